"""Places that a proof need not search, or searches strictly: of other topics, and of files."""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.archive.archive import list_archives
from tidelog.archive.derived_archives import archives_of
from tidelog.archive.roots import removed_archives
from tidelog.context import Context
from tidelog.log.topics import list_topics
from tidelog.model import layout
from tidelog.model.topic import Topic
from tidelog.pipeline.endpoints import StoreFolder, folders_of, pipelines_of
from tidelog.pipeline.registry import list_pipelines
from tidelog.store.base import Store

__all__ = ["explained_places", "places_of_files", "stagings_of_others"]


def explained_places(context: Context, topic: Topic, store: Store) -> tuple[str, ...]:
    """Returns the prefixes of keys that belong to other topics, archives or pipelines."""
    at = context.store.url
    own = {archive.name for archive, _ in archives_of(context, topic)}
    found = [StoreFolder(at, layout.HOME_OBJECT), StoreFolder(at, layout.probe(""))]
    others = (each for each in list_topics(context) if each.incarnation != topic.incarnation)
    found += [StoreFolder(at, f"topics/{each.incarnation}/") for each in others]
    for archive in list_archives(context):
        if archive.name not in own:
            folders = folders_of(context, archive)
            found += [*folders["files"], *folders["manifests"]]
    found += [
        StoreFolder(at, layout.manifests(named.incarnation)) for named in list_pipelines(context)
    ]
    return tuple(folder.prefix for folder in found if folder.store == store.url)


def places_of_files(context: Context, topic: Topic) -> Iterator[str]:
    """Yields the prefixes of files with values: staged, set aside, or of a generation."""
    yield "staging/"
    of_topic = [archive for archive, _ in archives_of(context, topic)]
    for archive in (*of_topic, *removed_archives(context)):
        yield layout.aside_folder(archive.root)
        yield from (f"{archive.root}/g{number}/" for number in range(1, archive.newest + 1))


def stagings_of_others(context: Context, topic: Topic) -> list[str]:
    """Returns the staging prefixes of archives that are made of something else."""
    own = {archive.name for archive, _ in archives_of(context, topic)}
    others = [archive for archive in list_archives(context) if archive.name not in own]
    return [layout.staging_of(each) for archive in others for each in pipelines_of(archive)]
