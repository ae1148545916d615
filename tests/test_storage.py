"""What operators do about storage, and what becomes of it: collection, expiry, usage, checks, repairs, and disks that are
full or cannot be written to.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cubesandbox import Sandbox
from cubesandbox._exceptions import CubeSandboxError

from harness import damage
from harness.objectstore import ObjectStore, flipped
from harness.planted import Planted, run
from harness.rest import all_snapshots, call
from harness.server import Server, ServerError, copy_data, wait_for

MakeServer = Callable[..., Server]

pytestmark = pytest.mark.timeout(420)

#: A collector that acts at once, and only when it is told to.
AT_ONCE = ("--gc-interval", "0s", "--gc-grace", "0s")


@pytest.fixture(scope="module")
def remote(root: Path, store: ObjectStore) -> Iterator[Server]:
    """A server with that object store, from its first start on."""
    server = Server(root / "storage", args=[*store.arguments, *AT_ONCE])
    server.start()
    server.uploaded()
    yield server
    server.remove()


def snapshot_of(server: Server, text: str) -> tuple[str, Planted]:
    """A snapshot with a few MB of its own, uploaded, and what is planted in it."""
    sandbox = Sandbox.create("base", config=server.cube())
    run(sandbox, f"head -c 4000000 /dev/urandom | base64 >/root/{text}; sync")
    planted = Planted.plant(sandbox)
    snapshot = sandbox.create_snapshot().snapshot_id
    sandbox.kill()
    server.uploaded()
    return snapshot, planted


def delete(server: Server, snapshot: str) -> None:
    assert call(server, "DELETE", f"/templates/{snapshot}").status == 204


def found_in(server: Server, snapshot: str, planted: Planted) -> None:
    sandbox = Sandbox.create(snapshot, config=server.cube())
    planted.find(sandbox)
    sandbox.kill()


def collect(server: Server) -> None:
    """Collections until what is of no use is gone: three steps, of which the second wants time to have passed."""
    for _ in range(3):
        report = server.cli("store", "gc")
        assert report["named_while_leaving"] == 0
        server.uploaded()
        time.sleep(0.05)


# First, while the node has everything that its guests read.
@pytest.mark.parametrize(
    ("status", "code"),
    [(403, "InvalidAccessKeyId"), (403, "SignatureDoesNotMatch"), (404, "NoSuchBucket"), (403, "RequestTimeTooSkewed")],
)
def test_an_object_store_that_refuses_keeps_snapshots_on_the_node(
    store: ObjectStore, remote: Server, status: int, code: str
) -> None:
    sandbox = Sandbox.create("base", config=remote.cube())
    planted = Planted.plant(sandbox)
    with store.refusing(status, code):
        snapshot = sandbox.create_snapshot().snapshot_id
        sandbox.kill()
        info = lambda: remote.cli("snapshot", "info", snapshot)["remote_status"]  # noqa: E731
        wait_for("the failed upload", lambda: info() == "failed", 60, 0.2)
        assert code in remote.log.read_text(errors="replace"), "the log says why"
        found_in(remote, snapshot, planted)
        done = remote.run_cli("store", "gc")
        assert done.returncode != 0 and code in done.stderr
    wait_for("the upload", lambda: info() == "ready", 120, 0.2)
    delete(remote, snapshot)


def test_what_a_deleted_snapshot_had_alone_leaves_the_object_store(store: ObjectStore, remote: Server) -> None:
    # What other tests deleted goes first: packs of which a little is needed are copied, named no more, then collected.
    collect(remote)
    collect(remote)
    before = store.packs()
    kept, planted = snapshot_of(remote, "kept")
    needed = store.packs()
    gone, _ = snapshot_of(remote, "gone")
    assert before < needed < store.packs()
    usage = {item["snapshot_id"]: item for item in remote.cli("store", "stats", "--snapshots")["usage"]["snapshots"]}
    assert usage[gone]["exclusive_bytes"] > 4_000_000
    delete(remote, gone)

    everything = dict(store.objects)
    dry = remote.cli("store", "gc", "--dry-run")
    assert dry["dry_run"] and dry["condemned"]["count"] > 0
    assert store.objects == everything
    collect(remote)
    assert store.packs() == needed
    assert not [key for key in store.objects if gone in key]
    collect(remote)
    assert store.packs() == needed, "nothing else goes"
    remote.stop()
    damage.wipe_caches(remote.data_dir)
    remote.start()
    found_in(remote, kept, planted)
    delete(remote, kept)
    collect(remote)
    assert store.packs() == before


def test_a_snapshot_expires_and_a_guest_of_it_goes_on(root: Path, seed: Path) -> None:
    data_dir = root / "expires"
    copy_data(seed, data_dir)
    server = Server(data_dir, args=[*AT_ONCE, "--retention", "10s"])
    try:
        server.start()
        source = Sandbox.create("base", config=server.cube())
        planted = Planted.plant(source)
        snapshot = source.create_snapshot("short-lived").snapshot_id
        guest = Sandbox.create(snapshot, config=server.cube())
        wait_for("the expiry", lambda: all_snapshots(server) == [], 60, 0.5)
        # It is only condemned while a guest runs from it: nothing that the guest can reach goes.
        collect(server)
        planted.find(guest)
        with pytest.raises(CubeSandboxError):
            Sandbox.create(snapshot, config=server.cube())
        again = source.create_snapshot("short-lived")
        assert again.snapshot_id != snapshot, "the name is free"
        guest.kill()
        source.kill()
        wait_for("the expiry", lambda: all_snapshots(server) == [], 60, 0.5)
        collect(server)
        report = server.cli("store", "fsck")
        assert report["missing"] == [] and report["bad_packs"] == []
        # All that is left is the template's own snapshot.
        assert report["snapshots"] == 1
    finally:
        server.remove()


def test_damage_is_named_and_repaired_from_what_the_node_has(store: ObjectStore, remote: Server) -> None:
    before = store.packs()
    snapshot, planted = snapshot_of(remote, "damaged")
    (pack, *_) = sorted(store.packs() - before)
    assert remote.cli("store", "fsck")["bad_packs"] == []
    with store.lock:
        store.objects[pack] = flipped(store.objects[pack])
    done = remote.run_cli("store", "fsck")
    assert done.returncode != 0
    assert pack.removeprefix("packs/") in done.stdout and snapshot in done.stdout

    report = remote.cli("store", "fsck", "--repair")
    assert report["missing"] == [] and report["repaired_snapshots"] == 1 and report["repaired_chunks"] > 0
    remote.uploaded()
    collect(remote)
    assert pack not in store.packs()
    report = remote.cli("store", "fsck")
    assert report["missing"] == [] and report["bad_packs"] == []
    remote.stop()
    damage.wipe_caches(remote.data_dir)
    remote.start()
    found_in(remote, snapshot, planted)

    # Once more, with nothing on the node to repair from: it is named, and nothing is made worse.
    (pack, *_) = sorted(store.packs() - before)
    good = store.objects[pack]
    remote.stop()
    damage.wipe_caches(remote.data_dir)
    with store.lock:
        store.objects[pack] = flipped(good)
    remote.start()
    done = remote.run_cli("store", "fsck", "--repair")
    assert done.returncode != 0 and snapshot in done.stdout
    with store.lock:
        store.objects[pack] = good
    assert remote.cli("store", "fsck")["missing"] == []
    found_in(remote, snapshot, planted)
    delete(remote, snapshot)
    collect(remote)


@pytest.fixture
def small_disk(root: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of its own, in memory."""
    where = root / f"disk-{abs(hash(request.node.name))}"
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2g", "snapyard-test", str(where)], check=True)
    yield where
    subprocess.run(["umount", "--lazy", str(where)], check=True)


def test_a_full_disk_fails_snapshots_and_nothing_else(small_disk: Path, seed: Path) -> None:
    data_dir = small_disk / "data"
    copy_data(seed, data_dir)
    server = Server(data_dir)
    try:
        server.start()
        sandbox = Sandbox.create("base", config=server.cube())
        planted = Planted.plant(sandbox)
        kept = sandbox.create_snapshot().snapshot_id
        server.uploaded()
        run(sandbox, "head -c 30000000 /dev/urandom >/dev/shm/noise")
        filler = small_disk / "filler"
        subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=1M"], check=False, capture_output=True)
        with filler.open("r+b") as file:
            file.truncate(filler.stat().st_size - (4 << 20))
        with pytest.raises(CubeSandboxError):
            sandbox.create_snapshot()
        assert "No space left" in server.log.read_text(errors="replace")
        planted.find(sandbox)
        assert [item["snapshotID"] for item in all_snapshots(server)] == [kept]
        filler.unlink()
        after = sandbox.create_snapshot().snapshot_id
        sandbox.kill()
        found_in(server, after, planted)
        found_in(server, kept, planted)
        assert server.stop() == 0
    finally:
        server.remove()


def test_a_data_directory_that_cannot_be_written_to_is_refused(small_disk: Path, seed: Path) -> None:
    data_dir = small_disk / "data"
    copy_data(seed, data_dir)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    server = Server(data_dir)
    # Its log and temporary files lie beside the data directory.
    server.log = small_disk.with_suffix(".log")
    server.tmp_dir = small_disk.with_suffix(".tmp")
    try:
        with pytest.raises(ServerError, match="exit code [1-9]"):
            server.start()
        text = server.log.read_text(errors="replace")
        assert "Read-only file system" in text and str(data_dir) in text
        assert "panicked" not in text
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
        server.remove()
