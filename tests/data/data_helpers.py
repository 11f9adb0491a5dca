"""What the tests of data/ share: shards, texts, scripts as real or killed processes."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from helpers import write_shard

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "data"
sys.path.insert(0, str(DATA))

import vocabulary  # noqa: E402

TIKTOKEN_CACHE = vocabulary.cache_folder()  # read before any test changes the environment
HUB_CACHE = (
    Path(tempfile.gettempdir()) / "no_hub_cache"
)  # huggingface_hub must not create it in a test


# Shards and texts ---------------------------------------------------------------------------------


def shard_bytes(tokens) -> bytes:
    """A shard, written independently of data/shards.py."""
    with tempfile.TemporaryDirectory() as folder:
        return write_shard(Path(folder) / "shard", np.asarray(tokens)).read_bytes()


def random_shard(seed: int, num_tokens: int, document_token: int = 50256) -> bytes:
    tokens = np.random.default_rng(seed).integers(0, 50256, num_tokens)
    tokens[::997] = document_token
    return shard_bytes(tokens)


def tokens_of(path: Path) -> np.ndarray:
    return np.frombuffer(path.read_bytes(), "<u2", offset=1024)


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def visible_files(folder: Path) -> dict[str, bytes]:
    """The content of every file of a folder, hidden ones left out."""
    return {path.name: path.read_bytes() for path in folder.glob("[!.]*")}


# Scripts as real processes ------------------------------------------------------------------------


def environment(**more: str) -> dict:
    """For a script in a test: no network but loopback, no vocabulary unless a test gives one."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PIP_"))
    }
    return (
        kept
        | {
            "TIKTOKEN_CACHE_DIR": "",
            "PIP_NO_INDEX": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(HUB_CACHE),
            "HF_ENDPOINT": "http://127.0.0.1:9",
        }
        | more
    )


def with_gpt2(**more: str) -> dict:
    return environment(TIKTOKEN_CACHE_DIR=str(TIKTOKEN_CACHE), **more)


def start(script: str, *arguments, env: dict | None = None, **more) -> subprocess.Popen:
    command = [sys.executable, str(DATA / script), *map(str, arguments)]
    return subprocess.Popen(
        command,
        env=env or environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def run(script: str, *arguments, env: dict | None = None, **more) -> subprocess.CompletedProcess:
    command = [sys.executable, str(DATA / script), *map(str, arguments)]
    return subprocess.run(
        command, env=env or environment(), capture_output=True, text=True, timeout=600, **more
    )


# Runs a script that kills itself just before the Nth time that it renames, removes or syncs a file.
CRASHING = """
import os, runpy, signal, sys
sys.path.insert(0, os.path.dirname(sys.argv[2]))
left = int(sys.argv[1])
def count_down(real):
    def step(*arguments, **options):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    return step
for name in ("replace", "rename", "fsync", "unlink"):
    setattr(os, name, count_down(getattr(os, name)))
sys.argv = sys.argv[2:]
script = sys.argv[0]
{prepare}
runpy.run_path(script, run_name="__main__")
"""


def crash(steps: int, script: str, *arguments, env: dict | None = None, prepare: str = "") -> bool:
    """Run a script and kill it at a step; returns whether it got that far."""
    program = CRASHING.replace("{prepare}", prepare)
    command = [sys.executable, "-c", program, str(steps), str(DATA / script), *map(str, arguments)]
    done = subprocess.run(
        command, env=env or environment(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode in (0, -9), done.stderr
    return done.returncode == -9
