"""The run store: one folder a run, which either is there whole or is not there.

``run.json`` holds parameters, machine, figures and verdicts; ``samples.parquet`` the time series.
Whatever reports reads runs from here, so a figure can always be traced to the machine and the
parameters that it came from.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import MOST_SHOWN, MachineError, UsageError, nearest, quoted
from lab.checkout import checkout
from lab.scratch import locked
from lab.verdict import STATES

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

SCHEMA = 1
ROOT_VARIABLE = "RINGLAB_RUNS"
RUN_FILE = "run.json"
SAMPLES_FILE = "samples.parquet"
_TEMPORARY = ".writing-"
_STAMP = "%Y%m%dT%H%M%S"
_NAME = re.compile(r"(?P<stamp>\d{8}T\d{6})-(?P<experiment>[a-z0-9][a-z0-9-]*)-[0-9a-f]{4}",
                   re.ASCII)
_EXPERIMENT = re.compile(r"[a-z0-9][a-z0-9-]*")
# What is nested deeper than this was not written by ringlab, and would exhaust Python's stack.
_MOST_DEEP = 50
_TOO_DEEP = object()
_LONG_PATH = 300
_AROUND = {"idle", "drain"}
_PASSING = {"load", "steal_fraction", "memory_available_bytes", "thread_id"}
# The figures of a window that two runs are compared by, with their units.
FIGURES = {
    "waits_per_s": "1/s",
    "wasted_per_s": "1/s",
    "cpu_ms_per_s": "ms/s",
    "process_cpu_ms_per_s": "ms/s",
    "on_queue_fraction": "",
    "voluntary_switches_per_s": "1/s",
}


@dataclass(frozen=True)
class RunInfo:
    """What a listing shows of a run; ``problem`` says why one cannot be read, else it is empty.

    ``states`` maps ``arm/policy`` to its verdict; ``started`` is None where the name tells no time.
    """

    name: str
    path: Path
    experiment: str
    started: datetime | None
    states: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class Run:
    """One run as read back; ``data`` is the whole of its ``run.json``."""

    path: Path
    data: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return str(self.data["run"])

    @property
    def experiment(self) -> str:
        """The experiment that was run."""
        return str(self.data["experiment"])

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Every parameter's value."""
        return dict(self.data["parameters"])

    @property
    def machine(self) -> Mapping[str, Any]:
        """The machine, as :func:`lab.machine.describe` gave it."""
        return dict(self.data["machine"])

    @property
    def arms(self) -> list[dict[str, Any]]:
        """The results, one an arm and policy."""
        return list(self.data["arms"])

    @property
    def has_samples(self) -> bool:
        """Whether the run kept a time series."""
        return (self.path / SAMPLES_FILE).is_file()

    def df_samples(self) -> pd.DataFrame:
        """The time series, one row a sample, with the columns that the engine recorded."""
        if not self.has_samples:
            raise UsageError(f"run {self.name} kept no samples")
        import pandas as pd

        try:
            return pd.read_parquet(self.path / SAMPLES_FILE)
        except (OSError, ValueError) as error:  # pyarrow's own errors are among these
            reason = str(error).splitlines()[0]
            raise MachineError(f"cannot read the samples of run {self.name}: {reason}") from None


class RunStore:
    """The runs below one folder, which is made when the first run is written."""

    def __init__(self, root: str | Path | None = None) -> None:
        self.root = Path(root) if root is not None else default_root()

    def ready(self) -> None:
        """MachineError where no run could be stored, which is better known before it is measured.

        The disk may still refuse afterwards.
        """
        trial = self.root / f"{_TEMPORARY}{secrets.token_hex(8)}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            trial.mkdir()
            trial.rmdir()
        except OSError as error:
            raise MachineError(self._refusal(error, 0)) from error

    def write(self, run: Mapping[str, Any], samples: np.ndarray | None = None) -> Path:
        """Store a run and return its folder, whose name completes it (the caller's is not changed).

        ``run`` needs ``experiment``, ``parameters``, ``machine`` and ``arms``; ``samples`` is a
        structured array. MachineError if the disk refuses: nothing half-written is left, and the
        caller still holds the run, to store again elsewhere.
        """
        experiment = str(run.get("experiment", ""))
        if not _EXPERIMENT.fullmatch(experiment):
            raise UsageError(f"'{experiment}' cannot name an experiment: use a-z, 0-9 and dashes")
        # Everything is made in memory first, so that its size is known before the disk is touched.
        table = None if samples is None else _parquet(samples)
        needed = 0
        try:
            while True:
                name = f"{datetime.now(UTC):{_STAMP}}-{experiment}-{secrets.token_hex(2)}"
                document = _document(run, name)
                files = {RUN_FILE: document} | ({SAMPLES_FILE: table} if table else {})
                needed = sum(len(content) for content in files.values())
                if self._place(name, files):
                    return self.root / name
        except OSError as error:
            raise MachineError(self._refusal(error, needed)) from error

    def load(self, name: str) -> Run:
        """A run by its name, or by a beginning that only one run has."""
        names = [found.name for found in self._folders()]
        if name in names:
            return read_run(self.root / name)
        matches = [found for found in names if name and found.startswith(name)]
        if len(matches) == 1:
            return read_run(self.root / matches[0])
        if matches:
            raise UsageError(f"'{name}' begins {len(matches)} runs: {_some(matches)}")
        if not names:
            raise UsageError(f"there is no run in {self.root} yet")
        near = _some(nearest(name[:MOST_SHOWN], names))
        raise UsageError(f"no run {quoted(name)} in {self.root}; nearest: {near}")

    def latest(self, experiment: str | None = None) -> Run:
        """The newest run, of one experiment or of any."""
        for info in reversed(self.list()):
            if not info.problem and experiment in (None, info.experiment):
                return self.load(info.name)
        of = f" of '{experiment}'" if experiment else ""
        raise UsageError(f"there is no run{of} in {self.root} yet")

    def sweep(self) -> int:
        """Remove what writers that died left behind; returns how many. Live writers are spared."""
        swept = 0
        for folder in _entries(self.root):
            if folder.name.startswith(_TEMPORARY) and folder.is_dir():
                with locked(folder, wait=False) as mine:
                    if mine:
                        shutil.rmtree(folder, ignore_errors=True)
                        swept += 1
        return swept

    def list(self) -> RunInfos:
        """All runs, oldest first; one that cannot be read is listed with its problem.

        There are none in a folder that has yet to be made; UsageError for what is no folder, and
        MachineError for one that cannot be read.
        """
        return [_info(folder) for folder in self._folders()]

    def _folders(self) -> Sequence[Path]:
        try:
            entries = list(self.root.iterdir())
        except FileNotFoundError:
            if not os.path.lexists(self.root):
                return []
            raise UsageError(f"{shown_path(self.root)} is a link to nothing") from None
        except NotADirectoryError:
            raise UsageError(f"{shown_path(self.root)} is not a folder, so there are no runs in it"
                             ) from None
        except OSError as error:
            raise MachineError(f"cannot read the runs in {shown_path(self.root)}: {_why(error)}; "
                               f"set {ROOT_VARIABLE} to another folder") from None
        return sorted((one for one in entries if _NAME.fullmatch(one.name)), key=_age)

    def _place(self, name: str, files: Mapping[str, bytes]) -> bool:
        """Write the files under a temporary name and rename; False if it has to be tried again."""
        self.root.mkdir(parents=True, exist_ok=True)
        temporary = self.root / f"{_TEMPORARY}{name}"
        try:
            temporary.mkdir()
        except FileExistsError:
            return False
        try:
            with locked(temporary, wait=True) as mine:
                if not mine:  # swept in the instant between its making and its locking
                    return False
                for file_name, content in files.items():
                    _write_durably(temporary / file_name, content)
                _sync_folder(temporary)
                if (self.root / name).exists():
                    return False
                temporary.rename(self.root / name)
                _sync_folder(self.root)
                return True
        finally:
            # After the rename there is nothing under this name; after any failure all of it goes.
            shutil.rmtree(temporary, ignore_errors=True)

    def _refusal(self, error: OSError, needed: int) -> str:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        needs = f"it needs {_size(needed)}{_free(self.root)}; " if full and needed else ""
        room = "make room or " if full else ""
        return (f"cannot store the run in {shown_path(self.root)}: {_why(error)}; {needs}{room}"
                f"give {'another' if full else 'a'} folder that can be written (--out, or "
                f"{ROOT_VARIABLE}); nothing was written")


RunInfos = list[RunInfo]


def default_root() -> Path:
    """Where runs go: RINGLAB_RUNS if set, else the checkout's data/runs, else the user's share."""
    chosen = os.environ.get(ROOT_VARIABLE)
    if chosen:
        return _expanded(chosen)
    here = checkout()
    return here / "data" / "runs" if here else _expanded("~/.local/share/ringlab/runs")


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # there is no such user, or no home
        raise UsageError(f"the home folder in {quoted(path)} cannot be told; set {ROOT_VARIABLE} "
                         "to the whole path of a folder") from None


def read_run(folder: Path) -> Run:
    """The run in a folder; UsageError for what is no run, or one of a later version of ringlab."""
    file = folder / RUN_FILE
    data: Any = None
    try:
        whole = stat.S_ISREG(file.stat().st_mode)  # the end of a pipe would never come
        if whole:
            data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read run {shown_path(folder)}: {_why(error)}") from None
    except ValueError:
        raise UsageError(f"cannot read run {shown_path(folder)}: {RUN_FILE} is not JSON") from None
    except RecursionError:
        data = _TOO_DEEP
    problem = problem_of(data) if whole else f"{RUN_FILE} is not a file"
    if problem:
        raise UsageError(f"cannot read run {shown_path(folder)}: {problem}")
    return Run(folder, data)


def problem_of(data: object) -> str:
    """What is wrong with the content of a ``run.json``, in words; empty if nothing is."""
    if data is _TOO_DEEP or not _shallow(data):
        return f"{RUN_FILE} is nested too deeply"
    if not isinstance(data, Mapping):
        return f"{RUN_FILE} holds no object"
    schema = data.get("schema")
    if not isinstance(schema, int):
        return "it has no schema number"
    if schema > SCHEMA:
        return f"its schema {schema} is newer than {SCHEMA}, the newest known here; update ringlab"
    kinds = {"experiment": str, "run": str, "parameters": Mapping, "machine": Mapping, "arms": list}
    for key, kind in kinds.items():
        if not isinstance(data.get(key), kind):
            return f"'{key}' is missing or of the wrong type"
    return next(filter(None, map(_arm_problem, data["arms"])), "")


def _arm_problem(arm: object) -> str:
    """The same of one of its arms; what is printed and reckoned with has to be fit for that."""
    if not isinstance(arm, Mapping) or not isinstance(arm.get("arm"), str):
        return "an entry of 'arms' has no 'arm'"
    windows, policy = arm.get("windows", {}), arm.get("policy", "")
    name = quoted(arm["arm"])
    if not isinstance(policy, str):
        return f"the policy of arm {name} is no text"
    if "state" in arm and arm["state"] not in STATES:
        return f"arm {name} has the unknown state {quoted(str(arm['state']))}"
    if not isinstance(windows, Mapping) or not all(
        isinstance(figures, Mapping) for figures in windows.values()
    ):
        return f"the windows of arm {name} are no objects"
    if not all(map(str.isprintable, (arm["arm"], policy, *windows))):
        return f"a name in arm {name} cannot be printed"
    for figure in FIGURES:
        if not all(_is_figure(figures.get(figure)) for figures in windows.values()):
            return f"'{figure}' of arm {name} is no number"
    return ""


def _is_figure(value: object) -> bool:
    if value is None:
        return True
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:  # a whole number beyond all that a float can be
        return False


def _shallow(data: object) -> bool:
    """Whether nothing is nested too deeply, told without descending."""
    level = [data]
    for _ in range(_MOST_DEEP):
        level = [inner for each in level if isinstance(each, (Mapping, list, tuple))
                 for inner in (each.values() if isinstance(each, Mapping) else each)]
        if not level:
            return True
    return False


def compare(run_a: Run, run_b: Run) -> list[dict[str, Any]]:
    """Two runs side by side: one row for each arm, policy and window of either.

    A row holds ``arm``, ``policy``, ``window``, ``state_a``, ``state_b`` and, for each of
    ``FIGURES``, ``NAME_a``, ``NAME_b`` and ``NAME_ratio`` (b over a). None stands for what one of
    them lacks, and for a ratio to zero. See :func:`differences` before reading a ratio.
    """
    if run_a.experiment != run_b.experiment:
        raise UsageError(f"{run_a.name} is a run of {run_a.experiment}, {run_b.name} of "
                         f"{run_b.experiment}: compare two runs of one experiment")
    a, b = _by_window(run_a), _by_window(run_b)
    rows = []
    for key in list(a) + [key for key in b if key not in a]:
        (state_a, left), (state_b, right) = a.get(key, (None, {})), b.get(key, (None, {}))
        row: dict[str, Any] = dict(zip(("arm", "policy", "window"), key, strict=True))
        row |= {"state_a": state_a, "state_b": state_b}
        for figure in FIGURES:
            before, after = left.get(figure), right.get(figure)
            row[f"{figure}_a"], row[f"{figure}_b"] = before, after
            row[f"{figure}_ratio"] = after / before if before and after is not None else None
        rows.append(row)
    return rows


def differences(run_a: Run, run_b: Run) -> list[dict[str, Any]]:
    """The parameters and machine facts in which two runs differ: ``what``, ``name``, ``a``, ``b``.

    Facts of facts are named with a dot (``engine.setup``). What always differs (load, free memory,
    thread numbers) is left out.
    """
    rows = []
    for what in ("parameters", "machine"):
        left, right = _flat(run_a.data[what]), _flat(run_b.data[what])
        for name in sorted(left.keys() | right.keys()):
            a, b = left.get(name), right.get(name)
            if a != b and not _PASSING & set(name.split(".")):
                rows.append({"what": what, "name": name, "a": a, "b": b})
    return rows


def _flat(facts: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{before}{name}.")
        else:
            flat[before + name] = value
    return flat


def _by_window(run: Run) -> dict[tuple[str, str, str], tuple[str | None, Mapping[str, Any]]]:
    """The state belongs to the window in which the loop was to sleep, not to those around it."""
    return {
        (arm["arm"], arm.get("policy", ""), window): (
            None if window in _AROUND else arm.get("state"), figures)
        for arm in run.arms
        for window, figures in arm.get("windows", {}).items()
    }


def _info(folder: Path) -> RunInfo:
    match = _NAME.fullmatch(folder.name)
    assert match is not None  # _folders lists no other names
    started = None
    try:
        started = datetime.strptime(match["stamp"], _STAMP).replace(tzinfo=UTC)
    except ValueError:
        pass  # a name that only looks like that of a run
    try:
        run = read_run(folder)
    except UsageError as error:
        return RunInfo(folder.name, folder, match["experiment"], started, problem=str(error))
    states = {
        "/".join(part for part in (arm["arm"], arm.get("policy")) if part): arm["state"]
        for arm in run.arms
        if "state" in arm
    }
    return RunInfo(folder.name, folder, run.experiment, started, states)


def _document(run: Mapping[str, Any], name: str) -> bytes:
    document = _plain({"schema": SCHEMA, **run, "run": name})
    problem = problem_of(document)
    if problem:
        raise UsageError(f"cannot store the run: {problem}")
    return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()


def _plain(value: Any) -> Any:
    """``value`` as JSON has it: NumPy scalars and arrays as Python's, what is not finite as null.

    A result is not to be lost over one division by zero in it.
    """
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    return str(value)


def _parquet(samples: np.ndarray) -> bytes:
    """A structured array as Parquet; a field that is itself an array becomes numbered columns."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not samples.dtype.names:
        raise UsageError("samples have no named fields: give a structured array")
    columns: dict[str, Any] = {}
    for name in samples.dtype.names:
        values = samples[name]
        if values.dtype.kind == "S":
            values = np.char.decode(values, "utf-8", "replace")
        if values.ndim == 1:
            columns[name] = pa.array(np.ascontiguousarray(values))
            continue
        flat = values.reshape(len(values), math.prod(values.shape[1:]))
        for index in range(flat.shape[1]):
            columns[f"{name}_{index}"] = pa.array(np.ascontiguousarray(flat[:, index]))
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, compression="zstd")
    return bytes(sink.getvalue())


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _entries(folder: Path) -> Sequence[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _age(folder: Path) -> tuple[str, int, str]:
    # Two runs of one second are told apart by when their folders were filled.
    try:
        filled = (folder / RUN_FILE).stat().st_mtime_ns
    except OSError:
        filled = 0
    return folder.name[:15], filled, folder.name


def _why(error: OSError) -> str:
    return error.strerror or str(error)


def shown_path(path: Path) -> str:
    """A path as a message has it: whole, unless it is too long for any disk."""
    text = os.fspath(path)
    return text if len(text) < _LONG_PATH else f"{text[:MOST_SHOWN]}..."


def _some(names: Sequence[str], most: int = 5) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _free(root: Path) -> str:
    for folder in (root, *root.parents):
        try:
            disk = os.statvfs(folder)
        except OSError:
            continue
        return f" and {_size(disk.f_bavail * disk.f_frsize)} are free"
    return ""
