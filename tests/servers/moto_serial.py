"""Run moto's server with one call into Kinesis at a time.

moto answers each request in a thread of its own, but its streams are not made for threads: two puts
at once may take the same sequence number, and the second overwrites an acknowledged record.

Called as `python -P moto_serial.py`, with the arguments of `moto_server`. Without `-P` the modules
beside this file would hide those of the same names.
"""

import functools
import threading
from collections.abc import Callable
from inspect import isfunction
from typing import Any

from moto.kinesis.models import KinesisBackend
from moto.server import main

_lock = threading.RLock()


def one_at_a_time(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which waits for calls of the others to end."""

    @functools.wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        with _lock:
            return method(*args, **named)

    return call


if __name__ == "__main__":
    for name, member in list(vars(KinesisBackend).items()):
        if isfunction(member) and not name.startswith("_"):
            setattr(KinesisBackend, name, one_at_a_time(member))
    main()
