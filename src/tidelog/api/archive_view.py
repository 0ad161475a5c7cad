"""What can be looked at in an archive without changing it, and its Delta and Iceberg tables."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from tidelog.api.spark_workers import with_tasks
from tidelog.archive.archive import committed_files, find_archive
from tidelog.archive.dead_letters import ReplayOptions, ReplayPlan, dead_letters, plan_replay
from tidelog.archive.derived_archives import copies_of
from tidelog.archive.metrics import ArchiveHistory, metrics_text, read_history
from tidelog.archive.read import FindResult, ReadRequest, archived_rows, find_event
from tidelog.archive.restore import restore_limit
from tidelog.archive.status import ArchiveStatus, Limits, WaitingTimes, read_status, troubles
from tidelog.archive.table_files import RegisterResult, TableStatus
from tidelog.archive.tables import (
    change_tables,
    forget_table,
    register_table,
    repair_tables,
    resolve_table,
    table_status,
)
from tidelog.archive.verify import verify_generations
from tidelog.archive.verify_checks import ArchiveVerifyOptions, ArchiveVerifyReport
from tidelog.connectors.by_url import open_source, store_at
from tidelog.connectors.source import GroupSource, SourcePartition
from tidelog.context import Context
from tidelog.coordination.audit import AuditRecord, read_audit, record_action
from tidelog.coordination.pipeline_rows import is_detached, read_partitions, read_progress
from tidelog.coordination.registry import check_shown
from tidelog.erasure.rewrite import finish_rewrites
from tidelog.errors import InvalidError, raise_first
from tidelog.model.archive import Archive
from tidelog.store import Store

__all__ = ["ArchiveTables", "ArchiveView", "CommittedFile", "FolderEntry", "FolderPage"]

_ENTRIES_MAX = 500  # of a folder in one page


@dataclass(frozen=True, slots=True)
class CommittedFile:
    """A file of an archive that counts."""

    kind: str  # data, dead, …
    path: str  # in the archive's store
    partition: str  # of the source
    events: int
    first_offset: int
    last_offset: int
    bytes: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """A file in an archive's folder, or a folder in it."""

    name: str
    size: int | None = None  # None: a folder
    modified_ms: int = 0

    @property
    def place(self) -> str:
        """Where the next page begins after this one: a folder and a file may share a name."""
        return f"{self.name}/" if self.size is None else self.name


@dataclass(frozen=True, slots=True)
class FolderPage:
    """Some entries of a folder, and where the next page begins; None after the last."""

    prefix: str  # of the folder in the archive's store
    entries: tuple[FolderEntry, ...]
    following: str | None


class ArchiveView:
    """An archive as its readers see it: how it does, and what it holds."""

    def __init__(self, context: Context, info: Archive) -> None:
        self.name = info.name
        self.info = info  # its settings and state, when they were last read
        self._context = context

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def _record(self, op: str, note: str = "", who: str = "") -> None:
        """Puts an action into the home's audit; call it before the action."""
        record_archive_action(self._context, self.name, op, note, who)

    def reload(self) -> Archive:
        """Reads the archive's settings and state, keeps them in ``info``, and returns them.

        >>> home.archives.get("daily").reload().generation
        1
        """
        found = find_archive(self._context, self.name)
        check_shown(f"archive `{self.name}`", self.info.incarnation, found.incarnation)
        self.info = found
        return found

    def status(
        self, generation: int | None = None, waiting: WaitingTimes | None = None
    ) -> ArchiveStatus:
        """Returns how far the archive is, what waits, and what fails, by source partition.

        ``generation`` is the live one by default. ``waiting`` is kept by a caller that asks again
        and again, so that the source is not asked for the same events.

        >>> status = home.archives.get("daily").status()
        >>> status.lag, [each.position for each in status.partitions]
        (0, ['3'])
        """
        return read_status(self._context, self.reload(), generation, waiting)

    def check(self, limits: Limits | None = None, generation: int | None = None) -> list[str]:
        """Returns what is wrong with the archive, a line for each trouble; none: it is healthy.

        >>> home.archives.get("daily").check()
        []
        """
        return troubles(self.status(generation), limits or Limits())

    def publish_offsets(self, group: str) -> int:
        """Publishes the archive's positions as offsets of a Kafka consumer group; returns how many.

        For tools that watch consumer groups: the archive itself never reads them. Raises
        ``InvalidError`` for other sources, and for a group that consumers are in.

        >>> home.archives.get("daily").publish_offsets("tidelog-daily")
        Traceback (most recent call last):
        tidelog.errors.InvalidError: archive `daily`: its source `topic:orders` has no consumer ...
        """
        info, context = self.reload(), self._context
        source = open_source(
            info.source,
            environ=context.environ,
            open_context=lambda: contextlib.nullcontext(context),
        )
        if not isinstance(source, GroupSource):
            raise InvalidError(
                f"archive `{info.name}`: its source `{info.source}` has no consumer groups: "
                "leave the group out"
            )
        positions = {}
        pipeline = info.pipeline(info.generation)
        for text in read_partitions(context, pipeline):
            progress = read_progress(context, pipeline, text)
            if progress is not None:
                positions[SourcePartition.named(text)] = progress.position
        source.publish_offsets(group, positions)
        return len(positions)

    def metrics(self, waiting: WaitingTimes | None = None) -> str:
        """Returns the archive's Prometheus metrics; ``waiting`` as in :meth:`status`.

        >>> "tidelog_archive" in home.archives.get("daily").metrics()
        True
        """
        return metrics_text(self._context, [self.reload()], waiting)

    def verify(
        self,
        *,
        deep: bool = False,
        source: bool = False,
        generation: int | None = None,
        progress: Callable[[int], None] | None = None,
        spark: str | None = None,
        spark_conf: Mapping[str, str] | None = None,
    ) -> ArchiveVerifyReport:
        """Compares rows, manifests and files and returns what was found.

        Checks all generations, or the one that is given. The counts are those of the live one.
        With ``source`` the source is asked how many events there were, and with ``deep`` every file
        is read; ``progress`` then gets the bytes of each. With ``spark``, a Spark master, tasks
        there read the files. Changes nothing. ``problem_count`` is 0 for an archive that is as it
        should be.

        >>> report = home.archives.get("daily").verify(deep=True)
        >>> report.events, report.problem_count
        (3, 0)
        """
        how = ArchiveVerifyOptions(generation, source, deep, progress or (lambda _: None))
        context = with_tasks(self._context, f"verify {self.name}", spark, spark_conf)
        return verify_generations(context, self.reload(), how)

    def stored_bytes(self, generation: int | None = None) -> int:
        """Returns the size of all files in a generation's folder.

        >>> home.archives.get("daily").stored_bytes() > 0
        True
        """
        found = self.reload()
        found.format_of(generation)
        files = store_at(self._context, found.store).list(f"{found.folder(generation)}/")
        return sum(each.size for each in files)

    def folder(self, under: str = "", after: str = "") -> FolderPage:
        """Returns the files and folders in a folder of the live generation, up to 500 at a time.

        ``after`` is ``following`` of the page before. Raises ``InvalidError`` for a path with
        empty or relative parts.

        >>> [entry.name for entry in home.archives.get("daily").folder().entries]
        ['orders']
        """
        if any(part in ("", ".", "..") for part in under.split("/") if under):
            raise InvalidError(f"folder `{under[:80]}`: is none of an archive: choose one of it")
        found = self.reload()
        prefix = f"{found.folder()}/" + (f"{under}/" if under else "")
        entries, is_whole = _list_folder(store_at(self._context, found.store), prefix, after)
        following = None if is_whole or not entries else entries[-1].place
        return FolderPage(prefix, tuple(entries), following)

    def history(self, generation: int | None = None, *, bars: int = 60) -> ArchiveHistory:
        """Returns when ranges were committed and how many events they had, in bars of equal width.

        Reads rows of the newest ranges only; ``is_whole`` says whether these are all.

        >>> history = home.archives.get("daily").history()
        >>> [bar.events for bar in history.bars if bar.events]
        [3]
        """
        return read_history(self._context, self.reload(), generation, bars)

    def restore_limit(self, generation: int | None = None) -> str:
        """Returns what a restore cannot bring back; empty where it brings back everything.

        >>> home.archives.get("daily").restore_limit()
        ''
        """
        return restore_limit(self.info.format_of(generation))

    def files(self) -> Iterator[CommittedFile]:
        """Yields the files that count, with their events, offsets and checksums.

        >>> [(file.kind, file.events) for file in home.archives.get("daily").files()]
        [('data', 3)]
        """
        for manifest, file in committed_files(self._context, self.reload()):
            yield CommittedFile(
                kind=file.kind,
                path=file.target,
                partition=manifest.partition,
                events=file.events,
                first_offset=file.first_offset,
                last_offset=file.last_offset,
                bytes=file.size,
                crc32c=file.crc,
            )

    def read(
        self,
        *,
        files: Iterable[str] = (),
        partition: str | None = None,
        start: int | None = None,
        end: int | None = None,
        generation: int | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yields what the archive's data files hold, as Arrow batches in event columns.

        By default of all data files. ``files`` are paths, or the ends of paths. ``partition`` is
        the source's: ``orders/0``, or ``0`` where there is one topic. ``start`` and ``end`` are
        offsets of it. Typed columns that were written without the raw value come as they are.

        >>> sum(batch.num_rows for batch in home.archives.get("daily").read())
        3
        """
        wanted = ReadRequest(generation, tuple(files), partition, start, end)
        return archived_rows(self._context, self.reload(), wanted)

    def find(
        self, partition: str, offset: int, generation: int | None = None, *, read: bool = False
    ) -> FindResult:
        """Returns the file that holds an event of the source, or why there is none.

        With ``read`` the result has the event too.

        >>> found = home.archives.get("daily").find("orders/0", 1)
        >>> found.status, found.file.events
        ('archived', 3)
        """
        return find_event(self._context, self.reload(), partition, offset, generation, read=read)

    def dead_letters(
        self, *, reason: str | None = None, generation: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yields events that could not be archived, in event columns and ``error``.

        ``reason`` selects those whose error contains this text.

        >>> list(home.archives.get("daily").dead_letters())
        []
        """
        for batch in dead_letters(self._context, self.reload(), generation):
            kept = batch
            if reason is not None:
                kept = batch.filter(pc.match_substring(batch.column("error"), reason))
            if kept.num_rows:
                yield kept

    def plan_replay(
        self,
        *,
        parser: str = "",
        granularity: str | None = None,
        time_zone: str | None = None,
        generation: int | None = None,
    ) -> ReplayPlan:
        """Returns what :meth:`ArchiveHandle.replay` would do, by a trial that changes nothing.

        It tries the first 10,000 dead letters: ``tried`` and ``dead`` say whether these are all.

        >>> plan = home.archives.get("daily").plan_replay(parser="json:created_at")
        >>> plan.dead, plan.accepted, plan.refused
        (0, 0, {})
        """
        layout = {"granularity": granularity, "time_zone": time_zone}
        given = {name: value for name, value in layout.items() if value is not None}
        how = ReplayOptions(generation, parser, given)
        return plan_replay(self._context, self.reload(), how)

    def copies(self) -> list[str]:
        """Returns the names of this archive and of those that were made of it.

        >>> home.archives.get("daily").copies()
        ['daily']
        """
        return [each.archive.name for each in copies_of(self._context, self.reload())]

    def audit(
        self, event_id: str | None = None, *, key: bytes | None = None
    ) -> Iterator[AuditRecord]:
        """Yields what :meth:`erase` has erased from the archive and proved, when and why.

        Records have hashes of ids and keys. With an id, only its records come; with a key, only
        erasures and proofs by this key.

        >>> list(home.archives.get("daily").audit())
        []
        """
        return read_audit(self._context, self.reload(), event_id=event_id, key=key)

    @property
    def is_detached(self) -> bool:
        """Whether its files belong to the home that this one was copied from.

        >>> home.archives.get("daily").is_detached
        False
        """
        return is_detached(self._context, self.info)


def record_archive_action(
    context: Context, archive: str, op: str, note: str = "", who: str = ""
) -> None:
    """Puts an action on an archive into the home's audit; call it before the action."""
    record_action(context, f"archive {op}", f"archive {archive}", note, who)


class ArchiveTables:
    """The tables of an archive: ``archive.tables``.

    A table is named ``delta``, ``iceberg:CATALOG#NAMESPACE.NAME`` or ``glue:DATABASE.NAME``.
    """

    def __init__(self, context: Context, archive: ArchiveView) -> None:
        self._context = context
        self._archive = archive

    def register(
        self, table: str | None = None, *, keep: bool = False, who: str = ""
    ) -> list[RegisterResult]:
        """Creates a table of the archive's Parquet files, or brings it up to date.

        Returns how many data files and events were added to each table, and how many files it lists
        now; without a name, for all of them. With ``keep`` drivers
        bring it up to date after each cycle from now on. Files are registered where they are. The
        audit records a new table, and any call that has ``who``.

        >>> [done.events_added for done in home.archives.get("daily").tables.register("delta")]
        [3]
        """
        found = self._archive.reload()
        if table is None and (keep or not found.tables):
            raise InvalidError(
                f"archive `{found.name}`: has {len(found.tables)} tables: say which with --as"
            )
        names = found.tables if table is None else (resolve_table(found, table),)
        if who or keep or not set(names) <= set(found.tables):
            record_archive_action(self._context, found.name, "register", ", ".join(names), who)
        for generation in found.in_state("live", "kept"):  # files that a killed erasure has changed
            raise_first(finish_rewrites(self._context, found, generation).failed.values())
        done = [register_table(self._context, found, each, count=True) for each in names]
        if keep:
            change_tables(self._context, found, names[0], keep=True)
        raise_first(repair_tables(self._context, self._archive.reload()))
        return done

    def keep(self, table: str, keep: bool = True) -> None:
        """Lets drivers bring a table up to date after each cycle, or no longer.

        >>> tables = home.archives.get("daily").tables
        >>> _ = tables.register("delta", keep=True)
        >>> tables.keep("delta", False)
        """
        found = self._archive.reload()
        change_tables(self._context, found, resolve_table(found, table), keep=keep)

    def forget(self, table: str, *, who: str = "") -> None:
        """Removes a dropped table from the record: erasures and promotes no longer change it.

        ``who`` is for the audit.

        >>> tables = home.archives.get("daily").tables
        >>> _ = tables.register("delta")
        >>> tables.forget("delta")
        >>> tables.list()
        []
        """
        found = self._archive.reload()
        name = resolve_table(found, table)
        record_archive_action(self._context, found.name, "forget table", name, who)
        forget_table(self._context, found, name)

    def status(self) -> builtins.list[TableStatus]:
        """Returns how far each table is, and how many files wait to be added to it.

        A table that cannot be read has its ``error``. Changes nothing.

        >>> tables = home.archives.get("daily").tables
        >>> _ = tables.register("delta")
        >>> [(each.table, each.files, each.is_behind) for each in tables.status()]
        [('delta', 0, False)]
        """
        found = self._archive.reload()
        return [table_status(self._context, found, each) for each in found.tables]

    def list(self) -> list[str]:
        """Returns the names of all tables that erasures and promotes correct.

        >>> home.archives.get("daily").tables.list()
        []
        """
        return list(self._archive.reload().tables)


def _list_folder(store: Store, prefix: str, after: str) -> tuple[list[FolderEntry], bool]:
    """Returns the entries of a folder in order, and whether these are all.

    Skips what is further down. ``after`` is the place of the last entry of the page before.
    """
    entries: list[FolderEntry] = []
    start = f"{prefix}{after}" if after else ""
    if after.endswith("/"):
        start += "\U0010ffff"
    while len(entries) < _ENTRIES_MAX:
        jump = ""
        for info in store.list(prefix, start):
            name, slash, _ = info.key.removeprefix(prefix).partition("/")
            if slash:
                entries.append(FolderEntry(name))
                jump = f"{prefix}{name}/\U0010ffff"
                break
            entries.append(FolderEntry(name, info.size, info.modified_ms))
            if len(entries) >= _ENTRIES_MAX:
                return entries, False
        if not jump:
            return entries, True
        start = jump
    return entries, False
