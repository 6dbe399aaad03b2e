"""A source is checked: it gives what it promised, or nothing is published and the error names the sample."""

import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from shardkit import ShardDataset, pack

COUNT = 9
SHARD_BYTES = 12_800


def honest(position, size):
    return {"__key__": f"class/{position:03d}", "bin": bytes([position]) * size, "cls": position % 3}


def kept(sample):
    return sample


@dataclass
class Source:
    """Samples in memory, one of which lies in some way. It counts how often each key and size was requested."""

    samples: list
    lie: str = ""
    at: int = 0
    taken: int | None = None  # the number of this part among those taken from the source
    asked: dict = field(default_factory=dict)
    classes = ()
    ignored = ()

    def lies(self, position, *lies):
        return self.lie in lies and self.samples[position]["__key__"] == f"class/{self.at:03d}"

    def is_first(self, position, what):
        self.asked[position, what] = self.asked.get((position, what), 0) + 1
        return self.asked[position, what] == 1

    def __len__(self):
        if self.lie == "is longer than it is" and self.taken is None:
            return len(self.samples) + 2
        if self.lie == "is shorter when it is asked again" and not self.is_first(0, "length"):
            return len(self.samples) - 1
        return len(self.samples)

    def key(self, position):
        key = self.samples[position]["__key__"]
        if self.lies(position, "promises another's key") or (
            self.lies(position, "promises another's key at first") and self.is_first(position, "key")
        ):
            return f"class/{(self.at + 1) % COUNT:03d}"
        if self.lies(position, "promises another key until it is taken") and self.taken is None:
            return "class/early"
        if self.lies(position, "promises a key that is none"):
            return 7
        if self.lies(position, "fails at a key"):
            raise ZeroDivisionError("no key")
        if self.lies(position, "promises another key later") and not self.is_first(position, "key"):
            return "class/later"
        return key

    def sizes(self, position):
        sample = self.samples[position]
        sizes = [("bin", len(sample["bin"])), ("cls", 1)]
        if self.lies(position, "promises less"):
            return [("bin", 0), ("cls", 1)]
        if self.lies(position, "promises more"):
            return [("bin", len(sample["bin"]) + 600), ("cls", 1)]
        if self.lies(position, "promises a byte more"):
            return [("bin", len(sample["bin"]) + 1), ("cls", 1)]
        if self.lies(position, "promises less at first") and self.is_first(position, "sizes"):
            return [("bin", 0), ("cls", 1)]
        if self.lies(position, "promises less until it is taken") and self.taken is None:
            return [("bin", 0), ("cls", 1)]
        if self.lies(position, "promises another field"):
            return [("bin", len(sample["bin"])), ("txt", 1)]
        if self.lies(position, "promises fewer fields"):
            return [("bin", len(sample["bin"]))]
        if self.lies(position, "promises sizes that are none"):
            return [("bin", "many"), ("cls", -1)]
        if self.lies(position, "promises negative sizes"):
            return [("bin", -(10**6)), ("cls", 1)]
        if self.lies(position, "promises endless sizes"):
            return [("bin", 1 << 80), ("cls", 1)]
        if self.lies(position, "fails at sizes"):
            raise ZeroDivisionError("no sizes")
        return sizes

    def read(self, position):
        sample = self.samples[position]
        if self.lies(position, "gives another key"):
            return sample | {"__key__": "class/other"}
        if self.lies(position, "gives another's key"):
            return sample | {"__key__": f"class/{(self.at + 1) % COUNT:03d}"}
        if self.lies(position, "gives no key"):
            return {"bin": sample["bin"], "cls": 1}
        if self.lies(position, "gives no dict"):
            return list(sample)
        if self.lies(position, "gives nothing"):
            return None
        if self.lies(position, "fails"):
            raise ZeroDivisionError("nothing to read")
        if self.lies(position, "ends"):
            raise StopIteration
        if self.lies(position, "gives what cannot be encoded"):
            return sample | {"cls": {1, 2}}
        return sample

    def take(self, positions):
        positions = list(positions)
        number = self.asked["parts"] = self.asked.get("parts", -1) + 1
        if self.lie == "takes fewer" and len(positions) > 1:
            positions = positions[:-1]
        if self.lie == "takes the first" and number:
            positions = list(range(len(positions)))
        if self.lie == "takes one twice" and len(positions) > 1:
            positions = [positions[0], *positions[:-1]]
        return Source([self.samples[p] for p in positions if p < len(self.samples)], self.lie, self.at, number)

    def fingerprint(self):
        return "always the same"


# Lies that matter only for the plan: a transform's result has a size of its own.
OF_SIZES = [
    *["promises less", "promises more", "promises a byte more", "promises less at first", "promises another field"],
    *["promises fewer fields", "promises sizes that are none", "promises negative sizes", "promises endless sizes"],
    *["fails at sizes", "promises less until it is taken"],
]
OTHERS = [
    *["promises another's key", "promises another's key at first", "promises a key that is none", "fails at a key"],
    *["promises another key later", "gives another key", "gives another's key", "gives no key", "gives no dict"],
    *["gives nothing", "fails", "ends", "gives what cannot be encoded", "is longer than it is", "takes fewer"],
    "is shorter when it is asked again",
    *["takes the first", "takes one twice", "promises another key until it is taken"],
]

HARMLESS = ["promises another key later", "takes the first", "is shorter when it is asked again"]  # or an error


@pytest.fixture(scope="module")
def executor():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        yield executor


def published(folder):
    """Return a dataset's samples by key; None if there is none. Check that no shard is larger than requested."""
    if not (folder / "manifest.json").exists():
        return None
    dataset = ShardDataset(str(folder))
    assert max(shard.tar_size for shard in dataset.manifest.shards) <= SHARD_BYTES
    keys = [dataset[i]["__key__"] for i in range(len(dataset))]
    assert len(set(keys)) == len(keys)
    return {sample["__key__"]: (sample["bin"], sample["cls"]) for sample in map(dataset.__getitem__, range(len(keys)))}


def told(error):
    """Return everything that an error shows to the user."""
    return "".join(traceback.format_exception(error))


def every_lie_at_least_once(test):
    for lie in [*OF_SIZES, *OTHERS]:
        for transform in (None, kept):
            sizes = [5000 if position == 4 else 1000 for position in range(COUNT)]
            test = example(sizes=sizes, lie=lie, at=4, where="here", transform=transform, shuffle=True)(test)
    return test


@pytest.mark.multiprocess
@every_lie_at_least_once
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=COUNT, max_size=COUNT),
    lie=st.sampled_from(["", *OF_SIZES, *OTHERS]),
    at=st.integers(0, COUNT - 1),
    where=st.sampled_from(["here", "threads", "processes"]),
    transform=st.sampled_from([None, kept]),
    shuffle=st.booleans(),
)
def test_a_source_that_lies_is_packed_as_it_is_or_named(
    tmp_path_factory, executor, sizes, lie, at, where, transform, shuffle
):
    samples = [honest(position, size) for position, size in enumerate(sizes)]
    folder = tmp_path_factory.mktemp("any") / "ds"
    workers = {"here": {"num_workers": 1}, "threads": {"num_workers": 2}, "processes": {"executor": executor}}[where]
    options = {"shard_bytes": SHARD_BYTES, "compression": "none", "progress": False, "shuffle": shuffle}
    failure = None
    try:
        pack(Source(samples, lie, at), folder, transform=transform, **options, **workers)
    except Exception as error:  # noqa: BLE001 - what the source raises may be anything
        failure = error
    exact = {s["__key__"]: (s["bin"], s["cls"]) for s in samples}

    event(f"{'refused' if failure else 'packed'}: {lie}")
    if failure is None:
        assert published(folder) == exact
        assert lie in ("", *HARMLESS) or (transform and lie in OF_SIZES)
    else:
        assert lie
        assert published(folder) is None
        assert not list(folder.glob(".*"))
        named = {f"class/{at:03d}", f"class/{(at + 1) % COUNT:03d}", f"sample {at}", "class/later"}
        if lie.startswith(("takes", "is ")):
            named = {f"class/{number:03d}" for number in range(COUNT)} | {f"sample {COUNT}"}
        assert any(name in told(failure) for name in named), told(failure)
