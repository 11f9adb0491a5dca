"""The systems from 2025-01-13 on against the reference in float64: only rounding may differ."""
import dataclasses
import functools
import math

import numpy as np
import pytest
import reference
import torch
from helpers import (
    TINY_FIELDS,
    hyperparameters,
    in_processes,
    made_up_text,
    make_trainer,
    next_loss,
    write_shard,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_lineage import name_in_reference, shake

import train_gpt
from train_gpt import NO_LIMIT, Hardware, Loader, UserError, momentum_at, rate_at, window_at

PRESETS = ["2025-01-13", "2025-01-16", "2025-07-13"]
SEQUENCE = 256
VAL_SEQUENCE = 512
DOCUMENT = TINY_FIELDS["document_token"]
# In 12 of 36 steps the window grows to 5 blocks, the short one to 2, as many as a sequence has. The
# rates fall from step 3 on.
LONG_RUN = dict(num_steps=36, cooldown=34)
STEPS = 12
VALIDATED = 3   # before this step, with windows of 2 blocks and of 1, in sequences of 4
# World size: sequences of a batch and steps. Three ranks have two micro-steps each.
RUNS = {1: (2, STEPS), 2: (2, STEPS), 3: (6, 4)}
SLOW_RUNS = {1: (6, STEPS), 2: (6, STEPS), 3: (6, STEPS)}
# For what needs many runs: windows of 1, 2 and 3 blocks, short ones of 1; rates fall at step 1.
SHORT_RUN = dict(num_steps=10, cooldown=10, batch_tokens=SEQUENCE)
SHORT_STEPS = 3


# ---- both sides ----

@functools.cache
def text() -> dict[str, list[np.ndarray]]:
    """Shards of training, of which the first ends within a run, and of validation.

    No document is longer than a sequence, so that twice a sequence holds an aligned one. Shards
    start just before a document.
    """
    stream = made_up_text(130_000, documents=0)
    starts = np.cumsum(np.random.default_rng(2).integers(5, SEQUENCE, 900))
    stream[starts] = DOCUMENT
    cuts = [starts[1] - 2, starts[50] - 2, starts[-1]]
    return dict(train=[stream[cuts[0]:cuts[1]], stream[cuts[1]:cuts[2]]],
                val=[made_up_text(3 * VAL_SEQUENCE + 1, seed=1, documents=1 / 700)])


def write_text(folder) -> None:
    for split, shards in text().items():
        for number, tokens in enumerate(shards):
            write_shard(folder / f"{split}_{number}.bin", tokens)


def small(folder, preset: str, **values) -> train_gpt.Hyperparameters:
    """A preset at the size of a test, in float64, on the text in a folder."""
    fields = TINY_FIELDS | dict(
        train_files=f"{folder}/train*", val_files=f"{folder}/val*", sequence_tokens=SEQUENCE,
        val_sequence_tokens=VAL_SEQUENCE, val_tokens=3 * VAL_SEQUENCE, dtype="float64",
        muon_dtype="auto", model_dim=16)
    del fields["align_documents"]  # the preset's own
    return hyperparameters(preset, **(fields | values))


def weights_of(trainer: train_gpt.Trainer) -> dict[str, torch.Tensor]:
    return {name_in_reference(name): p.detach().clone()
            for name, p in trainer.model.named_parameters()}


@dataclasses.dataclass
class Outcome:
    """What a run came to, on either side."""
    start: dict             # weights by the reference's names
    losses: list
    val_loss: float | None
    weights: dict


def train_ours(hp, steps: int, shaken: bool, hardware: Hardware | None = None) -> Outcome:
    trainer = make_trainer(hp, hardware)
    if shaken:
        shake(trainer.model)
    start = weights_of(trainer)
    losses = []
    val_loss = None
    for step in range(steps):
        if step == VALIDATED:
            trainer.window.copy_(train_gpt.window_tensor(hp, step))
            val_loss = train_gpt.evaluate(trainer)["val_loss"]
        losses.append(next_loss(trainer, step))
    return Outcome(start, losses, val_loss, weights_of(trainer))


def batches_of(system: reference.System, num_sequences: int) -> list:
    """The reference's own reading of the training shards."""
    if system.aligned:
        batches = reference.aligned_batches(text()["train"], num_sequences, SEQUENCE, DOCUMENT)
    else:
        batches = reference.contiguous_batches(text()["train"], num_sequences, SEQUENCE)
    return [as_tensors(batch) for batch in batches]


def as_tensors(sequences: list) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [tuple(torch.from_numpy(tokens.astype("int64")) for tokens in pair)
            for pair in sequences]


def start_theirs(system: reference.System, hp, start: dict) -> tuple[reference.Run, list]:
    """A run of the reference and its batches."""
    model = reference.Model(system, start, hp.num_heads, DOCUMENT)
    run = reference.Run(model, hp.num_steps, hp.cooldown)
    return run, batches_of(system, hp.batch_tokens // SEQUENCE)


def train_theirs(system: reference.System, hp, start: dict, steps: int) -> Outcome:
    run, batches = start_theirs(system, hp, start)
    losses = []
    val_loss = None
    for step in range(steps):
        if step == VALIDATED:
            val_loss = validate(run.model, step, hp.num_steps)
        losses.append(run.step(step, batches[step]))
    return Outcome(start, losses, val_loss, {name: p.detach() for name, p in run.model.w.items()})


@torch.no_grad()
def validate(model: reference.Model, step: int, num_steps: int) -> float:
    """The mean of the sequences' means; they follow each other whatever the documents are."""
    tokens = text()["val"][0]
    sequences = as_tensors([reference.cut(tokens, number * VAL_SEQUENCE, VAL_SEQUENCE)
                            for number in range(3)])
    return sum(model.loss(*pair, step, num_steps).item() for pair in sequences) / 3


def differences(one: Outcome, other: Outcome, losses=1e-10, weights=1e-11) -> dict[str, float]:
    """Where two runs are further apart than this, relative to the loss or size of a parameter."""
    assert one.weights.keys() == other.weights.keys()
    errors = {name: ((p - other.weights[name]).norm() / p.norm() / weights).item()
              for name, p in one.weights.items()}
    for step, (ours, theirs) in enumerate(zip(one.losses, other.losses, strict=True)):
        errors[f"loss {step}"] = abs(ours / theirs - 1) / losses
    if one.val_loss is not None:
        errors["validation"] = abs(one.val_loss / other.val_loss - 1) / losses
    return {name: error for name, error in errors.items() if not error < 1}


# ---- whole runs ----

def long_run(folder, preset: str, num_sequences: int) -> train_gpt.Hyperparameters:
    return small(folder, preset, **LONG_RUN, batch_tokens=num_sequences * SEQUENCE)


def train_all(folder, runs: dict, rank: int, world_size: int) -> dict:
    """Each of the systems, on one of several ranks."""
    num_sequences, steps = runs[world_size]
    outcomes = {}
    for preset in PRESETS:
        hp = long_run(folder, preset, num_sequences)
        hardware = train_gpt.find_hardware(hp)
        hardware.rank = rank
        hardware.world_size = world_size
        outcomes[preset] = vars(train_ours(hp, steps, shaken=True, hardware=hardware))
    return outcomes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The shards are the same in all of these tests."""
    folder = tmp_path_factory.mktemp("shards")
    write_text(folder)
    return folder


@pytest.fixture(scope="module", params=[RUNS, pytest.param(SLOW_RUNS, marks=pytest.mark.slow)],
                ids=["short", "long"])
def by_world_size(request, folder, tmp_path_factory) -> dict:
    """{world size: (sequences, steps, [{preset: outcome} of each rank])}"""
    target = functools.partial(train_all, folder, request.param)
    ranks = {1: [target(0, 1)],
             2: in_processes(target, 2, tmp_path_factory.mktemp("two")),
             3: in_processes(target, 3, tmp_path_factory.mktemp("three"))}
    return {world_size: (*request.param[world_size], ranks[world_size]) for world_size in ranks}


@pytest.mark.parametrize("preset", PRESETS)
def test_same_losses_and_weights_on_1_2_and_3_ranks(folder, by_world_size, preset):
    """12 steps, from weights that all matter, and a validation between them.

    4e-16 of the losses and 2e-13 of the parameters were measured.
    """
    system = reference.SYSTEMS[preset]
    theirs = {}
    for num_sequences, steps, ranks in by_world_size.values():
        ours = [Outcome(**outcomes[preset]) for outcomes in ranks]
        if (num_sequences, steps) not in theirs:
            hp = long_run(folder, preset, num_sequences)
            theirs[num_sequences, steps] = train_theirs(system, hp, ours[0].start, steps)
        assert ours[0].losses[-1] < ours[0].losses[0] - 0.5, "too little was learned to compare"
        assert ours[0].val_loss is not None
        for outcome in ours:
            assert differences(outcome, theirs[num_sequences, steps]) == {}


@pytest.mark.parametrize("preset", PRESETS)
def test_same_losses_from_the_systems_own_start(folder, preset):
    """At first the gradients of the mixes and skips are what the norm's epsilon leaves of nothing.

    Adam takes full steps with them all the same, and the smaller that epsilon is, the more of them
    is rounding: 6e-14 of the losses and 9e-12 of the parameters were measured for the last system,
    and 2e-16 and 1e-13 for the others.
    """
    hp = long_run(folder, preset, 1)
    system = reference.SYSTEMS[preset]
    ours = train_ours(hp, STEPS, shaken=False)
    theirs = train_theirs(system, hp, ours.start, STEPS)
    assert ours.losses[0] == pytest.approx(math.log(256), rel=1e-14)  # 200, padded to 2 × 128
    assert ours.losses[-1] < ours.losses[0] - 0.5
    assert differences(ours, theirs, weights=1e-8) == {}


@pytest.mark.parametrize("preset", PRESETS)
def test_what_moves_first(folder, preset):
    """The head; then what a head can reach; the rest when the blocks' outputs are not zero."""
    hp = small(folder, preset, **SHORT_RUN)
    trainer = make_trainer(hp)
    moved = []
    for step in range(3):
        before = weights_of(trainer)
        trainer.step(trainer.data.train.next_batch(), step)
        after = weights_of(trainer)
        moved.append({name for name in after if not torch.equal(before[name], after[name])})
    second = {"head", "embedding", "skips", *(f"{layer}.mix" for layer in range(12)),
              *(f"{layer}.down" for layer in range(12)),
              *(f"{layer}.o" for layer in range(12) if layer != 7)}
    assert moved == [{"head"}, second, set(before)]


# ---- errors that must be seen ----

@functools.cache
def short_run(folder, preset: str) -> Outcome:
    return train_ours(small(folder, preset, **SHORT_RUN), SHORT_STEPS, shaken=True)


def differs(folder, preset: str, system: reference.System) -> bool:
    """Whether our run is not the one of the reference with these facts; the first loss will do."""
    ours = short_run(folder, preset)
    run, batches = start_theirs(system, small(folder, preset, **SHORT_RUN), ours.start)
    losses = []
    for step, loss in enumerate(ours.losses):
        losses.append(run.step(step, batches[step]))
        if abs(losses[-1] / loss - 1) > 1e-10:
            return True
    return differences(ours, Outcome(ours.start, losses, None, run.model.w)) != {}


def window_rounded_down(step, steps):
    return None, max(1, 27 * step // (2 * steps))


WRONG_FACTS = [
    ("2025-01-13", dict(norm_eps=2**-23)),
    ("2025-01-13", dict(windows=window_rounded_down)),
    ("2025-01-13", dict(rate_floor=0.05)),
    ("2025-01-13", dict(softcap=30)),
    ("2025-01-16", dict(attention_scale=None)),
    ("2025-01-16", dict(short_layers=())),
    ("2025-01-16", dict(short_layers=(0, 4, 11))),
    ("2025-01-16", dict(short_layers=(1, 2, 3, 5, 6, 8, 9, 11))),
    ("2025-01-16", dict(adam_eps=1e-8)),
    ("2025-07-13", dict(norm_eps=2**-7)),
    ("2025-07-13", dict(norm_eps=None)),
    ("2025-07-13", dict(logits_by_width=False)),
    ("2025-07-13", dict(sum_loss=False)),
    ("2025-07-13", dict(head_rate=0.008)),
    ("2025-07-13", dict(adam_eps_first=False)),
    ("2025-07-13", dict(aligned=False)),
]


@pytest.mark.parametrize("preset", PRESETS)
def test_no_fact_is_wrong(folder, preset):
    """What the next two tests find is not there without the error."""
    assert not differs(folder, preset, reference.SYSTEMS[preset])


@pytest.mark.parametrize("preset, facts", WRONG_FACTS)
def test_a_wrong_fact_is_seen(folder, preset, facts):
    system = reference.SYSTEMS[preset]
    wrong = dataclasses.replace(system, **facts)
    assert wrong != system
    assert differs(folder, preset, wrong)


def half_rounded_up(blocks):
    return max(1, -(-blocks // 2))


def one_more_of_momentum(step, warmup):
    return 0.85 + 0.10 * min(step + 1, warmup) / warmup


def count_from_the_next(tokens, document_token):
    """A document starts after its token."""
    return torch.cat([torch.zeros(1), (tokens == document_token).cumsum(0)[:-1]])


def rotate_by_plus_theta(x, frequencies, rotate=reference.rotate):
    return rotate(x, -frequencies)


def orthogonalize_without_eps(g, steps=5, orthogonalize=reference.orthogonalize):
    """Almost: what is added to the norm of so large a matrix does not count."""
    return orthogonalize(1e9 * g, steps)


def float64_frequencies(head_dim, frequencies=reference.float32_frequencies):
    """So that the angles, cosines and sines are made in float64."""
    return frequencies(head_dim).double()


WRONG_FUNCTIONS = dict(half_of=half_rounded_up, momentum=one_more_of_momentum,
                       count_documents=count_from_the_next, rotate=rotate_by_plus_theta,
                       float32_frequencies=float64_frequencies,
                       orthogonalize=orthogonalize_without_eps)


@pytest.mark.parametrize("name", WRONG_FUNCTIONS)
def test_a_wrong_function_is_seen(folder, monkeypatch, name):
    monkeypatch.setattr(reference, name, WRONG_FUNCTIONS[name])
    assert differs(folder, "2025-01-16", reference.SYSTEMS["2025-01-16"])


# ---- one technique at a time, on an older system ----

def window_to_5_blocks(step, steps):
    return None, max(1, math.ceil(5 * step / steps))


TECHNIQUES = {
    "norm_eps": (dict(norm_eps=2**-7), dict(norm_eps=2**-7)),
    "attention_scale": (dict(attention_scale=0.2), dict(attention_scale=0.2)),
    "logit_scale": (dict(logit_scale=0.0), dict(logits_by_width=True)),
    "short_window_layers": (dict(short_window_layers="(1,2,10)"), dict(short_layers=(1, 2, 10))),
    "window_rounding": (dict(window_rounding="up", window_start=0, window_end=640),
                        dict(windows=window_to_5_blocks)),
    "rate_floor": (dict(rate_floor=0.3), dict(rate_floor=0.3)),
    "adam_eps": (dict(adam_eps=1e-4), dict(adam_eps=1e-4)),
    "adam_eps_first": (dict(adam_eps=1e-4, adam_eps_first=True),
                       dict(adam_eps=1e-4, adam_eps_first=True)),
    "sum_loss": (dict(sum_loss=True), dict(sum_loss=True)),
    "align_documents": (dict(align_documents=True), dict(aligned=True)),
}


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_a_technique_alone_on_the_system_of_2025_01_04(folder, technique):
    options, facts = TECHNIQUES[technique]
    hp = small(folder, "2025-01-04", **SHORT_RUN | options)
    system = dataclasses.replace(reference.SYSTEMS["2025-01-04"], float32_rotary=True)
    ours = train_ours(hp, SHORT_STEPS, shaken=True)
    changed = train_theirs(dataclasses.replace(system, **facts), hp, ours.start, SHORT_STEPS)
    assert differences(ours, changed) == {}
    assert differences(short_run(folder, "2025-01-04"), changed) != {}


# ---- schedules ----

FIRST_STEP_OF_WINDOW = {  # of 2, 3, … 14 blocks
    "2025-01-13": (104, 207, 311, 414, 517, 621, 724, 827, 931, 1034, 1137, 1241, 1344),
    "2025-01-16": (104, 207, 310, 413, 516, 620, 723, 826, 929, 1032, 1136, 1239, 1342),
    "2025-07-13": (130, 260, 389, 519, 649, 778, 908, 1038, 1167, 1297, 1426, 1556, 1686)}
SHORT_BLOCKS = {1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 3, 7: 3, 8: 4, 9: 4, 10: 5, 11: 5, 12: 6, 13: 6,
                14: 7}


@pytest.mark.parametrize("preset", PRESETS)
def test_windows_of_every_step(preset):
    hp = hyperparameters(preset)
    first = FIRST_STEP_OF_WINDOW[preset]
    for step in range(hp.num_steps + 1):
        blocks = 1 + sum(step >= start for start in first)
        window = window_at(hp, step)
        assert window == (NO_LIMIT, blocks), step
        short = train_gpt.short_window(torch.tensor(window, dtype=torch.int32))
        assert short[1] == SHORT_BLOCKS[blocks], step
        assert short[0] >= 2**18, step  # longer than any sequence
        assert reference.SYSTEMS[preset].windows(step, hp.num_steps) == (None, blocks)


@pytest.mark.parametrize("preset, num_steps, part, first, last", [
    ("2025-01-13", 1395, 0.4, 838, 0.1016129), ("2025-01-16", 1393, 0.4, 836, 0.1016152),
    ("2025-07-13", 1750, 0.45, 963, 0.1011429)])
def test_rates_and_momenta_of_every_step(preset, num_steps, part, first, last):
    hp = hyperparameters(preset)
    system = reference.SYSTEMS[preset]
    assert hp.num_steps == num_steps == system.steps
    assert [step for step in range(num_steps) if rate_at(hp, step) < 1 - 1e-12][0] == first
    assert rate_at(hp, num_steps - 1) == pytest.approx(last, abs=5e-8)
    for step in range(num_steps):
        left = min(1, (1 - step / num_steps) / part)
        warm = min(1, step / 300)
        assert rate_at(hp, step) == pytest.approx(left + 0.1 * (1 - left), rel=1e-12)
        assert momentum_at(hp, step) == pytest.approx((1 - warm) * 0.85 + warm * 0.95, rel=1e-12)
        factor = reference.rate_factor(step, num_steps, system.cooldown, system.rate_floor)
        assert rate_at(hp, step) == pytest.approx(factor, rel=1e-12)


# ---- the rotary tables ----

@pytest.mark.parametrize("preset", PRESETS)
def test_rotary_tables_are_those_of_float32(preset):
    """To the bit, at the size of the heads and up to the end of the longest sequence."""
    hp = hyperparameters(preset)
    rotary = train_gpt.Rotary(128, 2**18, hp.rotary_base, hp.rotary_fraction, hp.rotary_endpoint)
    frequencies = reference.float32_frequencies(128)
    assert torch.equal(frequencies[32:], torch.zeros(32))
    for start in (0, 49_152, 2**18 - 1000):
        positions = torch.arange(start, start + 1000, dtype=torch.float32)
        angles = positions[:, None] * frequencies
        assert torch.equal(rotary.cos[start:start + 1000, 0], angles.cos())
        assert torch.equal(rotary.sin[start:start + 1000, 0], angles.sin())


# ---- the start ----

@pytest.mark.parametrize("preset", PRESETS)
def test_weights_start_within_the_bounds(folder, preset):
    """Width 768, so that the bound is the specification's: 1/32."""
    torch.manual_seed(0)
    hp = small(folder, preset, model_dim=768, num_heads=6, num_layers=2, short_window_layers="()")
    model = train_gpt.GPT(hp)
    for name, p in model.named_parameters():
        if name.endswith(("output.weight", "down.weight", "head.weight")):
            assert not p.any(), name
        elif name.startswith("blocks.") and p.ndim == 2:
            assert p.abs().max() <= (1 + 1e-6) / 32, name
            assert p.abs().max() > 0.9999 / 32, name
            assert p.std().item() == pytest.approx(1 / 32 / math.sqrt(3), rel=0.01), name
        elif "embed" in name:
            assert p.mean().item() == pytest.approx(0, abs=0.01), name
            assert p.std().item() == pytest.approx(1, rel=0.01), name
        else:
            start = {"mix": [1, 0], "value_mix": [0.5, 0.5]}.get(name.split(".")[-1], [1])
            assert p.tolist() == start, name


@pytest.mark.parametrize("preset, count", [
    ("2025-01-13", 275_598_388), ("2025-01-16", 275_598_388),
    ("2025-07-13", 275_742_784 - 12)])  # 12 of its 64 scalars are not used
def test_every_parameter_is_counted(preset, count):
    with torch.device("meta"):
        model = train_gpt.GPT(hyperparameters(preset))
    assert sum(p.numel() for p in model.parameters()) == count
    rows = 50304 if reference.SYSTEMS[preset].padded_tables else 50257
    assert {table.weight.shape for table in (model.embed, *model.value_embeds)} == {(rows, 768)}


@pytest.mark.parametrize("preset, tokens, train, val", [
    ("2025-01-13", 524_288, 65_536, 65_536), ("2025-01-16", 524_288, 65_536, 65_536),
    ("2025-07-13", 393_216, 49_152, 262_144)])
def test_tokens_of_a_step_and_of_a_sequence(preset, tokens, train, val):
    hp = hyperparameters(preset)
    assert hp.batch_tokens == tokens
    assert (hp.sequence_tokens or train) == train
    assert (hp.val_sequence_tokens or hp.sequence_tokens or val) == val
    assert (hp.val_tokens, hp.val_every, hp.val_start) == (10_485_760, 125, 0)
    assert hp.align_documents == reference.SYSTEMS[preset].aligned


# ---- sequences that start at documents ----

def read_aligned(pattern: str, num_sequences: int, length: int, world_size: int) -> list:
    """[batch][sequence] of (inputs, targets), as lists; each rank has a loader of its own."""
    loaders = [Loader(pattern, num_sequences * length, length, rank=rank, world_size=world_size,
                      document_token=DOCUMENT, align_documents=True) for rank in range(world_size)]
    assert len({len(loader) for loader in loaders}) == 1
    batches = []
    for _ in range(len(loaders[0])):
        ranks = [loader.next_batch() for loader in loaders]
        batches.append([tuple(tokens.tolist() for tokens in rank[micro_step])
                        for micro_step in range(num_sequences // world_size) for rank in ranks])
    return batches


D = DOCUMENT
# In sequences of 4, two to a batch: found within 16 tokens, in shards that have 17 more, or 18.
BY_HAND = {
    "tokens before the first document are left out": (
        [[1, 2, 3, D, 1, 2, 3, D, 4, 5, 6, D, 8, 9, 1, 2, 3, 4]],
        [[([D, 1, 2, 3], [1, 2, 3, D]), ([D, 4, 5, 6], [4, 5, 6, D])]]),
    "the rest of a sequence's last document, too": (
        [[D, 1, 2, 3, 4, 5, D, 6, D, 8, 9, 10, D, 1, 1, 1, 1, 1]],
        [[([D, 1, 2, 3], [1, 2, 3, 4]), ([D, 6, D, 8], [6, D, 8, 9])]]),
    "the last target belongs to the document": (
        [[D, D, D, D, 1, D, D, 2, 3, D, 4, 4, 4, 4, 4, 4, 4, 4]],
        [[([D, D, D, D], [D, D, D, 1]), ([D, D, 2, 3], [D, 2, 3, D])]]),
    "the next batch starts where this one ended": (
        [[D, 1, 1, 1, D, 2, 2, 2, D, 3, 3, 3, 3, D, 4, 4, 4, D, 5, 5, 5, 5, 5, 5, 5, 5]],
        [[([D, 1, 1, 1], [1, 1, 1, D]), ([D, 2, 2, 2], [2, 2, 2, D])],
         [([D, 3, 3, 3], [3, 3, 3, 3]), ([D, 4, 4, 4], [4, 4, 4, D])]]),
    "a shard's tail is dropped, and a document is not joined across shards": (
        [[D, 1, 1, 1, D, 2, 2, 2, D, 3, 3, 3, D, 4, 4, 4, D, 5, 5, 5, D, 6, 6, 6],
         [5, 5, D, 8, 8, 8, D, 9, 9, 9, D, 1, 1, 1, 1, 1, 1, 1]],
        [[([D, 1, 1, 1], [1, 1, 1, D]), ([D, 2, 2, 2], [2, 2, 2, D])],
         [([D, 8, 8, 8], [8, 8, 8, D]), ([D, 9, 9, 9], [9, 9, 9, D])]]),
    "17 tokens are too few, as one more must follow the span": (
        [[D, 1, 1, 1, D, 2, 2, 2, D, 3, 3, 3, 3, 3, 3, 3, 3],
         [D, 4, 4, 4, D, 5, 5, 5, D, 6, 6, 6, 6, 6, 6, 6, 6, 6]],
        [[([D, 4, 4, 4], [4, 4, 4, D]), ([D, 5, 5, 5], [5, 5, 5, D])]]),
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", BY_HAND)
def test_aligned_batches_by_hand(make_shards, case, world_size):
    shards, expected = BY_HAND[case]
    assert reference.aligned_batches(shards, 2, 4, D) == expected
    assert read_aligned(make_shards(*shards), 2, 4, world_size) == expected


@pytest.mark.parametrize("tokens", [
    [1] * 18, [D] + [1] * 17, [D, 1, 1, 1, D] + [1] * 13, [D, 1, 1, 1, D] + [1] * 11 + [D, 1]])
def test_a_stretch_with_too_few_documents_is_refused(make_shards, tokens):
    """Also where the document that would end the batch follows right after the span."""
    with pytest.raises(ValueError):
        reference.aligned_batches([tokens], 2, 4, D)
    with pytest.raises(UserError, match=r"train_000000\.bin"):
        read_aligned(make_shards(tokens), 2, 4, 1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_ranks_read_aligned_batches_of_several_shards(make_shards, world_size):
    """128 tokens and 6 sequences of them; some documents are as long as a sequence, or longer."""
    generator = np.random.default_rng(5)
    shards = []
    for _ in range(4):
        lengths = generator.choice([1, 2, 20, 127, 128, 129, 200], 60)
        documents = [[D, *generator.integers(10, 2000, length - 1)] for length in lengths]
        head = generator.integers(10, 2000, generator.integers(0, 100))
        shards.append(np.concatenate([head, *documents]).astype(int).tolist())
    expected = reference.aligned_batches(shards, 6, 128, D)
    assert read_aligned(make_shards(*shards), 6, 128, world_size) == expected
    assert len(expected) > 12
    assert all(inputs[0] == D for batch in expected for inputs, _ in batch)
    assert any(targets[-1] == D for batch in expected for _, targets in batch)


@given(lengths=st.lists(st.integers(0, 700), min_size=1, max_size=4), seed=st.integers(0, 999),
       documents=st.sampled_from([0.05, 0.2, 0.5, 1.0]), world_size=st.integers(1, 3),
       micro_steps=st.integers(1, 3), length=st.sampled_from([1, 5, 16]))
@settings(max_examples=60)
def test_any_shards_in_aligned_batches(tmp_path_factory, lengths, seed, documents, world_size,
                                       micro_steps, length):
    folder = tmp_path_factory.mktemp("shards")
    generator = np.random.default_rng(seed)
    shards = []
    for number, size in enumerate(lengths):
        tokens = generator.integers(10, 2000, size)
        tokens[generator.random(size) < documents] = D
        write_shard(folder / f"{number}.bin", tokens)
        shards.append(tokens.tolist())
    num_sequences = world_size * micro_steps
    try:
        expected = reference.aligned_batches(shards, num_sequences, length, D)
    except ValueError:
        with pytest.raises(UserError):
            read_aligned(f"{folder}/*.bin", num_sequences, length, world_size)
    else:
        assert read_aligned(f"{folder}/*.bin", num_sequences, length, world_size) == expected


def test_aligned_batches_can_be_read_in_any_order(make_shards):
    """A run that resumes starts at any of them."""
    loader = Loader(make_shards(*text()["train"]), 2 * SEQUENCE, SEQUENCE, document_token=D,
                    align_documents=True)
    expected = batches_of(reference.SYSTEMS["2025-07-13"], 2)
    assert len(loader) == len(expected) > 50
    for index in (30, 3, 3, len(loader) - 1, 0, 1):
        loader.index = index
        for ours, theirs in zip(loader.next_batch(), expected[index], strict=True):
            assert all(torch.equal(one.long(), other) for one, other in zip(ours, theirs))
