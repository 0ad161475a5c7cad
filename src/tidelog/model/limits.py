"""The maximum size of everything, in one place, and the same for every backend.

The catalog's limits are those of the narrowest server: DynamoDB allows items of 400 KB, range keys
of 1,024 bytes and transactions of 4 MB.
"""

from __future__ import annotations

__all__ = [
    "BATCH_BYTES_MAX",
    "BATCH_EVENTS_MAX",
    "CHANGES_MAX",
    "COMMITS_UNMERGED",
    "COMMIT_ATTEMPTS",
    "CONSUMER_NAME_MAX",
    "COPY_CHUNK_BYTES",
    "EVENT_BYTES_CEILING",
    "EVENT_BYTES_MAX",
    "FAILURES_MAX",
    "FILES_PASSED_MAX",
    "FILE_FINISHED_MS",
    "FILE_GAPS_MAX",
    "FILE_GAPS_PER_RANGE",
    "FILE_GAPS_SHORT",
    "FILE_GAP_OFFSETS",
    "FILE_PARTITION_BYTES_MAX",
    "FOLDER_NAME_BYTES_MAX",
    "FOLDER_PATH_BYTES_MAX",
    "FORCED_RANGES_MAX",
    "HEADERS_MAX",
    "HEADER_OVERHEAD_BYTES",
    "ID_BYTES_MAX",
    "KEY_BYTES_MAX",
    "KEY_SEGMENT_BYTES_MAX",
    "MERGED_BYTES_MAX",
    "MERGED_FILES_MAX",
    "MERGED_RANGES_MAX",
    "MERGED_ROW_BYTES_MAX",
    "MERGES_MAX",
    "NESTING_MAX",
    "OBJECT_BYTES_MAX",
    "OFFSET_END_MAX",
    "OWN_BYTES_MAX",
    "OWN_HEADERS_MAX",
    "PAGE_BYTES_MAX",
    "PARTITIONS_MAX",
    "PARTITION_BYTES_MAX",
    "PIPELINE_COMMITS_MAX",
    "PIPELINE_NAME_MAX",
    "PLAYBACK_NAME_MAX",
    "PRESIGN_SECONDS_MAX",
    "PRODUCER_MARK_BYTES",
    "PRODUCER_NAME_MAX",
    "PRODUCER_RECENT",
    "PRODUCER_ROW_BYTES",
    "PROMOTION_MS",
    "RANGE_CUTS_MAX",
    "RANGE_FOLDERS_MAX",
    "RANGE_PARTITIONS_MAX",
    "ROW_BYTES_MAX",
    "SEGMENT_EVENTS_MAX",
    "SEQUENCE_MAX",
    "SLOT_MS_MAX",
    "STRAYS_AT_ONCE",
    "STRAY_KEEP_MS",
    "STRAY_STEP_MS",
    "TIMESTAMP_MS_END",
    "TOPIC_NAME_MAX",
    "VALUE_BYTES_MAX",
    "WRITE_BYTES_MAX",
    "WRITE_ID_BYTES_MAX",
]

# Catalog.
CHANGES_MAX = 25  # changes in one write
VALUE_BYTES_MAX = 300_000  # one row's value; a home uses 4 bytes for its checksum
WRITE_BYTES_MAX = 3_000_000  # all values of one write together
ROW_BYTES_MAX = 900  # a row key, as UTF-8
PARTITION_BYTES_MAX = 900  # a partition key, as UTF-8
WRITE_ID_BYTES_MAX = 64  # a write id, and so a version

# Store.
KEY_BYTES_MAX = 900  # an object's key, as UTF-8; S3 allows 1,024 with the home's prefix
KEY_SEGMENT_BYTES_MAX = 240  # one part between slashes; file systems allow 255
OBJECT_BYTES_MAX = 5_000_000_000  # one put, and one server-side copy, on S3
COPY_CHUNK_BYTES = 8 << 20  # how much of two objects is compared at a time
PRESIGN_SECONDS_MAX = 7 * 24 * 3600  # S3 signs for at most a week

# Topics and events.
TOPIC_NAME_MAX = 200  # characters; the name is part of archive paths
PARTITIONS_MAX = 10_000  # of one topic; each has a head row
EVENT_BYTES_MAX = 1 << 20  # one event by default: value, key, id, type and headers
EVENT_BYTES_CEILING = 64 << 20  # upper limit of event_bytes_max
ID_BYTES_MAX = 8_192  # an event's id, as UTF-8; percent-encoded it fits into a URL of the server
HEADERS_MAX = 10_000  # headers of one event
OWN_BYTES_MAX = 16 << 10  # that Tidelog may add to an event, on top of event_bytes_max
OWN_HEADERS_MAX = 16  # that Tidelog may add to an event, on top of HEADERS_MAX
HEADER_OVERHEAD_BYTES = 8  # per header, besides its name and value; counts for the event's size
NESTING_MAX = 200  # levels of JSON or MessagePack from outside; every interpreter parses these
FILE_GAP_OFFSETS = 1_000_000  # of a backup's file; a larger gap is skipped in one step
OFFSET_END_MAX = (1 << 63) - 1  # an end of offsets is a number of 64 bits too
TIMESTAMP_MS_END = 253_402_300_800_000  # the year 10000
SEGMENT_EVENTS_MAX = 250_000  # events of one segment; keeps batches well below 2 GiB
BATCH_EVENTS_MAX = 50_000  # events of one record batch, so that a reader decodes piece by piece
BATCH_BYTES_MAX = 1 << 30  # of batches that are joined; an Arrow array of bytes holds 2 GiB
SLOT_MS_MAX = 24 * 3600 * 1000  # the coarsest time index
STRAY_KEEP_MS = 7 * SLOT_MS_MAX  # a sweep keeps what may be the only copy of events this long
# From sweep to sweep, at most this much of it passes by a machine's clock.
STRAY_STEP_MS = SLOT_MS_MAX
STRAYS_AT_ONCE = 1_000  # per row
PAGE_BYTES_MAX = 4 << 20  # of a page of events, beyond which it ends early
RANGE_PARTITIONS_MAX = 100  # of a topic that is read by time page by page; a cursor lists them
FAILURES_MAX = 100  # failed flushes of a producer that are kept until they are raised
PRODUCER_MARK_BYTES = 64  # of a mark that is stored with a sequence
PRODUCER_NAME_MAX = 200  # characters
SEQUENCE_MAX = (1 << 63) - 1  # of a named producer
PRODUCER_RECENT = 8  # batches whose offsets a producer's row keeps
PRODUCER_ROW_BYTES = 150_000  # of those batches in the row, where sequences have gaps
COMMIT_ATTEMPTS = 200  # of one commit against other writers; each waits 0.2 s at most
CONSUMER_NAME_MAX = 200  # characters
PIPELINE_NAME_MAX = 250  # characters; may contain an archive's name
PLAYBACK_NAME_MAX = 150  # characters; a producer's name contains it
FOLDER_NAME_BYTES_MAX = 200  # one folder of an archive, as UTF-8; a key allows 240 per part
FILE_FINISHED_MS = 60_000  # a file of lines is finished after this long without a write
FILES_PASSED_MAX = 50_000  # files of one partition of a folder of archives; 5 bytes each in a row
FILE_PARTITION_BYTES_MAX = 100  # a source partition in the name of an archive's file, as UTF-8
FOLDER_PATH_BYTES_MAX = 500  # all folders together; a key has 900, with root, topic and file name
CLOCK_AHEAD_MS = 300_000  # a time of an event that is further ahead does not move a watermark
PROMOTION_MS = 60_000  # how long a promote may keep heads frozen; then drivers undo it
FORCED_RANGES_MAX = 1_000  # listed in an archive's row for one forced promote
PIPELINE_COMMITS_MAX = 10_000  # kept by a sweep for a named pipeline's source partition
COMMITS_UNMERGED = 100  # the newest of an archive's source partition, each in a row of its own
MERGED_RANGES_MAX = 1_000  # of commits that are merged into one row
MERGED_FILES_MAX = 10_000  # in these ranges, so that their manifest is read in one request
MERGED_BYTES_MAX = 16 << 20  # of a merged manifest
MERGED_ROW_BYTES_MAX = 200_000  # of a merged commit's row; 300,000 bytes fit
MERGES_MAX = 50  # of one sweep in one source partition; each reads up to 24 manifests
GAPS_MAX = 1_000  # per source partition; its head lists them all
FILE_GAPS_MAX = 500  # of these, what a folder of files lacks; the rest is only counted
FILE_GAPS_SHORT = 100  # with this many, one missing offset is only counted: most are markers
FILE_GAPS_PER_RANGE = 8  # the longest ones
RESERVE_BYTES = 4 << 20  # reserved beside a SQLite catalog
RANGE_CUTS_MAX = 256  # tasks of one range; its intent lists where it is cut
RANGE_FOLDERS_MAX = 10_000  # per range of an archive; other events become dead letters
