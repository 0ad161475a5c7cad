"""A topic that is deleted and made again under the hands of those who use it.

What belongs to one incarnation stays there: no amendment, lookup or append of the old topic shows
in the new one. No call reports corruption because a topic goes away while it runs. When all have
ended, a sweep leaves only closed heads of the topics that were deleted.
"""

from __future__ import annotations

import contextlib

from tests.sim.bare import fields
from tests.sim.base import ACCEPTED, check_swept
from tests.sim.journal_home import PARTITIONS, Desk
from tests.sim.journal_raw import CLOSED, traces
from tests.sim.journal_world import JournalWorld
from tidelog.context import Context
from tidelog.errors import AlreadyExistsError, ConflictError, NotFoundError
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.topics import create_topic, delete_topic, find_topic
from tidelog.model.topic import Topic

__all__ = ["RecreateWorld"]


class RecreateWorld(JournalWorld):
    """One seed's world."""

    prefill = 8
    copied = 0
    may_fail = (*ACCEPTED, NotFoundError)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.recreated = 0

    def spawn_all(self) -> None:
        self._spawn("recreator", self.recreate)
        self._spawn("amender-1", self.amend)
        self._spawn("amender-2", self.amend)
        self._spawn("producer-1", self.produce)
        self._spawn("producer-2", self.produce)
        self._spawn("absent", self.append_absent)
        self._spawn("reader", self.read)
        self._spawn("getter", self.get)
        self._spawn("compiler", self.compile)
        self._spawn("sweeper", self.sweep)

    def recreate(self) -> None:
        context = self._context()
        for _ in range(2):
            context.clock.sleep(self.random.uniform(1, 3))
            with contextlib.suppress(*self.may_fail, ConflictError):
                delete_topic(context, "t")
            with contextlib.suppress(*self.may_fail, ConflictError, AlreadyExistsError):
                self._create(context)
                self.recreated += 1

    def _create(self, context: Context) -> None:
        create_topic(context, Topic("t", context.ids.new(), PARTITIONS, context.clock.now_ms()))

    def check_rest(self) -> None:
        try:
            topic = find_topic(self.quiet, "t")
        except NotFoundError:  # half created or half deleted
            with contextlib.suppress(NotFoundError):
                delete_topic(self.quiet, "t")
            self._create(self.quiet)
            topic = find_topic(self.quiet, "t")
        for partition in range(PARTITIONS):
            self.read_to_end(topic, partition)
        Desk(self.quiet).compile("t")
        for _ in range(2):
            self.scheduler.time.advance(8 * 86_400)  # strays are kept for a week
            check_swept(sweep_home(self.quiet, 1_000))
        for partition in range(PARTITIONS):
            self.read_to_end(topic, partition)
        self._check_old(topic)

    def _check_old(self, topic: Topic) -> None:
        left = [  # a closed head stays for each partition
            f"{partition} {name}"
            for partition, name, value in self.bare_rows.everything()
            if partition.startswith("topic/") and topic.incarnation not in partition
            if name != "head" or not fields(value)["closed"]
        ]
        assert not left, f"rows of topics that were deleted: {left}"
        keys = self.bare_objects.bare()
        left = [
            each for each in keys if each.startswith("topics/") and topic.incarnation not in each
        ]
        assert not left, f"objects of topics that were deleted: {left}"
        gone = {
            raw.id
            for place, raw in self.truth.events.items()
            if raw.id is not None and self.truth.now(place) is CLOSED
        }
        needles = [
            each.encode()
            for each in gone
            if not self.truth.by_id_in(each, topic.incarnation)
            and not each.startswith("once")  # an upload to the new topic that failed may have it
        ]
        found = traces(self.bare_rows, self.bare_objects, needles)
        assert not found, f"traces of topics that were deleted: {found[:5]}"
