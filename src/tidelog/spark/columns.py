"""Maps events to Spark and back: event columns in its types, and stored columns.

Spark requires the first batch of a task to have exactly the declared types, so every batch is
converted here: times in microseconds, and the position next to what a segment holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from tidelog.codec.event_batch import STORED_SCHEMA, stored_batch
from tidelog.codec.numbers import number_array, repeated_text
from tidelog.errors import InvalidError
from tidelog.log.run_reader import EventRows
from tidelog.model.address import nearest

__all__ = [
    "BatchPosition",
    "arrow_schema",
    "check_writable",
    "floored_times",
    "spark_schema",
    "to_spark",
    "to_stored",
]

_HEADERS = ArrayType(
    StructType([StructField("name", StringType()), StructField("value", BinaryType())])
)
_EVENTS = StructType(
    [
        StructField("topic", StringType(), nullable=False),
        StructField("partition", IntegerType(), nullable=False),
        StructField("offset", LongType(), nullable=False),
        StructField("timestamp", TimestampType(), nullable=False),
        StructField("id", StringType()),
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("type", StringType()),
        StructField("headers", _HEADERS),
    ]
)
_WRITABLE: dict[str, tuple[DataType, ...]] = {
    "value": (BinaryType(), StringType()),
    "key": (BinaryType(), StringType()),
    "id": (StringType(),),
    "type": (StringType(),),
    "timestamp": (TimestampType(),),
    "headers": (_HEADERS,),
    "partition": (IntegerType(), LongType()),
}
_IGNORED = ("topic", "offset")  # so that what was read can be written unchanged
_MILLISECONDS = pa.timestamp("ms", "UTC")
_MICROSECONDS = pa.timestamp("us", "UTC")


@dataclass(frozen=True, slots=True)
class BatchPosition:
    """The position of the events of a batch."""

    topic: str
    partition: int


def spark_schema(columns: Sequence[str]) -> StructType:
    """Returns a schema of some event columns, in this order."""
    return StructType([_EVENTS[name] for name in columns])


def arrow_schema(schema: StructType) -> pa.Schema:
    """Returns Spark's Arrow schema. Raises ``InvalidError`` unless all are event columns."""
    for field in schema.fields:
        known = _EVENTS[field.name].dataType if field.name in _EVENTS.names else None
        if known is None or field.dataType != known:
            wanted = f"give {known.simpleString()}" if known else f"give {', '.join(_EVENTS.names)}"
            raise InvalidError(
                f"schema: column `{field.name}` {field.dataType.simpleString()} is not an event's: "
                f"{wanted}"
            )
    return to_arrow_schema(schema, timezone="UTC")


def to_spark(found: EventRows, place: BatchPosition, wanted: pa.Schema) -> pa.RecordBatch:
    """Converts stored rows to Spark's columns."""
    rows = found.batch.num_rows
    arrays = []
    for field in wanted:
        if field.name == "topic":
            array = repeated_text(place.topic, rows)
        elif field.name == "partition":
            array = number_array(np.full(rows, place.partition, np.int32))
        elif field.name == "offset":
            array = number_array(found.offsets)
        else:
            array = found.batch.column(field.name)
            if array.type != field.type:
                array = array.cast(field.type)
        arrays.append(array)
    return pa.record_batch(arrays, schema=wanted)


def check_writable(schema: StructType, use_partition: bool) -> None:
    """Raises for a table that cannot become events, before any task runs."""
    for field in schema.fields:
        if field.name in _IGNORED or (field.name == "partition" and not use_partition):
            continue
        allowed = _WRITABLE.get(field.name)
        if allowed is None:
            raise InvalidError(
                f"table: unknown column `{field.name}`{nearest(field.name, _WRITABLE)}: "
                f"events have {', '.join(STORED_SCHEMA.names)}: select these"
            )
        if not any(_same(field.dataType, kind) for kind in allowed):
            raise InvalidError(
                f"table: column `{field.name}` is {field.dataType.simpleString()}: "
                f"give {' or '.join(kind.simpleString() for kind in allowed)}"
            )
    if "value" not in schema.names:
        raise InvalidError("table: has no column `value`: name the column of the payload so")
    if use_partition and "partition" not in schema.names:
        raise InvalidError("option usePartition: the table has no column `partition`: add it")


def to_stored(batch: pa.RecordBatch, now_ms: int) -> pa.Table:
    """Converts Spark's rows to stored columns. Raises ``InvalidError`` for invalid events."""
    table = pa.Table.from_batches([batch])
    if "timestamp" in table.schema.names:
        index = table.schema.get_field_index("timestamp")
        table = table.set_column(index, "timestamp", floored_times(table.column(index)))
    found = stored_batch(table, now_ms)
    names = pc.struct_field(pc.list_flatten(found.column("headers")), "name")
    if names.null_count:
        raise InvalidError("table: a header has no name: give one, or no header")
    if "id" in table.schema.names and pc.any(pc.equal(found.column("id"), "")).as_py():
        raise InvalidError("table: an id is empty: give text, or null for no id")
    return found


def floored_times(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Returns Spark's microseconds as an event's milliseconds, rounded down.

    A plain cast rounds towards 1970, and would make 23:59:59.9995 of the day before a valid time.
    Spark's times are in the session's time zone. Arrow rounds local times, and refuses those of the
    hour that the end of summer time repeats, so they become UTC first.
    """
    return pc.floor_temporal(column.cast(_MICROSECONDS), unit="millisecond").cast(_MILLISECONDS)


def _same(found: DataType, wanted: DataType) -> bool:
    """Returns whether types are equal, ignoring nullability."""
    return found.simpleString() == wanted.simpleString()
