"""When a proof is clean: what a command's exit code and a caller's check go by."""

from __future__ import annotations

import pytest

from tidelog import Proof
from tidelog.erasure.delete import DeleteResult
from tidelog.erasure.proof import Trace

NOT_CLEAN = {
    "something is left": Proof("t", traces=[Trace("object", "what", "do")]),
    "nothing was deleted": Proof("t", known=False),
    "a file could not be searched": Proof("t", deleted=DeleteResult(1, unseen=("a.bin",))),
}


@pytest.mark.parametrize("why", NOT_CLEAN)
def test_proof_is_not_clean_if(why: str) -> None:
    assert Proof("t", deleted=DeleteResult(1)).is_clean
    assert not NOT_CLEAN[why].is_clean
