"""The ring server beside Debian's nginx: rate and server CPU per request, as ratios.

One worker each, both on the same CPU, wrk on the other; rounds interleaved, so that a machine that
changes its speed meanwhile changes both. wrk is often the limit: the figure to read is CPU per
request. All counters, policies and the 100 Hz sampler are on.
"""

from __future__ import annotations

import re
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.common import LOAD_CPU, SERVER_CPU, cpu_seconds, need, ringlab, running, spread

CONNECTIONS = 64
SMALL = 24
LARGE = 64 * 1024
DEPTH = 16

NGINX = """\
worker_processes 1; daemon off; master_process off; pid {folder}/pid; error_log {folder}/log;
events {{ worker_connections 2048; }}
http {{
  access_log off; keepalive_requests 1000000000; sendfile on; tcp_nodelay on; etag off;
  open_file_cache max=100; default_type application/octet-stream; root {folder}/www;
  client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
  uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
  server {{
    listen 127.0.0.1:{port} backlog=1024;
    location / {{ }}
    location /small {{ return 200 "{small}"; }}
  }}
}}
"""
PIPELINE = """\
init = function(args)
  local all = {}
  for i = 1, tonumber(args[1]) do all[i] = wrk.format("GET", args[2]) end
  burst = table.concat(all)
end
request = function() return burst end
"""


@dataclass(frozen=True)
class Case:
    """One load: its name, the two servers' paths, the pipelining depth, the aim for CPU."""

    name: str
    ours: str
    nginx: str
    depth: int
    aim: float


CASES = (
    Case("small, keep-alive", "/", "/small", 1, 1.3),
    Case(f"small, {DEPTH} deep", "/", "/small", DEPTH, 5.0),
    Case("64 KiB", f"/sync?size={LARGE}", "/large", 1, 1.2),
)


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def answers(port: int) -> bool:
    """Whether something accepts connections there."""
    try:
        socket.create_connection(("127.0.0.1", port), 0.2).close()
    except OSError:
        return False
    return True


def load(port: int, path: str, depth: int, seconds: int, script: Path) -> int:
    """Requests that wrk got answered."""
    command = ["taskset", "-c", str(LOAD_CPU), "wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s"]
    command += ["-s", str(script)] if depth > 1 else []
    command += [f"http://127.0.0.1:{port}{path}"]
    command += ["--", str(depth), path] if depth > 1 else []
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"(\d+) requests in", output)
    if not found or "Non-2xx" in output or "Socket errors" in output:
        raise RuntimeError(f"wrk: {output}")
    return int(found[1])


def measure(pid: int, run: Callable[[], int], seconds: int) -> tuple[float, float]:
    """Requests per second, and CPU microseconds of the server per request."""
    before = cpu_seconds(pid)
    requests = run()
    return requests / seconds, (cpu_seconds(pid) - before) / requests * 1e6


def rounds(case: Case, ours: tuple[int, int], nginx: tuple[int, int], n: int, seconds: int,
           script: Path) -> None:
    """Measure one case and print its row."""
    rate, cpu, own_cpu, own_rate = [], [], [], []
    for _ in range(n):
        theirs = measure(
            nginx[0], lambda: load(nginx[1], case.nginx, case.depth, seconds, script), seconds
        )
        mine = measure(
            ours[0], lambda: load(ours[1], case.ours, case.depth, seconds, script), seconds
        )
        rate.append(mine[0] / theirs[0])
        cpu.append(theirs[1] / mine[1])
        own_cpu.append(mine[1])
        own_rate.append(mine[0])
    print(
        f"{case.name:20} {spread(cpu):24} {case.aim:>5} {spread(rate):24} "
        f"{statistics.median(own_rate):>9,.0f} {statistics.median(own_cpu):>8.2f}",
        flush=True,
    )


def main(n: int = 5, seconds: int = 2) -> None:
    """Print the table."""
    need("nginx", "wrk", "taskset")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "www").mkdir()
        (folder / "www" / "large").write_bytes(b"x" * LARGE)
        script = folder / "pipeline.lua"
        script.write_text(PIPELINE)
        ports = free_port(), free_port()
        conf = folder / "nginx.conf"
        conf.write_text(NGINX.format(folder=folder, port=ports[0], small="x" * SMALL))
        nginx = stack.enter_context(
            running(["nginx", "-p", folder, "-e", folder / "log", "-c", conf], SERVER_CPU,
                    lambda: answers(ports[0]))
        )
        serve = [ringlab(), "serve", "--port", str(ports[1])]
        ours = stack.enter_context(
            running([*serve, "--response-size", str(SMALL)], SERVER_CPU, lambda: answers(ports[1]))
        )
        print(f"{CONNECTIONS} connections, {n} interleaved rounds of {seconds} s; ratios are "
              "ringlab to nginx, median [min to max]")
        print(f"{'load':20} {'times less CPU/request':24} {'aim':>5} {'times the rate':24} "
              f"{'our req/s':>9} {'our us':>8}")
        for case in CASES:
            rounds(case, (ours, ports[1]), (nginx, ports[0]), n, seconds, script)


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
