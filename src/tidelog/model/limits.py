"""How large anything may be: one place, the same for every backend.

The catalog's limits are those of the narrowest server: DynamoDB takes items of 400 KB, range
keys of 1,024 bytes and transactions of 4 MB.
"""

from __future__ import annotations

__all__ = [
    "CHANGES_MAX",
    "COPY_CHUNK_BYTES",
    "KEY_BYTES_MAX",
    "KEY_SEGMENT_BYTES_MAX",
    "OBJECT_BYTES_MAX",
    "PARTITION_BYTES_MAX",
    "PRESIGN_SECONDS_MAX",
    "ROW_BYTES_MAX",
    "SETTLE_ATTEMPTS",
    "VALUE_BYTES_MAX",
    "WRITE_BYTES_MAX",
    "WRITE_ID_BYTES_MAX",
]

# Catalog.
CHANGES_MAX = 25  # changes in one write
VALUE_BYTES_MAX = 300_000  # one row's value
WRITE_BYTES_MAX = 3_000_000  # all values of one write together
ROW_BYTES_MAX = 900  # a row key, as UTF-8
PARTITION_BYTES_MAX = 900  # a partition key, as UTF-8
WRITE_ID_BYTES_MAX = 64  # a write id, and so a version
SETTLE_ATTEMPTS = 5  # how often a write whose reply was lost is sent in all

# Store.
KEY_BYTES_MAX = 900  # an object's key, as UTF-8; S3 takes 1,024 with the home's prefix
KEY_SEGMENT_BYTES_MAX = 240  # one part between slashes; file systems take 255
OBJECT_BYTES_MAX = 5_000_000_000  # one put, and one server-side copy, on S3
COPY_CHUNK_BYTES = 8 << 20  # how much of two objects is compared at a time
PRESIGN_SECONDS_MAX = 7 * 24 * 3600  # S3 signs for a week at most
