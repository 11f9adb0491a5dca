"""What the tests share: small shards, tiny hyperparameters, the trainer started as users do."""
import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import train_gpt  # noqa: E402

SCRIPT = ROOT / "train_gpt.py"
STEP_LINE = re.compile(r"^step:(\d+)/(\d+) (train_loss|val_loss):(\S+) train_time:(\d+)ms "
                       r"step_avg:(nan|[\d.]+)ms$")
DATED = [name for name in train_gpt.PRESETS if name[0] == "2"]

# Small in every way that costs time; what makes a system that system is left to its preset.
TINY_FIELDS = dict(vocab_size=200, document_token=7, num_steps=12, batch_tokens=1024,
                   sequence_tokens=512, segment_tokens=0, align_documents=False, val_tokens=1024,
                   val_start=0, val_sequence_tokens=0, val_every=0,
                   model_dim=32, num_heads=2, num_layers=12, cooldown=5, device="cpu",
                   dtype="float32", muon_dtype="float32", compile="no", save_model=False,
                   sample_tokens=4, log_every=1)
# A run of a second: two mask blocks, several documents and a growing window.
TINY = ["--device=cpu", "--preset=laptop", "--num_steps=4", "--batch_tokens=1024",
        "--sequence_tokens=256", "--segment_tokens=128", "--val_tokens=1024", "--val_start=0",
        "--val_sequence_tokens=0",
        "--num_layers=4", "--num_heads=2", "--model_dim=32", "--vocab_size=64",
        "--document_token=63", "--window_start=128", "--window_end=256", "--log_every=1",
        "--sample_tokens=3"]
# The same with checkpoints, of which all stay, and validations, on one to three ranks.
SIX_STEPS = [*TINY, "--num_steps=6", "--val_every=2", "--batch_tokens=1536", "--save_every=2",
             "--keep_checkpoints=3"]


# ---- data ----

def write_shard(path: Path, tokens, magic: int = 20240520, version: int = 1,
                claimed: int | None = None) -> Path:
    tokens = np.asarray(tokens)
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if claimed is None else claimed
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
    return path


def write_manifest(folder: Path, entries: list[dict], **changes) -> None:
    """A manifest of shards in a folder. entries: what differs from the entry of made-up shards."""
    usual = dict(split="train", tokens=20_000, documents=1, text_bytes=20_000, sha256="")
    manifest = dict(format=1, complete=True, source="a test", tokenizer="bytes", vocab_size=64,
                    document_token=63, shards=[usual | entry for entry in entries])
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


def make_data(folder: Path, vocab_size: int = 64, tokens: int = 20_000,
              document_token: int = 63) -> list[str]:
    """Two training shards and one of validation that can be learned; the options that name them."""
    generator = np.random.default_rng(0)
    for name in ("train_000000", "train_000001", "val_000000"):
        text = np.cumsum(generator.integers(1, 4, tokens)) % (vocab_size - 1)
        text[generator.integers(0, tokens, tokens // 100)] = document_token
        write_shard(folder / f"{name}.bin", text)
    return [f"--train_files={folder}/train_*.bin", f"--val_files={folder}/val_*.bin",
            f"--log_dir={folder}/logs"]


def made_up_text(length: int, vocab_size: int = 200, document_token: int = 7, seed: int = 0,
                 documents: float = 1 / 200) -> np.ndarray:
    """Tokens with something to learn: most follow from the one before, some start a document."""
    generator = np.random.default_rng(seed)
    successor = generator.permutation(vocab_size)
    tokens = np.empty(length, dtype=np.uint16)
    tokens[0] = document_token
    fresh = generator.zipf(1.5, length) % vocab_size
    keep = generator.random(length) < 0.6
    for place in range(1, length):
        tokens[place] = successor[tokens[place - 1]] if keep[place] else fresh[place]
    tokens[tokens == document_token] = successor[document_token]
    tokens[generator.random(length) < documents] = document_token
    return tokens


# ---- in this process ----

def hyperparameters(*presets: str, **values) -> train_gpt.Hyperparameters:
    """Through the command line, as a user would: presets, then values on top."""
    arguments = [f"--preset={preset}" for preset in presets]
    arguments += [f"--{name}={value}" for name, value in values.items()]
    return train_gpt.parse_command_line(arguments)


def make_trainer(hp: train_gpt.Hyperparameters,
                 hardware: train_gpt.Hardware | None = None) -> train_gpt.Trainer:
    hardware = hardware or train_gpt.find_hardware(hp)
    train_gpt.fit_to_hardware(hp, hardware)
    return train_gpt.Trainer(hp, hardware, train_gpt.open_data(hp, hardware))


def train_steps(trainer: train_gpt.Trainer, steps: int) -> list[float]:
    """The losses of the first steps of a run."""
    return [next_loss(trainer, step) for step in range(steps)]


def next_loss(trainer: train_gpt.Trainer, step: int) -> float:
    """Do a step and return its loss."""
    trainer.step(trainer.data.train.next_batch(), step)
    (done, loss), = trainer.read_losses().items()
    assert done == step + 1
    return loss


def before_step(monkeypatch, number: int, action) -> None:
    """Runs in this process call action(trainer) before this step, counted from 0."""
    original = train_gpt.Trainer.step

    def step(self, batch, at):
        if at == number:
            action(self)
        return original(self, batch, at)
    monkeypatch.setattr(train_gpt.Trainer, "step", step)


def before_validation(monkeypatch, number: int, action) -> list[int]:
    """Likewise before this sequence of all validations of a run; returns the list of those read."""
    original = train_gpt.Loader.next_batch
    read = []

    def next_batch(self, **options):
        if "stride" in options:  # only validation has one
            if len(read) == number:
                action()
            read.append(len(read))
        return original(self, **options)
    monkeypatch.setattr(train_gpt.Loader, "next_batch", next_batch)
    return read


def send_signal(number: int = signal.SIGTERM) -> None:
    """To this process."""
    os.kill(os.getpid(), number)


# ---- as processes ----

def in_processes(target, world_size: int, folder: Path) -> list:
    """What target(rank, world_size) returns on each rank: tensors and numbers, in containers.

    The processes come from a server that has imported torch once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train_gpt", "pytest", "torch._dynamo"])
    ranks = [context.Process(target=one_process, args=(target, rank, world_size, str(folder)),
                             daemon=True) for rank in range(world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(600)
        if process.exitcode is None:
            process.kill()
    assert [process.exitcode for process in ranks] == [0] * world_size
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(world_size)]


def one_process(target, rank: int, world_size: int, folder: str) -> None:
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                                world_size=world_size)
    torch.save(target(rank, world_size), f"{folder}/rank{rank}.pt")
    if world_size > 1:
        dist.destroy_process_group()


def free_port() -> int:
    """Below the ports that the system gives to connections, which other tests open meanwhile."""
    while True:
        port = random.randint(10_000, 30_000)
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port


def run(arguments: list[str], ranks: int = 1, timeout: int = 900, cwd: Path = ROOT,
        script: Path = SCRIPT, **variables) -> subprocess.CompletedProcess:
    """The trainer, or another script, in one process, or under torchrun itself with several."""
    launcher = []
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    environment = {key: value for key, value in os.environ.items()
                   if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run([sys.executable, *launcher, str(script), *arguments], text=True, cwd=cwd,
                          capture_output=True, timeout=timeout,
                          env=environment | {"OMP_NUM_THREADS": "1"} | variables)


def trained(arguments: list[str], run_id: str, ranks: int = 1, **options) -> "Result":
    """A run that must succeed, and what its log says."""
    log_dir = next(a for a in arguments if a.startswith("--log_dir=")).partition("=")[2]
    process = run([*arguments, f"--run_id={run_id}"], ranks, **options)
    assert process.returncode == 0, process.stdout + process.stderr
    return Result(Path(log_dir) / run_id, process.stdout)


class Result:
    """What a run left in its folder."""

    def __init__(self, folder: Path, output: str = ""):
        self.folder = folder
        self.output = output
        self.log = (folder / "log.txt").read_text()
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        self.metrics = [json.loads(line) for line in lines]
        self.train_losses = [m["train_loss"] for m in self.metrics if "train_loss" in m]
        self.val_losses = [m["val_loss"] for m in self.metrics if "val_loss" in m and "step" in m]
        self.losses = self.train_losses + self.val_losses

    @property
    def steps(self) -> list[str]:
        """The lines of the log about steps, without their times."""
        return [line.partition(" train_time")[0] for line in self.log.splitlines()
                if line.startswith("step:")]

    @property
    def weights(self) -> dict:
        return torch.load(self.folder / "model.pt", weights_only=True)["model"]


def equal(one: dict, other: dict) -> bool:
    """The same tensors, bit for bit; a module may keep a dict of its own among them."""
    return one.keys() == other.keys() and all(
        equal(one[name], other[name]) if isinstance(one[name], dict)
        else torch.equal(one[name], other[name]) for name in one)


class BackgroundRun:
    """A run in the background, its output in a file that can be read meanwhile."""
    started = []

    def __init__(self, data: list[str], name: str, *options: str, base: list[str],
                 command: list[str] | None = None, ranks: int = 2, restarts: int = 0,
                 script: Path = SCRIPT, **variables):
        logs = Path(data[-1].partition("=")[2])
        self.folder = logs / name
        self.path = logs.parent / f"{name}_{random.random()}.out"
        launcher = []
        if ranks > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone",
                        f"--nproc_per_node={ranks}", f"--max-restarts={restarts}"]
        command = command or [sys.executable, *launcher, str(script)]
        self.process = subprocess.Popen(
            [*command, *base, *data, f"--run_id={name}", *options], start_new_session=True,
            stdout=open(self.path, "w"), stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "LOGLEVEL": "ERROR"} | variables)
        self.started.append(self)

    @property
    def output(self) -> str:
        return self.path.read_text()

    def until(self, text: str, timeout: float = 600) -> None:
        deadline = time.monotonic() + timeout
        while not re.search(text, self.output):
            assert time.monotonic() < deadline and self.process.poll() is None, self.output
            time.sleep(0.02)

    def ranks(self) -> dict[int, int]:
        """The process of each rank, among the launcher's children."""
        found = {}
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for child in children.read_text().split():
            try:
                entries = Path(f"/proc/{child}/environ").read_text().split("\0")
            except OSError:  # it may have ended since
                continue
            found |= {int(entry[5:]): int(child) for entry in entries if entry.startswith("RANK=")}
        return found

    def wait(self, timeout: float = 600) -> int:
        return self.process.wait(timeout)

    def kill_all(self) -> None:
        """A machine that fails: the launcher and its ranks at once."""
        for pid in [self.process.pid, *self.ranks().values()]:
            os.kill(pid, signal.SIGKILL)
