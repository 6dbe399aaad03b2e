"""Objects of S3 servers.

Requests are signed by botocore and sent over our own connections, so that ranges, retries and bounds are those of all
storage.

The modules, in the order of a sample's way::

    session   who asks an S3 server
    client    what S3 is asked to do, tried again
    uploads   local files -> objects of S3, whole
    storage   objects of S3 servers
"""
