"""What was found to be wrong with a dataset."""

import json
from dataclasses import asdict, dataclass

from shardkit.errors import hide_secrets


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a dataset.

    Attributes:
        url: The file concerned.
        message: A description for people.
        offset: The position in the uncompressed shard, in bytes; None if it is not known.
        key: The sample concerned; empty if it is not about one.
        field: The field concerned; empty if it is not about one.
    """

    url: str
    message: str
    offset: int | None = None
    key: str = ""
    field: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", hide_secrets(self.url))
        object.__setattr__(self, "message", hide_secrets(self.message))


@dataclass(frozen=True, slots=True)
class DamagedShard:
    """A shard that is damaged, or whose index is.

    Attributes:
        url: The shard.
        samples: How many samples it should have; if that is not known, how many could be read.
        whole: How many samples are whole. With an index, these are all samples whose bytes are unchanged, wherever
            the damage is; without one, the samples before the damage. With ``decode=``, only samples whose every
            field can be decoded.
        damaged: The keys of the samples that are known to be damaged, in order; then the keys of the samples with
            fields that are named because they cannot be decoded.
        problems: What is wrong.
    """

    url: str
    samples: int
    whole: int
    damaged: tuple[str, ...]
    problems: tuple[Problem, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", hide_secrets(self.url))


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What ``verify`` found.

    Attributes:
        url: What was verified.
        shards: How many shards were read.
        samples: How many samples were found in them.
        bytes: How many uncompressed bytes were read from whole shards.
        damaged: The shards that are damaged, or whose index is.
        problems: What is wrong with the dataset as a whole.
        notes: What could not be checked, because there is no manifest or no index.
    """

    url: str
    shards: int
    samples: int
    bytes: int
    damaged: tuple[DamagedShard, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", hide_secrets(self.url))

    @property
    def ok(self) -> bool:
        """Whether nothing wrong was found."""
        return not self.damaged and not self.problems

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=1)
