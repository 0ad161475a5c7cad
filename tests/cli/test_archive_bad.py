"""Archives and bad input: a clear line, an exit code, nothing half made; the next run goes on."""

from __future__ import annotations

import json
import random
import resource
from collections import Counter
from pathlib import Path

import pytest

from tests.servers.base import free_port
from tests.servers.s3 import S3
from tests.support.cli_run import Done, Run, finish, start
from tidelog.connectors.kafka.source import KafkaSource

MIB = 1 << 20
CREATE = ["archive", "create", "a", "--source", "topic:t"]
DATED = ["--kind", "partition", "--parser", "json:at"]
BAD = {
    "an unknown option": (["--formt", "orc"], "--formt"),
    "an unknown format": (["--format", "parket"], "did you mean `parquet`"),
    "a codec that it has not": (["--codec", "lzma"], "it has zstd"),
    "an option of another format": (["--delimiter", ","], "takes no setting `delimiter`"),
    "a missing parser": (["--kind", "partition"], "contradict"),
    "a parser for a backup": (["--kind", "backup", "--parser", "json:at"], "contradict"),
    "an unknown parser": (["--kind", "partition", "--parser", "jsn:at"], "unknown kind `jsn`"),
    "a parser that is nowhere": (["--kind", "partition", "--parser", "no.such:Parser"], "no.such"),
    "hours in a backup": (["--granularity", "hour"], "leave them out of a backup"),
    "an unknown granularity": ([*DATED, "--granularity", "week"], "week"),
    "a format of hours in folders of days": (
        [*DATED, "--hour-format", "h=%H"],
        "setting hour_format: has no effect, as granularity is day",
    ),
    "a format of minutes in folders of hours": (
        [*DATED, "--granularity", "hour", "--minute-format", "m=%M"],
        "setting minute_format: has no effect, as granularity is hour",
    ),
    "hours named as days are": (
        [*DATED, "--granularity", "hour", "--hour-format", "dt=%H"],
        "two of them are called `dt=`",
    ),
    "a time zone for folders of offsets": (
        ["--kind", "partition", "--parser", "offset:10", "--time-zone", "Europe/Berlin"],
        "setting time_zone: has no effect, as parser `offset:10` makes no folders of dates",
    ),
    "an unknown time zone": ([*DATED, "--time-zone", "Mars"], "Mars"),
    "a schema that does not parse": (["--schema", "n bigint, m"], "before the type of `m`"),
    "a schema that is no file": (["--schema", "@nowhere.sql"], "nowhere.sql"),
    "a strictness without a schema": (["--strict"], "give a schema"),
    "no bytes at all": (["--max-bytes", "0"], "give more than 0"),
    "an age that is none": (["--max-age", "soon"], "give a number and a unit"),
    "more dead letters than events": (["--dead-share", "2"], "give 0 to 1"),
    "a bad name": ([], "give 1 to 200 letters"),
    "an unknown source": (["--source", "kafkaa://h/t"], "did you mean `kafka`"),
    "a topic that is not there": (["--source", "topic:u"], "topic `u`"),
    "an unknown client property": (["--source", "kafka://127.0.0.1:9/t?nope=1"], "nope"),
    "a source that holds the home": (["--source", "file:."], "holds this home"),
    "a source inside of the home": (
        ["--source", "file:tidelog-data/objects/topics"],
        "is a part of this home",
    ),
    "a source that is the archive": (
        ["--source", "file:tidelog-data/objects/archives/a"],
        "holds the archive's own files",
    ),
    "a folder without a store": (["--to", "s3://bucket"], "s3://bucket/folder or ./folder"),
}


@pytest.fixture
def run(tidelog: Run) -> Run:
    assert tidelog("topic", "create", "t").code == 0
    return tidelog


def produce(run: Run, *values: bytes) -> None:
    assert run("produce", "t", stdin=b"".join(value + b"\n" for value in values)).code == 0


def numbered(*numbers: int) -> list[bytes]:
    return [json.dumps({"at": 1_794_700_800, "n": number}).encode() for number in numbers]


def archived(run: Run) -> Counter[int]:
    events = run("archive", "cat", "a").rows()
    return Counter(json.loads(event["value"])["n"] for event in events)


def drive(run: Run) -> Done:
    return run("archive", "run", "a", "--no-spark")


def check_refused(done: Done, code: int, message: str) -> None:
    assert done.code == code, done.err
    assert message in done.err
    assert "Traceback" not in done.err


def check_nothing_made(run: Run) -> None:
    assert run("archive", "list", "--json").rows() == []
    assert not list(Path("tidelog-data/objects").glob("archives/**/*"))


@pytest.mark.parametrize("case", BAD)
def test_settings_are_refused_and_nothing_is_made(run: Run, case: str) -> None:
    wrong, message = BAD[case]
    name = "no name" if case == "a bad name" else "a"
    command = ["archive", "create", name, "--source", "topic:t", *wrong]
    done = run(*command)
    check_refused(done, 1 if case == "a topic that is not there" else 2, message)
    check_nothing_made(run)
    assert run(*CREATE).code == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--rate", "0"], "--rate"),
        (["--dead-share", "-1"], "give 0 to 1"),
        (["--conf", "memory=1g"], "give spark.NAME=VALUE"),
        (["--start", "middle"], "--start"),
    ],
)
def test_a_run_with_bad_options_begins_nothing(run: Run, wrong: list[str], message: str) -> None:
    produce(run, *numbered(1, 2))
    assert run(*CREATE).code == 0
    spark = [] if wrong[0] == "--conf" else ["--no-spark"]
    check_refused(run("archive", "run", "a", *spark, *wrong), 2, message)
    assert archived(run) == Counter()
    assert drive(run).code == 0
    assert archived(run) == Counter([1, 2])


def test_a_share_of_dead_letters_can_be_borne(run: Run) -> None:
    produce(run, *numbered(*range(50)), *[b"rubbish"] * 150)
    assert run(*CREATE, *DATED).code == 0
    check_refused(drive(run), 2, "150 of 200 events are dead letters")
    assert archived(run) == Counter()
    assert run("archive", "run", "a", "--no-spark", "--dead-share", "0.8").code == 0
    assert archived(run) == Counter(range(50))


def test_a_broker_that_cannot_be_reached(tidelog: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KafkaSource.__init__.__kwdefaults__, "timeout_s", 2.0)
    gone = f"127.0.0.1:{free_port()}"
    wrong = ["archive", "create", "a", "--source", f"kafka://{gone}/t?socket.timeout.ms=1000"]
    check_refused(tidelog(*wrong), 1, "brokers can be reached")
    check_nothing_made(tidelog)


@pytest.mark.parametrize("share", [1, 3])
def test_a_disk_that_is_full(run: Run, share: int) -> None:
    """The limit of a file's size stands for it: a write comes back short, then fails."""
    noise = random.Random(7).randbytes(3 * MIB).hex().encode()
    produce(run, *[noise[at : at + MIB // 2] for at in range(0, len(noise), MIB // 2)])
    assert run(*CREATE).code == 0

    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (share * MIB, share * MIB))

    driver = start("archive", "run", "a", "--no-spark", preexec_fn=no_room)
    check_refused(finish(driver), 1, "the disk is full (File too large)")
    assert run("archive", "manifest", "a", "--json").rows() == []
    assert not list(Path("tidelog-data/objects/archives/a").glob("g1/**/*.parquet"))
    assert drive(run).code == 0
    assert [row["events"] for row in run("archive", "manifest", "a", "--json").rows()] == [12]
    assert run("archive", "verify", "a").code == 0


def keys(monkeypatch: pytest.MonkeyPatch, access: str, secret: str) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", access)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)


@pytest.fixture
def bucket(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    monkeypatch.setenv("AWS_REGION", s3_server.region)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    return s3_server.fresh_bucket()


@pytest.mark.server
def test_a_bucket_with_wrong_keys(
    run: Run, s3_server: S3, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(run, *numbered(1, 2))
    create = [*CREATE, "--to", f"s3://{bucket}/a"]
    keys(monkeypatch, s3_server.access_key, "wrong")
    check_refused(run(*create), 2, bucket)
    check_nothing_made(run)
    keys(monkeypatch, s3_server.access_key, s3_server.secret_key)
    assert run(*create).code == 0
    keys(monkeypatch, s3_server.access_key, "wrong")
    check_refused(drive(run), 2, bucket)
    keys(monkeypatch, s3_server.access_key, s3_server.secret_key)
    assert drive(run).code == 0
    assert archived(run) == Counter([1, 2])


@pytest.mark.server
def test_a_bucket_that_may_only_be_read(
    run: Run, s3_server: S3, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(run, *numbered(1, 2))
    create = [*CREATE, "--to", f"s3://{bucket}/a"]
    reader = s3_server.reader(bucket)
    keys(monkeypatch, *reader)
    check_refused(run(*create), 2, bucket)
    check_nothing_made(run)
    keys(monkeypatch, s3_server.access_key, s3_server.secret_key)
    assert run(*create).code == 0
    keys(monkeypatch, *reader)
    check_refused(drive(run), 2, bucket)
    keys(monkeypatch, s3_server.access_key, s3_server.secret_key)
    assert drive(run).code == 0
    assert archived(run) == Counter([1, 2])
