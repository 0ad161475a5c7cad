"""What a proof is about: a topic, and all archives and copies that may hold its events.

``ProofScope`` is what the search asks; ``archive_scope`` has the same for an archive without topic.
A source partition of an archive's generation has a number in a scope: ``Deletions`` has the erased
offsets by that number. For a topic it is the number of the topic's partition.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator

from tidelog.archive.derived_archives import (
    Origin,
    archives_of,
    is_of_topic,
    partitions_of,
)
from tidelog.archive.erased_events import Deletions, knows_all, read_deletions
from tidelog.connectors.source import SourcePartition
from tidelog.context import Context
from tidelog.coordination.audit import Owner
from tidelog.coordination.pipeline_rows import is_detached
from tidelog.erasure.matcher import EventMatcher
from tidelog.erasure.topic_copies import (
    Copies,
    copying_under_way,
    find_copies,
    originals_of_topic,
)
from tidelog.erasure.unsearched import outside_of_proof
from tidelog.model.archive import Archive
from tidelog.model.pipeline import NamedPipeline
from tidelog.model.topic import Topic
from tidelog.pipeline.registry import list_pipelines

__all__ = ["DeletedTopicScope", "Generation", "ProofScope", "TopicScope"]

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
    def unfinished_ranges(self) -> Iterable[tuple[str, str]]:
        """Waits for ranges that may hold events at unknown offsets.

        Returns those that do not end: the name of the archive, and the place of the row.
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

    def unfinished_ranges(self) -> Iterable[tuple[str, str]]:
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
