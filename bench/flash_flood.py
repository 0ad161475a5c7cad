"""flash-flood 0.4.3, the peer of journals: fetched into the cache of test servers, run apart.

``Peer`` is made in a process of its own (``bench.apart``), which alone imports it.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import boto3

from tests.servers.fetch import FetchError, Package, ensure

NAME = "flash-flood"
VERSION = "0.4.3"


def _fill(folder: Path) -> None:
    wanted = f"{NAME}=={VERSION}"
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FetchError(f"{wanted}: pip could not fetch it: {done.stderr[-500:]}")


PACKAGE = Package(NAME, VERSION, f"{NAME}=={VERSION}", (), _fill)


@functools.cache
def folder() -> str:
    """Where it is."""
    return str(ensure(PACKAGE))


class Peer:
    """What flash-flood takes for the same work; events of 1 KiB, one thread."""

    def __init__(self, path: str, endpoint: str, bucket: str, values: list[bytes]) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # it prints a line for each event
        sys.path.append(path)
        from flashflood import FlashFlood  # noqa: PLC0415 - not of our own environment

        s3 = boto3.resource("s3", endpoint_url=endpoint, region_name="us-east-1")
        self._flood: Any = FlashFlood(s3, bucket, "flood")
        self._values = values
        self._ids: list[str] = []

    def put(self, count: int) -> float:
        """Events a second."""
        began = time.perf_counter()
        for _ in range(count):
            value = self._values[len(self._ids) % len(self._values)]
            self._ids.append(f"id-{len(self._ids)}")
            self._flood.put(value, self._ids[-1])
        return count / (time.perf_counter() - began)

    def journal(self, count: int) -> float:
        """Events a second that become one journal."""
        began = time.perf_counter()
        self._flood.journal(count)
        return count / (time.perf_counter() - began)

    def replay(self) -> float:
        """Events a second, all of them."""
        began = time.perf_counter()
        count = sum(1 for _ in self._flood.replay())
        return count / (time.perf_counter() - began)

    def get(self, count: int) -> float:
        """Milliseconds for each."""
        began = time.perf_counter()
        for number in range(count):
            self._flood.get_event(self._ids[number * 7 % len(self._ids)])
        return (time.perf_counter() - began) / count * 1000

    def update(self, count: int) -> float:
        """Updates a second, until they are to be read; of the newest events, as it loses others
        of a journal that it updates a second time.
        """
        newest = self._ids[-count:]
        count = len(newest)
        began = time.perf_counter()
        for each in newest:
            self._flood.update_event(each, os.urandom(1024))
        left = count
        while left > 0:
            applied = self._flood.update(left)
            left = left - applied if applied else 0
        return count / (time.perf_counter() - began)

    def close(self) -> None:
        """Nothing is open."""
