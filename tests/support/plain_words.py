"""Plain English: words and phrases that no text for people may use, and what to write instead.

``SOURCES`` lists where such texts come from. A source is a function that yields a name and a text.
Add one for templates or for messages of errors, and every rule applies to it;
``tests/test_tidy.py`` checks them all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from tidelog.cli.main import cli

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = [
    *sorted(ROOT.glob("[A-Z]*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
]
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]+`|\]\([^)]*\)|<!--.*?-->", re.DOTALL | re.MULTILINE)
Source = Callable[[], Iterator[tuple[str, str]]]


@dataclass(frozen=True)
class Retired:
    """A pattern that must not match, what to write instead, and texts that show what it means."""

    pattern: str
    instead: str
    wrong: tuple[str, ...]
    right: tuple[str, ...] = ()


RETIRED = (
    Retired(
        r"\b(lay|lays|laid|laying)\b(?: \w+){0,4} down\b",
        "write, close (a file)",
        ("a file is laid down", "it lays its events down as files"),
        ("the disk is down",),
    ),
    Retired(
        r"\b(stand|stands|stood) (in|at|by|beside|before|there)\b",
        "is, is stored in; waits as a standby",
        ("what stands in the catalog", "the others stand by"),
        ("waits as a standby", "what the escape stands for"),
    ),
    Retired(r"\bmend(s|ed|ing)?\b", "fix", ("when the parser is mended",), ("we recommend",)),
    Retired(r"\banew\b", "again, from scratch, new", ("write it anew",), ("a new file",)),
    Retired(
        r"\b(tell|tells|telling|told)\b",
        "returns, reports, notifies, raises, shows",
        ("`status` tells how far it is", "one that was opened is told so"),
        ("the teller",),
    ),
    Retired(
        r"\bso (many|much|often)\b|\bso long\b(?! as)",
        "N, this many, this size, this long",
        ("lots of so many offsets", "after so long it ends"),
        ("so long as it runs", "so more partitions cost more"),
    ),
    Retired(
        r"\bbut for\b|\b(nothing|none|everything|anything|all|any) but\b(?! (it|not|they)\b)",
        "except",
        ("durable, but for pixels", "they share nothing but the home"),
        ("not for reads but while it runs",),
    ),
    Retired(
        r"\b(whoever|whomever|nobody|somebody|anybody)\b",
        "the caller, a reader, another process, no process",
        ("nobody drives it", "open to whoever is here"),
    ),
    Retired(
        r"\bfor who\b|(?:^|[.:;,] )[Ww]ho (wants|has|had|reads|must|needs|creates|is|only)\b",
        "a reader that, a member that",
        ("for who reads the manifest", "Who has lost a lease cannot commit"),
        ("people who need it", "who, when and why"),
    ),
    Retired(
        r"\b(give|gives|gave|given) up (an?|the|its|their|all|old|runs?|events?)\b",
        "delete",
        ("give up runs whose events are older",),
        ("it gives up after 30 s",),
    ),
    Retired(
        r"\b(bear|bears|bore|borne)\b",
        "tolerate, allow",
        ("a test bears a stall", "12 may be borne"),
        ("Authorization: Bearer",),
    ),
    Retired(
        r"\b(take|takes|took|taken) (an? |the |in |its )?(event|record)s?\b"
        r"|\b(cannot|could not) take\b",
        "accept, read, claim",
        ("the server takes events", "what a parser cannot take"),
        ("it takes a second", "takes over"),
    ),
    Retired(
        r"(?<!there )(?<!There )\b(is|are) no (?!longer\b|more\b|less\b|fewer\b|such\b)[a-z]",
        "is not a valid",
        ("the line is no event", "these are no valid times"),
        ("there is no event", "it is no longer used"),
    ),
    Retired(
        r"\b(has|have|had) come\b",
        "has reached, has arrived",
        ("how far it has come", "events that have come since"),
    ),
    Retired(
        r"\b(go|goes|gone|going|went) on\b|\bis gone\b(?! for good)",
        "continues, resumes; is deleted",
        ("it goes on where it was", "the range is gone on with", "the topic is gone"),
        ("the folder is gone for good",),
    ),
    Retired(
        r"\b(is|are|was|all) well\b",
        "healthy",
        ("when all is well", "the home is well"),
        ("it works as well", "well-known"),
    ),
    Retired(r"\blately\b", "recent", ("events lately",)),
    Retired(r"\bat most \S+ may be\b", "limit N", ("at most 0 may be",), ("at most once",)),
    Retired(r"\b1 have\b", "1 has", ("1 have joined",), ("11 have joined",)),
    Retired(r"\bback-up", "backup", ("a back-up of the home",), ("back up both",)),
)


def documents() -> Iterator[tuple[str, str]]:
    """Every document for users, without its code."""
    for path in DOCUMENTS:
        yield str(path.relative_to(ROOT)), CODE.sub("", path.read_text())


def pictures() -> Iterator[tuple[str, str]]:
    """The words of every drawn picture."""
    for path in sorted(ROOT.glob("docs/pictures/*.svg")):
        yield path.name, "\n".join(re.findall(r">([^<>{}]+)<", path.read_text()))


def help_texts() -> Iterator[tuple[str, str]]:
    """The help of every command and of its options, without examples."""
    commands: list[tuple[str, click.Command]] = [("tidelog", cli)]
    while commands:
        name, command = commands.pop()
        options = [getattr(param, "help", None) or "" for param in command.params]
        yield name, "\n\n".join([(command.help or "").partition("\b")[0], *options])
        if isinstance(command, click.Group):
            commands += [(f"{name} {own}", each) for own, each in command.commands.items()]


SOURCES: tuple[Source, ...] = (documents, pictures, help_texts)


def retired_words(text: str) -> Iterator[str]:
    """Yields each retired phrase of a text, over line ends too, with what to write instead."""
    joined = re.sub(r"\s*\n\s*(?=\S)", " ", text)
    for rule in RETIRED:
        for match in re.finditer(rule.pattern, joined):
            yield f"“{match[0].strip()}”: write {rule.instead}"
