"""``topic``, ``produce`` and ``consume``: what goes in comes out, and bad input loses nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import tidelog as library
from tests.support.all_times import ALL_TIMES_OPTIONS
from tests.support.cli_run import Run
from tests.support.heartbeats import beaten_between_looks
from tidelog import Event
from tidelog.cli.main import cli


def consumed(tidelog: Run, topic: str, name: str, *more: str) -> bytes:
    done = tidelog("consume", topic, "--name", name, *more)
    assert done.code == 0, done.err
    return done.out


# Topics.


def test_a_topics_life(tidelog: Run) -> None:
    made = tidelog(
        *("topic", "create", "orders", "--partitions", "3", "--slot", "1m"),
        *("--notify", "https://a", "--notify", "https://b", "--max-latency-ms", "50", "--json"),
    ).rows()[0]
    assert (made["name"], made["partitions"], made["slot_ms"]) == ("orders", 3, 60_000)
    assert (made["notify"], made["max_latency_ms"]) == (["https://a", "https://b"], 50)
    tidelog("topic", "create", "another")
    tidelog("produce", "orders", stdin=b"a\nb\nc\n")

    listed = tidelog("topic", "list", "--json").rows()
    assert [(each["name"], each["partitions"], each["events"]) for each in listed] == [
        ("another", 1, 0),
        ("orders", 3, 3),
    ]
    assert b"orders" in tidelog("topic", "list").out

    shown = tidelog("topic", "show", "orders", "--json").rows()[0]
    assert shown["events"] == 3
    assert shown["bytes"] > 0
    held = [each for each in shown["per_partition"] if each["events"]]
    assert [(each["start"], each["next"], each["runs"]) for each in held] == [(0, 3, 1)]
    assert len(shown["per_partition"]) == 3
    assert b"partition" in tidelog("topic", "show", "orders").out

    refused = tidelog("topic", "delete", "orders")
    assert refused.code == 2
    assert "--yes" in refused.err
    assert tidelog("topic", "delete", "orders", "--yes", "--json").rows() == [
        {"name": "orders", "deleted": True}
    ]
    assert [each["name"] for each in tidelog("topic", "list", "--json").rows()] == ["another"]


def test_a_person_is_asked_before_a_topic_goes(tidelog: Run) -> None:
    tidelog("topic", "create", "orders")
    kept = tidelog("topic", "delete", "orders", stdin=b"n\n", terminal=True)
    assert (kept.code, kept.out) == (1, b"")
    assert "Delete topic `orders` and its 0 events, for good? [y/N]" in kept.err
    assert len(tidelog("topic", "list", "--json").rows()) == 1
    assert "nothing was deleted" in kept.err
    assert tidelog("topic", "delete", "orders", stdin=b"y\n", terminal=True).code == 0
    assert tidelog("topic", "list", "--json").rows() == []


def test_a_topic_whose_creation_was_cut_short_is_listed_and_can_go(tidelog: Run) -> None:
    from tidelog.catalog import Put
    from tidelog.model import layout
    from tidelog.model.topic import Topic, encode_row

    with library.open() as home:
        half = Topic("half", home.context.ids.new(), 2, created_ms=0)
        home.catalog.write(
            layout.REGISTRY, Put(layout.topic_row("half"), encode_row(half)), write_id="w"
        )
    assert tidelog("topic", "list", "--json").rows()[0]["state"] == "creating"
    assert tidelog("topic", "show", "half").code == 1
    assert tidelog("topic", "delete", "half", "--yes").code == 0


# Into a topic and out of it.


def test_lines_come_back_byte_for_byte(tidelog: Run, tmp_path: Path) -> None:
    raw = b"plain\n\n\xff\x00binary\r\n\xc3\xbcml\xc3\xa4ut\nno newline at the end"
    (tmp_path / "input").write_bytes(raw)
    tidelog("topic", "create", "raw")
    summary = tidelog("produce", "raw", "input", "--json").rows()[0]
    assert summary["events"] == 5
    assert summary["ends"] == [{"partition": 0, "end": 5}]
    assert consumed(tidelog, "raw", "first") == raw + b"\n"
    assert consumed(tidelog, "raw", "first") == b"", "all is committed"
    events = consumed(tidelog, "raw", "j", "--json").splitlines()
    values = [json.loads(event)["value"] for event in events]
    assert values == ["plain", "", {"base64": "/wBiaW5hcnkN"}, "ümläut", "no newline at the end"]


def test_an_empty_input_is_fine(tidelog: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    tidelog("topic", "create", "t")
    for done in (tidelog("produce", "t", "--json"), tidelog("produce", "t", "empty", "--json")):
        assert (done.code, done.rows()[0]["events"]) == (0, 0)
    assert b"events" in tidelog("produce", "t").out
    assert consumed(tidelog, "t", "c") == b""


def test_json_lines_give_key_id_and_time(tidelog: Run) -> None:
    tidelog("topic", "create", "clicks", "--partitions", "4")
    one = b'{"user": {"id": 7}, "n": "a", "at": 1700000000}'
    two = b'{"user": {"id": "x"}, "n": "b", "at": "2026-01-01T00:00:00Z"}'
    done = tidelog(
        *("produce", "clicks", "--format", "json", "--key-field", "user.id"),
        *("--id-field", "n", "--time-field", "at"),
        stdin=one + b"\n \n" + two + b"\n",
    )
    assert done.code == 0, done.err
    events = [json.loads(line) for line in consumed(tidelog, "clicks", "c", "--json").splitlines()]
    assert {(e["key"], e["id"], e["timestamp"]) for e in events} == {
        ("7", "a", "2023-11-14T22:13:20.000Z"),
        ("x", "b", "2026-01-01T00:00:00.000Z"),
    }
    assert {e["value"].encode() for e in events} == {one, two}
    with library.open() as home:
        assert {e["partition"] for e in events if e["key"] == "7"} == {
            home.partition_for("clicks", b"7")
        }


def test_a_topic_is_copied_by_its_events(tidelog: Run) -> None:
    given = [
        Event(None, b"\xff", "gone", 5, "tombstone", (("h", b"\xfe"), ("h", b"twice"))),
        Event("ü\n".encode(), None, None, 6, None, ()),
        Event(b"\x00\x80", "ñ".encode(), "three", 7, "t", (("", b""),)),
    ]
    with library.open() as home:
        home.create_topic("a")
        home.create_topic("b")
        home.append("a", given)
    copied = tidelog(
        "produce", "b", "--format", "events", stdin=consumed(tidelog, "a", "c", "--json")
    )
    assert copied.code == 0, copied.err
    with library.open() as home:
        bare = [Event(e.value, e.key, e.id, e.timestamp, e.type, e.headers) for e in home.read("b")]
    assert bare == given


@pytest.mark.parametrize(
    ("format", "bad", "message"),
    [
        ("json", b"{nonsense}", "not a JSON object"),
        ("json", b"[]", "not a JSON object"),
        ("json", b'{"other": 1}', "field `id` is missing or null"),
        ("json", b'{"id": ""}', "id is empty"),
        ("events", b'{"id": "x"}', "missing required field `value`"),
        ("events", b'{"value": "x", "timestamp": -1}', "1970"),
        ("lines", b"x" * 300, "at most 200"),
        ("lines", b"x" * 3_000, "line 3"),
    ],
)
def test_a_bad_line_is_told_by_its_number_and_what_came_before_is_stored(
    tidelog: Run, monkeypatch: pytest.MonkeyPatch, format: str, bad: bytes, message: str
) -> None:
    monkeypatch.setenv("TIDELOG_EVENT_BYTES_MAX", "200")
    good = b'{"value": "good", "id": "1"}'
    fields = ("--id-field", "id") if format == "json" else ()
    tidelog("topic", "create", "t")
    for name in ((), ("--name", "p")):
        done = tidelog(
            *("produce", "t", "--format", format, *fields, *name, "--json"),
            stdin=b"\n".join([good, good, bad, good]),
        )
        assert done.code == 1
        error = json.loads(done.err)["error"]
        assert error["context"]["line"] == 3
        assert error["context"]["events"] == done.rows()[0]["events"] == 2
        assert message in error["message"]
        assert "2 events are stored" in error["message"]
        do = "the input again under the same name" if name else "the input from line 3 on"
        assert error["message"].endswith(f"fix the line, and produce {do}")
    assert len(consumed(tidelog, "t", "c").splitlines()) == 4


def test_a_line_that_never_ends_is_refused_before_it_fills_the_memory(
    tidelog: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDELOG_EVENT_BYTES_MAX", "1000")
    monkeypatch.setattr("tidelog.api.input_lines._BATCH_BYTES", 4_000)
    monkeypatch.setattr("tidelog.api.input_lines._READ_BYTES", 1_000)
    tidelog("topic", "create", "t")
    done = tidelog("produce", "t", stdin=b"first\n" + b"x" * 50_000)
    assert done.code == 1
    assert "line 2: is longer than 8000 bytes" in done.err


def test_many_batches_keep_the_order(tidelog: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.api.input_lines._BATCH_BYTES", 100)
    monkeypatch.setattr("tidelog.api.input_lines._READ_BYTES", 37)
    tidelog("topic", "create", "t")
    lines = b"".join(b"%d\n" % number for number in range(300))
    assert tidelog("produce", "t", "--json", stdin=lines).rows()[0]["events"] == 300
    assert consumed(tidelog, "t", "c", "--max-batch", "7") == lines


def test_a_named_producer_adds_only_what_is_new(tidelog: Run) -> None:
    tidelog("topic", "create", "t", "--partitions", "2")

    def produced(lines: bytes) -> tuple[int, int]:
        done = tidelog("produce", "t", "--name", "app.log", "--json", stdin=lines)
        assert done.code == 0, done.err
        row = done.rows()[0]
        return row["events"], row["repeated"]

    lines = [b"%d\n" % number for number in range(40)]
    assert produced(b"".join(lines[:10])) == (10, 0)
    assert produced(b"".join(lines[:10])) == (0, 10)
    for end in range(12, 40, 2):  # so many that the first offsets are forgotten
        assert produced(b"".join(lines[:end])) == (2, end - 2)
    assert sorted(consumed(tidelog, "t", "c").splitlines()) == sorted(
        line.strip() for line in lines[:38]
    )


def test_a_last_line_without_an_end_waits_under_a_name(tidelog: Run) -> None:
    """What was written of it by then is not stored in its place."""
    tidelog("topic", "create", "t", "--partitions", "1")
    first = tidelog("produce", "t", "--name", "app.log", "--json", stdin=b"one\ntwo\nthr")
    assert (first.code, first.rows()[0]["events"]) == (0, 2)
    assert "line 3: has no newline yet" in first.err
    again = tidelog("produce", "t", "--name", "app.log", "--json", stdin=b"one\ntwo\nthree\nfour\n")
    assert (again.code, again.rows()[0]["events"], again.rows()[0]["repeated"]) == (0, 2, 2)
    assert tidelog("playback", "t", *ALL_TIMES_OPTIONS).out == b"one\ntwo\nthree\nfour\n"
    assert tidelog("produce", "t", stdin=b"five\nsix").code == 0
    assert tidelog("playback", "t", *ALL_TIMES_OPTIONS).out.endswith(b"five\nsix\n")


def test_an_input_with_fewer_lines_than_its_name_has_stored_is_refused(tidelog: Run) -> None:
    tidelog("topic", "create", "t", "--partitions", "1")
    assert tidelog("produce", "t", "--name", "app.log", stdin=b"1\n2\n3\n").code == 0
    for shorter in (b"n1\nn2\n", b""):
        refused = tidelog("produce", "t", "--name", "app.log", stdin=shorter)
        assert refused.code == 1
        assert "3 lines were stored under this name" in refused.err
        assert "--name of its own" in refused.err
    assert tidelog("produce", "t", "--name", "app.log.2", stdin=b"n1\nn2\n").code == 0
    assert tidelog("playback", "t", *ALL_TIMES_OPTIONS).out == b"1\n2\n3\nn1\nn2\n"


def test_a_store_that_fails_midway_is_told_with_what_is_stored(
    tidelog: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidelog.errors import UnavailableError
    from tidelog.log.producer.append import Appender

    monkeypatch.setattr("tidelog.api.input_lines._BATCH_BYTES", 4)
    monkeypatch.setattr("tidelog.api.input_lines._READ_BYTES", 4)
    tidelog("topic", "create", "t")
    uploads: list[object] = []
    upload = Appender.upload

    def failing(self: Appender, segment: object) -> object:
        uploads.append(segment)
        if len(uploads) > 2:
            raise UnavailableError("store: no answer: try again")
        return upload(self, segment)

    monkeypatch.setattr(Appender, "upload", failing)
    for name in ((), ("--name", "p")):
        uploads.clear()
        done = tidelog("produce", "t", *name, "--json", stdin=b"aaa\nbbb\nccc\nddd\n")
        assert done.code == 1
        assert "2 events are stored, up to line 2, then: store: no answer" in done.err
        assert json.loads(done.err)["error"]["context"]["events"] == 2
        assert done.rows()[0]["events"] == 2


# Consuming.


def test_max_moves_the_cursor_exactly_so_far(tidelog: Run) -> None:
    tidelog("topic", "create", "t")
    tidelog("produce", "t", stdin=b"".join(b"%d\n" % n for n in range(10)))
    assert consumed(tidelog, "t", "c", "--max", "3") == b"0\n1\n2\n"
    assert tidelog("lag", "t", "--json").rows()[0]["cursor"] == 3
    assert consumed(tidelog, "t", "c", "--max", "4", "--max-batch", "3") == b"3\n4\n5\n6\n"
    assert consumed(tidelog, "t", "c") == b"7\n8\n9\n"
    assert consumed(tidelog, "t", "c", "--max", "5") == b""


def test_a_new_consumer_begins_where_it_is_told(tidelog: Run) -> None:
    with library.open() as home:
        home.create_topic("t")
        now_ms = home.context.clock.now_ms()
        times = [now_ms - 3_600_000, now_ms - 1_800_000, now_ms]
        home.append("t", [Event(b"%d" % n, timestamp=each) for n, each in enumerate(times)])
    iso = "2020-01-01T00:00:00Z"
    for start, expected in (
        ("earliest", b"0\n1\n2\n"),
        ("latest", b""),
        ("1", b"1\n2\n"),
        ("99", b""),
        ("-45m", b"1\n2\n"),
        ("-1m", b"2\n"),
        (iso, b"0\n1\n2\n"),
    ):
        assert consumed(tidelog, "t", f"from {start}", "--from", start) == expected
    told = tidelog("consume", "t", "--name", "from 1", "--from", "earliest")
    assert (told.code, told.out) == (0, b"")
    assert "resumes there" in told.err
    wrong = tidelog("consume", "t", "--name", "x", "--from", "yesterday")
    assert (wrong.code, "ISO 8601" in wrong.err) == (2, True)


def test_a_cursor_that_was_trimmed_is_told_and_the_loss_can_be_accepted(tidelog: Run) -> None:
    with library.open() as home:
        home.create_topic("t", partitions=2)
        for partition in (0, 1):
            home.append("t", [Event(b"%d" % n) for n in range(6)], partition=partition)
    consumed(tidelog, "t", "c", "--max", "1")
    trim = ("trim", "t", "--offset", "0:4", "--offset", "1:3")
    refused = tidelog(*trim)
    assert refused.code == 2
    assert "consumer `c` at" in refused.err
    assert "--past-readers" in refused.err
    unknown = tidelog(*trim, "--past-reader", "cc")
    assert (unknown.code, "did you mean `c`" in unknown.err) == (1, True)
    both = tidelog(*trim, "--past-reader", "c", "--past-readers")
    assert (both.code, "contradict" in both.err) == (2, True)
    assert tidelog(*trim, "--past-reader", "c").code == 0
    refused = tidelog("topic", "delete", "t", "--yes")
    assert refused.code == 2
    assert "consumer `c` at" in refused.err
    assert "--past-readers" in refused.err
    told = tidelog("consume", "t", "--name", "c")
    assert told.code == 1
    assert "was trimmed" in told.err
    accepted = tidelog("consume", "t", "--name", "c", "--accept-loss")
    assert accepted.code == 0
    assert sorted(accepted.out.split()) == [b"3", b"4", b"4", b"5", b"5"]
    assert accepted.err.count("are lost") == 2
    assert {row["lag"] for row in tidelog("lag", "--json").rows()} == {0}


def test_consumer_that_is_not_used_any_more_is_deleted(tidelog: Run) -> None:
    tidelog("topic", "create", "t")
    tidelog("produce", "t", stdin=b"1\n2\n3\n")
    for name in ("old", "new"):
        consumed(tidelog, "t", name, "--max", "1")
    refused = tidelog("topic", "delete", "t", "--yes")
    assert "tidelog consumer delete t new" in refused.err
    assert "--past-reader consumer:new" in refused.err
    unsure = tidelog("consumer", "delete", "t", "old")
    assert (unsure.code, "needs --yes" in unsure.err) == (2, True)
    missing = tidelog("consumer", "delete", "t", "olt", "--yes")
    assert (missing.code, "did you mean `old`" in missing.err) == (1, True)
    done = tidelog("consumer", "delete", "t", "old", "--yes", "--json").rows()
    assert done == [{"topic": "t", "name": "old", "deleted": True}]
    assert {row["consumer"] for row in tidelog("lag", "--json").rows()} == {"new"}
    assert consumed(tidelog, "t", "old", "--max", "1") == b"1\n", "begins as a new consumer"
    assert tidelog("consumer", "delete", "t", "old", "--yes").code == 0
    assert tidelog("topic", "delete", "t", "--yes", "--past-reader", "new").code == 0


def test_a_command_gets_batches_and_one_that_fails_keeps_the_cursor(
    tidelog: Run, tmp_path: Path
) -> None:
    tidelog("topic", "create", "t")
    tidelog("produce", "t", stdin=b"".join(b"%d\n" % n for n in range(10)))
    args = ("consume", "t", "--name", "c", "--max-batch", "4", "--exec")
    failed = tidelog(*args, "cat >> got; echo >> got; [ $(wc -l < got) -lt 10 ]")
    assert (failed.code, failed.out) == (1, b"")
    assert "ended with exit code 1 on 4 events, `t/0` offsets 4 to 8" in failed.err
    assert len(failed.err.splitlines()) == 1
    batches = [batch.splitlines() for batch in (tmp_path / "got").read_text().split("\n\n")]
    assert [[json.loads(line)["offset"] for line in batch] for batch in batches] == [
        *([0, 1, 2, 3], [4, 5, 6, 7], [])
    ]
    killed = tidelog(*args, "kill -9 $$")
    assert (killed.code, "ended with signal 9" in killed.err) == (1, True)
    assert tidelog("lag", "--json").rows()[0]["cursor"] == 4
    assert tidelog(*args, "true").code == 0, "a command need not read its input"
    assert tidelog("lag", "--json").rows()[0]["cursor"] == 10


def test_a_member_that_fell_silent_is_waited_for(
    tidelog: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDELOG_LEASE_TTL_MS", "500")
    with library.open() as home:
        home.create_topic("t")
        home.append("t", [Event(b"%d" % n) for n in range(4)])
        silent = home.consumer("t", "c")
        assert silent.poll(max_events=1)
        silent.commit()
        silent._stop.set()  # it beats no more, in a process that lives
        assert consumed(tidelog, "t", "c") == b"1\n2\n3\n"


def test_a_member_that_is_busy_keeps_its_share(
    tidelog: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDELOG_LEASE_TTL_MS", "1500")
    with library.open() as home:
        home.create_topic("t")
        home.append("t", [Event(b"%d" % n) for n in range(4)])
        with home.consumer("t", "c") as busy:
            assert busy.poll(max_events=1)
            with beaten_between_looks(busy._leases):
                assert consumed(tidelog, "t", "c") == b""
            busy.commit()


def test_people_see_bars_and_counts_on_standard_error(tidelog: Run, tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(b"line\n" * 1_000)
    tidelog("topic", "create", "t")
    assert "produce t" in tidelog("produce", "t", "input", terminal=True).err
    assert "verify t" in tidelog("verify", terminal=True).err
    assert tidelog("consume", "t", "--name", "c", terminal=True).err == "1,000 events\n"


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["produce", "gone"], 1, "tidelog topic create gone"),
        (["produce", "gone", "--name", "n"], 1, "tidelog topic create gone"),
        (["consume", "gone", "--name", "c"], 1, "`gone`: not found: see `tidelog topic list`"),
        (["consume", "ordres", "--name", "c"], 1, "did you mean `orders`?"),
        (["topic", "delete", "ordres"], 1, "did you mean `orders`?"),
        (["load", "http://["], 2, "give http://HOST:PORT"),
        (["playback", "t", "--to", "2026-11-15"], 2, "end of the range with --end"),
        (["trim", "t", "--before", "-" + "9" * 5000 + "s"], 2, "give a number and a unit"),
        (["trim", "t", "--before", "-" + "9" * 15 + "d"], 2, "longer than there are times"),
        (["compile", "t", "--all"], 2, "only one of them"),
        (["scribe", "--every", "10m", "--discard-older", "5m"], 2, "every 10m, dropped after 5m"),
        (["topic", "show", "gone"], 1, "not found"),
        (["topic", "delete", "gone", "--yes"], 1, "nothing to delete"),
        (["topic", "create", "t"], 1, "exists already"),
        (["topic", "create", "a/b"], 2, "topic name"),
        (["topic", "create", "n", "--partitions", "0"], 2, "0 partitions"),
        (["topic", "create", "n", "--slot", "soon"], 2, "duration"),
        (["produce", "t", "gone.txt"], 2, "No such file"),
        (["produce", "t", "."], 2, "cannot be read"),
        (["produce", "t", "--key-field", "a"], 2, "--format json"),
        (["produce", "t", "--format", "events", "--id-field", "a"], 2, "--format json"),
        (["produce", "t", "--name", "~x"], 2, "producer name"),
        (["consume", "t", "--name", "a/b"], 2, "consumer name"),
        (["lag", "gone"], 1, "not found"),
        (["trim", "gone", "--before", "-1d"], 1, "not found"),
        (["verify", "gone"], 1, "not found"),
    ],
)
def test_wrong_input_is_one_line_and_an_exit_code(
    tidelog: Run, args: list[str], code: int, message: str
) -> None:
    tidelog("topic", "create", "t")
    tidelog("topic", "create", "orders")
    done = tidelog(*args)
    assert (done.code, done.out) == (code, b"")
    assert message in done.err
    assert len(done.err.splitlines()) == 1
    as_json = tidelog(*args, "--json")
    assert (as_json.code, as_json.out) == (code, b"")
    assert message in json.loads(as_json.err)["error"]["message"]


def test_a_line_that_is_nested_too_deeply_is_told_by_its_number(tidelog: Run) -> None:
    tidelog("topic", "create", "t")
    lines = b'{"value": "x"}\n' + b'{"value":' * 100_000
    done = tidelog("produce", "t", "--format", "json", stdin=lines)
    assert done.code == 1
    assert (
        "line 2: is nested too deeply: the limit is 200 levels: 1 event is stored, up to line 1"
        in done.err
    )
    assert len(tidelog("consume", "t", "--name", "c", "--start", "0").out.splitlines()) == 1


def test_words_that_are_no_utf8_are_refused(tidelog: Run) -> None:
    tidelog("topic", "create", "t")
    for args, code, message in (
        (["consume", "t", "--name", "\udcff"], 2, "'--name': is not UTF-8"),
        (["delete", "t", "--key", "\udcff", "--yes"], 2, "'--key': is not UTF-8"),
        (["delete", "t", "\udcff"], 2, "is not UTF-8"),
        (["update", "t", "\udcff", "/dev/null"], 2, "is not UTF-8"),
        (["verify", "t", "--erased", "\udcff"], 2, "'--erased': is not UTF-8"),
        (["verify", "t", "--erased-key", "\udcff"], 2, "'--erased-key': is not UTF-8"),
        (["topic", "show", "\udcff"], 2, "is not UTF-8"),
    ):
        done = tidelog(*args)
        assert (done.code, done.out, message in done.err) == (code, b"", True)
        assert message in json.loads(tidelog(*args, "--json").err)["error"]["message"]


@pytest.mark.parametrize(
    "args",
    [
        ["consume", "t"],
        ["consume", "t", "--name", "c", "--max", "0"],
        ["consume", "t", "--name", "c", "--max-batch", "0"],
        ["produce", "t", "--format", "xml"],
        ["topic", "create"],
        ["topic", "rename", "a", "b"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(tidelog: Run, args: list[str]) -> None:
    assert tidelog(*args).code == 2


def test_list_of_commands_shows_their_first_sentences_whole() -> None:
    runner = CliRunner()
    for path in ((), ("archive",), ("topic",), ("token",), ("pipeline",)):
        shown = runner.invoke(cli, [*path, "--help"]).output
        group = cli if not path else cli.commands[path[0]]
        assert isinstance(group, click.Group)
        listed = " ".join(shown.partition("Commands:")[2].split())
        for name, command in group.commands.items():
            sentence = command.get_short_help_str(limit=200)
            assert command.hidden or f"{name} {sentence}" in listed
        assert "..." not in listed


def test_list_of_commands_loads_no_library_of_theirs() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from tidelog.cli.main import cli;"
        "CliRunner().invoke(cli, ['--help']);"
        "slow = ('tidelog.cli.commands.', 'rich.console', 'rich.progress', 'pyarrow', 'numpy');"
        "print([name for name in sys.modules if name.startswith(slow)])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_names_the_command(tidelog: Run, shell: str) -> None:
    script = tidelog("completion", shell)
    assert script.code == 0
    assert b"_TIDELOG_COMPLETE" in script.out


def test_shell_completes_commands_and_options() -> None:
    def complete(words: str, number: int) -> list[str]:
        environ = {"_TIDELOG_COMPLETE": "bash_complete", "COMP_WORDS": words}
        environ["COMP_CWORD"] = str(number)
        code = "from tidelog.cli.main import run; run()"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            check=False,
        )
        return [line.partition(",")[2] for line in done.stdout.splitlines()]

    assert complete("tidelog to", 1) == ["token", "topic"]
    assert complete("tidelog topic cr", 2) == ["create"]
    assert "--partitions" in complete("tidelog topic create --p", 3)


def commands(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, command in group.commands.items():
        found.append((*path, name))
        if isinstance(command, click.Group):
            found += commands(command, (*path, name))
    return found


@pytest.mark.parametrize("command", [(), *commands(cli)], ids=" ".join)
def test_every_command_has_help_with_examples(tidelog: Run, command: tuple[str, ...]) -> None:
    shown = tidelog(*command, "--help")
    assert shown.code == 0
    examples = shown.out.decode().partition("Examples:\n")[2].partition("\n\n")[0]
    assert " ".join(("tidelog", *command)) in " ".join(examples.split())


def test_secrets_in_the_address_of_a_webhook_are_not_shown(tidelog: Run) -> None:
    tidelog("topic", "create", "quiet", "--notify", "https://hooks.example/T0SECRET/xyz")
    for more in ((), ("--json",)):
        shown = tidelog("topic", "show", "quiet", *more).out.decode()
        assert "hooks.example" in shown
        assert not any(secret in shown for secret in ("T0SECRET", "xyz")), shown
