"""Samples of shards that are being read -> tasks that decode them -> which of their fields cannot be decoded."""

from array import array
from collections.abc import Iterator, Mapping, Sequence

from shardkit.codecs.registry import Decoder
from shardkit.errors import ShardError
from shardkit.format.shard_writer import EncodedSample
from shardkit.format.tar import Member
from shardkit.inspection.findings import Problem
from shardkit.packing.checks import Checked, CheckTask, Undecodable

_NAMED = 1000  # this many fields that cannot be decoded are named; the rest are counted
_CHUNK_BYTES = 1 << 20  # a worker decodes about this many bytes of samples at a time, ...
_CHUNK_SAMPLES = 256  # ... but at most this many samples


class Decoding:
    """Which fields of shards cannot be decoded, found while the shards are read.

    A remote shard that arrives damaged is read again, so each reading is counted as a separate part.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._samples: list[array[int]] = []  # for each part, the numbers of the samples that have such fields
        self._fields: list[int] = []  # for each part, the number of such fields
        self._named: list[tuple[int, Undecodable]] = []  # the first of all parts, and perhaps some later ones

    @property
    def last(self) -> int:
        """The number of the latest part."""
        return len(self._fields) - 1

    def begin(self) -> None:
        """Begin another part."""
        self._samples.append(array("q"))
        self._fields.append(0)

    def tasks(self, samples: Iterator[tuple[str, Mapping[str, Member]]]) -> Iterator[CheckTask]:
        """Yield tasks that decode samples as they are read. An error from reading is raised after the last task."""
        part = self.last
        chunk: list[EncodedSample] = []
        first = size = 0
        failure: Exception | None = None
        try:
            for key, members in samples:
                fields = tuple((field, member.data or b"") for field, member in members.items())
                chunk.append(EncodedSample(key, fields))
                size += sum(member.size for member in members.values())
                if size >= _CHUNK_BYTES or len(chunk) == _CHUNK_SAMPLES:
                    yield CheckTask(chunk, self._decoder, first, part)
                    first, size, chunk = first + len(chunk), 0, []
        except (ShardError, OSError) as error:
            failure = error
        if chunk:
            yield CheckTask(chunk, self._decoder, first, part)
        if failure is not None:
            raise failure

    def note(self, checked: Checked) -> None:
        """Note what was found in some samples."""
        found = checked.undecodable
        self._samples[checked.part].extend(dict.fromkeys(one.sample for one in found))
        self._fields[checked.part] += len(found)
        self._named += ((checked.part, one) for one in found)
        if len(self._named) > 2 * _NAMED:
            self._named = sorted(self._named)[:_NAMED]

    def samples(self, part: int) -> Sequence[int]:
        """Return the numbers of a part's samples that have fields that cannot be decoded."""
        return self._samples[part]

    def problems(self, part: int, url: str) -> list[Problem]:
        """Return a problem for each named field of a part that cannot be decoded, and one for all the others."""
        if not self._fields[part]:
            return []
        named = [one for number, one in sorted(self._named)[:_NAMED] if number == part]
        problems = [
            Problem(url, f"sample {key!r}: field {field!r} cannot be decoded: {reason}", None, key, field)
            for _, _, key, field, reason, _ in named
        ]
        if more := self._fields[part] - len(named):
            problems.append(Problem(url, f"has {more:,} more fields that cannot be decoded"))
        return problems
