"""Formats by name: what is refused, what files are called, and that formats cross processes."""

from __future__ import annotations

import pickle
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from tests.codec.formats.files import TYPED, VARIANTS, batch, label, opened, read, table, write
from tidelog import InvalidError
from tidelog.codec import formats
from tidelog.codec.formats import FORMATS, FormatSettings, open_format, settings_of


def test_every_name_opens_with_a_codec_of_its_own() -> None:
    codecs = {name: open_format(name).codec for name in FORMATS}
    assert codecs == {
        "parquet": "zstd",
        "orc": "zstd",
        "avro": "deflate",
        "jsonlines": "gzip",
        "delimited": "gzip",
        "sequence": "zlib",
    }
    assert open_format("parquet", "").codec == "zstd"
    assert [open_format(name).name for name in FORMATS] == list(FORMATS)


def test_names_of_files_are_secors() -> None:
    extensions = {label(each): opened(each).extension for each in VARIANTS}
    assert {name.partition("-")[0]: end for name, end in extensions.items()} == {
        "parquet": ".parquet",
        "orc": ".orc",
        "avro": ".avro",
        "jsonlines": ".jsonl",
        "delimited": "",
        "sequence": ".seq",
    }
    assert extensions["jsonlines-gzip"] == ".jsonl.gz"
    assert extensions["jsonlines-zstd"] == ".jsonl.zst"
    assert extensions["delimited-gzip"] == ".gz"
    assert extensions["delimited-zstd"] == ".zst"


def test_a_sidecar_stands_beside_its_file_and_is_not_data() -> None:
    for name in ("jsonlines", "delimited", "sequence"):
        form = open_format(name)
        assert form.sidecar_name("1_0_00.gz") == "_1_0_00.gz.meta.parquet"
        assert form.sidecar_name("g1/orders/dt=x/1_0_00") == "g1/orders/dt=x/_1_0_00.meta.parquet"
    for name in ("parquet", "orc", "avro"):
        assert open_format(name).sidecar_name("1_0_00") is None
    assert open_format("jsonlines", None, FormatSettings(mode="events")).sidecar_name("x") is None


WRONG: list[tuple[str, str | None, dict[str, Any], str]] = [
    ("parket", None, {}, "is unknown (did you mean `parquet`?): give one of parquet, orc, avro"),
    ("orc", "gzip", {}, "has no codec `gzip`: it has zstd, zlib, snappy, lz4, none"),
    (
        "sequence",
        "gzipp",
        {},
        "has no codec `gzipp` (did you mean `gzip`?): it has zlib, gzip, none",
    ),
    (
        "parquet",
        None,
        {"delimiter": ","},
        "takes no setting `delimiter`: it takes schema, keep_value, strict",
    ),
    (
        "jsonlines",
        None,
        {"mode": "event"},
        "mode `event` is unknown (did you mean `events`?): give value or events",
    ),
    (
        "sequence",
        "none",
        {"compression": "block"},
        "codec `none` and compression `block` contradict: choose a codec, or leave compression out",
    ),
    (
        "delimited",
        None,
        {"delimiter": "-" * 17},
        "its delimiter has 17 bytes: give 16 at most",
    ),
    (
        "avro",
        None,
        {"keep_value": True},
        "setting `keep_value` is for typed columns: give a schema, or leave it out",
    ),
    (
        "avro",
        None,
        {"schema": "`user-id` int"},
        "field `user-id` is not a valid name in Avro: use letters, digits and underscores",
    ),
]


@pytest.mark.parametrize(("name", "codec", "settings", "message"), WRONG)
def test_what_cannot_be_is_refused_in_one_line(
    name: str, codec: str | None, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidError) as error:
        open_format(name, codec, FormatSettings(**settings))
    assert str(error.value).startswith(f"format `{name}`: {message}")
    assert "\n" not in str(error.value)


def test_settings_by_name() -> None:
    assert settings_of({"mode": "events"}) == FormatSettings(mode="events")
    assert settings_of({}) == FormatSettings()
    with pytest.raises(InvalidError, match=r"`delimeter`: is unknown .did you mean `delimiter`"):
        settings_of({"delimeter": ","})
    with pytest.raises(InvalidError, match="`keep_value`: is str: give bool"):
        settings_of({"keep_value": "yes"})
    with pytest.raises(InvalidError, match="`schema`: is dict: give str"):
        settings_of({"schema": {}})


@pytest.mark.parametrize(
    "variant",
    [*VARIANTS, ("parquet", "zstd", {"schema": TYPED, "keep_value": True, "strict": True})],
    ids=label,
)
def test_a_format_crosses_to_another_process(variant: Any) -> None:
    form = opened(variant)
    copy = pickle.loads(pickle.dumps(form))
    assert copy == form
    events = batch([{"value": b'{"id": 1}'}])
    assert read(copy, write(form, [events])).equals(table([events]))
    assert pickle.loads(pickle.dumps(form)) == form  # also after it was used


def test_other_packages_may_add_a_format(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint(
        "fancy", "tidelog.codec.formats.text_lines:open_delimited", "tidelog.formats"
    )

    def found(group: str, name: str) -> list[EntryPoint]:
        return [entry] if (group, name) == ("tidelog.formats", "fancy") else []

    monkeypatch.setattr(formats, "find_plugins", found)
    assert open_format("fancy", "none").extension == ""
    with pytest.raises(InvalidError, match="format `other`: is unknown"):
        open_format("other")
