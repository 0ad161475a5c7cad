"""The public surface: what it lists, and that errors cross process borders whole."""

from __future__ import annotations

import pickle

import pytest

import tidelog
from tidelog import errors
from tidelog.cli.output import exit_code


def test_the_public_names_are_these() -> None:
    assert sorted(tidelog.__all__) == [
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
    assert all(hasattr(tidelog, name) for name in tidelog.__all__)


ERRORS = [found for name in errors.__all__ if isinstance(found := getattr(errors, name), type)]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_errors_pickle_with_their_context(kind: type[errors.TidelogError]) -> None:
    error = kind("partition `orders/3`: gone: look again", partition="orders/3", offset=41)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error) == "partition `orders/3`: gone: look again"
    assert copy.context == {"partition": "orders/3", "offset": 41}
    assert copy.as_json() == {
        "error": {"kind": kind.kind, "message": str(error), "context": copy.context}
    }


def test_error_kinds_are_stable_and_different() -> None:
    assert {kind.__name__: kind.kind for kind in ERRORS} == {
        "AlreadyExistsError": "already_exists",
        "ConflictError": "conflict",
        "CorruptError": "corrupt",
        "FailedError": "failed",
        "FencedError": "fenced",
        "InternalError": "internal",
        "InvalidError": "invalid",
        "NotFoundError": "not_found",
        "PartialAppendError": "partial_append",
        "TidelogError": "tidelog",
        "UnavailableError": "unavailable",
        "UnknownOutcomeError": "unknown_outcome",
    }


def test_first_error_is_raised_with_the_others_as_notes() -> None:
    errors.raise_first([])
    given = [errors.UnavailableError("a: away"), OSError("b"), errors.CorruptError("c: torn")]
    with pytest.raises(errors.UnavailableError) as caught:
        errors.raise_first(each for each in given)
    assert caught.value is given[0]
    assert str(caught.value) == "a: away"
    assert caught.value.__notes__ == ["also failed: b", "also failed: c: torn"]
    with pytest.raises(errors.InvalidError) as caught:
        errors.raise_first(errors.InvalidError(str(number)) for number in range(40))
    assert caught.value.__notes__[-1] == "also failed: 19 more"
    assert len(caught.value.__notes__) == 21


def test_errors_are_also_what_python_people_expect() -> None:
    assert issubclass(errors.NotFoundError, KeyError)
    assert issubclass(errors.InvalidError, ValueError)


def test_every_error_has_an_exit_code() -> None:
    for kind in ERRORS:
        assert exit_code(kind("x")) == (2 if issubclass(kind, errors.InvalidError) else 1)
