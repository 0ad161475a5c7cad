"""A folder of log files that are rotated, an archive of it, and a plain count of what it holds."""

from __future__ import annotations

import gzip
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from tests.support.archive_look import a_home, an_archive
from tidelog import Home
from tidelog.archive.archive import find_archive, open_pipeline
from tidelog.archive.generations import begin_backfill, promote
from tidelog.archive.verify import verify_archive
from tidelog.archive.verify_checks import ArchiveVerifyOptions
from tidelog.model.archive import ArchiveFormat
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.tasks import LocalWorkers

HEADER = "# header\n"


def text(first: int, end: int, header: str = HEADER) -> str:
    return header + "".join(f"line {n}\n" for n in range(first, end))


@dataclass
class Logs:
    """One archive of the folder, named ``x``."""

    home: Home
    folder: Path
    objects: Path

    @property
    def path(self) -> Path:
        return self.folder / "app.log"

    def create(self, name: str = "x") -> None:
        an_archive(self.home, name, source=f"file:{self.folder}")

    def run(self, generation: int | None = None, name: str = "x", **how: object) -> int:
        archive = find_archive(self.home.context, name)
        pipeline = open_pipeline(self.home.context, archive, LocalWorkers(1), generation)
        return Driver(self.home.context, pipeline, DriverOptions(**how)).run()  # type: ignore[arg-type]

    def build(self, name: str = "x", source: str = "") -> int:
        """Build another generation, up to the live one."""
        _, number = begin_backfill(self.home.context, name, ArchiveFormat(source=source))
        self.run(number, name)
        return number

    def replace(self, name: str = "x", source: str = "") -> None:
        """Build another generation, and promote it."""
        self.build(name, source)
        promote(self.home.context, name)

    def rotate(self, first: int, end: int, header: str = HEADER) -> None:
        """Rename the log, and begin another one."""
        self.path.rename(f"{self.path}.1")
        self.path.write_text(text(first, end, header))

    def compress(self, path: Path) -> None:
        Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()

    def age(self, path: Path) -> None:
        """Let a file look finished."""
        os.utime(path, (1e9, 1e9))

    def held(self, generation: int | None = None, name: str = "x") -> Counter[str]:
        """The values of all data files of a generation, the live one by default."""
        number = generation or find_archive(self.home.context, name).generation
        found: Counter[str] = Counter()
        for path in sorted(self.objects.glob(f"archives/{name}/g{number}/**/*.parquet")):
            values = pq.ParquetFile(path).read(columns=["value"]).column(0)
            found.update(value.decode() for value in values.to_pylist())
        return found

    def problems(self, name: str = "x") -> list[str]:
        how = ArchiveVerifyOptions(deep=True, source=True)
        found = verify_archive(self.home.context, find_archive(self.home.context, name), how)
        return [f"{each.where}: {each.what}" for each in found.problems]


@contextmanager
def log_folder(folder: Path) -> Iterator[Logs]:
    (folder / "logs").mkdir(parents=True)
    with a_home(folder) as home:
        yield Logs(home, folder / "logs", folder / "o")


def lines(*parts: str) -> Counter[str]:
    """The lines of some texts."""
    return Counter(line for part in parts for line in part.splitlines())
