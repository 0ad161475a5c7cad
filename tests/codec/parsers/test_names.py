"""Names from data: none leads out of its folder, and none is lost."""

from __future__ import annotations

import json
from urllib.parse import unquote

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec.parsers.layouts import as_json, batch, laid, opened, rows_of
from tidelog.codec.parsers import FolderSettings
from tidelog.codec.parsers.base import escaped, path_problem, paths_of
from tidelog.model.limits import FOLDER_NAME_BYTES_MAX
from tidelog.store.base import check_key

NAMES = [
    ("de", "de"),
    ("New York", "New York"),
    ("a-b_c.d+e@f,g(h)", "a-b_c.d+e@f,g(h)"),
    ("Zürich", "Zürich"),
    ("日本", "日本"),
    ("..", "%2E%2E"),
    (".", "%2E"),
    ("...", "%2E.%2E"),
    (".hidden", "%2Ehidden"),
    ("_SUCCESS", "%5FSUCCESS"),
    ("__HIVE_DEFAULT_PARTITION__", "%5F_HIVE_DEFAULT_PARTITION__"),
    ("/", "%2F"),
    ("/etc/passwd", "%2Fetc%2Fpasswd"),
    ("a/../../b", "a%2F..%2F..%2Fb"),
    ("a\\b", "a%5Cb"),
    ("C:\\", "C%3A%5C"),
    ("100%", "100%25"),
    ("%2F", "%252F"),
    ("dt=2026-11-15", "dt%3D2026-11-15"),
    ("a\x00b\nc\x7f", "a%00b%0Ac%7F"),
    ("\x1b[2J", "%1B%5B2J"),
    ("a\u202eb\u2028c", "a%E2%80%AEb%E2%80%A8c"),
    (" ", "%20"),
    (" a ", "%20a%20"),
    ("a.", "a%2E"),
    ("~", "%7E"),
    ("$HOME;`x`", "%24HOME%3B%60x%60"),
]


@pytest.mark.parametrize(("text", "name"), NAMES, ids=[repr(text) for text, _ in NAMES])
def test_names(text: str, name: str) -> None:
    assert escaped(text) == name
    assert unquote(name) == text


def test_long_names_end_with_a_hash_and_stay_different() -> None:
    assert escaped("a" * FOLDER_NAME_BYTES_MAX) == "a" * FOLDER_NAME_BYTES_MAX
    for text in ("a" * 201, "日" * 67, "/" * 67, "é" * 1_000_000, "\U0001f30a" * 51):
        name = escaped(text)
        assert len(name.encode()) <= FOLDER_NAME_BYTES_MAX
        assert name[-17] == "~"
        assert path_problem(name) is None
        assert name != escaped(text + "b")


@given(st.text(min_size=1, max_size=300))
@settings(max_examples=400, deadline=None)
def test_no_name_leaves_its_folder(text: str) -> None:
    name = escaped(text)
    assert path_problem(name) is None
    assert "/" not in name
    check_key(f"archives/a/g1/orders/{name}/1_0_00000000000000000000.parquet")
    if "~" not in name:
        assert unquote(name) == text


@given(st.text(min_size=1, max_size=30), st.text(min_size=1, max_size=30))
@settings(max_examples=200, deadline=None)
def test_different_data_have_different_names(one: str, other: str) -> None:
    assert (escaped(one) == escaped(other)) == (one == other)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
TIMES = st.integers(-(10**6), 3 * 10**20) | st.text(max_size=12) | ANYTHING
EVENTS = st.fixed_dictionaries({"at": TIMES, "who": st.text(max_size=300) | ANYTHING}).map(
    lambda record: json.dumps(record, ensure_ascii=False).encode(errors="surrogatepass")
)
VALUES = st.none() | st.binary(max_size=40) | EVENTS | ANYTHING.map(as_json)
PARSERS = [
    "json:at",
    "iso8601:at",
    "date:at|%Y",
    "regex:(.+)",
    "delimited:2|,",
    "msgpack:at",
    "thrift:1",
    "thrift:1?protocol=compact",
    "timestamp",
    "offset:3",
    "first:json:at||iso8601:at",
    "first:delimited:2|,||date:at|%Y||timestamp",
    "split:who|json:at",
    "split:who|first:json:at||iso8601:at",
    "split:who|timestamp",
    "split:who|split:at|offset:2",
]


@pytest.mark.parametrize("text", PARSERS)
@given(values=st.lists(VALUES, max_size=12), hourly=st.booleans())
@settings(max_examples=30, deadline=None)
def test_every_row_has_a_path_inside_or_an_error(
    text: str, values: list[bytes | None], hourly: bool
) -> None:
    chosen = FolderSettings(granularity="hour" if hourly else "day", time_zone="Asia/Kolkata")
    found = rows_of(opened(text, chosen).lay_out(batch(values)))
    assert len(found) == len(values)
    for row in found:
        if not row.startswith("!"):
            assert path_problem(row) is None
            check_key(f"archives/a/g1/orders/{row}/1_0_00000000000000000000.parquet")
    cut = len(values) // 2
    parser = opened(text, chosen)
    halves = [batch(values).slice(0, cut), batch(values).slice(cut)]
    assert found == [row for half in halves for row in rows_of(parser.lay_out(half))]


def test_codes_of_equal_names_become_one() -> None:
    paths = paths_of(pa.array([0, 1, None, 2, 3], pa.int32()), ["a", "b", "a", None])
    assert paths.to_pylist() == ["a", "b", None, "a", None]
    assert paths.dictionary.to_pylist() == ["a", "b"]


SPLITS = [
    ({"who": "de", "at": 1_794_744_000}, "de/dt=2026-11-15"),
    ({"who": "a/../b", "at": 1_794_744_000}, "a%2F..%2Fb/dt=2026-11-15"),
    ({"who": 5, "at": 1_794_744_000}, "5/dt=2026-11-15"),
    ({"who": True, "at": 1_794_744_000}, "true/dt=2026-11-15"),
    ({"who": "[draft]", "at": 1_794_744_000}, "%5Bdraft%5D/dt=2026-11-15"),
    ({"who": '{"a":1}', "at": 1_794_744_000}, "%7B%22a%22%3A1%7D/dt=2026-11-15"),
    ({"who": ["x"], "at": 1_794_744_000}, "!field `who` is an object or an array"),
    ({"who": {"x": 1}, "at": 1_794_744_000}, "!field `who` is an object or an array"),
    ({"who": "", "at": 1_794_744_000}, "!field `who` is empty"),
    ({"who": None, "at": 1_794_744_000}, "!field `who` is missing or null"),
    ({"at": 1_794_744_000}, "!field `who` is missing or null"),
    ({"who": "de"}, "!field `at` is missing or null"),
    ({"who": "de", "at": "soon"}, "!field `at` is not an epoch time: soon"),
    ({}, "!field `who` is missing or null"),
]


def test_split() -> None:
    values = [as_json(value) for value, _ in SPLITS]
    assert laid("split:who|json:at", values) == [expected for _, expected in SPLITS]
    assert laid("split:who|json:at", [None, b"{", b"\xff"]) == [
        "!null value",
        "!value is not JSON",
        "!value is not UTF-8 text",
    ]


def test_split_takes_any_parser_inside() -> None:
    value = as_json({"a": {"b": "x"}, "c": "y", "at": "2026-11-15T12:00:00Z"})
    assert laid("split:a.b|iso8601:at", [value]) == ["x/dt=2026-11-15"]
    assert laid("split:a.b|split:c|iso8601:at", [value]) == ["x/y/dt=2026-11-15"]
    assert laid("split:c|date:at|%Y-%m-%dT%H:%M:%S%z", [value]) == ["y/dt=2026-11-15"]
    assert laid("split:c|timestamp", [value], granularity="hour") == ["y/dt=2026-11-15/hr=12"]


def test_split_keeps_paths_short() -> None:
    value = as_json({"a": "x" * 999, "at": 1_794_744_000})
    (one,) = laid("split:a|json:at", [value])
    assert len(one) == 200 + len("/dt=2026-11-15")
    assert laid("split:a|split:a|split:a|json:at", [value]) == ["!its path has more than 500 bytes"]
