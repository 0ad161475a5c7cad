"""Events into a topic of Kafka, each of them once for who reads what is committed.

A writer stages segments in the home's store. Publishing sends their events by transactions that
also commit how far the range came (``kafka_transactions``), numbered from the range's ordinal: so
publishing again, after a crash anywhere or by another driver, goes on after the last transaction.

Keys, values, times and headers go as they are, nulls too. An id and a type become the headers
``tidelog-id`` and ``tidelog-type``, since Kafka has no other place for them; ``codec.kafka_times``
says how odd times are written. Kafka forgets a group's offsets when nothing was committed for long
(a week, unless its ``offsets.retention.minutes`` says otherwise). So before the first transaction
of a range an object beside its staged files says that sending has begun, and which number the group
had. Where the group has no number, a range without the object was never sent, and begins with its
own ordinal. So does one whose object says that there was no number then either, for a day: Kafka
keeps what was committed since for longer. Any other range is not sent a second time on a guess: a
person must say how far it came.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidelog.clock import Clock, SystemClock
from tidelog.connectors.archive.staging import discard_files, staged_events
from tidelog.connectors.kafka.client import (
    ClientWatch,
    KafkaPlace,
    described,
    open_admin,
    parse_place,
    topic_id,
)
from tidelog.connectors.kafka.transactions import OURS, Transactions, check_properties
from tidelog.connectors.sink import RangeWriter, TargetSink
from tidelog.connectors.topic.segments import (
    SegmentTarget,
    SegmentWriter,
    check_numbers,
    keeps_partition,
    same_places,
)
from tidelog.errors import AlreadyExistsError, CorruptError, InvalidError, NotFoundError
from tidelog.model import layout
from tidelog.model.address import Address, parse_address
from tidelog.model.pipeline import Manifest
from tidelog.store import open_store_here
from tidelog.store.base import Store

__all__ = ["KafkaSettings", "KafkaSink", "open_kafka"]

_TIMEOUT_S = 15.0  # without any answer; then the brokers count as unreachable
_NO_NUMBER = b"none"  # in the object that says so
_NUMBER_LASTS_MS = 24 * 3600 * 1000  # Kafka keeps one for longer, unless it is told otherwise


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """How events get into Kafka; plain values."""

    store: str  # URL of the home's store, where segments are staged
    partitions: int
    incarnation: str  # Kafka's id of the topic, where it gives one
    keep_partition: bool  # else Kafka's partitioner chooses
    timeout_s: float = _TIMEOUT_S


def open_kafka(
    address: Address, *, environ: Mapping[str, str], store: str, timeout_s: float = _TIMEOUT_S
) -> KafkaSink:
    """The sink at ``kafka://host1,host2:9092/TOPIC?partition=key|same&property=value``.

    Other options are librdkafka's properties. ``NotFoundError`` when the topic is not there.
    """
    keep_partition = keeps_partition(address)
    place = _place_of(address, environ)
    check_properties(place)
    incarnation, partitions = _look(place, timeout_s)
    settings = KafkaSettings(store, partitions, incarnation, keep_partition, timeout_s)
    return KafkaSink(place, settings)


class KafkaSink:
    """One topic of Kafka. It is pickled without secrets, and writers need none."""

    def __init__(
        self,
        place: KafkaPlace,
        settings: KafkaSettings,
        open_store: Callable[[str], Store] = open_store_here,
        clock: Clock | None = None,
    ) -> None:
        self._place = place
        self._settings = settings
        self._open_store = open_store
        self._clock = clock or SystemClock()

    @property
    def url(self) -> str:
        return self._place.url

    @property
    def incarnation(self) -> str:
        return self._settings.incarnation

    def check(self, partitions: Sequence[str]) -> None:
        if self._settings.keep_partition:
            check_numbers(self._what, self._settings.partitions, partitions)

    def writer(self, partition: str, staging: str) -> RangeWriter:
        store = self._open_store(self._settings.store)
        return SegmentWriter(store, staging, SegmentTarget(self.url), self._places)

    def publish(self, manifest: Manifest) -> None:
        """As the interface says. ``InvalidError`` when Kafka no longer knows how far it came."""
        if not manifest.read:
            return
        end = manifest.ordinal + manifest.read
        if _look(self._place, self._settings.timeout_s)[0] != self.incarnation:
            raise NotFoundError(
                f"{self._what}: was deleted and made again since this pipeline began: "
                "start a new pipeline into it"
            )
        name = f"tidelog-{manifest.pipeline}-{manifest.partition}"
        timeout_s = self._settings.timeout_s
        with closing(Transactions(self._place, name, timeout_s, self._clock)) as transactions:
            number = self._start(manifest, transactions.reached(), name)
            if number >= end:
                return
            try:
                store, skip = self._open_store(self._settings.store), number - manifest.ordinal
                for batch, partition in staged_events(store, manifest, skip):
                    where = partition if self._settings.keep_partition else None
                    transactions.send(batch, where, number)
                    number += batch.num_rows
            except NotFoundError as exc:
                if (transactions.reached() or 0) >= end:
                    return  # somebody else has sent it all, and removed what was staged
                raise CorruptError(
                    f"{self._what}: a part of source partition `{manifest.partition}`, "
                    f"{manifest.start} to {manifest.end}, is neither staged nor sent ({exc}): "
                    "find out who deleted it, and restore it from a copy"
                ) from exc
            transactions.finish(end)

    def discard(self, manifest: Manifest) -> None:
        store = self._open_store(self._settings.store)
        discard_files(store, manifest.files)
        store.delete([layout.sending(file.staged) for file in manifest.files[:1]])

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopened, (self.url, self._settings))

    def __repr__(self) -> str:
        return f"KafkaSink({self.url!r})"

    def _places(self, batch: pa.RecordBatch) -> npt.NDArray[np.int32]:
        if self._settings.keep_partition:
            return same_places(batch, self._settings.partitions, self._what)
        return np.zeros(batch.num_rows, np.int32)

    def _start(self, manifest: Manifest, reached: int | None, name: str) -> int:
        """The number of the first event that is not in Kafka yet."""
        end = manifest.ordinal + manifest.read
        if reached is not None and reached > end:
            raise InvalidError(
                f"{self._what}: its group `{name}` says number {reached}, but source partition "
                f"`{manifest.partition}` comes to number {end} only: the catalog was restored from "
                f"an older copy: see which events of {manifest.start} to {manifest.end} are there, "
                f"and set the group's offset on partition 0 to {manifest.ordinal} plus their count",
                group=name,
                number=reached,
            )
        if reached is not None and reached >= manifest.ordinal:
            if reached < end:
                self._begin(manifest, reached)
            return reached
        if reached is None and self._is_unsent(manifest):
            self._begin(manifest, None)
            return manifest.ordinal
        known = "nothing" if reached is None else f"number {reached}"
        raise InvalidError(
            f"{self._what}: its group `{name}` says {known}, but source partition "
            f"`{manifest.partition}` came to number {manifest.ordinal} at least: Kafka has "
            f"forgotten it, or it was set back: see which events of {manifest.start} to "
            f"{manifest.end} are there, and set the group's offset on partition 0 to "
            f"{manifest.ordinal} plus their count",
            group=name,
            number=manifest.ordinal,
        )

    def _begin(self, manifest: Manifest, reached: int | None) -> None:
        """Say that sending begins, and which number there is; what was said first stays."""
        store, said = self._open_store(self._settings.store), _NO_NUMBER
        if reached is not None:
            said = str(reached).encode()
        if manifest.files:
            with contextlib.suppress(AlreadyExistsError):
                store.put(layout.sending(manifest.files[0].staged), said)

    def _is_unsent(self, manifest: Manifest) -> bool:
        """Whether nothing of a range was sent whose group has no number."""
        if not manifest.files:
            return True
        store = self._open_store(self._settings.store)
        key = layout.sending(manifest.files[0].staged)
        try:
            began = store.head(key)
            said = store.get(key)
        except NotFoundError:
            return True
        return said == _NO_NUMBER and self._clock.now_ms() - began.modified_ms <= _NUMBER_LASTS_MS

    @property
    def _what(self) -> str:
        return f"kafka topic `{self._place.topic}`"


def _place_of(address: Address, environ: Mapping[str, str]) -> KafkaPlace:
    place = parse_place(address, environ, "sink", OURS)
    properties = {name: text for name, text in place.properties.items() if name != "partition"}
    return replace(place, properties=properties)


def _look(place: KafkaPlace, timeout_s: float) -> tuple[str, int]:
    """Which one of the topics of this name it is, and how many partitions it has."""
    watch = ClientWatch()
    admin = open_admin(place, timeout_s, watch)
    topic = described(admin, [place.topic], timeout_s, watch)[place.topic]
    return topic_id(topic) or f"{place.servers}/{place.topic}", len(topic.partitions)


def _reopened(url: str, settings: KafkaSettings) -> KafkaSink:
    """A sink in another process, with that one's secrets."""
    environ = os.environ  # noqa: TID251 - a worker's world comes in here
    return KafkaSink(_place_of(parse_address(url), environ), settings)


_: type[TargetSink] = KafkaSink
