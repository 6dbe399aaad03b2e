import unicodedata

import pytest

import shardkit
from shardkit.errors import IncompleteDatasetError
from shardkit.reading.missing import check_present
from shardkit.storage.local import LocalStorage
from shardkit.storage.registry import storage_for

SAMPLES = [{"__key__": f"{i:04d}", "cls": i} for i in range(30)]


@pytest.fixture
def folder(tmp_path):
    shardkit.pack(SAMPLES, tmp_path / "é", shard_samples=10, compression="none", progress=False)
    return tmp_path / "é"


def test_shards_in_other_folders_are_looked_for_there(folder, tmp_path):
    shardkit.index_shards(folder, out=tmp_path / "out")
    assert len(shardkit.ShardDataset(tmp_path / "out", allow_any_url=True)) == 30
    (folder / "é-000002.tar").unlink()

    with pytest.raises(IncompleteDatasetError, match=r"out: 1 of 3 shards are missing: \.\./é/é-000002\.tar; fetch"):
        shardkit.ShardDataset(tmp_path / "out", allow_any_url=True)


def test_a_folder_may_be_named_by_a_url(folder):
    assert len(shardkit.ShardDataset(folder.as_uri())) == 30
    (folder / "é-000000.tar").unlink()

    with pytest.raises(IncompleteDatasetError, match="1 of 3 shards are missing: é-000000"):
        shardkit.ShardDataset(folder.as_uri())


@pytest.mark.parametrize("change", [str.upper, lambda name: unicodedata.normalize("NFD", name)])
def test_file_systems_that_write_names_in_their_own_way_miss_nothing(folder, change, monkeypatch):
    names = LocalStorage.list
    monkeypatch.setattr(LocalStorage, "list", lambda self, url: list(map(change, names(self, url))))

    check_present(storage_for(str(folder)), shardkit.read_manifest(folder))


def test_of_a_folder_that_may_not_be_listed_nothing_is_said_to_be_missing(folder, monkeypatch):
    def refuse(_, url):
        raise shardkit.StorageError(f"{url}: access is refused; change the permissions")

    monkeypatch.setattr(LocalStorage, "list", refuse)

    assert len(shardkit.ShardDataset(folder)) == 30


def test_of_files_elsewhere_nothing_is_known_before_they_are_read(folder):
    from fsspec.implementations.memory import MemoryFileSystem

    memory = MemoryFileSystem()
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.endswith("0.tar"):
            memory.pipe(f"/missing/{path.relative_to(folder)}", path.read_bytes())
    dataset = shardkit.ShardDataset("memory://missing")

    assert dataset[25]["cls"] in range(30)
    with pytest.raises(shardkit.StorageError, match=r"000000\.tar: does not exist"):
        dataset[0]
