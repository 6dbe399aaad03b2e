"""The format of a dataset on disk: tar members, shards, their indexes, the manifest.

The modules, in the order of a sample's way::

    tar_header     the fields of a tar header <-> its 512 bytes
    tar            members <-> bytes
    parquet        Parquet files whose checksums are verified before anything is parsed
    manifest       the list of a dataset's shards
    index          where each sample of a shard lies
    columns        fields -> values in the index
    side_files     the block tables and the columns of all shards, each in one file
    classes        what class numbers mean, and how they change when datasets are combined
    scan           a shard -> the content of its index
    shard_writer   samples -> one shard

The format, as a specification
------------------------------

A dataset is a folder. Everything in it can be read without shardkit: with ``tar``, a JSON parser, NumPy and any reader
of Parquet. This is format 2. Format 1, which earlier versions wrote, will always be readable; ``shardkit index FOLDER``
brings such a dataset to format 2 without touching a shard::

    photos/train/
      manifest.json                           the shards, in order; published last, replaced atomically
      train-000000.tar                        a plain ustar
      train-000001.tar.zst                    compressed: one zstd frame per block, with a seek table
      .huggingface.yaml                       tells HF datasets which files of the folder are data
      unfinished.json                         only while the dataset is being written
      __index__/                              other readers of a folder skip it
        train-000000.9f86d081884c7d65.parquet   a shard's index: one row per sample, and the block table
        blocks.60303ae22b998861.npy             the block tables of all shards: reading blocks needs no index
        columns.fd61a03af4f77d87.parquet        the promoted columns of all samples: ``where=`` needs no index
        manifest-b7e07215c4b33343.json          a copy of this manifest under its digest, and earlier ones

Names below ``__index__/`` contain the first 16 digits of the SHA-256 of the file's content, or of the dataset's digest.
A file that is made again gets a new name, so a running job keeps the files that it started with. Nothing deletes old
files yet. ``ShardDataset(url, digest=...)`` opens a manifest by its digest.

- **Shard.** MUST be a tar whose end-of-archive mark (two blocks of zeros) is followed by nothing but zeros. shardkit
  writes ustar with mtime 0, uid and gid 0, mode 0444, and a PAX header only for a name that ustar cannot hold. A sample
  is a run of adjacent members with the same key. The key is the member's name up to the first dot of its last path
  component. The rest of the name after that dot, in lower case, is the field. Readers MUST skip members whose last
  component has no dot or starts with one, and members in folders named like ``__x__``.
- **Keys and fields.** A writer MUST refuse names that a reader would merge, rename or drop. These are keys with a dot
  in their last component, with empty components, with components like ``__x__`` or with control characters; keys that
  occur twice in a dataset; and fields that are empty, start with ``_``, are not lower case, or contain white space or
  any of ``/ ; ? :``.
- **Block.** The unit of reading: ``block_samples`` (in the manifest) consecutive samples of a shard, about
  ``block_bytes`` (1 MB) long; the last block of a shard may have fewer. In a ``.tar.zst`` each block MUST be one frame,
  and the end-of-archive mark another one, followed by a seek table in zstd's seekable format
  (https://github.com/facebook/zstd/blob/dev/contrib/seekable_format/zstd_seekable_compression_format.md).
- **Checksums.** A reader MUST verify the checksum of all data before it parses them: the manifest's own CRC-32; a
  footer's CRC-32, which is in the manifest; a column chunk's CRC-32, which is in the footer; ``blocks_crc32`` of a
  block table; the CRC-32 of a block or of a field. It MUST also compare the numbers of rows, values and fields with
  those that are recorded.
- **Index.** Parquet, with one row per sample in the shard's order: ``__key__``; ``__offset__`` and ``__size__`` of the
  sample; for every field ``<field>:offset``, ``<field>:size`` and ``<field>:crc32`` of its data, null where the sample
  lacks it; the promoted columns; ``__source__``, the path of the file that the sample was made from. Offsets count from
  the start of the uncompressed tar. The footer's metadata has three entries. ``shardkit`` holds facts of the shard as
  JSON (``samples``, ``file_size``, ``tar_size``, ``sha256`` of the uncompressed tar, ``group_rows``, ...).
  ``shardkit.blocks`` holds its block table in base64. ``shardkit.chunks`` holds 28 hexadecimal digits for each column
  chunk, row group by row group: 12 for its offset, 8 for its size, 8 for its CRC-32. Row groups have ``group_rows``
  rows; the last may have fewer.
- **Block table.** 36 bytes per block, little-endian: ``offset``, ``size`` (int64), ``crc32`` (uint32),
  ``stored_offset``, ``stored_size`` (int64; the size is 0 where blocks cannot be read alone). ``blocks.*.npy`` holds
  the block tables of all shards in the order of the manifest. ``blocks_crc32`` is the CRC-32 of one shard's rows in it.
- **manifest.json.** A superset of wids' JSON. ``shardkit_version`` MUST be 2. ``shardlist`` has for each shard ``url``
  (relative, inside the folder), ``nsamples``, ``filesize``, ``tarsize``, ``sha256``, ``compression``, ``blocks``,
  ``blocks_crc32``, and ``index``: the index's size, its SHA-256, and its footer's size and CRC-32. ``block_file`` and
  ``column_file`` hold the same facts of those files. The manifest begins with its own CRC-32: ``{``, a line feed,
  `` "crc32": "`` and 8 digits. These digits, and bytes 148 to 155, count as 0 in the CRC-32. The first 512 bytes are
  also the header of a tar member of type ``Z``, which tar readers skip. So programs that open every file of a folder as
  a tar, such as Ray Data, skip the manifest. Readers MAY ignore entries that they do not know.
- **Digest.** ``digest`` in the manifest is the SHA-256 of this text: ``shardkit dataset 1`` and a line feed; then, for
  each shard, its name without suffixes, ``nsamples`` and ``sha256``, separated by tabs and ended by a line feed. It
  does not change when a dataset is copied or compressed in another way.
- **Random choices** are made with SplitMix64's finaliser and keyed Feistel permutations built on it
  (``shardkit.hashing``), never with a library's generator: ``mix64(0) = 0xe220a8397b1dcdaf``,
  ``hash_key("a/0001") = 0xb666e45e594dc87e``.
"""
