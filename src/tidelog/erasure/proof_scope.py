"""What a proof is about: all archives and copies that may hold the events, and what it leaves out.

``ProofScope`` is what the search asks; ``archive_scope`` has the same for an archive without topic.
A source partition of an archive's generation has a number in a scope: ``Deletions`` has the erased
offsets by that number. For a topic it is the number of the topic's partition.

A proof also lists what it does not search although it may hold the events: where they came from. An
erasure from a copy does not reach its origin. So a proof names the archives, topics and systems
that the events of its topic were copied from, also through topics that were deleted since, and what
else the home has of an origin outside: archives and topics that read the same source, and dead
letters of handlers that do.

Nor does a proof recognize copies that a pump or a transform gave other ids or keys, or find an
archive whose folder was lost. It names these too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping

from tidelog.archive.archive import removed_archives
from tidelog.archive.derived_archives import (
    Origin,
    archives_of,
    is_of_topic,
    origin_of,
    partitions_of,
    sources_of,
)
from tidelog.archive.erased_events import Deletions, knows_all, read_deletions
from tidelog.archive.tables import open_table
from tidelog.connectors.by_url import StoreFolder, folders_of, pipelines_of
from tidelog.connectors.source import SourcePartition
from tidelog.context import Context
from tidelog.coordination.audit import Owner
from tidelog.coordination.pipeline_rows import (
    is_detached,
    list_archives,
    list_pipelines,
    read_partitions,
)
from tidelog.erasure.matcher import EventMatcher
from tidelog.erasure.topic_copies import (
    IN_HOME,
    Copies,
    Source,
    TopicCopy,
    archives_with,
    copying_under_way,
    deleted_pipelines,
    find_copies,
    incarnations_read,
    may_be_same,
    originals_of_topic,
    recorded_copies,
    source_of_url,
    system_of,
)
from tidelog.errors import TidelogError, contained
from tidelog.log.topics import list_topics
from tidelog.model import layout
from tidelog.model.address import parse_address
from tidelog.model.archive import Archive
from tidelog.model.pipeline import NamedPipeline
from tidelog.model.topic import Topic
from tidelog.store.base import Store

__all__ = [
    "DeletedTopicScope",
    "Generation",
    "ProofScope",
    "TopicScope",
    "explained_places",
    "lost_archives",
    "origins_of_deleted",
    "outside_of_home",
    "outside_of_proof",
    "places_of_files",
    "renamed_copies",
    "retimed_copies",
    "stagings_of_others",
]


def outside_of_home(context: Context, archives: Iterable[Archive]) -> Iterator[str]:
    """Yields messages about archives that this home may not erase from, and tables elsewhere."""
    for archive in archives:
        if is_detached(context, archive):
            yield (
                f"archive `{archive.name}` in `{archive.place}`: belongs to home "
                f"`{archive.home}`: was not searched: delete these events in that home too"
            )
        else:
            yield from _tables_elsewhere(context, archive)


def _tables_elsewhere(context: Context, archive: Archive) -> Iterator[str]:
    """Yields messages about tables with folders that are not the archive's, or unknown ones.

    Another program may have written events to these.
    """
    for name in archive.tables:
        errors: list[TidelogError] = []
        places: list[str] = []
        with contained(f"table `{name}`", errors.append):
            places = open_table(context, archive, name).outside()
        for error in errors:
            yield f"table `{name}` of archive `{archive.name}`: was not looked at: {error}"
        for place in dict.fromkeys(places):
            yield (
                f"table `{name}` of archive `{archive.name}`: its folder `{place}` was not "
                "searched: other programs may have written these events there"
            )


def renamed_copies(copy: TopicCopy, sought: Deletions) -> Iterator[str]:
    """Yields a message if a proof cannot recognize the events in a copy, nor in its archives."""
    marks = {"id": sought.by_id, "key": sought.by_key}
    changed = [f"{name}s" for name, wanted in marks.items() if wanted and name in copy.renamed]
    if changed:
        name, what = copy.topic.name, " and ".join(changed)
        how = f"{copy.how}, or a part of its way did, with other {what}"
        yield (
            f"topic `{name}`: {how}: was searched only for the {what} of the original: "
            f"{_delete_from(copy, 'these events')}"
        )


def retimed_copies(copy: TopicCopy, newer: int) -> Iterator[str]:
    """Yields a message if events in a copy are new ones only by times that a pump may have set.

    A range that was read before the delete may have brought them after it.
    """
    if copy.is_retimed and newer:
        name, events = copy.topic.name, "event" if newer == 1 else "events"
        how = f"{copy.how}, or a part of its way did, with other times"
        yield (
            f"topic `{name}`: {how}: it and its archives hold {newer:,} {events} with these ids or "
            "keys and later times than the delete there: look at them, and "
            f"{_delete_from(copy, 'those that are not new')}"
        )


def _delete_from(copy: TopicCopy, what: str) -> str:
    if copy.is_deleted:
        return f"erase {what} from its archives too, with `tidelog archive erase`"
    return f"delete {what} there too, with `tidelog delete {copy.topic.name}`"


def lost_archives(context: Context, sources: Iterable[Source]) -> Iterator[str]:
    """Yields messages about archives of some sources that were deleted because they were lost."""
    lost = [each for each in removed_archives(context) if each.ended and each.ended.lost]
    known, found = set(sources), list[Archive]()
    while more := [
        each
        for each in lost
        if each not in found and not known.isdisjoint(map(source_of_url, sources_of(each)))
    ]:
        found += more
        known |= {("archive", each.name) for each in more}
    for each in found:
        what = f"archive `{each.name}` in `{each.place}`: was deleted because its files were lost"
        yield f"{what}: was not searched: if they are found, delete these events there too"


def outside_of_proof(context: Context, topic: Topic) -> Iterator[str]:
    """Yields messages about what a proof of a topic does not search but may hold its events.

    An archive of an earlier topic with this name is not searched: it may be what was restored.
    """
    own = {each.name: each for each in archives_with(context, topic)}
    yield from outside_of_home(context, own.values())
    yield from lost_archives(context, originals_of_topic(context, topic).sources)
    yield from _unsearched_origins(context, topic, own, list(own.values()))


def origins_of_deleted(
    context: Context,
    topics: Iterable[tuple[str, str]],
    own: Mapping[str, Archive],
    copies: Collection[str],
) -> Iterator[str]:
    """Yields the same about topics that were deleted, by name and incarnation.

    ``own`` are archives that are searched, and ``copies`` are topics that are.
    """
    searched = tuple(f"topic `{each}`: " for each in copies)
    for name, incarnation in sorted(topics):
        for message in _unsearched_origins(context, _deleted(name, incarnation), own, []):
            if not message.startswith(searched):
                yield message


def _deleted(name: str, incarnation: str) -> Topic:
    return Topic(name, incarnation, partitions=1, created_ms=0, state="deleting")


def _unsearched_origins(
    context: Context, topic: Topic, own: Mapping[str, Archive], archives: Collection[Archive]
) -> Iterator[str]:
    """Yields messages about origins of a topic and of its archives, also through deleted topics."""
    ready = {each.incarnation for each in list_topics(context) if each.state == "ready"}
    gone = {each for each in incarnations_read(context) if each[1] not in ready}
    known, left, said = {topic.incarnation}, [(topic, archives)], set[str]()
    while left:
        one, of_one = left.pop()
        origins = _origins(context, one, of_one)
        found = [
            *_messages(one, own, origins),
            *_other_archives(context, one, (own, of_one), origins),
            *_other_pipelines(context, one, of_one),
            *_recorded_elsewhere(context, one, origins),
        ]
        for message in found:
            if message not in said:
                said.add(message)
                yield message
        named = {path for scheme, path in map(source_of_url, origins) if scheme == "topic"}
        for name, incarnation in sorted(gone):
            if name in named and incarnation not in known:
                known.add(incarnation)
                left.append((_deleted(name, incarnation), []))


def _messages(
    topic: Topic, own: Mapping[str, Archive], origins: Mapping[str, str]
) -> Iterator[str]:
    for url, how in origins.items():
        address = parse_address(url)
        if address.scheme == "archive" and address.path not in own:
            do = f"erase these events there too, with `tidelog archive erase {address.path}`"
            yield f"archive `{address.path}`: {how} events from it: was not searched: {do}"
        elif address.scheme == "topic" and address.path != topic.name:
            do = f"delete these events there too, with `tidelog delete {address.path}`"
            yield f"topic `{address.path}`: {how} events from it: was not searched: {do}"
        elif address.scheme not in IN_HOME:
            do = "delete these events there too"
            if address.scheme == "file":
                do += "; rows of the catalog keep the names of its files"
            yield f"source `{url}`: {how} events from it: was not searched: {do}"


def _other_archives(
    context: Context,
    topic: Topic,
    archives: tuple[Mapping[str, Archive], Collection[Archive]],
    origins: Iterable[str],
) -> Iterator[str]:
    """Yields messages about archives that may have events of a topic and are not made of it.

    They read the same system as a pump into the topic or one of its archives, or a folder with
    files of a topic that has its name. ``archives`` are those that are searched, and those of the
    topic; ``origins`` are listed already.
    """
    own, of_topic = archives
    listed = {path for scheme, path in map(source_of_url, origins) if scheme == "archive"}
    sources, names = _outside_partitions(context, topic, of_topic)
    for archive in list_archives(context):
        if archive.name in own or archive.name in listed or archive.state != "ready":
            continue
        pipelines = [archive.pipeline(number) for number in archive.formats]
        held = {(each, name) for each in pipelines for name in read_partitions(context, each)}
        found = [origin_of(context, *each) for each in held]
        is_named = any(each is not None and is_of_topic(each[0], topic) for each in found)
        urls = sorted(
            url for url in sources_of(archive) if parse_address(url).scheme not in IN_HOME
        )
        is_same = any(system_of(source_of_url(url)) in sources for url in urls)
        if is_named or (is_same and not names.isdisjoint(name for _, name in held)):
            what = f"`{urls[0]}`" if urls else f"topics named `{topic.name}`"
            do = f"erase these events there too, with `tidelog archive erase {archive.name}`"
            yield f"archive `{archive.name}`: may have got them from {what}: was not searched: {do}"


def _other_pipelines(context: Context, topic: Topic, archives: Iterable[Archive]) -> Iterator[str]:
    """Yields messages about pipelines that copied the same source to other topics."""
    sources, names = _outside_partitions(context, topic, archives)
    for each in list_pipelines(context):
        is_other = each.target != topic.incarnation and parse_address(each.sink).scheme == "topic"
        is_same = is_other and system_of(source_of_url(each.source)) in sources
        if is_same and not names.isdisjoint(read_partitions(context, each.incarnation)):
            name = parse_address(each.sink).path
            how = f"pipeline `{each.name}` copied events of `{each.source}` to it"
            do = f"delete these events there too, with `tidelog delete {name}`"
            yield f"topic `{name}`: {how}: was not searched: {do}"


def _recorded_elsewhere(context: Context, topic: Topic, origins: Iterable[str]) -> Iterator[str]:
    """Yields messages about topics that got events of the same origin by the audit alone."""
    outside = [each for each in map(source_of_url, origins) if each[0] not in IN_HOME]
    ready = {each.name for each in list_topics(context) if each.state == "ready"}
    for copy in sorted(recorded_copies(context)) if outside else ():
        is_same = any(may_be_same(copy.source, each) for each in outside)
        if copy.target is None or not is_same or copy.is_into(topic.name, topic.incarnation):
            continue
        how = f"{copy.how} events of `{':'.join(copy.source)}` to it"
        if copy.target in ready:
            do = f"delete these events there too, with `tidelog delete {copy.target}`"
            yield f"topic `{copy.target}`: {how}: was not searched: {do}"
        for archive in list_archives(context) if copy.target not in ready else ():
            if ("topic", copy.target) in map(source_of_url, sources_of(archive)):
                do = f"erase these events there too, with `tidelog archive erase {archive.name}`"
                what = f"reads topic `{copy.target}`, which was deleted ({how})"
                yield f"archive `{archive.name}`: {what}: was not searched: {do}"


def _outside_partitions(
    context: Context, topic: Topic, archives: Iterable[Archive]
) -> tuple[set[Source], set[str]]:
    """Returns the systems outside of the home that a topic's events came from.

    Also returns the source partitions that pumps and archives of the topic have read there.
    """
    into = [each for each in list_pipelines(context) if each.target == topic.incarnation]
    read = [(each.source, each.incarnation) for each in into]
    read += [
        (url, archive.pipeline(number))
        for archive in archives
        for url in sources_of(archive)
        for number in archive.formats
    ]
    outside = [each for each in read if parse_address(each[0]).scheme not in IN_HOME]
    names = {name for _, pipeline in outside for name in read_partitions(context, pipeline)}
    return {system_of(source_of_url(url)) for url, _ in outside}, names


def _origins(context: Context, topic: Topic, archives: Iterable[Archive]) -> dict[str, str]:
    """Returns what events of a topic and its archives may come from: URLs, and how they came."""
    into = [each for each in list_pipelines(context) if each.target == topic.incarnation]
    found = {each.source: f"pipeline `{each.name}` copied" for each in into}
    for copy in sorted(recorded_copies(context)):
        if copy.is_into(topic.name, topic.incarnation):
            found.setdefault(":".join(copy.source), copy.how)
    for archive in archives:
        for url in sorted(sources_of(archive)):
            found.setdefault(url, f"archive `{archive.name}` reads")
    names = {source for source, _ in deleted_pipelines(context, [topic])}
    how = "a pipeline that was deleted may have copied"
    for each in list_topics(context) if names else ():
        if each.name in names:
            found.setdefault(f"topic:{each.name}", how)
    for archive in list_archives(context) if names else ():
        pipelines = [archive.pipeline(number) for number in archive.formats]
        held = {name for each in pipelines for name in read_partitions(context, each)}
        if not names.isdisjoint(name.rpartition("/")[0] for name in held):
            found.setdefault(f"archive:{archive.name}", how)
    return found


Generation = tuple[Archive, int]
"""A generation of an archive."""


class ProofScope(ABC):
    """What a proof is about, and which rows, archives and copies belong to it."""

    context: Context
    is_by_key = False  # whether the proof is about keys alone, so that its reader knows no ids

    @property
    @abstractmethod
    def owner(self) -> Owner:
        """Returns the topic or archive itself, whose audit records the proof."""

    @property
    @abstractmethod
    def topic(self) -> Topic | None:
        """Returns the topic whose objects may hold the events; None if there is none."""

    @property
    @abstractmethod
    def incarnations(self) -> Collection[str]:
        """Returns the topics that may hold the events, and whose objects nothing else explains."""

    @abstractmethod
    def generations(self) -> list[Generation]:
        """Returns the generations of all archives that may hold the events."""

    @abstractmethod
    def matcher(self, ids: Collection[str], keys: Collection[bytes]) -> EventMatcher:
        """Returns what recognizes the erased events that had one of these ids or keys."""

    @abstractmethod
    def knows_all(self, deletions: Deletions) -> bool:
        """Returns whether a deletion of each id and key is known."""

    @abstractmethod
    def partitions(self, archive: Archive, generation: int) -> dict[str, int]:
        """Returns the source partitions of a generation that may hold the events, with numbers."""

    @abstractmethod
    def is_own_origin(self, archive: Archive, origin: Origin) -> bool:
        """Returns whether a file that an archive has set aside may hold the events."""

    @abstractmethod
    def unfinished_ranges(self) -> Iterable[tuple[Archive, str, str]]:
        """Waits for ranges that may hold events at unknown offsets.

        Returns those that do not end: archive, pipeline and source partition.
        """

    @abstractmethod
    def pipelines(self) -> list[NamedPipeline]:
        """Returns the named pipelines whose errors may quote the events."""

    @abstractmethod
    def quoted(self, pipeline: str, partition: str, sought: EventMatcher) -> set[int] | None:
        """Returns the erased offsets in a source partition; without a name, in all of them.

        None if the pipeline has the events under unknown numbers.
        """

    @abstractmethod
    def copies(self) -> Copies:
        """Returns where pumps, restores and playbacks copied the events."""

    @abstractmethod
    def copying_under_way(self, sought: EventMatcher) -> Iterator[tuple[str, str]]:
        """Yields unfinished copies that may hold the events."""

    @abstractmethod
    def out_of_reach(self) -> Iterator[str]:
        """Yields messages about what may hold the events and is not searched."""

    @abstractmethod
    def remedy(self, text: str, archive: str = "") -> str:
        """Returns what to do, with its names filled in; for an archive's own files, its name."""

    def erase_command(self, archive: str) -> str:
        """Returns the command that erases the events from an archive."""
        return f"tidelog archive erase {archive} {'--key KEY' if self.is_by_key else '--id ID'}"

    def reachable(self) -> list[Generation]:
        """Returns those of ``generations`` that this home may erase from."""
        return [each for each in self.generations() if not is_detached(self.context, each[0])]

    def archives(self) -> dict[str, Archive]:
        """Returns the archives of ``generations`` by name."""
        return {archive.name: archive for archive, _ in self.generations()}

    def owners(self) -> list[Owner]:
        """Returns all whose audits may name the events."""
        found: dict[str, Owner] = {self.owner.incarnation: self.owner}
        found |= {each.incarnation: each for each, _ in self.generations()}
        return list(found.values())


class TopicScope(ProofScope):
    """A topic, the archives that are made of it, and its copies."""

    def __init__(self, context: Context, topic: Topic) -> None:
        self.context = context
        self._topic = topic

    @property
    def topic(self) -> Topic:
        """Returns the topic."""
        return self._topic

    @property
    def incarnations(self) -> Collection[str]:
        """Returns the topic's incarnation."""
        return {self._topic.incarnation}

    @property
    def owner(self) -> Topic:
        """Returns the topic."""
        return self._topic

    def generations(self) -> list[Generation]:
        """Returns the generations whose events come from the topic, also indirectly."""
        return archives_of(self.context, self._topic)

    def matcher(self, ids: Collection[str], keys: Collection[bytes]) -> EventMatcher:
        """Returns what recognizes them, by the topic's audit and ledger."""
        return EventMatcher(read_deletions(self.context, self._topic, ids, keys))

    def knows_all(self, deletions: Deletions) -> bool:
        """Returns whether the audit or the ledger knows a deletion of each id and key."""
        return knows_all(self.context, self._topic, deletions)

    def partitions(self, archive: Archive, generation: int) -> dict[str, int]:
        """Returns the source partitions with events of the topic."""
        return partitions_of(self.context, archive.pipeline(generation), self._topic)

    def is_own_origin(self, archive: Archive, origin: Origin) -> bool:
        """Returns whether events of an origin may be of the topic."""
        return is_of_topic(origin, self._topic)

    def unfinished_ranges(self) -> Iterable[tuple[Archive, str, str]]:
        """Returns nothing: a delete knows the offsets of all events."""
        return ()

    def pipelines(self) -> list[NamedPipeline]:
        """Returns all named pipelines: their source partitions say whether it is of the topic."""
        return list(list_pipelines(self.context))

    def quoted(self, pipeline: str, partition: str, sought: EventMatcher) -> set[int] | None:
        """Returns the erased offsets of a partition, or of all."""
        number = SourcePartition.named(partition).number_in(self._topic.name)
        if partition and number is None:
            return set()  # of another topic
        numbers = range(self._topic.partitions) if number is None else [number]
        return {offset for each in numbers for offset in sought.offsets(each)}

    def copies(self) -> Copies:
        """Returns where events of the topic and its archives were copied to."""
        return find_copies(self.context, originals_of_topic(self.context, self._topic))

    def copying_under_way(self, sought: EventMatcher) -> Iterator[tuple[str, str]]:
        """Yields unfinished copies of the topic and its archives."""

        def offsets(pipeline: str) -> dict[str, set[int]]:
            found = partitions_of(self.context, pipeline, self._topic)
            return {name: sought.offsets(number) for name, number in found.items()}

        originals = originals_of_topic(self.context, self._topic)
        return copying_under_way(self.context, originals, offsets)

    def out_of_reach(self) -> Iterator[str]:
        """Yields messages about sources and archives of other homes."""
        return outside_of_proof(self.context, self._topic)

    def remedy(self, text: str, archive: str = "") -> str:
        """Returns what to do, with the topic's name."""
        delete = f"tidelog delete {self._topic.name} {'--key KEY' if self.is_by_key else 'ID'}"
        return text.replace("{delete}", delete).replace("{topic}", self._topic.name)


class DeletedTopicScope(TopicScope):
    """A topic that was deleted: its archives and copies are left."""

    def remedy(self, text: str, archive: str = "") -> str:
        """Returns what to do, with the name of the archive to erase from."""
        return text.replace("{delete}", self.erase_command(archive or "NAME"))


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
