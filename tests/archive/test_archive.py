"""Archives: every source event once, for who lists the folder and for who reads the manifest."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from tests.servers.kafka import Kafka
from tidelog import Event, Home
from tidelog.archive.archive import committed_files, create_archive, find_archive, open_pipeline
from tidelog.archive.status import read_status
from tidelog.coordination.pipeline_rows import list_archives
from tidelog.errors import AlreadyExistsError, InvalidError, NotFoundError, TidelogError
from tidelog.home import World, create_home
from tidelog.model.archive import Archive, ArchiveFormat
from tidelog.pipeline.driver import Driver, DriverOptions
from tidelog.pipeline.tasks import LocalWorkers
from tidelog.settings import Settings

DAY_S = 86_400
FIRST_S = 1_794_700_800  # 2026-11-15
KILLS = 12
SHARED = {"max_bytes", "max_age_ms", "dead_share_max"}  # by all generations of an archive

RUN = """
import sys
from tidelog.cli.main import main
sys.argv = ["tidelog", "--home", sys.argv[1], "archive", "run", sys.argv[2], "--no-spark"]
main()
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"), lease_ttl_ms=1_000)
    with create_home(settings, world=World(environ={}))[0] as made:
        made.create_topic("t", 3)
        yield made


def payload(number: int) -> bytes:
    return json.dumps({"at": FIRST_S + (number % 3) * DAY_S, "n": number}).encode()


def fill(home: Home, count: int, first: int = 0) -> None:
    for start in range(first, first + count, 500):
        numbers = range(start, min(start + 500, first + count))
        home.append("t", [Event(payload(n), key=b"%d" % n) for n in numbers])


def an_archive(home: Home, name: str, source: str = "topic:t", **settings: object) -> Archive:
    shared = {each: settings.pop(each) for each in SHARED & settings.keys()}
    wanted = Archive(
        name=name,
        incarnation=home.context.ids.new(),
        source=source,
        kind="partition" if "parser" in settings else "backup",
        store=home.store.url,
        root=f"archives/{name}",
        created_ms=0,
        formats={1: ArchiveFormat(**settings)},  # type: ignore[arg-type]
        **shared,  # type: ignore[arg-type]
    )
    return create_archive(home.context, wanted)


def drive(home: Home, archive: Archive, **how: object) -> int:
    pipeline = open_pipeline(home.context, archive, LocalWorkers(2))
    return Driver(home.context, pipeline, DriverOptions(**how)).run()  # type: ignore[arg-type]


def folder(home: Home, archive: Archive) -> str:
    return f"{home.store.url.removeprefix('file://')}/{archive.root}/g1"


def listed(home: Home, archive: Archive) -> Counter[int]:
    """The numbers of all events that a plain recursive listing finds."""
    rows = duckdb.sql(
        f"SELECT value FROM read_parquet('{folder(home, archive)}/**/*.parquet')"
    ).fetchall()
    return Counter(json.loads(value)["n"] for (value,) in rows)


def in_manifest(home: Home, archive: Archive) -> int:
    root = home.store.url.removeprefix("file://")
    files = [f"{root}/{file.target}" for _, file in committed_files(home.context, archive)]
    ((count,),) = duckdb.sql(f"SELECT count(*) FROM read_parquet({files})").fetchall()
    return int(count)


def test_backup_and_partition_archives_agree_with_the_topic(home: Home) -> None:
    fill(home, 3_000)
    raw = an_archive(home, "raw")
    daily = an_archive(home, "daily", parser="json:at")
    assert drive(home, raw) == drive(home, daily) == 3_000
    expected = Counter(range(3_000))
    assert listed(home, raw) == listed(home, daily) == expected
    assert in_manifest(home, raw) == in_manifest(home, daily) == 3_000
    days = {path.name for path in Path(folder(home, daily), "t").iterdir()}
    assert days == {"dt=2026-11-15", "dt=2026-11-16", "dt=2026-11-17"}
    assert list(home.store.list("staging/")) == []
    fill(home, 100, first=3_000)
    assert drive(home, daily) == 100
    assert listed(home, daily) == Counter(range(3_100))
    status = read_status(home.context, daily).partitions
    assert sum(each.events for each in status) == 3_100
    assert all(each.lag == 0 and not each.stuck for each in status)


def test_every_column_comes_back_from_a_backup(home: Home) -> None:
    events = [
        Event(None, b"k", "id-1", 5, "created", (("h", b"1"), ("h", b""))),
        Event(b"", None, None, 6),
        Event(b"\xff\x00", b"", "id-2", 7),
    ]
    home.append("t", events, partition=1)
    archive = an_archive(home, "raw")
    drive(home, archive)
    from tidelog.codec.formats import open_format

    ((_, file),) = committed_files(home.context, archive)
    form = open_format("parquet", None, None)
    (batch,) = form.read(home.store.get(file.target))
    (original,) = home.read_arrow("t", 1)
    assert batch.to_pylist() == original.to_pylist()


@pytest.mark.parametrize("form", ["orc", "avro", "jsonlines", "delimited", "sequence"])
def test_other_formats_hold_each_event_once(home: Home, form: str) -> None:
    from tidelog.codec.formats import open_format

    fill(home, 300)
    archive = an_archive(home, "other", parser="json:at", format=form)
    assert drive(home, archive) == 300
    reads = open_format(form, None, None)
    sidecars = {
        Path(file.target).name: file.target
        for _, file in committed_files(home.context, archive)
        if file.kind == "sidecar"
    }
    numbers: Counter[int] = Counter()
    for _, file in committed_files(home.context, archive):
        if file.kind != "data":
            continue
        beside = reads.sidecar_name(Path(file.target).name)
        sidecar = home.store.get(str(Path(file.target).parent / beside)) if beside else None
        for batch in reads.read(home.store.get(file.target), sidecar):
            numbers.update(json.loads(v)["n"] for v in batch.column("value").to_pylist())
    assert numbers == Counter(range(300))
    assert bool(sidecars) == bool(reads.sidecar_name("x"))


def test_what_no_parser_takes_goes_to_the_dead_letters_with_its_reason(home: Home) -> None:
    fill(home, 1_000)
    home.append("t", [Event(b"not json"), Event(b'{"n": 5}'), Event(None)], partition=0)
    archive = an_archive(home, "daily", parser="json:at")
    assert drive(home, archive) == 1_003
    assert listed(home, archive) == Counter(range(1_000))
    root = home.store.url.removeprefix("file://")
    dead = duckdb.sql(
        f"SELECT error, \"offset\" FROM read_parquet('{root}/dead/daily/**/*.parquet')"
    ).fetchall()
    assert len(dead) == 3
    assert all(error for error, _ in dead)


def test_too_many_dead_letters_stop_the_archive_loudly(home: Home) -> None:
    home.append("t", [Event(b"rubbish") for _ in range(500)], partition=0)
    archive = an_archive(home, "daily", parser="json:at")
    with pytest.raises(InvalidError, match="500 of 500 events are dead letters"):
        drive(home, archive)
    assert list(home.store.list("dead/")) == []


BAD = {
    "an unknown source": ({"source": "kafkaa://x/y"}, "did you mean `kafka`"),
    "a missing topic": ({"source": "topic:nope"}, "not found"),
    "an unknown parser": ({"parser": "jsn:at"}, "json"),
    "an unknown format": ({"format": "parket"}, "did you mean `parquet`"),
    "a codec it has not": ({"codec": "lzma"}, "lzma"),
    "an unknown time zone": ({"parser": "timestamp", "layout": {"time_zone": "Mars"}}, "Mars"),
    "a share beyond all": ({"dead_share_max": 1.5}, "0 to 1"),
    "a broker that is down": ({"source": "kafka://127.0.0.1:9/t?socket.timeout.ms=1000"}, "127.0"),
}


SLOW = "a broker that is down"  # it is given fifteen seconds to answer


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long if case == SLOW else ()) for case in BAD]
)
def test_bad_settings_are_refused_and_nothing_is_half_made(home: Home, case: str) -> None:
    settings, message = BAD[case]
    with pytest.raises(TidelogError, match=message):
        an_archive(home, "bad", **settings)  # type: ignore[arg-type]
    assert list(list_archives(home.context)) == []
    assert list(home.store.list("archives/")) == []


def test_a_folder_that_is_not_empty_and_a_name_that_is_taken_are_refused(home: Home) -> None:
    home.store.put("archives/full/something", b"x")
    with pytest.raises(InvalidError, match="not empty"):
        an_archive(home, "full")
    home.store.put("archives/since/_owner", b"of an archive that a restored catalog lacks")
    with pytest.raises(InvalidError, match="that the catalog does not know, as after a restore"):
        an_archive(home, "since")
    an_archive(home, "a")
    with pytest.raises(AlreadyExistsError):
        an_archive(home, "a")
    with pytest.raises(NotFoundError):
        find_archive(home.context, "b")


def kill_drivers(home: Home, archive: Archive, check: object) -> None:
    """Two drivers at once, killed again and again; then one that finishes."""
    chance = random.Random(20261115)
    for _ in range(KILLS // 2):
        command = [sys.executable, "-c", RUN, home.config, archive.name]
        drivers = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(2)]
        time.sleep(1.0 + chance.random() * 1.2)
        for driver in drivers:
            driver.send_signal(signal.SIGKILL)
            driver.wait()
        check()  # type: ignore[operator]
    drive(home, archive)
    check()  # type: ignore[operator]


@pytest.mark.long
def test_drivers_that_are_killed_archive_each_event_once(home: Home) -> None:
    fill(home, 30_000)
    archive = an_archive(home, "daily", parser="json:at")

    def no_doubles() -> None:
        if list(home.store.list(f"{archive.root}/g1/")):
            assert max(listed(home, archive).values()) == 1

    kill_drivers(home, archive, no_doubles)
    assert listed(home, archive) == Counter(range(30_000))
    assert in_manifest(home, archive) == 30_000


@pytest.mark.server
@pytest.mark.long
def test_kafka_is_archived_once_over_kills(home: Home, kafka_server: Kafka) -> None:
    name = f"archived-{uuid.uuid4().hex}"
    kafka_server.create_topic(name, 3)
    producer = kafka_server.producer()
    for number in range(20_000):
        producer.produce(name, payload(number), partition=number % 3)
    producer.flush()
    source = f"kafka://{kafka_server.bootstrap}/{name}"
    archive = an_archive(home, "clicks", source, parser="json:at")
    kill_drivers(home, archive, lambda: None)
    assert listed(home, archive) == Counter(range(20_000))
    backup = an_archive(home, "raw", source)
    assert drive(home, backup) == 20_000
    assert listed(home, backup) == listed(home, archive)


def test_cycles_leave_no_empty_folders_behind(home: Home) -> None:
    raw = an_archive(home, "raw")
    for number in range(25):
        fill(home, 3, first=3 * number)
        assert drive(home, raw) == 3
    root = Path(home.store.url.removeprefix("file://"))
    assert not (root / "staging").exists()
    empty = [path for path in root.rglob("*") if path.is_dir() and not any(path.iterdir())]
    assert [path for path in empty if ".tidelog" not in path.parts] == []
