"""Every object path and every catalog row that Tidelog keeps, on one screen.

Persisted names are stable: they may be added to, never renamed. ``OBJECTS`` and ``ROWS`` list
them for people; ARCHITECTURE.md shows the same tables, and a test compares the two. ``<t>`` is a
topic's incarnation and ``<p>`` a partition.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple
from urllib.parse import quote

from tidelog.model.limits import ROW_BYTES_MAX

__all__ = [
    "FLUSH_ROW",
    "FORMAT",
    "HOME_OBJECT",
    "HOME_PARTITION",
    "HOME_ROW",
    "OBJECTS",
    "PLAYBACK_PIN",
    "PLAYBACK_STATE",
    "REGISTRY",
    "REGISTRY_CHANGES",
    "ROWS",
    "TOPIC_ROW_KINDS",
    "Kind",
    "archive_row",
    "commit_row",
    "consumer_members",
    "consumer_row",
    "counted_row",
    "folder_row",
    "folder_rows",
    "lease_partition",
    "manifest",
    "manifest_epoch",
    "manifests",
    "member_row",
    "notify_partition",
    "partition_row",
    "pipeline_partition",
    "pipeline_row",
    "pipeline_shards",
    "playback_partition",
    "probe",
    "producer_row",
    "run_row",
    "segment",
    "segment_generation",
    "segments",
    "shard_row",
    "sink_batch",
    "sink_manifest",
    "sink_row",
    "sink_staged",
    "sinks",
    "slot_place",
    "slot_row",
    "slot_rows",
    "staged_epoch",
    "staging",
    "staging_of",
    "still_dead",
    "success",
    "token_row",
    "topic_partition",
    "topic_row",
    "unsettled_row",
]

FORMAT = 1  # of everything below; a home says the least that its readers and writers must know


class Kind(NamedTuple):
    """One kind of object (its path) or row (its partition and key)."""

    name: str
    what: str


OBJECTS = (
    Kind("home.json", "the home's id and the formats it needs; written once, by init"),
    Kind("probe/<id>", "tries out conditional writes during init; deleted at once"),
    Kind(
        "topics/<t>/segments/<generation>/<xx>/<id>.arrow",
        "segment: Arrow IPC file, zstd; the events of one flush, partition by partition",
    ),
    Kind(
        "topics/<t>/sinks/<sink>/<batch>/<id>.arrow",
        "staged segment of a Spark writer's task, copied to where segments are at commit",
    ),
    Kind(
        "topics/<t>/sinks/<sink>/<batch>/<id>.json",
        "manifest: the staged segments that a Spark writer's batch consists of",
    ),
    Kind(
        "pipelines/<name>/manifests/<epoch>/<source partition>/<id>.json",
        "what a range produced: files, counts, checksums, the end reached",
    ),
    Kind(
        "staging/<pipeline>/<epoch>/<attempt>/<id>/<n>",
        "a file that is not yet published; in the store where it will stand",
    ),
    Kind("archives/<name>/_owner", "whose folder an archive's root is"),
    Kind(
        "archives/<name>/g<generation>/<topic>/<names>/<generation>_<partition>_<offset>.<ext>",
        "archive file; the offset is that of its own first event",
    ),
    Kind(
        "archives/<name>/g<generation>/<topic>/<names>/_SUCCESS",
        "says that a date folder has all its events: watermark, files, events",
    ),
    Kind(
        "archives/<name>/g<generation>/_delta_log/<version>.json",
        "the files as a Delta table; the deltalake library writes it",
    ),
    Kind(
        "archives/<name>/_iceberg/<table>/metadata/<id>.avro",
        "the files as an Iceberg table; the pyiceberg library writes it",
    ),
    Kind(
        "dead/<archive>/<topic>/<generation>_<partition>_<offset>.parquet",
        "dead letters: events that no parser took, with all fields and the error",
    ),
    Kind(
        "dead/<archive>/_replayed/<attempt>/<topic>/<generation>_<partition>_<offset>.parquet",
        "those that a replay could not place either; replaces files of dead letters",
    ),
)

ROWS = (
    Kind("home · identity", "the same id and formats, and whether init has finished"),
    Kind("registry · changes", "counts creations and deletions; each of them expects its version"),
    Kind("registry · topic/<name>", "incarnation, settings, segment generation, state"),
    Kind("registry · consumer/<t>/<name>", "that this consumer exists"),
    Kind("registry · archive/<name>", "incarnation, source, folder, settings, generation, state"),
    Kind("registry · token/<id>", "a token of the server: hash of its secret, scopes, label"),
    Kind("registry · pipeline/<name>", "incarnation, source, sink and its incarnation, state"),
    Kind("topic/<t>/<p> · head", "next and start offset, segment floor, closed or not"),
    Kind("topic/<t>/<p> · run/<base>", "a run: object, byte range, checksum, times"),
    Kind("topic/<t>/<p> · slot/<level>/<start>/<base>/<write id>", "time index: the run's end"),
    Kind("topic/<t>/<p> · producer/<name>", "epoch, last sequence, recent batches and offsets"),
    Kind(
        "topic/<t>/0 · sink/<name>", "a Spark writer's query, its last batch, manifest, done or not"
    ),
    Kind("consumer/<t>/<name> · member/<id>", "a member's heartbeat, host and process"),
    Kind("consumer/<t>/<name>/<p> · lease", "owner, epoch, cursor, resolved start"),
    Kind("notify/<t>/<p> · state", "the debounce waiter, and the offset notified so far"),
    Kind("pipeline/<name> · shard/<m>", "the shard's driver, its epoch and heartbeat"),
    Kind("pipeline/<name> · flush", "changes when somebody asks for a flush"),
    Kind(
        "pipeline/<name> · counted/<kind>/<source partition>",
        "how far folder rows have its files",
    ),
    Kind("pipeline/<name> · folder/<end>/<folder>", "a date folder: files, events, final or not"),
    Kind("pipeline/<name> · unsettled/<end>/<folder>", "that its marker is being put or removed"),
    Kind("pipeline/<name> · partition/<source partition>", "that the pipeline has a head for it"),
    Kind(
        "pipeline/<name>/<source partition> · head",
        "position, ordinal, epoch of its driver, incarnation of the source",
    ),
    Kind("pipeline/<name>/<source partition> · intent", "a range under way; then its manifest"),
    Kind("pipeline/<name>/<source partition> · commit/<ordinal>/<start>", "a range that is done"),
    Kind("playback/<name> · pin", "topic, range, ends and sink, as they were when it began"),
    Kind("playback/<name> · state", "its driver, epoch and cursor; the lot under way"),
)

HOME_OBJECT = "home.json"
HOME_PARTITION = "home"
HOME_ROW = "identity"
REGISTRY = "registry"
REGISTRY_CHANGES = "changes"
FLUSH_ROW = "flush"
PLAYBACK_PIN = "pin"
PLAYBACK_STATE = "state"
TOPIC_ROW_KINDS = ("head", "producer", "run", "sink", "slot")  # what a sweep must understand


def probe(probe_id: str) -> str:
    """Where ``init`` tries the store out."""
    return f"probe/{probe_id}"


def segments(incarnation: str) -> str:
    """The folder of a topic's segments."""
    return f"topics/{incarnation}/segments/"


def segment(incarnation: str, generation: int, segment_id: str) -> str:
    """A segment's key; two digits of its id spread keys over prefixes."""
    return f"{segments(incarnation)}{generation:010}/{segment_id[:2]}/{segment_id}.arrow"


def segment_generation(key: str) -> int:
    """The generation under which a segment was written."""
    return int(key.split("/")[3])


def sinks(incarnation: str, sink: str) -> str:
    """The folder of what a Spark writer has staged; no sweep looks there."""
    return f"topics/{incarnation}/sinks/{sink}/"


def sink_staged(incarnation: str, sink: str, batch: int, staged_id: str) -> str:
    """A staged segment of one batch of a Spark writer."""
    return f"{sinks(incarnation, sink)}{batch:020}/{staged_id}.arrow"


def sink_manifest(incarnation: str, sink: str, batch: int, manifest_id: str) -> str:
    """A manifest of one batch; the sink's row says which one counts."""
    return f"{sinks(incarnation, sink)}{batch:020}/{manifest_id}.json"


def sink_batch(key: str) -> int:
    """The batch that a staged segment or a manifest belongs to."""
    return int(key.split("/")[4])


def sink_row(sink: str) -> str:
    """In the catalog partition of the topic's partition 0."""
    return f"sink/{sink}"


def topic_row(name: str) -> str:
    return f"topic/{name}"


def topic_partition(incarnation: str, partition: int) -> str:
    """The catalog partition that holds all rows of a topic's partition."""
    return f"topic/{incarnation}/{partition}"


def run_row(base: int) -> str:
    return f"run/{base:020}"


def slot_row(level: int, start_ms: int, base: int, write_id: str) -> str:
    return f"slot/{level:02}/{start_ms:015}/{base:020}/{write_id}"


def slot_rows(level: int, first_ms: int, last_ms: int) -> tuple[str, str]:
    """The rows of the slots that start in ``[first, last]``, as bounds of a scan."""
    return f"slot/{level:02}/{first_ms:015}/", f"slot/{level:02}/{last_ms:015}0"


def slot_place(row: str) -> tuple[int, int]:
    """The slot's start and the run's base, of a slot row."""
    return int(row[8:23]), int(row[24:44])


def producer_row(name: str) -> str:
    return f"producer/{_short(name)}"


def consumer_row(incarnation: str, name: str) -> str:
    return f"consumer/{incarnation}/{_short(name)}"


def consumer_members(incarnation: str, name: str) -> str:
    """The catalog partition of a consumer's members."""
    return f"consumer/{incarnation}/{_short(name)}"


def member_row(member_id: str) -> str:
    return f"member/{member_id}"


def lease_partition(incarnation: str, name: str, partition: int) -> str:
    """The catalog partition that holds the lease on one partition of a topic."""
    return f"{consumer_members(incarnation, name)}/{partition}"


def notify_partition(incarnation: str, partition: int) -> str:
    return f"notify/{incarnation}/{partition}"


def archive_row(name: str) -> str:
    return f"archive/{name}"


def token_row(token_id: str) -> str:
    return f"token/{token_id}"


def pipeline_row(name: str) -> str:
    return f"pipeline/{name}"


def pipeline_shards(incarnation: str) -> str:
    """The catalog partition of a pipeline's shards."""
    return f"pipeline/{incarnation}"


def shard_row(number: int) -> str:
    return f"shard/{number:06}"


def partition_row(source_partition: str) -> str:
    """In the catalog partition of the pipeline's shards; its value is the whole name."""
    return f"partition/{_short(source_partition)}"


def counted_row(kind: str, source_partition: str) -> str:
    """In the catalog partition of the pipeline's shards, as are the rows of its folders."""
    return f"counted/{kind}/{_short(source_partition)}"


def folder_row(end_ms: int, folder: str) -> str:
    """A date folder by the time that it ends at."""
    return f"folder/{end_ms:015}/{_short(folder)}"


def folder_rows(first_ms: int, last_ms: int) -> tuple[str, str]:
    """The rows of the folders that end in ``[first, last]``, as bounds of a scan."""
    return f"folder/{max(0, first_ms):015}/", f"folder/{max(0, last_ms):015}0"


def unsettled_row(end_ms: int, folder: str) -> str:
    return f"unsettled/{end_ms:015}/{_short(folder)}"


def success(folder: str) -> str:
    """What says to everybody that a folder has all its events."""
    return f"{folder}/_SUCCESS"


def pipeline_partition(incarnation: str, source_partition: str) -> str:
    """The catalog partition that holds a pipeline's rows for one source partition."""
    return f"pipeline/{incarnation}/{_short(source_partition)}"


def playback_partition(name: str) -> str:
    """The catalog partition that holds a named playback's rows, which stay for good."""
    return f"playback/{name}"


def commit_row(ordinal: int, start: str) -> str:
    """A committed range; by its start too, since a range may hold no event."""
    return f"commit/{ordinal:020}/{start}"


def manifest(incarnation: str, epoch: int, source_partition: str, manifest_id: str) -> str:
    folder = quote(source_partition, safe="")
    return f"{manifests(incarnation)}{epoch:010}/{folder}/{manifest_id}.json"


def manifests(pipeline: str) -> str:
    """The folder of a pipeline's manifests."""
    return f"pipelines/{pipeline}/manifests/"


def manifest_epoch(key: str) -> int:
    """Under which epoch a manifest was recorded."""
    return int(key.split("/")[3])


def staging_of(pipeline: str) -> str:
    """The folder of all that a pipeline has staged."""
    return f"staging/{pipeline}/"


def staging(pipeline: str, epoch: int, attempt: str) -> str:
    """Where one attempt at a range puts its files."""
    return f"{staging_of(pipeline)}{epoch:010}/{attempt}"


def staged_epoch(key: str) -> int:
    """Under which epoch something was staged."""
    return int(key.split("/")[2])


def still_dead(dead: str, attempt: str) -> str:
    """Where one attempt of a replay puts what stays dead, in the folder of dead letters."""
    return f"{dead}/_replayed/{attempt}"


def _short(name: str) -> str:
    """A name that fits into a row key; a longer one is hashed."""
    if len(name.encode()) <= ROW_BYTES_MAX // 2:
        return name
    return "sha256:" + hashlib.sha256(name.encode()).hexdigest()
