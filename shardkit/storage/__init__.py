"""Bytes from any place: this machine's disks, web servers, S3, and whatever fsspec reaches.

Everything that shardkit reads or writes goes through here; no other package knows a protocol. URLs can be given
wherever a path can: ``http://`` and ``https://`` to read; ``s3://`` to read and write, with
``pip install 'shardkit[s3]'``; and URLs of every other filesystem that fsspec supports, such as ``gs://``,
``abfs://``, ``sftp://`` or ``simplecache::gs://``, once its package is installed.

A network fault is either repaired by retries or, within a time that the user sets, raised as an error that says what
happened. It never results in wrong bytes::

    what goes wrong                                                     what the reader gets
    ------------------------------------------------------------------  ------------------------------------------------
    connections cut, reset, refused, stalled; answers 408, 425, 429,    the right bytes
      500 to 504; a server that is killed and started again
    ranges ignored, or of other bytes or another size; unrequested      the right bytes if the fault ends; otherwise
      compression; a changed bit; a short or empty answer that claims     a ``StorageError`` or ``ShardError``
      to be complete
    a file that is replaced while it is read                            ``ChangedFileError``
    a file that is missing or forbidden; credentials that expire and    ``MissingFileError``, ``AccessError``
      cannot be renewed
    a trickle of bytes; a server that never answers                     ``StorageError`` after ``total_timeout``

An answer is accepted only if its headers prove that it is the requested range, of the right length, of one version of
the file, without any encoding. A transfer that breaks off is continued at the last byte over another connection, after
random pauses that grow. A request without data for ``read_timeout`` seconds is retried. A block or a field whose
checksum is wrong is fetched again, bypassing caches, before it counts as damaged. A bare tar without an index has no
checksums, so a changed byte in it is not noticed. The tests of ``http``, ``fsspec``, ``s3.storage`` and ``s3.uploads``
print by name how each fault ends.

Each forked or spawned worker makes its own connections, one for each fetch in progress. If a server serves fewer
connections than a loader opens (32), the others wait. After they have waited for a second, idle connections are closed,
so that the server serves the waiting ones.

The modules, in the order in which a sample passes through them::

    base          the interface of a place that bytes are read from and written to
    os_errors     failures of the operating system as shardkit's errors
    safe_names    whether names from a dataset stay below their intended folder
    local         files on this machine
    spool         files that stay on disk until they are complete
    retry         trying again, within a time limit
    connections   requests over connections that belong to one process
    responses     which part of which version of a file an answer contains
    ranges        ranges of remote files over unreliable networks
    http          files of web servers
    fsspec        files that fsspec reaches
    registry      a URL -> its storage
    s3            objects of S3 servers
"""
