"""What was read -> what a training loop gets: fields picked and decoded, and the user's function called.

A function with a parameter named ``rng`` is given an ``Rng``, whose key says which sample of which epoch it is for. So
what it draws depends on neither threads nor processes, nor on what was drawn before.
"""

import inspect
import math
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from functools import partial
from typing import Any, TypeVar

from shardkit.codecs import Decoder
from shardkit.errors import ArgumentError, SampleError, check_whole
from shardkit.hashing import mix64
from shardkit.sample import COLUMNS, KEY, RESERVED, SOURCE, URL, FieldSelection, Sample

T = TypeVar("T")

_RANGE = 1 << 64


class Rng:
    """A small generator of random numbers for one sample: the same numbers on every machine and in every version.

    The numbers are ``mix64(key ^ mix64(0))``, ``mix64(key ^ mix64(1))``, ... (``hashing.mix64``), and what each method
    makes of them is as fixed as they are; only ``normal`` takes a logarithm and a cosine from the machine, whose last
    bit may differ between two. It is not for secrets.

    Args:
        key: Which numbers. Equal keys give equal numbers.

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
        return mix64(self._key ^ mix64(count))

    def random(self) -> float:
        """Return a number in [0, 1), a multiple of 2**-53."""
        return (self.bits() >> 11) * 2.0**-53

    def uniform(self, low: float, high: float) -> float:
        """Return a number from ``low`` to ``high``."""
        return low + (high - low) * self.random()

    def integers(self, low: int, high: int) -> int:
        """Return a whole number in [``low``, ``high``).

        It is the upper half of 64 bits times the number of possible values, so that one may come more often than
        another by at most that number in 2**64.

        Raises:
            ArgumentError: There is no such number, or there are more than 2**64.
        """
        low, high = check_whole("low", low), check_whole("high", high)
        if not 0 < high - low <= _RANGE:
            raise ArgumentError(f"low is {low:,} and high is {high:,}, expected low < high, at most 2**64 apart")
        return low + (self.bits() * (high - low) >> 64)

    def normal(self, mean: float = 0.0, std: float = 1.0) -> float:
        """Return a normally distributed number, by the method of Box and Muller, of which the second is not kept."""
        radius = math.sqrt(-2.0 * math.log(1.0 - self.random()))
        return mean + std * radius * math.cos(2.0 * math.pi * self.random())

    def choice(self, values: Sequence[T]) -> T:
        """Return one of ``values``.

        Raises:
            ArgumentError: There are none.
        """
        if not len(values):  # an array is neither true nor false
            raise ArgumentError("values is empty, expected something to choose from")
        return values[self.integers(0, len(values))]

    def shuffle(self, values: MutableSequence[Any]) -> None:
        """Bring a list into a random order, in place: each element from the last on changes places with one before."""
        for i in range(len(values) - 1, 0, -1):
            j = self.integers(0, i + 1)
            values[i], values[j] = values[j], values[i]

    def permutation(self, n: int) -> list[int]:
        """Return the numbers from 0 to ``n`` - 1 in a random order."""
        values = list(range(n))
        self.shuffle(values)
        return values


class Transform:
    """A user's ``transform`` argument: a function of the sample, or functions of single fields, or nothing.

    It is true if there is something to call. It can be pickled if the functions can.

    Attributes:
        needs_rng: Whether a function has a parameter named ``rng``, so that a call needs one.

    Example:
        >>> flip = Transform.parse({"text": lambda text, rng: text[::-1] if rng.random() < 0.5 else text})
        >>> flip.needs_rng, [flip({"__key__": "a", "text": "abc"}, Rng(key))["text"] for key in range(4)]
        (True, ['abc', 'cba', 'abc', 'abc'])
    """

    def __init__(
        self, name: str, function: Callable[..., Any] | None, functions: Mapping[str, Callable[..., Any]]
    ) -> None:
        self._name = name
        self._function = function
        self._takes_rng = function is not None and _takes_rng(function)
        self._functions = [(field, one, _takes_rng(one)) for field, one in functions.items()]
        self.needs_rng = self._takes_rng or any(takes_rng for _, _, takes_rng in self._functions)

    @classmethod
    def parse(
        cls, transform: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None, *, name: str = "transform"
    ) -> "Transform":
        """Return what an argument means.

        Args:
            transform: A function of a sample, which returns what takes its place; a mapping of names of fields to
                functions of their values; or None.
            name: What the argument is called, for messages.

        Raises:
            ArgumentError: It is none of these.
        """
        functions = transform.values() if isinstance(transform, Mapping) else [transform]
        if transform is not None and not all(callable(function) for function in functions):
            raise ArgumentError(f"{name} is {transform!r}, expected a function, or a mapping of names to functions")
        if isinstance(transform, Mapping):
            return cls(name, None, transform)
        return cls(name, transform, {})

    def __bool__(self) -> bool:
        return self._function is not None or bool(self._functions)

    def __call__(self, sample: Sample, rng: Rng | None = None) -> Any:
        """Return what the transform makes of a sample, which it may change. A field that is None stays None.

        Raises:
            SampleError: A field that has a function is missing. What the functions themselves raise gets a note of
                the sample, and of the field, and passes.
        """
        field = ""
        try:
            if self._function is not None:
                return self._function(sample, rng=rng) if self._takes_rng else self._function(sample)
            for field, function, takes_rng in self._functions:
                if field not in sample:
                    break
                value = sample[field]
                if value is not None:
                    sample[field] = function(value, rng=rng) if takes_rng else function(value)
            else:
                return sample
        except Exception as error:
            error.add_note(f"This was raised by {self._name}= for {_place(sample, field)}")
            raise
        raise SampleError(
            f"{_place(sample)}: has no field {field!r}, which {self._name} names; name fields that every sample has",
            key=str(sample.get(KEY, "")),
            url=str(sample.get(URL, "")),
            field=field,
        )


def parse_decode(decode: bool | Decoder) -> Decoder | None:  # noqa: FBT001 - it is a user's argument
    """Return the decoder that a ``decode`` argument means; None keeps bytes.

    Raises:
        ArgumentError: It is neither True, False nor a decoder.
    """
    if not isinstance(decode, bool | Decoder):
        raise ArgumentError(f"decode is {decode!r}, expected True, False or a Decoder, as Decoder(images='pil')")
    return (Decoder() if decode else None) if isinstance(decode, bool) else decode


def decode_fields(sample: Sample, selection: FieldSelection, decoder: Decoder | None) -> Sample:
    """Return a sample's picked fields under their new names, decoded by their own; ``__key__`` and its like are kept.

    Args:
        sample: Bytes of fields, or views of them. Values of index columns that are in ``__columns__`` come out beside
            the fields.
        selection: What to pick.
        decoder: None keeps the bytes.

    Raises:
        SampleError: A field is missing and not optional.
        CodecError: A picked field cannot be decoded.

    Example:
        >>> decode_fields({"__key__": "a", "cls": b"7"}, FieldSelection.parse({"label": "cls"}), Decoder())
        {'__key__': 'a', 'label': 7}
    """
    if decoder is None:
        picked = selection.pick(sample).items()
        decoded: Sample = {name: bytes(value) if isinstance(value, memoryview) else value for name, value in picked}
    elif not selection.wanted:
        decoded = decoder.decode_sample(sample)
    else:
        key, url = sample.get(KEY, ""), sample.get(URL, "")
        decoded = {name: sample[name] for name in sample if name in RESERVED}
        for name, field in selection.choose(sample).items():
            decoded[name] = None if field is None else decoder.decode(field, sample[field], key=key, url=url)
    if COLUMNS in decoded:
        decoded.update(decoded.pop(COLUMNS))
    return decoded


def _takes_rng(function: Callable[..., Any]) -> bool:
    if isinstance(function, partial) and "rng" in function.keywords:
        return False  # the user gave it one
    try:
        parameter = inspect.signature(function).parameters.get("rng")
    except (TypeError, ValueError):  # some of what is written in C has no signature
        return False
    return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def _place(sample: Sample, field: str = "") -> str:
    of_field = f"field {field!r} of " if field else ""
    of_shard = f" of shard {sample[URL]}" if sample.get(URL) else ""
    of_file = f", made of {sample[SOURCE]}" if sample.get(SOURCE) else ""
    return f"{of_field}sample {sample.get(KEY, '')!r}{of_shard}{of_file}"
