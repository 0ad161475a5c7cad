"""Lets pyiceberg write small files to S3 with one request, because Iceberg's metadata is small.

Arrow's streams begin every file as a multipart upload, which takes three requests. The property
``py-io-impl`` of a catalog names this class.
"""

from __future__ import annotations

from pyarrow.fs import FileSystem, S3FileSystem
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.typedef import EMPTY_DICT, Properties

__all__ = ["SmallFileIO"]


class SmallFileIO(PyArrowFileIO):
    """Arrow's file systems, with streams that buffer bytes before they begin a multipart upload."""

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
    """Returns the same file system, rebuilt like unpickling does; that needs keys, not roles."""
    if not isinstance(found, S3FileSystem):
        return found
    make, (options,) = found.__reduce__()
    return make({**options, "allow_delayed_open": True}) if options["access_key"] else found
