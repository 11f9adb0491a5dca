"""Masks against brute force; both attention back ends against dense attention under them."""
import functools
import math

import pytest
import reference
import torch
from helpers import hyperparameters
from hypothesis import given, settings
from hypothesis import strategies as st

import train_gpt
from train_gpt import (
    BLOCK,
    NO_LIMIT,
    Hardware,
    attend,
    build_mask,
    document_ids,
    window_at,
)

DOCUMENT = 7
FLEX = Hardware(attention="flex")
BANDED = Hardware(attention="banded")
UNITS = ("block", "token", "token_in_block")


@st.composite
def inputs(draw, max_blocks: int = 5) -> torch.Tensor:
    """Tokens of 1 to 5 blocks; documents start at random positions and at edges of blocks."""
    length = BLOCK * draw(st.integers(1, max_blocks))
    near_edges = [edge + side for edge in range(0, length, BLOCK) for side in (-1, 0, 1)
                  if edge + side >= 0]
    position = st.one_of(st.integers(0, length - 1), st.sampled_from(near_edges))
    starts = draw(st.lists(position, max_size=6))
    tokens = torch.zeros(length, dtype=torch.int32)
    tokens[starts] = DOCUMENT
    return tokens


@st.composite
def windows(draw) -> torch.Tensor:
    """What window_at says at a random step of a random schedule, in each of the three units."""
    hp = hyperparameters("laptop", window_unit=draw(st.sampled_from(UNITS)), num_steps=20,
                         window_start=draw(st.integers(1, 700)),
                         window_end=draw(st.integers(1, 700)))
    return torch.tensor(window_at(hp, draw(st.integers(0, 20))), dtype=torch.int32)


def brute_force(tokens: torch.Tensor, window: torch.Tensor, segment: int = 0) -> torch.Tensor:
    """Every pair of positions against every condition, the window's two numbers among them."""
    documents = reference.count_documents(tokens, DOCUMENT)
    if segment:
        documents = documents * len(tokens) + torch.arange(len(tokens)) // segment
    return reference.dense_mask(documents, *window.tolist())


def block_lists(count: torch.Tensor, indices: torch.Tensor) -> list[list[int]]:
    rows = [row[:number].tolist() for number, row in zip(count[0, 0], indices[0, 0])]
    assert all(row == sorted(set(row)) for row in rows), "in order, and no block twice"
    return rows


def expanded(mask: train_gpt.BlockMask) -> torch.Tensor:
    """Lists and function together: full blocks are seen whole, others where the function says."""
    partial = block_lists(mask.kv_num_blocks, mask.kv_indices)
    full = block_lists(mask.full_kv_num_blocks, mask.full_kv_indices)
    position = torch.arange(BLOCK * len(partial))
    zero = torch.tensor(0)
    where = mask.mask_mod(zero, zero, position[:, None], position[None, :])
    dense = torch.zeros(len(position), len(position), dtype=torch.bool)
    for row in range(len(partial)):
        assert not set(partial[row]) & set(full[row])
        queries = slice(row * BLOCK, (row + 1) * BLOCK)
        for column in partial[row] + full[row]:
            keys = slice(column * BLOCK, (column + 1) * BLOCK)
            dense[queries, keys] = True if column in full[row] else where[queries, keys]
    return dense


def by_blocks(dense: torch.Tensor) -> torch.Tensor:
    """[query block, key block, position in the pair of blocks]"""
    blocks = len(dense) // BLOCK
    return dense.view(blocks, BLOCK, blocks, BLOCK).transpose(1, 2).flatten(2)


@given(inputs(), windows())
@settings(max_examples=100)
def test_block_mask_is_the_brute_force_mask(tokens, window):
    mask = build_mask(document_ids(tokens, DOCUMENT, 0), window, FLEX, 9)
    assert torch.equal(expanded(mask), brute_force(tokens, window))


@given(inputs(), windows())
def test_block_lists_hold_no_block_too_many(tokens, window):
    """Listed are the blocks with something to see, and full are those seen whole."""
    mask = build_mask(document_ids(tokens, DOCUMENT, 0), window, FLEX, 9)
    pairs = by_blocks(brute_force(tokens, window))
    assert torch.equal(mask.to_dense()[0, 0].bool(), pairs.any(-1))
    full = [[column for column in range(len(pairs)) if pairs[row, column].all()]
            for row in range(len(pairs))]
    assert block_lists(mask.full_kv_num_blocks, mask.full_kv_indices) == full


@given(inputs(), windows())
def test_the_lists_of_the_backward_pass_are_the_transposed_ones(tokens, window):
    mask = build_mask(document_ids(tokens, DOCUMENT, 0), window, FLEX, 9)
    for kind in ("", "full_"):
        keys = block_lists(getattr(mask, f"{kind}kv_num_blocks"),
                           getattr(mask, f"{kind}kv_indices"))
        queries = block_lists(getattr(mask, f"{kind}q_num_blocks"),
                              getattr(mask, f"{kind}q_indices"))
        forward = {(q, k) for q, row in enumerate(keys) for k in row}
        assert forward == {(q, k) for k, row in enumerate(queries) for q in row}


def expanded_band(bias: torch.Tensor) -> torch.Tensor:
    """The band as a dense mask; what lies before the first token is seen by no one."""
    blocks, _, _, span = bias.shape
    assert ((bias == 0) | (bias == -math.inf)).all()
    dense = torch.zeros(blocks * BLOCK, span - BLOCK + blocks * BLOCK, dtype=torch.bool)
    for block in range(blocks):
        start = block * BLOCK
        dense[start:start + BLOCK, start:start + span] = bias[block, 0] == 0
    assert not dense[:, :span - BLOCK].any()
    return dense[:, span - BLOCK:]


@given(inputs(), windows(), st.integers(0, 3))
@settings(max_examples=100)
def test_band_is_the_brute_force_mask(tokens, window, more):
    blocks_back = train_gpt.blocks_back(*window.tolist()) + more
    mask = build_mask(document_ids(tokens, DOCUMENT, 0), window, BANDED, blocks_back)
    assert torch.equal(expanded_band(mask), brute_force(tokens, window))


@given(inputs(), windows(), st.sampled_from([64, 128, 256]))
def test_segments_separate_like_documents(tokens, window, segment):
    expected = brute_force(tokens, window, segment)
    flex = build_mask(document_ids(tokens, DOCUMENT, segment), window, FLEX, 9)
    assert torch.equal(expanded(flex), expected)
    banded = build_mask(document_ids(tokens, DOCUMENT, segment), window, BANDED, 9)
    assert torch.equal(expanded_band(banded), expected)


@given(st.integers(1, 600), st.integers(1, 6))
def test_blocks_back_is_just_enough(tokens, blocks):
    """As many blocks back as the farthest key that some query sees, and no more."""
    sees = brute_force(torch.zeros(8 * BLOCK), torch.tensor([tokens, blocks]))
    query, key = sees.nonzero().T
    assert train_gpt.blocks_back(tokens, blocks) == (query // BLOCK - key // BLOCK).max()


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("start, end", [(64, 1792), (1024, 1024), (900, 128)])
def test_the_band_is_wide_enough_for_the_whole_run(unit, start, end):
    hp = hyperparameters("laptop", window_unit=unit, window_start=start, window_end=end,
                         num_steps=50)
    needed = [train_gpt.blocks_back(*window_at(hp, step)) for step in range(51)]
    assert train_gpt.max_blocks_back(hp) == max(needed)


# ---- attention ----

def random_heads(length: int, heads: int = 2, head_dim: int = 16,
                 seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, heads, head_dim, generator=generator) for _ in range(4)]


def with_gradients(attention, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients of q, k and v for the last tensor as the output's gradient."""
    *leaves, grad = [tensor.clone() for tensor in tensors]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def assert_same_attention(mask, dense: torch.Tensor, tensors: list, attention=attend) -> None:
    """To 1e-5, against softmax over the whole row in float64."""
    ours = with_gradients(lambda *qkv: attention(*qkv, mask), *tensors)
    theirs = with_gradients(lambda *qkv: reference.dense_attention(*qkv, dense),
                            *(x.double() for x in tensors))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@given(inputs(), windows(), st.integers(0, 2))
def test_banded_attention_is_dense_attention(tokens, window, more):
    blocks_back = train_gpt.blocks_back(*window.tolist()) + more
    mask = build_mask(document_ids(tokens, DOCUMENT, 0), window, BANDED, blocks_back)
    assert_same_attention(mask, brute_force(tokens, window), random_heads(len(tokens)))


def three_blocks(*starts: int) -> torch.Tensor:
    tokens = torch.zeros(3 * BLOCK, dtype=torch.int32)
    tokens[list(starts)] = DOCUMENT
    return tokens


def token_window(tokens: int) -> torch.Tensor:
    return torch.tensor([tokens, NO_LIMIT], dtype=torch.int32)


@pytest.mark.parametrize("heads, head_dim", [(1, 64), (3, 8), (6, 128)])
def test_banded_attention_for_other_shapes(heads, head_dim):
    tokens = three_blocks(0, 150)
    window = token_window(200)
    mask = build_mask(document_ids(tokens, DOCUMENT, 0), window, BANDED, 2)
    tensors = random_heads(len(tokens), heads, head_dim)
    assert_same_attention(mask, brute_force(tokens, window), tensors)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_dense_attention():
    """Not compiled it uses the function and not the lists: so with a window in tokens."""
    tokens = three_blocks(0, 150, 151, 300)
    window = token_window(192)
    mask = build_mask(document_ids(tokens, DOCUMENT, 0), window, FLEX, 2)
    *qkv, _ = random_heads(len(tokens))
    expected = reference.dense_attention(*qkv, brute_force(tokens, window))
    torch.testing.assert_close(attend(*qkv, mask), expected, rtol=1e-5, atol=1e-5)


def test_banded_attention_in_bfloat16_is_near():
    tokens = three_blocks()
    window = token_window(192)
    mask = build_mask(document_ids(tokens, DOCUMENT, 0), window, BANDED, 2)
    dense = brute_force(tokens, window)
    tensors = [x.bfloat16() for x in random_heads(len(tokens))]
    ours = with_gradients(lambda *qkv: attend(*qkv, mask), *tensors)
    theirs = with_gradients(lambda *qkv: reference.dense_attention(*qkv, dense),
                            *(x.double() for x in tensors))
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - other).norm() < 0.01 * other.norm()


def test_one_graph_computes_the_attention_of_every_window():
    """Traced with its backward pass; the window is a tensor, so another one recompiles nothing."""
    tokens = three_blocks(0, 150)
    tensors = random_heads(len(tokens))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True, dynamic=False)
    def masked_attention(q, k, v, window):
        return attend(q, k, v, build_mask(documents, window, BANDED, 2))

    documents = document_ids(tokens, DOCUMENT, 0)
    for window in (token_window(100), token_window(300)):
        assert_same_attention(window, brute_force(tokens, window), tensors, masked_attention)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_window_costs_what_it_sees():
    """Not compiled, the band is only as wide as the window of this step."""
    documents = document_ids(torch.zeros(4 * BLOCK), DOCUMENT, 0)
    for blocks in (1, 2, 4):
        window = torch.tensor([NO_LIMIT, blocks], dtype=torch.int32)
        mask = build_mask(documents, window, BANDED, 3)
        assert mask.shape == (4, 1, BLOCK, blocks * BLOCK)
    # elsewhere the window is not read, which would wait for the device: on "meta" it cannot be
    elsewhere = build_mask(documents.to("meta"), window.to("meta"), BANDED, 3)
    assert elsewhere.shape == (4, 1, BLOCK, 4 * BLOCK)
    elsewhere = build_mask(documents.to("meta"), window.to("meta"), BANDED, 1)
    assert elsewhere.shape == (4, 1, BLOCK, 2 * BLOCK)
