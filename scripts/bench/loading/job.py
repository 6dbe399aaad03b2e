"""What one process measures: a loader, a task, and for how long; or several ways of loading, one after the other."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

SIZE = 224
"""Height and width of the images in a batch."""
ARRAY = 256
"""How many float32 an array of the task npy has: 1 KB."""
BATCH_SIZES = {"image": 64, "raw": 64, "small": 256, "npy": 256}
"""The tasks, and how many samples a batch has."""
PIPELINES = ("crop", "resize", "colour", "noise")
"""The pipelines of albumentations, from light to heavy."""

Batch: TypeAlias = tuple[Any, Any]
"""Values and labels. Of image a uint8 array, of raw and small two lists of bytes, of npy a float32 array and None."""
Passes: TypeAlias = Callable[[], Iterable[Batch]]
"""Gives a fresh pass over all samples, each time it is called."""


@dataclass(frozen=True)
class Job:
    """What one process measures.

    Attributes:
        task: One of ``BATCH_SIZES``.
        module: The module that has the loader, in ``open_passes(job)``.
        folder: The input, as ``inputs`` made it.
        workers: Threads or processes; 0 for the process itself.
        options: What else the loader is to do, as its module says.
        seconds: How long to measure, in whole passes.
        limit: After how many seconds a pass is left, if the loader is that slow.
        only_first: Leave it at the first pass, of which come no rates.
        servers: Processes that belong to what is measured, though not to the loader.
    """

    task: str
    module: str
    folder: str
    workers: int
    options: dict[str, Any] = field(default_factory=dict)
    seconds: float = 2.0
    limit: float = 6.0
    only_first: bool = False
    servers: tuple[int, ...] = ()

    @property
    def batch_size(self) -> int:
        """How many samples a batch has."""
        return BATCH_SIZES[self.task]

    @property
    def shards(self) -> list[str]:
        """The paths of the tars."""
        return sorted(str(path) for path in self.dataset.glob("*.tar"))

    @property
    def dataset(self) -> Path:
        """The folder of the task's shards."""
        return Path(self.folder) / ("image" if self.task == "raw" else self.task)

    @property
    def files(self) -> Path:
        """The folder of the loose images, in a folder for each class."""
        return Path(self.folder) / "files"

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Way:
    """How samples are loaded.

    Attributes:
        kind: ``"sequential"``, ``"bare"``, ``"thread"`` or ``"process"``.
        workers: How many threads or processes; 1 for the loop.
        batch_size: How many samples a batch has.
    """

    kind: str
    workers: int
    batch_size: int


@dataclass(frozen=True)
class Errand:
    """What one process measures.

    Attributes:
        folder: The input, as ``inputs`` made it.
        pipeline: One of ``PIPELINES``.
        ways: What is measured, one after the other.
        quiet: A way is measured again if other processes took more of a processor than this ...
        repeats: ... but no more often than that; then the quietest time counts.
    """

    folder: str
    pipeline: str
    ways: tuple[Way, ...]
    quiet: float
    repeats: int

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Errand":
        """Return the job that ``to_json`` made this text of."""
        values = json.loads(text)
        return cls(**values | {"ways": tuple(Way(**way) for way in values["ways"])})


def batched(samples: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of ``size`` samples, the last perhaps shorter."""
    iterator = iter(samples)
    while batch := list(islice(iterator, size)):
        yield batch
