"""The scribe as a function: one message of its queue is one turn of maintenance.

``TIDELOG_HOME`` in the function's environment is the home's config string. A turn that fails
raises, so the queue gives its message again; the message of a turn that nobody got to expires.
"""

import tidelog


def handle(event: dict[str, object], context: object) -> dict[str, object]:
    """Do one turn, however many messages are given, and return what was done."""
    with tidelog.open() as home:
        turn = home.maintain()
    if turn is None:
        raise RuntimeError("tidelog: another scribe of this home is at work: wait for its turn")
    if not turn.succeeded:
        errors = [each.error for each in turn.troubles]
        errors += [each.error for each in turn.swept.refused] if turn.swept else []
        why = "; ".join(map(str, errors)) or "the time was over: the next turn goes on"
        raise RuntimeError(f"tidelog: the turn did not succeed: {why}")
    swept = turn.swept.objects_deleted if turn.swept else 0
    return {
        "topics": turn.topics,
        "journals": turn.compiled.journals,
        "erased": turn.erased,
        "objects_deleted": swept,
    }
