"""Times that are not all written in one way: the first parser that finds one."""

from __future__ import annotations

import pytest

from tests.codec.parsers.layouts import as_json, laid
from tidelog.codec.parsers import (
    FolderSettings,
    either_parser,
    folder_settings,
    open_parser,
    parts_of_events,
)

MIXED = "first:json:at||iso8601:at||date:at|%d/%m/%Y"

NONE = (
    "!field `at` is not an epoch time: soon; field `at` is not an ISO 8601 time: soon; "
    "field `at` does not fit `%d/%m/%Y`: soon"
)


@pytest.mark.parametrize(
    ("at", "folder"),
    [
        (1_794_744_000, "dt=2026-11-15"),  # seconds, milliseconds, microseconds, nanoseconds
        (1_794_744_000_000, "dt=2026-11-15"),
        (1_794_744_000_000_000, "dt=2026-11-15"),
        ("1794744000", "dt=2026-11-15"),
        ("2026-11-16", "dt=2026-11-16"),
        ("2026-11-16T23:30:00-02:00", "dt=2026-11-17"),
        ("18/11/2026", "dt=2026-11-18"),
        ("soon", NONE),
        (None, "!field `at` is missing or null"),
    ],
)
def test_event_has_the_time_of_the_first_parser_that_finds_one(at: object, folder: str) -> None:
    assert laid(MIXED, [as_json({"at": at})]) == [folder]


def test_events_of_a_batch_keep_their_order() -> None:
    values = [{"at": "2026-11-16"}, {"at": 1_794_744_000}, {}, {"at": "18/11/2026"}, {"at": 5}]
    assert laid(MIXED, [*map(as_json, values), None, b"{"]) == [
        "dt=2026-11-16",
        "dt=2026-11-15",
        "!field `at` is missing or null",
        "dt=2026-11-18",
        "dt=1970-01-01",
        "!null value",
        "!value is not JSON",
    ]
    assert laid(MIXED, []) == []


def test_parsers_may_read_other_fields_and_have_blanks_around_them() -> None:
    values = [{"created": "2026-11-16"}, {"at": 1_794_744_000, "created": "2026-11-16"}, {}]
    named = "first:json:at || iso8601:created"
    assert laid(named, list(map(as_json, values)))[:2] == ["dt=2026-11-16", "dt=2026-11-15"]
    (last,) = laid(named, [as_json({})])
    assert last == "!field `at` is missing or null; field `created` is missing or null"


def test_it_works_inside_other_parsers() -> None:
    value = as_json({"who": "de", "at": "2026-11-16"})
    assert laid(f"split:who|{MIXED}", [value]) == ["de/dt=2026-11-16"]
    assert open_parser(f"topics:clicks={MIXED};*=timestamp", FolderSettings())


def test_settings_of_folders_count() -> None:
    assert folder_settings(MIXED, {"granularity": "hour"}).granularity == "hour"
    path = "de/dt=2026-11-16"
    assert parts_of_events(path, f"split:who|{MIXED}", FolderSettings(), 1_794_787_200_000) == 1


def test_two_parsers_are_named_as_one() -> None:
    assert either_parser("json:at", "iso8601:at") == "first:json:at||iso8601:at"
    assert either_parser("first:json:at||iso8601:at", "timestamp").endswith("||timestamp")
    assert either_parser("split:who|json:at", "iso8601:at") == "iso8601:at", "no one tries both"
