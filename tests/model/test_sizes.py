"""Sizes as people write them."""

from __future__ import annotations

import pytest

from tidelog.errors import InvalidError
from tidelog.model.sizes import limit_text, size_bytes

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("10000", 10_000), ("1.5kB", 1_500), ("200 MB", 200_000_000), ("64mib", 64 << 20)],
)
def test_size_is_read(text: str, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "-1", "MB", "1 XB", "1 iB", "1,5 MB"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidError, match="give bytes, or a number and a unit"):
        size_bytes(text)


@pytest.mark.parametrize("size", [0, 1, 999, 1_500, 200_000_000, 8 << 20, 3 << 40])
def test_limit_is_shown_as_it_was_given(size: int) -> None:
    assert size_bytes(limit_text(size)) == size


def test_limit_has_the_largest_unit() -> None:
    shown = [limit_text(each) for each in (200_000_000, 8 << 20, 1_500, 10**9, 2048)]
    assert shown == ["200 MB", "8 MiB", "1500 B", "1 GB", "2 KiB"]
