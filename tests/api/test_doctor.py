"""The doctor: healthy homes have no problem, and each trouble is named with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidelog.api import doctor
from tidelog.api.doctor import HealthCheck, diagnose
from tidelog.home import World, create_home
from tidelog.settings import Settings


def found(checks: list[HealthCheck], name: str) -> HealthCheck:
    return next(check for check in checks if check.name == name)


def make_home(folder: Path) -> None:
    settings = Settings(str(folder / "home" / "objects"), str(folder / "home" / "catalog.sqlite"))
    create_home(settings, world=World(environ={}, folder=folder))[0].close()


def test_healthy_home_has_no_problem(tmp_path: Path) -> None:
    make_home(tmp_path)
    checks = diagnose(tmp_path / "home")
    assert [check for check in checks if check.state == "problem"] == []
    assert {"python", "java", "open files", "extras", "home", "store"} <= {c.name for c in checks}
    assert {"catalog", "clock", "disk"} <= {check.name for check in checks}


def test_nothing_is_created(tmp_path: Path) -> None:
    world = World(environ={}, folder=tmp_path)
    assert "created on first use" in found(diagnose(world=world), "home").found
    missing = found(diagnose("elsewhere", world=world), "home")
    assert missing.state == "problem"
    assert "no such file" in missing.found
    wanted = (
        "run `tidelog --home elsewhere init` (`tidelog.create_home` in Python), or fix the path"
    )
    assert missing.do == wanted
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_written_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    check = found(diagnose(world=World(environ={}, folder=tmp_path)), "home")
    assert (check.state, "is not writable" in check.found) == ("problem", True)


@pytest.mark.parametrize("skew_ms", [-60_000, 60_000])
def test_clock_that_differs_from_the_store_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skew_ms: int
) -> None:
    make_home(tmp_path)
    monkeypatch.setattr(doctor, "store_now_ms", lambda context: context.clock.now_ms() + skew_ms)
    clock = found(diagnose(tmp_path / "home"), "clock")
    assert (clock.state, "synchronize" in clock.do) == ("problem", True)


def test_damaged_catalog_is_a_problem(tmp_path: Path) -> None:
    make_home(tmp_path)
    file = tmp_path / "home" / "catalog.sqlite"
    file.write_bytes(b"not a database, and longer than a header of one" * 100)
    checks = diagnose(tmp_path / "home")
    assert any(check.state == "problem" for check in checks)


def test_missing_java_and_few_files_are_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (256, 256))
    checks = diagnose(world=World(environ={"PATH": str(tmp_path)}, folder=tmp_path))
    assert found(checks, "java").state == found(checks, "open files").state == "warning"
    assert "ulimit -n" in found(checks, "open files").do
