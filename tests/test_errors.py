"""Bad input, bad moments, bad manners: the right code with a message, and the sandbox unharmed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cubesandbox import Sandbox

from harness.planted import evaluate, run
from harness.rest import Answer, all_sandboxes, all_snapshots, call, guest_headers, request_bytes, send_and_hang_up
from harness.server import HOST, Server, wait_for
from harness.world import World

NOBODY = "nosuchsandbox"
NOTHING = "00000000-0000-4000-8000-000000000000"
LONG = "x" * 10_000


@pytest.fixture(scope="module")
def victim(shared: World) -> Sandbox:
    """The sandbox that must not be harmed."""
    sandbox = shared.cube()
    run(sandbox, "echo whole > /root/state")
    evaluate(sandbox, "state = 'whole'\n0")
    return sandbox


@pytest.fixture
def unharmed(victim: Sandbox) -> Iterator[Sandbox]:
    """The same, looked at after the test."""
    yield victim
    assert run(victim, "cat /root/state") == "whole"
    assert evaluate(victim, "state") == "whole"
    assert victim.get_info().state == "running"


# Bodies that say nothing sensible


@pytest.mark.parametrize("path", ["/sandboxes", "/v2/sandboxes"])
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"{", id="cut-off"),
        pytest.param(b"not json", id="words"),
        pytest.param(b'{"templateID": "base",}', id="trailing-comma"),
        pytest.param(b"\xff\xfe\x00", id="not-utf8"),
        pytest.param(b'["base"]', id="a-list"),
        pytest.param(b'"base"', id="a-string"),
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b"", id="empty"),
        pytest.param(b"{}", id="no-template"),
    ],
)
def test_a_create_with_a_malformed_body_is_400(server: Server, path: str, body: bytes) -> None:
    call(server, "POST", path, raw=body).assert_error(400)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("templateID", 7),
        ("templateID", None),
        ("templateID", ""),
        ("templateID", ["base"]),
        ("templateID", "\u0000"),
        ("timeout", "60"),
        ("timeout", 1.5),
        ("timeout", -2),
        ("timeout", 0),
        ("timeout", 1e300),
        ("timeout", {}),
        ("metadata", "k=v"),
        ("metadata", {"k": 1}),
        ("metadata", {"k": {}}),
        ("envVars", ["A=1"]),
        ("envVars", {"A": 1}),
        ("envVars", {"": "x"}),
        ("secure", "yes"),
        ("sandboxID", 5),
        ("sandboxID", "with-dash"),
        ("sandboxID", "UPPER"),
        ("sandboxID", "a" * 1000),
        ("autoPause", "yes"),
        ("lifecycle", "kill"),
        ("lifecycle", {"onTimeout": "explode"}),
    ],
)
def test_a_create_with_a_wrong_type_or_value_is_400_and_names_the_field(
    server: Server, field: str, value: object
) -> None:
    answer = call(server, "POST", "/v2/sandboxes", {"templateID": "base", field: value})
    answer.assert_error(400, field)


@pytest.mark.parametrize(
    ("reference", "code"),
    [
        pytest.param("no-such-template", 404, id="unknown-alias"),
        pytest.param("tpl-0123456789abcdef", 404, id="unknown-template"),
        pytest.param(NOTHING, 404, id="unknown-snapshot"),
        pytest.param("default/no-such", 404, id="unknown-name"),
        pytest.param("default/no-such:tag", 404, id="unknown-tag"),
        pytest.param("default/base", 404, id="a-template-is-no-snapshot-name"),
        pytest.param("other/name:tag", 404, id="another-team"),
        pytest.param("a/b/c", 400, id="two-slashes"),
        pytest.param("/name", 400, id="no-team"),
        pytest.param("default/", 400, id="no-name"),
        pytest.param("default/a:b:c", 400, id="two-tags"),
        pytest.param("default/UPPER CASE", 400, id="not-a-name"),
        pytest.param("../../etc/passwd", 400, id="a-path"),
        pytest.param(LONG, (400, 404), id="ten-kilobytes"),
        pytest.param(f"default/{LONG}", (400, 404), id="ten-kilobytes-with-slash"),
    ],
)
def test_a_create_from_nothing_says_so(server: Server, reference: str, code: Any) -> None:
    words = [reference] if code == 404 else []
    call(server, "POST", "/sandboxes", {"templateID": reference}).assert_error(code, *words)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("envVars", {"A": "1"}),
        ("volumeMounts", [{"name": "v", "path": "/v"}]),
        ("mounts", [{"path": "/v"}]),
        ("image", "debian"),
        ("metadata", {"fc.system": "1"}),
    ],
)
def test_a_create_from_a_snapshot_may_not_set_what_is_captured(
    world: World, server: Server, victim: Sandbox, field: str, value: object
) -> None:
    snapshot = world.snapshot(victim)
    named = "fc.system" if field == "metadata" else field
    call(server, "POST", "/v2/sandboxes", {"templateID": snapshot, field: value}).assert_error(400, named)


def test_a_create_from_a_snapshot_may_set_the_rest_and_empty_values_are_absent(
    world: World, server: Server, unharmed: Sandbox
) -> None:
    snapshot = world.snapshot(unharmed)
    identity = f"own{uuid.uuid4().hex[:12]}"
    body = {
        "templateID": snapshot,
        "sandboxID": identity,
        "timeout": 600,
        "metadata": {"k": "v"},
        "envVars": {},
        "volumeMounts": [],
        "image": "",
        "secure": False,
    }
    answer = call(server, "POST", "/v2/sandboxes", body)
    assert answer.status == 201, answer
    world.keep_id(identity)
    assert answer.json()["sandboxID"] == identity
    assert call(server, "GET", f"/sandboxes/{identity}").json()["metadata"] == {"k": "v"}
    call(server, "POST", "/v2/sandboxes", body).assert_error(409, identity)


# What does not exist


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", f"/sandboxes/{NOBODY}", None),
        ("DELETE", f"/sandboxes/{NOBODY}", None),
        ("POST", f"/sandboxes/{NOBODY}/connect", {}),
        ("POST", f"/v2/sandboxes/{NOBODY}/connect", {"timeout": 60}),
        ("POST", f"/sandboxes/{NOBODY}/timeout", {"timeout": 60}),
        ("POST", f"/sandboxes/{NOBODY}/refreshes", {"duration": 60}),
        ("POST", f"/sandboxes/{NOBODY}/snapshots", {}),
        ("POST", f"/sandboxes/{NOBODY}/rollback", {"snapshotID": NOTHING}),
        ("GET", f"/sandboxes/{NOBODY}/metrics", None),
    ],
)
def test_an_unknown_sandbox_is_404_and_named(server: Server, method: str, path: str, body: object) -> None:
    call(server, method, path, body).assert_error(404, NOBODY)


@pytest.mark.parametrize("identity", ["UPPER", "with-dash", "a" * 10_000, "%00", "..%2f..%2fetc", "%ff"])
def test_what_cannot_be_a_sandbox_id_is_refused(server: Server, identity: str) -> None:
    call(server, "GET", f"/sandboxes/{identity}").assert_error((400, 404))
    call(server, "DELETE", f"/sandboxes/{identity}").assert_error((400, 404))


@pytest.mark.parametrize(
    "reference",
    [
        NOTHING,
        "no-such-template",
        "default/no-such:tag",
        "default%2Fno-such%3Atag",
        "default/no-such",
        "other/name:tag",
        LONG,
    ],
)
def test_deleting_what_is_not_there_is_404(server: Server, reference: str) -> None:
    code = (400, 404) if len(reference) > 1000 else 404
    call(server, "DELETE", f"/templates/{reference}").assert_error(code)


@pytest.mark.parametrize("path", ["/no/such/route", "/sandboxes/x/y/z", "/%2e%2e/%2e%2e"])
def test_an_unknown_route_is_404(server: Server, path: str) -> None:
    call(server, "GET", path).assert_error(404)


@pytest.mark.parametrize(("method", "path"), [("PUT", "/sandboxes"), ("DELETE", "/snapshots"), ("PATCH", "/health")])
def test_a_wrong_method_is_405(server: Server, method: str, path: str) -> None:
    call(server, method, path).assert_error(405)


# Snapshots, rollbacks and timeouts of a sandbox that exists


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("other/name", id="another-team"),
        pytest.param("other/name:tag", id="another-team-with-tag"),
        pytest.param("a/b/c", id="two-slashes"),
        pytest.param("with space", id="space"),
        pytest.param("name:", id="empty-tag"),
        pytest.param(":tag", id="empty-name"),
        pytest.param("a:b:c", id="two-tags"),
        pytest.param("na.me", id="dot-in-short"),
        pytest.param("näme", id="umlaut"),
        pytest.param("name:täg", id="umlaut-in-tag"),
        pytest.param(LONG, id="ten-kilobytes"),
        pytest.param(f"name:{LONG}", id="ten-kilobytes-of-tag"),
        pytest.param(7, id="a-number"),
        pytest.param(["name"], id="a-list"),
    ],
)
def test_a_snapshot_with_a_bad_name_is_400(server: Server, unharmed: Sandbox, name: object) -> None:
    before = all_snapshots(server)
    call(server, "POST", f"/sandboxes/{unharmed.sandbox_id}/snapshots", {"name": name}).assert_error(400)
    assert all_snapshots(server) == before


def test_a_snapshot_with_a_malformed_body_is_400(server: Server, unharmed: Sandbox) -> None:
    path = f"/sandboxes/{unharmed.sandbox_id}/snapshots"
    for body in (b"{", b"[]", b"7"):
        call(server, "POST", path, raw=body).assert_error(400)


def test_a_taken_name_is_409_and_overwrites_nothing(world: World, server: Server, unharmed: Sandbox) -> None:
    first = world.snapshot(unharmed, "taken:v1")
    path = f"/sandboxes/{unharmed.sandbox_id}/snapshots"
    for name in ("taken:v1", "TAKEN:V1", " taken:v1 "):
        call(server, "POST", path, {"name": name}).assert_error(409, "taken")
    listed = call(server, "GET", "/snapshots?name=taken").json()
    assert [item["snapshotID"] for item in listed] == [first]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, 400),
        ({"snapshotID": 7}, 400),
        ({"snapshotID": ""}, 400),
        ({"snapshotID": None}, 400),
        ({"snapshotID": NOTHING}, 404),
        ({"snapshotID": "default/no-such"}, 404),
        ({"snapshotID": "no-such"}, (400, 404)),
        ({"snapshotID": "base"}, (400, 404)),
        ({"snapshotID": LONG}, (400, 404)),
    ],
)
def test_a_rollback_to_nothing_is_refused(server: Server, unharmed: Sandbox, body: object, code: Any) -> None:
    call(server, "POST", f"/sandboxes/{unharmed.sandbox_id}/rollback", body).assert_error(code)


@pytest.mark.parametrize(
    ("action", "body"),
    [
        ("timeout", {}),
        ("timeout", {"timeout": "60"}),
        ("timeout", {"timeout": -2}),
        ("timeout", {"timeout": 1.5}),
        ("timeout", {"timeout": 10**18}),
        ("connect", {"timeout": 0}),
        ("connect", {"timeout": -2}),
        ("connect", {"timeout": "60"}),
        ("refreshes", {"duration": -1}),
        ("refreshes", {"duration": "60"}),
    ],
)
def test_a_bad_timeout_is_400_and_changes_nothing(server: Server, unharmed: Sandbox, action: str, body: object) -> None:
    ends = unharmed.get_info().end_at
    call(server, "POST", f"/sandboxes/{unharmed.sandbox_id}/{action}", body).assert_error(400)
    assert unharmed.get_info().end_at == ends


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=101", "limit=-1", "limit=many", "nextToken=rubbish", "nextToken=%00"],
)
@pytest.mark.parametrize("path", ["/snapshots", "/v2/sandboxes"])
def test_a_bad_page_is_400(server: Server, path: str, query: str) -> None:
    call(server, "GET", f"{path}?{query}").assert_error(400)


def test_filters_that_find_nothing_are_no_error(server: Server) -> None:
    for query in (f"sandboxID={NOBODY}", "name=no-such", "name=no-such:tag", "limit=1&name=no-such"):
        answer = call(server, "GET", f"/snapshots?{query}")
        assert (answer.status, answer.json()) == (200, [])
        assert "x-next-token" not in answer.headers
    call(server, "GET", "/v2/sandboxes?state=sleeping").assert_error(400)


# Size


def resident_peak_kib(server: Server) -> int:
    status = Path(f"/proc/{server.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found.group(1))


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_body_of_100_mb_is_413_and_never_in_memory(server: Server, unharmed: Sandbox, framing: str) -> None:
    size, piece = 100_000_000, b" " * 1_000_000
    head = f"POST /sandboxes/{unharmed.sandbox_id}/snapshots HTTP/1.1\r\nHost: {HOST}\r\n"
    head += "Content-Type: application/json\r\nX-API-Key: any\r\n"
    head += f"Content-Length: {size}\r\n\r\n" if framing == "length" else "Transfer-Encoding: chunked\r\n\r\n"
    before = resident_peak_kib(server)
    with socket.create_connection((HOST, server.port), timeout=60) as sock:
        sock.sendall(head.encode())
        answer = bytearray()
        try:
            for _ in range(size // len(piece)):
                sock.sendall(piece if framing == "length" else b"%x\r\n%s\r\n" % (len(piece), piece))
        except (BrokenPipeError, ConnectionResetError):
            pass  # it need not take the rest; it must have answered
        # A body that was taken to its end leaves the connection open.
        while not answer.endswith(b"}") and (data := _receive(sock)):
            answer += data
    status, _, body = bytes(answer).partition(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 413"), status[:200]
    assert json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])["code"] == 413
    assert resident_peak_kib(server) - before < 50_000


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(65536)
    except ConnectionResetError:
        return b""


def test_headers_without_end_are_refused(server: Server) -> None:
    with socket.create_connection((HOST, server.port), timeout=60) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        try:
            for number in range(2000):
                sock.sendall(f"X-Filler-{number}: {'x' * 1000}\r\n".encode())
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = _receive(sock)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert call(server, "GET", "/health").status == 200


def test_what_is_not_http_does_not_disturb(server: Server) -> None:
    for rubbish in (b"\x16\x03\x01\x02\x00\x01", b"\r\n" * 1000, b"GET\r\n\r\n", b"\x00" * 1000):
        with socket.create_connection((HOST, server.port), timeout=60) as sock:
            sock.sendall(rubbish)
            sock.shutdown(socket.SHUT_WR)
            while _receive(sock):
                pass
    assert call(server, "GET", "/health").status == 200


# A sandbox that is dead


def test_a_dead_sandbox_is_404_for_the_api_and_502_for_its_ports(world: World, server: Server) -> None:
    sandbox = world.cube()
    identity = sandbox.sandbox_id
    snapshot = world.snapshot(sandbox)
    assert call(server, "DELETE", f"/sandboxes/{identity}").status == 204
    call(server, "DELETE", f"/sandboxes/{identity}").assert_error(404, identity)
    call(server, "GET", f"/sandboxes/{identity}").assert_error(404, identity)
    call(server, "POST", f"/sandboxes/{identity}/snapshots", {}).assert_error(404, identity)
    call(server, "POST", f"/sandboxes/{identity}/rollback", {"snapshotID": snapshot}).assert_error(404, identity)
    call(server, "POST", f"/sandboxes/{identity}/timeout", {"timeout": 60}).assert_error(404, identity)
    call(server, "GET", "/health", headers=guest_headers(identity, 49983)).assert_error(502, "was not found")
    assert identity not in [item["sandboxID"] for item in all_sandboxes(server)]


def test_a_vmm_that_dies_takes_its_sandbox_along_and_no_other(world: World, server: Server, unharmed: Sandbox) -> None:
    sandbox = world.cube()
    (vmm,) = [vm for vm in server.stats()["vms"] if vm["sandbox_id"] == sandbox.sandbox_id]
    os.kill(vmm["pid"], signal.SIGKILL)
    path = f"/sandboxes/{sandbox.sandbox_id}"
    wait_for("the sandbox to be gone", lambda: call(server, "GET", path).status == 404)
    call(server, "GET", "/health", headers=guest_headers(sandbox.sandbox_id, 49983)).assert_error(502)
    call(server, "POST", f"{path}/snapshots", {}).assert_error((404, 409))


# Two operations at once


def at_once(*requests: tuple[str, str, object], server: Server) -> list[Answer]:
    """Sends all of them at the same moment."""
    barrier = threading.Barrier(len(requests))

    def send(request: tuple[str, str, object]) -> Answer:
        method, path, body = request
        barrier.wait()
        return call(server, method, path, body)

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(send, requests))


def check_conflicts(answers: list[Answer], success: int) -> list[Answer]:
    """Each answer is the success or a conflict that says what to do; at least one is the success. Those that are."""
    for answer in answers:
        if answer.status != success:
            answer.assert_error((409, 503))
            assert answer.headers.get("should-retry") in ("true", "false")
    winners = [answer for answer in answers if answer.status == success]
    assert winners, answers
    return winners


def test_two_snapshots_at_once(world: World, server: Server, unharmed: Sandbox) -> None:
    path = f"/sandboxes/{unharmed.sandbox_id}/snapshots"
    for _ in range(3):
        answers = at_once(("POST", path, {}), ("POST", path, {}), server=server)
        for winner in check_conflicts(answers, 201):
            snapshot = world.keep_snapshot(winner.json()["snapshotID"])
            assert run(world.cube(snapshot), "cat /root/state") == "whole"


def test_two_snapshots_of_two_sandboxes_with_one_name_at_once(world: World, server: Server, unharmed: Sandbox) -> None:
    other = world.cube()
    paths = [f"/sandboxes/{sandbox.sandbox_id}/snapshots" for sandbox in (unharmed, other)]
    answers = at_once(*[("POST", path, {"name": "race"}) for path in paths], server=server)
    winners = [answer for answer in answers if answer.status == 201]
    assert len(winners) == 1, answers
    world.keep_snapshot(winners[0].json()["snapshotID"])
    assert len(call(server, "GET", "/snapshots?name=race").json()) == 1


def test_snapshot_and_rollback_at_once(world: World, server: Server) -> None:
    sandbox = world.cube()
    run(sandbox, "echo whole > /root/state")
    target = world.snapshot(sandbox)
    base = f"/sandboxes/{sandbox.sandbox_id}"
    answers = at_once(
        ("POST", f"{base}/snapshots", {}), ("POST", f"{base}/rollback", {"snapshotID": target}), server=server
    )
    assert {201, 200} & {answer.status for answer in answers}, answers
    for answer in answers:
        if answer.status == 201:
            world.keep_snapshot(answer.json()["snapshotID"])
        elif answer.status != 200:
            answer.assert_error((409, 503))
    assert run(sandbox, "cat /root/state") == "whole"


def test_two_rollbacks_at_once(world: World, server: Server) -> None:
    sandbox = world.cube()
    run(sandbox, "echo one > /root/state")
    first = world.snapshot(sandbox)
    run(sandbox, "echo two > /root/state")
    second = world.snapshot(sandbox)
    path = f"/sandboxes/{sandbox.sandbox_id}/rollback"
    for _ in range(2):
        answers = at_once(("POST", path, {"snapshotID": first}), ("POST", path, {"snapshotID": second}), server=server)
        check_conflicts(answers, 200)
        assert run(sandbox, "cat /root/state") in ("one", "two")


def killed(server: Server, path: str) -> bool:
    return call(server, "DELETE", path).status == 204


def test_kill_in_the_middle_of_a_snapshot(world: World, server: Server) -> None:
    for _ in range(3):
        sandbox = world.cube()
        run(sandbox, "head -c 20000000 /dev/urandom > /dev/shm/dirty")
        base = f"/sandboxes/{sandbox.sandbox_id}"
        snapshot, kill = at_once(("POST", f"{base}/snapshots", {}), ("DELETE", base, None), server=server)
        if snapshot.status == 201:
            world.keep_snapshot(snapshot.json()["snapshotID"])
        else:
            snapshot.assert_error((404, 409))
        if kill.status != 204:
            kill.assert_error(409)
            assert kill.headers["should-retry"] == "true"
            assert int(kill.headers["retry-after"]) >= 0
            wait_for("the kill", partial(killed, server, base))


def test_two_kills_at_once_one_of_which_is_late(world: World, server: Server) -> None:
    sandbox = world.cube()
    path = f"/sandboxes/{sandbox.sandbox_id}"
    answers = at_once(("DELETE", path, None), ("DELETE", path, None), ("DELETE", path, None), server=server)
    statuses = sorted(answer.status for answer in answers)
    assert statuses[0] == 204
    assert set(statuses[1:]) <= {404, 409}, statuses


def test_creates_from_a_snapshot_that_is_being_deleted(world: World, server: Server, unharmed: Sandbox) -> None:
    snapshot = world.snapshot(unharmed)
    requests: list[tuple[str, str, object]] = [("POST", "/sandboxes", {"templateID": snapshot}) for _ in range(3)]
    *creates, delete = at_once(*requests, ("DELETE", f"/templates/{snapshot}", None), server=server)
    alive = [answer for answer in creates if answer.status == 201]
    for answer in alive:
        world.keep_id(answer.json()["sandboxID"])
        sandbox = Sandbox(answer.json(), server.cube())
        assert run(sandbox, "cat /root/state") == "whole"
    for answer in creates:
        if answer.status != 201:
            answer.assert_error((404, 409))
    if alive:
        delete.assert_error(409)
    else:
        assert delete.status == 204


def test_one_id_asked_for_twice_at_once(world: World, server: Server) -> None:
    identity = f"twin{uuid.uuid4().hex[:10]}"
    world.keep_id(identity)
    body = {"templateID": "base", "sandboxID": identity}
    answers = at_once(*[("POST", "/sandboxes", body)] * 3, server=server)
    assert sorted(answer.status for answer in answers) == [201, 409, 409], answers


# Idempotency


def test_a_create_repeated_with_its_key_answers_the_same_sandbox(world: World, server: Server) -> None:
    key = {"Idempotency-Key": uuid.uuid4().hex}
    body = {"templateID": "base", "metadata": {"k": "1"}}
    first = call(server, "POST", "/v2/sandboxes", body, headers=key)
    assert first.status == 201
    identity = world.keep_id(first.json()["sandboxID"])
    again = call(server, "POST", "/v2/sandboxes", body, headers=key)
    assert again.status == 201
    assert again.json() == first.json()
    call(server, "POST", "/v2/sandboxes", {**body, "metadata": {"k": "2"}}, headers=key).assert_error(409)
    assert [item["sandboxID"] for item in all_sandboxes(server)].count(identity) == 1


def test_a_snapshot_repeated_with_its_key_answers_the_same_snapshot(
    world: World, server: Server, unharmed: Sandbox
) -> None:
    key = {"Idempotency-Key": uuid.uuid4().hex}
    path = f"/sandboxes/{unharmed.sandbox_id}/snapshots"
    first = call(server, "POST", path, {"name": "keyed"}, headers=key)
    assert first.status == 201, first
    world.keep_snapshot(first.json()["snapshotID"])
    again = call(server, "POST", path, {"name": "keyed"}, headers=key)
    assert (again.status, again.json()) == (201, first.json())
    call(server, "POST", path, {"name": "other"}, headers=key).assert_error(409)


def test_creates_with_one_key_at_once_make_one_sandbox(world: World, server: Server) -> None:
    key = {"Idempotency-Key": uuid.uuid4().hex}
    mark = uuid.uuid4().hex
    body = {"templateID": "base", "metadata": {"mark": mark}}
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: call(server, "POST", "/v2/sandboxes", body, headers=key), range(4)))
    made = {answer.json()["sandboxID"] for answer in answers if answer.status == 201}
    for identity in made:
        world.keep_id(identity)
    assert len(made) == 1, answers
    assert len(all_sandboxes(server, metadata=f"mark={mark}")) == 1


# A client that hangs up


def test_a_client_that_hangs_up_during_a_snapshot(world: World, server: Server, unharmed: Sandbox) -> None:
    identity = unharmed.sandbox_id
    before = {item["snapshotID"] for item in all_snapshots(server)}
    send_and_hang_up(server, request_bytes("POST", f"/sandboxes/{identity}/snapshots", {"name": "hung-up"}))
    # The operation goes on: the snapshot appears although nobody heard of it.
    found = wait_for("the snapshot", lambda: {item["snapshotID"] for item in all_snapshots(server)} - before or None)
    assert len(found) == 1
    world.keep_snapshot(next(iter(found)))
    assert run(world.cube("default/hung-up"), "cat /root/state") == "whole"


def test_a_client_that_hangs_up_during_a_rollback(world: World, server: Server) -> None:
    sandbox = world.cube()
    run(sandbox, "echo old > /root/state")
    snapshot = world.snapshot(sandbox)
    run(sandbox, "echo new > /root/state")
    path = f"/sandboxes/{sandbox.sandbox_id}/rollback"
    send_and_hang_up(server, request_bytes("POST", path, {"snapshotID": snapshot}))

    def state() -> str | None:
        # A connection that the rollback cuts off is no answer yet.
        try:
            return run(Sandbox.connect(sandbox.sandbox_id), "cat /root/state")
        except Exception:  # noqa: BLE001
            return None

    wait_for("the rollback", lambda: state() == "old")


def test_a_client_that_hangs_up_during_a_create_leaves_a_normal_sandbox(world: World, server: Server) -> None:
    mark = uuid.uuid4().hex
    body = {"templateID": "base", "timeout": 600, "metadata": {"mark": mark}}
    send_and_hang_up(server, request_bytes("POST", "/sandboxes", body))
    found = wait_for("the sandbox", lambda: all_sandboxes(server, metadata=f"mark={mark}") or None)
    assert len(found) == 1
    world.keep_id(found[0]["sandboxID"])
    assert run(Sandbox.connect(found[0]["sandboxID"]), "echo well") == "well"


def test_a_client_that_hangs_up_within_its_body_has_asked_for_nothing(server: Server, unharmed: Sandbox) -> None:
    snapshots = all_snapshots(server)
    sandboxes = {item["sandboxID"] for item in all_sandboxes(server)}
    for path in (f"/sandboxes/{unharmed.sandbox_id}/snapshots", "/sandboxes"):
        request = request_bytes("POST", path, {"templateID": "base", "name": "half"})
        send_and_hang_up(server, request[:-10])
    run(unharmed, "sleep 1")
    assert all_snapshots(server) == snapshots
    assert {item["sandboxID"] for item in all_sandboxes(server)} == sandboxes


def test_a_client_that_hangs_up_during_a_command_does_not_end_it(unharmed: Sandbox, server: Server) -> None:
    import struct

    command = {"process": {"cmd": "/bin/bash", "args": ["-l", "-c", "sleep 1; echo done > /root/hung"]}}
    payload = json.dumps(command).encode()
    frame = struct.pack(">BI", 0, len(payload)) + payload
    head = (
        f"POST /process.Process/Start HTTP/1.1\r\nHost: 49983-{unharmed.sandbox_id}.cube.app\r\n"
        "Authorization: Basic cm9vdDo=\r\nContent-Type: application/connect+json\r\n"
        f"Connect-Protocol-Version: 1\r\nContent-Length: {len(frame)}\r\n\r\n"
    )
    with socket.create_connection((HOST, server.port), timeout=60) as sock:
        sock.sendall(head.encode() + frame)
        assert sock.recv(1), "the stream has begun"
    run(unharmed, "while [ ! -s /root/hung ]; do sleep 0.05; done; rm /root/hung")
