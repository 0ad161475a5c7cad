"""Settings: where they come from, who wins, and what is refused."""

from __future__ import annotations

import pickle
import re
from dataclasses import fields
from pathlib import Path

import pytest

from tidelog.errors import InvalidError, NotFoundError
from tidelog.settings import Settings, config_string, load_settings


def load(folder: Path, home: str | None = None, **environ: str) -> Settings:
    return load_settings(home, environ, folder)


def test_the_default_home_is_a_folder_beside_you(tmp_path: Path) -> None:
    settings = load(tmp_path)
    assert settings.store == str(tmp_path / "tidelog-data" / "objects")
    assert settings.catalog == str(tmp_path / "tidelog-data" / "catalog.sqlite")
    assert (settings.found_in, settings.is_default) == ("default", True)


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "tidelog.toml").write_text(
        'store = "in-file"\ncatalog = "in-file.sqlite"\ncache_bytes = 1\nretry_attempts = 2\n'
    )
    from_file = load(tmp_path)
    assert from_file.store == str(tmp_path / "in-file")
    assert from_file.found_in == str(tmp_path / "tidelog.toml")
    assert (from_file.cache_bytes, from_file.retry_attempts) == (1, 2)
    from_environ = load(
        tmp_path, TIDELOG_STORE="s3://b", TIDELOG_CATALOG="dynamodb://t", TIDELOG_CACHE_BYTES="3"
    )
    assert (from_environ.store, from_environ.catalog) == ("s3://b", "dynamodb://t")
    assert (from_environ.cache_bytes, from_environ.retry_attempts) == (3, 2)
    from_home = load(tmp_path, TIDELOG_HOME="elsewhere", TIDELOG_CACHE_BYTES="3")
    assert from_home.store == str(tmp_path / "elsewhere" / "objects")
    assert (from_home.cache_bytes, from_home.retry_attempts) == (3, 8)
    from_flag = load(tmp_path, "here", TIDELOG_STORE="s3://b", TIDELOG_CATALOG="dynamodb://t")
    assert from_flag.store == str(tmp_path / "here" / "objects")
    assert not from_flag.is_default


def test_a_home_can_be_a_folder_with_a_file_or_the_file_itself(tmp_path: Path) -> None:
    folder = tmp_path / "team"
    folder.mkdir()
    (folder / "tidelog.toml").write_text('store = "s3://b/p"\ncatalog = "rows.sqlite"\n')
    for home in ("team", "team/tidelog.toml", str(folder)):
        settings = load(tmp_path, home)
        assert settings.store == "s3://b/p"
        assert settings.catalog == str(folder / "rows.sqlite")


@pytest.mark.parametrize(
    ("store", "catalog"),
    [
        ("file:///srv/a b/ü&=%", "sqlite:///srv/a%20b/c.sqlite"),
        ("s3://b/p?endpoint=http://127.0.0.1:9000&region=x", "dynamodb://t?region=eu-west-1"),
        ("gs://b", "cql://h1,h2:9042/ks?table=t"),
    ],
)
def test_the_config_string_goes_both_ways(tmp_path: Path, store: str, catalog: str) -> None:
    text = config_string(store, catalog)
    assert text.startswith("tidelog:?store=")
    settings = load(tmp_path, text)
    assert (settings.store, settings.catalog) == (store, catalog)
    assert load(tmp_path, TIDELOG_HOME=text).store == store


def test_settings_pickle(tmp_path: Path) -> None:
    settings = load(tmp_path)
    assert pickle.loads(pickle.dumps(settings)) == settings


@pytest.mark.parametrize(
    ("home", "message"),
    [
        ("tidelog:", "must name one store and one catalog"),
        ("tidelog:?store=s3://b", "must name one store and one catalog"),
        ("tidelog:?store=a&store=b&catalog=c", "must name one store"),
        ("tidelog:?store=a&catlog=c", "did you mean `catalog`"),
        ("tidelog:?store=a&catalog=c&secret=x", "unknown part `secret`"),
        ("tidelog:?store&catalog", "not well formed"),
        ("tidelog:store=a&catalog=b", "must name one store"),
        ("tidelog:?store=&catalog=x", "is empty"),
        ("tidelog:?store=s3://k:v@b&catalog=x", "credentials come from the environment"),
        ("tidelog:?store=s3://b?session_token=x&catalog=x", "looks like a secret"),
        ("", "is empty"),
        ("s3://bucket", "two addresses"),
        pytest.param("x" * 70_000, "File name too long: give a folder", id="too long"),
        ("tidelog:?store=%00&catalog=x", "has NUL"),
        ("tidelog:?store=file:///a%2500&catalog=x", "has NUL"),
        ("\ud800", "half of a character"),
    ],
)
def test_malformed_homes_are_refused(tmp_path: Path, home: str, message: str) -> None:
    with pytest.raises(InvalidError, match=message) as told:
        load(tmp_path, home)
    assert "k:v" not in str(told.value)


def test_all_variables_in_the_guides_are_accepted(tmp_path: Path) -> None:
    guides = Path(__file__).parents[2].joinpath("docs").rglob("*.md")
    named = {name for each in guides for name in re.findall(r"\bTIDELOG_[A-Z_]+", each.read_text())}
    settings = {f"TIDELOG_{each.name.upper()}" for each in fields(Settings)}
    secrets = named - settings - {"TIDELOG_HOME", "TIDELOG_HOMES"}  # the latter: see `tidelog.aws`
    assert {"TIDELOG_HTTP_TOKEN", "TIDELOG_SCYLLA_PASSWORD"} <= secrets
    load(tmp_path, **dict.fromkeys(secrets, "x"))


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"TIDELOG_STOR": "x"}, "did you mean `TIDELOG_STORE`"),
        ({"TIDELOG_KAFKA_PASSWORD": "x"}, "did you mean `TIDELOG_KAFKA_SASL_PASSWORD`"),
        ({"TIDELOG_WHATEVER": "x"}, "unknown variable TIDELOG_WHATEVER"),
        ({"TIDELOG_CACHE_BYTES": "lots"}, "give a whole number"),
        ({"TIDELOG_CACHE_BYTES": "-1"}, "give 0 or more"),
        ({"TIDELOG_RETRY_ATTEMPTS": "0"}, "give 1 or more"),
        ({"TIDELOG_RETRY_BASE_MS": "10", "TIDELOG_RETRY_MAX_MS": "5"}, "contradict"),
        ({"TIDELOG_STORE": "x"}, "store is given but catalog is not"),
        ({"TIDELOG_CATALOG": "x"}, "catalog is given but store is not"),
        ({"TIDELOG_HOME": "a", "TIDELOG_STORE": "x"}, "contradict"),
        ({"TIDELOG_STORE": "memory:", "TIDELOG_CATALOG": "x"}, "gone with the process"),
        ({"TIDELOG_STORE": "s3://b", "TIDELOG_CATALOG": "memory:"}, "gone with the process"),
    ],
)
def test_unknown_and_contradictory_variables_are_refused(
    tmp_path: Path, environ: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidError, match=message):
        load(tmp_path, **environ)


def test_secrets_for_backends_may_stand_in_the_environment(tmp_path: Path) -> None:
    settings = load(tmp_path, TIDELOG_CQL_USERNAME="u", TIDELOG_CQL_PASSWORD="p")
    assert settings.is_default


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('stor = "x"', "did you mean `store`"),
        ("store = 5", "give text"),
        ('cache_bytes = "many"', "give a whole number"),
        ("cache_bytes = true", "give a whole number"),
        ("store = ", "write it as TOML"),
        ("found_in = 'x'", "unknown setting `found_in`"),
        ("[section]\nstore = 'x'", "unknown setting `section`"),
        ("store = 'x'", "store is given but catalog is not"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "tidelog.toml").write_text(text)
    with pytest.raises(InvalidError, match=message):
        load(tmp_path)


def test_a_file_that_is_no_text_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="not found"):
        load(tmp_path, "gone.toml")
    (tmp_path / "tidelog.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidError, match="cannot be read"):
        load(tmp_path)
