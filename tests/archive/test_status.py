"""Status, health and metrics: what is told of an archive, and that trouble is seen."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.servers.kafka import Kafka
from tests.support.archive_look import AT, AT_OR_WHEN, a_home, an_archive, drive, fill
from tidelog import Event, Home
from tidelog.archive.archive import committed_files
from tidelog.archive.dead_letters import ReplayOptions, replay
from tidelog.archive.metrics import metrics_text, status_text
from tidelog.archive.status import ArchiveStatus, Limits, WaitingTimes, read_status, troubles
from tidelog.catalog.base import Put
from tidelog.connectors.kafka.source import KafkaSource
from tidelog.coordination.pipeline_rows import change_archive
from tidelog.errors import InvalidError
from tidelog.home import World, create_home
from tidelog.journal.scribe import ScribeMetrics
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.model import layout
from tidelog.model.pipeline import FileCounts, Intent
from tidelog.model.topic import encode_row
from tidelog.pipeline.share import DriverMembers
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.settings import Settings
from tidelog.testing.scheduler import FakeClock

ALERTS = Path(__file__).parents[2] / "docs" / "alerts.yml"
HOUR_MS = 3_600_000


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 2)
        yield made


def now_ms() -> int:
    return int(time.time() * 1000)


def recent(count: int, age_ms: int = 0) -> list[Event]:
    return [Event(b"%d" % n, timestamp=now_ms() - age_ms) for n in range(count)]


def of(status: ArchiveStatus, partition: str = "t/0") -> Any:
    return next(each for each in status.partitions if each.partition == partition)


def said(status: ArchiveStatus, limits: Limits | None = None) -> str:
    return "\n".join(troubles(status, limits or Limits()))


def test_totals_are_those_of_all_commits(home: Home) -> None:
    archive = an_archive(home, parser=AT)
    for step in range(3):
        fill(home, range(step * 50, step * 50 + 50), partition=step % 2)
        drive(home, archive)
    status = read_status(home.context, archive)
    files = [file for _, file in committed_files(home.context, archive)]
    assert sum(each.events for each in status.partitions) == 150
    assert sum(each.files_written for each in status.partitions) == len(files)
    assert sum(each.bytes_written for each in status.partitions) == sum(file.size for file in files)
    dead = sum(file.events for file in files if file.kind == "dead")
    assert sum(each.dead for each in status.partitions) == dead > 0
    assert of(status).totals.commits == 2
    assert status.lag == 0
    done = replay(home.context, archive, ReplayOptions(parser=AT_OR_WHEN), LocalWorkers(1))
    after = read_status(home.context, archive)
    assert sum(each.dead for each in after.partitions) == dead - done.replayed
    assert sum(each.totals.dead for each in after.partitions) == dead


def test_an_archive_that_was_never_run(home: Home) -> None:
    archive = an_archive(home)
    status = read_status(home.context, archive)
    assert [(each.position, each.end, each.lag) for each in status.partitions] == [
        ("0", "0", 0),
        ("0", "0", 0),
    ]
    assert troubles(status, Limits()) == []
    home.append("t", recent(5), partition=1)
    status = read_status(home.context, archive)
    assert (status.lag, of(status, "t/1").lag) == (5, 5)
    assert "events wait in 1 source partition, and no driver is running" in said(status)
    assert troubles(status, Limits(driver=False)) == []


def test_lag_in_seconds_is_that_of_the_oldest_event_that_waits(home: Home) -> None:
    archive = an_archive(home)
    home.append("t", recent(1, age_ms=10 * HOUR_MS), partition=0)
    drive(home, archive)
    assert of(read_status(home.context, archive)).lag_s == 0
    home.append("t", recent(3, age_ms=90_000), partition=0)  # after ten quiet hours
    waiting = WaitingTimes()
    status = read_status(home.context, archive, waiting=waiting)
    assert 85 < of(status).lag_s < 120
    assert len(waiting.known_ms) == 1
    assert troubles(status, Limits(driver=False)) == []
    assert "the oldest event that waits is " in said(status, Limits(max_lag_ms=60_000))
    assert "3 events wait (limit 2)" in said(status, Limits(max_lag=2))
    drive(home, archive)
    assert read_status(home.context, archive, waiting=waiting).lag_s == 0
    assert waiting.known_ms == {}


def test_lag_in_seconds_needs_no_look_at_a_source_that_is_busy(home: Home) -> None:
    archive = an_archive(home)
    home.append("t", recent(1), partition=0)
    drive(home, archive)
    home.append("t", recent(1), partition=0)
    waiting = WaitingTimes()
    assert of(read_status(home.context, archive, waiting=waiting)).lag_s < 60
    assert waiting.known_ms == {}


def test_drivers_that_live_and_that_died(tmp_path: Path) -> None:
    clock = FakeClock(now_ms())
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=10_000)
    with create_home(settings, world=World(environ={}, clock=clock))[0] as home:
        home.create_topic("t", 1)
        home.append("t", [Event(b"1", timestamp=clock.now_ms())])
        archive = an_archive(home)
        assert (
            read_status(home.context, archive).drivers,
            read_status(home.context, archive).silent,
        ) == (0, 0)
        driver = DriverMembers(home.context, archive.pipeline())
        driver.join()
        status = read_status(home.context, archive)
        assert (status.drivers, status.silent) == (1, 0)
        assert troubles(status, Limits()) == []
        clock.advance(12)
        driver.beat()
        clock.advance(12)
        assert read_status(home.context, archive).drivers == 1
        clock.advance(10)
        status = read_status(home.context, archive)
        assert (status.drivers, status.silent) == (0, 1)
        assert "1 of its drivers died" in said(status)
        assert "no driver is running" in said(status)
        driver.leave()
        assert (
            read_status(home.context, archive).drivers,
            read_status(home.context, archive).silent,
        ) == (0, 0)


def test_a_range_that_hangs_is_seen(home: Home) -> None:
    archive = an_archive(home)
    fill(home, range(5))
    drive(home, archive)
    where = layout.pipeline_partition(archive.pipeline(), "t/0")
    intent = Intent("5", "9", began_ms=now_ms() - 1_000_000)
    home.catalog.write(where, Put("intent", encode_row(intent)), write_id="x")
    status = read_status(home.context, archive)
    assert of(status).stuck
    assert "a range is in progress for 17 min" in said(status)
    assert troubles(status, Limits(max_intent_ms=2_000_000)) == []
    assert 'intent_age_seconds{archive="daily",partition="t/0"} 100' in status_text([status])


def test_dead_letters_are_trouble_until_they_are_old_or_allowed(home: Home) -> None:
    archive = an_archive(home, parser=AT)
    fill(home, range(20))
    drive(home, archive)
    status = read_status(home.context, archive)
    dead = of(status).dead
    assert f"{dead} dead letters (limit 0)" in said(status)
    assert troubles(status, Limits(max_dead=dead)) == []
    assert troubles(status, Limits(since_ms=-1)) == []


def test_dead_letters_of_all_source_partitions_share_one_line(home: Home) -> None:
    archive = an_archive(home, parser=AT)
    fill(home, range(20), partition=0)
    fill(home, range(20, 60), partition=1)
    drive(home, archive)
    status = read_status(home.context, archive)
    counts = [of(status, name).dead for name in ("t/0", "t/1")]
    assert min(counts) > 0
    assert counts[0] != counts[1]
    (line,) = troubles(status, Limits())
    assert f"{sum(counts)} dead letters (limit 0 in each source partition) in t/0 and t/1" in line
    assert line.count("tidelog archive dead daily --replay") == 1
    assert f"--max-dead {max(counts)}`, the most in one of them" in line
    assert troubles(status, Limits(max_dead=max(counts))) == []


def test_source_partitions_with_the_same_problem_share_one_line(home: Home) -> None:
    archive = an_archive(home)
    for partition in (0, 1):
        home.append("t", recent(10 + partition), partition=partition)
    status = read_status(home.context, archive)
    (line,) = troubles(status, Limits(driver=False, max_lag=5))
    assert line.startswith("archive `daily`, source partition `t/0`: 10 events wait (limit 5)")
    assert line.endswith(" (the same in t/1)")


def test_files_are_counted_in_the_same_words_everywhere(home: Home) -> None:
    archive = an_archive(home, parser=AT)
    fill(home, range(50))
    drive(home, archive)
    files = [file for _, file in committed_files(home.context, archive)]
    data = sum(file.kind == "data" for file in files)
    found = home.archives.get("daily").verify()
    assert (found.data_files, found.dead_files, found.files) == (data, 1, len(files))
    assert str(found.file_counts) == f"{data} data files, 1 of dead letters"
    replay(home.context, archive, ReplayOptions(parser=AT_OR_WHEN), LocalWorkers())
    after = home.archives.get("daily").verify()
    assert of(read_status(home.context, archive)).files_written > after.files, "replaced since"
    assert after.data_files + after.dead_files == after.files
    assert str(FileCounts(1, aside=2)) == "1 data file, 2 set aside"
    assert str(FileCounts(14, 2, 1, 1)) == (
        "14 data files, 2 of dead letters, 1 sidecar, 1 set aside"
    )


def test_what_the_source_lost_is_seen_before_and_after_it_is_accepted(home: Home) -> None:
    archive = an_archive(home)
    home.append("t", recent(10), partition=0)
    drive(home, archive)
    for _ in range(2):
        home.append("t", recent(10), partition=0)
    home.trim("t", ToOffsets({0: 20}), past_readers=True)
    status = read_status(home.context, archive)
    assert of(status).lost_to == "20"
    assert "holds nothing before 20, archived is up to 10" in said(status, Limits(driver=False))
    drive(home, archive, accept_loss=True)
    status = read_status(home.context, archive)
    assert of(status).totals.lost == 1
    assert "1 range was lost" in said(status)
    assert of(status).lost_to == ""


def test_a_source_that_is_gone_leaves_the_rest_to_be_seen(home: Home) -> None:
    archive = an_archive(home)
    fill(home, range(20))
    drive(home, archive)
    home.delete_topic("t")
    status = read_status(home.context, archive)
    assert (of(status).events, of(status).lag, of(status).end) == (20, None, None)
    assert len(troubles(status, Limits())) == 1
    assert "its topic `t` was deleted: end the archive with" in said(status)
    text = status_text([status])
    assert 'tidelog_archive_source_up{archive="daily"} 0' in text
    assert 'events_total{archive="daily",partition="t/0"} 20' in text
    assert "lag_events{" not in text


def test_events_that_were_not_archived_before_their_topic_was_deleted_are_lost(home: Home) -> None:
    archive = an_archive(home)
    home.append("t", recent(10), partition=0)
    drive(home, archive)
    home.append("t", recent(7), partition=0)
    with pytest.raises(InvalidError, match=r"archive `daily` at 0:10: .* with --past-readers"):
        home.delete_topic("t")
    assert of(read_status(home.context, archive)).unread == 0
    home.delete_topic("t", past_readers=True)
    for again in (False, True):
        if again:
            home.create_topic("t")
        status = read_status(home.context, archive)
        assert of(status).unread == 7
        assert "up to 7 of its events were not archived: they are lost" in said(status)
        assert 'source_lost{archive="daily",partition="t/0"} 1' in status_text([status])
    drive(home, archive, accept_loss=True)
    status = read_status(home.context, archive)
    assert of(status).unread == 0
    assert "were not archived" not in said(status)


def test_deleted_topic_that_was_never_archived_is_lost_as_a_whole(home: Home) -> None:
    archive = an_archive(home)
    fill(home, range(20))
    home.delete_topic("t", past_readers=True)
    status = read_status(home.context, archive)
    assert sum(each.unread for each in status.partitions) == 20


def test_status_does_not_read_commits(home: Home) -> None:
    archive = an_archive(home)
    fill(home, range(20))
    drive(home, archive)
    where = layout.pipeline_partition(archive.pipeline(), "t/0")
    rows = [row.row for row in home.catalog.scan(where, "commit/", "commit0")]
    spoilt = [Put(row, b"\xff not a row") for row in rows]
    home.catalog.write(where, *spoilt, write_id="spoilt")
    assert of(read_status(home.context, archive)).events == 20


def families(text: str) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_the_metrics_are_what_prometheus_reads(home: Home) -> None:
    one, two = an_archive(home, "one", parser=AT), an_archive(home, "two")
    fill(home, range(30))
    drive(home, one)
    change_archive(home.context, "one", lambda a: msgspec.structs.replace(a, watermark_ms=1_500))
    text = metrics_text(home.context, [home.archives.get("one").info, two])
    found = families(text)
    events = {
        (sample.labels["archive"], sample.labels["partition"]): sample.value
        for sample in found["tidelog_archive_events"].samples
    }
    assert events == {
        ("one", "t/0"): 30,
        ("one", "t/1"): 0,
        ("two", "t/0"): 0,
        ("two", "t/1"): 0,
    }
    (watermark,) = found["tidelog_archive_watermark_timestamp_seconds"].samples
    assert (watermark.labels, watermark.value) == ({"archive": "one"}, 1.5)
    lag = {s.labels["archive"]: s.value for s in found["tidelog_archive_lag_events"].samples}
    assert lag["two"] == 0
    assert found["tidelog_archive_events"].type == "counter"
    assert text.endswith("\n")


def test_labels_may_hold_anything(home: Home) -> None:
    archive = an_archive(home)
    status = read_status(home.context, archive)
    odd = 'a"b\\c\nd'
    named = msgspec.structs.replace(archive, name=odd)
    text = status_text([replace(status, archive=named)])
    names = {
        sample.labels["archive"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert names == {odd}


def test_every_alert_is_made_of_metrics_that_exist(home: Home) -> None:
    archive = an_archive(home, parser=AT)
    fill(home, range(30))
    drive(home, archive)
    change_archive(home.context, "daily", lambda a: msgspec.structs.replace(a, watermark_ms=1))
    text = metrics_text(home.context, [home.archives.get("daily").info])
    known = set(re.findall(r"^(tidelog_\w+)\{", text, re.MULTILINE))
    known |= set(re.findall(r"^(tidelog_\w+) ", ScribeMetrics().text(), re.MULTILINE))
    rules = yaml.safe_load(ALERTS.read_text())
    assert list(rules) == ["groups"]
    seen: set[str] = set()
    for group in rules["groups"]:
        assert set(group) <= {"name", "interval", "rules"}
        for rule in group["rules"]:
            assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
            assert re.fullmatch(r"[A-Z][A-Za-z]+", rule["alert"])
            assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"]["summary"]
            named = set(re.findall(r"tidelog_\w+", rule["expr"]))
            assert named
            assert named <= known, rule["alert"]
            assert rule["expr"].count("(") == rule["expr"].count(")")
            seen |= named
            labels = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
            assert labels <= {"archive", "partition"}
    guide = (ALERTS.parent / "operating-archives.md").read_text()
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert f"| {rule['alert'].removeprefix('TidelogArchive')} |" in guide


@pytest.mark.server
def test_the_lag_of_kafka_is_read_from_kafka(
    home: Home, kafka_server: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the empty partition must not wait for: long, so that a stall is not taken for it.
    monkeypatch.setitem(KafkaSource.__init__.__kwdefaults__, "timeout_s", 120.0)
    topic = f"status-{uuid.uuid4().hex}"
    kafka_server.create_topic(topic, 2)
    producer = kafka_server.producer()
    for age_ms in (10 * HOUR_MS, 120_000, 0):
        producer.produce(topic, b"x", partition=0, timestamp=now_ms() - age_ms)
    producer.flush()
    archive = change_archive(
        home.context,
        an_archive(home, "kafka").name,
        lambda a: msgspec.structs.replace(a, source=f"kafka://{kafka_server.bootstrap}/{topic}"),
    )
    began_s = time.monotonic()
    status = read_status(home.context, archive)
    assert of(status, f"{topic}/0").lag == 3
    assert 35_990 < of(status, f"{topic}/0").lag_s < 36_100
    assert of(status, f"{topic}/1").lag_s == 0
    assert time.monotonic() - began_s < 60
