"""Parsers of other people: by module and class, by entry point, and what happens when they err."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tests.codec.parsers.layouts import NOON_MS, batch, laid, rows_of
from tidelog.codec.parsers import FolderSettings, open_parser
from tidelog.errors import InvalidError, UnavailableError

MODULE = '''
import pyarrow as pa

from tidelog.codec.parsers import ParsedValues, FolderPaths
from tidelog.errors import InvalidError, UnavailableError


class ByLength:
    """Folders by the length of the value; raises on a null one."""

    def __init__(self, argument, settings):
        self.prefix = argument or "length"

    def lay_out(self, batch):
        paths = [f"{self.prefix}={len(value)}" for value in batch.column("value").to_pylist()]
        rows = batch.num_rows
        return FolderPaths(pa.array(paths), pa.nulls(rows, pa.string()), pa.nulls(rows, pa.int64()))


class Verbatim(ByLength):
    """Trusts its data, as nobody should."""

    def lay_out(self, batch):
        values = batch.column("value").to_pylist()
        paths = [None if value is None else value.decode() for value in values]
        errors = ["bad" if path == "bad" else None for path in paths]
        times = pa.array([17] * batch.num_rows, pa.int64())
        return FolderPaths(pa.array(paths, pa.string()), pa.array(errors, pa.string()), times)


class Noon:
    """Finds times alone."""

    def __init__(self, argument, settings):
        self.shift_ms = int(argument)

    def times(self, batch):
        rows = batch.num_rows
        times = pa.array([1_794_744_000_000 + self.shift_ms] * rows, pa.int64())
        return ParsedValues(times, pa.nulls(rows, pa.string()))


class Short(ByLength):
    def lay_out(self, batch):
        return super().lay_out(batch.slice(0, 0))


class Wrong(ByLength):
    def lay_out(self, batch):
        return ["dt=2026-11-15"]


class Offline(ByLength):
    def lay_out(self, batch):
        raise UnavailableError("a registry: does not answer: check that it runs")


class Neither:
    def __init__(self, argument, settings):
        pass


class Choosy:
    def __init__(self, argument, settings):
        raise InvalidError(f"argument `{argument}`: give a colour")


class Broken:
    def __init__(self, argument, settings):
        raise KeyError("two\\nlines")
'''


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "shop_parsers.py").write_text(MODULE)
    (tmp_path / "shop_broken.py").write_text("import no_such_package_at_all\n")
    (tmp_path / "shop_failing.py").write_text("1 / 0\n")
    info = tmp_path / "shop-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shop\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tidelog.parsers]\nlength = shop_parsers:ByLength\ngone = shop_parsers:Gone\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield


def test_a_class_of_ones_own() -> None:
    found = laid("shop_parsers:ByLength", [b"a", b"abc", None, b""])
    assert found[:2] == ["length=1", "length=3"]
    assert found[2].startswith("!parser failed: TypeError: ")
    assert found[3] == "length=0"
    assert laid("shop_parsers:ByLength|size", [b"a"]) == ["size=1"]


def test_one_bad_event_among_many_is_the_only_dead_letter() -> None:
    values: list[bytes | None] = [b"abc"] * 1_000
    values[333] = None
    layout = open_parser("shop_parsers:ByLength", FolderSettings()).lay_out(batch(values))
    found = rows_of(layout)
    assert found.count("length=3") == 999
    assert found[333].startswith("!parser failed")


def test_an_entry_point() -> None:
    assert laid("length:n", [b"a", b"bb"]) == ["n=1", "n=2"]
    assert laid("length", [b"a"]) == ["length=1"]
    assert laid("split:x|length:n", [b'{"x":"y"}']) == ["y/n=9"]


def test_one_that_finds_times_alone() -> None:
    assert laid("shop_parsers:Noon|0", [None], granularity="hour") == ["dt=2026-11-15/hr=12"]
    layout = open_parser("shop_parsers:Noon|5", FolderSettings()).lay_out(batch([b""]))
    assert layout.times.to_pylist() == [NOON_MS + 5]
    assert laid(f"shop_parsers:Noon|-{NOON_MS + 1}", [b""]) == [
        "!time is outside of the years 1970 to 9999: -1"
    ]


def test_no_path_of_theirs_leaves_the_folder() -> None:
    refused = "!parser gave a path that must not be: "
    values = [
        b"a/b",
        b"../a",
        b"a/../b",
        b"/etc",
        b"a//b",
        b"",
        b"_x",
        b".x/y",
        b"a\x1bb",
        b"a\\b",
        b"x" * 201,
        None,
        b"bad",
        b"a/b",
    ]
    found = laid("shop_parsers:Verbatim", values)
    assert found[0] == found[-1] == "a/b"
    assert found[1:3] == [refused + "../a", refused + "a/../b"]
    assert all(row.startswith(refused) for row in found[1:11])
    assert found[11:13] == ["!parser gave no path", "!bad"]


def test_what_is_no_layout_is_a_reason_too() -> None:
    assert laid("shop_parsers:Short", [b"a"]) == [
        "!parser failed: InvalidError: it gave 0 paths and 0 errors for 1 events"
    ]
    wrong = "!parser failed: InvalidError: it gave list, not FolderPaths"
    assert laid("shop_parsers:Wrong", [b"a", b"b"]) == [wrong] * 2


def test_what_it_cannot_reach_makes_no_dead_letters() -> None:
    with pytest.raises(UnavailableError):
        open_parser("shop_parsers:Offline", FolderSettings()).lay_out(batch([b"a", b"b"]))


REFUSED = {
    "shop_parsers:Gone": "the module of that name has no class `Gone`",
    "shop_parsers:Neither": "it has neither lay_out(batch) nor times(batch)",
    "shop_parsers:Choosy|7": "argument `7`: give a colour",
    "shop_parsers:Broken": "it cannot be made (KeyError: 'two\\nlines')",
    "shop_broken:Class": "module `shop_broken` cannot be imported (ModuleNotFoundError",
    "shop_failing:Class": "module `shop_failing` cannot be imported (ZeroDivisionError",
    "gone:x": "entry point `shop_parsers:Gone` cannot be loaded",
    "lenght:x": "unknown kind `lenght`",
    "no_such.module:Class": "unknown kind `no_such.module`",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused_at_open(text: str) -> None:
    with pytest.raises(InvalidError) as caught:
        open_parser(text, FolderSettings())
    assert REFUSED[text] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_batch_has_an_empty_layout() -> None:
    for text in ("shop_parsers:Wrong", "shop_parsers:ByLength", "shop_parsers:Noon|0"):
        layout = open_parser(text, FolderSettings()).lay_out(batch([]))
        assert rows_of(layout) == []
        assert layout.paths.type == pa.dictionary(pa.int32(), pa.string())
