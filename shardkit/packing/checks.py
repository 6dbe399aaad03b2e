"""Samples whose every field is decoded, to see whether it can be: a task for threads or processes."""

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
        sample: Its sample's number among those that were checked.
        member: Its number in the sample.
        key: The sample's key.
        field: Its name.
        reason: Why it cannot be decoded.
        source: The file that the sample was made of, if that is known.
    """

    sample: int
    member: int
    key: str
    field: str
    reason: str
    source: str | None


class Checked(NamedTuple):
    """What was found in some samples.

    Attributes:
        part: What they are part of, as the task had it.
        samples: How many they were.
        undecodable: Their fields that cannot be decoded, in order.
    """

    part: int
    samples: int
    undecodable: Sequence[Undecodable]


def parse_check(name: str, check: bool | Decoder) -> Decoder | None:  # noqa: FBT001 - it is a user's argument
    """Return what decodes fields to see whether they can be decoded; None if nothing is to be checked.

    True takes images as they are stored: depth maps of 16 bits are no damage, though they need ``:unchanged``.

    Raises:
        ArgumentError: It is neither True, False nor a decoder.
    """
    if not isinstance(check, bool | Decoder):
        raise ArgumentError(f"{name} is {check!r}, expected True, False or a Decoder, as Decoder(max_pixels=10**9)")
    return (Decoder(images="unchanged") if check else None) if isinstance(check, bool) else check


@dataclass(frozen=True)
class CheckTask:
    """Decodes every field of some samples.

    Attributes:
        samples: The samples.
        decoder: What decodes them.
        first: The number of the first of them.
        part: What they are part of, for the caller.
    """

    samples: Iterable[EncodedSample]
    decoder: Decoder
    first: int = 0
    part: int = 0

    def run(self, stop: StopSign) -> Checked:
        """Decode them, one value at a time. Raises Cancelled as soon as it is to stop."""
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
