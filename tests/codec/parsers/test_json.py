"""Parsers of JSON fields: epochs, ISO 8601, dates by a pattern."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec.parsers.layouts import as_json, batch, laid, laid_by, times_of
from tidelog import Event
from tidelog.codec.event_batch import table_of
from tidelog.codec.parsers import FolderSettings, open_parser

OUTSIDE = "!time is outside of the years 1970 to 9999: "
NOT_EPOCH = "!field `at` is not an epoch time: "
ISO = "!field `at` is not an epoch time (use the parser iso8601): "
NOT_ISO = "!field `at` is not an ISO 8601 time: "

EPOCHS = [
    # Secor's four units, at their borders.
    ("1794744000", 1_794_744_000_000),
    ("253402300799", 253_402_300_799_000),  # the last second of 9999
    ("253402300800", OUTSIDE + "253402300800"),
    ("999999999999", OUTSIDE + "999999999999"),  # still seconds, of the year 33658
    ("1000000000000", 1_000_000_000_000),  # the first milliseconds: 2001-09-09
    ("1794744000123", 1_794_744_000_123),
    ("253402300799999", 253_402_300_799_999),
    ("253402300800000", OUTSIDE + "253402300800000"),
    ("999999999999999", OUTSIDE + "999999999999999"),
    ("1000000000000000", 1_000_000_000_000),  # the first microseconds: the same moment
    ("1794744000123999", 1_794_744_000_123),
    ("999999999999999999", OUTSIDE + "999999999999999999"),
    ("1000000000000000000", 1_000_000_000_000),  # the first nanoseconds: the same moment
    ("1794744000123999999", 1_794_744_000_123),
    ("9223372036854775807", 9_223_372_036_854),
    ("9223372036854775808", 9_223_372_036_854),  # more than 63 bits
    ("18446744073709551615", 18_446_744_073_709),
    ("253402300799000000000", 253_402_300_799_000),  # more than 64
    ("253402300800000000000", OUTSIDE + "253402300800000000000"),
    # Zero is a time; less is not.
    ("0", 0),
    ("-1", OUTSIDE + "-1"),
    ("-1794744000000", OUTSIDE + "-1794744000000"),
    # Fractions and exponents.
    ("1794744000.5", 1_794_744_000_500),
    ("1794744000.123", 1_794_744_000_123),
    ("1794744000.0", 1_794_744_000_000),
    ("1.794744e9", 1_794_744_000_000),
    ("1.794744e12", 1_794_744_000_000),
    ("-0.5", OUTSIDE + "-0.5"),
    ("-0.0", 0),
    # Finer digits are cut off, also where a double would be rounded up.
    ("1794743999.999999999", 1_794_743_999_999),
    ("1794743999.9996", 1_794_743_999_999),
    ("1794743999.99999999999999999999", 1_794_743_999_999),
    ("1794743999999.999999999", 1_794_743_999_999),
    ("99999999999999999999", 99_999_999_999_999),
    ("253402300799999999999", 253_402_300_799_999),
    ("1.794743999999999999999e9", 1_794_743_999_999),
    ("1794743999999999999999e-12", 1_794_743_999_999),
    ("0.0019999999999999999999", 1),
    ('"1794743999.999999999"', 1_794_743_999_999),
    ('"99999999999999999999"', 99_999_999_999_999),
    ("1e300", NOT_EPOCH + "1e300"),
    ("1e30", OUTSIDE + "1e30"),
    ("1" * 39, OUTSIDE + "1" * 39),
    ("9" * 400, NOT_EPOCH + "9" * 60),
    # Text that is a number, and text that is none.
    ('"1794744000"', 1_794_744_000_000),
    ('"0001794744000"', 1_794_744_000_000),
    ('"1794744000.25"', 1_794_744_000_250),
    ('"+1794744000"', 1_794_744_000_000),
    ('" 1794744000"', NOT_EPOCH + " 1794744000"),
    ('"0x6AF0"', NOT_EPOCH + "0x6AF0"),
    ('"1_794_744_000"', NOT_EPOCH + "1_794_744_000"),
    ('"١٧٩٤٧٤٤٠٠٠"', NOT_EPOCH + "١٧٩٤٧٤٤٠٠٠"),
    ('"2026-11-15"', ISO + "2026-11-15"),
    ('"2026-11-15T10:00:00.5Z"', ISO + "2026-11-15T10:00:00.5Z"),
    ('"soon"', NOT_EPOCH + "soon"),
    ('""', NOT_EPOCH),
    ('"a\\u0000b\\nc\\u001b[2Jd\\u202ee"', NOT_EPOCH + "a?b?c?[2Jd?e"),
    ("NaN", "!value is not JSON"),
    ("Infinity", "!value is not JSON"),
    ("true", NOT_EPOCH + "true"),
    ("[1794744000]", NOT_EPOCH + "[1794744000]"),
    ('{"s":1}', NOT_EPOCH + '{"s":1}'),
    ("null", "!field `at` is missing or null"),
]


@pytest.mark.parametrize(("text", "expected"), EPOCHS, ids=[text[:40] for text, _ in EPOCHS])
def test_epochs(text: str, expected: int | str) -> None:
    value = f'{{"at":{text}}}'.encode()
    if isinstance(expected, str):
        (found,) = laid("json:at", [value])
        assert found.rstrip() == expected.rstrip()
    else:
        assert times_of("json:at", [value]) == [expected]


def test_epochs_in_one_batch_are_what_they_are_alone() -> None:
    laid("json:at", [f'{{"at":{text}}}'.encode() for text, _ in EPOCHS])


VALUES = [
    (None, "!null value"),
    (b"", "!value is not JSON"),
    (b"{", "!value is not JSON"),
    (b'{"at":1794744000} x', "!value is not JSON"),
    (b'{"at":"\\ud800"}', "!value is not JSON"),
    (b'\xef\xbb\xbf{"at":1794744000}', "!value is not JSON"),
    (b"\xff\xfe", "!value is not UTF-8 text"),
    (b'{"at":1794744000,"name":"\xe9"}', "!value is not UTF-8 text"),
    (b"null", "!field `at` is missing or null"),
    (b"[]", "!field `at` is missing or null"),
    (b'"at"', "!field `at` is missing or null"),
    (b"17", "!field `at` is missing or null"),
    (b"{}", "!field `at` is missing or null"),
    (b'{"AT":1794744000}', "!field `at` is missing or null"),
    (b'{"meta":{"at":1794744000}}', "!field `at` is missing or null"),
    (b'{"at":1794744000}', "dt=2026-11-15"),
    (b' \n{ "at" : 1794744000 }\r\n ', "dt=2026-11-15"),
    (b'{"\\u0061t":1794744000}', "dt=2026-11-15"),
    (b'{"at":0,"at":1794744000}', "dt=2026-11-15"),  # of equal names the last counts
    (b'{"at":0,"x":"at","\\u0061t":1794744000}', "dt=2026-11-15"),
    (b'{"at":1794744000,"at":null}', "!field `at` is missing or null"),
    (b'{"at":1794744000,"at":1,"at":', "!value is not JSON"),
    ('{"at":1794744000,"ñ":"日本"}'.encode(), "dt=2026-11-15"),
    (b'{"at":1794744000,"n":"\\u0000"}', "dt=2026-11-15"),
    (b'{"deep":' + b"[" * 10_000 + b"]" * 10_000 + b',"at":1794744000}', "dt=2026-11-15"),
    (b"[" * 300_000, "!value is not JSON"),
    (b"[" * 300_000 + b"]" * 300_000, "!field `at` is missing or null"),
]


def test_what_a_value_may_be() -> None:
    values = [value for value, _ in VALUES]
    assert laid("json:at", values) == [expected for _, expected in VALUES]


def test_a_bad_event_harms_no_neighbour_in_a_large_batch() -> None:
    good, rows = as_json({"at": 1_794_744_000}), 5_000
    values: list[bytes | None] = [good] * rows
    values[7], values[1_500], values[4_999] = b"\xff", b"{", None
    found = laid_by(open_parser("json:at", FolderSettings()), values[:10])
    assert found.count("dt=2026-11-15") == 9
    layout = open_parser("json:at", FolderSettings()).lay_out(batch(values))
    errors = {row: text for row, text in enumerate(layout.errors.to_pylist()) if text}
    assert errors == {
        7: "value is not UTF-8 text",
        1_500: "value is not JSON",
        4_999: "null value",
    }


PATHS = [
    ("json:meta.at", {"meta": {"at": 1_794_744_000}}),
    ("json:a.b.c.d", {"a": {"b": {"c": {"d": 1_794_744_000}}}}),
    ("json:items.1.at", {"items": [{}, {"at": 1_794_744_000}]}),
    ("json:it's", {"it's": 1_794_744_000}),
    ("json:a/b", {"a/b": 1_794_744_000}),
    ("json:a~b", {"a~b": 1_794_744_000}),
    ("json:*", {"*": 1_794_744_000}),
    ('json:"q"', {'"q"': 1_794_744_000}),
    ("json:ключ", {"ключ": 1_794_744_000}),
    ("json:$", {"$": 1_794_744_000}),
    ("json:/meta.at/time", {"meta.at": {"time": 1_794_744_000}}),
    ("json:at; drop table x --", {"at; drop table x --": 1_794_744_000}),
]


@pytest.mark.parametrize(("text", "value"), PATHS, ids=[text for text, _ in PATHS])
def test_names_of_fields(text: str, value: object) -> None:
    decoy = {"meta": 5, "a": [1], "items": {}, "x": 1_000_000_000}
    assert laid(text, [as_json(value), as_json(decoy)])[0] == "dt=2026-11-15"


ISO = [
    ("2026-11-15T12:00:00Z", 1_794_744_000_000),
    ("2026-11-15T12:00:00z", 1_794_744_000_000),
    ("2026-11-15t12:00:00Z", 1_794_744_000_000),
    ("2026-11-15 12:00:00Z", 1_794_744_000_000),
    ("2026-11-15T12:00:00", 1_794_744_000_000),  # without a zone it is UTC
    ("2026-11-15T12:00", 1_794_744_000_000),
    ("2026-11-15T12:00Z", 1_794_744_000_000),
    ("2026-11-15", 1_794_700_800_000),
    ("20261115T120000Z", 1_794_744_000_000),
    ("20261115T120000.5+0100", 1_794_740_400_500),
    ("2026-11-15T12:00:00+01:00", 1_794_740_400_000),
    ("2026-11-15T12:00:00+0100", 1_794_740_400_000),
    ("2026-11-15T12:00:00+01", 1_794_740_400_000),
    ("2026-11-15T12:00:00-05:30", 1_794_763_800_000),
    ("2026-11-15T12:00:00-00:00", 1_794_744_000_000),
    ("2026-11-15T12:00:00.1Z", 1_794_744_000_100),
    ("2026-11-15T12:00:00,25Z", 1_794_744_000_250),
    ("2026-11-15T12:00:00.123456789Z", 1_794_744_000_123),
    ("2026-11-15T12:59:59.9999999999Z", 1_794_747_599_999),  # never into the next hour
    ("2024-02-29T00:00:00Z", 1_709_164_800_000),
    ("1970-01-01T00:00:00Z", 0),
    ("1970-01-01T00:00:00+01:00", OUTSIDE + "1970-01-01T00:00:00+01:00"),
    ("1969-12-31T23:59:59.999Z", OUTSIDE + "1969-12-31T23:59:59.999Z"),
    ("0001-01-01", OUTSIDE + "0001-01-01"),
    ("9999-12-31T23:59:59.999Z", 253_402_300_799_999),
    ("9999-12-31T23:59:59-01:00", OUTSIDE + "9999-12-31T23:59:59-01:00"),
    ("2026-02-29", NOT_ISO + "2026-02-29"),
    ("2026-04-31T00:00:00Z", NOT_ISO + "2026-04-31T00:00:00Z"),
    ("2026-13-01", NOT_ISO + "2026-13-01"),
    ("2026-00-10", NOT_ISO + "2026-00-10"),
    ("2026-11-15T24:00:00Z", NOT_ISO + "2026-11-15T24:00:00Z"),
    ("2016-12-31T23:59:60Z", NOT_ISO + "2016-12-31T23:59:60Z"),
    ("2026-11-15T12:00:00+24:00", NOT_ISO + "2026-11-15T12:00:00+24:00"),
    ("2026-11-15T12:00:00 Europe/Berlin", NOT_ISO + "2026-11-15T12:00:00 Europe/Berlin"),
    ("2026-11-15T12:00:00Z ", NOT_ISO + "2026-11-15T12:00:00Z "),
    ("2026-11-15T12:00:00Z\n", NOT_ISO + "2026-11-15T12:00:00Z?"),
    ("2026-11-15TZ", NOT_ISO + "2026-11-15TZ"),
    ("15.11.2026", NOT_ISO + "15.11.2026"),
    ("12026-11-15", NOT_ISO + "12026-11-15"),
    ("1794744000", NOT_ISO + "1794744000"),
    ("epoch", NOT_ISO + "epoch"),
    ("infinity", NOT_ISO + "infinity"),
    ("２０２６-11-15", NOT_ISO + "２０２６-11-15"),  # noqa: RUF001 - digits of another script
    ("", NOT_ISO),
]


@pytest.mark.parametrize(("text", "expected"), ISO, ids=[text for text, _ in ISO])
def test_iso_8601(text: str, expected: int | str) -> None:
    value = as_json({"at": text})
    if isinstance(expected, str):
        assert laid("iso8601:at", [value])[0].rstrip() == expected.rstrip()
    else:
        assert times_of("iso8601:at", [value]) == [expected]


def test_iso_8601_in_one_batch_is_what_it_is_alone() -> None:
    laid("iso8601:at", [as_json({"at": text}) for text, _ in ISO])


@given(
    moment=st.datetimes(datetime(1971, 1, 1), datetime(9998, 12, 31)),  # noqa: DTZ001 - zoned below
    minutes=st.integers(-14 * 60, 14 * 60),
    timespec=st.sampled_from(["minutes", "seconds", "milliseconds", "microseconds"]),
)
@settings(max_examples=150, deadline=None)
def test_iso_8601_reads_as_python_does(moment: datetime, minutes: int, timespec: str) -> None:
    zoned = moment.replace(tzinfo=timezone(timedelta(minutes=minutes)))
    text = zoned.isoformat(timespec=timespec)
    since = datetime.fromisoformat(text) - datetime(1970, 1, 1, tzinfo=UTC)
    expected = since // timedelta(milliseconds=1)
    assert times_of("iso8601:at", [as_json({"at": text})]) == [expected]


DATES = [
    ("%Y-%m-%d", "2026-11-15", 1_794_700_800_000),
    ("%d.%m.%Y", "15.11.2026", 1_794_700_800_000),
    ("%d.%m.%Y %H:%M", "15.11.2026 12:00", 1_794_744_000_000),
    ("%Y%m%d%H%M%S", "20261115120000", 1_794_744_000_000),
    ("%d/%b/%Y:%H:%M:%S %z", "15/Nov/2026:12:00:00 +0100", 1_794_740_400_000),
    ("%Y-%m-%dT%H:%M:%S%z", "2026-11-15T12:00:00Z", 1_794_744_000_000),
    ("%m/%d/%Y %I:%M:%S %p", "11/15/2026 01:00:00 PM", 1_794_747_600_000),
    ("%Y-%m-%d %H:%M:%S.%f", "2026-11-15 12:00:00.999999", 1_794_744_000_999),
    ("%Y %j", "2026 319", 1_794_700_800_000),
    ("%y%m%d", "261115", 1_794_700_800_000),
    ("%Y|%m|%d", "2026|11|15", 1_794_700_800_000),
    ("100%% %Y-%m-%d", "100% 2026-11-15", 1_794_700_800_000),
    ("%Y-%m-%d", "2026-02-30", "!field `at` does not fit `%Y-%m-%d`: 2026-02-30"),
    ("%Y-%m-%d", "2026-11-15x", "!field `at` does not fit `%Y-%m-%d`: 2026-11-15x"),
    ("%Y-%m-%d", "", "!field `at` does not fit `%Y-%m-%d`: "),
    ("%Y-%m-%d", "1969-12-31", OUTSIDE + "1969-12-31"),
]


@pytest.mark.parametrize(
    ("pattern", "text", "expected"), DATES, ids=[f"{p} {t}" for p, t, _ in DATES]
)
def test_dates(pattern: str, text: str, expected: int | str) -> None:
    values = [as_json({"at": text}), None, as_json({}), as_json({"at": text})]
    found = laid(f"date:at|{pattern}", values)
    assert found[1:3] == ["!null value", "!field `at` is missing or null"]
    if isinstance(expected, str):
        assert found[0] == found[3] == expected
    else:
        assert times_of(f"date:at|{pattern}", values) == [expected, None, None, expected]


def test_parsers_of_several_threads_do_not_meet() -> None:
    def lay_out(day: int) -> None:
        parser = open_parser("iso8601:at", FolderSettings())
        rows = batch([as_json({"at": f"2026-11-{day:02}T10:00:00Z"})] * 50)
        for _ in range(20):
            paths = parser.lay_out(rows).paths
            assert set(paths.to_pylist()) == {f"dt=2026-11-{day:02}"}

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(lay_out, day) for day in range(1, 17)]:
            done.result()


@pytest.mark.parametrize("signs", range(8))
def test_refused_value_is_a_dead_letter_wherever_its_text_is_cut(signs: int) -> None:
    bad = ("{" + '"a": "' + "x" * signs + "é" * 200 + '"} ' + " " * 70_000 + "v").encode()
    table = table_of([Event(bad), Event(b'{"at": 1794700800}')], 0)
    (batch,) = table.to_batches()
    found = open_parser("json:at", FolderSettings()).lay_out(batch)
    assert found.errors.to_pylist() == ["value is not JSON", None]
