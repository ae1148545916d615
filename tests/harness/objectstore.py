"""An object store that somebody else wrote: the few operations of S3 that a client needs, path style, in memory, with
switches for what goes wrong with real ones. Signatures are not checked.

It shares no code with the endpoint that the server brings along, so a server that works with both works with the
protocol and not with its own habits.
"""

from __future__ import annotations

import hashlib
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from xml.sax.saxutils import escape

from harness.server import HOST

BUCKET = "snapyard"
#: One byte in each stretch of this length is flipped in a bad copy: less than the smallest piece that is read at once.
STRIDE = 2048


def flipped(data: bytes, start: int = STRIDE // 2) -> bytes:
    """The same bytes with one flipped in each stretch. Done twice, nothing has happened."""
    changed = bytearray(data)
    for place in range(start, len(changed), STRIDE):
        changed[place] ^= 0x40
    return bytes(changed)


class ObjectStore:
    """The store. `reachable` may be switched at any time; `objects` may be changed behind the server's back."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.reachable = True
        #: Status and code that every request is refused with.
        self.refusal: tuple[int, str] | None = None
        self.gets = 0
        self.lock = threading.Lock()
        store = self

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that goes away in the middle is no news."""

        class Handler(_Handler):
            pass

        Handler.store = store
        self._server = Server((HOST, 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="object-store", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._server.server_address[1]}"

    @property
    def arguments(self) -> list[str]:
        """What tells `snapyard up` to use it."""
        return [
            *("--s3-endpoint", self.url, "--s3-bucket", BUCKET),
            *("--s3-access-key", "test", "--s3-secret-key", "test-secret"),
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @contextmanager
    def unreachable(self) -> Iterator[None]:
        """While it lasts every connection is closed without an answer."""
        self.reachable = False
        try:
            yield
        finally:
            self.reachable = True

    @contextmanager
    def refusing(self, status: int, code: str) -> Iterator[None]:
        """While it lasts every request is answered with this error."""
        self.refusal = status, code
        try:
            yield
        finally:
            self.refusal = None

    def packs(self) -> set[str]:
        """The keys of the packs."""
        with self.lock:
            return {key for key in self.objects if key.startswith("packs/")}

    @contextmanager
    def bad_copies(self) -> Iterator[None]:
        """While it lasts every pack has wrong bytes all over."""
        self._flip_packs()
        try:
            yield
        finally:
            self._flip_packs()

    def _flip_packs(self) -> None:
        with self.lock:
            packs = [key for key in self.objects if "manifest" not in key]
            assert packs, "nothing has been uploaded"
            for key in packs:
                self.objects[key] = flipped(self.objects[key])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: ObjectStore

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _key(self) -> tuple[str, dict[str, str]] | None:
        """Key (empty: the bucket itself) and query; `None` when the request gets no answer."""
        if not self.store.reachable:
            self.close_connection = True
            return None
        if self.store.refusal is not None:
            self._error(*self.store.refusal)
            return None
        url = urllib.parse.urlsplit(self.path)
        bucket, _, key = urllib.parse.unquote(url.path.lstrip("/")).partition("/")
        if bucket != BUCKET:
            self._error(404, "NoSuchBucket")
            return None
        return key, dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))

    def _answer(self, status: int, body: bytes = b"", length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, status: int, code: str) -> None:
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        self._answer(status, body, Content_Type="application/xml")

    def _etag(self, data: bytes) -> str:
        return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = self._key()
        if found is None:
            return
        if "aws-chunked" in (self.headers.get("Content-Encoding") or ""):
            self._error(501, "NotImplemented")
            return
        key, _ = found
        with self.store.lock:
            if key and self.headers.get("If-None-Match") == "*" and key in self.store.objects:
                self._error(412, "PreconditionFailed")
                return
            if key:
                self.store.objects[key] = data
        self._answer(200, ETag=self._etag(data))

    def do_GET(self) -> None:
        found = self._key()
        if found is None:
            return
        key, query = found
        if not key:
            self._list(query)
            return
        with self.store.lock:
            data = self.store.objects.get(key)
            self.store.gets += 1
        if data is None:
            self._error(404, "NoSuchKey")
            return
        wanted = self.headers.get("Range")
        if wanted is None:
            self._answer(200, data, ETag=self._etag(data))
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start = int(first) if first else len(data) - int(last)
        end = min(int(last) + 1, len(data)) if first and last else len(data)
        if start >= len(data):
            self._error(416, "InvalidRange")
            return
        self._answer(206, data[start:end], Content_Range=f"bytes {start}-{end - 1}/{len(data)}")

    def do_HEAD(self) -> None:
        found = self._key()
        if found is None:
            return
        key, _ = found
        with self.store.lock:
            data = self.store.objects.get(key) if key else b""
        if data is None:
            self._answer(404)
            return
        self._answer(200, length=len(data), ETag=self._etag(data))

    def do_DELETE(self) -> None:
        found = self._key()
        if found is None:
            return
        with self.store.lock:
            self.store.objects.pop(found[0], None)
        self._answer(204)

    def _list(self, query: dict[str, str]) -> None:
        prefix, limit = query.get("prefix", ""), int(query.get("max-keys", "1000"))
        after = query.get("continuation-token") or query.get("start-after", "")
        with self.store.lock:
            keys = sorted(key for key in self.store.objects if key.startswith(prefix) and key > after)
            sizes = {key: len(self.store.objects[key]) for key in keys[:limit]}
        more = len(keys) > limit
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, size in sizes.items()
        )
        token = f"<NextContinuationToken>{escape(keys[limit - 1])}</NextContinuationToken>" if more else ""
        body = (
            "<?xml version='1.0'?><ListBucketResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'>"
            f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(sizes)}</KeyCount>"
            f"<MaxKeys>{limit}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>{token}{contents}"
            "</ListBucketResult>"
        )
        self._answer(200, body.encode(), Content_Type="application/xml")
