"""webdataset's pipelines give the same results with a reader that notices damage and reorders every epoch."""

import logging
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset as wds
from torch.utils.data import DataLoader

from shardkit.codecs.registry import encode
from shardkit.errors import ArgumentError, MissingExtraError, ShardError, TooManySkippedError
from shardkit.loading.stream import StreamWarning
from shardkit.packing.writer import ShardWriter
from shardkit.sample import KEY, URL
from shardkit.webdataset import WebDataset
from tests.support.shared import tar_of as tar

pytestmark = [
    # A stream warns if shards have no index.
    pytest.mark.filterwarnings("ignore::shardkit.loading.stream.StreamWarning"),
    # webdataset never closes the shards that it opens.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than this machine has cores
]

multiprocess = pytest.mark.multiprocess
WORKERS = [0, pytest.param(2, marks=multiprocess)]


def members(number):
    image = np.full((4, 6, 3), number, np.uint8)
    return [(f"{number:03d}.png", encode("png", image)), (f"{number:03d}.cls", b"%d" % (number % 3))]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Eight shards of five samples, as a brace pattern."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(8):
        data = tar([member for i in range(5) for member in members(5 * shard + i)])
        (folder / f"a-{shard}.tar").write_bytes(data)
    return str(folder / "a-{0..7}.tar")


@pytest.fixture
def damaged(shards, tmp_path):
    """Three shards; the second is cut between two samples."""
    for shard in range(3):
        data = Path(shards.replace("{0..7}", str(shard))).read_bytes()
        (tmp_path / f"a-{shard}.tar").write_bytes(data[: 4 * 1024] if shard == 1 else data)
    return str(tmp_path / "a-{0..2}.tar")


def classic(dataset):
    """The pipeline of webdataset's own documentation."""
    return dataset.shuffle(1000).decode("rgb").to_tuple("jpg;png", "cls").batched(16)


def numbers_of(batches):
    """Return which samples are in batches of images, and check that each has the correct label."""
    images, labels = (np.concatenate([np.asarray(batch[part]) for batch in batches]) for part in (0, 1))
    numbers = np.rint(images[:, 0, 0, 0] * 255).astype(int)
    assert (numbers % 3 == labels).all()
    return numbers.tolist()


def keys_of(samples):
    return [sample[KEY] for sample in samples]


def without_path(samples):
    return [{name: value for name, value in sample.items() if name != "__local_path__"} for sample in samples]


@pytest.mark.parametrize("as_list", [False, True])
def test_samples_are_those_of_webdataset_in_their_order(shards, as_list):
    urls = wds.shardlists.expand_urls(shards) if as_list else shards
    ours = list(WebDataset(urls, shardshuffle=False))

    assert ours == without_path(wds.WebDataset(urls, shardshuffle=False))
    assert len(ours) == 40


def test_decoded_samples_are_those_of_webdataset(shards):
    def pipeline(dataset):
        return dataset.decode("torchrgb8").rename(image="jpg;png", label="cls").to_tuple("image", "label", "__key__")

    ours, theirs = list(pipeline(WebDataset(shards))), list(pipeline(wds.WebDataset(shards, shardshuffle=False)))

    assert len(ours) == len(theirs) == 40
    for our, their in zip(ours, theirs, strict=True):
        assert torch.equal(our[0], their[0])
        assert our[1:] == their[1:]


@pytest.mark.parametrize("workers", WORKERS)
def test_the_classic_pipeline_gives_every_sample_once_and_in_another_order_every_epoch(shards, workers):
    loader = wds.WebLoader(classic(WebDataset(shards, shardshuffle=100)), batch_size=None, num_workers=workers)
    first, second = numbers_of(list(loader)), numbers_of(list(loader))

    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second


@multiprocess
@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_agree_about_the_order_of_every_epoch(shards, context, persistent):
    dataset = WebDataset(shards, shardshuffle=True, seed=3)
    loader = DataLoader(
        dataset, batch_size=None, num_workers=2, persistent_workers=persistent, multiprocessing_context=context
    )
    alone = WebDataset(shards, shardshuffle=True, seed=3)
    for _ in range(2):
        keys, order = keys_of(loader), keys_of(alone)
        of_workers = [order[5 * shard : 5 * shard + 5] for shard in range(8)]

        # The shards are dealt to the workers in turn, and the loader takes samples from them in turn.
        pairs = zip(of_workers[0::2], of_workers[1::2], strict=True)
        assert keys == [key for left, right in pairs for both in zip(left, right, strict=True) for key in both]


def test_all_shards_change_places_whatever_the_number_that_shardshuffle_has(shards):
    dataset = WebDataset(shards, shardshuffle=2)
    firsts = {next(iter(dataset))[URL] for _ in range(100)}

    assert len(firsts) == 8


def test_the_samples_of_a_shard_stay_together_unless_several_shards_are_open(shards):
    one, four = (keys_of(WebDataset(shards, shardshuffle=True, open_shards=n)) for n in (1, 4))

    assert all(one[i : i + 5] == sorted(one[i : i + 5]) for i in range(0, 40, 5))
    assert {int(key) // 5 for key in one[:5]} == {int(one[0]) // 5}
    assert len({int(key) // 5 for key in four[:4]}) == 4


def test_the_same_seed_and_epoch_are_the_same_order(shards):
    dataset = WebDataset(shards, shardshuffle=100, seed=1)
    first, second = keys_of(dataset), keys_of(dataset)
    dataset.set_epoch(0)

    assert keys_of(dataset) == first
    assert keys_of(WebDataset(shards, shardshuffle=100, seed=1)) == first
    assert keys_of(WebDataset(shards, shardshuffle=100, seed=2)) not in (first, second)


def test_without_shardshuffle_the_order_is_that_of_the_shards(shards):
    dataset = WebDataset(shards)

    assert keys_of(dataset) == keys_of(dataset) == [f"{i:03d}" for i in range(40)]


def test_a_pipeline_that_another_was_made_of_is_still_itself(shards):
    dataset = WebDataset(shards)
    shorter = dataset.slice(3)

    assert len(list(shorter)) == 3
    assert len(list(dataset)) == 40


def test_webdatasets_stages_are_there(shards):
    dataset = WebDataset(shards)

    assert keys_of(dataset.select(lambda sample: sample["cls"] == b"1"))[:3] == ["001", "004", "007"]
    assert next(iter(dataset.map_dict(cls=int)))["cls"] == 0
    assert next(iter(dataset.to_tuple("cls").map_tuple(int))) == (0,)
    assert [len(part) for part in dataset.listed(30)] == [30, 10]
    assert len(list(dataset.batched(30).unbatched())) == 40
    assert len(list(dataset.compose(wds.shuffle(10), wds.decode()))) == 40
    # These methods change the dataset that they are called on.
    assert len(list(WebDataset(shards).with_epoch(100))) == 100
    assert len(list(WebDataset(shards).repeat(2))) == 80
    assert len(WebDataset(shards).with_length(40, silent=True)) == 40


def test_only_fields_that_are_named_are_in_the_samples(shards):
    assert next(iter(WebDataset(shards, fields={"label": "cls"}))) == {
        KEY: "000",
        URL: shards.replace("{0..7}", "0"),
        "label": b"0",
    }


def test_urls_may_be_joined_as_webdataset_joins_them(shards):
    first, last = (shards.replace("{0..7}", number) for number in "07")

    assert len(list(WebDataset(f"{first}::{last}"))) == 10


def test_urls_may_have_variables_as_webdataset_has_them(shards, monkeypatch):
    folder = str(Path(shards).parent)
    monkeypatch.setenv("WDS_ROOT", folder)
    monkeypatch.setenv("WDS_FIRST", "${ROOT}/a-0.tar")
    urls = "${FIRST}::${ROOT}/a-{2..3}.tar"

    assert [sample[KEY] for sample in WebDataset(urls)] == [
        sample[KEY] for sample in wds.WebDataset(urls, shardshuffle=False)
    ]
    assert len(list(WebDataset([f"{folder}/a-0.tar"]))) == 5


def test_a_variable_that_there_is_not_is_an_error(monkeypatch):
    monkeypatch.setenv("ROOT", "/here")
    monkeypatch.setenv("WDS_A", "${B}")
    monkeypatch.setenv("WDS_B", "${A}")

    with pytest.raises(ArgumentError, match=r"\$\{ROOT\} is the environment variable WDS_ROOT.*there is none; set it"):
        WebDataset("${ROOT}/a.tar")
    with pytest.raises(ArgumentError, match="name variables again and again"):
        WebDataset("${A}/a.tar")


def test_the_second_argument_is_the_handler(damaged):
    assert len(list(WebDataset(damaged, wds.ignore_and_continue))) == len(list(WebDataset(damaged, on_error="skip")))
    with pytest.raises(ArgumentError, match=r"handler=True: is not known here; write on_error='skip'"):
        WebDataset(damaged, True)


def test_a_dataset_is_compared_with_its_index(tmp_path):
    with ShardWriter(str(tmp_path / "words"), compression="none") as writer:
        writer.write({KEY: "0", "txt": "hello"})
    shard = tmp_path / "words" / "words-000000.tar"
    shard.write_bytes(shard.read_bytes().replace(b"hello", b"hallo"))

    assert [sample["txt"] for sample in wds.WebDataset(str(shard), shardshuffle=False)] == [b"hallo"]
    with pytest.raises(ShardError, match="damaged field 'txt'"):
        list(WebDataset(str(tmp_path / "words")))


def test_compressed_datasets_are_read(tmp_path):
    for compression in ("zst", "gz"):
        with ShardWriter(str(tmp_path / compression), compression=compression) as writer:
            writer.write({KEY: "0", "txt": "hello"})

        assert list(WebDataset(str(tmp_path / compression)).decode().to_tuple("txt")) == [("hello",)]


@pytest.mark.parametrize("workers", WORKERS)
def test_a_damaged_shard_is_an_error(damaged, workers):
    theirs = list(wds.WebDataset(damaged, shardshuffle=False))

    assert len(theirs) == 5 + 2 + 5, "webdataset notices it now"
    with pytest.raises(ShardError, match=r"a-1\.tar: ends at or before byte 4,096"):
        list(wds.WebLoader(WebDataset(damaged), batch_size=None, num_workers=workers))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    "options", [{"on_error": "skip"}, {"handler": wds.warn_and_continue}, {"handler": wds.ignore_and_continue}]
)
def test_damaged_shards_are_skipped_and_counted_if_asked_for(damaged, workers, options, caplog):
    caplog.set_level(logging.CRITICAL)
    dataset = WebDataset(damaged, **options)
    keys = keys_of(DataLoader(dataset.map(dict), batch_size=None, num_workers=workers))

    assert sorted(keys) == [f"{i:03d}" for i in (0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14)]
    assert dataset.skipped == (0, 1)


@pytest.mark.parametrize("shardshuffle", [False, True])
def test_no_whole_sample_before_damage_is_held_back(damaged, shardshuffle):
    keys, samples = [], iter(WebDataset(damaged.replace("{0..2}", "1"), shardshuffle=shardshuffle))
    with pytest.raises(ShardError):
        keys.extend(sample[KEY] for sample in samples)

    assert keys == ["005"]


def test_skipping_has_a_bound(damaged):
    with pytest.raises(TooManySkippedError):
        list(WebDataset(damaged, on_error="skip", max_skipped=0))


@multiprocess
def test_workers_without_shards_end_cleanly(shards):
    dataset = WebDataset(shards.replace("{0..7}", "0"))

    assert len(list(DataLoader(dataset, batch_size=None, num_workers=2))) == 5


def test_ranks_share_the_shards(shards, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    keys = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        keys += keys_of(WebDataset(shards, shardshuffle=100))

    assert sorted(keys) == [f"{i:03d}" for i in range(40)]


def test_a_warning_points_at_the_line_that_made_the_dataset(shards):
    with pytest.warns(StreamWarning, match="without an index") as warned:
        WebDataset(shards)

    assert [warning.filename for warning in warned] == [__file__]


def test_it_is_a_context_manager(shards):
    with WebDataset(shards) as dataset:
        samples = list(dataset)

    assert len(samples) == 40
    assert not hasattr(dataset, "pipeline")  # like a closed dataset of webdataset


@pytest.mark.parametrize(
    "options",
    [
        {"handler": wds.reraise_exception},
        {"nodesplitter": wds.split_by_node, "workersplitter": wds.split_by_worker, "detshuffle": True},
        {"nodesplitter": wds.shardlists.single_node_only, "shardshuffle": None},
        {"resampled": False, "cache_dir": None, "cache_size": 0, "empty_check": False, "verbose": False},
    ],
)
def test_arguments_of_webdataset_that_say_what_happens_anyway_are_taken(shards, options):
    assert len(list(WebDataset(shards, **options))) == 40


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"resampled": True}, "exactly once an epoch"),
        ({"mode": "resampled"}, "no modes"),
        ({"repeat": True}, r"\.repeat\(\)"),
        ({"cache_dir": "cache"}, "copy them to a local disk"),
        ({"cache_size": -1}, "not cached"),
        ({"url_to_name": str}, "not cached"),
        ({"select_files": bool}, "fields="),
        ({"rename_files": str}, r"\.rename"),
        ({"empty_check": True}, "just ends"),
        ({"verbose": True}, "never did anything"),
        ({"nodesplitter": None}, "leave both out"),
        ({"workersplitter": None}, "leave both out"),
        ({"handler": wds.warn_and_stop}, "on_error='skip'"),
        ({"open_shards": 0}, "open_shards must be at least 1"),
    ],
)
def test_other_arguments_are_errors_that_say_what_to_use(shards, options, advice):
    with pytest.raises(ArgumentError, match=advice):
        WebDataset(shards, **options)


def test_commands_are_not_run(tmp_path):
    with pytest.raises(ArgumentError):
        list(WebDataset(f"pipe:touch {tmp_path}/ran"))

    assert not (tmp_path / "ran").exists()


def test_decode_unpickles_as_the_documentation_warns(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar([("a.pyd", pickle.dumps({"b": 1}))]))

    assert list(WebDataset(str(tmp_path / "a.tar")).decode().to_tuple("pyd")) == [({"b": 1},)]
    assert "unpickles" in WebDataset.__doc__


def test_without_webdataset_the_error_says_how_to_install_it():
    program = (
        "import sys; sys.modules['webdataset'] = None\n"
        "try:\n    import shardkit.webdataset\n"
        "except ImportError as error:\n    print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.startswith(MissingExtraError.__name__)
    assert "pip install 'shardkit[webdataset]'" in done.stdout
