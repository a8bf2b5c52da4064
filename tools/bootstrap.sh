#!/bin/bash
# What `make` needs before Python can help: an interpreter, a compiler, headers, a browser.
#
#   bootstrap.sh python            print a usable Python 3.11 to 3.13 (RINGLAB_PYTHON goes first)
#   bootstrap.sh toolchain PYTHON  see that PYTHON can build the engine
#   bootstrap.sh packages PYTHON   install requirements.lock, with a line of progress
#   bootstrap.sh browser           see that a Chromium is there for tests/browser; never fails
#   bootstrap.sh qemu              see that QEMU is there for the tests of other kernels; never fails
#
# As root on a Debian-like system whatever is missing gets installed. Elsewhere, or when that
# fails, one message names the packages for apt, dnf and conda.
set -euo pipefail

readonly APT_LOG=${TMPDIR:-/tmp}/ringlab-apt.$$.log
trap 'rm -f "$APT_LOG"' EXIT
apt_updated=no

say() { printf 'ringlab: %s\n' "$*" >&2; }

can_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

apt_quiet() {
    DEBIAN_FRONTEND=noninteractive apt-get -y -q -o DPkg::Lock::Timeout=300 "$@" \
        >"$APT_LOG" 2>&1 </dev/null
}

# Installs packages, with the list of packages brought up to date once.
apt_install() {
    can_install || return 1
    say "installing $* ..."
    if [ "$apt_updated" = no ]; then
        apt_quiet update || say "the list of packages could not be brought up to date; trying"
        apt_updated=yes
    fi
    apt_quiet install --no-install-recommends "$@" && return 0
    tail -n 15 "$APT_LOG" >&2
    return 1
}

# A command that runs is not enough: version managers leave names that only print an error.
usable() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

makes_venvs() { "$1" -c 'import venv, ensurepip' 2>/dev/null; }

find_python() {
    local name spare=
    for name in python3 python3.13 python3.12 python3.11 /usr/bin/python3; do
        usable "$name" || continue
        if makes_venvs "$name"; then
            echo "$name"
            return 0
        fi
        spare=${spare:-$name}
    done
    echo "$spare"
    [ -n "$spare" ]
}

want_python() {
    local found
    if [ -n "${RINGLAB_PYTHON:-}" ]; then
        usable "$RINGLAB_PYTHON" && makes_venvs "$RINGLAB_PYTHON" && {
            echo "$RINGLAB_PYTHON"
            return 0
        }
        say "RINGLAB_PYTHON=$RINGLAB_PYTHON is not a Python 3.11 to 3.13 that can make virtual" \
            "environments (module venv with ensurepip)"
        return 1
    fi
    if ! { found=$(find_python) && makes_venvs "$found"; }; then
        apt_install python3 python3-venv || true
    fi
    if found=$(find_python) && makes_venvs "$found"; then
        echo "$found"
        return 0
    fi
    say "no Python 3.11, 3.12 or 3.13 that can make virtual environments. Install" \
        "apt: python3 python3-venv | dnf: python3 | conda: python=3.11; or name one with" \
        "RINGLAB_PYTHON=/path/to/python3 make setup"
    return 1
}

want_toolchain() {
    local python=$1 lacking packages=() word
    lacking=$("$python" engine/build_native.py --missing)
    for word in $lacking; do
        case $word in
            compiler) packages+=(gcc libc6-dev) ;;
            liburing) packages+=(liburing-dev) ;;
            python-headers) packages+=(python3-dev) ;;
        esac
    done
    [ ${#packages[@]} -gt 0 ] || return 0
    apt_install "${packages[@]}" || true
    lacking=$("$python" engine/build_native.py --missing)
    [ -z "$lacking" ] && return 0
    say "the engine cannot be built: missing" $lacking \
        "(liburing 2.3 or newer${CC:+; CC=$CC}). Install" "apt: gcc libc6-dev liburing-dev python3-dev |" \
        "dnf: gcc glibc-devel liburing-devel python3-devel | conda: c-compiler liburing python"
    return 1
}

# pip's own output is two lines a package; one that counts is enough, errors come through whole.
want_packages() {
    local python=$1 total
    total=$(grep -c '^[a-z0-9].*==' requirements.lock)
    say "installing up to $total Python packages into .venv (a minute or two) ..."
    "$python" -m pip install --progress-bar off --disable-pip-version-check --no-input \
        --require-hashes -r requirements.lock \
        2> >(grep --line-buffered -v '^WARNING: Location .* is ignored' >&2) |
        awk -v total="$total" '
            /^(Collecting|Processing) / && ++n % 20 == 0 { print "  " n " of " total; fflush() }
            /^Installing collected/ { print "  all found, unpacking"; fflush() }
            /^Successfully/ { print "  done" }'
}

want_browser() {
    local name
    for name in chromium chromium-browser google-chrome; do
        command -v "$name" >/dev/null && return 0
    done
    apt_install chromium && return 0
    say "no Chromium, so the tests in tests/browser will be skipped. Install apt: chromium |" \
        "dnf: chromium"
}

want_qemu() {
    [ "$(uname -m)" = x86_64 ] || return 0
    command -v qemu-system-x86_64 >/dev/null && return 0
    apt_install qemu-system-x86 && return 0
    say "no QEMU, so the tests of other kernels will be skipped. Install apt: qemu-system-x86 |" \
        "dnf: qemu-system-x86-core"
}

case ${1:-} in
    python) want_python ;;
    toolchain) want_toolchain "$2" ;;
    packages) want_packages "$2" ;;
    browser) want_browser ;;
    qemu) want_qemu ;;
    *)
        say "usage: bootstrap.sh python | toolchain PYTHON | packages PYTHON | browser | qemu"
        exit 2
        ;;
esac
