"""JupyterLab and Chromium for the tests of this folder: one server and one browser a session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab.doctor import browser_path

TOKEN = "ringlab-test"
STARTUP_S = 120
# Nothing is asked of the network, and no first-run page stands in the way.
CHROMIUM = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
SETTINGS = {
    "apputils-extension/notification.jupyterlab-settings": '{"fetchNews": "false"}',
}


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab: its address, its folder of notebooks, its log."""

    url: str
    root: Path
    log: Path
    pid: int


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_lab(home: Path, root: Path) -> Iterator[Lab]:
    """A JupyterLab on loopback whose every file is below ``home``; stopped on the way out."""
    port = free_port()
    settings = home / "settings"
    for name, text in SETTINGS.items():
        path = settings / "@jupyterlab" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    checkout = Path(__file__).resolve().parents[2]
    environment = {
        **os.environ, "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"), "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(settings), "JUPYTERLAB_WORKSPACES_DIR": str(home / "spaces"),
        "IPYTHONDIR": str(home / "ipython"), "RINGLAB_RUNS": str(home / "runs"),
        "PYTHONPATH": str(checkout),
    }
    environment.pop("RINGLAB_BATCH", None)
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1",
        f"--port={port}", f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={root}",
        "--expose-app-in-browser", "--LabApp.news_url=",
    ]
    log = home / "jupyter.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment,
                                   cwd=root, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            await_answer(f"{url}/api/status?token={TOKEN}", process, log)
            yield Lab(url, root, log, process.pid)
        finally:
            stop(process)


def await_answer(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + STARTUP_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None:
                break
            time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not answer:\n{log.read_text(errors='replace')[-2000:]}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a server and, through it, its kernels: it is given time to do so itself."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def jupyterlab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab on a folder of its own, with the checkout's packages to import."""
    home = tmp_path_factory.mktemp("jupyter")
    root = home / "notebooks"
    root.mkdir()
    with running_lab(home, root) as lab:
        yield lab


@pytest.fixture
def no_exception_in_the_log(jupyterlab: Lab) -> Iterator[None]:
    before = jupyterlab.log.stat().st_size
    yield
    text = jupyterlab.log.read_text(errors="replace")[before:]
    assert "Exception in" not in text, text[-3000:]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Debian's Chromium, or whichever is on PATH; without one the test is skipped."""
    sync = pytest.importorskip("playwright.sync_api")
    found = browser_path()
    if found is None:
        pytest.skip("no chromium on PATH; on Debian: apt-get install chromium")
    with sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def pictures() -> Path:
    """Where screenshots are kept for people to look at; reports/ is not in git."""
    folder = Path(__file__).resolve().parents[2] / "reports" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


OpenNotebook = Callable[..., Any]


@pytest.fixture(scope="module")
def open_notebook(jupyterlab: Lab, chromium: Any) -> Iterator[OpenNotebook]:
    """Opens a notebook of the lab's folder in a page of its own profile; returns the page."""
    with opened_in(chromium, jupyterlab) as opened:
        yield opened


@contextmanager
def opened_in(chromium: Any, lab: Lab) -> Iterator[OpenNotebook]:
    """What opens notebooks of a JupyterLab; its pages are closed on the way out."""
    contexts = []

    def opened(name: str, width: int = 1280, height: int = 800) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": height})
        context.set_default_timeout(90_000)  # a busy machine; nothing here asserts how long
        contexts.append(context)
        page = context.new_page()
        page.errors = []
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.address = f"{lab.url}/lab/tree/{name}?token={TOKEN}&reset"
        page.goto(page.address)
        page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=90_000)
        kernel_idle(page)
        return page

    yield opened
    for context in contexts:
        context.close()


def kernel_idle(page: Any) -> None:
    """The notebook's kernel has come up."""
    page.wait_for_function(
        "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel"
        "?.status === 'idle'", timeout=90_000)


def theme(page: Any, name: str) -> None:
    """Chooses "JupyterLab Light" or "JupyterLab Dark"."""
    page.evaluate("(theme) => window.jupyterapp.commands.execute('apputils:change-theme', {theme})",
                  name)


def run_all(page: Any) -> None:
    """Run -> Run All Cells."""
    page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")


def scroll_to(page: Any, words: str) -> None:
    """Brings the output of the code cell that holds ``words`` into sight: JupyterLab draws no
    others."""
    page.wait_for_function("() => window.jupyterapp?.shell.currentWidget?.content?.widgets?.length",
                           timeout=90_000)
    page.evaluate(
        """(words) => {
          const notebook = window.jupyterapp.shell.currentWidget.content;
          const index = notebook.widgets.findIndex(cell => cell.model.type === 'code' &&
            cell.model.sharedModel.source.includes(words));
          return notebook.scrollToItem(index, 'start');
        }""", words)


def leave(page: Any) -> None:
    """Ends the kernel and closes the page."""
    page.evaluate("window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    page.context.close()


def restart(page: Any) -> None:
    """Kernel -> Restart, without the question."""
    page.evaluate("window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
