"""Files that vanish unread: what an archive's creation or a driver saw is reported."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import msgspec
import pytest

from tests.support.archive_look import a_home, an_archive, drive, fill
from tidelog.archive.fill_files import FillFilesSource
from tidelog.connectors.files.listing import parse_file_address
from tidelog.connectors.files.source import FilesSource
from tidelog.connectors.source import KnownPartition, SourcePartition, SourceRange, VanishedError
from tidelog.coordination.pipeline_rows import read_progress
from tidelog.errors import NotFoundError
from tidelog.home import Home
from tidelog.model.address import parse_address
from tidelog.model.archive import ArchiveFormat, Start
from tidelog.model.pipeline import Gap
from tidelog.pipeline.ranges import FilePolicy

_LINES = {"format": "jsonlines", "format_settings": {"mode": "events"}}


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_file_that_vanished_before_the_first_run_is_an_error(tmp_path: Path, start: Start) -> None:
    """The creation of the archive has seen its rows."""
    log, elsewhere = tmp_path / "in" / "app.log", tmp_path / "elsewhere.log"
    log.parent.mkdir()
    log.with_name("other.log").write_text("x\n")
    log.write_text("1\n2\n3\n")
    with a_home(tmp_path) as home:
        archive = an_archive(home, source=f"file:{log.parent}", start=start)
        log.rename(elsewhere)
        if start == "latest":
            assert drive(home, archive) == 0
            return
        for _ in range(2):
            with pytest.raises(NotFoundError, match=r"before its last 3 rows.*--accept-loss"):
                drive(home, archive)
        assert drive(home, archive, accept_loss=True) == 0
        head = read_progress(home.context, archive.pipeline(), "in/app.log")
        assert head is not None
        assert head.gaps == (Gap("0", "3", "vanished"),)
        assert drive(home, archive) == 0
        elsewhere.rename(log)
        assert drive(home, archive) == 3
        head = read_progress(home.context, archive.pipeline(), "in/app.log")
        assert head is not None
        assert (head.position, head.gaps) == ("3", ())


@pytest.mark.parametrize(("left", "position"), [(0, "0"), (2, "10")], ids=["all", "the last"])
@pytest.mark.parametrize(
    "form", [{}, {"format": "jsonlines", "format_settings": {"mode": "events"}}]
)
def test_files_of_a_backup_that_vanished_before_the_first_run_are_an_error(
    tmp_path: Path, left: int, position: str, form: dict[str, object]
) -> None:
    """The rest is archived; what is put back is read, without a gap."""
    with a_home(tmp_path) as home:
        folder = _a_backup(home, tmp_path, **form)
        url = f"file:{folder}" + ("?mode=events" if form else "")
        archive = an_archive(home, "again", source=url)
        gone = {each: each.read_bytes() for each in sorted(folder.glob("t/1_1_*"))[left:]}
        for each in gone:
            each.unlink()
        for _ in range(2):
            with pytest.raises(VanishedError, match=rf"ended at 15, and {position} is committed"):
                drive(home, archive)
        assert drive(home, archive, accept_loss=True) == 0
        head = read_progress(home.context, archive.pipeline(), "t/1")
        assert head is not None
        assert head.gaps == (Gap(position, "15", "vanished"),)
        assert drive(home, archive) == 0
        for each, data in gone.items():
            each.write_bytes(data)
        assert drive(home, archive) == 5 * len(gone)
        head = read_progress(home.context, archive.pipeline(), "t/1")
        assert head is not None
        assert (head.position, head.gaps, head.totals.absent) == ("15", (), 0)


def test_files_of_a_backup_that_appeared_later_may_not_vanish_unread(tmp_path: Path) -> None:
    """A driver has seen them: the next one reports it, in another process too."""
    with a_home(tmp_path) as home:
        folder = _a_backup(home, tmp_path)
        last = sorted(folder.glob("t/1_1_*"))[-1]
        last.rename(tmp_path / "elsewhere")
        archive = an_archive(home, "again", source=f"file:{folder}")
        assert drive(home, archive) == 25
        (tmp_path / "elsewhere").rename(last)
        stop, patient = threading.Event(), FilePolicy(1 << 40, 1 << 40)
        drive(home, archive, follow=True, policy=patient, stop=stop, on_look=lambda _: stop.set())
        last.unlink()
        with pytest.raises(VanishedError, match="ended at 15, and 10 is committed"):
            drive(home, archive)


def test_an_archive_that_begins_at_the_end_does_not_miss_files_of_a_backup(tmp_path: Path) -> None:
    with a_home(tmp_path) as home:
        folder = _a_backup(home, tmp_path)
        archive = an_archive(home, "again", source=f"file:{folder}", start="latest")
        for each in folder.glob("t/1_1_*"):
            each.unlink()
        assert drive(home, archive) == 0


def test_a_backfill_reads_from_the_live_files_what_vanished_from_a_backup(tmp_path: Path) -> None:
    with a_home(tmp_path) as home:
        folder = _a_backup(home, tmp_path)
        url, partition = f"file:{folder}", SourcePartition("t", "1")
        raw = home.archives.get("raw").reload()
        made = msgspec.structs.replace(raw, formats={**raw.formats, 2: ArchiveFormat(source=url)})
        files = FilesSource(parse_file_address(parse_address(url)))
        source = FillFilesSource(home.context, made, 2, files, "")
        source.track({partition: KnownPartition("0", "", b"")})
        assert source.bounds([partition])[partition].end == "15"
        for each in folder.glob("t/1_1_*"):
            each.unlink()
        again = FillFilesSource(home.context, made, 2, files, "")
        assert again.bounds([partition])[partition].end == "15"
        again = FillFilesSource(home.context, made, 2, files, "")
        rest = again.reader(SourceRange(partition, "0", "15"))
        assert sum(chunk.batch.num_rows for chunk in rest.read()) == 15


def _a_backup(home: Home, folder: Path, **form: object) -> Path:
    """Returns a copy of an archive's folder: three files of each of two source partitions."""
    home.create_topic("t", partitions=2)
    raw = an_archive(home, "raw", **form)
    for first in (0, 5, 10):
        for partition in (0, 1):
            fill(home, range(first, first + 5), partition=partition)
        drive(home, raw)
    return Path(shutil.copytree(folder / "o" / "archives" / "raw" / "g1", folder / "backup"))
