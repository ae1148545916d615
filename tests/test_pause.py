"""Pause and resume, by both SDKs, by a timeout and by a request; and fork."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cubesandbox import Sandbox as Cube
from e2b import Sandbox as E2b
from e2b import SandboxQuery, SandboxState, TimeoutException

from harness.planted import Planted, run
from harness.rest import all_sandboxes, all_snapshots, call, guest_headers, request_bytes, send_and_hang_up
from harness.server import Server, all_gone, wait_for
from harness.world import World

MakeServer = Callable[..., Server]


def state(server: Server, sandbox_id: str) -> str:
    return call(server, "GET", f"/sandboxes/{sandbox_id}").json()["state"]


def vmm_of(server: Server, sandbox_id: str) -> list[int]:
    return [vm["pid"] for vm in server.stats()["vms"] if vm["sandbox_id"] == sandbox_id]


def stored_snapshots(server: Server) -> int:
    return server.stats()["store"]["snapshots"]


# cubesandbox


def test_what_was_planted_is_there_after_a_pause(world: World, server: Server) -> None:
    sandbox = world.cube()
    planted = Planted.plant(sandbox)
    (vmm,) = vmm_of(server, sandbox.sandbox_id)
    listed = all_snapshots(server)
    sandbox.pause()
    assert state(server, sandbox.sandbox_id) == "paused"
    assert vmm not in [process.pid for process in server.vmms()], "its VM is gone"
    assert all_snapshots(server) == listed, "what holds it is nobody's to see"
    again = Cube.connect(sandbox.sandbox_id)
    assert state(server, sandbox.sandbox_id) == "running"
    planted.find(again)


def test_paused_and_resumed_many_times(world: World, server: Server) -> None:
    sandbox = world.cube()
    planted = Planted.plant(sandbox)
    snapshots = stored_snapshots(server)
    for _ in range(5):
        sandbox.pause()
        sandbox.resume(timeout=600)
        planted.find(sandbox)
    # Each resume leaves what held the pause before.
    assert stored_snapshots(server) == snapshots + 1


def test_what_cannot_be_done_in_which_state(world: World, server: Server) -> None:
    sandbox = world.cube()
    snapshot = world.snapshot(sandbox)
    path = f"/sandboxes/{sandbox.sandbox_id}"
    call(server, "POST", f"{path}/resume", {}).assert_error(409, "not paused")
    sandbox.pause()
    call(server, "POST", f"{path}/pause", {}).assert_error(409, "is paused")
    call(server, "POST", f"{path}/snapshots", {}).assert_error(409, "is paused")
    call(server, "POST", f"{path}/rollback", {"snapshotID": snapshot}).assert_error(409, "is paused")
    call(server, "POST", f"{path}/fork", {"count": 1}).assert_error(409, "is paused")
    call(server, "POST", f"{path}/timeout", {"timeout": 5}).assert_error(409, "is paused")
    assert call(server, "GET", f"{path}/metrics").json() == []
    with pytest.raises(RuntimeError, match="paused"):
        sandbox.commands.run("true")
    assert state(server, sandbox.sandbox_id) == "paused"
    sandbox.resume()
    assert run(sandbox, "echo well") == "well"


def test_a_paused_sandbox_holds_no_snapshot_but_its_own(world: World, server: Server) -> None:
    source = world.cube()
    run(source, "echo kept > /root/state")
    snapshot = world.snapshot(source)
    sandbox = world.cube(snapshot)
    call(server, "DELETE", f"/templates/{snapshot}").assert_error(409)
    sandbox.pause()
    assert call(server, "DELETE", f"/templates/{snapshot}").status == 204
    sandbox.resume()
    assert run(sandbox, "cat /root/state") == "kept"


def test_snapshots_and_rollbacks_of_what_was_paused(world: World, server: Server) -> None:
    sandbox = world.cube()
    run(sandbox, "echo one > /root/state")
    first = world.snapshot(sandbox)
    run(sandbox, "echo two > /root/state")
    sandbox.pause()
    sandbox.resume()
    second = world.snapshot(sandbox)
    assert run(world.cube(second), "cat /root/state") == "two"
    sandbox.rollback(first)
    assert run(sandbox, "cat /root/state") == "one"
    sandbox.pause()
    sandbox.resume()
    assert run(sandbox, "cat /root/state") == "one"


def test_a_paused_sandbox_can_be_killed(world: World, server: Server) -> None:
    snapshots = stored_snapshots(server)
    sandbox = world.cube()
    sandbox.pause()
    assert stored_snapshots(server) == snapshots + 1
    assert call(server, "DELETE", f"/sandboxes/{sandbox.sandbox_id}").status == 204
    call(server, "DELETE", f"/sandboxes/{sandbox.sandbox_id}").assert_error(404)
    call(server, "GET", f"/sandboxes/{sandbox.sandbox_id}").assert_error(404)
    assert stored_snapshots(server) == snapshots


def test_a_client_that_hangs_up_during_a_pause(world: World, server: Server) -> None:
    sandbox = world.cube()
    run(sandbox, "echo whole > /root/state")
    send_and_hang_up(server, request_bytes("POST", f"/sandboxes/{sandbox.sandbox_id}/pause", {}))
    path = f"/sandboxes/{sandbox.sandbox_id}/resume"
    # One that is being paused shows as paused; a resume is told to come again then.
    wait_for("the resume", lambda: call(server, "POST", path, {}).status == 201 or None)
    assert run(sandbox, "cat /root/state") == "whole"


def test_pauses_and_resumes_at_the_same_time(world: World, server: Server) -> None:
    """One of them wins each time, the others are told so, and the sandbox is whole."""
    sandbox = world.cube()
    planted = Planted.plant(sandbox)
    path = f"/sandboxes/{sandbox.sandbox_id}"
    with ThreadPoolExecutor(8) as pool:
        for action, success in [("pause", 204), ("resume", 201)] * 3:
            answers = list(pool.map(lambda _: call(server, "POST", f"{path}/{action}", {}).status, range(8)))
            assert sorted(answers) == [success] + [409] * 7, action
    planted.find(sandbox)


# e2b


def test_e2b_pauses_and_connects(world: World, server: Server) -> None:
    mark = uuid.uuid4().hex
    sandbox = world.e2b(metadata={"mark": mark}, envs={"FROM_CREATE": "yes"})
    sandbox.commands.run("echo kept > /tmp/state")
    assert sandbox.pause()
    assert not sandbox.pause(), "already paused"
    paused = E2b.list(query=SandboxQuery(metadata={"mark": mark}, state=[SandboxState.PAUSED]))
    assert [item.sandbox_id for item in paused.next_items()] == [sandbox.sandbox_id]
    with pytest.raises(TimeoutException, match="paused"):
        sandbox.commands.run("true")
    again = E2b.connect(sandbox.sandbox_id, timeout=600)
    assert again.commands.run('echo "$(cat /tmp/state) $FROM_CREATE"').stdout == "kept yes\n"
    assert again.get_info().state == SandboxState.RUNNING


def test_e2b_forks(world: World, server: Server) -> None:
    sandbox = world.e2b(envs={"FROM_CREATE": "yes"}, metadata={"of": "the source"})
    sandbox.commands.run("echo forked > /tmp/state")
    listed = all_snapshots(server)
    forks = sandbox.fork(count=3, timeout=600)
    assert len(forks) == 3
    for fork in forks:
        assert isinstance(fork, E2b), fork
        world.keep(fork)
    said = [fork.commands.run('echo "$(cat /tmp/state) $FROM_CREATE $E2B_SANDBOX_ID"').stdout for fork in forks]
    assert said == [f"forked yes {fork.sandbox_id}\n" for fork in forks]
    assert len({fork.commands.run("cat /proc/sys/kernel/random/uuid").stdout for fork in forks}) == 3
    assert all(fork.get_info().metadata == {"of": "the source"} for fork in forks)
    assert all_snapshots(server) == listed, "what they started from is nobody's to see"
    sandbox.commands.run("echo source > /tmp/state")
    forks[0].commands.run("echo first > /tmp/state")
    assert forks[1].commands.run("cat /tmp/state").stdout == "forked\n"
    assert sandbox.commands.run("cat /tmp/state").stdout == "source\n"


# Timeouts and requests


def test_paused_at_its_timeout(world: World, server: Server) -> None:
    sandbox = world.e2b(timeout=4, lifecycle={"on_timeout": "pause"})
    sandbox.commands.run("echo kept > /tmp/state")
    wait_for("the pause", lambda: state(server, sandbox.sandbox_id) == "paused" or None)
    detail = call(server, "GET", f"/sandboxes/{sandbox.sandbox_id}").json()["lifecycle"]
    assert detail == {"autoResume": False, "onTimeout": "pause"}
    assert E2b.connect(sandbox.sandbox_id, timeout=600).commands.run("cat /tmp/state").stdout == "kept\n"


def test_a_request_wakes_it(world: World, server: Server) -> None:
    sandbox = world.e2b(timeout=600, lifecycle={"on_timeout": "pause", "auto_resume": True})
    sandbox.commands.run("echo kept > /tmp/state")
    sandbox.pause()
    assert sandbox.commands.run("cat /tmp/state").stdout == "kept\n"
    assert state(server, sandbox.sandbox_id) == "running"


def test_many_requests_wake_it_once(world: World, server: Server) -> None:
    sandbox = world.e2b(timeout=600, lifecycle={"on_timeout": "pause", "auto_resume": True})
    headers = guest_headers(sandbox.sandbox_id, 49983)
    for _ in range(3):
        sandbox.pause()
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: call(server, "GET", "/health", headers=headers).status, range(8)))
        assert answers == [204] * 8
        assert len(vmm_of(server, sandbox.sandbox_id)) == 1


# Crashes


def test_a_paused_sandbox_survives_kill_9(new_server: MakeServer) -> None:
    server = new_server().start()
    sandbox = Cube.create("base", config=server.cube())
    planted = Planted.plant(sandbox)
    assert call(server, "POST", f"/sandboxes/{sandbox.sandbox_id}/pause", {}).status == 204
    doomed = Cube.create("base", config=server.cube())
    assert call(server, "POST", f"/sandboxes/{doomed.sandbox_id}/pause", {}).status == 204
    all_gone(server.kill_9())
    server.start()
    assert state(server, sandbox.sandbox_id) == "paused"
    assert call(server, "DELETE", f"/sandboxes/{doomed.sandbox_id}").status == 204
    planted.find(Cube.connect(sandbox.sandbox_id, config=server.cube()))


def test_kill_9_in_the_middle_of_pauses_and_resumes(new_server: MakeServer) -> None:
    """Paused and whole, or lost with its node and gone: nothing in between, and nothing left."""
    server = new_server().start()
    for number, delay in enumerate((0.02, 0.1, 0.2, 0.4, 0.8)):
        sandbox = Cube.create("base", config=server.cube())
        planted = Planted.plant(sandbox)
        path = f"/sandboxes/{sandbox.sandbox_id}"
        if number % 2:
            assert call(server, "POST", f"{path}/pause", {}).status == 204
            send_and_hang_up(server, request_bytes("POST", f"{path}/resume", {}))
        else:
            send_and_hang_up(server, request_bytes("POST", f"{path}/pause", {}))
        time.sleep(delay)
        all_gone(server.kill_9())
        server.start()
        found = call(server, "GET", path)
        if found.status == 404:
            assert all_sandboxes(server) == []
            continue
        assert found.json()["state"] == "paused"
        planted.find(Cube.connect(sandbox.sandbox_id, config=server.cube()))
        assert call(server, "DELETE", path).status == 204
    assert server.stats()["occupancy_rows"] == 0


def test_a_paused_sandbox_ends_when_its_snapshot_expires(new_server: MakeServer) -> None:
    server = new_server("--retention", "4s").start()
    sandbox = Cube.create("base", config=server.cube())
    assert call(server, "POST", f"/sandboxes/{sandbox.sandbox_id}/pause", {}).status == 204

    def gone() -> Any:
        return call(server, "GET", f"/sandboxes/{sandbox.sandbox_id}").status == 404 or None

    # Retention looks every minute.
    wait_for("the end of what nobody resumed", gone, 90, 0.5)
    wait_for("what held it", lambda: server.stats()["store"]["snapshots"] == 1 or None)
