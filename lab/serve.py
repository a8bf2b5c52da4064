"""``ringlab serve``, ``relay`` and ``origin``: what the lab has, for other people's clients.

The options of an engine are made of its own tables of settings and decisions, so none is missing.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click

from engine import RingServer, SpliceRelay
from engine.base import Engine
from engine.binding import words
from engine.decisions import Decisions, method_name
from engine.parameters import RELAY as RELAY_TABLES
from engine.parameters import RING as RING_TABLES
from engine.parameters import Range, Tables, Words
from engine.policy import RING
from engine.relay_policy import RELAY
from lab import console
from lab.origin import Origin
from lab.parameters import Parameter, Parameters

_LOOK_S = 1.0
_DECISION = "decision_"
_ENDING = {signal.SIGTERM, signal.SIGINT}


@dataclass(frozen=True)
class Stand:
    """One engine as a command: how it is made, and which counters its end is about.

    ``make`` takes the policy and, as keywords, host and whatever was given. ``needs`` are the
    options that it has besides, with their help, and cannot do without.
    """

    verb: str
    make: Callable[..., Engine]
    tables: Tables
    decisions: Decisions
    preset: str
    shown: tuple[str, ...]
    needs: Mapping[str, str]
    alone: Mapping[str, Any]
    """Defaults that are others than in a notebook: here the clients are somebody else's."""

    def options(self) -> Parameters:
        """The engine's settings as parameters."""
        return Parameters(
            _parameter(name, entry, self.alone.get(name, entry.default))
            for name, entry in [*self.tables.start.items(), *self.tables.live.items()]
        )

    def params(self) -> list[click.Parameter]:
        """The command's options: one for every setting and every decision."""
        out: list[click.Parameter] = [
            click.Option([f"--{name}"], required=True, metavar="HOST:PORT", help=text)
            for name, text in self.needs.items()
        ]
        out += [
            _host(),
            click.Option(["--preset", "--policy", "policy"], default=self.preset,
                         show_default=True, metavar="NAME",
                         help=f"one of {', '.join(self.decisions.presets)}"),
            _json(),
        ]
        out += [_option(each) for each in self.options()]
        for decision, choices in self.decisions.table().items():
            names = [f"--{decision}", f"{_DECISION}{method_name(decision)}"]
            out.append(click.Option(names, metavar="CHOICE", help=" | ".join(choices)))
        return out

    def run(self, host: str, policy: str, as_json: bool, **given: str | None) -> None:
        """What the command does with its options, all of them text as it was typed.

        Serves until SIGTERM or SIGINT; one line when ready, the counters at the end.
        """
        known, wanted = self.options(), dict(self.alone)
        for name, value in given.items():
            if value is None:
                continue
            decision = name.removeprefix(_DECISION)
            plain = decision != name or name in self.needs
            wanted[decision] = value if plain else known[name].check(value)
        self._serve(host, policy, wanted, as_json)

    def _serve(self, host: str, policy: str, given: Mapping[str, Any], as_json: bool) -> None:
        grace_ms = given.get("stop_grace_ms", _default(self.tables.start["stop_grace_ms"]))
        with _signals_held() as let_through, self.make(policy=policy, host=host, **given) as server:
            try:
                self._announce(server, given, as_json)
                let_through()
                while True:
                    time.sleep(_LOOK_S)
                    server.check()
            except KeyboardInterrupt:
                pass
            # A parked worker does not see this; leaving the block ends it all the same.
            server.request_stop()
            server.wait_stopped(grace_ms / 1e3)
            self._report(server.counters(), as_json)

    def _announce(self, server: Engine, given: Mapping[str, Any], as_json: bool) -> None:
        address = _address(server.host, server.port)
        needed = "".join(f" for {given[name]}" for name in self.needs)
        line = (f"ringlab: {self.verb} {address}{needed} under {server.policy.name} "
                f"(pid {os.getpid()})")
        if as_json:
            line = json.dumps({
                "address": address, "host": server.host, "port": server.port, "pid": os.getpid(),
                **{name: given[name] for name in self.needs},
                "policy": server.policy.name, "decisions": server.policy.choices,
                "settings": server.settings,
            })
        click.echo(line)

    def _report(self, counters: Mapping[str, Any], as_json: bool) -> None:
        if as_json:
            click.echo(json.dumps({"counters": dict(counters)}))
            return
        rows = [(name, f"{counters[name]:,}") for name in self.shown if name in counters]
        click.echo(console.table(rows, ("counter", "total"), "lr"))


SERVER = Stand(
    verb="serving", make=RingServer, tables=RING_TABLES, decisions=RING, preset="tickless",
    shown=("accepts", "requests", "bad_requests", "bytes_in", "bytes_sent", "bytes_direct",
           "iterations", "waits", "wasted", "enters", "completions", "sends", "sends_short",
           "write_timeouts", "resets"),
    needs={},
    # A handler's time is its worker's (sync), or one of a few threads' (async).
    alone={"max_handler_ms": 1_000},
)
RELAY_STAND = Stand(
    verb="relaying", make=SpliceRelay, tables=RELAY_TABLES, decisions=RELAY, preset="after",
    shown=("accepts", "requests", "responses", "answers", "bytes_spliced_client",
           "bytes_spliced_origin", "bytes_copied_client", "bytes_copied_origin", "iterations",
           "waits", "waits_zero", "wasted", "dispatches", "noop_dispatches", "sink_full",
           "pipe_failures", "connect_failures", "closes_client_timeout", "closes_server_timeout"),
    needs={"origin": "the server behind it; a numeric host"},
    # Else a client that asks a silent origin and hangs up keeps its session for ever.
    alone={"client_timeout_ms": 60_000, "server_timeout_ms": 60_000},
)


class OriginStand:
    """The bundled origin as a command; what it does is in the request."""

    _OPTIONS = Parameters((
        Parameter("port", int, 0, "", 0, 65_535, help="0: any free one"),
        Parameter("rcvbuf", int, 0, "bytes", 0, 1 << 30, help="SO_RCVBUF; 0: the kernel's choice"),
        Parameter("sndbuf", int, 0, "bytes", 0, 1 << 30, help="SO_SNDBUF; 0: the kernel's choice"),
    ))

    def params(self) -> list[click.Parameter]:
        """The command's options."""
        return [_host(), _json(), *(_option(each) for each in self._OPTIONS)]

    def run(self, host: str, as_json: bool, **given: str | None) -> None:
        """Serves until SIGTERM or SIGINT; one line when ready, what was asked at the end."""
        wanted: dict[str, Any] = {
            name: self._OPTIONS[name].check(value) for name, value in given.items()
            if value is not None
        }
        with _signals_held() as let_through, Origin(host, **wanted) as origin:
            address = _address(*origin.address)
            line = f"ringlab: origin on {address} (pid {os.getpid()})"
            told = {"address": address, "target": origin.target, "pid": os.getpid()}
            click.echo(json.dumps(told) if as_json else line)
            try:
                let_through()
                while True:
                    time.sleep(_LOOK_S)
            except KeyboardInterrupt:
                pass
            asked = {"requests": origin.requests}
            click.echo(json.dumps({"counters": asked}) if as_json
                       else console.table([("requests", f"{asked['requests']:,}")],
                                          ("counter", "total"), "lr"))


STANDS: dict[str, Stand | OriginStand] = {
    "serve": SERVER, "relay": RELAY_STAND, "origin": OriginStand(),
}


def _parameter(name: str, entry: Range | Words, default: Any) -> Parameter:
    if isinstance(entry, Words):
        return Parameter(name, str, default, choices=words(entry.enum))
    unit, _, note = entry.unit.partition(" (")
    if unit.startswith("("):
        unit, note = "", unit[1:]
    kind = float if entry.real else int
    return Parameter(name, kind, kind(default), unit, entry.low, entry.high,
                     help=note.rstrip(")"))


def _option(each: Parameter) -> click.Option:
    note = f"; {each.help}" if each.help else ""
    return click.Option([each.option, each.name], metavar="VALUE",
                        help=f"{each.allowed}{note} [default: {each.default}]")


def _host() -> click.Option:
    return click.Option(["--host"], default="127.0.0.1", show_default=True,
                        help="numeric address; anything but loopback lets others in")


def _json() -> click.Option:
    return click.Option(["--json", "as_json"], is_flag=True, help="print JSON lines")


def _default(entry: Range | Words) -> Any:
    return entry.default


def _address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


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
