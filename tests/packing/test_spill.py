"""Samples in a spill come back unchanged, with one read per segment, and other programs' files are not touched."""

import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import SourceError
from shardkit.format.shard_writer import EncodedSample, sample_size
from shardkit.packing import spill as spills
from shardkit.packing.spill import Spill, Staging, read_segment, write_segments
from shardkit.storage.local import LocalStorage
from tests.support.shared import peak_memory

letters = st.text("aé貓/", min_size=1, max_size=90).map(lambda text: f"{text.strip('/').replace('//', '')}k" * 2)
members = st.dictionaries(st.sampled_from(["cls", "jpg", "seg.png", "x"]), st.binary(max_size=1500), min_size=1)
samples = st.builds(
    EncodedSample,
    key=letters,
    members=members.map(lambda found: tuple(sorted(found.items()))),
    source=st.none() | st.text("/aé\\ ", max_size=20),
)


class Counted(LocalStorage):
    """A storage that counts reads of ranges."""

    def __init__(self):
        self.reads = []

    def read_range(self, url, start, size, *, fresh=False):
        self.reads.append((Path(url).name, start, size))
        return super().read_range(url, start, size, fresh=fresh)


def spilled(storage, folder, given_samples):
    segments = list(write_segments(storage, f"{folder}/{'0' * 16}", given_samples, shard_bytes=10**6))
    return Spill(storage, f"{folder}/{'0' * 16}", segments, is_kept=True)


def sort(spill, order):
    for task in spill.sort_tasks(order):
        spill.end_sort(task.run(threading.Event()))


@given(
    given_samples=st.lists(samples, max_size=30),
    segment_bytes=st.integers(1, 20_000),
    seed=st.integers(0, 99),
    cut=st.integers(0, 30),
)
def test_samples_come_back_in_the_order_of_the_plan_by_one_read_of_each_segment(
    given_samples, segment_bytes, seed, cut
):
    storage = Counted()
    order = np.random.default_rng(seed).permutation(len(given_samples))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(spills, "SEGMENT_BYTES", segment_bytes)
        spill = spilled(storage, folder, given_samples)
        sizes = [sample_size(s.key, ((name, len(data)) for name, data in s.members)) for s in given_samples]

        assert spill.tar_sizes.tolist() == sizes
        assert list(spill.keys()) == [s.key for s in given_samples]
        assert list(spill.take(order)) == [given_samples[i] for i in order]
        assert {f for fields in spill.fields() for f in fields} == {f for s in given_samples for f, _ in s.members}

        storage.reads.clear()
        assert list(spill.take(np.arange(len(order)))) == given_samples
        assert len({name for name, _, _ in storage.reads}) == len(storage.reads)

        digest = spill.digest
        sort(spill, order)

        assert not list(Path(folder).glob("*[0-9].tar"))
        assert list(spill.keys()) == [s.key for s in given_samples]
        for part in (order[:cut], order[cut:]):
            storage.reads.clear()
            assert list(spill.take(part)) == [given_samples[i] for i in part]
            assert len({name for name, _, _ in storage.reads}) == len(storage.reads)
        there = [path.name for path in Path(folder).iterdir()]
        urls = [f"{folder}/{'0' * 16}-{number:06d}" for number in range(len(there) // 2)]
        again = Spill(storage, f"{folder}/{'0' * 16}", [read_segment(storage, u, there) for u in urls], is_kept=True)

        assert again.digest == digest
        assert list(again.sort_tasks(order)) == []
        assert list(again.take(order)) == [given_samples[i] for i in order]


def test_of_many_large_segments_little_is_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(spills, "SEGMENT_BYTES", 2_000_000)
    data = bytes(50_000)
    spill = spilled(LocalStorage(), tmp_path, (EncodedSample(f"{i}", (("bin", data),)) for i in range(800)))
    order = np.random.default_rng(0).permutation(800)
    sort(spill, order)
    taken = []

    assert peak_memory(lambda: taken.extend(sample.key for sample in spill.take(order))) < 12_000_000
    assert taken == [str(i) for i in order]


def test_a_table_that_is_damaged_or_a_segment_that_is_gone_is_written_again(tmp_path):
    storage = LocalStorage()
    spill = spilled(storage, tmp_path, [EncodedSample("a", (("cls", b"1"),))])
    url = f"{tmp_path}/{'0' * 16}-000000"
    sort(spill, np.array([0]))
    whole = Path(f"{url}.table").read_bytes()
    names = [f"{'0' * 16}-000000.table", f"{'0' * 16}-000000-sorted.tar"]

    assert read_segment(storage, url, names).fields == ("cls",)
    assert read_segment(storage, url, names[:1]) is None
    assert read_segment(storage, url, names[1:]) is None
    for at in range(len(whole)):
        Path(f"{url}.table").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert read_segment(storage, url, names) is None
        Path(f"{url}.table").write_bytes(whole[:at])
        assert read_segment(storage, url, names) is None


def test_a_segment_that_is_gone_before_it_is_sorted_is_an_error(tmp_path):
    spill = spilled(LocalStorage(), tmp_path, [EncodedSample("a", (("cls", b"1"),))])
    (tmp_path / f"{'0' * 16}-000000.tar").unlink()

    with pytest.raises(SourceError, match=r"000000\.tar: was cut or changed while it was in use"):
        sort(spill, np.array([0]))
    with pytest.raises(SourceError, match=r"000000\.tar: was cut or changed while it was in use"):
        list(spill.keys())


def test_staging_deletes_what_is_its_own_and_nothing_else(tmp_path):
    staging = Staging(str(tmp_path), LocalStorage(), is_shared=True)
    folder = tmp_path / "__staging__"
    folder.mkdir()
    own = [f"{'a' * 16}-000000.tar", f"{'a' * 16}-000000.table", f"{'b' * 16}-000000-sorted.tar", ".shardkit-0123"]
    for name in [*own, "notes.txt", "train-000000.tar"]:
        (folder / name).write_text("x")

    assert staging.clear(keep="b" * 16) == {own[2]}
    assert {path.name for path in folder.iterdir()} == {own[2], "notes.txt", "train-000000.tar"}
    assert staging.clear() == set()
    assert {path.name for path in folder.iterdir()} == {"notes.txt", "train-000000.tar"}
