"""SPDL: threads that decode with FFmpeg, batch by batch, or with shardkit's decoder and kernels.

Shards are read whole and parsed by its own ``iter_tarfile``, which is faster than the standard library's tarfile.
"""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from loading import kernels
from loading.job import SIZE, Batch, Job, Passes

spdl_io: Any = import_module("spdl.io")
pipeline: Any = import_module("spdl.pipeline")

PACKAGES = ("spdl-core", "spdl-io")


def open_passes(job: Job) -> Passes:
    """Return a function that builds a pipeline, as in SPDL's documentation, and iterates over it once."""
    make = _raw if job.task != "image" else _ours if job.options.get("ours") else _ffmpeg
    return lambda: _run(job, make)


def _run(job: Job, make: Any) -> Iterator[Batch]:
    builder = pipeline.PipelineBuilder().add_source(_samples(job.shards)).aggregate(job.batch_size)
    built = builder.pipe(make, concurrency=job.workers).add_sink(4).build(num_threads=job.workers)
    with built.auto_stop():
        yield from built


def _samples(shards: list[str]) -> Iterator[dict[str, Any]]:
    """Yield samples whose fields are views of the shard's bytes."""
    sample: dict[str, Any] = {}
    current = None
    for shard in shards:
        for name, view in spdl_io.iter_tarfile(Path(shard).read_bytes()):
            key, _, field = name.partition(".")
            if key != current:
                if sample:
                    yield sample
                sample, current = {}, key
            sample[field] = view
    if sample:
        yield sample


def _raw(samples: list[dict[str, Any]]) -> Batch:
    first = "jpg" if "jpg" in samples[0] else "txt"
    return [bytes(sample[first]) for sample in samples], [bytes(sample["cls"]) for sample in samples]


def _labels(samples: list[dict[str, Any]]) -> list[int]:
    return [int(bytes(sample["cls"])) for sample in samples]


def _ffmpeg(samples: list[dict[str, Any]]) -> Batch:
    rng = Random()  # noqa: S311 - of a benchmark
    frames = []
    for sample in samples:
        packets = spdl_io.demux_image(bytes(sample["jpg"]))
        left, upper, right, lower = kernels.choose_box(packets.width, packets.height, rng)
        flip = "hflip," if rng.random() < 0.5 else ""
        steps = f"crop={right - left}:{lower - upper}:{left}:{upper},scale={SIZE}:{SIZE}:flags=bilinear"
        frames.append(spdl_io.decode_packets(packets, filter_desc=f"{steps},{flip}format=pix_fmts=rgb24"))
    return np.asarray(spdl_io.to_numpy(spdl_io.convert_frames(frames))), _labels(samples)


def _ours(samples: list[dict[str, Any]]) -> Batch:
    rng = Random()  # noqa: S311 - of a benchmark
    rows = np.empty((len(samples), SIZE, SIZE, 3), np.uint8)
    for row, sample in zip(rows, samples, strict=True):
        kernels.crop(kernels.decode(sample["jpg"]), rng, row)
    return rows, _labels(samples)
