"""Run the benchmarks one after the other; one that lacks a tool says so and is passed over."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import common  # noqa: E402  (the checkout must be on the path first)


def main(names: list[str]) -> int:
    """Run those named (``http``, ``sampling``...), or all; the number that failed."""
    found = [m.name for m in pkgutil.iter_modules([str(ROOT / "bench")])]
    known = [name.removeprefix("bench_") for name in found if name.startswith("bench_")]
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"bench: no benchmark '{unknown[0]}'; choose from: {', '.join(known)}")
        return 2
    failed = 0
    for name in names or known:
        print(f"== {name}", flush=True)
        try:
            importlib.import_module(f"bench.bench_{name}").main()
        except common.Missing as reason:
            print(f"not run: {reason}")
            failed += bool(names)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
