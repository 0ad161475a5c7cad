"""What all tests share: servers' fixtures, a clean environment, markers, who runs beside whom."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from tidelog.model import limits

pytest_plugins = ["tests.servers.fixtures"]


# A machine may stall at any time: an example that is slow proves nothing.
settings.register_profile(
    "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("patient")

# What takes long to start, or much memory: all tests that want one of these run in one process,
# where tests are spread over several; and before all others, so that none of them comes last.
SHARED = ("spark_cluster", "local_spark", "cassandra_server", "kafka_server")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever needs neither server nor Spark, and is not long, is a unit test.

    A test that gets one of the shared servers by its parameter says so by a group of its own.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            wanted = [name for name in SHARED if name in getattr(item, "fixturenames", ())]
            beside = item.path.relative_to(item.config.rootpath).as_posix()
            item.add_marker(pytest.mark.xdist_group(wanted[0] if wanted else beside))
        if not any(item.get_closest_marker(name) for name in ("server", "spark", "long")):
            item.add_marker("unit")
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    """Tests of one group, in their order, one group of ``SHARED`` after the other."""
    group = next(item.iter_markers("xdist_group")).args[0]
    return SHARED.index(group) if group in SHARED else len(SHARED)


@pytest.fixture(autouse=True)
def _small_reserves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of homes of tests would else keep gigabytes of a disk."""
    monkeypatch.setattr(limits, "RESERVE_BYTES", 1 << 16)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own home must neither help nor harm a test."""
    for name in list(os.environ):
        if name.startswith(("TIDELOG_", "AWS_")) and name != "AWS_CA_BUNDLE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # tests ask 127.0.0.1 alone
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
