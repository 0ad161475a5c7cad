"""The servers by hand: `python -m tests.servers check | fetch [NAME…] | run NAME`."""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from tests.servers import cassandra, dynamodb, kafka, moto, s3, spark
from tests.servers.base import Server, ServerError
from tests.servers.fetch import Package, ensure
from tests.servers.tools import Tool, problem


class Kind(Protocol):
    """What a server's module offers."""

    @property
    def NAME(self) -> str: ...  # noqa: N802
    @property
    def TOOLS(self) -> tuple[Tool, ...]: ...  # noqa: N802
    @property
    def PACKAGE(self) -> Package | None: ...  # noqa: N802
    def running(self) -> AbstractContextManager[Server]: ...


KINDS: tuple[Kind, ...] = (kafka, dynamodb, cassandra, s3, moto, spark)


def main(arguments: Sequence[str]) -> int:
    """Do what the arguments say and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.servers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="say which tools are missing")
    fetching = commands.add_parser("fetch", help="bring servers into the cache")
    fetching.add_argument("names", metavar="NAME", nargs="*", default=[])
    starting = commands.add_parser("run", help="run one server until Ctrl-C")
    starting.add_argument("name", metavar="NAME")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "check":
            return check()
        if chosen.command == "fetch":
            return fetch(chosen.names or [kind.NAME for kind in KINDS])
        return run(chosen.name)
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1


def check() -> int:
    """Print a line for each missing tool; 1 if there is one."""
    tools = dict.fromkeys(tool for kind in KINDS for tool in kind.TOOLS)
    lines = [
        f"{found} (for {', '.join(kind.NAME for kind in KINDS if tool in kind.TOOLS)})"
        for tool in tools
        if (found := problem(tool))
    ]
    for line in lines:
        print(line)
    return 1 if lines else 0


def fetch(names: Sequence[str]) -> int:
    """Bring the servers into the cache, with a line for each."""
    for name in names:
        package = _kind(name).PACKAGE
        if package is None:
            print(f"{name}: comes with the project's Python packages")
            continue
        start = time.monotonic()
        folder = ensure(package)
        print(f"{name}: {folder} in {time.monotonic() - start:.1f} s", flush=True)
    return 0


def run(name: str) -> int:
    """Run one server in the foreground until Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        start = time.monotonic()
        with _kind(name).running() as server:
            took = time.monotonic() - start
            print(f"{name}: {server.address} (up in {took:.1f} s, Ctrl-C ends it)", flush=True)
            while True:
                signal.pause()
    except KeyboardInterrupt:
        return 0


def _kind(name: str) -> Kind:
    for kind in KINDS:
        if name == kind.NAME:
            return kind
    known = ", ".join(kind.NAME for kind in KINDS)
    raise ServerError(f"{name}: there is no such server: choose one of {known}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
