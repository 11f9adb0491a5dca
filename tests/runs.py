"""Starting the trainer as its users do: real processes, tiny data, everything under the test's own folder."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "train_gpt.py"
STEP_LINE = re.compile(r"^step:(\d+)/(\d+) (train_loss|val_loss):(\S+) train_time:(\d+)ms step_avg:(nan|[\d.]+)ms$")
# small enough for a second a run, large enough for two mask blocks, several documents and a growing window
TINY = ["--device=cpu", "--preset=laptop", "--num_steps=4", "--batch_tokens=1024", "--sequence_tokens=256",
        "--segment_tokens=128", "--val_tokens=1024", "--num_layers=4", "--num_heads=2", "--model_dim=32",
        "--vocab_size=64", "--document_token=63", "--window_start=128", "--window_end=256", "--log_every=1",
        "--sample_tokens=3"]


def write_shard(path: Path, tokens: np.ndarray, magic: int = 20240520, version: int = 1, claimed: int | None = None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if claimed is None else claimed
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
    return path


def make_data(folder: Path, vocab_size: int = 64, tokens: int = 20_000, document_token: int = 63) -> list[str]:
    """Two training shards and one of validation, of a language that can be learnt; returns the options that name them."""
    random = np.random.default_rng(0)
    for name in ("train_000000", "train_000001", "val_000000"):
        steps = random.integers(1, 4, tokens)
        text = np.cumsum(steps) % (vocab_size - 1)
        text[random.integers(0, tokens, tokens // 100)] = document_token
        write_shard(folder / f"{name}.bin", text)
    return [f"--train_files={folder}/train_*.bin", f"--val_files={folder}/val_*.bin", f"--log_dir={folder}/logs"]


def run(arguments: list[str], ranks: int = 1, timeout: int = 900, cwd: Path = ROOT, **variables) -> subprocess.CompletedProcess:
    """The trainer in one process, or under torchrun itself with several."""
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run([sys.executable, *launcher, str(SCRIPT), *arguments], capture_output=True, text=True, cwd=cwd,
                          timeout=timeout, env=environment | {"OMP_NUM_THREADS": "1"} | variables)


def trained(arguments: list[str], run_id: str, ranks: int = 1, **options) -> "Result":
    """A run that must succeed, and what its log says."""
    log_dir = next(a for a in arguments if a.startswith("--log_dir=")).partition("=")[2]
    process = run([*arguments, f"--run_id={run_id}"], ranks, **options)
    assert process.returncode == 0, process.stdout + process.stderr
    return Result(Path(log_dir) / run_id, process)


class Result:
    def __init__(self, folder: Path, process: subprocess.CompletedProcess):
        self.folder, self.output = folder, process.stdout
        self.log = (folder / "log.txt").read_text()
        self.metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.train_losses = [m["train_loss"] for m in self.metrics if "train_loss" in m]
        self.val_losses = [m["val_loss"] for m in self.metrics if "val_loss" in m and "step" in m]
