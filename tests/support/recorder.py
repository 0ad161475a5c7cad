"""A target of notifications for tests."""

from __future__ import annotations

from collections.abc import Callable

from tidelog.log.notifier import Notification


class Recorder:
    """A target that keeps what it was told; ``trouble`` may raise or hang first."""

    def __init__(self, trouble: Callable[[int], None] = lambda _: None) -> None:
        self.told: list[Notification] = []
        self.tries = 0
        self._trouble = trouble

    def send(self, notification: Notification) -> None:
        self.tries += 1
        self._trouble(self.tries)
        self.told.append(notification)

    @property
    def offsets(self) -> list[int]:
        return [notification.offset for notification in self.told]
