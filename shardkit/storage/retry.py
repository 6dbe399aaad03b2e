"""Trying again: with random pauses that grow, a limited number of times, within a time limit."""

import logging
import random
import time
from typing import NoReturn

from shardkit.errors import StorageError, hide_secrets

MAX_TRIES = 12
"""The number of consecutive failures after which to give up: over half a minute, enough for a server to restart."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # seconds, at most
_LONGEST_ASKED_PAUSE = 60.0  # if the server asks for it
_SLOWEST = 100_000  # bytes a second

_logger = logging.getLogger("shardkit")
_sleep = time.sleep


class Attempts:
    """Counts and limits the tries of one operation.

    Args:
        url: The file or folder concerned, for messages.
        seconds: How long it may take, plus one second for each 100 kB received.

    Attributes:
        failures: How often it failed.
        renewals: How often the request was changed, for example because credentials had expired.
        wrong_answers: How often an answer contained something other than what was requested.
    """

    __slots__ = ("_began", "_received", "_seconds", "_tries", "_url", "failures", "renewals", "wrong_answers")

    def __init__(self, url: str, seconds: float) -> None:
        self._url = url
        self._seconds = seconds
        self._began = time.monotonic()
        self._received = 0
        self._tries = 0  # since the last byte
        self.failures = 0
        self.renewals = 0
        self.wrong_answers = 0

    @property
    def seconds_left(self) -> float:
        """The remaining time; negative if the operation has taken too long."""
        return self._began + self._seconds + self._received / _SLOWEST - time.monotonic()

    def receive(self, received: int, *, is_wanted: bool) -> None:
        """Count received bytes; bytes that are only skipped do not count as progress."""
        self._received += received
        if is_wanted:
            self._tries = 0

    def check_time(self, doing: str) -> None:
        """Raise StorageError if the time has run out, even if bytes still arrive."""
        if self.seconds_left <= 0:
            self._give_up(doing, f"the data arrives too slowly, {self._received:,} bytes so far")

    def fail(self, doing: str, problem: str, *, pause: float | None = None, is_final: bool = False) -> None:
        """Wait before the next try, or raise if there is none.

        Args:
            doing: What cannot be done, in the words of the message.
            problem: The reason.
            pause: How long the server asks to wait. It never shortens our own pause, so that a server that asks for
                0 s, or whose clock is behind, does not get all requests at once.
            is_final: Whether another try would not help.

        Raises:
            StorageError: There have been too many tries, or the time has run out.
        """
        self._tries += 1
        self.failures += 1
        if is_final or self._tries >= MAX_TRIES or self.seconds_left <= 0:
            self._give_up(doing, problem)
        own = random.uniform(0, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (self._tries - 1)))  # noqa: S311
        pause = max(0.0, min(max(pause or 0.0, own), _LONGEST_ASKED_PAUSE, self.seconds_left))
        _logger.info("%s %s: %s; trying again in %.1f s", hide_secrets(self._url), doing, problem, pause)
        _sleep(pause)

    def _give_up(self, doing: str, problem: str) -> NoReturn:
        took = time.monotonic() - self._began
        tried = f"tried {self.failures} times in {took:.0f} s" if self.failures > 1 else f"gave up after {took:.0f} s"
        raise StorageError(
            f"{self._url}: {doing}, because {problem} ({tried}); check the URL, the network and the server, then do it "
            "again",
            url=self._url,
        )
