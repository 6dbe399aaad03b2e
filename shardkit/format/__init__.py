"""The format of a dataset on disk: tar members, shards, their indexes, the manifest.

The modules, in the order of a sample's way::

    tar_header     what a tar header says <-> its 512 bytes
    tar            members <-> bytes
    parquet        Parquet files of which nothing is parsed before it is compared
    manifest       the list of a dataset's shards
    index          where each sample of a shard lies
    columns        fields -> values in the index
    side_files     the block tables and the columns of all shards, each in one file
    classes        what class numbers mean, and what becomes of them where datasets meet
    scan           a shard -> all that an index says of it
    shard_writer   samples -> one shard

The format, as a specification
------------------------------

A dataset is a folder. Everything in it can be read without shardkit: with ``tar``, a JSON parser, NumPy and any reader
of Parquet. This is format 2. Format 1, which earlier versions wrote, will always be readable; ``shardkit index FOLDER``
brings such a dataset to format 2 without touching a shard::

    photos/train/
      manifest.json                           the shards, in order; published last, replaced atomically
      train-000000.tar                        a plain ustar
      train-000001.tar.zst                    compressed: one zstd frame a block, with a seek table
      .huggingface.yaml                       tells HF datasets which files of the folder are data
      unfinished.json                         only while it is being written: not a dataset yet
      __index__/                              other readers of a folder skip it
        train-000000.9f86d081884c7d65.parquet   a shard's index: one row a sample, and the block table
        blocks.60303ae22b998861.npy             the block tables of all shards: blocks are read without any index
        columns.fd61a03af4f77d87.parquet        the promoted columns of all samples: ``where=`` needs no index
        manifest-b7e07215c4b33343.json          this manifest by its digest, and earlier ones

Names below ``__index__/`` have the first 16 digits of the SHA-256 of the file's content, or of the dataset's digest. A
file that is made again has another name, so a running job keeps the files that it started with. Nothing deletes old
ones yet. ``ShardDataset(url, digest=...)`` opens a manifest by its digest.

- **Shard.** MUST be a tar whose end-of-archive mark (two blocks of zeros) is followed by nothing but zeros. shardkit
  writes ustar with mtime 0, uid and gid 0, mode 0444, and a PAX header only for a name that ustar cannot hold. A sample
  is a run of adjacent members with the same key: the name up to the first dot of its last part. The rest of the name,
  in lower case, is the field. Members whose last part has no dot or starts with one, and those in folders ``__x__``,
  MUST be skipped.
- **Keys and fields.** A writer MUST refuse what a reader would merge, rename or drop: a dot in the key's last part, a
  key twice in a dataset, empty parts, parts like ``__x__``, control characters; fields that are empty, start with
  ``_``, are not lower case, or contain white space or any of ``/ ; ? :``.
- **Block.** The unit of reading: ``block_samples`` (in the manifest) consecutive samples of a shard, about
  ``block_bytes`` (1 MB) long; the last block of a shard may have fewer. In a ``.tar.zst`` each block MUST be one frame,
  and the end mark one more, followed by a seek table in zstd's seekable format
  (https://github.com/facebook/zstd/blob/dev/contrib/seekable_format/zstd_seekable_compression_format.md).
- **Checksums.** Whatever is read MUST be compared before it is parsed: the manifest with its own CRC-32; a footer with
  the CRC-32 that the manifest has of it, and a column chunk with the one that the footer has; block tables with
  ``blocks_crc32``; a block or a field with its CRC-32. Whatever is counted MUST be compared too: rows, values, fields.
- **Index.** Parquet, one row a sample in the shard's order: ``__key__``; ``__offset__`` and ``__size__`` of the sample;
  for every field ``<field>:offset``, ``<field>:size`` and ``<field>:crc32`` of its data, null where the sample lacks
  it; the promoted columns; ``__source__``, the path of the file that the sample was made from. Offsets count from the
  start of the uncompressed tar. The footer's metadata has under ``shardkit`` facts of the shard as JSON (``samples``,
  ``file_size``, ``tar_size``, ``sha256`` of the uncompressed tar, ``group_rows``, ...); under ``shardkit.blocks`` its
  block table in base64; under ``shardkit.chunks`` for each column chunk, row group by row group, 28 hexadecimal digits:
  12 of its offset, 8 of its size, 8 of its CRC-32. Groups have ``group_rows`` rows, the last possibly fewer.
- **Block table.** 36 bytes a block, little-endian: ``offset``, ``size`` (int64), ``crc32`` (uint32), ``stored_offset``,
  ``stored_size`` (int64; size 0 where blocks cannot be read alone). ``blocks.*.npy`` has those of all shards in the
  order of the manifest, and ``blocks_crc32`` is that of a shard's rows.
- **manifest.json.** A superset of wids' JSON. ``shardkit_version`` MUST be 2. ``shardlist`` has for each shard ``url``
  (relative, inside the folder), ``nsamples``, ``filesize``, ``tarsize``, ``sha256``, ``compression``, ``blocks``,
  ``blocks_crc32``, and of its ``index`` the size, the SHA-256, and the footer's size and CRC-32; ``block_file`` and
  ``column_file`` have the same. It begins with its CRC-32: ``{``, a line feed, `` "crc32": "`` and 8 digits, which
  count as 0 in it, as bytes 148 to 155 do. Its first 512 bytes are also the header of a tar member of type ``Z``, which
  readers of tars skip. So programs that open every file of a folder as a tar, such as Ray Data, pass over it. Readers
  MAY ignore what they do not know.
- **Digest.** ``digest`` in the manifest is the SHA-256 of ``shardkit dataset 1`` and a line feed, and for each shard of
  its name without suffixes, ``nsamples`` and ``sha256``, with tabs between and a line feed after. It does not change
  when a dataset is copied or compressed in another way.
- **Random choices** are made by SplitMix64's finaliser and keyed Feistel permutations of it (``shardkit.hashing``),
  never by a library's generator: ``mix64(0) = 0xe220a8397b1dcdaf``, ``hash_key("a/0001") = 0xb666e45e594dc87e``.
"""
