"""Formats values for a page: numbers, sizes, times, any bytes, and lines of charts.

Templates escape all that they show. What escaping leaves, characters that are invisible or that
turn the direction of a line, is made visible here.

A line of a chart is the points of a series as the coordinates of an SVG, with labels beside it.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from markupsafe import Markup, escape

from tidelog.concurrency import describe_process
from tidelog.model.decoding import is_deep_json
from tidelog.model.event import to_iso
from tidelog.model.sizes import limit_text
from tidelog.model.times import rough_text

__all__ = [
    "PREVIEW_MAX",
    "SHOWN_MAX",
    "BarChart",
    "Bytes",
    "Chart",
    "Series",
    "ago",
    "bar_chart",
    "counted",
    "duration",
    "json_markup",
    "limit",
    "line_chart",
    "message",
    "number",
    "one_line",
    "process",
    "rate",
    "short",
    "size",
    "url",
    "visible",
    "when",
]

SHOWN_MAX = 65_536  # bytes of a value on its own page; a file has the rest
PREVIEW_MAX = 240  # characters of a value in a list
_HEX_MAX = 8_192  # bytes that are shown in hexadecimal digits
_UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
_TOKENS = re.compile(
    r'(?P<name>"(?:[^"\\]|\\.)*"(?=\s*:))|(?P<text>"(?:[^"\\]|\\.)*")'
    r"|(?P<number>-?\d[\d.eE+-]*)|(?P<word>\b(?:true|false|null)\b)"
)
_TICKS = re.compile("`([^`\n]+)`")
_OPTIONS = re.compile(r"(?<![^\s>])--[a-z][a-z-]{1,30}(?![\w-])")  # browsers break lines at dashes
_PLAIN = re.compile(r"[\x20-\x7e\n\t\u00a1-\u02ff\u0370-\u058f]*")


def visible(text: str) -> str:
    """Returns text with control characters and the like replaced by their numbers."""
    if _PLAIN.fullmatch(text):
        return text
    return "".join(
        char
        if char in "\n\t" or unicodedata.category(char) not in _UNSEEN
        else f"\\u{{{ord(char):x}}}"
        for char in text
    )


def message(text: str) -> Markup:
    """Returns an escaped message with the names between backticks as code."""
    marked = _TICKS.sub(r"<code>\1</code>", str(escape(visible(text))))
    return Markup(_OPTIONS.sub(r'<span class="option">\g<0></span>', marked))  # noqa: S704


def json_markup(text: str) -> Markup:
    """Returns indented JSON, escaped, with its names, texts, numbers and words as elements."""

    def element(found: re.Match[str]) -> str:
        kind = found.lastgroup or ""
        return f'<span class="j-{kind}">{escape(found[kind])}</span>'

    parts: list[str] = []
    at = 0
    for found in _TOKENS.finditer(text):
        parts += [str(escape(text[at : found.start()])), element(found)]
        at = found.end()
    return Markup("".join([*parts, str(escape(text[at:]))]))  # noqa: S704


def process(mark: str) -> str:
    """Returns the host and process of a member's mark: `vm/…|31864|…` is `vm, process 31864`."""
    return describe_process(mark)


def one_line(data: bytes | str | None, most: int = PREVIEW_MAX) -> str:
    """Returns the beginning of a value on one line; bytes that are not text in hexadecimal."""
    if data is None:
        return ""
    if isinstance(data, bytes):
        part = data[: 4 * most]
        try:
            text = part.decode()
        except UnicodeDecodeError as exc:
            if len(data) <= len(part) or exc.start < len(part) - 4:
                return part[: most // 3].hex(" ") + (" …" if len(data) > most // 3 else "")
            text = part[: exc.start].decode()
        longer = len(data) > len(part)
    else:
        text, longer = data, False
    shown = visible(" ".join(text.split(None, -1))) if "\n" in text else visible(text)
    return shown[:most] + ("…" if longer or len(shown) > most else "")


@dataclass(frozen=True, slots=True)
class Bytes:
    """A value of an event in each of its views."""

    data: bytes | None

    @property
    def text(self) -> str:
        """Returns the value as text; bytes that are not UTF-8 become a mark."""
        return visible((self.data or b"")[:SHOWN_MAX].decode("utf-8", "replace"))

    @property
    def is_text(self) -> bool:
        """Returns whether all of it is UTF-8."""
        try:
            (self.data or b"").decode()
        except UnicodeDecodeError:
            return False
        return True

    @property
    def json(self) -> str | None:
        """Returns indented JSON, with numbers and names unchanged; None if it is not JSON."""
        if self.data is None or len(self.data) > SHOWN_MAX:
            return None
        if is_deep_json(self.data):
            return None
        try:
            laid_out = msgspec.json.format(self.data, indent=2)
            return visible(laid_out.decode())
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None

    @property
    def hex(self) -> str:
        """Returns lines of 16 bytes each, with their place and their printable characters."""
        data = (self.data or b"")[:_HEX_MAX]
        lines = []
        for at in range(0, len(data), 16):
            part = data[at : at + 16]
            plain = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
            lines.append(f"{at:08x}  {part[:8].hex(' '):23}  {part[8:].hex(' '):23}  {plain}")
        return "\n".join(lines)

    @property
    def best(self) -> str:
        """Returns the view to begin with."""
        if self.json is not None:
            return "json"
        return "text" if self.is_text else "hex"

    @property
    def is_cut(self) -> bool:
        """Returns whether the page shows only a part of it."""
        return len(self.data or b"") > SHOWN_MAX

    @property
    def hex_is_cut(self) -> bool:
        return len(self.data or b"") > _HEX_MAX


def number(value: int | None) -> str:
    """Returns a number with separators; a dash for an unknown one."""
    return "—" if value is None else f"{value:,}"


def counted(value: int, noun: str) -> str:
    """Returns a number of things: 1 event, 2 events."""
    return f"{value:,} {noun}" if value == 1 else f"{value:,} {noun}s"


def short(value: float | None) -> str:
    """Returns a number in about three digits: 1.2 M."""
    if value is None:
        return "—"
    for unit, least in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= least:
            return f"{value / (1e3 if unit == 'k' else least):.3g} {unit}"
    return f"{value:,.0f}"


def rate(value: float | None) -> str:
    """Returns events a second."""
    if value is None:
        return "—"
    if 0 < value < 10:
        return f"{value:.2g}"
    return short(value)


def size(value: int | None) -> str:
    """Returns bytes in the unit that fits."""
    if value is None:
        return "—"
    amount, unit = float(value), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if amount < 1024 or unit == "PiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"


def limit(value: int) -> str:
    """Returns a limit that a person has set, such as 200 MB, as it was given."""
    return limit_text(value)


def duration(milliseconds: float | None) -> str:
    """Returns a duration as people say it: 3 s, 5 min, 2 h, 4 d."""
    if milliseconds is None:
        return "—"
    return rough_text(milliseconds / 1000)


def ago(then_ms: int | None, now_ms: int) -> str:
    """Returns how long ago a time was."""
    if not then_ms:
        return "never"
    if then_ms - now_ms > 1_000:
        return f"in {duration(then_ms - now_ms)}"
    return "just now" if now_ms - then_ms < 1_500 else f"{duration(now_ms - then_ms)} ago"


def when(time_ms: int | None) -> str:
    """Returns a time as ISO 8601; a dash for none."""
    return "—" if time_ms is None or time_ms < 0 else to_iso(time_ms)


def url(path: str, /, *parts: str, **query: Any) -> str:
    """Returns a path of the console with its parts and query; leaves out what is None."""
    whole = "/".join([path, *(quote(part, safe="") for part in parts)])
    given = {name: value for name, value in query.items() if value is not None}
    return f"{whole}?{urlencode(given)}" if given else whole


_POINTS_MAX = 240
_STEP_MS_MAX = 60_000  # beyond this the oldest points go


class Series:
    """A figure over time, in a bounded number of points: the longer, the coarser."""

    __slots__ = ("_step_ms", "times_ms", "values")

    def __init__(self) -> None:
        self.times_ms = array("q")
        self.values = array("d")
        self._step_ms = 1_000

    def add(self, time_ms: int, value: float) -> None:
        """Adds a point; one that comes soon after the last replaces it."""
        times, values = self.times_ms, self.values
        if len(times) > 1 and time_ms - times[-2] < self._step_ms:
            times[-1], values[-1] = time_ms, value
            return
        times.append(time_ms)
        values.append(value)
        if len(times) <= _POINTS_MAX:
            return
        if self._step_ms < _STEP_MS_MAX:
            self._step_ms *= 2
            del times[1:-1:2], values[1:-1:2]
        else:
            del times[0], values[0]

    @property
    def last(self) -> float | None:
        """Returns the newest value."""
        return self.values[-1] if self.values else None

    def rates(self) -> Series:
        """Returns the growth per second from point to point; a fall counts as 0."""
        found = Series()
        points = list(zip(self.times_ms, self.values, strict=True))
        for (before_ms, before), (time_ms, value) in itertools.pairwise(points):
            passed_ms = time_ms - before_ms
            if passed_ms > 0:
                found.times_ms.append(time_ms)
                found.values.append(max(0.0, value - before) * 1000 / passed_ms)
        return found

    def rate(self, over_ms: int = 10_000) -> float | None:
        """Returns the recent growth per second; None before there are two points."""
        times, values = self.times_ms, self.values
        if len(times) < 2:
            return None
        first = len(times) - 2
        while first > 0 and times[-1] - times[first] < over_ms:
            first -= 1
        passed_ms = times[-1] - times[first]
        return max(0.0, values[-1] - values[first]) * 1000 / passed_ms if passed_ms > 0 else None


@dataclass(frozen=True, slots=True)
class Chart:
    """One line with its area, for a view box of a given size."""

    line: str
    area: str
    width: int
    height: int
    highest: str
    first: str
    last: str
    says: str  # the same in words, for who does not see it

    @property
    def is_empty(self) -> bool:
        return not self.line


def line_chart(series: Series, width: int = 600, height: int = 120) -> Chart:
    """Returns the chart of a series, from 0 to its highest value."""
    times, values = series.times_ms, series.values
    if len(times) < 2 or times[-1] == times[0]:
        return Chart("", "", width, height, "", "", "", "no points yet")
    top = max(1e-9, *values)
    points = [
        f"{(time_ms - times[0]) * width / (times[-1] - times[0]):.1f},"
        f"{height - 2 - value * (height - 6) / top:.1f}"
        for time_ms, value in zip(times, values, strict=True)
    ]
    line = " ".join(points)
    area = f"0,{height} {line} {width},{height}"
    first, last = to_iso(times[0]), to_iso(times[-1])
    now, highest = _word(values[-1]), _word(max(values))
    says = f"from {first[11:19]} to {last[11:19]}: now {now}, up to {highest}"
    return Chart(line, area, width, height, highest, first, last, says)


@dataclass(frozen=True, slots=True)
class BarChart:
    """Bars over time, for a view box of a given size."""

    bars: tuple[tuple[float, float, float, float, str], ...]  # x, y, width, height, in words
    cuts: tuple[float, ...]  # x of bars that are larger than the others allow
    width: int
    height: int
    highest: str
    first: str
    last: str
    says: str


def bar_chart(counts: Sequence[tuple[int, int]], width: int = 1200, height: int = 120) -> BarChart:
    """Returns the chart of counts by the time at which each bar begins, from 0 to the highest."""
    highest = max((count for _, count in counts), default=0)
    if not highest:
        return BarChart((), (), width, height, "", "", "", "nothing yet")
    each = width / len(counts)
    # One or two large bars, such as those of a first run, would flatten all others: bars beyond 8
    # times the usual height are cut.
    usual = sorted(count for _, count in counts if count)
    high9 = usual[max(0, min((len(usual) - 1) * 9 // 10, len(usual) - 3))]
    most = 2 * high9 if len(usual) > 4 and highest > 8 * high9 else highest
    bars = tuple(
        (
            round(at * each + each * 0.08, 2),
            round(height - high, 2),
            round(each * 0.84, 2),
            round(high, 2),
            f"{count:,} from {to_iso(time_ms)}",
        )
        for at, (time_ms, count) in enumerate(counts)
        if (high := max(2.0, min(count, most) * (height - 4) / most) if count else 0.0)
    )
    cuts = tuple(round(at * each, 2) for at, (_, count) in enumerate(counts) if count > most)
    first, last = (to_iso(counts[at][0]) for at in (0, -1))
    says = f"from {first} to {last}: up to {highest:,}"
    return BarChart(bars, cuts, width, height, short(highest), first, last, says)


def _word(value: float) -> str:
    return f"{value:.2g}" if 0 < value < 10 and value % 1 else short(value)
