"""Tables as they stand on a terminal: whole, or one record below the other."""

from __future__ import annotations

import re
import sys

import pytest

from tidelog.cli.output import (
    Output,
    counted,
    echo_aside,
    print_error,
    to_seconds,
    visible,
    write_out,
)
from tidelog.errors import InvalidError

ROWS = [
    {"object": "topics/1c7a/journals/000000/0000000001.parquet", "events": 1, "url": None},
    {"object": "topics/1c7a/journals/000001/0000000001.parquet", "events": 12, "url": None},
]


def shown(width: int, monkeypatch: pytest.MonkeyPatch, captured: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")  # of a dumb one the width is always 80
    monkeypatch.setenv("NO_COLOR", "1")
    Output(as_json=False).records(("object", "events", "url"), ROWS)
    return re.sub(r"\x1b\[[0-9;]*m", "", captured.readouterr().out)


def test_a_table_that_fits_is_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(59, monkeypatch, capsys).splitlines()
    assert len(lines) == 3
    assert lines[0].split() == ["object", "events", "url"]
    assert lines[2].split() == [ROWS[1]["object"], "12", "-"]


@pytest.mark.parametrize("width", [58, 40])
def test_a_table_that_would_be_cut_is_one_record_below_the_other(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(width, monkeypatch, capsys)
    first, second = text.split("\n\n")
    assert first.splitlines()[0] == f"object  {ROWS[0]['object']}"
    assert second.splitlines()[1:] == ["events  12", "url     -"]
    assert "…" not in text


def test_small_words() -> None:
    assert [counted(n, "event") for n in (0, 1, 1_000)] == ["0 events", "1 event", "1,000 events"]
    assert counted(2, "entry", "entries") == "2 entries"
    assert to_seconds("2026-11-15T19:55:45.123Z") == "2026-11-15T19:55:45Z"


HOSTILE = "a\x1b[2J\x1b]0;owned\x07\r\nb\x9b31m\u202etxt"


def test_what_could_steer_a_terminal_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(False)
    output.say(HOSTILE)
    output.title(HOSTILE)
    output.record({"why": HOSTILE})
    output.records(("why",), [{"why": HOSTILE}])
    output.record({HOSTILE: ""})
    output.records((HOSTILE,), [{HOSTILE: ""}])
    print_error(InvalidError(f"topic `{HOSTILE}`: is bad"), False)
    echo_aside(HOSTILE)
    found = capsys.readouterr()
    for text in (found.out, found.err):
        assert r"\x1b[2J" in text
        assert not set(text) & set("\x1b\x07\r\x9b\u202e"), text
    assert visible("plain ü text") == "plain ü text"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_values_of_events_do_not_steer_a_terminal_and_reach_a_pipe_as_they_are(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    value = HOSTILE.encode() + b"\xff\tend\n"
    write_out(value)
    shown = b"a\\x1b[2J\\x1b]0;owned\\x07\\r\nb\\x9b31m\\u202etxt\\xff\tend\n"
    assert capsysbinary.readouterr().out == (shown if is_terminal else value)


def test_markup_in_names_and_values_is_printed_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "[/x] [bold]b[/bold] [draft] :smile:"
    output = Output(False)
    output.say(text)
    output.title(text)
    output.record({text: text})
    output.records((text,), [{text: text}])
    assert capsys.readouterr().out.count(text) == 6
