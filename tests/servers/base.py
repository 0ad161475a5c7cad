"""What every server has in common: its address, its error, its port and its folder."""

import os
import random
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

HOST = "127.0.0.1"

# Below the range from which Linux takes ports for outgoing connections, so that no client can take
# a port between the moment we find it free and the moment the server binds it. Each of the test
# processes that run side by side has ports of its own, so that no other one takes it either.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_SHARES = 12
PORTS = range(20_000, 32_000)[_WORKER % _SHARES :: _SHARES]
PORT_TRIES = 200

_handed_out: set[int] = set()


class ServerError(Exception):
    """A server cannot be had; the message says which one, what happened and what to do."""


class Server(Protocol):
    """What a running server of any kind can say of itself."""

    @property
    def address(self) -> str:
        """What a client is given to reach it."""


def free_port() -> int:
    """A port on the loopback interface that nobody listens on, and never the same one twice."""
    for port in random.SystemRandom().sample(PORTS, PORT_TRIES):
        if port not in _handed_out and _can_bind(port):
            _handed_out.add(port)
            return port
    raise ServerError(
        f"ports {PORTS[0]}-{PORTS[-1]}: {PORT_TRIES} of them were tried and none is free: "
        "stop what listens there"
    )


@contextmanager
def workspace(server: str) -> Iterator[Path]:
    """A folder for one server's settings, data and log, removed at the end.

    A test process that is killed outright leaves its folder behind for the system to clean.
    """
    with tempfile.TemporaryDirectory(
        prefix=f"tidelog-{server}-", ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


def environment(
    values: Mapping[str, str] | None = None, *, without: tuple[str, ...] = ()
) -> dict[str, str]:
    """This process's environment, less the names that begin with a prefix, and with the values.

    A developer's own SPARK_… or VGW_… settings must not change what the tests run against.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(without)}
    return kept | dict(values or {})


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
