"""Times as names: granularities, formats, time zones."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec.parsers.layouts import as_json, batch, laid, opened, rows_of
from tidelog.codec.parsers import FolderSettings
from tidelog.errors import InvalidError


def at(moment: str, **chosen: Any) -> str:
    (found,) = laid("iso8601:at", [as_json({"at": moment})], **chosen)
    return found


SETTINGS = [
    ({}, "dt=2026-11-15"),
    ({"granularity": "hour"}, "dt=2026-11-15/hr=10"),
    ({"granularity": "minute"}, "dt=2026-11-15/hr=10/min=05"),
    ({"date_format": "date=%Y%m%d"}, "date=20261115"),
    ({"date_format": "year=%Y/month=%m/day=%d"}, "year=2026/month=11/day=15"),
    ({"date_format": "%G-W%V"}, "2026-W46"),
    ({"date_format": "Tag %j 100%%"}, "Tag 319 100%"),
    (
        {"granularity": "minute", "hour_format": "h%H", "minute_format": "m%M"},
        "dt=2026-11-15/h10/m05",
    ),
    ({"granularity": "hour", "time_zone": "Asia/Kathmandu"}, "dt=2026-11-15/hr=15"),
    ({"granularity": "hour", "time_zone": "Pacific/Kiritimati"}, "dt=2026-11-16/hr=00"),
    ({"granularity": "hour", "time_zone": "Etc/UTC"}, "dt=2026-11-15/hr=10"),
]


@pytest.mark.parametrize(("chosen", "expected"), SETTINGS, ids=[str(each) for each, _ in SETTINGS])
def test_settings_make_the_path(chosen: dict[str, Any], expected: str) -> None:
    assert at("2026-11-15T10:05:59.999Z", **chosen) == expected


CLOCKS = [
    # Berlin, spring 2026: 02:00 becomes 03:00 at 01:00 UTC.
    ("Europe/Berlin", "2026-03-29T00:59:59.999Z", "dt=2026-03-29/hr=01"),
    ("Europe/Berlin", "2026-03-29T01:00:00Z", "dt=2026-03-29/hr=03"),
    # Autumn: 03:00 becomes 02:00 at 01:00 UTC; both hours are 02.
    ("Europe/Berlin", "2026-10-25T00:30:00Z", "dt=2026-10-25/hr=02"),
    ("Europe/Berlin", "2026-10-25T01:30:00Z", "dt=2026-10-25/hr=02"),
    ("Europe/Berlin", "2026-10-25T02:00:00Z", "dt=2026-10-25/hr=03"),
    ("America/New_York", "2026-11-15T04:59:59Z", "dt=2026-11-14/hr=23"),
    # Lord Howe moves by half an hour, St John's once did so a minute after midnight.
    ("Australia/Lord_Howe", "2026-10-03T15:29:59Z", "dt=2026-10-04/hr=01"),
    ("Australia/Lord_Howe", "2026-10-03T15:30:00Z", "dt=2026-10-04/hr=02"),
    ("America/St_Johns", "2006-04-02T03:30:59Z", "dt=2006-04-02/hr=00"),
    ("America/St_Johns", "2006-04-02T03:31:00Z", "dt=2006-04-02/hr=01"),
    # Samoa had no 30 December 2011; Monrovia's offset had seconds until 1972.
    ("Pacific/Apia", "2011-12-30T09:59:59Z", "dt=2011-12-29/hr=23"),
    ("Pacific/Apia", "2011-12-30T10:00:00Z", "dt=2011-12-31/hr=00"),
    ("Africa/Monrovia", "1972-01-07T00:44:29Z", "dt=1972-01-06/hr=23"),
    ("Africa/Monrovia", "1972-01-07T00:44:30Z", "dt=1972-01-07/hr=00"),
    # The edges of what a time may be.
    ("America/New_York", "1970-01-01T00:00:00Z", "dt=1969-12-31/hr=19"),
    ("America/New_York", "9999-12-31T23:59:59.999Z", "dt=9999-12-31/hr=18"),
    ("Asia/Tokyo", "9999-12-31T14:59:59.999Z", "dt=9999-12-31/hr=23"),
]


@pytest.mark.parametrize(("zone", "moment", "expected"), CLOCKS)
def test_the_clocks_of_a_zone(zone: str, moment: str, expected: str) -> None:
    assert at(moment, granularity="hour", time_zone=zone) == expected


def test_a_year_that_no_clock_shows_is_an_error() -> None:
    assert at("9999-12-31T15:00:00Z", time_zone="Asia/Tokyo").startswith("!time is outside")


@given(
    year=st.integers(1970, 9_998),
    start=st.integers(0, 1_800),
    zone=st.sampled_from(
        ["Europe/Berlin", "America/St_Johns", "Australia/Lord_Howe", "Africa/Monrovia", "Asia/Gaza"]
    ),
)
@settings(max_examples=15, deadline=None)
def test_the_names_of_a_whole_year_are_pythons(year: int, start: int, zone: str) -> None:
    first = int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) + start
    moments = range(first, first + 366 * 86_400, 1_801)
    expected = [
        datetime.fromtimestamp(each, ZoneInfo(zone)).strftime("dt=%Y-%m-%d/hr=%H")
        for each in moments
    ]
    parser = opened("delimited:1|,", FolderSettings(granularity="hour", time_zone=zone))
    assert rows_of(parser.lay_out(batch([str(each).encode() for each in moments]))) == expected


WRONG = [
    ({"granularity": "hours"}, "setting granularity: is `hours` (did you mean `hour`?)"),
    ({"granularity": ""}, "setting granularity: is ``: give day, hour or minute"),
    ({"time_zone": "Europe/Berln"}, "setting time_zone: `Europe/Berln` is not known"),
    ({"time_zone": ""}, "setting time_zone: `` is not known"),
    ({"time_zone": "../../etc/passwd"}, "setting time_zone: `../../etc/passwd` is not known"),
    ({"time_zone": "Europe"}, "setting time_zone: `Europe` is not known"),
    ({"date_format": ""}, "has an empty name"),
    ({"date_format": "/%Y"}, "has an empty name"),
    ({"date_format": "%Y//%m"}, "has an empty name"),
    ({"date_format": "../%Y"}, "has the name `..`"),
    ({"date_format": "_%Y"}, "has the name `_2026`"),
    ({"date_format": "%Y\n"}, "which some stores cannot hold"),
    ({"date_format": "dt=%B"}, "setting date_format: has `%B`"),
    ({"hour_format": "hr=%"}, "setting hour_format: has `%`"),
    ({"minute_format": "m" * 201}, "has a name of more than 200 bytes"),
    ({"date_format": "/".join(["n" * 150] * 4)}, "has more than 500 bytes"),
    ({"granularity": "hour", "hour_format": "hr=%M"}, "setting hour_format: `hr=%M` has no %H"),
    ({"granularity": "minute", "minute_format": "min"}, "minute_format: `min` has no %M"),
    ({"granularity": "hour", "hour_format": "dt=%H"}, "two of them are called `dt=`"),
]


@pytest.mark.parametrize(("chosen", "message"), WRONG, ids=[str(each)[:40] for each, _ in WRONG])
def test_wrong_settings_are_refused(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidError) as caught:
        FolderSettings(**chosen)
    assert message in str(caught.value)


def test_settings_pickle() -> None:
    chosen = FolderSettings(granularity="hour", time_zone="Europe/Berlin")
    assert pickle.loads(pickle.dumps(chosen)) == chosen
