"""The pytest plugin: a home for each test.

pytest finds it by itself where Tidelog is installed::

    def test_order_is_stored(tidelog_home):
        tidelog_home.create_topic("orders")
        tidelog_home.append("orders", [tidelog.Event(b"first")])
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tidelog.home import Home

__all__ = ["tidelog_home"]


@pytest.fixture
def tidelog_home() -> Iterator[Home]:
    """A new home in memory, which is closed after the test."""
    import tidelog  # noqa: PLC0415 - only tests that use the fixture load it

    with tidelog.open("memory:") as home:
        yield home
