"""The panel's own clients: so many connections that do the same, and what the buttons make them do.
"""

from __future__ import annotations

import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine
from engine.base import Engine
from engine.errors import RinglabError
from lab.choreography import (
    FIRST,
    Choreography,
    Pace,
    Player,
    Poke,
    Settle,
    Stall,
    Step,
)
from lab.clients import ClientError
from lab.live.case import Scene

PATIENCE_S = 1.0
_SETTLE_S = 1.5
_GOING_S = 0.5
_LOOK_S = 0.005
# One choreography of many clients settles, and waits, once for all of them.
_LONE = (Settle, Poke, Stall)
# A paced client looks whether it is to go on so many times a second.
_LOOKS_PER_S = 8


class Party:
    """The connections of one panel to its server. Not for two threads at once.

    ``connected`` is the server's gauge of connections. ``trouble`` is told in words, on another
    thread, when what is played beside the buttons breaks off.
    """

    def __init__(
        self, server: Engine, connected: str, trouble: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._server, self._trouble, self._gauge = server, trouble, connected
        self._players: list[Player] = []
        self._beside: list[threading.Thread] = []
        self._enough = threading.Event()
        self._scene = Scene(())
        self.poked = False
        """Whether somebody was poked since the stall began."""

    @property
    def size(self) -> int:
        """Connections that were opened and not put away."""
        return len(self._players)

    @property
    def reads(self) -> bool:
        """Whether the clients are reading at a pace."""
        return any(each.is_alive() for each in self._beside)

    def play(self, scene: Scene, count: int) -> list[str]:
        """Everybody connects anew and does its steps; returns what did not come about."""
        self.close()
        self._scene = scene
        self._players = [self._player(count) for _ in range(count)]
        self.poked = any(isinstance(step, Poke) for step in scene.steps)
        for step in scene.steps:
            if isinstance(step, Settle):
                step = replace(step, most=min(step.most, _SETTLE_S))
            doing: Sequence[Player] = self._players[-1:] if isinstance(step, _LONE) \
                else self._players
            for player in doing:
                self._step(player, step)
        if scene.meanwhile:
            self._begin_beside(scene.meanwhile)
        return list(dict.fromkeys(line for player in self._players for line in player.troubles))

    def read(self, size: int) -> str:
        """Everybody reads up to ``size`` bytes."""
        got = sum(each.client().read(size) for each in self._open())
        return f"read {got:,} bytes{self._fault()}"

    def read_all(self) -> str:
        """Everybody reads all that was asked for; says whether it was whole and in order."""
        begun = time.monotonic()
        players = self._open()
        for each in players:
            each.troubles.clear()
            each.play(self._scene.drain)
        streams = [each.client().stream for each in players]
        got = sum(stream.received for stream in streams)
        took = (time.monotonic() - begun) * 1e3
        if not all(stream.in_order for stream in streams):
            order = "not in order"
        elif all(stream.complete for stream in streams):
            order = "every byte in order"
        else:
            order = f"incomplete: {sum(stream.expected for stream in streams):,} were asked for"
        return f"read all: {got:,} bytes of body since connecting, {order}{self._fault()}; " \
               f"{took:,.0f} ms"

    def poke(self) -> str:
        """One small request on a connection of its own."""
        player = self._player()
        self.poked = True
        return f"poke answered after {player.poke(Poke(patience=PATIENCE_S * 3)):,.1f} ms"

    def release(self, steps: Choreography) -> str:
        """Whoever is asked lets go what it holds back of everybody's requests."""
        for each in self._players:
            each.play(steps)
        return "the origin goes on with every request that it held back"

    def half_close(self) -> str:
        """Everybody sends FIN."""
        for each in self._open():
            each.client().half_close()
        return "half-closed: FIN sent, still open for reading"

    def reset(self) -> str:
        """Everybody closes with RST."""
        for each in self._open():
            each.client().reset()
        count = len(self._players)
        self._players = []
        return f"reset {count} connection{'s' if count != 1 else ''}"

    def delivered(self) -> list[dict[str, Any]]:
        """What each connection got."""
        return [each.delivered() for each in self._players]

    def close(self) -> None:
        """Puts everybody away, and gives the server time to see it; harmless when repeated.

        A busy machine may not let it for a while, and who asks anew before it has would take the
        states of those who are gone for his own.
        """
        self._end_beside()
        players, self._players = self._players, []
        self.poked = False
        others = max(0, self._connected() - len(players))
        for each in players:
            try:
                each.close()
            except (OSError, RuntimeError):
                pass  # it is in use by a thread that will find its socket closed
            try:
                each.play(self._scene.after)
            except (RinglabError, OSError):
                pass  # whoever it is meant for has gone already
        until = time.monotonic() + _GOING_S
        while players and self._connected() > others and time.monotonic() < until:
            time.sleep(_LOOK_S)

    # -- what goes on beside the buttons ---------------------------------------------------------

    def _begin_beside(self, steps: Choreography) -> None:
        self._enough = threading.Event()
        self._beside = [
            threading.Thread(target=self._again, args=(each, steps, self._enough),
                             name="ringlab-paced", daemon=True)
            for each in self._players
        ]
        for thread in self._beside:
            thread.start()

    def _end_beside(self) -> None:
        self._enough.set()
        for thread in self._beside:
            thread.join(2 * PATIENCE_S)
        self._beside = []

    def _again(self, player: Player, steps: Choreography, enough: threading.Event) -> None:
        """Plays the steps over and over, with a look after each small part of a paced read."""
        try:
            while not enough.is_set():
                for step in steps:
                    if not isinstance(step, Pace):
                        player.play((step,))
                    elif not _paced(player, step, enough):
                        raise ClientError(str(player.delivered()["fault"]))
        except (RinglabError, OSError, ValueError) as error:
            if not enough.is_set():
                self._trouble(f"the paced client stopped: {brief(error)}")

    def _player(self, clients: int = 1) -> Player:
        return Player(self._server.host, self._server.port, watch=self._watch,
                      patience=PATIENCE_S, strict=False, clients=clients)

    def _connected(self) -> int:
        try:
            return int(self._watch()[self._gauge])
        except RinglabError:
            return 0  # it has ended: nobody is

    def _watch(self) -> Mapping[str, Any]:
        return self._server.counters()

    def _open(self) -> list[Player]:
        self._end_beside()
        if not self._players:
            raise ClientError("no client is connected: press stall first")
        return self._players

    def _fault(self) -> str:
        faults = [line for each in self._players if (line := each.client(FIRST).stream.fault)]
        return f"; wrong: {faults[0]}" if faults else ""

    @staticmethod
    def _step(player: Player, step: Step) -> None:
        player.play((step,))


def _paced(player: Player, step: Pace, enough: threading.Event) -> bool:
    """Reads a step's bytes in parts; False when it was enough, or nothing came any more."""
    client, left = player.client(step.client), step.size
    part = max(1, int(step.bytes_per_s / _LOOKS_PER_S))
    while left > 0:
        wanted = min(part, left)
        if enough.is_set() or client.read(wanted, step.bytes_per_s) < wanted:
            return False
        left -= wanted
    return client.stream.in_order


def brief(error: BaseException) -> str:
    """An error as the one line that the panel shows, with the line of a user's own policy."""
    line = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, RinglabError):
        line = f"{type(error).__name__}: {line}"
    where = _own_line(error.__cause__)
    return f"{line}{where}"


def _own_line(cause: BaseException | None) -> str:
    """The line of the user's own code that ``cause`` came through last; empty: it was none of his.

    What he called there may have raised it: his line is the one that he can change.
    """
    steps = traceback.walk_tb(cause.__traceback__ if cause is not None else None)
    own = [(line, frame.f_code) for frame, line in steps if _is_users(frame.f_code.co_filename)]
    return f" (line {own[-1][0]} of {own[-1][1].co_name}())" if own else ""


def _is_users(file: str) -> bool:
    return not (file.startswith("<frozen")
                or any(Path(file).is_relative_to(place) for place in _NOT_HIS))


# The lab, the engine, Python's own modules, installed packages.
_NOT_HIS = (
    Path(__file__).resolve().parents[1], Path(engine.__file__).resolve().parent,
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
