"""The peers' packages, each in an environment of its own, on top of the one that runs the benchmark, never in it.

An environment's own packages come first; all others are taken from the environment that runs the benchmark. So torch is
not installed again for each peer, and no peer changes the packages of another one.
"""

import importlib.util
import shutil
import site
import subprocess
import sys
from pathlib import Path

PACKAGES = {
    "input": ["scikit-image", "scikit-learn"],
    "webdataset": ["webdataset"],
    "datasets": ["datasets"],
    "spdl": ["spdl-core", "spdl-io"],
    "dali": ["nvidia-dali-cuda130"],
    "albumentations": ["albumentations", "opencv-python-headless"],
    "aiohttp": ["fsspec[http]"],
    "s3fs": ["s3fs"],
    "boto3": ["boto3"],
}
"""The environments, and the packages that pip installs into each."""
_PROGRAMS = {"spdl": ("ffmpeg", ["ffmpeg"])}  # SPDL's wheel has no FFmpeg; Debian's package brings its libraries


class UnavailableError(Exception):
    """An environment cannot be created here; the message says why."""


def find_python(package: str, work: Path, *, install: bool) -> str:
    """Return a Python that can import a package.

    Raises:
        UnavailableError: There is none, and none can or may be created.
    """
    if not package or importlib.util.find_spec(package):
        return sys.executable
    if not install:
        raise UnavailableError(f"{' '.join(PACKAGES[package])} is not installed")
    return python_of(package, work)


def python_of(name: str, work: Path) -> str:
    """Return the Python of an environment, which is created if it does not exist yet.

    Args:
        name: One of ``PACKAGES``; or empty, for the environment that runs the benchmark.
        work: The folder of the environments.

    Raises:
        UnavailableError: It cannot be created.
    """
    if not name:
        return sys.executable
    folder = work / f"environment-{name}"
    python, mark = folder / "bin" / "python", folder / "installed"
    wanted = "\n".join([sys.version, *PACKAGES[name]])
    if mark.exists() and mark.read_text() == wanted:
        return str(python)
    print(f"== installing {' '.join(PACKAGES[name])}", file=sys.stderr)
    if name in _PROGRAMS:
        _need_program(*_PROGRAMS[name])
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    own = next(folder.glob("lib/python*/site-packages"))
    _run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES[name])
    below = [*site.getsitepackages(), *([str(Path.cwd())] if "" in sys.path else [])]
    (own / "below.pth").write_text("import site; " + "; ".join(f"site.addsitedir({path!r})" for path in below))
    mark.write_text(wanted)
    return str(python)


def _need_program(program: str, packages: list[str]) -> None:
    if shutil.which(program):
        return
    if not shutil.which("apt-get"):
        raise UnavailableError(f"{program} is missing")
    _run("apt-get", "update")
    _run("apt-get", "install", "--yes", "--no-install-recommends", *packages)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or [f"exit code {done.returncode}"]
        raise UnavailableError(f"{' '.join(command[-4:])}: {last[0][:200]}")
