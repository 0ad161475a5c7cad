"""How pyiceberg writes to S3 here: a small file by one request, as Iceberg's metadata is small.

Arrow's streams begin every file as an upload in parts, which takes three requests. Named in the
property ``py-io-impl`` of a catalog.
"""

from __future__ import annotations

from pyarrow.fs import FileSystem, S3FileSystem
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.typedef import EMPTY_DICT, Properties

__all__ = ["SmallFileIO"]


class SmallFileIO(PyArrowFileIO):
    """Arrow's file systems, with streams that wait for enough bytes before they begin parts."""

    def __init__(self, properties: Properties = EMPTY_DICT) -> None:
        super().__init__(properties)
        whole = self.fs_by_scheme
        known: dict[tuple[str, str | None], FileSystem] = {}

        def waiting(scheme: str, netloc: str | None = None) -> FileSystem:
            if (scheme, netloc) not in known:
                known[scheme, netloc] = _waiting(whole(scheme, netloc))
            return known[scheme, netloc]

        self.fs_by_scheme = waiting


def _waiting(found: FileSystem) -> FileSystem:
    """The same one; rebuilt as unpickling does, which needs keys: roles are not told to it."""
    if not isinstance(found, S3FileSystem):
        return found
    make, (options,) = found.__reduce__()
    return make({**options, "allow_delayed_open": True}) if options["access_key"] else found
