"""A playback with a name: it can be stopped, or die, and be resumed by any process.

1. pin: the rows ``pin`` and ``state``, where there are none
2. take: owner and epoch + 1 in ``state``, by the version that was read, if nobody living has it
3. intend: ``state`` with the last event of the next lot, by our own version; the lot before, if
   there was one, counts as out from here on
4. put the lot into the sink; back to step 3
5. finish: ``state`` says that all is out
6. forget: ``pin`` goes, and ``state`` becomes that of the name's next generation

| dies after | what is there                         | who goes on                                |
|------------|---------------------------------------|--------------------------------------------|
| 1          | a playback that nobody drives         | the next who resumes it                    |
| 2          | an owner that is silent               | the next, when it is seen to be dead       |
| 3          | a lot that is not, or partly, out     | the next puts this lot, from its first     |
|            |                                       | event to its last, and goes on             |
| 4          | a lot that is out, and not known to be| the same; a topic shows it has it already  |
| 5          | a finished playback                   | nobody needs to; who resumes it is told so |
| 6          | a name that is free                   | nobody needs to; see ``names``             |

What a lot holds follows from ``pin`` and from the cursors around it, whoever puts it, less what was
deleted since; values may be updated. So how far a sink came is a lot, never a number of events
inside of one: a transaction, or a request, is a lot of its own. Into a topic
a lot goes by one commit for each partition, under the producer ``:playback:<name>`` and with
numbers that follow from ``state``: what its row there shows is stored. Who takes it over opens
that producer anew, so that an older process can put nothing any more; into other sinks that one may
put the lot it has begun, and no other, as each lot is intended first.

A name that was forgotten may be begun again. Its row ``state`` stays for good, so that no delayed
repeat can bring a playback back, and counts generations: what sinks know of an older one, such as
its producer, is not taken for the new one's.

Playbacks by their names: begun, found, listed and forgotten.

A name is in the registry so that it can be listed; what counts are the rows of the playback itself.

1. begin: the name into the registry          → a name without a pin, which is not listed
2. begin: the rows ``pin`` and ``state``      → a playback that nobody drives
3. forget: take it, then step 6 of ``named``  → a name without a pin, which is not listed
4. forget: the name out of the registry, by the version that it had before step 3

Who begins writes the registry's row after a look at ``state``, whose version the pin expects. So a
name that is begun while it is forgotten has a newer row than the one that step 4 would remove.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from tidelog.catalog.base import ABSENT, Change, Delete, Put, Row
from tidelog.context import Context
from tidelog.coordination.ownership import Silence, beating, write_held
from tidelog.errors import (
    ConflictError,
    FencedError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.model import layout
from tidelog.model.partition_rows import decode_row, encode_row
from tidelog.model.playback import Cursor, PlaybackPin, PlaybackState, check_playback_name
from tidelog.process import ProcessGuard, RefusingLock

__all__ = [
    "KnownPlayback",
    "NamedPlayback",
    "find_playback",
    "forget_playback",
    "list_playbacks",
    "start_playback",
]

_LOOK_S = 0.2  # between looks at a playback that another process has


class NamedPlayback:
    """One process's hold on a playback that was started, in the generation of its pin."""

    def __init__(self, context: Context, name: str, generation: int = 1) -> None:
        self.name = name
        self.label = name if generation == 1 else f"{name}~{generation}"  # for sinks
        self._generation = generation
        self.state = PlaybackState()
        self._context = context
        self._id = context.ids.new()
        self._where = layout.playback_partition(name)
        self._version = ""
        self._silence = Silence(context)
        self._lock = threading.Lock()  # of a process's own beats and intents
        self._process = ProcessGuard(f"playback `{name}`", self._leave_to_parent)

    def try_take(self) -> bool:
        """Step 2, if nobody living has it; also one that is finished. Call it again to wait."""
        row = self._context.catalog.get(self._where, layout.PLAYBACK_STATE)
        if row is None:
            raise InvalidError(f"playback `{self.name}`: was never started: start it first")
        found = decode_row(row.value, PlaybackState, f"playback `{self.name}`")
        if found.generation != self._generation:
            raise InvalidError(f"playback `{self.name}`: was forgotten meanwhile: begin it anew")
        if found.finished_ms:
            self.state, self._version = found, row.version
            return True
        if found.owner and not self._is_over(found, row.version):
            return False
        taken = msgspec.structs.replace(
            found, owner=self._id, epoch=found.epoch + 1, mark=self._context.processes.mark()
        )
        return self._put(taken, row.version)

    def take(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Wait until it can be taken; False when ``stopped`` said so before."""
        while not self.try_take():
            if stopped():
                return False
            self._context.clock.sleep(_LOOK_S)
        return True

    def beat(self) -> None:
        """Say that we are alive, and see that it is ours. ``FencedError`` when it is not."""
        with self._lock:
            self._change(self.state, beat=self.state.beat + 1)

    def intend(self, until: Cursor, number: int, reached: int = 0) -> None:
        """Step 3: the lot up to this event is next, and after it comes that number.

        ``reached`` is how long a file was before it. ``FencedError`` as for :meth:`beat`.
        """
        with self._lock:
            self._change(self._moved(), until=until, until_number=number, reached=reached)

    def finish(self, reached: int = 0) -> None:
        """Step 5, when the lot under way was the last."""
        finished_ms = max(1, self._context.clock.now_ms())
        with self._lock:
            self._change(self._moved(), owner="", mark="", reached=reached, finished_ms=finished_ms)

    def release(self, lot_is_out: bool, reached: int = 0) -> None:
        """Let it go, with what is known of the lot under way.

        One that was lost needs none, and a forked child has none to release.
        """
        if self._process.is_foreign:
            return
        with self._lock, contextlib.suppress(FencedError, UnavailableError, UnknownOutcomeError):
            if lot_is_out:
                self._change(self._moved(), owner="", mark="", reached=reached)
            else:
                self._change(self.state, owner="", mark="")

    def forget(self) -> None:
        """Step 6. ``FencedError`` when another process has taken it since."""
        with self._lock:
            fresh = PlaybackState(generation=self._generation + 1)
            if not self._put(fresh, self._version, Delete(layout.PLAYBACK_PIN)):
                raise self._fenced()

    def beating(self) -> contextlib.AbstractContextManager[threading.Event]:
        """Heartbeats while the body runs; the event is set when the playback was lost."""
        return beating(self._context, self.beat)

    def _leave_to_parent(self) -> None:
        """In a forked child: the state is the parent's to write."""
        self._lock = RefusingLock(self._process)  # type: ignore[assignment]

    def _moved(self) -> PlaybackState:
        """The state with the lot under way counted as out."""
        state = self.state
        if state.until is None:
            return state
        return msgspec.structs.replace(
            state, cursor=state.until, number=state.until_number, until=None
        )

    def _change(self, state: PlaybackState, **fields: object) -> None:
        """With the lock held: write our state again, by our own version.

        The row may have that of an earlier write of ours, of which the outcome was not known.
        """
        changed = msgspec.structs.replace(state, **fields)
        if self._put(changed, self._version):
            return
        row = self._context.catalog.get(self._where, layout.PLAYBACK_STATE)
        if row is None or not self._is_ours(row) or not self._put(changed, row.version):
            raise self._fenced()

    def _is_ours(self, row: Row) -> bool:
        found = decode_row(row.value, PlaybackState, f"playback `{self.name}`")
        ours = self._id, self.state.epoch, self._generation
        return (found.owner, found.epoch, found.generation) == ours

    def _fenced(self) -> FencedError:
        return FencedError(
            f"playback `{self.name}`: another process has taken it, ours was epoch "
            f"{self.state.epoch}: stop this one"
        )

    def _put(self, state: PlaybackState, version: str, *others: Change) -> bool:
        """Write by the version that we know; False when somebody else was first."""
        self._process.check()
        wanted = Put(layout.PLAYBACK_STATE, encode_row(state), version)
        mine = write_held(self._context, self._where, f"playback `{self.name}`", wanted, *others)
        if mine is not None:
            self.state, self._version = state, mine
        return mine is not None

    def _is_over(self, state: PlaybackState, version: str) -> bool:
        return state.owner == self._id or self._silence.is_over(state.mark, version)


_ATTEMPTS = 20  # of one write whose replies get lost


@dataclass(frozen=True, slots=True)
class KnownPlayback:
    """A playback as it stands now."""

    name: str
    pinned: PlaybackPin
    state: PlaybackState
    is_played: bool  # by a process that is not known to be dead


def find_playback(context: Context, name: str) -> PlaybackPin | None:
    """What a playback of this name was told, or None where there is none."""
    check_playback_name(name)
    row = context.catalog.get(layout.playback_partition(name), layout.PLAYBACK_PIN)
    return decode_row(row.value, PlaybackPin, f"playback `{name}`") if row else None


def start_playback(context: Context, name: str, wanted: PlaybackPin) -> PlaybackPin:
    """Steps 1 and 2; of two at once, what the first one was told."""
    check_playback_name(name)
    where = layout.playback_partition(name)
    for attempt in range(_ATTEMPTS):
        row = context.catalog.get(where, layout.PLAYBACK_STATE)
        before = _state(name, row)
        state = PlaybackState(generation=before.generation)
        pinned = msgspec.structs.replace(wanted, generation=before.generation)
        known = Put(layout.playback_row(name), name.encode())
        changes = (
            Put(layout.PLAYBACK_PIN, encode_row(pinned), ABSENT),
            Put(layout.PLAYBACK_STATE, encode_row(state), row.version if row else ABSENT),
        )
        with contextlib.suppress(ConflictError, UnknownOutcomeError):
            context.catalog.write(layout.REGISTRY, known, write_id=context.ids.new())
            context.catalog.write(where, *changes, write_id=context.ids.new())
        found = find_playback(context, name)
        if found is not None:
            return found
        context.clock.sleep(0.01 * attempt)
    raise UnavailableError(f"playback `{name}`: replies keep getting lost: try again")


def list_playbacks(context: Context) -> Iterator[KnownPlayback]:
    """All that have names, by name, also those that are finished."""
    for row in context.catalog.scan(layout.REGISTRY, layout.playback_row(""), "playback0"):
        name = row.value.decode()
        pinned = find_playback(context, name)
        if pinned is None:
            continue
        found = context.catalog.get(layout.playback_partition(name), layout.PLAYBACK_STATE)
        state = _state(name, found)
        is_played = bool(state.owner) and not context.processes.is_dead(state.mark)
        yield KnownPlayback(name, pinned, state, is_played)


def forget_playback(context: Context, name: str) -> None:
    """Steps 3 and 4; what it has played stays where it is. ``NotFoundError``.

    ``InvalidError`` while a process plays it; one that is only silent is waited for.
    """
    known = context.catalog.get(layout.REGISTRY, layout.playback_row(name))
    pinned = find_playback(context, name)
    if pinned is None:
        raise NotFoundError(f"playback `{name}`: not found: nothing to forget")
    named = NamedPlayback(context, name, pinned.generation)
    deadline_s = context.clock.monotonic_s() + 1.5 * context.settings.lease_ttl_ms / 1000
    if not named.take(lambda: context.clock.monotonic_s() > deadline_s):
        raise InvalidError(
            f"playback `{name}`: a process plays it: stop that one, and forget it then"
        )
    named.forget()
    if known is not None:
        gone = Delete(known.row, known.version)
        with contextlib.suppress(ConflictError, UnknownOutcomeError):  # it is only for listing
            context.catalog.write(layout.REGISTRY, gone, write_id=context.ids.new())


def _state(name: str, row: Row | None) -> PlaybackState:
    return decode_row(row.value, PlaybackState, f"playback `{name}`") if row else PlaybackState()
