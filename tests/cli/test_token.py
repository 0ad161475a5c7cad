"""``tidelog token``: what is shown once, what is listed, and what is refused."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from tests.support.cli_run import Run


def test_a_token_is_shown_once_listed_and_revoked(tidelog: Run) -> None:
    made = tidelog("token", "create", "--append", "--read", "--label", "web", "--json").rows()[0]
    assert made["scopes"] == ["append", "read"]
    assert made["token"].startswith(f"tidelog_{made['id']}_")
    assert b"It is the first" not in tidelog("token", "create", "--read").out
    listed = tidelog("token", "list", "--json").rows()
    assert [(row["label"], row["scopes"]) for row in listed] == [
        ("web", ["append", "read"]),
        (None, ["read"]),
    ]
    shown = tidelog("token", "list").out
    assert b"append, read" in shown
    assert made["token"].encode() not in shown
    assert tidelog("token", "revoke", made["id"], "--json").rows() == [
        {"id": made["id"], "revoked": True}
    ]
    again = tidelog("token", "revoke", made["id"])
    assert again.code == 1
    assert "not found" in again.err
    last = tidelog("token", "revoke", listed[1]["id"])
    assert b"the last" in last.out


def test_the_first_token_closes_servers_and_says_so(tidelog: Run) -> None:
    assert (
        b"running servers require tokens within 6 seconds"
        in tidelog("token", "create", "--read").out
    )


@pytest.mark.parametrize("given", [(), ("--expires", "90d")])
def test_a_token_that_is_rotated_twice_keeps_its_lifetime(
    tidelog: Run, given: tuple[str, ...]
) -> None:
    old = tidelog("token", "create", "--read", *given, "--json").rows()[0]
    for overlap in ("1h", "2h"):
        new = tidelog("token", "rotate", old["id"], "--overlap", overlap, "--json").rows()[0]
        assert days_of(new) == (90 if given else None)
    assert days_of(new) == days_of(old)
    rotated = next(
        row for row in tidelog("token", "list", "--json").rows() if row["id"] == old["id"]
    )
    assert days_of(rotated) == 0, "the first overlap is sooner"


def days_of(row: dict[str, Any]) -> int | None:
    """The lifetime that a token's row shows."""
    if row["expires"] is None:
        return None
    lasts = datetime.fromisoformat(row["expires"]) - datetime.fromisoformat(row["created"])
    return round(lasts.total_seconds() / 86_400)


def test_bad_tokens_are_refused(tidelog: Run) -> None:
    nothing = tidelog("token", "create")
    assert nothing.code == 2
    assert "--append, --read" in nothing.err
    assert tidelog("token", "create", "--read", "--label", "a\nb").code == 2
    assert tidelog("token", "create", "--read", "--label", "x" * 201).code == 2
    assert tidelog("token", "revoke", "../x").code == 2
    assert tidelog("token", "list").code == 0


def test_serve_refuses_what_it_cannot_do(tidelog: Run) -> None:
    elsewhere = tidelog("serve", "--host", "0.0.0.0", "--port", "0")
    assert elsewhere.code == 2
    assert "tidelog token create" in elsewhere.err
    assert tidelog("serve", "--port", "70000").code == 2
    assert tidelog("serve", "--rate", "-1").code == 2
    assert tidelog("serve", "--topic-default", "../x").code == 2
    assert tidelog("serve", "--body-max", str(1 << 40)).code == 2


def test_token_for_a_topic_that_does_not_exist_is_warned_of(tidelog: Run) -> None:
    assert "There are no tokens yet" in tidelog("token", "list").err
    tidelog("topic", "create", "orders")
    done = tidelog("token", "create", "--append", "ordrs", "--read", "ord*", "--admin", "--json")
    assert done.code == 0
    assert done.err == (
        "warning: no topic matches `ordrs` (did you mean `orders`?): the token cannot append "
        "until there is one\n"
    )
