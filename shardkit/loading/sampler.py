"""The order of an epoch for a stock DataLoader: batches of numbers of samples."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

from shardkit.errors import ArgumentError, check_whole
from shardkit.order.plan import Batches, IntArray
from shardkit.order.ranks import find_place
from shardkit.reading.dataset import ShardDataset

_AT_A_TIME = 1 << 14  # positions that are planned at a time: about 10 ms, or a microsecond each


class ShardSampler(Sampler[list[int]]):
    """Yield the sample numbers of each batch of this rank, in the order of a ``ShardLoader``.

    Pass it to a stock ``DataLoader`` as ``batch_sampler=``, not as ``sampler=``: only then does every rank get the same
    number of batches. The order is the same for any ``num_workers``. Every sample is returned exactly once per epoch,
    over all ranks.

    Each iteration is the next epoch, from 0. Only a ``ShardLoader`` can resume within an epoch. Lightning uses its own
    sampler instead, unless its Trainer is given ``use_distributed_sampler=False``.

    Args:
        dataset: The dataset.
        batch_size: How many samples a batch of this rank has. The last batch may have fewer. If fewer samples than
            ranks would remain after a batch, they are added to it, and some ranks get one more.
        shuffle: Whether each epoch has a different order. False for the dataset's own order.
        seed: The key of the orders.
        lanes: How many places of the dataset a batch draws from; by default as for ``ShardLoader``.
        drop_last: Leave out the last batch if it is not full.
        rank: This process's number: by default torch.distributed's, otherwise that in torchrun's environment,
            otherwise 0.
        world_size: The number of ranks, found in the same way.

    Raises:
        ArgumentError: An argument is out of range; or while iterating, there are fewer samples than ranks.

    Example:
        >>> import tempfile, shardkit
        >>> from torch.utils.data import DataLoader
        >>> folder = tempfile.mkdtemp() + "/digits"
        >>> samples = ({"__key__": f"{i:04d}", "cls": i} for i in range(10))
        >>> _ = shardkit.pack(samples, folder, progress=False)
        >>> dataset = shardkit.ShardDataset(folder, fields={"label": "cls"})
        >>> batches = DataLoader(dataset, batch_sampler=ShardSampler(dataset, batch_size=4, seed=1))
        >>> [len(batch["label"]) for batch in batches]
        [4, 4, 2]
    """

    def __init__(
        self,
        dataset: ShardDataset,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        lanes: int | None = None,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if not isinstance(dataset, ShardDataset):
            raise ArgumentError(f"dataset is {type(dataset).__name__}, expected ShardDataset('path/of/the/dataset')")
        self.dataset = dataset
        self.batch_size = check_whole("batch_size", batch_size, least=1)
        self._shuffle = bool(shuffle)
        self._seed = check_whole("seed", seed)
        self._lanes = dataset.order(seed=0, epoch=0, lanes=lanes, shuffle=self._shuffle).lanes
        self._drop_last = bool(drop_last)
        self._place = rank, world_size
        self._epoch = 0
        self._find_batches()

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration this epoch, and later iterations the epochs that follow.

        It is not needed: each iteration is the next epoch anyway.

        Args:
            epoch: The number of the epoch, from 0.

        Raises:
            ArgumentError: It is negative, or not a whole number.
        """
        self._epoch = check_whole("epoch", epoch, least=0)

    def __len__(self) -> int:
        """Return the number of batches, which is the same for every rank."""
        return self._find_batches()[0].count()

    def __iter__(self) -> Iterator[list[int]]:
        # Only when the first batch is requested: a DataLoader with workers calls iter() twice for its first epoch.
        epoch, self._epoch = self._epoch, self._epoch + 1
        batches, rank = self._find_batches()
        if batches.leaves_ranks_empty(0):
            raise batches.too_few()
        plan = self.dataset.order(seed=self._seed, epoch=epoch, lanes=self._lanes, shuffle=self._shuffle)
        position = 0
        while True:
            dealt: list[IntArray] = []
            while len(dealt) * self.batch_size < _AT_A_TIME and (stop := batches.stop(position)) is not None:
                dealt.append(plan.deal(position, stop, rank, batches.world_size))
                position = stop
            if not dealt:
                return
            samples = plan.samples_at(np.concatenate(dealt))
            for batch in np.split(samples, np.cumsum([len(positions) for positions in dealt])[:-1]):
                yield batch.tolist()

    def _find_batches(self) -> tuple[Batches, int]:
        """Return the batches of an epoch, and the rank. It is looked up now: torch.distributed may start late."""
        rank, world_size = find_place(*self._place)
        batches = Batches(
            num_samples=len(self.dataset),
            batch_size=self.batch_size,
            world_size=world_size,
            drop_last=self._drop_last,
        )
        return batches, rank
