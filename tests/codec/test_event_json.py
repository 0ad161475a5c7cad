"""Events as JSON: long lines, which are parsed field by field, follow the rules of short ones."""

from __future__ import annotations

import itertools

import pytest

from tidelog.codec.event_json import event_of_line, is_event_line
from tidelog.errors import InvalidError
from tidelog.model.event import Event

LONG = b" " * 70_000
NAMES = ("value", "key", "id", "timestamp", "type", "headers", "topic", "offset", "other")
VALUES = (
    b'"x"',
    b"null",
    b"1",
    b"5.5",
    b"1e999",
    b"{}",
    b'{"a":1}',
    b'{"base64":"eA=="}',
    b'{"base64":"!"}',
    b'[["a","b"]]',
    b"[1,]",
    rb'"\ud800"',
    b'"\xff"',
)


def parsed(line: bytes) -> Event | None:
    try:
        return event_of_line(line, 1 << 20)
    except InvalidError:
        return None


@pytest.mark.parametrize("name", NAMES)
def test_long_lines_are_accepted_by_the_same_rules(name: str) -> None:
    """Also with a name that is given twice, and with a position that is ignored."""
    given = name.encode()
    once = [b'{"value":"ok","%s":%s}' % (given, value) for value in VALUES]
    twice = [
        b'{"value":"ok","%s":%s,"%s":%s}' % (given, first, given, second)
        for first, second in itertools.product(VALUES, repeat=2)
    ]
    for line in once + twice:
        assert parsed(line) == parsed(LONG + line), line


def test_the_last_of_a_name_counts_and_the_position_is_ignored() -> None:
    for space in (b"", LONG):
        line = b'{"id":5,"id":"a","value":{"x":1},"value":"v","offset":1e999}' + space
        found = event_of_line(line)
        assert (found.id, found.value) == ("a", b"v")
        for bad in (b'{"value":1,"topic":"\xff"}', b'{"value":"\xff","value":1}'):
            with pytest.raises(InvalidError, match="is not an event as JSON"):
                event_of_line(bad + space)


def test_form_of_an_event() -> None:
    for line in (b'{"value":1}', b'{"value":null,"topic":[[]],"id":"a"}', LONG + b'{"value":1}'):
        assert is_event_line(line), line
    headers = b",".join([b'["",""]'] * 20_000)
    for line in (
        b"1",
        b'{"other":1,"value":1}',
        b'{"value":1,"id":5}',
        b'{"value":"\xff"}',
        b'{"value":1,"headers":[%s]}' % headers,
        b'{"value":%s' % (b"[" * 5_000),
    ):
        assert not is_event_line(line), line[:80]
