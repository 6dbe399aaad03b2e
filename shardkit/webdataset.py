"""webdataset's pipelines over shardkit's strict reader, for users of webdataset.

Only one import changes::

    from shardkit.webdataset import WebDataset

    dataset = WebDataset("train-{000..127}.tar", shardshuffle=100).shuffle(1000).decode("rgb").to_tuple("jpg", "cls")
    loader = webdataset.WebLoader(dataset.batched(32), batch_size=None, num_workers=4)

The stages are webdataset's own, but their source is not: samples are read by ``ShardStream``. So damage is an error and
never a shorter shard, every shard is read by one worker of one rank, and every epoch has a different order of shards,
which is the same again for the same seed.

You can also replace webdataset entirely. This is what to write instead::

    webdataset                                     shardkit
    ---------------------------------------------  ---------------------------------------------------------------------
    wds.WebDataset(urls, shardshuffle=100)         ShardStream(urls)
    .shuffle(1000)                                 buffer_size=1000; open_shards=4 mixes shards too
    .decode("rgb")                                 decode=True: numpy uint8, no pickle
    .decode("pil")                                 decode=Decoder(images="pil")
    .to_tuple("jpg;png", "cls"), .rename(...)      fields={"image": "jpg;png", "label": "cls"}
    .map(f), .map_dict(jpg=f)                      transform=f, transform={"jpg": f}
    random numbers in .map(f)                      a parameter rng of the transform: the same for any number of workers
    .select(predicate)                             pack(ShardSource(urls, filter=predicate), ...)
    .batched(32, partial=False)                    batch_size=32, drop_last=True
    handler=wds.warn_and_continue                  on_error="skip", max_skipped=100; stream.skipped counts them
    nodesplitter=, workersplitter=, empty_check=   nothing: a stream always divides its shards among ranks and workers,
                                                   and a worker without shards ends
    resampled=True, .with_epoch(n),                ShardLoader(dataset, batch_size): every sample once, the same number
      .with_length(n)                              of batches on every rank, an exact len()
    seed=, detshuffle=True                         seed=, set_epoch(n): seed and epoch determine the order
    wds.ShardWriter(pattern, maxsize=, maxcount=)  ShardWriter(folder, shard_bytes=, shard_samples=), or pack
    wds.WebLoader, DataLoader                      ShardLoader; for streams the same as before, with batch_size=None
                                                   if the stream makes the batches
    wids.ShardListDataset(json)                    ShardDataset(folder)
    wids.DistributedChunkedSampler                 ShardSampler(dataset, batch_size)

shardkit reads from a shard what webdataset reads, with these deviations, each of which is shown by a test:

- files whose names begin with a dot are skipped in every folder, not only at the top
- files named ``__x__``, and files in folders of such names, are skipped in every folder, not only at the top
- a newline in a name is a character like any other
- ``__bad__`` and ``__local_path__`` are fields like any other
- a field ``__source__`` is an error, because shardkit keeps the name for itself
- an archive without its end-of-archive mark is an error
- anything but zeros after the end-of-archive mark is an error, a second archive too
- class numbers of several of shardkit's datasets with different class lists are those of one list, by name
- a damaged or cut header is an error, not the end of the shard
- compressed data that is cut, or followed by something else, is an error
- all parts of a gz, bz2 or xz file are read, not only the first (pigz, pbzip2 and bgzip write many)
- zst is read, also before Python 3.14
- the format that lzma wrote before xz is not read
- sparse members, parts of multi-volume archives and members of unknown types are errors
- a negative size is an error
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Literal, Self

from shardkit.errors import ArgumentError, MissingExtraError
from shardkit.loading.epochs import Skipped
from shardkit.loading.stream import ShardStream

try:
    import webdataset as wds
    from webdataset.compat import FluidInterface
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"shardkit.webdataset: needs webdataset ({error}); install it with: pip install 'shardkit[webdataset]'"
    ) from error

_HANDLERS: dict[object, Literal["raise", "skip"]] = {
    wds.reraise_exception: "raise",
    wds.ignore_and_continue: "skip",
    wds.warn_and_continue: "skip",
}
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_NESTED_VARIABLES = 10  # webdataset stops there, too
_NODE_SPLITTERS = (wds.split_by_node, wds.shardlists.single_node_only)

# Arguments that webdataset accepts but this class does not, and what to do instead.
_INSTEAD = {
    "cache_dir": "shards are not cached here; copy them to a local disk first, and leave it out",
    "cache_size": "shards are not cached here; leave it out",
    "empty_check": "a worker without shards just ends, and urls without shards are an error anyway; leave it out",
    "mode": "there are no modes; leave it out",
    "rename_files": "files keep their names; rename fields with the stage .rename(new='old'), or with fields=",
    "repeat": "it never did anything; use the stage .repeat()",
    "resampled": "every sample comes exactly once an epoch; use .repeat() to go on without end, and .with_epoch(n) for "
    "epochs of one length",
    "select_files": "name the fields to read with fields=, such as fields=('jpg', 'cls')",
    "url_to_name": "shards are not cached here; leave it out",
    "verbose": "it never did anything; leave it out",
}


class WebDataset(wds.DataPipeline, FluidInterface):  # type: ignore[misc]  # webdataset has no types: both are Any
    """webdataset's ``WebDataset`` over shardkit's reader: the same stages, damage is an error, epochs differ.

    A ``ShardStream`` of bytes is the source; everything else is webdataset's: ``shuffle decode to_tuple map select
    batched`` and the other stages, ``with_epoch``, ``repeat``, ``WebLoader``. Shards are always divided among ranks and
    workers. Every iteration is the next epoch; ``with_epoch(n)`` and ``repeat()`` also begin a new epoch each time that
    they start over.

    The stage ``.decode()`` is still webdataset's: it unpickles the fields ``pyd pickle pkl pth``, and a pickle can run
    any program. ``ShardStream`` never unpickles. Its samples lack only ``__local_path__``.

    Args:
        urls: As for ``ShardStream``; they may also be joined by ``::``. In text, ``${NAME}`` is replaced by the
            environment variable ``WDS_NAME``. A folder is one dataset and is not watched, and pipes and commands are
            not run.
        handler: webdataset's name for ``on_error``: ``reraise_exception``, ``warn_and_continue`` or
            ``ignore_and_continue``.
        shardshuffle: True or a number to reorder the shards every epoch. All shards are shuffled, whatever the number;
            samples are shuffled by the stage ``.shuffle(1000)``.
        seed: The key of the shards' order.
        open_shards: How many shards at a time are read in turn if shards are shuffled. By default they are read one
            after the other, as in webdataset; with 4, the stage ``.shuffle`` mixes samples of 4 shards.
        fields: What to read, by default everything; as for ``ShardStream``. A field that says how it is decoded, such
            as ``depth.png:unchanged``, is decoded here; ``.decode(..., partial=True)`` then leaves it unchanged.
        on_error: ``"skip"`` leaves out the rest of damaged shards and logs this; see ``skipped``. It applies only to
            reading: the stages have their own handlers.
        max_skipped: How many shards and samples an epoch may leave out.
        storage_options: Passed to the storage.
        nodesplitter: Only functions that ask for the default behaviour: ``split_by_node``, ``single_node_only``.
        workersplitter: Only the function that asks for the default behaviour: ``split_by_worker``.
        detshuffle: Has no effect: seed and epoch always determine the shards' order.
        mode, resampled, repeat, cache_dir, cache_size, url_to_name, select_files, rename_files, empty_check, verbose:
            Refused unless they are None or False; the error says what to use.

    Raises:
        ArgumentError: An argument cannot be honoured here.
        DatasetError: There are no shards.
        ShardError: While iterating, a shard is damaged.

    Example:
        >>> import tempfile
        >>> from shardkit.packing.writer import ShardWriter
        >>> folder = tempfile.mkdtemp()
        >>> with ShardWriter(f"{folder}/words") as writer:
        ...     writer.write({"__key__": "0001", "txt": "hello", "cls": 1})
        >>> list(WebDataset(f"{folder}/words", shardshuffle=100).decode().to_tuple("txt", "cls"))
        [('hello', 1)]
    """

    def __init__(  # noqa: PLR0913 - half are webdataset's, so that only an import has to change
        self,
        urls: str | PathLike[str] | Sequence[str | PathLike[str]],
        handler: Callable[[Exception], bool] | None = None,
        *,
        shardshuffle: bool | int | None = False,
        seed: int = 0,
        open_shards: int = 1,
        fields: Sequence[str] | Mapping[str, str] | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        max_skipped: int = 100,
        storage_options: Mapping[str, object] | None = None,
        nodesplitter: object = wds.split_by_node,
        workersplitter: object = wds.split_by_worker,
        detshuffle: bool = False,
        mode: object = None,
        resampled: object = None,
        repeat: object = None,
        cache_dir: object = None,
        cache_size: object = None,
        url_to_name: object = None,
        select_files: object = None,
        rename_files: object = None,
        empty_check: object = None,
        verbose: object = None,
    ) -> None:
        given = locals()
        for name, remedy in _INSTEAD.items():
            if given[name]:
                raise ArgumentError(f"{name}={given[name]!r}: webdataset's argument is not taken here; {remedy}")
        if nodesplitter not in _NODE_SPLITTERS or workersplitter is not wds.split_by_worker:
            raise ArgumentError(
                f"nodesplitter={nodesplitter!r}, workersplitter={workersplitter!r}: shards are always divided among "
                "ranks and workers, each is read once; leave both out"
            )
        if handler is not None and handler not in _HANDLERS:
            raise ArgumentError(
                f"handler={handler!r}: is not known here; write on_error='skip' to leave out the rest of "
                "damaged shards, and give handlers to the stages that are to have them"
            )
        source = ShardStream(
            _expand_variables(urls).split("::") if isinstance(urls, str) else urls,
            fields=fields,
            decode=False,
            shuffle=bool(shardshuffle),
            seed=seed,
            buffer_size=0,  # samples are mixed by the stage .shuffle
            open_shards=open_shards,
            on_error=on_error if handler is None else _HANDLERS[handler],
            max_skipped=max_skipped,
            storage_options=storage_options,
        )
        super().__init__(source)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration this epoch, and later iterations the following epochs. Calling it is optional.

        Args:
            epoch: From 0.

        Raises:
            ArgumentError: It is negative.
        """
        self._source.set_epoch(epoch)

    @property
    def skipped(self) -> Skipped:
        """The samples and shards that reading has left out so far in the latest epoch, over all workers."""
        return self._source.skipped

    @property
    def _source(self) -> ShardStream:
        source: ShardStream = self.pipeline[0]
        return source

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _expand_variables(urls: str) -> str:
    """Return text with variables expanded, as webdataset does: ``${NAME}`` is the environment variable ``WDS_NAME``.

    Raises:
        ArgumentError: There is no such variable, or a variable refers to itself.
    """
    for _ in range(_NESTED_VARIABLES):
        names: set[str] = set(_VARIABLE.findall(urls))
        if not names:
            return urls
        if missing := sorted(name for name in names if f"WDS_{name}" not in os.environ):
            raise ArgumentError(
                f"urls: ${{{missing[0]}}} is the environment variable WDS_{missing[0]}, as in webdataset, and there is "
                "none; set it, or write its value"
            )
        urls = _VARIABLE.sub(lambda match: os.environ[f"WDS_{match[1]}"], urls)
    raise ArgumentError(f"urls: {urls[:100]!r} has variables whose values name variables again and again; correct them")
