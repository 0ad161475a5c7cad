"""What a user may say; and the pure parts of planning. No Spark runs here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pyspark.sql.types import StringType, StructField, StructType, TimestampNTZType

from tidelog.errors import InvalidError
from tidelog.model.topic import Run
from tidelog.spark.columns import arrow_schema, check_writable, spark_schema
from tidelog.spark.options import (
    BATCH_READ,
    BATCH_WRITE,
    STREAM_READ,
    STREAM_WRITE,
    DataSourceUse,
    read_columns,
    read_options,
    write_options,
)
from tidelog.spark.plan import OffsetSlice, split_tasks
from tidelog.spark.stream import shares

ALL = (BATCH_READ, STREAM_READ, BATCH_WRITE, STREAM_WRITE)
PLACE = {"home": "h", "topic": "orders"}


def test_options_come_in_any_case() -> None:
    options = read_options({**PLACE, "startoffsets": '{"0": 17}'}, BATCH_READ)
    assert options.start_offsets == {"": {0: 17}}
    assert options.end_offsets == "latest"


@pytest.mark.parametrize(
    ("given", "use", "message"),
    [
        ({"startofsets": "latest"}, BATCH_READ, "did you mean `startOffsets`"),
        ({"endoffsets": "latest"}, STREAM_READ, "streaming read: unknown option `endoffsets`"),
        ({"maxeventspertrigger": "5"}, BATCH_READ, "unknown option"),
        ({"path": "orders"}, BATCH_READ, "a topic has no path"),
        ({"home": ""}, BATCH_READ, "option home: is missing"),
        ({"topic": "a/b"}, BATCH_READ, "topic name `a/b`"),
        ({"startoffsets": "17"}, BATCH_READ, "offsets as JSON"),
        ({"startoffsets": '{"0": -1}'}, BATCH_READ, "offsets as JSON"),
        ({"startoffsets": "soon"}, BATCH_READ, "offsets as JSON"),
        ({"startoffsets": '{"orders": 17}'}, BATCH_READ, "offsets as JSON"),
        ({"startoffsets": '{"orders": {"0": -1}}'}, BATCH_READ, "offsets as JSON"),
        ({"topic": "a,b", "startoffsets": '{"0": 1}'}, BATCH_READ, "may be several topics"),
        ({"topic": "a*", "endoffsets": '{"0": 1}'}, BATCH_READ, "may be several topics"),
        ({"topic": "a,a"}, BATCH_READ, "names a topic twice"),
        ({"topic": "a,*/b"}, BATCH_READ, "topic name `x/b`"),
        ({"endtime": "-1h"}, STREAM_READ, "elsewhere after each restart"),
        ({"endtime": "soon"}, STREAM_READ, "is not ISO 8601"),
        ({"failondataloss": "no"}, STREAM_READ, "true or false"),
        ({"failondataloss": "false"}, BATCH_READ, "unknown option"),
        ({"bytespertask": "0"}, BATCH_READ, "whole number, 1 or more"),
        ({"maxeventspertrigger": "1", "maxbytespertrigger": "1"}, STREAM_READ, "give one"),
        ({"startoffsets": "latest", "starttime": "-1h"}, STREAM_READ, "give one"),
    ],
)
def test_reads_refuse(given: dict[str, str], use: DataSourceUse, message: str) -> None:
    with pytest.raises(InvalidError, match=message):
        read_options({**PLACE, **given}, use)


@pytest.mark.parametrize(
    ("given", "use", "message"),
    [
        ({}, STREAM_WRITE, "option sink: is missing"),
        ({"sink": "a/b"}, STREAM_WRITE, "option sink: `a/b`"),
        ({"sink": "~a"}, STREAM_WRITE, "option sink: `~a`"),
        ({"sink": "a", "batch": "1"}, STREAM_WRITE, "unknown option `batch`"),
        ({"sink": "a"}, BATCH_WRITE, "give both or none"),
        ({"batch": "1"}, BATCH_WRITE, "give both or none"),
        ({"sink": "a", "batch": "-1"}, BATCH_WRITE, "whole number, 0 or more"),
        ({"usepartition": "yes"}, BATCH_WRITE, "true or false"),
        ({"columns": "value"}, BATCH_WRITE, "unknown option `columns`"),
        ({"topic": "a,b"}, BATCH_WRITE, "topic name `a,b`"),
        ({"topic": "a*"}, BATCH_WRITE, r"topic name `a\*`"),
    ],
)
def test_writes_refuse(given: dict[str, str], use: DataSourceUse, message: str) -> None:
    with pytest.raises(InvalidError, match=message):
        write_options({**PLACE, **given}, use)


def test_spark_hands_its_checkpoint_on() -> None:
    given = {**PLACE, "checkpointlocation": "/somewhere", "sink": "a"}
    assert write_options(given, STREAM_WRITE).sink == "a"


def test_columns_are_known_and_named_once() -> None:
    assert read_columns({**PLACE, "columns": "offset, value"}) == ("offset", "value")
    with pytest.raises(InvalidError, match="did you mean `value`"):
        read_columns({**PLACE, "columns": "values"})
    with pytest.raises(InvalidError, match="twice"):
        read_columns({**PLACE, "columns": "value,value"})


def test_a_schema_of_ones_own_has_event_columns() -> None:
    assert arrow_schema(spark_schema(["value", "offset"])).names == ["value", "offset"]
    with pytest.raises(InvalidError, match="column `value` string is not an event's: give binary"):
        arrow_schema(StructType([StructField("value", StringType())]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([("key", StringType())], "has no column `value`"),
        ([("value", StringType()), ("keys", StringType())], "did you mean `key`"),
        ([("value", StringType()), ("timestamp", TimestampNTZType())], "give timestamp"),
    ],
)
def test_tables_that_cannot_be_events(fields: list[tuple[str, StringType]], message: str) -> None:
    schema = StructType([StructField(name, kind) for name, kind in fields])
    with pytest.raises(InvalidError, match=message):
        check_writable(schema, use_partition=False)


def test_a_partition_column_is_needed_where_it_is_used() -> None:
    with pytest.raises(InvalidError, match="no column `partition`"):
        check_writable(StructType([StructField("value", StringType())]), use_partition=True)


@pytest.mark.parametrize(
    ("available", "limit", "taken"),
    [
        ([3, 4], 7, [3, 4]),
        ([10, 10], 4, [2, 2]),
        ([1, 0, 99], 10, [0, 0, 10]),
        ([5, 5, 5], 1, [1, 0, 0]),
        ([0, 1, 1], 1, [0, 1, 0]),
    ],
)
def test_a_limit_is_shared(available: list[int], limit: int, taken: list[int]) -> None:
    assert shares(available, limit) == taken


def test_the_guide_names_every_option_for_its_use() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
    shown = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", guide, re.MULTILINE))
    uses = {
        "all": (BATCH_READ, STREAM_READ, BATCH_WRITE, STREAM_WRITE),
        "reads": (BATCH_READ, STREAM_READ),
        "writes": (BATCH_WRITE, STREAM_WRITE),
        "streams": (STREAM_READ,),
        "batch": (BATCH_READ,),
    }
    written = {"batch": (BATCH_WRITE,)}
    for name, kind in shown.items():
        taken = {use.name for use in ALL if name in use.takes}
        expected = written if name == "batch" else uses
        assert taken == {use.name for use in expected[kind]}, name
    assert set(shown) == {name for use in ALL for name in use.takes}


def a_slice(size: int) -> OffsetSlice:
    run = Run(0, 10, "x", 0, size, 0, 0, 0, 0, 0)
    return OffsetSlice(0, run, 0, 10)


def test_tasks_are_of_about_one_size_and_keep_the_order() -> None:
    slices = [a_slice(size) for size in (5, 1, 1, 1, 5, 5)]
    tasks = split_tasks(slices, 6)
    assert [sum(each.size for each in task) for task in tasks] == [6, 7, 5]
    assert [each for task in tasks for each in task] == slices
    assert split_tasks([], None) == []
    assert len(split_tasks([a_slice(100)] * 50, None)) == 1, "small reads are one task"
    assert len(split_tasks([a_slice(1 << 20)] * 100, None)) == 4
    assert len(split_tasks([a_slice(1 << 20)] * 1000, None)) == 32
