"""A program that outlives pytest by a moment: it ends the servers of a pytest that was killed.

On its standard input it is told of each server that starts, ``+PID``, and ends, ``-PID``. It holds descriptors of
processes, so it never ends another one that has got the same number since.
"""

import os
import select
import signal
import sys


def main(owner):
    """Kill what the process with the id ``owner`` has left running, once that has ended, whatever way."""
    owner_ended, told = os.pidfd_open(owner), sys.stdin.fileno()
    watched = {}
    # The pipe alone would not do: its other end may live on in processes that the owner has forked.
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
    """Watch a process, or do so no longer."""
    if sign == "-":
        os.close(watched.pop(pid))
        return
    try:
        watched[pid] = os.pidfd_open(pid)
    except ProcessLookupError:
        watched[pid] = os.open(os.devnull, os.O_RDONLY)


if __name__ == "__main__":
    main(int(sys.argv[1]))
