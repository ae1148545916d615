"""Sandboxes end when they should, and not before; snapshots expire."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime

from cubesandbox import NEVER_TIMEOUT, Sandbox
from cubesandbox._models import SandboxInfo

from harness.planted import run
from harness.rest import all_snapshots, call, guest_headers
from harness.server import Server, wait_for
from harness.world import World

#: Clocks of two processes on one machine agree; what a request takes is not counted against a life.
SLACK_S = 10.0


def gone(server: Server, sandbox_id: str) -> bool:
    return call(server, "GET", f"/sandboxes/{sandbox_id}").status == 404


def seconds_left(info: SandboxInfo) -> float:
    assert info.end_at is not None
    return (info.end_at - datetime.now(UTC)).total_seconds()


def assert_about(seconds: float, expected: float) -> None:
    assert expected - SLACK_S < seconds < expected + SLACK_S


def test_a_sandbox_ends_at_its_timeout_with_everything_it_held(world: World, server: Server) -> None:
    source = world.cube()
    snapshot = world.snapshot(source)
    sandbox = world.cube(snapshot, timeout=4)
    vmm = [vm["pid"] for vm in server.stats()["vms"] if vm["sandbox_id"] == sandbox.sandbox_id]
    assert len(vmm) == 1
    wait_for("the end of the sandbox", lambda: gone(server, sandbox.sandbox_id))
    answer = call(server, "GET", "/health", headers=guest_headers(sandbox.sandbox_id, 49983))
    answer.assert_error(502, "was not found")
    call(server, "DELETE", f"/sandboxes/{sandbox.sandbox_id}").assert_error(404)
    assert vmm[0] not in [process.pid for process in server.vmms()]
    # It no longer occupies what it was made from.
    assert call(server, "DELETE", f"/templates/{snapshot}").status == 204


def test_a_sandbox_lives_at_least_as_long_as_it_was_given(world: World, server: Server) -> None:
    before = time.monotonic()
    sandbox = world.cube(timeout=5)
    wait_for("the end of the sandbox", lambda: gone(server, sandbox.sandbox_id))
    assert time.monotonic() - before >= 5


def test_an_omitted_timeout_is_300_s_on_both_routes(world: World, server: Server) -> None:
    for path in ("/sandboxes", "/v2/sandboxes"):
        answer = call(server, "POST", path, {"templateID": "base"})
        assert answer.status == 201
        sandbox_id = world.keep_id(answer.json()["sandboxID"])
        info = SandboxInfo.from_dict(call(server, "GET", f"/sandboxes/{sandbox_id}").json())
        assert_about(seconds_left(info), 300)


def test_set_timeout_counts_from_now_and_may_shorten(world: World, server: Server) -> None:
    sandbox = world.cube(timeout=1000)
    assert_about(seconds_left(sandbox.get_info()), 1000)
    sandbox.set_timeout(5000)
    assert_about(seconds_left(sandbox.get_info()), 5000)
    sandbox.set_timeout(100)
    assert_about(seconds_left(sandbox.get_info()), 100)
    sandbox.set_timeout(1)
    wait_for("the end of the sandbox", lambda: gone(server, sandbox.sandbox_id))


def test_a_life_that_is_prolonged_in_time_goes_on(world: World, server: Server) -> None:
    sandbox = world.cube(timeout=4)
    sandbox.set_timeout(600)
    run(sandbox, "sleep 6")
    assert not gone(server, sandbox.sandbox_id)


def test_a_timeout_of_0_ends_it_at_once(world: World, server: Server) -> None:
    sandbox = world.cube()
    sandbox.set_timeout(0)
    wait_for("the end of the sandbox", lambda: gone(server, sandbox.sandbox_id))


def test_never_is_a_date_that_nobody_waits_for(world: World, server: Server) -> None:
    sandbox = world.cube(timeout=NEVER_TIMEOUT)
    assert seconds_left(sandbox.get_info()) > 365 * 24 * 3600
    other = world.cube(timeout=5)
    other.set_timeout(NEVER_TIMEOUT)
    assert seconds_left(other.get_info()) > 365 * 24 * 3600
    run(other, "sleep 6")
    assert not gone(server, other.sandbox_id)
    # And back to a life that ends.
    other.set_timeout(100)
    assert_about(seconds_left(other.get_info()), 100)


def test_connect_prolongs_and_never_shortens(world: World) -> None:
    sandbox = world.cube(timeout=1000)
    Sandbox.connect(sandbox.sandbox_id, timeout=10)
    assert_about(seconds_left(sandbox.get_info()), 1000)
    Sandbox.connect(sandbox.sandbox_id)
    assert_about(seconds_left(sandbox.get_info()), 1000)
    Sandbox.connect(sandbox.sandbox_id, timeout=2000)
    assert_about(seconds_left(sandbox.get_info()), 2000)
    Sandbox.connect(sandbox.sandbox_id, timeout=NEVER_TIMEOUT)
    assert seconds_left(sandbox.get_info()) > 365 * 24 * 3600


def test_a_connect_by_e2b_says_200_and_keeps_the_token(world: World, server: Server) -> None:
    sandbox = world.e2b()
    answer = call(server, "POST", f"/v2/sandboxes/{sandbox.sandbox_id}/connect", {"timeout": 60})
    assert answer.status == 200
    assert answer.json()["sandboxID"] == sandbox.sandbox_id
    assert answer.json()["envdAccessToken"] == sandbox._envd_access_token


def test_refreshes_prolong(world: World, server: Server) -> None:
    sandbox = world.cube(timeout=100)
    path = f"/sandboxes/{sandbox.sandbox_id}/refreshes"
    assert call(server, "POST", path, {"duration": 700}).status == 204
    assert_about(seconds_left(sandbox.get_info()), 700)


def test_a_sandbox_that_ends_during_a_command_ends_the_command_too(world: World, server: Server) -> None:
    sandbox = world.cube(timeout=4)
    try:
        done: object = sandbox.commands.run("sleep 100")
    except Exception as error:  # noqa: BLE001 - however the SDK puts it: it must not hang
        done = error
    assert isinstance(done, Exception)
    wait_for("the end of the sandbox", lambda: gone(server, sandbox.sandbox_id))


def test_an_expired_snapshot_is_neither_listed_nor_usable_and_its_name_is_free(
    new_server: Callable[..., Server],
) -> None:
    server = new_server("--retention", "6s").start()
    sandbox = Sandbox.create("base", config=server.cube())
    name = f"brief-{uuid.uuid4().hex[:6]}"
    first = sandbox.create_snapshot(name)
    guest = Sandbox.create(first.snapshot_id, config=server.cube())
    wait_for("the expiry", lambda: first.snapshot_id not in [item["snapshotID"] for item in all_snapshots(server)])
    for reference in (first.snapshot_id, f"default/{name}"):
        call(server, "POST", "/sandboxes", {"templateID": reference}).assert_error(404, reference)
    path = f"/sandboxes/{sandbox.sandbox_id}/rollback"
    call(server, "POST", path, {"snapshotID": first.snapshot_id}).assert_error(404)
    assert sandbox.create_snapshot(name).names == [f"default/{name}:default"]
    # A guest that was made from it goes on, with bytes that it has not touched yet.
    assert run(guest, "find / -xdev -type f -size -64k -print0 2>/dev/null | head -z -n 2000 | xargs -0 cat | wc -c")
    # The template does not expire with the snapshots.
    Sandbox.create("base", config=server.cube()).kill()
