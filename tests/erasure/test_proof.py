"""Erased is nowhere: every object is decoded and searched, by other code than the product's."""

from __future__ import annotations

import contextlib
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet as pq
import pytest

from tests.servers.s3 import S3
from tests.support.archive_look import AT, FIRST_S, an_archive, drive
from tidelog import Event, Home
from tidelog.archive.tables import change_tables, register
from tidelog.connectors.by_url import store_at
from tidelog.coordination.audit import Why
from tidelog.erasure.proof_search import prove_erased
from tidelog.errors import InvalidError
from tidelog.home import World, create_home
from tidelog.journal.amend import Amender
from tidelog.journal.lookup import Lookups
from tidelog.maintenance.erase import purge
from tidelog.model.archive import Archive
from tidelog.settings import Settings

ERASED = "person-41-erased"  # its id; the value and the key hold others like it
CONTROL = "person-42-control"


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.server)])
def home(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Home]:
    store, environ = str(tmp_path / "o"), {}
    if request.param == "s3":
        server: S3 = request.getfixturevalue("s3_server")
        environ = {
            "AWS_ACCESS_KEY_ID": server.access_key,
            "AWS_SECRET_ACCESS_KEY": server.secret_key,
        }
        for name, text in environ.items():
            monkeypatch.setenv(name, text)
        where = f"endpoint={server.endpoint}&region={server.region}"
        store = f"s3://{server.fresh_bucket()}/deep?{where}"
    settings = Settings(store, str(tmp_path / "c.sqlite"), lease_ttl_ms=1_000)
    with create_home(settings, world=World(environ=environ))[0] as made:
        yield made


def value_of(name: str, number: int, has_time: bool = True) -> bytes:
    """A dead letter of the parser where it has no time."""
    times = {"at": FIRST_S + number % 2 * 86_400} if has_time else {}
    return json.dumps({"n": number, "who": f"value-of-{name}", **times}).encode()


def filled(home: Home) -> None:
    """Two events of each, one of them a dead letter, among others; in two partitions."""
    home.create_topic("people", 2)
    for partition in (0, 1):
        events = []
        for number in range(60):
            name = {20: ERASED, 30: CONTROL, 40: ERASED, 50: CONTROL}.get(number)
            who = name or f"somebody-{number}"
            events.append(
                Event(
                    value_of(who, number, has_time=number < 35),
                    key=f"key-of-{who}".encode(),
                    id=f"{name}-{partition}-{number}" if name else f"other-{partition}-{number}",
                    timestamp=FIRST_S * 1000 + number,
                    headers=(("who", f"header-of-{who}".encode()),),
                )
            )
        home.append("people", events, partition=partition)


def archived(home: Home) -> list[Archive]:
    made = [
        an_archive(home, "daily", "topic:people", parser=AT),
        an_archive(home, "backup", "topic:people", format="jsonlines", codec="gzip"),
        # Uncompressed, so that bounds of values in its stripes and its footer are bytes to find.
        an_archive(home, "copy", "archive:backup", format="orc", codec="none"),
        an_archive(home, "old", "topic:people", format="sequence"),
    ]
    for archive in made:
        drive(home, archive)
    made[0] = change_tables(home.context, made[0], "delta", keep=True)
    register(home.context, made[0])
    return made


def delete(home: Home, ids: list[str]) -> None:
    lookup = Lookups(home.context).of(home.topic("people"))
    assert Amender(home.context, lookup, Why("tester", "asked to")).delete(ids).events == len(ids)


def ids_of(name: str) -> list[str]:
    return [f"{name}-{p}-{n}" for p in (0, 1) for n in ((20, 40) if name == ERASED else (30, 50))]


def everything(home: Home) -> dict[str, bytes]:
    """All objects of the store, each as all the text that can be got out of it."""
    store = store_at(home.context, home.store.url)  # past the cache
    return {info.key: searchable(store.get(info.key)) for info in store.list("")}


def searchable(data: bytes) -> bytes:
    """An object's own bytes, decompressed, every column and all metadata."""
    found = [data]
    for codec in ("gzip", "zstd", "bz2"):
        with contextlib.suppress(OSError, pa.ArrowInvalid):
            found.append(pa.CompressedInputStream(pa.BufferReader(data), codec).read())
    if data.startswith(b"ARROW1"):
        file = pa.ipc.open_file(pa.BufferReader(data))
        found.append(text_of([file.schema.metadata, *file.read_all().to_pylist()]))
    if data.startswith(b"PAR1"):
        parquet = pq.ParquetFile(pa.BufferReader(data))
        groups = [parquet.metadata.row_group(n).to_dict() for n in range(parquet.num_row_groups)]
        found.append(text_of([parquet.metadata.metadata, groups, *parquet.read().to_pylist()]))
    if data.startswith(b"ORC"):
        found.append(text_of(pyarrow.orc.ORCFile(pa.BufferReader(data)).read().to_pylist()))
    if data.startswith(b"Obj\x01"):
        reader = fastavro.reader(io.BytesIO(data))
        found.append(text_of([reader.metadata, *reader]))
    if data.startswith(b"SEQ"):
        found.extend(sequence_texts(data))
    return b"\n".join(found)


def sequence_texts(data: bytes) -> Iterator[bytes]:
    """Blocks of a sequence file are streams of a codec: begin one wherever it can begin."""
    for at in range(len(data)):
        if data[at : at + 2] in (b"x\x9c", b"x\x01", b"x\xda", b"x^"):
            with contextlib.suppress(zlib.error):
                yield zlib.decompressobj().decompress(data[at:])


def bounds_are_plain(home: Home, archive: Archive) -> Iterator[bool]:
    """Whether the statistics behind the rows of each ORC file hold values as they are."""
    store = store_at(home.context, home.store.url)
    for info in store.list(f"{archive.folder()}/"):
        if info.key.endswith(".orc"):
            data = store.get(info.key)
            tail = pyarrow.orc.ORCFile(pa.BufferReader(data)).file_footer_length + 1_000
            yield b"somebody-" in data[-tail:]


def text_of(values: Any) -> bytes:
    return repr(values).encode()


def holders(home: Home, name: str) -> set[str]:
    """The objects in which anything of a person is left."""
    needles = [f"{kind}{name}".encode() for kind in ("", "value-of-", "key-of-", "header-of-")]
    return {key for key, text in everything(home).items() if any(n in text for n in needles)}


def test_an_erased_event_is_nowhere_and_another_one_is_found(home: Home) -> None:
    filled(home)
    archives = archived(home)
    topic = home.topic("people")
    before = holders(home, ERASED)
    assert len(before) >= 12, "segment, files of four archives, sidecars, dead letters"
    assert set(bounds_are_plain(home, archives[2])) == {True}
    delete(home, ids_of(ERASED))
    half_way = home.prove_erased(topic.name, ids=ids_of(ERASED))
    assert not half_way.is_erased
    assert {trace.object for trace in half_way.traces} <= before
    done = purge(home.context, topic, grace_ms=0)
    assert sum(each.events for each in done.archives) == 4 * 4
    proof = home.prove_erased(topic.name, ids=ids_of(ERASED))
    assert proof.traces == []
    assert proof.objects >= 12
    assert holders(home, ERASED) == set()
    assert len(holders(home, CONTROL)) >= 12
    control = home.prove_erased(topic.name, ids=ids_of(CONTROL))
    assert not control.is_erased
    assert any("readers still see it" in trace.what for trace in control.traces)
    for archive in archives[:1]:
        assert register(home.context, archive) is not None


def test_a_person_is_erased_by_key(home: Home) -> None:
    filled(home)
    archived(home)
    topic = home.topic("people")
    key = f"key-of-{ERASED}".encode()
    lookup = Lookups(home.context).of(topic)
    amended = Amender(home.context, lookup, Why("tester")).delete_key(key, lambda _: None)
    assert amended.events == 4
    purge(home.context, topic, grace_ms=0)
    assert home.prove_erased(topic.name, keys=[key]).is_erased
    assert holders(home, ERASED) == set()


def test_the_values_that_updates_have_replaced_are_gone_too(home: Home) -> None:
    filled(home)
    topic = home.topic("people")
    amender = Amender(home.context, Lookups(home.context).of(topic), Why("tester"))
    large = b"large-" + ERASED.encode() * 4_000
    amender.update(dict.fromkeys(ids_of(ERASED), large))
    delete(home, ids_of(ERASED))
    proof = home.prove_erased(topic.name, ids=ids_of(ERASED))
    assert any("amendments/" in trace.object for trace in proof.traces)
    purge(home.context, topic, grace_ms=0)
    assert home.prove_erased(topic.name, ids=ids_of(ERASED)).is_erased
    assert holders(home, ERASED) == set()


def test_an_id_that_was_appended_anew_is_another_event(home: Home) -> None:
    filled(home)
    archives = archived(home)
    topic = home.topic("people")
    (first, *_) = ids_of(ERASED)
    delete(home, [first])
    purge(home.context, topic, grace_ms=0)
    home.append("people", [Event(b'{"n": 1}', id=first)], partition=0)
    for archive in archives:
        drive(home, archive)
    home.sweep(grace=0)  # the append may have stored its segment twice, as a sweep had passed
    assert home.prove_erased(topic.name, ids=[first]).is_erased


def test_what_is_staged_counts(home: Home) -> None:
    filled(home)
    topic = home.topic("people")
    delete(home, ids_of(ERASED))
    segment = next(iter(home.store.list("topics/"))).key
    home.store.copy(segment, "staging/some.pipeline/0000000001/attempt/0")
    purge(home.context, topic, grace_ms=0)
    proof = home.prove_erased(topic.name, ids=ids_of(ERASED))
    assert [trace.object for trace in proof.traces] == [
        "staging/some.pipeline/0000000001/attempt/0"
    ]


def test_a_proof_of_nothing_is_refused(home: Home) -> None:
    home.create_topic("people", 1)
    with pytest.raises(InvalidError, match="of which event"):
        prove_erased(home.context, home.topic("people"))
