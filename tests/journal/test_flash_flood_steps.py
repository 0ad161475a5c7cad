"""flash-flood's whole API, step by step, on S3 and DynamoDB; readers know only URLs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

import tidelog
from tests.servers.dynamodb import DynamoDb
from tests.servers.s3 import S3
from tidelog import Event, Home
from tidelog.errors import AlreadyExistsError, NotFoundError
from tidelog.home import create_home
from tidelog.settings import Settings

T0 = 1_700_000_000_000
SCRIPT = Path(__file__).parents[2] / "docs" / "read_journals.py"


def streams(home: Home) -> list[dict[str, object]]:
    """`list_event_streams`: what another program is given."""
    return [
        json.loads(msgspec.json.encode(each)) for each in home.journals("events", presign="10m")
    ]


def replayed(home: Home) -> dict[str | None, bytes | None]:
    """`replay_with_urls`: by the URLs alone."""
    found = [event for entry in streams(home) for event in tidelog.read_journal(entry)]
    assert len(found) == len({event.id for event in found})
    return {event.id: event.value for event in found}


@pytest.mark.server
def test_steps_of_flash_flood(
    s3_server: S3, dynamodb_server: DynamoDb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    region = s3_server.region
    settings = Settings(
        f"s3://{s3_server.fresh_bucket()}?endpoint={s3_server.endpoint}&region={region}",
        f"dynamodb://ff{time.monotonic_ns()}?endpoint={dynamodb_server.endpoint}&region=us-east-1",
    )
    with create_home(settings)[0] as home:
        home.create_topic("events")
        # put, and put again under the same id
        events = [Event(b"%d" % n, id=f"event-{n}", timestamp=T0 + n) for n in range(20)]
        home.append("events", events, if_absent=True)
        with pytest.raises(AlreadyExistsError):
            home.append("events", events[:1], if_absent=True)
        assert home.event_exists("events", "event-3")
        assert not home.event_exists("events", "event-")  # no prefix
        expected: dict[str | None, bytes | None] = {e.id: e.value for e in events}
        assert replayed(home) == expected
        # update_event and delete_event: seen at once, also by who has only URLs
        home.update("events", "event-3", b"small")
        home.update("events", "event-4", b"large" * 5_000)
        home.delete("events", "event-5")
        expected |= {"event-3": b"small", "event-4": b"large" * 5_000}
        del expected["event-5"]
        assert replayed(home) == expected
        with pytest.raises(NotFoundError):
            home.get("events", "event-5")
        # journal, then update of what is compiled, then update(number_of_updates)
        assert home.compile("events").journals == 1
        home.update("events", "event-6", b"later")
        expected["event-6"] = b"later"
        assert [entry["format"] for entry in streams(home)] == ["parquet"]
        assert replayed(home) == expected
        policy = tidelog.CompilePolicy.everything()
        turn = home.scribe_once(tidelog.ScribeOptions(policy=policy, max_amendments=1))
        assert turn is not None
        assert turn.compiled.amendments == 1
        assert replayed(home) == expected
        home.update("events", "event-7", b"large" * 5_000)
        expected["event-7"] = b"large" * 5_000
        # a reader with neither the library nor credentials
        without = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        done = subprocess.run(
            [sys.executable, str(SCRIPT)],
            input="".join(json.dumps(entry) + "\n" for entry in streams(home)),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env=without,
        )
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        assert {row["id"]: row["value"].encode() for row in rows} == expected
        stale = streams(home)[0]
    stale["url"] = str(stale["url"]).replace("Signature=", "Signature=0")
    with pytest.raises(NotFoundError, match="403"):
        list(tidelog.read_journal(stale))
