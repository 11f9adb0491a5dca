"""A hub on loopback that can misbehave, for the tests of data/.

It speaks what huggingface_hub asks of the real one: a dataset's revision with its list of files
(size and sha256), and files through a redirect, complete or from a byte on.
"""

import hashlib
import json
import socket
import struct
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from data_helpers import environment

REVISION = "0123456789abcdef0123456789abcdef01234567"


class LocalHub:
    """A hub with one dataset. `faults[name]`: what happens to the next requests for a file:

    a number: that HTTP status; "reset": the connection is reset half way; "short": it ends half
    way; "wrong": a byte is changed; "whole": a request for the rest is answered with the complete
    file; "slow": after the first half, half a second for every 16 KiB.
    """

    def __init__(self, repo: str, files: dict[str, bytes], faults: dict[str, list] | None = None):
        self.repo = repo
        self.files = files
        self.faults = faults or {}
        self.requests = []  # (method, path, first byte asked for)
        handler = type("Handler", (Answers,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *request: None  # clients may be killed at any time
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        self.storage = (
            f"http://localhost:{self.server.server_port}"  # another host, as on the real hub
        )

    def __enter__(self):
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()
        return self

    def __exit__(self, *exception):
        self.server.shutdown()
        self.server.server_close()

    def env(self, **more: str) -> dict:
        return environment(HF_ENDPOINT=self.endpoint, **more)

    def asked(self, name: str) -> list[int]:
        """The first bytes of the requests for a file's content."""
        return [first for _, path, first in self.requests if path == f"/content/{name}"]

    def sha256(self, name: str) -> str:
        return hashlib.sha256(self.files[name]).hexdigest()

    def about(self) -> dict:
        """What the hub tells about the dataset and its files."""
        siblings = [
            {
                "rfilename": name,
                "size": len(content),
                "blobId": self.sha256(name)[:40],
                "lfs": {"sha256": self.sha256(name), "size": len(content), "pointerSize": 134},
            }
            for name, content in self.files.items()
        ]
        return {"id": self.repo, "sha": REVISION, "siblings": siblings}


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LocalHub

    def log_message(self, *arguments):
        pass

    def answer(self, status: int, body: bytes = b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def note(self) -> tuple[str, int]:
        path = urllib.parse.urlsplit(self.path).path
        first = int(
            (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0]
        )
        self.hub.requests.append((self.command, path, first))
        return path, first

    def fault(self, name: str):
        faults = self.hub.faults.get(name)
        return faults.pop(0) if faults else None

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path, first = self.note()
        files = f"/datasets/{self.hub.repo}/resolve/{REVISION}/"
        if path == f"/api/datasets/{self.hub.repo}":
            if fault := self.fault("list"):
                return self.answer(fault)
            self.answer(200, json.dumps(self.hub.about()).encode(), Content_Type="application/json")
        elif path.startswith(files) and path.removeprefix(files) in self.hub.files:
            name = path.removeprefix(files)
            self.answer(
                302,
                Location=f"{self.hub.storage}/content/{name}",
                X_Repo_Commit=REVISION,
                X_Linked_Etag=f'"{self.hub.sha256(name)}"',
                X_Linked_Size=str(len(self.hub.files[name])),
            )
        elif path.startswith("/content/"):
            self.content(path.removeprefix("/content/"), first)
        else:
            self.answer(404)

    def content(self, name: str, first: int):
        fault = self.fault(name)
        content = self.hub.files[name]
        if isinstance(fault, int):
            return self.answer(fault, **({"Retry_After": "0"} if fault == 429 else {}))
        if fault == "wrong":
            content = content[:-1] + bytes([content[-1] ^ 1])
        first = 0 if fault == "whole" else first
        body = content[first:]
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(body)))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if fault in ("reset", "short"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if fault == "reset":  # so that closing sends a reset, not an end
                self.connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
            time.sleep(0.1)
            self.close_connection = True
            self.connection.close()
            return
        at_once = len(body) // 2 if fault == "slow" else len(body)
        try:
            self.wfile.write(body[:at_once])
            for start in range(at_once, len(body), 1 << 14):
                time.sleep(0.5)
                self.wfile.write(body[start : start + (1 << 14)])
        except (BrokenPipeError, ConnectionResetError):  # the script was killed
            return
