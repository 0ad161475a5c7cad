"""Searches for erased events: reads and decodes every object that could hold one.

That is: segments and journals of the topic, also those that no row names; large values of updates;
what Spark writers and pipelines staged; and files, sidecars, dead letters and metadata of every
archive made of the topic. Then everything in the home is listed, and objects that nothing explains
are searched with their names; manifests are searched for the names of files. So are unfinished
uploads, which no listing shows, and topics that pipelines and playbacks copied events into.

An event is recognized by its id or key, and in archives by its offset too. An event whose time is
after that of the erasure, by the ledger, is a new event. There are two exceptions: objects that no
row names, because no delete has seen the times of their events, and copies whose times a pump or a
transform has set. An archive's unfinished range counts: its driver may have read the event before
the delete. A file of an archive without ids or keys cannot be searched for them, and counts too; a
file that is not ours is searched in all its columns. Every table in the archive's row must list
rewritten files as they are now. Each finding comes with what to do about it. With a task runner,
tasks search segments, journals and files of archives first (``event_search``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.archive.archive import removed_archives
from tidelog.archive.read import ArchiveFiles, is_changing
from tidelog.archive.tables import is_in_delta_table, stale_entries
from tidelog.catalog.base import clear_deleted_rows
from tidelog.catalog.update import read_if_stable
from tidelog.connectors.by_url import folders_of, store_at
from tidelog.context import Context
from tidelog.coordination.audit import id_hash, key_hash
from tidelog.coordination.pipeline_rows import (
    counting_files,
    is_detached,
    read_partitions,
    replay_pipeline,
)
from tidelog.erasure import proof_remedies as remedies
from tidelog.erasure.archive_scope import ArchiveScope
from tidelog.erasure.aside_files import AsideFiles, aside_origins
from tidelog.erasure.chosen_names import chosen_names
from tidelog.erasure.event_search import files_to_search, files_without, objects_without
from tidelog.erasure.matcher import (
    EventMatcher,
    has_columns,
    names_of,
    own_column,
    rows_of,
)
from tidelog.erasure.metadata_objects import (
    ManifestNames,
    erases,
    event_values,
    folder_below,
    folder_values,
    is_named_by_events,
)
from tidelog.erasure.object_search import UNREADABLE, ObjectSearch
from tidelog.erasure.proof import Proof
from tidelog.erasure.proof_scope import (
    DeletedTopicScope,
    Generation,
    ProofScope,
    TopicScope,
    explained_places,
    outside_of_home,
    renamed_copies,
    retimed_copies,
)
from tidelog.erasure.redaction import (
    named_source_files,
    quoted_errors,
    quoting_rows,
    quoting_seeks,
)
from tidelog.erasure.topic_copies import copy_deletions, transformed_archives
from tidelog.erasure.unfinished_ranges import is_under_way
from tidelog.errors import CorruptError, InvalidError, NotFoundError
from tidelog.journal.listing import MovedError, covering
from tidelog.log.run_reader import describe_run, read_run
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.archive import Archive
from tidelog.model.event import check_utf8
from tidelog.model.pipeline import FileEntry
from tidelog.model.topic import Amendment, Run, Topic, decode_row
from tidelog.store.base import Store
from tidelog.store.wrappers import CachedStore

__all__ = ["prove_erased", "prove_erased_from_archive"]

_NAMED = 5  # offsets that a finding names


def prove_erased(
    context: Context,
    topic: Topic,
    ids: Collection[str] = (),
    keys: Collection[bytes] = (),
    progress: Callable[[int], None] = lambda _: None,
) -> Proof:
    """Searches for events of a topic by id and key. Reads every object that could hold them.

    An event appended under the same id after the erasure is another one, and not a trace. An id
    that never existed leaves no trace either: ``Proof.known`` distinguishes it from a deleted one.
    Raises ``InvalidError`` without any id or key.
    """
    return _prove(TopicScope(context, topic), ids, keys, progress)


def prove_erased_from_archive(
    context: Context,
    archive: Archive,
    ids: Collection[str] = (),
    keys: Collection[bytes] = (),
    progress: Callable[[int], None] = lambda _: None,
) -> Proof:
    """Does the same for events that were erased from an archive without topic."""
    return _prove(ArchiveScope(context, archive), ids, keys, progress)


def _prove(
    scope: ProofScope,
    ids: Collection[str],
    keys: Collection[bytes],
    progress: Callable[[int], None],
) -> Proof:
    if not ids and not keys:
        raise InvalidError("proof: of which event? give an id or a key")
    for each in ids:
        check_utf8("id", each)  # dead letters have ids that no topic accepts, such as an empty one
    scope.is_by_key = not ids
    context, sought = scope.context, scope.matcher(ids, keys)
    store = context.store.inner if isinstance(context.store, CachedStore) else context.store
    search = _ProofSearch(scope, sought, progress)
    search.proof.ids, search.proof.keys = tuple(map(id_hash, ids)), tuple(map(key_hash, keys))
    search.proof.searched_ms = context.clock.now_ms()
    search.proof.known = scope.knows_all(sought.deletions)
    search.ranges()
    generations = scope.reachable()
    search.proof.out_of_reach = list(scope.out_of_reach())
    search.all_uploads(store, generations)
    if scope.topic is not None:
        search.enter(f"topic `{scope.topic.name}`")
        search.topic_objects(store, scope.topic)
    search.enter("staged files")
    search.staged(store)
    search.archives(generations)
    for archive in removed_archives(context):
        if not is_detached(context, archive):
            search.enter(f"deleted archive `{archive.name}`")
            search.removed_archive(archive)
    search.enter("all other objects of the home")
    search.everything(store)
    search.rows()
    search.copies(store)
    search.proof.out_of_reach += chosen_names(context, search.topics, sought.deletions)
    return search.proof


def _holds(offsets: list[int], partition: int) -> str:
    """Returns which offsets an object holds; the first few of many."""
    if len(offsets) == 1:
        return f"holds offset {offsets[0]} of partition {partition}"
    first = ", ".join(map(str, offsets[:_NAMED]))
    more = f" and {len(offsets) - _NAMED:,} more" if len(offsets) > _NAMED else ""
    return f"holds {len(offsets):,} of them, at offsets {first}{more} of partition {partition}"


class _ProofSearch(ObjectSearch):
    """The search of everything that belongs to a scope."""

    def __init__(
        self, scope: ProofScope, sought: EventMatcher, progress: Callable[[int], None]
    ) -> None:
        super().__init__(scope, sought, progress)
        self._starts: dict[int, int] = {}  # of partitions
        self.newer = 0  # rows that are new events by their times alone
        self._manifests = ManifestNames(scope.context, sought)
        self.topics = [] if scope.topic is None else [scope.topic]  # and those with copies

    # What no listing shows.

    def ranges(self) -> None:
        """Reports ranges that may have read an event at an unknown offset; call this first."""
        for archive, pipeline, partition in self._scope.unfinished_ranges():
            self.range_under_way(archive, pipeline, partition)

    def range_under_way(self, archive: Archive, pipeline: str, partition: str) -> None:
        """Reports a range that may have been read before the delete."""
        what = f"a range of archive `{archive.name}` is under way there"
        place = layout.pipeline_partition(pipeline, partition)
        self.add(place, what, remedies.again(archive, pipeline))

    # The topic.

    def topic_objects(self, store: Store, topic: Topic) -> None:
        """Searches segments, journals, values of updates, and what Spark writers staged."""
        live = self._live(topic)
        values = self._values(topic)
        folder = f"topics/{topic.incarnation}/"
        clean = self._objects_without(store, folder, live)
        for info in store.list(folder):
            data = self.get(store, info, clean)
            if data is None:
                continue
            kind = info.key.removeprefix(folder).partition("/")[0]
            if kind == "amendments":
                if info.key not in values:
                    self.add(
                        info.key, "is the value of an update that no row names", remedies.VALUE
                    )
            elif kind == "segments":
                self._segment(store, topic, (info.key, data), live.get(info.key, []))
            elif kind == "journals" and info.key in live:
                self._live_rows(store, topic, live[info.key], data)
            elif kind == "sinks":
                self.loose(info.key, data, *remedies.of_batch(self._context, topic, info.key))
            else:
                self.loose(info.key, data, "no row names it")

    def deleted_topic_objects(self, store: Store, topic: Topic) -> None:
        """Searches what is left of a topic that is being deleted."""
        for info in store.list(f"topics/{topic.incarnation}/"):
            if not self.is_done((store.url, info.key)):
                self.unexplained(store, info, "its topic is being deleted", remedies.SWEEP)

    def _objects_without(
        self, store: Store, folder: str, live: Mapping[str, list[tuple[int, Run]]]
    ) -> set[str]:
        """Returns the segments and journals in which tasks have found nothing."""
        objects = (
            (info, [run for _, run in live.get(info.key, ())])
            for info in store.list(folder)
            if (store.url, info.key) not in self._seen
            and (info.key in live or info.key.startswith(f"{folder}segments/"))
        )
        return objects_without(self._context, store, objects, self._sought, self._progress)

    def _live(self, topic: Topic) -> dict[str, list[tuple[int, Run]]]:
        """Returns what rows name, by object."""
        found: dict[str, list[tuple[int, Run]]] = {}
        for partition in range(topic.partitions):
            for run in self._runs(topic, partition):
                found.setdefault(run.object, []).append((partition, run))
        return found

    def _runs(self, topic: Topic, partition: int) -> list[Run]:
        """Returns what a partition counts; nothing, with a trace, if it changes all the time."""

        def read() -> list[Run] | None:
            head = read_head(self._context, topic, partition)[0]
            self._starts[partition] = head.start
            with contextlib.suppress(MovedError):  # compiled or trimmed in between
                return list(covering(self._context, topic, partition, head))
            return None

        if (found := read_if_stable(self._context, read)) is not None:
            return found
        where = layout.topic_partition(topic.incarnation, partition)
        self.add(
            where, "is compiled or trimmed again and again, and was not searched", remedies.MOVING
        )
        return []

    def _values(self, topic: Topic) -> set[str]:
        found = set()
        for partition in range(topic.partitions):
            where = layout.topic_partition(topic.incarnation, partition)
            for row in self._context.catalog.scan(where, "amend/", "amend0"):
                amendment = decode_row(row.value, Amendment, f"row `{row.row}`")
                if amendment.object is not None:
                    found.add(amendment.object)
        return found

    def _segment(
        self, store: Store, topic: Topic, segment: tuple[str, bytes], runs: list[tuple[int, Run]]
    ) -> None:
        """Searches a segment, which may hold pieces that no row counts next to others."""
        key, data = segment
        total = sum(len(self._sought.rows(batch)) for batch in rows_of(data))
        counted = self._live_rows(store, topic, runs, data)
        if total > counted:
            what = "other runs share this object, and keep it" if runs else "no row names it"
            self.add(
                key,
                f"holds {total - counted} of them: {what}",
                remedies.COMPILE if runs else remedies.STRAY,
            )

    def _live_rows(
        self, store: Store, topic: Topic, runs: list[tuple[int, Run]], data: bytes
    ) -> int:
        """Checks places that count: erased ones need a compile, others are still there.

        Returns how many rows of the object have one of the ids or keys.
        """
        counted = 0
        for partition, run in runs:
            what = describe_run(topic.name, partition, run)
            piece = data[run.byte_start : run.byte_end]
            waiting, alive = [], []
            for rows in read_run(store, run, what, data=piece):
                found = self._sought.rows(rows.batch)
                older = self._sought.rows(rows.batch, later=False)
                counted += len(found)
                self.newer += len(found.keys() - older.keys())
                for row in found:
                    offset = int(rows.offsets[row])
                    state = self._sought.state(partition, offset, older.get(row, []))
                    if state == "deleted" or offset < self._starts[partition]:
                        waiting.append(offset)
                    elif state == "alive":
                        alive.append(offset)
            if waiting:
                said = _holds(waiting, partition)
                self.add(run.object, f"{said}: not compiled yet", remedies.COMPILE)
            if alive:
                said = _holds(alive, partition)
                self.add(run.object, f"{said}: readers still see it", remedies.DELETE)
        return counted

    # Archives.

    def archives(self, generations: Collection[Generation]) -> None:
        """Searches archives: what was set aside, their generations, and the rest of their folders.

        Pass those that can be reached.
        """
        archives = {each.name: each for each, _ in generations}.values()
        for archive in archives:
            self.enter(f"archive `{archive.name}`")
            self.aside(archive)
        for archive, generation in generations:
            self.enter(f"archive `{archive.name}`")
            self.archive(archive, generation)
        for archive in archives:
            self.enter(f"archive `{archive.name}`")
            self.whole_archive(archive)

    def aside(self, archive: Archive) -> None:
        """Searches files that were set aside, each with its sidecar, like an erasure reads them.

        Those of a dropped generation are left to the search of single objects. Those of another
        topic are not searched, even if it had the same name. Where a transform may have given
        events other times, the ledger's time does not say which ones came after the erasure.
        """
        store, lines = store_at(self._context, archive.store), aside_origins(self._context, archive)
        is_own = partial(self._scope.is_own_origin, archive)
        others = {key for key, line in lines.items() if not is_own(line)}
        for info in store.list(layout.aside_folder(archive.root)):
            if info.key.partition(layout.ERASING)[0] in others:
                self._others.add((store.url, info.key))
        files = AsideFiles(store, archive, lambda key: key not in others)
        names = files.names()
        later = bool(names) and archive.name in transformed_archives(self._context)
        for key in names:
            # Then it is searched as an object.
            with contextlib.suppress(*UNREADABLE, NotFoundError):
                read = files.read(key)
                if read is not None:
                    found = sum(self.in_rows(batch, later=later) for batch in read.batches)
                    for part in read.parts:
                        self.count((store.url, part.target), part.size)
                    if found:
                        what = f"holds {found} of them: {remedies.why_loose(key)}"
                        self.add(key, what, remedies.ASIDE, archive.name)

    def archive(self, archive: Archive, generation: int) -> None:
        """Searches all files of a generation, then everything else in its folders."""
        store = store_at(self._context, archive.store)
        reader = ArchiveFiles(store, archive.format_of(generation))
        pipeline = archive.pipeline(generation)
        own = self._scope.partitions(archive, generation)
        gone = {each: sorted(self._sought.offsets(number)) for each, number in own.items()}
        self._living, emptied = set(), {}
        for partition in own:
            self._under_way(archive, pipeline, partition, gone[partition])
        files = files_to_search(self._context, archive, generation, gone)
        clean = files_without(self._context, archive.name, files, self._sought, self._progress)
        for partition in read_partitions(self._context, pipeline):
            for manifest, file in counting_files(self._context, pipeline, partition):
                key = (store.url, file.target)
                folder = folder_below(file.target, f"{archive.folder(generation)}/")
                if file.events:
                    self._living.add(folder)
                    self._folders.add(file.target.rpartition("/")[0])
                elif partition in own:
                    had = erases(manifest, file, gone[partition])
                    emptied[file.target] = (folder, file.named if had else 0)
                if partition not in own:
                    self._others.add(key)  # even if that topic had the same name
                elif key not in self._seen:
                    self.count(key, file.size, is_reported=file in clean)
                    if file in clean:
                        continue
                    with self._note_changes(archive, generation, partition, file):
                        for batch in reader.batches(manifest, file):
                            place = (archive.name, file.target)
                            self._archived(place, batch, own[partition], gone[partition])
        self._note_empty_files(emptied)
        self._manifests.note(archive, generation, self._living)
        for table, what in stale_entries(self._context, archive, generation):
            self.add(f"table {table}", what, remedies.TABLE.replace("{archive}", archive.name))
        self.count_owner(store, archive)
        self._strays(store, archive, generation)
        self.staged(store, [f"{archive.dead}/"])

    def _strays(self, store: Store, archive: Archive, generation: int) -> None:
        """Searches objects of a generation's folder that no commit names, with their names."""
        folder = f"{archive.folder(generation)}/"
        for info in store.list(folder):
            data = self.get(store, info)
            if data is None:
                continue
            why, do = remedies.why_loose(info.key), remedies.remedy_of(info.key)
            if event_values(info.key, data, ()) is None:
                below, _, name = info.key.removeprefix(folder).rpartition("/")
                is_named = any(map(self._sought.is_value_in, folder_values(below, self._living)))
                if is_named or any(map(self._sought.is_quoted_in, names_of(name))):
                    self.add(info.key, f"has one of them in its name: {why}", do)
                is_file = has_columns(data)
                if is_file and is_in_delta_table(self._context, archive, generation, info.key):
                    why = "another program has written it to the Delta table"
                    do = remedies.in_delta_table(archive.name, folder)
            self.loose(info.key, data, why, do)

    @contextlib.contextmanager
    def _note_changes(
        self, archive: Archive, generation: int, partition: str, file: FileEntry
    ) -> Iterator[None]:
        """Notes a file that an erasure, a replay or a drop changes in between; not damage."""
        try:
            yield
        except CorruptError:
            if not is_changing(self._context, archive, generation, partition, file):
                raise
            self.add(file.target, "was changed while it was searched", remedies.CHANGED)

    def _note_empty_files(self, files: Mapping[str, tuple[str, int]]) -> None:
        """Notes files without events, with their folders and how many parts events have named.

        A folder without any event left may have its name from an erased one.
        """
        for target, (folder, named) in files.items():
            if any(map(self._sought.is_value_in, folder_values(folder, self._living))):
                self.add(target, "has one of them in the name of its folder", remedies.REBUILD)
            elif is_named_by_events(folder, named, self._living):
                what = "is empty, and its folder was named by a field of the events it had"
                self.add(target, what, remedies.REBUILD)

    def whole_archive(self, archive: Archive) -> None:
        """Searches an archive's folders for objects of no generation: there should be none.

        Files that were set aside and metadata of tables are expected; they name files of all
        generations. So is staging, also of dropped generations: a driver may have stalled.
        """
        store, folders = store_at(self._context, archive.store), folders_of(self._context, archive)
        self.staged(store, [f"{archive.root}/_", *(each.prefix for each in folders["staged"])])
        for folder in folders["files"]:
            for info in store.list(folder.prefix):
                why, do = "of no generation that the archive has", remedies.SWEEP
                for number in archive.formats:  # one that no delete here reaches
                    if info.key.startswith(f"{archive.folder(number)}/"):
                        why = f"of generation {number}, which was made from something else"
                        do = f"run `{self._scope.erase_command(archive.name)} --prove`"
                self.unexplained(store, info, why, do)

    def removed_archive(self, archive: Archive) -> None:
        """Searches the folders of a deleted archive, unless another one has marked its root."""
        store = store_at(self._context, archive.store)
        with contextlib.suppress(NotFoundError):
            if store.get(archive.owner) != archive.owner_content:
                return
        self.whole_archive(archive)

    def everything(self, store: Store) -> None:
        """Searches all objects of the home that nothing explains, and all manifests for names."""
        explained = explained_places(self._scope, store)
        for info in store.list(""):
            if self.is_done((store.url, info.key)) or info.key.startswith(explained):
                continue
            named = self._manifests.names_in(store, info.key)
            if named is None:
                self.unexplained(store, info, "nothing explains it", remedies.remedy_of(info.key))
                continue
            self.count((store.url, info.key), info.size)
            if named:
                do = remedies.REBUILD if self._manifests.is_needed(info.key) else remedies.SWEEP
                self.add(info.key, "has one of them in the name of a file", do)

    def rows(self) -> None:
        """Searches errors and reasons in catalog rows; no other row can hold ids or keys."""
        self.reasons()
        for where in quoting_seeks(self._context, self._sought.deletions):
            self.add(where, "quotes one of them in its reason", remedies.SEEK)
        self.errors()
        if not clear_deleted_rows(self._context.catalog):
            self.add(
                self._context.catalog.url, "its log holds rows that were deleted", remedies.LOG
            )

    def reasons(self) -> None:
        """Searches reasons and authors in the audits of the topic and its archives."""
        owners = self._scope.owners()
        for owner, where in quoting_rows(self._context, owners, self._sought.deletions):
            self.add(where, "quotes one of them in its reason", remedies.REASON, owner.name)

    def errors(self) -> None:
        """Searches errors that rows show to people, and names of source files."""
        for error in quoted_errors(self._scope, self._sought):
            self.add(*error)
        for name in named_source_files(self._scope, self._sought):
            self.add(*name)

    def copies(self, store: Store) -> None:
        """Searches topics that pumps, restores and playbacks copied to, and their archives.

        Unfinished copies count too. Lists other places that they wrote to.
        """
        found = self._scope.copies()
        for place, what in self._scope.copying_under_way(self._sought):
            self.add(place, what, remedies.COPYING)
        for copy in found.topics:
            deletions, own = copy_deletions(self._context, copy, self._sought.deletions)
            kind = DeletedTopicScope if copy.is_deleted else TopicScope
            scope = kind(self._context, copy.topic)
            scope.is_by_key = self._scope.is_by_key
            sought = EventMatcher(deletions, now_ms=self.proof.searched_ms, own=own)
            inner = _ProofSearch(scope, sought, self._progress)
            inner._seen = self._seen
            generations = scope.reachable()
            inner.all_uploads(store, generations)
            how = f"{copy.how}, and it was deleted" if copy.is_deleted else copy.how
            name = f"topic `{copy.topic.name}` ({how})"
            inner.enter(name)
            for place, what in scope.copying_under_way(sought):
                inner.add(place, what, remedies.COPYING)
            if copy.is_deleted:
                inner.deleted_topic_objects(store, copy.topic)
            else:
                self.topics.append(copy.topic)
                inner.topic_objects(store, copy.topic)
            inner.reasons()
            inner.errors()
            inner.archives(generations)
            inner.enter("all other objects of the home")
            inner.everything(store)  # what the original explains by another topic or archive
            for message in (
                *outside_of_home(self._context, scope.archives().values()),
                *renamed_copies(copy, self._sought.deletions),
                *retimed_copies(copy, inner.newer),
            ):
                if message not in self.proof.out_of_reach:
                    self.proof.out_of_reach.append(message)
            for each in inner.proof.places:
                self.enter(each.name)
                self._place.objects += each.objects
                self._place.bytes += each.bytes
            self.proof.objects += inner.proof.objects
            self.proof.bytes += inner.proof.bytes
            for trace in inner.proof.traces:
                self.add(trace.object, trace.what, trace.do, copy=name)
        self.proof.out_of_reach += found.outside

    def _under_way(self, archive: Archive, pipeline: str, partition: str, gone: list[int]) -> None:
        """Reports ranges that may have been read before the delete; call before the commits."""
        wanted = np.array(gone, np.int64)
        for each in (pipeline, replay_pipeline(pipeline)):
            if len(wanted) and is_under_way(self._context, each, partition, wanted):
                self.range_under_way(archive, each, partition)

    def _archived(
        self, place: tuple[str, str], batch: pa.RecordBatch, partition: int, gone: list[int]
    ) -> None:
        """Reports rows at erased offsets, and rows with the id or key of no later event."""
        archive, target = place
        for name in self._sought.hidden(batch):
            self.add(
                target, f"has no column `{name}`: what is in it cannot be seen", remedies.UNSEEN
            )
        older = self._sought.rows(batch, later=False)
        column = own_column(batch, "offset")
        found = set(older)
        if column is not None:
            offsets = column.cast(pa.int64())
            at = pc.is_in(offsets, pa.array(gone, pa.int64()))
            found = set(pc.indices_nonzero(at).to_pylist())
            for row in self._sought.rows(batch):
                self.newer += row not in older
                places, offset = older.get(row, []), offsets[row].as_py()
                if self._sought.state(partition, offset, places) != "another":
                    found.add(row)
        if found:
            self.add(target, f"holds {len(found)} of them", remedies.ARCHIVE, archive)
