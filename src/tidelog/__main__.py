"""``python -m tidelog``: the command line."""

from __future__ import annotations

from tidelog.cli.main import run

if __name__ == "__main__":
    run()
