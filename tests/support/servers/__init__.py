"""The servers that tests read from and write to: real ones, on this machine's loopback network, which end with pytest.

Fixtures (``tests/conftest.py``) start them where a test asks for one:

``nginx``
    A web server for one test. It serves ``nginx.folder`` at ``nginx.url``, with Range; at ``nginx.private_url`` it
    requires ``nginx.user`` and ``nginx.password``; at ``nginx.tls_url`` it uses TLS, with a certificate of the
    authority in ``nginx.ca_file``. ``nginx.requests()`` returns the requests that it has answered so far.
``moto``
    An S3 server in memory, with AWS's rules for conditional writes. It checks no signature and no checksum.
``ceph``
    A real S3 server, Ceph's. It checks signatures and Content-MD5, and lets signed URLs expire. It can be killed
    without losing data: ``ceph.kill()`` and ``ceph.start()`` affect the gateway, and objects stay. It obeys
    If-None-Match in a PUT, but not in the completion of a multipart upload.
``proxy``
    Makes a fault-injecting proxy for a server: ``faulty = proxy(nginx.url)``, ``faulty.inject("503 once")``.
    See ``faults.py``.

``moto`` and ``ceph`` are started once in each process of pytest, which takes a second or two: each test makes a bucket
of its own, by ``ceph.make_bucket()``. Their ``url``, ``key``, ``secret``, ``region`` and ``client()`` are for boto3. A
killed server restarts at the same port::

    nginx.kill()  # like kill -9: connections break, new ones are refused
    nginx.start()

To do that, or anything else, in the middle of a response, let the proxy hold the response there::

    faulty = proxy(nginx.url)
    held = faulty.hold(after=1000)  # the next response stops after 1000 bytes
    ...  # a thread reads faulty.url
    held.wait()  # until the response is held
    nginx.kill()
    nginx.start()
    held.release()  # the client gets the rest that the proxy has received; then the connection breaks
"""
