"""The model: sizes, pieces, the FP8 head, and nothing leaks from the future or another document."""
import math

import pytest
import reference
import torch
import torch.nn.functional as F
from helpers import (
    DATED,
    TINY_FIELDS,
    hyperparameters,
    made_up_text,
    make_trainer,
    train_steps,
)
from test_lineage import shake

import train_gpt
from train_gpt import (
    GPT,
    Float8Matmul,
    Hardware,
    Rotary,
    UserError,
    build_optimizers,
    optimizer_groups,
)

EVERY_PRESET = [*DATED, "h100", "laptop"]
PARAMETERS_M = {"2024-11-19": 162.2, "2024-12-04": 625.8, "2024-12-08": 394.0, "2024-12-10": 394.0,
                "2024-12-17": 275.6, "2025-01-04": 275.7, "2025-01-13": 275.6, "2025-01-16": 275.6,
                "2025-07-13": 275.7}


def at_full_size(preset: str) -> GPT:
    """All of the shapes and none of the memory."""
    with torch.device("meta"):
        return GPT(hyperparameters(preset))


def window_of(hp, step: int) -> torch.Tensor:
    return torch.tensor(train_gpt.window_at(hp, step), dtype=torch.int32)


# ---- sizes ----

@pytest.mark.parametrize("preset", DATED)
def test_parameter_counts_are_those_of_the_records(preset):
    count = sum(p.numel() for p in at_full_size(preset).parameters())
    assert round(count / 1e6, 1) == PARAMETERS_M[preset]


@pytest.mark.parametrize("preset", DATED)
def test_shapes_of_the_records(preset):
    model = at_full_size(preset)
    system = reference.SYSTEMS[preset]
    without = tuple(layer for layer, block in enumerate(model.blocks) if block.attention is None)
    assert without == system.no_attention
    assert train_gpt.table_of_layer(model.hp) == system.tables
    assert len(model.value_embeds) == len({table for table in system.tables if table is not None})
    assert model.head.weight.shape == (50304, 768)
    assert model.embed.weight.shape == (50304 if system.padded_tables else 50257, 768)
    assert model.blocks[0].up.weight.shape == (3072, 768)
    assert model.blocks[0].attention.value_mix.shape == ((2,) if system.values == "two" else ())
    assert model.blocks[0].attention.num_heads == 6
    assert model.skip_weights.shape == (6,)


# ---- optimizer groups ----

@pytest.mark.parametrize("preset", EVERY_PRESET)
def test_every_parameter_is_in_exactly_one_group(preset):
    model = at_full_size(preset)
    groups = optimizer_groups(model)
    named = [pair for params in groups.values() for pair in params.items()]
    expected = dict(model.named_parameters())
    assert sorted(name for name, _ in named) == sorted(expected)
    assert all(p is expected[name] for name, p in named)


@pytest.mark.parametrize("preset", DATED)
def test_groups_and_rates_are_those_of_the_records(preset):
    model = at_full_size(preset)
    system = reference.SYSTEMS[preset]
    groups = optimizer_groups(model)
    assert train_gpt.base_rates(model.hp) == dict(
        embed=0.6, head=system.head_rate, scalar=0.04, muon=system.muon_rate)
    assert set(groups["head"]) == {"head.weight"}
    assert {name.split(".")[0] for name in groups["embed"]} <= {"embed", "value_embeds"}
    assert len(groups["embed"]) == 1 + len(model.value_embeds)
    assert all(p.ndim < 2 for p in groups["scalar"].values())
    matrices = 12 * 2 + 4 * (12 - len(system.no_attention))
    assert len(groups["muon"]) == matrices
    assert all(p.ndim == 2 and name.startswith("blocks.")
               for name, p in groups["muon"].items())


@pytest.mark.parametrize("preset", EVERY_PRESET)
def test_the_optimizers_hold_every_parameter_once_with_the_records_settings(tiny, preset):
    hp = tiny(preset)
    model = GPT(hp)
    adam, muon = build_optimizers(hp, model, Hardware())
    train_gpt.set_schedules(hp, 0, adam, muon)
    held = [id(p) for optimizer in (adam, muon)
            for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    for group in adam.param_groups:
        assert group["betas"] == (hp.adam_beta1, hp.adam_beta2)
        first = math.sqrt(1 - hp.adam_beta2) if hp.adam_eps_first else 1
        assert group["eps"] == pytest.approx(hp.adam_eps / first)
        assert group["weight_decay"] == 0 and not group["amsgrad"]
    for group in muon.param_groups:
        assert (group["lerp"], group["nesterov"], group["steps"]) == (hp.muon_lerp, True, 5)
        assert group["weight_decay"] == 0


@pytest.mark.parametrize("name, shape", [("stray", (2, 2)), ("blocks_extra", (3, 3)),
                                         ("volume", (2, 2, 2))])
def test_a_parameter_that_no_group_knows_is_refused_by_name(tiny, name, shape):
    model = GPT(tiny())
    model.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
    with pytest.raises(UserError, match=rf"\b{name}\b"):
        build_optimizers(model.hp, model, Hardware())


# ---- pieces ----

def test_norm_has_unit_mean_square():
    x = 5 * torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(train_gpt.norm(x), reference.rms_norm(x))


@pytest.mark.parametrize("preset, half", [("2024-12-10", False), ("2025-01-04", True)])
@pytest.mark.parametrize("heads, head_dim", [(6, 128), (2, 16)])
def test_rotary_against_its_formula(preset, half, heads, head_dim):
    hp = hyperparameters(preset)
    rotary = Rotary(head_dim, 300, hp.rotary_base, hp.rotary_fraction, hp.rotary_endpoint)
    x = torch.randn(300, heads, head_dim, generator=torch.Generator().manual_seed(0))
    expected = reference.rotate(x, reference.rotary_frequencies(head_dim, half))
    torch.testing.assert_close(rotary(x), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rotary(x[:100]), expected[:100], rtol=1e-4, atol=1e-4)


def test_rotary_sees_only_how_far_apart_two_tokens_are():
    rotary = Rotary(32, 64, 1024.0, 0.5, True)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 32, generator=generator).expand(64, 1, 32) for _ in range(2))
    products = torch.einsum("qhd,khd->qk", rotary(q), rotary(k))
    for apart in (0, 1, 17):
        along = products.diagonal(-apart)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-4)
    assert products[:, 0].std() > 0.1
    torch.testing.assert_close(rotary(q).norm(dim=-1), q.norm(dim=-1))


def test_bfloat16_activations_leave_weights_and_rotary_tables_in_float32(tiny):
    model = GPT(tiny(dtype="bfloat16"), Hardware(dtype=torch.bfloat16))
    kinds = {name: p.dtype for name, p in model.named_parameters() if p.dtype != torch.float32}
    assert set(kinds) == {"embed.weight", *(f"value_embeds.{n}.weight" for n in range(3))}
    assert set(kinds.values()) == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    assert len(list(model.buffers())) > 0
    inputs = torch.arange(512) % 200
    assert model(inputs, None, window_of(model.hp, 0)).dtype == torch.float32
    full = GPT(tiny(bf16_embeddings=False), Hardware(dtype=torch.bfloat16))
    assert {p.dtype for p in full.parameters()} == {torch.float32}


def test_bfloat16_model_is_near_the_float32_one(tiny):
    hp = tiny()
    exact = GPT(hp)
    near = GPT(hp, Hardware(dtype=torch.bfloat16))
    shake(exact)
    near.load_state_dict(exact.state_dict())
    inputs = torch.from_numpy(made_up_text(512).astype("int64"))
    logits = [model(inputs, None, window_of(hp, 0)) for model in (exact, near)]
    assert (logits[0] - logits[1]).norm() < 0.05 * logits[0].norm()


def test_softcap(tiny):
    hp = tiny(softcap=3)
    model = GPT(hp)
    uncapped = GPT(tiny(softcap=0))
    shake(model)
    with torch.no_grad():
        model.head.weight *= 50
    uncapped.load_state_dict(model.state_dict())
    inputs = torch.arange(512) % 200
    capped, logits = (m(inputs, None, window_of(hp, 0)) for m in (model, uncapped))
    assert capped.abs().max() <= 3 < logits.abs().max()
    torch.testing.assert_close(capped, 3 * torch.tanh(logits / 3))


def test_the_loss_is_the_mean_cross_entropy_of_the_logits(tiny):
    model = GPT(tiny())
    shake(model)
    tokens = torch.from_numpy(made_up_text(513).astype("int64"))
    window = window_of(model.hp, 0)
    logits = model(tokens[:-1], None, window).double()
    expected = (logits.logsumexp(-1) - logits[torch.arange(512), tokens[1:]]).mean()
    assert model(tokens[:-1], tokens[1:], window).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("shape", [(1, 512), (500,), (2, 256)])
def test_shapes_are_asserted(tiny, shape):
    model = GPT(tiny())
    with pytest.raises(AssertionError, match="one sequence of whole blocks"):
        model(torch.zeros(shape, dtype=torch.int32), None, window_of(model.hp, 0))


@pytest.mark.parametrize("preset", EVERY_PRESET)
def test_at_the_start_every_token_is_as_likely(tiny, preset):
    hp = tiny(preset)
    model = GPT(hp)
    tokens = torch.from_numpy(made_up_text(513).astype("int64"))
    loss = model(tokens[:-1], tokens[1:], window_of(hp, 0)).item()
    assert loss == pytest.approx(math.log(hp.padded_vocab), abs=1e-5)
    assert not model.head.weight.any()
    for block in model.blocks:
        assert not block.down.weight.any() and block.up.weight.any()
        assert block.attention is None or not block.attention.output.weight.any()


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("layout", ["none", "per_layer", "mirrored", "ends"])
def test_every_parameter_has_a_gradient_at_any_depth(tiny, layers, layout):
    """DDP stops at a parameter without one. A depth that leaves one without must be refused."""
    if layers == 1:
        with pytest.raises(UserError, match="--num_layers=1: expected at least 2"):
            tiny("2024-12-10", num_layers=layers, value_layout=layout)
        return
    hp = tiny("2024-12-10", num_layers=layers, value_layout=layout)
    model = GPT(hp)
    shake(model)
    tokens = torch.from_numpy(made_up_text(513).astype("int64"))
    model(tokens[:-1], tokens[1:], window_of(hp, 5)).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []
    assert all(p.grad.isfinite().all() for p in model.parameters())


# ---- nothing leaks ----

def leak_model(preset: str, **values) -> GPT:
    """The preset's architecture, small, with weights that all matter; in evaluation mode."""
    model = GPT(hyperparameters(preset, **(TINY_FIELDS | values)))
    shake(model)
    return model.eval()


def three_documents() -> torch.Tensor:
    """512 tokens: documents of 200, 20 and 292 tokens, none of them at the edge of a block."""
    tokens = torch.from_numpy(made_up_text(512, documents=0.0).astype("int64"))
    tokens[[0, 200, 220]] = TINY_FIELDS["document_token"]
    return tokens


@torch.no_grad()
def changed_rows(model: GPT, tokens: torch.Tensor, position: int, step: int) -> torch.Tensor:
    """Where the logits change when the token at this position becomes another one."""
    other = tokens.clone()
    other[position] += 1
    if other[position] == TINY_FIELDS["document_token"]:
        other[position] = 0
    window = window_of(model.hp, step)
    before, after = (model(x, None, window) for x in (tokens, other))
    return ((before - after).abs() > 1e-6).any(-1)


@pytest.mark.parametrize("preset", EVERY_PRESET)
def test_no_token_is_seen_before_it_or_from_another_document(preset):
    model = leak_model(preset)
    tokens = three_documents()
    document = reference.count_documents(tokens, TINY_FIELDS["document_token"])
    positions = torch.arange(512)
    for step in (0, 6, 12):
        for position in (1, 127, 128, 199, 201, 219, 300, 383, 384, 511):
            changed = changed_rows(model, tokens, position, step)
            assert changed[position], "the token itself must notice"
            assert not changed[positions < position].any(), f"token {position} leaks into the past"
            elsewhere = document != document[position]
            assert not changed[elsewhere].any(), f"token {position} leaks into another document"


@pytest.mark.parametrize("preset", EVERY_PRESET)
def test_what_may_be_seen_is_seen(preset):
    """A token in the same document and window changes what follows: the test above can fail."""
    changed = changed_rows(leak_model(preset), three_documents(), 300, step=12)
    assert changed[300:340].all()


@pytest.mark.parametrize("preset", EVERY_PRESET)
def test_a_new_document_token_changes_nothing_before_it(preset):
    model = leak_model(preset)
    tokens = three_documents()
    cut = tokens.clone()
    cut[350] = TINY_FIELDS["document_token"]
    with torch.no_grad():
        before, after = (model(x, None, window_of(model.hp, 12)) for x in (tokens, cut))
    torch.testing.assert_close(before[:350], after[:350], rtol=0, atol=1e-6)
    assert (before[350:] - after[350:]).abs().max() > 1e-3


def test_segments_separate_the_training_batch_but_not_the_validation_text():
    model = leak_model("laptop", segment_tokens=256)
    tokens = three_documents()
    assert changed_rows(model, tokens, 250, step=12)[256:].any()
    assert not changed_rows(model.train(), tokens, 250, step=12)[256:].any()


def test_without_attention_no_token_sees_another():
    model = leak_model("2024-12-10", no_attention="(0,1,2,3,4,5,6,7,8,9,10,11)")
    assert len(model.value_embeds) == 0
    changed = changed_rows(model, three_documents(), 300, step=12)
    assert changed.nonzero().flatten().tolist() == [300]


# ---- the head in FP8 ----

TOKENS = 512
WIDTH = 256
VOCABULARY = 1024
# Relative errors: e4m3 rounds to 1/16, e5m2 to 1/8, and errors are uniform.
FORWARD = 0.045
BACKWARD = 0.08


def relative_error(found, wanted) -> float:
    return ((found.float() - wanted).norm() / wanted.norm()).item()


def head_and_gradients(product, x, weight, targets) -> tuple:
    """(logits, dx, dweight) of the mean loss behind the softcap, as the model has it."""
    x = x.clone().requires_grad_()
    weight = weight.clone().requires_grad_()
    logits = product(x, weight)
    F.cross_entropy(15 * torch.tanh(logits.float() / 15), targets).backward()
    return logits.detach(), x.grad, weight.grad


def head_inputs(tokens: int = TOKENS) -> tuple:
    generator = torch.Generator().manual_seed(0)
    x = train_gpt.norm(torch.randn(tokens, WIDTH, generator=generator))
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator)
    return x, weight, torch.randint(VOCABULARY, (tokens,), generator=generator)


def float8_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """With the scales that the model chooses by default, for the mean loss of these tokens."""
    return Float8Matmul.apply(x, weight, 448 / x.size(1) ** 0.5, 32.0, 2.0**15 * len(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0.008, 0.1, 1.0])  # after the first step, and in the end
def test_float8_values_and_gradients_are_near(size, dtype):
    x, weight, targets = head_inputs()
    wanted = head_and_gradients(F.linear, x, size * weight, targets)
    found = head_and_gradients(float8_product, x.to(dtype), size * weight, targets)
    assert found[0].dtype == found[1].dtype == dtype
    assert found[2].dtype == torch.float32
    errors = [relative_error(*pair) for pair in zip(found, wanted)]
    assert errors[0] < FORWARD and max(errors[1:]) < BACKWARD


@pytest.mark.parametrize("tokens", [128, 4096])
def test_the_float8_gradient_is_scaled_by_the_number_of_tokens(tokens):
    """Its entries are 1/tokens at most: neither zero nor cut off at any length of sequence."""
    x, weight, targets = head_inputs(tokens)
    wanted = head_and_gradients(F.linear, x, 0.1 * weight, targets)
    found = head_and_gradients(float8_product, x, 0.1 * weight, targets)
    assert max(relative_error(*pair) for pair in zip(found[1:], wanted[1:])) < BACKWARD


@pytest.mark.parametrize("micro_steps", [1, 4])
def test_the_float8_gradient_is_scaled_by_the_number_of_micro_steps(tiny, make_shards, monkeypatch,
                                                                    micro_steps):
    """The trainer divides the loss by it, and a gradient that small would be zero in FP8."""
    sequence = 128
    shards = make_shards(made_up_text(32 * sequence))
    hp = tiny("2025-07-13", train_files=shards, val_files=shards, fp8_head=True, num_steps=2,
              batch_tokens=micro_steps * sequence, sequence_tokens=sequence, val_tokens=sequence)
    scales = []
    original = Float8Matmul.apply
    monkeypatch.setattr(Float8Matmul, "apply",
                        lambda *inputs: scales.append(inputs[-1]) or original(*inputs))
    trainer = make_trainer(hp)
    trainer.step(trainer.data.train.next_batch(), 0)
    assert scales == [448.0 * micro_steps] * micro_steps


def test_float8_outliers_saturate():
    x, weight, _ = head_inputs()
    x[0, 0] = 1e6
    weight[0] = 100.0
    x.requires_grad_()
    weight.requires_grad_()
    logits = float8_product(x, weight)
    (1e9 * logits.sum()).backward()
    assert all(tensor.isfinite().all() for tensor in (logits, x.grad, weight.grad))
    plain = F.linear(x.clamp(max=WIDTH**0.5), weight.clamp(max=14.0))
    assert relative_error(logits, plain) < FORWARD


def test_what_is_not_finite_shows_through_float8():
    x, weight, _ = head_inputs()
    x[3, 5] = torch.nan
    logits = float8_product(x, weight)
    assert logits[3].isnan().all() and logits[:3].isfinite().all()


def test_a_float8_head_trains_as_one_without(tiny, make_shards):
    stream = make_shards(made_up_text(13 * 1024))
    losses = {}
    for fp8 in (False, True):
        hp = tiny(train_files=stream, val_files=stream, fp8_head=fp8, num_layers=4,
                  vocab_multiple=16)
        losses[fp8] = train_steps(make_trainer(hp), 12)
    assert losses[True] != losses[False]
    assert losses[True][-1] < losses[True][0] - 1
    assert losses[True] == pytest.approx(losses[False], rel=0.02)


def test_only_training_is_in_float8(tiny):
    """A model loads, validates and samples also where there is no FP8."""
    hp = tiny(fp8_head=True, num_layers=2)
    model = GPT(hp).eval()
    torch.nn.init.normal_(model.head.weight)
    plain = GPT(tiny(num_layers=2)).eval()
    plain.load_state_dict(model.state_dict())
    inputs = torch.arange(128)
    window = window_of(hp, 0)
    assert torch.equal(model(inputs, None, window), plain(inputs, None, window))
    assert not torch.equal(model.train()(inputs, None, window), plain(inputs, None, window))


def test_sizes_are_such_as_the_hardware_multiplies():
    """Multiples of 16: the vocabulary is padded to it, a width is refused."""
    for multiple, padded in ((1, 272), (24, 288), (128, 384)):
        hp = hyperparameters("h100", vocab_size=257, document_token=256,
                             vocab_multiple=multiple)
        assert hp.padded_vocab == padded
    with pytest.raises(UserError, match=r"--model_dim=104: expected a multiple of 16 \(.*and 16 for"
                                        r" FP8\); the nearest is 96$"):
        hyperparameters("h100", num_heads=2, model_dim=104)
