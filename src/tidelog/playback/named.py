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
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import msgspec

from tidelog.catalog.base import Change, Delete, Put, Row
from tidelog.errors import FencedError, InvalidError, UnavailableError, UnknownOutcomeError
from tidelog.forks import ProcessGuard, RefusingLock
from tidelog.log.base import Log
from tidelog.log.hold import Silence, beating, write_held
from tidelog.model import layout
from tidelog.model.playback import Cursor, PlaybackState
from tidelog.model.run import decode_row, encode_row

__all__ = ["NamedPlayback"]

_LOOK_S = 0.2  # between looks at a playback that another process has


class NamedPlayback:
    """One process's hold on a playback that was started, in the generation of its pin."""

    def __init__(self, log: Log, name: str, generation: int = 1) -> None:
        self.name = name
        self.label = name if generation == 1 else f"{name}~{generation}"  # for sinks
        self._generation = generation
        self.state = PlaybackState()
        self._log = log
        self._id = log.ids.new()
        self._where = layout.playback_partition(name)
        self._version = ""
        self._silence = Silence(log)
        self._lock = threading.Lock()  # of a process's own beats and intents
        self._process = ProcessGuard(f"playback `{name}`", self._leave_to_parent)

    def try_take(self) -> bool:
        """Step 2, if nobody living has it; also one that is finished. Call it again to wait."""
        row = self._log.catalog.get(self._where, layout.PLAYBACK_STATE)
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
            found, owner=self._id, epoch=found.epoch + 1, mark=self._log.processes.mark()
        )
        return self._put(taken, row.version)

    def take(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Wait until it can be taken; False when ``stopped`` said so before."""
        while not self.try_take():
            if stopped():
                return False
            self._log.clock.sleep(_LOOK_S)
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
        finished_ms = max(1, self._log.clock.now_ms())
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
        return beating(self._log, self.beat)

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
        row = self._log.catalog.get(self._where, layout.PLAYBACK_STATE)
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
        mine = write_held(self._log, self._where, f"playback `{self.name}`", wanted, *others)
        if mine is not None:
            self.state, self._version = state, mine
        return mine is not None

    def _is_over(self, state: PlaybackState, version: str) -> bool:
        return state.owner == self._id or self._silence.is_over(state.mark, version)
