"""Small and read-only file systems for tests, where this machine lets us mount them."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["read_only", "small_disk"]


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int, inodes: int = 100_000) -> Iterator[Path]:
    """A disk of this size; skips the test where mounting is not permitted."""
    folder.mkdir(exist_ok=True)
    size = f"size={megabytes}m,nr_inodes={inodes}"
    with _mounted("-t", "tmpfs", "-o", size, "tidelog-test", str(folder)):
        yield folder


@contextlib.contextmanager
def read_only(folder: Path, there: Path) -> Iterator[Path]:
    """A folder under another name, where nothing can be written."""
    there.mkdir(exist_ok=True)
    with _mounted("--bind", "-o", "ro", str(folder), str(there)):
        yield there


@contextlib.contextmanager
def _mounted(*words: str) -> Iterator[None]:
    try:
        done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    except OSError as exc:
        pytest.skip(f"no mount here: {exc}")
    if done.returncode:
        pytest.skip(f"mounting is not permitted: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", words[-1]], check=True)
