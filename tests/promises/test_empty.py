"""A dataset without samples, such as a split of few samples, has length 0, however it is read."""

import json

from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import shardkit
from shardkit.cli.app import app


def listed(url):
    result = CliRunner().invoke(app, ["ls", "--json", url])

    assert result.exit_code == 0
    return [json.loads(line)["key"] for line in result.stdout.splitlines()]


def counted(url):
    result = CliRunner().invoke(app, ["stats", "--json", url])

    assert result.exit_code == 0
    return json.loads(result.stdout)["samples"]


@given(number=st.integers(1, 4), share=st.sampled_from([0.1, 0.5]), compression=st.sampled_from(["none", "zst"]))
def test_every_reader_gives_as_many_samples_of_a_split_as_there_are(tmp_path_factory, number, share, compression):
    folder = tmp_path_factory.mktemp("splits") / "photos"
    samples = [{"__key__": f"{i}", "cls": i} for i in range(number)]
    splits = {"train": share, "val": 1 - share}
    manifests = shardkit.pack(samples, folder, splits=splits, compression=compression, progress=False)
    found = []
    for name, manifest in manifests.items():
        url = str(folder / name)
        dataset = shardkit.ShardDataset(url)
        keys = [sample["__key__"] for sample in dataset[:]]
        stream = shardkit.ShardStream(url)
        loader = shardkit.ShardLoader(dataset, batch_size=2)
        report = shardkit.verify(url)

        assert len(dataset) == manifest.num_samples == stream.num_samples == report.samples == len(keys) == counted(url)
        assert report.ok
        assert sorted(sample["__key__"] for sample in stream) == sorted(keys)
        assert sorted(key for batch in loader for key in batch["__key__"]) == sorted(keys)
        assert [sample["__key__"] for sample in shardkit.ShardSource(url)] == keys == listed(url)
        found += keys
    urls = [folder / name for name in manifests]

    assert sorted(found) == [str(i) for i in range(number)]
    assert sorted(sample["__key__"] for sample in shardkit.ShardStream(urls)) == sorted(found)
    assert shardkit.index_shards(urls, out=folder / "both").num_samples == number
    assert shardkit.pack(shardkit.ShardSource(urls), folder / "again", progress=False)["again"].num_samples == number
