"""A catalog that was restored from a copy which is older than an archive's ranges."""

from __future__ import annotations

from tidelog import Home
from tidelog.catalog.base import Delete
from tidelog.coordination.pipeline_rows import read_partitions
from tidelog.model import layout
from tidelog.model.archive import Archive


def forget(home: Home, archive: Archive, pipeline: str = "") -> None:
    """The catalog is one from before the archive, or a pipeline of it, had any range."""
    own = pipeline or archive.pipeline()
    places = [layout.pipeline_partition(own, each) for each in read_partitions(home.context, own)]
    for where in (*places, layout.pipeline_members(own)):
        for row in list(home.catalog.scan(where)):
            home.catalog.write(where, Delete(row.row), write_id=home.context.ids.new())
