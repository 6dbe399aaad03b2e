"""Rank and world size are found where launchers put them, and are never guessed if one of them is missing."""

import pytest
from torch import distributed

from shardkit.errors import ArgumentError
from shardkit.order.ranks import find_place


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_without_a_launcher_a_process_is_alone():
    assert find_place() == (0, 1)


def test_what_the_user_says_comes_first_then_torch_distributed_then_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    from_environment = find_place()
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 3)

    assert from_environment == (2, 4)
    assert find_place() == (1, 3)
    assert find_place(0, 2) == (0, 2)


@pytest.mark.parametrize(
    ("rank", "world_size", "problem"),
    [
        (1, None, "arguments: rank is 1 and world_size is None; give both or neither"),
        (None, 2, "arguments: rank is None and world_size is 2; give both or neither"),
        (2, 2, r"rank must be in \[0, 2\), got 2"),
        (-1, 2, r"rank must be in \[0, 2\), got -1"),
        (0, 0, r"rank must be in \[0, 0\), got 0"),
        ("first", 2, "arguments: rank is 'first', expected a number"),
        ((0,), 2, r"rank must be a whole number, got \(0,\)"),
    ],
)
def test_what_cannot_be_is_an_error(rank, world_size, problem):
    with pytest.raises(ArgumentError, match=problem):
        find_place(rank, world_size)


@pytest.mark.parametrize("environment", [{"RANK": "1"}, {"WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}])
def test_an_environment_that_is_half_set_is_an_error_that_names_it(environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(ArgumentError, match="environment variables RANK and WORLD_SIZE: rank is"):
        find_place()
