"""The first six systems against an independent reference: same weights, tokens and losses.

test_lineage_2025.py has the later ones.
"""
import math
import re

import pytest
import reference
import torch
from helpers import DATED, made_up_text, make_trainer, next_loss

import train_gpt

PARTS = {"attention.query.weight": "q", "attention.key.weight": "k", "attention.value.weight": "v",
         "attention.output.weight": "o", "attention.value_mix": "values", "up.weight": "up",
         "down.weight": "down", "mix": "mix"}
WHOLE = {"embed.weight": "embedding", "head.weight": "head", "skip_weights": "skips"}
SEQUENCE = 384
FIRST_SIX = [preset for preset in DATED if preset < "2025-01-13"]


def name_in_reference(name: str) -> str:
    if block := re.fullmatch(r"blocks\.(\d+)\.(.+)", name):
        return f"{block[1]}.{PARTS[block[2]]}"
    if table := re.fullmatch(r"value_embeds\.(\d+)\.weight", name):
        return f"table.{table[1]}"
    return WHOLE[name]


def shake(model: train_gpt.GPT) -> None:
    """Let every weight matter from the first step, also those that start at zero, or all alike."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim < 2:
                p += 0.2 * torch.randn(p.shape, generator=generator)
            elif not p.any():
                p += 0.3 * p.size(1) ** -0.5 * torch.randn(p.shape, generator=generator)


class Pair:
    """The trainer from its preset and the reference, with the same weights and tokens.

    The oldest system's window of 1024 would exclude nothing in these sequences: 192 on both sides.
    """

    def __init__(self, tiny, make_shards, preset: str, num_steps: int, cooldown: int, shaken: bool):
        fixed_window = preset == "2024-11-19"
        window = dict(window_start=192, window_end=192) if fixed_window else {}
        stream = made_up_text(num_steps * 2 * SEQUENCE + 1)
        hp = tiny(preset, train_files=make_shards(stream),
                  val_files=make_shards(stream, name="val"), sequence_tokens=SEQUENCE,
                  batch_tokens=2 * SEQUENCE, val_tokens=SEQUENCE, num_steps=num_steps,
                  cooldown=cooldown, **window)
        self.stream = torch.from_numpy(stream.astype("int64"))
        self.trainer = make_trainer(hp)
        if shaken:
            shake(self.trainer.model)
        weights = {name_in_reference(name): p.detach()
                   for name, p in self.trainer.model.named_parameters()}
        model = reference.Model(reference.SYSTEMS[preset], weights, hp.num_heads, hp.document_token)
        windows = (lambda step, steps: (192, None)) if fixed_window else None
        self.reference = reference.Run(model, num_steps, cooldown, windows)

    def sequences(self, step: int) -> list:
        """The two sequences of a step, each with its targets one token on."""
        first = 2 * SEQUENCE * step
        return [(self.stream[start:start + SEQUENCE], self.stream[start + 1:start + SEQUENCE + 1])
                for start in (first, first + SEQUENCE)]

    def train(self, steps: int) -> tuple[list[float], list[float]]:
        ours = []
        theirs = []
        for step in range(steps):
            ours.append(next_loss(self.trainer, step))
            theirs.append(self.reference.step(step, self.sequences(step)))
        return ours, theirs

    def distances(self) -> dict[str, float]:
        """How far each parameter is from the reference's, relative to its size."""
        there = self.reference.model.w
        return {name: ((p - there[name_in_reference(name)]).norm() / p.norm()).item()
                for name, p in self.trainer.model.named_parameters()}


@pytest.mark.parametrize("preset", FIRST_SIX)
def test_same_losses_step_after_step(tiny, make_shards, preset):
    """8 steps of 24: the window grows over the whole sequence, the rate falls from step 4 on.

    Every weight matters from the start, so nothing but rounding can differ: 2e-7 of the losses and
    5e-5 of the parameters were measured.
    """
    pair = Pair(tiny, make_shards, preset, num_steps=24, cooldown=20, shaken=True)
    ours, theirs = pair.train(8)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert ours[-1] < ours[0] - 1, "too little was learned for this to compare anything"
    assert {name: far for name, far in pair.distances().items() if not far < 2e-3} == {}


@pytest.mark.parametrize("preset", FIRST_SIX)
def test_same_losses_from_the_systems_own_start(tiny, make_shards, preset):
    """6 steps of 16 from outputs and head that are zero: at first every token is as likely.

    Until the blocks do something, the skip weights and mixes only scale the stream, which the norms
    undo: their gradients are rounding errors, of which Adam takes the sign. So these losses agree
    less closely.
    """
    pair = Pair(tiny, make_shards, preset, num_steps=16, cooldown=13, shaken=False)
    ours, theirs = pair.train(6)
    assert ours[0] == pytest.approx(math.log(256), rel=1e-6)  # 200 tokens, padded to 2 × 128
    assert ours[:2] == pytest.approx(theirs[:2], rel=1e-6)
    assert ours == pytest.approx(theirs, rel=2e-4)
    assert ours[-1] < ours[0] - 0.5, "too little was learned for this to compare anything"
