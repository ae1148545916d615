"""A small HTTP server for a guest, on the standard library alone, for what a proxy in front of it could break.

  any    /echo          method, path, headers and body as JSON
  POST   /digest        SHA-256 and length of the body, which is read as it comes
  GET    /bytes?n=N     N bytes that are not all alike; their SHA-256 is that of the pattern
  GET    /drip          one chunk at once, a second one only after GET /release
  GET    /status?code=N an empty answer with that code
  GET    /ws            a WebSocket that says back what it hears

Usage: echo.py PORT
"""

import base64
import hashlib
import http.server
import json
import struct
import sys
import threading
import urllib.parse

PATTERN = bytes(range(256)) * 256
released = threading.Event()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def body(self):
        """The request's body in pieces, whichever way it is framed."""
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while size := int(self.rfile.readline().split(b";")[0], 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return
        left = int(self.headers.get("Content-Length") or 0)
        while left:
            piece = self.rfile.read(min(left, 65536))
            if not piece:
                return
            left -= len(piece)
            yield piece

    def answer(self, value, code=200):
        payload = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.send_header("X-From-Guest", "yes")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(payload)

    def handle_any(self):
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        if url.path == "/echo":
            pieces = b"".join(self.body())
            headers = {name.lower(): value for name, value in self.headers.items()}
            text = base64.b64encode(pieces).decode()
            self.answer({"method": self.command, "path": self.path, "headers": headers, "body": text})
        elif url.path == "/digest":
            digest, size = hashlib.sha256(), 0
            for piece in self.body():
                digest.update(piece)
                size += len(piece)
            self.answer({"sha256": digest.hexdigest(), "size": size})
        elif url.path == "/bytes":
            left = int(query["n"])
            self.send_response(200)
            self.send_header("Content-Length", str(left))
            self.end_headers()
            while left:
                piece = PATTERN[: min(left, len(PATTERN))]
                self.wfile.write(piece)
                left -= len(piece)
        elif url.path == "/drip":
            released.clear()
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"6\r\nfirst\n\r\n")
            self.wfile.flush()
            released.wait(60)
            self.wfile.write(b"7\r\nsecond\n\r\n0\r\n\r\n")
        elif url.path == "/release":
            released.set()
            self.answer({})
        elif url.path == "/status":
            self.send_response(int(query["code"]))
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif url.path == "/ws":
            self.websocket()
        else:
            self.answer({"path": self.path}, 404)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_OPTIONS = handle_any

    def websocket(self):
        """RFC 6455, as much of it as an echo needs: whole and fragmented messages, ping, close."""
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.end_headers()
        self.close_connection = True
        kind, message = 0, b""
        while True:
            first, second = self.rfile.read(2)
            size = second & 0x7F
            if size == 126:
                (size,) = struct.unpack(">H", self.rfile.read(2))
            elif size == 127:
                (size,) = struct.unpack(">Q", self.rfile.read(8))
            mask = self.rfile.read(4)
            payload = self.rfile.read(size)
            repeated = (mask * (size // 4 + 1))[:size]
            payload = (int.from_bytes(payload, "big") ^ int.from_bytes(repeated, "big")).to_bytes(size, "big")
            opcode = first & 0x0F
            if opcode == 8:
                self.frame(8, payload[:2])
                return
            if opcode == 9:
                self.frame(10, payload)
                continue
            if opcode in (1, 2):
                kind, message = opcode, b""
            message += payload
            if first & 0x80:
                self.frame(kind, message)

    def frame(self, opcode, payload):
        size = len(payload)
        head = bytes([0x80 | opcode])
        if size < 126:
            head += bytes([size])
        elif size < 65536:
            head += struct.pack(">BH", 126, size)
        else:
            head += struct.pack(">BQ", 127, size)
        self.wfile.write(head + payload)
        self.wfile.flush()


http.server.ThreadingHTTPServer(("0.0.0.0", int(sys.argv[1])), Handler).serve_forever()
