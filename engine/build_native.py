"""Builds ``engine._native`` from ``engine/native/``: cffi in API mode, against liburing.

The declarations that Python sees are those of the contract headers and stand nowhere else; these
headers keep to the subset of C that cffi parses. Every ``.c`` file beside it is compiled in,
except stand-alone programs (``main_*.c``, ``fuzz_*.c``, ``test_*.c``).

``python engine/build_native.py --missing`` names what this machine lacks for the build, one word a
line (``compiler``, ``liburing``, ``python-headers``); it needs nothing but the standard library.

``CC`` and ``CFLAGS`` are honoured. ``RINGLAB_WERROR=0`` turns warnings back into warnings, for a
compiler newer than any that we have seen.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import cffi

MODULE = "engine._native"
ROOT = Path(__file__).resolve().parent.parent
NATIVE = "engine/native"
# In this order: a later one may use what an earlier one declares.
CONTRACTS = ("ringlab.h", "relay.h", "waits.h")
STANDALONE = ("main_", "fuzz_", "test_")
# A call that liburing has had since 2.3; its absence tells an older header.
LIBURING_2_3 = "io_uring_prep_send_zc"

# How C asks a policy written in Python: cffi's own kind of declaration, of the types rl_decide and
# rl_relay_decide, and the only ones that the contract does not hold. engine/own_policy.py defines
# them.
PYTHON_CALLS = """
extern "Python" int64_t rl_python_decide(void *, int, const rl_conn_view *, const rl_loop_view *);
extern "Python" int64_t rl_python_relay_decide(void *, int, const rl_relay_view *,
                                               const rl_relay_loop_view *);
"""

WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Wvla",
    "-Wpointer-arith",
    "-Werror=implicit-function-declaration",
]
# The wrapper that cffi generates is not ours to clean.
GENERATED_CODE_EXCEPTIONS = [
    "-Wunused-parameter",
    "-Wunused-function",
    "-Wunused-variable",
    "-Wshadow",
    "-Wsign-compare",
    "-Wmissing-field-initializers",
    "-Wcast-function-type",
    "-Wpointer-arith",
]

PACKAGES_HINT = (
    "apt: gcc libc6-dev liburing-dev python3-dev | "
    "dnf: gcc glibc-devel liburing-devel python3-devel | "
    "conda: c-compiler liburing python"
)
EXPLAIN = {
    "compiler": "a C compiler that can build a program",
    "liburing": "the headers of liburing 2.3 or newer",
    "python-headers": "the C headers of this Python (Python.h)",
}


def compiler() -> list[str]:
    """The C compiler as an argument list; empty when there is none.

    The one that Python was built with may not be on this machine, so ``gcc`` and ``cc`` follow it.
    """
    asked = os.environ.get("CC")
    for command in [asked] if asked else [sysconfig.get_config_var("CC"), "gcc", "cc"]:
        try:
            words = shlex.split(command or "")
        except ValueError:  # a quote that is not closed: no compiler, as a name that is none
            continue
        if words and shutil.which(words[0]):
            return words
    return []


def asked_for() -> str:
    """Which compiler the environment asks for, to be said where it is no use; empty if none."""
    return f" (CC={os.environ['CC']})" if os.environ.get("CC") else ""


def prefix_dirs(name: str) -> list[str]:
    """``[sys.prefix/name]`` if liburing lives in this environment (conda), else an empty list."""
    in_prefix = Path(sys.prefix, "include", "liburing.h").exists()
    return [str(Path(sys.prefix, name))] if in_prefix else []


def pkg_config(*asked: str) -> list[str]:
    """Words that ``pkg-config ASKED liburing`` prints; empty without pkg-config or its file."""
    tool = shutil.which(os.environ.get("PKG_CONFIG", "pkg-config"))
    if tool is None:
        return []
    done = subprocess.run([tool, *asked, "liburing"], capture_output=True, text=True, check=False)
    return shlex.split(done.stdout) if done.returncode == 0 else []


def preprocess(cc: list[str], header: str, include_dirs: list[str]) -> str | None:
    """The text of ``header`` after the preprocessor, or None when the compiler cannot find it."""
    flags = shlex.split(os.environ.get("CPPFLAGS", "") + " " + os.environ.get("CFLAGS", ""))
    dirs = [f"-I{directory}" for directory in include_dirs]
    command = [*cc, *flags, *dirs, "-E", "-include", header, "-x", "c", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    return done.stdout if done.returncode == 0 else None


def missing() -> list[str]:
    """What the build lacks on this machine, as keys of ``EXPLAIN``; empty when all is there."""
    cc = compiler()
    if not cc or preprocess(cc, "stdio.h", []) is None:
        return list(EXPLAIN)
    lacking = []
    uring_dirs = [word[2:] for word in pkg_config("--cflags") if word.startswith("-I")]
    uring = preprocess(cc, "liburing.h", uring_dirs + prefix_dirs("include"))
    if uring is None or LIBURING_2_3 not in uring:
        lacking.append("liburing")
    if preprocess(cc, "Python.h", [sysconfig.get_path("include")]) is None:
        lacking.append("python-headers")
    return lacking


def require_toolchain() -> None:
    """Stops with one line that names the packages, when something is missing."""
    lacking = missing()
    if lacking:
        what = " and ".join(EXPLAIN[key] for key in lacking) + asked_for()
        sys.exit(f"ringlab: the engine cannot be built without {what}. Install {PACKAGES_HINT}")
    if "CC" not in os.environ:
        os.environ["CC"] = shlex.join(compiler())


def declarations() -> str:
    """The text of the contract for cffi: the headers less their preprocessor guard lines."""
    lines: list[str] = []
    for name in CONTRACTS:
        path = ROOT / NATIVE / name
        if not path.exists():
            sys.exit(f"ringlab: the engine cannot be built: {NATIVE}/{name} is not there")
        lines += path.read_text(encoding="utf-8").splitlines(keepends=True)
    # An empty line in its place keeps the line numbers of cffi's messages right.
    return "".join("\n" if line.startswith("#pragma once") else line for line in lines)


def sources() -> list[str]:
    """The C files of the engine, relative to the project, sorted."""
    files = sorted((ROOT / NATIVE).glob("*.c"))
    return [f"{NATIVE}/{file.name}" for file in files if not file.name.startswith(STANDALONE)]


def preamble() -> str:
    """What the generated wrapper starts with: its exceptions from our warnings, and the headers."""
    lines = [f'#pragma GCC diagnostic ignored "{flag}"' for flag in GENERATED_CODE_EXCEPTIONS]
    includes = [f'#include "{name}"' for name in CONTRACTS]
    return "\n".join([*lines, "#include <stdint.h>", *includes, ""])


def compile_flags() -> list[str]:
    """Flags for every C file. Python's own headers count as the system's, so they cannot warn."""
    flags = ["-std=gnu11", "-O2", "-g", *WARNINGS]
    if os.environ.get("RINGLAB_WERROR", "1") != "0":
        flags.append("-Werror")
    flags += ["-isystem", sysconfig.get_path("include")]
    return flags + [word for word in pkg_config("--cflags") if not word.startswith("-I")]


def make_ffi() -> cffi.FFI:
    """The cffi builder that ``setup.py`` names: made when cffi calls for it, not by an import."""
    import cffi

    require_toolchain()
    ffi = cffi.FFI()
    ffi.cdef(declarations())
    ffi.cdef(PYTHON_CALLS)
    libraries = [word[2:] for word in pkg_config("--libs") if word.startswith("-l")]
    uring_includes = [word[2:] for word in pkg_config("--cflags") if word.startswith("-I")]
    uring_libs = [word[2:] for word in pkg_config("--libs") if word.startswith("-L")]
    ffi.set_source(
        MODULE,
        preamble(),
        sources=sources(),
        # Any change of these, or of this file, rebuilds the module.
        depends=[
            "engine/build_native.py",
            *(f"{NATIVE}/{file.name}" for file in sorted((ROOT / NATIVE).glob("*.[ch]"))),
        ],
        include_dirs=[NATIVE, *uring_includes, *prefix_dirs("include")],
        library_dirs=[*uring_libs, *prefix_dirs("lib")],
        runtime_library_dirs=[*uring_libs, *prefix_dirs("lib")],
        libraries=[*(libraries or ["uring"]), "pthread"],
        extra_compile_args=compile_flags(),
    )
    return ffi


if __name__ == "__main__":
    if sys.argv[1:] != ["--missing"]:
        sys.exit("usage: python engine/build_native.py --missing")
    for lack in missing():
        print(lack)
