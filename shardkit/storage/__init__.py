"""Bytes of any place: this machine's disks, web servers, S3, and whatever fsspec reaches.

Everything that shardkit reads or writes goes through here; no other package knows a protocol. URLs can be given
wherever a path can: ``http://`` and ``https://`` to read; ``s3://`` to read and write, with
``pip install 'shardkit[s3]'``; and those of every other place that fsspec has a filesystem for, such as ``gs://``,
``abfs://``, ``sftp://`` or ``simplecache::gs://``, once its package is installed.

A fault on the way is either made good or raised as an error that says what happened, after retries, within a time that
the user sets. It never gives other bytes::

    what goes wrong                                                     what the reader gets
    ------------------------------------------------------------------  ------------------------------------------------
    connections cut, reset, refused, stalled; answers 408, 425, 429,    the right bytes
      500 to 504; a server that is killed and started again
    ranges ignored, of other bytes or another size; unasked             the right bytes if it ends; otherwise a
      compression; a changed bit; a short or empty answer that says       ``StorageError`` or ``ShardError``
      it is complete
    a file that is replaced while it is read                            ``ChangedFileError``
    a file that is not there, or not allowed; credentials that expire   ``MissingFileError``, ``AccessError``
      and cannot be renewed
    a trickle of bytes; a server that never answers                     ``StorageError`` after ``total_timeout``

An answer is accepted only if it proves what it is: the asked range, of the right length, of one version of the file, as
it is stored. A transfer that breaks off is continued at the last byte over another connection, after growing random
pauses. A request without data for ``read_timeout`` seconds is retried. A block or a field whose checksum is wrong is
fetched again, past caches, before it counts as damaged. A bare tar without an index has no checksums, so a changed byte
of it is not noticed. The tests of ``http``, ``fsspec``, ``s3.storage`` and ``s3.uploads`` print how each fault ends, by
name.

Each forked or spawned worker makes its own connections, one for each fetch that is under way. If a server serves fewer
connections than a loader opens (32), the others wait; after a second of that, idle connections are closed, so that the
server turns to those that wait.

The modules, in the order of a sample's way::

    base          what a place is where bytes come from and go to
    os_errors     failures of the operating system as errors of ours
    safe_names    whether names from a dataset stay below the folder that they are meant for
    local         ... on this machine
    spool         files that wait on disk until they are whole
    retry         trying again, within a time
    connections   requests over connections of a process's own
    responses     which part of which version of a file an answer brings
    ranges        ranges of remote files, through networks that fail
    http          files of web servers
    fsspec        files wherever fsspec reaches
    registry      a URL -> its storage
    s3            objects of S3 servers
"""
