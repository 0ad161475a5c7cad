"""Offsets of a range's files, as a deep verification checks them."""

from __future__ import annotations

import random

import numpy as np

from tidelog.archive.verify_checks import doubles_of, erased_left, in_order, runs_of
from tidelog.model.pipeline import Manifest


def test_offsets_of_files_in_any_order_with_doubles_holes_and_erased_ones() -> None:
    chance = random.Random(3)
    for _ in range(300):
        files = [sorted(chance.sample(range(30), chance.randrange(8))) for _ in range(3)]
        offsets = [offset for file in files for offset in file]
        erased = tuple(chance.choices(range(40), k=chance.randrange(5)))
        known = in_order(np.array(offsets, np.int64))
        assert known.tolist() == sorted(offsets)
        assert len(doubles_of(known)) == len(offsets) - len(set(offsets))
        held = [n for first, last in runs_of(known).tolist() for n in range(first, last + 1)]
        assert held == sorted(set(offsets))
        manifest = Manifest("p", "t/0", "0", "30", 0, 0, 0, erased=erased)
        assert erased_left(known, manifest).tolist() == sorted({*erased} & {*offsets})
