"""What a proof is about if events were erased from an archive that has no topic.

The archive's audit says which events these are: source partition, incarnation and offset, and ids
or a key up to a time. The audits of the archives that it was made of count too. These archives may
hold the same events, and are searched:

- its *family*: the archive, those that it was made of, and all that were made of one of these;
- archives of the same source partition, and those made of them: of the same incarnation of a
  deleted topic, or of the same topic, stream or file elsewhere.

A proof also searches what pipelines and playbacks copied out of all these, or out of the same
source, into topics. Sources outside of the home are out of reach.

An event is recognized by its offset where offsets mean the same, and by its id or key. One with a
later time than the erasure is another event; larger offsets say nothing, because no driver knows
how far its source had got then. So a range that was under way may hold an event that no record
names. A proof waits for such ranges, and names those that do not end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set
from functools import cached_property

from tidelog.archive.derived_archives import (
    Copy,
    Origin,
    copies_of,
    is_same_event,
    origin_of,
    sources_of,
)
from tidelog.archive.erased_events import Deletions
from tidelog.connectors.by_url import pipelines_of
from tidelog.context import Context
from tidelog.coordination.audit import (
    AuditRecord,
    id_hash,
    key_digest,
    key_hash,
    read_audit,
)
from tidelog.coordination.pipeline_rows import (
    generation_pipeline,
    list_archives,
    list_pipelines,
    read_partitions,
)
from tidelog.erasure.matcher import EventMatcher
from tidelog.erasure.proof_scope import (
    Generation,
    ProofScope,
    lost_archives,
    origins_of_deleted,
    outside_of_home,
)
from tidelog.erasure.topic_copies import (
    IN_HOME,
    Copies,
    Originals,
    Source,
    copying_under_way,
    find_copies,
    original_archives,
    other_sources,
    pipelines_from,
    source_of_url,
    system_of,
)
from tidelog.erasure.unfinished_ranges import still_under_way
from tidelog.log.ledger import ErasedIds
from tidelog.log.topics import list_topics
from tidelog.model.archive import Archive
from tidelog.model.pipeline import NamedPipeline
from tidelog.model.topic import Topic

__all__ = ["ArchiveScope"]


class ArchiveScope(ProofScope):
    """An archive without topic, and everything that may hold the events erased from it."""

    def __init__(self, context: Context, archive: Archive) -> None:
        self.context = context
        self._archive = archive
        above = [archive, *original_archives(context, archive)]
        # By the owner of an audit: its relation to all archives that were made of it.
        self._copies = {
            each.incarnation: {copy.archive.incarnation: copy for copy in copies_of(context, each)}
            for each in above
        }
        self._records: list[tuple[str, AuditRecord]] = [
            (each.incarnation, record)
            for each in above
            for record in read_audit(context, each)
            if record.op == "delete"
        ]
        self._made_of_others: set[str] = set()  # archives of those that read the same source
        self._numbers: dict[tuple[str, str], int] = {}  # of pipelines and source partitions
        self._deletions = Deletions()

    @property
    def owner(self) -> Archive:
        """Returns the archive."""
        return self._archive

    @property
    def topic(self) -> Topic | None:
        """Returns None: no topic holds the events."""
        return None

    @property
    def incarnations(self) -> Collection[str]:
        """Returns the topics that are deleted, or being deleted, and whose events it holds."""
        ready = {each.incarnation for each in self._topics}
        return {origin.incarnation for origin in self._origins} - ready

    def generations(self) -> list[Generation]:
        """Returns the generations of its family, and of archives of the same source partitions."""
        return self._generations

    def matcher(self, ids: Collection[str], keys: Collection[bytes]) -> EventMatcher:
        """Returns what recognizes them; it learns offsets as ``partitions`` is called."""
        times = ErasedIds(
            self._times({id_hash(each) for each in ids}, by_key=False),
            self._times({key_hash(each) for each in keys}, by_key=True),
        )
        self._deletions = Deletions.anywhere(ids, keys, times)
        return EventMatcher(self._deletions, by_offset=False)

    def knows_all(self, deletions: Deletions) -> bool:
        """Returns whether an audit has an erasure of each id and key."""
        ids = {mark for _, record in self._records for mark in record.ids}
        keys = {record.key for _, record in self._records}
        return ids.issuperset(map(id_hash, deletions.by_id)) and keys.issuperset(
            map(key_hash, deletions.by_key)
        )

    def partitions(self, archive: Archive, generation: int) -> dict[str, int]:
        """Returns all source partitions of its family, and the same ones of other archives."""
        pipeline = archive.pipeline(generation)
        found: dict[str, int] = {}
        for partition in read_partitions(self.context, pipeline):
            own = origin_of(self.context, pipeline, partition)
            if own is None or self.is_own_origin(archive, own[0]):
                place = (pipeline, partition)
                found[partition] = self._numbers.setdefault(place, len(self._numbers))
                if own is not None:
                    self._note_offsets(archive, generation, own, found[partition])
        return found

    def is_own_origin(self, archive: Archive, origin: Origin) -> bool:
        """Returns whether an origin of an archive may hold the events; an unknown origin may."""
        if archive.incarnation in self._family or not origin.partition:
            return True
        if any(origin.is_surely(each) for each in self._origins):
            return True
        is_same = any(origin.partition == each.partition for each in self._origins)
        return is_same and (
            archive.incarnation in self._made_of_others
            or not self._outside.isdisjoint(map(system_of, _sources(archive)))
        )

    def unfinished_ranges(self) -> Iterator[tuple[Archive, str, str]]:
        """Waits for ranges of the archive and its copies; yields those that do not end.

        They may have read events of a key before the erasure, at offsets that it does not know. A
        range that begins later leaves them out.
        """
        copies = self._copies[self._archive.incarnation].values()
        archives = {
            pipeline: copy.archive
            for copy in copies
            for pipeline in pipelines_of(copy.archive, *copy.archive.formats)
        }
        left = still_under_way(self.context, archives)
        for pipeline, partition in sorted({each[:2] for each in left}):
            yield archives[pipeline], pipeline, partition

    def pipelines(self) -> list[NamedPipeline]:
        """Returns the named pipelines that read one of the archives, or the same source."""
        return list(pipelines_from(self.context, self._originals.sources))

    def quoted(self, pipeline: str, partition: str, sought: EventMatcher) -> set[int] | None:
        """Returns the erased offsets of a source partition, or of all."""
        generation = next(
            (each for each in self._generations if each[0].pipeline(each[1]) == _base(pipeline)),
            None,
        )
        if generation is None or not partition:
            return self._offsets_of(partition)
        number = self.partitions(*generation).get(partition)
        if number is None:
            return set()  # of something else
        found = sought.offsets(number)
        is_copy = generation[0].incarnation in self._copies[self._archive.incarnation]
        return found if found or is_copy else None

    def copies(self) -> Copies:
        """Returns where events of the archives, or of the same source, were copied to."""
        return find_copies(self.context, self._originals)

    def copying_under_way(self, sought: EventMatcher) -> Iterator[tuple[str, str]]:
        """Yields unfinished copies of the archives and of the same source."""

        def offsets(pipeline: str) -> dict[str, set[int]]:
            return {
                each: self._offsets_of(each) for each in read_partitions(self.context, pipeline)
            }

        return copying_under_way(self.context, self._originals, offsets)

    def out_of_reach(self) -> Iterator[str]:
        """Yields messages about sources, topics that exist, and archives of other homes."""
        yield from outside_of_home(self.context, self.archives().values())
        yield from other_sources(self.context, self._archive)
        originals = self._originals
        yield from lost_archives(self.context, {*originals.sources, *originals.outside})
        gone = {
            (each.partition.rpartition("/")[0], each.incarnation)
            for each in self._origins
            if each.incarnation in self.incarnations
        }
        copies = [each.topic.name for each in self.copies().topics if not each.is_deleted]
        yield from origins_of_deleted(self.context, gone, self.archives(), copies)
        for topic in self._topics:
            if any(origin.incarnation == topic.incarnation for origin in self._origins):
                do = f"prove that with `tidelog verify {topic.name} --erased ID`"
                yield f"topic `{topic.name}`: the archive has events of it: was not searched: {do}"

    def remedy(self, text: str, archive: str = "") -> str:
        """Returns what to do, with the name of the archive to erase from."""
        return text.replace("{delete}", self.erase_command(archive or self._archive.name))

    # What was erased.

    @cached_property
    def _origins(self) -> frozenset[Origin]:
        """Returns the source partitions that the archive has, or had when events were erased."""
        found = {
            own[0]
            for generation in self._archive.formats
            for pipeline in [self._archive.pipeline(generation)]
            for partition in read_partitions(self.context, pipeline)
            if (own := origin_of(self.context, pipeline, partition)) is not None
        }
        found |= {
            Origin(source.partition, source.incarnation)
            for _, record in self._records
            for source in record.sources
            if source.partition
        }
        return frozenset(found)

    def _note_offsets(
        self, archive: Archive, generation: int, own: tuple[Origin, bool], number: int
    ) -> None:
        """Enters the erased offsets of a generation's source partition under its number."""
        found, marks = self._deletions, self._marks()
        for owner, record in self._records:
            copy = self._copies[owner].get(archive.incarnation)
            related = copy or Copy(archive, frozenset(), same_numbers=False)
            for event in record.events:
                source = record.sources[event.partition]
                origin = Origin(source.partition, source.incarnation)
                if event.offset >= 0 and is_same_event(related, generation, origin, own):
                    for places in (found.all, marks.get(event.id or ""), marks.get(record.key)):
                        if places is not None:
                            places.setdefault(number, set()).add(event.offset)

    def _offsets_of(self, partition: str) -> set[int]:
        """Returns the erased offsets of a source partition by its name, or of all."""
        marks = self._marks()
        return {
            event.offset
            for _, record in self._records
            for event in record.events
            if event.offset >= 0
            and partition in ("", record.sources[event.partition].partition)
            and (event.id in marks or record.key in marks)
        }

    def _marks(self) -> dict[str, dict[int, set[int]]]:
        """Returns where events were erased, by the marks of the ids and keys that are sought."""
        ids, keys = self._deletions.by_id, self._deletions.by_key
        return {id_hash(each): ids[each] for each in ids} | {
            key_hash(each): keys[each] for each in keys
        }

    def _times(self, marks: Set[str], *, by_key: bool) -> dict[bytes, int]:
        """Returns until when events with these ids or keys were erased.

        None for what was deleted from the topic while there was one: its ledger had that time.
        """
        found: dict[str, list[int]] = {}
        for _, record in self._records:
            for mark in marks & {record.key} if by_key else marks & set(record.ids):
                found.setdefault(mark, []).append(record.until_ms)
        return {key_digest(mark): max(each) for mark, each in found.items() if all(each)}

    # What may hold it.

    @cached_property
    def _family(self) -> frozenset[str]:
        """Returns the incarnations of archives that are made of each other."""
        return frozenset(each for copies in self._copies.values() for each in copies)

    @cached_property
    def _topics(self) -> list[Topic]:
        return [each for each in list_topics(self.context) if each.state == "ready"]

    @cached_property
    def _generations(self) -> list[Generation]:
        archives = {
            copy.archive.incarnation: copy.archive
            for copies in reversed(self._copies.values())
            for copy in copies.values()
        }
        for each in list_archives(self.context):
            if each.state == "ready" and each.incarnation not in archives and self._is_same(each):
                copies = copies_of(self.context, each)
                self._made_of_others |= {copy.archive.incarnation for copy in copies}
                archives |= {copy.archive.incarnation: copy.archive for copy in copies}
        return [(each, number) for each in archives.values() for number in each.from_live]

    def _is_same(self, archive: Archive) -> bool:
        """Returns whether another archive has one of the source partitions."""
        pipelines = [archive.pipeline(number) for number in archive.formats]
        return any(
            own is not None and self.is_own_origin(archive, own[0])
            for pipeline in pipelines
            for partition in read_partitions(self.context, pipeline)
            for own in [origin_of(self.context, pipeline, partition)]
        )

    @cached_property
    def _outside(self) -> frozenset[Source]:
        """Returns the sources outside of the home that its family has events of."""
        found = {
            source
            for copies in self._copies.values()
            for copy in copies.values()
            for source in _sources(copy.archive)
        }
        return frozenset(system_of(each) for each in found if each[0] not in IN_HOME)

    def _reads_same(self, named: NamedPipeline) -> bool:
        """Returns whether a pipeline reads one of the source partitions outside of the home."""
        if system_of(source_of_url(named.source)) not in self._outside:
            return False
        own = {origin.partition for origin in self._origins}
        return not own.isdisjoint(read_partitions(self.context, named.incarnation))

    @cached_property
    def _originals(self) -> Originals:
        archives = self.archives()
        topics = {
            source
            for each in archives.values()
            for source in _sources(each)
            if source[0] == "topic"
        }
        own = {("archive", name) for name in archives}
        others = filter(self._reads_same, list_pipelines(self.context))
        return Originals(
            sources=frozenset({*topics, *own, *(source_of_url(each.source) for each in others)}),
            incarnations=frozenset(origin.incarnation for origin in self._origins) - {""},
            names=frozenset(origin.partition.rpartition("/")[0] for origin in self._origins),
            outside=frozenset(
                source
                for each in archives.values()
                for source in _sources(each)
                if source[0] not in IN_HOME
            ),
        )


def _base(pipeline: str) -> str:
    """Returns the pipeline of a generation, also for its replays."""
    return generation_pipeline(pipeline) if pipeline else ""


def _sources(archive: Archive) -> set[Source]:
    return {source_of_url(url) for url in sources_of(archive)}
