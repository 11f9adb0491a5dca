"""Muon against the SVD, plain formulas and any number of ranks; schedules; layouts by name."""
import collections
import itertools
import math
import types

import pytest
import reference
import torch
from helpers import DATED, hyperparameters, in_processes
from torch.optim._muon import _zeropower_via_newtonschulz

import train_gpt
from train_gpt import (
    NO_LIMIT,
    Muon,
    momentum_at,
    newton_schulz,
    rate_at,
    set_schedules,
    window_at,
    layers_without_attention,
    table_of_layer,
)

# Tall, wide and square, in groups of 7 (of both orders), 3 and 1: no world size divides them all.
SHAPES = [(24, 40)] * 2 + [(40, 24)] * 5 + [(16, 16)] * 3 + [(8, 64)]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# bfloat16 rounds to 2^-9. A step of Newton–Schulz rounds seven times (A, its square, two products
# with numbers, two sums, the product with X), and five steps 35 times: this if all errors add up.
BFLOAT16_ERROR = 35 * 2**-9


def random_matrices(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_singular_values(values: torch.Tensor, rows: int, columns: int,
                         seed: int = 0) -> torch.Tensor:
    left, _ = torch.linalg.qr(random_matrices(rows, len(values), seed=seed))
    right, _ = torch.linalg.qr(random_matrices(columns, len(values), seed=seed + 1))
    return left * values @ right.T


# ---- Newton–Schulz ----

@pytest.mark.parametrize("shape", [(64, 64), (48, 192), (192, 48), (3, 32, 33), (2, 2, 70, 30)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_singular_values_from_a_hundredth_of_the_norm_up_come_near_1(shape, scale):
    *batch, rows, columns = shape
    values = torch.logspace(-2.5, 0, min(rows, columns))
    matrices = torch.stack([scale * with_singular_values(values, rows, columns, seed)
                            for seed in range(math.prod(batch))]).view(shape)
    left, inputs, right = torch.linalg.svd(matrices.double(), full_matrices=False)
    outputs = (left.mT @ newton_schulz(matrices).double() @ right.mT).diagonal(dim1=-2, dim2=-1)
    large = inputs >= 0.01 * matrices.norm(dim=(-2, -1))[..., None]
    assert large.any(-1).all() and not large.all()
    assert 0.68 <= outputs[large].min() and outputs[large].max() <= 1.14


def test_every_singular_value_is_mapped_by_the_quintic():
    """Also those too small to come near 1: five times a·s + b·s³ + c·s⁵."""
    matrix = with_singular_values(torch.logspace(-4, 0, 40), 40, 70).double()
    expected = torch.linalg.svdvals(matrix / matrix.norm())
    for _ in range(5):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    outputs = torch.linalg.svdvals(newton_schulz(matrix))
    torch.testing.assert_close(outputs, expected.sort(descending=True).values, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rows, columns", [(40, 40), (32, 96), (96, 32)])
def test_directions_are_kept(rows, columns):
    """In the basis of the input's singular vectors the output is diagonal and positive."""
    matrix = random_matrices(rows, columns).double()
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inside = left.T @ newton_schulz(matrix) @ right.T
    assert (inside.diagonal() > 0).all()
    torch.testing.assert_close(inside, inside.diagonal().diag(), rtol=0, atol=1e-9)
    torch.testing.assert_close(left @ inside @ right, newton_schulz(matrix), rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [(3, 5, 24, 40), (3, 5, 40, 24)])
def test_a_batch_is_its_matrices_one_by_one(shape):
    matrices = random_matrices(*shape) * torch.tensor([1e-2, 1.0, 1e2])[:, None, None, None]
    batched = newton_schulz(matrices)
    assert batched.shape == matrices.shape
    for matrix, result in zip(matrices.flatten(0, 1), batched.flatten(0, 1)):
        torch.testing.assert_close(result, newton_schulz(matrix), rtol=1e-4, atol=1e-5)


def test_steps_and_zero():
    matrix = random_matrices(8, 8)
    torch.testing.assert_close(newton_schulz(matrix, 0), matrix / (matrix.norm() + 1e-7))
    torch.testing.assert_close(newton_schulz(matrix, 3), reference.orthogonalize(matrix, 3))
    assert not newton_schulz(torch.zeros(4, 6)).any()


def test_bfloat16_is_near_enough():
    outputs = torch.linalg.svdvals(newton_schulz(random_matrices(64, 128).bfloat16()).float())
    assert 0.5 < outputs.min() and outputs.max() < 1.3


# ---- the update ----

def parameters(shapes=SHAPES) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(random_matrices(*shape, seed=seed))
            for seed, shape in enumerate(shapes)]


def give_gradients(params, step: int) -> None:
    """Of different sizes, and related from step to step so that the momentum matters."""
    for number, p in enumerate(params):
        common = random_matrices(*p.shape, seed=number)
        own = random_matrices(*p.shape, seed=100 * step + number)
        p.grad = 10.0 ** (number % 5 - 3) * (common + own)


def train(params, optimizer, steps=range(4)) -> list[torch.Tensor]:
    """Rate and momentum change on the way, as the schedules change them."""
    for step in steps:
        give_gradients(params, step)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + step)
            group["momentum"] = 0.85 + 0.02 * step
        optimizer.step()
    return [p.detach().clone() for p in params]


class Plain:
    """The same training, one matrix at a time, by the reference's formula."""

    def __init__(self, steps: int = 4, sums=False, nesterov=True, decay=0.0, newton=5):
        self.params = parameters()
        self.states = [{} for _ in self.params]
        for step in range(steps):
            give_gradients(self.params, step)
            with torch.no_grad():
                for p, state in zip(self.params, self.states):
                    reference.muon_step(p, p.grad, state, 0.05 / (1 + step), 0.85 + 0.02 * step,
                                        sums, nesterov, decay, newton)

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [state["buffer"] for state in self.states]


def plain(steps: int = 4, **settings) -> list[torch.Tensor]:
    return [p.detach() for p in Plain(steps, **settings).params]


def assert_same(ours, theirs, **tolerance) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("lerp", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_update_against_a_plain_version(nesterov, lerp, decay):
    params = parameters()
    ours = train(params, Muon(params, nesterov=nesterov, lerp=lerp, weight_decay=decay))
    expected = plain(sums=not lerp, nesterov=nesterov, decay=decay)
    assert_same(ours, expected, rtol=1e-4, atol=1e-5)


def test_number_of_newton_schulz_steps():
    params = parameters()
    assert_same(train(params, Muon(params, steps=2)), plain(newton=2), rtol=1e-4, atol=1e-5)


def one_by_one(matrix: torch.Tensor, coefficients: tuple, steps: int, eps: float) -> torch.Tensor:
    """In the place of torch's, which casts to bfloat16."""
    assert (coefficients, eps) == (COEFFICIENTS, 1e-7)
    return newton_schulz(matrix, steps)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_update_against_the_one_of_torch(monkeypatch, nesterov, decay):
    """Momentum, decay and scale of torch.optim.Muon, both sides with Newton–Schulz in float32."""
    settings = dict(nesterov=nesterov, weight_decay=decay)
    ours = parameters()
    theirs = parameters()
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", one_by_one)
    train(ours, Muon(ours, dtype=torch.float32, **settings))
    train(theirs, torch.optim.Muon(theirs, ns_coefficients=COEFFICIENTS, **settings))
    assert_same(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows, columns", [*dict.fromkeys(SHAPES)])
def test_newton_schulz_in_bfloat16_is_as_near_as_the_one_of_torch(rows, columns):
    matrix = random_matrices(rows, columns)
    exact = newton_schulz(matrix.double())
    ours = newton_schulz(matrix.bfloat16())
    theirs = _zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, 1e-7)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    for found in (ours, theirs):
        assert (found.double() - exact).norm() < BFLOAT16_ERROR * exact.norm()


def test_updates_in_bfloat16_are_near_those_in_float32():
    """And the weights keep their own type. As torch.optim.Muon does, which knows bfloat16 only."""
    ours = parameters()
    theirs = parameters()
    train(ours, Muon(ours, dtype=torch.bfloat16))
    train(theirs, torch.optim.Muon(theirs, ns_coefficients=COEFFICIENTS, weight_decay=0.0))
    for params in (ours, theirs):
        assert all(p.dtype == torch.float32 for p in params)
        for p, expected, start in zip(params, plain(), parameters()):
            assert (p - expected).norm() < BFLOAT16_ERROR * (expected - start).norm()


def test_without_nesterov_the_momentum_is_what_moves_the_weights():
    """After a gradient and then none, the buffer still points where the gradient did."""
    p = torch.nn.Parameter(torch.zeros(8, 12))
    muon = Muon([p], lr=1.0, momentum=0.5, nesterov=False)
    p.grad = gradient = random_matrices(8, 12)
    muon.step()
    before = p.detach().clone()
    p.grad = torch.zeros(8, 12)
    muon.step()
    torch.testing.assert_close(p.detach() - before, -newton_schulz(gradient), rtol=1e-4, atol=1e-4)


def test_tall_matrices_take_larger_steps():
    for rows, columns, scale in ((64, 16, 2.0), (16, 64, 1.0), (16, 16, 1.0)):
        p = torch.nn.Parameter(torch.zeros(rows, columns))
        p.grad = random_matrices(rows, columns)
        Muon([p], lr=0.1).step()
        largest = torch.linalg.svdvals(p.detach()).max()
        assert 0.1 * scale * 0.68 <= largest <= 0.1 * scale * 1.2


def test_all_gathers_have_begun_before_an_update_is_applied(monkeypatch):
    """So that they are hidden: each by the next group's updates, the last by the other optimizer.
    """
    events = []

    def all_gather(everyone, own, async_op):
        events.append("gather")
        everyone.copy_(own.repeat(2, 1, 1))
        return types.SimpleNamespace(wait=lambda: events.append("wait"))

    monkeypatch.setattr(train_gpt.dist, "all_gather_single", all_gather)
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((8, 8), (16, 8), (8, 8))]
    for p in params:
        p.grad = random_matrices(*p.shape)
    muon = Muon(params, rank=0, world_size=2)
    started = muon.start_updates()
    assert events == ["gather", "gather"] and all(p.detach().abs().max() == 0 for p in params)
    muon.finish_updates(started)
    assert events == ["gather", "gather", "wait", "wait"]
    assert all(p.detach().abs().max() > 0 for p in params)


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_flag_that_is_set_keeps_every_parameter(found_inf, decay):
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in ((8, 8), (16, 8))]
    for p in params:
        p.grad = torch.full_like(p, math.nan if found_inf else 1.0)
    muon = Muon(params, weight_decay=decay)
    muon.found_inf = torch.tensor(found_inf)
    muon.step()
    changed = [not torch.equal(p, torch.ones_like(p)) for p in params]
    assert changed == [not found_inf] * 2


def test_it_takes_matrices_only():
    with pytest.raises(AssertionError, match="matrices"):
        Muon([torch.nn.Parameter(torch.zeros(3))])


# ---- several processes ----

SETTINGS = {"lerp": dict(lerp=True, nesterov=True, weight_decay=0.1),
            "sums": dict(lerp=False, nesterov=False, weight_decay=0.0)}
PLAIN = {"lerp": dict(sums=False, nesterov=True, decay=0.1),
         "sums": dict(sums=True, nesterov=False, decay=0.0)}


def packed_order(muon: Muon, params: list) -> list[int]:
    """state_dict numbers the parameters group by group; here each one's number in `params`."""
    numbers = {p: number for number, p in enumerate(params)}
    return [numbers[p] for group in muon.param_groups for p in group["params"]]


def gathered(muon: Muon, params: list) -> list[torch.Tensor]:
    """The momentum buffers of state_dict in the order of `params`. A collective."""
    state = muon.state_dict()["state"]
    assert sorted(state) == list(range(len(params)))
    buffers = [None] * len(params)
    for index, number in enumerate(packed_order(muon, params)):
        buffers[number] = state[index]["momentum_buffer"].clone()
    return buffers


def owned(muon: Muon, params: list) -> list[int]:
    """The parameters whose momentum this rank keeps."""
    return [number for number, p in enumerate(params)
            if muon.state.get(p, {}).get("momentum_buffer") is not None]


def copies(params: list) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


def copied(state: dict) -> dict:
    """Loading does not copy: two optimizers would share, and both update, the same momentum."""
    return train_gpt.copy_to_host(state)


def one_case(kind: str, rank: int, world_size: int) -> dict:
    ranks = dict(rank=rank, world_size=world_size)
    params = parameters()
    muon = Muon(params, **SETTINGS[kind], **ranks)
    result = dict(owned_at_start=owned(muon, params), at_start=gathered(muon, params))
    train(params, muon, range(2))
    result["halfway"] = gathered(muon, params)
    halfway = copies(params)
    saved = copied(muon.state_dict())
    result["params"] = train(params, muon, range(2, 4))
    result["owned"] = owned(muon, params)

    # from the state of all ranks, on as many ranks again
    resumed = copies(halfway)
    muon = Muon(resumed, **SETTINGS[kind], **ranks)
    muon.load_state_dict(copied(saved))
    result["owned_after_loading"] = owned(muon, resumed)
    result["resumed"] = train(resumed, muon, range(2, 4))

    # on one rank, each process by itself
    alone = copies(halfway)
    muon = Muon(alone, **SETTINGS[kind])
    muon.load_state_dict(copied(saved))
    result["owned_alone"] = owned(muon, alone)
    result["alone"] = train(alone, muon, range(2, 4))
    return result


def one_rank(rank: int, world_size: int) -> dict:
    """Trains with all settings, stops and resumes, and returns what it ends with."""
    return {kind: one_case(kind, rank, world_size) for kind in SETTINGS}


@pytest.fixture(scope="module", params=[1, 2, 3, 5])
def by_rank(request, tmp_path_factory) -> list[dict]:
    """{kind of settings: result} of each rank of a world."""
    return in_processes(one_rank, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("kind", SETTINGS)
def test_any_number_of_processes_ends_with_the_same_parameters(by_rank, kind):
    expected = plain(**PLAIN[kind])
    for results in by_rank:
        assert_same(results[kind]["params"], expected, rtol=1e-4, atol=1e-5)
        assert_same(results[kind]["params"], by_rank[0][kind]["params"], rtol=0, atol=0)


def most_kept(world_size: int) -> int:
    """Parameters whose momentum a rank keeps: an equal share of each group, rounded up."""
    groups = collections.Counter(tuple(sorted(shape)) for shape in SHAPES)
    return sum(math.ceil(number / world_size) for number in groups.values())


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_rank_keeps_the_momentum_of_its_share_from_the_start(by_rank, kind):
    for when in ("owned_at_start", "owned", "owned_after_loading"):
        kept = [results[kind][when] for results in by_rank]
        assert {*itertools.chain(*kept)} == {*range(len(SHAPES))}, when
        assert max(map(len, kept)) <= most_kept(len(by_rank))


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_state_of_an_optimizer_has_the_momentum_of_all_ranks(by_rank, kind):
    halfway = Plain(2, **PLAIN[kind]).buffers
    for results in by_rank:
        assert all(not buffer.any() for buffer in results[kind]["at_start"])
        assert_same(results[kind]["halfway"], halfway, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_state_of_any_number_of_ranks_resumes_on_as_many_and_on_one(by_rank, kind):
    for results in by_rank:
        assert_same(results[kind]["resumed"], results[kind]["params"], rtol=0, atol=0)
        assert results[kind]["owned_alone"] == list(range(len(SHAPES)))
        assert_same(results[kind]["alone"], results[kind]["params"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_state_of_one_rank_is_taken_apart_among_several(world_size):
    """Every rank loads all of it and keeps its own: no collective, so no processes either."""
    params = parameters()
    muon = Muon(params)
    train(params, muon, range(2))
    expected = gathered(muon, params)
    kept = []
    for rank in range(world_size):
        others = copies(params)
        part = Muon(others, rank=rank, world_size=world_size)
        part.load_state_dict(copied(muon.state_dict()))
        for number in owned(part, others):
            buffer = part.state[others[number]]["momentum_buffer"]
            assert torch.equal(buffer, expected[number])
            kept.append(number)
        assert len(owned(part, others)) <= most_kept(world_size)
    assert {*kept} == {*range(len(SHAPES))}


# ---- schedules ----

@pytest.mark.parametrize("preset", DATED)
def test_every_step_of_the_dated_systems(preset):
    hp = hyperparameters(preset)
    system = reference.SYSTEMS[preset]
    assert hp.num_steps == system.steps
    for step in range(system.steps + 1):
        factor = reference.rate_factor(step, system.steps, system.cooldown, system.rate_floor)
        momentum = reference.momentum(step, system.momentum_steps)
        assert rate_at(hp, step) == pytest.approx(factor)
        assert momentum_at(hp, step) == pytest.approx(momentum)
        tokens, blocks = system.windows(step, system.steps)
        assert window_at(hp, step) == (tokens or NO_LIMIT, blocks or NO_LIMIT), step


MILLION_TOKENS = {"2024-11-19": 983.0, "2024-12-04": 802.2, "2024-12-08": 775.9,
                  "2024-12-10": 775.9, "2024-12-17": 781.2, "2025-01-04": 728.8,
                  "2025-01-13": 731.4, "2025-01-16": 730.3, "2025-07-13": 688.1}


@pytest.mark.parametrize("preset", DATED)
def test_figures_of_the_records(preset):
    hp = hyperparameters(preset)
    system = reference.SYSTEMS[preset]
    assert round(hp.num_steps * hp.batch_tokens / 1e6, 1) == MILLION_TOKENS[preset]
    assert hp.sequence_tokens == (49_152 if system.aligned else 65_536)
    assert hp.batch_tokens == 8 * hp.sequence_tokens
    assert (hp.val_tokens, hp.val_every) == (10_485_760, 125)
    assert (hp.num_layers, hp.model_dim, hp.num_heads, hp.mlp_ratio) == (12, 768, 6, 4)
    assert (hp.adam_beta1, hp.adam_beta2) == system.betas
    assert (hp.muon_rate, hp.softcap) == (system.muon_rate, system.softcap)
    assert hp.muon_lerp != system.momentum_sums
    assert (hp.head_rate, hp.rate_floor) == (system.head_rate, system.rate_floor)
    assert (hp.adam_eps, hp.adam_eps_first) == (system.adam_eps, system.adam_eps_first)
    assert (hp.norm_eps or None, hp.attention_scale or None) == (system.norm_eps,
                                                                 system.attention_scale)
    assert hp.init_bound == pytest.approx(system.init_bound)
    assert (hp.sum_loss, hp.align_documents) == (system.sum_loss, system.aligned)
    assert hp.logit_scale == (0 if system.logits_by_width else 1)
    assert tuple(layer for layer in train_gpt.layers_with_short_window(hp)
                 if layer not in system.no_attention) == system.short_layers
    assert (hp.document_token, hp.padded_vocab, hp.segment_tokens) == (50256, 50304, 0)
    assert (hp.muon_decay, hp.muon_nesterov, hp.muon_steps) == (0, True, 5)
    assert hp.target_loss == 3.28


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
    momenta = [momentum_at(hp, step) for step in (0, 150, 300, 1000)]
    assert momenta == pytest.approx([0.85, 0.90, 0.95, 0.95])
    hp = hyperparameters("2024-12-04")
    assert [window_at(hp, step)[0] for step in (0, 56, 57, 1530)] == [64, 64, 128, 1792]
    hp = hyperparameters("2024-12-08")
    assert [window_at(hp, step) for step in (0, 1480)] == [(64, 1), (1792, 14)]


@pytest.mark.parametrize("cooldown, steps", [(0.4, 40), (1, 100), (25, 25), (250, 250),
                                             (0.015, 1.5)])
def test_cooldown_is_a_part_of_the_run_or_above_1_a_number_of_steps(cooldown, steps):
    hp = hyperparameters("h100", num_steps=100, cooldown=cooldown, rate_floor=0)
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
    hp = hyperparameters("h100", window_unit=unit, window_start=128, window_end=1280,
                         num_steps=1000)
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
        set_schedules(hp, step, *optimizers)
        window.copy_(train_gpt.window_tensor(hp, step))
        system = reference.SYSTEMS[preset]
        factor = reference.rate_factor(step, 12, 5, system.rate_floor)
        adam, muon = ([group["lr"] for group in optimizer.param_groups]
                      for optimizer in optimizers)
        assert adam == pytest.approx([0.6 * factor, system.head_rate * factor, 0.04 * factor])
        assert muon == pytest.approx([system.muon_rate * factor] * len(muon))
        expected = reference.momentum(step, system.momentum_steps)
        momenta = [group["momentum"] for group in optimizers[1].param_groups]
        assert momenta == pytest.approx([expected] * len(muon))
        assert tuple(window.tolist()) == window_at(hp, step)


# ---- layouts by name ----

LAYOUTS = {
    ("none", 4): (None,) * 4,
    ("per_layer", 3): (0, 1, 2), ("per_layer", 5): (0, 1, 2, 3, 4),
    ("mirrored", 2): (0, 0), ("mirrored", 4): (0, 1, 1, 0), ("mirrored", 6): (0, 1, 2, 2, 1, 0),
    ("mirrored", 12): (0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0),
    ("ends", 2): (0, 0), ("ends", 4): (0, None, None, 0),
    ("ends", 8): (0, 1, None, None, None, None, 0, 1),
    ("ends", 12): (0, 1, 2, None, None, None, None, None, None, 0, 1, 2),
}


@pytest.mark.parametrize("layout, layers", LAYOUTS)
def test_value_layouts_by_name(layout, layers):
    hp = hyperparameters("h100", num_layers=layers, value_layout=layout, no_attention="none")
    assert table_of_layer(hp) == LAYOUTS[layout, layers]


@pytest.mark.parametrize("layout", ["none", "per_layer", "mirrored", "ends"])
@pytest.mark.parametrize("layers", range(2, 17))
def test_value_layouts_fit_any_depth(layout, layers):
    """One entry per layer; no gaps in the numbers; layers without attention have no table."""
    hp = hyperparameters("h100", num_layers=layers, value_layout=layout,
                         no_attention="second_decoder")
    tables = table_of_layer(hp)
    assert len(tables) == layers
    numbers = {table for table in tables if table is not None}
    assert numbers == set(range(len(numbers)))
    assert all(tables[layer] is None for layer in layers_without_attention(hp))


@pytest.mark.parametrize("layers, layer", [(2, 1), (4, 3), (8, 5), (12, 7), (16, 9)])
def test_the_second_decoder_layer_is_the_one_without_attention(layers, layer):
    assert layers_without_attention(hyperparameters("h100", num_layers=layers)) == (layer,)


def test_layouts_as_tuples():
    hp = hyperparameters("h100", num_layers=4, value_layout="(1, None, None, 0)",
                         no_attention="(1,2)")
    assert table_of_layer(hp) == (1, None, None, 0) and layers_without_attention(hp) == (1, 2)
    hp = hyperparameters("h100", num_layers=4, value_layout="(0,5,5,9)", no_attention="(0,)")
    assert table_of_layer(hp) == (None, 0, 0, 1), "a table that no layer uses is not made"
    hp = hyperparameters("h100", num_layers=3, value_layout="(None,None,None)",
                         no_attention="()")
    assert table_of_layer(hp) == (None,) * 3 and layers_without_attention(hp) == ()
