"""Promises about the source tree: packages and their dependencies, the public names, and how fast they import."""

import ast
import graphlib
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardkit

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "shardkit"
SOURCES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py"
}

# The packages that each package may import, besides the ground, in the order of the data flow. Add edges deliberately.
GROUND = ["errors", "hashing", "sample", "progress"]
ALLOWED = {
    "storage": [],
    "codecs": ["storage"],
    "transforms": ["codecs"],
    "format": ["storage", "codecs"],
    "order": [],
    "reading": ["storage", "codecs", "transforms", "format", "order"],
    "sources": ["storage", "codecs", "format", "reading"],
    "packing": ["storage", "codecs", "transforms", "format", "reading", "sources"],
    "loading": ["storage", "codecs", "transforms", "format", "order", "reading"],
    "inspection": ["storage", "codecs", "format", "order", "reading", "packing"],
    "cli": ["storage", "format", "reading", "sources", "packing", "inspection"],
    "testing": [],
    "webdataset": ["loading"],
}

# The parameter names of all public signatures: the same thing has the same name everywhere.
VOCABULARY = {
    *[
        "batch_size",
        "block_bytes",
        "buffer_size",
        "check",
        "collate_fn",
        "columns",
        "compression",
        "drop_last",
        "executor",
    ],
    *["fields", "max_skipped", "num_workers", "on_error", "open_shards", "overwrite", "progress", "rank", "resume"],
    *["seed", "shard_bytes", "shard_samples", "shuffle", "split_by", "splits", "storage_options", "transform", "where"],
    *["worker_type", "world_size"],
    # the subject of a call
    *["allow_any_url", "check", "classes", "out", "outs", "path"],
    *["filter", "folder", "labels", "position", "positions", "state_dict", "text"],
    *["destination", "epoch", "field", "key", "message", "offset", "sample", "source", "url", "urls"],
    # codecs: a value and its bytes, and the limits on the sizes that they may claim
    *["codecs", "data", "decode", "encode", "images", "max_array_bytes", "max_decompressed_bytes", "max_pixels"],
    "value",
    # a dataset: which samples, and where they are
    "digest",
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
    # an image, and the result made from it
    *["antialias", "crop", "exif", "flip", "image", "nearest", "ratio", "scale", "size"],
    # a random number
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

QUICK = {
    "import shardkit": "import shardkit",
    "shardkit --help": "sys.argv = ['shardkit', '--help']; from shardkit.cli.app import main; main()",
}

every_module = pytest.mark.parametrize("module", sorted(SOURCES))
every_public_name = pytest.mark.parametrize("name", shardkit.__all__)


def imported_modules(path):
    """Return the modules of shardkit that a source file imports, at the top, in a function, or for types only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names]
            found |= {name if name.removeprefix("shardkit.") in SOURCES else module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.removeprefix("shardkit.") for name in found if name.startswith("shardkit.")}


def listed_in(docstring):
    """Return the names in the table of a docstring."""
    return re.findall(r"^ {4}(\w+) {2,}\S", docstring, re.MULTILINE)


def public_callables():
    """Yield (name, callable) for everything that users call: shardkit's functions, constructors and methods."""
    for name in shardkit.__all__:
        value = getattr(shardkit, name)
        if "__dataclass_fields__" not in vars(value) or value is shardkit.Decoder:  # other dataclasses are results
            yield name, value
        for cls in inspect.getmro(value) if inspect.isclass(value) else ():
            if cls.__module__.startswith("shardkit."):
                for method in vars(cls):
                    if not method.startswith("_") and callable(getattr(value, method)):
                        yield f"{name}.{method}", getattr(value, method)


def test_the_docstring_lists_the_packages_in_their_order():
    assert listed_in(shardkit.__doc__.partition("The packages")[2]) == [*GROUND, *ALLOWED]


def test_the_readme_draws_every_package():
    section = (ROOT / "README.md").read_text().partition("\n## How it works\n")[2].partition("\n## ")[0]
    drawn = re.findall(r"\[(\w+)\](?!\()", section)
    named = re.findall(r"`(\w+)`", section)

    assert sorted(drawn + named) == sorted([*GROUND, *ALLOWED])


def test_the_tests_that_the_readme_names_are_there():
    named = set(re.findall(r"\btest_\w+\.py", (ROOT / "README.md").read_text()))

    assert named - {path.name for path in (ROOT / "tests").rglob("test_*.py")} == set()


def test_every_module_is_in_a_package_that_is_listed():
    assert {name.split(".")[0] for name in SOURCES} == {*GROUND, *ALLOWED}


@pytest.mark.parametrize("package", sorted({name.rpartition(".")[0] for name in SOURCES} - {""}))
def test_a_package_lists_its_modules(package):
    depth = package.count(".") + 1
    inside = {name.split(".")[depth] for name in SOURCES if name.startswith(f"{package}.")}

    assert sorted(listed_in(importlib.import_module(f"shardkit.{package}").__doc__)) == sorted(inside)


@every_module
def test_a_module_imports_only_what_its_package_may(module):
    package = module.split(".")[0]
    imported = {name.split(".")[0] for name in imported_modules(SOURCES[module])} - {package}

    assert imported <= {*GROUND, *ALLOWED.get(package, [])}


def test_no_edge_is_allowed_that_nobody_needs():
    used = {
        (name.split(".")[0], other.split(".")[0]) for name, path in SOURCES.items() for other in imported_modules(path)
    }
    allowed = {(package, other) for package, others in ALLOWED.items() for other in others}

    assert allowed - used == set()


def test_no_package_and_no_module_imports_in_a_circle():
    graphlib.TopologicalSorter(ALLOWED).prepare()
    graphlib.TopologicalSorter({name: imported_modules(path) for name, path in SOURCES.items()}).prepare()


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
    for module in SOURCES:
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


def test_completion_shows_what_is_public_and_nothing_else():
    assert [name for name in dir(shardkit) if not name.startswith("__")] == shardkit.__all__
