"""Numbers and bytes between numpy and Arrow are what Arrow itself would make of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tidelog import Event
from tidelog.codec.numbers import (
    bytes_array,
    mask_array,
    number_array,
    numbers_of,
    repeated_text,
    text_array,
)
from tidelog.home import create_home

READS = """
import sys, tidelog
with tidelog.open(sys.argv[1]) as home:
    assert len(list(home.read("orders"))) == 3
    assert len(list(home.peek("orders"))) == 3
    assert home.get("orders", "two").value == b"2"
    with home.consumer("orders", "billing") as consumer:
        assert len(consumer.poll()) == 3
    assert len(list(home.playback("orders", start="2000-01-01"))) == 3
assert "pandas" not in sys.modules
"""


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64, np.uint32, np.uint64])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_numbers_survive(kind: type[np.generic], rows: int) -> None:
    values = np.arange(rows).astype(kind)
    found = number_array(values)
    assert found.equals(pa.array(values))
    back = numbers_of(found)
    assert (back.dtype, back.tolist()) == (values.dtype, values.tolist())
    assert numbers_of(found.slice(1)).tolist() == values[1:].tolist()
    assert number_array(values[::2]).equals(pa.array(values[::2]))


def test_a_column_with_nulls_is_refused() -> None:
    with pytest.raises(ValueError, match="1 nulls"):
        numbers_of(pa.array([1, None]))
    assert numbers_of(pa.array([None, 1]).slice(1)).tolist() == [1]


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 65])
def test_masks_survive(rows: int) -> None:
    mask = np.arange(rows) % 3 == 0
    assert mask_array(mask).equals(pa.array(mask))


def test_bytes_and_texts_are_joined() -> None:
    assert bytes_array([b"a", b"", b"ccc"]).equals(pa.array([b"a", b"", b"ccc"]))
    assert bytes_array([]).equals(pa.array([], pa.binary()))
    assert text_array(["\u00fc", "", "x"]).equals(pa.array(["\u00fc", "", "x"]))
    assert repeated_text("t\u00fc", 3).equals(pa.array(["t\u00fc"] * 3))
    assert repeated_text("t", 0).equals(pa.array([], pa.string()))


def test_a_process_that_only_reads_does_not_import_pandas(tmp_path: Path) -> None:
    with create_home(tmp_path / "home")[0] as home:
        home.create_topic("orders")
        home.append(
            "orders", [Event(b"%d" % n, id=name) for n, name in enumerate(("a", "b", "two"))]
        )
    subprocess.run([sys.executable, "-c", READS, str(tmp_path / "home")], check=True, timeout=120)
