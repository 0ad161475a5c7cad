"""Names of parsers: what is refused, in one line, and how it is said."""

from __future__ import annotations

import sys

import pytest

from tidelog.codec.parsers import PARSER_KINDS, FolderSettings, open_parser
from tidelog.errors import InvalidError

REFUSED = {
    "": "unknown kind ``: give one of avro, date, ",
    "jsn:at": "unknown kind `jsn` (did you mean `json`?): give one of ",
    "JSON:at": "unknown kind `JSON`",
    "iso8601x": "unknown kind `iso8601x` (did you mean `iso8601`?)",
    "a b:c": "unknown kind `a b`",
    "math:at": "unknown kind `math`, and the module of that name has no class `at`",
    "x\ny:z": "unknown kind `x?y`",
    "json": "names no field: give json:field",
    "json:": "names no field: give json:field",
    "json:a..b": "a field's name is empty",
    "json:.": "a field's name is empty",
    "iso8601:": "names no field: give iso8601:field",
    "date:at": "has no pattern: give date:field|%Y-%m-%d",
    "date:at|": "has no pattern",
    "date:|%Y": "names no field",
    "date:at|%Q": "pattern has `%Q`: it takes %",
    "date:at|%Y-%": "pattern has `%`: it takes %",
    "date:at|%Y %Z": "pattern has `%Z`",
    "date:at|%H:%M": "pattern has no year: put %Y or %y into it",
    "date:at|today": "pattern has no year",
    "regex:": "the pattern has no group",
    r"regex:\d+": "the pattern has no group: put (…) around the time",
    "regex:(?:a)": "the pattern has no group",
    "regex:(a": "the pattern does not compile: missing )",
    "regex:(?=a)(b)": "the pattern does not compile: ",
    "regex:a{9999}(b)": "the pattern does not compile: ",
    "delimited:": "`` is no field: give 1 for the first",
    "delimited:0|,": "`0` is no field",
    "delimited:-1|,": "`-1` is no field",
    "delimited:x|,": "`x` is no field",
    "delimited:²|,": "`²` is no field",
    "delimited:10001|,": "`10001` is no field",
    "delimited:3": "has no separator",
    "delimited:3|": "has no separator",
    "msgpack:": "a field's name is empty",
    "thrift:": "`` is no field id",
    "thrift:at": "`at` is no field id",
    "thrift:0": "`0` is no field id",
    "thrift:40000": "`40000` is no field id",
    "thrift:1?protocol=json": "protocol `json` is not known: give binary or compact",
    "thrift:1?protokol=compact": "unknown option `protokol` (did you mean `protocol`?)",
    "thrift:1?protocol=": "option `protocol` is empty or given twice",
    "timestamp:x": "it has no argument",
    "offset:": "`` is no number of offsets",
    "offset:0": "`0` is no number of offsets",
    "offset:-5": "`-5` is no number of offsets",
    "offset:many": "`many` is no number of offsets",
    f"offset:{1 << 63}": "is no number of offsets",
    f"offset:{'9' * 5_000}": "is no number of offsets",
    f"delimited:{'9' * 5_000}|,": "is no field",
    "first:": "`` finds no time: give parsers that do, such as first:json:at||iso8601:at",
    "first:json:at||": "`` finds no time",
    "first:offset:10||json:at": "`offset` finds no time",
    "first:split:who|json:at": "`split` finds no time",
    "first:json:at||first:json:b": "`first` finds no time",
    "first:json:at||jsn:b": "`jsn` finds no time",
    "first:json:at||date:at": "parser `date:at`: has no pattern",
    "split:": "names no parser inside: give split:field|json:timestamp",
    "split:who": "names no parser inside",
    "split:who|": "names no parser inside",
    "split:|json:at": "names no parser inside",
    "split:who|jsn:at": "parser `jsn:at`: unknown kind `jsn`",
    "split:a..b|json:at": "a field's name is empty",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused(text: str) -> None:
    with pytest.raises(InvalidError) as caught:
        open_parser(text, FolderSettings())
    message = str(caught.value)
    assert REFUSED[text] in message
    assert message.startswith("parser `")
    assert message.isprintable()


def test_a_long_name_makes_a_short_message() -> None:
    with pytest.raises(InvalidError) as caught:
        open_parser("regex:(" + "x" * 5_000, FolderSettings())
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("text", "module"),
    [("avro:at?schemas=.", "fastavro"), ("avro:at?registry=http://x", "fastavro")],
)
def test_a_missing_package_is_named(
    text: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InvalidError, match=r"pip install 'tidelog\[formats\]'"):
        open_parser(text, FolderSettings())


def test_protobuf_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    with pytest.raises(InvalidError, match=r"pip install 'tidelog\[formats\]'"):
        open_parser("protobuf:at?descriptor=x&message=y", FolderSettings())


def test_every_kind_is_known() -> None:
    for kind in PARSER_KINDS:
        if kind != "timestamp":
            with pytest.raises(InvalidError, match=rf"^parser `{kind}`: (?!unknown kind)"):
                open_parser(kind, FolderSettings())
    open_parser("timestamp", FolderSettings())
