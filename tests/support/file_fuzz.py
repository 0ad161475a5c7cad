"""A random life of rotated log files beside an archive of them, counted by a plain reader.

Steps write lines and half lines, rotate by renaming or by copying and truncating, compress and
delete files that were read; others run the archive, build generations, promote, roll back and drop
them. A run is a new process, which knows what the catalog knows, or goes on in the last one. In the
end every line must be in the live generation once, unless the last run reports an error.

A file that is compressed and gets another number between two runs is read twice, as documented: its
name tells nothing, and files with the same lines may be others. So a run sees one of the names.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.support.file_logs import HEADER, Logs, log_folder
from tidelog.archive.archive import find_archive, open_pipeline
from tidelog.archive.generations import begin_backfill, drop_generation, promote, rollback
from tidelog.errors import InvalidError, TidelogError
from tidelog.model.archive import ArchiveFormat
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.pipeline import Pipeline
from tidelog.pipeline.tasks import LocalWorkers

__all__ = ["play"]

_RESTARTED = 0.6  # of all runs

_WEIGHTS = {
    "append": 5,
    "begin_line": 2,
    "rename": 3,
    "copy_and_truncate": 2,
    "compress": 2,
    "delete": 2,
    "run": 5,
    "build": 2,
    "promote": 2,
    "rollback": 1,
    "drop": 1,
}


@dataclass
class _Life:
    logs: Logs
    random: Random
    header: str
    start: str
    written: list[str] = field(default_factory=list)  # since the archive was created
    before: list[str] = field(default_factory=list)  # lines that a latest start skips
    half: str = ""  # a line without its end
    count: int = 0
    is_compressed: bool = False  # a file, since the last run
    pipeline: Pipeline | None = None  # of the last run, with what its source remembers
    error: TidelogError | None = None  # of the last run
    trace: list[str] = field(default_factory=list)

    def line(self) -> str:
        self.count += 1
        return f"line {self.count}"

    def put(self, text: str) -> None:
        path = self.logs.path
        is_new = not path.exists() or not path.stat().st_size
        with path.open("a") as file:
            file.write((self.header if is_new else "") + text)

    def finish(self) -> None:
        """Write the end of a half line, as a program does before its file is rotated."""
        if self.half:
            self.put("-end\n")
            self.written.append(f"{self.half}-end")
            self.half = ""

    def rotated(self) -> list[Path]:
        """Rotated files, the oldest first."""
        found = [path for path in self.logs.folder.iterdir() if path != self.logs.path]
        return sorted(found, key=lambda path: -int(path.name.split(".")[2]))

    def shift(self) -> None:
        """Give rotated files the next numbers; a run has seen the names of compressed ones."""
        if self.is_compressed:
            self.run()
        for path in self.rotated():
            parts = path.name.split(".")
            parts[2] = str(int(parts[2]) + 1)
            path.rename(path.with_name(".".join(parts)))

    # Steps.

    def append(self) -> None:
        self.finish()
        for _ in range(self.random.randint(1, 6)):
            self.written.append(self.line())
            self.put(f"{self.written[-1]}\n")

    def begin_line(self) -> None:
        self.finish()
        self.half = self.line()
        self.put(self.half)

    def rename(self) -> None:
        self.finish()
        self.shift()
        self.logs.path.rename(f"{self.logs.path}.1")
        self.logs.path.write_text(self.header)

    def copy_and_truncate(self) -> None:
        self.finish()
        self.shift()
        shutil.copyfile(self.logs.path, f"{self.logs.path}.1")
        os.truncate(self.logs.path, 0)

    def compress(self) -> None:
        plain = [path for path in self.rotated() if path.suffix != ".gz"]
        if plain:
            path = self.random.choice(plain)
            if path.name != "app.log.1":
                self.run()  # which sees its name
            self.logs.compress(path)
            self.is_compressed = True

    def delete(self) -> None:
        """Delete the oldest file, after it was read, as a rotation does."""
        if self.rotated():
            self.run()
            if self.error is None:
                self.rotated()[0].unlink()

    def run(self) -> None:
        self.is_compressed = False
        archive = find_archive(self.logs.home.context, "x")
        pipeline, is_new = self.pipeline, self.random.random() < _RESTARTED
        if pipeline is None or is_new or pipeline.id != archive.pipeline():
            pipeline = open_pipeline(self.logs.home.context, archive, LocalWorkers(1))
        self.pipeline = pipeline
        try:
            Driver(self.logs.home.context, pipeline, DriverOptions(start=self.start)).run()
            self.error = None
        except TidelogError as exc:
            self.error = exc
            self.trace.append(f"  error: {exc}")

    def build(self) -> None:
        _, number = begin_backfill(self.logs.home.context, "x", ArchiveFormat())
        self.logs.run(number)

    def promote(self) -> None:
        if find_archive(self.logs.home.context, "x").building is not None:
            promote(self.logs.home.context, "x")

    def rollback(self) -> None:
        archive = find_archive(self.logs.home.context, "x")
        if archive.building is None and archive.in_state("kept"):
            with self.may_refuse():
                rollback(self.logs.home.context, "x", generation=archive.in_state("kept")[-1])

    def drop(self) -> None:
        kept = find_archive(self.logs.home.context, "x").in_state("kept")
        if kept:
            with self.may_refuse():
                drop_generation(self.logs.home.context, "x", kept[0])

    @contextmanager
    def may_refuse(self) -> Iterator[None]:
        """A kept generation may begin later, or have more, than the live one and the files."""
        try:
            yield
        except InvalidError as exc:
            self.trace.append(f"  refused: {exc}")

    def step(self, name: str) -> None:
        self.trace.append(name)
        taken: Callable[[], None] = getattr(self, name)
        taken()


def play(folder: Path, seed: int, steps: int) -> list[str]:
    """Return what is wrong after a random life: lines that are lost or doubled, and problems."""
    random = Random(seed)
    with log_folder(folder) as logs:
        header = HEADER if random.random() < 0.5 else ""
        start = random.choice(["earliest", "latest"])
        life = _Life(logs, random, header, start)
        life.put("")
        life.append()
        logs.create()
        if start == "latest":
            life.before, life.written = life.written, []
        names = random.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=steps)
        for name in names:
            life.step(name)
        life.finish()
        life.run()
        life.run()
        return _wrong(life)


def _wrong(life: _Life) -> list[str]:
    held = Counter(value for value in life.logs.held().elements() if value.startswith("line"))
    written, before = Counter(life.written), Counter(life.before)
    lost = sorted((written - held).elements())
    doubled = sorted(value for value, count in held.items() if count > 1)
    strange = sorted(held.keys() - written.keys() - before.keys())
    found = [
        f"{name}: {values}" for name, values in (("doubled", doubled), ("odd", strange)) if values
    ]
    if lost and life.error is None:
        found.append(f"lost: {lost}")
    if life.error is None:
        found += life.logs.problems()
    return [*found, *life.trace] if found else []
