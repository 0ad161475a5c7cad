"""``python -m tests.support.players``: a nursery of players that a test kills.

It reads lines of a home and the words of a command, forks a process for each that runs it with its
output appended to a file, and prints its process id. Where a file ``<output>.leash`` is, players
go no further than the number in it: so a test kills them at work, however slow it is itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from tidelog.cli.main import main as tidelog_main
from tidelog.connectors.sink import PlaybackSink
from tidelog.model.playback import Cursor
from tidelog.playback import play as run
from tidelog.playback.session import NamedPlayback

LOT_EVENTS = 25  # at most, on a leash


def let(output: Path, number: int) -> None:
    """Players with this output may go on to a number; before they start, this puts the leash on."""
    new = Path(f"{output}.new")
    new.write_text(str(number))
    new.replace(f"{output}.leash")


def hold(leash: Path) -> None:
    """Let lots be small, and intend none that ends beyond what the leash says."""
    lots_of, intend = run.lots_of, NamedPlayback.intend

    def small(batch: pa.RecordBatch, sink: PlaybackSink) -> Iterator[pa.RecordBatch]:
        for part in lots_of(batch, sink):
            for first in range(0, part.num_rows, LOT_EVENTS):
                yield part.slice(first, LOT_EVENTS)

    def held(self: NamedPlayback, until: Cursor, number: int, reached: int = 0) -> None:
        while number > int(leash.read_text()):
            time.sleep(0.005)
        intend(self, until, number, reached)

    run.lots_of = small
    NamedPlayback.intend = held  # type: ignore[method-assign]


def work(output: str, words: list[str]) -> None:
    file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(os.open(output + ".err", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    leash = Path(f"{output}.leash")
    if leash.exists():
        hold(leash)
    sys.argv = ["tidelog", *words]
    try:
        tidelog_main()
    except SystemExit as exc:
        sys.stdout.flush()
        os._exit(int(exc.code or 0))
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    pa.array([0])  # loads what would else be loaded in each child
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who were killed
    for line in sys.stdin:
        output, *words = line.split()
        player = os.fork()
        if player == 0:
            os.close(0)
            work(output, words)
        print(player, flush=True)


if __name__ == "__main__":
    main()
