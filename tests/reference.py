"""The six dated systems, written again as plainly as possible: the trainer is compared with these.

Nothing here is shared with train_gpt.py. Attention is a dense matrix under a dense mask, the
optimizers are their textbook formulas, one matrix at a time, and each system is a row of facts.
"""
import math
from dataclasses import dataclass
from typing import Callable

import torch

# ---- masks ----

def dense_mask(documents, token_window=None, block_window=None):
    """[query, key], true where the query may look: causal, same document, within both windows."""
    position = torch.arange(len(documents))
    query = position[:, None]
    key = position[None, :]
    mask = (key <= query) & (documents[:, None] == documents[None, :])
    if token_window is not None:
        mask &= query - key < token_window
    if block_window is not None:
        mask &= torch.div(query, 128, rounding_mode="floor") - key // 128 < block_window
    return mask


def count_documents(tokens, document_token):
    """The number of document tokens up to and including each position."""
    seen = 0
    numbers = []
    for token in tokens.tolist():
        if token == document_token:
            seen += 1
        numbers.append(seen)
    return torch.tensor(numbers)


def growing_tokens(step, steps):
    """64 → 1792 tokens by 64."""
    return 64 * ((64 * steps + (1792 - 64) * step) // (64 * steps))


def growing_blocks(step, steps):
    """1 → 14 blocks of 128."""
    return max(1, (128 * steps + 1728 * step) // (128 * steps))


# ---- the facts ----

@dataclass
class System:
    windows: Callable                   # (step, steps) → (tokens or None, blocks or None)
    tables: tuple                       # value table by layer, or None
    values: str                         # first: (1−λ)v + λv₁ ; one: (1−λ)v + λe ; two: λ₀v + λ₁e
    softcap: float
    cooldown: float                     # steps, at full size
    steps: int
    muon_rate: float = 0.05
    betas: tuple = (0.8, 0.95)
    momentum_sums: bool = False
    momentum_steps: int = 300
    no_attention: tuple = ()
    half_rotary: bool = False


NO_TABLES = (None,) * 12
PER_LAYER = tuple(range(12))
MIRRORED = (0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0)
ENDS = (0, 1, 2, None, None, None, None, None, None, 0, 1, 2)


def constant_window(step, steps):
    return 1024, None


def window_in_tokens(step, steps):
    return growing_tokens(step, steps), None


def window_in_both(step, steps):
    tokens = growing_tokens(step, steps)
    return tokens, math.ceil(tokens / 128)


def window_in_blocks(step, steps):
    return None, growing_blocks(step, steps)


SYSTEMS = {
    "2024-11-19": System(constant_window, NO_TABLES, "first", 30, 562, 1875, muon_rate=0.04,
                         betas=(0.9, 0.95), momentum_sums=True, momentum_steps=500),
    "2024-12-04": System(window_in_tokens, PER_LAYER, "one", 30, 600, 1530, momentum_sums=True),
    "2024-12-08": System(window_in_both, MIRRORED, "two", 30, 600, 1480),
    "2024-12-10": System(window_in_blocks, MIRRORED, "two", 30, 600, 1480),
    "2024-12-17": System(window_in_blocks, ENDS, "two", 30, 600, 1490, no_attention=(7,),
                         half_rotary=True),
    "2025-01-04": System(window_in_blocks, ENDS, "two", 15, 0.4 * 1390, 1390, no_attention=(7,),
                         half_rotary=True),
}


# ---- schedules ----

def rate_factor(step, steps, cooldown):
    return 1.0 if step < steps - cooldown else (steps - step) / cooldown


def momentum(step, warmup):
    return 0.95 if step >= warmup else 0.85 + 0.10 * step / warmup


# ---- model ----

def rms_norm(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + torch.finfo(x.dtype).eps)


def rotary_frequencies(head_dim, half):
    if half:
        rotated = head_dim // 4
        exponents = [i / (rotated - 1) for i in range(rotated)]
        return torch.tensor([1024.0 ** -e for e in exponents] + [0.0] * (head_dim // 2 - rotated))
    return torch.tensor([10000.0 ** -(2 * i / head_dim) for i in range(head_dim // 2)])


def rotate(x, frequencies):
    """x: [tokens, heads, head_dim]; dimension i makes a pair with i + head_dim/2."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[0])[:, None, None] * frequencies
    first = x[..., :half]
    second = x[..., half:]
    return torch.cat([first * angle.cos() + second * angle.sin(),
                      -first * angle.sin() + second * angle.cos()], -1)


def dense_attention(q, k, v, mask):
    """[tokens, heads, head_dim] each, softmax over the whole row."""
    scores = torch.einsum("qhd,khd->hqk", q / math.sqrt(q.shape[-1]), k)
    weights = (scores + torch.where(mask, 0.0, -math.inf).to(q)).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


class Model:
    """The weights by the reference's own names, and the forward pass."""

    def __init__(self, system, weights, heads, document_token):
        self.system = system
        self.heads = heads
        self.document_token = document_token
        self.w = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}

    def mixed_values(self, layer, v, first, tokens):
        weight = self.w.get(f"{layer}.values")
        table = self.system.tables[layer]
        if self.system.values == "first":
            return (1 - weight) * v + weight * first
        if self.system.values == "one":
            return (1 - weight) * v + weight * self.w[f"table.{table}"][tokens].view_as(v)
        if table is None:
            return weight[0] * v
        return weight[0] * v + weight[1] * self.w[f"table.{table}"][tokens].view_as(v)

    def logits(self, tokens, step, steps, windows=None):
        system = self.system
        w = self.w
        mask = dense_mask(count_documents(tokens, self.document_token),
                          *(windows or system.windows)(step, steps))
        x = x0 = rms_norm(w["embedding"][tokens])
        frequencies = rotary_frequencies(x.shape[1] // self.heads, system.half_rotary)
        first = None
        stack = []
        for layer in range(12):
            if layer >= 6:
                x = x + w["skips"][layer - 6] * stack.pop()
            x = w[f"{layer}.mix"][0] * x + w[f"{layer}.mix"][1] * x0
            if layer not in system.no_attention:
                q, k, v = ((rms_norm(x) @ w[f"{layer}.{part}"].T).unflatten(-1, (self.heads, -1))
                           for part in "qkv")
                first = v if first is None else first
                q = rotate(rms_norm(q), frequencies)
                k = rotate(rms_norm(k), frequencies)
                mixed = self.mixed_values(layer, v, first, tokens)
                x = x + dense_attention(q, k, mixed, mask).flatten(1) @ w[f"{layer}.o"].T
            hidden = torch.clamp(rms_norm(x) @ w[f"{layer}.up"].T, min=0) ** 2
            x = x + hidden @ w[f"{layer}.down"].T
            if layer < 6:
                stack.append(x)
        return system.softcap * torch.tanh(rms_norm(x) @ w["head"].T / system.softcap)

    def loss(self, inputs, targets, *where, **windows):
        logits = self.logits(inputs, *where, **windows)
        return (logits.logsumexp(-1) - logits[torch.arange(len(targets)), targets]).mean()


# ---- optimizers ----

def orthogonalize(g, steps=5):
    """Newton–Schulz on one matrix; the shorter side is made the rows."""
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (torch.sqrt((x ** 2).sum()) + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x.T if g.shape[0] > g.shape[1] else x


def muon_step(p, g, state, rate, momentum, sums=False, nesterov=True, decay=0.0, steps=5):
    """One matrix, in place. The state is a dict for its momentum."""
    buffer = state.get("buffer", torch.zeros_like(g))
    buffer = momentum * buffer + g if sums else momentum * buffer + (1 - momentum) * g
    state["buffer"] = buffer
    ahead = buffer
    if nesterov:
        ahead = g + momentum * buffer if sums else (1 - momentum) * g + momentum * buffer
    p *= 1 - rate * decay
    p -= rate * math.sqrt(max(1, p.shape[0] / p.shape[1])) * orthogonalize(ahead, steps)


def adam_step(p, g, state, rate, betas):
    state["count"] = state.get("count", 0) + 1
    state["mean"] = betas[0] * state.get("mean", 0) + (1 - betas[0]) * g
    state["square"] = betas[1] * state.get("square", 0) + (1 - betas[1]) * g * g
    mean = state["mean"] / (1 - betas[0] ** state["count"])
    square = state["square"] / (1 - betas[1] ** state["count"])
    p -= rate * mean / (square.sqrt() + 1e-8)


def adam_rate(name):
    """The rate of the parameters that are Adam's; None for Muon's."""
    if name == "embedding" or name.startswith("table."):
        return 0.6
    if name == "head":
        return 0.008
    return 0.04 if name == "skips" or name.endswith((".mix", ".values")) else None


class Run:
    """A whole training run of the reference, a step at a time."""

    def __init__(self, model, steps, cooldown, windows=None):
        self.model = model
        self.steps = steps
        self.cooldown = cooldown
        self.windows = windows
        self.states = {name: {} for name in model.w}

    def step(self, step, sequences):
        """sequences: (inputs, targets) of the whole batch. Returns the loss before the step."""
        system = self.model.system
        weights = self.model.w
        losses = [self.model.loss(inputs, targets, step, self.steps, windows=self.windows)
                  for inputs, targets in sequences]
        loss = sum(losses) / len(losses)
        grads = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        factor = rate_factor(step, self.steps, self.cooldown)
        with torch.no_grad():
            for (name, p), g in zip(weights.items(), grads):
                g = torch.zeros_like(p) if g is None else g
                rate = adam_rate(name)
                if rate is not None:
                    adam_step(p, g, self.states[name], factor * rate, system.betas)
                else:
                    muon_step(p, g, self.states[name], factor * system.muon_rate,
                              momentum(step, system.momentum_steps), system.momentum_sums)
        return loss.item()
