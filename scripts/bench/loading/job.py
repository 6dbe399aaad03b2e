"""What one process measures: a loader, a task and a duration; or several ways of loading, one after the other."""

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
"""The number of float32 values in an array of the task npy: 1 KB."""
BATCH_SIZES = {"image": 64, "raw": 64, "small": 256, "npy": 256}
"""The tasks, and the number of samples in a batch."""
PIPELINES = ("crop", "resize", "colour", "noise")
"""The pipelines of albumentations, from light to heavy."""

Batch: TypeAlias = tuple[Any, Any]
"""Values and labels: of image a uint8 array, of raw and small two lists of bytes, of npy a float32 array and None."""
Passes: TypeAlias = Callable[[], Iterable[Batch]]
"""Returns a new pass over all samples each time it is called."""


@dataclass(frozen=True)
class Job:
    """What one process measures.

    Attributes:
        task: One of ``BATCH_SIZES``.
        module: The module of the loader, with the function ``open_passes(job)``.
        folder: The input, as ``inputs`` made it.
        workers: The number of threads or processes; 0 for the process itself.
        options: More settings of the loader, which its module explains.
        seconds: How long to measure; only whole passes are made.
        limit: The seconds after which the pass of a slow loader is stopped early.
        only_first: Make only the first pass, which gives no rates.
        servers: Processes whose usage is measured too, though they do not belong to the loader.
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
        """The number of samples in a batch."""
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
        workers: The number of threads or processes; 1 for the loop.
        batch_size: The number of samples in a batch.
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
        ways: The ways to measure, one after the other.
        quiet: A way is measured again if other processes used more than this fraction of a processor.
        repeats: The most repetitions; after that, the quietest measurement counts.
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
        """Return the job that ``to_json`` turned into this text."""
        values = json.loads(text)
        return cls(**values | {"ways": tuple(Way(**way) for way in values["ways"])})


def batched(samples: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of ``size`` samples; the last may be shorter."""
    iterator = iter(samples)
    while batch := list(islice(iterator, size)):
        yield batch
