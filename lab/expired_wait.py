"""The case expired-wait: a wait whose timeout has passed already still arms a timer.

On Linux before the patch of the founding document, an io_uring wait with an expired timeout arms an
hrtimer and calls schedule(), only to be told at once that the time is up. Each arm here is a way to
wait, each policy a set of ring flags, each window a timeout. What the spin of the case dirty-list
costs is made of these waits, so the run measures that spin too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine import facts
from engine.errors import MachineError, UsageError, unknown
from engine.waits import FLAGS, Case, WayAbsent, measure, ping, ways
from lab import machine, napi, wait_commands, waits
from lab.experiment import Arm, Outcome, Work, keeping, stored
from lab.parameters import Parameter, Parameters, Value
from lab.progress import Progress, choose, shown
from lab.runs import SCHEMA, RunStore
from lab.verdict import SHORTEST_S

SOURCE = ("the patch \"io_uring/wait: don't sleep on an already expired timeout\", io-uring "
          "mailing list, 2026-11-04")
# The arm of the case dirty-list that spins in any environment, and its two ways to make the wait.
SPIN_ARM = "async+pipelined"
SPINS = {"kernel": "shipped", "poll": "shipped+expired=poll"}
_SPIN_SETUP = "defer"
_BESIDE_S = 0.1

PARAMETERS = Parameters((
    Parameter("timeouts", str, "0,1ns,1us,10us,50us,200us,1ms",
              help="timeouts to wait for, with commas between"),
    Parameter("napi", str, "0,20,1000",
              help="NAPI busy polling in us, with commas between; 0 is none"),
    Parameter("run_ms", float, 20.0, "ms", 1.0, 10_000.0,
              help="how long a row is measured in a round"),
    Parameter("repetitions", int, 3, "", 1, 1000, help="rounds; each measures every row once"),
    Parameter("spin_seconds", float, 0.5, "s", 0.0, 60.0,
              help="window of the dirty-list spin that its waits bound: 0.2 or more; 0: none"),
))


@dataclass(frozen=True)
class WaitCosts:
    """The bench as a case of the run store; there is no state to judge, only what a wait costs."""

    name: str
    title: str
    source: str
    parameters: Parameters

    @property
    def arms(self) -> list[Arm]:
        """The ways to wait, each under every ring flags."""
        return [Arm(way.name, way.what, FLAGS if way.ring else FLAGS[:1], window="wait")
                for way in ways().values()]

    def settings(
        self, values: Mapping[str, Value], arms: Iterable[str] = (),
        policies: Iterable[str] = (), repeat: int = 1,
    ) -> list[Any]:
        """The cases to measure, without those that need NAPI; UsageError as :class:`Case` says."""
        return self.plan(values, arms, policies, repeat).cases()

    def plan(
        self, values: Mapping[str, Value], arms: Iterable[str] = (),
        policies: Iterable[str] = (), repeat: int = 1,
    ) -> waits.Plan:
        """The plan of the bench for these values."""
        for policy in policies:
            if policy not in FLAGS:
                raise unknown("ring flags", policy, FLAGS)
        timeouts = waits.parse_timeouts(str(values["timeouts"]))
        if not timeouts:
            raise UsageError("timeouts is empty: give some, as 0,50us")
        if 0 < float(values["spin_seconds"]) < SHORTEST_S:
            raise UsageError(f"spin_seconds={values['spin_seconds']} is not allowed: give "
                             f"{SHORTEST_S} to 60 s, or 0 for none")
        return waits.Plan(
            ways=tuple(arms), timeouts_ns=timeouts, flags=tuple(policies) or FLAGS,
            napi_us=_napi(str(values["napi"])), rounds=repeat,
            run_s=float(values["run_ms"]) / 1e3,
        )

    def run(
        self, parameters: Mapping[str, object] | None = None, *, arms: Iterable[str] = (),
        policies: Iterable[str] = (), repeat: int | None = None,
        progress: Progress | None = None, store: RunStore | None = None,
    ) -> Outcome:
        """Measure and store, and keep what was measured whatever happens: as Experiment.run."""
        values = self.parameters.resolve(
            {**(parameters or {}), **({} if repeat is None else {"repetitions": repeat})}
        )
        plan = self.plan(values, list(arms), list(policies), int(values["repetitions"]))
        plan.cases()
        telling, keep = progress or choose(), store or RunStore()
        keep.ready()
        with napi.if_needed(plan.napi_us) as (socket, lacking):
            result = waits.run(plan, socket=socket, progress=telling)
        result.absent += lacking
        work, further = Work(plan.rounds, "rounds", result.rounds), Further()

        def finish(reason: str | None) -> Outcome:
            return self._store(values, plan, result, further, keep, reason)

        with keeping(work, finish):
            if result.cut is not None:
                raise result.cut
            _further(plan, values, result, bool(lacking), further, work, telling)
        return finish(None)

    def table(self, outcome: Outcome) -> str:
        """The rows for a terminal."""
        left_out = outcome.data["left_out"]
        more = f"\n\n{wait_commands.left_out_line(left_out)}" if left_out else ""
        return wait_commands.rows_table(outcome.data["rows"]) + more

    def _store(
        self, values: Mapping[str, Value], plan: waits.Plan, result: waits.Result,
        further: Further, store: RunStore, cut: str | None,
    ) -> Outcome:
        conclusions = {"kernel_check": waits.kernel_check(result.rows), **further.conclusions()}
        data: dict[str, Any] = {
            "schema": SCHEMA, "experiment": self.name, "title": self.title, "source": self.source,
            "parameters": dict(values), "machine": machine.describe(facts.of_kernel()),
            "interrupted": cut,
            "arms": arms_of(result), "rows": result.rows, "absent": result.absent,
            "left_out": plan.left_out(),
            "untraced": result.untraced, "warnings": result.warnings, "rounds": result.rounds,
            **conclusions, "conclusions": list(conclusions),
            "not_shown": not_shown(result.rows, further.spins),
        }
        return stored(store, data)


def not_shown(
    rows: Sequence[Mapping[str, Any]], spins: Sequence[Mapping[str, Any]]
) -> list[str]:
    """What was measured and yet does not decide what it was to: one line each."""
    check = waits.kernel_check(rows)
    asked = all(waits.find(rows, name, 0) for name in (waits.RING_WAIT, waits.CURE))
    lines = [check["text"]] if asked and check["has_check"] is None else []
    return lines + [f"the spin of dirty-list under {one['policy']} made {bound_kept(one)}"
                    for one in spins if one["exceeds_bound"]]


def arms_of(result: waits.Result) -> list[dict[str, Any]]:
    """The rows in the form that every run has: an arm a way, a policy a set of flags, a window a
    timeout. Rates are those of a loop of nothing but these waits."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in result.rows:
        arm = found.setdefault((row["way"], row["flags"]), {
            "arm": row["way"], "policy": row["flags"], "windows": {}, "broken": [],
            "repetitions": result.rounds,
        })
        napi_us = f", NAPI {row['napi_us']} us" if row["napi_us"] else ""
        per_s = 1e6 / row["us_mean"]
        arm["windows"][waits.label(row["timeout_ns"]) + napi_us] = {
            "seconds": row["seconds"], "repetitions": result.rounds, "waits_per_s": per_s,
            "cpu_ms_per_s": 1e3 * row["cpu_us"] / row["us_mean"],
            "voluntary_switches_per_s": row["voluntary_switches"] * per_s,
        }
    return list(found.values())


# ---- NAPI ---------------------------------------------------------------------------------------


def _napi(text: str) -> tuple[int, ...]:
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = [-1]
    if any(not 0 <= one <= 1_000_000 for one in found):
        raise UsageError(f"napi={text} is not allowed: give 0 to 1,000,000 us, commas between")
    return tuple(dict.fromkeys([0, *found]))


def ping_pong(napi_us: int, seconds: float = 0.3) -> dict[str, Any] | None:
    """Round trips over a veth pair of its own, with that busy polling; None if not to be had."""
    try:
        with napi.connection() as ends:
            found = ping((ends.client.fileno(), ends.server.fileno()), napi_us, seconds)
    except (napi.NoNapi, WayAbsent):
        return None
    return {"napi_us": napi_us, "us_p50": found.us_p50, "us_p99": found.us_p99,
            "cpu_us": found.cpu_us, "pings": found.pings}


def told_pings(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The round trips as a conclusion; None without any."""
    if not rows:
        return None
    told = ", ".join(f"{row['us_p50']:.1f} us " + (f"with NAPI {row['napi_us']} us"
                                                   if row["napi_us"] else "without NAPI")
                     for row in rows)
    return {"rows": list(rows), "text": f"A round trip of one byte over the veth pair: {told}."}


# ---- the tie to dirty-list ----------------------------------------------------------------------


def spin(choice: str, seconds: float) -> dict[str, Any]:
    """The spin of the case dirty-list under a choice of its worker, against what its waits cost.

    The wait is measured just before and just after the spin, and the cheaper of the two taken,
    for it is to be a bound. All per second of the worker's own CPU time, so that neighbours who
    take the CPU change nothing.
    """
    from lab.dirty_list import EXPERIMENT, stall_of
    from lab.ring_stall import measure_ring

    values, wait, policy = EXPERIMENT.parameters.defaults(), spin_wait(choice), SPINS[choice]
    arm = EXPERIMENT.arm(SPIN_ARM)
    options = {"response_size": int(values["response_size"]),
               "so_sndbuf": int(values["sndbuf"]), "setup": _SPIN_SETUP, "max_connections": 64}
    before = measure(wait, _BESIDE_S, trace=False)
    stalled = measure_ring(stall_of(arm.name, values), arm.name, arm.window, policy, 0, seconds,
                           options)["windows"][arm.window]
    wait_us = min(before.cpu_us, measure(wait, _BESIDE_S, trace=False).cpu_us)
    cpu_s = stalled.cpu_ms_per_s / 1e3
    if not stalled.waits_per_s or not cpu_s:
        raise MachineError(f"the worker did not spin under {policy}, so there is no rate to hold "
                           "against its waits; measure again, or give spin_seconds=0")
    share = stalled.waits_per_s / cpu_s * wait_us / 1e6
    return {
        "expired": choice, "policy": policy, "wait_us": wait_us,
        "bound_per_cpu_s": 1e6 / wait_us, "waits_per_s": stalled.waits_per_s,
        "waits_per_cpu_s": stalled.waits_per_s / cpu_s,
        "us_per_iteration": 1e6 * cpu_s / stalled.waits_per_s, "cpu_fraction": cpu_s,
        "of_bound": share, "exceeds_bound": share > 1 + waits.SPREAD,
    }


def spin_wait(choice: str) -> Case:
    """The wait that the spin is made of."""
    return Case(f"ring_worker_{choice}", 0, _SPIN_SETUP)


def told_spin(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The spins as a conclusion; None without any."""
    if not rows:
        return None
    told = "; ".join(
        f"expired={one['expired']}: {one['wait_us']:.2f} us a wait allow at most "
        f"{one['bound_per_cpu_s']:,.0f} turns per second of CPU, the spin made "
        f"{one['waits_per_cpu_s']:,.0f} ({one['us_per_iteration']:.2f} us each), "
        f"{bound_kept(one)}" for one in rows)
    return {"rows": list(rows), "text": f"The spin of dirty-list is made of these waits. {told}."}


def bound_kept(row: Mapping[str, Any]) -> str:
    """Whether a spin turned no faster than its waits allow, in words."""
    of_bound = f"{row['of_bound']:.0%} of the bound"
    if row["exceeds_bound"]:
        return (f"{of_bound}, so it EXCEEDS it: these waits were dearer beside the spin than in "
                "it (a changing CPU clock, neighbours); measure again on a quiet machine")
    if row["of_bound"] > 1:
        return f"{of_bound}, which it keeps within the {waits.SPREAD:.0%} that rounds may differ by"
    return f"{of_bound}, which it keeps"


# ---- what belongs to the run beside the rows ----------------------------------------------------


@dataclass
class Further:
    """What was measured of it so far."""

    pings: list[dict[str, Any]] = field(default_factory=list)
    spins: list[dict[str, Any]] = field(default_factory=list)

    def conclusions(self) -> dict[str, Any]:
        """As those of a run."""
        return {"ping_pong": told_pings(self.pings), "spin": told_spin(self.spins)}


def _further(
    plan: waits.Plan, values: Mapping[str, Value], result: waits.Result, lacking: bool,
    further: Further, work: Work, progress: Progress,
) -> None:
    """Measures it, one after the other, into ``further``."""
    polled = [us for us in plan.napi_us if us]
    seconds = float(values["spin_seconds"])
    names = {row["way"] for row in result.rows if row["flags"] == _SPIN_SETUP}
    pings = (0, max(polled)) if polled and not lacking else ()
    spins = [choice for choice in SPINS if spin_wait(choice).way in names] if seconds else []
    with shown(progress, len(pings) + len(spins), "beside the waits") as telling:
        for us in pings:
            what = f"round trips with NAPI {us} us" if us else "round trips without NAPI"
            telling.step(what, 0)
            work.at = f"at the {what}"
            found = ping_pong(us)
            further.pings += [] if found is None else [found]
            telling.step(what)
        for choice in spins:
            what = f"spin of dirty-list, expired={choice}"
            telling.step(what, 0)
            work.at = f"at the {what}"
            further.spins.append(spin(choice, seconds))
            telling.step(what)


EXPERIMENT = WaitCosts(
    name="expired-wait",
    title="A wait whose timeout has already passed",
    source=SOURCE,
    parameters=PARAMETERS,
)
