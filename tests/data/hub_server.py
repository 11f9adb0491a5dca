"""What the tests of data/ share: a hub on loopback that can misbehave, scripts as real processes, crashes.

The hub speaks what huggingface_hub asks of the real one: a dataset's revision, its list of files, what is
known of a path (size, sha256), and files by way of a redirect, whole or from a byte on.
"""
import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

DATA = Path(__file__).resolve().parents[2] / "data"
sys.path.insert(0, str(DATA))
REVISION = "0123456789abcdef0123456789abcdef01234567"


def shard_bytes(tokens) -> bytes:
    """A shard, spelled out here independently of data/shards.py."""
    tokens = np.asarray(tokens, dtype="<u2")
    return struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) + tokens.tobytes()


def random_shard(seed: int, num_tokens: int, document_token: int = 50256) -> bytes:
    tokens = np.random.default_rng(seed).integers(0, 50256, num_tokens)
    tokens[::997] = document_token
    return shard_bytes(tokens)


def environment(**more: str) -> dict:
    """For a script in a test: no network but loopback, no vocabulary unless a test gives one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PIP_"))}
    return kept | {"TIKTOKEN_CACHE_DIR": "", "PIP_NO_INDEX": "1", "NO_PROXY": "127.0.0.1",
                   "HF_HUB_DISABLE_TELEMETRY": "1"} | more


def start(script: str, *arguments, env: dict | None = None, **more) -> subprocess.Popen:
    command = [sys.executable, str(DATA / script), *map(str, arguments)]
    return subprocess.Popen(command, env=env or environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, **more)


def run(script: str, *arguments, env: dict | None = None, **more) -> subprocess.CompletedProcess:
    command = [sys.executable, str(DATA / script), *map(str, arguments)]
    return subprocess.run(command, env=env or environment(), capture_output=True, text=True, timeout=600,
                          **more)


# Runs a script that kills itself, as kill -9 would, just before its Nth change of a name or forcing of bytes
# to the disk.
CRASHING = """
import os, runpy, signal, sys
sys.path.insert(0, os.path.dirname(sys.argv[2]))
left = int(sys.argv[1])
def count_down(real):
    def step(*arguments):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)
    return step
os.replace, os.fsync, os.unlink = map(count_down, (os.replace, os.fsync, os.unlink))
script, sys.argv = sys.argv[2], sys.argv[2:]
{prepare}
runpy.run_path(script, run_name="__main__")
"""


def crash(steps: int, script: str, *arguments, env: dict | None = None, prepare: str = "") -> bool:
    """Run a script and kill it at a step; returns whether it lived that long."""
    program = CRASHING.replace("{prepare}", prepare)
    command = [sys.executable, "-c", program, str(steps), str(DATA / script), *map(str, arguments)]
    done = subprocess.run(command, env=env or environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, -9), done.stderr
    return done.returncode == -9


class LocalHub:
    """A hub with one dataset. `faults[name]` is what befalls the next requests for a file, in turn:

    a number: that HTTP status; "reset": the connection breaks half way; "short": it ends half way; "wrong": a
    byte is changed; "whole": a request for the rest is answered with the whole; "slow": after the
    first half, half a second for every 16 KiB.
    """

    def __init__(self, repo: str, files: dict[str, bytes], faults: dict[str, list] | None = None):
        self.repo, self.files, self.faults = repo, files, faults or {}
        self.requests = []      # (method, path, first byte asked for)
        hub = self

        class Handler(Answers):
            pass

        Handler.hub = hub
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05},
                         daemon=True).start()
        return self

    def __exit__(self, *exception):
        self.server.shutdown()
        self.server.server_close()

    def env(self, **more: str) -> dict:
        return environment(HF_ENDPOINT=self.endpoint, **more)

    def asked(self, name: str) -> list[int]:
        """The first bytes of the requests for a file's content."""
        return [first for _, path, first in self.requests if path == f"/content/{name}"]

    def about(self, name: str) -> dict:
        content = self.files[name]
        sha256 = hashlib.sha256(content).hexdigest()
        return {"type": "file", "path": name, "size": len(content), "oid": sha256[:40],
                "lfs": {"oid": sha256, "size": len(content), "pointerSize": 134}}


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
        first = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.hub.requests.append((self.command, path, first))
        return path, first

    def fault(self, name: str):
        faults = self.hub.faults.get(name)
        return faults.pop(0) if faults else None

    def do_POST(self):
        path, _ = self.note()
        form = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        if path != f"/api/datasets/{self.hub.repo}/paths-info/{REVISION}":
            return self.answer(404)
        if isinstance(status := self.fault("paths-info"), int):
            return self.answer(status)
        infos = [self.hub.about(name) for name in form["paths"] if name in self.hub.files]
        self.answer(200, json.dumps(infos).encode(), Content_Type="application/json")

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path, first = self.note()
        api, files = f"/api/datasets/{self.hub.repo}/", f"/datasets/{self.hub.repo}/resolve/{REVISION}/"
        if path == f"{api}revision/main":
            self.answer(200, json.dumps({"id": self.hub.repo, "sha": REVISION, "siblings": []}).encode())
        elif path == f"{api}tree/{REVISION}":
            self.answer(200, json.dumps([self.hub.about(name) for name in self.hub.files]).encode())
        elif path.startswith(files) and path.removeprefix(files) in self.hub.files:
            self.answer(302, Location=f"{self.hub.endpoint}/content/{path.removeprefix(files)}")
        elif path.startswith("/content/"):
            self.content(path.removeprefix("/content/"), first)
        else:
            self.answer(404)

    def content(self, name: str, first: int):
        fault, content = self.fault(name), self.hub.files[name]
        if isinstance(fault, int):
            return self.answer(fault, **({"Retry_After": "0"} if fault == 429 else {}))
        if fault == "wrong":
            content = content[:-1] + bytes([content[-1] ^ 1])
        first = 0 if fault == "whole" else first
        body, status = content[first:], 206 if first else 200
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if fault in ("reset", "short"):
            self.wfile.write(body[:len(body) // 2])
            self.wfile.flush()
            if fault == "reset":  # so that closing sends a reset, not an end
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            time.sleep(0.1)
            self.close_connection = True
            self.connection.close()
            return
        at_once = len(body) // 2 if fault == "slow" else len(body)
        try:
            self.wfile.write(body[:at_once])
            for start in range(at_once, len(body), 1 << 14):
                time.sleep(0.5)
                self.wfile.write(body[start:start + (1 << 14)])
        except (BrokenPipeError, ConnectionResetError):  # the script was killed
            return
