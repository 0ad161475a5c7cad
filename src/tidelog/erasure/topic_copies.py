"""Finds the copies that pumps, restores and playbacks made of a topic's or archive's events.

The catalog records each of them with its source and sink. A deleted pipeline is known by its
producers in the topic that it wrote to, whose rows are permanent and name source partitions. A
proof of an erasure searches these topics, with their archives, and lists the other sinks. A topic
that was deleted since is followed too: its archives and copies stay. A playback without a name, or
whose name was forgotten, is known by the home's audit, which names topics that may have been
created again since. So are topics with dead letters of handlers, and a pipeline that was deleted
with its target. A consumer that produces leaves no such record. A playback with a name is known by
its own rows alone, and one that certainly sent nothing is left out.

A pump may give its copies ids or keys of their own, by a field or a transform. A search for the
original ones does not find these copies, so a proof lists the topics that have them. It may also
give them other times, and so may a system outside of the home that events come back from. Then no
time of the original's ledger shows that an event in the copy is a new one.

The other way round, an erasure from a copy does not reach its origin, and names it
(``proof_scope``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tidelog.archive.derived_archives import (
    archives_of,
    copies_of,
    origin_of,
    partitions_of,
    sources_of,
)
from tidelog.archive.erased_events import Deletions, read_deletions
from tidelog.context import Context
from tidelog.coordination.audit import dead_letter_topic, deleted_copy, played_topic, read_actions
from tidelog.coordination.pipeline_rows import list_archives, list_pipelines, read_partitions
from tidelog.erasure.unfinished_ranges import is_under_way
from tidelog.log.ledger import ErasedIds, Times
from tidelog.log.topics import list_topics
from tidelog.model import layout
from tidelog.model.address import parse_address
from tidelog.model.archive import Archive
from tidelog.model.pipeline import RENAMED, NamedPipeline
from tidelog.model.topic import Topic, pipeline_of
from tidelog.pipeline.registry import is_target_deleted
from tidelog.playback.session import KnownPlayback, list_playbacks

__all__ = [
    "IN_HOME",
    "Copies",
    "CopyDeletions",
    "Originals",
    "RecordedCopy",
    "Source",
    "TopicCopy",
    "archives_with",
    "copies_of_archives",
    "copy_deletions",
    "copying_under_way",
    "deleted_pipelines",
    "find_copies",
    "incarnations_read",
    "may_be_same",
    "original_archives",
    "originals_of_topic",
    "other_sources",
    "pipelines_from",
    "recorded_copies",
    "source_of_url",
    "system_of",
    "transformed_archives",
]


Source = tuple[str, str]
"""The scheme and path of a URL: what it names, without the options and hosts to reach it by."""

IN_HOME = ("archive", "topic")  # schemes
_BY_NAMES = ("kafka", "kinesis", "scylla")  # schemes; a name may be a list or a pattern
_LISTS = frozenset(",*?[|(^")  # signs in such a list or pattern


class TopicCopy(NamedTuple):
    """A topic that may hold events of another one."""

    topic: Topic  # as far as it is known, if it was deleted
    how: str  # how the events got there
    renamed: frozenset[str] = frozenset()  # what they may have other ones of: id, key, time

    @property
    def is_deleted(self) -> bool:
        """Returns whether only what was made of it is left."""
        return self.topic.state == "deleting"

    @property
    def is_retimed(self) -> bool:
        """Returns whether its events may have other times than their originals."""
        return "time" in self.renamed


@dataclass(slots=True)
class Copies:
    """Where events were copied to, also through other topics."""

    topics: list[TopicCopy] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)  # messages about all other sinks


class Originals(NamedTuple):
    """What events were copied from, as the rows of copies name it."""

    sources: frozenset[Source]  # of pipelines
    incarnations: frozenset[str]  # of topics that playbacks read
    names: frozenset[str]  # of topics, in the audit and in partitions of deleted pipelines
    outside: frozenset[Source] = frozenset()  # systems that also had the events
    renamed: frozenset[str] = frozenset()  # what the events may have other ones of: id, key, time

    def has(self, source: Source) -> bool:
        """Returns whether a source that the audit names may be one of them."""
        if source[0] == "topic" and source[1] in self.names:
            return True
        return any(may_be_same(source, each) for each in (*self.sources, *self.outside))


class _Step(NamedTuple):
    how: str
    sink: str  # URL
    target: str  # incarnation of a topic; empty for other sinks
    renamed: frozenset[str] = frozenset()
    is_recorded: bool = False  # only the audit has a record of it


def source_of_url(url: str) -> Source:
    """Returns what a URL names."""
    address = parse_address(url)
    return address.scheme, address.name


def may_be_same(one: Source, other: Source) -> bool:
    """Returns whether two sources may have the same events: equal, or partly, or unknown."""
    (scheme, name), (other_scheme, other_name) = one, other
    if one == other or scheme != other_scheme or scheme in IN_HOME:
        return one == other
    if not name or not other_name:
        return True
    if scheme == "file":
        folders = [f"{each.rstrip('/')}/" for each in (name, other_name)]
        return folders[0].startswith(folders[1]) or folders[1].startswith(folders[0])
    return scheme in _BY_NAMES and not _LISTS.isdisjoint(name + other_name)


def system_of(source: Source) -> Source:
    """Returns a source without its path, if its source partitions are named by topic or stream."""
    return source if source[0] not in _BY_NAMES else (source[0], "")


def originals_of_topic(context: Context, topic: Topic) -> Originals:
    """Returns what events of a topic are copied from: the topic and its archives."""
    archives = {archive.name for archive, _ in archives_of(context, topic)}
    sources = {("topic", topic.name), *(("archive", each) for each in archives)}
    return Originals(frozenset(sources), frozenset({topic.incarnation}), frozenset({topic.name}))


def find_copies(context: Context, originals: Originals) -> Copies:
    """Returns where events were copied to, also through other topics."""
    topics = {each.incarnation: each for each in list_topics(context) if each.state == "ready"}
    found, left = Copies(), [originals]
    # What events may have other ones of there: in topics, and in systems that were written to.
    known = dict.fromkeys(originals.incarnations, originals.renamed)
    systems: dict[Source, frozenset[str]] = {}
    deleted = [*deleted_pipelines(context, topics.values())]
    # Read once: a playback that is forgotten in between is known by its rows or by the audit.
    playbacks = list(list_playbacks(context))
    labels = {each.label for each in playbacks}
    audited = [*_audited(context, topics.values(), labels)]
    while left:
        one = left.pop()
        by_deleted = (step for source, step in deleted if source in one.names)
        by_audit = (step for source, step in audited if one.has(source))
        for step in (*_steps(context, one, playbacks), *by_deleted, *by_audit):
            renamed = one.renamed | step.renamed
            if not step.target:
                renamed |= {"time"}  # the other system may set it, as Kafka and Kinesis do
                there = source_of_url(step.sink)
                if not (step.is_recorded and there in systems):  # known by its own rows
                    messages = [_outside(step), *_archives_from(context, step)]
                    found.outside += [each for each in messages if each not in found.outside]
                if there not in systems or not renamed <= systems[there]:
                    systems[there] = renamed | systems.get(there, renamed)
                    # A pipeline may bring them back from there.
                    left.append(Originals(frozenset({there}), *_NO_TOPICS, renamed=renamed))
            elif step.target not in known or not renamed <= known[step.target]:
                topic = topics.get(step.target) or _deleted_topic(step)
                if all(each.topic.incarnation != step.target for each in found.topics):
                    found.topics.append(TopicCopy(topic, step.how))
                known[step.target] = renamed | known.get(step.target, renamed)
                left.append(originals_of_topic(context, topic)._replace(renamed=renamed))
    found.topics = [each._replace(renamed=known[each.topic.incarnation]) for each in found.topics]
    return found


_NO_TOPICS: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())


def _deleted_topic(step: _Step) -> Topic:
    """Returns what is known of a topic that was deleted, or is being deleted."""
    name = parse_address(step.sink).path
    return Topic(name, step.target, partitions=1, created_ms=0, state="deleting")


def copies_of_archives(context: Context, names: Collection[str]) -> list[str]:
    """Returns messages about topics and other places that events of archives were copied to."""
    messages = []
    sources = frozenset(("archive", each) for each in names)
    found = find_copies(context, Originals(sources, frozenset(), frozenset()))
    for copy in found.topics:
        topic, how = copy.topic, copy.how
        do = f"delete these events there too, with `tidelog delete {topic.name}`"
        if not copy.is_deleted:
            messages.append(f"topic `{topic.name}`: {how}: was not searched: {do}")
        for archive in archives_with(context, topic) if copy.is_deleted else ():
            do = f"erase these events there too, with `tidelog archive erase {archive.name}`"
            what = f"has events of topic `{topic.name}`, which was deleted ({how})"
            messages.append(f"archive `{archive.name}`: {what}: was not searched: {do}")
    return [*messages, *found.outside]


def archives_with(context: Context, topic: Topic) -> list[Archive]:
    """Returns the archives that have events of a topic, not of an earlier one with its name."""
    found = {
        archive.name: archive
        for archive, generation in archives_of(context, topic)
        if partitions_of(context, archive.pipeline(generation), topic)
    }
    return list(found.values())


def copying_under_way(
    context: Context, originals: Originals, offsets: Callable[[str], Mapping[str, Collection[int]]]
) -> Iterator[tuple[str, str]]:
    """Yields unfinished copies that may hold deleted events: the row's place, and what it is.

    A driver or a playback may have read an event before it was deleted, and append it later, unless
    the target was deleted. ``offsets`` returns where a pipeline has these events, by source
    partition.
    """
    for pipeline in pipelines_from(context, originals.sources):
        if is_target_deleted(context, pipeline):
            continue
        for name, places in offsets(pipeline.incarnation).items():
            wanted = np.array(sorted(places), np.int64)
            if len(wanted) and is_under_way(context, pipeline.incarnation, name, wanted):
                place = layout.pipeline_partition(pipeline.incarnation, name)
                yield place, f"a range of pipeline `{pipeline.name}` is under way there"
    for playback in list_playbacks(context):
        is_of_origin = playback.pinned.pin.incarnation in originals.incarnations
        is_active = playback.is_played and not playback.state.finished_ms
        if is_of_origin and is_active and playback.pinned.target:
            place = layout.playback_partition(playback.name)
            yield place, f"playback `{playback.name}` of the topic is under way"


class CopyDeletions(NamedTuple):
    """What was deleted from a copy, by the ids and keys that were deleted from its original."""

    deletions: Deletions  # with the times up to which the erasures reach in the copy
    own: ErasedIds  # up to which times the copy itself refuses copies


def copy_deletions(context: Context, copy: TopicCopy, original: Deletions) -> CopyDeletions:
    """Returns what was deleted from a copy, by the same ids and keys.

    The ledger has the later time of both topics: events after an erasure in either are new ones.
    But where copies have other times than their originals, the ledger of the original says nothing
    about them. Then only a delete from the copy counts that was not before that of the original.
    """
    own = read_deletions(context, copy.topic, original.by_id, original.by_key)
    ledger, first = own.ledger, original.ledger
    combine = _own_times if copy.is_retimed else _later_times
    times = ErasedIds(combine(first.ids, ledger.ids), combine(first.keys, ledger.keys))
    return CopyDeletions(Deletions(own.all, own.by_id, own.by_key, times), ledger)


def _later_times(original: Times, own: Times) -> Times:
    times = dict(original)
    for digest, until_ms in own.items():
        times[digest] = max(until_ms, times.get(digest, until_ms))
    return times


def _own_times(original: Times, own: Times) -> Times:
    return {each: until for each, until in own.items() if until >= original.get(each, until)}


def _steps(
    context: Context, originals: Originals, playbacks: Iterable[KnownPlayback]
) -> Iterator[_Step]:
    """Yields what copied events out of a topic, or out of archives."""
    pipelines = list(pipelines_from(context, originals.sources))
    yield from _of_pipelines(pipelines, transformed_archives(context) if pipelines else set())
    for playback in playbacks:
        pinned = playback.pinned
        if pinned.pin.incarnation in originals.incarnations and not playback.sent_nothing:
            copied = "may have copied" if playback.is_unconfirmed else "copied"
            how = f"playback `{playback.name}` {copied} events of `{pinned.topic}` to it"
            yield _Step(how, pinned.sink, pinned.target)


def deleted_pipelines(context: Context, topics: Iterable[Topic]) -> Iterator[tuple[str, _Step]]:
    """Yields what deleted pipelines copied into topics, each with the topic of its source.

    That may have been a topic of another system: only a search shows it.
    """
    known = {each.incarnation for each in list_pipelines(context)}
    for topic in topics:
        for partition in range(topic.partitions):
            where = layout.topic_partition(topic.incarnation, partition)
            for row in context.catalog.scan(where, *layout.producer_rows()):
                producer = layout.producer_of(row.row)
                pipeline = pipeline_of(producer)
                if pipeline is not None and pipeline not in known:
                    source = producer.partition(f"{pipeline}:")[2].rpartition("/")[0]
                    how = f"a pipeline that was deleted copied events of `{source}` to it"
                    yield source, _Step(how, f"topic:{topic.name}", topic.incarnation)


def _audited(
    context: Context, topics: Iterable[Topic], labels: Collection[str]
) -> Iterator[tuple[Source, _Step]]:
    """Yields what was copied by the audit, each with its source.

    The audit has the name of a topic. Of one that was deleted, archives know the incarnation. The
    rows of playbacks with these labels say more than the audit.
    """
    copies = sorted(each for each in recorded_copies(context) if each.label not in labels)
    named = {(each.name, each.incarnation) for each in topics}
    named |= incarnations_read(context) if copies else set()
    for copy in copies:
        how = f"{copy.how} events of `{copy.source[1]}` to it"
        if copy.target is None:
            yield copy.source, _Step(how, copy.sink, "", is_recorded=True)
        for name, incarnation in sorted(named):
            if copy.is_into(name, incarnation):
                renamed = frozenset(copy.renamed)
                yield copy.source, _Step(how, f"topic:{name}", incarnation, renamed)


def incarnations_read(context: Context) -> set[tuple[str, str]]:
    """Returns the topics that archives and pipelines have read, also those deleted since."""
    pipelines = [each.incarnation for each in list_pipelines(context)]
    for archive in list_archives(context):
        pipelines += map(archive.pipeline, archive.formats)
    found = set()
    for pipeline in pipelines:
        for partition in read_partitions(context, pipeline):
            own = origin_of(context, pipeline, partition)
            if own is not None and own[0].incarnation:
                found.add((partition.rpartition("/")[0], own[0].incarnation))
    return found


class RecordedCopy(NamedTuple):
    """A copy that only the home's audit has a record of."""

    source: Source
    sink: str  # topic:NAME, or what it names elsewhere
    how: str  # who copied
    incarnation: str = ""  # of the topic; empty: unknown
    renamed: tuple[str, ...] = ()  # what the copies have other ones of: id, key, time
    label: str = ""  # of a playback with a name

    @property
    def target(self) -> str | None:
        """Returns the name of the topic that it copied into; None if it is another sink."""
        scheme, _, name = self.sink.partition(":")
        return name if scheme == "topic" else None

    def is_into(self, name: str, incarnation: str) -> bool:
        """Returns whether it may have copied into a topic."""
        return self.target == name and self.incarnation in ("", incarnation)


def recorded_copies(context: Context) -> set[RecordedCopy]:
    """Returns what the audit says about playbacks, dead letters and deleted pipelines."""
    found = set()
    for action in read_actions(context):
        played, letters, copied = (
            played_topic(action),
            dead_letter_topic(action),
            deleted_copy(action),
        )
        if copied is not None:
            how = "a pipeline that was deleted may have copied"
            renamed = tuple(sorted(copied.renamed))
            copy = RecordedCopy(copied.source, copied.sink, how, copied.incarnation, renamed)
            found.add(copy)
        elif played is not None:
            source, how = ("topic", played.source), "a playback copied"
            found.add(RecordedCopy(source, played.sink, how, label=played.label))
        elif letters is not None:
            how = f"{letters.handler} moved failed"
            found.add(RecordedCopy(letters.source, f"topic:{letters.target}", how))
    return found


def _of_pipelines(
    pipelines: Iterable[NamedPipeline], transformed: Collection[str]
) -> Iterator[_Step]:
    for each in pipelines:
        inside = parse_address(each.sink).scheme == "topic"
        how = f"pipeline `{each.name}` copied events of `{each.source}` to it"
        scheme, name = source_of_url(each.source)
        is_output = scheme == "archive" and name in transformed
        renamed = frozenset(RENAMED) if is_output else each.renames
        yield _Step(how, each.sink, each.target if inside else "", renamed)


def transformed_archives(context: Context) -> set[str]:
    """Returns archives with events that a transform may have given other ids, keys or times."""
    archives = [each for each in list_archives(context) if each.state == "ready"]
    found = {
        each.name
        for each in archives
        if each.had_output or any(written_as.transform for written_as in each.formats.values())
    }
    while more := {
        each.name
        for each in archives
        if each.name not in found and not found.isdisjoint(_archives_in(each))
    }:
        found |= more
    return found


def pipelines_from(context: Context, sources: Collection[Source]) -> Iterator[NamedPipeline]:
    """Yields the named pipelines that read one of some sources."""
    for each in list_pipelines(context):
        if source_of_url(each.source) in sources:
            yield each


def _archives_from(context: Context, step: _Step) -> Iterator[str]:
    """Yields messages about archives that read what was written to another system."""
    scheme, path = source_of_url(step.sink)
    for archive in list_archives(context) if path else ():
        schemes = {parse_address(url).scheme for url in sources_of(archive)}
        pipelines = [archive.pipeline(number) for number in archive.formats]
        held = {name for each in pipelines for name in read_partitions(context, each)}
        is_named = scheme in schemes and path in {name.rpartition("/")[0] for name in held}
        is_same = any(
            source == scheme and f"{path}/".startswith(f"{folder.rstrip('/')}/")
            for source, folder in map(source_of_url, sources_of(archive))
        )
        if archive.state == "ready" and (is_same or is_named):
            do = f"erase these events there too, with `tidelog archive erase {archive.name}`"
            what = f"archive `{archive.name}`: reads `{step.sink}`, to which {step.how}"
            yield f"{what.removesuffix(' to it')}: was not searched: {do}"


def _outside(step: _Step) -> str:
    return f"`{step.sink}`: {step.how}: was not searched: delete these events there too"


def original_archives(context: Context, archive: Archive) -> list[Archive]:
    """Returns the archives of this home that an archive was made of, also indirectly."""
    named = {each.name: each for each in list_archives(context) if each.state == "ready"}
    known = {copy.archive.name for copy in copies_of(context, archive)}
    found: list[Archive] = []
    todo = [archive]
    while todo:
        for name in sorted(_archives_in(todo.pop())):
            if name in named and name not in known:
                known.add(name)
                found.append(named[name])
                todo.append(named[name])
    return found


def other_sources(context: Context, archive: Archive) -> list[str]:
    """Returns messages about sources outside the home, which were neither searched nor erased.

    Includes those of the archive, and of the archives that it was made of.
    """
    every = [archive, *original_archives(context, archive)]
    outside = dict.fromkeys(url for each in every for url in sorted(sources_of(each)))
    return [
        f"source `{url}`: was not searched: delete these events there too"
        for url in outside
        if parse_address(url).scheme not in IN_HOME
    ]


def _archives_in(archive: Archive) -> set[str]:
    addresses = map(parse_address, sources_of(archive))
    return {each.path for each in addresses if each.scheme == "archive"}
