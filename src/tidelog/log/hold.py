"""Writing a row that says who holds something: settled here, whatever replies get lost."""

from __future__ import annotations

from tidelog.catalog.base import ABSENT, Put
from tidelog.errors import ConflictError, UnavailableError, UnknownOutcomeError
from tidelog.log.base import Log

__all__ = ["put_held"]

_ATTEMPTS = 20  # of one write whose replies get lost


def put_held(
    log: Log, where: str, row: str, value: bytes, version: str | None, what: str
) -> str | None:
    """Write a row by the version that we know; its new version, or None: somebody else was first.

    Only this write carries its id, so a row that has it is ours. ``UnavailableError`` when nobody
    can be asked.
    """
    write_id = log.ids.new()
    change = Put(row, value, expect=version or ABSENT)
    for attempt in range(_ATTEMPTS):
        try:
            log.catalog.write(where, change, write_id=write_id)
        except ConflictError:
            return None
        except UnknownOutcomeError:
            found = log.catalog.get(where, row)
            if found is None or found.version not in (version, write_id):
                return None
            if found.version != write_id:
                log.clock.sleep(0.01 * attempt)
                continue
        return write_id
    raise UnavailableError(f"{what}: replies keep getting lost: try again")
