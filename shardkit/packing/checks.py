"""A task for threads or processes that decodes every field of some samples, to find fields that cannot be decoded."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardkit.codecs.registry import Decoder, describe_cause
from shardkit.errors import ArgumentError, CodecError
from shardkit.format.shard_writer import EncodedSample
from shardkit.packing.workers import Cancelled, StopSign


class Undecodable(NamedTuple):
    """A field that cannot be decoded.

    Attributes:
        sample: Its sample's number among the checked samples.
        member: The field's number in the sample.
        key: The sample's key.
        field: The field's name.
        reason: Why it cannot be decoded.
        source: The file that the sample was made from, if that is known.
    """

    sample: int
    member: int
    key: str
    field: str
    reason: str
    source: str | None


class Checked(NamedTuple):
    """The result of a check of some samples.

    Attributes:
        part: The ``part`` of the task.
        samples: The number of samples.
        undecodable: Their fields that cannot be decoded, in order.
    """

    part: int
    samples: int
    undecodable: Sequence[Undecodable]


def parse_check(name: str, check: bool | Decoder) -> Decoder | None:  # noqa: FBT001 - it is a user's argument
    """Return the decoder that checks fields; None if nothing is to be checked.

    With True, images are decoded as they are stored: 16-bit depth maps are not errors, though they need ``:unchanged``.

    Raises:
        ArgumentError: It is neither True, False nor a decoder.
    """
    if not isinstance(check, bool | Decoder):
        raise ArgumentError(
            f"{name} is {check!r}, expected True, False or a Decoder, for example Decoder(max_pixels=10**9)"
        )
    return (Decoder(images="unchanged") if check else None) if isinstance(check, bool) else check


@dataclass(frozen=True)
class CheckTask:
    """Decodes every field of some samples.

    Attributes:
        samples: The samples.
        decoder: Decodes the fields.
        first: The number of the first sample.
        part: What the samples are part of, for the caller.
    """

    samples: Iterable[EncodedSample]
    decoder: Decoder
    first: int = 0
    part: int = 0

    def run(self, stop: StopSign) -> Checked:
        """Decode the samples, one value at a time. Raises Cancelled soon after ``stop`` is set."""
        count, undecodable = 0, []
        for number, sample in enumerate(self.samples, self.first):
            if stop.is_set():
                raise Cancelled
            for position, (field, data) in enumerate(sample.members):
                try:
                    self.decoder.decode(field, data, key=sample.key)
                except CodecError as error:
                    reason = describe_cause(error.__cause__ or error)
                    undecodable.append(Undecodable(number, position, sample.key, field, reason, sample.source))
            count += 1
        return Checked(self.part, count, undecodable)
