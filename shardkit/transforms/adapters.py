"""Transforms of albumentations and torchvision, with results that depend only on seed, epoch and position.

By themselves, they are not repeatable if several threads call them: they draw from one generator, in whatever order the
threads arrive. Here each thread has its own copy, and the random numbers of a call depend only on its ``rng``.
"""

import copy
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.errors import ArgumentError, check_texts
from shardkit.sample import RESERVED
from shardkit.transforms.rng import Rng

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Albumentations:
    """A repeatable version of a transform of albumentations 2 or later, or of AlbumentationsX.

    For one field, as in ``transform={"image": Albumentations(...)}``, it gets the field's value as ``image``. For
    several fields, as in ``{("image", "mask"): ...}``, or as a function of the sample, it gets all of them under their
    names, which must be those of albumentations' targets: image, mask, bboxes, keypoints, ... Fields that are None are
    left out, and stay None.

    Args:
        transform: The transform, such as ``albumentations.Compose([...])``. It is copied; only copies are called.

    Raises:
        ArgumentError: It has no ``set_random_state``, by which its random numbers are chosen.

    Example:
        >>> class Shift:  # what shardkit uses of a transform of albumentations
        ...     def set_random_state(self, generator, _):
        ...         self.generator = generator
        ...     def __call__(self, image):
        ...         return {"image": image + self.generator.integers(9)}
        >>> shift = Albumentations(Shift())
        >>> int(shift(100, Rng(5))) == int(shift(100, Rng(5)))
        True
    """

    def __init__(self, transform: Callable[..., Mapping[str, Any]]) -> None:
        if not callable(transform) or not hasattr(transform, "set_random_state"):
            raise ArgumentError(
                f"transform is {type(transform).__name__}, expected a transform of albumentations 2 or later, which "
                "has set_random_state(); for others, pass a function with a parameter rng"
            )
        self._copies = _Copies(transform)

    def __call__(self, image: Any, rng: Rng) -> Any:
        """Return the transformed image, or the dict of targets that were transformed together.

        Args:
            image: uint8, (height, width, 3); or a dict of targets.
            rng: The source of all random numbers.
        """
        transform = self._copies.own()
        generator = random.Random(rng.bits())  # noqa: S311 - for an augmentation
        transform.set_random_state(np.random.default_rng(rng.bits()), generator)
        if not isinstance(image, Mapping):
            return transform(image=image)["image"]
        made = transform(**_fields(image))
        return {name: made.get(name, value) for name, value in image.items()}


class Torchvision:
    """A repeatable version of a transform of torchvision's v2.

    For one field it gets the field's value; for several, or as a function of the sample, a dict of their values. Images
    that are arrays become uint8 tensors with the channels first, which share the arrays' memory. Such tensors in the
    result become arrays again, so that batches have the same types as without an adapter. Other values are not changed.

    torch's random numbers come from a generator that belongs to this thread and this call; torch's global generator is
    not used. The generators of Python and NumPy are not controlled: torchvision's v2 does not use them.

    Args:
        transform: The transform, such as ``torchvision.transforms.v2.Compose([...])``. It is copied; only copies are
            called.
        nearest: Those of several fields that are masks, whose pixels are never mixed.

    Raises:
        ArgumentError: It cannot be called, or ``nearest`` is not a sequence of names.

    Example:
        >>> import numpy as np, torch
        >>> shift = Torchvision(lambda image: image + torch.randint(9, ()).to(image.dtype))  # draws as v2 does
        >>> a, b = (shift(np.zeros((2, 3, 3), np.uint8), Rng(5)) for _ in range(2))
        >>> a.shape, np.array_equal(a, b)
        ((2, 3, 3), True)
    """

    def __init__(self, transform: Callable[..., Any], *, nearest: Sequence[str] = ()) -> None:
        if not callable(transform):
            raise ArgumentError(f"transform is {transform!r:.80}, expected a transform of torchvision")
        self._copies = _Copies(transform)
        self._nearest = frozenset(check_texts("nearest", nearest))

    def __call__(self, image: Any, rng: Rng) -> Any:
        """Return the transformed image, or the dict of values that were transformed together.

        Args:
            image: uint8, (height, width, 3), a tensor or a PIL image; or a dict of these and others.
            rng: The source of all random numbers.

        Raises:
            ArgumentError: The transform draws through a torch function that does not take a generator.
        """
        transform = self._copies.own()
        with _keyed_randomness(rng.bits()):
            if not isinstance(image, Mapping):
                return _as_array(transform(_as_tensor(image)))
            made = transform({name: self._wrapped(name, value) for name, value in _fields(image).items()})
        return {name: _as_array(made[name]) if name in made else value for name, value in image.items()}

    def _wrapped(self, name: str, value: Any) -> Any:
        """Return a value as one of torchvision's types, which determine how it is transformed."""
        from torchvision import tv_tensors

        if name in self._nearest and isinstance(value, np.ndarray):
            return tv_tensors.Mask(_as_tensor(value))
        tensor = _as_tensor(value)
        return tensor if tensor is value else tv_tensors.Image(tensor)


class _Copies:
    """A transform, and a copy of it for every thread, so that threads do not share its internal state."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self._local = threading.local()

    def own(self) -> Any:
        """Return this thread's copy."""
        if not hasattr(self._local, "copy"):
            self._local.copy = copy.deepcopy(self._original)
        return self._local.copy

    def __reduce__(self) -> tuple[Any, ...]:
        return _Copies, (self._original,)


def _fields(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if value is not None and name not in RESERVED}


def _as_tensor(value: Any) -> Any:
    """Return an image as a tensor, (3, height, width), and any other value unchanged."""
    import torch

    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.shape[2:] != (3,):
        return value
    return torch.from_numpy(value if value.flags.writeable else value.copy()).permute(2, 0, 1)


def _as_array(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        value = value.as_subclass(torch.Tensor)
        if value.dtype == torch.uint8 and value.ndim == 3 and len(value) == 3:
            return value.permute(1, 2, 0).numpy()
    return value


def _keyed_randomness(key: int) -> "AbstractContextManager[Any]":
    """Return a context in which a key determines torch's random numbers in this thread."""
    import torch

    mode: AbstractContextManager[Any] = _mode()(torch.Generator().manual_seed(key))
    return mode


@cache
def _mode() -> type[Any]:
    import torch
    from torch.overrides import TorchFunctionMode

    class KeyedRandomness(TorchFunctionMode):
        """In this thread, passes a generator to every torch function that draws and was called without one."""

        def __init__(self, generator: torch.Generator) -> None:
            super().__init__()
            self._generator = generator

        def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if _draws(func) and kwargs.get("generator") is None:
                kwargs = {**kwargs, "generator": self._generator}
            return func(*args, **kwargs)

    return KeyedRandomness


@cache
def _draws(func: Any) -> bool:
    """Return whether a torch function draws random numbers.

    Raises:
        ArgumentError: It does, but it takes no generator.
    """
    import torch

    operator: Any = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
    names = operator.overloads() if hasattr(operator, "overloads") else ()  # __eq__ and the like are no operators there
    overloads = [getattr(operator, name) for name in names]
    if not any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads):
        return False
    if any(argument.name == "generator" for overload in overloads for argument in overload._schema.arguments):  # noqa: SLF001 - torch has no other way to ask
        return True
    raise ArgumentError(
        f"a transform draws random numbers by torch.{func.__name__}, which takes no generator, so that they could not "
        "be the same again; leave it to the network"
    )
