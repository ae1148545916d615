"""Guests restored ahead of need: only for snapshots in frequent use, never seen by anybody, and as good as new ones."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from cubesandbox import Sandbox

from harness.planted import Planted, evaluate, run
from harness.server import Server, wait_for
from harness.world import World

MakeServer = Callable[..., Server]
STANDBYS = 2


@pytest.fixture
def own(new_server: MakeServer) -> Server:
    return new_server(standby=STANDBYS).start()


@pytest.fixture
def on_own(own: Server) -> Iterator[World]:
    made = World(own)
    yield made
    made.close()


def waiting(server: Server) -> int:
    return int(server.stats()["standbys"])


def full(server: Server) -> None:
    wait_for("standbys", lambda: waiting(server) == STANDBYS, 60, 0.1)


def owned(server: Server) -> dict[str, int]:
    """Pid of the VMM of each sandbox."""
    return {vm["sandbox_id"]: vm["pid"] for vm in server.stats()["vms"] if vm["sandbox_id"]}


def unowned(server: Server) -> set[int]:
    """Pids of the VMMs that are nobody's: in the pool, or standbys."""
    return {process.pid for process in server.vmms()} - set(owned(server).values())


def heat(world: World, snapshot: str) -> None:
    """Makes a snapshot one that is used again and again."""
    for _ in range(2):
        world.cube(snapshot).kill()


def test_one_start_makes_no_standby_and_two_do(own: Server, on_own: World) -> None:
    snapshot = on_own.snapshot(on_own.cube())
    on_own.cube(snapshot).kill()
    time.sleep(3)
    assert waiting(own) == 0
    on_own.cube(snapshot).kill()
    full(own)


def test_a_sandbox_from_a_standby_has_all_state_and_an_identity_of_its_own(own: Server, on_own: World) -> None:
    source = on_own.cube()
    planted = Planted.plant(source)
    evaluate(source, "import random\nrandom.random() > 2")
    snapshot = on_own.snapshot(source)
    heat(on_own, snapshot)
    full(own)
    before = unowned(own)
    # While it waits nothing of the user's goes on, and its clock stands.
    time.sleep(5)
    first = on_own.cube(snapshot)
    second = on_own.cube(snapshot)
    assert {owned(own)[guest.sandbox_id] for guest in (first, second)} <= before, "they waited before"
    third = on_own.cube(snapshot)
    guests = [first, second, third]
    for guest in guests:
        planted.find(guest)
        assert abs(float(run(guest, "date +%s.%N")) - time.time()) < 5
    for probe in ("cat /etc/machine-id", "hostname", "cat /etc/hostname", "head -c 16 /dev/urandom | od -An -tx1"):
        assert len({run(guest, probe) for guest in guests}) == 3, probe
    assert len({evaluate(guest, "random.getrandbits(128)") for guest in guests}) == 3
    assert run(first, "hostname") == first.sandbox_id
    for guest in guests:
        assert run(guest, "getent hosts $(hostname) >/dev/null && echo known") == "known"


def test_nothing_of_the_user_s_runs_before_the_guest_is_somebody_s(own: Server, on_own: World) -> None:
    source = on_own.cube()
    # The last is where a home directory is that does not exist, in the eyes of some.
    run(source, "mkdir /nonexistent")
    for home in ("/root", "/home/user", "/nonexistent"):
        run(source, f"echo 'echo ran >> {home}/ran' >> {home}/.profile")
    ticking = "setsid bash -c 'while :; do echo $((++n)) > /root/ticks; sleep 0.1; done' <&- >&- 2>&- &"
    run(source, f"{ticking} rm -f /root/ran /home/user/ran /nonexistent/ran")
    snapshot = on_own.snapshot(source)
    heat(on_own, snapshot)
    full(own)
    time.sleep(3)
    copy = on_own.cube(snapshot)
    # The SDK reads files without a shell.
    ticks = int(copy.files.read("/root/ticks") or 0)
    assert ticks < 30, "a process that ticks ten times a second did so while its guest waited"
    assert run(copy, "wc -l < /root/ran; ls /home/user/ran /nonexistent/ran 2>/dev/null || true") == "1", "this command's own shell"


@pytest.mark.parametrize(
    "change",
    [
        "echo : >> /etc/profile",
        "touch /etc/ld.so.preload",
        "touch /etc/profile.d/x.sh",
        "cp /bin/bash /bin/other; mv /bin/other /bin/bash",
    ],
)
def test_a_guest_whose_login_shell_was_changed_does_not_rehearse(own: Server, on_own: World, change: str) -> None:
    source = on_own.cube()
    run(source, change)
    snapshot = on_own.snapshot(source)
    heat(on_own, snapshot)
    wait_for("the attempt", lambda: "no standby for this snapshot" in own.tail(200), 60, 0.1)
    assert waiting(own) == 0
    assert run(on_own.cube(snapshot), "echo fine") == "fine"


def test_a_rollback_takes_a_standby(own: Server, on_own: World) -> None:
    source = on_own.cube()
    planted = Planted.plant(source)
    snapshot = on_own.snapshot(source)
    heat(on_own, snapshot)
    for _ in range(3):
        full(own)
        before = unowned(own)
        run(source, "echo changed > /root/marker")
        source.rollback(snapshot)
        assert owned(own)[source.sandbox_id] in before
        planted.find(source)


def test_a_snapshot_of_a_sandbox_that_was_a_standby(own: Server, on_own: World) -> None:
    source = on_own.cube()
    planted = Planted.plant(source)
    snapshot = on_own.snapshot(source)
    heat(on_own, snapshot)
    full(own)
    copy = on_own.cube(snapshot)
    run(copy, "echo second > /root/second")
    grandchild = on_own.cube(on_own.snapshot(copy))
    planted.find(grandchild)
    assert run(grandchild, "cat /root/second") == "second"


def test_a_standby_that_dies_is_missed_by_nobody(own: Server, on_own: World) -> None:
    snapshot = on_own.snapshot(on_own.cube())
    heat(on_own, snapshot)
    full(own)
    for pid in unowned(own):
        os.kill(pid, signal.SIGKILL)
    for _ in range(3):
        assert run(on_own.cube(snapshot), "echo fine") == "fine"
    full(own)


def test_a_deleted_snapshot_keeps_no_standby(own: Server, on_own: World) -> None:
    snapshot = on_own.snapshot(on_own.cube())
    heat(on_own, snapshot)
    full(own)
    Sandbox.delete_snapshot(snapshot, config=own.cube())
    wait_for("their end", lambda: waiting(own) == 0, 30)
    wait_for("no VMM but the pool's", lambda: len(unowned(own)) == own.stats()["pooled_vmms"], 30)


def test_the_bound_is_for_all_snapshots_together(own: Server, on_own: World) -> None:
    source = on_own.cube()
    snapshots = [on_own.snapshot(source) for _ in range(STANDBYS + 1)]
    for snapshot in snapshots:
        heat(on_own, snapshot)
    full(own)
    time.sleep(3)
    assert waiting(own) == STANDBYS
    before = unowned(own)
    copies = [on_own.cube(snapshot) for snapshot in snapshots]
    pids = owned(own)
    assert before & {pids[copy.sandbox_id] for copy in copies}, "a standby was taken"
    assert [run(copy, "echo fine") for copy in copies] == ["fine"] * len(copies)


def test_what_a_rehearsal_leaves_running_ends_before_the_guest_is_somebody_s(own: Server, on_own: World) -> None:
    source = on_own.cube()
    # As a start-up file of the system's could: nothing that a sandbox started itself is ever there.
    run(source, "sleep 12345 <&- >&- 2>&- & echo $! > /sys/fs/cgroup/rehearsal/cgroup.procs")
    snapshot = on_own.snapshot(source)
    heat(on_own, snapshot)
    full(own)
    copy = on_own.cube(snapshot)
    assert run(copy, "cat /sys/fs/cgroup/rehearsal/cgroup.procs; pgrep -f 'sleep 1234[5]' || true") == ""


def test_a_machine_id_that_was_replaced_differs_in_clones_again(own: Server, on_own: World) -> None:
    source = on_own.cube()
    run(source, "rm /etc/machine-id; echo 0123456789abcdef0123456789abcdef > /etc/machine-id")
    snapshot = on_own.snapshot(source)
    names = {run(on_own.cube(snapshot), "cat /etc/machine-id") for _ in range(2)}
    assert len(names) == 2 and "0123456789abcdef0123456789abcdef" not in names


def test_standbys_end_with_the_server(own: Server, on_own: World) -> None:
    snapshot = on_own.snapshot(on_own.cube())
    heat(on_own, snapshot)
    full(own)
    vmms = own.vmms()
    on_own.close()
    assert own.stop() == 0
    assert not [vmm for vmm in vmms if vmm.alive()]


def test_standbys_do_not_outlive_a_server_that_is_killed(own: Server, on_own: World) -> None:
    snapshot = on_own.snapshot(on_own.cube())
    heat(on_own, snapshot)
    full(own)
    vmms = own.kill_9()
    wait_for("their end", lambda: not [vmm for vmm in vmms if vmm.alive()], 30)
    own.start()
    assert waiting(own) == 0
    assert run(on_own.cube(snapshot), "echo fine") == "fine"
