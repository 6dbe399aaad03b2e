# Sourced by scripts/test and scripts/demo: goes to the root of the project and makes what they need.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONHOME PYTHONPATH # of another environment; they would come before .venv
unset PYTHONDONTWRITEBYTECODE # else each of the hundreds of programs that tests start compiles all that it imports

fail() {
    echo "$0: $*" >&2
    exit 1
}

# need_programs NAME=PACKAGE...: the programs are there, or are installed where we may (Debian's apt-get, as root).
need_programs() {
    local program packages=()
    for program in "$@"; do
        command -v "${program%=*}" >/dev/null || packages+=("${program#*=}")
    done
    [ ${#packages[@]} = 0 ] && return
    echo "== installing ${packages[*]}"
    install_packages "${packages[@]}" || fail "programs are missing; install the packages ${packages[*]}"
    for program in "$@"; do
        command -v "${program%=*}" >/dev/null || fail "the package ${program#*=} has no program ${program%=*}"
    done
}

install_packages() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "$@"; } >/dev/null
}

find_python() {
    local python
    for python in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    return 1
}

make_venv() {
    local python
    python=$(find_python) || fail "Python 3.11 or newer is needed, and none is on PATH"
    echo "== making .venv with $("$python" --version)"
    # Debian keeps the part of Python that makes environments in a package of its own.
    "$python" -m venv --clear .venv >/dev/null ||
        { install_packages python3-venv && "$python" -m venv --clear .venv; } ||
        fail "$python cannot make an environment; on Debian or Ubuntu, install the package python3-venv"
    pwd >.venv/made-in
}

# An environment holds its own path, so it does not work where its project was copied or moved to.
has_venv() {
    [ "$(cat .venv/made-in 2>/dev/null)" = "$(pwd)" ] && .venv/bin/python -m pip --version >/dev/null 2>&1
}

# All that decides what is installed.
wanted() {
    .venv/bin/python --version
    cat pyproject.toml scripts/constraints.txt
}

is_installed() {
    [ "$(cat ".venv/installed-$1" 2>/dev/null)" = "$(wanted)" ]
}

# setup EXTRA [OTHER]: .venv has the project with the extra, or with another that holds it; it comes first on PATH.
setup() {
    has_venv || make_venv
    if ! is_installed "$1" && ! is_installed "${2:-$1}"; then
        echo "== installing the project and what it needs into .venv (the first time takes minutes)"
        .venv/bin/python -m pip install --quiet --disable-pip-version-check \
            --constraint scripts/constraints.txt --editable ".[$1]" || fail "the installation failed; run it again"
        wanted >".venv/installed-$1"
    fi
    export PATH="$PWD/.venv/bin:$PATH"
}
