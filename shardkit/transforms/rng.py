"""Random numbers for one sample, which do not depend on threads, on processes or on earlier numbers."""

import math
from collections.abc import MutableSequence, Sequence
from typing import Any, TypeVar

from shardkit.errors import ArgumentError, check_whole
from shardkit.hashing import mix64

T = TypeVar("T")

_RANGE = 1 << 64
_COUNTS = tuple(mix64(count) for count in range(16))  # more than most transforms draw; it halves the time of a draw


class Rng:
    """A small generator of random numbers for one sample: the same numbers on every machine and in every version.

    The numbers are ``mix64(key ^ mix64(0))``, ``mix64(key ^ mix64(1))``, ... (``hashing.mix64``), and the way in which
    each method uses them is equally fixed. Only ``normal`` uses the machine's logarithm and cosine, whose last bit may
    differ between two machines. It is not suitable for secrets.

    Args:
        key: Determines the numbers. Equal keys give equal numbers.

    Example:
        >>> rng = Rng(7)
        >>> rng.integers(1, 7), rng.uniform(0.8, 1.2), rng.choice(["left", "right"]), rng.permutation(4)
        (3, 0.9860769802513949, 'left', [2, 1, 0, 3])
    """

    __slots__ = ("_count", "_key")

    def __init__(self, key: int) -> None:
        self._key = key & (_RANGE - 1)
        self._count = 0

    def bits(self) -> int:
        """Return the next 64 bits, from 0 to 2**64 - 1."""
        count = self._count
        self._count = count + 1
        return mix64(self._key ^ (_COUNTS[count] if count < len(_COUNTS) else mix64(count)))

    def random(self) -> float:
        """Return a number in [0, 1), a multiple of 2**-53."""
        return (self.bits() >> 11) * 2.0**-53

    def uniform(self, low: float, high: float) -> float:
        """Return a number from ``low`` to ``high``."""
        return low + (high - low) * self.random()

    def integers(self, low: int, high: int) -> int:
        """Return a whole number in [``low``, ``high``).

        It is the upper half of the product of 64 random bits and the number of possible values, so that one value may
        occur more often than another by at most that number in 2**64.

        Raises:
            ArgumentError: There is no such number, or there are more than 2**64.
        """
        low, high = check_whole("low", low), check_whole("high", high)
        if not 0 < high - low <= _RANGE:
            raise ArgumentError(f"low is {low:,} and high is {high:,}, expected low < high, at most 2**64 apart")
        return low + (self.bits() * (high - low) >> 64)

    def normal(self, mean: float = 0.0, std: float = 1.0) -> float:
        """Return a normally distributed number, the first of the two that the Box-Muller method generates."""
        radius = math.sqrt(-2.0 * math.log(1.0 - self.random()))
        return mean + std * radius * math.cos(2.0 * math.pi * self.random())

    def choice(self, values: Sequence[T]) -> T:
        """Return one of ``values``.

        Raises:
            ArgumentError: There are none.
        """
        if not len(values):  # an array has no truth value
            raise ArgumentError("values is empty, expected something to choose from")
        return values[self.integers(0, len(values))]

    def shuffle(self, values: MutableSequence[Any]) -> None:
        """Shuffle a list in place: each element, from the last one on, is swapped with a random one up to itself."""
        for i in range(len(values) - 1, 0, -1):
            j = self.integers(0, i + 1)
            values[i], values[j] = values[j], values[i]

    def permutation(self, n: int) -> list[int]:
        """Return the numbers from 0 to ``n`` - 1 in a random order."""
        values = list(range(n))
        self.shuffle(values)
        return values
