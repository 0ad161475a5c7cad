"""The pytest plugin: each test gets a home of its own, and loading it is cheap."""

from __future__ import annotations

import subprocess
import sys

from tidelog import Event, Home
from tidelog.testing.pytest_plugin import tidelog_home

__all__ = ["tidelog_home"]


def test_home_takes_events(tidelog_home: Home) -> None:
    tidelog_home.create_topic("orders")
    assert [each.offset for each in tidelog_home.append("orders", [Event(b"first")])] == [0]


def test_home_is_another_one_in_each_test(tidelog_home: Home) -> None:
    assert tidelog_home.topics() == []


def test_plugin_loads_no_library_of_its_own() -> None:
    code = (
        "import sys, pytest, tidelog.testing.pytest_plugin;"
        "print([name for name in ('numpy', 'pyarrow', 'pyspark') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
