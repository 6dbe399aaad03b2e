"""Samples whose sizes are known before they are read, encoded when needed and compared with what was promised."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from shardkit.codecs.registry import Codec, Decoder, registered_codecs
from shardkit.errors import SourceError
from shardkit.format.shard_writer import EncodedSample, check_sample, encode_sample, sample_size
from shardkit.hashing import UInt64Array, derive, hash_key
from shardkit.sample import KEY, Sample, check_key
from shardkit.sources.folders import ListedSource
from shardkit.transforms.apply import FieldFunctions, Transform, undecoded_fields
from shardkit.transforms.image_source import PendingImage
from shardkit.transforms.rng import Rng

SampleFunction: TypeAlias = Callable[..., Any] | FieldFunctions

_LARGEST = 1 << 60
_RNG_DOMAIN = 0x5452_414E_53  # "TRANS"


class Records(Protocol):
    """Samples whose sizes and keys are known: a listed source, or a spill.

    Attributes:
        tar_sizes: The bytes that each sample takes in a tar: int64, (samples,).
        hashes: ``hash_key`` of each key: uint64, (samples,).
        digest: Text that changes when a sample changes.
    """

    tar_sizes: npt.NDArray[np.int64]
    hashes: UInt64Array
    digest: str

    def take(self, positions: npt.NDArray[np.int64], /) -> Iterable[EncodedSample]:
        """Return some of the samples, in that order, as an iterable that is small when pickled."""
        ...

    def keys(self) -> Iterator[str]:
        """Yield all keys, in order."""
        ...

    def fields(self) -> Iterator[Iterable[str]]:
        """Yield groups of fields that occur together; every field is in one of them."""
        ...


def promised_hashes(source: ListedSource) -> UInt64Array:
    """Return ``hash_key`` of the keys that a source promises: uint64, (samples,).

    Raises:
        SampleError: A key cannot be written. This error, and any error of the source, gets a note about the sample.
    """
    count = len(source)
    return np.fromiter(_asked(count, lambda i: hash_key(check_key(source.key(i)))), dtype=np.uint64, count=count)


def _asked(count: int, ask: Callable[[int], int]) -> Iterator[int]:
    for position in range(count):
        try:
            answer = ask(position)
        except Exception as error:
            error.add_note(f"It was raised while the source was asked about its sample {position:,}.")
            raise
        yield answer


def take_part(source: ListedSource, positions: Sequence[int]) -> ListedSource:
    """Return a source of some of a source's samples. Raises SourceError if it has more or fewer."""
    part = source.take(positions)
    if len(part) != len(positions):
        key = source.key(positions[min(len(part), len(positions) - 1)])
        raise _broken(key, f"to take {len(positions):,} samples and this one among them", f"{len(part):,}")
    return part


class ListedRecords:
    """The samples of a listed source as records, with the keys and sizes that the source promises.

    Args:
        source: The source.
        fingerprint: Its fingerprint.

    Raises:
        SampleError: A key cannot be written. This error, and any error of the source, gets a note about the sample.
    """

    def __init__(self, source: ListedSource, fingerprint: str) -> None:
        self._source = source
        self.hashes = promised_hashes(source)
        count = len(self.hashes)
        sizes = _asked(count, lambda i: min(sample_size(source.key(i), source.sizes(i)), _LARGEST))
        self.tar_sizes = np.fromiter(sizes, dtype=np.int64, count=count)
        promised = hashlib.sha256(fingerprint.encode("utf-8", "surrogateescape"))
        promised.update(self.hashes.data)
        promised.update(self.tar_sizes.data)
        self.digest = promised.hexdigest()

    def take(self, positions: npt.NDArray[np.int64], /) -> "ListedPart":
        """Return some of the samples, in that order; they are compared with what was promised when they are read."""
        part = take_part(self._source, positions.tolist())
        return ListedPart(part, self.hashes[positions], self.tar_sizes[positions])

    def keys(self) -> Iterator[str]:
        """Yield all keys, in order. Raises SourceError if one has changed."""
        for position, promised in enumerate(self.hashes.tolist()):
            key = self._source.key(position)
            if hash_key(key) != promised:
                raise _broken(key, "another key before", "this one")
            yield key

    def fields(self) -> Iterator[list[str]]:
        """Yield the fields of each sample, without reading the sample."""
        return ([field for field, _ in self._source.sizes(i)] for i in range(len(self.hashes)))


@dataclass(frozen=True)
class ListedPart:
    """Some samples of a listed source; they are read, transformed if requested, and encoded during iteration.

    Attributes:
        source: A source of exactly these samples.
        hashes: ``hash_key`` of the keys that it promised: uint64, (samples,).
        tar_sizes: The promised bytes that they take in a tar: int64, (samples,); None if sizes are not compared.
        transform: Changes each sample, or leaves it out.
        codecs: The registered codecs of the process that makes this object.
    """

    source: ListedSource
    hashes: UInt64Array
    tar_sizes: npt.NDArray[np.int64] | None = None
    transform: "SampleTransform | None" = None
    codecs: Mapping[str, Codec] = field(default_factory=registered_codecs)

    def __iter__(self) -> Iterator[EncodedSample]:
        """Yield the samples. An error of the source gets a note about the sample.

        Raises:
            SourceError: The source returns another sample than it promised.
        """
        for position, promised in enumerate(self.hashes.tolist()):
            key = f"number {position:,} of a part"
            try:
                key = check_key(self.source.key(position))
                encoded = self._read(position, key, promised)
            except Exception as error:
                if not any(repr(key) in text for text in (str(error), *getattr(error, "__notes__", ()))):
                    error.add_note(f"It was raised while the source's sample {key!r} was being read.")
                raise
            if encoded is not None:
                yield encoded

    def _read(self, position: int, key: str, promised_hash: int) -> EncodedSample | None:
        sample: Sample | None = self.source.read(position)
        given = sample.get(KEY) if isinstance(sample, Mapping) else sample
        if given != key:
            raise _broken(key, "this key", f"{given!r:.80}")
        if hash_key(key) != promised_hash:
            raise _broken(key, "another key when the pack was planned", "this one")
        if self.transform is not None and sample is not None:
            sample = self.transform(sample)
        if sample is None:
            return None
        encoded = encode_sample(sample, codecs=self.codecs)
        if self.tar_sizes is not None:
            came = [(name, len(data)) for name, data in encoded.members]
            promised = sorted(self.source.sizes(position))
            if came != promised:
                raise _broken(key, _described(promised, came), _described(came, promised))
            if sample_size(key, came) != self.tar_sizes[position]:
                raise _broken(key, "other sizes when the pack was planned", _described(came))
        return encoded


def _described(sizes: Sequence[tuple[str, int]], others: Sequence[tuple[str, int]] = ()) -> str:
    return ", ".join(f"{size:,} bytes of {name!r}" for name, size in sizes if (name, size) not in others) or "no more"


def _broken(key: str, promised: str, came: str) -> SourceError:
    return SourceError(
        f"sample {key!r}: the source promised {promised} and gave {came}; correct the source, whose keys and sizes "
        "must match the samples that it reads, or pack an iterable of its samples",
        key=key,
    )


def encode_samples(samples: Iterable[Mapping[str, Any]]) -> Iterator[EncodedSample]:
    """Yield the samples, encoded. An error gets a note with the number of samples read so far."""
    number = 0
    try:
        for sample in samples:
            number += 1
            yield encode_sample(sample)
    except Exception as error:
        error.add_note(f"It was raised at or after sample {number:,} of the samples to pack.")
        raise


class SampleTransform:
    """A user's ``transform`` of samples to pack, with random numbers that are determined by the seed and the key.

    Args:
        function: The function of a sample, or the functions of its fields.
        seed: The seed of the random numbers.

    Attributes:
        function: The argument ``function``.
        seed: The seed of the random numbers; None if no function uses any.

    Raises:
        ArgumentError: It is neither a function nor a mapping of names to functions.

    Example:
        >>> jitter = SampleTransform({"cls": lambda label, rng: label + rng.integers(0, 10)}, seed=0)
        >>> jitter({"__key__": "0001", "cls": 10}), jitter({"__key__": "0002", "cls": 10})
        ({'__key__': '0001', 'cls': 19}, {'__key__': '0002', 'cls': 11})
    """

    def __init__(self, function: SampleFunction, *, seed: int) -> None:
        self._transform = Transform.parse(function)
        self._decoder = Decoder()
        self._images = undecoded_fields([self._transform], self._decoder)  # their transform decodes them
        self.function = function
        self.seed = seed if self._transform.needs_rng else None

    def __call__(self, sample: Mapping[str, Any]) -> Sample | None:
        """Return the transformed sample, or None to leave it out. An error of the function gets a note of the sample.

        Raises:
            SampleError: The result is not a sample, or the sample lacks a field that has a function.
        """
        own = dict(check_sample(sample))
        rng = None
        if self.seed is not None:
            rng = Rng(derive(_RNG_DOMAIN, self.seed, hash_key(check_key(own.get(KEY)))))
        for name in self._images:
            if isinstance(own.get(name), bytes) and self._decoder.takes_as_image(name):
                at = {"field": name, "key": own.get(KEY, ""), "url": ""}
                own[name] = PendingImage(own[name], max_pixels=self._decoder.max_pixels, **at)
        changed: Sample | None = self._transform(own, rng)
        return changed

    def of_all(self, samples: Iterable[Mapping[str, Any]]) -> Iterator[Sample]:
        """Yield the transformed samples, without those that are left out."""
        for sample in samples:
            changed = self(sample)
            if changed is not None:
                yield changed
