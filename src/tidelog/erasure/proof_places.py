"""Places where a proof must look besides objects: names, rows and uploads.

**Names.** A parser such as ``split:user`` names a folder by a field of the events in it. A folder
with a file that still holds events has its name from these. A folder whose events were all erased
is named by an erased event; so are the manifests that list its files, including those before the
erasure. ``FileEntry.named`` says which parts of a folder's name are not times: the archive's parser
does not, because a replay may have used another one. A source that is a folder has a source
partition for each file. The file's name is in the names of archive files, manifests and rows, so it
must not be an erased id or key either. Names of topics, shards and streams are no data of events.

**Rows.** Rows hold no ids, keys or values (the audit and the ledger have hashes), with one
exception: errors shown to people, which may quote a value that a parser refused. They are kept
while something fails: in ``failure`` rows of pipelines, and in the rows of running keepers. The
row of jobs has texts too, but none of an error that could quote a value. A proof
does not know the values of erased events. So it recognizes a quote by the id or key, and by the
offset of the quoted event in the row. An error without an offset may quote any event that its
pipeline has not committed, and one of a keeper any event.

**Uploads.** A running upload becomes an object, or its writer deletes it. So a proof lists uploads
before objects, and waits a little for those that may end: a finished one is then in a listing. A
process that has not begun its upload has the bytes only in memory, which no proof can see. The
protocols (``rewrite.is_under_way``) cover what it may write. Reasons in audits: see ``matcher``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

import numpy as np

from tidelog.archive.archive import list_archives, removed_archives
from tidelog.clock import Clock, looks
from tidelog.connectors.by_url import StoreFolder, folders_of, pipelines_of
from tidelog.context import Context
from tidelog.coordination.commits import load_manifest, read_commit_rows
from tidelog.coordination.jobs import Keeper, read_jobs
from tidelog.coordination.pipeline_rows import (
    counting_files,
    read_partitions,
    read_progress,
    replay_pipeline,
)
from tidelog.erasure import proof_remedies as remedies
from tidelog.erasure.matcher import EventMatcher, names_of
from tidelog.erasure.metadata_objects import folder_values
from tidelog.erasure.proof_scope import ProofScope
from tidelog.errors import CorruptError, NotFoundError
from tidelog.log.topics import list_topics
from tidelog.model import layout
from tidelog.model.archive import Archive
from tidelog.model.pipeline import FileEntry, Manifest
from tidelog.model.topic import decode_row
from tidelog.pipeline.failures import read_failures
from tidelog.pipeline.registry import list_pipelines
from tidelog.store.base import Store, Upload

__all__ = [
    "WAIT_S",
    "ManifestNames",
    "erases",
    "explained_places",
    "files_named_by_events",
    "is_named_by_events",
    "lasting_uploads",
    "named_source_files",
    "places_of_files",
    "quoted_errors",
    "stagings_of_others",
]

_MANIFESTS = "pipelines/"


class ManifestNames:
    """Searches the names that manifests list."""

    def __init__(self, context: Context, sought: EventMatcher) -> None:
        self._context = context
        self._sought = sought
        self._living: dict[str, tuple[str, frozenset[str]]] = {}  # by pipeline: folder, living
        self._needed: set[str] = set()

    def note(self, archive: Archive, generation: int, living: Collection[str]) -> None:
        """Notes a generation that was searched, and its folders with events."""
        pipeline = archive.pipeline(generation)
        for each in (pipeline, replay_pipeline(pipeline)):
            self._living[each] = (f"{archive.folder(generation)}/", frozenset(living))
            for partition in read_partitions(self._context, each):
                for row in read_commit_rows(self._context, each, partition):
                    self._needed.add(row.committed.manifest)

    def is_needed(self, key: str) -> bool:
        """Returns whether a commit names a manifest."""
        return key in self._needed

    def names_in(self, store: Store, key: str) -> bool | None:
        """Returns whether a manifest lists a file in a folder named by an erased event.

        None for an object that is not a manifest.
        """
        if not key.startswith(_MANIFESTS):
            return None
        try:
            manifest = load_manifest(store, key)
        except NotFoundError:
            return False
        except CorruptError:
            return None
        root, living = self._living.get(key.split("/")[1], ("", frozenset()))
        return any(
            self._sought.is_in(value)
            for part in manifest.parts
            for file in part.files
            for value in folder_values(_folder(file.target, root), living)
        )


def erases(manifest: Manifest, file: FileEntry, offsets: Sequence[int]) -> bool:
    """Returns whether some of these offsets were removed from a file."""
    taken = np.intersect1d(np.array(manifest.erased, np.int64), np.array(offsets, np.int64))
    return bool(((taken >= file.first_offset) & (taken <= file.last_offset)).any())


def is_named_by_events(folder: str, named: int, living: Collection[str]) -> bool:
    """Returns whether a part of a folder's name is a value of events that were all erased.

    ``named`` parts after the topic's are values of events, whichever parser set them. Each is such
    a value if no folder with events has it and all parts before it.
    """
    parts = folder.split("/")
    starts = ["/".join([*parts[: depth + 1], ""]) for depth in range(1, named + 1)]
    return any(not any(f"{each}/".startswith(own) for each in living) for own in starts)


def files_named_by_events(context: Context, archive: Archive) -> Iterator[str]:
    """Yields empty files of an archive whose folders were named by events that were all erased."""
    for generation in archive.in_state("live", "building", "kept"):
        pipeline, root = archive.pipeline(generation), f"{archive.folder(generation)}/"
        files = [
            file
            for partition in read_partitions(context, pipeline)
            for _, file in counting_files(context, pipeline, partition)
            if file.kind == "data"
        ]
        living = {_folder(file.target, root) for file in files if file.events}
        for file in files:
            is_empty = file.erased and not file.events
            if is_empty and is_named_by_events(_folder(file.target, root), file.named, living):
                yield file.target


def _folder(target: str, root: str) -> str:
    """Returns the folder of a file below its generation's; events name none of dead letters."""
    return target.removeprefix(root).rpartition("/")[0] if target.startswith(root) else ""


@dataclass(frozen=True, slots=True)
class _ShownError:
    """An error in a row: where, its text, what deletes it, and what it may quote."""

    where: str
    text: str
    do: str
    pipeline: str = ""  # empty: any
    partition: str = ""  # of the source; empty: all
    quotes: str = "any"  # as in ``DriverFailure``
    position: str = ""  # what is before it is committed; empty: unknown

    def may_quote(self, offsets: Collection[int] | None) -> bool:
        """Returns whether it may quote an event at one of these offsets; None: any event."""
        if offsets is None:
            return bool(self.quotes)
        if self.quotes != "any":
            return bool(self.quotes) and int(self.quotes) in offsets
        begin = int(self.position) if self.position.isdecimal() else 0
        return any(offset >= begin for offset in offsets)


def quoted_errors(scope: ProofScope, sought: EventMatcher) -> Iterator[tuple[str, str, str]]:
    """Yields rows whose errors quote erased events, or may: where, what, and what deletes it.

    Covers the archives and pipelines of a scope, keepers, which may run any of them, and jobs.
    """
    for error in (*_failures(scope), *_keeper_errors(scope), *_job_texts(scope.context)):
        if sought.in_any_text(error.text.encode()):
            yield error.where, "quotes one of them in an error", error.do
        elif error.may_quote(scope.quoted(error.pipeline, error.partition, sought)):
            yield error.where, "may quote one of them in an error", error.do


def _failures(scope: ProofScope) -> Iterator[_ShownError]:
    context = scope.context
    own = [archive.pipeline(number) for archive, number in scope.generations()]
    pipelines = [each for pipeline in own for each in (pipeline, replay_pipeline(pipeline))]
    for pipeline in (*pipelines, *(named.incarnation for named in scope.pipelines())):
        for partition, failure in read_failures(context, pipeline).items():
            where = f"{layout.pipeline_members(pipeline)} · {layout.failure_row(partition)}"
            head = read_progress(context, pipeline, partition) if partition else None
            position = "" if head is None else head.position
            place = (pipeline, partition)
            yield _ShownError(
                where, failure.message, remedies.FAILURE, *place, failure.quotes, position
            )


def _keeper_errors(scope: ProofScope) -> Iterator[_ShownError]:
    own = {f"archive {name}" for name in scope.archives()}
    own |= {f"pump {named.name}" for named in scope.pipelines()}
    for row in scope.context.catalog.scan(layout.KEEPERS, layout.keeper_row(""), "keeper0"):
        keeper = decode_row(row.value, Keeper, f"keeper row `{row.row}`")
        for part in keeper.parts:
            fails = part.error and part.name in own and part.state in ("failed", "running")
            where = f"{layout.KEEPERS} · {row.row}"
            yield _ShownError(where, part.error, remedies.KEEPER, quotes="any" if fails else "")


def _job_texts(context: Context) -> Iterator[_ShownError]:
    """Yields what jobs say; it may name an event of a source that failed."""
    where = f"{layout.JOBS} · {layout.JOB_LIST}"
    for job in read_jobs(context):
        texts = (job.what, job.says, *job.args.values(), *job.result.values())
        yield _ShownError(where, "\n".join(texts), remedies.JOB.format(job=job.id), quotes="")


def named_source_files(scope: ProofScope, sought: EventMatcher) -> Iterator[tuple[str, str, str]]:
    """Yields rows of source files whose names have an erased id or key: where, what, what to do.

    Covers the archives of a scope, and pipelines into its topic or from its sources.
    """
    found = [
        (archive.pipeline(number), remedies.NAMED_ARCHIVE.replace("{archive}", archive.name))
        for archive, number in scope.generations()
    ]
    for named in scope.pipelines():
        if scope.topic is None or named.target == scope.topic.incarnation:
            do = remedies.NAMED_PIPELINE.replace("{pipeline}", named.name)
            found.append((named.incarnation, do))
    for pipeline, do in found:
        for partition in read_partitions(scope.context, pipeline):
            name = unquote(partition.rpartition("/")[2])
            if not name.isdecimal() and any(map(sought.is_quoted_in, names_of(name))):
                where = layout.pipeline_partition(pipeline, partition)
                yield where, "is a file of the source with one of them in its name", do


WAIT_S = 10.0  # for running uploads
_LOOK_S = 0.1


def lasting_uploads(store: Store, clock: Clock) -> Iterator[Upload]:
    """Yields uploads of dead processes, and those that do not end within ``WAIT_S``."""
    under_way: dict[tuple[str, int], Upload] = {}
    for upload in store.uploads():
        if upload.may_end:
            under_way[upload.name, upload.began_ms] = upload
        else:
            yield upload
    for _ in looks(clock, WAIT_S, _LOOK_S) if under_way else ():
        names = {upload.name for upload in store.uploads()}
        under_way = {key: each for key, each in under_way.items() if each.name in names}
        if not under_way:
            break
    yield from under_way.values()


def explained_places(scope: ProofScope, store: Store) -> tuple[str, ...]:
    """Returns the prefixes of keys that belong to other topics, archives or pipelines."""
    context = scope.context
    at, own, topics = context.store.url, scope.archives(), scope.incarnations
    found = [StoreFolder(at, layout.HOME_OBJECT), StoreFolder(at, layout.probe(""))]
    others = (each for each in list_topics(context) if each.incarnation not in topics)
    found += [StoreFolder(at, f"topics/{each.incarnation}/") for each in others]
    for archive in list_archives(context):
        if archive.name not in own:
            folders = folders_of(context, archive)
            found += [*folders["files"], *folders["manifests"]]
    found += [
        StoreFolder(at, layout.manifests(named.incarnation)) for named in list_pipelines(context)
    ]
    return tuple(folder.prefix for folder in found if folder.store == store.url)


def places_of_files(scope: ProofScope) -> Iterator[str]:
    """Yields the prefixes of files with values: staged, set aside, or of a generation."""
    yield "staging/"
    for archive in (*scope.archives().values(), *removed_archives(scope.context)):
        yield layout.aside_folder(archive.root)
        yield from (f"{archive.root}/g{number}/" for number in range(1, archive.newest + 1))


def stagings_of_others(scope: ProofScope) -> list[str]:
    """Returns the staging prefixes of archives that are made of something else."""
    own = scope.archives()
    others = [archive for archive in list_archives(scope.context) if archive.name not in own]
    return [layout.staging_of(each) for archive in others for each in pipelines_of(archive)]
