"""The command line: a thin face over lab. Every command imports what it needs when it is run.

Exit codes: 0 done (the verdicts as expected, or no check asked), 1 a check failed (a budget broken,
or a state not reached or undecided), 2 a usage or environment error, told in one line on stderr,
130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from engine.errors import MachineError, RinglabError, UsageError
from lab import console, wait_commands

if TYPE_CHECKING:
    from lab.experiment import Case, Outcome
    from lab.runs import RunInfo

DONE, BROKEN, ERROR, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
_LONG = 300

_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_assigned = click.option("-p", "--parameter", "assigned", multiple=True, metavar="NAME=VALUE",
                         help="A parameter of the experiment; sizes as 64KiB or 3MiB.")
_arms = click.option("--arm", "arms", multiple=True, metavar="ARM", help="Only this arm.")
_policies = click.option("--policy", "policies", multiple=True, metavar="POLICY",
                         help="Only under this policy.")
_out = click.option("--out", type=click.Path(path_type=Path), metavar="DIR",
                    help="The folder for what is made.")


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point: runs a command and returns its exit code, whatever happens in it."""
    with _terminable() as terminated:
        code = _run(argv)
    return TERMINATED if terminated and code == INTERRUPTED else code


@contextmanager
def _terminable() -> Iterator[list[int]]:
    """SIGTERM ends a command as Ctrl-C does: nothing left behind, nothing measured lost."""
    seen: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(argv: Sequence[str] | None) -> int:
    try:
        code = cli.main(args=argv, prog_name="ringlab", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        console.complain(error.format_message())
        return ERROR
    except RinglabError as error:
        console.complain(_with_notes(error))
        return ERROR
    except (KeyboardInterrupt, click.Abort) as error:
        # click makes an Abort of every KeyboardInterrupt; ours says what was kept.
        console.complain(str(error.__cause__ or error) or "interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has enough (`| head`); the interpreter's last flush must not
        # complain of it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except OSError as error:
        if error.filename is not None:  # one that nobody on the way knew better words for
            console.complain(f"cannot use {str(error.filename)[:_LONG]}: {error.strerror}")
            return ERROR
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
            raise
        console.complain(f"cannot write the output: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ERROR
    return code if isinstance(code, int) else DONE


def _with_notes(error: BaseException) -> str:
    """What went wrong, and what was noted of it on its way: where the finished part is, say."""
    return "; ".join([str(error), *getattr(error, "__notes__", ())])


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="ringlab", message="ringlab %(version)s")
def cli() -> None:
    """Reproduce, see, measure and keep out event loops that spin while nothing can move."""


@cli.command()
@_json
def doctor(as_json: bool) -> int:
    """What this machine can do, and what to change."""
    from lab import doctor as examination

    rows = examination.examine()
    if as_json:
        click.echo(console.to_json(examination.summary(rows)))
    else:
        click.echo(console.table([(row.state, row.what, row.found) for row in rows],
                                 ("state", "what", "found")))
        for row in rows:
            if row.remedy:
                click.echo(f"{row.state}: {row.what}: {row.remedy}")
    bad = [row.what for row in rows if row.state == examination.FAIL]
    if bad:
        raise MachineError(f"the lab cannot run here because of: {', '.join(bad)}")
    return DONE


@cli.command(context_settings={"ignore_unknown_options": True})
@click.argument("jupyter_args", nargs=-1, type=click.UNPROCESSED)
def lab(jupyter_args: tuple[str, ...]) -> None:
    """JupyterLab on the notebooks, on loopback; further arguments go to it."""
    if importlib.util.find_spec("jupyterlab") is None:
        raise MachineError("JupyterLab is not installed; install it with: make setup")
    if not NOTEBOOKS.is_dir():
        raise MachineError(f"there is no {NOTEBOOKS}: run from a checkout of ringlab")
    # No question about news and no look for updates: nothing here needs a network.
    command = [sys.executable, "-m", "jupyterlab", "--ip=127.0.0.1",
               f"--ServerApp.root_dir={NOTEBOOKS}",
               "--LabApp.default_url=/lab/tree/start_here.ipynb",
               f"--LabApp.app_settings_dir={Path(__file__).parent / 'jupyter'}",
               "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    if os.geteuid() == 0:
        command.append("--allow-root")  # it refuses to start for root otherwise
    sys.stdout.flush()
    os.execv(sys.executable, [*command, *jupyter_args])


@cli.command(name="list")
@click.argument("experiment", required=False)
@_json
def list_(experiment: str | None, as_json: bool) -> None:
    """The experiments; of EXPERIMENT its arms, policies and parameters."""
    from lab.experiment import case, names

    cases = [case(name) for name in ([experiment] if experiment else names())]
    if as_json:
        click.echo(console.to_json([console.described(each) for each in cases]))
    elif experiment:
        click.echo(console.description(cases[0]))
    else:
        for each in cases:
            click.echo(f"{each.name:16} {each.title}")


@cli.command()
@click.argument("experiment")
@_assigned
@_arms
@_policies
@click.option("--repeat", type=click.IntRange(1), metavar="N",
              help="Rounds; each does all arms once.")
@click.option("--check", is_flag=True,
              help="Exit 1 if a policy with a budget breaks it, or does not deliver, stop or time "
                   "out as it should; and if an arm did not come to its state, or its state stayed "
                   "undecided.")
@click.option("--no-progress", is_flag=True, help="Show no progress on stderr.")
@_out
@_json
def run(
    experiment: str, assigned: tuple[str, ...], arms: tuple[str, ...], policies: tuple[str, ...],
    repeat: int | None, check: bool, no_progress: bool, out: Path | None, as_json: bool,
) -> int:
    """Run EXPERIMENT once, headless; prints the arms' table and where the run is.

    --out is where runs are kept (default: data/runs of the checkout, or RINGLAB_RUNS).
    """
    from lab.experiment import Interrupted, NotStored, case
    from lab.progress import Progress, for_command
    from lab.runs import RunStore

    found = case(experiment)
    progress = Progress() if no_progress else for_command()
    try:
        outcome = found.run(
            found.parameters.parse(assigned), arms=arms, policies=policies, repeat=repeat,
            progress=progress, store=RunStore(out),
        )
    except (Interrupted, NotStored) as error:
        if error.outcome is not None:
            _print_outcome(found, error.outcome, as_json)
        raise
    _print_outcome(found, outcome, as_json)
    if not check:
        return DONE
    for line in outcome.broken:
        console.complain(f"budget broken: {line}")
    for line in outcome.not_shown:
        console.complain(f"not shown: {line}")
    return BROKEN if outcome.broken or outcome.not_shown else DONE


@cli.command()
@click.argument("experiment", required=False)
@click.option("--all", "everything", is_flag=True, help="Every case, and a page in front of them.")
@_assigned
@_arms
@_policies
@_out
@_json
def report(
    experiment: str | None, everything: bool, assigned: tuple[str, ...], arms: tuple[str, ...],
    policies: tuple[str, ...], out: Path | None, as_json: bool,
) -> int:
    """The notebook of EXPERIMENT, executed, and its HTML; the page of all reports is renewed."""
    from lab.experiment import case
    from lab.progress import for_command
    from lab.report import default_out, make_report
    from lab.report_index import write_index

    if everything == bool(experiment):
        raise UsageError("give one experiment, or --all")
    if everything:
        if assigned or arms or policies:
            raise UsageError("--all takes no parameters, arms or policies: cases have their own")
        return _report_all(out, as_json)
    assert experiment is not None
    given = case(experiment).parameters.parse(assigned)
    made = make_report(experiment, given, out, arms=arms, policies=policies,
                       progress=for_command())
    index = write_index(out or default_out())
    paths = {"notebook": made.notebook, "html": made.html, "run": made.run, "index": index}
    if as_json:
        click.echo(console.to_json({name: str(path) if path else None
                                    for name, path in paths.items()}))
        return DONE
    for name, path in paths.items():
        if path:
            click.echo(f"{name:8} {path}")
    return DONE


def _report_all(out: Path | None, as_json: bool) -> int:
    """Every report; one that fails does not keep the others from being made."""
    from lab import experiment as experiments
    from lab.progress import for_command
    from lab.report import NOTEBOOKS, make_report, ready
    from lab.report_index import write_index

    folder = ready(out)  # what would fail every report is told once, and before the first
    made, failed = {}, 0
    for name in experiments.names():
        if not (NOTEBOOKS / f"{name.replace('-', '_')}.ipynb").is_file():
            continue
        try:
            made[name] = str(make_report(name, {}, folder, progress=for_command()).html)
        except RinglabError as error:
            console.complain(f"{name}: {error}")
            failed += 1
    made["index"] = str(write_index(folder))
    if as_json:
        click.echo(console.to_json(made))
    else:
        for name, path in made.items():
            click.echo(f"{name:12} {path}")
    return ERROR if failed else DONE


@cli.command()
@_out
@_json
def runs(out: Path | None, as_json: bool) -> None:
    """The runs that are kept, oldest first."""
    from lab.runs import RunStore

    store = RunStore(out)
    infos = store.list()
    if as_json:
        click.echo(console.to_json([_run_info(info) for info in infos]))
    elif infos:
        rows = [(info.name, _when(info.started), _summary(info)) for info in infos]
        click.echo(console.table(rows, ("run", "UTC", "states")))
    else:
        click.echo(f"no runs in {store.root}")


@cli.command()
@click.argument("run_a")
@click.argument("run_b")
@_out
@_json
def compare(run_a: str, run_b: str, out: Path | None, as_json: bool) -> None:
    """Two runs side by side, and in what else they differ; a beginning of a name will do."""
    from lab import runs as store

    kept = store.RunStore(out)
    a, b = kept.load(run_a), kept.load(run_b)
    rows, differ = store.compare(a, b), store.differences(a, b)
    if as_json:
        click.echo(console.to_json({"a": a.name, "b": b.name, "rows": rows, "differences": differ}))
        return
    click.echo(f"a: {a.name}\nb: {b.name}")
    click.echo(console.table([_compared(row) for row in rows], (
        "arm", "policy", "window", "state a", "state b", "waits/s a", "waits/s b", "CPU ms/s a",
        "CPU ms/s b", "on queue a", "on queue b"), "lllllrrrrrr"))
    for row in differ:
        click.echo(f"{row['what']} {row['name']}: {row['a']} | {row['b']}")


class _Late(click.Command):
    """A command whose options come from the engine's tables: made when it is called for."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        from lab.serve import STANDS

        if not self.params and self.name:
            self.params = STANDS[self.name].params()
        return super().get_params(ctx)

    def invoke(self, ctx: click.Context) -> Any:
        from lab.serve import STANDS

        return STANDS[str(self.name)].run(**ctx.params)


cli.add_command(_Late("serve", help="""The ring server on its own, for other people's clients.

Stops on SIGTERM and SIGINT, and prints its counters then. Faults are asked for by name: without
--preset it is tickless."""))
cli.add_command(_Late("relay", help="""The relay on its own, in front of any HTTP/1.1 origin.

Stops on SIGTERM and SIGINT, and prints its counters then. Faults are asked for by name: without
--preset it is after, the fixed one."""))
cli.add_command(_Late("origin", help="""The bundled origin: objects of any size, slow or silent.

What it does is in the query of the request: /object?size=1000000&chunk=65000&last=3000&delay_ms=300
and more, as lab/origin.py tells. Stops on SIGTERM and SIGINT."""))


wait_commands.register(cli)


def _print_outcome(found: Case, outcome: Outcome, as_json: bool) -> None:
    if as_json:
        stored = outcome.path / "run.json" if outcome.path else None
        text = stored.read_text(encoding="utf-8") if stored else console.to_json(outcome.data)
        click.echo(text.rstrip("\n"))
        return
    click.echo(found.table(outcome))
    for line in outcome.not_shown:
        click.echo("\n" + textwrap.fill(f"{console.NOT_SHOWN} {line}", 100))
    for line in outcome.remarks:
        click.echo("\n" + textwrap.fill(line, 100))
    if outcome.path:
        click.echo(f"\nrun {outcome.path}")


def _run_info(info: RunInfo) -> dict[str, Any]:
    return {"name": info.name, "path": str(info.path), "experiment": info.experiment,
            "started": info.started and info.started.isoformat(), "states": dict(info.states),
            "problem": info.problem}


def _when(started: datetime | None) -> str:
    return console.NOTHING if started is None else f"{started:%Y-%m-%d %H:%M}"


def _summary(info: RunInfo) -> str:
    if info.problem:
        return info.problem
    states = list(info.states.values())
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


def _compared(row: dict[str, Any]) -> tuple[str, ...]:
    words = (row["arm"], row["policy"], row["window"], row["state_a"], row["state_b"])
    figures = (("waits_per_s", 1), ("cpu_ms_per_s", 1), ("on_queue_fraction", 2))
    return (
        *(word or console.NOTHING for word in words),
        *(console.number(row[f"{name}_{side}"], digits)
          for name, digits in figures for side in "ab"),
    )
