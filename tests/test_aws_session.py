"""Sessions of the AWS SDK: their own keys and regions, and one copy of what they read."""

from __future__ import annotations

from pathlib import Path

import pytest
from botocore.loaders import JSONFileLoader

from tidelog.aws_session import aws_session

PLACE = {"endpoint_url": "http://127.0.0.1:9"}


def keys(name: str) -> dict[str, str]:
    return {"aws_access_key_id": name, "aws_secret_access_key": f"{name}'s word"}


def test_sessions_have_keys_and_a_region_of_their_own() -> None:
    one = aws_session(region_name="eu-west-1", **keys("one"))
    two = aws_session(region_name="us-east-2", **keys("two"))
    for session, key, region in ((one, "one", "eu-west-1"), (two, "two", "us-east-2")):
        client = session.client("s3", **PLACE)
        assert client.meta.region_name == region
        assert session.get_credentials().access_key == key


def test_second_session_reads_no_description_again(monkeypatch: pytest.MonkeyPatch) -> None:
    aws_session(region_name="eu-west-1", **keys("one")).client("kinesis", **PLACE)
    read: list[str] = []
    real = JSONFileLoader.load_file

    def load(self: JSONFileLoader, path: str) -> object:
        read.append(path)
        return real(self, path)

    monkeypatch.setattr(JSONFileLoader, "load_file", load)
    aws_session(region_name="eu-west-1", **keys("two")).client("kinesis", **PLACE)
    assert read == []


def test_folders_of_descriptions_are_those_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def folders() -> list[str]:
        found: list[str] = aws_session()._session.get_component("data_loader").search_paths
        return found

    before = list(folders())
    assert folders() == before, "no folder is added twice"
    monkeypatch.setenv("AWS_DATA_PATH", str(tmp_path))
    assert str(tmp_path) in folders()
    monkeypatch.delenv("AWS_DATA_PATH")
    assert folders() == before
