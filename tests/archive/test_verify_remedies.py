"""What a verify of an archive advises."""

from __future__ import annotations

from pathlib import Path

from tidelog import Event
from tidelog.archive.verify_remedies import intent_remedy
from tidelog.home import create_home


def test_range_of_a_kept_generation_is_not_finished_by_a_run(tmp_path: Path) -> None:
    with create_home(str(tmp_path))[0] as home:
        home.create_topic("orders")
        home.append("orders", [Event(b"1")])
        archive = home.archives.create("daily", source="topic:orders", parser="timestamp")
        archive.run()
        run = "the next `tidelog archive run daily` finishes it"
        assert intent_remedy(archive.info, 1, is_replay=False) == run
        archive.backfill()
        archive.promote()
        info = archive.reload()
        kept = "a rollback finishes it, and `tidelog archive drop daily 1` deletes it"
        assert intent_remedy(info, 1, is_replay=False) == kept
        assert intent_remedy(info, 2, is_replay=False) == run
