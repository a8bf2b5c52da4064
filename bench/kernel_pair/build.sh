#!/usr/bin/env bash
# Two small kernels of one source, without and with the check for an expired wait:
#
#   build.sh SOURCE.tar.xz FOLDER
#
# leaves FOLDER/before.bzImage and FOLDER/after.bzImage, which differ by expired_wait.c only. See
# docs/kernels.md. What is in FOLDER already is used again. JOBS says how many compilers run at once.
set -euo pipefail

readonly HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# The same bytes from the same compiler, whoever builds them, wherever and whenever.
export KBUILD_BUILD_TIMESTAMP=2026-01-01 KBUILD_BUILD_VERSION=1
export KBUILD_BUILD_USER=ringlab KBUILD_BUILD_HOST=ringlab LOCALVERSION=

say() { printf 'kernel pair: %s\n' "$*" >&2; }

fail() {
    say "$@"
    exit 2
}

require_tools() {
    local tool
    for tool in gcc make flex bison bc awk xz; do
        command -v "$tool" >/dev/null || fail "'$tool' is not installed (see docs/kernels.md)"
    done
}

unpack() { # TARBALL TREE
    [ -e "$2/.unpacked" ] && return
    mkdir -p "$2"
    tar -xf "$1" -C "$2" --strip-components=1
    touch "$2/.unpacked"
}

configure() { # TREE BUILD
    [ "$2/.configured" -nt "$HERE/guest.config" ] && return
    mkdir -p "$2"
    make -s -C "$1" O="$2" tinyconfig
    "$1/scripts/kconfig/merge_config.sh" -m -O "$2" "$2/.config" "$HERE/guest.config" >/dev/null
    make -s -C "$1" O="$2" olddefconfig
    touch "$2/.configured"
}

# An option whose dependencies are not met is dropped without a word.
require_options() { # BUILD
    local option
    while read -r option; do
        grep -qx "$option" "$1/.config" || fail "this source does not take $option"
    done < <(grep '=y$' "$HERE/guest.config")
}

# The check goes before the call that would arm the timer and sleep, where all else was looked at.
with_the_check() { # FILE
    awk -v check="$HERE/expired_wait.c" '
        !done && /return __io_cqring_wait_schedule\(/ {
            while ((getline line < check) > 0) print line
            done = 1
        }
        { print }
        END { exit !done }' "$1"
}

build() { # TREE BUILD IMAGE
    make -s -C "$1" O="$2" -j"${JOBS:-$(nproc)}" bzImage >&2
    cp "$2/arch/x86/boot/bzImage" "$3"
    say "$3"
}

main() {
    [ $# = 2 ] && [ -f "$1" ] || fail "usage: build.sh SOURCE.tar.xz FOLDER"
    require_tools
    mkdir -p "$2"
    local folder
    folder=$(cd "$2" && pwd)
    local tree=$folder/source build=$folder/build
    unpack "$1" "$tree"
    configure "$tree" "$build"
    require_options "$build"
    local file=$tree/io_uring/io_uring.c
    [ -e "$folder/unchanged.c" ] || cp "$file" "$folder/unchanged.c"
    cp "$folder/unchanged.c" "$file"
    build "$tree" "$build" "$folder/before.bzImage"
    with_the_check "$folder/unchanged.c" >"$file" ||
        fail "expired_wait.c has no place in this source (it was made for Linux 6.12)"
    build "$tree" "$build" "$folder/after.bzImage"
}

main "$@"
