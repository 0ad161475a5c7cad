"""Addresses, and the hints of errors about names."""

from __future__ import annotations

import pytest

from tidelog.model.address import nearest


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("ordrs", {"orders", "clicks"}, " (did you mean `orders`?)"),
        ("payments", {"orders"}, ""),
        ("orders", {"orders"}, ""),  # created right after it was not found
        ("orders", {"orders", "order"}, " (did you mean `order`?)"),
        ("orders", set(), ""),
    ],
)
def test_hint_names_a_similar_name_and_never_the_name_itself(
    name: str, known: set[str], hint: str
) -> None:
    assert nearest(name, known) == hint
