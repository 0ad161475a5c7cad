"""Run a program that dies when the process that started it dies, even by SIGKILL.

Called as `python leash.py PARENT_PID COMMAND…`. It asks the kernel to send it SIGKILL when its
parent goes, and then becomes the command: the request and the process id outlive `exec`.

It is a program of its own, not a `preexec_fn`, because forking a test process that has threads
(Kafka's and Cassandra's clients have many) and then running Python in the child can deadlock.

The kernel watches the thread that started us, not the whole process, so servers are to be started
from a thread that lives as long as they do: pytest's main thread. Linux only.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent_pid: int, command: list[str]) -> None:
    """Tie this process to its parent, then become the command; does not return."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit(f"{command[0]}: parent {parent_pid} died before the start: nothing to serve")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
