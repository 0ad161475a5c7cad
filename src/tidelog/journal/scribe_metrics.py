"""A scribe as Prometheus reads it: what this process has done, and what waits."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tidelog.journal.scribe import Turn

__all__ = ["ScribeMetrics"]


@dataclass(slots=True)
class ScribeMetrics:
    """Counts of one process; told as counters, but for the last three."""

    turns: int = 0
    turns_unfinished: int = 0
    turn_seconds: float = 0.0
    journals: int = 0
    runs: int = 0
    events: int = 0
    amendments: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    objects_swept: int = 0
    bytes_swept: int = 0
    stores_unlisted: int = 0
    errors: int = 0
    tickets_dropped: int = 0
    tickets_waiting: int = 0
    last_turn_timestamp_seconds: float = 0.0

    def add(self, turn: Turn) -> None:
        """A turn is over."""
        done = turn.compiled
        self.turns += 1
        self.turns_unfinished += not turn.finished
        self.turn_seconds += turn.seconds
        self.journals += done.journals
        self.runs += done.runs
        self.events += done.events
        self.amendments += done.amendments
        self.bytes_read += done.bytes_before
        self.bytes_written += done.bytes_after
        if turn.swept is not None:
            self.objects_swept += turn.swept.objects_deleted
            self.bytes_swept += turn.swept.bytes_deleted
            self.stores_unlisted = len(turn.swept.unlisted)
        self.errors += len(turn.troubles)
        self.tickets_dropped = turn.dropped
        self.tickets_waiting = turn.waiting
        self.last_turn_timestamp_seconds = turn.began_ms / 1000 + turn.seconds

    def text(self) -> str:
        """The text of Prometheus' exposition format."""
        lines = []
        for each in fields(self):
            is_counter = each.name not in _GAUGES
            name = f"tidelog_scribe_{each.name}" + ("_total" if is_counter else "")
            lines += [
                f"# HELP {name} {_HELP[each.name]}.",
                f"# TYPE {name} {'counter' if is_counter else 'gauge'}",
                f"{name} {getattr(self, each.name)}",
            ]
        return "".join(f"{line}\n" for line in lines)


_GAUGES = ("stores_unlisted", "tickets_waiting", "last_turn_timestamp_seconds")
_HELP = {
    "turns": "Turns of this scribe",
    "turns_unfinished": "Turns whose time was over before all was done",
    "turn_seconds": "How long turns took",
    "journals": "Journals that were made",
    "runs": "Runs and journals that they took the place of",
    "events": "Events in the journals that were made",
    "amendments": "Updates and deletes that were applied",
    "bytes_read": "Bytes of what was replaced",
    "bytes_written": "Bytes of the journals that were made",
    "objects_swept": "Objects that its sweeps deleted",
    "bytes_swept": "Bytes of these objects",
    "stores_unlisted": "Stores whose unfinished uploads the last sweep could not list or remove",
    "errors": "Topics that could not be compiled or swept, turn by turn",
    "tickets_dropped": "Tickets of the home that were too old when a scribe looked",
    "tickets_waiting": "Tickets of the home that wait for a turn",
    "last_turn_timestamp_seconds": "When the last turn of this scribe ended",
}
