"""The session of dynamodb-event-store, step by step: pixels, a stream, playback into another."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import boto3
import pytest

from tests.servers.moto import Moto
from tests.support.cli_run import run_here
from tests.support.serving import serving


@pytest.mark.server
def test_steps_of_the_event_store(
    moto_server: Moto,
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "word")
    run = run_here(monkeypatch, capsysbinary, tmp_path)
    number, region = time.monotonic_ns(), moto_server.region
    streams = {name: f"{name}-{number}" for name in ("orders", "playback")}
    where = f"?endpoint_url={moto_server.endpoint}&region={region}"
    client = boto3.client("kinesis", endpoint_url=moto_server.endpoint, region_name=region)
    for stream in streams.values():
        client.create_stream(StreamName=stream, ShardCount=1)
    began_ms = int(time.time() * 1000) - 1_000
    sent = [{"Data": b"%d" % n, "PartitionKey": f"k{n % 3}"} for n in range(30)]
    client.put_records(StreamName=streams["orders"], Records=sent)
    client.close()
    # function load: a pixel stores its request, in a topic or in the stream
    load = (f"load=kinesis://{streams['orders']}{where}",)
    with serving(tmp_path / "home", topic_default="t", keep_request=True, forward=load) as served:
        assert served.client.get("/track/load.gif?page=30&key=k0").status_code == 200
        for page in range(20):
            assert served.client.get(f"/track.gif?page={page}").content.startswith(b"GIF89a")
        kept = [json.loads(value or b"") for value in served.values()]
        assert [each["params"]["page"] for each in kept] == [str(page) for page in range(20)]
        assert {(each["method"], each["path"]) for each in kept} == {("GET", "/track.gif")}
        config = served.home.config
    home = ("--home", config)
    # function pump: every record once, also when it runs again
    assert run(*home, "topic", "create", "orders", "--partitions", "2", "--slot", "1s").code == 0
    pump = ("pump", f"kinesis://{streams['orders']}{where}", "--topic", "orders", "--no-spark")
    for _ in range(2):
        done = run(*home, *pump)
        assert done.code == 0, done.err
    assert json.loads(run(*home, "topic", "show", "orders", "--json").out)["events"] == 31
    # function playback: the file says what, each slot has a line, and the end says so
    to = f"kinesis://{streams['playback']}{where}"
    params = {"topic": "orders", "start": began_ms, "end": began_ms + 600_000, "to": to}
    (tmp_path / "test.json").write_text(json.dumps(params))
    played = run(*home, "playback", "--params", "test.json")
    assert played.code == 0, played.err
    begin, *slots, end = played.out.decode().splitlines()
    assert begin.startswith("playback of orders from ")
    counts = [re.fullmatch(r"\S+: (\d+) events?(, the first at \S+)?", line) for line in slots]
    assert sum(int(found[1]) for found in counts if found) == 31
    assert all(counts)
    assert end.startswith("Success: played 31 events in ")
    # the second stream has them, with their keys
    assert run(*home, "topic", "create", "again").code == 0
    again = ("pump", to, "--topic", "again", "--no-spark")
    assert run(*home, *again).code == 0
    lines = run(*home, "playback", "again", "--start", "-15m", "--to", "stdout:").out.splitlines()
    found = [json.loads(line) for line in lines]
    pages = [each["value"] for each in found if each["value"].startswith("{")]
    assert [json.loads(each)["params"]["page"] for each in pages] == ["30"]
    assert sorted(int(v["value"]) for v in found if v["value"] not in pages) == list(range(30))
    assert {each["key"] for each in found} == {"k0", "k1", "k2"}
