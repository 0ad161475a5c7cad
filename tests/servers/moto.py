"""moto: Kinesis and SNS, and other services that only look like AWS, in one Python process."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.servers import probe
from tests.servers.base import HOST, environment, free_port, workspace
from tests.servers.process import Launch, Process, started
from tests.servers.tools import Tool

NAME = "moto"
TOOLS: tuple[Tool, ...] = ()
PACKAGE = None  # a development dependency of the project itself

SERIAL = Path(__file__).with_name("moto_serial.py")
REGION = "us-east-1"
KEYS = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "secret"}  # for who must have some


@dataclass(frozen=True)
class Moto:
    """A running server; any access key and secret are accepted."""

    endpoint: str
    region: str
    process: Process

    @property
    def address(self) -> str:
        return self.endpoint


@contextmanager
def running() -> Iterator[Moto]:
    """A server of one's own; it forgets everything on `process.restart()`."""
    port = free_port()
    with workspace(NAME) as folder:
        launch = Launch(
            name=NAME,
            command=[sys.executable, "-P", str(SERIAL), "-H", HOST, "-p", str(port)],
            environment=environment(without=("MOTO_", "AWS_")),
            folder=folder,
            answers=lambda: _lists_its_state(port),
        )
        with started(launch) as process:
            yield Moto(f"http://{HOST}:{port}", REGION, process)


def _lists_its_state(port: int) -> bool:
    status, body = probe.http(port, "/moto-api/data.json")
    return status == 200 and body.startswith(b"{")
