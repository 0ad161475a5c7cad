"""A playback that was started from a page: into another topic of the home, as a job.

Only topics: a page must not make the server write files, or reach out to other hosts.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tidelog.home import Home
from tidelog.model.event import to_iso
from tidelog.playback.asked import Asked, pin_asked
from tidelog.playback.outlets import Setting, open_outlet
from tidelog.playback.pace import check_speed
from tidelog.playback.run import How, Playback, opened, run_playback
from tidelog.playback.windows import READERS
from tidelog.server.console.jobs import Job

__all__ = ["play_to_topic"]


def play_to_topic(
    home: Home, topic: str, target: str, times: tuple[str, str], speed: str
) -> Callable[[Job], str]:
    """What the job does. ``InvalidError`` for a speed that is none."""
    factor = check_speed(speed)
    sink = f"topic:{target}"
    start, end = times
    asked = Asked(topic, sink, start or to_iso(0), end or None)

    def work(job: Job) -> str:
        log = home.log
        with ThreadPoolExecutor(READERS, "tidelog-playback") as pool:
            found, pin = pin_asked(log, asked, pool)
            home.watch(target)
            how = How(
                speed=factor,
                on_slot=lambda slot: _tell(job, slot.events),
                stopped=job.stop.is_set,
            )
            setting = Setting.of(log, home.world.environ, log.ids.new())
            with opened(lambda: open_outlet(sink, setting)) as outlet:
                played = run_playback(Playback(log, found, pin, pool, how), outlet)
        return f"{played.events:,} events played"

    return work


def _tell(job: Job, events: int) -> None:
    job.done += events
    job.says = f"{job.done:,} events so far"
