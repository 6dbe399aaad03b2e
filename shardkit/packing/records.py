"""Samples whose sizes are known before they are read, encoded when they are needed."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from shardkit.codecs.registry import Codec, Decoder, registered_codecs
from shardkit.format.shard_writer import EncodedSample, check_sample, encode_sample, sample_size
from shardkit.hashing import UInt64Array, derive, hash_key, hash_keys
from shardkit.sample import KEY, Sample, check_key
from shardkit.sources.folders import ListedSource
from shardkit.transforms.apply import FieldFunctions, Transform, undecoded_fields
from shardkit.transforms.image_source import PendingImage
from shardkit.transforms.rng import Rng

SampleFunction: TypeAlias = Callable[..., Any] | FieldFunctions

_RNG_DOMAIN = 0x5452_414E_53  # "TRANS"


class Records(Protocol):
    """Samples whose sizes and keys are known: a listed source, or a spill.

    Attributes:
        tar_sizes: The bytes that each sample takes in a tar: int64, (samples,).
        hashes: ``hash_key`` of each key: uint64, (samples,).
        digest: Text that changes when a sample does.
    """

    tar_sizes: npt.NDArray[np.int64]
    hashes: UInt64Array
    digest: str

    def take(self, positions: npt.NDArray[np.int64], /) -> Iterable[EncodedSample]:
        """Return some of the samples, in that order; what is returned is small to pickle."""
        ...

    def key(self, position: int, /) -> str:
        """Return a sample's key."""
        ...


class ListedRecords:
    """A listed source, whose fingerprint is ``digest``, as records."""

    def __init__(self, source: ListedSource, digest: str) -> None:
        self._source = source
        count = len(source)
        self.tar_sizes = np.fromiter(
            (sample_size(source.key(i), source.sizes(i)) for i in range(count)), dtype=np.int64, count=count
        )
        self.hashes = hash_keys(source.key(i) for i in range(count))
        self.digest = digest

    def take(self, positions: npt.NDArray[np.int64], /) -> "ListedPart":
        """Return some of the samples, in that order."""
        return ListedPart(self._source.take(positions.tolist()))

    def key(self, position: int, /) -> str:
        """Return a sample's key."""
        return self._source.key(position)


@dataclass(frozen=True)
class ListedPart:
    """Some samples of a listed source, read, perhaps transformed, and encoded when they are iterated over."""

    source: ListedSource
    transform: "SampleTransform | None" = None
    codecs: Mapping[str, Codec] = field(default_factory=registered_codecs)  # of the process that makes it

    def __iter__(self) -> Iterator[EncodedSample]:
        for position in range(len(self.source)):
            sample: Sample | None = self.source.read(position)
            if self.transform and sample is not None:
                sample = self.transform(sample)
            if sample is not None:
                yield encode_sample(sample, codecs=self.codecs)


class SampleTransform:
    """A user's ``transform`` of samples that are packed, with random numbers that follow from seed and key.

    Args:
        function: The function of a sample, or the functions of its fields.
        seed: Of the random numbers.

    Attributes:
        function: As it was given.
        seed: Of the random numbers; None if there are none.

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
        self._images = undecoded_fields([self._transform], self._decoder)  # are decoded by their transform
        self.function = function
        self.seed = seed if self._transform.needs_rng else None

    def __call__(self, sample: Mapping[str, Any]) -> Sample | None:
        """Return what takes a sample's place, or None to leave it out. What the function raises gets a note of it.

        Raises:
            SampleError: It is no sample, or lacks a field that has a function.
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
        """Yield what takes the samples' places."""
        for sample in samples:
            changed = self(sample)
            if changed is not None:
                yield changed
