"""Transforms of other libraries are repeatable: their random numbers depend only on rng, in any thread."""

import importlib
import pickle
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from shardkit import Albumentations, Rng, ShardDataset, ShardLoader, Torchvision, pack
from shardkit.errors import ArgumentError
from tests.support import vision
from tests.support.shared import PHOTO


@pytest.fixture(scope="module")
def album():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")  # otherwise any process would ask the network for newer versions
        yield importlib.import_module("albumentations")


@pytest.fixture(scope="module")
def v2():
    """Return torchvision.transforms.v2, or a stand-in if it does not work with this build of torch."""
    try:
        yield importlib.import_module("torchvision.transforms.v2")
    except (ImportError, RuntimeError):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "torchvision", vision)
            yield vision


def rich_album(album):
    return album.Compose(
        [
            album.RandomResizedCrop(size=(20, 24)),
            album.HorizontalFlip(p=0.5),
            album.OneOf([album.GaussNoise(p=1), album.ColorJitter(p=1)], p=0.8),
            album.CoarseDropout(p=0.5),
        ]
    )


def rich_vision(v2):
    return v2.Compose(
        [
            v2.RandomCrop((20, 24)),
            v2.RandomHorizontalFlip(),
            v2.RandomErasing(),
        ]
    )


@pytest.fixture(params=["albumentations", "torchvision"])
def adapter(request):
    if request.param == "albumentations":
        return Albumentations(rich_album(request.getfixturevalue("album")))
    return Torchvision(rich_vision(request.getfixturevalue("v2")))


def test_equal_numbers_give_equal_images_and_others_others(adapter):
    made = [adapter(PHOTO, Rng(key)) for key in range(20)]
    again = pickle.loads(pickle.dumps(adapter))
    _ = [again(PHOTO, Rng(key)) for key in (7, 3)]

    assert all((image.dtype, image.shape) == (np.uint8, (20, 24, 3)) for image in made)
    assert all(np.array_equal(again(PHOTO, Rng(key)), image) for key, image in enumerate(made))
    assert len({image.tobytes() for image in made}) == 20


def test_threads_do_not_disturb_each_other(adapter):
    expected = [adapter(PHOTO, Rng(key)) for key in range(200)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda key: adapter(PHOTO, Rng(key)), range(200)))

    assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))


def test_global_generators_are_left_alone_and_have_no_say(adapter):
    def state():
        return bytes(torch.get_rng_state().numpy()), random.getstate()

    expected = adapter(PHOTO, Rng(1))
    torch.manual_seed(1)
    random.seed(1)
    before = state()
    again = adapter(PHOTO, Rng(1))

    assert state() == before
    assert np.array_equal(again, expected)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign") / "photos"
    rng = np.random.default_rng(0)
    samples = []
    for i in range(24):
        image = rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)
        mask = (image[:, :, 0] > 100).astype(np.uint8)
        samples.append({"__key__": f"{i:02d}", "png": image, "seg.npy": mask, "cls": i})
    pack(samples, folder, shard_samples=10, progress=False)
    return folder


FIELDS = {"image": "png", "mask": "seg.npy", "label": "cls"}


def epochs(photos, transform, **options):
    loader = ShardLoader(ShardDataset(photos, fields=FIELDS), 8, seed=3, transform=transform, **options)
    return [batch for _ in range(2) for batch in loader]


@pytest.mark.multiprocess
def test_a_loader_gives_the_same_with_any_number_of_threads_and_with_processes(photos, adapter):
    expected = epochs(photos, {"image": adapter}, num_workers=1)
    for options in ({"num_workers": 3}, {"num_workers": 2, "worker_type": "process"}):
        found = epochs(photos, {"image": adapter}, **options)

        assert [batch["__key__"] for batch in found] == [batch["__key__"] for batch in expected]
        assert all(torch.equal(a["image"], b["image"]) for a, b in zip(found, expected, strict=True))
    assert expected[0]["image"].shape == (8, 3, 20, 24)
    assert expected[0]["image"].is_contiguous(memory_format=torch.channels_last)


def test_an_image_and_its_mask_are_transformed_alike(photos, album, v2):
    crops = (
        Albumentations(album.Compose([album.RandomCrop(20, 24), album.HorizontalFlip()])),
        Torchvision(v2.Compose([v2.RandomCrop((20, 24)), v2.RandomHorizontalFlip()]), nearest=("mask",)),
    )
    for crop in crops:
        for batch in epochs(photos, {("image", "mask"): crop}):
            assert batch["image"].shape[1:] == (3, 20, 24)
            assert torch.equal(batch["mask"], (batch["image"][:, 0] > 100).to(torch.uint8))


def test_a_whole_sample_is_transformed_and_what_is_no_image_stays(photos, album, v2):
    crops = (Albumentations(album.RandomCrop(20, 24)), Torchvision(v2.RandomCrop((20, 24)), nearest=("mask",)))
    for crop in crops:
        batches = epochs(photos, crop)

        assert sorted(label for batch in batches[:3] for label in batch["label"].tolist()) == list(range(24))
        for batch in batches:
            assert [int(key) for key in batch["__key__"]] == batch["label"].tolist()
            assert torch.equal(batch["mask"], (batch["image"][:, 0] > 100).to(torch.uint8))


def test_fields_that_are_none_stay_none(album, v2):
    strict = album.Compose([album.RandomCrop(20, 24)], strict=True)
    crops = (Albumentations(strict), Torchvision(v2.RandomCrop((20, 24)), nearest=("mask",)))
    for crop in crops:
        made = crop({"__key__": "a", "image": PHOTO, "mask": None}, Rng(0))

        assert made["image"].shape == (20, 24, 3)
        assert (made["__key__"], made["mask"]) == ("a", None)


def test_tensors_and_pil_images_stay_what_they_are(v2):
    numbers = v2.Compose([v2.RandomCrop((8, 8)), v2.ToDtype(torch.float32, scale=True)])
    made = Torchvision(numbers)(PHOTO, Rng(0))
    frozen = PHOTO.copy()
    frozen.flags.writeable = False
    image = Torchvision(Image.Image.copy)(Image.fromarray(PHOTO), Rng(0))

    for tensor in (made, Torchvision(numbers)({"image": PHOTO}, Rng(0))["image"]):
        assert (type(tensor), tensor.dtype, tensor.shape) == (torch.Tensor, torch.float32, (3, 8, 8))
    assert torch.equal(Torchvision(numbers)(frozen, Rng(0)), made)
    assert isinstance(image, Image.Image)
    assert np.array_equal(np.asarray(image), PHOTO)


def draw(_, function):
    return function()


DRAWS = {
    "rand": lambda: torch.rand(3),
    "randn": lambda: torch.randn(3),
    "randint": lambda: torch.randint(1 << 40, (5,)),
    "randint from": lambda: torch.randint(3, 1 << 40, (5,)),
    "randperm": lambda: torch.randperm(20),
    "rand_like": lambda: torch.rand_like(torch.zeros(3)),
    "uniform_": lambda: torch.empty(3).uniform_(2, 3),
    "normal_": lambda: torch.empty(3).normal_(),
    "bernoulli": lambda: torch.bernoulli(torch.full((40,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(40), 5),
    "normal": lambda: torch.normal(torch.zeros(3)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_whatever_draws_in_torch_is_keyed(name):
    adapter = Torchvision(partial(draw, function=DRAWS[name]))

    assert torch.equal(adapter(None, Rng(1)), adapter(None, Rng(1)))
    assert not torch.equal(adapter(None, Rng(1)), adapter(None, Rng(2)))


def test_what_does_not_draw_is_as_it_is_without():
    def shift(image):
        return torch.where(image == 3, 255 - image, image * 2 % 7)[..., None].squeeze(-1)

    image = torch.arange(27, dtype=torch.uint8).reshape(3, 3, 3)

    assert torch.equal(torch.from_numpy(Torchvision(shift)(image, Rng(0))), shift(image).permute(1, 2, 0))


def test_a_generator_that_a_transform_has_of_its_own_is_used():
    def own(_):
        return torch.rand(3, generator=torch.Generator().manual_seed(5))

    assert torch.equal(Torchvision(own)(None, Rng(1)), Torchvision(own)(None, Rng(2)))


def test_what_cannot_be_keyed_is_an_error():
    for function in (torch.nn.functional.dropout, torch.nn.Dropout()):
        with pytest.raises(ArgumentError, match=r"draws random numbers by torch\.dropout, which takes no generator"):
            Torchvision(function)(torch.ones(3), Rng(0))


def test_what_is_no_transform_is_an_error(album):
    with pytest.raises(ArgumentError, match="expected a transform of albumentations 2 or later, which has set_random"):
        Albumentations(len)
    with pytest.raises(ArgumentError, match="expected a transform of albumentations"):
        Albumentations([album.HorizontalFlip()])
    with pytest.raises(ArgumentError, match="expected a transform of torchvision"):
        Torchvision([torch.nn.Identity()])
    with pytest.raises(
        ArgumentError, match=r"nearest must be a sequence of texts, got the text 'mask'; write \(\"mask\",\)"
    ):
        Torchvision(torch.nn.Identity(), nearest="mask")
