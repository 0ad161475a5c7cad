"""Accepting a loss beside another member of the consumer, and beside another trim."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.archive_look import a_home
from tidelog import Event, Home
from tidelog.api.consumers import accept_loss
from tidelog.errors import NotFoundError
from tidelog.log.maintenance.trim import ToOffsets


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with a_home(tmp_path) as made:
        made.create_topic("t", 1)
        made.append("t", [Event(b"x") for _ in range(9)])
        with made.consumer("t", name="c") as member:
            member.seek(0, 1)
            member.commit()
        made.trim("t", ToOffsets({0: 5}), past_readers=True)
        yield made


def lost(start: int) -> NotFoundError:
    return NotFoundError("trimmed", partition=0, cursor=0, start=start)


def test_member_without_the_partition_leaves_the_loss_to_the_one_that_has_it(home: Home) -> None:
    with home.consumer("t", name="c") as first:
        first.seek(0, 5)
        with home.consumer("t", name="c") as second:
            assert accept_loss(second, lost(5)) is None
        assert accept_loss(first, lost(5)) is not None


def test_more_that_was_trimmed_is_left_to_the_next_read(home: Home) -> None:
    with home.consumer("t", name="c") as member:
        assert accept_loss(member, lost(3)) is None
