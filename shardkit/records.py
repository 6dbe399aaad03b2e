"""Samples whose sizes are known before they are read, encoded when they are needed."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from shardkit.codecs import Codec, registered_codecs
from shardkit.hashing import UInt64Array, hash_keys
from shardkit.sample import KEY, SOURCE, Sample
from shardkit.shards import EncodedSample, encode_sample, sample_size
from shardkit.sources import ListedSource

Transform: TypeAlias = Callable[[Sample], Sample | None]


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
    transform: Transform | None = None
    codecs: Mapping[str, Codec] = field(default_factory=registered_codecs)  # of the process that makes it

    def __iter__(self) -> Iterator[EncodedSample]:
        for position in range(len(self.source)):
            sample: Sample | None = self.source.read(position)
            if self.transform and sample is not None:
                sample = apply_transform(self.transform, sample)
            if sample is not None:
                yield encode_sample(sample, codecs=self.codecs)


def apply_transform(transform: Transform, sample: Sample) -> Sample | None:
    """Return what a transform makes of a sample. Its errors get a note of which sample it was."""
    name = " from ".join(str(sample[at]) for at in (KEY, SOURCE) if at in sample)
    try:
        return transform(sample)
    except Exception as error:
        error.add_note(f"This was raised by transform= for the sample {name}. To leave a sample out, return None")
        raise
