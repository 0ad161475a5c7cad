"""The interface of a parser: for every event the folder it belongs in, or the reason why it has
none.

A parser works on whole batches rather than single events. Its result for an event depends on that
event alone: the same events in other batches get the same folders.

**Names of folders** are made from times and from arbitrary data. Data never leads out of the
archive's folder: characters that are special in a path, a shell or Hive are written as ``%XX``, as
Hive does, and so is a leading ``_`` or ``.``, which readers of archives skip. Different data get
different names. Names of topics and source partitions, which other systems choose, follow the same
rule.

:class:`FolderSettings` says how times become folders, and is checked when it is created.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol
from urllib.parse import parse_qsl, unquote
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.errors import InvalidError
from tidelog.model.address import nearest
from tidelog.model.limits import FOLDER_NAME_BYTES_MAX, FOLDER_PATH_BYTES_MAX

__all__ = [
    "FieldTimes",
    "FolderPaths",
    "FolderSettings",
    "ParsedValues",
    "Parser",
    "Spec",
    "TimeParser",
    "escaped",
    "folder_settings",
    "makes_dates",
    "parts_of_events",
    "path_problem",
    "paths_of",
    "shown",
    "unescaped",
    "used_folder_settings",
]

_QUOTED_MAX = 60  # characters of a bad value that its error repeats
_SHOWN_MAX = 200  # characters of a name or of a foreign message
_NOT_SHOWN = r"[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]"  # would break a line or a terminal


@dataclass(frozen=True, slots=True)
class FolderPaths:
    """For every row of a batch either a path or an error; the other one is null.

    Paths are what comes between an archive's topic and its files, such as ``dt=2026-11-15/hr=10``.
    Their dictionary has no duplicates, so equal codes are equal folders.
    """

    paths: pa.DictionaryArray  # int32 codes of strings
    errors: pa.Array  # strings: why an event is a dead letter
    times: pa.Array  # int64: the ms UTC that the path was made from; null if none
    values: pa.Array | None = None  # what files hold instead of the events' own values


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

    def lay_out(self, batch: pa.RecordBatch) -> FolderPaths:
        """Returns where each event of a batch in event columns belongs.

        A bad event gets an error text, and never fails its batch. Raises ``UnavailableError`` if
        something that the parser needs, such as a schema registry, cannot be reached.

        A parser with a true attribute ``changes_values`` may also return the values that files hold
        instead. Dead letters keep the events' own.
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


_SPECIAL = frozenset("\"#%'*/:=?\\{}[]^<>|`$!&;~")
_EDGE = frozenset("_. ")  # hidden at the start; lost by some file systems at the end
_HASH_DIGITS = 16


def escaped(text: str, bytes_max: int = FOLDER_NAME_BYTES_MAX) -> str:
    """Returns a name for a piece of data, which is not empty: one short part of a path.

    A name that would be too long ends with a hash after a ``~``, which no other name has.
    """
    last = len(text) - 1
    pieces: list[str] = []
    size = 0
    for index, char in enumerate(text[: bytes_max + 1]):
        plain = char.isprintable() and char not in _SPECIAL
        if plain and char in _EDGE and (index == 0 or (index == last and char != "_")):
            plain = False
        piece = char if plain else "".join(f"%{byte:02X}" for byte in char.encode())
        pieces.append(piece)
        size += len(piece.encode())
    if size <= bytes_max:
        return "".join(pieces)
    while size > bytes_max - _HASH_DIGITS - 1:
        size -= len(pieces.pop().encode())
    digest = hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]
    return f"{''.join(pieces)}~{digest}"  # no plain name has a ~


def unescaped(name: str, bytes_max: int = FOLDER_NAME_BYTES_MAX) -> str:
    """Returns the data of a name that ``escaped`` returned; other and hashed names unchanged."""
    text = unquote(name, errors="replace")
    return text if text and escaped(text, bytes_max) == name else name


def path_problem(path: str) -> str | None:
    """Returns why a path is not allowed in an archive, or None."""
    for name in path.split("/"):
        if not name:
            return "has an empty name"
        if name[0] in "_.":
            return f"has the name `{name}`, which readers of archives skip"
        if not name.isprintable() or "\\" in name:
            return f"has the name {name!r}, which some stores cannot hold"
        if len(name.encode()) > FOLDER_NAME_BYTES_MAX:
            return f"has a name of more than {FOLDER_NAME_BYTES_MAX} bytes"
    if len(path.encode()) > FOLDER_PATH_BYTES_MAX:
        return f"has more than {FOLDER_PATH_BYTES_MAX} bytes"
    return None


def paths_of(codes: pa.Array, names: Sequence[str | None]) -> pa.DictionaryArray:
    """Returns codes into unique names, from codes into names that may repeat; None is null."""
    distinct = {name: code for code, name in enumerate(dict.fromkeys(n for n in names if n))}
    moved = np.array([distinct.get(name or "", -1) for name in names] or [-1], np.int32)
    found = moved[codes.fill_null(0).to_numpy()] if len(codes) else moved[:0]
    empty = (found < 0) | codes.is_null().to_numpy(zero_copy_only=False)
    indices = pa.array(found, pa.int32(), mask=empty)
    return pa.DictionaryArray.from_arrays(indices, pa.array(list(distinct), pa.string()))


_GRANULARITIES_MS = {"day": 86_400_000, "hour": 3_600_000, "minute": 60_000}
_DIRECTIVES = set("YymdHMjGVu%")  # only numbers: the names of months depend on the machine
_SAMPLE = datetime(2026, 11, 15, 10, 30, tzinfo=UTC)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class FolderSettings:
    """How times become folders. Plain values that pickle."""

    granularity: str = "day"  # day, hour or minute: how fine the folders are
    date_format: str = "dt=%Y-%m-%d"  # names as Hive reads them; a / makes two folders
    hour_format: str = "hr=%H"
    minute_format: str = "min=%M"
    time_zone: str = "UTC"  # the zone of the names; two hours share one when clocks go back

    def __post_init__(self) -> None:
        if self.granularity not in _GRANULARITIES_MS:
            raise InvalidError(
                f"setting granularity: is `{self.granularity}`"
                f"{nearest(self.granularity, _GRANULARITIES_MS)}: give day, hour or minute"
            )
        try:
            ZoneInfo(self.time_zone)
        except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
            raise InvalidError(
                f"setting time_zone: `{self.time_zone}` is not known: give a name such as "
                "UTC or Europe/Berlin"
            ) from exc
        for name, needed in (("date_format", ""), ("hour_format", "%H"), ("minute_format", "%M")):
            _check_format(name, getattr(self, name), needed)
        columns = Counter(
            name.partition("=")[0] for name in self.path_format.split("/") if "=" in name
        )
        twice = [name for name, count in columns.items() if count > 1]
        if twice:
            raise InvalidError(
                f"folders `{self.path_format}`: two of them are called `{twice[0]}=`, and readers "
                "would mistake them for one column: give each format its own name"
            )

    @property
    def unit_ms(self) -> int:
        """Returns how long the finest folder lasts."""
        return _GRANULARITIES_MS[self.granularity]

    @property
    def path_format(self) -> str:
        """Returns the formats of this granularity, one folder below the other."""
        every = (self.date_format, self.hour_format, self.minute_format)
        return "/".join(every[: list(_GRANULARITIES_MS).index(self.granularity) + 1])

    def name_of(self, time_ms: int) -> str:
        """Returns the folder of a time."""
        moment = (_EPOCH + timedelta(milliseconds=time_ms)).astimezone(ZoneInfo(self.time_zone))
        shown = moment.replace(tzinfo=UTC) - _EPOCH  # by the zone's clocks
        unit = timedelta(milliseconds=self.unit_ms)
        return (_EPOCH + shown - shown % unit).strftime(self.path_format)


def parts_of_events(path: str, parser: str, settings: FolderSettings, time_ms: int) -> int:
    """Returns how many leading parts of a folder's path are not a time or an offset.

    Values of events have filled these. ``time_ms`` is the parser's time of an event in it; -1:
    unknown.
    """
    if not path:
        return 0
    parts, name = path.split("/"), ""
    if not makes_dates(parser):
        name = parts[-1] if parts[-1].startswith("offset=") else ""
    elif time_ms >= 0:
        try:
            name = settings.name_of(time_ms)
        except (OverflowError, ValueError):
            name = ""  # a time that no clock shows
    is_last = bool(name) and f"/{path}".endswith(f"/{name}")
    return len(parts) - (name.count("/") + 1 if is_last else 0)


def folder_settings(parser: str, given: Mapping[str, str]) -> FolderSettings:
    """Returns the given settings, for the folders that a parser makes.

    Raises ``InvalidError`` for a setting that has no effect.
    """
    settings = FolderSettings(**given)
    unused = sorted(given.keys() - used_folder_settings(parser, given).keys())
    if parser and unused:  # a sink refuses those of a backup
        why = f"granularity is {settings.granularity}"
        if not makes_dates(parser):
            why = f"parser `{parser}` makes no folders of dates"
        raise InvalidError(f"setting {unused[0]}: has no effect, as {why}: leave it out")
    return settings


def used_folder_settings(parser: str, given: Mapping[str, str]) -> dict[str, str]:
    """Returns those of the given settings that have an effect."""
    if not makes_dates(parser):
        return {}
    finer = {"day": ("hour_format", "minute_format"), "hour": ("minute_format",)}
    unused = finer.get(given.get("granularity", "day"), ())
    return {name: value for name, value in given.items() if name not in unused}


def makes_dates(parser: str) -> bool:
    """Returns whether a parser, or the innermost of a split, makes names of times.

    Those of topics are all of one sort.
    """
    if parser.startswith("topics:"):
        parser = parser.partition("=")[2].partition(";")[0]
    while parser.startswith("split:"):
        parser = parser.partition("|")[2]
    return bool(parser) and parser.partition(":")[0] != "offset"


def _check_format(name: str, text: str, needed: str) -> None:
    unknown = [each for each in re.findall(r"%(.?)", text, re.DOTALL) if each not in _DIRECTIVES]
    if unknown:
        raise InvalidError(
            f"setting {name}: has `%{unknown[0]}`: it takes %{' %'.join(sorted(_DIRECTIVES))}"
        )
    problem = path_problem(_SAMPLE.strftime(text))
    if problem:
        raise InvalidError(f"setting {name}: `{text}` {problem}: give plain names")
    if needed not in text:
        raise InvalidError(f"setting {name}: `{text}` has no {needed}: put it into the name")
