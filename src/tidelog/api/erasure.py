# ruff: noqa: PLC0415 - archives and erasure take longer to import than the rest
"""Erasures of events from a topic: plan, delete, erase for good, and prove it.

Events that a home updates get into files of archives here too: their files are written again by the
same steps as for an erasure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypedDict, Unpack

from tidelog.api.base import HomeBase
from tidelog.context import Context
from tidelog.coordination.audit import Owner
from tidelog.coordination.pipeline_rows import read_archive
from tidelog.coordination.registry import check_shown
from tidelog.errors import InvalidError, NotFoundError
from tidelog.model import defaults
from tidelog.model.event import id_list
from tidelog.model.times import duration_ms
from tidelog.settings import check_options

if TYPE_CHECKING:
    from tidelog.erasure.delete import DeleteResult, ErasurePlan
    from tidelog.erasure.proof import Proof
    from tidelog.erasure.updates import ArchiveUpdate
    from tidelog.maintenance.erase import Erasure, ErasureWatch

__all__ = ["DeleteOptions", "EraseOptions", "ErasureCalls", "ProveOptions", "erase_wait_ms"]


class _TaskOptions(TypedDict, total=False):
    """Who does something to events, and on which machines."""

    who: str | None  # for the audit; default: user@host
    spark: str | None  # Spark master; tasks there search and rewrite files of archives
    spark_conf: Mapping[str, str] | None  # settings of Spark


class DeleteOptions(_TaskOptions, total=False):
    """How events are deleted."""

    incarnation: str  # delete from this topic only, and from no other that has the name now
    progress: Callable[[int], None] | None  # gets the bytes of each step of a search by key


class ProveOptions(_TaskOptions, total=False):
    """How bytes are removed and searched for."""

    wait: str | int | None  # for ranges of archives under way; default: 10 seconds
    watch: ErasureWatch | None  # follows it, and may stop it


class EraseOptions(DeleteOptions, total=False):
    """How events are erased: deleted, removed and searched for."""

    wait: str | int | None  # as in ``ProveOptions``
    watch: ErasureWatch | None


class ErasureCalls(HomeBase):
    """Erasure of events with its proof, and updates of archived events."""

    def plan_erase(
        self,
        topic: str,
        ids: str | Iterable[str] = (),
        *,
        key: bytes | None = None,
        archives: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> ErasurePlan:
        """Returns how many events :meth:`erase` would delete now, and where they are.

        Give ids, or a key, for which it reads the keys of the whole topic and calls ``progress``
        with the bytes of each run. Without ``archives`` it counts events of the topic alone, and
        searches no files of archives for what the topic has trimmed. Deletes nothing; if it meets
        a rewrite of archived files that died, it finishes that.

        >>> plan = home.plan_erase("orders", ["order-2", "order-9"])
        >>> plan.events, plan.partitions, plan.archives
        (1, {'orders/0': 1}, {'daily': 1})
        """
        from tidelog.erasure.delete import plan_erasure

        wanted = id_list(ids)
        lookup = self._lookups.of(self.topic(topic))
        told = progress or (lambda _: None)
        return plan_erasure(self.context, lookup, wanted, key, told, archives=archives)

    def erase(
        self,
        topic: str,
        ids: str | Iterable[str] = (),
        *,
        key: bytes | None = None,
        why: str = "",
        **options: Unpack[EraseOptions],
    ) -> Proof:
        """Erases events for good, from a topic and its archives, and returns the proof.

        Give ids, or the key of the events. All readers stop seeing them, the topic is compiled,
        files of archives are rewritten, what is left over is swept, and then every object that
        could hold them is searched (:meth:`purge_and_prove`). ``Proof.is_erased`` is True if
        nothing is left, and ``Proof.deleted`` says how many events were deleted and which ids had
        none. With ``spark``, a Spark master, tasks there read, search and rewrite.

        ``why`` and the proof's hash go to the audit, and ``Proof.save`` writes the proof to a file.
        To hide events now and let maintenance remove their bytes, use :meth:`delete`. An erasure
        that fails can be repeated.

        >>> proof = home.erase("orders", ["order-2", "order-9"], why="request 1234")
        >>> proof.is_erased, proof.deleted.events, proof.deleted.missing
        (True, 1, ('order-9',))
        """
        from tidelog.maintenance.erase import ErasureWatch, TopicEvents, erase_and_prove

        check_options("erase", options, EraseOptions, self.erase)
        wanted = id_list(ids)
        if bool(wanted) == (key is not None):
            raise _ids_or_key("erase")
        events = TopicEvents(wanted, () if key is None else (key,))
        context = self._context_of(topic, options)
        open_amender = partial(self.amender, topic, self.reason(why, options.get("who")))
        wait_ms, watch = erase_wait_ms(options), options.get("watch") or ErasureWatch()
        progress = options.get("progress") or _ignore
        return erase_and_prove(context, open_amender, events, wait_ms, watch, progress)

    def purge_and_prove(
        self,
        topic: str,
        ids: str | Iterable[str] = (),
        *,
        keys: Iterable[bytes] = (),
        why: str = "",
        deleted: DeleteResult | None = None,
        **options: Unpack[ProveOptions],
    ) -> Proof:
        """Removes the bytes of deleted events, searches for what is left, and records the proof.

        Waits for ranges of archives that were planned before the delete. Searches again if all
        that is left may be an append under way. ``deleted`` is the result of a delete of these ids
        and keys, for the proof: what it did not find, but a recovery of the topic would append, is
        then deleted too.

        >>> deleted = home.delete("orders", ["order-2"])
        >>> home.purge_and_prove("orders", ids=["order-2"], deleted=deleted).is_erased
        True
        """
        from tidelog.maintenance.erase import ErasureWatch, TopicEvents, purge_and_prove

        check_options("purge_and_prove", options, ProveOptions, self.purge_and_prove)
        spark, conf = options.get("spark"), options.get("spark_conf")
        context = self._with_tasks(f"erase {topic}", spark, conf)
        events = TopicEvents(id_list(ids), list(keys))
        amender = self.amender(topic, self.reason(why, options.get("who")))
        wait_ms, watch = erase_wait_ms(options), options.get("watch") or ErasureWatch()
        return purge_and_prove(context, amender, events, wait_ms, watch, deleted)

    def delete(
        self,
        topic: str,
        ids: str | Iterable[str] | None = None,
        *,
        key: bytes | None = None,
        why: str = "",
        **options: Unpack[DeleteOptions],
    ) -> DeleteResult:
        """Hides all events that have one of these ids, or a key, from readers; bytes go later.

        Give ids, or ``key``, as to :meth:`delete_key`. No reader that starts after this returned
        sees the events. Maintenance removes their bytes from the topic and from files of archives;
        :meth:`erase` does so at once, and proves it. For a single id, raises ``NotFoundError`` if
        neither the topic nor its archives have such an event. For several, the result lists the ids
        without an event. With ``spark``, a Spark master, tasks there search files of archives.

        >>> home.delete("orders", ["order-2", "order-3"], why="entered twice").events
        2
        """
        from tidelog.erasure.delete import DeleteResult, delete_events

        if (ids is None) == (key is None):
            raise _ids_or_key("delete")
        if key is not None:
            return self.delete_key(topic, key, why=why, **options)
        check_options("delete", options, DeleteOptions, self.delete)
        wanted = id_list(() if ids is None else ids)
        context = self._context_of(topic, options)
        if not wanted:
            return DeleteResult()
        amender = self.amender(topic, self.reason(why, options.get("who")))
        done = delete_events(context, amender, wanted)
        if isinstance(ids, str) and done.missing:
            raise NotFoundError(
                f"topic `{topic}`: has no event with id `{ids[:200]}`, nor have its archives: "
                "nothing was deleted: check the id",
                topic=topic,
            )
        return done

    def delete_key(
        self, topic: str, key: bytes, *, why: str = "", **options: Unpack[DeleteOptions]
    ) -> DeleteResult:
        """Deletes all events that have this key, up to the current ends, as ``delete`` does.

        Reads the keys of the whole topic, and calls ``progress`` with the bytes of each run.

        >>> home.delete_key("orders", b"customer-1").events
        2
        """
        from tidelog.erasure.delete import delete_key

        check_options("delete", options, DeleteOptions, self.delete_key)
        if not isinstance(key, bytes):
            raise InvalidError(f"key: is {type(key).__name__}: give bytes")
        context = self._context_of(topic, options)
        amender = self.amender(topic, self.reason(why, options.get("who")))
        return delete_key(context, amender, key, options.get("progress") or _ignore)

    def purge(
        self,
        topic: str,
        grace: str | int = "0s",
        *,
        wait: str | int = defaults.ERASE_WAIT,
        watch: ErasureWatch | None = None,
        spark: str | None = None,
        spark_conf: Mapping[str, str] | None = None,
    ) -> Erasure:
        """Removes the bytes of all deleted events of a topic and returns what was done.

        Compiles the topic, rewrites files of its archives, and sweeps. Objects younger than
        ``grace`` stay for readers that are under way. Waits for ranges of archives that may still
        write such an event; ``watch`` follows that. With ``spark``, a Spark master, tasks there
        make journals and rewrite files.

        >>> _ = home.delete("orders", "order-2")
        >>> home.purge("orders").compiled.journals
        1
        """
        from tidelog.maintenance.erase import purge

        context = self._with_tasks(f"erase {topic}", spark, spark_conf)
        return purge(context, self.topic(topic), duration_ms(grace), duration_ms(wait), watch)

    def prove_erased(
        self,
        topic: str,
        ids: str | Iterable[str] = (),
        *,
        keys: Iterable[bytes] = (),
        progress: Callable[[int], None] | None = None,
        spark: str | None = None,
        spark_conf: Mapping[str, str] | None = None,
    ) -> Proof:
        """Searches all objects that could hold erased events and returns what is left of them.

        ``progress`` gets the bytes of each object. With ``spark``, a Spark master, tasks there
        search the topic's objects and the files of archives. Changes no rows or objects. It
        removes what the files of a SQLite catalog still hold of deleted rows.

        >>> home.prove_erased("orders", ids=["order-1"]).is_erased
        False
        """
        from tidelog.erasure.proof_search import prove_erased

        wanted = id_list(ids)
        found = self.topic(topic)
        context = self._with_tasks(f"prove {topic}", spark, spark_conf)
        return prove_erased(context, found, wanted, list(keys), progress or _ignore)

    def record_proof(self, proof: Proof, *, why: str = "", who: str | None = None) -> None:
        """Writes the hash of a proof to the audit of its topic or archive, as ``erase`` does.

        A file of the proof can then be checked against the home: :meth:`has_proof`.

        >>> proof = home.prove_erased("orders", ids=["order-1"])
        >>> home.record_proof(proof, why="yearly check")
        >>> [record.proof.verdict for record in home.audit("orders")]
        ['not erased']
        """
        from tidelog.erasure.proof import record_proof

        record_proof(self.context, self._proved(proof), proof, self.reason(why, who))

    def has_proof(self, proof: Proof) -> bool:
        """Returns whether the audit of this home has the hash of a proof, such as a loaded one.

        >>> home.has_proof(home.erase("orders", ids=["order-2"]))
        True
        """
        from tidelog.erasure.proof import is_recorded

        return is_recorded(self.context, self._proved(proof), proof)

    def _context_of(self, topic: str, options: DeleteOptions | EraseOptions) -> Context:
        """Returns what a delete works with. Raises ``NotFoundError`` without the shown topic."""
        shown = options.get("incarnation", "")
        check_shown(f"topic `{topic}`", shown, self.topic(topic).incarnation)
        return self._with_tasks(f"erase {topic}", options.get("spark"), options.get("spark_conf"))

    def _proved(self, proof: Proof) -> Owner:
        """Returns the topic or archive that a proof is about."""
        if proof.archive:
            return read_archive(self.context, proof.archive)
        return self.topic(proof.topic)

    def update_archives(self, topic: str, ids: Iterable[str]) -> list[ArchiveUpdate]:
        """Gives archived events the values that the topic has now; returns what was changed.

        Rewrites the files of the topic's archives that hold these ids, under their names, and
        corrects their tables. ``unchanged`` of a result says why files keep the old values. An
        event keeps its folder. Safe to kill and to repeat: files with the values stay as they are.
        Raises ``NotFoundError`` if the topic has none of these events.

        >>> home.update("orders", "order-2", b"corrected")
        >>> [each.events for each in home.update_archives("orders", ["order-2"])]
        [1]
        """
        from tidelog.erasure.updates import update_archives

        wanted = id_list(ids)
        return update_archives(self.context, self._lookups.of(self.topic(topic)), wanted)


def erase_wait_ms(options: ProveOptions | EraseOptions) -> int:
    """Returns how long an erasure waits for ranges of archives under way; 0 if it must not."""
    wait = options.get("wait")
    return duration_ms(defaults.ERASE_WAIT if wait is None else wait)


def _ids_or_key(call: str) -> InvalidError:
    return InvalidError(f"{call}: give ids or a key")


def _ignore(_: object) -> None:
    """A report that has no reader."""
