"""The command line reads and writes remote data, and its advice names its own options."""

import json

import pytest
from typer.testing import CliRunner

from shardkit.cli.app import app
from shardkit.storage.registry import storage_for
from tests.storage.s3.test_storage import options_for
from tests.support.matrix import SAMPLES, pack_samples


def run(*arguments, options=()):
    """Run a command, and return its output."""
    done = CliRunner().invoke(app, [*map(str, arguments), *options])
    assert done.exit_code == 0, done.output
    return done.stdout


def as_arguments(options):
    """Return storage options as they are written on the command line."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in options.items()}
    return [part for name, text in texts.items() for part in ("--storage-option", f"{name}={text}")]


def test_every_command_takes_what_is_in_a_bucket(moto, tmp_path):
    url, options = f"s3://{moto.make_bucket()}/train", as_arguments(options_for(moto))
    for key, data in SAMPLES.items():
        (tmp_path / f"{key}.bin").write_bytes(data)

    assert run("pack", tmp_path, url, "--kind", "files", "--shard-samples", 50, options=options).startswith(
        f"{url}: 200 samples in 4 shards"
    )
    assert "everything is as it should be" in run("verify", url, options=options)
    assert f"0007\tbin {len(SAMPLES['0007']):,}\n" in run("ls", url, options=options)
    assert run("ls", url, "--shards", options=options).count("train-00000") == 4
    assert CliRunner().invoke(app, ["cat", url, "0007", "bin", *options]).stdout_bytes == SAMPLES["0007"]
    assert "200" in run("stats", url, options=options)
    assert "effective batch" in run("shuffle-report", url, "--batch-size", 8, options=options)
    assert "200 samples" in run("index", url, "--out", tmp_path / "index", options=options)
    again = run("pack", url, f"{url}-again", "--kind", "shards", "--shard-samples", 100, options=options)
    assert "200 samples in 2 shards" in again


def test_uploads_that_were_begun_and_not_ended_are_listed_and_aborted(ceph):
    bucket, options = ceph.make_bucket(), options_for(ceph)
    url = f"s3://{bucket}/train"
    with ceph.client() as client:
        for key in ("train/a.tar", "train/b.tar", "val/a.tar"):
            client.create_multipart_upload(Bucket=bucket, Key=key)
    pack_samples(url, storage_options=options)
    arguments = as_arguments(options)

    assert [line.split()[1] for line in run("uploads", "ls", url, options=arguments).splitlines()] == [
        *[f"{url}/a.tar", f"{url}/b.tar"]
    ]
    assert {entry["url"] for entry in json.loads(run("uploads", "ls", url, "--json", options=arguments))} == {
        *[f"{url}/a.tar", f"{url}/b.tar"]
    }
    assert run("uploads", "abort", url, options=arguments) == f"{url}: 0 uploads aborted\n"  # they are too recent
    assert run("uploads", "abort", url, "--older-than", 0, options=arguments) == f"{url}: 2 uploads aborted\n"
    assert len(run("uploads", "ls", f"s3://{bucket}", options=arguments).splitlines()) == 1
    assert [name for name in storage_for(url, options).list(url) if name.endswith(".tar.zst")] == [
        f"train-{number:06d}.tar.zst" for number in range(4)
    ]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["uploads", "ls", "https://host/a"],
            "https://host/a: only S3 has unfinished uploads; write s3://bucket/folder",
        ),
        (["ls", "s3://bucket/a", "--storage-option", "password"], "--storage-option 'password': write name=value"),
        (
            ["ls", "s3://b/a", "--storage-option", "anno=1"],
            "--storage-option: anno is not an option of s3: key, secret",
        ),
        (
            ["index", "a.tar", "--out", "https://host/a"],
            "https://host/a: http and https can only be read; write to a local folder",
        ),
    ],
)
def test_errors_are_one_line_in_the_words_of_the_command_line(arguments, error):
    done = CliRunner().invoke(app, arguments)

    assert done.exit_code == 2
    assert f"error: {error}" in done.stderr
    assert done.stderr.count("\n") <= 2
