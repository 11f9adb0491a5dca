"""The kernels of a GPU, in Triton's interpreter, and FlexAttention, against the CPU path."""
import pytest
import torch
import torch.nn.attention.flex_attention as flex
import train_gpt
from train_gpt import NO_LIMIT
from harness import needs_triton, run, slow


@needs_triton
@pytest.mark.parametrize("what", ["float32", pytest.param("bfloat16", marks=slow),
                                  pytest.param("cut", marks=slow)])
def test_lowered_kernels_agree_with_the_cpu_path(what):
    print(run("numerics.py", what, depth="numbers"))


def listed(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Which blocks are in the ordered lists: bool [query blocks, key blocks]."""
    dense = torch.zeros(indices.shape[-2:], dtype=torch.bool)
    for row, (count, order) in enumerate(zip(counts.flatten(), indices.flatten(0, 2))):
        dense[row, order[:count].long()] = True
    return dense


def as_a_kernel_sees(blocks: flex.BlockMask) -> flex.BlockMask:
    """The mask with its lists of blocks taken into its function, all that eager FlexAttention asks.

    A kernel visits the listed blocks, and asks the function only in partial ones.
    """
    partial = listed(blocks.kv_num_blocks, blocks.kv_indices)
    full = listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    position = torch.arange(blocks.seq_lengths[0])
    query, key = position[:, None], position
    rows, columns = query // train_gpt.BLOCK, key // train_gpt.BLOCK
    dense = full[rows, columns] | partial[rows, columns] & blocks.mask_mod(0, 0, query, key)
    return flex.create_block_mask(lambda b, h, q, k: dense[q, k], None, None, *dense.shape,
                                  device="cpu")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [(NO_LIMIT, 1), (NO_LIMIT, 2), (200, NO_LIMIT), (64, 1),
                                    (250, 2)])
def test_flex_attention_agrees_with_banded(window, monkeypatch):
    """The same documents and window through both back ends: values and gradients."""
    # FlexAttention can differentiate on a CPU, but refuses to
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    tokens = 6 * train_gpt.BLOCK
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(1, 50, (tokens,), generator=generator)
    inputs[[0, 100, 128, 129]] = 0  # the last document is five blocks long
    weight, *qkv = torch.randn(4, tokens, 2, 16, generator=generator)
    window_tensor = torch.tensor(window, dtype=torch.int32)
    blocks_back = train_gpt.blocks_back(*window)
    documents = train_gpt.document_ids(inputs, document_token=0, segment_tokens=0)
    results = []
    for attention in ("banded", "flex"):
        hardware = train_gpt.Hardware(attention=attention)
        mask = train_gpt.build_mask(documents, window_tensor, hardware, blocks_back)
        if attention == "flex":
            mask = as_a_kernel_sees(mask)
        q, k, v = (x.clone().requires_grad_() for x in qkv)
        out = train_gpt.attend(q, k, v, mask)
        (out * weight).sum().backward()
        results.append((out.detach(), q.grad, k.grad, v.grad))
    for banded, flexed in zip(*results):
        torch.testing.assert_close(banded, flexed, rtol=1e-4, atol=2e-5)
