"""A question binds to what it showed: a later thing of the same name is not deleted."""

from __future__ import annotations

import shlex

import pytest

import tidelog as library
from tests.support.all_times import ALL_TIMES_OPTIONS
from tests.support.cli_run import Run
from tidelog.cli import terminal
from tidelog.pipeline import registry

NEW = b'{"k": "k", "is": "new"}\n'


def texts(run: Run, command: str) -> list[str]:
    done = run(*shlex.split(command))
    assert done.code == 0, done.err
    return done.out.decode().split()


@pytest.mark.parametrize(
    ("make", "delete", "left"),
    [
        ("topic create orders", "topic delete orders", "topic list"),
        (
            "archive create daily --source topic:t",
            "archive delete daily --delete-files",
            "archive list",
        ),
        (
            "pump topic:t --topic u --name mine --no-spark",
            "pipeline delete mine",
            "pipeline list",
        ),
        ("consume t --name late", "consumer delete t late", "lag t"),
    ],
)
def test_yes_to_an_old_question_does_not_delete_what_was_made_since(
    tidelog: Run, monkeypatch: pytest.MonkeyPatch, make: str, delete: str, left: str
) -> None:
    texts(tidelog, "init")
    for topic in ("t", "u"):
        texts(tidelog, f"topic create {topic}")
    texts(tidelog, make)

    def made_again(*_: object, **__: object) -> bool:
        texts(tidelog, f"{delete} --yes")
        texts(tidelog, make)
        return True

    with monkeypatch.context() as patch:
        patch.setattr(terminal, "confirm", made_again)
        refused = tidelog(*delete.split(), terminal=True)
    assert refused.code == 1, refused
    assert "was deleted and made again since you were asked: nothing was deleted" in refused.err
    assert {"orders", "daily", "mine", "late"} & {*texts(tidelog, left)}, "it is there"
    texts(tidelog, f"{delete} --yes")


def test_archive_that_ended_and_was_made_again_is_not_ended_by_an_old_answer(
    tidelog: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts(tidelog, "init")
    texts(tidelog, "topic create t")
    texts(tidelog, "archive create daily --source topic:t")

    def made_again(*_: object, **__: object) -> bool:
        texts(tidelog, "archive delete daily --delete-files --yes")
        texts(tidelog, "archive create daily --source topic:t")
        return True

    with monkeypatch.context() as patch:
        patch.setattr(terminal, "confirm", made_again)
        assert tidelog("archive", "delete", "daily", terminal=True).code == 1
    assert "ready" in texts(tidelog, "archive list")


def test_events_of_a_topic_that_was_made_again_are_not_deleted_by_an_old_answer(
    tidelog: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts(tidelog, "init")
    texts(tidelog, "topic create t")
    assert tidelog("produce", "t", "--format", "json", "--key-field", "k", stdin=NEW).code == 0

    def made_again(*_: object, **__: object) -> bool:
        texts(tidelog, "topic delete t --yes")
        texts(tidelog, "topic create t")
        assert tidelog("produce", "t", "--format", "json", "--key-field", "k", stdin=NEW).code == 0
        return True

    with monkeypatch.context() as patch:
        patch.setattr(terminal, "confirm", made_again)
        refused = tidelog("delete", "t", "--key", "k", terminal=True)
    assert "since you were asked" in refused.err
    assert b"new" in tidelog("playback", "t", *ALL_TIMES_OPTIONS).out


def test_question_says_how_many_events_would_be_erased_and_where(tidelog: Run) -> None:
    texts(tidelog, "init")
    texts(tidelog, "topic create t --partitions 2")
    texts(tidelog, "archive create a --source topic:t")
    events = b'{"k": "u-1"}\n{"k": "u-2"}\n' * 3
    assert tidelog("produce", "t", "--format", "json", "--key-field", "k", stdin=events).code == 0
    texts(tidelog, "archive run a --no-spark")
    assert tidelog("produce", "t", "--format", "json", "--key-field", "k", stdin=events).code == 0
    asked = tidelog("delete", "t", "--key", "u-1", stdin=b"n\n", terminal=True)
    assert asked.code == 1
    assert "Found 6 events (t/" in asked.err
    assert "Events in files of archives, which are deleted there too: a: 3.\n" in asked.err
    assert asked.err.index("Found") < asked.err.index("Delete all events with key `u-1`")
    none = tidelog("delete", "t", "--key", "unknown", stdin=b"n\n", terminal=True)
    assert "Found 0 events.\n" in none.err
    texts(tidelog, "topic delete t --yes --past-readers")
    asked = tidelog("archive", "erase", "a", "--key", "u-1", stdin=b"n\n", terminal=True)
    assert "Found 3 events (t/" in asked.err
    none = tidelog("archive", "erase", "a", "--key", "unknown", stdin=b"n\n", terminal=True)
    assert "nothing was erased: no event of archive `a` or its copies has the key" in none.err
    assert "Found" not in tidelog("archive", "erase", "a", "--key", "u-1", "--yes").err


def test_nothing_is_asked_if_no_event_would_be_deleted(
    tidelog: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts(tidelog, "topic create t")
    assert tidelog("produce", "t", stdin=b"one\n").code == 0
    asked: list[object] = []
    monkeypatch.setattr(terminal, "confirm", lambda *given, **_: asked.append(given) or True)
    for wanted in (["--key", "nobody"], ["no-such-id"]):
        done = tidelog("delete", "t", *wanted, terminal=True)
        assert (done.code, asked) == (1, [])
        assert "nothing was deleted: no event of `t` or of its archives has " in done.err
        said = tidelog("delete", "t", *wanted, "--yes")
        assert (said.code, b"Nothing was deleted: no event of `t`" in said.out) == (1, True)


def test_what_is_refused_is_refused_before_the_question(
    tidelog: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (
        "topic create t",
        "topic create u",
        "archive create daily --source topic:t",
        "archive create chained --source archive:daily",
        "pump topic:t --topic u --name mine --no-spark",
        "consume t --name late",
    ):
        texts(tidelog, each)
    assert tidelog("produce", "t", stdin=b"one\n").code == 0
    asked: list[str] = []
    monkeypatch.setattr(terminal, "confirm", asked.append)
    home = library.open("tidelog-data")
    with home, home.consumer("t", "late") as member:
        member.poll()
        monkeypatch.setattr(registry, "looks", lambda *_: [True])
        monkeypatch.setattr(registry.DriverMembers, "alive", lambda _: ["a driver"])
        for command, why in (
            ("archive delete daily --delete-files", "archive `chained` is made from it"),
            ("topic delete t", "would delete events that have not been read"),
            ("consumer delete t late", "is alive: stop it first"),
            ("pipeline delete mine", "a driver runs it: stop that one"),
        ):
            refused = tidelog(*command.split(), terminal=True)
            assert (why in refused.err, asked) == (True, []), (command, refused)
    audit = tidelog("audit").out
    for refused_op in (b"archive delete", b"topic delete", b"pump delete"):
        assert refused_op not in audit, "what was refused did not happen"


def test_an_answer_that_is_none_is_asked_for_again(tidelog: Run) -> None:
    texts(tidelog, "topic create t")
    done = tidelog("topic", "delete", "t", stdin=b"what\n Y \n", terminal=True)
    assert (done.code, "Deleted topic" in done.out.decode()) == (0, True)
    assert "error: answer `what`: not understood: give y or n\n" in done.err
    assert "Error" not in done.err
    texts(tidelog, "topic create t")
    assert tidelog("topic", "delete", "t", stdin=b"\n", terminal=True).code == 1


def test_question_names_ids_that_no_event_has(tidelog: Run) -> None:
    texts(tidelog, "topic create t")
    events = b'{"k": "one"}\n{"k": "two"}\n'
    texts_of_json = ("--format", "json", "--id-field", "k")
    assert tidelog("produce", "t", *texts_of_json, stdin=events).code == 0
    asked = tidelog("delete", "t", "one", "three", stdin=b"n\n", terminal=True)
    assert "Found 1 event (t/0: 1).\nNo event has the id `three`.\n" in asked.err
    texts(tidelog, "archive create a --source topic:t")
    texts(tidelog, "archive run a --no-spark")
    erase = ("archive", "erase", "a", "--id", "two", "--id", "three", "--id", "four")
    asked = tidelog(*erase, stdin=b"n\n", terminal=True)
    assert "No event has the ids `three`, `four`.\n" in asked.err
    assert tidelog("trim", "t", "--offset", "0:2", "--yes").code == 0
    asked = tidelog("delete", "t", "one", "three", stdin=b"n\n", terminal=True)
    assert "No event has the id `three`.\n" in asked.err
