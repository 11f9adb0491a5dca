"""Lower FlexAttention, forward and backward, under the mask of train_gpt.py for a card.

    python gpu_attention.py CARD HEAD_DIM [TILES as JSON]      prints what the kernels need, as JSON
    PTXAS=1 …                                                  also registers and spills: a minute more
"""
import json
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), os.environ.get("TRAIN_GPT", str(Path(__file__).parents[2]))]

import fake_gpu  # noqa: E402

card, head_dim = sys.argv[1], int(sys.argv[2])
fake_gpu.install(card, configs="first", assemble="PTXAS" in os.environ)  # attention has one

import torch  # noqa: E402
import train_gpt  # noqa: E402
from torch.nn.attention.flex_attention import flex_attention  # noqa: E402

tiles = (json.loads(sys.argv[3]) if len(sys.argv) > 3 else
         train_gpt.flex_tiles(fake_gpu.card.shared_limit, head_dim * torch.bfloat16.itemsize))


def attend(q, k, v, documents, window):
    mask = train_gpt.flex_block_mask(documents, window)
    return flex_attention(q, k, v, block_mask=mask, kernel_options=tiles)


def main() -> None:
    tokens, heads = 8192, 6
    with fake_gpu.session() as seen:
        q, k, v = (torch.randn(1, heads, tokens, head_dim, device="cuda", dtype=torch.bfloat16,
                               requires_grad=True) for _ in range(3))
        documents = torch.zeros(tokens, dtype=torch.int32, device="cuda")
        window = torch.zeros(2, dtype=torch.int32, device="cuda")
        try:
            torch.compile(attend, fullgraph=True, dynamic=False)(q, k, v, documents, window).sum().backward()
            error = ""
        except Exception as problem:  # whatever it is: the caller judges
            error = f"{type(problem).__name__}: {str(problem)[:300]}"
    flex = [kernel for kernel in seen.kernels if "tem_fused" in kernel["name"]]
    print(json.dumps(dict(card=card, head_dim=head_dim, tiles=tiles, limit=fake_gpu.card.shared_limit,
                          error=error, unpipelined=seen.unpipelined, kernels=flex)))


if __name__ == "__main__":
    main()
