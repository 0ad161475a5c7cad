"""``python -m tidelog``: the command line. With ``--child-of PARENT`` first, as a child process.

The kernel is asked to end such a child at once when the thread that started it ends, whatever ended
that one. So a keeper that is killed leaves no process behind. Nothing is lost: every part of
Tidelog may die at any point.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from tidelog.cli.main import run

__all__ = ["die_with"]

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Makes this process end when its parent ends; at once if that has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit(f"tidelog: process {parent}, which wanted this one, has ended")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child-of"]:
        parent = int(sys.argv[2])
        del sys.argv[1:3]
        die_with(parent)
    run()
