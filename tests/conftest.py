"""What all tests share: servers' fixtures, a clean environment, markers, who runs beside whom."""

from __future__ import annotations

import gc
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.servers import spark
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

# Files that take long come after these, and rooms of many short ones last, so that no worker is
# left alone with a long file while the others have nothing to do.
EARLY = ("tests/browser", "tests/contract", "tests/sim", "tests/test_docs.py", "tests/test_site.py")
LATE = ("tests/codec", "tests/model", "tests/test_tidy.py", "tests/testing")

# Unit tests of many seconds, which `make check` leaves out: they are marked `slow`.
SLOW = (
    "tests/archive/test_lost_replays.py::test_driver_that",
    "tests/archive/test_lost_replays.py::test_replay_beside",
    "tests/catalog/test_sqlite.py::test_a_killed_writer_leaves_whole_writes",
    "tests/codec/formats/test_roundtrip.py::test_a_reader_gives_a_bounded_amount",
    "tests/codec/parsers/test_names.py::test_every_row_has_a_path",
    "tests/codec/parsers/test_folders.py::test_the_names_of_a_whole_year",
    "tests/journal/test_machine.py",
    "tests/journal/test_scribe.py::test_a_scribe_may_die_after_every_call",
    "tests/log/maintenance/test_sweep_journals.py",
    "tests/log/maintenance/test_sweep_races.py",
    "tests/log/producer/test_memory.py",
    "tests/pipeline/test_forgotten_ranges.py",
    "tests/pipeline/test_cycle.py::test_two_drivers_at_once",
    "tests/pipeline/test_pump.py::test_pumps_that_are_killed",
    "tests/pipeline/test_registry.py::test_a_removal_that_dies_after_any_call",
)

# Where tests have their folders: in memory, as no test pulls the machine's plug, and every append
# to a home waits for the disk. Some rooms are about files and locks themselves.
MEMORY = Path("/dev/shm").resolve()
MEMORY_BYTES_MIN = 4 << 30
ON_DISK = (
    *("tests/catalog", "tests/connectors/files", "tests/contract", "tests/stateful", "tests/store"),
)

_STALE = "stale seed"


def pytest_configure() -> None:
    """Put folders of tests into memory if there is room, and the environment names no place.

    And let every Spark that tests start do so quickly.
    """
    os.environ |= spark.variables()
    if "PYTEST_DEBUG_TEMPROOT" not in os.environ and _has_memory():
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(MEMORY)


def _has_memory() -> bool:
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.M)
        free = shutil.disk_usage(MEMORY).free
    except OSError:
        return False
    has_room = found is not None and min(free, int(found[1]) << 10) >= MEMORY_BYTES_MIN
    return has_room and os.access(MEMORY, os.W_OK)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The test's own folder: on a disk in the rooms that are about files themselves."""
    room = request.path.relative_to(request.config.rootpath).as_posix()
    if not room.startswith(ON_DISK) or not tmp_path.is_relative_to(MEMORY):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="tidelog-", ignore_cleanup_errors=True) as folder:
        yield Path(folder).resolve()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever needs neither server nor Spark, and is not long, is a unit test.

    A test that gets one of the shared servers by its parameter says so by a group of its own.
    """
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
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
    if group in SHARED:
        return SHARED.index(group)
    return len(SHARED) + (0 if group.startswith(EARLY) else 2 if group.startswith(LATE) else 1)


def pytest_collection_finish() -> None:
    """Spare ten thousand collected tests the garbage collector's looks, and look less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


def pytest_sessionfinish() -> None:
    """Let Python's end find all objects again: native libraries complain of those that are left."""
    gc.unfreeze()


@pytest.fixture
def stale_seed(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Notes a planted bug that the seed of its document no longer catches."""
    return lambda bug: record_property(_STALE, bug)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the seeds that are stale: a search for others takes up to a minute each."""
    reports = terminalreporter.getreports("passed")
    stale = [bug for each in reports for name, bug in each.user_properties if name == _STALE]
    if stale:
        terminalreporter.section("stale seeds")
        for bug in stale:
            terminalreporter.line(f"{bug}: found by a search: run `python -m tests.sim planted`")


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
    monkeypatch.setenv("TIDELOG_NOTIFY_LOCAL", "1")  # webhooks of tests are on this machine
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # tests ask 127.0.0.1 alone
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
