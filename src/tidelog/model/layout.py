"""Builds and parses every object path and every catalog row; ``model.schema`` lists them."""

from __future__ import annotations

import hashlib
from urllib.parse import quote

from tidelog.model.limits import KEY_SEGMENT_BYTES_MAX, ROW_BYTES_MAX

__all__ = [
    "ACCEPTED_ROW",
    "BEFORE",
    "CLOSED_ROW",
    "COMPILE_ROW",
    "ERASED",
    "FAILURES_ROW",
    "FAILURE_ROWS",
    "FENCE_ROW",
    "FLUSH_ROW",
    "FORMAT",
    "GUARD_OBJECT",
    "HOME_AUDIT",
    "HOME_OBJECT",
    "HOME_PARTITION",
    "HOME_ROW",
    "JOBS",
    "JOB_LIST",
    "KEEPERS",
    "LISTING_ROW",
    "PLAYBACK_PIN",
    "PLAYBACK_STATE",
    "REGISTRY",
    "REGISTRY_CHANGES",
    "SCRIBE",
    "SCRIBE_LEASE",
    "SCRIBE_QUEUE",
    "SEEN_ROWS",
    "STAGED_ROW",
    "TOKEN_GUARD",
    "TOKEN_USES",
    "TOPIC_ROW_KINDS",
    "amend_offset",
    "amend_row",
    "amendment",
    "amendment_place",
    "amendments",
    "archive_row",
    "aside_row",
    "audit_partition",
    "audit_row",
    "commit_row",
    "consumer_members",
    "consumer_row",
    "consumers_partition",
    "counted_row",
    "deleted_row",
    "erased_partition",
    "folder_of_manifest",
    "folder_of_staged",
    "folder_row",
    "journal",
    "journal_base",
    "journal_place",
    "journal_row",
    "journal_work",
    "journals",
    "keeper_row",
    "lease_partition",
    "manifest",
    "manifest_epoch",
    "manifest_folder",
    "manifests",
    "member_row",
    "notify_partition",
    "partition_row",
    "pipeline_members",
    "pipeline_partition",
    "pipeline_row",
    "pipeline_rows",
    "playback_partition",
    "playback_row",
    "playback_staging",
    "playback_stagings",
    "probe",
    "producer_of",
    "producer_row",
    "producer_rows",
    "removed_row",
    "run_row",
    "seen_row",
    "segment",
    "segment_generation",
    "segment_origin",
    "segments",
    "sending",
    "sink_batch",
    "sink_generation",
    "sink_manifest",
    "sink_row",
    "sink_staged",
    "sink_target_row",
    "sinks",
    "slot_place",
    "slot_row",
    "slot_rows",
    "staged_epoch",
    "staging",
    "staging_of",
    "staging_pipeline",
    "still_dead",
    "stray_row",
    "success",
    "token_row",
    "topic_partition",
    "topic_row",
    "unsettled_row",
    "unused_row",
    "waiting_row",
    "waiting_rows",
    "witness",
    "witness_origin",
    "witnesses",
]

FORMAT = 3  # of everything stored: a home of another format is refused

GUARD_OBJECT = "guard"  # the home has had a token, also if its catalog was lost
HOME_AUDIT = "audit"
HOME_OBJECT = "home.json"
HOME_PARTITION, HOME_ROW = "home", "identity"
JOBS, JOB_LIST = "jobs", "list"
KEEPERS = "keepers"
REGISTRY, REGISTRY_CHANGES = "registry", "changes"
FAILURES_ROW, FAILURE_ROWS = "failures", "failure/"
CLOSED_ROW = "closed"  # among consumers: their topic was deleted, so none can be added
TOKEN_GUARD = "guard"  # noqa: S105 - a row of the registry: the home has had a token
TOKEN_USES = "tokens"  # noqa: S105 - a partition: when each token was used
FENCE_ROW, FLUSH_ROW, LISTING_ROW, SEEN_ROWS = "fence", "flush", "listing", "seen/"
ACCEPTED_ROW, COMPILE_ROW, PLAYBACK_PIN, PLAYBACK_STATE = "accepted", "compile", "pin", "state"
SCRIBE, SCRIBE_LEASE, SCRIBE_QUEUE = "scribe", "lease", "queue"
STAGED_ROW = "staged"
TOPIC_ROW_KINDS = (
    *("accepted", "amend", "compile", "head", "journal", "producer"),
    *("run", "sink", "staged", "slot", "stray", "unused"),
)  # the kinds that a sweep must understand


def probe(probe_id: str) -> str:
    """Returns the key of the object that ``init`` tests the store with."""
    return f"probe/{probe_id}"


def segments(incarnation: str) -> str:
    """Returns the folder of a topic's segments."""
    return f"topics/{incarnation}/segments/"


def segment(
    incarnation: str, generation: int, segment_id: str, partitions: int = 1, copy_id: str = ""
) -> str:
    """Returns a segment's key; two digits of its id spread keys over prefixes.

    The key contains the number of partitions that the segment has events of. A segment that is
    stored again, or that was staged, has a ``copy_id``; each partition commits one of the copies.
    """
    name = f"{segment_id}-{partitions}" + (f"_{copy_id}" if copy_id else "")
    return f"{segments(incarnation)}{generation:010}/{segment_id[:2]}/{name}.arrow"


def segment_origin(key: str) -> tuple[str, int]:
    """Returns the id that all copies of a segment share, and how many partitions it is for."""
    name = key.rpartition("/")[2].removesuffix(".arrow").partition("_")[0]
    segment_id, _, partitions = name.rpartition("-")
    return segment_id, int(partitions)


def segment_generation(key: str) -> int:
    """Returns the generation under which a segment was written."""
    return int(key.split("/")[3])


def journals(incarnation: str) -> str:
    """Returns the folder of a topic's journals."""
    return f"topics/{incarnation}/journals/"


def journal(
    incarnation: str, partition: int, epoch: int, base: int, work_id: str, journal_id: str = ""
) -> str:
    """Returns a journal's key. One compile may write several; each has a ``journal_id``.

    Without one it means all journals of the compile, in a row of unused objects.
    """
    folder = f"{journals(incarnation)}{partition:06}/{epoch:010}"
    name = f"{base:020}_{work_id}" + (f"-{journal_id}" if journal_id else "")
    return f"{folder}/{name}.parquet"


def journal_place(key: str) -> tuple[int, int]:
    """Returns the partition of a journal, and the epoch under which it was compiled."""
    partition, epoch = key.split("/")[3:5]
    return int(partition), int(epoch)


def journal_base(key: str) -> int:
    """Returns the first offset that a journal covers."""
    return int(key.rpartition("/")[2].partition("_")[0])


def journal_work(key: str) -> tuple[str, str]:
    """Returns the folder of a journal, and the compile that wrote it."""
    folder, _, name = key.rpartition("/")
    return folder, name.removesuffix(".parquet").partition("_")[2].partition("-")[0]


def amendments(incarnation: str) -> str:
    """Returns the folder of the large values of a topic's updates."""
    return f"topics/{incarnation}/amendments/"


def amendment(
    incarnation: str, generation: int, partition: int, sequence: int, value_id: str
) -> str:
    """Returns the key of an update's new value; :func:`segment_generation` reads its generation.

    ``sequence`` is that of the partition's newest amendment when the value was uploaded.
    """
    folder = f"{amendments(incarnation)}{generation:010}/{value_id[:2]}"
    return f"{folder}/{partition:06}-{sequence:020}_{value_id}"


def amendment_place(key: str) -> tuple[int, int]:
    """Returns the partition of an update's value, and the newest amendment before it."""
    partition, sequence = key.split("/")[5].partition("_")[0].split("-")
    return int(partition), int(sequence)


def witnesses(incarnation: str) -> str:
    """Returns the folder of the witnesses of staged segments."""
    return f"topics/{incarnation}/witnesses/"


def witness(incarnation: str, origin: str, witness_id: str) -> str:
    """Returns the key of a witness, which lists partitions that committed a segment."""
    return f"{witnesses(incarnation)}{origin}_{witness_id}"


def witness_origin(key: str) -> str:
    """Returns the id that all copies of its segment share; ``ValueError`` for another key."""
    origin, between, _ = key.rpartition("/")[2].partition("_")
    if not between:
        raise ValueError(key)
    return origin


def sinks(incarnation: str, sink: str) -> str:
    """Returns the folder of what a Spark writer has staged."""
    return f"topics/{incarnation}/sinks/{sink}/"


def sink_staged(incarnation: str, sink: str, batch: int, generation: int, staged_id: str) -> str:
    """Returns the key of a segment that a Spark writer stages in one batch and generation."""
    return f"{sinks(incarnation, sink)}{batch:020}/{generation:010}_{staged_id}.arrow"


def sink_generation(key: str) -> int:
    """Returns the generation of a staged segment; ``ValueError`` for another key."""
    return int(key.rpartition("/")[2].partition("_")[0])


def sink_manifest(incarnation: str, sink: str, batch: int, manifest_id: str) -> str:
    """Returns the key of a manifest of one batch; the sink's row names the one that counts."""
    return f"{sinks(incarnation, sink)}{batch:020}/{manifest_id}.json"


def sink_batch(key: str) -> tuple[str, int]:
    """Returns the sink and batch that a staged segment or a manifest belongs to."""
    return key.split("/")[3], int(key.split("/")[4])


def sink_target_row(topic: str, sink: str) -> str:
    """Returns a row of the registry, which outlives the topic."""
    return f"sink/{topic}/{sink}"


def sink_row(sink: str) -> str:
    """Returns a row in the catalog partition of the topic's partition 0."""
    return f"sink/{sink}"


def topic_row(name: str) -> str:
    return f"topic/{name}"


def deleted_row(incarnation: str) -> str:
    """Returns the row of the registry that records that a topic was deleted."""
    return f"deleted/{incarnation}"


def topic_partition(incarnation: str, partition: int) -> str:
    """Returns the catalog partition that holds all rows of a topic's partition."""
    return f"topic/{incarnation}/{partition}"


def run_row(base: int) -> str:
    return f"run/{base:020}"


def journal_row(base: int) -> str:
    return f"journal/{base:020}"


def amend_row(offset: int) -> str:
    return f"amend/{offset:020}"


def amend_offset(row: str) -> int:
    """Returns the offset of the event that a row amends."""
    return int(row[6:])


def unused_row(row_id: str) -> str:
    """Returns a row that lists objects which a partition no longer needs.

    Its kind sorts after those of rows that name objects. So a scan in key order finds an object
    that moves from such a row into this one at least once.
    """
    return f"unused/{row_id}"


def stray_row(row_id: str) -> str:
    """Returns a row that notes strays, in the catalog partition of partition 0."""
    return f"stray/{row_id}"


def audit_partition(incarnation: str) -> str:
    """Returns the catalog partition of a topic's audit records."""
    return f"audit/{incarnation}"


def audit_row(at_ms: int, record_id: str) -> str:
    return f"{at_ms:015}/{record_id}"


def erased_partition(incarnation: str, digest: str) -> str:
    """Returns the catalog partition of the ledger for an id, given as its sha256 in hex."""
    return f"erased/{incarnation}/{digest[:2]}"


def slot_row(level: int, start_ms: int, base: int, write_id: str) -> str:
    return f"slot/{level:02}/{start_ms:015}/{base:020}/{write_id}"


def slot_rows(level: int, first_ms: int, last_ms: int) -> tuple[str, str]:
    """Returns the rows of the slots that start in ``[first, last]``, as bounds of a scan."""
    return f"slot/{level:02}/{first_ms:015}/", f"slot/{level:02}/{last_ms:015}0"


def slot_place(row: str) -> tuple[int, int]:
    """Returns the slot's start and the run's base, of a slot row."""
    return int(row[8:23]), int(row[24:44])


def producer_row(name: str) -> str:
    return f"producer/{_short(name)}"


def producer_rows() -> tuple[str, str]:
    """Returns the rows of a partition's producers, as bounds of a scan."""
    return "producer/", "producer0"


def producer_of(row: str) -> str:
    """Returns the producer's name in its row's key; the hash of a long one."""
    return row.partition("/")[2]


def consumers_partition(incarnation: str) -> str:
    """Returns the catalog partition that lists the consumers of a topic.

    It is not the registry, so that a reader needs write access only here.
    """
    return f"consumer/{incarnation}"


def consumer_row(name: str) -> str:
    return f"consumer/{_short(name)}"


def consumer_members(incarnation: str, name: str) -> str:
    """Returns the catalog partition of a consumer's members."""
    return f"consumer/{incarnation}/{_short(name)}"


def member_row(member_id: str) -> str:
    return f"member/{member_id}"


def lease_partition(incarnation: str, name: str, partition: int) -> str:
    """Returns the catalog partition that holds the lease on one partition of a topic."""
    return f"{consumer_members(incarnation, name)}/{partition}"


def notify_partition(incarnation: str, partition: int) -> str:
    return f"notify/{incarnation}/{partition}"


def archive_row(name: str) -> str:
    return f"archive/{name}"


def removed_row(incarnation: str) -> str:
    """Returns the row of the registry for an archive that was deleted with its files."""
    return f"removed/{incarnation}"


def keeper_row(keeper_id: str) -> str:
    return f"keeper/{keeper_id}"


def token_row(token_id: str) -> str:
    return f"token/{token_id}"


def pipeline_row(name: str) -> str:
    return f"pipeline/{name}"


def pipeline_rows() -> tuple[str, str]:
    """Returns the registry's rows of all pipelines, as bounds of a scan."""
    return "pipeline/", "pipeline0"


def playback_row(name: str) -> str:
    return f"playback/{name}"


def pipeline_members(incarnation: str) -> str:
    """Returns the catalog partition of a pipeline's drivers, and of its list of partitions."""
    return f"pipeline/{incarnation}"


def partition_row(source_partition: str) -> str:
    """Returns a row in the catalog partition of the drivers; its value has the whole name."""
    return f"partition/{_short(source_partition)}"


def failure_row(source_partition: str) -> str:
    """Returns a row in the catalog partition of the drivers; empty name: the whole source."""
    return f"{FAILURE_ROWS}{_short(source_partition)}"


def seen_row(source_partition: str) -> str:
    """Returns a row in the catalog partition of the drivers; its value has the whole name."""
    return f"{SEEN_ROWS}{_short(source_partition)}"


def counted_row(kind: str, source_partition: str) -> str:
    """Returns a row in the catalog partition of the drivers, like the rows of its folders."""
    return f"counted/{kind}/{_short(source_partition)}"


def folder_row(end_ms: int, folder: str) -> str:
    """Returns the row of a date folder, sorted by the end of its time range."""
    return f"folder/{end_ms:015}/{_short(folder)}"


def waiting_row(end_ms: int, folder: str) -> str:
    """Returns the row of a date folder that was never marked."""
    return f"waiting/{end_ms:015}/{_short(folder)}"


def waiting_rows(last_ms: int) -> tuple[str, str]:
    """Returns the rows of folders that end at a time or before, as bounds of a scan."""
    return "waiting/", f"waiting/{max(0, last_ms):015}0"


ERASED = "erased"  # beside a head: counts the events that erasures removed from its files
ERASING = ".erasing-"  # between the name of a file set aside and its checksum after an erasure
BEFORE = "before"  # beside a promoted head: the account of the generation before it


def aside_folder(root: str) -> str:
    """Returns the folder of an archive's files that were set aside."""
    return f"{root}/_aside/"


def aside_row(manifest_id: str) -> str:
    """Returns the row of a range that was set aside; beside the head of its source partition."""
    return f"aside/{manifest_id}"


def unsettled_row(end_ms: int, folder: str) -> str:
    return f"unsettled/{end_ms:015}/{_short(folder)}"


def success(folder: str) -> str:
    """Returns the key of the marker which says that a folder is complete."""
    return f"{folder}/_SUCCESS"


def pipeline_partition(incarnation: str, source_partition: str) -> str:
    """Returns the catalog partition of a pipeline's rows for one source partition."""
    return f"pipeline/{incarnation}/{_short(source_partition)}"


def playback_partition(name: str) -> str:
    """Returns the catalog partition of a named playback's rows."""
    return f"playback/{name}"


def commit_row(ordinal: int, start: str) -> str:
    """Returns the row of a committed range. It has the start too, since a range may be empty."""
    return f"commit/{ordinal:020}/{start}"


def manifest(incarnation: str, epoch: int, source_partition: str, manifest_id: str) -> str:
    folder = manifest_folder(source_partition)
    return f"{manifests(incarnation)}{folder}/{epoch:010}/{manifest_id}.json"


def manifest_folder(source_partition: str) -> str:
    """Returns the part of a manifest's key that names its source partition; a long name is hashed.

    Only a hashed one contains a ``=``, since names are quoted.
    """
    quoted = quote(source_partition, safe="")
    if len(quoted) <= KEY_SEGMENT_BYTES_MAX:
        return quoted
    return f"sha256={hashlib.sha256(source_partition.encode()).hexdigest()}"


def manifests(pipeline: str) -> str:
    """Returns the folder of a pipeline's manifests."""
    return f"pipelines/{pipeline}/manifests/"


def manifest_epoch(key: str) -> int:
    """Returns the epoch of the head under which a manifest was recorded."""
    return int(key.split("/")[4])


def folder_of_manifest(key: str) -> str:
    """Returns the result of ``manifest_folder`` in the key of a manifest."""
    return key.split("/")[3]


def staging_of(pipeline: str) -> str:
    """Returns the folder of everything that a pipeline has staged."""
    return f"staging/{pipeline}/"


def staging(pipeline: str, source_partition: str, epoch: int, attempt: str) -> str:
    """Returns the folder for the files of one attempt at a range."""
    return f"{staging_of(pipeline)}{manifest_folder(source_partition)}/{epoch:010}/{attempt}"


def staging_pipeline(staging: str) -> str:
    """Returns the pipeline of a folder that ``staging`` returned."""
    return staging.split("/")[1]


def sending(staged: str) -> str:
    """Returns the key of a mark beside a staged file: sending has begun, without our commits."""
    return f"{'/'.join(staged.split('/')[:5])}/sending"


def playback_staging(playback_id: str) -> str:
    """Returns the name of the pipeline that a playback by Spark stages for."""
    return f"playback-{playback_id}"


def playback_stagings() -> str:
    """Returns the prefix of all objects that playbacks by Spark have staged."""
    return "staging/playback-"


def staged_epoch(key: str) -> int:
    """Returns the epoch of the head under which something was staged."""
    return int(key.split("/")[3])


def folder_of_staged(key: str) -> str:
    """Returns the result of ``manifest_folder`` in the key of something staged."""
    return key.split("/")[2]


def still_dead(dead: str, attempt: str) -> str:
    """Returns where one attempt of a replay puts events that are still dead letters."""
    return f"{dead}/_replayed/{attempt}"


_HASHED = "sha256:"


def _short(name: str) -> str:
    """Returns a name that fits into a row key; hashes long names and those like a hash."""
    if len(name.encode()) <= ROW_BYTES_MAX // 2 and not name.startswith(_HASHED):
        return name
    return _HASHED + hashlib.sha256(name.encode()).hexdigest()
