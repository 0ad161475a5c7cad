"""The two substrates: catalog commits and store puts and gets, on every backend.

The local ones run beside their raw cost in the same run: a bare SQLite transaction with the same
rows, and the same fsyncs on bare files.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from bench.measure import Result, beside, measure, scratch
from tests.servers import cassandra, dynamodb, s3
from tests.support.homes import a_catalog, a_store
from tidelog.catalog.base import Catalog, Put
from tidelog.clock import RandomIds
from tidelog.store.base import Store

GOAL = 0.5
SMALL, LARGE = b"x" * 4096, b"x" * (1 << 20)
ids = RandomIds()


def run() -> list[Result]:
    """All cases, the local ones first."""
    results: list[Result] = []
    with scratch() as folder:
        results += local_catalog(Path(folder))
        results += local_store(Path(folder))
    results += remote_catalogs()
    with s3_store() as store:
        results += store_cases("s3 (versitygw)", store)
    return results


def commit(catalog: Catalog, partition: str) -> None:
    """What an append commits: the head by its version, and three rows beside it."""
    head = catalog.get(partition, "head")
    catalog.write(
        partition,
        Put("head", b"h" * 100, expect=head.version if head else None),
        Put("run/1", b"r" * 200),
        Put("slot/1", b"s" * 50),
        Put("producer/1", b"p" * 100),
        write_id=ids.new(),
    )


def local_catalog(folder: Path) -> list[Result]:
    memory = a_catalog("memory:")
    results = [measure("catalog commit", "memory", lambda _: commit(memory, "p"), seconds=1)]
    catalog = a_catalog(f"sqlite://{folder}/catalog.sqlite", create=True)
    raw = sqlite3.connect(folder / "raw.sqlite", isolation_level=None)
    raw.execute("PRAGMA journal_mode=WAL")
    raw.execute("PRAGMA synchronous=FULL")
    raw.execute("CREATE TABLE rows (k TEXT PRIMARY KEY, v BLOB)")

    def bare(_: int) -> None:
        raw.execute("BEGIN IMMEDIATE")
        for key, size in (("head", 100), ("run/1", 200), ("slot/1", 50), ("producer/1", 100)):
            raw.execute("INSERT OR REPLACE INTO rows VALUES (?, ?)", (key, b"x" * size))
        raw.execute("COMMIT")

    results += beside(
        "catalog commit",
        "sqlite",
        lambda _: commit(catalog, "p"),
        ("bare SQLite transaction", bare),
        goal=GOAL,
    )
    results.append(measure("catalog get", "sqlite", lambda _: catalog.get("p", "head"), seconds=1))
    raw.close()
    catalog.close()
    return results


def local_store(folder: Path) -> list[Result]:
    memory = a_store("memory:")
    results = [
        measure("store put 4 KiB", "memory", lambda _: memory.put(ids.new(), SMALL), seconds=1)
    ]
    store = a_store(str(folder / "objects"))
    store.put("warm/up", b"")
    raw = folder / "raw"
    (raw / "tmp").mkdir(parents=True)
    (raw / "warm").mkdir()

    def bare(data: bytes) -> None:
        """The same system calls that make a file durable, and nothing else."""
        name = ids.new()
        descriptor = os.open(raw / "tmp" / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        os.write(descriptor, data)
        os.fsync(descriptor)
        os.close(descriptor)
        os.link(raw / "tmp" / name, raw / "warm" / name)
        folder_descriptor = os.open(raw / "warm", os.O_RDONLY)
        os.fsync(folder_descriptor)
        os.close(folder_descriptor)
        os.unlink(raw / "tmp" / name)

    for size, data in (("4 KiB", SMALL), ("1 MiB", LARGE)):
        results += beside(
            f"store put {size}",
            "local",
            lambda _, data=data: store.put(f"warm/{ids.new()}", data),  # type: ignore[misc]
            ("the same fsyncs, bare", lambda _, data=data: bare(data)),  # type: ignore[misc]
            goal=GOAL,
            slices=6,
        )
    results.append(gets("local", store))
    return results


def remote_catalogs() -> list[Result]:
    results = []
    for name, opened in (
        ("dynamodb (local)", dynamodb_catalog()),
        ("cql (cassandra)", cql_catalog()),
    ):
        with opened as catalog:
            results.append(measure("catalog commit", name, lambda _: commit(catalog, "p")))
            results.append(
                measure(
                    "catalog put, one row",
                    name,
                    lambda n: catalog.write("q", Put(f"r{n}", b"x"), write_id=ids.new()),
                )
            )
            results.append(measure("catalog get", name, lambda _: catalog.get("p", "head")))
    return results


@contextlib.contextmanager
def dynamodb_catalog() -> Iterator[Catalog]:
    keys = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local"}
    os.environ.update(keys)
    with dynamodb.running() as server:
        url = f"dynamodb://bench?endpoint={server.endpoint}&region={server.region}"
        catalog = a_catalog(url, create=True)
        yield catalog
        catalog.close()


@contextlib.contextmanager
def cql_catalog() -> Iterator[Catalog]:
    with cassandra.running() as server:
        catalog = a_catalog(f"cql://{server.host}:{server.port}/bench", create=True)
        yield catalog
        catalog.close()


@contextlib.contextmanager
def s3_store() -> Iterator[Store]:
    with s3.running() as server:
        os.environ["AWS_ACCESS_KEY_ID"] = server.access_key
        os.environ["AWS_SECRET_ACCESS_KEY"] = server.secret_key
        bucket = server.fresh_bucket()
        yield a_store(f"s3://{bucket}?endpoint={server.endpoint}&region={server.region}")


def store_cases(name: str, store: Store) -> list[Result]:
    return [
        measure("store put 4 KiB", name, lambda _: store.put(f"warm/{ids.new()}", SMALL)),
        measure("store put 1 MiB", name, lambda _: store.put(f"warm/{ids.new()}", LARGE)),
        gets(name, store),
    ]


def gets(name: str, store: Store) -> Result:
    keys = [f"get/{number}" for number in range(100)]
    for key in keys:
        store.put(key, SMALL)
    return measure("store get 4 KiB", name, lambda n: store.get(keys[n % 100]), seconds=1)
