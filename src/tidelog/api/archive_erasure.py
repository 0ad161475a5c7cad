"""Erasure of events from an archive without a topic, and its proof."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, Unpack, overload

from tidelog.api.archive_view import ArchiveView
from tidelog.api.erasure import ProveOptions, erase_wait_ms
from tidelog.api.spark_workers import with_tasks
from tidelog.coordination.audit import Why, user_at_host
from tidelog.erasure.delete import ErasurePlan, plan_archive_erasure
from tidelog.erasure.delete_archived import ErasedFromArchives, erase_archived
from tidelog.erasure.proof import Proof
from tidelog.erasure.proof_search import prove_erased_from_archive
from tidelog.errors import InvalidError
from tidelog.maintenance.erase import ArchivedEvents, ErasureWatch, erase_archived_and_prove
from tidelog.model.event import id_list
from tidelog.settings import check_options

__all__ = ["ErasableArchive"]


class ErasableArchive(ArchiveView):
    """What erases events from an archive, its files and its copies."""

    @overload
    def erase(
        self,
        ids: str | Iterable[str] = ...,
        *,
        key: bytes | None = ...,
        why: str = ...,
        prove: Literal[True] = ...,
        **options: Unpack[ProveOptions],
    ) -> Proof: ...

    @overload
    def erase(
        self,
        ids: str | Iterable[str] = ...,
        *,
        key: bytes | None = ...,
        why: str = ...,
        prove: Literal[False],
        **options: Unpack[ProveOptions],
    ) -> ErasedFromArchives: ...

    def erase(
        self,
        ids: str | Iterable[str] = (),
        *,
        key: bytes | None = None,
        why: str = "",
        prove: bool = True,
        **options: Unpack[ProveOptions],
    ) -> Proof | ErasedFromArchives:
        """Erases events from the files of the archive and of its copies, and returns the proof.

        Give ids, or a key. For an archive of another system, or of a topic that was deleted: while
        the topic exists, :meth:`Home.erase` erases from its archives too. Files are rewritten, what
        is left over is swept, and then every object that could hold the events is searched. The
        proof covers archives that this one was made of, and others of the same source: it names
        those that still hold one of the events. ``wait`` is how long to wait for ranges that may
        still write such an event. With ``spark``, a Spark master, tasks there search and rewrite.

        ``why``, ``who`` and the proof's hash go to the archive's audit. With ``prove=False`` it
        rewrites the files without a proof: it waits for no range, sweeps nothing, and returns what
        it found. A call that fails can be repeated.

        >>> home.delete_topic("orders")
        >>> proof = home.archives.get("daily").erase(ids=["order-3"], why="request 1234")
        >>> proof.verdict, proof.archive, proof.deleted.archived
        ('erased', 'daily', 1)
        >>> home.archives.get("daily").erase(ids=["order-2"], prove=False).events
        1
        """
        check_options("archive erase", options, ProveOptions, self.erase)
        wanted = id_list(ids)
        if bool(wanted) == (key is not None):
            raise InvalidError("archive erase: give ids or a key")
        who = options.get("who")
        because = Why(user_at_host(self._context.environ) if who is None else who, why)
        spark, conf = options.get("spark"), options.get("spark_conf")
        context = with_tasks(self._context, f"erase {self.name}", spark, conf)
        archive = self.reload()
        if not prove:
            return erase_archived(context, archive, because, wanted, key)
        wait_ms = erase_wait_ms(options)
        watch, events = options.get("watch") or ErasureWatch(), ArchivedEvents(archive, wanted, key)
        return erase_archived_and_prove(context, events, because, wait_ms, watch)

    def plan_erase(self, ids: str | Iterable[str] = (), *, key: bytes | None = None) -> ErasurePlan:
        """Returns how many events :meth:`erase` would erase now, and where they are.

        Searches the files of the archive and of its copies. Erases nothing; if it meets a rewrite
        of files that died, it finishes that.

        >>> plan = home.archives.get("daily").plan_erase(ids=["order-2", "order-9"])
        >>> plan.partitions, plan.archives
        ({'orders/0': 1}, {'daily': 1})
        """
        wanted = id_list(ids)
        return plan_archive_erasure(self._context, self.reload(), wanted, key)

    def prove_erased(
        self,
        ids: str | Iterable[str] = (),
        *,
        keys: Iterable[bytes] = (),
        progress: Callable[[int], None] | None = None,
        spark: str | None = None,
        spark_conf: Mapping[str, str] | None = None,
    ) -> Proof:
        """Searches all objects that could hold erased events and returns what is left of them.

        For events that :meth:`erase` has erased. ``progress`` gets the bytes of each object. With
        ``spark``, a Spark master, tasks there search the files of archives. Changes no rows or
        objects. It removes what the files of a SQLite catalog still hold of deleted rows.
        :meth:`Home.record_proof` writes the proof's hash to the archive's audit.

        >>> home.delete_topic("orders")
        >>> home.archives.get("daily").prove_erased(ids=["order-1"]).verdict
        'not erased'
        """
        wanted = id_list(ids)
        context = with_tasks(self._context, f"prove {self.name}", spark, spark_conf)
        archive, tell = self.reload(), progress or (lambda _: None)
        return prove_erased_from_archive(context, archive, wanted, list(keys), tell)
