"""A parser for each topic of a pattern."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tests.codec.parsers.layouts import batch, rows_of
from tidelog.codec.parsers import FolderSettings, folder_settings, open_parser, parts_of_events
from tidelog.errors import InvalidError

NAME = "topics:clicks=iso8601:at;orders-*=split:country|iso8601:made"
CLICK, ORDER = b'{"at": "2026-11-15"}', b'{"made": "2026-11-16", "country": "de"}'


def of_topics(values: list[bytes], topics: list[str]) -> pa.RecordBatch:
    events = batch(values)
    index = events.schema.get_field_index("topic")
    return events.set_column(index, events.schema.field(index), pa.array(topics, pa.string()))


def test_each_topic_has_the_parser_of_the_first_pattern_that_fits() -> None:
    parser = open_parser(NAME, FolderSettings())
    mixed = of_topics(
        [ORDER, CLICK, b"{}", ORDER, CLICK], ["orders-eu", "clicks", "x", "orders-", "clicks"]
    )
    found = rows_of(parser.lay_out(mixed))
    order, click = "de/dt=2026-11-16", "dt=2026-11-15"
    assert found == [order, click, "!no parser is named for topic `x`", order, click]
    assert rows_of(parser.lay_out(mixed.slice(1, 2))) == found[1:3]
    assert rows_of(parser.lay_out(of_topics([CLICK] * 2, ["clicks"] * 2))) == [click] * 2
    assert rows_of(parser.lay_out(of_topics([], []))) == []


def test_settings_of_folders_count_as_for_the_parsers_inside() -> None:
    assert folder_settings(NAME, {"granularity": "hour"}).granularity == "hour"
    with pytest.raises(InvalidError, match="has no effect"):
        folder_settings("topics:a=offset:10;b=offset:20", {"granularity": "hour"})
    path = "de/dt=2026-11-16"
    assert parts_of_events(path, NAME, FolderSettings(), 1_794_787_200_000) == 1


@pytest.mark.parametrize(
    "name",
    [
        *("topics:", "topics:clicks", "topics:=json:at", "topics:a=", "topics:a=json:at;"),
        *("topics:a=topics:b=timestamp", "topics:a=timestamp;b=offset:10", "topics:a=jsn:at"),
    ],
)
def test_name_that_says_too_little_is_refused(name: str) -> None:
    with pytest.raises(InvalidError, match="parser"):
        open_parser(name, FolderSettings())
