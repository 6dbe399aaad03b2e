"""Training loops of other libraries accept a ShardLoader, and resume it if they save the state of loaders."""

import itertools

import pytest
import torch

import shardkit
from shardkit.testing import assert_resumes_anywhere

COUNT, BATCH_SIZE = 50, 16
KEYS = [f"{i:03d}" for i in range(COUNT)]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ecosystem") / "train"
    samples = ({"__key__": key, "npy": torch.full((4,), int(key) / COUNT).numpy(), "cls": 3} for key in KEYS)
    shardkit.pack(samples, folder, shard_bytes="20kB", block_bytes="3kB", progress=False)
    return shardkit.ShardDataset(folder, fields={"x": "npy", "label": "cls"})


@pytest.fixture
def make_loader(dataset):
    return lambda: shardkit.ShardLoader(dataset, BATCH_SIZE, num_workers=1)


class StoppedError(Exception):
    """Stands for any error that ends a training."""


@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning:pytorch_lightning")
def test_lightning_trains_with_a_loader_and_resumes_it_with_its_checkpoints(make_loader, tmp_path):
    import pytorch_lightning as lightning

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.network = torch.nn.Linear(4, 10)
            self.seen = []

        def training_step(self, batch, _):
            self.seen.append((self.current_epoch, batch["__key__"]))
            return torch.nn.functional.cross_entropy(self.network(batch["x"]), batch["label"])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Stop(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 6:  # in the second epoch
                trainer.save_checkpoint(tmp_path / "checkpoint.ckpt")
                raise StoppedError

    def train(model, callback=None, checkpoint=None, state=None):
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=3, callbacks=callback, default_root_dir=tmp_path, **quiet
        )
        loader = make_loader()
        if state is not None:
            loader.load_state_dict(state)
        trainer.fit(model, loader, ckpt_path=checkpoint)
        return loader

    undisturbed, stopped, resumed = Model(), Model(), Model()
    train(undisturbed)
    with pytest.raises(StoppedError):
        train(stopped, callback=Stop())
    train(resumed, checkpoint=tmp_path / "checkpoint.ckpt")

    later = Model()
    train(later, state=make_loader().state_dict() | {"epoch": 1, "position": 2 * BATCH_SIZE})

    assert stopped.seen + resumed.seen == undisturbed.seen
    assert [keys for _, keys in later.seen[:6]] == [keys for _, keys in undisturbed.seen[6:]]
    assert len(stopped.seen) == 6
    for epoch in range(3):
        assert sorted(key for number, keys in undisturbed.seen if number == epoch for key in keys) == KEYS
    assert torch.equal(resumed.network.weight, undisturbed.network.weight)


def test_torchdata_nodes_take_a_loader_and_resume_it(make_loader):
    from torchdata.nodes import IterableWrapper, Loader, Prefetcher

    prefetched, ours = Loader(Prefetcher(IterableWrapper(make_loader()), prefetch_factor=2)), make_loader()
    for _ in range(2):
        assert [batch["__key__"] for batch in prefetched] == [batch["__key__"] for batch in ours]

    # By default, nodes start the next epoch at once if nothing remains of the current one.
    assert_resumes_anywhere(lambda: Loader(IterableWrapper(make_loader()), restart_on_stop_iteration=False))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning:torchdata")
def test_torchdatas_stateful_dataloader_takes_the_dataset_and_the_sampler_and_resumes_within_an_epoch(
    dataset, make_loader
):
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make_stateful():
        return StatefulDataLoader(dataset, batch_sampler=shardkit.ShardSampler(dataset, BATCH_SIZE))

    expected = [batch["__key__"] for batch in make_loader()]
    stopped, resumed = make_stateful(), make_stateful()
    taken = [batch["__key__"] for batch in itertools.islice(stopped, 2)]
    resumed.load_state_dict(stopped.state_dict())

    assert taken + [batch["__key__"] for batch in resumed] == expected
