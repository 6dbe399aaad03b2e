import inspect
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from shardkit import errors
from shardkit.errors import ShardkitError, hide_secrets

MESSAGE = "shard a.tar: ends at byte 3,072 without an end-of-archive mark; fetch or write it again"
ERRORS = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, ShardkitError)]

every_error = pytest.mark.parametrize("error_class", ERRORS, ids=lambda error_class: error_class.__name__)


class RaisesEveryError(Dataset):
    """A dataset that raises an error of class number i for sample number i."""

    def __len__(self):
        return len(ERRORS)

    def __getitem__(self, position):
        raise ERRORS[position](MESSAGE, url="a.tar", offset=3072, key="a/b", field="seg.png")


@every_error
def test_an_error_is_built_from_one_message(error_class):
    error = error_class(MESSAGE)

    assert str(error) == MESSAGE
    assert error.args == (MESSAGE,)
    assert (error.url, error.offset, error.key, error.field) == ("", None, "", "")


@every_error
def test_an_error_survives_pickling_with_its_attributes(error_class):
    error = error_class(MESSAGE, url="a.tar", offset=3072, key="a/b", field="seg.png")

    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is error_class
    assert str(copy) == MESSAGE
    assert (copy.url, copy.offset, copy.key, copy.field) == ("a.tar", 3072, "a/b", "seg.png")


@pytest.mark.multiprocess
def test_an_error_of_a_torch_worker_arrives_as_itself_with_its_message():
    loader = iter(DataLoader(RaisesEveryError(), num_workers=1, multiprocessing_context="spawn"))

    for error_class in ERRORS:
        with pytest.raises(ShardkitError, match=re.escape(MESSAGE)) as caught:
            next(loader)

        assert type(caught.value) is error_class


@pytest.mark.parametrize(
    ("error_class", "builtin"),
    [
        *[(errors.ArgumentError, ValueError), (errors.MissingExtraError, ImportError), (errors.StorageError, OSError)],
        *[(errors.MissingFileError, FileNotFoundError), (errors.AccessError, PermissionError)],
    ],
)
def test_an_error_that_python_has_a_word_for_is_caught_by_it(error_class, builtin):
    with pytest.raises(builtin, match=re.escape(MESSAGE)):
        raise error_class(MESSAGE)


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes():
    drawn = re.findall(r"^ {4}((?:[│ ] {3})*)(?:[├└]── )?(\w+Error)\b", errors.__doc__, flags=re.MULTILINE)
    path, parents = [], {}
    for indent, name in drawn:
        path[len(indent) // 4 + bool(path) :] = [name]
        parents[name] = path[-2] if path[1:] else None

    classes = {c.__name__: next((b.__name__ for b in c.__bases__ if b in ERRORS), None) for c in ERRORS}
    assert parents == classes
    assert list(parents) == list(classes)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pass@host:1/a?sig=x&b=c", "https://host:1/a?..."),
        ("'https://host/a.tar?sig=x': is", "'https://host/a.tar?...': is"),
        ("https://host/a?sig=x, and https://host/b?sig=y.", "https://host/a?..., and https://host/b?...."),
        ("(see HTTP://me@host/a?b=c:d)", "(see HTTP://host/a?...)"),
        ("simplecache::https://me:p@host/a?b", "simplecache::https://host/a?..."),
        ("sftp://me:pass@host/a is", "sftp://host/a is"),
        ("s3://bucket/a?b@c", "s3://bucket/a?b@c"),
        ("a@b? c", "a@b? c"),
    ],
)
def test_passwords_and_queries_of_urls_are_in_no_message(text, shown):
    error = ShardkitError(text, url=text)

    assert (str(error), error.url) == (shown, shown)


pieces = st.lists(
    st.sampled_from(["http://", "https://", "s3://", "host", "/", "?", "#", "@", ":", " ", ",", "'", ")", "."])
)


@given(before=pieces, after=pieces)
def test_hiding_is_what_it_was_and_no_longer_query_takes_more_than_its_length(before, after):
    """Compare with a pattern that does the same in one line, but takes time quadratic in the length of a query."""
    text = "".join([*before, "?", *after])
    query = r"(https?://[^\s?#]*)\?(?!\.\.\.)[^\s#'\"]*?(?=[,;:.)\]}]*(?:[\s#'\"]|\Z))"
    without_users = re.sub(r"(?<=://)[^\s/?#]*@", "", text)

    assert hide_secrets(text) == (re.sub(query, r"\1?...", without_users) if "://" in text else text)


@given(password=st.text("aZ9@:!$%&*+,;=-._~", min_size=1), query=st.text("aZ9&=%/@:+,.-_~", min_size=4))
def test_neither_a_password_nor_a_query_is_shown(password, query):
    shown = hide_secrets(f"https://me:<{password}>@host/a.tar?<{query}>: is missing; look")

    assert shown.startswith("https://host/a.tar?...")
    assert "<" not in shown
    assert shown.endswith("look")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text", ["https://h/?" + ",;:." * 10**6, "http://" * 10**6, "https://h/?" * 10**6, "s3://@" * 10**6]
)
def test_long_texts_are_hidden_at_once(text):
    assert len(hide_secrets(text)) <= len(text) + 10
