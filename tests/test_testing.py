"""assert_resumes_anywhere accepts a correct loader, and says what is wrong with an incorrect one."""

import itertools
import math

import numpy as np
import pytest
import torch

from shardkit.errors import ArgumentError
from shardkit.testing import assert_resumes_anywhere

COUNT = 10


class Loader:
    """A correct loader: ten samples, in a different order every epoch, in batches of three, three, three and one.

    Subclasses replace parts of it by incorrect ones.
    """

    def __init__(self, batch_size=3):
        self.batch_size = batch_size
        self.epoch = self.position = 0
        self.is_under_way = False

    def order(self):
        return [f"{(i * 3 + self.epoch) % COUNT:02d}" for i in range(COUNT)]

    def make(self, keys):
        return {"__key__": keys, "x": torch.tensor([int(key) / 7 for key in keys])}

    def begin(self):
        if self.is_under_way:
            self.epoch, self.position = self.epoch + 1, 0
        self.is_under_way = True

    def batches(self):
        order = self.order()
        while self.position < COUNT:
            start, self.position = self.position, min(self.position + self.batch_size, COUNT)
            yield self.make(order[start : self.position])

    def end(self):
        self.epoch, self.position, self.is_under_way = self.epoch + 1, 0, False

    def __iter__(self):
        self.begin()
        return self._pass()

    def _pass(self):
        yield from self.batches()
        self.end()

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state_dict):
        self.epoch, self.position = state_dict["epoch"], state_dict["position"]
        self.is_under_way = False


class LosesASample(Loader):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.position += self.position > 0


class RepeatsASample(Loader):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.position -= self.position > 0


class LosesTheRestOfTheEpoch(Loader):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.position = COUNT if self.position else 0


class BeginsTheEpochAgain(Loader):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict | {"position": 0})


class ForgetsTheEpoch(Loader):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict | {"epoch": 0})


class Resumed(Loader):
    """A correct loader that also knows whether it was resumed."""

    is_resumed = False

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.is_resumed = True


class Reorders(Resumed):
    def order(self):
        order = super().order()
        return order[: self.position] + sorted(order[self.position :]) if self.is_resumed else order


class DrawsOtherNumbers(Resumed):
    def make(self, keys):
        batch = super().make(keys)
        return batch | {"x": -batch["x"]} if self.is_resumed else batch


class DropsTheLastBatch(Resumed):
    def batches(self):
        for batch in super().batches():
            if len(batch["__key__"]) == self.batch_size or not self.is_resumed:
                yield batch


class NeverEnds(Resumed):
    def batches(self):
        yield from super().batches()
        while self.is_resumed:
            yield self.make([])


class HasAStateThatStays(Loader):
    def state_dict(self):
        return {"epoch": 0, "position": 0}


class HasTheStateOfTheEpochsBegin(Loader):
    def state_dict(self):
        return super().state_dict() | {"position": 0}


class CountsWhatIsMadeAhead(Loader):
    def batches(self):
        batches = super().batches()
        ahead = list(itertools.islice(batches, 2))
        for batch in batches:
            yield ahead.pop(0)
            ahead.append(batch)
        yield from ahead


class CountsFromWhereItResumed(Loader):
    resumed_at = 0

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.resumed_at = self.position

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position - self.resumed_at if self.position else 0}


class HasNoStateBeforeItBegins(Loader):
    def state_dict(self):
        return super().state_dict() if self.is_under_way or self.epoch else {}


class HasAStateThatIsAlive(Loader):
    def __init__(self):
        self.state = {}
        super().__init__()

    def state_dict(self):
        self.state.update(super().state_dict())
        return self.state

    def batches(self):
        for batch in super().batches():
            self.state_dict()
            yield batch


class IsDisturbed(Loader):
    def state_dict(self):
        state = super().state_dict()
        self.position += self.position == 6
        return state


class GoesOnWithTheSameEpoch(Resumed):
    def end(self):
        super().end()
        self.epoch -= self.is_resumed


class BeginsAnEpochThatItsStateSaysHasEnded(Loader):
    def state_dict(self):
        state = super().state_dict()
        return state if self.is_under_way or not self.epoch else {"epoch": self.epoch - 1, "position": 0}


class HasAnOrderOfItsOwn(Loader):
    serial = itertools.count()

    def __init__(self):
        super().__init__()
        self.first = next(self.serial)

    def order(self):
        return [f"{(i + self.first) % COUNT:02d}" for i in range(COUNT)]


class HasASet(Loader):
    def state_dict(self):
        return super().state_dict() | {"seen": {1, 2}}


class HasATensor(Loader):
    def state_dict(self):
        return super().state_dict() | {"random": torch.zeros(3)}


class HasATuple(Loader):
    def state_dict(self):
        return super().state_dict() | {"place": (1, 2)}


class HasNumbersForNames(Loader):
    def state_dict(self):
        return super().state_dict() | {3: 4}


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (
            LosesASample,
            "after 1 batches of epoch 0, and resumed: the rest: of its batches, number 0 is .'02'.*, exp.*'09'",
        ),
        (
            RepeatsASample,
            "after 1 batches of epoch 0, and resumed: the rest: of its batches, number 0 is .'06'.*, exp.*'09'",
        ),
        (LosesTheRestOfTheEpoch, "after 1 batches of epoch 0, and resumed: the rest: got 0 batches, expected 3"),
        (BeginsTheEpochAgain, "after 1 batches of epoch 0, and resumed: the rest: of its batches, number 0 is .'00'"),
        (ForgetsTheEpoch, "after 4 batches of epoch 0, at its end, and resumed: the rest: of its batches, number 0 is"),
        (Reorders, "before it began, and resumed: the rest: of its batches, number 0 is .'00', '01', '02'"),
        (DrawsOtherNumbers, "before it began, and resumed: the rest: of its batches, number 0 is"),
        (DropsTheLastBatch, "before it began, and resumed: the rest: got 3 batches, expected 4"),
        (NeverEnds, r"before it began, and resumed: the rest: got more than 4 batches, the next is \[\]"),
        (HasAStateThatStays, "after 1 batches of epoch 0, and resumed: the rest: of its batches, number 0 is .'00'"),
        (HasTheStateOfTheEpochsBegin, "after 1 batches of epoch 0, and resumed: the rest: of its batches, number 0 is"),
        (CountsWhatIsMadeAhead, "after 1 batches of epoch 0, and resumed: the rest: of its batches, number 0 is .'07'"),
        (
            CountsFromWhereItResumed,
            "epoch 0, resumed, stopped after a batch, and resumed again: of its batches, number 1",
        ),
        (
            HasAStateThatIsAlive,
            "the state that it had returned changed from {'epoch': 0, 'position': 0} to {'epoch': 0,",
        ),
        (
            IsDisturbed,
            r"after 2 batches of epoch 0, and continued: state_dict\(\) disturbed it: of its batches, number 0",
        ),
        (GoesOnWithTheSameEpoch, "before it began, and resumed: 1 epochs later: of its batches, number 0 is"),
        (
            BeginsAnEpochThatItsStateSaysHasEnded,
            "after 4 batches of epoch 0, at its end, and resumed: the rest: of its",
        ),
        (HasAnOrderOfItsOwn, "two loaders from make_loader, which must be new ones, give different batches: epoch 0"),
        (HasASet, "the state .*'seen': {1, 2}.* is not JSON: Object of type set is not JSON serializable"),
        (HasATensor, "the state .* is not JSON: Object of type Tensor is not JSON serializable"),
        (HasATuple, r"JSON makes .*'place': \[1, 2\].* of the state .*'place': \(1, 2\).*; keep it to text, numbers"),
        (HasNumbersForNames, "JSON makes .*'3': 4.* of the state .*, 3: 4"),
    ],
)
def test_a_loader_that_does_it_wrong_is_told_what(loader, says):
    with pytest.raises(AssertionError, match=says):
        assert_resumes_anywhere(loader)


def test_what_a_loader_raises_comes_out():
    with pytest.raises(KeyError, match="epoch"):
        assert_resumes_anywhere(HasNoStateBeforeItBegins)


def test_one_loader_again_and_again_is_told():
    loader = Loader()

    with pytest.raises(
        AssertionError, match="two loaders from make_loader, which must be new ones, give different batches"
    ):
        assert_resumes_anywhere(lambda: loader)


def test_a_loader_that_does_it_right_passes():
    assert_resumes_anywhere(Loader)
    assert_resumes_anywhere(Loader, epochs=4)
    assert_resumes_anywhere(Loader, resume_with=lambda: Loader(batch_size=4))
    assert_resumes_anywhere(lambda: Loader(batch_size=100), resume_with=lambda: Loader(batch_size=1))


def test_with_another_batch_size_samples_are_compared():
    with pytest.raises(
        AssertionError, match="epoch 0, and resumed: the rest: of its samples, number 0 is '02', expected"
    ):
        assert_resumes_anywhere(Loader, resume_with=lambda: LosesASample(batch_size=4))
    with pytest.raises(AssertionError, match="the rest: got 8 samples, expected 10"):
        assert_resumes_anywhere(Loader, resume_with=lambda: DropsTheLastBatch(batch_size=4))


def test_what_has_no_keys_cannot_be_compared_with_another_batch_size():
    class Bare(Loader):
        def make(self, keys):
            return keys

    assert_resumes_anywhere(Bare)
    with pytest.raises(ArgumentError, match=r"resume_with: needs batches that are dicts with '__key__', got \['00',"):
        assert_resumes_anywhere(Bare, resume_with=Bare)


def test_every_epoch_that_is_asked_for_is_gone_through():
    class FailsLate(Resumed):
        def order(self):
            return super().order()[:: -1 if self.is_resumed and self.epoch == 2 else 1]

    assert_resumes_anywhere(FailsLate)
    with pytest.raises(AssertionError, match="before it began, and resumed: 2 epochs later"):
        assert_resumes_anywhere(FailsLate, epochs=3)


def test_of_many_places_some_are_tried_the_first_and_the_last_among_them():
    tried = []

    class Noted(Loader):
        def load_state_dict(self, state_dict):
            super().load_state_dict(state_dict)
            tried.append((self.epoch, self.position))

    assert_resumes_anywhere(lambda: Noted(batch_size=1), max_stops=4)

    assert {(0, 0), (2, 0)} < set(tried)
    assert len(set(tried)) <= 2 * 6  # each is stopped again a batch later


def test_nothing_is_not_said_to_be_right():
    with pytest.raises(AssertionError, match="has no batches in 2 epochs"):
        assert_resumes_anywhere(LosesEverything)
    with pytest.raises(ArgumentError, match="epochs must be at least 1, got 0"):
        assert_resumes_anywhere(Loader, epochs=0)
    with pytest.raises(ArgumentError, match="max_stops must be at least 1, got 0"):
        assert_resumes_anywhere(Loader, max_stops=0)


class LosesEverything(Loader):
    def batches(self):
        return iter(())


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.tensor([1.0]), torch.tensor([[1.0]])),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), np.array([1.0], dtype=np.float32)),
        (np.array([0.0]), np.array([-0.0])),
        (np.array([1, 2], dtype="<i4"), np.array([1, 2], dtype=">i4")),
        (np.zeros(2, dtype=np.int32), np.zeros(1, dtype=np.int64)),
        (np.float32(0.0), np.float32(-0.0)),
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        ("1", b"1"),
        ([1, 2], [1]),
        ((1, 2), [1, 2]),
        ({"a": 1}, {"a": 1, "b": None}),
        ({"a": 1}, {"b": 1}),
        (None, 0),
    ],
)
def test_values_that_differ_in_a_bit_differ(value, other):
    class Different(Resumed):
        def make(self, _keys):
            return [other if self.is_resumed else value]

    with pytest.raises(AssertionError, match="the rest: of its batches, number 0 is"):
        assert_resumes_anywhere(Different)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([math.nan, -0.0]),
        torch.tensor(3),
        torch.ones(2, 3, requires_grad=True).T,
        np.array([math.nan]),
        math.nan,
        None,
        "x",
        [{}],
    ],
)
def test_values_that_are_equal_are_equal_and_nan_equals_itself(value):
    class Same(Loader):
        def make(self, _keys):
            return {"value": value}

    assert_resumes_anywhere(Same)
