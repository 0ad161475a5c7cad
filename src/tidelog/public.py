"""The public names that take long to import; ``tidelog`` imports them when they are asked for."""

from __future__ import annotations

from tidelog.api.archive_view import ArchiveTables, CommittedFile
from tidelog.api.archives import ArchiveHandle, Archives, BackfillOptions, DeadLetterOptions
from tidelog.api.consumers import ConsumerHandle, Consumers
from tidelog.api.pipelines import (
    PumpFields,
    PumpHandle,
    PumpRunOptions,
    Pumps,
    RunOptions,
    RunResult,
)
from tidelog.api.playbacks import Playbacks, PlayOptions
from tidelog.api.tokens import Tokens
from tidelog.api.upkeep import CompileOptions, EraseOptions
from tidelog.archive.archive import ArchiveOptions, FormatOptions
from tidelog.archive.dead_letters import ReplayResult
from tidelog.archive.finalize import FinalizeResult, FolderNotice
from tidelog.archive.read import FindResult
from tidelog.archive.read import file_rows as read_file
from tidelog.archive.status import ArchiveStatus, Limits, PartitionStatus
from tidelog.archive.tables import RegisterResult
from tidelog.archive.verify import ArchiveVerifyReport
from tidelog.archive.verify_rows import Problem
from tidelog.coordination.supervisors import SupervisedPart
from tidelog.erasure.from_archives import DeleteResult, ErasedFromArchives
from tidelog.erasure.proof import Proof, Trace
from tidelog.erasure.rewrite import ArchiveErasure
from tidelog.journal.amend import AmendResult
from tidelog.journal.audit import AuditRecord
from tidelog.journal.compile import CompileReport
from tidelog.journal.compile_policy import CompilePolicy
from tidelog.journal.listing import JournalEntry
from tidelog.journal.recover import RecoverReport
from tidelog.journal.scribe import Scribe, ScribeOptions, Trouble, Turn
from tidelog.log.consumer.consumer import Consumer
from tidelog.log.consumer.drain import DrainOptions, LostOffsets
from tidelog.log.consumer.handler import Fate, FateError, HandlerOptions, HandlerSettings, Share
from tidelog.log.consumer.move import CursorMove
from tidelog.log.maintenance.sweep import SweepReport
from tidelog.log.maintenance.trim import BeforeTime, KeepBytes, ToOffsets, TrimResult, TrimTo
from tidelog.log.maintenance.verify import VerifyReport
from tidelog.log.producer.flush import SendFuture
from tidelog.log.producer.producer import Producer
from tidelog.log.status import Lag, PartitionState
from tidelog.maintenance.turn import Erasure
from tidelog.model.archive import Account, Archive, ArchiveFormat
from tidelog.model.event import Positions
from tidelog.model.pipeline import NamedPipeline
from tidelog.model.playback import Pin, PlaybackState
from tidelog.model.token import Grant, Token
from tidelog.model.topic import Topic
from tidelog.pipeline.base import CycleReport
from tidelog.pipeline.pump import PumpPartition, PumpStatus
from tidelog.playback.play import PlaybackResult, SlotCount
from tidelog.playback.session import KnownPlayback
from tidelog.settings import Settings

__all__ = [
    "Account",
    "AmendResult",
    "Archive",
    "ArchiveErasure",
    "ArchiveFormat",
    "ArchiveHandle",
    "ArchiveOptions",
    "ArchiveStatus",
    "ArchiveTables",
    "ArchiveVerifyReport",
    "Archives",
    "AuditRecord",
    "BackfillOptions",
    "BeforeTime",
    "CommittedFile",
    "CompileOptions",
    "CompilePolicy",
    "CompileReport",
    "Consumer",
    "ConsumerHandle",
    "Consumers",
    "CursorMove",
    "CycleReport",
    "DeadLetterOptions",
    "DeleteResult",
    "DrainOptions",
    "EraseOptions",
    "ErasedFromArchives",
    "Erasure",
    "Fate",
    "FateError",
    "FinalizeResult",
    "FindResult",
    "FolderNotice",
    "FormatOptions",
    "Grant",
    "HandlerOptions",
    "HandlerSettings",
    "JournalEntry",
    "KeepBytes",
    "KnownPlayback",
    "Lag",
    "Limits",
    "LostOffsets",
    "NamedPipeline",
    "PartitionState",
    "PartitionStatus",
    "Pin",
    "PlayOptions",
    "PlaybackResult",
    "PlaybackState",
    "Playbacks",
    "Positions",
    "Problem",
    "Producer",
    "Proof",
    "PumpFields",
    "PumpHandle",
    "PumpPartition",
    "PumpRunOptions",
    "PumpStatus",
    "Pumps",
    "RecoverReport",
    "RegisterResult",
    "ReplayResult",
    "RunOptions",
    "RunResult",
    "Scribe",
    "ScribeOptions",
    "SendFuture",
    "Settings",
    "Share",
    "SlotCount",
    "SupervisedPart",
    "SweepReport",
    "ToOffsets",
    "Token",
    "Tokens",
    "Topic",
    "Trace",
    "TrimResult",
    "TrimTo",
    "Trouble",
    "Turn",
    "VerifyReport",
    "read_file",
]
