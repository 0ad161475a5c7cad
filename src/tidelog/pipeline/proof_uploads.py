"""Uploads for a proof: what stores hold beside the objects that a listing shows.

An upload that is under way becomes an object, or is removed by its writer. So a proof lists uploads
before objects, and waits a little for those that may end: what ended is then in a listing. A
process that has not begun its upload yet holds the bytes in memory only, which no proof can see;
the protocols (``erase.is_under_way``) cover what it may write.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.clock import Clock
from tidelog.store.base import Store, Upload

__all__ = ["WAIT_S", "lasting_uploads"]

WAIT_S = 10.0  # for uploads that are under way
_LOOK_S = 0.1


def lasting_uploads(store: Store, clock: Clock) -> Iterator[Upload]:
    """Yields the uploads that died, and those that do not end within ``WAIT_S``."""
    under_way: dict[tuple[str, int], Upload] = {}
    for upload in store.uploads():
        if upload.may_end:
            under_way[upload.name, upload.began_ms] = upload
        else:
            yield upload
    until_s = clock.monotonic_s() + WAIT_S
    while under_way and clock.monotonic_s() < until_s:
        clock.sleep(_LOOK_S)
        names = {upload.name for upload in store.uploads()}
        under_way = {key: each for key, each in under_way.items() if each.name in names}
    yield from under_way.values()
