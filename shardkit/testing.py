"""For the tests of whoever trains: that a loader resumes anywhere."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from shardkit.hashing import Permutation, derive

if TYPE_CHECKING:
    import torch


class ResumableLoader(Protocol):
    """What is iterated over, an epoch at a time, and says where it is: a ``ShardLoader``, a ``StatefulDataLoader``."""

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, or go on in the one that was loaded."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Return where it is."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Let the next ``iter()`` go on there."""
        ...


def assert_resumes_anywhere(
    make_loader: Callable[[], ResumableLoader],
    *,
    resume_with: Callable[[], ResumableLoader] | None = None,
    epochs: int = 2,
    max_stops: int = 64,
) -> None:
    """Check that a loader that is stopped between any two batches, and resumed in a new one, goes on exactly there.

    An undisturbed loader says what is expected. Then others are stopped after 0, 1, 2, ... batches, also after the last
    one before the epoch's end is noticed and after that, and left; each state goes through JSON into a new loader,
    which must give what remains of that epoch and all of the epochs after it, the same values in the same order.

    Args:
        make_loader: Returns a new loader, always of the same kind.
        resume_with: Returns the loaders that go on, if they are to be of another kind: with other workers, or another
            batch size. Where batches may be cut elsewhere, the samples' keys (``__key__``) are compared, in order.
        epochs: How many epochs are gone through, at least 1.
        max_stops: How many places to stop at are tried. Where there are more, some are, spread by a fixed hash, the
            first and the last always.

    Raises:
        AssertionError: It does not. The message says where it was stopped and what came instead.

    Example:
        >>> import tempfile, shardkit
        >>> folder = tempfile.mkdtemp() + "/digits"
        >>> _ = shardkit.pack(({"__key__": f"{i}", "cls": i} for i in range(10)), folder, progress=False)
        >>> dataset = shardkit.ShardDataset(folder)
        >>> assert_resumes_anywhere(lambda: shardkit.ShardLoader(dataset, batch_size=3))
    """
    loader = make_loader()
    expected = [list(loader) for _ in range(epochs)]
    again = make_loader()
    for epoch, batches in enumerate(expected):
        _compare(list(again), batches, f"two new loaders do not agree: epoch {epoch}", by_key=False)
    stops = [(epoch, count) for epoch in range(epochs) for count in range(len(expected[epoch]) + 2)]
    for epoch, count in _some(stops, max_stops):
        stopped = make_loader()
        for _ in range(epoch):
            for _ in stopped:
                pass
        iterator = iter(stopped)
        taken = list(islice(iterator, count))  # one more than there are batches: the end is noticed
        where = f"stopped after {len(taken)} batches of epoch {epoch}"
        if count > len(expected[epoch]):
            where += ", at its end"
        state = stopped.state_dict()
        copy = json.loads(json.dumps(state))
        if copy != state:
            raise AssertionError(f"{where}: JSON does not keep the state {state!r}; keep it to text, numbers, lists")
        _compare(
            list(iterator), expected[epoch][count:], f"{where}, and went on: state_dict() disturbed it", by_key=False
        )
        resumed = (resume_with or make_loader)()
        resumed.load_state_dict(copy)
        rest = [expected[epoch][count:], *expected[epoch + 1 :]]
        if count > len(expected[epoch]):
            rest = rest[1:]
        for later, batches in enumerate(rest):
            what = "the rest" if later == 0 and count <= len(expected[epoch]) else "a later epoch"
            _compare(list(resumed), batches, f"{where}, and resumed: {what}", by_key=resume_with is not None)


def _some(stops: Sequence[tuple[int, int]], at_most: int) -> Iterable[tuple[int, int]]:
    if len(stops) <= at_most:
        return stops
    order = Permutation(len(stops), key=derive(at_most)).forward(np.arange(at_most)).tolist()
    return [stops[i] for i in sorted({0, len(stops) - 1, *order})]


def _compare(found: list[Any], expected: list[Any], where: str, *, by_key: bool) -> None:
    if by_key:
        found, expected = _keys(found), _keys(expected)
    unit = "samples" if by_key else "batches"
    for number, (one, other) in enumerate(zip(found, expected, strict=False)):
        if not _equal(one, other):
            raise AssertionError(f"{where}: of its {unit}, number {number} is {_short(one)}, expected {_short(other)}")
    if len(found) != len(expected):
        raise AssertionError(f"{where}: {len(found)} {unit} came, expected {len(expected)}")


def _keys(batches: Iterable[Any]) -> list[Any]:
    return [key for batch in batches for key in batch["__key__"]]


def _equal(one: Any, other: Any) -> bool:
    """Compare values of batches, tensors and arrays among them, to the last bit; NaN equals itself."""
    import torch

    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, torch.Tensor):
        return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(_bits(one), _bits(other))
    if isinstance(one, np.ndarray):
        return (one.shape, one.dtype) == (other.shape, other.dtype) and one.tobytes() == other.tobytes()
    return bool(one == other) or repr(one) == repr(other) == "nan"


def _bits(tensor: "torch.Tensor") -> "torch.Tensor":
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8)


def _short(value: Any) -> str:
    if isinstance(value, Mapping) and "__key__" in value:
        value = value["__key__"]
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
