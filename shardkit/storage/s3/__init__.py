"""Objects of S3 servers.

Requests are signed by botocore and sent over our own connections, so that ranges, retries and bounds are those of all
storage. Credentials, profiles, regions and endpoints are found as by every AWS tool.

``storage_options`` for s3 are those of s3fs that ``session.S3Options`` lists, and ``total_timeout``; an unknown option
is an error.

What is written waits in ``TMPDIR`` until it is complete, one shard for each worker at a time. Then it is sent: in one
request, or, above 64 MiB, in parts that become an object only at the end. Each request carries an MD5, and what is
stored is compared with what was sent. If an answer is lost, shardkit looks at what is there. So an exception, Ctrl-C or
``kill -9`` at any moment leaves no part of an object and no dataset without its manifest, and the same ``pack`` sends
only what is missing.

The parts that a killed process had sent take room until ``shardkit uploads abort s3://bucket/photos`` or a lifecycle
rule of the bucket deletes them. Two packs of one machine and user lock each other out. On several machines, the same
pack twice writes the same files, and a different one is refused because the folder is marked as unfinished.

The modules, in the order of a sample's way::

    session   who asks an S3 server
    client    what S3 is asked to do, tried again
    uploads   local files -> objects of S3, whole
    storage   objects of S3 servers
"""
