"""nginx, moto and the proxy's program, started, killed and started again."""

import contextlib
import functools
import http.client
import json
import sys
import uuid
from dataclasses import dataclass
from urllib.parse import urlsplit

from tests.support.servers.processes import Port, wait_until

NGINX_CONF = """
daemon off;
master_process off;  # one process: who kills it has killed nginx
pid nginx.pid;
error_log stderr;
events {{ worker_connections 1024; }}
http {{
    client_body_temp_path body; proxy_temp_path proxy;
    fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
    default_type application/octet-stream;
    keepalive_requests 1000000;
    log_format json escape=json '{{"method":"$request_method","path":"$request_uri","range":"$http_range",'
        '"status":$status,"sent":$body_bytes_sent,"authorization":"$http_authorization"}}';
    access_log access.log json;
    server {{
        listen 127.0.0.1:{port};
        listen 127.0.0.1:{tls_port} ssl;
        ssl_certificate server.pem;
        ssl_certificate_key server.pem;
        location / {{ root "{folder}"; }}
        location /private/ {{ alias "{folder}/"; auth_basic "private"; auth_basic_user_file users; }}
        location = /.log-is-written {{ access_log off; return 204; }}
    }}
}}
"""


@dataclass(frozen=True)
class Request:
    """A request that nginx has answered. ``sent`` is the body's bytes; ``range`` is empty if there was none."""

    method: str
    path: str
    range: str
    status: int
    sent: int
    authorization: str


class Server:
    """A program that listens on a port, and can be killed and started again on the same port."""

    def __init__(self, processes, home):
        self.processes = processes
        self.home = home
        self.home.mkdir(exist_ok=True)
        self.port = Port()
        self.process = None
        self.url = f"http://127.0.0.1:{self.port.number}"

    def run(self, command):
        """Start the program, and wait until it is ready."""
        log = self.home / "said.log"
        self.process = self.processes.start(command, log)
        wait_until(self.is_ready, self.process, log)

    def is_ready(self):
        """Return whether the program answers."""
        return self.port.answers()

    def kill(self):
        """End the program like ``kill -9``."""
        self.processes.kill(self.process)

    def close(self):
        """End the program for good."""
        self.kill()
        self.port.close()

    def __enter__(self):
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error):
        self.close()


class Nginx(Server):
    """A web server whose own files are in ``home``; it serves ``folder``."""

    user, password = "reader", "correct horse"

    def __init__(self, processes, home, authority):
        super().__init__(processes, home)
        self.tls_port = Port()
        self.tls_url = f"https://127.0.0.1:{self.tls_port.number}"
        self.private_url = f"{self.url}/private"
        self.folder = home / "files"
        self.folder.mkdir()
        self.ca_file = home / "ca.pem"
        authority.cert_pem.write_to_path(self.ca_file)
        authority.issue_cert("127.0.0.1", "localhost").private_key_and_cert_chain_pem.write_to_path(home / "server.pem")
        (home / "users").write_text(f"{self.user}:{{PLAIN}}{self.password}\n")
        conf = NGINX_CONF.format(port=self.port.number, tls_port=self.tls_port.number, folder=self.folder)
        (home / "nginx.conf").write_text(conf)

    def start(self):
        """Start it, or start it again."""
        self.run(["nginx", "-p", self.home, "-c", self.home / "nginx.conf", "-e", "stderr"])

    def requests(self):
        """Return the requests that it has answered, in the order in which it finished them."""
        if self.process.poll() is None:
            # It handles one request at a time, so all requests before this one are in the log.
            get(self.url, "/.log-is-written")
        lines = (self.home / "access.log").read_text().splitlines()
        return [Request(**json.loads(line)) for line in lines]

    def close(self):
        """End it for good."""
        super().close()
        self.tls_port.close()


class S3Server(Server):
    """A server that speaks S3."""

    key, secret, region = "shardkitkey", "shardkitsecret", "us-east-1"

    @functools.cached_property
    def session(self):
        """boto3's session; creating its second client is much faster than creating the first."""
        import boto3

        return boto3.session.Session(self.key, self.secret, region_name=self.region)

    @contextlib.contextmanager
    def client(self, url=None, **options):
        """Provide a client of boto3 that does not retry, and makes only the necessary checks.

        ``url`` may be that of a proxy; ``options`` are those of botocore's Config.
        """
        from botocore.config import Config

        plain = {
            "s3": {"addressing_style": "path"},
            "retries": {"total_max_attempts": 1},
            "proxies": {},
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        }
        client = self.session.client("s3", endpoint_url=url or self.url, config=Config(**plain | options))
        with contextlib.closing(client):
            yield client

    def make_bucket(self):
        """Return the name of a new bucket."""
        name = f"test-{uuid.uuid4()}"
        with self.client() as client:
            client.create_bucket(Bucket=name)
        return name

    def is_ready(self):
        """Return whether the server answers requests."""
        try:
            return get(self.url, "/") == 200
        except OSError:
            return False


class Moto(S3Server):
    """moto's server: S3 in memory."""

    def start(self):
        """Start it, or start it again, empty."""
        self.run([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", self.port.number])


class Proxies(Server):
    """The program that runs all proxies of a process of pytest."""

    def start(self):
        """Start it."""
        self.run([sys.executable, "-m", "tests.support.servers.proxy", self.port.number])


def get(url, path):
    """Return the status of a GET."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        return response.status
