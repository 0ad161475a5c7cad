"""A crowd of workers around topic ``t``, some of which a test kills, and what they wrote."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support.child_processes import Nursery
from tidelog import Home

# Of consumers. One that was killed is known to be dead at once, so nobody waits for this; and none
# that lives is taken for dead: it might handle an event that another has committed meanwhile.
LEASE_TTL_MS = 600_000


@dataclass(frozen=True)
class Line:
    """One line that a worker wrote."""

    at: int
    worker: str
    verb: str
    partition: int
    offset: int
    value: str


class Crowd:
    """Workers of a home that write what they do into files of a folder."""

    def __init__(self, module: str, config: str, folder: Path, seed: int) -> None:
        self._nursery = Nursery(module, {"TIDELOG_LEASE_TTL_MS": str(LEASE_TTL_MS)})
        self._config = config
        self._folder = folder
        self._random = random.Random(seed)
        self._workers: list[tuple[str, Path, int]] = []  # that live until they are killed
        self._killed: list[str] = []

    def stop(self) -> None:
        for *_, worker in self._workers:
            with contextlib.suppress(ProcessLookupError):  # then the others must end all the same
                os.kill(worker, signal.SIGKILL)
        self._nursery.close()

    def killed_at_work(self, lines: list[Line]) -> int:
        """How many consumers were killed that had handled something: others took over."""
        handled = {line.worker for line in lines if line.verb == "handled"}
        return len(handled.intersection(self._killed))

    def lines(self) -> list[Line]:
        """All that was written so far, in its order; what is not yet a whole line is not."""
        found = []
        for file in self._folder.glob("*.log"):
            for text in file.read_text().rpartition("\n")[0].splitlines():
                at, verb, partition, offset, *value = text.split(" ")
                where = (int(partition), int(offset), "".join(value))
                found.append(Line(int(at), file.stem, verb, *where))
        return sorted(found, key=lambda line: line.at)

    def _start(self, role: str, *more: object) -> tuple[Path, int]:
        """Begin a worker that is not killed by the crowd; its file and its process id."""
        file = self._folder / f"{role}-{self._random.getrandbits(64):016x}.log"
        return file, self._nursery.start(role, self._config, "t", file, *more)

    def _add(self, role: str, *more: object) -> None:
        self._workers.append((role, *self._start(role, *more)))

    def _replace_one(self, *more: object) -> None:
        """Kill one of those who live, and begin another of its role."""
        role, file, worker = self._workers.pop(self._random.randrange(len(self._workers)))
        os.kill(worker, signal.SIGKILL)  # raises if it ended by itself
        self._killed.append(file.stem)
        self._add(role, *more)


def drain(home: Home, folder: Path, partitions: int) -> int:
    """The last consumer, which nobody kills, handles what is left; how many events."""
    count = 0
    with home.consumer("t", "c") as consumer, (folder / "consume-last.log").open("w") as out:
        end = time.monotonic() + 120
        while len(consumer.partitions()) < partitions or not consumer.caught_up():
            assert time.monotonic() < end, "leases of dead processes were not taken over"
            for event in consumer.poll(1_000, timeout_s=0.2):
                now, value = time.monotonic_ns(), (event.value or b"").decode()
                out.write(f"{now} handled {event.partition} {event.offset} {value}\n")
                count += 1
            consumer.commit()
    return count
