"""The scribe as a function: one message of its queue is one round of ``tidelog scribe --once``.

``TIDELOG_HOME`` in the function's environment is the home's config string. A round that fails
raises, so the queue gives its message again; the message of a round that nobody got to expires.
"""

import subprocess
import sys

COMMAND = (
    *(sys.executable, "-c", "from tidelog.cli.main import run; run()"),
    *("scribe", "--once", "--json"),
)


def handle(event: dict[str, object], context: object) -> dict[str, object]:
    """Run one round, however many messages are given, and give back what it printed."""
    done = subprocess.run(COMMAND, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"tidelog scribe: exit code {done.returncode}: {done.stderr.strip()}")
    return {"said": done.stdout.splitlines()}
