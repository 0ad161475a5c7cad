"""``python -m tests.playback.players``: a nursery of players that a test kills.

It reads lines of a home and the words of a command, forks a process for each that runs it with its
output appended to a file, and prints its process id.
"""

from __future__ import annotations

import os
import signal
import sys

import pyarrow as pa

from tidelog.cli.main import main as tidelog_main


def work(output: str, words: list[str]) -> None:
    file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(os.open(output + ".err", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
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
