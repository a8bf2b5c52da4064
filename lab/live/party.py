"""The panel's own clients: so many connections that ask for the same and then do not read."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine import RingServer
from engine.errors import RinglabError
from lab.choreography import (
    FIRST,
    SEND_WAITS,
    Ask,
    Choreography,
    Connect,
    Player,
    Poke,
    Settle,
    Step,
    requests_seen,
)
from lab.clients import ClientError
from lab.dirty_list import SMALL, stall_of
from lab.parameters import Value

PATIENCE_S = 1.0
_SETTLE_S = 1.5
# One choreography of many clients settles once for all of them.
_LONE = (Settle, Poke)


def steps_of(arm: str | None, values: Mapping[str, Value]) -> Choreography:
    """What a client does: the arm's own choreography, or one like it for what is no arm."""
    if arm is not None:
        return stall_of(arm, values).steps
    depth = int(values["depth"])
    steps: Choreography = (
        Connect(rcvbuf=int(values["rcvbuf"])),
        Ask(str(values["route"]), int(values["response_size"])),
        Settle(SEND_WAITS),
    )
    if depth > 1:
        steps += (Ask(str(values["route"]), SMALL, count=depth - 1), Settle(requests_seen(depth)))
    return steps


class Party:
    """The connections of one panel to its server. Not for two threads at once."""

    def __init__(self, server: RingServer) -> None:
        self._server = server
        self._players: list[Player] = []
        self.poked = False
        """Whether somebody was poked since the stall began."""

    @property
    def size(self) -> int:
        """Connections that were opened and not put away."""
        return len(self._players)

    def stall(self, steps: Choreography, count: int) -> list[str]:
        """Everybody connects anew, asks, and reads nothing; returns what did not come about."""
        self.close()
        self._players = [self._player() for _ in range(count)]
        self.poked = any(isinstance(step, Poke) for step in steps)
        for step in steps:
            if isinstance(step, Settle):
                step = replace(step, most=min(step.most, _SETTLE_S))
            doing: Sequence[Player] = self._players[-1:] if isinstance(step, _LONE) \
                else self._players
            for player in doing:
                self._play(player, step)
        return list(dict.fromkeys(line for player in self._players for line in player.troubles))

    def read(self, size: int) -> str:
        """Everybody reads up to ``size`` bytes."""
        got = sum(each.client().read(size) for each in self._open())
        return f"read {got:,} bytes{self._fault()}"

    def read_all(self) -> str:
        """Everybody reads all that was asked for; says whether it was whole and in order."""
        begun = time.monotonic()
        each_whole = [each.client().read_all() for each in self._open()]
        got = sum(each.client().stream.received for each in self._players)
        took = (time.monotonic() - begun) * 1e3
        order = "every byte in order" if all(each_whole) else "not whole"
        return f"read all: {got:,} bytes of body since connecting, {order}{self._fault()}; " \
               f"{took:,.0f} ms"

    def poke(self) -> str:
        """One small request on a connection of its own."""
        player = self._player()
        self.poked = True
        return f"poke answered after {player.poke(Poke(patience=PATIENCE_S * 3)):,.1f} ms"

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
        """Puts everybody away; harmless when repeated."""
        players, self._players = self._players, []
        self.poked = False
        for each in players:
            try:
                each.close()
            except (OSError, RuntimeError):
                pass  # it is in use by a thread that will find its socket closed

    def _player(self) -> Player:
        return Player(self._server.host, self._server.port, watch=self._watch,
                      patience=PATIENCE_S, strict=False)

    def _watch(self) -> Mapping[str, Any]:
        return self._server.counters()

    def _open(self) -> list[Player]:
        if not self._players:
            raise ClientError("no client is connected: press stall first")
        return self._players

    def _fault(self) -> str:
        faults = [line for each in self._players if (line := each.client(FIRST).stream.fault)]
        return f"; wrong: {faults[0]}" if faults else ""

    @staticmethod
    def _play(player: Player, step: Step) -> None:
        player.play((step,))


def brief(error: BaseException) -> str:
    """An error as the one line that the panel shows, with the line of a user's own policy."""
    line = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, RinglabError):
        line = f"{type(error).__name__}: {line}"
    where = _own_line(error.__cause__)
    return f"{line}{where}"


def _own_line(cause: BaseException | None) -> str:
    if cause is None or cause.__traceback__ is None:
        return ""
    step = cause.__traceback__
    while step.tb_next is not None:
        step = step.tb_next
    return f" (line {step.tb_lineno} of {step.tb_frame.f_code.co_name}())"
