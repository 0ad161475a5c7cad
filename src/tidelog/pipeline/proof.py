"""The proof of an erasure: every object that could hold an event is read, decoded and searched.

Segments and journals of the topic, also those that no row names any more; large values of updates;
what Spark writers and pipelines have staged; and of every archive that was made of the topic the
files, sidecars, dead letters and metadata. An event is known by its id or its key, and where a file
has no column for either, by its offset. What is found is told with what to do about it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from tidelog.codec.formats.rows import read_rows
from tidelog.codec.segment import read_piece
from tidelog.errors import CorruptError, InvalidError, NotFoundError
from tidelog.home import Home
from tidelog.journal.audit import AuditRecord, key_mark, read_audit
from tidelog.journal.rows import covering
from tidelog.log.archives import read_partitions
from tidelog.log.contents import describe_run, read_run
from tidelog.log.replays import counting_files
from tidelog.log.topics import read_head
from tidelog.model import layout
from tidelog.model.archive import Archive
from tidelog.model.run import Amendment, Run, decode_row
from tidelog.model.topic import Topic
from tidelog.pipeline.contents import ArchiveFiles
from tidelog.pipeline.erase import archives_of
from tidelog.pipeline.places import store_at
from tidelog.store.base import ObjectInfo, Store
from tidelog.store.cache import CachedStore

__all__ = ["Proof", "Sought", "Trace", "deleted_offsets", "prove_erased"]

_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2"}
_COMPILE = "run `tidelog compile {topic} --amended`, then `tidelog sweep`"
_SWEEP = "run `tidelog sweep`; what is younger than its grace waits for the next one"
_ARCHIVE = "run `tidelog delete {topic} ID --prove` again, which writes the file anew"


@dataclass(frozen=True, slots=True)
class Sought:
    """What is looked for: ids, keys, and the places where those events stood."""

    ids: frozenset[str] = frozenset()
    keys: frozenset[bytes] = frozenset()
    places: Mapping[int, frozenset[int]] = field(default_factory=dict)  # offsets by partition

    def rows(self, batch: pa.RecordBatch) -> list[int]:
        """The rows of a batch that have one of the ids or keys."""
        found: set[int] = set()
        for name, values in (("id", list(self.ids)), ("key", list(self.keys))):
            if values and name in batch.schema.names:
                column = batch.column(name)
                given = pa.array(values, column.type)
                found.update(pc.indices_nonzero(pc.is_in(column, given)).to_pylist())
        return sorted(found)

    def in_text(self, data: bytes) -> bool:
        """Whether lines of JSON, perhaps compressed, hold one of them."""
        texts = [*self.ids, *(key.decode() for key in self.keys if _is_text(key))]
        forms = [json.dumps(text, ensure_ascii=plain) for text in texts for plain in (True, False)]
        content = _plain(data)
        return any(form.encode() in content for form in forms)


@dataclass(frozen=True, slots=True)
class Trace:
    """Where something is left."""

    object: str
    what: str
    do: str


@dataclass(slots=True)
class Proof:
    """What was searched, and what was found."""

    topic: str
    objects: int = 0
    bytes: int = 0
    traces: list[Trace] = field(default_factory=list)

    @property
    def is_erased(self) -> bool:
        """Whether no byte of it is left in any of these objects."""
        return not self.traces


def deleted_offsets(home: Home, topic: Topic) -> dict[int, set[int]]:
    """Every offset of a topic that was ever deleted, by partition, as the audit has it."""
    found: dict[int, set[int]] = {}
    for record in read_audit(home.log, topic):
        if record.op == "delete":
            for event in record.events:
                found.setdefault(event.partition, set()).add(event.offset)
    return found


def prove_erased(
    home: Home,
    topic: Topic,
    ids: Collection[str] = (),
    keys: Collection[bytes] = (),
    progress: Callable[[int], None] = lambda _: None,
) -> Proof:
    """Search for events by id and by key. Reads every object that could hold them, whole.

    An event that was appended under the same id after the erasure is another one, and no trace.
    ``InvalidError`` when nothing is asked for.
    """
    if not ids and not keys:
        raise InvalidError("proof: of which event? give an id or a key")
    sought = _sought(home, topic, frozenset(ids), frozenset(keys))
    store = home.store.inner if isinstance(home.store, CachedStore) else home.store
    search = _Search(home, topic, sought, progress)
    search.topic_objects(store)
    search.staged(store)
    for archive, generation in archives_of(home, topic):
        search.archive(archive, generation)
    return search.proof


def _sought(home: Home, topic: Topic, ids: frozenset[str], keys: frozenset[bytes]) -> Sought:
    """With the places that the audit knows."""
    marks = {key_mark(key) for key in keys}
    places: dict[int, set[int]] = {}
    for record in read_audit(home.log, topic):
        if record.op == "delete":
            for partition, offset in _places(record, ids, marks):
                places.setdefault(partition, set()).add(offset)
    return Sought(ids, keys, {p: frozenset(offsets) for p, offsets in places.items()})


def _places(
    record: AuditRecord, ids: frozenset[str], marks: Collection[str]
) -> Iterator[tuple[int, int]]:
    for event in record.events:
        if event.id in ids or record.key in marks:
            yield event.partition, event.offset


class _Search:
    def __init__(
        self, home: Home, topic: Topic, sought: Sought, progress: Callable[[int], None]
    ) -> None:
        self._home = home
        self._topic = topic
        self._sought = sought
        self._progress = progress
        self._seen: set[tuple[str, str]] = set()  # store and key
        self.proof = Proof(topic.name)

    # The topic.

    def topic_objects(self, store: Store) -> None:
        """Segments, journals, values of updates, what Spark writers have staged."""
        live = self._live()
        values = self._values()
        folder = f"topics/{self._topic.incarnation}/"
        for info in store.list(folder):
            data = self._get(store, info)
            if data is None:
                continue
            kind = info.key.removeprefix(folder).partition("/")[0]
            if kind == "amendments":
                if info.key not in values:
                    self._add(info.key, "is the value of an update that no row names", _SWEEP)
            elif kind == "segments":
                self._segment(store, info.key, data, live.get(info.key, []))
            elif kind == "journals" and info.key in live:
                self._live_rows(store, live[info.key])
            else:
                self._loose(info.key, data, "no row names it")

    def _live(self) -> dict[str, list[tuple[int, Run]]]:
        """What rows name, by object."""
        found: dict[str, list[tuple[int, Run]]] = {}
        for partition in range(self._topic.partitions):
            head, _ = read_head(self._home.log, self._topic, partition)
            for run in covering(self._home.log, self._topic, partition, head):
                found.setdefault(run.object, []).append((partition, run))
        return found

    def _values(self) -> set[str]:
        found = set()
        for partition in range(self._topic.partitions):
            where = layout.topic_partition(self._topic.incarnation, partition)
            for row in self._home.log.catalog.scan(where, "amend/", "amend0"):
                amendment = decode_row(row.value, Amendment, f"row `{row.row}`")
                if amendment.object is not None:
                    found.add(amendment.object)
        return found

    def _segment(self, store: Store, key: str, data: bytes, runs: list[tuple[int, Run]]) -> None:
        """A segment may hold pieces that no row counts any more beside others that are needed."""
        total = sum(len(self._sought.rows(batch)) for batch in _decoded(data))
        counted = 0
        for partition, run in runs:
            what = describe_run(self._topic.name, partition, run)
            piece = data[run.byte_start : run.byte_end]
            for batch in read_piece(piece, run.crc, run.count, what):
                counted += len(self._sought.rows(batch))
        self._live_rows(store, runs)
        if total > counted:
            what = "other runs share this object, and keep it" if runs else "no row names it"
            self._add(key, f"holds {total - counted} of them: {what}", _COMPILE if runs else _SWEEP)

    def _live_rows(self, store: Store, runs: list[tuple[int, Run]]) -> None:
        """What stands at places that count: erased ones are to be compiled, others are there."""
        for partition, run in runs:
            gone = self._sought.places.get(partition, frozenset())
            what = describe_run(self._topic.name, partition, run)
            for rows in read_run(store, run, what):
                for row in self._sought.rows(rows.batch):
                    offset = int(rows.offsets[row])
                    if offset in gone:
                        said = f"holds offset {offset} of partition {partition}: not compiled yet"
                        self._add(run.object, said, _COMPILE)
                    elif not gone:
                        said = f"holds offset {offset} of partition {partition}: was not deleted"
                        self._add(run.object, said, f"run `tidelog delete {self._topic.name} ID`")

    # Staging.

    def staged(self, store: Store, only: Iterable[str] = ("staging/",)) -> None:
        """Files that are not published yet, or never will be."""
        for prefix in only:
            for info in store.list(prefix):
                data = self._get(store, info)
                if data is not None:
                    self._loose(info.key, data, "it is staged")

    # Archives.

    def archive(self, archive: Archive, generation: int) -> None:
        """All files of a generation, then all else that lies in its folders."""
        store = store_at(self._home, archive.store)
        reader = ArchiveFiles(store, archive.making(generation))
        pipeline = archive.pipeline(generation)
        for partition in read_partitions(self._home.log, pipeline):
            number = partition.rpartition("/")[2]
            gone = self._sought.places.get(int(number) if number.isdecimal() else -1, frozenset())
            for manifest, file in counting_files(self._home.log, pipeline, partition):
                key = (store.url, file.target)
                if key in self._seen:
                    continue
                self._count(key, file.size)
                for batch in reader.batches(manifest, file):
                    self._archived(file.target, batch, gone)
        prefixes = (f"{archive.folder(generation)}/", f"{archive.dead}/", f"{archive.root}/_")
        for prefix in (*prefixes, layout.staging_of(pipeline)):
            self.staged(store, [prefix])

    def _archived(self, target: str, batch: pa.RecordBatch, gone: frozenset[int]) -> None:
        """Rows at erased offsets; without any, rows that have the id or the key."""
        name = next((each for each in ("offset", "_offset") if each in batch.schema.names), None)
        if name is None or not gone:
            found = len(self._sought.rows(batch))
        else:
            offsets = batch.column(name).cast(pa.int64())
            found = pc.sum(pc.is_in(offsets, pa.array(sorted(gone), pa.int64()))).as_py() or 0
        if found:
            self._add(target, f"holds {found} of them", _ARCHIVE)

    # Objects.

    def _loose(self, key: str, data: bytes, why: str) -> None:
        """An object whose events nobody counts: none of them may be in it."""
        try:
            found = sum(len(self._sought.rows(batch)) for batch in _decoded(data))
        except (CorruptError, InvalidError, pa.ArrowInvalid, OSError):
            found = int(self._sought.in_text(data))
        if found:
            self._add(key, f"holds {found} of them: {why}", _SWEEP)

    def _get(self, store: Store, info: ObjectInfo) -> bytes | None:
        """The bytes of an object; None for one that was searched, or has gone meanwhile."""
        key = (store.url, info.key)
        if key in self._seen:
            return None
        self._count(key, info.size)
        try:
            return store.get(info.key)
        except NotFoundError:
            return None

    def _count(self, key: tuple[str, str], size: int) -> None:
        self._seen.add(key)
        self.proof.objects += 1
        self.proof.bytes += size
        self._progress(size)

    def _add(self, key: str, what: str, do: str) -> None:
        trace = Trace(key, what, do.replace("{topic}", self._topic.name))
        if trace not in self.proof.traces:
            self.proof.traces.append(trace)


def _decoded(data: bytes) -> Iterator[pa.RecordBatch]:
    """The rows of a file of any format with columns, told by its first bytes.

    ``InvalidError`` for what has none.
    """
    if data.startswith(b"ARROW1"):
        yield from _arrow(data)
        return
    kinds = {b"PAR1": "parquet", b"ORC": "orc", b"Obj\x01": "avro"}
    kind = next((name for magic, name in kinds.items() if data.startswith(magic)), None)
    if kind is None:
        raise InvalidError("no columns")
    yield from read_rows(kind, io.BytesIO(data))


def _plain(data: bytes) -> bytes:
    """Bytes as they are, or as they were before they were compressed."""
    codec = next((name for magic, name in _CODECS.items() if data.startswith(magic)), None)
    if codec is None:
        return data
    try:
        return bytes(pa.CompressedInputStream(pa.BufferReader(data), codec).read())
    except OSError:
        return data


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _arrow(data: bytes) -> Iterator[pa.RecordBatch]:
    file = pa.ipc.open_file(pa.BufferReader(data))
    for number in range(file.num_record_batches):
        yield file.get_batch(number)
