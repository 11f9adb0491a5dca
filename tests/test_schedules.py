"""Rates, momentum and window of every step against the formulas of the systems; layouts at several depths."""
import pytest
import torch

import reference
import train_gpt
from conftest import DATED, hyperparameters
from train_gpt import NO_LIMIT, momentum_at, rate_at, set_schedules, window_at


@pytest.mark.parametrize("preset", DATED)
def test_every_step_of_the_dated_systems(preset):
    hp, system = hyperparameters(preset), reference.SYSTEMS[preset]
    assert hp.num_steps == system.steps
    for step in range(system.steps + 1):
        assert rate_at(hp, step) == pytest.approx(reference.rate_factor(step, system.steps, system.cooldown))
        assert momentum_at(hp, step) == pytest.approx(reference.momentum(step, system.momentum_steps))
        tokens, blocks = system.windows(step, system.steps)
        assert window_at(hp, step) == (tokens or NO_LIMIT, blocks or NO_LIMIT), step


@pytest.mark.parametrize("preset, tokens", [*zip(DATED, (983.0, 802.2, 775.9, 775.9, 781.2, 728.8))])
def test_figures_of_the_records(preset, tokens):
    hp, system = hyperparameters(preset), reference.SYSTEMS[preset]
    assert round(hp.num_steps * hp.batch_tokens / 1e6, 1) == tokens
    assert (hp.batch_tokens, hp.sequence_tokens) == (524_288, 65_536)
    assert (hp.val_tokens, hp.val_every) == (10_485_760, 125)
    assert (hp.num_layers, hp.model_dim, hp.num_heads, hp.mlp_ratio) == (12, 768, 6, 4)
    assert (hp.adam_beta1, hp.adam_beta2) == system.betas
    assert (hp.muon_rate, hp.softcap) == (system.muon_rate, system.softcap)
    assert hp.muon_lerp != system.momentum_sums
    assert (hp.document_token, hp.padded_vocab, hp.segment_tokens) == (50256, 50304, 0)
    assert hp.target_loss == 3.28 and hp.muon_decay == 0 and hp.muon_nesterov and hp.muon_steps == 5


def test_landmarks_of_the_records():
    """By hand, against a slip in the formulas on both sides."""
    hp = hyperparameters("2024-11-19")
    assert [rate_at(hp, step) for step in (0, 1312, 1313, 1875)] == [1, 1, 1, 0]
    assert rate_at(hp, 1875 - 281) == pytest.approx(0.5)
    assert {window_at(hp, step) for step in range(1876)} == {(1024, NO_LIMIT)}
    assert momentum_at(hp, 250) == pytest.approx(0.90)
    hp = hyperparameters("2025-01-04")
    assert rate_at(hp, 834) == pytest.approx(1) and rate_at(hp, 835) < 1
    assert rate_at(hp, 1390 - 278) == pytest.approx(0.5)
    assert [window_at(hp, step)[1] for step in (0, 102, 103, 1390)] == [1, 1, 2, 14]
    assert [momentum_at(hp, step) for step in (0, 150, 300, 1000)] == pytest.approx([0.85, 0.90, 0.95, 0.95])
    hp = hyperparameters("2024-12-04")
    assert [window_at(hp, step)[0] for step in (0, 56, 57, 1530)] == [64, 64, 128, 1792]
    hp = hyperparameters("2024-12-08")
    assert [window_at(hp, step) for step in (0, 1480)] == [(64, 1), (1792, 14)]


@pytest.mark.parametrize("cooldown, steps", [(0.4, 40), (1, 100), (25, 25), (250, 250), (0.015, 1.5)])
def test_cooldown_is_a_part_of_the_run_or_above_1_a_number_of_steps(cooldown, steps):
    hp = hyperparameters("h100", num_steps=100, cooldown=cooldown)
    for step in range(101):
        assert rate_at(hp, step) == pytest.approx(reference.rate_factor(step, 100, steps))


def test_without_cooldown_or_warmup():
    hp = hyperparameters("h100", num_steps=10, cooldown=0, muon_warmup_steps=0)
    assert {rate_at(hp, step) for step in range(11)} == {1.0}
    assert {momentum_at(hp, step) for step in range(11)} == {0.95}


@pytest.mark.parametrize("unit", ["block", "token", "token_in_block"])
def test_a_window_never_sees_nothing(unit):
    hp = hyperparameters("h100", window_unit=unit, window_start=1, window_end=1)
    assert min(window_at(hp, 0)) >= 1


@pytest.mark.parametrize("unit", ["block", "token", "token_in_block"])
def test_a_window_grows_step_by_step_from_first_to_last(unit):
    hp = hyperparameters("h100", window_unit=unit, window_start=128, window_end=1280, num_steps=1000)
    sizes = [window_at(hp, step) for step in range(1001)]
    assert sizes == sorted(sizes)
    whole = {"block": (NO_LIMIT, 10), "token": (1280, NO_LIMIT), "token_in_block": (1280, 10)}
    assert sizes[-1] == whole[unit]
    assert len(set(sizes)) == (10 if unit == "block" else 19)


@pytest.mark.parametrize("preset", DATED)
def test_schedules_reach_the_optimizers_and_the_window(tiny, preset):
    hp = tiny(preset)
    optimizers = train_gpt.build_optimizers(hp, train_gpt.GPT(hp), train_gpt.Hardware())
    window = torch.zeros(2, dtype=torch.int32)
    for step in (0, 9, 11, 3):  # also backwards: nothing builds up
        set_schedules(hp, step, optimizers, window)
        factor = reference.rate_factor(step, 12, 5)
        adam, muon = ([group["lr"] for group in optimizer.param_groups] for optimizer in optimizers)
        assert adam == pytest.approx([0.6 * factor, 0.008 * factor, 0.04 * factor])
        assert muon == pytest.approx([reference.SYSTEMS[preset].muon_rate * factor] * len(muon))
        expected = reference.momentum(step, reference.SYSTEMS[preset].momentum_steps)
        momenta = [group["momentum"] for group in optimizers[1].param_groups]
        assert momenta == pytest.approx([expected] * len(muon))
        assert tuple(window.tolist()) == window_at(hp, step)


# ---- layouts by name ---------------------------------------------------------------------------------------

LAYOUTS = {
    ("none", 4): (None,) * 4,
    ("per_layer", 3): (0, 1, 2), ("per_layer", 5): (0, 1, 2, 3, 4),
    ("mirrored", 2): (0, 0), ("mirrored", 4): (0, 1, 1, 0), ("mirrored", 6): (0, 1, 2, 2, 1, 0),
    ("mirrored", 12): (0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0),
    ("ends", 2): (0, 0), ("ends", 4): (0, None, None, 0), ("ends", 8): (0, 1, None, None, None, None, 0, 1),
    ("ends", 12): (0, 1, 2, None, None, None, None, None, None, 0, 1, 2),
}


@pytest.mark.parametrize("layout, layers", LAYOUTS)
def test_value_layouts_by_name(layout, layers):
    hp = hyperparameters("h100", num_layers=layers, value_layout=layout, no_attention="none")
    assert hp.value_tables == LAYOUTS[layout, layers]


@pytest.mark.parametrize("layout", ["none", "per_layer", "mirrored", "ends"])
@pytest.mark.parametrize("layers", range(2, 17))
def test_value_layouts_fit_any_depth(layout, layers):
    """One entry per layer; the tables are numbered without gaps; layers without attention have none."""
    hp = hyperparameters("h100", num_layers=layers, value_layout=layout, no_attention="second_decoder")
    tables = hp.value_tables
    assert len(tables) == layers
    numbers = {table for table in tables if table is not None}
    assert numbers == set(range(len(numbers)))
    assert all(tables[layer] is None for layer in hp.layers_without_attention)


@pytest.mark.parametrize("layers, layer", [(2, 1), (4, 3), (8, 5), (12, 7), (16, 9)])
def test_the_second_decoder_layer_is_the_one_without_attention(layers, layer):
    assert hyperparameters("h100", num_layers=layers).layers_without_attention == (layer,)


def test_layouts_as_tuples():
    hp = hyperparameters("h100", num_layers=4, value_layout="(1, None, None, 0)", no_attention="(1,2)")
    assert hp.value_tables == (1, None, None, 0) and hp.layers_without_attention == (1, 2)
    hp = hyperparameters("h100", num_layers=4, value_layout="(0,5,5,9)", no_attention="(0,)")
    assert hp.value_tables == (None, 0, 0, 1), "a table that no layer uses is not made"
    hp = hyperparameters("h100", num_layers=3, value_layout="(None,None,None)", no_attention="()")
    assert hp.value_tables == (None,) * 3 and hp.layers_without_attention == ()
