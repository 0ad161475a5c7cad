"""The pages of an archive's folder show every entry once."""

from __future__ import annotations

import pytest

from tidelog.api import archive_view
from tidelog.api.archive_view import _list_folder
from tidelog.store.memory import MemoryStore
from tidelog.testing.scheduler import FakeClock


@pytest.mark.parametrize("most", [1, 2, 3, 10])
def test_name_that_begins_with_the_last_one_of_a_page_is_shown(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_view, "_ENTRIES_MAX", most)
    store = MemoryStore(FakeClock())
    for key in ("a", "a-b/x", "a/y", "a/z", "ab", "b/c/d", "bc"):
        store.put(f"p/{key}", b"1")
    found: list[str] = []
    after, is_whole = "", False
    while not is_whole and len(found) < 20:
        entries, is_whole = _list_folder(store, "p/", after)
        found += [entry.place for entry in entries]
        after = found[-1]
    assert found == ["a", "a-b/", "a/", "ab", "b/", "bc"]
