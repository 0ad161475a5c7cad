"""Where a proof need not search, or searches strictly: places of other topics, and of files."""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.home import Home
from tidelog.model import layout
from tidelog.model.topic import Topic
from tidelog.pipeline.archive import list_archives
from tidelog.pipeline.descent import archives_of
from tidelog.pipeline.places import Folder, folders_of, pipelines_of
from tidelog.pipeline.registry import list_pipelines
from tidelog.pipeline.roots import removed_archives
from tidelog.store.base import Store

__all__ = ["explained_places", "places_of_files", "stagings_of_others"]


def explained_places(home: Home, topic: Topic, store: Store) -> tuple[str, ...]:
    """What keys of a store begin with that are another's: of other topics, archives, pipelines."""
    at = home.store.url
    own = {archive.name for archive, _ in archives_of(home, topic)}
    found = [Folder(at, layout.HOME_OBJECT), Folder(at, layout.probe(""))]
    others = (each for each in home.topics() if each.incarnation != topic.incarnation)
    found += [Folder(at, f"topics/{each.incarnation}/") for each in others]
    for archive in list_archives(home):
        if archive.name not in own:
            folders = folders_of(home, archive)
            found += [*folders["files"], *folders["manifests"]]
    found += [Folder(at, layout.manifests(named.incarnation)) for named in list_pipelines(home)]
    return tuple(folder.prefix for folder in found if folder.store == store.url)


def places_of_files(home: Home, topic: Topic) -> Iterator[str]:
    """What keys of files with values begin with: staged, set aside, or of a generation."""
    yield "staging/"
    of_topic = [archive for archive, _ in archives_of(home, topic)]
    for archive in (*of_topic, *removed_archives(home)):
        yield layout.aside_folder(archive.root)
        yield from (f"{archive.root}/g{number}/" for number in range(1, archive.newest + 1))


def stagings_of_others(home: Home, topic: Topic) -> list[str]:
    """Where archives stage that are made of something else."""
    own = {archive.name for archive, _ in archives_of(home, topic)}
    others = [archive for archive in list_archives(home) if archive.name not in own]
    return [layout.staging_of(each) for archive in others for each in pipelines_of(archive)]
