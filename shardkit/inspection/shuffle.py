"""The shuffle report: how well a dataset is mixed for training, what that costs, and how to improve it.

It is computed from the manifest and the order's plan alone; no shard and no index is read.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np

from shardkit.errors import ArgumentError, DatasetError, MissingExtraError, check_path, check_whole, hide_secrets
from shardkit.format.manifest import Manifest, read_manifest
from shardkit.hashing import derive
from shardkit.inspection.mixing import (
    BUFFER_SAMPLES,
    BUFFER_WORKERS,
    LIMIT,
    Course,
    Layout,
    Mixing,
    count_held,
    follow_buffer,
    follow_permutation,
    follow_plan,
    measure,
    read_amplification,
    spread_run,
)
from shardkit.order.plan import LANES, OrderPlan, default_lanes
from shardkit.reading.index_cache import cannot_read_blocks
from shardkit.storage.base import format_bytes, join, parse_bytes
from shardkit.storage.local import LocalStorage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORLD_SIZES = (1, 2, 3, 4, 6, 7, 8, 12, 16, 24, 32, 64, 128)
"""The numbers of ranks for which the report says how much they read, if the dataset has a batch for each rank."""

_GOOD = 0.9  # a figure of at least this fraction of a random permutation's needs no advice
_WASTEFUL = 1.1  # reading at most this multiple of the dataset needs no advice

_PICTURES = (".png", ".svg")
_PICTURE_LIMIT = LIMIT >> 2  # the samples measured for each dot
_SOME_LANES = (1, 4, 15, 60, 240, 960, 3840)
_SOME_BUFFERS = (100, BUFFER_SAMPLES, 10_000, 100_000)
_OTHER_KEY = derive(0)  # for the buffers and the permutation that the order is compared with: never an order's key


@dataclass(frozen=True)
class ShuffleReport:
    """How well a dataset is mixed, and what that costs.

    Attributes:
        url: The dataset.
        num_samples: The number of samples.
        num_shards: The number of shards.
        num_blocks: The number of blocks.
        block_samples: The number of samples in a block; the last block of a shard may have fewer.
        sample_bytes: The average size of a sample in memory.
        read_bytes: The average number of bytes read for a block.
        packed_shuffled: Whether the dataset was packed in a random order, so that its shards are random samples of it.
        packed_in_order: Whether it was packed in its source's order. Both are False if ``pack`` did not write the
            dataset.
        batch_size: The batch size of one rank.
        world_size: How many ranks share a global batch.
        lanes: How many lanes the order has.
        seed: The seed of the order.
        epoch: The epoch of the order.
        plan: How well the order mixes.
        buffer: How well webdataset's ``shuffle(1000)`` in 8 workers per rank mixes, simulated.
        uniform: How well a random permutation mixes.
        spread_run: How many neighbours are spread over the epoch nearly as far as in a random order. If the source was
            sorted by class, smaller classes are missing from long parts of an epoch, unless it was packed shuffled.
        in_memory: Whether the whole dataset fits into a loader's ``memory``, so that each rank reads a block once.
        read_amplification: For each number of ranks, how many bytes they read together, as a multiple of the dataset's
            size.
        sampled: Whether the dataset is so large that only some batches, shards and blocks were measured.
    """

    url: str
    num_samples: int
    num_shards: int
    num_blocks: int
    block_samples: int
    sample_bytes: float
    read_bytes: float
    packed_shuffled: bool
    packed_in_order: bool
    batch_size: int
    world_size: int
    lanes: int
    seed: int
    epoch: int
    plan: Mixing
    buffer: Mixing
    uniform: Mixing
    spread_run: int
    in_memory: bool
    read_amplification: Mapping[int, float]
    sampled: bool
    _layout: Layout = field(repr=False, compare=False)

    @property
    def advice(self) -> tuple[str, ...]:
        """Advice on each figure that is bad, in a few sentences; empty if none is bad."""
        return tuple(self._advice())

    def _advice(self) -> Iterator[str]:
        size, amplification = self.batch_size * self.world_size, self.read_amplification[self.world_size]
        if min(self.plan.effective_batch_by_shard, self.plan.effective_batch_by_block) < _GOOD:
            more = min((n for n in LANES if n >= size), default=LANES[-1])
            text = f"A batch takes {size / self.lanes:.1f} samples of each lane, and these lie together."
            if self.lanes < more <= self.num_blocks:
                held = self.plan.held_samples * self.sample_bytes * more / self.lanes
                text += f" {more:,} lanes would take fewer, and hold about {format_bytes(held)}."
            if not self.packed_shuffled:
                text += " Or pack the dataset again, shuffled: then samples that lie together are not alike."
            yield text
        if self.plan.dispersion_by_shard < _GOOD * self.uniform.dispersion_by_shard:
            yield (
                f"A shard has only {self.num_blocks / self.num_shards:.0f} blocks, so its samples come at only a few "
                "points in the epoch. Pack it again with a smaller block_bytes."
            )
        if self.packed_in_order and self.spread_run > 2:
            yield (
                "The dataset was packed in its source's order. If that is sorted by class, classes of fewer than about "
                f"{self.spread_run:,} samples are missing from long parts of an epoch. Then pack it again, shuffled, "
                "or use more lanes."
            )
        if self.in_memory:
            return
        if self.lanes % self.world_size and amplification > _WASTEFUL:
            fitting = self.world_size * max(1, round(self.lanes / self.world_size))
            yield (
                f"{self.world_size:,} ranks do not divide {self.lanes:,} lanes, so some blocks are read by two ranks. "
                f"With {fitting:,} lanes they are not."
            )
        elif amplification > _WASTEFUL:
            yield (
                f"The ends of {self.lanes:,} lanes cut many of only {self.num_blocks:,} blocks in two, which are read "
                "twice, because the dataset does not fit into the loader's memory. Fewer lanes cut fewer."
            )

    def to_json(self) -> str:
        """Return the report as JSON text."""
        values = {name: value for name, value in vars(self).items() if name != "_layout"} | {"advice": self.advice}
        mixings = {name: asdict(value) for name, value in values.items() if isinstance(value, Mixing)}
        return json.dumps(values | mixings, indent=1)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw a picture of the report.

        The upper half shows how well the order and a buffer mix, by the number of samples that they hold. The lower
        half shows when each sample comes in the epoch: an even colour is good, and streaks are samples of a shard that
        come together.

        Args:
            path: The file, ``.png`` or ``.svg``. An existing file is replaced.

        Raises:
            ArgumentError: The file is neither.
            StorageError: The file cannot be written.
            MissingExtraError: matplotlib is not installed.
        """
        path = check_path("plot", path)
        if not path.lower().endswith(_PICTURES):
            raise ArgumentError(f"plot {path!r}: is a picture of an unknown kind, expected .png or .svg")
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                f"plot: needs matplotlib ({error}); install it with: pip install 'shardkit[plot]'"
            ) from error
        figure = Figure(figsize=(11, 8), dpi=120, layout="constrained")
        figure.suptitle(
            f"{self.num_samples:,} samples in {self.num_shards:,} shards, blocks of {self.block_samples:,}, "
            f"batches of {self.batch_size:,} x {self.world_size:,}"
        )
        axes = figure.subplot_mosaic("aaabbb;ccddee")
        curves = {"this order, by lanes": self._orders(), "webdataset's shuffle(), by buffer": self._buffers()}
        for letter, figure_name, title in (
            ("a", "effective_batch_by_shard", "effective batch, by shard"),
            ("b", "dispersion_by_shard", "spread of a shard over the epoch"),
        ):
            _draw_curves(axes[letter], curves, figure_name, self.num_samples)
            axes[letter].set_title(title)
        figure.legend(*axes["a"].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        courses = _courses(self._layout, self._order(self.lanes), self.batch_size, self.world_size)
        titles = (f"this order, {self.lanes:,} lanes", f"webdataset's shuffle({BUFFER_SAMPLES})", "random permutation")
        for letter, course, title in zip("cde", courses, titles, strict=True):
            _draw_course(axes[letter], course, self.num_samples)
            axes[letter].set_title(title)
        axes["c"].set_ylabel("place in the dataset, %")
        with LocalStorage().create(path, overwrite=True) as file:
            figure.savefig(file, format=path.rpartition(".")[2].lower())

    def _order(self, lanes: int) -> OrderPlan:
        counts, size = self._layout.counts, self._layout.block_samples
        return OrderPlan(counts, size, seed=self.seed, epoch=self.epoch, lanes=lanes)

    def _orders(self) -> dict[int, Mixing]:
        """Return how well the order mixes with other numbers of lanes."""
        layout, size = self._layout, self.batch_size * self.world_size
        mixings: dict[int, Mixing] = {}
        for lanes in sorted({n for n in _SOME_LANES if n <= min(self.num_blocks, 4 * self.lanes)} | {self.lanes}):
            plan = self._order(lanes)
            course = follow_plan(plan, layout, size, limit=_PICTURE_LIMIT)
            mixings[lanes] = measure(course, layout, size, count_held(plan, layout))
        return mixings

    def _buffers(self) -> dict[int, Mixing]:
        """Return how well buffers of some sizes mix, up to those that would hold the whole dataset."""
        layout, ranks = self._layout, self.world_size
        mixings: dict[int, Mixing] = {}
        for n in _SOME_BUFFERS:
            held = _held_by_buffers(layout, ranks, n)
            if mixings and held == self.num_samples:
                break
            course = follow_buffer(
                layout, self.batch_size, key=_OTHER_KEY, world_size=ranks, buffer_samples=n, limit=_PICTURE_LIMIT
            )
            mixings[n] = measure(course, layout, self.batch_size * ranks, held)
        return mixings


def shuffle_report(
    url: str | PathLike[str],
    batch_size: SupportsIndex = 256,
    *,
    world_size: SupportsIndex = 1,
    lanes: SupportsIndex | None = None,
    memory: int | str = "1GB",
    seed: SupportsIndex = 0,
    epoch: SupportsIndex = 0,
    storage_options: Mapping[str, object] | None = None,
    allow_any_url: bool = False,
) -> ShuffleReport:
    """Report how well the samples of a dataset are mixed in training, and what that costs.

    Only the manifest is read. If there are more than about a million samples, about a million of them are measured.

    Args:
        url: The dataset.
        batch_size: The batch size of one rank.
        world_size: How many ranks share a global batch.
        lanes: How many lanes the order has; by default as many as a loader chooses.
        memory: The ``memory`` of the loader: if the dataset fits into it, each rank reads a block once and keeps it.
        seed: The seed of the order.
        epoch: The epoch of the order.
        storage_options: Passed to the storage.
        allow_any_url: Accept shards outside the folder. Only for manifests whose author you trust.

    Raises:
        ArgumentError: An argument is out of range.
        UnfinishedDatasetError: The dataset is being written, or its writer was killed.
        DatasetError: There is no manifest, it is unusable, or its shards cannot be read by block.

    Example:
        >>> import tempfile, shardkit
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     samples = ({"__key__": f"{i}", "cls": i} for i in range(1000))
        ...     packed = shardkit.pack(samples, f"{folder}/train", block_bytes="10kB", progress=False)
        ...     report = shuffle_report(f"{folder}/train", 32)
        >>> report.lanes, report.packed_shuffled, round(report.plan.effective_batch_by_shard, 1)
        (60, True, 1.0)
    """
    batch_size = check_whole("batch_size", batch_size, least=1)
    world_size = check_whole("world_size", world_size, least=1)
    seed, epoch = check_whole("seed", seed), check_whole("epoch", epoch)
    manifest = read_manifest(url, storage_options=storage_options, allow_any_url=allow_any_url)
    layout = _layout(manifest)
    tar_bytes, stored_bytes = (sum(getattr(s, size) for s in manifest.shards) for size in ("tar_size", "file_size"))
    if lanes is None:
        lanes = default_lanes(layout.num_blocks, tar_bytes / layout.num_blocks)
    plan = OrderPlan(layout.counts, layout.block_samples, seed=seed, epoch=epoch, lanes=lanes)
    in_memory = tar_bytes <= parse_bytes(memory)
    ranks = sorted({n for n in WORLD_SIZES if n * batch_size <= layout.num_samples} | {1, world_size})
    amplification = {n: read_amplification(plan, layout, batch_size, n, in_memory=in_memory) for n in ranks}
    held_by_plan = round(amplification[world_size] * layout.num_samples) if in_memory else count_held(plan, layout)
    held = (held_by_plan, _held_by_buffers(layout, world_size, BUFFER_SAMPLES), layout.num_samples)
    courses = _courses(layout, plan, batch_size, world_size)
    of_plan, of_buffer, of_uniform = (
        measure(course, layout, batch_size * world_size, n) for course, n in zip(courses, held, strict=True)
    )
    seed_of_pack = manifest.request.get("seed", "")  # None if the order was kept
    return ShuffleReport(
        url=hide_secrets(manifest.url),
        num_samples=layout.num_samples,
        num_shards=len(manifest.shards),
        num_blocks=layout.num_blocks,
        block_samples=layout.block_samples,
        sample_bytes=tar_bytes / layout.num_samples,
        read_bytes=stored_bytes / layout.num_blocks,
        packed_shuffled=isinstance(seed_of_pack, int),
        packed_in_order=seed_of_pack is None,
        batch_size=batch_size,
        world_size=world_size,
        lanes=plan.lanes,
        seed=seed,
        epoch=epoch,
        plan=of_plan,
        buffer=of_buffer,
        uniform=of_uniform,
        spread_run=spread_run(plan),
        in_memory=in_memory,
        read_amplification=amplification,
        sampled=layout.num_samples > LIMIT,
        _layout=layout,
    )


def _layout(manifest: Manifest) -> Layout:
    if manifest.num_samples == 0:
        raise DatasetError(f"{manifest.url}: has no samples, so there is nothing to shuffle", url=manifest.url)
    for shard in manifest.shards:
        if not shard.is_block_readable:
            raise cannot_read_blocks(manifest.url, join(manifest.url, shard.url), shard.compression)
    return Layout(np.array([shard.samples for shard in manifest.shards], dtype=np.int64), manifest.block_samples)


def _courses(layout: Layout, plan: OrderPlan, batch_size: int, world_size: int) -> Iterator[Course]:
    """Yield the measured parts of the order, of a buffer's order and of a random permutation."""
    yield follow_plan(plan, layout, batch_size * world_size)
    yield follow_buffer(layout, batch_size, key=_OTHER_KEY, world_size=world_size)
    yield follow_permutation(layout, batch_size * world_size, key=_OTHER_KEY)


def _held_by_buffers(layout: Layout, world_size: int, buffer_samples: int) -> int:
    return min(layout.num_samples, world_size * BUFFER_WORKERS * buffer_samples)


def _draw_curves(axes: "Axes", curves: Mapping[str, Mapping[int, Mixing]], figure: str, num_samples: int) -> None:
    """Draw one figure of the orders against the number of samples that they hold."""
    for (label, mixings), color, place, side in zip(
        curves.items(), ("tab:blue", "tab:orange"), ((3, -13), (-4, 6)), ("left", "right"), strict=True
    ):
        held = [100 * mixing.held_samples / num_samples for mixing in mixings.values()]
        values = [100 * getattr(mixing, figure) for mixing in mixings.values()]
        axes.plot(held, values, "o-", color=color, label=label)
        for number, x, y in zip(mixings, held, values, strict=True):
            axes.annotate(f"{number:,}", (x, y), xytext=place, textcoords="offset points", ha=side, fontsize=8)
    axes.axhline(100, color="black", linewidth=1, label="random permutation")
    low, high = axes.dataLim.intervalx
    axes.set(xscale="log", xlim=(min(low / 2, 5), high * 2), ylim=(-12, 115))
    axes.set(xlabel="samples held at once, % of the dataset", ylabel="% of a random permutation's")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")


def _draw_course(axes: "Axes", course: Course, num_samples: int) -> None:
    """Draw when each sample comes: the colour is even if the order is random."""
    places = np.arange(len(course.samples))  # in a large dataset, some samples represent all
    bins = max(2, min(80, int((len(places) / 20) ** 0.5)))
    counts, _, _ = np.histogram2d(places, course.positions, bins, range=((0, len(places)), (0, num_samples)))
    axes.imshow(
        counts, origin="lower", aspect="auto", cmap="magma", vmin=0, vmax=2 * counts.mean(), extent=(0, 100, 0, 100)
    )
    axes.set_xlabel("position in the epoch, %")
