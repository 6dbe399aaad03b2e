"""Helpers that tests of several modules share."""

import ctypes
import io
import os
import random
import signal
import subprocess
import sys
import threading
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.extra import numpy as npst
from PIL import Image

from shardkit.codecs.registry import Decoder, encode
from shardkit.errors import CodecError
from shardkit.format.tar import END_OF_ARCHIVE, member_header, padding

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
DECODER = Decoder()
COMPRESSIONS = ["none", "zst", "gz"]
every_compression = pytest.mark.parametrize("compression", COMPRESSIONS)


def saved(image, form, **options):
    """Return the bytes of an image file."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


# Smooth colours with some noise, so that the image is not trivial for any format.
PHOTO = np.clip(np.add.outer(np.arange(40) * 3, np.arange(48) * 2)[:, :, None] + [0, 20, 40], 0, 255).astype(np.uint8)
PHOTO[::3, ::5] ^= 21

PHOTO_FILES = {
    form: saved(Image.fromarray(PHOTO).convert(mode), kind)
    for form, mode, kind in (
        ("jpg", "RGB", "JPEG"),
        ("grey jpg", "L", "JPEG"),
        ("cmyk jpg", "CMYK", "JPEG"),
        ("png", "RGB", "PNG"),
        ("webp", "RGB", "WEBP"),
        ("gif", "RGB", "GIF"),
        ("tif", "RGB", "TIFF"),
    )
}
LARGE_PHOTO = np.asarray(Image.fromarray(PHOTO).resize((480, 400), Image.Resampling.BICUBIC))

# Arrays of all types that a file can hold.
dtypes = npst.scalar_dtypes() | npst.array_dtypes(max_size=3) | npst.unicode_string_dtypes() | npst.byte_string_dtypes()
arrays = npst.arrays(dtypes, npst.array_shapes(min_dims=0, min_side=0, max_side=4))


def examples(times):
    """Return settings with a multiple of the profile's number of examples, also in the nightly profile."""
    return settings(max_examples=max(1, round(times * settings().max_examples)))


def tar_of(members):
    """Return a tar of (name, data) pairs, as shardkit writes it, but without its rules about names."""
    parts = [member_header(name, len(data)) + data + bytes(padding(len(data))) for name, data in members]
    return b"".join(parts) + END_OF_ARCHIVE


def round_trip(field, value):
    """Return a value after encoding and decoding."""
    data = encode(field, value)

    assert isinstance(data, bytes)
    return DECODER.decode(field, data)


def same_array(a, b):
    """Return whether two arrays are equal to the last bit, including NaNs and the signs of zeros."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def peak_memory(function):
    """Return the peak of Python's memory during a function call, in bytes."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def run_program(*command, cwd=ROOT, **environment):
    """Return the output of a Python program that finds shardkit and the tests; fail with its errors if it fails.

    Args:
        command: The program and its arguments, as for ``python``.
        cwd: Its working folder.
        environment: Environment variables to change.
    """
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def started(command, **options):
    """Start a program with pipes, in a process group of its own, which ends with the test, however that ends."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, process_group=0, **pipes, **options) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def fork_beside_threads(work, in_child):
    """Fork twenty times while four threads keep working; return the children's exit codes: 0 for success.

    Args:
        work: Called repeatedly in each thread, with a random generator of its own.
        in_child: Called in a child with the fork's number; returns whether the child succeeded.
    """
    stop = threading.Event()

    def run(seed):
        draw = random.Random(seed)
        while not stop.is_set():
            work(draw)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    codes = []
    for number in range(20):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if in_child(number) else 1
            finally:  # also after an error, or the child would continue with the tests
                os._exit(code)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    stop.set()
    for thread in threads:
        thread.join()
    return codes


@contextmanager
def without_rights():
    """Make file permissions apply to this thread and the threads it starts, even if it runs as root."""
    libc, header = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(0x20080522, 0)
    rights = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, each twice 32 bits
    assert libc.capget(header, rights) == 0
    fewer = (ctypes.c_uint32 * 6)(*rights)
    fewer[0] = fewer[3] = 0
    assert libc.capset(header, fewer) == 0
    try:
        yield
    finally:
        assert libc.capset(header, rights) == 0


def refuses(field, data, cause, decoder=DECODER):
    """Check that data is refused for the given cause, and that this takes little memory."""

    def decode():
        with pytest.raises(CodecError, match=cause):
            decoder.decode(field, data, key="0001", url="a.tar")

    assert peak_memory(decode) < 4 * MIB + 2 * len(data)


def assert_same_batch(ours, theirs):
    """Check that two batches have the same fields in the same order, of the same types and values."""
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert_same_value(value, theirs[name])


def assert_same_value(ours, theirs):
    """Check that two values, and the values in them, have the same bits, types and order."""
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        assert torch.equal(ours, theirs)
    elif isinstance(ours, np.ndarray | np.generic):
        assert same_array(ours, theirs)
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        assert_same_value(list(ours.values()), list(theirs.values()))
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same_value(one, other)
    else:
        assert ours == theirs


def misplace(dataset, field, part, value):
    """Change a field of the eighth sample in the second shard's index: 0 for its offset, 1 for its size."""
    rows = dataset._access.indexes.rows(1, 0)
    writable = tuple(array.copy() for array in rows.members[field])
    writable[part][7] = value
    rows.members[field] = writable
