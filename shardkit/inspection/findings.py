"""What was found to be wrong with a dataset."""

import json
from dataclasses import asdict, dataclass

from shardkit.errors import hide_secrets


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as it should be.

    Attributes:
        url: The file concerned.
        message: What it is, for people.
        offset: Where in the uncompressed shard, in bytes; None if that is not known.
        key: The sample concerned; empty if it is not about one.
        field: The field concerned; empty likewise.
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
    """A shard that is not as it should be, or whose index is not.

    Attributes:
        url: The shard.
        samples: How many samples it should have; if nothing says that, how many could be read.
        whole: How many are whole. With an index: each byte of their fields is what it was, wherever the damage is.
            Without: they come before the damage. With ``decode=``, those alone whose every field can be decoded.
        damaged: The keys of those that are known not to be whole, in order; then those of fields that are named because
            they cannot be decoded.
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
        bytes: How many uncompressed bytes were read, of whole shards.
        damaged: The shards that are not as they should be.
        problems: What is wrong with the dataset as a whole.
        notes: What could not be checked, for want of a manifest or an index.
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
        """Whether all is as it should be."""
        return not self.damaged and not self.problems

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=1)
