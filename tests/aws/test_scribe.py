"""The scribe function: one message, one turn, of the home that the message names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tidelog import Event, aws
from tidelog.aws import scribe_handler
from tidelog.errors import InvalidError, NotFoundError
from tidelog.home import World, create_home
from tidelog.settings import load_settings


def fresh_home(folder: Path, topic: str) -> str:
    """Returns a home with one event that waits to be compiled."""
    with create_home(load_settings(str(folder), {}, folder))[0] as home:
        home.create_topic(topic)
        home.append(topic, [Event(b"one")])
        return home.config


def sqs(*messages: object) -> dict[str, object]:
    return {"Records": [{"eventSource": "aws:sqs", "body": json.dumps(each)} for each in messages]}


def test_message_is_a_turn_of_the_home_that_it_names(tmp_path: Path) -> None:
    homes = {name: fresh_home(tmp_path / name, name) for name in ("aws", "gcp")}
    environ = {"TIDELOG_HOME": homes["aws"], "TIDELOG_HOMES": json.dumps(homes)}
    handle = scribe_handler(World(environ))
    one = {"topics": 1, "journals": 0, "erased": 0, "objects_deleted": 0}
    assert handle(sqs({"replica": "gcp"}), None) == one
    assert handle(sqs({}), None) == one
    assert handle({}, None) == one
    both = handle(sqs({"replica": "aws"}, {"replica": "gcp"}), None)
    assert both == {"turns": [one, one]}
    for wrong in ({"replica": "azure"}, {"replica": 1}, []):
        with pytest.raises(InvalidError, match="TIDELOG_HOMES"):
            handle(sqs(wrong), None)


def test_home_that_fails_does_not_stop_the_turns_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = {"lost": str(tmp_path / "nowhere"), "aws": fresh_home(tmp_path / "aws", "aws")}
    turns, turn = [], aws._turn

    def counted(home: str | None, world: World) -> dict[str, object]:
        turns.append(turn(home, world))
        return turns[-1]

    monkeypatch.setattr(aws, "_turn", counted)
    handle = scribe_handler(World({"TIDELOG_HOMES": json.dumps(homes)}))
    with pytest.raises(NotFoundError, match="nowhere"):  # the queue gives both messages again
        handle(sqs({"replica": "lost"}, {"replica": "aws"}), None)
    assert [each["topics"] for each in turns] == [1]
