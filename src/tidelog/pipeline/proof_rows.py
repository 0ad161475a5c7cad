"""Catalog rows for a proof: which of them may quote an event.

Rows hold no ids, keys or values (the audit and the ledger have hashes), with one exception: errors
that are shown to people, which may quote the value that a parser refused. They are kept while
something fails: in ``failure`` rows of pipelines, and in the rows of running keepers.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.home import Home
from tidelog.log.keepers import Keeper
from tidelog.log.replays import replay_pipeline
from tidelog.model import layout
from tidelog.model.run import decode_row
from tidelog.model.topic import Topic
from tidelog.pipeline.descent import archives_of
from tidelog.pipeline.failures import read_failures
from tidelog.pipeline.registry import list_pipelines

__all__ = ["quoted_errors"]

_FAILURE = (
    "fix what fails and let its driver run until it commits there, which removes the row; of a "
    "generation that is kept: `tidelog archive drop`"
)
_KEEPER = "fix what fails; stop `tidelog up`, or wait a day if it was killed"


def quoted_errors(home: Home, topic: Topic) -> Iterator[tuple[str, str, str]]:
    """Yields errors that rows quote: where, the text, and what removes it.

    Of the topic's archives, of pipelines, and of keepers, which may run any of them.
    """
    pipelines = [
        each
        for archive, generation in archives_of(home, topic)
        for each in (archive.pipeline(generation), replay_pipeline(archive.pipeline(generation)))
    ]
    pipelines += [named.incarnation for named in list_pipelines(home)]
    for pipeline in pipelines:
        for partition, failure in read_failures(home.log, pipeline).items():
            where = f"{layout.pipeline_shards(pipeline)} · {layout.failure_row(partition)}"
            yield where, failure.message, _FAILURE
    for row in home.log.catalog.scan(layout.KEEPERS, layout.keeper_row(""), "keeper0"):
        keeper = decode_row(row.value, Keeper, f"keeper row `{row.row}`")
        for part in keeper.parts:
            yield f"{layout.KEEPERS} · {row.row}", part.error, _KEEPER
