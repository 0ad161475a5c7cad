"""Formats values for a page: numbers, sizes, times and any bytes.

Templates escape all that they show. What escaping leaves, characters that are invisible or that
turn the direction of a line, is made visible here.
"""

from __future__ import annotations

import re
import unicodedata
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
    "Bytes",
    "ago",
    "counted",
    "duration",
    "json_markup",
    "limit",
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
