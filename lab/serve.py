"""``ringlab serve``: the ring server on its own, for other people's clients."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click

from engine import RingServer
from engine.binding import words
from engine.parameters import LIVE, START, Range, Words
from engine.policy import PRESETS, method_name, table
from lab import console
from lab.parameters import Parameter, Parameters

_LOOK_S = 1.0
_DECISION = "decision_"
_ENDING = {signal.SIGTERM, signal.SIGINT}
# What the counters at the end are about; the rest is for --json.
_SHOWN = (
    "accepts", "requests", "bad_requests", "bytes_in", "bytes_sent", "bytes_direct", "iterations",
    "waits", "wasted", "enters", "completions", "sends", "sends_short", "write_timeouts", "resets",
)


def options() -> Parameters:
    """The options of the command: the engine's own tables of settings, so that none is missing."""
    return Parameters(
        _parameter(name, entry) for name, entry in [*START.items(), *LIVE.items()]
    )


def _parameter(name: str, entry: Range | Words) -> Parameter:
    if isinstance(entry, Words):
        return Parameter(name, str, entry.default, choices=words(entry.enum))
    unit, _, note = entry.unit.partition(" (")
    if unit.startswith("("):
        unit, note = "", unit[1:]
    kind = float if entry.real else int
    return Parameter(name, kind, kind(entry.default), unit, entry.low, entry.high,
                     help=note.rstrip(")"))


def params() -> list[click.Parameter]:
    """The command's options: one for every setting and every decision."""
    out: list[click.Parameter] = [
        click.Option(["--host"], default="127.0.0.1", show_default=True,
                     help="numeric address; anything but loopback lets others in"),
        click.Option(["--preset", "--policy", "policy"], default="tickless", show_default=True,
                     metavar="NAME", help=f"one of {', '.join(PRESETS)}"),
        click.Option(["--json", "as_json"], is_flag=True, help="print JSON lines"),
    ]
    for each in options():
        note = f"; {each.help}" if each.help else ""
        out.append(click.Option([each.option, each.name], metavar="VALUE",
                                   help=f"{each.allowed}{note} [default: {each.default}]"))
    for decision, choices in table().items():
        names = [f"--{decision}", f"{_DECISION}{method_name(decision)}"]
        out.append(click.Option(names, metavar="CHOICE", help=" | ".join(choices)))
    return out


def run(host: str, policy: str, as_json: bool, **given: str | None) -> None:
    """What the command does with its options, all of them text as it was typed."""
    known, wanted = options(), {}
    for name, value in given.items():
        if value is None:
            continue
        decision = name.removeprefix(_DECISION)
        wanted[decision] = value if decision != name else known[name].check(value)
    serve(host, policy, wanted, as_json)


def serve(host: str, policy: str, given: Mapping[str, Any], as_json: bool) -> None:
    """Serve until SIGTERM or SIGINT; one line when ready, the counters at the end."""
    with _signals_held() as let_through, RingServer(policy, host=host, **given) as server:
        try:
            _announce(server, as_json)
            let_through()
            while True:
                time.sleep(_LOOK_S)
                server.check()
        except KeyboardInterrupt:
            pass
        # A parked worker does not see this; leaving the block ends it all the same.
        server.request_stop()
        server.wait_stopped(given.get("stop_grace_ms", START["stop_grace_ms"].default) / 1e3)
        _report(server.counters(), as_json)


@contextmanager
def _signals_held() -> Iterator[Callable[[], object]]:
    """Both signals are KeyboardInterrupt, once the block calls what it is given.

    Until then they are blocked, and the engine's threads inherit that: neither signal ever lands
    on a worker and wakes a loop that is being looked at. (Threads that libraries made earlier may
    still take one, so the exception can come a little before it is asked for.)
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    handlers = {
        number: signal.signal(number, signal.default_int_handler) for number in _ENDING
    }
    try:
        yield lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _announce(server: RingServer, as_json: bool) -> None:
    shown = f"[{server.host}]" if ":" in server.host else server.host
    address = f"http://{shown}:{server.port}/"
    line = f"ringlab: serving {address} under {server.policy.name} (pid {os.getpid()})"
    if as_json:
        line = json.dumps({
            "address": address, "host": server.host, "port": server.port, "pid": os.getpid(),
            "policy": server.policy.name, "decisions": server.policy.choices,
            "settings": server.settings,
        })
    click.echo(line)


def _report(counters: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"counters": dict(counters)}))
        return
    rows = [(name, f"{counters[name]:,}") for name in _SHOWN if name in counters]
    click.echo(console.table(rows, ("counter", "total"), "lr"))
