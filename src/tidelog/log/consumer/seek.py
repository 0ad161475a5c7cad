"""Moves the cursor of a consumer from outside.

A move is planned, shown to a person, and done as shown. The lease is written by the version that
the plan was made from, with a higher epoch and no owner. So a member that holds it loses it at its
next commit, and resumes at the new cursor when it takes the lease again. A plan that was overtaken
by a commit changes nothing.

Both steps read the lease first and the consumer's row then, as a member that takes a lease does
(``leases``). So a delete of the consumer that starts later writes the lease, and then this write
fails: no lease of a deleted consumer comes back, which a trim would pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidelog.catalog.base import ABSENT, Put
from tidelog.catalog.update import Decision, Rows, update
from tidelog.context import Context
from tidelog.coordination.ownership import write_held
from tidelog.errors import InvalidError, NotFoundError
from tidelog.log.consumer.leases import Lease, decode_registered, lease_of, read_lease_row
from tidelog.log.partition_reader import find_offset
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.event import check_utf8
from tidelog.model.times import moment_ms
from tidelog.model.topic import Topic, encode_row

__all__ = [
    "CursorMove",
    "check_consumer",
    "consumer_not_found",
    "move_cursor",
    "plan_move",
    "seek_cursor",
]


@dataclass(frozen=True, slots=True)
class CursorMove:
    """Where a cursor is, and where it would move."""

    partition: int
    cursor: int | None  # None: no member has read the partition yet
    to: int
    owner: str
    version: str  # of the lease; empty if there is none

    @property
    def again(self) -> int:
        """Returns how many events would be handled a second time."""
        return max(0, (self.cursor or 0) - self.to) if self.cursor is not None else 0

    @property
    def skipped(self) -> int:
        """Returns how many events would never be handled."""
        return max(0, self.to - self.cursor) if self.cursor is not None else 0


def plan_move(context: Context, topic: Topic, name: str, partition: int, to: str) -> CursorMove:
    """Returns where one cursor would move: ``earliest``, ``latest``, an offset, or a time.

    Raises ``InvalidError`` for an offset that does not exist, and ``NotFoundError`` for a consumer
    that the topic does not have.
    """
    offset = _target(context, topic, partition, to)
    return _move(partition, offset, _read_lease(context, topic, name, partition))


def _target(context: Context, topic: Topic, partition: int, to: str) -> int:
    """Returns the offset that a text names. Raises ``InvalidError`` if it does not exist."""
    topic.check_partition(partition)
    head, _ = read_head(context, topic, partition)
    if to == "earliest":
        offset = head.start
    elif to == "latest":
        offset = head.next
    elif to.isascii() and to.isdigit() and len(to) < 20:
        offset = int(to)
    else:
        offset = find_offset(context, topic, partition, _moment_ms(to, context.clock.now_ms()))
    if not head.start <= offset <= head.next:
        raise InvalidError(
            f"seek in `{topic.name}/{partition}`: offset {offset} is outside of "
            f"[{head.start}, {head.next}]: give one inside"
        )
    return offset


def _moment_ms(text: str, now_ms: int) -> int:
    try:
        return moment_ms(text, now_ms)
    except InvalidError as exc:
        raise InvalidError(f"{exc}, or earliest, latest or an offset") from exc


def _move(partition: int, offset: int, found: tuple[Lease, str] | None) -> CursorMove:
    if found is None or found[0].deleted:
        return CursorMove(partition, None, offset, "", found[1] if found else "")
    return CursorMove(partition, found[0].cursor, offset, found[0].owner, found[1])


def seek_cursor(context: Context, topic: Topic, name: str, partition: int, to: str) -> CursorMove:
    """Plans a move and does it at once, also while members commit; returns the move.

    Raises as :func:`plan_move`, and ``UnavailableError`` if the lease keeps changing.
    """
    where = layout.lease_partition(topic.incarnation, name, partition)

    def decide(rows: Rows) -> Decision[CursorMove]:
        row = rows["lease"]
        check_consumer(context, topic, name)  # after the lease, as everywhere
        found = None if row is None else lease_of(topic, name, partition, row)
        plan = _move(partition, _target(context, topic, partition, to), found)
        lease = Lease("", found[0].epoch + 1 if found else 1, plan.to)
        return Decision(plan, [rows.put("lease", encode_row(lease))])

    what = f"consumer `{name}` of `{topic.name}/{partition}`"
    return update(context, where, ["lease"], decide, what)


def move_cursor(
    context: Context, topic: Topic, name: str, partition: int, to: int, version: str
) -> bool:
    """Does what was planned; returns False if the lease has changed since. Raises ``InvalidError``.

    ``version`` is that of the plan. Raises ``NotFoundError`` if the consumer was deleted since.
    """
    again = plan_move(context, topic, name, partition, str(to))
    if again.version != version:
        return False
    found = _read_lease(context, topic, name, partition)
    epoch = found[0].epoch + 1 if found else 1
    where = layout.lease_partition(topic.incarnation, name, partition)
    wanted = Put("lease", encode_row(Lease("", epoch, again.to)), expect=version or ABSENT)
    what = f"move of consumer `{name}` on `{topic.name}/{partition}`"
    return write_held(context, where, what, wanted) is not None


def _read_lease(
    context: Context, topic: Topic, name: str, partition: int
) -> tuple[Lease, str] | None:
    """Returns the lease of a consumer that is there: its row is read after the lease."""
    found = read_lease_row(context, topic, name, partition)
    check_consumer(context, topic, name)
    return found


def check_consumer(context: Context, topic: Topic, name: str) -> None:
    """Raises ``NotFoundError`` for a consumer that the topic has not had."""
    check_utf8("consumer name", name)
    where = layout.consumers_partition(topic.incarnation)
    found = context.catalog.get(where, layout.consumer_row(name))
    if not name or found is None or decode_registered(found).state != "ready":
        raise consumer_not_found(topic, name)


def consumer_not_found(topic: Topic, name: str, like: str = "") -> NotFoundError:
    """Returns the error for a consumer that the topic has not had; ``like`` names another one."""
    shown = name[:80]
    return NotFoundError(
        f"consumer `{shown}` of `{topic.name}`: not found{like}: see `tidelog consumer list "
        f"{topic.name}`, or create it with `tidelog consume {topic.name} --name {shown or 'NAME'}`"
    )
