"""Every benchmark runs to its end; what it measures in so short a time is not looked at."""

from __future__ import annotations

import re

import pytest

from bench import (
    bench_http,
    bench_painted,
    bench_panel,
    bench_relay,
    bench_sampling,
    bench_waits,
    common,
)
from engine import RingServer, SpliceRelay
from engine.errors import MachineError
from lab.origin_process import OriginProcess

RATIO = re.compile(r"\d \[-?[\d.]+ to [\d.]+\]")


@pytest.mark.parametrize(("main", "given", "ratios"), [
    (bench_http.main, (1, 1), 6), (bench_relay.main, (1, 1), 4), (bench_sampling.main, (1, 1), 1),
    (bench_waits.main, (1, 2), 0),
    pytest.param(bench_painted.main, (2,), 2, marks=pytest.mark.browser),
], ids=["http", "relay", "sampling", "waits", "painted"])
def test_it_runs_and_prints_what_it_measured(
    main: object, given: tuple[int, ...], ratios: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(main)
    try:
        main(*given)
    except common.Missing as reason:
        pytest.skip(str(reason))
    said = capsys.readouterr().out
    assert len(RATIO.findall(said)) >= ratios, said
    assert said.strip()


@pytest.mark.parametrize("engine", ["ring", "relay"])
def test_the_panel_is_measured_over_either_engine(
    engine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_panel, "SECONDS", 0.3)
    try:
        if engine == "ring":
            with RingServer("shipped", max_connections=64) as server:
                bench_panel.stalled(server, "async+pipelined", "a worker", 1)
        else:
            with OriginProcess() as origin, SpliceRelay(origin.target, "before") as relay:
                bench_panel.stalled(relay, "a", "a relay", 1)
    except MachineError as reason:
        pytest.skip(str(reason))
    said = capsys.readouterr().out
    assert len(RATIO.findall(said)) == 4, said
