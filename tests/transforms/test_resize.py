"""Resizing gives Pillow's result within two grey levels, wherever the pixels come from and go to."""

import threading
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shardkit.transforms import resize
from shardkit.transforms.resize import resize_linear, resize_nearest, use_one_thread
from tests.support.shared import PHOTO

sides = st.integers(1, 90)
NOISE = np.random.default_rng(0).integers(0, 256, (90, 90, 3), dtype=np.uint8)


def resized(pixels, size, *, mirrored=False, antialias=True):
    out = np.empty((*size, 3), np.uint8)
    resize_linear(pixels, out, mirrored=mirrored, antialias=antialias)
    return out


def difference(a, b):
    return np.abs(a.astype(int) - b).max()


def interpolated(pixels, size):
    """Return the result of linear interpolation without antialiasing, computed pixel by pixel."""
    out = pixels.astype(float)
    for axis in (0, 1):
        length = out.shape[axis]
        at = np.clip((np.arange(size[axis]) + 0.5) * length / size[axis] - 0.5, 0, length - 1)
        before = np.floor(at).astype(int)
        weight = (at - before).reshape((-1, 1, 1) if axis == 0 else (-1, 1))
        after = np.minimum(before + 1, length - 1)
        out = (1 - weight) * out.take(before, axis) + weight * out.take(after, axis)
    return out


@given(height=sides, width=sides, out_height=sides, out_width=sides)
def test_it_is_what_pillow_gives_within_two_grey_levels(height, width, out_height, out_width):
    pixels = NOISE[:height, :width]
    expected = Image.fromarray(pixels).resize((out_width, out_height), Image.Resampling.BILINEAR)

    assert difference(resized(pixels, (out_height, out_width)), np.asarray(expected)) <= 2


@given(height=sides, width=sides, out_height=sides, out_width=sides)
def test_without_antialiasing_each_pixel_is_made_of_the_four_around_it(height, width, out_height, out_width):
    pixels = NOISE[:height, :width]
    found = resized(pixels, (out_height, out_width), antialias=False)

    assert difference(found, interpolated(pixels, (out_height, out_width))) <= 2


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("size", [(20, 30), (40, 48), (60, 50), (300, 400)])  # torch uses threads for the largest
def test_mirrored_it_is_the_same_mirrored(size, antialias):
    straight = resized(PHOTO, size, antialias=antialias)

    assert np.array_equal(resized(PHOTO, size, mirrored=True, antialias=antialias), straight[:, ::-1])


def test_it_is_the_same_for_any_strides_and_for_what_cannot_be_written_to():
    expected = resized(PHOTO[3:30, 5:40].copy(), (20, 24))
    frozen = PHOTO[3:30, 5:40].copy()
    frozen.flags.writeable = False
    turned = np.ascontiguousarray(PHOTO.swapaxes(0, 1)).swapaxes(0, 1)

    assert np.array_equal(resized(PHOTO[3:30, 5:40], (20, 24)), expected)
    assert np.array_equal(resized(frozen, (20, 24)), expected)
    assert np.array_equal(resized(turned[3:30, 5:40], (20, 24)), expected)
    assert np.array_equal(resized(PHOTO[::-1, ::-1], (20, 24)), resized(PHOTO[::-1, ::-1].copy(), (20, 24)))


def test_rows_of_a_batch_are_written_in_place_and_their_neighbours_left_alone():
    batch = np.full((3, 20, 24, 3), 7, np.uint8)
    resize_linear(PHOTO, batch[1], mirrored=True, antialias=True)

    assert np.array_equal(batch[1], resized(PHOTO, (20, 24), mirrored=True))
    assert (batch[[0, 2]] == 7).all()


@pytest.mark.parametrize("antialias", [True, False])
def test_where_torch_has_no_such_operator_its_public_function_gives_the_same(monkeypatch, antialias):
    expected = resized(PHOTO, (20, 24), mirrored=True, antialias=antialias)
    resize._kernel.cache_clear()
    monkeypatch.setattr(torch.ops, "aten", types.SimpleNamespace())
    try:
        assert np.array_equal(resized(PHOTO, (20, 24), mirrored=True, antialias=antialias), expected)
    finally:
        resize._kernel.cache_clear()


def test_an_operator_of_torch_that_gives_something_else_is_not_used(monkeypatch):
    expected = resized(PHOTO, (20, 24))
    resize._kernel.cache_clear()
    other = types.SimpleNamespace(out=lambda *_, out: out.zero_())
    monkeypatch.setattr(torch.ops, "aten", types.SimpleNamespace(_upsample_bilinear2d_aa=other))
    try:
        assert np.array_equal(resized(PHOTO, (20, 24)), expected)
    finally:
        resize._kernel.cache_clear()


@given(length=sides, out_length=sides)
def test_the_nearest_pixel_is_the_one_that_the_middle_lies_in(length, out_length):
    out = np.empty((1, out_length), np.int64)
    resize_nearest(np.arange(length)[None], out, mirrored=False)
    doubled_distance = (2 * np.arange(out_length) + 1) * length - (2 * out[0] + 1) * out_length

    assert (np.abs(doubled_distance) <= out_length).all()


@pytest.mark.parametrize("size", [(1, 1), (11, 13), (40, 48), (80, 96)])
def test_the_nearest_pixels_are_those_that_pillow_takes(size):
    expected = np.asarray(Image.fromarray(PHOTO).resize(size[::-1], Image.Resampling.NEAREST))
    straight, mirrored = np.empty((2, *size, 3), np.uint8)
    resize_nearest(PHOTO, straight, mirrored=False)
    resize_nearest(PHOTO, mirrored, mirrored=True)

    assert np.array_equal(straight, expected)
    assert np.array_equal(mirrored, expected[:, ::-1])


@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.bool_, ">i2"])
@pytest.mark.parametrize("shape", [(7, 9), (7, 9, 1), (7, 9, 2, 3)])
def test_the_nearest_pixels_may_be_of_any_type(dtype, shape):
    pixels = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    out = np.empty((14, 18, *shape[2:]), dtype)
    resize_nearest(pixels, out, mirrored=False)

    assert np.array_equal(out, pixels.repeat(2, 0).repeat(2, 1))


def test_a_thread_that_uses_one_thread_changes_nothing_for_others():
    counts = []

    def count():
        counts.append(torch.get_num_threads())

    def use_and_count():
        use_one_thread()
        count()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for target in (use_and_count, count):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
        count()
    finally:
        torch.set_num_threads(before)

    assert counts == [1, 2, 2]
