"""A dataset's samples by their numbers: for evaluation, notebooks and stock DataLoaders, and in blocks for a loader."""

import copy
import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple, Self, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from shardkit.codecs.registry import Decoder
from shardkit.errors import ArgumentError, DatasetError, hide_secrets
from shardkit.format.manifest import read_manifest
from shardkit.hashing import UInt64Array, derive, hash_key, hash_keys
from shardkit.order.plan import IntArray, OrderPlan, default_lanes, prefix_sums
from shardkit.reading.access import ShardAccess
from shardkit.reading.block import Block
from shardkit.reading.disk_cache import open_cache
from shardkit.reading.filters import Where, select_indices, select_samples
from shardkit.reading.index_cache import cannot_read_blocks
from shardkit.reading.memory import Buffers
from shardkit.reading.missing import check_present
from shardkit.reading.page_cache import ResidentBlock
from shardkit.sample import KEY, RESERVED, FieldSelection, Sample
from shardkit.transforms.apply import FieldFunctions, Transform, decode_fields, parse_decode, undecoded_fields
from shardkit.transforms.rng import Rng

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    _TorchDataset = Dataset[Any]
else:
    _TorchDataset = object  # a DataLoader needs nothing more, and torch takes two seconds to import


class Places(NamedTuple):
    """Where samples lie, with one element per sample.

    Attributes:
        shard: The number of the shard in the manifest: int64.
        block: The number of the block in the shard: int64.
        row: The number of the sample in the block: int64.
    """

    shard: IntArray
    block: IntArray
    row: IntArray


class ShardDataset(_TorchDataset):
    """Read any sample of a dataset by its number, like an item of a list. Each sample is compared with its index.

    ``dataset[i]`` reads only the bytes of the fields asked for, and returns the same sample every time; from a zst
    shard it reads the whole block. Only the manifest, and with ``where`` the indexes, are read before they are needed.
    Threads may share the dataset, and it can be sent to DataLoader workers by fork and by spawn.

    Train with a ``ShardLoader``: it reads whole blocks, in an order that mixes them. If ``fields`` leaves out most
    of a block, it reads only those fields, provided that this saves more than the additional requests cost.

    Args:
        url: The dataset's folder, or its ``manifest.json``. Shards that are gz, or zst without frames of blocks, are
            refused.
        digest: The ``digest`` of the dataset's manifest, in hexadecimal: a dataset other than the one that was
            reviewed is refused. If a newer one has replaced it but its manifest is kept, the reviewed one is opened.
        fields: What to read, all by default: ``("jpg", "cls")``, or ``{"image": "jpg;png", "label": "cls?"}`` with
            new names, alternatives, and ``?`` for None where the field is missing. A name may say how an image is
            decoded: ``"seg.png:unchanged"`` for the stored values (grey, 16 bits, palette numbers), ``:pil``,
            ``:bytes``, or ``:rgb``, the default.
        decode: True to decode fields by their names, False for bytes, or a ``Decoder`` with other settings.
        where: Take only samples whose index columns satisfy it: ``[("label", "==", 3), ("width", ">=", 224)]`` for
            conditions that must all hold, a list of such lists of which at least one must hold, or an expression of
            ``pyarrow.compute``. It may use promoted columns, ``__key__``, and ``<field>:size``, a field's size in
            bytes; a condition on a null value selects nothing. It is evaluated when the dataset is opened: promoted
            columns are read from one file for all samples; anything else, and everything in format 1, from every
            index. It takes 8 bytes of memory for each selected sample.
        transform: Called with every decoded sample, and its return value replaces the sample. Or a mapping like
            ``{"image": function}`` for single fields, which leaves None unchanged, or for several fields
            ``{("image", "mask"): function}``, with a function of a dict. An image transform decodes the image itself.
            A parameter named ``rng`` gets an ``Rng``: in ``dataset[i]`` keyed by the sample's key alone, so that it
            draws the same numbers in every epoch; in a ``ShardLoader`` by seed, epoch and position.
        columns: Index columns to put into every sample, under their names. They are read from the indexes.
        allow_any_url: Let the manifest name shards outside its folder, as ``shardkit index --out`` writes them.
        storage_options: Passed to the storage.
        cache: A folder on a fast disk, or in memory. Blocks that are read are kept in its subfolder
            ``shardkit-cache``, for the next epoch and for all processes of this machine that name the same folder.
            ``dataset[i]`` then reads whole blocks, too.
        cache_bytes: How much space the cache may use, in bytes or as text: ``"200GB"``. To make room, it deletes the
            blocks that were used longest ago, but never one that was used since this object was created.

    Attributes:
        manifest: The dataset's manifest.
        selection: The parsed ``fields``.
        decoder: The decoder that ``decode`` stands for; None keeps bytes.
        transform: The parsed ``transform``; false if there is none.
        columns: The index columns that go into the samples.
        num_blocks: How many blocks have selected samples.
        block_bytes: The average size of a block, uncompressed.

    Raises:
        ArgumentError: An argument is out of range, or no sample has one of the fields, or the indexes lack a column.
        DatasetError: There is no usable manifest; or later, an index is not usable, or belongs to another shard.
        IncompleteDatasetError: Shards or indexes on this machine are missing.
        StorageError: The manifest cannot be read; or later, a shard or an index is missing or cannot be read.
        ShardError: Later, a shard is damaged, cut or replaced.
        CodecError: Later, a field cannot be decoded.
        SampleError: Later, a sample lacks a field.

    Example:
        >>> import tempfile, shardkit
        >>> folder = tempfile.mkdtemp()
        >>> digits = [{"__key__": f"{i:04d}", "cls": i % 10, "txt": "digit"} for i in range(100)]
        >>> _ = shardkit.pack(digits, folder + "/digits", columns={"label": "cls"}, shuffle=False, progress=False)
        >>> dataset = ShardDataset(folder + "/digits", fields={"label": "cls"}, where=[("label", "in", [3, 4])])
        >>> len(dataset), dataset[-1]["label"], [sample["__key__"] for sample in dataset[:4]]
        (20, 4, ['0003', '0004', '0013', '0014'])
        >>> dataset.by_key("0023")["label"]
        3
    """

    def __init__(  # noqa: PLR0913 - each has a default, and one call says all that is read
        self,
        url: str | PathLike[str],
        *,
        digest: str | None = None,
        fields: Sequence[str] | Mapping[str, str] | None = None,
        decode: bool | Decoder = True,
        where: "Where | None" = None,
        transform: Callable[..., Any] | FieldFunctions | None = None,
        columns: Sequence[str] | None = None,
        allow_any_url: bool = False,
        storage_options: Mapping[str, object] | None = None,
        cache: str | PathLike[str] | None = None,
        cache_bytes: int | str | None = None,
    ) -> None:
        self.selection = FieldSelection.parse(fields)
        self.decoder = parse_decode(decode, self.selection)
        self.transform = Transform.parse(transform)
        self.manifest = read_manifest(url, digest=digest, storage_options=storage_options, allow_any_url=allow_any_url)
        self._check_fields()
        self.columns = self._check_columns(columns)
        self.check_transform(self.transform)
        self._first = prefix_sums([shard.samples for shard in self.manifest.shards])  # the first sample of each shard
        self._first_block = prefix_sums([shard.blocks for shard in self.manifest.shards])
        total = sum(shard.tar_size for shard in self.manifest.shards)
        self.block_bytes = total / max(1, int(self._first_block[-1]))
        self._access = ShardAccess(
            self.manifest,
            fields=[field for field in self.manifest.fields if self.selection.wants(field)],
            columns=self.columns,
            storage_options=storage_options,
            cache=open_cache(cache, cache_bytes, block_bytes=self.block_bytes),
        )
        check_present(self._access.indexes.storage, self.manifest)
        self._check_shards()
        self._selected: IntArray | None = None  # numbers in the whole dataset, ascending; None for all
        self._select(None)
        if where is not None:
            self._select(select_samples(where, self.manifest, self._access.indexes))

    def _check_fields(self) -> None:
        known = set(self.manifest.fields)
        for name, alternatives in self.selection.wanted.items():
            if not known.intersection(alternatives) and name not in self.selection.optional and self.manifest.shards:
                raise ArgumentError(
                    f"fields: no sample of {self.manifest.url} has {' or '.join(alternatives)}; there are "
                    f"{', '.join(self.manifest.fields)}",
                    field=name,
                )

    def _check_columns(self, columns: Sequence[str] | None) -> tuple[str, ...]:
        if isinstance(columns, str):
            raise ArgumentError(f'columns must be a sequence of names, got the text {columns!r}; write ("{columns}",)')
        names = tuple(dict.fromkeys(columns or ()))
        taken = set(self.selection.wanted or self.manifest.fields)
        for name in names:
            if name not in self.manifest.columns:
                known = ", ".join(self.manifest.columns) or "none; pack(columns=...) or 'shardkit index --column' makes"
                raise ArgumentError(f"columns: {self.manifest.url} has no column {name!r}; there are {known}")
            if name in taken or name in RESERVED:
                raise ArgumentError(
                    f"columns: {name!r} is a field too; give the field a new name: fields={{new: field}}"
                )
        return names

    def _check_shards(self) -> None:
        """Refuse shards that cannot be read by blocks. For zst shards only an index tells, so the first one is read."""
        of_zst, size = None, self.manifest.block_samples
        for number, shard in enumerate(self.manifest.shards):
            if shard.blocks != -(-shard.samples // size):
                raise DatasetError(
                    f"{self.manifest.url}: its manifest says that {shard.url} has {shard.blocks:,} blocks, but its "
                    f"{shard.samples:,} samples are {-(-shard.samples // size):,} blocks of {size:,}; it was edited or "
                    "damaged, so fetch it again, or make it again with 'shardkit index'",
                    url=self.manifest.url,
                )
            if not shard.is_block_readable:
                raise cannot_read_blocks(self.manifest.url, self._access.indexes.url(number), shard.compression)
            if shard.compression == "zst" and shard.samples and of_zst is None:
                of_zst = number
        if of_zst is not None:
            self._access.indexes.blocks(of_zst)

    def _select(self, numbers: IntArray | None) -> None:
        """Select these samples of the whole dataset, ascending; None for all of them."""
        if numbers is not None and len(numbers) == self.manifest.num_samples:
            numbers = None  # the same dataset, with the same digest
        self._selected = numbers
        self._digest = ""
        self._by_key: tuple[UInt64Array, IntArray] | None = None
        if numbers is None:
            self._runs = np.diff(self._first)
            self.num_blocks = int(self._first_block[-1])
        else:
            shard, block, _ = self.places(np.arange(len(numbers)))
            self._runs = np.unique(self._first_block[shard] + block, return_counts=True)[1]
            self.num_blocks = len(self._runs)

    def check_transform(self, transform: Transform) -> None:
        """Check that a transform's functions are for fields that the dataset returns.

        Nothing is checked if the fields are not known: after a function of whole samples, or without any samples.

        Raises:
            ArgumentError: A function is for another field.
        """
        if self.manifest.shards and (transform is self.transform or not self.transform.is_of_sample):
            transform.check_names([*(self.selection.wanted or self.manifest.fields), *self.columns, *RESERVED])

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, by number; empty if they are not known."""
        return self.manifest.classes

    @property
    def digest(self) -> str:
        """The identity of the samples and their order, in hexadecimal: the manifest's digest.

        With a selection it is a SHA-256 of that digest and of the selected numbers, however they were selected.
        """
        if self._selected is None:
            return self.manifest.digest
        if not self._digest:
            digest = hashlib.sha256(f"shardkit selection 1\n{self.manifest.digest}\n".encode())
            digest.update(np.ascontiguousarray(self._selected, dtype="<i8").data)
            self._digest = digest.hexdigest()
        return self._digest

    def __len__(self) -> int:
        return self.manifest.num_samples if self._selected is None else len(self._selected)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_by_key": None}  # workers can rebuild it from the indexes

    def __repr__(self) -> str:
        url, shards = hide_secrets(self.manifest.url), len(self.manifest.shards)
        return f"ShardDataset({url!r}, {len(self):,} samples in {shards:,} shards)"

    @overload
    def __getitem__(self, index: SupportsIndex) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        try:
            number = operator.index(index)
        except TypeError:
            raise ArgumentError(
                f"an index must be a whole number or a slice, got {index!r:.80}; subset() takes several numbers or a "
                "mask, and a ShardSampler is passed to a DataLoader as batch_sampler="
            ) from None
        if not -len(self) <= number < len(self):
            raise IndexError(f"{hide_secrets(self.manifest.url)}: has no sample {number:,}, it has {len(self):,}")
        shard, row = self._place(number % len(self))
        raw = self._access.read_sample(shard, row, self.selection)
        return self.load(raw, Rng(derive(hash_key(raw[KEY]))) if self.transform.needs_rng else None)

    def __iter__(self) -> Iterator[Any]:
        # Otherwise Python would index until an IndexError, and mistake one that a transform raises for the end.
        for number in range(len(self)):
            yield self[number]

    def _place(self, number: int) -> tuple[int, int]:
        """Return the shard of a sample, and its row in the shard."""
        number = number if self._selected is None else int(self._selected[number])
        shard = int(self._first.searchsorted(number, side="right")) - 1
        return shard, number - int(self._first[shard])

    def load(self, raw: Sample, rng: Rng | None = None) -> Any:
        """Return the sample made from its bytes: fields picked and decoded, and the dataset's transform applied.

        Args:
            raw: The bytes of its fields, as a ``Block`` returns them.
            rng: Passed to a transform that takes one.

        Raises:
            SampleError: A field is missing.
            CodecError: A field cannot be decoded.
        """
        undecoded = undecoded_fields([self.transform], self.decoder)
        sample = decode_fields(raw, self.selection, self.decoder, undecoded=undecoded)
        return self.transform(sample, rng) if self.transform else sample

    def keys(self) -> list[str]:
        """Return the keys of all samples, in order. Reading them from the indexes takes 0.2 s for a million.

        Raises:
            DatasetError: An index is not usable.
        """
        keys: list[str] = []
        bounds = np.searchsorted(self._selected, self._first).tolist() if self._selected is not None else self._first
        for shard in range(len(self.manifest.shards)):
            if bounds[shard] < bounds[shard + 1]:
                column = self._access.indexes.open(shard).rows([KEY]).column(KEY)
                if self._selected is not None:
                    column = column.take(self._selected[bounds[shard] : bounds[shard + 1]] - self._first[shard])
                keys += column.to_pylist()
        return keys

    def by_key(self, key: str) -> Any:
        """Return the sample with a key.

        The first call reads all keys and keeps 16 bytes for each: about 2 s for a million. Later calls take as long as
        ``dataset[i]``.

        Raises:
            KeyError: None of the samples has the key.
            DatasetError: More than one has it.
        """
        if self._by_key is None:
            hashes = hash_keys(self.keys())
            order = np.argsort(hashes, kind="stable")
            self._by_key = hashes[order], order
        hashes, order = self._by_key
        sought = np.uint64(hash_key(key))
        suspects = order[hashes.searchsorted(sought) : hashes.searchsorted(sought, side="right")].tolist()
        found = [number for number in suspects if self._access.indexes.key(*self._place(number)) == key]
        if not found:
            raise KeyError(f"{hide_secrets(self.manifest.url)}: none of the {len(self):,} samples has the key {key!r}")
        if len(found) > 1:
            raise DatasetError(
                f"{self.manifest.url}: {len(found):,} samples have the key {key!r}, the first are the numbers "
                f"{found[0]:,} and {found[1]:,}; read them by number",
                url=self.manifest.url,
                key=key,
            )
        return self[found[0]]

    def subset(self, indices: "Sequence[int] | npt.ArrayLike") -> Self:
        """Return a dataset of some of the samples, in the same order, whatever the order of ``indices``.

        It keeps 8 bytes for each of them.

        Args:
            indices: Numbers of samples, negative ones from the end; or a mask with True or False for each sample.

        Raises:
            ArgumentError: A sample is named twice or does not exist, or the mask has another length.

        Example:
            >>> import tempfile, shardkit
            >>> folder = tempfile.mkdtemp()
            >>> letters = [{"__key__": letter, "txt": letter} for letter in "abcde"]
            >>> _ = shardkit.pack(letters, folder + "/letters", shuffle=False, progress=False)
            >>> ShardDataset(folder + "/letters").subset([4, 0, -2]).keys()
            ['a', 'd', 'e']
        """
        numbers = select_indices(indices, len(self))
        other = copy.copy(self)
        other._select(numbers if self._selected is None else self._selected[numbers])  # noqa: SLF001 - it is one of us
        return other

    def order(self, *, seed: int, epoch: int, lanes: int | None = None, shuffle: bool = True) -> OrderPlan:
        """Return the order of an epoch.

        Args:
            seed: The order's key, together with the epoch.
            epoch: The epoch's number, from 0.
            lanes: How many ordered sequences of blocks are mixed; by default as many as 512 MB of blocks allow.
            shuffle: False for the order of the dataset.
        """
        return OrderPlan(
            self._runs,
            self.manifest.block_samples,
            seed=seed,
            epoch=epoch,
            lanes=default_lanes(self.num_blocks, self.block_bytes) if lanes is None else lanes,
            shuffle=shuffle,
        )

    def places(self, samples: IntArray) -> Places:
        """Return where samples lie.

        Args:
            samples: Their numbers, from 0 to ``len(dataset) - 1``: int64.
        """
        numbers = np.asarray(samples) if self._selected is None else self._selected[samples]
        shard = self._first.searchsorted(numbers, side="right") - 1
        block, row = np.divmod(numbers - self._first[shard], self.manifest.block_samples)
        return Places(shard, block, row)

    def read_block(self, shard: int, block: int) -> Block:
        """Read one block, a single range of the shard, then compare its checksum and decompress it.

        If only a small part of a block is in ``fields``, the fields' ranges are read and their checksums compared.

        Args:
            shard: Its shard's number.
            block: Its number in the shard.

        Raises:
            ArgumentError: There is no such block.
            ShardError: It is damaged, or the shard was cut or replaced.
            DatasetError: The index is not usable, or belongs to another shard.
            StorageError: The shard or its index is missing, or cannot be read.
        """
        return self._access.read_block(int(shard), int(block))

    def open_block(self, shard: int, block: int, buffers: Buffers) -> Block | ResidentBlock:
        """Return a block to take samples from.

        It is only opened if its samples are large and in the page cache, so that they are best read one by one.
        Otherwise it is read as by ``read_block``, into memory of ``buffers`` if it is not compressed.
        """
        return self._access.open_block(int(shard), int(block), buffers)
