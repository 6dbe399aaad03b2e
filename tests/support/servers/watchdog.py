"""A program that outlives pytest by a moment: it ends the servers of a pytest that was killed.

Its standard input has a line for each server that starts, ``+PID``, and ends, ``-PID``. It holds descriptors of
processes, so it never ends a later process with the same number.
"""

import os
import select
import signal
import sys


def main(owner):
    """Wait until the process with the id ``owner`` has ended, for any reason, and kill what it left running."""
    owner_ended, told = os.pidfd_open(owner), sys.stdin.fileno()
    watched = {}
    # The pipe alone is not enough: its other end may stay open in processes that the owner has forked.
    while told in select.select([owner_ended, told], [], [])[0]:
        lines = os.read(told, 1 << 16)
        if not lines:
            break
        for line in lines.decode().split():
            note(watched, line[0], int(line[1:]))
    for descriptor in watched.values():
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it has ended by itself


def note(watched, sign, pid):
    """Watch a process, or stop watching it."""
    if sign == "-":
        os.close(watched.pop(pid))
        return
    try:
        watched[pid] = os.pidfd_open(pid)
    except ProcessLookupError:
        watched[pid] = os.open(os.devnull, os.O_RDONLY)


if __name__ == "__main__":
    main(int(sys.argv[1]))
