"""The plan of the samples in each shard and their order, made from sizes alone before anything is written."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardkit.errors import ArgumentError
from shardkit.hashing import UInt64Array, derive, hash_key, mix64_array, shuffled
from shardkit.storage.safe_names import find_unsafe

_SPLIT_DOMAIN = derive(0x5350_4C49_54)  # "SPLIT": independent of every seed
_SHUFFLE_DOMAIN = 0x5041_434B  # "PACK"

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One dataset's samples in the order in which they are written, and the beginnings of its shards.

    Attributes:
        order: Positions in the source: int64, (samples,).
        starts: The index in ``order`` where each shard begins, and finally its length: int64, (shards + 1,).
    """

    order: Positions
    starts: Positions

    def __len__(self) -> int:
        return len(self.starts) - 1

    def positions(self, shard: int) -> Positions:
        """Return the positions in the source of one shard's samples, in order."""
        return self.order[self.starts[shard] : self.starts[shard + 1]]


def plan_shards(
    positions: Positions,
    sizes: npt.NDArray[np.int64],
    *,
    capacity: int,
    shard_samples: int | None,
    seed: int | None,
) -> ShardPlan:
    """Return the plan of one dataset.

    Args:
        positions: The samples' positions in the source.
        sizes: The bytes in a tar of every sample of the source, by position.
        capacity: The most bytes of samples that a shard holds; no sample is larger.
        shard_samples: The most samples that a shard holds, or None.
        seed: Decides the order; None keeps the source's order.

    Example:
        >>> sizes = np.full(10, 100)
        >>> plan_shards(np.arange(10), sizes, capacity=400, shard_samples=None, seed=None).starts.tolist()
        [0, 4, 7, 10]
    """
    order = positions
    if seed is not None:
        order = positions[shuffled(len(positions), key=derive(_SHUFFLE_DOMAIN, seed))]
    return ShardPlan(order, cut(sizes[order], capacity=capacity, shard_samples=shard_samples))


def cut(sizes: npt.NDArray[np.int64], *, capacity: int, shard_samples: int | None) -> Positions:
    """Cut a sequence of samples into the fewest shards that hold them, as equal in size as possible.

    The cuts are at equal shares, moved only as far as the capacity of the shards before and after requires. So no
    shard is smaller than the mean by more than one sample, unless ``shard_samples`` limits it.

    Args:
        sizes: The samples' sizes, in order.
        capacity: The most bytes that a shard holds; no sample is larger.
        shard_samples: The most samples that a shard holds, or None.

    Returns:
        The index where each shard begins, and finally the number of samples: int64, (shards + 1,).

    Example:
        >>> cut(np.array([5, 5, 5, 1]), capacity=11, shard_samples=None).tolist()
        [0, 2, 4]
    """
    samples = len(sizes)
    most = shard_samples or samples or 1
    ends = np.concatenate([[0], np.cumsum(sizes)])

    def last_end(start: int) -> int:
        """Return the latest end of a shard that begins at ``start``."""
        return min(int(np.searchsorted(ends, ends[start] + capacity, side="right")) - 1, start + most)

    def first_start(end: int) -> int:
        """Return the earliest beginning of a shard that ends at ``end``."""
        return max(int(np.searchsorted(ends, ends[end] - capacity, side="left")), end - most)

    earliest = [samples]  # the earliest beginning of the last k shards, k = 0, 1, ...
    while earliest[-1] > 0:
        earliest.append(first_start(earliest[-1]))
    shards = len(earliest) - 1
    starts = [0] if shards else []
    for shard in range(1, shards):
        if shard_samples is not None and shards == -(-samples // most):  # the limit is the number of samples
            near = samples * shard // shards
        else:
            near = int(np.searchsorted(ends, int(ends[samples]) * shard // shards))
        starts.append(min(max(near, earliest[shards - shard]), last_end(starts[-1])))
    return np.array([*starts, samples], dtype=np.int64)


def check_splits(splits: Mapping[str, float] | None) -> dict[str, float] | None:
    """Return the shares of the splits, or None if there are none.

    Raises:
        ArgumentError: The shares are not positive or do not add up to 1, or a split's name is not a valid folder name.

    Example:
        >>> check_splits({"train": 0.9, "val": 0.1})
        {'train': 0.9, 'val': 0.1}
    """
    if splits is None:
        return None
    shares = list(splits.values()) if isinstance(splits, Mapping) else []
    if not shares or not all(map(_is_share, shares)) or not abs(sum(shares) - 1) < 1e-9:
        raise ArgumentError(
            "splits: expected positive shares that add up to 1, such as 0.9 for train and 0.1 for val, got "
            f"{splits!r:.200}"
        )
    for name in splits:
        if not isinstance(name, str) or not name or name[0] in ".-" or set(name) & set("/\\:\0"):
            raise ArgumentError(f"splits: {name!r} cannot be the name of a folder and its shards; write 'train'")
    if unsafe := find_unsafe(splits):
        raise ArgumentError(f"splits: {unsafe[0]!r} {unsafe[1]}; call it something else")
    return {name: float(share) for name, share in splits.items()}


def _is_share(share: object) -> bool:
    return isinstance(share, int | float | np.number) and bool(share > 0)


def _given_by(split_by: Callable[[str], str], key: str) -> str:
    given: object = split_by(key)
    if not isinstance(given, str) and not hasattr(given, "__index__"):
        raise ArgumentError(f"split_by returns {given!r} for the key {key!r}, expected text or a number", key=key)
    return str(given)


def assign_splits(
    hashes: UInt64Array,
    splits: Mapping[str, float],
    split_by: Callable[[str], str] | None,
    keys: Callable[[], Iterable[str]],
) -> dict[str, Positions]:
    """Return the positions of each split's samples, by a hash of their keys that does not depend on a seed.

    So a sample stays in its split when the data is shuffled again or grows.

    Args:
        hashes: ``hash_key`` of every key: uint64, (samples,).
        splits: The share of each split, as ``check_splits`` returns them.
        split_by: Returns for a key the value that is hashed instead, for example the patient of an image, so that
            related samples stay together.
        keys: Returns all keys; called only with ``split_by``.

    Raises:
        ArgumentError: ``split_by`` returns neither text nor a whole number.

    Example:
        >>> from shardkit.hashing import hash_keys
        >>> hashes = hash_keys(str(i) for i in range(1000))
        >>> {name: len(p) for name, p in assign_splits(hashes, {"train": 0.9, "val": 0.1}, None, list).items()}
        {'train': 883, 'val': 117}
    """
    if split_by is not None:
        given = (_given_by(split_by, key) for key in keys())
        hashes = np.fromiter(map(hash_key, given), dtype=np.uint64, count=len(hashes))
    uniform = (mix64_array(hashes ^ np.uint64(_SPLIT_DOMAIN)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    bounds = np.cumsum(list(splits.values()))[:-1]
    number = np.searchsorted(bounds, uniform, side="right")
    return {name: np.flatnonzero(number == i) for i, name in enumerate(splits)}
