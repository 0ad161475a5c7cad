"""Signals and pipes: what only shows between real processes."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

import tidelog as library
from tests.support.cli_run import Run, finish, start


def fill() -> None:
    """A topic ``t`` with the numbers from 0 to 9."""
    with library.open() as home:
        home.create_topic("t")
        home.append("t", [library.Event(b"%d" % n) for n in range(10)])


def lease(tidelog: Run) -> tuple[int | None, str | None]:
    """The cursor of the only partition, and who owns it."""
    row = tidelog("lag", "--json").rows()[0]
    return row["cursor"], row["owner"]


def test_a_follower_that_is_told_to_end_releases_its_lease(tidelog: Run) -> None:
    fill()
    following = start("consume", "t", "--name", "c", "--follow")
    assert following.stdout is not None
    assert [following.stdout.readline() for _ in range(10)][-1] == b"9\n"
    tidelog("produce", "t", stdin=b"later")
    assert following.stdout.readline() == b"later\n"
    assert lease(tidelog)[1] is not None
    following.send_signal(signal.SIGTERM)
    done = finish(following)
    assert (done.code, done.out, done.err) == (0, b"", "")
    assert lease(tidelog) == (11, None)


def test_killed_between_output_and_commit_only_that_batch_comes_again(tidelog: Run) -> None:
    fill()
    command = "cat; if [ -e second ]; then kill -9 $PPID; fi; touch second"
    args = ("consume", "t", "--name", "c", "--max-batch", "3")
    killed = finish(start(*args, "--exec", command))
    assert killed.code == -signal.SIGKILL
    assert len(killed.out.splitlines()) == 6, "the command's output passes through"
    again = tidelog(*args)
    assert again.out.split() == [b"3", b"4", b"5", b"6", b"7", b"8", b"9"]
    assert lease(tidelog) == (10, None)


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_reader_that_goes_away_leaves_the_cursor(tidelog: Run, unbuffered: str) -> None:
    fill()
    tidelog("produce", "t", stdin=b"x" * 1_000_000)
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with start("consume", "t", "--name", "c", env=environ) as consuming:
        assert consuming.stdout is not None
        assert consuming.stderr is not None
        consuming.stdout.read(1)
        consuming.stdout.close()
        assert consuming.stderr.read() == b""
        assert consuming.wait(60) == 1
    assert lease(tidelog) == (0, None)


def test_a_pipe_that_trickles_is_stored_as_it_comes_until_ctrl_c(tidelog: Run) -> None:
    fill()
    with (
        library.open() as home,
        home.consumer("t", "c", start="latest") as consumer,
        start("produce", "t", "--json", stdin=subprocess.PIPE) as producing,
    ):
        assert consumer.poll(timeout_s=0) == []
        assert producing.stdin is not None
        assert producing.stdout is not None
        assert producing.stderr is not None
        for line in (b"first\n", b"second\n", b"third\nnot ended"):
            producing.stdin.write(line)
            producing.stdin.flush()
            expected = [line.split()[0]]
            assert [event.value for event in consumer.poll(timeout_s=120)] == expected
        producing.send_signal(signal.SIGINT)
        assert producing.wait(60) == 130
        assert b'"events":3' in producing.stdout.read()
        assert producing.stderr.read() == b"interrupted: 3 events are stored, up to line 3\n"
