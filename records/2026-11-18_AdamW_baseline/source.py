"""The AdamW baseline of the laptop track, on our shards.

    python records/baseline.py [--name=value …]

The small-CPU recipe of the best-known minimal trainer: four layers of width 128 with four heads,
learned positions, GELU, LayerNorm without bias, a head tied to the embedding; 2,000 steps of AdamW
on twelve random stretches of 64 tokens each, the rate rising to 1e-3 over 100 steps and falling to
1e-4 along a cosine. Written to be read beside train_gpt.py, not to be fast or general. The log has
the form of train_gpt.py's, so that every command of records/speedrun.py works on it; the clock
counts training only, as there.
"""

import dataclasses
import glob
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEPARATOR = "=" * 100
HEADER_BYTES = 256 * 4  # of a token shard
ROOT = Path(__file__).resolve().parent.parent


class UserError(Exception):
    """A user's mistake: one sentence with the value, what was expected and the remedy."""


@dataclass
class Hyperparameters:
    train_files: str = "data/enwik8/enwik8_train_*.bin"
    val_files: str = "data/enwik8/enwik8_val_*.bin"
    vocab_size: int = 257  # bytes, and the token that starts a document
    num_steps: int = 2000
    batch_tokens: int = 12 * 64  # twelve sequences a step
    sequence_tokens: int = 64  # context
    val_every: int = 0  # steps between validations; 0: only at the end
    val_tokens: int = 2**19  # tokens to validate on, always the same
    val_start: int = 2**19  # the first of them
    target_loss: float = 2.07  # nats per token
    num_layers: int = 4
    num_heads: int = 4
    model_dim: int = 128
    rate: float = 1e-3  # AdamW, after the warm-up
    final_rate: float = 1e-4  # at the last step
    warmup_steps: int = 100
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.1  # of matrices and embeddings, not of the norms' gains
    clip_norm: float = 1.0  # of the whole gradient
    seed: int = 1337
    log_dir: str = "logs"
    run_id: str = ""  # name of the run's folder; empty: the time
    log_every: int = 10


def parse_command_line(arguments: list[str]) -> tuple[Hyperparameters, set[str]]:
    """The hyperparameters, and which of them the user gave."""
    fields = {field.name: field.type for field in dataclasses.fields(Hyperparameters)}
    values = {}
    for argument in arguments:
        name, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or name not in fields or not equals:
            raise UserError(
                f"{argument}: expected --name=value with a name out of {', '.join(fields)}"
            )
        try:
            values[name] = fields[name](text)
        except ValueError:
            raise UserError(f"--{name}={text}: expected a number") from None
    hp = Hyperparameters(**values)
    for name in ("batch_tokens", "val_tokens", "val_start"):
        lowest = 0 if name == "val_start" else 1
        if getattr(hp, name) < lowest or getattr(hp, name) % hp.sequence_tokens:
            raise UserError(
                f"--{name}={getattr(hp, name)}: expected a multiple of "
                f"sequence_tokens={hp.sequence_tokens}"
            )
    return hp, set(values)


# Model --------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm attention and MLP; no biases anywhere."""

    def __init__(self, hp: Hyperparameters):
        super().__init__()
        dim = hp.model_dim
        self.num_heads = hp.num_heads
        self.attention_norm = nn.LayerNorm(dim, bias=False)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.LayerNorm(dim, bias=False)
        self.mlp_in = nn.Linear(dim, 4 * dim, bias=False)
        self.mlp_out = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, hp: Hyperparameters):
        super().__init__()
        self.tokens = nn.Embedding(hp.vocab_size, hp.model_dim)
        self.positions = nn.Embedding(hp.sequence_tokens, hp.model_dim)
        self.blocks = nn.ModuleList(Block(hp) for _ in range(hp.num_layers))
        self.norm = nn.LayerNorm(hp.model_dim, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                into_residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(
                    p, std=0.02 / math.sqrt(2 * hp.num_layers) if into_residual else 0.02
                )

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs) + self.positions.weight[: inputs.size(1)]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)  # the head is the embedding
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# Data and schedule --------------------------------------------------------------------------------


def read_tokens(pattern: str) -> tuple[np.ndarray, list[str]]:
    paths = sorted(glob.glob(pattern))
    if not paths:
        raise UserError(f"{pattern}: no token shards there; get them with: python data/enwik8.py")
    shards = [np.memmap(path, "<u2", "r", offset=HEADER_BYTES) for path in paths]
    return (shards[0] if len(shards) == 1 else np.concatenate(shards)), paths


def stack(tokens: np.ndarray, starts, length: int) -> tuple[Tensor, Tensor]:
    rows = np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64)
    rows = torch.from_numpy(rows)
    return rows[:, :-1], rows[:, 1:]


def rate_at(hp: Hyperparameters, step: int) -> float:
    if step < hp.warmup_steps:
        return hp.rate * (step + 1) / (hp.warmup_steps + 1)
    part = (step - hp.warmup_steps) / max(1, hp.num_steps - hp.warmup_steps)
    return hp.final_rate + 0.5 * (1 + math.cos(math.pi * part)) * (hp.rate - hp.final_rate)


@torch.no_grad()
def evaluate(hp: Hyperparameters, model: GPT, tokens: np.ndarray) -> float:
    """Mean loss over the val_tokens targets after token val_start, those of train_gpt.py too, in
    windows that follow each other."""
    end = hp.val_start + hp.val_tokens
    if len(tokens) <= end:
        raise UserError(
            f"--val_tokens={hp.val_tokens} from --val_start={hp.val_start}: the validation shards "
            f"hold {len(tokens)} tokens"
        )
    starts = range(hp.val_start, end, hp.sequence_tokens)
    total = 0.0
    for first in range(0, len(starts), 512):
        some = starts[first : first + 512]
        total += model(*stack(tokens, some, hp.sequence_tokens)).item() * len(some)
    return total / len(starts)


# Log ----------------------------------------------------------------------------------------------


class Log:
    """log.txt and metrics.jsonl in the form of train_gpt.py's."""

    def __init__(self, hp: Hyperparameters, given: set[str], shards: list[str]):
        self.folder = Path(hp.log_dir) / (hp.run_id or time.strftime("%Y-%m-%d_%H%M%S_baseline"))
        if (self.folder / "log.txt").exists():
            raise UserError(
                f"--run_id={hp.run_id}: {self.folder} holds a run already; give another name"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        source = Path(__file__).read_bytes()
        values = dataclasses.asdict(hp)
        origins = {name: "command line" if name in given else "default" for name in values}
        commit, dirty = git_state()
        sha256 = hashlib.sha256(source).hexdigest()
        about = dict(
            python=platform.python_version(),
            torch=torch.__version__,
            numpy=np.__version__,
            cuda=None,
            driver=None,
            platform=platform.platform(),
            device="cpu",
            device_name=cpu_name(),
            world_size=1,
            threads=torch.get_num_threads(),
            dtype="float32",
            muon_dtype=None,
            attention="sdpa",
            compiled=False,
        )
        hashes = {path: shard_facts(path) for path in shards}
        self.write(
            source.decode(),
            SEPARATOR,
            f"command: {' '.join(['records/baseline.py', *sys.argv[1:]])}",
            f"commit: {commit or 'unknown'}{' (dirty)' if dirty else ''}",
            f"source_sha256: {sha256}",
            *(f"{name}: {value!r}  # {origins[name]}" for name, value in values.items()),
            f"Python {about['python']}, PyTorch {about['torch']}, NumPy {about['numpy']}, CUDA "
            "None, "
            f"{about['platform']}",
            f"1 × cpu ({about['device_name']}), {about['threads']} threads, float32 activations, "
            "causal attention, not compiled",
            *(
                f"shard: {path} {facts['tokens']:,} tokens sha256 {facts['sha256'] or 'unknown'}"
                for path, facts in hashes.items()
            ),
            SEPARATOR,
            show=False,
        )
        self.record(
            start=True,
            command=["records/baseline.py", *sys.argv[1:]],
            commit=commit,
            dirty=dirty,
            source_sha256=sha256,
            hyperparameters=values,
            origins=origins,
            environment=about,
            shards=hashes,
        )

    def write(self, *lines: str, show: bool = True) -> None:
        with open(self.folder / "log.txt", "a", encoding="utf-8") as file:
            print(*lines, sep="\n", file=file)
        if show:
            print(*lines, sep="\n", flush=True)

    def record(self, **values) -> None:
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            print(json.dumps(values), file=file)

    def step(self, hp: Hyperparameters, step: int, kind: str, loss: float, train_ms: float) -> None:
        average = train_ms / step if step else math.nan
        self.write(
            f"step:{step}/{hp.num_steps} {kind}:{loss:.4f} train_time:{train_ms:.0f}ms "
            f"step_avg:{average:.2f}ms"
        )
        self.record(
            step=step, tokens=step * hp.batch_tokens, **{kind: loss}, times_ms=dict(train=train_ms)
        )


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def git_state() -> tuple[str | None, bool]:
    """(commit, changed since?); (None, False) outside a repository."""
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
            )
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"])
        )
        return commit.stdout.strip(), bool(changes.stdout.strip())
    except (OSError, subprocess.CalledProcessError):
        return None, False


def shard_facts(path: str) -> dict:
    """Tokens, and the sha256 that the manifest beside the shard gives it."""
    tokens = (os.path.getsize(path) - HEADER_BYTES) // 2
    try:
        manifest = json.loads((Path(path).parent / "manifest.json").read_text(encoding="utf-8"))
        hashes = {entry["file"]: entry["sha256"] for entry in manifest["shards"]}
    except (OSError, ValueError, KeyError, TypeError):
        hashes = {}
    return dict(tokens=tokens, sha256=hashes.get(Path(path).name))


# Training -----------------------------------------------------------------------------------------


def train(hp: Hyperparameters, given: set[str]) -> None:
    train_tokens, train_paths = read_tokens(hp.train_files)
    val_tokens, val_paths = read_tokens(hp.val_files)
    log = Log(hp, given, train_paths + val_paths)
    torch.manual_seed(hp.seed)
    model = GPT(hp)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    gains = [p for p in model.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW(
        [dict(params=matrices, weight_decay=hp.weight_decay), dict(params=gains, weight_decay=0.0)],
        betas=(hp.beta1, hp.beta2),
    )
    sequences = hp.batch_tokens // hp.sequence_tokens
    generator = torch.Generator().manual_seed(hp.seed)
    log.write(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {hp.num_steps:,} steps of "
        f"{hp.batch_tokens:,} tokens"
    )
    train_ms = 0.0
    since = time.perf_counter()
    for step in range(hp.num_steps + 1):
        if step == hp.num_steps or (hp.val_every and step % hp.val_every == 0):
            train_ms += 1000 * (time.perf_counter() - since)
            val_loss = evaluate(hp, model, val_tokens)
            log.step(hp, step, "val_loss", val_loss, train_ms)
            since = time.perf_counter()
        if step == hp.num_steps:
            break
        starts = torch.randint(
            len(train_tokens) - hp.sequence_tokens, (sequences,), generator=generator
        )
        loss = model(*stack(train_tokens, starts.tolist(), hp.sequence_tokens))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), hp.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(hp, step)
        optimizer.step()
        done = step + 1
        if done % hp.log_every == 0 or done in (1, hp.num_steps):
            now_ms = train_ms + 1000 * (time.perf_counter() - since)
            log.step(hp, done, "train_loss", loss.item(), now_ms)
    reached = "reached" if val_loss <= hp.target_loss else "not reached"
    log.write(
        f"final validation loss {val_loss:.4f} (target {hp.target_loss} {reached}) after "
        f"{hp.num_steps * hp.batch_tokens:,} tokens"
    )
    log.record(end=True, val_loss=val_loss, recompiles=0, times_ms=dict(warmup=0.0, train=train_ms))


def main(arguments: list[str]) -> int:
    try:
        train(*parse_command_line(arguments))
        return 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
