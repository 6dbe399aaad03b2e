"""S3 operations other than reading bytes: done, tried again if that makes sense, or refused with a reason."""

from collections.abc import Callable, Mapping
from typing import Any

from shardkit.errors import AccessError, ArgumentError, MissingFileError, StorageError
from shardkit.storage.responses import Refusal, asked_pause
from shardkit.storage.retry import Attempts
from shardkit.storage.s3.session import S3Options, advise, no_credentials, session_for


class RefusedError(Exception):
    """S3 refuses an operation, and another try would not help.

    Attributes:
        refusal: The answer.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.said)
        self.refusal = refusal

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.refusal.status

    def explain(self, url: str, doing: str) -> StorageError:
        """Return the error for the user."""
        if self.status == 404:
            return MissingFileError(f"{url}: does not exist ({self}); correct the URL", url=url)
        if self.refusal.is_forbidden:
            return AccessError(f"{url}: {doing}: access is refused ({self}); {advise(self.refusal.code)}", url=url)
        return StorageError(
            f"{url}: {doing}: the server answers {self.status} ({self}); correct the URL or the server", url=url
        )


class Caller:
    """Calls S3 operations.

    Args:
        options: The credentials and the server.
    """

    def __init__(self, options: S3Options) -> None:
        self._options = options

    def attempts(self, url: str, size: int = 0) -> Attempts:
        """Return the limits on the tries and the time of one call that sends ``size`` bytes."""
        attempts = Attempts(url, self._options.total_timeout)
        attempts.receive(size, is_wanted=False)
        return attempts

    def call(
        self,
        operation: str,
        url: str,
        doing: str,
        parameters: Mapping[str, object],
        *,
        attempts: Attempts | None = None,
        body: Callable[[], object] | None = None,
    ) -> dict[str, Any]:
        """Call one operation, and return S3's answer.

        Args:
            operation: Its name in botocore.
            url: The object or folder, for messages.
            doing: What cannot be done, in the words of the message.
            parameters: The operation's parameters.
            attempts: Limits and counts the tries, and limits the time.
            body: Returns the data to send; called for each try.

        Raises:
            RefusedError: S3 refuses it.
            StorageError: All tries failed, or the time has run out.
            AccessError: There are no credentials.
            ArgumentError: A parameter is invalid, such as a bucket's name.
        """
        from botocore import exceptions

        attempts = attempts or self.attempts(url)
        while True:
            session = session_for(self._options)
            sent = {"Body": body()} if body is not None else {}
            try:
                result: dict[str, Any] = getattr(session.client, operation)(**parameters, **sent)
            except exceptions.ClientError as error:
                about, said = error.response.get("ResponseMetadata", {}), error.response.get("Error", {})
                refusal = Refusal(
                    int(about.get("HTTPStatusCode", 0)),
                    str(said.get("Code", "")),
                    str(said.get("Message", "")),
                    about.get("HTTPHeaders", {}),
                    None,
                )
                if refusal.may_pass:
                    attempts.fail(doing, refusal.said, pause=asked_pause(refusal.headers.get("retry-after")))
                elif attempts.renewals < 2 and session.renew(url, refusal):
                    attempts.renewals += 1
                else:
                    raise RefusedError(refusal) from None
            except (exceptions.NoCredentialsError, exceptions.CredentialRetrievalError) as error:
                raise no_credentials(url, str(error)) from None
            except exceptions.ParamValidationError as error:
                raise ArgumentError(f"{url}: {' '.join(str(error).split())}; correct the URL", url=url) from None
            except exceptions.SSLError as error:
                attempts.fail(doing, _describe(error), is_final="CERTIFICATE_VERIFY_FAILED" in str(error))
            except (exceptions.BotoCoreError, OSError) as error:
                attempts.fail(doing, _describe(error))
            else:
                return result

    def call_if_there(
        self, operation: str, url: str, doing: str, parameters: Mapping[str, object]
    ) -> dict[str, Any] | None:
        """Call one operation on an existing object, and return S3's answer; None if there is none. See ``call``.

        Raises:
            StorageError: S3 refuses it, or all tries failed.
        """
        try:
            return self.call(operation, url, doing, parameters)
        except RefusedError as error:
            if error.status == 404:
                return None
            raise error.explain(url, doing) from None


def _describe(error: Exception) -> str:
    """Return what went wrong with a request, without secrets."""
    from botocore import exceptions

    if isinstance(error, exceptions.EndpointConnectionError | exceptions.ConnectTimeoutError):
        return "no connection was made"
    if isinstance(error, exceptions.ReadTimeoutError):
        return "the server was silent for too long"
    if isinstance(error, exceptions.SSLError):
        return "the connection is not secure"
    if isinstance(error, exceptions.ProxyConnectionError):
        return "the proxy was not reached"
    return f"the connection broke ({type(error).__name__})"
