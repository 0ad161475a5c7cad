"""Tidelog: an event log and archive that lives on object storage.

::

    import tidelog

    home = tidelog.open()          # ./tidelog-data, or a folder, or a config string
    print(home.config)

The public surface is what ``__all__`` lists; everything else may change.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tidelog.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptError,
    FailedError,
    FencedError,
    InternalError,
    InvalidError,
    NotFoundError,
    PartialAppendError,
    TidelogError,
    UnavailableError,
    UnknownOutcomeError,
)

if TYPE_CHECKING:
    from tidelog.adoption import adopt_home
    from tidelog.home import Home, create_home
    from tidelog.home import open_home as open  # noqa: A004 - read as tidelog.open(...)
    from tidelog.model.event import Event, Position
    from tidelog.public import *

__version__ = "0.1.0"

__all__ = [
    "Account",
    "Action",
    "Adoption",
    "AlreadyExistsError",
    "AmendResult",
    "Amender",
    "Archive",
    "ArchiveErasure",
    "ArchiveFormat",
    "ArchiveHandle",
    "ArchiveHistory",
    "ArchiveOptions",
    "ArchiveRunOptions",
    "ArchiveStatus",
    "ArchiveTables",
    "ArchiveUpdate",
    "ArchiveVerifyReport",
    "ArchivedRange",
    "Archives",
    "Aside",
    "AuditRecord",
    "AuditedEvent",
    "AuditedProof",
    "AuditedSource",
    "BackfillOptions",
    "BeforeTime",
    "Begin",
    "CommittedFile",
    "CompileOptions",
    "CompilePolicy",
    "CompileReport",
    "ConflictError",
    "Consumer",
    "ConsumerHandle",
    "Consumers",
    "CorruptError",
    "Cursor",
    "CursorMove",
    "CycleReport",
    "DeadLetterOptions",
    "DeleteOptions",
    "DeleteResult",
    "DrainOptions",
    "DriverFailure",
    "EraseOptions",
    "ErasedFromArchives",
    "Erasure",
    "ErasurePlan",
    "ErasureWatch",
    "Event",
    "FailedError",
    "Fate",
    "FateError",
    "FencedError",
    "FileCounts",
    "FileEntry",
    "FinalizeResult",
    "FindResult",
    "Finding",
    "FolderEntry",
    "FolderNotice",
    "FolderPage",
    "FormatOptions",
    "Forwarder",
    "Gap",
    "Grant",
    "HandlerOptions",
    "HandlerSettings",
    "HealthCheck",
    "Histogram",
    "HistoryBar",
    "Home",
    "InternalError",
    "InvalidError",
    "JobRecord",
    "Jobs",
    "JournalEntry",
    "KeepBytes",
    "KnownPlayback",
    "Lag",
    "Latencies",
    "Limits",
    "LineCounts",
    "LineOptions",
    "LoadPlan",
    "LoadReport",
    "LostOffsets",
    "MemberState",
    "NamedPipeline",
    "NotFoundError",
    "PartialAppendError",
    "PartitionState",
    "PartitionStatus",
    "Pin",
    "PipelineSweep",
    "PlayOptions",
    "PlaybackPin",
    "PlaybackResult",
    "PlaybackState",
    "Playbacks",
    "Position",
    "PositionMove",
    "Positions",
    "Problem",
    "Producer",
    "Proof",
    "ProveOptions",
    "PumpFields",
    "PumpHandle",
    "PumpPartition",
    "PumpRunOptions",
    "PumpStatus",
    "Pumps",
    "ReadOnceResult",
    "RecordedRunOptions",
    "RecoverReport",
    "RedoOptions",
    "RedoPlan",
    "RegisterResult",
    "ReplayPlan",
    "ReplayResult",
    "RunOptions",
    "RunResult",
    "Scribe",
    "ScribeOptions",
    "SearchQuery",
    "SearchResult",
    "SearchedPlace",
    "SendFuture",
    "Settings",
    "Share",
    "SkippedTopic",
    "SlotCount",
    "Stream",
    "StreamOptions",
    "SupervisedPart",
    "SweepReport",
    "TableStatus",
    "TidelogError",
    "TimeRange",
    "ToOffsets",
    "Token",
    "Tokens",
    "Topic",
    "Totals",
    "Trace",
    "TrimOptions",
    "TrimResult",
    "TrimTo",
    "Trouble",
    "Turn",
    "UnavailableError",
    "UnknownOutcomeError",
    "UpdatedValue",
    "VerifyReport",
    "WaitingTimes",
    "Why",
    "adopt_home",
    "create_home",
    "diagnose",
    "load_test",
    "open",
    "open_forwarder",
    "read_file",
    "read_journal",
]


# Names that most programs use, with the modules that they load; ``tidelog.public`` has the others.
_FIRST = {
    "Event": ("tidelog.model.event", "Event"),
    "Home": ("tidelog.home", "Home"),
    "Position": ("tidelog.model.event", "Position"),
    "adopt_home": ("tidelog.adoption", "adopt_home"),
    "create_home": ("tidelog.home", "create_home"),
    "open": ("tidelog.home", "open_home"),
}


def __getattr__(name: str) -> object:
    """Imports a public name when it is first used, so that ``import tidelog`` takes no time."""
    if name not in __all__:
        raise AttributeError(f"module `tidelog` has no attribute `{name}`")
    module, attribute = _FIRST.get(name, ("tidelog.public", name))
    found = globals()[name] = getattr(import_module(module), attribute)
    return found
