"""What a home does to notify other systems of new events."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tidelog.context import Context
from tidelog.errors import InvalidError
from tidelog.log.notifier import Notifier, notify_again
from tidelog.log.notify_targets import open_target
from tidelog.model.topic import Topic

__all__ = ["NotifyCalls"]


class NotifyCalls(ABC):
    """Notifications on request; those of commits happen by themselves."""

    context: Context
    _notifier: Notifier

    @abstractmethod
    def topic(self, name: str) -> Topic:
        """The topic of this name. ``NotFoundError``."""

    def watch(self, topic: str) -> None:
        """Let this process notify a topic's targets of what it commits there by other ways.

        >>> home.watch("orders")
        """
        self._notifier.watch(self.topic(topic))

    def notify(self, topic: str, partition: int) -> int | None:
        """Notify a topic's targets of a partition's newest event now, whether they know it or not.

        For a function that stops before the end and wants to be called again. Returns the offset,
        None for an empty partition. Raises ``InvalidError`` if there are no targets, or if one
        refuses, and ``UnavailableError`` if one cannot be reached.

        >>> home.create_topic("calls", notify=["https://example.com/woken"]).partitions
        1
        >>> home.notify("calls", 0) is None
        True
        """
        found = self.topic(topic)
        found.check_partition(partition)
        if not found.notify or not self.context.standing.owns(found.home):
            raise InvalidError(f"topic `{topic}`: this home notifies no targets of it: give some")
        targets = [open_target(url, self.context.environ) for url in found.notify]
        sent = notify_again(self.context, found, partition, targets)
        return sent.offset if sent else None
