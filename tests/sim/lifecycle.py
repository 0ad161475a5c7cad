"""Topics that are deleted and created again under producers, consumers, readers and sweeps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from tests.sim.base import ACCEPTED, in_peace
from tests.sim.clients import PARTITIONS, PEACE_S, ClientsWorld
from tidelog.context import Context
from tidelog.errors import AlreadyExistsError, NotFoundError
from tidelog.log.maintenance.sweep import sweep_home
from tidelog.log.partition_reader import Reader
from tidelog.log.topics import create_topic, delete_topic, find_topic
from tidelog.model.topic import Topic

__all__ = ["LifecycleWorld"]


class LifecycleWorld(ClientsWorld):
    """One seed's world in which the topic comes and goes."""

    accepted = (*ACCEPTED, NotFoundError)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.faults.late_rate = self.random.choice([0.02, 0.5])  # also after a topic is gone

    def spawn_all(self) -> None:
        self._start("admin", self.administer, self.random.choice([1, 2]))
        writers: list[Callable[[], None]] = [
            lambda: self._start("sender", self._again(self.send), 2),
            lambda: self._start("sequenced", self._again(self.send_sequenced), 2),
            lambda: self._start("server", self._again(self.serve), 2),
        ]
        self.random.choice(writers)()
        self._start("consumer", self._again(self.consume), 2)
        self._start("reader", self._again(self.read), 1)
        self._start("sweeper", self._again(self.sweep), 1)
        if self.chance(0.3):
            self._start("trimmer", self._again(self.trim), 1)

    def _again(self, run: Callable[[], None]) -> Callable[[], None]:
        """With the topic of the present, as often as it is deleted."""

        def live() -> None:
            for _ in range(3):
                with contextlib.suppress(NotFoundError):
                    run()
                    return
                self.process.clock.sleep(self.random.uniform(0, 3))

        return live

    def administer(self) -> None:
        """Deletes the topic and creates it again; another admin may do the same."""
        context = self._context()
        for _ in range(2):
            context.clock.sleep(self.random.uniform(0, 8))
            with contextlib.suppress(*self.passing, NotFoundError):
                delete_topic(context, "t")
            with contextlib.suppress(*self.passing, AlreadyExistsError):
                self.create(context)

    def _incarnations(self) -> list[str]:
        return [topic["incarnation"] for topic in self.ledger.bare.topics().values()]

    def read(self) -> None:
        """Reads all partitions from the start, again and again, without a lease."""
        context = self._context()
        topic = find_topic(context, "t")
        for _ in range(8):
            for partition in range(PARTITIONS):
                with contextlib.suppress(*self.passing):
                    self._read(context, topic, partition)
            context.clock.sleep(self.random.uniform(0, 1))

    def _read(self, context: Context, topic: Topic, partition: int) -> None:
        at = 0
        try:
            for stretch in Reader(context, topic, partition).read(at):
                assert stretch.base == at, "a reader skipped or went back"
                self.ledger.deliver("reader", topic.incarnation, stretch.events())
                at = stretch.end
        except NotFoundError as exc:
            if "start" not in exc.context:
                raise

    def check_after(self) -> None:
        while self.faults.late:  # what arrives after the last sweep is the next one's
            self.faults.late.pop()()
        in_peace(self, "admin", self._create_again, PEACE_S)
        in_peace(self, "sweep", lambda context: sweep_home(context, 0), PEACE_S)
        known = set(self._incarnations())
        stored = [key for key in self.objects.bare() if key.startswith("topics/")]
        left = [key for key in stored if key.split("/")[1] not in known]
        assert not left, f"objects of deleted topics are left: {left}"
        super().check_after()

    def _create_again(self, context: Context) -> None:
        with contextlib.suppress(AlreadyExistsError):
            self.create(context)
        with contextlib.suppress(NotFoundError):
            find_topic(context, "t")
            return
        # A deletion that a crash has cut off: the next one completes it.
        delete_topic(context, "t")
        create_topic(context, Topic("t", context.ids.new(), PARTITIONS, 0, notify=("sim:",)))
