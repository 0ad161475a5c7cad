"""The interface of a parser: for every event the folder it belongs in, or the reason why it has
none.

A parser works on whole batches rather than single events. Its result for an event depends on that
event alone: the same events in other batches get the same folders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import parse_qsl

import pyarrow as pa
import pyarrow.compute as pc

from tidelog.errors import InvalidError
from tidelog.model.address import nearest

__all__ = ["FieldTimes", "Layout", "ParsedValues", "Parser", "Spec", "TimeParser", "shown"]

_QUOTED_MAX = 60  # characters of a bad value that its error repeats
_SHOWN_MAX = 200  # characters of a name or of a foreign message
_NOT_SHOWN = r"[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]"  # would break a line or a terminal


@dataclass(frozen=True, slots=True)
class Layout:
    """For every row of a batch either a path or an error; the other one is null.

    Paths are what comes between an archive's topic and its files, such as ``dt=2026-11-15/hr=10``.
    Their dictionary has no duplicates, so equal codes are equal folders.
    """

    paths: pa.DictionaryArray  # int32 codes of strings
    errors: pa.Array  # strings: why an event is a dead letter
    times: pa.Array  # int64: the ms UTC that the path was made from; null if none


@dataclass(frozen=True, slots=True)
class ParsedValues:
    """For every row either a value or an error text; the other one is null."""

    values: pa.Array
    errors: pa.Array

    def reject(self, bad: pa.Array, reason: str, quoted: pa.Array | None = None) -> ParsedValues:
        """Returns values without those of ``bad`` rows; null is not bad, and a first error stays.

        The error text is the reason and, if ``quoted`` is given, the start of that row's text.
        """
        bad = pc.and_(pc.fill_null(bad, False), pc.is_null(self.errors))
        if not pc.any(bad, min_count=0).as_py():
            return self
        said: pa.Array | pa.Scalar = pa.scalar(reason)
        if quoted is not None:
            some = pc.utf8_slice_codeunits(pc.if_else(bad, quoted, None), 0, _QUOTED_MAX)
            some = pc.replace_substring_regex(some, pattern=_NOT_SHOWN, replacement="?")
            said = pc.binary_join_element_wise(said, some, ": ")
        kept = pc.if_else(bad, pa.scalar(None, self.values.type), self.values)
        return ParsedValues(kept, pc.if_else(bad, said, self.errors))


class Parser(Protocol):
    """Belongs to one thread; opened where it is used."""

    def lay_out(self, batch: pa.RecordBatch) -> Layout:
        """Returns where each event of a batch in event columns belongs.

        A bad event gets an error text, and never fails its batch. Raises ``UnavailableError`` if
        something that the parser needs, such as a schema registry, cannot be reached.
        """
        ...


class TimeParser(Protocol):
    """The half of a parser that finds times; names are made from them in one way for all."""

    def times(self, batch: pa.RecordBatch) -> ParsedValues:
        """Returns the time of each event of a batch: int64, ms UTC, or an error text."""
        ...


@dataclass(frozen=True, slots=True)
class FieldTimes:
    """A time parser in two halves: one picks a text out of each event, one reads it as a time."""

    pick: Callable[[pa.RecordBatch], ParsedValues]
    read: Callable[[ParsedValues], ParsedValues]

    def times(self, batch: pa.RecordBatch) -> ParsedValues:
        return self.read(self.pick(batch))


@dataclass(frozen=True, slots=True)
class Spec:
    """A parser's name: ``kind:argument``, or ``kind:argument?option=value&…``."""

    text: str
    kind: str
    argument: str

    def refused(self, problem: str) -> InvalidError:
        """Returns the error for a name that opens no parser."""
        return InvalidError(f"parser `{shown(self.text)}`: {problem}", parser=self.text)

    def path(self, field: str) -> tuple[str, ...]:
        """Returns a field's name in parts; ``meta.at`` is the field ``at`` inside ``meta``."""
        parts = tuple(field.split("."))
        if not all(parts):
            raise self.refused("a field's name is empty: give names with dots between them")
        return parts

    def number(self, text: str, most: int, problem: str) -> int:
        """Returns an integer from 1 to ``most``. Raises with ``problem`` otherwise."""
        if text.isascii() and text.isdecimal() and len(text) < 20 and 1 <= int(text) <= most:
            return int(text)
        raise self.refused(f"`{shown(text)}` is {problem}")

    def with_options(self, known: Iterable[str]) -> tuple[str, dict[str, str]]:
        """Returns the argument without its options, and the options, which must be known."""
        argument, _, query = self.argument.partition("?")
        names = sorted(known)
        options: dict[str, str] = {}
        for name, value in parse_qsl(query, keep_blank_values=True):
            if name not in names:
                raise self.refused(
                    f"unknown option `{name}`{nearest(name, names)}: it takes {', '.join(names)}"
                )
            if name in options or not value:
                raise self.refused(f"option `{name}` is empty or given twice: give it one value")
            options[name] = value
        return argument, options


def shown(text: str) -> str:
    """Returns text as one line of limited length, for messages."""
    plain = "".join(char if char.isprintable() else "?" for char in text[:_SHOWN_MAX])
    return plain if len(text) <= _SHOWN_MAX else f"{plain}…"


_: type[TimeParser] = FieldTimes
