"""For your own tests: a check that a loader resumes anywhere."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from shardkit.errors import ArgumentError, check_whole
from shardkit.hashing import Permutation, derive
from shardkit.sample import KEY

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_END = object()


class ResumableLoader(Protocol):
    """A loader with a state, whose every ``iter()`` is an epoch: ``ShardLoader``, ``StatefulDataLoader``."""

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, or resume the epoch of a loaded state."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Return the loader's position."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Let the next ``iter()`` resume at that position."""
        ...


def assert_resumes_anywhere(
    make_loader: Callable[[], ResumableLoader],
    *,
    resume_with: Callable[[], ResumableLoader] | None = None,
    epochs: int = 2,
    max_stops: int = 64,
) -> None:
    """Check that a new loader, given the state of one that was stopped between any two batches, resumes exactly there.

    A loader that is not stopped gives the expected batches. Then other loaders are stopped: before they begin; after 0,
    1, 2, ... batches; after the last batch, both before and after the loader reaches the end of the epoch. Each state
    goes through JSON into a new loader, which must give the rest of that epoch and all later epochs: the same values in
    the same order. Resumed loaders are stopped again after their first batch, and resumed once more.

    Args:
        make_loader: Returns a new loader, always with the same settings.
        resume_with: Returns the loaders that resume, if they must have other settings: another number of workers, or
            another batch size. Then only the samples' keys (``__key__``) are compared, in order.
        epochs: How many epochs are compared, at least 1.
        max_stops: The largest number of stops that are tried. If there are more, they are chosen by a fixed hash; the
            first and the last are always included.

    Raises:
        AssertionError: The loader does not resume there. The message says where it was stopped and what it returned
            instead.
        ArgumentError: An argument is out of range.

    Example:
        >>> import tempfile, shardkit
        >>> folder = tempfile.mkdtemp() + "/digits"
        >>> _ = shardkit.pack(({"__key__": f"{i}", "cls": i} for i in range(10)), folder, progress=False)
        >>> dataset = shardkit.ShardDataset(folder)
        >>> assert_resumes_anywhere(lambda: shardkit.ShardLoader(dataset, batch_size=3))
    """
    epochs, max_stops = check_whole("epochs", epochs, least=1), check_whole("max_stops", max_stops, least=1)
    loader = make_loader()
    expected = [list(loader) for _ in range(epochs)]
    if not any(expected):
        raise AssertionError(f"the loader has no batches in {epochs} epochs, so nothing can be checked")
    again = make_loader()
    for epoch, batches in enumerate(expected):
        where = f"two loaders from make_loader, which must be new ones, give different batches: epoch {epoch}"
        _compare(again, batches, where)
    stops = [(epoch, count) for epoch in range(epochs) for count in range(len(expected[epoch]) + 2)]
    stopped = [_stop(make_loader(), expected, *stop) for stop in _some([(0, None), *stops], max_stops)]
    make_other, by_key = resume_with or make_loader, resume_with is not None
    for where, state, rest in stopped:
        resumed = make_other()
        resumed.load_state_dict(state)
        for later, batches in enumerate(rest):
            what = f"{later} epochs later" if later else "the rest"
            _compare(resumed, batches, f"{where}, and resumed: {what}", by_key=by_key)
    for where, state, rest in stopped:
        if rest and rest[0]:
            resumed, again = make_other(), make_other()
            resumed.load_state_dict(state)
            first = list(islice(resumed, 1))
            again.load_state_dict(_through_json(resumed.state_dict(), f"{where}, and resumed"))
            where_again = f"{where}, resumed, stopped after a batch, and resumed again"
            _compare(chain(first, again), rest[0], where_again, by_key=by_key)


class _Stopped(NamedTuple):
    where: str
    state: dict[str, Any]
    rest: list[list[Any]]  # the batches expected from the next iter(), and from all later epochs


def _stop(loader: ResumableLoader, expected: list[list[Any]], epoch: int, count: int | None) -> _Stopped:
    """Stop a new loader after ``count`` batches of an epoch, or before it begins if None; then let it continue."""
    for _ in range(epoch):
        for _ in loader:
            pass
    iterator = iter(()) if count is None else iter(loader)
    taken = list(islice(iterator, count))  # asking for one more than there are reaches the end
    where = "stopped before it began" if count is None else f"stopped after {len(taken)} batches of epoch {epoch}"
    rest = [expected[epoch][len(taken) :], *expected[epoch + 1 :]]
    if len(taken) < (count or 0):
        where += ", at its end"
        rest = rest[1:]
    state = loader.state_dict()
    copy = _through_json(state, where)
    if count is not None:
        _compare(iterator, expected[epoch][len(taken) :], f"{where}, and continued: state_dict() disturbed it")
    if state != copy:
        raise AssertionError(f"{where}, and continued: the state that it had returned changed from {copy} to {state}")
    return _Stopped(where, copy, rest)


def _through_json(state: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a state after a round trip through JSON. It must be the same."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{where}: the state {state!r} is not JSON: {error}") from error
    if copy != state:
        raise AssertionError(f"{where}: JSON makes {copy!r} of the state {state!r}; keep it to text, numbers, lists")
    return copy


def _some(stops: Sequence[T], at_most: int) -> Iterable[T]:
    if len(stops) <= at_most:
        return stops
    order = Permutation(len(stops), key=derive(at_most)).forward(np.arange(at_most)).tolist()
    return [stops[i] for i in sorted({0, len(stops) - 1, *order})]


def _compare(found: Iterable[Any], expected: Sequence[Any], where: str, *, by_key: bool = False) -> None:
    if by_key:
        found, expected = _keys(found), list(_keys(expected))
    unit = "samples" if by_key else "batches"
    iterator = iter(found)
    for number, other in enumerate(expected):
        one = next(iterator, _END)
        if one is _END:
            raise AssertionError(f"{where}: got {number} {unit}, expected {len(expected)}")
        if not _equal(one, other):
            raise AssertionError(f"{where}: of its {unit}, number {number} is {_short(one)}, expected {_short(other)}")
    one = next(iterator, _END)  # check for only one more: there may be no end
    if one is not _END:
        raise AssertionError(f"{where}: got more than {len(expected)} {unit}, the next is {_short(one)}")


def _keys(batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        if not isinstance(batch, Mapping) or KEY not in batch:
            raise ArgumentError(f"resume_with: needs batches that are dicts with {KEY!r}, got {_short(batch)}")
        yield from batch[KEY]


def _equal(one: Any, other: Any) -> bool:
    """Compare values of batches, including tensors and arrays, bit by bit; NaN equals itself."""
    import torch

    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, torch.Tensor):
        return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(_bits(one), _bits(other))
    if isinstance(one, np.ndarray | np.generic):
        return (one.shape, one.dtype) == (other.shape, other.dtype) and one.tobytes() == other.tobytes()
    return one.hex() == other.hex() if isinstance(one, float) else bool(one == other)


def _bits(tensor: "torch.Tensor") -> "torch.Tensor":
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def _short(value: Any) -> str:
    if isinstance(value, Mapping) and KEY in value:
        value = value[KEY]
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
