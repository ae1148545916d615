"""The way into a sandbox's ports: by host name and by header, in both directions, for as long as it takes."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import socket
import threading
from collections.abc import Mapping

import pytest
from cubesandbox import Sandbox
from websockets.sync.client import ClientConnection, connect

from harness.planted import run, start, upload
from harness.rest import Answer, call, guest_headers, guest_host
from harness.server import HOST, Server, wait_for
from harness.world import World

PORT = 8000
MEGABYTE = 1 << 20
#: What `/bytes` of the guest's server repeats.
PATTERN = bytes(range(256)) * 256


@pytest.fixture(scope="module")
def guest(shared: World) -> Sandbox:
    """A sandbox with `tests/guest/echo.py` on its port 8000."""
    sandbox = shared.cube()
    serve(sandbox)
    return sandbox


def serve(sandbox: Sandbox) -> None:
    upload(sandbox, "echo.py")
    start(sandbox, f"python3 /root/echo.py {PORT}")
    run(sandbox, f"while ! (echo > /dev/tcp/127.0.0.1/{PORT}) 2>/dev/null; do sleep 0.05; done")


@pytest.fixture(params=["host", "header"])
def route(request: pytest.FixtureRequest, guest: Sandbox) -> dict[str, str]:
    """Headers that lead to the guest's server."""
    return by(request.param, guest.sandbox_id, PORT)


def by(kind: str, sandbox_id: str, port: int) -> dict[str, str]:
    return {"Host": guest_host(sandbox_id, port)} if kind == "host" else guest_headers(sandbox_id, port)


def echo(answer: Answer) -> dict[str, object]:
    assert answer.status == 200, answer
    value: dict[str, object] = answer.json()
    return value


# Where requests go


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_every_method_arrives_with_path_query_headers_and_body(
    server: Server, route: Mapping[str, str], method: str
) -> None:
    body = None if method == "GET" else bytes(range(256))
    sent = {**route, "X-Custom": "a, b", "Cookie": "c=1; d=2"}
    answer = call(server, method, "/echo?q=%2F%20x&q=2", raw=body, headers=sent)
    found = echo(answer)
    assert found["method"] == method
    assert found["path"] == "/echo?q=%2F%20x&q=2"
    headers = found["headers"]
    assert isinstance(headers, dict)
    assert headers["x-custom"] == "a, b"
    assert headers["cookie"] == "c=1; d=2"
    assert base64.b64decode(str(found["body"])) == (body or b"")
    assert answer.headers["x-from-guest"] == "yes"


def test_head_and_statuses_without_a_body(server: Server, route: Mapping[str, str]) -> None:
    head = call(server, "HEAD", "/echo", headers=route)
    assert (head.status, head.body) == (200, b"")
    assert int(head.headers["content-length"]) > 0
    for code in (204, 304, 404, 418, 500, 503):
        assert call(server, "GET", f"/status?code={code}", headers=route).status == code


def test_an_unknown_sandbox_and_a_closed_port_are_told_apart(server: Server, guest: Sandbox) -> None:
    for kind in ("host", "header"):
        call(server, "GET", "/", headers=by(kind, "nosuchsandbox", PORT)).assert_error(502, "was not found")
        call(server, "GET", "/", headers=by(kind, guest.sandbox_id, 9)).assert_error(502, "port is not open")


def test_the_control_port_of_the_agent_is_closed_to_clients(server: Server, guest: Sandbox) -> None:
    for kind in ("host", "header"):
        for path in ("/health", "/init", "/freeze"):
            answer = call(server, "POST", path, {}, headers=by(kind, guest.sandbox_id, 49982))
            answer.assert_error(502, "port is not open")


def test_the_agent_takes_no_new_identity_from_a_client(server: Server, guest: Sandbox) -> None:
    before = run(guest, "hostname; cat /etc/machine-id")
    clock = int(run(guest, "date +%s"))
    body = {"sandbox_id": "other", "hostname": "other", "unix_ns": 0, "access_token": "x", "env": {"A": "1"}}
    answer = call(server, "POST", "/init", body, headers=guest_headers(guest.sandbox_id, 49983))
    assert answer.status in (401, 403, 404, 405, 501, 502)
    assert run(guest, "hostname; cat /etc/machine-id") == before
    assert int(run(guest, "date +%s")) >= clock


def test_health_is_the_server_s_or_the_guest_s(server: Server, guest: Sandbox) -> None:
    assert call(server, "GET", "/health").status == 200
    for kind in ("host", "header"):
        assert call(server, "GET", "/health", headers=by(kind, guest.sandbox_id, 49983)).status == 204


@pytest.mark.parametrize("port", ["0", "65536", "99999999999", "http", "", "-1"])
def test_a_port_that_is_none(server: Server, guest: Sandbox, port: str) -> None:
    headers = {"E2b-Sandbox-Id": guest.sandbox_id, "E2b-Sandbox-Port": port}
    call(server, "GET", "/", headers=headers).assert_error((400, 502))


def test_a_host_name_with_port_and_in_capitals(server: Server, guest: Sandbox) -> None:
    name = guest_host(guest.sandbox_id, PORT)
    for host in (f"{name}:{server.port}", name.upper()):
        echo(call(server, "GET", "/echo", headers={"Host": host}))


# What flows


def test_answers_are_not_held_back(server: Server, guest: Sandbox, route: Mapping[str, str]) -> None:
    """The guest sends the second part only after the first has been seen here."""
    connection = http.client.HTTPConnection(HOST, server.port, timeout=60)
    connection.request("GET", "/drip", headers=dict(route))
    response = connection.getresponse()
    assert response.read1() == b"first\n"
    assert call(server, "GET", "/release", headers=guest_headers(guest.sandbox_id, PORT)).status == 200
    assert response.read() == b"second\n"
    connection.close()


def test_a_chunked_upload(server: Server, route: Mapping[str, str]) -> None:
    pieces = [bytes([n % 256]) * (1 + 997 * n) for n in range(60)]
    answer = echo(call(server, "POST", "/digest", raw=iter(pieces), headers=route))
    whole = b"".join(pieces)
    assert answer == {"sha256": hashlib.sha256(whole).hexdigest(), "size": len(whole)}


def test_an_upload_is_not_collected_before_it_is_passed_on(server: Server, guest: Sandbox) -> None:
    """The body's second half is sent only after the guest has been seen to have the first."""
    listener = (
        "import socket, sys\n"
        "s = socket.create_server(('', 8077)); c, _ = s.accept(); data = b''\n"
        "while b'half' not in data: data += c.recv(65536)\n"
        "open('/root/half', 'w').write('x')\n"
        "while b'whole' not in data: data += c.recv(65536)\n"
        "c.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\nConnection: close\\r\\n\\r\\nok'); c.close()\n"
    )
    guest.files.write("/root/listener.py", listener)
    start(guest, "python3 /root/listener.py")
    run(guest, "while ! grep -q :1F8D /proc/net/tcp; do sleep 0.05; done")
    head = f"POST / HTTP/1.1\r\nHost: {guest_host(guest.sandbox_id, 8077)}\r\nContent-Length: 9\r\n\r\n"
    with socket.create_connection((HOST, server.port), timeout=60) as sock:
        sock.sendall(head.encode() + b"half")
        run(guest, "while [ ! -e /root/half ]; do sleep 0.05; done; rm /root/half")
        sock.sendall(b"whole")
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")


def test_megabytes_up(server: Server, route: Mapping[str, str]) -> None:
    data = PATTERN * (8 * MEGABYTE // len(PATTERN))
    answer = echo(call(server, "POST", "/digest", raw=data, headers=route))
    assert answer == {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


def test_megabytes_down(server: Server, route: Mapping[str, str]) -> None:
    size = 8 * MEGABYTE + 123
    answer = call(server, "GET", f"/bytes?n={size}", headers=route)
    expected = (PATTERN * (size // len(PATTERN) + 1))[:size]
    assert len(answer.body) == size
    assert hashlib.sha256(answer.body).digest() == hashlib.sha256(expected).digest()


def test_megabytes_as_a_file_both_ways(guest: Sandbox) -> None:
    text = "0123456789abcdef\n" * (4 * MEGABYTE // 17)
    guest.files.write("/root/large", text)
    assert run(guest, "sha256sum < /root/large").split()[0] == hashlib.sha256(text.encode()).hexdigest()
    assert guest.files.read("/root/large") == text


def test_a_reader_that_goes_away_ends_nothing_else(server: Server, guest: Sandbox, route: Mapping[str, str]) -> None:
    with socket.create_connection((HOST, server.port), timeout=60) as sock:
        lines = "".join(f"{name}: {value}\r\n" for name, value in {"Host": "x", **route}.items())
        sock.sendall(f"GET /bytes?n=50000000 HTTP/1.1\r\n{lines}\r\n".encode())
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")
    echo(call(server, "GET", "/echo", headers=route))


def test_many_requests_on_one_connection(server: Server, route: Mapping[str, str]) -> None:
    connection = http.client.HTTPConnection(HOST, server.port, timeout=60)
    for number in range(20):
        connection.request("POST", f"/echo?{number}", body=str(number), headers=dict(route))
        response = connection.getresponse()
        found = json.loads(response.read())
        assert found["path"] == f"/echo?{number}"
        assert base64.b64decode(found["body"]) == str(number).encode()
    connection.close()


def test_one_connection_for_several_guests_and_the_api(world: World, server: Server, guest: Sandbox) -> None:
    other = world.cube()
    serve(other)
    connection = http.client.HTTPConnection(HOST, server.port, timeout=60)
    for sandbox_id in (guest.sandbox_id, None, other.sandbox_id, guest.sandbox_id, None):
        headers = {"X-API-Key": "any"} | (guest_headers(sandbox_id, 49983) if sandbox_id else {})
        path = "/health" if sandbox_id else f"/sandboxes/{other.sandbox_id}"
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        response.read()
        assert response.status == (204 if sandbox_id else 200)
    connection.close()


def test_many_requests_at_once(server: Server, route: Mapping[str, str]) -> None:
    answers: dict[int, object] = {}

    def one(number: int) -> None:
        answers[number] = echo(call(server, "GET", f"/echo?n={number}", headers=route))["path"]

    threads = [threading.Thread(target=one, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: f"/echo?n={number}" for number in range(12)}


# WebSocket


def websocket(server: Server, route: Mapping[str, str]) -> ClientConnection:
    sock = socket.create_connection((HOST, server.port), timeout=60)
    headers = dict(route)
    name = headers.pop("Host", HOST)
    return connect(f"ws://{name}/ws", sock=sock, additional_headers=headers, max_size=None, compression=None)


def test_websocket_messages_of_any_kind_and_size(server: Server, route: Mapping[str, str]) -> None:
    with websocket(server, route) as ws:
        for message in ("hello", "", "ü" * 1000, b"\x00\xff", PATTERN, PATTERN * 16):
            ws.send(message)
            assert ws.recv(timeout=60) == message
        ws.send(iter(["in ", "three ", "pieces"]))
        assert ws.recv(timeout=60) == "in three pieces"
        assert ws.ping().wait(60)


def test_a_websocket_that_is_closed_by_the_client(server: Server, route: Mapping[str, str]) -> None:
    ws = websocket(server, route)
    ws.send("before")
    assert ws.recv(timeout=60) == "before"
    ws.close(1000)
    assert ws.close_code == 1000
    echo(call(server, "GET", "/echo", headers=route))


def test_websockets_to_several_guests_at_once(world: World, server: Server, guest: Sandbox) -> None:
    other = world.cube()
    serve(other)
    with (
        websocket(server, guest_headers(guest.sandbox_id, PORT)) as first,
        websocket(server, guest_headers(other.sandbox_id, PORT)) as second,
    ):
        for number in range(10):
            first.send(f"first {number}")
            second.send(f"second {number}")
            assert second.recv(timeout=60) == f"second {number}"
            assert first.recv(timeout=60) == f"first {number}"


# Connections and what happens to the guest


def test_a_snapshot_leaves_open_connections_alone(world: World, server: Server, guest: Sandbox) -> None:
    with websocket(server, guest_headers(guest.sandbox_id, PORT)) as ws:
        ws.send("before")
        assert ws.recv(timeout=60) == "before"
        world.snapshot(guest)
        ws.send("after")
        assert ws.recv(timeout=60) == "after"


def test_a_server_in_the_guest_answers_in_every_copy(world: World, server: Server, guest: Sandbox) -> None:
    snapshot = world.snapshot(guest)
    for _ in range(2):
        copy = world.cube(snapshot)
        echo(call(server, "GET", "/echo", headers=guest_headers(copy.sandbox_id, PORT)))
    echo(call(server, "GET", "/echo", headers=guest_headers(guest.sandbox_id, PORT)))


@pytest.fixture
def at_snapshot(world: World) -> tuple[Sandbox, str]:
    """A sandbox with the echo server, and a snapshot of it."""
    sandbox = world.cube()
    serve(sandbox)
    return sandbox, world.snapshot(sandbox)


def test_a_rollback_ends_old_connections_and_takes_new_ones(server: Server, at_snapshot: tuple[Sandbox, str]) -> None:
    sandbox, snapshot = at_snapshot
    route = guest_headers(sandbox.sandbox_id, PORT)
    ws = websocket(server, route)
    ws.send("before")
    assert ws.recv(timeout=60) == "before"
    connection = http.client.HTTPConnection(HOST, server.port, timeout=60)
    connection.request("GET", "/drip", headers=route)
    response = connection.getresponse()
    assert response.read1() == b"first\n"
    sandbox.rollback(snapshot)
    # The end, not silence: neither waits for its timeout.
    with pytest.raises(Exception, match="(?i)clos|reset|incomplete|frame"):
        ws.recv(timeout=45)
    with pytest.raises((http.client.HTTPException, OSError)):
        response.read()
    connection.close()
    echo(call(server, "GET", "/echo", headers=route))
    with websocket(server, route) as again:
        again.send("after")
        assert again.recv(timeout=60) == "after"


def test_requests_during_a_rollback_are_answered_by_the_old_or_the_new_guest(
    server: Server, at_snapshot: tuple[Sandbox, str]
) -> None:
    sandbox, snapshot = at_snapshot
    route = guest_headers(sandbox.sandbox_id, PORT)
    done = threading.Event()
    statuses: list[int | str] = []

    def ask() -> None:
        while not done.is_set():
            try:
                statuses.append(call(server, "GET", "/echo", headers=route).status)
            except (http.client.HTTPException, OSError) as error:
                statuses.append(type(error).__name__)

    asking = threading.Thread(target=ask)
    asking.start()
    for _ in range(2):
        sandbox.rollback(snapshot)
    done.set()
    asking.join()
    # A request that the switch cut off may fail; none may be told that there is no such sandbox, or hang.
    assert statuses
    assert 404 not in statuses
    assert call(server, "GET", "/echo", headers=route).status == 200


def test_a_kill_ends_open_connections(world: World, server: Server) -> None:
    sandbox = world.cube()
    serve(sandbox)
    ws = websocket(server, guest_headers(sandbox.sandbox_id, PORT))
    ws.send("before")
    assert ws.recv(timeout=60) == "before"
    sandbox.kill()
    with pytest.raises(Exception, match="(?i)clos|reset|incomplete|frame"):
        ws.recv(timeout=45)
    answer = call(server, "GET", "/echo", headers=guest_headers(sandbox.sandbox_id, PORT))
    answer.assert_error(502, "was not found")


def test_a_port_that_opens_late_is_reached(world: World, server: Server) -> None:
    sandbox = world.cube()
    route = guest_headers(sandbox.sandbox_id, PORT)
    call(server, "GET", "/echo", headers=route).assert_error(502, "port is not open")
    serve(sandbox)
    wait_for("the port", lambda: call(server, "GET", "/echo", headers=route).status == 200)
