"""Every example in the documentation of the public classes runs, on a home of its own."""

from __future__ import annotations

import asyncio
import doctest
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import tidelog
from tidelog import aio
from tidelog.connectors.sink import Lot
from tidelog.home import create_home
from tidelog.settings import load_settings

ORDERS = [
    tidelog.Event(
        b'{"at": 179465760000%d, "total": %d}' % (number, 10 * number),
        id=f"order-{number}",
        key=b"customer-%d" % (number % 2),
        timestamp=1_794_657_600_000 + number,
    )
    for number in (1, 2, 3)
]


def public_members() -> Iterator[tuple[str, object]]:
    """Yields all that is public, and the methods and properties of what is a class."""
    yield from ((f"aio.{name}", getattr(aio, name)) for name in aio.__all__)
    for name in tidelog.__all__:
        found = getattr(tidelog, name)
        yield name, found
        if not inspect.isclass(found) or not found.__module__.startswith("tidelog"):
            continue
        for base in found.__mro__:
            for own, member in vars(base).items():
                if base.__module__.startswith("tidelog") and not own.startswith("_"):
                    yield f"{name}.{own}", member


WITH_EXAMPLES = [
    *(tidelog.Home, tidelog.Producer, tidelog.SendFuture, tidelog.Consumer, tidelog.Consumers),
    *(tidelog.ConsumerHandle, tidelog.Archives, tidelog.ArchiveHandle, tidelog.ArchiveTables),
    *(tidelog.Pumps, tidelog.PumpHandle, tidelog.Playbacks, tidelog.Tokens, tidelog.Jobs),
    *(tidelog.Share, tidelog.Fate, tidelog.Proof, tidelog.Stream, tidelog.Scribe, tidelog.Event),
    tidelog.Forwarder,
]
"""What people work with; other types are what calls take and return."""


def examples() -> list[doctest.DocTest]:
    """Returns the examples, each of a class or method."""
    parser, found = doctest.DocTestParser(), []
    for name, member in public_members():
        text = inspect.getdoc(member) or ""
        if ">>>" in text and (
            callable(member) or isinstance(member, property | functools.cached_property)
        ):
            found.append(parser.get_doctest(text, {}, name, None, 0))
    return [each for each in found if each.examples]


class Target:
    """A target of a forwarder that acknowledges everything."""

    lot_events = 100
    lot_bytes = None

    def check(self, event: tidelog.Event, now_ms: int) -> None:
        """Accepts every event."""

    def put(self, lot: Lot) -> None:
        """Acknowledges a lot."""

    def reached(self) -> int:
        return 0

    def close(self, failed: bool = False) -> None:
        """Does nothing: nothing is open."""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[tidelog.Home]:
    with create_home(load_settings(str(tmp_path / "home"), {}, tmp_path))[0] as home:
        home.create_topic("orders")
        home.append("orders", ORDERS)
        home.archives.create("daily", source="topic:orders", parser="json:at").run()
        yield home


@pytest.mark.parametrize("kind", WITH_EXAMPLES, ids=lambda kind: kind.__name__)
def test_every_public_method_has_an_example(kind: type) -> None:
    assert kind.__name__ in tidelog.__all__
    members = [
        (name, inspect.getattr_static(kind, name)) for name in dir(kind) if not name.startswith("_")
    ]
    called = (property, functools.cached_property)
    without = [
        name
        for name, member in members
        if (inspect.isfunction(member) or isinstance(member, called))
        and ">>>" not in (inspect.getdoc(member) or "")
    ]
    assert without == []


def test_every_public_function_has_an_example() -> None:
    functions = [name for name in tidelog.__all__ if inspect.isfunction(getattr(tidelog, name))]
    assert {"open", "create_home", "adopt_home", "read_file"} <= set(functions)
    named = [(name, getattr(tidelog, name)) for name in functions]
    named += [(f"aio.{name}", getattr(aio, name)) for name in aio.__all__ if name[0].islower()]
    assert [name for name, each in named if ">>>" not in (inspect.getdoc(each) or "")] == []


@pytest.mark.parametrize("example", examples(), ids=lambda each: each.name)
def test_example_runs(
    example: doctest.DocTest,
    home: tidelog.Home,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"home": home}
    if example.name.startswith(("Consumer.", "Producer.", "SendFuture.")):
        names["consumer"] = home.consumer("orders", "billing")
        names["producer"] = home.producer("orders")
    if example.name.startswith("Forwarder."):
        names["forwarder"] = tidelog.Forwarder("kinesis://clicks", Target)
    example.globs = {"tidelog": tidelog, "aio": aio, "asyncio": asyncio, **names}
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert not said, "".join(said)
