"""The case splice on real sockets: states, counts and delivered bytes, never CPU seconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.errors import UsageError
from engine.relay_policy import PRESETS
from lab import haproxy, splice, splice_findings, splice_sizes, splice_tables
from lab.experiment import Outcome, load
from lab.origin import Object, Origin
from lab.origin_process import OriginProcess
from lab.plots import df_noops, df_series, plot_noops, plot_series
from lab.relay_stall import measure_relay
from lab.runs import Run, RunStore, read_run

SHORT = {"seconds": 0.25, "sizes": "", "paced_seconds": 0.5}
STALLS = ("a", "a2", "b", "d", "e")
LEVEL = splice.LEVEL


def measured(
    tmp_path: Path, arms: tuple[str, ...], *policies: Any, **given: object
) -> Outcome:
    return load("splice").run(
        {**SHORT, **given}, arms=arms, policies=policies, store=RunStore(tmp_path)
    )


def check_healthy(row: Mapping[str, Any]) -> None:
    """Quiet and complete, no dispatch for nothing, and the session closed by its timeout."""
    assert row["state"] == "quiet", row["reason"]
    assert row["noop_per_s"] < 1
    assert row["delivered"]["bytes"] == row["delivered"]["expected"], row["delivered"]["fault"]
    assert row["delivered"]["in_order"], row["delivered"]["fault"]
    assert row["honours_stop"] is True
    assert row["honours_write_timeout"] is True


@pytest.fixture(scope="module")
def ways_in(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Each way into the spin under every ingredient of the fix, measured once."""
    return measured(tmp_path_factory.mktemp("ways"), ("a", "b", "d"), "before", "after",
                    *splice_findings.INGREDIENTS)


@pytest.fixture(scope="module")
def silent_and_upload(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """An origin silent on the second request, and the way from the client to the origin."""
    return measured(tmp_path_factory.mktemp("others"), ("a2", "e"), "before", "after")


@pytest.mark.parametrize("arm", STALLS)
def test_the_fix_reaches_the_state_and_sleeps_where_the_relay_spun(
    ways_in: Outcome, silent_and_upload: Outcome, arm: str
) -> None:
    outcome = silent_and_upload if arm in ("a2", "e") else ways_in
    before, after = outcome.row(arm, "before"), outcome.row(arm, "after")
    assert before["state"] == "spins", before["reason"]
    assert before["in_state"]
    assert before["noop_per_s"] > 10_000
    assert before["waits_zero_per_s"] > 0.9 * before["windows"]["stall"]["waits_per_s"]
    assert before["events_per_s"] < 100, "the speculative engine spins on its own belief"
    reading = "client" if arm == "e" else "origin"
    assert before[f"eagain_{reading}_per_s"] < 100, "no EAGAIN counts it on the side that is read"
    assert splice_findings.complete(before)
    check_healthy(after)
    assert after["in_state"]
    assert after["within_budget"] is True
    assert outcome.broken == []


def test_in_a_the_head_of_response_2_stands_behind_the_pipe(ways_in: Outcome) -> None:
    row = ways_in.row("a", "after")
    assert row["reached"]
    assert row["session"]["requests"] == 2
    assert row["channel"]["piped"] > 0
    assert row["channel"]["scheduled"] + row["channel"]["awaiting"] > 0
    assert row["last_why"] in ("event", "deadline")


@pytest.mark.parametrize("arm", ["a", "a2", "d"])
@pytest.mark.parametrize("policy", ["before", "skip-send", "after", "later"])
def test_the_state_is_reached_however_the_bytes_come(arm: str, policy: str) -> None:
    """In dribs, as from a busy origin, they fill the pipe in the middle of the body."""
    values = {each.name: each.default for each in splice.PARAMETERS}
    with Origin(sndbuf=8192) as origin:
        stall = splice.stall_of(arm, values, origin.target)
        seen = measure_relay(
            stall, arm, "stall", policy, 0, 0.2, origin.target, {"so_sndbuf": values["sndbuf"]})
    found = seen["evidence"]
    assert found["in_state"], found["channel"]
    if policy in ("before", "skip-send"):
        assert found["counts"]["noop_dispatches"] > 2000
    else:
        assert found["asleep"]
    assert splice_findings.complete({"delivered": seen["delivered"]})


def test_one_ingredient_is_the_cure(ways_in: Outcome) -> None:
    found = ways_in.data["cure"]
    assert found["cures"] == ["recv-allowed"]
    assert found["ingredients"]["last-block"] == ["a", "d"], "it closes that way in, and no other"
    assert set(found["ingredients"]["skip-send"]) == {"a", "b", "d"}
    skipping, before = ways_in.row("b", "skip-send"), ways_in.row("b", "before")
    assert skipping["eagain_client_per_s"] < 100 < before["eagain_client_per_s"]


def test_the_controls_are_quiet(tmp_path: Path) -> None:
    for row in measured(tmp_path, ("m",), "before", "sink-full", "after").arms:
        check_healthy(row)
        assert not row["in_state"]
    for row in measured(tmp_path, ("a", "e"), "no-splice").arms:
        check_healthy(row)


def test_the_engines_differ_where_the_origin_is_silent(tmp_path: Path) -> None:
    outcome = measured(tmp_path, ("a", "a2"), "before", f"before{LEVEL}")
    assert [outcome.row("a2", policy)["state"] for policy in ("before", f"before{LEVEL}")] == [
        "spins", "quiet"]
    level = outcome.row("a", f"before{LEVEL}")
    assert level["state"] == "spins"
    assert level["counts"]["events"] >= 0.9 * level["counts"]["waits"], "one event a turn"
    assert level["counts"]["waits_zero"] == 0


@pytest.mark.parametrize("arm", [arm.name for arm in splice.ARMS])
def test_every_arm_is_run_under_each_preset_and_both_engines(arm: str) -> None:
    asked = [preset + engine for preset in PRESETS for engine in ("", LEVEL)]
    settings = load("splice").settings(splice.PARAMETERS.defaults(), [arm], asked)
    assert [setting.policy for setting in settings] == asked
    listed = load("splice").settings(splice.PARAMETERS.defaults(), [arm])
    assert {setting.policy for setting in settings if LEVEL not in setting.policy} <= {
        setting.policy for setting in listed}, "each preset is measured unless told otherwise"


@pytest.mark.parametrize("policy", splice.HEALTHY)
def test_what_spins_under_no_engine_keeps_its_budget_under_both(
    tmp_path: Path, policy: str
) -> None:
    outcome = measured(tmp_path, ("a2", "b", "e", "m"), policy + LEVEL)
    assert len(outcome.arms) == 4
    for row in outcome.arms:
        check_healthy(row)
        assert row["within_budget"] is True
    assert outcome.broken == []


def test_the_level_triggered_engine_sleeps_where_nothing_has_arrived(tmp_path: Path) -> None:
    policies = [f"{policy}{LEVEL}" for policy in ("before", "last-block")]
    outcome = measured(tmp_path, ("d", "e", "m"), "before", *policies)
    for policy in policies:
        states = {row["arm"]: row["state"] for row in outcome.arms if row["policy"] == policy}
        assert states == {"d": "spins", "e": "quiet", "m": "quiet"}
    assert outcome.data["engines"]["arms"] == ["d", "e"], "m spins under neither"


def test_a_paced_client_tells_what_every_ingredient_costs(tmp_path: Path) -> None:
    outcome = measured(
        tmp_path, ("paced",), "last-block", "skip-send", f"before{LEVEL}", f"after{LEVEL}",
        "mirror", f"mirror{LEVEL}")
    states = {row["policy"]: row["state"] for row in outcome.arms}
    assert [policy for policy, state in states.items() if state == "spins"] == [
        "last-block", "skip-send", f"before{LEVEL}"]
    for row in outcome.arms:
        lossy = row["policy"].startswith("mirror")
        assert splice_findings.complete(row) is not lossy
        assert ("cpu_ms_per_mb" in row) is not lossy, "it is not known how much it moved"
    assert [cell["policy"] for cell in outcome.data["paced"]["rows"]] == list(states)
    assert outcome.data["mirror"]["caught"] == ["paced"]
    assert f"paced under mirror{LEVEL}: " in outcome.data["mirror"]["text"]
    assert outcome.data["mirror"]["others"] == []
    assert outcome.broken == []


def test_the_engine_is_a_parameter_too(tmp_path: Path) -> None:
    outcome = measured(tmp_path, ("a2",), "before", engine="level-triggered")
    row = outcome.row("a2", "before")
    assert row["decisions"]["engine"] == "level-triggered"
    assert row["state"] == "quiet"
    assert outcome.data["pattern"]["compared"] == 0, "no real build has that engine"


def test_the_mirror_fault_is_caught_by_the_bytes(tmp_path: Path) -> None:
    outcome = measured(tmp_path, ("m", "b"), "mirror", "after")
    row = outcome.row("m", "mirror")
    assert row["state"] != "spins"
    assert not splice_findings.complete(row)
    assert outcome.data["mirror"]["caught"] == ["m", "b"]
    assert outcome.data["mirror"]["others"] == []
    # In b it forgets its source before anything is in the pipe: that is the fault itself, no arm
    # that failed.
    assert outcome.row("b", "mirror")["troubles"]
    assert outcome.not_shown == []


def test_a_paced_client_costs_turns_for_nothing_before_the_fix(tmp_path: Path) -> None:
    outcome = measured(tmp_path, ("paced",), "before", "after", "recv-allowed", "no-splice")
    before, after = outcome.row("paced", "before"), outcome.row("paced", "after")
    assert (before["state"], after["state"]) == ("spins", "quiet")
    assert before["waits_per_mb"] > 10 * after["waits_per_mb"]
    assert after["spliced_share"] > 0.9
    # What the other half of the fix is for.
    assert outcome.row("paced", "recv-allowed")["recv_per_mb"] > 2 * after["recv_per_mb"]
    assert outcome.row("paced", "no-splice")["splice_per_mb"] == 0
    assert all(splice_findings.complete(row) for row in outcome.arms)
    assert [cell["policy"] for cell in outcome.data["paced"]["rows"]] == [
        "before", "after", "recv-allowed", "no-splice"]


@pytest.mark.skipif(haproxy.version() is None, reason="HAProxy is not installed")
def test_haproxy_takes_the_relays_place(tmp_path: Path) -> None:
    outcome = measured(tmp_path, ("a", "paced"), "haproxy", "after")
    for arm in ("a", "paced"):
        row = outcome.row(arm, "haproxy")
        assert row["state"] == "quiet", row["reason"]
        assert splice_findings.complete(row)
    assert outcome.data["paced"]["haproxy"] == haproxy.version()
    assert all(cell["over_haproxy"] > 0 for cell in outcome.data["paced"]["rows"])


def test_sizes_between_the_sockets_and_a_full_pipe_spin(tmp_path: Path) -> None:
    found = measured(tmp_path, ("m",), "after", sizes="10k,100k,2M", trials=1).data["sizes"]
    assert [row["spinning"] for row in found["rows"]] == [0, 1, 0]
    assert found["rows"][0]["piped"] == 0
    assert found["rows"][2]["stopped"], "the EAGAIN of the full pipe stops the reading"
    assert "100,000" in found["text"]


def test_a_run_is_stored_with_its_samples_and_conclusions(tmp_path: Path) -> None:
    outcome = measured(tmp_path, ("a",), "before", "after")
    assert outcome.path is not None
    run = read_run(outcome.path)
    assert set(run.data["conclusions"]) >= {"pattern", "cure", "sign", "reached", "sizes"}
    assert run.data["pattern"]["agree"] == run.data["pattern"]["compared"] == 2
    samples = run.df_samples()
    assert set(samples["window"]) >= {"idle", "stall", "drain"}
    stalled = samples[(samples["policy"] == "before") & (samples["window"] == "stall")]
    assert stalled["noop_dispatches"].max() - stalled["noop_dispatches"].min() > 1000
    check_pictures(run)


def check_pictures(run: Run) -> None:
    """Tables and picture of a run that measured a part only."""
    pattern = str(splice_tables.pattern_table(run))
    assert "10 of 10" in pattern
    assert "HAProxy builds around commit 61d39a0e2" in pattern
    for table in (splice_tables.sign_table, splice_tables.sizes_table, splice_tables.paced_table):
        assert "<caption>" in table(run).to_html()
    frame = df_noops(run)
    assert list(frame["policy"]) == ["before", "after"]
    assert frame["noop_per_s"][0] > 10_000 > 1 > frame["noop_per_s"][1]
    assert "the handler runs for nothing" in plot_noops(run).title
    over_time = df_series(run, "a", "before").query("window == 'stall'")
    assert over_time["noop_dispatches_per_s"].max() > 10_000
    assert over_time["why_active_per_s"].max() > 10_000
    assert df_series(run, "a", "after")["noop_dispatches_per_s"].max() == 0
    assert plot_series(run, "a").title == "a: spins under before, quiet under after"
    assert "spin or sleep here as they did there" in splice_tables.note(run, "pattern").text
    assert "has not measured" in splice_tables.note(run, "mirror").text


def test_the_real_builds_table_stands_beside_the_pattern() -> None:
    known = splice_findings.known()
    assert known["a", "before"] == (10, 10)
    assert known["a", "sink-full"] == (2, 5)
    assert known["b", "last-block"] == (0, 4)
    assert known["m", "before"] == (0, 5)
    assert splice_findings.paced_elsewhere()["before"]["waits_per_mb"] == 36_990


@pytest.mark.parametrize("wrong", ["x", "-1", "1G", "0"])
def test_sizes_that_are_none_are_refused(wrong: str) -> None:
    with pytest.raises(UsageError):
        splice_sizes.parse_sizes(wrong)


def test_policies_of_another_engine_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown policy 'tickless'"):
        load("splice").settings(splice.PARAMETERS.defaults(), (), ["tickless"])


def test_an_origin_elsewhere_ends_with_its_pipe() -> None:
    with OriginProcess() as origin:
        assert origin.pid
        host, _, port = origin.target.rpartition(":")
        assert host == "127.0.0.1"
        assert int(port) > 0
    assert not Path("/proc", str(origin.pid)).exists()


def test_an_object_is_asked_for_by_its_target() -> None:
    wanted = Object(5000, seq=2, chunk=100, silent=1)
    assert Object.of(wanted.target) == wanted
