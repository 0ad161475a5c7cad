"""Archives as Python code uses them: ``home.archives``, and a handle for each archive.

A handle names one archive, and reads its settings again for each call. It never works on another
archive that got the same name later: then its calls raise ``NotFoundError``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Literal, Unpack

import msgspec

from tidelog.api.archive_erasure import ErasableArchive
from tidelog.api.archive_options import (
    ArchiveRunOptions,
    BackfillOptions,
    DeadLetterOptions,
    RecordedRunOptions,
    RedoOptions,
)
from tidelog.api.archive_view import ArchiveTables, record_archive_action
from tidelog.api.pipelines import RunOptions, RunResult, driver_options, run_pipeline, shown_address
from tidelog.api.run_metrics import RunMetrics, send_statsd
from tidelog.api.spark_workers import open_workers
from tidelog.archive.archive import (
    ArchiveKind,
    ArchiveOptions,
    FormatOptions,
    archive_format,
    archive_record,
    check_active,
    choose_start,
    create_archive,
    find_archive,
    open_pipeline,
)
from tidelog.archive.dead_letters import ReplayOptions, ReplayResult, count_dead_again, replay
from tidelog.archive.delete import check_delete, delete_archive, delete_lost, end_archive
from tidelog.archive.fill import is_own_damage
from tidelog.archive.finalize import FinalizeOptions, FinalizeResult, finalize
from tidelog.archive.generations import begin_backfill, drop_generation, promote, rollback
from tidelog.archive.metrics import metrics_text
from tidelog.archive.redo import RedoPlan, plan_redo
from tidelog.archive.restore import RestoreOptions, open_restore
from tidelog.archive.tables import register, register_archive
from tidelog.connectors.by_url import source_at
from tidelog.connectors.source import waits
from tidelog.context import Context
from tidelog.coordination.pipeline_rows import list_archives, read_archive
from tidelog.errors import CorruptError, FencedError, InvalidError, NotFoundError, contained
from tidelog.model import defaults
from tidelog.model.address import nearest
from tidelog.model.archive import Archive, ArchiveFormat, RedoPart, Start
from tidelog.model.times import duration_ms
from tidelog.pipeline.pipeline import CycleReport
from tidelog.pipeline.ranges import FilePolicy
from tidelog.pipeline.seek import PositionMove, SeekOptions, plan_seek, seek
from tidelog.pipeline.share import request_flush, wait_until_done
from tidelog.pipeline.source_partitions import track
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.settings import check_options

__all__ = [
    "ArchiveHandle",
    "Archives",
]


class Archives:
    """The archives of a home: ``home.archives``."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def create(
        self,
        name: str,
        *,
        source: str,
        kind: ArchiveKind | None = None,
        **options: Unpack[ArchiveOptions],
    ) -> ArchiveHandle:
        """Creates an archive and returns its handle. Nothing is archived before it is run.

        ``source`` is a URL such as ``kafka://host:9092/topic`` or ``topic:orders``. ``kind`` is
        ``partition`` where a ``parser`` is given, else ``backup``. The folder must be empty, and is
        not used again after a delete. See :class:`ArchiveOptions` for the other options. Raises
        ``AlreadyExistsError``, and ``InvalidError`` for a setting that is not valid.

        >>> archive = home.archives.create("raw", source="topic:orders", max_age="10m")
        >>> archive.run().events
        3
        """
        check_options(f"create of archive `{name}`", options, ArchiveOptions, self.create)
        wanted = archive_record(self._context, name, source, kind, options)
        who = options.get("who", "")
        record = functools.partial(record_archive_action, self._context, name, "create", who=who)
        return ArchiveHandle(self._context, create_archive(self._context, wanted, record))

    def get(self, name: str) -> ArchiveHandle:
        """Returns the handle of an archive. Raises ``NotFoundError``.

        >>> home.archives.get("daily").info.source
        'topic:orders'
        """
        try:
            return ArchiveHandle(self._context, read_archive(self._context, name))
        except NotFoundError as exc:
            hint = nearest(name, [each.name for each in list_archives(self._context)])
            said = exc.message.replace(": not found", f": not found{hint}", 1)
            raise NotFoundError(said, **exc.context) from exc

    def list(self) -> list[ArchiveHandle]:
        """Returns the handles of all archives, by name; also those that are not ready, or ended.

        >>> [archive.name for archive in home.archives.list()]
        ['daily']
        """
        return [ArchiveHandle(self._context, each) for each in list_archives(self._context)]

    def metrics(self, names: Iterable[str] | None = None) -> str:
        """Returns Prometheus metrics of these archives, or of all that are ready.

        >>> "tidelog_archive" in home.archives.metrics()
        True
        """
        if names is not None:
            return metrics_text(
                self._context, [find_archive(self._context, each) for each in names]
            )
        ready = [each for each in list_archives(self._context) if each.state == "ready"]
        return metrics_text(self._context, ready)

    def send_metrics(self, statsd: str, names: Iterable[str] | None = None) -> None:
        """Sends the metrics of these archives, or of all, to a StatsD server at ``HOST:PORT``.

        >>> home.archives.send_metrics("127.0.0.1:8125")
        """
        send_statsd(statsd, self.metrics(names))

    def __repr__(self) -> str:
        return f"Archives({[each.name for each in list_archives(self._context)]!r})"


class ArchiveHandle(ErasableArchive):
    """One archive: run it, look at it, read it, change it."""

    # Running it.

    def run(
        self,
        *,
        follow: bool = False,
        spark: str | None = None,
        start: Start | None = None,
        dead_share: float | None = None,
        **options: Unpack[ArchiveRunOptions],
    ) -> RunResult:
        """Archives what the source holds and returns what was done.

        With ``follow`` it goes on until ``stop`` is set. ``spark`` is a Spark master; without it
        the work is done in this process. ``start`` changes where an archive begins that has not
        begun yet. ``dead_share`` is for this run. Several drivers share the source's partitions;
        without ``follow`` a run leaves the others those that they have (``on_left``). Tables that
        drivers keep up to date follow each cycle. After a promote the run goes on with the
        generation that is live then. Options that write metrics do so after cycles and at the end.
        The audit records a run where ``who`` is given. Safe to kill, to repeat, and to run twice at
        once.

        >>> _ = home.append("orders", [tidelog.Event(b'{"at": 1794744000000}')])
        >>> home.archives.get("daily").run().events
        1
        """
        check_options(f"run of archive `{self.name}`", options, ArchiveRunOptions, self.run)
        metrics = RunMetrics(self._context.clock, self, options)
        watched = metrics.watch()
        check_active(self.reload())  # before Spark is started
        if who := options.get("who"):
            self._record("run", who=who)
        if start is not None:
            choose_start(self._context, self.name, start)
        workers = open_workers(self.name, spark, options.get("spark_conf"))
        done = RunResult()
        while True:
            found = self.reload()
            policy = FilePolicy(found.max_bytes, found.max_age_ms)
            how = driver_options(watched, follow=follow, policy=policy)
            how.on_cycle = functools.partial(self._after_cycle, watched)
            wanted = _with_dead_share(found, dead_share)
            pipeline = open_pipeline(self._context, wanted, workers, rate=options.get("rate"))
            done.generation = found.generation
            try:
                run_pipeline(self._context, pipeline, how, done)
                break
            except FencedError:
                promoted = self._promoted_since(found)
                if promoted is None:
                    raise
                options.get("on_promote", _ignore)(promoted)
        register(self._context, self.reload())
        metrics.finish()
        return done

    def _after_cycle(self, options: RunOptions, report: CycleReport) -> None:
        if on_cycle := options.get("on_cycle"):
            on_cycle(report)
        with contained(f"archive `{self.name}`", options.get("on_error", _ignore)):
            if report.committed:  # a table that fails is brought up to date after the next cycle
                register_archive(self._context, self.name)

    def _promoted_since(self, before: Archive) -> int | None:
        """Returns the live generation where that is another one than before."""
        for each in list_archives(self._context):
            if each.incarnation == before.incarnation and each.ended is None:
                return each.generation if each.generation != before.generation else None
        return None

    def flush(self, timeout_s: float = defaults.FLUSH_TIMEOUT_S, *, who: str = "") -> list[str]:
        """Has the driver that follows the archive write what waits, and waits for it.

        Returns the source partitions that still wait when the time is over: none is success. The
        audit records it where ``who`` is given.

        >>> home.archives.get("daily").flush()
        []
        """
        found = self.reload()
        check_active(found)
        if who:
            self._record("flush", who=who)
        source = source_at(self._context, found.source)
        track(self._context, found.pipeline(), source)
        bounds = source.bounds(source.partitions())
        ends = {each.text: held.end for each, held in bounds.items() if held.first != held.end}
        request_flush(self._context, found.pipeline())
        left = functools.partial(waits, source)
        return list(wait_until_done(self._context, found.pipeline(), ends, left, timeout_s))

    def plan_seek(self, to: str | int, partition: str | None = None) -> list[PositionMove]:
        """Returns where :meth:`seek` would move each position, and what it would skip.

        >>> [move.skipped for move in home.archives.get("daily").plan_seek("latest")]
        [0]
        """
        wanted = SeekOptions(str(to), partition, is_archive=True)
        pipeline = open_pipeline(self._context, self.reload(), LocalWorkers())
        return plan_seek(self._context, pipeline, wanted)

    def seek(
        self, to: str | int, partition: str | None = None, *, why: str = "", who: str = ""
    ) -> list[PositionMove]:
        """Moves the archive's position in its source and returns what moved.

        ``to`` is ``earliest``, ``latest``, or a position as the status shows it. Without a
        ``partition``, such as ``orders/0`` or ``0``, all positions move. What is skipped becomes a
        gap with the reason ``seek``, and the audit records it with ``why`` and ``who``. Moving back
        undoes such gaps. Raises ``InvalidError`` for offsets that the archive has: it holds each
        event once. It does so too for offsets that a chained archive, a pump or a restore has read
        of this one.

        >>> archive = home.archives.create("new", source="topic:orders")
        >>> [move.to for move in archive.seek("latest", why="old events are not wanted")]
        ['3']
        >>> archive.run().events
        0
        """
        wanted = SeekOptions(str(to), partition, is_archive=True, why=why, who=who)
        pipeline = open_pipeline(self._context, self.reload(), LocalWorkers())
        return seek(self._context, pipeline, wanted)

    # Dead letters and restores.

    def replay(
        self, *, spark: str | None = None, **options: Unpack[DeadLetterOptions]
    ) -> ReplayResult:
        """Tries the dead letters again and returns how many are archived now.

        ``parser``, ``granularity`` and ``time_zone`` replace those of the archive. Tables that
        drivers keep up to date list the new files. ``spark`` is a Spark master; without it the work
        is done in this process. Safe to kill, to repeat, and to run twice at once.

        >>> home.archives.get("daily").replay(parser="json:created_at").tried
        0
        """
        check_options(f"replay of archive `{self.name}`", options, DeadLetterOptions, self.replay)
        layout = {"granularity": options.get("granularity"), "time_zone": options.get("time_zone")}
        how = ReplayOptions(
            options.get("generation"),
            options.get("parser", ""),
            {name: value for name, value in layout.items() if value is not None},
        )
        how.stop = options.get("stop", how.stop)
        how.on_cycle = options.get("on_cycle", how.on_cycle)
        self.reload()
        self._record("replay", who=options.get("who", ""))
        workers = open_workers(f"{self.name}, dead letters", spark, options.get("spark_conf"))
        done = replay(self._context, self.reload(), how, workers)
        register(self._context, self.reload())
        return done

    def restore(
        self,
        to: str,
        *,
        generation: int | None = None,
        partition: Literal["same", "key"] | None = None,
        spark: str | None = None,
        **options: Unpack[RecordedRunOptions],
    ) -> RunResult:
        """Brings the archive's events into a topic or into Kafka and returns what was done.

        ``to`` is ``topic:NAME`` or ``kafka://host:9092/topic``, which must exist. ``partition``
        keeps the source's partitions (``same``, the default) or chooses them by key. A restore that
        is run again brings what the archive got since. Safe to kill.

        >>> _ = home.create_topic("again")
        >>> home.archives.get("daily").restore(to="topic:again").events
        3
        """
        check_options(
            f"restore of archive `{self.name}`", options, RecordedRunOptions, self.restore
        )
        wanted = RestoreOptions(self.reload().name, to, generation, partition)
        pipeline = open_restore(self._context, wanted, LocalWorkers(), options.get("rate"))
        self._record("restore", f"to {shown_address(to)}", options.get("who", ""))
        workers = open_workers(pipeline.name, spark, options.get("spark_conf"))
        pipeline = dataclasses.replace(pipeline, workers=workers)
        return run_pipeline(self._context, pipeline, driver_options(options, wait=True))

    # Generations.

    def backfill(
        self,
        *,
        source: str = "",
        start: Literal["earliest"] | None = None,
        spark: str | None = None,
        dead_share: float | None = None,
        **options: Unpack[BackfillOptions],
    ) -> RunResult:
        """Builds a new generation beside the live one and returns what was done.

        What is not given stays as in the live generation. ``source`` is ``archive:NAME`` to read
        another archive instead of the archive's source. ``start="earliest"`` also reads what came
        before the archive's begin. ``accept_loss`` leaves out ranges that the source no longer has
        and that are damaged in the live generation. Called again with the same options it resumes.
        Promote the generation when it is complete; :meth:`replay` its ``dead_again`` before that.

        >>> done = home.archives.get("daily").backfill(granularity="hour")
        >>> done.generation, done.events
        (2, 3)
        """
        check_options(f"backfill of archive `{self.name}`", options, BackfillOptions, self.backfill)
        made = archive_format(options, self.reload().format_of(), source)
        made = msgspec.structs.replace(made, start=start or "")
        self._record("backfill", who=options.get("who", ""))
        return self._build(made, spark, dead_share, options)

    def _build(
        self,
        made: ArchiveFormat,
        spark: str | None,
        dead_share: float | None,
        options: RunOptions,
    ) -> RunResult:
        """Builds a generation with these settings, or resumes that."""
        found, generation = begin_backfill(self._context, self.name, made)
        self.info = found
        workers = open_workers(self.name, spark, options.get("spark_conf"))
        pipeline = open_pipeline(
            self._context,
            _with_dead_share(found, dead_share),
            workers,
            generation,
            options.get("rate"),
            options.get("accept_loss", False),
        )
        policy = FilePolicy(found.max_bytes, found.max_age_ms)
        how = driver_options(options, policy=policy, wait=True)
        try:
            done = run_pipeline(self._context, pipeline, how, RunResult(generation=generation))
            done.dead_again = count_dead_again(self._context, found, generation)
            return done
        except CorruptError as exc:
            if not how.accept_loss and is_own_damage(self._context, found, exc):
                raise CorruptError(
                    f"{exc}; without a copy, leave out its range with `tidelog archive "
                    f"backfill {self.name} --accept-loss`",
                    **exc.context,
                ) from exc
            raise

    def plan_redo(
        self,
        *,
        dates: Iterable[str] = (),
        topics: Iterable[str] = (),
        partitions: Iterable[str] = (),
        parser: str | None = None,
        transform: str | None = None,
    ) -> RedoPlan:
        """Returns what :meth:`redo` would write again, and what it would copy.

        >>> plan = home.archives.get("daily").plan_redo(dates=["2026-11-14"])
        >>> plan.events, plan.copied_files
        (3, 0)
        """
        part = RedoPart(tuple(dates), tuple(topics), tuple(partitions))
        return self._redo_part(part, FormatOptions(parser=parser, transform=transform))[1]

    def redo(
        self,
        *,
        dates: Iterable[str] = (),
        topics: Iterable[str] = (),
        partitions: Iterable[str] = (),
        spark: str | None = None,
        dead_share: float | None = None,
        **options: Unpack[RedoOptions],
    ) -> RunResult:
        """Builds a new generation that writes a part of the archive again and copies the rest.

        ``dates`` are days of the archive's folders, as ``2026-11-15``; ``topics`` and
        ``partitions`` are those of its source. The events are those that the files hold now. A
        ``parser`` or ``transform`` that is not given stays as it is, for code that was fixed.
        Copies are made on the server: see :meth:`plan_redo`. Called again with the same options it
        resumes. Promote the generation when it is complete.

        >>> done = home.archives.get("daily").redo(dates=["2026-11-14"], parser="timestamp")
        >>> done.generation, done.events
        (2, 3)
        """
        check_options(f"redo of archive `{self.name}`", options, RedoOptions, self.redo)
        part = RedoPart(tuple(dates), tuple(topics), tuple(partitions))
        form = FormatOptions(parser=options.get("parser"), transform=options.get("transform"))
        made, _ = self._redo_part(part, form)
        self._record("redo", who=options.get("who", ""))
        return self._build(made, spark, dead_share, options)

    def _redo_part(self, part: RedoPart, form: FormatOptions) -> tuple[ArchiveFormat, RedoPlan]:
        """Returns the settings of a redo, and what it would do."""
        found = self.reload()
        check_active(found)
        made = archive_format(form, found.format_of())
        part, plan = plan_redo(self._context, found, part, made)
        return msgspec.structs.replace(made, redo=part), plan

    def promote(
        self,
        generation: int | None = None,
        *,
        force: bool = False,
        spark: str | None = None,
        spark_conf: Mapping[str, str] | None = None,
        who: str = "",
    ) -> Archive:
        """Makes the generation that was built the live one and returns the archive's settings.

        It is brought up to the live one first. Raises ``InvalidError`` if it lacks events that the
        live one has, unless ``force`` accepts that they are lost. The old generation is kept. With
        ``generation`` it raises ``NotFoundError`` if another one is being built, or none. ``who``
        is for the audit.

        >>> archive = home.archives.get("daily")
        >>> _ = archive.backfill(granularity="hour")
        >>> archive.promote().generation
        2
        """
        self.reload()
        self._record("promote", _FORCED * force, who)
        workers = open_workers(self.name, spark, spark_conf)
        self.info = promote(
            self._context, self.name, generation=generation, force=force, workers=workers
        )
        return self.info

    def rollback(
        self,
        generation: int | None = None,
        *,
        force: bool = False,
        spark: str | None = None,
        spark_conf: Mapping[str, str] | None = None,
        who: str = "",
    ) -> Archive:
        """Makes a kept generation the live one again and returns the archive's settings.

        It gets all events that came in since first. ``generation`` says which one, if several are
        kept. Raises ``InvalidError`` as :meth:`promote` does. ``who`` is for the audit.

        >>> archive = home.archives.get("daily")
        >>> _ = archive.backfill(granularity="hour"), archive.promote()
        >>> archive.rollback().generation
        1
        """
        self.reload()
        self._record("rollback", _FORCED * force, who)
        workers = open_workers(self.name, spark, spark_conf)
        self.info = rollback(
            self._context, self.name, generation=generation, force=force, workers=workers
        )
        return self.info

    def drop(
        self, generation: int, *, force: bool = False, dry_run: bool = False, who: str = ""
    ) -> None:
        """Deletes a generation that is being built or kept, with its files.

        Raises ``InvalidError`` for the live one, and if the generation has events that neither the
        live one nor the source has, unless ``force``. With ``dry_run`` it only does that. ``who``
        is for the audit.

        >>> archive = home.archives.get("daily")
        >>> _ = archive.backfill(granularity="hour")
        >>> archive.drop(2)
        """
        self.reload()
        drop_generation(self._context, self.name, generation, force=force, dry_run=True)
        if dry_run:
            return
        self._record("drop", f"generation {generation}" + f", {_FORCED}" * force, who)
        drop_generation(self._context, self.name, generation, force=force)
        self.reload()

    # Folders and tables.

    def finalize(
        self,
        delay: str | int = defaults.FINALIZE_DELAY,
        *,
        notify: str = "",
        dry_run: bool = False,
        who: str = "",
    ) -> FinalizeResult:
        """Puts ``_SUCCESS`` into date folders that are complete and returns which these are.

        ``delay`` is how late events may be. ``notify`` is a URL that gets a POST for each folder.
        The audit records it where ``who`` is given.

        >>> home.archives.get("daily").finalize("0s", dry_run=True).errors
        []
        """
        how = FinalizeOptions(duration_ms(delay), notify, dry_run)
        found = self.reload()
        if who:
            self._record("finalize", who=who)
        return finalize(self._context, found, how)

    @property
    def tables(self) -> ArchiveTables:
        """The archive's Delta and Iceberg tables.

        >>> home.archives.get("daily").tables.list()
        []
        """
        return ArchiveTables(self._context, self)

    # Deleting.

    def delete(
        self, *, files: bool = False, lost: bool = False, dry_run: bool = False, who: str = ""
    ) -> None:
        """Ends the archive: drivers stop, and trims no longer wait for it. Its files stay.

        With ``files`` its files are deleted too, and its name is free. ``lost`` is for an archive
        outside of the home whose folder is gone: it frees the name. Raises ``NotFoundError``, also
        where another archive has the name now, and ``InvalidError`` while something is made from
        the files. With ``dry_run`` it only does that. ``who`` is for the home's audit, which stays.

        >>> home.archives.get("daily").delete(files=True)
        >>> home.archives.list()
        []
        """
        if files and lost:
            raise InvalidError("archive delete: files that are lost cannot be deleted: give one")
        check_delete(self._context, self.name, self.info.incarnation, files=files, lost=lost)
        if dry_run:
            return
        self._record("delete", "with its files" * files, who)
        if files:
            delete_archive(self._context, self.name, self.info.incarnation)
        elif lost:
            delete_lost(self._context, self.name, self.info.incarnation)
        else:
            self.info = end_archive(self._context, self.name, self.info.incarnation)


_FORCED = "events that only it has may be lost"


def _with_dead_share(archive: Archive, share: float | None) -> Archive:
    """Returns an archive that tolerates another share of dead letters in this run."""
    return archive if share is None else msgspec.structs.replace(archive, dead_share_max=share)


def _ignore(_: object) -> None:
    """A report that has no reader."""
