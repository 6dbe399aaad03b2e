"""Objects of S3 servers.

Requests are signed by botocore and sent over shardkit's own connections, so that ranges, retries and limits are the
same as for all other storage. Credentials, profiles, regions and endpoints are found in the same way as by every AWS
tool.

``storage_options`` for s3 are those of s3fs that ``session.S3Options`` lists, and ``total_timeout``; an unknown option
is an error.

A file that is written stays in ``TMPDIR`` until it is complete, one shard for each worker at a time. Then it is sent:
in one request, or, above 64 MiB, in parts that become an object only at the end. Each request carries an MD5, and the
stored object is compared with the file. If an answer is lost, shardkit checks what is stored. So an exception, Ctrl-C
or ``kill -9`` at any moment leaves no part of an object and no dataset without its manifest, and the same ``pack``
sends only the missing files.

Parts that a killed process has sent take up room until ``shardkit uploads abort s3://bucket/photos`` or a lifecycle
rule of the bucket deletes them. Two packs by one user on one machine lock each other out. On several machines, running
the same pack twice writes the same files, and a different pack is refused because the folder is marked as unfinished.

The modules, in the order in which a sample passes through them::

    session   credentials and endpoints of an S3 server
    client    S3 operations with retries
    uploads   local files -> whole objects of S3
    storage   objects of S3 servers
"""
