"""Reading without shards: a GET for each image, by urllib3 or boto3, as many at a time as there are workers."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import urllib3
from loading import kernels
from loading.job import Batch, Job, Passes, batched

from remote.with_boto3 import make_client


def open_passes(job: Job) -> Passes:
    """Return a function that reads all images once, shuffled; their names are known beforehand."""
    url, options = job.options["url"], job.options.get("storage_options")
    names = [path.relative_to(job.files).as_posix() for path in sorted(job.files.glob("*/*.jpg"))]
    torch.set_num_threads(1)
    if options:
        bucket, _, folder = url.removeprefix("s3://").partition("/")
        mine = threading.local()
        clients = [make_client(options) for _ in range(job.workers)]

        def get(name: str) -> bytes:
            if not hasattr(mine, "client"):
                mine.client = clients.pop()
            data: bytes = mine.client.get_object(Bucket=bucket, Key=f"{folder}/{name}")["Body"].read()
            return data
    else:
        pool = urllib3.PoolManager(maxsize=job.workers)

        def get(name: str) -> bytes:
            response = pool.request("GET", f"{url}/{name}")
            if response.status != 200:
                raise ConnectionError(f"{url}/{name}: {response.status}")
            return response.data

    def make(name: str) -> tuple[Any, Any]:
        label = name.partition("/")[0]
        if job.task == "raw":
            return get(name), label.encode()
        return kernels.make_row(get(name), pillow=False), int(label)

    workers = ThreadPoolExecutor(job.workers)

    def one_pass() -> Iterator[Batch]:
        order = random.Random(0).sample(names, len(names))  # noqa: S311 - of a benchmark
        for samples in batched(workers.map(make, order), job.batch_size):
            values, labels = (list(column) for column in zip(*samples, strict=True))
            yield (values, labels) if job.task == "raw" else (torch.from_numpy(np.stack(values)), torch.tensor(labels))

    return one_pass
