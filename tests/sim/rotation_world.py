"""An archive of log files that grow and are rotated while two drivers read them.

A program writes lines, now and then half of one first. A rotation does what ``logrotate`` does, one
system call at a time: renames, compresses at once or one rotation later (``delaycompress``), or
copies and truncates (``copytruncate``). Drivers look and read between any two of these calls. Every
line is archived once in the end, and none is twice in the archive at any time.

The files are real ones, in a folder of their own. Their times are those of the simulated clock.
"""

from __future__ import annotations

import gzip
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sim.archive_home import ArchivesHome
from tests.sim.archive_world import RAW
from tidelog import store as here
from tidelog.archive.archive import find_archive
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.connectors.files import source as files
from tidelog.errors import ConflictError, InvalidError, NotFoundError
from tidelog.home import Home
from tidelog.maintenance.pipeline_sweep import sweep_archives
from tidelog.store.local import LocalStore
from tidelog.testing.faults import Fault

__all__ = ["RotationWorld"]

LOG = "app.log"


class RotationWorld(ArchivesHome):
    """One seed's world."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.folder = Path()
        self.lines: list[str] = []  # complete ones
        self.rotations = 0
        self._rest = ""  # of a line that is half written
        self._seen: tuple[int, ...] = ()
        self._styles: list[Callable[[], None]] = self.random.sample(
            [self.rename, self.compress_at_once, self.compress_later, self.copy_and_truncate],
            self.random.choice([1, 1, 2]),
        )

    def run(self) -> Counter[Fault]:
        with tempfile.TemporaryDirectory() as folder:
            self.folder = Path(folder) / "logs"
            self.folder.mkdir()
            return super().run()

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        super()._patch(patch)
        above = self.folder.parent
        clock = self.scheduler.clock
        local = LocalStore(above, clock=clock, ids=self._ids, random=random.Random(0))
        folder = PausingStore(local, self.scheduler.pause)
        patch.setattr(
            here, "open_store", lambda url, **_: folder if above.name in url else self.store_here()
        )
        patch.setattr(files, "SystemClock", lambda: clock)

    def fill(self) -> None:
        self.write(self.random.randint(1, 4))
        home = self.home(self.quiet)
        self.create_archive(home, "day", f"file:{self.folder}", RAW)

    def spawn_all(self) -> None:
        self._spawn("writer", self.write_and_rotate)
        self._spawn("driver-1", self.run_drivers)
        self._spawn("driver-2", self.run_drivers)
        self._spawn("sweeper", self.sweep)

    # The program and its rotation.

    def write_and_rotate(self) -> None:
        for _ in range(self.random.randint(6, 12)):
            self.process.clock.sleep(self.random.uniform(0, 8))
            if self.chance(0.4) and (self.folder / LOG).exists():  # else logrotate does nothing
                self.end_line()
                self.random.choice(self._styles)()
                self.rotations += 1
            else:
                self.write(self.random.randint(1, 4))
                if self.chance(0.3):
                    self.begin_line()
        self.end_line()

    def write(self, count: int) -> None:
        self.end_line()
        for _ in range(count):
            self.begin_line()
            self.end_line()

    def begin_line(self) -> None:
        """Writes the first half of a line."""
        line = f"line {len(self.lines):05} {self._ids.new()}"
        half = self.random.randint(1, len(line) - 1)
        self._rest = line[half:] + "\n"
        self._add(line[:half])
        self.lines.append(line)

    def end_line(self) -> None:
        if self._rest:
            self._add(self._rest)
            self._rest = ""

    def _add(self, text: str) -> None:
        with (self.folder / LOG).open("a") as file:
            file.write(text)
        self._touch(self.folder / LOG)

    def _touch(self, path: Path) -> None:
        now_s = self.scheduler.clock.now_ms() / 1000
        os.utime(path, (now_s, now_s))

    def rename(self) -> None:
        self._move_up("")
        self._rename(LOG, f"{LOG}.1")

    def compress_at_once(self) -> None:
        self._move_up(".gz")
        self._rename(LOG, f"{LOG}.1")
        self._compress(f"{LOG}.1")

    def compress_later(self) -> None:
        """The newest rotated file is compressed by the next rotation."""
        self._compress(f"{LOG}.1")
        self._move_up(".gz")
        self._rename(LOG, f"{LOG}.1")

    def copy_and_truncate(self) -> None:
        self._move_up("")
        log, copy = self.folder / LOG, self.folder / f"{LOG}.1"
        if log.exists():
            data = log.read_bytes()
            with copy.open("wb", buffering=0) as file:  # in two writes
                self._touch(copy)
                for part in (data[: len(data) // 2], data[len(data) // 2 :]):
                    self.scheduler.pause("copy")
                    file.write(part)
                    self._touch(copy)
            self.scheduler.pause("truncate")
            os.truncate(log, 0)
            self._touch(log)

    def _move_up(self, ending: str) -> None:
        """Gives each rotated file the next number."""
        for number in range(20, 0, -1):
            for end in {ending, ".gz", ""}:
                self._rename(f"{LOG}.{number}{end}", f"{LOG}.{number + 1}{end}")

    def _rename(self, old: str, new: str) -> None:
        if (self.folder / old).exists():
            self.scheduler.pause(f"rename {old}")
            (self.folder / old).rename(self.folder / new)

    def _compress(self, name: str) -> None:
        plain = self.folder / name
        if plain.exists():
            self.scheduler.pause(f"compress {name}")
            packed = plain.with_name(f"{name}.gz")
            data = gzip.compress(plain.read_bytes(), mtime=0)
            with packed.open("wb", buffering=0) as file:
                for part in (data[: len(data) // 2], data[len(data) // 2 :]):
                    file.write(part)
                    shutil.copystat(plain, packed)
                    self.scheduler.pause(f"compressing {name}")
            shutil.copystat(plain, packed)
            plain.unlink()

    # The archive.

    def run_drivers(self) -> None:
        home = self.home()
        for _ in range(6):
            home.context.clock.sleep(self.random.uniform(0, 8))
            with self.tolerating(InvalidError, NotFoundError, ConflictError):
                self.drive(home, "day", **self.some_driver(0.3))

    def sweep(self) -> None:
        home = self.home()
        for _ in range(3):
            home.context.clock.sleep(self.random.uniform(0, 12))
            with self.tolerating(ConflictError):
                sweep_archives(home.context, 0)

    # Checks.

    def archived(self) -> Counter[str]:
        """The lines that a reader of the archive's folder finds."""
        [live] = self.folders.live()
        return Counter((event.value or b"").decode() for event in self.folders.events(live))

    def check(self) -> None:
        seen = (self.bare_objects.changes, self.bare_objects.deletes)
        if seen != self._seen:
            self._seen = seen
            twice = [line for line, count in self.archived().items() if count > 1]
            assert not twice, f"archived twice: {twice[:3]}"

    def check_rest(self) -> None:
        home = self.home(self.quiet)
        self.scheduler.time.advance(3_600)  # what looks as if it were still written is finished
        self.drive(home, "day", take_over=True)
        found = self.archived()
        missing = [line for line in self.lines if not found[line]]
        assert not missing, f"never archived: {missing[:3]}"
        assert found == Counter(self.lines), (
            f"archived, but not written: {list(found - Counter(self.lines))[:3]}"
        )
        self.check_verified(home, "day")

    def check_verified(self, home: Home, name: str) -> None:
        """Checks that a verify finds nothing in an archive."""
        archive = find_archive(home.context, name)
        report = verify_archive(home.context, archive, ArchiveVerifyOptions(deep=True))
        assert not report.problems, f"verify of `{name}` finds {report.problems}"

    def acknowledged(self) -> int:
        return len(self.lines)


class PausingStore:
    """A store whose calls yield to the others first."""

    def __init__(self, store: LocalStore, pause: Callable[[str], None]) -> None:
        self._store = store
        self._pause = pause

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._pause(name)
            return found(*args, **kwargs)

        return call
