"""Code that all commands share: how they print, and how they end."""

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, NoReturn, ParamSpec, TypeVar

import typer

from shardkit.errors import ArgumentError, ShardkitError
from shardkit.storage.os_errors import storage_error

P = ParamSpec("P")
R = TypeVar("R")

EXIT_DAMAGED = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130

StorageOptions = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="An option of the storage, for example anon=true; a value may be JSON."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def new_app(text: str) -> typer.Typer:
    """Return the typer app that commands are added to, with the text that ``--help`` begins with."""
    return typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        help=text,
        context_settings={"help_option_names": ["--help", "-h"]},
    )


def command(app: typer.Typer) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a command of a function: errors that it raises on purpose are printed as one line, not as a traceback."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def _run(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except BrokenPipeError:  # as in `shardkit ls ... | head`: the reader has closed the pipe
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit(0) from None
            except (ShardkitError, OSError) as error:
                _fail(error)
            except KeyboardInterrupt:
                typer.echo("interrupted", err=True)
                raise typer.Exit(EXIT_INTERRUPTED) from None

        return app.command(name=function.__name__.replace("_", "-"))(_run)

    return decorate


def read_storage_options(texts: list[str] | None) -> dict[str, object] | None:
    """Return the storage options that were given as text. Raises ArgumentError if one is not ``name=value``.

    Example:
        >>> read_storage_options(["profile=mine", "anon=true", 'client_kwargs={"region_name": "eu-west-1"}'])
        {'profile': 'mine', 'anon': True, 'client_kwargs': {'region_name': 'eu-west-1'}}
        >>> read_storage_options(["timeout=2.5", "password=1e5"])  # a number in any other notation is text
        {'timeout': 2.5, 'password': '1e5'}
    """
    options: dict[str, object] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ArgumentError(f"--storage-option {name!r}: write name=value")  # the rest may be a password
        options[name] = value
        with contextlib.suppress(ValueError):
            parsed = json.loads(value)
            if not isinstance(parsed, float) or json.dumps(parsed) == value:
                options[name] = parsed
    return options or None


def print_lines(lines: Iterable[str]) -> None:
    """Print lines to standard output."""
    for line in lines:
        typer.echo(line)


def print_json(value: object) -> None:
    """Print a value as JSON to standard output."""
    typer.echo(json.dumps(value, indent=1))


def _fail(error: ShardkitError | OSError) -> NoReturn:
    if not isinstance(error, ShardkitError):  # the error names no file that we read or write
        error = storage_error(error, error.filename or "standard output")
    text = str(error).replace("overwrite=True", "--overwrite").replace("allow_any_url=True", "--allow-any-url")
    text = text.replace("storage_options", "--storage-option")
    typer.echo(f"error: {' '.join(text.split())}", err=True)
    raise typer.Exit(EXIT_ERROR)
