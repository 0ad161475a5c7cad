"""Listing a folder past subfolders that may not be read: these stop only what may be in them."""

from __future__ import annotations

from contextlib import suppress

from tidelog.codec.formats.sidecar import sidecar_name
from tidelog.errors import InvalidError, NotFoundError, TidelogError
from tidelog.sources.file_names import FilePlace
from tidelog.store.base import ObjectInfo, Store, after_folder

__all__ = ["found_files", "readable_files"]


def found_files(
    store: Store, place: FilePlace
) -> tuple[dict[str, ObjectInfo], dict[str, TidelogError], str, str]:
    """What is in the folder, which subfolders may not be read, and what the folder is called.

    Before the last there is what stands before each path.
    """
    infos, denied = readable_files(store, place.folder)
    if infos or denied or not place.name:
        return infos, denied, place.folder, place.root_name
    for key in (place.name, sidecar_name(place.name)):  # it may be a file
        with suppress(NotFoundError):
            infos[key] = store.head(key)
    if place.name not in infos:
        raise NotFoundError(
            f"source `{place.url}`: no file is there: check the path, or put some there"
        )
    beside, _ = readable_files(store, place.name)
    alike = {key: info for key, info in beside.items() if "/" not in key}
    return {**alike, **infos}, {}, "", place.parent_name


def readable_files(
    store: Store, prefix: str
) -> tuple[dict[str, ObjectInfo], dict[str, TidelogError]]:
    """Returns the objects below a prefix, and errors of folders that may not be read, by key.

    ``InvalidError`` where the folder of the prefix itself may not be read.
    """
    infos: dict[str, ObjectInfo] = {}
    denied: dict[str, TidelogError] = {}
    start_after = ""
    while True:
        try:
            infos.update((info.key, info) for info in store.list(prefix, start_after))
        except InvalidError as exc:
            folder = str(exc.context.get("folder", ""))
            if not folder or f"{folder}/" == prefix or not folder.startswith(prefix):
                raise
            denied[folder] = exc
            start_after = after_folder(folder)
            continue
        below = tuple(f"{folder}/" for folder in denied)
        return {key: info for key, info in infos.items() if not key.startswith(below)}, denied
