"""Mistakes that the harness has to catch; each prints a line, and the last line is the names of those caught.

    python gpu_negative.py
"""
import dataclasses
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
warnings.simplefilter("ignore")
os.environ["TORCH_LOGS"] = "-all"

import fake_gpu  # noqa: E402

fake_gpu.install("H100")
fake_gpu.join(0, 8)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: E402
from triton.compiler.compiler import max_shared_mem  # noqa: E402


def cuda(*shape, dtype=torch.bfloat16, device="cuda"):
    return torch.randn(*shape, dtype=dtype, device=device)


def attention(shared_limit: int = 227 * 2**10):
    fake_gpu.card = dataclasses.replace(fake_gpu.card, shared_limit=shared_limit)
    max_shared_mem.cache_clear()
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cuda")
    q = cuda(1, 1, 256, 128)
    return torch.compile(flex_attention)(q, q, q, block_mask=mask)


RIGHT = {
    "all_reduce": lambda: dist.all_reduce(cuda(8)),
    "all_gather": lambda: dist.all_gather_single(cuda(32), cuda(4)),
    "attention": attention,
    "product": lambda: torch.compile(lambda a, b: a @ b)(cuda(8, 8), cuda(8, 8)),
}
WRONG = {  # the mistake, and a word of what has to be said about it
    "devices": lambda: torch.compile(lambda a, b: a + b)(cuda(8), cuda(8, device="cpu")),
    "same device": lambda: cuda(8) + cuda(8, device="cpu"),
    "one dtype": lambda: torch.compile(lambda a, b: a @ b)(cuda(8, 8), cuda(8, 8, dtype=torch.float32)),
    "resource": lambda: attention(shared_limit=16 * 2**10),
    "ranks × the input": lambda: dist.all_gather_single(cuda(30), cuda(4)),
    "one dtype expected": lambda: dist.all_gather_single(cuda(32, dtype=torch.float32), cuda(4)),
    "ranks × the output": lambda: dist.reduce_scatter_tensor(cuda(4), cuda(30)),
    "NCCL needs CUDA": lambda: dist.all_reduce(cuda(8, device="cpu")),
    "contiguous": lambda: dist.all_reduce(cuda(8, 8).t()[1:]),
    "print": lambda: torch.compile(lambda a: (a + 1, print("break"))[0] * 2, fullgraph=True)(cuda(8)),
    "device_id": lambda: dist.init_process_group("nccl", device_id=torch.device("cuda:5")),
}


def attempt(function) -> str:
    """What it raised, or nothing."""
    torch._dynamo.reset()
    try:
        with fake_gpu.session():
            function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
    for name, function in RIGHT.items():
        assert not (said := attempt(function)), f"right, and refused: {name}: {said[:500]}"
    for words, function in WRONG.items():
        said = attempt(function)
        print(f"{words}: {said.strip()[:150]!r}")
        assert words in said, f"wrong, and not caught: {words}: {said[:500]!r}"
    print(f"{len(WRONG)} mistakes caught")


if __name__ == "__main__":
    main()
