"""A named playback: it can be stopped, or crash, and any process can resume it.

1. pin: the rows ``pin`` and ``state``, if there are none
2. take: owner and epoch + 1 in ``state``, by its version, if no living process has it
3. intend: ``state`` with the last event of the next lot, by our own version; the lot before, if
   there was one, counts as out from now on
4. put the lot into the sink; back to step 3
5. finish: ``state`` says that everything is out
6. forget: delete ``pin``; ``state`` becomes that of the name's next generation

| crash after | what is there                         | what happens next                          |
|-------------|---------------------------------------|--------------------------------------------|
| 1           | a playback without an owner           | any process resumes it                     |
| 2           | an owner that is silent               | another process, once the owner is dead    |
| 3           | a lot that is not, or partly, out     | the next process puts this lot, from its   |
|             |                                       | first event to its last, and continues     |
| 4           | a lot that is out, but not recorded   | the same; a topic shows that it has it     |
| 5           | a finished playback                   | nothing; a resume reports it               |
| 6           | a free name                           | nothing; see below                         |

The content of a lot follows from ``pin`` and the cursors around it, whichever process puts it,
minus what was deleted since; values may be updated. So the progress of a sink is a lot, never a
number of events in one: a transaction or a request is exactly one lot. In a topic a lot is one
commit per partition, by the producer ``:playback:<name>``, with numbers that follow from ``state``:
what the producer's row shows is stored. A process that takes over opens that producer again, so an
older process can no longer put anything. A file is locked while a process has it open. Into other
sinks the older process may still put the lot it has begun, and no other, because each lot is
intended first.

A forgotten name can be used again. Its row ``state`` stays forever, so no delayed packet can bring
a playback back, and it counts generations: what sinks know about an older one, such as its
producer, is never mistaken for the new one's.

**Names.** The registry lists names; only the rows of the playback itself decide.

1. begin: the name into the registry          → a name without a pin, which is not listed
2. begin: the rows ``pin`` and ``state``      → a playback without an owner
3. forget: take it, then step 6 above         → a name without a pin, which is not listed
4. forget: delete the name from the registry, by the version it had before step 3

A process that begins a playback writes the registry's row after reading ``state``, whose version
the pin expects. So a name that is begun while it is forgotten has a newer row than step 4 deletes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from tidelog.catalog.base import Change, Delete, Put, Row
from tidelog.catalog.update import Decision, Rows, update
from tidelog.clock import looks
from tidelog.concurrency import ProcessGuard, RefusingLock
from tidelog.context import Context
from tidelog.coordination.ownership import Silence, beating, write_held, write_repeatedly
from tidelog.errors import (
    ConflictError,
    FencedError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidelog.model import layout
from tidelog.model.playback import Cursor, PlaybackPin, PlaybackState, check_playback_name
from tidelog.model.topic import decode_row, encode_row

__all__ = [
    "KnownPlayback",
    "NamedPlayback",
    "find_playback",
    "forget_playback",
    "list_pins",
    "list_playbacks",
    "start_playback",
]

_LOOK_S = 0.2  # between looks at a playback that another process has


class NamedPlayback:
    """One process's ownership of a playback, in the generation of its pin."""

    def __init__(self, context: Context, name: str, generation: int = 1) -> None:
        self.name = name
        self.label = _label(name, generation)  # for sinks
        self._generation = generation
        self.state = PlaybackState()
        self._context = context
        self._id = context.ids.new()
        self._where = layout.playback_partition(name)
        self._version = ""
        self._silence = Silence(context)
        self._lock = threading.Lock()  # for a process's own heartbeats and intents
        self._process = ProcessGuard(f"playback `{name}`", self._leave_to_parent)

    def try_take(self) -> bool:
        """Step 2, if no living process has it, also if it is finished. Call it again to wait."""
        row = self._context.catalog.get(self._where, layout.PLAYBACK_STATE)
        if row is None:
            raise InvalidError(f"playback `{self.name}`: was never started: start it first")
        found = decode_row(row.value, PlaybackState, f"playback `{self.name}`")
        if found.generation != self._generation:
            raise InvalidError(f"playback `{self.name}`: was forgotten meanwhile: start it again")
        if found.finished_ms:
            self.state, self._version = found, row.version
            return True
        if found.owner and not self._can_take(found, row.version):
            return False
        taken = msgspec.structs.replace(
            found, owner=self._id, epoch=found.epoch + 1, mark=self._context.processes.mark()
        )
        return self._put(taken, row.version)

    def take(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Waits until it can be taken. Returns False if ``stopped`` returned True before."""
        while not self.try_take():
            if stopped():
                return False
            self._context.clock.sleep(_LOOK_S)
        return True

    def beat(self) -> None:
        """Sends a heartbeat. Raises ``FencedError`` if it is not ours any more."""
        with self._lock:
            self._change(self.state, beat=self.state.beat + 1)

    def intend(self, until: Cursor, number: int, reached: int = 0) -> None:
        """Step 3: intends the lot up to this event; ``number`` comes after it.

        ``reached`` is the length of a file before the lot. Raises ``FencedError`` like
        :meth:`beat`.
        """
        with self._lock:
            self._change(self._after_lot(), until=until, until_number=number, reached=reached)

    def finish(self, reached: int = 0) -> None:
        """Step 5, after the last lot."""
        finished_ms = max(1, self._context.clock.now_ms())
        with self._lock:
            self._change(
                self._after_lot(), owner="", mark="", reached=reached, finished_ms=finished_ms
            )

    def release(self, lot_is_out: bool, reached: int = 0) -> None:
        """Releases it, with what is known about the current lot.

        A playback that was lost needs no release, and a forked child has none to release.
        """
        if self._process.is_foreign:
            return
        with self._lock, contextlib.suppress(FencedError, UnavailableError, UnknownOutcomeError):
            if lot_is_out:
                self._change(self._after_lot(), owner="", mark="", reached=reached)
            else:
                self._change(self.state, owner="", mark="")

    def forget(self) -> None:
        """Step 6. Raises ``FencedError`` if another process has taken it since."""
        with self._lock:
            fresh = PlaybackState(generation=self._generation + 1)
            if not self._put(fresh, self._version, Delete(layout.PLAYBACK_PIN)):
                raise self._fenced_error()

    def beating(self) -> contextlib.AbstractContextManager[threading.Event]:
        """Sends heartbeats while the body runs. Sets the event if the playback is lost."""
        return beating(self._context, self.beat)

    def _leave_to_parent(self) -> None:
        """In a forked child: the state is the parent's to write."""
        self._lock = RefusingLock(self._process)  # type: ignore[assignment]

    def _after_lot(self) -> PlaybackState:
        """Returns the state with the current lot counted as out."""
        state = self.state
        if state.until is None:
            return state
        return msgspec.structs.replace(
            state, cursor=state.until, number=state.until_number, until=None
        )

    def _change(self, state: PlaybackState, **fields: object) -> None:
        """With the lock held: writes our state again, by our own version.

        The row may have the version of an earlier write of ours with an unknown outcome.
        """
        changed = msgspec.structs.replace(state, **fields)
        if self._put(changed, self._version):
            return
        row = self._context.catalog.get(self._where, layout.PLAYBACK_STATE)
        if row is None or not self._is_ours(row) or not self._put(changed, row.version):
            raise self._fenced_error()

    def _is_ours(self, row: Row) -> bool:
        found = decode_row(row.value, PlaybackState, f"playback `{self.name}`")
        ours = self._id, self.state.epoch, self._generation
        return (found.owner, found.epoch, found.generation) == ours

    def _fenced_error(self) -> FencedError:
        return FencedError(
            f"playback `{self.name}`: another process has claimed it, ours was epoch "
            f"{self.state.epoch}: stop this one"
        )

    def _put(self, state: PlaybackState, version: str, *others: Change) -> bool:
        """Writes by the version that we know. Returns False if another process was first."""
        self._process.check()
        wanted = Put(layout.PLAYBACK_STATE, encode_row(state), version)
        mine = write_held(self._context, self._where, f"playback `{self.name}`", wanted, *others)
        if mine is not None:
            self.state, self._version = state, mine
        return mine is not None

    def _can_take(self, state: PlaybackState, version: str) -> bool:
        return state.owner == self._id or self._silence.is_owner_dead(state.mark, version)


@dataclass(frozen=True, slots=True)
class KnownPlayback:
    """A playback as it is now."""

    name: str
    pinned: PlaybackPin
    state: PlaybackState
    is_played: bool  # by a process that is not known to be dead

    @property
    def label(self) -> str:
        """Returns the name that sinks and the audit know this playback by, and no other."""
        return _label(self.name, self.pinned.generation)

    @property
    def sent_nothing(self) -> bool:
        """Returns whether certainly no event has left: no lot was ever intended."""
        state = self.state
        is_own = state.generation == self.pinned.generation  # the rows are read one by one
        is_unused = state.until is None and state.cursor is None and not state.number
        return is_own and is_unused and not self.is_played

    @property
    def is_unconfirmed(self) -> bool:
        """Returns whether events may have left, but no lot is known to be out."""
        return self.state.cursor is None and not self.state.finished_ms


def find_playback(context: Context, name: str) -> PlaybackPin | None:
    """Returns the settings of the playback with this name, or None."""
    check_playback_name(name)
    row = context.catalog.get(layout.playback_partition(name), layout.PLAYBACK_PIN)
    return decode_row(row.value, PlaybackPin, f"playback `{name}`") if row else None


def start_playback(context: Context, name: str, wanted: PlaybackPin) -> PlaybackPin:
    """Steps 1 and 2. Of two at once, returns the settings of the first."""
    check_playback_name(name)
    where = layout.playback_partition(name)
    known = Put(layout.playback_row(name), name.encode())
    write_repeatedly(context, layout.REGISTRY, known)

    def decide(rows: Rows) -> Decision[PlaybackPin]:
        pin = rows[layout.PLAYBACK_PIN]
        if pin is not None:
            return Decision(decode_row(pin.value, PlaybackPin, f"playback `{name}`"))
        before = _state(name, rows[layout.PLAYBACK_STATE])
        state = PlaybackState(generation=before.generation)
        pinned = msgspec.structs.replace(wanted, generation=before.generation)
        changes = [
            rows.put(layout.PLAYBACK_PIN, encode_row(pinned)),
            rows.put(layout.PLAYBACK_STATE, encode_row(state)),
        ]
        return Decision(pinned, changes)

    names = [layout.PLAYBACK_PIN, layout.PLAYBACK_STATE]
    return update(context, where, names, decide, f"playback `{name}`")


def list_pins(context: Context) -> Iterator[tuple[str, PlaybackPin]]:
    """Yields the name and the settings of each named playback, by name."""
    for row in context.catalog.scan(layout.REGISTRY, layout.playback_row(""), "playback0"):
        name = row.value.decode()
        if (pinned := find_playback(context, name)) is not None:
            yield name, pinned


def list_playbacks(context: Context) -> Iterator[KnownPlayback]:
    """Lists all named playbacks by name, also finished ones."""
    for name, pinned in list_pins(context):
        found = context.catalog.get(layout.playback_partition(name), layout.PLAYBACK_STATE)
        state = _state(name, found)
        is_played = bool(state.owner) and not context.processes.is_dead(state.mark)
        yield KnownPlayback(name, pinned, state, is_played)


def forget_playback(context: Context, name: str) -> None:
    """Steps 3 and 4. What it has played stays. Raises ``NotFoundError``.

    Raises ``InvalidError`` while a process plays it; waits for one that is only silent.
    """
    known = context.catalog.get(layout.REGISTRY, layout.playback_row(name))
    pinned = find_playback(context, name)
    if pinned is None:
        raise NotFoundError(f"playback `{name}`: not found: nothing to forget")
    named = NamedPlayback(context, name, pinned.generation)
    times = looks(context.clock, context.log_settings.dead_after_s, _LOOK_S)
    if not any(named.try_take() for _ in times):
        raise InvalidError(
            f"playback `{name}`: a process plays it: stop that one, and forget it then"
        )
    named.forget()
    if known is not None:
        gone = Delete(known.row, known.version)
        with contextlib.suppress(ConflictError, UnknownOutcomeError):  # it is only for listing
            context.catalog.write(layout.REGISTRY, gone, write_id=context.ids.new())


def _label(name: str, generation: int) -> str:
    return name if generation == 1 else f"{name}~{generation}"


def _state(name: str, row: Row | None) -> PlaybackState:
    return decode_row(row.value, PlaybackState, f"playback `{name}`") if row else PlaybackState()
