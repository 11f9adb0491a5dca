"""Benchmarks: ./run.sh bench. Ratios only, each against a reference measured interleaved in the same run."""
import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).resolve().parents[depth]) for depth in (1, 2)]
import train_gpt  # noqa: E402
from helpers import make_data, write_shard  # noqa: E402

ROUNDS = 7


def interleaved(**functions) -> dict[str, float]:
    """The best time of each function; one call of each in turn, so that all see the same machine."""
    for function in functions.values():
        function()
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(ROUNDS):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def model_flops(hp: train_gpt.Hyperparameters, model: train_gpt.GPT) -> float:
    """Multiplications and additions of a training step: matrices, and attention over the keys that a query may see."""
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    keys = train_gpt.BLOCK * (train_gpt.window_at(hp, hp.num_steps)[1] - 0.5)  # half of the own block, all of the others
    attention = 2 * (hp.num_layers - len(hp.layers_without_attention)) * hp.model_dim * min(keys, hp.segment_tokens / 2)
    return 6 * hp.batch_tokens * (matrices + attention)


def bench_step(folder: Path) -> list[tuple]:
    """Model FLOP/s of whole steps (forward, backward, optimizers) over the FLOP/s of a plain fp32 matrix product."""
    shapes = {"laptop preset": [], "width 256": ["--model_dim=256", "--num_heads=4", "--batch_tokens=8192",
                                                  "--sequence_tokens=8192"]}
    rows = []
    square = torch.randn(1024, 1024)
    for name, options in shapes.items():
        data = make_data(folder, vocab_size=257, tokens=400_000, document_token=256)
        hp = train_gpt.parse_command_line(["--preset=laptop", "--device=cpu", *data, "--val_tokens=8192",
                                           "--num_steps=40", *options])
        trainer = make_trainer(hp)
        batch = trainer.data.train.next_batch()
        times = interleaved(step=lambda: trainer.step(batch, 0), product=lambda: square @ square)
        ratio = model_flops(hp, trainer.model) / times["step"] / (2 * 1024**3 / times["product"])
        rows.append((f"training step, {name}: model FLOP/s over fp32 matmul FLOP/s", ratio, ">=",
                     0.5 if name == "width 256" else None))
    return rows


def attention_step(tokens: int, window: int, unit: str = "block", heads: int = 4, head_dim: int = 64):
    q, k, v = (torch.randn(tokens, heads, head_dim, requires_grad=True) for _ in range(3))
    size = torch.tensor((train_gpt.NO_LIMIT, window // 128) if unit == "block" else (window, train_gpt.NO_LIMIT), dtype=torch.int32)
    inputs = torch.ones(tokens, dtype=torch.int32)
    mask = train_gpt.build_mask(inputs, size, 0, 0, "banded", train_gpt.blocks_back(*size.tolist()))
    grad = torch.randn(tokens, heads, head_dim)
    return lambda: train_gpt.attend(q, k, v, mask).backward(grad)


def dense_step(tokens: int, heads: int = 4, head_dim: int = 64):
    q, k, v = (torch.randn(1, heads, tokens, head_dim, requires_grad=True) for _ in range(3))
    grad = torch.randn(1, heads, tokens, head_dim)
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(grad)


def bench_attention(folder: Path) -> list[tuple]:
    times = interleaved(short=attention_step(8192, 512), long=attention_step(16384, 512), dense=dense_step(8192),
                        tokens=attention_step(8192, 512, unit="token"))
    return [("banded attention: 16,384 tokens over 8,192, window 512", times["long"] / times["short"], "<=", 2.2),
            ("banded attention: dense causal SDPA over ours, 8,192 tokens, window 512",
             times["dense"] / times["short"], ">=", 5.0),
            ("the same, window compared token by token", times["dense"] / times["tokens"], ">=", None)]


def bench_muon(folder: Path) -> list[tuple]:
    """Our step over torch.optim.Muon's, on copies of the same parameters: those of width 256, and of the preset."""
    rows = []
    for width in (128, 256):
        shapes = [(width, width)] * 16 + [(4 * width, width), (width, 4 * width)] * 4
        ours, theirs = ([torch.nn.Parameter(torch.randn(shape)) for shape in shapes] for _ in range(2))
        for p in (*ours, *theirs):
            p.grad = torch.randn_like(p)
        hardware = train_gpt.find_hardware(train_gpt.parse_command_line(["--preset=laptop", "--device=cpu"]))
        muon = train_gpt.Muon(ours, lr=0.02, dtype=hardware.muon_dtype)
        reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.0)
        times = interleaved(ours=muon.step, theirs=reference.step)
        rows.append((f"Muon step over torch.optim.Muon's, width {width}", times["ours"] / times["theirs"], "<=", 1.0))
    return rows


def bench_loader(folder: Path) -> list[tuple]:
    """Bytes of tokens per second that the loader reads, checks and hands over, against a plain copy of as many."""
    tokens = 2**22
    write_shard(folder / "loader.bin", np.random.default_rng(0).integers(0, 50_000, 8 * tokens + 1))
    loader = train_gpt.Loader(str(folder / "loader.bin"), tokens, tokens, vocab_size=50_257)
    source, target = np.ones(tokens, np.uint16), np.ones(tokens, np.uint16)
    index = iter(range(10**9))
    times = interleaved(read=lambda: loader.read(next(index) % 8), copy=lambda: np.copyto(target, source))
    return [("loader bandwidth over memcpy's", times["copy"] / times["read"], ">=", 0.5)]


def bench_checkpoint(folder: Path) -> list[tuple]:
    """What a checkpoint and the parameter hash hold training up for, in steps; how often a checkpoint copies."""
    data = make_data(folder, vocab_size=257, tokens=700_000, document_token=256)
    hp = train_gpt.parse_command_line(["--preset=laptop", "--device=cpu", *data, "--val_tokens=8192"])
    trainer = make_trainer(hp)
    log = train_gpt.Logger(hp, trainer.hardware, folder / "run")
    clock, batch = train_gpt.Clock(trainer.hardware.device), trainer.data.train.next_batch()
    times = interleaved(step=lambda: trainer.step(batch, 0), hash=trainer.check_ranks_agree,
                        pause=lambda: log.save("checkpoint_0000001.pt", trainer.state(1, clock, log.sizes()), 1))
    log.saved.result()
    return [("pause per checkpoint, in hundredths of a step, laptop preset", 100 * times["pause"] / times["step"], "<=", 20.0),
            ("parameter hash, in hundredths of a step, laptop preset", 100 * times["hash"] / times["step"], "<=", 5.0),
            ("bytes copied per checkpoint over its size, h100 preset", copies_of_a_checkpoint(data), "<=", 1.0)]


def copies_of_a_checkpoint(data: list[str]) -> float:
    """Without a step, which would take minutes here: moments of the right sizes."""
    hp = train_gpt.parse_command_line(["--preset=h100", "--device=cpu", "--compile=no", "--num_steps=1", "--val_tokens=1024",
                                       "--batch_tokens=1024", "--sequence_tokens=1024", *data])
    trainer, copied = make_trainer(hp), []
    adam, muon = trainer.optimizers
    for optimizer, names in ((adam, ("exp_avg", "exp_avg_sq")), (muon, ("momentum_buffer",))):
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            optimizer.state[p] = {name: torch.zeros_like(p) for name in names}
    to = torch.Tensor.to
    torch.Tensor.to = lambda x, *where, **how: (copied.append(x.nbytes * how.get("copy", False)), to(x, *where, **how))[1]
    state = trainer.state(0, train_gpt.Clock(trainer.hardware.device), [0, 0])
    torch.Tensor.to = to
    held = [x.nbytes for part in (state["model"], state["muon"], *state["adam"].values()) for x in part.values()]
    return sum(copied) / sum(held)


def bench_tokenizing(folder: Path) -> list[tuple]:
    """data/tokenize_text.py in one process, seconds of one core, against tiktoken alone and against 100 MB/s."""
    import bench_data
    ratios = bench_data.measure(bench_data.made_up_text(bench_data.BPE_BYTES))
    return [(f"tokenizing: {name}", ratio, ">=", bench_data.REQUIRED[name]) for name, ratio in ratios.items()]


BENCHMARKS = {"step": bench_step, "attention": bench_attention, "muon": bench_muon, "loader": bench_loader,
              "tokenizing": bench_tokenizing,
              "checkpoint": bench_checkpoint}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(BENCHMARKS)}; default: all")
    names = parser.parse_args().names or list(BENCHMARKS)
    if unknown := set(names) - BENCHMARKS.keys():
        parser.error(f"{', '.join(unknown)}: no such benchmark; there are {', '.join(BENCHMARKS)}")
    print(f"{'ratio':>8}  {'wanted':>8}  what")
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            for what, ratio, sign, bound in BENCHMARKS[name](Path(folder)):
                met = bound is None or (ratio >= bound if sign == ">=" else ratio <= bound)
                missed += not met
                wanted = "" if bound is None else f"{sign} {bound}"
                print(f"{ratio:8.2f}  {wanted:>8}  {what}{'' if met else '   MISSED'}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
