"""Fixtures of the whole-system tests.

Before the first test one data directory is made in which the template `base` is ready: the *seed*. Each server runs on
a copy of it. Most tests share one server (`server`, also in the environment of the SDKs); tests that kill, corrupt or
configure have one of their own (`new_server`).

After each test on the shared server its accounts must be what they were before (`harness/accounts.py`).
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import accounts
from harness.objectstore import ObjectStore
from harness.server import Server, ServerError, copy_data
from harness.world import World

_ROOT = pytest.StashKey[Path]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Makes the seed: here, and not in a fixture, since a first build may take longer than any test."""
    if session.config.option.collectonly or not session.items:
        return
    root = Path(tempfile.mkdtemp(prefix="snapyard-tests-", dir=os.environ.get("SNAPYARD_TEST_DIR")))
    session.config.stash[_ROOT] = root
    # Control requests, and nothing else, go to this machine; a proxy of the environment must not see them.
    os.environ["NO_PROXY"] = "127.0.0.1,localhost"
    seed = Server(root / "seed")
    try:
        seed.start()
        seed.uploaded()
        code = seed.stop()
    except (ServerError, TimeoutError) as error:
        seed.kill()
        pytest.exit(f"no server to test: {error}\n{seed.tail()}\nlog: {seed.log}", returncode=3)
    if code != 0:
        pytest.exit(f"the server ended with exit code {code}\n{seed.tail()}", returncode=3)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        global _any_failed
        _any_failed = True


_any_failed = False


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Removes what the run made; the logs of the servers stay when something failed."""
    root = session.config.stash.get(_ROOT, None)
    if root is None:
        return
    if not _any_failed:
        shutil.rmtree(root, ignore_errors=True)
        return
    for path in root.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
    print(f"\nlogs of the servers: {root}/*.log")


@pytest.fixture(scope="session")
def root(pytestconfig: pytest.Config) -> Path:
    """The directory of this run."""
    return pytestconfig.stash[_ROOT]


@pytest.fixture(scope="session")
def seed(root: Path) -> Path:
    """A data directory in which `base` is ready. Copy it; do not start a server on it."""
    return root / "seed"


@pytest.fixture(scope="session")
def server(root: Path, seed: Path) -> Iterator[Server]:
    """The server that most tests share; the SDKs find it in the environment."""
    copy_data(seed, root / "shared")
    with Server(root / "shared") as running:
        running.start()
        os.environ.update(running.sdk_env())
        # One sandbox, once: the memory image of `base` is there from now on, as on any server in use.
        world = World(running)
        world.cube().commands.run("true")
        world.close()
        pool = accounts.pool_size(running)
        _trackers[running.pid] = Tracker(pool)
        before = accounts.settled(running, pool)
        yield running
        _, found = accounts.check(running, before)
        vmms = running.vmms()
        code = running.stop()
        assert not found, f"left at the end of all tests: {found}"
        assert code == 0, f"exit code {code} after SIGTERM\n{running.tail()}"
        assert not [vmm for vmm in vmms if vmm.alive()], "VMM processes outlived a server that ended in order"


class Tracker:
    """What is known about a shared server's accounts between two tests."""

    def __init__(self, pool: int) -> None:
        self.pool = pool
        #: VMMs without an owner that failed tests have left.
        self.excess = 0
        #: The ledger after the last test: as long as nothing else has happened it need not be waited for again.
        self.last: accounts.Ledger | None = None


_trackers: dict[int, Tracker] = {}


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test on the shared server: no VMM, socket, temporary file, memfd, reservation or occupancy row."""
    if "server" not in request.fixturenames:
        yield
        return
    server: Server = request.getfixturevalue("server")
    tracker = _trackers[server.pid]
    before = accounts.measure(server)
    if before != tracker.last:
        before = accounts.settled(server, tracker.pool, tracker.excess)
    yield
    after, found = accounts.check(server, before)
    # A leak is reported once, and the tests after it are measured against what it left.
    tracker.last, tracker.excess, tracker.pool = after, after.excess_vmms, min(tracker.pool, after.pooled)
    assert not found, f"left by this test: {found}"


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    """Sandboxes and snapshots that end with the test."""
    made = World(server)
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared(server: Server) -> Iterator[World]:
    """Sandboxes and snapshots that end with the module."""
    made = World(server)
    yield made
    made.close()


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    """An object store of the module's own, beside the server."""
    made = ObjectStore()
    yield made
    made.close()


@pytest.fixture
def new_server(root: Path, seed: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Server]]:
    """Makes servers of this test's own, not yet started, each on its own copy of the seed. Arguments go to `up`."""
    made: list[Server] = []
    numbers = itertools.count()

    def make(*args: str, standby: int = 0) -> Server:
        name = "".join(c if c.isalnum() else "-" for c in request.node.name)
        data_dir = root / f"{name[:60]}-{next(numbers)}"
        copy_data(seed, data_dir)
        server = Server(data_dir, args=args, standby=standby)
        made.append(server)
        return server

    yield make
    for server in made:
        server.remove()
