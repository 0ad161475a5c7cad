"""The file in which a command keeps its metrics, for a textfile collector."""

from __future__ import annotations

import os
from pathlib import Path

from tidelog.errors import InvalidError

__all__ = ["check_metrics_file", "write_metrics_file"]


def check_metrics_file(file: Path | None) -> None:
    """Refuse a file in a folder that is not there or may not be written, before work begins."""
    if file is None:
        return
    if not file.parent.is_dir():
        raise InvalidError(f"metrics file `{file}`: its folder is not there: make it")
    if not os.access(file.parent, os.W_OK):
        raise InvalidError(f"metrics file `{file}`: its folder may not be written: give the right")


def write_metrics_file(file: Path, text: str) -> None:
    """Put the text there, whole or not at all. ``InvalidError`` where the folder is gone."""
    check_metrics_file(file)
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(file)
