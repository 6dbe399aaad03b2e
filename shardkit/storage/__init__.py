"""Bytes of any place: this machine's disks, web servers, S3, and whatever fsspec reaches.

Everything that shardkit reads or writes goes through here; no other package knows a protocol.

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
