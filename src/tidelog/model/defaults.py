"""Defaults that the library, the command line and the console share, each written once.

Durations are text, as ``--help`` shows them and a person gives them.
"""

from __future__ import annotations

__all__ = [
    "ARCHIVE_FILE_AGE",
    "ARCHIVE_FILE_BYTES",
    "BODY_BYTES",
    "DEAD_SHARE",
    "ERASE_WAIT",
    "FINALIZE_DELAY",
    "FLUSH_TIMEOUT_S",
    "NOTIFY_LATENCY_MS",
    "PUMP_BATCH_AGE",
    "PUMP_BATCH_BYTES",
    "ROTATION_OVERLAP",
    "SCRIBE_BUDGET",
    "SCRIBE_DISCARD",
    "SCRIBE_EVERY",
    "SERVE_HOST",
    "SERVE_PORT",
    "SWEEP_EVERY",
    "SWEEP_GRACE",
    "TOPIC_SLOT",
]

# Topics.
TOPIC_SLOT = "1s"  # the resolution of the time index
NOTIFY_LATENCY_MS = 1_000  # between two notifications of a partition

# Archives and pumps.
ARCHIVE_FILE_BYTES = 200_000_000  # of events as received, at which a file is closed
ARCHIVE_FILE_AGE = "1h"  # of its first event, at which a file is closed
DEAD_SHARE = 0.1  # of dead letters; a larger share stops a range
PUMP_BATCH_BYTES = 64_000_000
PUMP_BATCH_AGE = "1s"
FINALIZE_DELAY = "1h"  # how late events may be
FLUSH_TIMEOUT_S = 60.0

# Maintenance.
SCRIBE_EVERY = "10m"
SCRIBE_DISCARD = "60m"  # after which a turn that waits is dropped
SCRIBE_BUDGET = "5m"  # of one turn
SWEEP_EVERY = "1h"
SWEEP_GRACE = "1h"  # younger objects may belong to a reader or writer under way
ERASE_WAIT = "10s"  # for ranges of archives that may still write an erased event

# The server.
SERVE_HOST = "127.0.0.1"
SERVE_PORT = 8480
BODY_BYTES = 8 << 20  # of a request
ROTATION_OVERLAP = "1h"  # while a token that was rotated is still valid
