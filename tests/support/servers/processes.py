"""Programs that tests start: each ends with pytest, however pytest ends, and has a port that no other program takes."""

import os
import shutil
import socket
import subprocess
import sys
from multiprocessing.connection import wait
from pathlib import Path

ROOT = Path(__file__).parents[3]
READY_SECONDS = 60  # far more than any server takes, also on a busy machine


class Processes:
    """Starts programs, and ends them cleanly in ``close``; a watchdog ends them if pytest was killed.

    It is thread-safe. A process that was forked from this one must not use it.
    """

    def __init__(self):
        self.running = []
        self.watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", Path(__file__).with_name("watchdog.py"), str(os.getpid())],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C ends pytest, and pytest ends its servers
        )

    def start(self, command, log):
        """Start a program and return it; its output goes to the end of ``log``. Python's settings are not inherited."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment["PATH"] += ":/usr/sbin"  # nginx is there, and not every user has that folder on PATH
        if not shutil.which(command[0], path=environment["PATH"]):
            message = f"{command[0]} is not installed; scripts/test installs what tests need"
            raise RuntimeError(message)
        with Path(log).open("ab") as file:
            process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                cwd=ROOT,  # so that the tests' own programs find tests.support.servers
                start_new_session=True,
            )
        self._tell(f"+{process.pid}")
        self.running.append(process)
        return process

    def run(self, command, log):
        """Run a program to its end; fail with its output unless it succeeds."""
        process = self.start(command, log)
        process.wait(READY_SECONDS)
        self.kill(process)
        if process.returncode:
            fail(process, log)

    def kill(self, process):
        """End a program like ``kill -9``, and wait until it has ended."""
        if process in self.running:
            self.running.remove(process)
            process.kill()
            self._tell(f"-{process.pid}")
            process.wait()

    def close(self):
        """End all programs, the watchdog last."""
        for process in reversed(self.running.copy()):
            self.kill(process)
        self.watchdog.stdin.close()
        self.watchdog.wait()

    def _tell(self, line):
        os.write(self.watchdog.stdin.fileno(), f"{line}\n".encode())


class Port:
    """A free port of this machine's loopback network, reserved for a server that may stop and start.

    A socket that is bound and does not listen reserves it. The system gives the port to no other program, a server that
    allows address reuse (they all do) can listen there, and while none listens, connections are refused.
    """

    def __init__(self):
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(("127.0.0.1", 0))
        self.number = self.socket.getsockname()[1]

    def answers(self):
        """Return whether a server listens on the port."""
        try:
            socket.create_connection(("127.0.0.1", self.number), timeout=READY_SECONDS).close()
        except ConnectionRefusedError:
            return False
        return True

    def close(self):
        """Release the port."""
        self.socket.close()


def wait_until(is_ready, process, log):
    """Wait until a started server is ready; fail with its output if it ends or takes too long."""
    ended = os.pidfd_open(process.pid)
    try:
        for _ in range(READY_SECONDS * 100):
            if is_ready():
                return
            if wait([ended], 0.01):  # select does not support descriptors above 1023
                break
    finally:
        os.close(ended)
    fail(process, log)


def fail(process, log):
    """Raise an error with a program's output."""
    status = process.poll()
    state = "is not ready" if status is None else f"has ended with {status}"
    said = Path(log).read_text(errors="replace")[-4000:]
    message = f"{' '.join(process.args)} {state}; it said:\n{said}"
    raise RuntimeError(message)
