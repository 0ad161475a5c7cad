"""Drivers that follow an archive in processes of their own, forked by a nursery.

``python -m tests.support.driver_processes`` starts one for each line: the home, and the archive.
SIGTERM lets it finish its cycle and leave.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

from tests.support.child_processes import fork_workers
from tidelog.home import open_home

__all__ = ["follow"]


def follow(config: str, name: str) -> None:
    """Follow an archive until SIGTERM."""
    stop = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, end)
    with open_home(config) as home:
        home.archives.get(name).run(follow=True, stop=stop)


if __name__ == "__main__":
    fork_workers(follow)
