"""The scribe as a function: a message of its queue is one turn of maintenance of one home.

A message ``{}`` is for the home of the settings. ``{"replica": "NAME"}`` is for the home that
``TIDELOG_HOMES`` gives this name: a JSON object of config strings by name. So one function serves
several homes, and a schedule with a message for each of them decides how often. A turn that fails
raises, so the queue gives its message again; the message of a turn that nobody got to expires.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from tidelog.aws.consumer import LambdaHandler
from tidelog.errors import InvalidError, UnavailableError
from tidelog.home import World, open_home
from tidelog.model.decoding import decode_json
from tidelog.opening import real_world

__all__ = ["scribe_handler"]

_HOMES = "TIDELOG_HOMES"  # no setting: those of a home do not know it


class _Message(msgspec.Struct):
    replica: str | None = None


def scribe_handler(world: World | None = None) -> LambdaHandler:
    """Returns a handler for Lambda that does a turn for each message that it is called with.

    Called with anything but messages of SQS, it does one turn of the home of the settings.
    """

    def handler(event: Mapping[str, Any], context: Any) -> dict[str, Any]:
        here = world or real_world()
        records = event.get("Records")
        bodies = [each.get("body") for each in records] if isinstance(records, list) else ["{}"]
        others = {name: text for name, text in here.environ.items() if name != _HOMES}
        turns = [
            _turn(_home_of(str(body), here.environ), replace(here, environ=others))
            for body in bodies
        ]
        return turns[0] if len(turns) == 1 else {"turns": turns}

    return handler


def _home_of(body: str, environ: Mapping[str, str]) -> str | None:
    """Returns the config string that a message is for; None for the home of the settings."""
    try:
        replica = decode_json(body, _Message).replica
        if replica is None:
            return None
        homes = decode_json(environ.get(_HOMES, "{}"), dict[str, str])
    except msgspec.MsgspecError as exc:
        raise InvalidError(
            f"scribe function: a message or TIDELOG_HOMES: {exc}: give the message "
            '{"replica": NAME}, and in TIDELOG_HOMES a JSON object of config strings'
        ) from exc
    if replica not in homes:
        raise InvalidError(
            f"scribe function: TIDELOG_HOMES has no home `{replica[:80]}`: give one of "
            f"{', '.join(sorted(homes)) or 'none so far'}"
        )
    return homes[replica]


def _turn(home: str | None, world: World) -> dict[str, Any]:
    with open_home(home, world=world) as opened:
        turn = opened.maintain()
    if turn is None:
        raise UnavailableError("another scribe of this home is at work: wait for its turn")
    if not turn.succeeded:
        errors = [each.error for each in turn.troubles]
        errors += [each.error for each in turn.swept.refused] if turn.swept else []
        why = "; ".join(map(str, errors)) or "the time was over: the next turn goes on"
        raise UnavailableError(f"the turn did not succeed: {why}")
    return {
        "topics": turn.topics,
        "journals": turn.compiled.journals,
        "erased": turn.erased,
        "objects_deleted": turn.swept.objects_deleted if turn.swept else 0,
    }
