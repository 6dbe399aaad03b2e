"""The servers that tests read from and write to: real ones, on this machine's own network, ended with pytest.

Fixtures (``tests/conftest.py``) start them where a test asks for one:

``nginx``
    A web server for one test. What is in ``nginx.folder`` is at ``nginx.url``, with Range; at ``nginx.private_url``
    it wants ``nginx.user`` and ``nginx.password``; at ``nginx.tls_url`` it is there over TLS, signed by an authority
    that only ``nginx.ca_file`` knows. ``nginx.requests()`` are the requests that it has answered so far.
``moto``
    An S3 server in memory, with AWS's rules for conditional writes. It checks no signature and no checksum.
``ceph``
    A real S3 server, Ceph's. It checks signatures and Content-MD5, lets signed URLs run out, and is killed without a
    loss: ``ceph.kill()`` and ``ceph.start()`` are about the gateway, and objects stay. It heeds If-None-Match in a PUT,
    not in the completion of an upload in parts.
``proxy``
    Makes a proxy before a server, which injects faults: ``faulty = proxy(nginx.url)``, ``faulty.inject("503 once")``.
    See ``faults.py``.

``moto`` and ``ceph`` are started once in each process of pytest, which takes a second or two: each test makes a bucket
of its own, by ``ceph.make_bucket()``. Their ``url``, ``key``, ``secret``, ``region`` and ``client()`` are what boto3
needs. A server that is killed comes back at the same port::

    nginx.kill()  # as kill -9 does: connections break, new ones are refused
    nginx.start()

To do that, or anything else, in the very middle of a response, let the proxy hold the response there::

    faulty = proxy(nginx.url)
    held = faulty.hold(after=1000)  # the next response stops after 1000 bytes
    ...  # a thread reads faulty.url
    held.wait()  # until it has come to that
    nginx.kill()
    nginx.start()
    held.release()  # the client gets what the proxy has got of the rest; then the connection breaks
"""
