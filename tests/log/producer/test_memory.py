"""Memory stays flat: a process that produces or consumes millions of events stays small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tidelog.home import create_home
from tidelog.settings import Settings

RESIDENT_MB_MAX = 500

PRODUCE = """
import re, sys
import pyarrow as pa
import tidelog
value = b"x" * 180
with tidelog.open(sys.argv[1]) as home:
    for first in range(0, int(sys.argv[2]), 100_000):
        rows = [b"%020d" % n + value for n in range(first, first + 100_000)]
        home.append("t", pa.table({"value": pa.array(rows, pa.binary())}))
    with home.producer("t") as producer:
        for number in range(100_000):
            producer.send(value)
print(int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024)
"""

CONSUME = """
import re, sys
import tidelog
count = 0
with tidelog.open(sys.argv[1]) as home, home.consumer("t", "c") as consumer:
    while count < int(sys.argv[2]) + 100_000:
        for event in consumer.poll(5_000):
            event.value, event.offset
            count += 1
        consumer.commit()
print(int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024)
"""


@pytest.mark.parametrize(
    "events", [1_000_000, pytest.param(10_000_000, marks=pytest.mark.long)], ids=["1M", "10M"]
)
def test_producers_and_consumers_stay_small(tmp_path: Path, events: int) -> None:
    with create_home(Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite")))[0] as home:
        home.create_topic("t", 4)
        for script in (PRODUCE, CONSUME):
            done = subprocess.run(
                [sys.executable, "-c", script, home.config, str(events)],
                check=True,
                capture_output=True,
                text=True,
                timeout=1_000,
            )
            assert int(done.stdout) < RESIDENT_MB_MAX
