"""The kernels of a small model and of Muon, in Triton's interpreter, against the CPU path.

    python fake_gpu.py --depth=numbers numerics.py float32|bfloat16|cut
"""
import functools
import sys
from types import SimpleNamespace

import interpreter
import torch
import torch._dynamo.backends.distributed as cutting
import train_gpt
from torch.nn.parallel import DistributedDataParallel

TOLERANCE = dict(float32=1e-4, bfloat16=3e-2)
TOKENS = 3 * train_gpt.BLOCK
DOCUMENT = 0


def small() -> train_gpt.Hyperparameters:
    """Every part of the model: value table, layer without attention, skip; windows in tokens."""
    return train_gpt.Hyperparameters(
        vocab_size=90, vocab_multiple=32, document_token=DOCUMENT, batch_tokens=TOKENS,
        sequence_tokens=TOKENS, num_layers=3, num_heads=2, model_dim=64,
        window_unit="token_in_block", window_start=192, window_end=192, value_layout="ends",
        no_attention="second_decoder", short_window_layers=(1,), fp8_head=False)


def batch(hp: train_gpt.Hyperparameters) -> tuple:
    """Random tokens; documents that start inside, at the edge and across edges of mask blocks."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, hp.vocab_size, (TOKENS + 1,), generator=generator)
    tokens[[0, 30, 128, 300]] = DOCUMENT
    window = torch.tensor(train_gpt.window_at(hp, 0), dtype=torch.int32)
    return tokens[:-1].int(), tokens[1:].long(), window


def build(hp, dtype: torch.dtype, attention: str) -> train_gpt.GPT:
    torch.manual_seed(0)
    model = train_gpt.GPT(hp, train_gpt.Hardware(dtype=dtype, attention=attention))
    for p in model.parameters():  # where a matrix is zero, gradients say nothing
        if p.ndim == 2 and not p.any():
            torch.nn.init.normal_(p, std=p.size(1) ** -0.5)
        elif p.ndim < 2:
            p.data += torch.randn_like(p)
    return model


def gradients(model, run, inputs) -> dict:
    loss = run(*inputs)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad.float() for name, p in model.named_parameters()}}


def relative_errors(found: dict, wanted: dict) -> dict:
    return {name: ((found[name] - exact).norm() / exact.norm().clamp_min(1e-12)).item()
            for name, exact in wanted.items()}


def check(dtype: str) -> None:
    """Kernels and the CPU path, both against the CPU path in float32.

    In bfloat16 the CPU path itself is off by 1 %, and by up to 5 % where a mix, a sum of two,
    nearly cancels: the kernels may be off by twice as much. They round less often: for matrices
    they have 0.7 to 0.9 of its error. The error of a single mix is chance, so the worst of all
    mixes is compared with the worst.
    """
    hp = small()
    kind = getattr(torch, dtype)
    inputs = batch(hp)
    exact = build(hp, torch.float32, "banded")
    on_cpu = build(hp, kind, "banded")
    lowered = build(hp, kind, "flex")
    exact.load_state_dict(on_cpu.state_dict())  # embeddings are rounded
    wanted = gradients(exact, exact, inputs)
    compiled = torch.compile(lowered, backend=interpreter.backend, fullgraph=True)
    errors = relative_errors(gradients(lowered, compiled, inputs), wanted)
    allowed = relative_errors(gradients(on_cpu, on_cpu, inputs), wanted)
    mixes = [name for name, gradient in wanted.items() if gradient.numel() <= 2]
    for group in (mixes, *([name] for name in wanted if name not in mixes)):
        worst = max(errors[name] for name in group)
        bound = max(1e-5, 2 * max(allowed[name] for name in group))
        if group is not mixes:
            bound = min(bound, TOLERANCE[dtype])
        print(f"{dtype}: error {worst:.1e} of {bound:.1e} allowed: {group}")
        assert worst < bound, group
    assert any("flex_attention_backward" in name for name in interpreter.launched)
    if dtype == "bfloat16":  # the control: what another window changes is far outside these bounds
        lowered.zero_grad()
        narrower = inputs[2] - torch.tensor([64, 0], dtype=torch.int32)
        other = relative_errors(gradients(lowered, compiled, (*inputs[:2], narrower)), wanted)
        name = "blocks.0.attention.query.weight"
        print(f"another window: error {other[name]:.1e}")
        assert other[name] > 5 * allowed[name] and other[name] > 2 * TOLERANCE[dtype]


def check_cut() -> None:
    """The graph cut in pieces: DDP reduces the gradients of one while the next is computed."""
    pieces = []
    compile_piece = cutting.SubmodCompiler.compile_submod

    def counting(*arguments):
        pieces.append(1)
        return compile_piece(*arguments)

    cutting.SubmodCompiler.compile_submod = counting
    hp = small()
    exact = build(hp, torch.float32, "banded")
    lowered = build(hp, torch.float32, "flex")
    wanted = gradients(exact, exact, batch(hp))
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 20_000
    DistributedDataParallel._active_ddp_module = SimpleNamespace(bucket_bytes_cap=40_000)
    compiled = torch.compile(lowered, backend=interpreter.backend, fullgraph=True)
    errors = relative_errors(gradients(lowered, compiled, batch(hp)), wanted)
    print(f"{len(pieces)} pieces, worst relative error {max(errors.values()):.1e}")
    assert len(pieces) > 5 and max(errors.values()) < TOLERANCE["float32"], errors


@torch.no_grad()
def check_muon(dtype: str) -> None:
    """Two steps of tall, wide and square matrices; rate and momentum change without recompiling."""
    torch.compile = functools.partial(torch.compile, backend=interpreter.backend)
    shapes = [(64, 64)] * 3 + [(128, 64), (64, 128)] * 2
    results = []
    for compiled in (False, True):
        params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        muon = train_gpt.Muon(params, weight_decay=0.1, dtype=getattr(torch, dtype),
                              compiled=compiled)
        generator = torch.Generator().manual_seed(0)
        for step in (0, 1):
            for group in muon.param_groups:
                group["lr"] = 0.1 / (1 + step)
                group["momentum"] = 0.8 + 0.1 * step
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
            muon.step()
        results.append([p - 1 for p in params])
    wanted, found = (dict(enumerate(result)) for result in results)
    errors = relative_errors(found, wanted)
    print(f"{dtype}: Muon's worst relative error {max(errors.values()):.1e}")
    assert any("for_fused" in name for name in interpreter.launched), "one kernel for all updates"
    assert max(errors.values()) < TOLERANCE[dtype], errors
    assert train_gpt.count_compiled_graphs() == 4, "one of each function for each of the two sizes"


def main(what: str) -> None:
    if what == "cut":
        check_cut()
    else:
        check_muon(what)
        check(what)


if __name__ == "__main__":
    main(sys.argv[1])
