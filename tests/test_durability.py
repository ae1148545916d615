"""What was acknowledged is there, and what comes back is right, whatever happens to the server and its storage.

Each test has a server of its own, since it kills or damages it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from cubesandbox import Sandbox
from cubesandbox._exceptions import CubeSandboxError

from harness import damage
from harness.objectstore import ObjectStore
from harness.planted import Planted, run
from harness.rest import all_sandboxes, all_snapshots, call, guest_headers
from harness.server import Server, all_gone, wait_for
from harness.world import World

MakeServer = Callable[..., Server]

# Servers of their own: several starts in one test, and one template built from nothing.
pytestmark = pytest.mark.timeout(420)


def ids(server: Server) -> list[str]:
    return [item["snapshotID"] for item in all_snapshots(server)]


def remote_status(server: Server, snapshot: str) -> str:
    return str(server.cli("snapshot", "info", snapshot)["remote_status"])


def start_from(server: Server, snapshot: str, planted: Planted) -> None:
    """A sandbox from the snapshot has what was planted; it is killed again."""
    sandbox = Sandbox.create(snapshot, config=server.cube())
    planted.find(sandbox)
    sandbox.kill()


# kill -9


def test_an_acknowledged_snapshot_survives_kill_9(new_server: MakeServer) -> None:
    server = new_server().start()
    sandbox = Sandbox.create("base", config=server.cube())
    planted = Planted.plant(sandbox)
    info = sandbox.create_snapshot("kept")
    vmms = server.kill_9()
    assert vmms
    server.start()
    all_gone(vmms)
    listed = {item["snapshotID"]: item["names"] for item in all_snapshots(server)}
    assert listed == {info.snapshot_id: ["default/kept:default"]}
    start_from(server, info.snapshot_id, planted)
    start_from(server, "default/kept", planted)


def test_a_sandbox_does_not_survive_kill_9_and_holds_nothing_afterwards(new_server: MakeServer) -> None:
    server = new_server().start()
    snapshot = Sandbox.create("base", config=server.cube()).create_snapshot().snapshot_id
    lost = Sandbox.create(snapshot, config=server.cube())
    run(lost, "true")
    call(server, "DELETE", f"/templates/{snapshot}").assert_error(409)
    server.kill_9()
    server.start()
    assert all_sandboxes(server) == []
    call(server, "GET", f"/sandboxes/{lost.sandbox_id}").assert_error(404, lost.sandbox_id)
    answer = call(server, "GET", "/health", headers=guest_headers(lost.sandbox_id, 49983))
    answer.assert_error(502, "was not found")
    assert call(server, "DELETE", f"/templates/{snapshot}").status == 204
    assert ids(server) == []


def test_kill_9_in_the_middle_of_a_snapshot_leaves_all_of_it_or_nothing(new_server: MakeServer) -> None:
    server = new_server().start()
    for number, delay in enumerate((0.0, 0.03, 0.1, 0.3)):
        sandbox = Sandbox.create("base", config=server.cube())
        planted = Planted.plant(sandbox)
        before = ids(server)
        name = f"cut-{number}"

        caller = threading.Thread(target=_ignore, args=(partial(sandbox.create_snapshot, name),))
        caller.start()
        time.sleep(delay)
        vmms = server.kill_9()
        caller.join()
        server.start()
        all_gone(vmms)
        new = [snapshot for snapshot in ids(server) if snapshot not in before]
        assert len(new) <= 1
        if new:
            start_from(server, f"default/{name}", planted)
        else:
            # The name is free, and the next one works.
            again = Sandbox.create("base", config=server.cube())
            assert again.create_snapshot(name).names == [f"default/{name}:default"]
            again.kill()
    assert call(server, "GET", "/v2/sandboxes").json() == []


def test_kill_9_in_the_middle_of_creates_leaves_no_sandbox_and_no_process(new_server: MakeServer) -> None:
    server = new_server().start()
    creating = [
        threading.Thread(target=_ignore, args=(partial(Sandbox.create, "base", config=server.cube()),))
        for _ in range(6)
    ]
    for thread in creating:
        thread.start()
    time.sleep(0.3)
    vmms = server.kill_9()
    for thread in creating:
        thread.join()
    server.start()
    all_gone(vmms)
    assert all_sandboxes(server) == []
    sandbox = Sandbox.create("base", config=server.cube())
    assert run(sandbox, "echo well") == "well"


def _ignore(action: Callable[[], object]) -> None:
    try:
        action()
    except Exception:  # noqa: BLE001 - the server is killed under this call
        return


def test_an_orderly_end_takes_every_vmm_along_and_keeps_every_snapshot(new_server: MakeServer) -> None:
    server = new_server().start()
    sandbox = Sandbox.create("base", config=server.cube())
    planted = Planted.plant(sandbox)
    snapshot = sandbox.create_snapshot().snapshot_id
    vmms = server.vmms()
    assert server.stop() == 0
    assert not [vmm for vmm in vmms if vmm.alive()]
    assert list(server.tmp_dir.iterdir()) == []
    server.start()
    assert all_sandboxes(server) == []
    start_from(server, snapshot, planted)


# The cache


def test_with_the_cache_wiped_a_snapshot_starts_from_the_object_store(new_server: MakeServer) -> None:
    server = new_server().start()
    sandbox = Sandbox.create("base", config=server.cube())
    planted = Planted.plant(sandbox)
    snapshot = sandbox.create_snapshot().snapshot_id
    wait_for("the upload", lambda: remote_status(server, snapshot) == "ready", 120, 0.2)
    server.stop()
    damage.wipe_caches(server.data_dir)
    server.start()
    before = server.stats()["store"]["s3_gets"]
    start_from(server, snapshot, planted)
    assert server.stats()["store"]["s3_gets"] > before


def test_with_the_cache_wiped_before_the_upload_a_snapshot_starts(new_server: MakeServer) -> None:
    """Durable on the node means: not in the cache."""
    server = new_server("--s3-endpoint", "http://127.0.0.1:9", "--s3-access-key", "k", "--s3-secret-key", "s").start()
    sandbox = Sandbox.create("base", config=server.cube())
    planted = Planted.plant(sandbox)
    snapshot = sandbox.create_snapshot().snapshot_id
    assert remote_status(server, snapshot) != "ready"
    server.kill_9()
    damage.wipe_caches(server.data_dir)
    # The object store that has the template is there again; the snapshot itself has never been in one.
    server.args.clear()
    server.start()
    start_from(server, snapshot, planted)
    wait_for("the upload", lambda: remote_status(server, snapshot) == "ready", 120, 0.2)


def test_a_byte_flipped_in_every_cached_chunk_is_never_seen(new_server: MakeServer) -> None:
    server = new_server().start()
    sandbox = Sandbox.create("base", config=server.cube())
    planted = Planted.plant(sandbox)
    checksum = run(sandbox, "head -c 4000000 /dev/urandom > /root/data; sync; sha256sum < /root/data")
    snapshot = sandbox.create_snapshot().snapshot_id
    server.uploaded()
    # A start writes what was only in the database's log to its files.
    server.stop()
    server.start()
    server.stop()
    assert damage.flip_cached_chunks(server.data_dir) > 0
    server.start()
    copy = Sandbox.create(snapshot, config=server.cube())
    planted.find(copy)
    assert run(copy, "echo 3 > /proc/sys/vm/drop_caches; sha256sum < /root/data") == checksum
    assert server.stats()["store"]["bad_copies"] > 0


def test_bytes_flipped_in_the_object_store_are_not_seen_while_the_cache_is_good(new_server: MakeServer) -> None:
    server = new_server().start()
    sandbox = Sandbox.create("base", config=server.cube())
    planted = Planted.plant(sandbox)
    snapshot = sandbox.create_snapshot().snapshot_id
    server.uploaded()
    server.stop()
    assert damage.flip_stored_packs(server.data_dir) > 0
    server.start()
    start_from(server, snapshot, planted)


def test_with_no_good_copy_left_the_create_fails_and_says_why(new_server: MakeServer) -> None:
    server = new_server().start()
    sandbox = Sandbox.create("base", config=server.cube())
    planted = Planted.plant(sandbox)
    snapshot = sandbox.create_snapshot().snapshot_id
    server.uploaded()
    server.stop()
    damage.flip_stored_packs(server.data_dir)
    damage.wipe_caches(server.data_dir)
    server.start()
    pool = server.stats()["pooled_vmms"]
    call(server, "POST", "/sandboxes", {"templateID": snapshot}).assert_error((500, 503), "chunk")
    assert all_sandboxes(server) == []
    assert snapshot in ids(server)
    wait_for("no VMM without an owner", lambda: len(server.vmms()) == server.stats()["pooled_vmms"] >= pool)
    # Nothing wrong was kept: with the good copies back, it starts.
    server.stop()
    damage.flip_stored_packs(server.data_dir)
    server.start()
    start_from(server, snapshot, planted)


# The object store, written by somebody else


@pytest.fixture(scope="module")
def remote(root: Path, store: ObjectStore) -> Iterator[Server]:
    """A server whose object store is that one, from its first start on."""
    server = Server(root / "remote", args=[*store.arguments, "--fault-deadline", "60s"])
    server.start()
    server.uploaded()
    yield server
    server.remove()


@pytest.fixture
def on_remote(remote: Server) -> Iterator[World]:
    made = World(remote)
    yield made
    made.close()


def cold(server: Server) -> None:
    """Restarts it without its cache."""
    server.stop()
    damage.wipe_caches(server.data_dir)
    server.start()


def test_with_the_object_store_unreachable_a_warm_node_goes_on(
    store: ObjectStore, remote: Server, on_remote: World
) -> None:
    sandbox = on_remote.cube()
    planted = Planted.plant(sandbox)
    first = on_remote.snapshot(sandbox)
    wait_for("the upload", lambda: remote_status(remote, first) == "ready", 120, 0.2)
    with store.unreachable():
        planted.find(on_remote.cube(first))
        second = on_remote.snapshot(sandbox)
        planted.find(on_remote.cube(second))
        sandbox.rollback(first)
        planted.find(sandbox)
        assert remote_status(remote, second) != "ready"
    wait_for("the upload, once it is back", lambda: remote_status(remote, second) == "ready", 180, 0.5)


def test_a_cold_node_waits_for_an_object_store_that_is_away(
    store: ObjectStore, remote: Server, on_remote: World
) -> None:
    sandbox = on_remote.cube()
    planted = Planted.plant(sandbox)
    checksum = run(sandbox, "head -c 8000000 /dev/urandom > /root/data; sync; sha256sum < /root/data")
    snapshot = on_remote.snapshot(sandbox)
    sandbox.kill()
    wait_for("the upload", lambda: remote_status(remote, snapshot) == "ready", 120, 0.2)
    cold(remote)
    copy = on_remote.cube(snapshot)
    answers: list[str] = []
    reading = threading.Thread(
        target=lambda: answers.append(run(copy, "echo 3 > /proc/sys/vm/drop_caches; sha256sum < /root/data"))
    )
    with store.unreachable():
        reading.start()
        reading.join(5)
    reading.join(120)
    assert answers == [checksum]
    planted.find(copy)


def test_without_cache_and_object_store_the_create_fails_and_says_why(
    store: ObjectStore, remote: Server, on_remote: World
) -> None:
    sandbox = on_remote.cube()
    snapshot = on_remote.snapshot(sandbox)
    sandbox.kill()
    wait_for("the upload", lambda: remote_status(remote, snapshot) == "ready", 120, 0.2)
    cold(remote)
    with store.unreachable():
        answer = call(remote, "POST", "/sandboxes", {"templateID": snapshot}, timeout=200)
        answer.assert_error((500, 503))
        assert all_sandboxes(remote) == []
    assert run(on_remote.cube(snapshot), "echo back") == "back"


def test_wrong_bytes_from_the_object_store_never_reach_a_guest(
    store: ObjectStore, remote: Server, on_remote: World
) -> None:
    sandbox = on_remote.cube()
    planted = Planted.plant(sandbox)
    snapshot = on_remote.snapshot(sandbox)
    sandbox.kill()
    wait_for("the upload", lambda: remote_status(remote, snapshot) == "ready", 120, 0.2)
    cold(remote)
    with store.bad_copies():
        with pytest.raises(CubeSandboxError):
            Sandbox.create(snapshot, config=remote.cube())
        assert all_sandboxes(remote) == []
    planted.find(on_remote.cube(snapshot))
    assert remote.stats()["store"]["bad_copies"] > 0


def test_a_burst_of_creates_fetches_nothing_twice(store: ObjectStore, remote: Server, on_remote: World) -> None:
    sandbox = on_remote.cube()
    planted = Planted.plant(sandbox)
    snapshot = on_remote.snapshot(sandbox)
    sandbox.kill()
    wait_for("the upload", lambda: remote_status(remote, snapshot) == "ready", 120, 0.2)

    def bytes_read(count: int) -> int:
        cold(remote)
        made = World(remote)
        before = int(remote.stats()["store"]["s3_bytes_read"])
        threads = [threading.Thread(target=lambda: planted.find(made.cube(snapshot))) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(all_sandboxes(remote)) == count
        made.close()
        return int(remote.stats()["store"]["s3_bytes_read"]) - before

    alone, together = bytes_read(1), bytes_read(4)
    # Four guests do not touch exactly what one does; four times as much would be four fetches of everything.
    assert together < 2 * alone
