"""Benchmarks: ./run.sh bench [NAME …]

Ratios only, each against a reference that is measured interleaved in the same run.

./run.sh bench gpu [--card=H100] [--world_size=8] [--name=value …] instead models a step on a GPU
from its bytes and FLOPs (tests/gpu/cost_model.py); it needs none. Options of train_gpt.py follow.
"""
import argparse
import contextlib
import functools
import io
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).resolve().parents[depth]) for depth in (1, 2)]
from helpers import make_data, make_trainer, run, write_shard  # noqa: E402

import train_gpt  # noqa: E402

ROUNDS = 7


def interleaved(**functions) -> dict[str, float]:
    """The best time of each function; one call of each in turn: all see the same machine."""
    for function in functions.values():
        function()
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(ROUNDS):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


# ---- the whole step ----

def model_flops(hp: train_gpt.Hyperparameters, model: train_gpt.GPT) -> float:
    """Of a training step: matrices, and attention over the keys that a query may see."""
    matrices = sum(p.numel() for name, p in model.named_parameters()
                   if p.ndim == 2 and "embed" not in name)
    window_blocks = train_gpt.window_at(hp, hp.num_steps)[1]
    keys = train_gpt.BLOCK * (window_blocks - 0.5)  # half of the own block, all of the others
    keys = min(keys, hp.segment_tokens / 2)
    attention_layers = hp.num_layers - len(train_gpt.layers_without_attention(hp))
    attention = 2 * attention_layers * hp.model_dim * keys
    return 6 * hp.batch_tokens * (matrices + attention)


def do_step(trainer: train_gpt.Trainer, batch: list) -> None:
    trainer.step(batch, 0)
    trainer.read_losses()


def bench_step(folder: Path) -> list[tuple]:
    """Model FLOP/s of whole steps (forward, backward, optimizers) over those of a matrix product.
    """
    shapes = {"laptop preset": [],
              "width 256": ["--model_dim=256", "--num_heads=4", "--batch_tokens=8192",
                            "--sequence_tokens=8192"]}
    bounds = {"laptop preset": None, "width 256": 0.5}
    data = make_data(folder, vocab_size=257, tokens=400_000, document_token=256)
    square = torch.randn(1024, 1024)
    rows = []
    for name, options in shapes.items():
        hp = train_gpt.parse_command_line(["--preset=laptop", "--device=cpu", *data,
                                           "--val_tokens=8192", "--val_start=0", "--num_steps=40",
                                           *options])
        trainer = make_trainer(hp)
        batch = trainer.data.train.next_batch()
        times = interleaved(step=lambda: do_step(trainer, batch), product=lambda: square @ square)
        step_flops = model_flops(hp, trainer.model) / times["step"]
        product_flops = 2 * 1024**3 / times["product"]
        rows.append((f"training step, {name}: model FLOP/s over fp32 matmul FLOP/s",
                     step_flops / product_flops, ">=", bounds[name]))
    return rows


# ---- how cost grows ----

SWEEPS = {  # what is varied: its values, and the options for one of them
    "width": ((64, 128, 256), lambda n: [f"--model_dim={n}", f"--num_heads={n // 32}"]),
    "depth": ((2, 4, 8), lambda n: [f"--num_layers={n}"]),
    "sequence length": ((2048, 4096, 8192), lambda n: [f"--sequence_tokens={n}",
                                                       f"--batch_tokens={n}"]),
    "window": ((256, 512, 1024), lambda n: ["--segment_tokens=4096", f"--window_start={n}",
                                            f"--window_end={n}"])}


def exponent(sizes: tuple, costs: list[float]) -> float:
    """Of the power law through the costs: the slope on logarithmic axes."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def bench_scaling(folder: Path) -> list[tuple]:
    """Exponents of the time per token; its FLOPs may not grow more slowly, with some tolerance."""
    data = make_data(folder, vocab_size=257, tokens=400_000, document_token=256)
    base = ["--preset=laptop", "--device=cpu", *data, "--val_tokens=8192", "--val_start=0",
            "--num_steps=40"]
    rows = []
    for name, (sizes, options_of) in SWEEPS.items():
        steps = {}
        flops = []
        for size in sizes:
            trainer = make_trainer(train_gpt.parse_command_line([*base, *options_of(size)]))
            batch = trainer.data.train.next_batch()
            steps[str(size)] = functools.partial(do_step, trainer, batch)
            flops.append((trainer.hp.batch_tokens, model_flops(trainer.hp, trainer.model)))
        times = interleaved(**steps)
        measured = exponent(sizes, [times[str(size)] / tokens
                                    for size, (tokens, _) in zip(sizes, flops)])
        predicted = exponent(sizes, [total / tokens for tokens, total in flops])
        rows.append((f"time per token, exponent of the {name} over {sizes[0]} … {sizes[-1]} (that "
                     f"of the FLOPs: {predicted:.2f})", measured, "<=", round(predicted + 0.2, 2)))
    ranks = (1, 2)
    rounds = [[step_ms(base, number) for number in ranks] for _ in range(3)]
    best = np.min(rounds, axis=0)
    rows.append(("time per token, exponent of the ranks over 1 … 2, one thread each (at best -1)",
                 exponent(ranks, best), "<=", None))
    return rows


def step_ms(options: list[str], ranks: int) -> float:
    """Of a run in processes of its own, without its first steps."""
    process = run([*options, "--num_steps=12", "--sequence_tokens=2048", "--log_every=1",
                   "--save_model=false", "--sample_tokens=0"], ranks)
    times = [int(ms) for ms in re.findall(r"train_loss:\S+ train_time:(\d+)ms", process.stdout)]
    return (times[-1] - times[3]) / (len(times) - 4)


# ---- attention ----

def attention_step(tokens: int, window: int, unit: str = "block", heads: int = 4,
                   head_dim: int = 64):
    """Forward and backward of the banded attention, as a function."""
    q, k, v = (torch.randn(tokens, heads, head_dim, requires_grad=True) for _ in range(3))
    size = (window, train_gpt.NO_LIMIT)
    if unit == "block":
        size = (train_gpt.NO_LIMIT, window // train_gpt.BLOCK)
    documents = torch.zeros(tokens, dtype=torch.int32)
    mask = train_gpt.build_mask(documents, torch.tensor(size, dtype=torch.int32),
                                train_gpt.Hardware(), train_gpt.blocks_back(*size))
    grad = torch.randn(tokens, heads, head_dim)
    return lambda: train_gpt.attend(q, k, v, mask).backward(grad)


def dense_step(tokens: int, heads: int = 4, head_dim: int = 64):
    q, k, v = (torch.randn(1, heads, tokens, head_dim, requires_grad=True) for _ in range(3))
    grad = torch.randn(1, heads, tokens, head_dim)
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(grad)


def bench_attention(folder: Path) -> list[tuple]:
    times = interleaved(short=attention_step(8192, 512), long=attention_step(16384, 512),
                        dense=dense_step(8192), tokens=attention_step(8192, 512, unit="token"))
    return [("banded attention: 16,384 tokens over 8,192, window 512",
             times["long"] / times["short"], "<=", 2.2),
            ("banded attention: dense causal SDPA over ours, 8,192 tokens, window 512",
             times["dense"] / times["short"], ">=", 5.0),
            ("the same, window compared token by token", times["dense"] / times["tokens"], ">=",
             None)]


# ---- Muon, loader ----

def bench_muon(folder: Path) -> list[tuple]:
    """Our step over torch.optim.Muon's, on the matrices of the laptop preset and of width 256."""
    hp = train_gpt.parse_command_line(["--preset=laptop", "--device=cpu"])
    hardware = train_gpt.find_hardware(hp)
    rows = []
    for width in (128, 256):
        shapes = [(width, width)] * 16 + [(4 * width, width), (width, 4 * width)] * 4
        ours, theirs = ([torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
                        for _ in range(2))
        for p in (*ours, *theirs):
            p.grad = torch.randn_like(p)
        muon = train_gpt.Muon(ours, lr=0.02, dtype=hardware.muon_dtype)
        reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.0)
        times = interleaved(ours=muon.step, theirs=reference.step)
        rows.append((f"Muon step over torch.optim.Muon's, width {width}",
                     times["ours"] / times["theirs"], "<=", 1.0))
    return rows


def bench_loader(folder: Path) -> list[tuple]:
    """Tokens per second that the loader reads and checks, over a plain copy of as many."""
    tokens = 2**22
    num_batches = 8
    content = np.random.default_rng(0).integers(0, 50_000, num_batches * tokens + 1)
    write_shard(folder / "loader.bin", content)
    loader = train_gpt.Loader(str(folder / "loader.bin"), tokens, tokens, vocab_size=50_257)
    source = np.ones(tokens, np.uint16)
    target = np.ones(tokens, np.uint16)
    numbers = itertools.cycle(range(num_batches))
    times = interleaved(read=lambda: loader.read(next(numbers)),
                        copy=lambda: np.copyto(target, source))
    return [("loader bandwidth over memcpy's", times["copy"] / times["read"], ">=", 0.5)]


# ---- checkpoints ----

def bench_checkpoint(folder: Path) -> list[tuple]:
    """How long a checkpoint and the parameter hash stop the training; how often it copies."""
    data = make_data(folder, vocab_size=257, tokens=700_000, document_token=256)
    hp = train_gpt.parse_command_line(["--preset=laptop", "--device=cpu", *data,
                                       "--val_tokens=8192", "--val_start=0", "--num_steps=100",
                                       "--keep_checkpoints=1"])
    trainer = make_trainer(hp)
    steps = itertools.count(1)
    batch = trainer.data.train.next_batch()
    with contextlib.redirect_stdout(io.StringIO()):
        log = train_gpt.Logger(train_gpt.Run(folder / "run"), hp, trainer.hardware, trainer.data)
    two_ranks = types.SimpleNamespace(hp=hp, model=trainer.model,
                                      hardware=train_gpt.Hardware(world_size=2))

    with train_gpt.Saver(folder / "run", enabled=True) as saver, without_all_gather():
        times = interleaved(
            step=lambda: do_step(trainer, batch),
            hash=lambda: train_gpt.check_ranks_agree(two_ranks, 1),
            pause=lambda: train_gpt.save_checkpoint(trainer, saver, log, next(steps)))
    return [("pause per checkpoint, in hundredths of a step, laptop preset",
             100 * times["pause"] / times["step"], "<=", 20.0),
            ("parameter hash, in hundredths of a step, laptop preset",
             100 * times["hash"] / times["step"], "<=", 5.0),
            ("bytes copied per checkpoint over its size, h100 preset", copies_of_a_checkpoint(data),
             "<=", 1.0)]


@contextlib.contextmanager
def without_all_gather():
    """As if the other rank had sent what this one has."""
    all_gather = train_gpt.dist.all_gather_single
    train_gpt.dist.all_gather_single = lambda everyone, own: everyone.view(2, -1).copy_(own)
    try:
        yield
    finally:
        train_gpt.dist.all_gather_single = all_gather


def copies_of_a_checkpoint(data: list[str]) -> float:
    """Without a step, which would take minutes here: moments of the right sizes."""
    hp = train_gpt.parse_command_line(["--preset=h100", "--device=cpu", "--compile=no",
                                       "--align_documents=false",
                                       "--num_steps=1", "--val_tokens=1024", "--batch_tokens=1024",
                                       "--sequence_tokens=1024", *data])
    trainer = make_trainer(hp)
    adam = trainer.adam
    for p in (p for group in adam.param_groups for p in group["params"]):
        adam.state[p] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p),
                         "exp_avg_sq": torch.zeros_like(p)}
    copied = []
    to = torch.Tensor.to

    def counted_to(x, *where, **how):
        if how.get("copy"):
            copied.append(x.nbytes)
        return to(x, *where, **how)

    torch.Tensor.to = counted_to
    try:
        state = train_gpt.copy_to_host(trainer.state_dict())
    finally:
        torch.Tensor.to = to
    return sum(copied) / sum(tensor.nbytes for tensor in tensors_in(state))


def tensors_in(state) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, list):
        return [tensor for value in state for tensor in tensors_in(value)]
    return []


# ---- tokenizing ----

def bench_tokenizing(folder: Path) -> list[tuple]:
    """data/tokenize_text.py on one core, over tiktoken alone and over 100 MB/s."""
    import bench_data
    ratios = bench_data.measure(bench_data.made_up_text(bench_data.BPE_BYTES))
    return [(f"tokenizing: {name}", ratio, ">=", bench_data.REQUIRED[name])
            for name, ratio in ratios.items()]


BENCHMARKS = {"step": bench_step, "scaling": bench_scaling, "attention": bench_attention,
              "muon": bench_muon, "loader": bench_loader, "tokenizing": bench_tokenizing,
              "checkpoint": bench_checkpoint}


# ---- the model of a step on a GPU ----

def model_gpu_step(arguments: list[str]) -> int:
    """In a process of its own, which pretends to have the card."""
    folder = Path(__file__).resolve().parents[1] / "gpu"
    parser = argparse.ArgumentParser(prog="./run.sh bench gpu", allow_abbrev=False)
    parser.add_argument("--card", default="H100", help="of tests/gpu/cost_model.py: RATES")
    parser.add_argument("--world_size", type=int, help="ranks; default: 8, for the laptop preset 1")
    options, hyperparameters = parser.parse_known_args(arguments)
    world_size = options.world_size
    if world_size is None:
        world_size = 1 if any("laptop" in argument for argument in hyperparameters) else 8
    process = subprocess.run(
        [sys.executable, "-W", "ignore", folder / "fake_gpu.py", f"--card={options.card}",
         "--depth=wrapper", f"--world_size={world_size}", folder / "cost_model.py",
         *hyperparameters],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "TORCH_LOGS": "-all"})
    *lines, numbers = process.stdout.splitlines() or [""]
    print(*lines, *([] if numbers.startswith("{") else [numbers]), sep="\n")
    return process.returncode


def is_met(ratio: float, sign: str, bound: float | None) -> bool:
    if bound is None:
        return True
    return ratio >= bound if sign == ">=" else ratio <= bound


def main() -> int:
    if sys.argv[1:2] == ["gpu"]:
        return model_gpu_step(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help=f"which of {', '.join(BENCHMARKS)}; default: all")
    names = parser.parse_args().names or list(BENCHMARKS)
    unknown = set(names) - BENCHMARKS.keys()
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: no such benchmark; there are "
                     f"{', '.join(BENCHMARKS)}")
    print(f"{'ratio':>8}  {'wanted':>8}  what")
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            for what, ratio, sign, bound in BENCHMARKS[name](Path(folder)):
                wanted = "" if bound is None else f"{sign} {bound}"
                verdict = ""
                if not is_met(ratio, sign, bound):
                    verdict = "   MISSED"
                    missed += 1
                print(f"{ratio:8.2f}  {wanted:>8}  {what}{verdict}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
