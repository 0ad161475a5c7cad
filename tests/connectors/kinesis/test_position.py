"""Positions of Kinesis, and records that hold several: pure, and never surprised."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kinesis_aggregator import MAGIC, Message, aggregated, sealed
from tidelog.connectors.kinesis.reader import (
    END,
    RangeLimit,
    ShardPosition,
    UserRecord,
    hash_of,
    is_before,
    user_records,
)
from tidelog.errors import InvalidError

BIG = 49_590_338_271_490_256_608_559_692_538_361_571_095_921_575_989_136_588_898
ALONG = [
    "oldest^500",
    "at:1000",
    "after:9@2000",
    "after:10@2000",
    f"after:{BIG}@3000",
    f"after:{BIG + 1}@3000",
    "end",
]


@pytest.mark.parametrize(
    "text",
    ["oldest", "oldest@5", "oldest^5", "at:7", "at:7@9", "at:7^9", f"after:{BIG}@7", "end"],
)
def test_places_come_back_from_their_texts(text: str) -> None:
    assert ShardPosition.parse(text).text == text


@pytest.mark.parametrize("text", ["until:7", "until:7,20", "end", "end,1"])
def test_limits_come_back_from_their_texts(text: str) -> None:
    assert RangeLimit.parse(text).text == text


@pytest.mark.parametrize(
    "text",
    ["", "5", "after:", "after:-1", "after:x", "at:1.5", "END", "until:", "until:1,", "after:٣"],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidError, match="is none of Kinesis"):
        ShardPosition.parse(text)


def test_places_rise_along_a_shard() -> None:
    bare = [text.replace("^500", "") for text in ALONG]
    for place, one in enumerate(bare):
        for other_place, other in enumerate(bare):
            assert is_before(one, other) == (place < other_place)


def test_an_end_is_a_time_and_never_before_what_was_read() -> None:
    for one in ALONG[:-1]:
        assert is_before(one, "until:9000")
        assert not is_before("until:9000", one)
    assert not is_before("after:9@9000", "until:9000")
    assert not is_before("at:9000", "until:9000")
    assert is_before("until:1", "until:2")
    assert not is_before("until:2", "until:2")
    # A shard that was seen to end may be listed as open for a moment.
    assert not is_before("end", "until:9000")
    assert not is_before("until:9000", "end")


def test_only_what_was_read_long_ago_is_before_the_first_place() -> None:
    assert is_before("after:9@100", "oldest^101")
    assert is_before("oldest@100", "at:7^101")
    assert not is_before("after:9@100", "oldest^100")
    for never_read in ("oldest", "oldest^1", "at:1", "at:1^5", "end", "until:5"):
        assert not is_before(never_read, "oldest^101")
    for late in ("oldest^1", "at:1", "at:1^5"):  # by more than an hour
        assert is_before(late, "oldest^3600101")


def test_a_limit_is_cut_to_the_least_count() -> None:
    assert RangeLimit.parse("until:7").cut(5).text == "until:7,5"
    assert RangeLimit.parse("until:7,3").cut(5).text == "until:7,3"
    assert RangeLimit.parse("end").cut(5).text == "end,5"
    assert ShardPosition.parse("until:7,3") == ShardPosition("at", 7, seen_ms=7)
    assert ShardPosition.parse("end,3") == END


RECORDS = st.lists(
    st.tuples(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
        st.binary(max_size=200),
    )
    | st.tuples(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
        st.binary(max_size=200),
        st.integers(0, 2**128 - 1).map(str),
    ),
    min_size=1,
    max_size=40,
)


@given(RECORDS)
def test_what_was_put_together_comes_apart(records: list[tuple[str, bytes]]) -> None:
    wanted = [UserRecord(each[0], each[2] if len(each) > 2 else None, each[1]) for each in records]
    assert user_records(aggregated(records)) == wanted


def test_tags_are_kept() -> None:
    message = Message(partition_key_table=["k"])
    record = message.records.add(partition_key_index=0, data=b"d")
    record.tags.add(key="colour", value="red")
    record.tags.add(key="empty")
    whole = sealed(message.SerializeToString())
    assert user_records(whole) == [
        UserRecord("k", None, b"d", (("colour", b"red"), ("empty", b"")))
    ]


@given(st.binary(max_size=300))
def test_rubbish_behind_the_magic_bytes_is_no_record_and_no_error(rubbish: bytes) -> None:
    assert (
        user_records(MAGIC + rubbish) is None
        or rubbish[-16:] == hashlib.md5(rubbish[:-16]).digest()
    )
    found = user_records(sealed(rubbish))
    assert found is None or all(isinstance(each, UserRecord) for each in found)


GOOD = aggregated([("a", b"1"), ("b", b"2", "7")])
DAMAGED = {
    "empty": b"",
    "magic alone": MAGIC,
    "nothing in it": sealed(b""),
    "no records": sealed(Message(partition_key_table=["a"]).SerializeToString()),
    "cut short": GOOD[:-1],
    "one bit": GOOD[:10] + bytes([GOOD[10] ^ 1]) + GOOD[11:],
    "a key that no table has": sealed(b"\x1a\x05\x08\x05\x1a\x01x"),
    "no key": sealed(b"\x0a\x01a\x1a\x03\x1a\x01x"),
    "no data": sealed(b"\x0a\x01a\x1a\x02\x08\x00"),
    "a length beyond the end": sealed(b"\x0a\xff\xff\xff\xff\x0f"),
    "a number without an end": sealed(b"\x08" + b"\xff" * 30),
    "a group": sealed(b"\x0b"),
    "keys that are no text": sealed(b"\x0a\x01\xff\x1a\x05\x08\x00\x1a\x01x"),
    "a number for a key": sealed(b"\x08\x01"),
    "a hash key that is no number": aggregated([("a", b"1", "x")]),
    "a hash key that is too large": aggregated([("a", b"1", str(2**128))]),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_what_is_damaged_is_left_whole(case: str) -> None:
    assert user_records(DAMAGED[case]) is None


def test_unknown_fields_are_passed_over() -> None:
    message = GOOD[4:-16] + b"\x79" + bytes(8) + b"\x7d" + bytes(4) + b"\x78\x05"
    assert user_records(sealed(message)) == user_records(GOOD)


def test_hash_keys_are_those_of_kinesis() -> None:
    assert hash_of("a", None) == int(hashlib.md5(b"a").hexdigest(), 16)
    assert hash_of("a", "17") == 17
