"""A proof is clean although an archive's own mark has texts that are the same as a key."""

from __future__ import annotations

from pathlib import Path

from tests.archive.test_names import Shell
from tidelog import Event
from tidelog.erasure.proof_remedies import NOT_SWEPT, REBUILD, STAGED, SWEEP, remedy_of
from tidelog.model import layout


def test_empty_key_is_proved_erased_beside_an_archive(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    home = shell.made
    home.create_topic("t", 1)
    home.append("t", [Event(b"other", key=b"k"), Event(b"secret", key=b"", id="i")])
    home.delete("t", ["i"])
    shell("scribe", "--once", "--amended", "--grace", "0s")
    shell("sweep", "--grace", "0s")
    shell("archive", "create", "a", "--source", "topic:t", "--kind", "backup")
    shell("archive", "run", "a", "--no-spark")
    owner = next(Path(shell.home).rglob("_owner"))
    found = home.prove_erased("t", keys=[b""])
    assert [trace for trace in found.traces if trace.object.endswith("_owner")] == []
    owner.write_bytes(owner.read_bytes() + b'{"x":""}')
    found = home.prove_erased("t", keys=[b""])
    assert [trace.do for trace in found.traces if trace.object.endswith("_owner")] == [NOT_SWEPT]


def test_sweep_is_the_advice_only_for_what_a_sweep_removes() -> None:
    assert remedy_of(f"{layout.staging_of('p')}x") == STAGED
    assert remedy_of("topics/i/segments/x") == SWEEP
    assert remedy_of("archives/a/g1/_delta_log/0.json") == REBUILD
    assert remedy_of("archives/a/_iceberg/n.t/metadata/0.avro") == REBUILD
    assert remedy_of("archives/a/g1/notes.txt") == NOT_SWEPT
