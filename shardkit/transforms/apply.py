"""The fields of a sample -> what a training loop gets: picked and decoded fields, after the user's function.

A function with a parameter named ``rng`` gets an ``Rng`` whose key belongs to one sample of one epoch. So its random
numbers do not depend on threads, on processes or on earlier numbers.

If the first function for a field is an image transform, the field is not decoded beforehand: the transform decodes it.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, Protocol

from shardkit.codecs.registry import Decoder
from shardkit.errors import ArgumentError, SampleError
from shardkit.sample import COLUMNS, KEY, RESERVED, SOURCE, URL, FieldSelection, Sample
from shardkit.transforms.crops import ImageTransform
from shardkit.transforms.image_source import PendingImage
from shardkit.transforms.resize import Pixels
from shardkit.transforms.rng import Rng


class FieldFunctions(Protocol):
    """A mapping to functions: names to functions of single values, tuples of names to functions of dicts of values.

    It is a protocol because, for type checkers, a ``Mapping`` from names is not a ``Mapping`` from names or tuples.
    """

    def items(self) -> AbstractSet[tuple[str | tuple[str, ...], Callable[..., Any]]]:
        """Return names, or tuples of names, and their functions."""
        ...


_AS_THEY_SAY = Decoder()
"""Decodes only the fields that say how they are decoded; all others stay bytes."""


class FieldFunction:
    """A user's function of one field's value, or of a dict of several fields' values.

    Attributes:
        names: The fields.
        function: The function.
        takes_rng: Whether it has a parameter named ``rng``.
    """

    def __init__(self, fields: str | tuple[str, ...], function: Callable[..., Any]) -> None:
        if isinstance(fields, tuple) and not (fields and all(isinstance(field, str) for field in fields)):
            raise ArgumentError(f"transform has functions for {fields!r}, expected a field, or a tuple of fields")
        self._is_of_several = isinstance(fields, tuple)
        self.names = fields if isinstance(fields, tuple) else (fields,)
        self.function = function
        self.takes_rng = _takes_rng(function)

    def __call__(self, sample: Sample, rng: Rng | None, outs: Mapping[str, Pixels] | None) -> None:
        """Call the function on its fields of a sample, and replace their values with the result."""
        values = {name: sample[name] for name in self.names}
        if isinstance(self.function, ImageTransform):
            sample.update(self.function.apply(values, rng, outs))
        elif self._is_of_several:
            made = self._call(values, rng)
            if not isinstance(made, Mapping) or made.keys() != values.keys():
                got = ", ".join(map(str, made)) if isinstance(made, Mapping) else type(made).__name__
                raise ArgumentError(f"a function of {', '.join(self.names)} returned {got}, expected a dict of these")
            sample.update(made)
        elif values[self.names[0]] is not None:
            sample[self.names[0]] = self._call(values[self.names[0]], rng)

    def _call(self, value: Any, rng: Rng | None) -> Any:
        return self.function(value, rng=rng) if self.takes_rng else self.function(value)


class Transform:
    """A user's ``transform`` argument: a function of the sample, or functions of fields, or nothing.

    It is true if there is a function to call. It can be pickled if the functions can.

    Attributes:
        needs_rng: Whether a function has a parameter named ``rng``, so that a call needs one.
        is_of_sample: Whether it is a function of the sample.
        functions: If not, the functions of fields, in the order in which they are called.

    Example:
        >>> flip = Transform.parse({"text": lambda text, rng: text[::-1] if rng.random() < 0.5 else text})
        >>> flip.needs_rng, [flip({"__key__": "a", "text": "abc"}, Rng(key))["text"] for key in range(4)]
        (True, ['abc', 'cba', 'abc', 'abc'])
    """

    def __init__(self, function: Callable[..., Any] | None, functions: Iterable[FieldFunction] = ()) -> None:
        self._function = function
        self._takes_rng = function is not None and _takes_rng(function)
        self.is_of_sample = function is not None
        self.functions = tuple(functions)
        self._last = {name: one for one in self.functions for name in one.names}
        self.needs_rng = self._takes_rng or any(one.takes_rng for one in self.functions)

    @classmethod
    def parse(cls, transform: Callable[..., Any] | FieldFunctions | None) -> "Transform":
        """Return the transform that an argument stands for.

        Args:
            transform: A function of a sample, which returns its replacement; a mapping of names of fields to
                functions of their values, or of tuples of names to functions of dicts of their values; or None.

        Raises:
            ArgumentError: It is none of these.
        """
        if transform is None or (callable(transform) and not isinstance(transform, Mapping)):
            return cls(transform)
        if not isinstance(transform, Mapping) or not all(callable(function) for function in transform.values()):
            raise ArgumentError(f"transform is {transform!r}, expected a function, or a mapping of names to functions")
        return cls(None, (FieldFunction(fields, function) for fields, function in transform.items()))

    def check_names(self, known: Collection[str]) -> None:
        """Check that every field with a function is one of these fields.

        Raises:
            ArgumentError: There is a function for another field.

        Example:
            >>> Transform.parse({"imgae": abs}).check_names(["image", "label", "__key__"])
            Traceback (most recent call last):
            shardkit.errors.ArgumentError: transform: has a function for 'imgae', and the fields are image, label
        """
        for one in self.functions:
            for name in one.names:
                if name not in known:
                    fields = ", ".join(field for field in known if field not in RESERVED)
                    raise ArgumentError(f"transform: has a function for {name!r}, and the fields are {fields}")

    def __bool__(self) -> bool:
        return self.is_of_sample or bool(self.functions)

    def __call__(self, sample: Sample, rng: Rng | None = None, outs: Mapping[str, Pixels] | None = None) -> Any:
        """Return the result of the transform for a sample, which it may modify. A field that is None stays None.

        Args:
            sample: The sample.
            rng: For functions that need one.
            outs: Arrays by field name. An image transform writes its result into the array of its field if the result
                is uint8 and has that shape, and no later function gets it.

        Raises:
            SampleError: A field that has a function is missing.
            ArgumentError: A function raised StopIteration.
            CodecError: A pending image cannot be decoded; ``was_undecodable`` distinguishes it from a function's error.
            Exception: Whatever a function raises, with a note that names the sample and the field.
        """
        names: Sequence[str] = ()
        missing: Sequence[str] = ()
        try:
            if self._function is not None:
                return self._function(sample, rng=rng) if self._takes_rng else self._function(sample)
            for function in self.functions:
                names = function.names
                if missing := [name for name in names if name not in sample]:
                    break
                # The input of a later function must not be in the memory that receives that function's result.
                own = {name: out for name, out in (outs or {}).items() if self._last.get(name) is function}
                function(sample, rng, own)
            else:
                return sample
        except StopIteration as error:  # a loop over samples would end there silently, without the rest
            raise ArgumentError(
                f"{_place(sample, *names)}: transform= raised StopIteration, which would be taken for the end of "
                "the data; give next() a default, or raise another error"
            ) from error
        except Exception as error:
            if not was_undecodable(sample, error):
                error.add_note(f"This was raised by transform= for {_place(sample, *names)}")
            raise
        raise SampleError(
            f"{_place(sample)}: has no field {missing[0]!r}, which transform names; name fields that every sample has",
            key=str(sample.get(KEY, "")),
            url=str(sample.get(URL, "")),
            field=missing[0],
        )


def undecoded_fields(transforms: Iterable[Transform], decoder: Decoder | None) -> frozenset[str]:
    """Return the fields that ``decode_fields`` may leave undecoded, because an image transform gets them first.

    Args:
        transforms: The transforms that are called with the sample, in order.
        decoder: Decodes the fields.
    """
    if decoder is None:
        return frozenset()
    found: dict[str, bool] = {}
    for transform in transforms:
        if transform.is_of_sample:
            break
        for one in transform.functions:
            for name in one.names:
                # A mask as a PIL image contains class numbers; decoded here, it would contain their colours.
                is_taken = isinstance(one.function, ImageTransform) and not (
                    decoder.images == "pil" and name in one.function.nearest
                )
                found.setdefault(name, is_taken)
    return frozenset(name for name, is_taken in found.items() if is_taken)


def parse_decode(decode: bool | Decoder, selection: FieldSelection) -> Decoder | None:  # noqa: FBT001 - the user's
    """Return the decoder for a ``decode`` argument; None keeps the bytes of fields that do not say how to decode them.

    Raises:
        ArgumentError: It is not True, False or a decoder; or a field cannot be decoded as the selection says.
    """
    if not isinstance(decode, bool | Decoder):
        raise ArgumentError(f"decode is {decode!r}, expected True, False or a Decoder, as Decoder(images='pil')")
    decoder = (Decoder() if decode else None) if isinstance(decode, bool) else decode
    for name, field in selection.decodings:
        (decoder or _AS_THEY_SAY).decoding_of(selection.with_decoding(name, field))
    return decoder


def decode_fields(
    sample: Sample, selection: FieldSelection, decoder: Decoder | None, *, undecoded: Collection[str] = ()
) -> Sample:
    """Return the picked fields under their new names, decoded as their stored names say; reserved entries are kept.

    Args:
        sample: Bytes of fields, or views of them. Values of index columns in ``__columns__`` are returned with the
            fields.
        selection: What to pick.
        decoder: None keeps the bytes of fields for which the selection does not say how to decode them.
        undecoded: Fields, by their new names, that become pending images if they are images; see ``undecoded_fields``.

    Raises:
        SampleError: A field is missing and not optional.
        CodecError: A picked field cannot be decoded.

    Example:
        >>> decode_fields({"__key__": "a", "cls": b"7"}, FieldSelection.parse({"label": "cls"}), Decoder())
        {'__key__': 'a', 'label': 7}
    """

    def value_of(name: str, field: str) -> Any:
        data = sample[field]
        asked = selection.with_decoding(name, field)
        if decoder is None and asked == field:
            return bytes(data) if isinstance(data, memoryview) else data
        by, at = decoder or _AS_THEY_SAY, {"key": sample.get(KEY, ""), "url": sample.get(URL, "")}
        if name in undecoded and by.takes_as_image(asked):
            is_unchanged = by.decoding_of(asked) == "unchanged"
            return PendingImage(data, max_pixels=by.max_pixels, field=field, is_unchanged=is_unchanged, **at)
        return by.decode(asked, data, **at)

    if selection.wanted:
        decoded = {name: sample[name] for name in sample if name in RESERVED}
        for name, field in selection.choose(sample).items():
            decoded[name] = None if field is None else value_of(name, field)
    else:
        decoded = {
            name: value if value is None or name in RESERVED else value_of(name, name) for name, value in sample.items()
        }
    if COLUMNS in decoded:
        decoded.update(decoded.pop(COLUMNS))
    return decoded


def was_undecodable(sample: object, error: BaseException) -> bool:
    """Return whether a transform failed because a pending image of the sample cannot be decoded."""
    values = sample.values() if isinstance(sample, Mapping) else ()
    return any(isinstance(value, PendingImage) and value.error is error for value in values)


def _takes_rng(function: Callable[..., Any]) -> bool:
    if isinstance(function, partial) and "rng" in function.keywords:
        return False  # the user gave it one
    try:
        parameter = inspect.signature(function).parameters.get("rng")
    except (TypeError, ValueError):  # some functions written in C have no signature
        return False
    return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def _place(sample: Sample, *fields: str) -> str:
    of_field = f"field {', '.join(map(repr, fields))} of " if fields else ""
    of_shard = f" of shard {sample[URL]}" if sample.get(URL) else ""
    of_file = f", made of {sample[SOURCE]}" if sample.get(SOURCE) else ""
    return f"{of_field}sample {sample.get(KEY, '')!r}{of_shard}{of_file}"
