"""Every random choice of shardkit: a keyed hash and a keyed permutation.

They are the same on every machine and in every version.

No generator of NumPy or Python is used for an order, because neither promises its numbers across versions. All
arithmetic is on unsigned 64-bit integers and wraps around. The finaliser is that of SplitMix64 (Steele, Lea, Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

import hashlib
from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

UInt64Array: TypeAlias = npt.NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_FIRST = 0x243F6A8885A308D3  # the fractional digits of pi: a nothing-up-my-sleeve number
_MASK = 0xFFFFFFFFFFFFFFFF
_ROUNDS = 4
_CHUNK = 1 << 20  # elements that are permuted at once


def mix64(x: int) -> int:
    """Return the SplitMix64 finaliser of ``x + 0x9E3779B97F4A7C15``, a bijection of the 64-bit integers.

    Example:
        >>> hex(mix64(0))
        '0xe220a8397b1dcdaf'
    """
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _MULTIPLIER_1) & _MASK
    x = ((x ^ (x >> 27)) * _MULTIPLIER_2) & _MASK
    return x ^ (x >> 31)


def mix64_array(x: UInt64Array) -> UInt64Array:
    """Return ``mix64`` of every element.

    Example:
        >>> [hex(v) for v in mix64_array(np.array([0], dtype=np.uint64))]
        ['0xe220a8397b1dcdaf']
    """
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MULTIPLIER_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MULTIPLIER_2)
    return x ^ (x >> np.uint64(31))


def derive(*parts: int) -> int:
    """Return one 64-bit key made from all parts, mixed one after the other, so that (1, 0) and (0, 1) differ.

    Example:
        >>> derive(1, 0) == derive(0, 1)
        False
    """
    key = _FIRST
    for part in parts:
        key = extend(key, part)
    return key


def extend(key: int, part: int) -> int:
    """Return a key with one more part: ``extend(derive(1, 2), 3)`` is ``derive(1, 2, 3)``.

    Example:
        >>> extend(derive(1, 2), 3) == derive(1, 2, 3)
        True
    """
    return mix64(key ^ mix64(part & _MASK))


def hash_key(key: str) -> int:
    """Return a 64-bit hash of a sample's key: the first eight bytes of BLAKE2b, little endian.

    Example:
        >>> hex(hash_key("a/0001"))
        '0xb666e45e594dc87e'
    """
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")


def hash_keys(keys: Iterable[str]) -> UInt64Array:
    """Return ``hash_key`` of every key, as an array: uint64, (number of keys,).

    Example:
        >>> hash_keys(["a/0001"])[0] == hash_key("a/0001")
        np.True_
    """
    return np.fromiter((hash_key(key) for key in keys), dtype=np.uint64)


class Permutation:
    """A keyed permutation of ``range(n)`` that needs no arrays: four Feistel rounds and cycle walking.

    Args:
        n: The number of elements, at least 0.
        key: The key, usually from ``derive``.

    Example:
        >>> sorted(Permutation(5, key=derive(7)).forward(np.arange(5)).tolist())
        [0, 1, 2, 3, 4]
    """

    def __init__(self, n: int, *, key: int) -> None:
        self.n = n
        half_bits = max(1, (max(n - 1, 1).bit_length() + 1) // 2)
        self._half = np.uint64(half_bits)
        self._mask = np.uint64((1 << half_bits) - 1)
        self._keys = [np.uint64(mix64(key ^ (r + 1))) for r in range(_ROUNDS)]

    def forward(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the place of each of ``positions``: int64, of the same shape, each in ``[0, n)``."""
        return self._walk(positions, self._rounds)

    def inverse(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the position that goes to each of ``places``: int64, of the same shape, each in ``[0, n)``.

        Example:
            >>> permutation = Permutation(5, key=derive(7))
            >>> permutation.inverse(permutation.forward(np.arange(5))).tolist()
            [0, 1, 2, 3, 4]
        """
        return self._walk(places, self._rounds_back)

    def _walk(self, x: npt.NDArray[np.int64], rounds: Callable[[UInt64Array], UInt64Array]) -> npt.NDArray[np.int64]:
        # The rounds permute range(4**k); a value outside range(n) is permuted again until it lies inside.
        y = rounds(x.astype(np.uint64))
        while (outside := y >= np.uint64(self.n)).any():
            y[outside] = rounds(y[outside])
        return y.astype(np.int64)

    def _rounds(self, x: UInt64Array) -> UInt64Array:
        left, right = x >> self._half, x & self._mask
        for key in self._keys:
            left, right = right, left ^ (mix64_array(right ^ key) & self._mask)
        return (left << self._half) | right

    def _rounds_back(self, x: UInt64Array) -> UInt64Array:
        left, right = x >> self._half, x & self._mask
        for key in reversed(self._keys):
            left, right = right ^ (mix64_array(left ^ key) & self._mask), left
        return (left << self._half) | right


def shuffled(n: int, *, key: int) -> npt.NDArray[np.int64]:
    """Return a keyed permutation of ``range(n)`` as an array: int64, (n,).

    It is computed in chunks, so it needs little memory besides the array itself.

    Example:
        >>> shuffled(4, key=derive(0)).tolist() == shuffled(4, key=derive(0)).tolist()
        True
    """
    permutation = Permutation(n, key=key)
    order = np.empty(n, dtype=np.int64)
    for start in range(0, n, _CHUNK):
        order[start : start + _CHUNK] = permutation.forward(np.arange(start, min(start + _CHUNK, n)))
    return order
