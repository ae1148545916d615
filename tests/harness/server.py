"""A Snapyard server as its users see it: a binary, a data directory, a port.

Nothing here knows how the server works inside; it starts and ends processes, asks the public API and the operator's
command line, and looks at the process tree and the file system.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

CACHE = Path(os.environ.get("SNAPYARD_CACHE") or Path.home() / ".cache" / "snapyard")
HOST = "127.0.0.1"
#: The domain that `cubesandbox` puts into host names when nothing else is configured.
DOMAIN = "cube.app"
#: A first start builds the template: a root file system to be downloaded and made, a boot, a warm-up.
BASE_DEADLINE_S = 20 * 60

T = TypeVar("T")


class ServerError(Exception):
    """The server did not do what it must for anything else to make sense."""


def wait_for(what: str, probe: Callable[[], T | None], seconds: float = 30, pause: float = 0.05) -> T:
    """The first value of `probe` that is neither `None` nor `False`; fails, naming `what`, after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        value = probe()
        if value is not None and value is not False:
            return value
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(pause)


def binary() -> Path:
    """The server's executable: `SNAPYARD_BIN`, or where the build puts it."""
    given = os.environ.get("SNAPYARD_BIN")
    target = Path(os.environ.get("CARGO_TARGET_DIR") or CACHE / "target")
    path = Path(given) if given else target / "release" / "snapyard"
    if not path.is_file():
        raise ServerError(f"{path} does not exist: run `make build`, or set SNAPYARD_BIN")
    return path


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return sock.getsockname()[1]


@dataclass(frozen=True)
class Process:
    """A process that cannot be mistaken for a later one with the same pid."""

    pid: int
    started: int

    def alive(self) -> bool:
        stat = _stat(self.pid)
        return stat is not None and stat.started == self.started and stat.state != "Z"


@dataclass(frozen=True)
class _Stat:
    pid: int
    comm: str
    state: str
    parent: int
    started: int


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    comm = text[text.index("(") + 1 : text.rindex(")")]
    rest = text[text.rindex(")") + 2 :].split()
    return _Stat(pid, comm, rest[0], int(rest[1]), int(rest[19]))


def descendants(pid: int) -> list[_Stat]:
    """Every process below `pid`, whatever process group or session it put itself into."""
    stats = [stat for name in os.listdir("/proc") if name.isdigit() and (stat := _stat(int(name)))]
    found: list[_Stat] = []
    parents = {pid}
    while True:
        more = [stat for stat in stats if stat.parent in parents and stat not in found]
        if not more:
            return found
        found += more
        parents = {stat.pid for stat in more}


class Server:
    """One `snapyard up`. A context manager: leaving it kills what still runs.

    Beside the data directory `D` lie `D.log` (what the server printed, over all its starts) and `D.tmp` (its temporary
    directory, so that forgotten files can be seen).
    """

    def __init__(self, data_dir: Path, *, args: Sequence[str] = (), standby: int = 0) -> None:
        self.data_dir = data_dir
        # Guests on standby come and go by themselves: only the tests that are about them have any.
        self.args = [*args, "--standby", str(standby)]
        self.log = data_dir.with_name(data_dir.name + ".log")
        self.tmp_dir = data_dir.with_name(data_dir.name + ".tmp")
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.kill)

    # Where it is

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerError("the server is not running")
        return self._process.pid

    def sdk_env(self) -> dict[str, str]:
        """The environment variables that make each SDK work against this server."""
        return {
            "E2B_API_KEY": "any",
            "E2B_API_URL": self.url,
            "E2B_SANDBOX_URL": self.url,
            "CUBE_API_URL": self.url,
            "CUBE_PROXY_NODE_IP": HOST,
            "CUBE_PROXY_PORT_HTTP": str(self.port),
            "CUBE_SANDBOX_DOMAIN": DOMAIN,
            "CUBE_TEMPLATE_ID": "base",
            "NO_PROXY": "127.0.0.1,localhost",
        }

    def e2b(self) -> dict[str, Any]:
        """Connection parameters for `e2b`, for a server that is not the one in the environment."""
        return {"api_key": "any", "api_url": self.url, "sandbox_url": self.url}

    def cube(self) -> Any:
        """A `cubesandbox.Config` for this server."""
        from cubesandbox import Config

        return Config(
            api_url=self.url,
            template_id="base",
            proxy_node_ip=HOST,
            proxy_port=self.port,
            sandbox_domain=DOMAIN,
        )

    # Life

    def start(self, *, wait_base: bool = True) -> Server:
        """Starts it and waits until it answers, and (unless told otherwise) until the template `base` is ready."""
        self.launch()
        wait_for("the server to answer", self._answers, 60)
        if wait_base:
            wait_for("the template base", self._base_ready, BASE_DEADLINE_S, 0.2)
        return self

    def launch(self) -> None:
        """Starts it and does not wait."""
        if self._process is not None:
            raise ServerError("the server runs already")
        self.tmp_dir.mkdir(parents=True, exist_ok=True)
        env = os.environ | {"TMPDIR": str(self.tmp_dir), "NO_COLOR": "1"}
        exe = binary()
        env.setdefault("SNAPYARD_ASSETS", str(CACHE / "assets"))
        env.setdefault("SNAPYARD_PRELOAD", str(exe.with_name("libsnapyard_vmm_preload.so")))
        command = [str(exe), "up", "--data-dir", str(self.data_dir), "--listen", f"{HOST}:{self.port}", *self.args]
        with self.log.open("ab") as log:
            # A session of its own: Ctrl-C at the terminal is the test runner's, which then ends the server in order.
            self._process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def stop(self, seconds: float = 60) -> int:
        """Asks it to end, as Ctrl-C does, and answers its exit code."""
        process = self._take()
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise ServerError(f"the server did not end within {seconds:g} s of SIGTERM\n{self.tail()}") from None

    def kill_9(self) -> list[Process]:
        """`kill -9`, and nothing else: answers the VMM processes that it had."""
        vmms = self.vmms()
        process = self._take()
        process.kill()
        process.wait()
        return vmms

    def kill(self) -> None:
        """Ends it by any means, with every process below it. For cleaning up."""
        if self._process is None:
            return
        vmms = self.kill_9()
        for vmm in vmms:
            if vmm.alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(vmm.pid, signal.SIGKILL)

    def remove(self) -> None:
        """Kills it and removes all that it kept but the log."""
        self.kill()
        shutil.rmtree(self.data_dir, ignore_errors=True)
        shutil.rmtree(self.tmp_dir, ignore_errors=True)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def tail(self, lines: int = 40) -> str:
        """The end of its log, for messages."""
        if not self.log.exists():
            return "(no log)"
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _take(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError("the server is not running")
        process, self._process = self._process, None
        return process

    def _alive(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            code = self._take().returncode
            raise ServerError(f"the server ended with exit code {code}\n{self.tail()}")

    def _answers(self) -> bool:
        self._alive()
        try:
            return self.get("/health") is not None
        except OSError:
            return False

    def _base_ready(self) -> bool:
        self._alive()
        for template in self.get("/templates"):
            if "base" in [*(template.get("aliases") or []), *(template.get("names") or [])]:
                status = template.get("buildStatus")
                if status == "error":
                    raise ServerError(f"the template base could not be built: {template}\n{self.tail()}")
                return status == "ready"
        return False

    # Questions

    def get(self, path: str) -> Any:
        """GET of a control route that answers JSON."""
        # No proxy from the environment: it is this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(self.url + path, timeout=30) as answer:
                body = answer.read()
        except urllib.error.HTTPError as error:
            raise ServerError(f"GET {path}: {error.code} {error.read().decode(errors='replace')}") from None
        return json.loads(body) if body else {}

    def run_cli(self, *args: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
        """The operator's command line against this server, as it is."""
        command = [str(binary()), "--data-dir", str(self.data_dir), *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL)

    def cli(self, *args: str, seconds: float = 120) -> Any:
        """The same with `--json`; must succeed."""
        done = self.run_cli("--json", *args, seconds=seconds)
        if done.returncode != 0:
            raise ServerError(f"snapyard {' '.join(args)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return json.loads(done.stdout)

    def stats(self) -> dict[str, Any]:
        """`store stats`: the message `NodeStats` of `node.proto`, with the accounts of what is held."""
        return self.cli("store", "stats")

    def vmms(self) -> list[Process]:
        """The VMM processes, those waiting in the pool included."""
        below = descendants(self.pid)
        return [Process(stat.pid, stat.started) for stat in below if stat.comm.startswith("qemu-system")]

    def uploaded(self, seconds: float = 120) -> None:
        """Waits until everything that is durable here is in the object store too."""
        wait_for("the uploads", lambda: int(self.stats()["store"]["packs_staged"]) == 0, seconds, 0.2)


def copy_data(source: Path, target: Path) -> None:
    """A copy of a stopped server's data directory, holes and all, sharing blocks where the file system can."""
    subprocess.run(["cp", "-a", "--reflink=auto", "--sparse=auto", str(source), str(target)], check=True)


def all_gone(processes: Iterable[Process], seconds: float = 30) -> None:
    """Waits until none of the processes is left."""
    listed = list(processes)
    wait_for(f"the end of {listed}", lambda: not any(process.alive() for process in listed), seconds)
