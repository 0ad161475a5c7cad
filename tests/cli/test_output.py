"""Tables as they stand on a terminal: whole, or one record below the other."""

from __future__ import annotations

import errno
import io
import re
import sys
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from tidelog import cli as cli_package
from tidelog.cli.commands.up import View
from tidelog.cli.output import (
    Output,
    counted,
    echo_aside,
    print_error,
    to_seconds,
    visible,
    write_out,
)
from tidelog.cli.pipeline_options import DriverWatch
from tidelog.coordination.jobs import SupervisedPart
from tidelog.errors import InvalidError

ROWS = [
    {"object": "topics/1c7a/journals/000000/0000000001.parquet", "events": 1, "url": None},
    {"object": "topics/1c7a/journals/000001/0000000001.parquet", "events": 12, "url": None},
]


def shown(
    width: int,
    monkeypatch: pytest.MonkeyPatch,
    captured: pytest.CaptureFixture[str],
    columns: tuple[str, ...] = ("object", "events", "url"),
) -> str:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")  # of a dumb one the width is always 80
    monkeypatch.setenv("NO_COLOR", "1")
    Output(as_json=False).records(columns, ROWS)
    return re.sub(r"\x1b\[[0-9;]*m", "", captured.readouterr().out)


def test_a_table_that_fits_is_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(59, monkeypatch, capsys).splitlines()
    assert len(lines) == 3
    assert lines[0].split() == ["object", "events", "url"]
    assert lines[2].split() == [ROWS[1]["object"], "12", "-"]


def test_last_column_of_a_wide_table_is_below_each_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(58, monkeypatch, capsys, ("events", "url", "object")).splitlines() == [
        "events  url  object",
        "1       -",
        f"  {ROWS[0]['object']}",
        "12      -",
        f"  {ROWS[1]['object']}",
    ]


def test_columns_without_a_value_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(as_json=False)
    output.records(("events", "url"), ROWS, rare=("url",))
    assert capsys.readouterr().out == "events\n1\n12\n"
    output.records(("events", "url"), [{**ROWS[0], "url": "x"}, ROWS[1]], rare=("url",))
    assert capsys.readouterr().out == "events  url\n1       x\n12      -\n"


def test_no_rows_leave_no_line_of_names(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=False).records(("dead", "reason"), [], "There are no dead letters.")
    assert capsys.readouterr() == ("", "There are no dead letters.\n")


def test_bar_of_a_driver_is_gone_before_the_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "write", sys.stdout.write)  # one screen
    monkeypatch.setenv("TERM", "xterm")
    output = Output(as_json=False)
    with DriverWatch(output, "daily") as watch:
        watch.look(20)
        output.record({"archive": "daily", "events": 20})
        output.say("Done.")
    screen = capsys.readouterr().out
    bar, result = screen.split("archive  daily\n")
    assert "20 behind" in bar
    assert bar.endswith("\x1b[2K"), "the bar was still on the line"
    assert result == "events   20\nDone.\n"


@pytest.mark.parametrize("width", [47, 40])
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


def test_what_runs_on_a_terminal_escapes_what_its_parts_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = io.StringIO()
    screen = partial(Console, file=shown, force_terminal=True, width=300)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("tidelog.cli.commands.up.Console", screen)
    monkeypatch.setattr("tidelog.cli.pipeline_options.Console", screen)
    hostile = "\x1b]0;owned\x07\x9b31m\u202e[blink]"
    with View(Output(False)) as view:
        view.say(hostile)
        view.complain("serve", hostile)
        part = SupervisedPart(f"archive {hostile}", "failed", 0, error=f"answered 500 {hostile}")
        view.changed(part, [part])
    watch = DriverWatch(Output(False), "archive a")
    watch.tell(hostile)
    text = shown.getvalue()
    assert text.count(r"\x1b]0;owned\x07\x9b31m\u202e[blink]") >= 4
    assert "\x1b]" not in text
    assert not set(text) & set("\x07\x9b\u202e")


PRINTS = re.compile(r"\b(click\.(?:echo|secho|confirm|prompt)|print|stdout\.write)\((.*)")
ALLOWED = {  # what no client chooses
    "commands/home.py": "kind(program",
    "commands/playback.py": "msgspec.json.encode(record)",
    "commands/serve.py": "",
}


def test_commands_print_only_what_was_escaped() -> None:
    found = []
    for path in sorted(Path(cli_package.__path__[0]).rglob("*.py")):
        if path.name == "output.py":
            continue
        name = "/".join(path.parts[-2:])
        for match in PRINTS.finditer(path.read_text()):
            allowed = ALLOWED.get(name)
            if "visible(" in match[2] or match[2].startswith("shown"):
                continue
            if allowed is None or not match[2].startswith(allowed):
                found.append((name, match[0]))
    assert found == [], "print by Output or echo_aside, or escape it by visible"


def test_up_goes_on_while_its_output_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tidelog.cli.commands.up.echo_aside", refuse)
    output = Output(False)
    monkeypatch.setattr(output, "say", refuse)
    view = View(output)
    part = SupervisedPart("serve", "failed", 0, error="x")
    view.say("x")
    view.complain("serve", "x")
    view.changed(part, [part])
    view.listening("http://127.0.0.1:1", False)


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
