"""What a verify of an archive advises."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidelog import Event, InvalidError
from tidelog.home import create_home


def test_range_of_a_kept_generation_is_not_finished_by_a_run(tmp_path: Path) -> None:
    with create_home(str(tmp_path))[0] as home:
        home.create_topic("orders")
        home.append("orders", [Event(b'{"at": "2026-11-15T10:00:00Z"}')])
        archive = home.archives.create("daily", source="topic:orders", parser="json:at")
        with pytest.raises(InvalidError, match="dead letters"):
            archive.run()
        (note,) = archive.verify().notes
        assert note.do == "the next `tidelog archive run daily` finishes it"
        archive.backfill(parser="iso8601:at")
        archive.promote()
        (note,) = archive.verify().notes
        assert (note.kind, note.do) == (
            "intent",
            "a rollback finishes it, and `tidelog archive drop daily 1` deletes it",
        )
        archive.drop(1)
        assert archive.verify().notes == []
