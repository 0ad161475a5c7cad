"""A cursor that is moved while its consumer is deleted, and consumers of unusual names."""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial

import pytest

import tidelog
from tests.faults.test_topic_delete_beside_readers import Between
from tidelog import Event
from tidelog.api.consumers import ConsumerHandle
from tidelog.catalog.base import prefix_end
from tidelog.errors import InvalidError, NotFoundError
from tidelog.log.consumer.delete import delete_consumer
from tidelog.log.consumer.leases import read_lease
from tidelog.log.maintenance.trim import ToOffsets
from tidelog.log.status import consumer_names
from tidelog.testing.faults import Faults, FaultyCatalog

CALLS_MAX = 100


def test_moved_cursor_does_not_outlive_its_consumer() -> None:
    for call in range(1, CALLS_MAX):
        with tidelog.open("memory:") as home:
            topic = home.create_topic("t")
            home.append("t", [Event(b"x")] * 6)
            with home.consumer("t", "billing") as consumer:
                consumer.poll(2)
                consumer.commit()
            quiet = home.context
            delete = partial(delete_consumer, quiet, topic, "billing", force=True)
            between = Between(call, delete)
            rows = FaultyCatalog(quiet.catalog, Faults(scheduler=between))  # type: ignore[arg-type]
            with contextlib.suppress(NotFoundError):
                ConsumerHandle(dataclasses.replace(quiet, catalog=rows), topic, "billing").seek(4)
            is_listed = consumer_names(quiet, topic) == ["billing"]
            assert (read_lease(quiet, topic, "billing", 0) is not None) == is_listed
            if between.calls_left > 0:
                return
    pytest.fail("the seek never ended")


@pytest.mark.parametrize("name", ["\U0010ffff", "\uffff", "\U0001f600", "~", " ", "%"])
def test_consumer_of_any_name_is_listed_and_holds_up_a_trim(name: str) -> None:
    with tidelog.open("memory:") as home:
        topic = home.create_topic("t")
        home.append("t", [Event(b"x")] * 6)
        with home.consumer("t", name) as consumer:
            consumer.poll(2)
            consumer.commit()
        assert [each.name for each in home.consumers("t")] == [name]
        with pytest.raises(InvalidError, match="trim"):
            home.trim("t", ToOffsets({0: 6}))
        with pytest.raises(InvalidError):
            home.delete_topic("t")
        home.delete_topic("t", past_readers=True)
        assert read_lease(home.context, topic, name, 0) is None


@pytest.mark.parametrize("last", ["", "a", "\uffff", "\U0001f600", "\U0010ffff" * 3])
def test_every_row_of_a_prefix_is_before_its_end(last: str) -> None:
    assert "consumer/" <= "consumer/" + last < prefix_end("consumer/") == "consumer0"
