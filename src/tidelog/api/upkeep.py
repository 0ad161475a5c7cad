"""What a home does as a whole: erase events for good, maintain itself, drive what it has.

Archives and pipelines are imported when they are needed: that takes longer than all the rest.
"""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack, overload

from tidelog.context import Context
from tidelog.coordination.registry import check_shown
from tidelog.coordination.supervisors import SupervisedPart
from tidelog.errors import InvalidError
from tidelog.journal.amend.amend import Amender
from tidelog.journal.audit import Why
from tidelog.journal.compile.policy import CompilePolicy
from tidelog.journal.scribe import ScribeOptions, Turn
from tidelog.model.times import duration_ms
from tidelog.model.topic import Topic

if TYPE_CHECKING:
    from tidelog.erasure.from_archives import DeleteResult
    from tidelog.erasure.proof import Proof
    from tidelog.maintenance.erase import Erasure
    from tidelog.pipeline.base import Workers

__all__ = ["EraseOptions", "UpkeepCalls"]


class EraseOptions(TypedDict, total=False):
    """How events are erased."""

    who: str | None  # for the audit; default: user@host
    incarnation: str  # erase from this topic only, and from no other that has the name now
    progress: Callable[[int], None]  # gets the bytes of each step of a search by key


class UpkeepCalls(ABC):
    """Erasure with its proof, one turn of maintenance, and the drivers of all pipelines."""

    context: Context

    @abstractmethod
    def topic(self, name: str) -> Topic:
        """The topic of this name. ``NotFoundError``."""

    @abstractmethod
    def amender(self, topic: str, why: Why) -> Amender:
        """What amends events of a topic."""

    @abstractmethod
    def reason(self, why: str = "", who: str | None = None) -> Why:
        """What audit records say of a call."""

    @abstractmethod
    def scribe_once(self, how: ScribeOptions | None = None) -> Turn | None:
        """One turn of the scribe."""

    @overload
    def erase(
        self,
        topic: str,
        *,
        ids: Iterable[str] = ...,
        key: bytes | None = ...,
        why: str = ...,
        prove: Literal[True] = ...,
        **options: Unpack[EraseOptions],
    ) -> Proof: ...

    @overload
    def erase(
        self,
        topic: str,
        *,
        ids: Iterable[str] = ...,
        key: bytes | None = ...,
        why: str = ...,
        prove: Literal[False],
        **options: Unpack[EraseOptions],
    ) -> DeleteResult: ...

    def erase(
        self,
        topic: str,
        *,
        ids: Iterable[str] = (),
        key: bytes | None = None,
        why: str = "",
        prove: bool = True,
        **options: Unpack[EraseOptions],
    ) -> Proof | DeleteResult:
        """Erase events for good, from a topic and its archives, and return the proof.

        Give ids, or the key of the events. All readers stop seeing them, the topic is compiled,
        files of archives are rewritten, what is left over is swept, and then every object that
        could hold them is searched. ``Proof.is_erased`` is True if nothing is left.

        With ``prove=False`` it returns once the events are deleted; maintenance removes their bytes
        later. ``why`` goes to the audit. An erasure that fails can be repeated.

        >>> proof = home.erase("orders", ids=["order-2"], why="request 1234")
        >>> proof.is_erased, proof.known
        (True, True)
        """
        from tidelog.erasure.from_archives import delete_events, delete_key

        wanted = [ids] if isinstance(ids, str) else list(ids)
        if bool(wanted) == (key is not None):
            raise InvalidError("erase: give ids or a key")
        shown = options.get("incarnation", "")
        check_shown(f"topic `{topic}`", shown, self.topic(topic).incarnation)
        amender = self.amender(topic, self.reason(why, options.get("who")))
        if key is not None:
            progress = options.get("progress", _ignore)
            deleted = delete_key(self.context, amender, key, progress)
        else:
            deleted = delete_events(self.context, amender, wanted)
        if not prove:
            return deleted
        self.purge(topic)
        return self.prove_erased(topic, ids=wanted, keys=() if key is None else (key,))

    def purge(self, topic: str, grace: str | int = "0s") -> Erasure:
        """Remove the bytes of all deleted events of a topic and return what was done.

        Compiles the topic, rewrites files of its archives, and sweeps. Objects younger than
        ``grace`` stay for readers that are under way.

        >>> _ = home.delete("orders", "order-2")
        >>> home.purge("orders").compiled.journals
        1
        """
        from tidelog.maintenance.erase import carry_out

        return carry_out(self.context, self.topic(topic), duration_ms(grace))

    def prove_erased(
        self,
        topic: str,
        *,
        ids: Iterable[str] = (),
        keys: Iterable[bytes] = (),
        progress: Callable[[int], None] | None = None,
    ) -> Proof:
        """Search all objects that could hold erased events and return what is left of them.

        ``progress`` gets the bytes of each object. Changes nothing.

        >>> home.prove_erased("orders", ids=["order-1"]).is_erased
        False
        """
        from tidelog.erasure.proof import prove_erased

        wanted = [ids] if isinstance(ids, str) else list(ids)
        found = self.topic(topic)
        return prove_erased(self.context, found, wanted, list(keys), progress or _ignore)

    def maintain(
        self,
        budget_s: float = 300.0,
        *,
        grace: str | int | None = "1h",
        policy: CompilePolicy | None = None,
    ) -> Turn | None:
        """Do one turn of what a home needs: compile, erase from archives, sweep.

        Returns what was done, or None while another process does it. After ``budget_s`` the next
        turn goes on where this one ended. Sweeps leave what is younger than ``grace``; with None
        there is no sweep. Call it from cron or a function; ``tidelog up`` calls it for you.

        >>> turn = home.maintain(budget_s=60)
        >>> turn.succeeded
        True
        """
        how = ScribeOptions(
            policy=policy or CompilePolicy(),
            budget_ms=round(budget_s * 1000),
            grace_ms=None if grace is None else duration_ms(grace),
            sweep_every_ms=0,
        )
        return self.scribe_once(how)

    def follow(
        self,
        stop: threading.Event,
        *,
        spark: str | None = None,
        spark_conf: Mapping[str, str] | None = None,
        report: Callable[[SupervisedPart], None] | None = None,
    ) -> None:
        """Drive all archives and pumps of the home until ``stop`` is set.

        One that fails is tried again and does not stop the others. What is created meanwhile is
        found within seconds. All share one Spark session where ``spark`` is a master. ``report``
        gets the state of each, from any thread.

        >>> import threading
        >>> stop = threading.Event()
        >>> stop.set()
        >>> home.follow(stop)
        """
        from tidelog.api.runs import open_workers
        from tidelog.maintenance.follower import Follower

        lock = threading.Lock()

        @functools.cache
        def opened() -> Workers:
            return open_workers("follow", spark, spark_conf)

        def workers() -> Workers:
            with lock:  # one session for all
                return opened()

        Follower(self.context, workers, report or _ignore, stop).run()


def _ignore(_: object) -> None:
    """A report that has no reader."""
