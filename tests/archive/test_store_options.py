"""Archives in a store whose address has options: their folder, tables, and what reads them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.servers.moto import KEYS, Moto
from tidelog import Event
from tidelog.errors import InvalidError
from tidelog.home import World, create_home
from tidelog.settings import Settings

pytestmark = pytest.mark.server

KEY = "arn:aws:kms:us-east-1:123456789012:key/1234"


def heads(client: Any, bucket: str) -> Mapping[str, str | None]:
    found = client.list_objects_v2(Bucket=bucket)["Contents"]
    return {
        each["Key"]: client.head_object(Bucket=bucket, Key=each["Key"]).get("SSEKMSKeyId")
        for each in found
    }


def test_archive_and_delta_table_are_encrypted_by_the_key_of_the_address(
    moto_server: Moto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    bucket = f"kms-{uuid.uuid4().hex[:8]}"
    client = boto3.client("s3", endpoint_url=moto_server.endpoint, region_name=moto_server.region)
    client.create_bucket(Bucket=bucket)
    where = f"endpoint={moto_server.endpoint}&region={moto_server.region}"
    settings = Settings(str(tmp_path / "o"), str(tmp_path / "c.sqlite"))
    with create_home(settings, world=World(environ=KEYS))[0] as home:
        home.create_topic("t")
        home.append("t", [Event(b"1", id="one"), Event(b"2", id="two")])
        store = f"s3://{bucket}/daily?{where}&kms_key={KEY}"
        archive = home.archives.create("daily", source="topic:t", to=store)
        archive.run()
        assert archive.info.folder_place() == f"s3://{bucket}/daily/g1"
        for source in (f"file:s3://{bucket}/daily/g1", f"file:s3://{bucket}/daily"):
            with pytest.raises(InvalidError, match="is in the folder of archive `daily`"):
                home.archives.create("again", source=f"{source}?{where}")
        with pytest.raises(InvalidError, match="holds the archive's own files"):
            home.archives.create(
                "again", source=f"file:s3://{bucket}/in?{where}", to=f"s3://{bucket}/in/a?{where}"
            )
        archive.tables.register("delta")
        home.erase("t", ids=["one"])
        found = heads(client, bucket)
        assert [name for name in found if "_delta_log" in name]
        assert {name for name, key in found.items() if key != KEY} == set()
        with pytest.raises(InvalidError, match="writes its metadata without the key"):
            archive.tables.register(f"iceberg:sqlite:///{tmp_path}/i.db#lake.daily")
    client.close()
