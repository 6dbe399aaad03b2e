# Sourced by scripts/test and scripts/demo: changes to the root of the project and prepares what they need.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONHOME PYTHONPATH # they belong to another environment and would override .venv
unset PYTHONDONTWRITEBYTECODE # otherwise each of the hundreds of programs that tests start compiles all of its imports

fail() {
    echo "$0: $*" >&2
    exit 1
}

# need_programs NAME=PACKAGE...: installs the programs that are missing, if possible (as root, by Debian's apt-get).
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
    # In Debian, the module venv is in a package of its own.
    "$python" -m venv --clear .venv >/dev/null ||
        { install_packages python3-venv && "$python" -m venv --clear .venv; } ||
        fail "$python cannot make an environment; on Debian or Ubuntu, install the package python3-venv"
    pwd >.venv/made-in
}

# An environment contains its own path, so it does not work after its project was copied or moved.
has_venv() {
    [ "$(cat .venv/made-in 2>/dev/null)" = "$(pwd)" ] && .venv/bin/python -m pip --version >/dev/null 2>&1
}

# Everything that decides which packages are installed.
wanted() {
    .venv/bin/python --version
    cat pyproject.toml scripts/constraints.txt
}

is_installed() {
    [ "$(cat ".venv/installed-$1" 2>/dev/null)" = "$(wanted)" ]
}

# setup EXTRA [OTHER]: installs the project with EXTRA into .venv, unless it is there with EXTRA or with OTHER, which
# includes EXTRA; and puts .venv first on PATH.
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
