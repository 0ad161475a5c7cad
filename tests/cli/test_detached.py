"""In an adopted copy, no command advises to delete files that belong to the original."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.cli_run import Done, Run


def test_advice_about_an_archive_of_the_original_can_be_followed(
    tidelog: Run, tmp_path: Path
) -> None:
    def run(home: str, *args: str) -> Done:
        return tidelog("--home", str(tmp_path / home), *args)

    assert run("h", "init").code == 0
    run("h", "topic", "create", "t")
    create = ("archive", "create", "out", "--source", "topic:t")
    assert run("h", *create, "--to", f"file:{tmp_path}/lake/out").code == 0
    shutil.copytree(tmp_path / "h", tmp_path / "copy")
    assert run("copy", "home", "adopt").code == 0
    ended = run("copy", "archive", "delete", "out", "--yes")
    assert ended.code == 0, ended.err
    again = run("copy", *create)
    assert again.code == 1
    for said in (ended, again):
        text = said.out.decode() + said.err
        assert "--delete-files" not in text
        assert f"{tmp_path}/lake/out" in text
