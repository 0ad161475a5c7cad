"""``produce --name``: one name is for one input, and another input under it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.all_times import ALL_TIMES_OPTIONS
from tests.support.cli_run import Run
from tidelog.log.producer.producer import Producer
from tidelog.model.topic import partition_for

REFUSED = "are not those that were stored under this name"


def replayed(tidelog: Run) -> list[bytes]:
    return sorted(tidelog("playback", "t", *ALL_TIMES_OPTIONS).out.splitlines())


@pytest.mark.parametrize("partitions", ["1", "3"])
@pytest.mark.parametrize(
    "other", [b"x\ny\nz\n", b"x\ny\nz\nnew\n", b"a\nB\nc\nd\n", b"a\n\nb\nc\n"]
)
def test_another_input_under_a_name_is_refused(
    tidelog: Run, tmp_path: Path, partitions: str, other: bytes
) -> None:
    tidelog("topic", "create", "t", "--partitions", partitions)
    file = tmp_path / "in"
    file.write_bytes(b"a\nb\nc\n")
    assert tidelog("produce", "t", str(file), "--name", "n").code == 0
    file.write_bytes(other)
    for given, stdin in ((str(file), b""), ("-", other)):
        refused = tidelog("produce", "t", given, "--name", "n", stdin=stdin)
        assert refused.code == 1
        assert REFUSED in refused.err
        assert "name `n`: the input's first lines, up to line" in refused.err
        assert "give this input a --name of its own" in refused.err
    assert replayed(tidelog) == [b"a", b"b", b"c"], "nothing of it is stored"
    assert tidelog("produce", "t", str(file), "--name", "n2").code == 0
    file.write_bytes(b"a\nb\nc\nd\n")
    assert tidelog("produce", "t", str(file), "--name", "n", "--json").rows()[0]["events"] == 1
    assert replayed(tidelog) == sorted([b"a", b"b", b"c", b"d", *other.splitlines()])


def test_lines_that_a_crash_left_out_are_stored_for_the_same_input_only(
    tidelog: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One partition is behind the other: nothing is stored there before all lines agree."""
    monkeypatch.setattr("tidelog.api.input_lines._BATCH_BYTES", 12)
    monkeypatch.setattr("tidelog.api.input_lines._READ_BYTES", 12)
    monkeypatch.setattr("tidelog.api.append_lines._HELD_BYTES", 8)
    tidelog("topic", "create", "t", "--partitions", "2")
    lines = b"".join(b"%d\n" % n for n in range(20, 40))
    assert tidelog("produce", "t", "--name", "n", stdin=lines[:12]).code == 0  # 20 to 23

    is_stored = Producer.is_stored

    def left_out(self: Producer, sequence: int, key: bytes | None = None) -> bool:
        return is_stored(self, sequence, key) or (sequence >= 4 and sequence % 2 == 1)

    with monkeypatch.context() as patched:
        patched.setattr(Producer, "is_stored", left_out)
        assert tidelog("produce", "t", "--name", "n", stdin=lines).code == 0
    even = [b"%d" % n for n in range(24, 40, 2)]
    assert replayed(tidelog) == sorted([b"20", b"21", b"22", b"23", *even])

    for other in (lines.replace(b"25", b"xx"), lines[:-6], lines.replace(b"38", b"xx")):
        refused = tidelog("produce", "t", "--name", "n", stdin=other)
        assert refused.code == 1
        assert REFUSED in refused.err or "the input ends after line 18" in refused.err
        assert len(replayed(tidelog)) == 12, "nothing of it is stored"
    again = tidelog("produce", "t", "--name", "n", "--json", stdin=lines + b"40\n")
    assert again.code == 0, again.err
    assert (again.rows()[0]["events"], again.rows()[0]["repeated"]) == (9, 12)
    assert replayed(tidelog) == [b"%d" % n for n in range(20, 41)]


def test_other_options_for_keys_are_refused(tidelog: Run) -> None:
    """A key decides which partition knows a line: under another it would be stored twice."""
    tidelog("topic", "create", "t", "--partitions", "2")
    user = next(name for name in ("a", "b", "c") if partition_for(name.encode(), 2) == 0)
    lines = b'{"user": "%s"}\n' % user.encode() * 2
    produce = ("produce", "t", "--name", "n", "--format", "json")
    assert tidelog(*produce, stdin=lines).code == 0
    refused = tidelog(*produce, "--key-field", "user", stdin=lines)
    assert refused.code == 1
    assert "with the same options" in refused.err
    assert len(replayed(tidelog)) == 2
    assert tidelog(*produce, stdin=lines + b"{}\n").code == 0
    assert len(replayed(tidelog)) == 3


def test_a_name_of_another_program_is_refused(tidelog: Run) -> None:
    """What it stored were not lines of this input."""
    from tidelog.home import open_home

    tidelog("topic", "create", "t", "--partitions", "1")
    with open_home(None) as home, home.producer("t", name="n") as producer:
        producer.send(b"theirs").result(60)
    refused = tidelog("produce", "t", "--name", "n", stdin=b"ours\nmore\n")
    assert refused.code == 1
    assert REFUSED in refused.err
    assert replayed(tidelog) == [b"theirs"]


def test_blank_lines_and_a_fixed_line_go_on_under_a_name(tidelog: Run) -> None:
    tidelog("topic", "create", "t", "--partitions", "2")
    produce = ("produce", "t", "--name", "n", "--format", "json")
    first = tidelog(*produce, stdin=b'{"n": 1}\n\n{"n": 2}\n{bad\n{"n": 4}\n')
    assert first.code == 1
    assert "line 4" in first.err
    again = tidelog(*produce, "--json", stdin=b'{"n": 1}\n\n{"n": 2}\n{"n": 3}\n{"n": 4}\n')
    assert again.code == 0, again.err
    assert (again.rows()[0]["events"], again.rows()[0]["repeated"]) == (2, 2)
    assert len(replayed(tidelog)) == 4


def test_held_events_keep_all_their_fields(tidelog: Run) -> None:
    from tidelog.api.append_lines import _pending, _WaitingLines
    from tidelog.model.event import Event

    held = _WaitingLines()
    event = Event(None, b"\xff", "id", 5, "type", (("h", None), ("h", b"\0")))
    lines = [_pending(1, b"m", event), _pending(3, b"n", Event(b""))]
    for line in lines:
        held.add(line)
    assert list(held.take()) == lines
    held.close()
