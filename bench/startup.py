"""How long a start takes, in CPU time: imports and commands, beside ``import pyarrow``.

CPU time, because a start that waits for a busy machine is not slower code. The bytecode is there,
as after an install.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from functools import partial

from bench.measure import scratch
from bench.rates import Rate, contest

IMPORTS = {
    "python, nothing imported": "pass",
    "import pyarrow": "import pyarrow",
    "import pyarrow.compute": "import pyarrow.compute",
    "import tidelog": "import tidelog",
    "import tidelog, and use Home": "import tidelog; tidelog.Home",
}
COMMANDS = {
    "tidelog --help": ["--help"],
    "tidelog topic list": ["topic", "list"],
}
LIMITS = {  # milliseconds
    "import tidelog": 150,
    "tidelog --help": 300,
}
ROUNDS = 9


def run() -> list[Rate]:
    """Returns milliseconds of CPU time for each start."""
    entry = "from tidelog.cli.main import run; run()"
    with scratch() as folder:
        starts = {name: ["-c", code] for name, code in IMPORTS.items()}
        starts |= {name: ["-c", entry, *words] for name, words in COMMANDS.items()}
        rates = contest(
            {name: partial(_cpu_ms, words, folder) for name, words in starts.items()}, ROUNDS
        )
    for rate in rates.values():
        rate.unit = "ms of CPU"
        rate.limit = LIMITS.get(rate.what)
    peer = rates["import pyarrow.compute"].median
    home = rates["import tidelog, and use Home"]
    home.note = f"{home.median - peer:.0f} more than pyarrow.compute, which it needs"
    return list(rates.values())


def _cpu_ms(words: list[str], folder: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1_000 * (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
