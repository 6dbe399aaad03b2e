"""Credentials and endpoints for S3: options, profiles and environment -> signed requests and a client.

Credentials, regions and endpoints are resolved by botocore, as for every other AWS tool. A process has one session for
each set of options; a forked or spawned process makes its own.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Any
from urllib.parse import quote

from shardkit.errors import AccessError, ArgumentError, MissingExtraError, hide_secrets
from shardkit.storage.connections import CONNECT_TIMEOUT, READ_TIMEOUT, TOTAL_TIMEOUT, Network
from shardkit.storage.responses import EXPIRED, Refusal

_CLIENT_OPTIONS = ("region_name", "endpoint_url", "use_ssl", "verify", "api_version")
_KEPT_CONNECTIONS = 64
_PLAIN = "/~"  # not percent-encoded in a key


@dataclass(frozen=True)
class S3Options:
    """The ``storage_options`` for s3: options of s3fs, and the time limit of a read.

    Attributes:
        key: The access key; with ``secret``, and ``token`` if it is temporary. By default, the key that every AWS tool
            finds.
        secret: The secret key.
        token: The session's token.
        anon: Send requests without credentials, as public buckets allow.
        profile: The name of a profile in AWS's configuration files.
        endpoint_url: The server, if it is not AWS's.
        client_kwargs: For botocore's client: ``region_name``, ``verify`` (a file of certificates) and so on.
        config_kwargs: For botocore's ``Config``: ``connect_timeout``, ``read_timeout``, ``s3`` and so on.
        total_timeout: How long a read may take in total, in seconds, plus one second for each 100 kB received.
    """

    key: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    anon: bool = False
    profile: str | None = None
    endpoint_url: str | None = field(default=None, repr=False)
    client_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    config_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    total_timeout: float = TOTAL_TIMEOUT

    def __post_init__(self) -> None:
        if find_spec("botocore") is None:
            raise MissingExtraError("s3:// needs botocore, which is not installed: pip install 'shardkit[s3]'")
        for name in ("key", "secret", "token"):
            value = getattr(self, name)
            if not isinstance(value, str | None):  # the value is not shown
                raise ArgumentError(
                    f"storage_options: {name} must be text, got {type(value).__name__}; write it in quotes"
                )
        for name, known in (("client_kwargs", _CLIENT_OPTIONS), ("config_kwargs", None)):
            given = getattr(self, name)
            if not isinstance(given, Mapping):
                raise ArgumentError(f"storage_options: {name} must be a mapping, got {type(given).__name__}")
            if known and (unknown := sorted(set(given) - set(known))):
                raise ArgumentError(f"storage_options: {name} has {', '.join(unknown)}, known are {', '.join(known)}")
        problems = {
            "key and secret go together; give both, or neither": bool(self.key) != bool(self.secret),
            "anon asks without credentials; give it, or key and profile": self.anon and (self.key or self.profile),
            "verify cannot be off; give a file of the certificates that are trusted": (
                self.client_kwargs.get("verify") is False
            ),
            "proxies are those of the environment; set HTTPS_PROXY and NO_PROXY": "proxies" in self.config_kwargs,
            "signature_version can be s3v4 alone; leave it out, or pass anon=True": (
                self.config_kwargs.get("signature_version", "s3v4") != "s3v4"
            ),
        }
        for problem, applies in problems.items():
            if applies:
                raise ArgumentError(f"storage_options: {problem}")

    @cached_property
    def identity(self) -> str:
        """A string that identifies these options. It contains the secrets."""
        return json.dumps([getattr(self, f.name) for f in fields(self)], sort_keys=True, default=repr)


OPTIONS = tuple(f.name for f in fields(S3Options))


class S3Session:
    """A client that belongs to one process, and the signing of requests that the client does not send itself.

    Attributes:
        client: botocore's client.
    """

    def __init__(self, options: S3Options) -> None:
        import botocore
        from botocore.config import Config

        # Checksums beyond Content-MD5 are used only where they are required: servers other than AWS's do not support
        # them. There is only one try: one place decides for all reads and writes when and how often to try again.
        default = Config(
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            retries={"total_max_attempts": 1},
            max_pool_connections=_KEPT_CONNECTIONS,
        )
        config = default.merge(_checked(Config, **options.config_kwargs))
        self._unsigned = config.merge(Config(signature_version=botocore.UNSIGNED))
        self._options = options
        self._config = self._unsigned if options.anon else config
        self._addresses: dict[str, str] = {}  # by bucket
        self._regions: dict[str, str] = {}  # of the buckets whose region differs from the client's
        self._open()

    def _open(self) -> None:
        """Find credentials; called again after they have expired."""
        import botocore.session

        options = self._options
        self._session = botocore.session.Session(profile=options.profile)
        data_path = _checked(self._session.get_config_variable, logical_name="data_path")
        self._session.register_component("data_loader", _loader(data_path))
        if options.key:
            self._session.set_credentials(options.key, options.secret, options.token)
        self._credentials = None if options.anon else _checked(self._session.get_credentials)
        self.client = self._make_client(self._config)

    def _make_client(self, config: Any, region: str | None = None) -> Any:
        given = {"endpoint_url": self._options.endpoint_url, **self._options.client_kwargs}
        given |= {"region_name": region} if region else {}
        return _checked(self._session.create_client, service_name="s3", config=config, **given)

    @property
    def network(self) -> Network:
        """How the server is reached."""
        from botocore.httpsession import where

        named, config = self._options.client_kwargs.get("verify"), self._options.config_kwargs
        configured = self._session.get_config_variable("ca_bundle")
        return Network(
            connect_timeout=config.get("connect_timeout", CONNECT_TIMEOUT),
            read_timeout=config.get("read_timeout", READ_TIMEOUT),
            total_timeout=self._options.total_timeout,
            ca_certs=str(named) if isinstance(named, str | os.PathLike) else configured or where(),
        )

    def sign(self, url: str) -> tuple[str, dict[str, str]]:
        """Return the address for a GET of an object, and the headers that sign the request.

        Other headers are not signed, so that a proxy may change them.

        Raises:
            AccessError: There are no credentials.
        """
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.exceptions import BotoCoreError

        bucket, key = split_s3(url)
        address = self._address(bucket) + quote(key, safe=_PLAIN)
        if self._options.anon:
            return address, {}
        if self._credentials is None:
            raise no_credentials(url)
        request = AWSRequest("GET", address)
        region = self._regions.get(bucket) or self.client.meta.region_name
        try:
            S3SigV4Auth(self._credentials.get_frozen_credentials(), "s3", region).add_auth(request)
        except BotoCoreError as error:
            raise no_credentials(url, str(error)) from None
        return address, dict(request.headers.items())

    def _address(self, bucket: str) -> str:
        """Return the common prefix of the addresses of a bucket's objects."""
        address = self._addresses.get(bucket)
        if address is None:
            client = self._make_client(self._unsigned, self._regions.get(bucket))
            params = {"Bucket": bucket, "Key": "k"}
            whole = _checked(client.generate_presigned_url, ClientMethod="get_object", Params=params)
            address = self._addresses[bucket] = whole.removesuffix("k")
        return address

    def renew(self, url: str, refusal: Refusal) -> bool:
        """Return whether a refused request may be sent again: to another region, or with new credentials.

        Args:
            url: The object.
            refusal: The answer; it may name the bucket's region.
        """
        bucket, _ = split_s3(url)
        region = refusal.headers.get("x-amz-bucket-region")
        if region and region != (self._regions.get(bucket) or self.client.meta.region_name):
            self._regions[bucket] = region
            self._addresses.pop(bucket, None)
            return True
        if refusal.code in EXPIRED and not self._options.anon and not self._options.key:
            self._open()
            return True
        return False


@cache
def _loader(data_path: str | None) -> Any:
    """Return a shared loader of botocore's service descriptions: otherwise each session would keep its own 12 MB."""
    from botocore.loaders import create_loader

    return create_loader(data_path)


_sessions: dict[str, S3Session] = {}
os.register_at_fork(after_in_child=_sessions.clear)


def session_for(options: S3Options) -> S3Session:
    """Return this process's session for some options."""
    session = _sessions.get(options.identity)
    return session if session is not None else _sessions.setdefault(options.identity, S3Session(options))


@dataclass(frozen=True)
class S3Signer:
    """Signs requests; see ``Signer``. Its pickle contains only the options."""

    options: S3Options
    follows = False  # a signature is valid for one host

    @property
    def network(self) -> Network:
        """How the server is reached."""
        return session_for(self.options).network

    def sign(self, url: str, headers: dict[str, str]) -> tuple[str, dict[str, str]]:
        """See ``Signer.sign``."""
        address, signed = session_for(self.options).sign(url)
        return address, {**signed, **headers}

    def renew(self, url: str, refusal: Refusal) -> bool:
        """See ``Signer.renew``."""
        return session_for(self.options).renew(url, refusal)

    def advise(self, refusal: Refusal) -> str:
        """See ``Signer.advise``."""
        return advise(refusal.code)


def advise(code: str) -> str:
    """Return what to do about a refusal for lack of permission."""
    if code in EXPIRED:
        return "the credentials have expired, so get new ones (a profile or a role is renewed by itself)"
    if code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken"):
        return "correct key, secret and token in storage_options, or the profile"
    if code == "RequestTimeTooSkewed":
        return "set this machine's clock"
    return "it needs another key or profile, or, if the bucket is public, anon=True, by storage_options"


def no_credentials(url: str, problem: str = "there are none") -> AccessError:
    """Return the error for missing credentials."""
    return AccessError(
        f"{url}: no credentials were found ({problem}); set AWS_PROFILE, or pass key and secret, or profile, or, if "
        "the bucket is public, anon=True, by storage_options",
        url=url,
    )


def split_s3(url: str) -> tuple[str, str]:
    """Return the bucket and the key of a URL.

    Raises:
        ArgumentError: There is no bucket.

    Example:
        >>> split_s3("s3://bucket/shards/train-000000.tar")
        ('bucket', 'shards/train-000000.tar')
    """
    bucket, _, key = url.partition("://")[2].partition("/")
    if not bucket:
        raise ArgumentError(f"{url}: names no bucket; write s3://bucket/folder", url=url)
    return bucket, key


def _checked(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a function that checks the user's arguments. Raises ArgumentError if they are wrong."""
    from botocore.exceptions import BotoCoreError

    try:
        return function(**arguments)
    except (BotoCoreError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"storage_options: {hide_secrets(str(error))}; correct them, or AWS's configuration"
        ) from None
