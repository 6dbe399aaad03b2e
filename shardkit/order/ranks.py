"""The rank of this process and the number of ranks: from arguments, torch.distributed, or torchrun's environment."""

import os

from shardkit.errors import ArgumentError, check_whole


def find_place(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Return rank and world size: as given, or else torch.distributed's if it is initialised, or else torchrun's.

    If none of these is known, this is the only process: (0, 1).

    Raises:
        ArgumentError: Only one of the two is known, one is not a whole number, or rank is not in [0, world_size).

    Example:
        >>> find_place(1, 4)
        (1, 4)
    """
    if rank is not None or world_size is not None:
        return _check_place(rank, world_size, "arguments")
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    found = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if found == (None, None):
        return 0, 1
    return _check_place(*found, "environment variables RANK and WORLD_SIZE")


def _check_place(rank: int | str | None, world_size: int | str | None, where: str) -> tuple[int, int]:
    """Return rank and world size as numbers; ``where`` says where they come from. Raises ArgumentError."""
    if rank is None or world_size is None:
        raise ArgumentError(f"{where}: rank is {rank} and world_size is {world_size}; give both or neither")
    place = _number("rank", rank, where), _number("world_size", world_size, where)
    if not 0 <= place[0] < place[1]:
        raise ArgumentError(f"{where}: rank must be in [0, {place[1]}), got {place[0]}")
    return place


def _number(name: str, value: int | str, where: str) -> int:
    if not isinstance(value, str):
        return check_whole(name, value)
    try:
        return int(value)
    except ValueError as error:
        raise ArgumentError(f"{where}: {name} is {value!r}, expected a number") from error
