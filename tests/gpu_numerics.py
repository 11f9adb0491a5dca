"""The kernels of a small model and of Muon for sm_90, in Triton's interpreter, against the CPU path.

    python gpu_numerics.py float32|bfloat16
"""
import sys
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
warnings.simplefilter("ignore")

import gpu_interpreter  # noqa: E402, first: it switches the interpreter on
import torch  # noqa: E402
import train_gpt  # noqa: E402

torch._inductor.config.combo_kernels = True  # as train_gpt.start_up has it
torch._inductor.config.combo_kernels_pointwise_only = True
TOLERANCE = dict(float32=1e-4, bfloat16=3e-2)
TOKENS = 3 * train_gpt.BLOCK
DOCUMENT = 0


def small() -> train_gpt.Hyperparameters:
    """Every part of the model: value table, layer without attention, skip; a window that cuts blocks."""
    return train_gpt.Hyperparameters(
        vocab_size=90, vocab_multiple=32, document_token=DOCUMENT, batch_tokens=TOKENS,
        sequence_tokens=TOKENS, num_layers=3, num_heads=2, model_dim=64, window_unit="token_in_block",
        window_start=192, window_end=192, value_layout="ends", no_attention="second_decoder")


def batch(hp: train_gpt.Hyperparameters) -> tuple:
    """Random tokens; documents that start inside, at the edge and across the edges of mask blocks."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, hp.vocab_size, (TOKENS + 1,), generator=generator)
    tokens[[0, 30, 128, 300]] = DOCUMENT
    return tokens[:-1].int(), tokens[1:].long(), torch.tensor(train_gpt.window_at(hp, 0), dtype=torch.int32)


def build(hp, dtype: torch.dtype, attention: str) -> train_gpt.GPT:
    torch.manual_seed(0)
    model = train_gpt.GPT(hp, dtype, attention)
    for p in model.parameters():  # where a matrix is zero, gradients say nothing
        if p.ndim == 2 and not p.any():
            torch.nn.init.normal_(p, std=p.size(1) ** -0.5)
        elif p.ndim < 2:
            p.data += 0.1 * torch.randn_like(p)
    return model


def gradients(model, run, inputs) -> dict:
    """The mixes as one vector: alone, a sum that nearly cancels has few digits in bfloat16."""
    loss = run(*inputs)
    loss.backward()
    mixes = torch.cat([p.grad.flatten() for p in model.parameters() if p.ndim < 2])
    return {"loss": loss.detach(), "mixes": mixes,
            **{name: p.grad.float() for name, p in model.named_parameters() if p.ndim == 2}}


def relative_errors(found: dict, wanted: dict) -> dict:
    return {name: ((found[name] - wanted[name]).norm() / wanted[name].norm().clamp_min(1e-12)).item()
            for name in wanted}


def check(dtype: str) -> None:
    hp, kind = small(), getattr(torch, dtype)
    inputs = batch(hp)
    on_cpu, lowered = build(hp, kind, "banded"), build(hp, kind, "flex")
    wanted = gradients(on_cpu, on_cpu, inputs)
    compiled = torch.compile(lowered, backend=gpu_interpreter.backend, fullgraph=True)
    found = gradients(lowered, compiled, inputs)
    errors = relative_errors(found, wanted)
    worst = max(errors, key=errors.get)
    launched = gpu_interpreter.launched
    print(f"{dtype}: loss {found['loss']:.6f}, on the CPU {wanted['loss']:.6f}; worst relative error "
          f"{errors[worst]:.1e} ({worst}) of {len(errors)}; {len(launched)} launches")
    assert any("flex_attention_backward" in name for name in launched), "the flex kernels did not run"
    assert errors[worst] < TOLERANCE[dtype], errors


@torch.no_grad()
def check_muon(dtype: str) -> None:
    """Two steps of tall, wide and square matrices; rate and momentum differ, and nothing compiles twice."""
    compile = torch.compile
    torch.compile = lambda function, **options: compile(
        function, **{"backend": gpu_interpreter.backend, **options})
    shapes = [(64, 64)] * 3 + [(128, 64), (64, 128)] * 2
    results = []
    for compiled in (False, True):
        params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        muon = train_gpt.Muon(params, weight_decay=0.1, dtype=getattr(torch, dtype), compile=compiled)
        generator = torch.Generator().manual_seed(0)
        for step in (0, 1):
            for group in muon.param_groups:
                group["lr"], group["momentum"] = 0.1 / (1 + step), 0.8 + 0.1 * step
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
            muon.step()
        results.append([p - 1 for p in params])
    errors = relative_errors(*(dict(enumerate(result)) for result in reversed(results)))
    print(f"{dtype}: Muon's worst relative error {max(errors.values()):.1e}")
    assert any("for_fused" in name for name in gpu_interpreter.launched), "updates were not applied as one"
    assert max(errors.values()) < TOLERANCE[dtype], errors
    assert train_gpt.compiled_graphs() == 4, "one of each function for each of the two sizes"


if __name__ == "__main__":
    check_muon(sys.argv[1])
    check(sys.argv[1])
