"""Files that vanish before an archive's first run: what its creation saw is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.archive_look import a_home, an_archive, drive
from tidelog.coordination.pipeline_rows import read_progress
from tidelog.errors import NotFoundError
from tidelog.model.archive import Start
from tidelog.model.pipeline import Gap


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
