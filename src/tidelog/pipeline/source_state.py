"""What a driver knows of a source partition: its rows, and the range that is in work.

The errors here say why a driver cannot work with a partition. Some pass (``UnavailableError``);
others fence the driver out (``FencedError``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tidelog.catalog.base import Catalog
from tidelog.connectors.archive.reader import CarriedRange, CarriedReader, CompletedReader
from tidelog.connectors.source import (
    RangeReader,
    SourcePartition,
)
from tidelog.context import Context
from tidelog.errors import (
    FencedError,
    TidelogError,
    UnavailableError,
)
from tidelog.model.pipeline import (
    Intent,
    Progress,
)
from tidelog.model.topic import decode_row
from tidelog.pipeline.tasks import NO_ERASED_ROWS, ErasedRows

__all__ = [
    "ClaimedError",
    "FrozenError",
    "SourceState",
    "claim_failed_error",
    "claimed_elsewhere_error",
    "claimed_head",
    "closed_error",
    "explained",
    "frozen_error",
    "head_error",
]


@dataclass
class SourceState:
    """A source partition, with its rows as last read or written, and its current range."""

    partition: SourcePartition
    where: str
    head: Progress
    head_version: str
    intent: Intent | None = None
    intent_version: str = ""
    unchecked: Sequence[str] = ()  # manifests that a restored catalog may have lost
    reader: RangeReader | None = None  # of the current range
    erased: ErasedRows = NO_ERASED_ROWS  # that the current range must skip

    @property
    def goes_back(self) -> bool:
        """Returns whether the current range is in a gap before the position."""
        return self.intent is not None and self.intent.start != self.head.position

    @property
    def carried(self) -> CarriedRange | None:
        """Returns what to know if the current range comes entirely from another generation."""
        return self.reader.carried if isinstance(self.reader, CarriedReader) else None

    @property
    def completed(self) -> int:
        """Returns the generation that completes the current range; 0 if none does."""
        return self.reader.generation if isinstance(self.reader, CompletedReader) else 0

    def read_intent(self, catalog: Catalog) -> None:
        """Reads the row of the current range; there is none between two ranges."""
        row = catalog.get(self.where, "intent")
        self.intent, self.intent_version = None, ""
        if row is not None:
            self.intent = decode_row(row.value, Intent, f"intent of `{self.partition.text}`")
            self.intent_version = row.version


def claimed_head(
    found: Progress | None, new: Progress, owner: str, state: SourceState | None = None
) -> Progress:
    """Returns a head with this driver as its owner, under the next epoch.

    A head that is already the driver's keeps its epoch: its rows only have to be read again.
    """
    epoch = 1 if found is None else found.epoch + 1
    if found is not None and state is not None:
        same = (found.owner, found.epoch) == (owner, state.head.epoch)
        epoch = found.epoch if same else epoch
    known = new if found is None or not found.position else found
    return msgspec.structs.replace(
        known,
        epoch=epoch,
        owner=owner,
        frozen="",
        incarnation=known.incarnation or new.incarnation,
    )


class ClaimedError(FencedError):
    """Another driver has a source partition. This one may have others."""


class FrozenError(UnavailableError):
    """The head is frozen while another generation is promoted. It may resume after that."""


def claimed_elsewhere_error(
    pipeline: str, partition: str, head: Progress | None = None
) -> ClaimedError:
    """Returns the error of a source partition that another driver has."""
    other = f" (epoch {head.epoch})" if head is not None else ""
    return ClaimedError(
        f"source partition `{partition}` of pipeline `{pipeline}`: another driver has it{other}",
        partition=partition,
    )


def claim_failed_error(pipeline: str, partition: str) -> UnavailableError:
    """Returns the error of a source partition that could not be claimed, for reasons that pass."""
    return UnavailableError(
        f"source partition `{partition}` of pipeline `{pipeline}`: could not be claimed, replies "
        "stay lost or others keep changing its head: try again",
        partition=partition,
    )


def closed_error(pipeline: str, partition: str) -> FencedError:
    """Returns the error of a source partition whose pipeline or generation was removed."""
    return FencedError(
        f"source partition `{partition}` of pipeline `{pipeline}`: was closed: stop this driver",
        partition=partition,
    )


def frozen_error(pipeline: str, partition: str) -> FrozenError:
    """Returns the error for a partition whose generation is about to be replaced."""
    return FrozenError(
        f"source partition `{partition}` of pipeline `{pipeline}`: is frozen while another "
        "generation is promoted: wait, it resumes after that",
        partition=partition,
    )


def head_error(pipeline: str, state: SourceState, head: Progress | None) -> TidelogError:
    """Returns why a driver cannot work with a head that it finds changed; None: it is deleted."""
    partition = state.partition.text
    if head is None or head.closed:
        return closed_error(pipeline, partition)
    if head.frozen:
        return frozen_error(pipeline, partition)
    if (head.owner, head.epoch) != (state.head.owner, state.head.epoch):
        return claimed_elsewhere_error(pipeline, partition, head)
    return UnavailableError(
        f"source partition `{partition}` of pipeline `{pipeline}`: its rows were changed: they are "
        "read again",
        partition=partition,
    )


def explained(
    context: Context, pipeline: str, state: SourceState, error: TidelogError
) -> TidelogError:
    """Returns the error, or that a promote or another driver has the partition, if so.

    If another driver has it, files that it published or deleted are not damage. An error that says
    by its kind that it passes, or that a person must decide, is returned as it is.
    """
    if isinstance(error, UnavailableError) or error.kind in ("lost", "remade"):
        return error
    with contextlib.suppress(TidelogError):
        row = context.catalog.get(state.where, "head")
        if row is None or row.version != state.head_version:
            head = decode_row(row.value, Progress, state.where) if row is not None else None
            return head_error(pipeline, state, head)
    # Until its rows show that, no partition counts as another driver's.
    return head_error(pipeline, state, state.head) if isinstance(error, ClaimedError) else error
