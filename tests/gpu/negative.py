"""Mistakes that the harness has to catch, each after something similar that is right.

    python fake_gpu.py --depth=ptx --world_size=8 negative.py
"""
import dataclasses

import fake_gpu
import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from triton.compiler.compiler import max_shared_mem


def cuda(*shape, dtype=torch.bfloat16, device="cuda"):
    return torch.randn(*shape, dtype=dtype, device=device)


def attention(shared_limit: int = 227 * 2**10):
    fake_gpu.card = dataclasses.replace(fake_gpu.card, shared_limit=shared_limit)
    max_shared_mem.cache_clear()
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cuda")
    q = cuda(1, 1, 256, 128)
    return torch.compile(flex_attention)(q, q, q, block_mask=mask)


def add(a, b):
    return torch.compile(lambda a, b: a + b)(a, b)


def multiply(a, b):
    return torch.compile(lambda a, b: a @ b)(a, b)


def break_the_graph():
    @torch.compile(fullgraph=True)
    def printing(a):
        a = a + 1
        print("break")
        return a * 2
    return printing(cuda(8))


RIGHT = {
    "all_reduce": lambda: dist.all_reduce(cuda(8)),
    "all_gather": lambda: dist.all_gather_single(cuda(32), cuda(4)),
    "attention": attention,
    "product": lambda: multiply(cuda(8, 8), cuda(8, 8)),
}
WRONG = {  # words of the error, and the mistake
    "devices": lambda: add(cuda(8), cuda(8, device="cpu")),
    "same device": lambda: cuda(8) + cuda(8, device="cpu"),
    "one dtype": lambda: multiply(cuda(8, 8), cuda(8, 8, dtype=torch.float32)),
    "resource": lambda: attention(shared_limit=16 * 2**10),
    "ranks × the input": lambda: dist.all_gather_single(cuda(30), cuda(4)),
    "one dtype expected": lambda: dist.all_gather_single(cuda(32, dtype=torch.float32), cuda(4)),
    "ranks × the output": lambda: dist.reduce_scatter_tensor(cuda(4), cuda(30)),
    "NCCL needs CUDA": lambda: dist.all_reduce(cuda(8, device="cpu")),
    "contiguous": lambda: dist.all_reduce(cuda(8, 8).t()[1:]),
    "print": break_the_graph,
    "device_id": lambda: dist.init_process_group("nccl", device_id=torch.device("cuda:5")),
}


def attempt(function) -> str:
    """What it raised, or nothing."""
    torch._dynamo.reset()
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
    for name, function in RIGHT.items():
        error = attempt(function)
        assert not error, f"right, and refused: {name}: {error[:500]}"
    for words, function in WRONG.items():
        error = attempt(function)
        print(f"{words}: {error.strip()[:150]!r}")
        assert words in error, f"wrong, and not caught: {words}: {error[:500]!r}"
    print(f"{len(WRONG)} mistakes caught")


if __name__ == "__main__":
    main()
