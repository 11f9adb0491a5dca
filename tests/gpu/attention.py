"""Lower FlexAttention, forward and backward, under the mask of train_gpt.py.

    python fake_gpu.py --card=4090 --depth=ptx attention.py HEAD_DIM

Prints what the kernels need, as JSON.
"""
import json
import sys

import fake_gpu
import torch
import train_gpt
from torch.nn.attention.flex_attention import flex_attention

TOKENS = 8192
HEADS = 6


def lower(head_dim: int) -> str:
    """What went wrong, or nothing."""
    def attend(q, k, v, documents, window):
        mask = train_gpt.flex_block_mask(documents, window)
        return flex_attention(q, k, v, block_mask=mask)

    q, k, v = (torch.randn(1, HEADS, TOKENS, head_dim, device="cuda", dtype=torch.bfloat16,
                           requires_grad=True) for _ in range(3))
    documents = torch.zeros(TOKENS, dtype=torch.int32, device="cuda")
    window = torch.zeros(2, dtype=torch.int32, device="cuda")
    compiled = torch.compile(attend, fullgraph=True, dynamic=False)
    try:
        compiled(q, k, v, documents, window).sum().backward()
    except Exception as error:  # whatever it is: the caller judges
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


def main(arguments: list[str]) -> None:
    head_dim = int(arguments[0])
    limit = fake_gpu.card.shared_limit
    error = lower(head_dim)
    kernels = [kernel for kernel in fake_gpu.seen.kernels if "tem_fused" in kernel["name"]]
    print(json.dumps(dict(head_dim=head_dim, limit=limit, error=error,
                          unpipelined=fake_gpu.seen.unpipelined, kernels=kernels)))


if __name__ == "__main__":
    main(sys.argv[1:])
