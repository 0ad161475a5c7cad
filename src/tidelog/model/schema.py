"""Every object path and every catalog row that Tidelog stores, on one screen.

Persisted names are stable: they may be added to, never renamed. docs/reference/layout.md shows the
same tables, and a test compares the two. ``<t>`` is a topic's incarnation and ``<p>`` a partition.
``model.layout`` builds the names.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["OBJECTS", "ROWS", "Kind"]


class Kind(NamedTuple):
    """One kind of object (its path) or row (its partition and key)."""

    name: str
    what: str


OBJECTS = (
    Kind(
        "home.json",
        "the home's id and earlier ids, where its store and its catalog were created, the formats "
        "it needs; replaced by adoption",
    ),
    Kind(
        "guard",
        "that the home has had a token: from then on every server asks for one, even after the "
        "catalog is restored from an older copy",
    ),
    Kind(
        "probe/<id>",
        "tries out the store at init, and shows its time to a sweep, except in a folder; "
        "deleted at once",
    ),
    Kind(
        "topics/<t>/segments/<generation>/<xx>/<id>-<partitions>[_<copy>].arrow",
        "segment: Arrow IPC file, zstd; the events of one flush, partition by partition. Before "
        "the footer: what its appender knew, and the producer's name if it has one. The key has "
        "the number of partitions with events",
    ),
    Kind(
        "topics/<t>/journals/<partition>/<epoch>/<base>_<work>-<id>.parquet",
        "journal: compiled runs with their offsets, amendments applied, and from which segments "
        "they came; Parquet, zstd",
    ),
    Kind(
        "topics/<t>/amendments/<generation>/<xx>/<partition>-<sequence>_<id>",
        "the new value of an updated event, if it is too large for a row (the row has its "
        "checksum); `<sequence>` is that of the newest amendment when it was uploaded",
    ),
    Kind(
        "topics/<t>/witnesses/<segment>_<id>",
        "which partitions have committed a copy of a staged segment; goes with the last copy",
    ),
    Kind(
        "topics/<t>/sinks/<sink>/<batch>/<generation>_<id>.arrow",
        "staged segment of a Spark writer's task, copied to where segments are at commit",
    ),
    Kind(
        "topics/<t>/sinks/<sink>/<batch>/<id>.json",
        "manifest: the staged segments that a Spark writer's batch consists of",
    ),
    Kind(
        "pipelines/<name>/manifests/<source partition>/<epoch>/<id>.json",
        "what a range produced: files, counts, checksums, the end reached; or merged ranges",
    ),
    Kind(
        "staging/<pipeline>/<source partition>/<epoch>/<attempt>/sending",
        "that sending a range into Kafka has begun, and which number its group had",
    ),
    Kind(
        "staging/<pipeline>/<source partition>/<epoch>/<attempt>/<id>/<n>",
        "a file that is not yet published; in the store of its final name",
    ),
    Kind(
        "archives/<name>/_owner",
        "whose folder an archive's root is: home id, where it is outside, and incarnation",
    ),
    Kind(
        "archives/<name>/_aside/<manifest>/<path>",
        "a file of a range that a restored catalog had forgotten; without folders named by events",
    ),
    Kind(
        "archives/<name>/_aside/<manifest>/<path>.erasing-<checksum>",
        "what an erasure makes of such a file and its sidecar",
    ),
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
        "dead/<archive>/<incarnation>/<topic>/<generation>_<partition>_<offset>.parquet",
        "dead letters: events that no parser took, or that no topic accepts, with all fields and "
        "the error",
    ),
    Kind(
        "dead/<archive>/<incarnation>/_replayed/<attempt>/<topic>/<generation>_<partition>_<offset>.parquet",
        "those that a replay could not place either; replaces files of dead letters",
    ),
)

ROWS = (
    Kind("home · identity", "what `home.json` says, and whether init or an adoption has finished"),
    Kind("registry · changes", "counts creations and deletions; each of them expects its version"),
    Kind("registry · topic/<name>", "incarnation, settings, segment generation, state"),
    Kind("registry · deleted/<t>", "that a topic was deleted, so that late uploads are garbage"),
    Kind(
        "registry · archive/<name>",
        "incarnation, source, folder, settings, generation, tables, state, "
        "sources of dropped backfills, whether it was ended",
    ),
    Kind(
        "registry · removed/<incarnation>",
        "an archive that was deleted with its files, so that late copies are garbage",
    ),
    Kind("registry · token/<id>", "a token of the server: hash, scopes with topics, label, expiry"),
    Kind(
        "registry · guard",
        "that the home has had a token: from then on every server asks for one",
    ),
    Kind("tokens · <id>", "when a token was last used, to the minute"),
    Kind(
        "audit · <time>/<id>",
        "who did what to the home as a whole, and when: logins, tokens, cursors, playbacks, reads",
    ),
    Kind("registry · pipeline/<name>", "incarnation, source, sink and its incarnation, state"),
    Kind(
        "registry · sink/<topic>/<name>",
        "the incarnation of the topic that a Spark writer's query writes to; stays when the "
        "topic is deleted",
    ),
    Kind("registry · playback/<name>", "that a playback of this name may be there; for listing"),
    Kind(
        "topic/<t>/<p> · head",
        "next and start offset, segment floor, closed or not; last run, where journals end, "
        "amendments",
    ),
    Kind("topic/<t>/<p> · run/<base>", "a run: object, byte range, checksum, times"),
    Kind("topic/<t>/<p> · journal/<base>", "a compiled run; what is below the head's `journaled`"),
    Kind("topic/<t>/<p> · slot/<level>/<start>/<base>/<write id>", "time index: the run's end"),
    Kind("topic/<t>/<p> · amend/<offset>", "an update or a delete that waits to be compiled in"),
    Kind(
        "topic/<t>/<p> · unused/<id>",
        "objects that this partition no longer needs, since a write removed their rows",
    ),
    Kind(
        "topic/<t>/0 · stray/<id>",
        "objects that a sweep has found to be strays, and when: from then on a week counts",
    ),
    Kind("topic/<t>/<p> · compile", "who compiles it, under which epoch"),
    Kind(
        "topic/<t>/0 · accepted",
        "a date: a person has accepted that unnamed objects older than it are deleted",
    ),
    Kind(
        "topic/<t>/<p> · producer/<name>",
        "epoch, last sequence and its mark, recent batches: offsets, write ids; last seen, silent "
        "since",
    ),
    Kind(
        "topic/<t>/0 · staged",
        "below which generation what Spark writers have staged may be swept",
    ),
    Kind(
        "topic/<t>/0 · sink/<name>",
        "a Spark writer's query, its last batch, digest of its events, manifest, done or not",
    ),
    Kind(
        "audit/<t> · <time>/<id>",
        "who amended what, when and why; hashes of ids and keys, never the bytes; of an archive "
        "too: what was erased from it by itself, and the deletes of its deleted topic",
    ),
    Kind(
        "erased/<t>/<xx> · <sha256 of id>",
        "up to which time events of an id were erased, so no copy brings them back",
    ),
    Kind("erased/<t>/<xx> · key/<sha256 of key>", "the same, of a key whose events were deleted"),
    Kind("consumer/<t> · consumer/<name>", "a consumer of a topic, and whether it was deleted"),
    Kind("consumer/<t> · closed", "that the topic was deleted, so that no consumer is added"),
    Kind("consumer/<t>/<name> · member/<id>", "a member's heartbeat, host and process"),
    Kind("consumer/<t>/<name> · fence", "changes with each delete, so that older members are out"),
    Kind("consumer/<t>/<name>/<p> · lease", "owner, epoch, cursor, resolved start; deleted or not"),
    Kind("notify/<t>/<p> · state", "the debounce waiter, and the offset notified so far"),
    Kind("pipeline/<name> · member/<id>", "a driver's heartbeat and process"),
    Kind("pipeline/<name> · fence", "changes to stop every driver that has joined before"),
    Kind("pipeline/<name> · flush", "changes when a flush is requested"),
    Kind(
        "pipeline/<name> · failure/<source partition>",
        "why its driver fails there now, since when, and which event that quotes; without a name: "
        "in the source as a whole",
    ),
    Kind(
        "pipeline/<name> · failures",
        "changes with each write of failures, so that no repeated packet brings one back; closed "
        "with the pipeline",
    ),
    Kind(
        "pipeline/<name> · seen/<source partition>",
        "the last known end of a file, or of a topic of a pattern, in case it vanishes before it "
        "is read",
    ),
    Kind(
        "pipeline/<name> · counted/<kind>/<source partition>",
        "up to which range the folder rows include its files",
    ),
    Kind("pipeline/<name> · folder/<end>/<folder>", "a date folder: files, events, final or not"),
    Kind(
        "pipeline/<name> · waiting/<end>/<folder>",
        "that this date folder has never had its `_SUCCESS`",
    ),
    Kind(
        "pipeline/<name> · unsettled/<end>/<folder>",
        "that its `_SUCCESS` is being put or deleted",
    ),
    Kind(
        "pipeline/<name> · partition/<source partition>",
        "that the pipeline knows it, and its first position and its end at the pipeline's "
        "creation; of a file, its mark and incarnation",
    ),
    Kind(
        "pipeline/<name> · listing",
        "changes when a driver adds a file to that list, or takes files from another driver",
    ),
    Kind(
        "pipeline/<name>/<source partition> · head",
        "position, ordinal, epoch of its driver, incarnation of the source; begin, gaps, totals",
    ),
    Kind(
        "pipeline/<name>/<source partition> · intent",
        "a range under way; then its manifest, and the range that is read ahead",
    ),
    Kind(
        "pipeline/<name>/<source partition> · commit/<ordinal>/<start>",
        "a range that is done, or merged ones",
    ),
    Kind(
        "pipeline/<name>/<source partition> · before",
        "what the generation before a promoted one accounted for",
    ),
    Kind(
        "pipeline/<name>/<source partition> · erased",
        "how many events erasures took out of its files",
    ),
    Kind(
        "pipeline/<name>/<source partition> · aside/<manifest>",
        "a range that a restored catalog had forgotten, and where its files are now",
    ),
    Kind("playback/<name> · pin", "topic, range, ends and sink, as they were when it began"),
    Kind("playback/<name> · state", "its driver, epoch and cursor; the lot under way"),
    Kind("scribe · lease", "which scribe is at work, its epoch and heartbeat"),
    Kind("scribe · queue", "tickets of turns that wait, and where the next turn begins"),
    Kind("jobs · list", "what people started in consoles: progress, owner, result, arguments"),
    Kind("keepers · keeper/<id>", "a running `tidelog up`: its parts, their states, heartbeat"),
)
