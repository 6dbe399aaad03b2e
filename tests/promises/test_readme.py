"""Runs the README: its commands work, and the output that it shows is what is printed.

Blocks of ``python``, ``bash`` and ``console`` (lines that begin with ``$``, and their output) run in order in one
folder. Python's names last until the next ``##`` heading. A ``text`` block directly after a block is its output, where
``...`` stands for anything. A block after ``<!-- not run: reason -->`` is not run.

The notebooks, which nbmake runs, cover what the README has no room for. Links between the pages must not be broken.
"""

import contextlib
import doctest
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(
    r"(?:^<!-- not run:(?P<reason>.*)-->\n+)?^```(?P<language>.*)\n(?P<code>(?:.*\n)*?)```\n"
    r"(?:\n*```text\n(?P<output>(?:.*\n)*?)```\n)?",
    re.MULTILINE,
)
LANGUAGES = {"python", "bash", "console", "text", "json"}


class Block(NamedTuple):
    """A block of code, with its first line and its expected output (None if no output is given)."""

    section: str
    language: str
    code: str
    line: int
    output: str | None


def blocks_to_run(text):
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        assert match["language"] in LANGUAGES, f"README.md:{line}: a block of {match['language']!r}, not of {LANGUAGES}"
        if match["reason"] is not None:
            assert match["reason"].strip(), f"README.md:{line}: is not run, and no reason is given"
        elif match["language"] in ("python", "bash", "console"):
            headings = re.findall(r"^## .*", BLOCK.sub("", text[: match.start()]), re.MULTILINE)
            section = headings[-1] if headings else ""
            yield Block(section, match["language"], match["code"], line, match["output"])


def run_python(block, names):
    program = compile(
        "\n" * (block.line - 1) + block.code, README.name, "exec"
    )  # so that tracebacks show the README's lines
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program, names)
    return printed.getvalue()


def run_bash(command, line):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        env=os.environ | {"PATH": path, "COLUMNS": "100", "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"README.md:{line}: {command.strip()}: exit code {done.returncode}\n{done.stderr}"
    return done.stdout


def check_output(expected, printed, line):
    printed = re.sub(r"[ \t]+$", "", printed, flags=re.MULTILINE)
    same = doctest.OutputChecker().check_output(expected.strip(), printed.strip(), doctest.ELLIPSIS)
    assert same, f"README.md:{line}: is said to print\n{expected}\nand prints\n{printed}"


def run_readme(text):
    names = {}
    for block in blocks_to_run(text):
        if block.language == "python":
            printed = run_python(block, names.setdefault(block.section, {"__name__": "readme"}))
        elif block.language == "bash":
            printed = run_bash(block.code, block.line)
        else:
            printed = None
            assert block.code.startswith("$ "), f"README.md:{block.line}: a console block begins with a line of $"
            for command, output in re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", block.code, re.MULTILINE):
                check_output(output, run_bash(command, block.line), block.line)
        if block.output is not None and printed is not None:
            check_output(block.output, printed, block.line)


@pytest.fixture(autouse=True)
def photos(tmp_path, monkeypatch):
    """A folder like that of the README's reader: photos/, with a folder of images for each class."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(["cat", "dog"]):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for i in range(50):
            pixels = np.full((32, 48, 3), 100 * number + i, np.uint8)
            Image.fromarray(pixels).save(folder / f"{i:03}.jpg")


def test_the_readme_works_as_printed():
    run_readme(README.read_text())


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "README.md:2: is said to print"),
        ("```python\nx = 1\n```\n\n## Next\n\n```python\nx\n```\n", "name 'x' is not defined"),
        ("```bash\nls photos | wc -l\n```\n```text\n3\n```\n", "README.md:2: is said to print"),
        ("```bash\nfalse\necho 1\n```\n", "exit code 1"),
        ("```console\n$ echo 1\n1\n$ echo 2 \\\n  3\n3\n```\n", "README.md:2: is said to print\n  3\n"),
        ("```console\n1\n```\n", "begins with a line of"),
        ("```\necho 1\n```\n", "a block of ''"),
        ("<!-- not run: -->\n```bash\nfalse\n```\n", "no reason"),
        ("<!-- not run: takes an hour -->\n```bash\nfalse\n```\n\n```bash\nfalse\n```\n", "README.md:7: false"),
    ],
)
def test_a_readme_that_does_not_work_as_printed_is_noticed(text, fault):
    with pytest.raises((AssertionError, NameError), match=re.escape(fault)):
        run_readme(text)


@pytest.mark.parametrize(
    "text",
    [
        "```python\nx = 1\n```\n\n```python\nprint(x, 'rate', 17.2)\n```\n```text\n1 rate ...\n```\n",
        "```bash\nls photos\n```\n\n```text\ncat\ndog\n```\n",
        "```console\n$ echo 1\n1\n$ true\n$ echo 2 \\\n  3\n2 3\n```\n",
        "<!-- not run: needs the network -->\n\n```bash\nfalse\n```\n",
        "A drawing.\n\n```text\na -> b\n```\n",
    ],
)
def test_a_readme_that_works_as_printed_passes(text):
    run_readme(text)


def prose_of(path):
    """Return the text of a Markdown file or of a notebook's Markdown cells, without blocks of code."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "".join("".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "markdown")
    return BLOCK.sub("", text)


def anchors_of(path):
    """Return GitHub's anchors for the headings of a Markdown file or a notebook."""
    headings = re.findall(r"^#+ (.*)$", prose_of(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def lost_links(path):
    """Return the broken links of a page to files of the project."""
    lost = []
    for link in LINK.findall(prose_of(path)):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors_of(target))):
            lost.append(link)
    return lost


@pytest.mark.parametrize("page", [README, *NOTEBOOKS], ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    assert lost_links(page) == []


def test_the_readme_leads_to_every_notebook():
    linked = {(ROOT / link).resolve() for link in LINK.findall(prose_of(README))}

    assert linked.issuperset(NOTEBOOKS)


def test_a_link_that_leads_nowhere_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Who reads?\n[a](page.md#who-reads) [b](#what) [c](none.md) [d](https://host/) [e](page.md)\n")

    assert lost_links(page) == ["#what", "none.md"]
