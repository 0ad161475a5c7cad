"""What to do about each finding of a proof, except about single objects (``proof_places``)."""

from __future__ import annotations

__all__ = [
    "AGAIN",
    "ARCHIVE",
    "CHANGED",
    "COMPILE",
    "COPYING",
    "DELETE",
    "LOG",
    "MOVING",
    "REASON",
    "RIGHTS",
    "STRAY",
    "TABLE",
    "UNREAD",
    "UNSEEN",
    "UPLOAD",
    "VALUE",
]

COMPILE = "run `tidelog compile {topic} --amended`, then `tidelog sweep`"
STRAY = (
    "run `tidelog sweep`; if it keeps the object as a possible loss: `tidelog topic recover "
    "{topic}` appends what was not deleted of it, then sweep again; only if you can do without "
    "these events, `tidelog sweep --accept-loss {topic}` deletes them; what is younger "
    "than its grace waits for the next one"
)
VALUE = (
    "an update died before it took effect, or the catalog has lost it, and the value does not name "
    "its event: repeat the update if you miss it, run `tidelog topic recover {topic}` for other "
    "objects that no row names, then `tidelog sweep --accept-loss {topic}`, which deletes what is "
    "older than its grace; other sweeps delete it after a week"
)
ARCHIVE = "run `{delete} --prove` again, which writes the file without it"
UNSEEN = "make the archive's files again with `tidelog archive backfill`, which keeps ids and keys"
TABLE = (
    "run `tidelog archive register {archive}`; if you have dropped the table, forget it: "
    "`tidelog archive register {archive} --forget`"
)
AGAIN = (
    "prove again when it is committed; if it fails, correct what `tidelog archive status "
    "{archive}` shows and run it, or end it with `tidelog archive delete {archive}` (a generation "
    "that is being built: `tidelog archive drop`), and prove again"
)
COPYING = (
    "prove again when it has ended; `tidelog pipeline list` and `tidelog playback --list` show it; "
    "resume one that died, or forget it"
)
DELETE = "run `{delete} --prove`"
REASON = "run `{delete}` again, which takes it out of the audit"
LOG = "prove again; if it stays, end the process that reads the catalog's file all the time"
UPLOAD = (
    "prove again when its writer has ended; if that died, run `tidelog sweep`, which removes what "
    "is older than its grace"
)
RIGHTS = "give these credentials the right to list uploads (`docs/operating.md`), then prove again"
CHANGED = "run `tidelog sweep`, which finishes what has died, and prove again"
MOVING = "prove again when no process compiles or trims the topic all the time"
UNREAD = "prove again when its pipeline has published it, or run `tidelog sweep`"
