"""The dated systems, written again as plainly as possible: the trainer is compared with these.

Nothing here is shared with train_gpt.py. Attention is a dense matrix under a dense mask, the
optimizers are their textbook formulas, one matrix at a time, and each system is a row of facts.
The last three are specified in float64, up to rotary tables that are made in float32.
"""
import math
from dataclasses import dataclass, replace
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


def growing_blocks_rounded_up(step, steps):
    """0 → 13.5 blocks of 128, rounded up: 1 → 14."""
    return max(1, -(-27 * step // (2 * steps)))


def half_of(blocks):
    """What the short layers see of a window of these blocks: their own block at least."""
    return max(1, blocks // 2)


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
    float32_rotary: bool = False        # half of it, every operation in float32
    norm_eps: float | None = None       # None: the epsilon of the type
    attention_scale: float | None = None  # None: 1/√head_dim
    short_layers: tuple = ()            # they see half the blocks of the others
    sigmoid: bool = False               # logits 2c·sigmoid(2z/c) instead of c·tanh(z/c)
    logits_by_width: bool = False       # z is divided by √model_dim first
    sum_loss: bool = False              # the gradients are those of the sum over a sequence
    head_rate: float = 0.008
    rate_floor: float = 0.0             # rates fall to this part
    adam_eps: float = 1e-8
    adam_eps_first: bool = False        # added before the bias correction
    init_bound: float = 1.0             # matrices start uniform in ±this/√inputs
    padded_tables: bool = True          # embeddings have rows for the head's padding too
    aligned: bool = False               # sequences start at documents


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


def window_rounded_up(step, steps):
    return None, growing_blocks_rounded_up(step, steps)


SHORT = (1, 2, 3, 5, 6, 8, 9, 10)  # long: 0, 4 and 11; layer 7 has no attention
FP8 = System(window_rounded_up, ENDS, "two", 15, 0.4 * 1395, 1395, no_attention=(7,),
             float32_rotary=True, norm_eps=2**-7, sigmoid=True, rate_floor=0.1,
             init_bound=math.sqrt(3) / 2, padded_tables=False)
LONG_SHORT = replace(FP8, cooldown=0.4 * 1393, steps=1393, attention_scale=0.12, short_layers=SHORT,
                     adam_eps=1e-10)
ALIGNED = replace(LONG_SHORT, cooldown=0.45 * 1750, steps=1750, norm_eps=2**-23,
                  logits_by_width=True, sum_loss=True, head_rate=0.22, adam_eps_first=True,
                  padded_tables=True, aligned=True)

SYSTEMS = {
    "2024-11-19": System(constant_window, NO_TABLES, "first", 30, 562, 1875, muon_rate=0.04,
                         betas=(0.9, 0.95), momentum_sums=True, momentum_steps=500),
    "2024-12-04": System(window_in_tokens, PER_LAYER, "one", 30, 600, 1530, momentum_sums=True),
    "2024-12-08": System(window_in_both, MIRRORED, "two", 30, 600, 1480),
    "2024-12-10": System(window_in_blocks, MIRRORED, "two", 30, 600, 1480),
    "2024-12-17": System(window_in_blocks, ENDS, "two", 30, 600, 1490, no_attention=(7,),
                         half_rotary=True, padded_tables=False),
    "2025-01-04": System(window_in_blocks, ENDS, "two", 15, 0.4 * 1390, 1390, no_attention=(7,),
                         half_rotary=True),
    "2025-01-13": FP8,
    "2025-01-16": LONG_SHORT,
    "2025-07-13": ALIGNED,
}


# ---- schedules ----

def rate_factor(step, steps, cooldown, floor=0.0):
    left = 1.0 if step < steps - cooldown else (steps - step) / cooldown
    return left + floor * (1 - left)


def momentum(step, warmup):
    return 0.95 if step >= warmup else 0.85 + 0.10 * step / warmup


# ---- model ----

def rms_norm(x, eps=None):
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rotary_frequencies(head_dim, half):
    if half:
        rotated = head_dim // 4
        exponents = [i / (rotated - 1) for i in range(rotated)]
        return torch.tensor([1024.0 ** -e for e in exponents] + [0.0] * (head_dim // 2 - rotated))
    return torch.tensor([10000.0 ** -(2 * i / head_dim) for i in range(head_dim // 2)])


def float32_frequencies(head_dim):
    """1 → 1/1024 for the first half of the pairs, as float32 computes it; 0 for the others."""
    rotated = head_dim // 4
    exponents = torch.linspace(0, 1, rotated, dtype=torch.float32)
    return torch.cat([(1 / 1024) ** exponents, torch.zeros(head_dim // 2 - rotated)])


def rotate(x, frequencies):
    """x: [tokens, heads, head_dim]; dimension i makes a pair with i + head_dim/2.

    Frequencies in float32 give angles, cosines and sines in float32, whatever the type of x.
    """
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[0])[:, None, None] * frequencies
    first = x[..., :half]
    second = x[..., half:]
    return torch.cat([first * angle.cos() + second * angle.sin(),
                      -first * angle.sin() + second * angle.cos()], -1)


def dense_attention(q, k, v, mask, scale=None):
    """[tokens, heads, head_dim] each, softmax over the whole row."""
    scaled = q / math.sqrt(q.shape[-1]) if scale is None else q * scale
    scores = torch.einsum("qhd,khd->hqk", scaled, k)
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

    def frequencies(self, head_dim):
        if self.system.float32_rotary:
            return float32_frequencies(head_dim)
        return rotary_frequencies(head_dim, self.system.half_rotary)

    def norm(self, x):
        return rms_norm(x, self.system.norm_eps)

    def softcap(self, z):
        cap = self.system.softcap
        if self.system.logits_by_width:
            z = z / math.sqrt(self.w["head"].shape[1])
        if self.system.sigmoid:  # 30·sigmoid(z/7.5) for a cap of 15
            return 2 * cap * torch.sigmoid(z / (cap / 2))
        return cap * torch.tanh(z / cap)

    def logits(self, tokens, step, steps, windows=None):
        system = self.system
        w = self.w
        norm = self.norm
        documents = count_documents(tokens, self.document_token)
        window_tokens, window_blocks = (windows or system.windows)(step, steps)
        long_mask = dense_mask(documents, window_tokens, window_blocks)
        if system.short_layers:
            short_mask = dense_mask(documents, window_tokens, half_of(window_blocks))
        x = x0 = norm(w["embedding"][tokens])
        frequencies = self.frequencies(x.shape[1] // self.heads)
        first = None
        stack = []
        for layer in range(12):
            if layer >= 6:
                x = x + w["skips"][layer - 6] * stack.pop()
            x = w[f"{layer}.mix"][0] * x + w[f"{layer}.mix"][1] * x0
            if layer not in system.no_attention:
                q, k, v = ((norm(x) @ w[f"{layer}.{part}"].T).unflatten(-1, (self.heads, -1))
                           for part in "qkv")
                first = v if first is None else first
                q = rotate(norm(q), frequencies)
                k = rotate(norm(k), frequencies)
                mixed = self.mixed_values(layer, v, first, tokens)
                mask = short_mask if layer in system.short_layers else long_mask
                attended = dense_attention(q, k, mixed, mask, system.attention_scale)
                x = x + attended.flatten(1) @ w[f"{layer}.o"].T
            hidden = torch.clamp(norm(x) @ w[f"{layer}.up"].T, min=0) ** 2
            x = x + hidden @ w[f"{layer}.down"].T
            if layer < 6:
                stack.append(x)
        return self.softcap(norm(x) @ w["head"].T)

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


def adam_step(p, g, state, rate, betas, eps=1e-8, eps_first=False):
    """eps_first: it is added to the root of the average before that average is corrected."""
    state["count"] = state.get("count", 0) + 1
    state["mean"] = betas[0] * state.get("mean", 0) + (1 - betas[0]) * g
    state["square"] = betas[1] * state.get("square", 0) + (1 - betas[1]) * g * g
    mean = state["mean"] / (1 - betas[0] ** state["count"])
    square = state["square"] / (1 - betas[1] ** state["count"])
    if eps_first:
        correction = math.sqrt(1 - betas[1] ** state["count"])
        p -= rate * mean * correction / (state["square"].sqrt() + eps)
    else:
        p -= rate * mean / (square.sqrt() + eps)


def adam_rate(name, head_rate=0.008):
    """The rate of the parameters that are Adam's; None for Muon's."""
    if name == "embedding" or name.startswith("table."):
        return 0.6
    if name == "head":
        return head_rate
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
        objective = loss * len(sequences[0][0]) if system.sum_loss else loss
        grads = torch.autograd.grad(objective, list(weights.values()), allow_unused=True)
        factor = rate_factor(step, self.steps, self.cooldown, system.rate_floor)
        with torch.no_grad():
            for (name, p), g in zip(weights.items(), grads):
                g = torch.zeros_like(p) if g is None else g
                rate = adam_rate(name, system.head_rate)
                if rate is not None:
                    adam_step(p, g, self.states[name], factor * rate, system.betas,
                              system.adam_eps, system.adam_eps_first)
                else:
                    muon_step(p, g, self.states[name], factor * system.muon_rate,
                              momentum(step, system.momentum_steps), system.momentum_sums)
        return loss.item()


# ---- data ----

def contiguous_batches(shards, num_sequences, length):
    """Batches of (inputs, targets), lists of tokens: one stretch after another of each shard.

    A shard that ends with the last target of a batch gives that batch up, too.
    """
    batches = []
    for tokens in shards:
        position = 0
        while position + num_sequences * length + 1 < len(tokens):
            starts = [position + number * length for number in range(num_sequences)]
            batches.append([cut(tokens, start, length) for start in starts])
            position += num_sequences * length
    return batches


def aligned_batches(shards, num_sequences, length, document_token):
    """The same of sequences that start at documents, the rest of the last document left out.

    A batch is looked for in twice its tokens; a shard in which fewer are left is done.
    """
    batches = []
    span = 2 * num_sequences * length
    for tokens in shards:
        position = 0
        while position + span + 1 < len(tokens):
            starts, position = aligned_starts(tokens, position, span, num_sequences, length,
                                              document_token)
            batches.append([cut(tokens, start, length) for start in starts])
    return batches


def aligned_starts(tokens, position, span, num_sequences, length, document_token):
    """Where the sequences of the batch at a position start, and the position of the next batch."""
    start = None
    starts = []
    for place in range(position, position + span):
        if tokens[place] != document_token:
            continue
        if start is None:
            start = place
        elif place - start >= length:
            starts.append(start)
            start = place
        if len(starts) == num_sequences:
            return starts, start
    raise ValueError(f"{len(starts)} sequences from {position} on, not {num_sequences}")


def cut(tokens, start, length):
    return tokens[start:start + length], tokens[start + 1:start + length + 1]
