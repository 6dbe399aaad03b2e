"""What the tree itself promises: the modules and their order, the public names, and how quickly they are there."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardkit

ROOT = Path(__file__).parents[1]
SOURCES = {path.stem: path for path in (ROOT / "shardkit").glob("*.py") if path.stem != "__init__"}

# The order of a sample's way. The same list stands in shardkit's docstring and in the README's table of modules.
LAYERS = [
    *["errors", "hashing", "sample"],
    *[
        "storage",
        "local",
        "attempts",
        "network",
        "answers",
        "ranges",
        "web",
        "spool",
        "credentials",
        "calls",
        "uploads",
        "s3",
        "generic",
        "schemes",
    ],
    "progress",
    *[
        "decompress",
        "compress",
        "arrays",
        "pixels",
        "codecs",
        "columns",
        "rng",
        "resize",
        "boxes",
        "image",
        "foreign",
        "transforms",
        "headers",
        "tar",
        "index",
        "manifest",
        "reader",
    ],
    *["scan", "indexing"],
    *[
        "filenames",
        "labels",
        "sources",
        "shard_source",
        "shards",
        "writer",
        "plan",
        "records",
        "spill",
        "resume",
        "lock",
        "work",
        "tasks",
        "pack",
    ],
    *["ranks", "epochs", "stream"],
    *[
        "order",
        "buffers",
        "blocks",
        "recent",
        "cachedir",
        "cache",
        "parts",
        "resident",
        "indexes",
        "access",
        "filters",
        "dataset",
        "sampler",
    ],
    *["batches", "columnar", "slabs", "rows", "schedule", "threads", "fetch", "engine", "loader"],
    *[
        "findings",
        "verify",
        "inspection",
        "mixing",
        "report",
        "testing",
        "output",
        "commands",
        "cli_cache",
        "cli_uploads",
        "cli",
    ],
    "webdataset",
]

# The words of every public signature: the same thing has the same name everywhere.
VOCABULARY = {
    *["batch_size", "block_bytes", "buffer_size", "collate_fn", "columns", "compression", "drop_last", "executor"],
    *["fields", "max_skipped", "num_workers", "on_error", "open_shards", "overwrite", "progress", "rank", "resume"],
    *["seed", "shard_bytes", "shard_samples", "shuffle", "split_by", "splits", "storage_options", "transform", "where"],
    *["worker_type", "world_size"],
    # what a call is about
    *["allow_any_url", "classes", "out", "outs", "path"],
    *["filter", "folder", "labels", "position", "positions", "state_dict", "text"],
    *["destination", "epoch", "field", "key", "message", "offset", "sample", "source", "url", "urls"],
    # codecs: a value and its bytes, and the bounds on what they may claim
    *["codecs", "data", "decode", "encode", "images", "max_array_bytes", "max_decompressed_bytes", "max_pixels"],
    "value",
    # a dataset: which samples, and where they lie
    *[
        "block",
        "buffers",
        "cache",
        "cache_bytes",
        "dataset",
        "indices",
        "lanes",
        "memory",
        "raw",
        "rng",
        "samples",
        "shard",
    ],
    # an image, and what is made of it
    *["antialias", "crop", "exif", "flip", "image", "nearest", "ratio", "scale", "size"],
    # what a random number is to be
    *["high", "low", "mean", "n", "std", "values"],
}

HEAVY = {
    "botocore",
    "PIL",
    "boto3",
    "datasets",
    "fsspec",
    "matplotlib",
    "pandas",
    "pyarrow",
    "simplejpeg",
    "torch",
    "urllib3",
    "webdataset",
}

QUICK = {"import shardkit": "import shardkit"}
if "cli" in LAYERS:
    QUICK["shardkit --help"] = "sys.argv = ['shardkit', '--help']; from shardkit.cli import main; main()"

every_module = pytest.mark.parametrize("module", sorted(SOURCES))
every_public_name = pytest.mark.parametrize("name", shardkit.__all__)


def imported_modules(tree):
    """Return the modules of shardkit that a source imports, at the top, in a function, or for types only."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            package = "." * node.level + (node.module or "")
            names = [f"{package}.{alias.name}" if package == "shardkit" else package for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        modules |= {name.removeprefix("shardkit.") for name in names if name.startswith(("shardkit", "."))}
    return modules


def public_callables():
    """Yield (name, callable) for what a user calls: functions, constructors and methods that are ours."""
    for name in shardkit.__all__:
        value = getattr(shardkit, name)
        if "__dataclass_fields__" not in vars(value) or value is shardkit.Decoder:  # others are results
            yield name, value
        for cls in inspect.getmro(value) if inspect.isclass(value) else ():
            if cls.__module__.startswith("shardkit."):
                for method in vars(cls):
                    if not method.startswith("_") and callable(getattr(value, method)):
                        yield f"{name}.{method}", getattr(value, method)


def test_the_modules_are_the_layers():
    assert sorted(LAYERS) == sorted(SOURCES)


def test_the_docstring_lists_the_layers_in_their_order():
    assert re.findall(r"^ {4}(\w+) {2,}\S", shardkit.__doc__.partition("The modules")[2], re.MULTILINE) == LAYERS


def test_the_readme_lists_the_layers_in_their_order():
    table = re.search(r"^\| module \|.*\n\|[-:| ]+\n((?:\|.*\n)+)", (ROOT / "README.md").read_text(), re.MULTILINE)

    assert re.findall(r"^\| `(\w+)` \|", table[1], re.MULTILINE) == LAYERS


@every_module
def test_a_module_imports_only_from_earlier_layers(module):
    earlier = set(LAYERS[: LAYERS.index(module)])

    assert imported_modules(ast.parse(SOURCES[module].read_text())) <= earlier


@every_module
def test_a_module_is_one_idea_of_at_most_400_lines(module):
    assert len(SOURCES[module].read_text().splitlines()) <= 400


@every_module
def test_a_public_signature_has_no_bag_of_arguments(module):
    functions = [n for n in ast.walk(ast.parse(SOURCES[module].read_text())) if isinstance(n, ast.FunctionDef)]

    assert [f.name for f in functions if f.args.kwarg and (f.name == "__init__" or not f.name.startswith("_"))] == []


@pytest.mark.parametrize("module", ["", *sorted(f".{name}" for name in SOURCES)])
def test_all_is_sorted_and_true(module):
    module = importlib.import_module(f"shardkit{module}")
    names = getattr(module, "__all__", [])

    assert names == sorted(set(names))
    assert [name for name in names if not hasattr(module, name)] == []


@every_public_name
def test_a_public_name_has_a_docstring_of_its_own(name):
    assert getattr(shardkit, name).__doc__


def test_a_public_name_is_never_hidden_by_the_module_of_that_name():
    for module in LAYERS:
        importlib.import_module(f"shardkit.{module}")

    assert [name for name in shardkit.__all__ if inspect.ismodule(getattr(shardkit, name))] == []


def test_the_same_thing_has_the_same_name_in_every_public_signature():
    signatures = {name: inspect.signature(f) for name, f in public_callables() if f is not shardkit.StreamWarning}
    used = {name: set(signature.parameters) - {"self"} for name, signature in signatures.items()}

    assert {name: words - VOCABULARY for name, words in used.items() if words - VOCABULARY} == {}


@pytest.mark.parametrize("program", QUICK, ids=QUICK)
def test_what_should_be_quick_imports_nothing_heavy(program):
    report = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
    done = subprocess.run([sys.executable, "-c", report + QUICK[program]], capture_output=True, text=True, check=True)

    assert HEAVY & set(done.stderr.split()) == set()
