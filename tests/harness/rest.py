"""HTTP as it is on the wire, for what the SDKs would never send: broken JSON, raw slashes, bodies that never end."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.server import DOMAIN, HOST, Server

AGENT_PORT = 49983
INTERPRETER_PORT = 49999


@dataclass(frozen=True)
class Answer:
    """A complete response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def timing(self) -> dict[str, float]:
        """The `Server-Timing` header: phase to milliseconds."""
        phases: dict[str, float] = {}
        for entry in self.headers.get("server-timing", "").split(","):
            name, *params = [part.strip() for part in entry.split(";")]
            for param in params:
                if param.startswith("dur="):
                    phases[name] = float(param[len("dur=") :])
        return phases

    def assert_error(self, code: int | tuple[int, ...], *words: str) -> None:
        """An error as the API promises it: the code also in the JSON, a message for people that has the words."""
        codes = (code,) if isinstance(code, int) else code
        assert self.status in codes, f"{self.status} instead of {codes}: {self.body[:500]!r}"
        body = self.json()
        assert body["code"] == self.status, body
        assert isinstance(body["message"], str), body
        assert body["message"].strip(), body
        for word in words:
            assert word.lower() in body["message"].lower(), f"{word!r} is not in {body['message'][:500]!r}"


def call(
    server: Server,
    method: str,
    path: str,
    body: object = None,
    *,
    raw: bytes | Iterable[bytes] | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> Answer:
    """One request on a connection of its own. `body` is sent as JSON, `raw` as it is; the path is not touched."""
    sent = {"X-API-Key": "any", **(headers or {})}
    payload = raw
    if body is not None:
        payload = json.dumps(body).encode()
    if payload is not None:
        sent.setdefault("Content-Type", "application/json")
    connection = http.client.HTTPConnection(HOST, server.port, timeout=timeout)
    try:
        connection.request(method, path, body=payload, headers=sent)
        response = connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


def guest_headers(sandbox_id: str, port: int) -> dict[str, str]:
    """Routing to a port of a guest by header."""
    return {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": str(port)}


def guest_host(sandbox_id: str, port: int) -> str:
    """Routing to a port of a guest by host name."""
    return f"{port}-{sandbox_id}.{DOMAIN}"


def shell(server: Server, sandbox_id: str, command: str) -> str:
    """What the SDKs send for `commands.run` as root, without an SDK: for figures, which must not hold what a client
    library does for itself. Must succeed; what the command printed."""
    payload = json.dumps({"process": {"cmd": "/bin/bash", "args": ["-l", "-c", command]}, "stdin": False}).encode()
    headers = {
        "Host": guest_host(sandbox_id, AGENT_PORT),
        "Authorization": "Basic " + base64.b64encode(b"root:").decode(),
        "Content-Type": "application/connect+json",
        "Connect-Protocol-Version": "1",
    }
    frame = struct.pack(">BI", 0, len(payload)) + payload
    answer = call(server, "POST", "/process.Process/Start", raw=frame, headers=headers)
    assert answer.status == 200, answer
    output, code, rest = b"", None, answer.body
    while rest:
        flags, size = struct.unpack_from(">BI", rest)
        message, rest = json.loads(rest[5 : 5 + size]), rest[5 + size :]
        assert not (flags & 2 and "error" in message), message
        event = message.get("event", {})
        output += base64.b64decode(event.get("data", {}).get("stdout", ""))
        code = event.get("end", {}).get("exitCode", code)
    assert code == 0, f"{command!r}: exit code {code}"
    return output.decode()


def send_and_hang_up(server: Server, request: bytes) -> None:
    """Sends a request and goes away without waiting for anything."""
    with socket.create_connection((HOST, server.port), timeout=30) as sock:
        sock.sendall(request)


def request_bytes(method: str, path: str, body: object) -> bytes:
    """A request with a JSON body, as bytes."""
    payload = json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nX-API-Key: any\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


def all_snapshots(server: Server, **filters: str) -> list[dict[str, Any]]:
    """A full walk over the pages of `GET /snapshots`."""
    return _walk(server, "/snapshots", filters)


def all_sandboxes(server: Server, **filters: str) -> list[dict[str, Any]]:
    """A full walk over the pages of `GET /v2/sandboxes`."""
    return _walk(server, "/v2/sandboxes", filters)


def _walk(server: Server, path: str, filters: Mapping[str, str]) -> list[dict[str, Any]]:
    from urllib.parse import urlencode

    items: list[dict[str, Any]] = []
    token: str | None = None
    while True:
        query = dict(filters) | {"limit": "100"} | ({"nextToken": token} if token else {})
        answer = call(server, "GET", f"{path}?{urlencode(query)}")
        assert answer.status == 200, answer
        items += answer.json()
        token = answer.headers.get("x-next-token") or None
        if token is None:
            return items
