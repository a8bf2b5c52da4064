#!/bin/bash
# Builds and runs the native tests under the address, undefined-behaviour and thread sanitizers, and
# fuzzes the HTTP parser and the scripted relay for a bounded time each. What the fuzzer finds fails
# this script and is left in tests/native/corpus/, where it stays as a test.
#
#   RINGLAB_FUZZ_SECONDS  how long to fuzz each (20)
#   RINGLAB_ROUNDS        connections that each client of the native tests makes (30)
#   CLANG                 the clang to use; "no": do as if there were none
#
# Exits 69 where the compiler has no sanitizers: nothing was found then, and nothing was looked for.
set -euo pipefail
cd "$(dirname "$0")"

fuzz_seconds=${RINGLAB_FUZZ_SECONDS:-20}
corpora=../../tests/native/corpus
clang=${CLANG:-clang}
flags="-std=gnu11 -O1 -g -fno-omit-frame-pointer -Wall -Wextra -Wshadow -Wvla -Werror"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say() { echo "sanitize: $*"; }

# Whether a compiler can build and run with a sanitizer: clang comes without its runtime on Debian.
can() {
    printf '#include <stddef.h>\n%s\n%s\n' \
        'int LLVMFuzzerTestOneInput(const unsigned char *d, size_t n) { return (int)n * !d; }' \
        "$([ "$2" = fuzzer ] || echo 'int main(void) { return 0; }')" > "$work/can.c"
    "$1" "-fsanitize=$2" "$work/can.c" -o "$work/can" > /dev/null 2>&1
}

if [ "$clang" != no ] && ! can "$clang" fuzzer && [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null
then
    say "installing clang with its sanitizers"
    { apt-get install -y -q clang "libclang-rt-$(apt-cache depends clang |
        sed -n 's/.*Depends: clang-\([0-9]*\)$/\1/p')-dev" ||
        { apt-get update -q && apt-get install -y -q clang; }; } > "$work/apt.log" 2>&1 ||
        say "apt-get could not install it: $(tail -1 "$work/apt.log")"
fi
if [ "$clang" != no ] && can "$clang" fuzzer; then
    cc=$clang
else
    clang=no
    cc=${CC:-gcc}
    say "no clang with a fuzzer: sanitizers of $cc, and the corpus instead of fuzzing"
    # gcc warns that its thread sanitizer does not follow fences; what ours order is atomic anyway.
    # When it optimises, it reads neighbouring flags as one word, which looks like a race on those
    # that another thread owns.
    "$cc" --version | grep -q clang || flags+=" -Wno-tsan -O0"
    for sanitizer in address,undefined thread; do
        can "$cc" "$sanitizer" && continue
        say "$cc has no $sanitizer sanitizer. Install apt: gcc | dnf: libasan libubsan libtsan"
        exit 69
    done
fi

uring=$(pkg-config --cflags --libs liburing 2> /dev/null || echo -luring)
sources=$(ls ./*.c | grep -Ev '/(main|fuzz|test)_')

# native TEST NAME SANITIZERS: exit 77 of the tests means that io_uring is not allowed here.
native() {
    say "$1, $2"
    # shellcheck disable=SC2086
    "$cc" $flags "-fsanitize=$3" -fno-sanitize-recover=all $sources "$1.c" \
        -o "$work/$1-$2" $uring -lpthread
    local status=0
    # Thread sanitizers of old compilers cannot place their memory under full address randomness.
    setarch -R "$work/$1-$2" || status=$?
    [ "$status" = 0 ] || [ "$status" = 77 ] || { say "$1, $2: failed ($status)"; exit 1; }
}

# fuzz NAME MOST_BYTES SOURCES: fuzz_NAME.c from and into the corpus of that name.
fuzz() {
    local name=$1 most=$2 corpus=$corpora/$1
    shift 2
    if [ "$clang" = no ]; then
        # shellcheck disable=SC2086
        "$cc" $flags -DRINGLAB_REPLAY -fsanitize=address,undefined -fno-sanitize-recover=all \
            "$@" "fuzz_$name.c" -o "$work/replay-$name"
        "$work/replay-$name" "$corpus"/*
        return
    fi
    say "fuzzing $name for $fuzz_seconds s"
    # shellcheck disable=SC2086
    "$cc" $flags -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
        "$@" "fuzz_$name.c" -o "$work/fuzz-$name"
    mkdir "$work/found-$name"
    "$work/fuzz-$name" -max_total_time="$fuzz_seconds" -max_len="$most" \
        -artifact_prefix="$corpus/" -print_final_stats=1 "$work/found-$name" "$corpus" \
        > "$work/fuzz-$name.log" 2>&1 ||
        { tail -40 "$work/fuzz-$name.log"; say "the fuzzer found a fault"; exit 1; }
    say "$(sed -n 's/^stat::number_of_executed_units: */inputs: /p' "$work/fuzz-$name.log")"
}

export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1:abort_on_error=0}
export TSAN_OPTIONS=${TSAN_OPTIONS:-halt_on_error=1:second_deadlock_stack=1}
for test in test_native test_relay; do
    native "$test" address-undefined address,undefined
    native "$test" thread thread
done

# The relay on its scripted backend, which is all of it but the system calls.
relay=$(ls ./relay_*.c | grep -Ev '/relay_(epoll|server)')
fuzz http 512 http.c
# shellcheck disable=SC2086
fuzz relay 400 $relay
say "all hold"
