"""What all tests share: servers' fixtures, a clean environment, markers, who runs beside whom."""

from __future__ import annotations

import os

import pytest

pytest_plugins = ["tests.servers.fixtures"]


# What takes long to start, or much memory: all tests that want one of these run in one process,
# where tests are spread over several.
SHARED = ("cassandra_server", "spark_cluster", "local_spark", "kafka_server")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever needs neither server nor Spark, and is not long, is a unit test."""
    for item in items:
        wanted = [name for name in SHARED if name in getattr(item, "fixturenames", ())]
        item.add_marker(pytest.mark.xdist_group(wanted[0] if wanted else item.path.stem))
        if not any(item.get_closest_marker(name) for name in ("server", "spark", "long")):
            item.add_marker("unit")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own home must neither help nor harm a test."""
    for name in list(os.environ):
        if name.startswith(("TIDELOG_", "AWS_")) and name != "AWS_CA_BUNDLE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # tests ask 127.0.0.1 alone
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
