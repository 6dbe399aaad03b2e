"""A pack has its own folder: files of others in it are never mixed with the pack, and never deleted."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit import DatasetExistsError, pack, read_manifest
from shardkit.storage.registry import storage_for
from tests.support.folders import contents_of

SAMPLES = [{"__key__": f"{i}", "txt": f"{i}"} for i in range(3)]
SPLITS = {"train": 0.5, "val": 0.5}
SHARDS = ["out-000000.tar", "out-000007.tar.zst", "out-000000.parquet"]
names = st.sets(
    st.sampled_from([*SHARDS, "IMG_0001.jpg", "cat/1.jpg", "train/1.jpg", "other-000000.tar", "out.tar", "notes.txt"])
)


@given(names=names, overwrite=st.booleans(), splits=st.sampled_from([None, SPLITS]))
def test_a_folder_that_is_neither_empty_nor_a_dataset_is_refused(names, overwrite, splits):
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        for name in names:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(name.encode())
        before = contents_of(out)
        if (not splits and not names.isdisjoint(SHARDS)) or (names and not overwrite):
            with pytest.raises(DatasetExistsError, match=f"^{out}"):
                pack(SAMPLES, out, splits=splits, overwrite=overwrite, progress=False)
            assert contents_of(out) == before
        else:
            pack(SAMPLES, out, splits=splits, overwrite=overwrite, progress=False)
            assert contents_of(out).items() >= before.items()
            with_both = sum(read_manifest(out / split if split else out).num_samples for split in splits or [""])
            assert with_both == len(SAMPLES)


def test_what_is_said_names_a_file_and_what_to_do(tmp_path):
    (tmp_path / "photos").mkdir()
    for i in range(1200):
        (tmp_path / f"photos/{i:04d}.jpg").write_bytes(b"")

    with pytest.raises(
        DatasetExistsError, match=r"photos: holds 0000\.jpg and 1,199 more, and no dataset; choose an empty"
    ):
        pack(SAMPLES, tmp_path / "photos", progress=False)
    with pytest.raises(DatasetExistsError, match=r"photos: holds 0000\.jpg, which is no dataset; .* for the splits"):
        pack(SAMPLES, tmp_path / "photos", splits=SPLITS, progress=False)


def test_splits_come_to_lie_beside_other_datasets(tmp_path):
    pack(SAMPLES, tmp_path / "out/test", progress=False)
    pack(SAMPLES, tmp_path / "out", splits=SPLITS, progress=False)
    (tmp_path / "out/README.md").write_text("What the splits are of.")

    pack(SAMPLES, tmp_path / "out", splits=SPLITS, progress=False)  # finished, so there is nothing to do
    pack(SAMPLES, tmp_path / "out", splits=SPLITS, seed=1, overwrite=True, progress=False)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [".huggingface.yaml", "README.md", "test", "train", "val"]


def test_hidden_files_are_in_nobodys_way(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/.DS_Store").write_bytes(b"")

    assert pack(SAMPLES, tmp_path / "out", progress=False)["out"].num_samples == 3


def test_another_place_is_looked_at_too():
    storage = storage_for("memory://target")
    with storage.create("memory://target/out/notes.txt") as file:
        file.write(b"mine")

    with pytest.raises(DatasetExistsError, match=r"holds notes\.txt, and no dataset"):
        pack(SAMPLES, "memory://target/out", progress=False)
    assert pack(SAMPLES, "memory://target/out", overwrite=True, progress=False)["out"].num_samples == 3
    assert "notes.txt" in storage.list("memory://target/out")
