"""Times of Kafka that no event can have, or that no client of Kafka writes: kept in a header.

Kafka stores any 64-bit number as a record's time, -1 for none. Events have times from 1970 to the
year 9999. Any other one becomes 0, and the header ``tidelog-kafka-time`` keeps it. What
is written into Kafka has that time again, and no such header.

Kafka's clients write the time of sending for 0. So 0 is written as none, with the header, and is
read as 0, without it.
"""

from __future__ import annotations

from tidelog.model import limits

__all__ = ["NO_TIME", "is_event_time", "time_from_kafka", "time_to_kafka"]

Headers = list[tuple[str, bytes | None]]

NO_TIME = -1  # Kafka's own
_HEADER = "tidelog-kafka-time"
_ZERO = (_HEADER, b"0")
_TIMES = range(-(1 << 63), 1 << 63)


def is_event_time(time_ms: int) -> bool:
    """Whether an event can have this time."""
    return 0 <= time_ms < limits.TIMESTAMP_MS_END


def time_from_kafka(time_ms: int, headers: Headers) -> Headers:
    """Return the headers of an event whose time becomes 0, since none can have this one."""
    if time_ms == NO_TIME and headers and headers[-1] == _ZERO:
        return headers[:-1]
    return [*headers, (_HEADER, b"%d" % time_ms)]


def time_to_kafka(headers: Headers) -> tuple[int, Headers]:
    """Return the time and headers to write into Kafka for an event whose time is 0."""
    for at in range(len(headers) - 1, -1, -1):
        name, value = headers[at]
        kept = _time(value) if name == _HEADER else None
        if kept is not None:
            return kept, [*headers[:at], *headers[at + 1 :]]
    return NO_TIME, [*headers, _ZERO]


def _time(text: bytes | None) -> int | None:
    """The time that a header keeps; None for what this module did not write."""
    digits = (text or b"").removeprefix(b"-")
    if text is None or not digits.isdigit() or len(digits) > 19:
        return None
    time_ms = int(text)
    is_ours = b"%d" % time_ms == text and time_ms in _TIMES and not is_event_time(time_ms)
    return time_ms if is_ours else None
