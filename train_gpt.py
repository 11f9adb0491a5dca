"""Train a GPT as fast as it can be trained: one file, the same from a laptop's CPU to 8×H100.

    ./run.sh [--name=value …]                              set up, fetch data, train on whatever is here
    python train_gpt.py [--name=value …]                   train in this process: one GPU, or the CPU
    torchrun --nproc_per_node=N train_gpt.py [--name=…]    train on N GPUs, or in N processes on the CPU
    python train_gpt.py --sample="Text" --checkpoint=PATH  continue a text from a saved model
    python train_gpt.py --help                             every hyperparameter, its meaning and default

Contents, in the order in which data flows:
    1  hyperparameters              the numbers to change, the presets, the command line
    2  Muon                         Newton–Schulz and the optimizer of the matrices
    3  model                        the U-Net GPT with value embeddings
    4  masks and attention          causal ∧ same document ∧ within the window; FlexAttention, banded SDPA
    5  data                         memory-mapped token shards, one shared position
    6  schedules and optimizers     pure functions of the step; which parameter goes where
    7  logging and checkpoints      log.txt, its twin metrics.jsonl, checkpoint_*.pt, model.pt
    8  evaluation and sampling      validation loss, text
    9  train and main               the hardware, warm-up, the loop, the end of a run
"""
import bisect
import contextlib
import dataclasses
import datetime
import difflib
import glob
import inspect
import itertools
import json
import math
import mmap
import os
import platform
import re
import shutil
import signal
import sys
import time
import uuid
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

BLOCK = 128                     # tokens in a block of the attention mask
FAR = 2**30                     # a window that cuts nothing
SHARD_MAGIC, SHARD_VERSION, HEADER_BYTES = 20240520, 1, 256 * 4
CHECKPOINT_FORMAT = 1
SEPARATOR = "=" * 100           # between the parts of a log


class UserError(Exception):
    """A mistake that the user can mend: one sentence with the value, what was expected and the remedy."""


# ------------------------------------------------------------------------------------------------------------
# 1  Hyperparameters: edit them here, or give --name=value.
# ------------------------------------------------------------------------------------------------------------

@dataclass
class Hyperparameters:
    preset: str = "auto"                # applied in turn; auto: h100 where there are GPUs, else laptop
    # data
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"  # glob of the token shards to train on
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"      # glob of the token shards to validate on
    vocab_size: int = 50257             # tokens that exist
    vocab_multiple: int = 128           # rows of the head are padded up to a multiple of this: 50,304
    pad_embeddings: bool = True         # pad the rows of the embeddings likewise
    document_token: int = 50256         # starts each document; attention never crosses it
    # budget
    num_steps: int = 1390               # optimizer steps
    batch_tokens: int = 8 * 64 * 1024   # tokens per step over all ranks, whatever the world size
    sequence_tokens: int = 0            # tokens per forward pass of a rank; 0: 65,536, or as many as fit
    segment_tokens: int = 0             # a batch is stretches this long from evenly spaced places; 0: one
    epochs: int = 1                     # times the shards may be walked through; above 1: in shuffled order
    val_every: int = 125                # steps between validations; 0: only at the end
    val_tokens: int = 10_485_760        # tokens validated on, always the same first ones
    target_loss: float = 3.28           # validation loss that the run is meant to reach
    # model
    num_layers: int = 12                # the first half encodes, the second half decodes
    num_heads: int = 6                  # attention heads per layer
    model_dim: int = 768                # width of the residual stream
    mlp_ratio: int = 4                  # hidden units of the MLP per unit of width
    value_layout: str | tuple = "per_layer"  # value table of a layer: none, per_layer, mirrored, ends, tuple
    value_lambdas: int = 2              # learned weights of the value mix: 2: λ0·v + λ1·ve; 1: (1−λ)·v + λ·ve
    first_layer_values: bool = False    # mix the first layer's values into layers that have no value table
    no_attention: str | tuple = "none"  # layers without attention: none, second_decoder, or a tuple
    rotary_base: float = 1024.0         # the slowest rotary frequency is 1/base radians per token
    rotary_fraction: float = 0.5        # part of a head's dimensions that is rotated
    rotary_endpoint: bool = True        # frequencies run to 1/base itself; false: stop one short of it
    softcap: float = 15.0               # logits pass through c·tanh(logits/c); 0: off
    # attention window, growing linearly over the run
    window_unit: str = "block"          # it counts in: block (of 128), token (by 64), token_in_block (both)
    window_start: int = 128             # tokens, at step 0
    window_end: int = 1856              # tokens, at the last step (14 whole blocks)
    # optimizers
    embed_rate: float = 0.6             # Adam: token and value embeddings
    head_rate: float = 0.008            # Adam: output head
    scalar_rate: float = 0.04           # Adam: skip weights and mixes
    adam_beta1: float = 0.8             # Adam: decay of the mean
    adam_beta2: float = 0.95            # Adam: decay of the square
    muon_rate: float = 0.05             # Muon: matrices of the blocks
    muon_momentum: float = 0.95         # Muon: final momentum
    muon_momentum_start: float = 0.85   # Muon: momentum at step 0
    muon_warmup_steps: int = 300        # Muon: steps from the first momentum to the final one
    muon_lerp: bool = True              # Muon: momentum averages the gradients; false: sums them
    muon_nesterov: bool = True          # Muon: look ahead along the momentum
    muon_decay: float = 0.0             # Muon: decoupled weight decay
    muon_steps: int = 5                 # Muon: Newton–Schulz iterations per update
    cooldown: float = 0.4               # rates fall to 0 over this part of the run (steps, if above 1)
    # hardware
    device: str = "auto"                # auto, cuda, cpu, mps
    dtype: str = "auto"                 # activations: auto (bfloat16 on GPUs that have it), bfloat16, float32
    bf16_embeddings: bool = True        # embeddings in bfloat16 wherever activations are
    fp8_head: bool = False              # train the output head in FP8; validation and samples do without
    muon_dtype: str = "auto"            # Newton–Schulz: auto (bfloat16 if the hardware has it), or either
    attention: str = "auto"             # auto (flex on CUDA, banded elsewhere), flex, banded
    compile: str = "auto"               # torch.compile: auto (CUDA, and long runs on a CPU), yes, no
    tune_kernels: bool = False          # Inductor's coordinate descent: faster kernels, slower compiling
    seed: int = 1337                    # of the weights and of the sample
    # output
    log_dir: str = "logs"               # each run makes a folder of its own in here
    run_id: str = ""                    # name of that folder; empty: the time and a random word
    log_every: int = 10                 # steps between lines with the training loss
    save_model: bool = True             # write model.pt at the end
    save_every: int = 0                 # steps between checkpoints to resume from; 0: none but when stopped
    keep_checkpoints: int = 2           # how many of the last checkpoints stay
    resume: str = ""                    # go on from a checkpoint, a run's folder, or auto: the last run
    resume_anyway: bool = False         # even with hyperparameters that make it another training
    timeout: float = 600.0              # seconds after which a rank that does not answer stops the run
    hellaswag: str = ""                 # folder of data/hellaswag.py to score, at the end or with checkpoint
    # instead of training
    show: bool = False                  # print the hyperparameters as resolved, and stop
    checkpoint: str = ""                # saved model to sample from, or to score
    sample: str = ""                    # text to continue from the checkpoint
    sample_tokens: int = 200            # length of a sample
    temperature: float = 0.8            # of sampling; 0: always the likeliest token
    top_k: int = 0                      # sample among the k likeliest tokens; 0: among all

    @cached_property
    def padded_vocab(self) -> int:
        multiple = math.lcm(self.vocab_multiple, 16 if self.fp8_head else 1)  # what FP8 products need
        return -(-self.vocab_size // multiple) * multiple

    @cached_property
    def attention_free(self) -> tuple:
        named = {"none": (), "second_decoder": (min(self.num_layers // 2 + 1, self.num_layers - 1),)}
        return named.get(self.no_attention, self.no_attention)

    @cached_property
    def value_tables(self) -> tuple:
        """For each layer, the number of its value table, or None."""
        layers, encoder, ends = self.num_layers, self.num_layers // 2, max(1, self.num_layers // 4)
        named = {"none": (None,) * layers, "per_layer": tuple(range(layers)),
                 "mirrored": (*range(encoder), *reversed(range(encoder)), *(None,) * (layers % 2)),
                 "ends": (*range(ends), *(None,) * (layers - 2 * ends), *range(ends))[:layers]}
        wanted = [None if layer in self.attention_free else table
                  for layer, table in enumerate(named.get(self.value_layout, self.value_layout))]
        numbers = sorted({table for table in wanted if table is not None})
        return tuple(None if table is None else numbers.index(table) for table in wanted)


# Differences from the defaults; of several presets the later win, field by field.
OLDER = dict(rotary_base=10_000.0, rotary_fraction=1.0, rotary_endpoint=False, softcap=30.0, cooldown=600.0,
             tune_kernels=True)
SPARSE = dict(value_layout="ends", no_attention="second_decoder")
PRESETS = {
    "h100": SPARSE,
    # The shape with the lowest loss per second on two cores; records/NEGATIVE.md has the others.
    "laptop": dict(train_files="data/enwik8/enwik8_train_*.bin", val_files="data/enwik8/enwik8_val_*.bin",
                   vocab_size=257, vocab_multiple=1, document_token=256, num_steps=320, batch_tokens=4096,
                   sequence_tokens=4096, segment_tokens=512, val_every=0, val_tokens=2**20, target_loss=1.80,
                   num_layers=4, num_heads=2, model_dim=128, window_start=256, window_end=256, cooldown=0.5),
    "h100-fp8": SPARSE | dict(fp8_head=True),
    # The historical systems on 8×H100: shared design, figures and dates in the README's table.
    "2024-11-19": OLDER | dict(num_steps=1875, muon_rate=0.04, adam_beta1=0.9, cooldown=562.0,
                               muon_warmup_steps=500, window_unit="token", window_start=1024, window_end=1024,
                               value_layout="none", value_lambdas=1, muon_lerp=False,
                               first_layer_values=True),
    "2024-12-04": OLDER | dict(num_steps=1530, window_unit="token", window_start=64, window_end=1792,
                               value_layout="per_layer", value_lambdas=1, muon_lerp=False),
    "2024-12-08": OLDER | dict(num_steps=1480, window_unit="token_in_block", window_start=64, window_end=1792,
                               value_layout="mirrored"),
    "2024-12-10": OLDER | dict(num_steps=1480, value_layout="mirrored"),
    "2024-12-17": SPARSE | dict(num_steps=1490, cooldown=600.0, softcap=30.0, pad_embeddings=False,
                                tune_kernels=True),
    "2025-01-04": SPARSE | dict(num_steps=1390, tune_kernels=True),
}
CHOICES = {"window_unit": ("block", "token", "token_in_block"), "device": ("auto", "cuda", "cpu", "mps"),
           "dtype": ("auto", "bfloat16", "float32"), "muon_dtype": ("auto", "bfloat16", "float32"),
           "attention": ("auto", "flex", "banded"), "compile": ("auto", "yes", "no"),
           "value_layout": ("none", "per_layer", "mirrored", "ends"),
           "no_attention": ("none", "second_decoder")}


def nearest(word: str, words) -> str:
    return difflib.get_close_matches(word, list(words), n=1, cutoff=0.0)[0]


def refuse(name: str, text, expected: str, better) -> None:
    raise UserError(f"--{name}={text}: expected {expected}; the nearest is --{name}={better}")


def parse_value(name: str, text: str, kind):
    """What `text` means for a hyperparameter of this kind."""
    if name in CHOICES and not (kind == str | tuple and text.startswith("(")):
        if text not in CHOICES[name]:
            refuse(name, text, "one of " + ", ".join(CHOICES[name]), nearest(text, CHOICES[name]))
    elif kind == str | tuple:
        entries = [entry.strip() for entry in text.strip("()").split(",") if entry.strip()]
        if not all(entry == "None" or entry.isdigit() for entry in entries):
            refuse(name, text, "whole numbers and None in parentheses, or a name", CHOICES[name][-1])
        return tuple(None if entry == "None" else int(entry) for entry in entries)
    elif kind is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if text.lower() not in words:
            refuse(name, text, "true or false", nearest(text.lower(), ("true", "false")))
        return words[text.lower()]
    elif kind in (int, float):
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            refuse(name, text, "a number", getattr(Hyperparameters, name))
        if kind is int and number != int(number):
            refuse(name, text, "a whole number", round(number))
        return int(text) if kind is int and text.lstrip("-").isdigit() else kind(number)
    return text


def parse_command_line(arguments: list[str]) -> Hyperparameters:
    """Presets first, in turn, then every --name=value on top."""
    fields = {field.name: field.type for field in dataclasses.fields(Hyperparameters)}
    presets, values = [], {}
    for argument in arguments:
        name, equals, text = argument.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not argument.startswith("--") or name not in fields:
            raise UserError(f"{argument}: no such hyperparameter; the nearest is --{nearest(name, fields)}=… "
                            "(--help lists them all)")
        if not equals and fields[name] is not bool:
            raise UserError(f"{argument}: it has no value; write --{name}=…")
        if name == "preset":
            presets += text.split("+")
        else:
            values[name] = parse_value(name, text if equals else "true", fields[name])
    if presets in ([], ["auto"]):
        on_gpus = values.get("device", "auto") in ("auto", "cuda") and torch.cuda.is_available()
        presets = ["h100" if on_gpus else "laptop"]
    for preset in presets:
        if preset not in PRESETS:
            refuse("preset", preset, "one of " + ", ".join(PRESETS), nearest(preset, PRESETS))
    merged = {name: value for preset in presets for name, value in PRESETS[preset].items()} | values
    hp = Hyperparameters(**merged, preset="+".join(presets))
    settle_sequence(hp)
    return hp


def settle_sequence(hp: Hyperparameters) -> None:
    """Turn sequence_tokens=0 into a number, and refuse one that the smallest GPU here has no room for.

    Shorter sequences are more micro-steps of the same batch: the same training, to documents that fit them.
    """
    lengths = sequence_lengths(hp)
    automatic, hp.sequence_tokens = not hp.sequence_tokens, hp.sequence_tokens or max(lengths, default=2**16)
    validate(hp)
    if hp.checkpoint or hp.device not in ("auto", "cuda") or not torch.cuda.is_available() or (
            automatic and not lengths):  # the ranks do not divide the batch: micro_steps says so
        return
    place, cards = find_place(hp), map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    room = usable(min(card.total_memory for card in cards))
    state, per_token = memory_needed(hp, place)
    fitting = max((length for length in lengths if state + length * per_token <= room), default=0)
    if automatic:
        hp.sequence_tokens = fitting or min(lengths, default=hp.sequence_tokens)
    if (needed := state + hp.sequence_tokens * per_token) > room:
        remedy = f"--sequence_tokens={fitting} is the most that fits" if fitting else "train a smaller model"
        raise UserError(f"--sequence_tokens={hp.sequence_tokens}: it needs about {needed / 2**30:.1f} GiB "
                        f"and the GPU has {max(0, room) / 2**30:.1f} GiB for it; {remedy}")


def sequence_lengths(hp: Hyperparameters) -> list[int]:
    """Into what the batch can be cut: powers of two, from the mask's block to 65,536."""
    ranks, segment = int(os.environ.get("WORLD_SIZE", 1)), hp.segment_tokens or 1
    return [length for length in (BLOCK * 2**power for power in range(10)) if hp.val_tokens % length ==
            hp.batch_tokens % (ranks * length) == length % segment == 0]


def usable(card_bytes: int) -> float:
    return 0.9 * card_bytes - 2**30  # less fragments, CUDA itself, workspaces


AT_LEAST_1 = ("vocab_size", "vocab_multiple", "num_steps", "num_heads", "model_dim", "mlp_ratio", "log_every",
              "window_start", "window_end", "muon_steps", "epochs", "keep_checkpoints", "timeout")
AT_LEAST_0 = ("segment_tokens", "val_every", "softcap", "embed_rate", "head_rate", "scalar_rate", "muon_rate",
              "muon_decay", "muon_warmup_steps", "cooldown", "temperature", "top_k", "sample_tokens", "seed",
              "document_token", "save_every")
BELOW_1 = ("adam_beta1", "adam_beta2", "muon_momentum", "muon_momentum_start")


def validate(hp: Hyperparameters) -> None:
    """Refuse impossible values and combinations, each in one sentence."""
    def need(right: bool, name: str, expected: str, better) -> None:
        if not right:
            refuse(name, getattr(hp, name), expected, better)

    for name in AT_LEAST_1:
        need(getattr(hp, name) >= 1, name, "at least 1", 1)
    for name in AT_LEAST_0:
        need(getattr(hp, name) >= 0, name, "0 or more", 0)
    for name in BELOW_1:
        need(0 <= getattr(hp, name) < 1, name, "0 or more, below 1", 0.0 if getattr(hp, name) < 0 else 0.99)
    unit, sequence = math.lcm(4 * hp.num_heads, 16 if hp.fp8_head else 1), hp.sequence_tokens
    need(hp.num_layers >= 2, "num_layers", "at least 2, an encoder and a decoder", 2)
    need(hp.value_lambdas in (1, 2), "value_lambdas", "1 or 2", min(2, max(1, hp.value_lambdas)))
    need(0 < hp.rotary_fraction <= 1, "rotary_fraction", "above 0 and at most 1",
         1.0 if hp.rotary_fraction > 1 else 0.5)
    need(hp.rotary_base > 1, "rotary_base", "above 1", 1024.0)
    need(hp.model_dim % unit == 0, "model_dim", f"a multiple of 4 × num_heads{' and of 16' * hp.fp8_head} = "
         f"{unit}", nearest_multiple(hp.model_dim, unit))
    need(sequence > 0 and sequence % BLOCK == 0, "sequence_tokens",
         f"a multiple of the mask's block of {BLOCK}", nearest_multiple(sequence, BLOCK))
    if hp.segment_tokens and sequence % hp.segment_tokens:
        divisors = (n for n in range(1, sequence + 1) if sequence % n == 0)
        refuse("segment_tokens", hp.segment_tokens, f"a divisor of sequence_tokens={sequence}",
               min(divisors, key=lambda n: abs(n - hp.segment_tokens)))
    for name in ("batch_tokens", "val_tokens"):
        tokens = getattr(hp, name)
        need(tokens > 0 and tokens % sequence == 0, name, f"a multiple of sequence_tokens={sequence}",
             nearest_multiple(tokens, sequence))
    need(hp.document_token < hp.vocab_size, "document_token", f"below vocab_size={hp.vocab_size}",
         hp.vocab_size - 1)
    need(all(layer in range(hp.num_layers) for layer in hp.attention_free), "no_attention",
         f"layers from 0 to {hp.num_layers - 1}", "none")
    need(len(hp.value_tables) == hp.num_layers, "value_layout",
         f"one entry for each of the {hp.num_layers} layers", "ends")
    need(bool(hp.checkpoint or not hp.sample), "checkpoint", "a model to sample from", "logs/…/model.pt")


def nearest_multiple(number: int, unit: int) -> int:
    return max(round(number / unit), 1) * unit


def help_text() -> str:
    """Every hyperparameter with its default and its meaning, which is its comment above."""
    lines = [__doc__.split("\n\nContents")[0], "", "Hyperparameters:"]
    for line in inspect.getsource(Hyperparameters).splitlines():
        if field := re.match(r"    (\w+): [\w |]+ = .+?  # (.+)", line):
            lines.append(f"  --{field[1]}={getattr(Hyperparameters, field[1])}".ljust(34) + f"  {field[2]}")
        elif heading := re.match(r"    # (.+)", line):
            lines.append(f"\n {heading[1]}")
    return "\n".join([*lines, "", "Presets (--preset=NAME, repeatable, later win): " + ", ".join(PRESETS)])


# ------------------------------------------------------------------------------------------------------------
# 2  Muon: momentum, orthogonalized by Newton–Schulz (https://kellerjordan.github.io/posts/muon)
# ------------------------------------------------------------------------------------------------------------

def newton_schulz(matrices: Tensor, steps: int = 5) -> Tensor:
    """Bring the singular values of each matrix [..., rows, columns] near 1 and keep its singular vectors.

    A quintic as steep at zero as can be: five steps lift every singular value above 0.01 of the norm to about
    [0.7, 1.15], which trains as well as exact orthogonality.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.size(-2) > matrices.size(-1)
    X = matrices.mT if tall else matrices  # the shorter side first: the smaller Gram matrix
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * (A @ A)) @ X
    return X.mT if tall else X


def orthogonal_updates(grads: list[Tensor], buffers: list[Tensor], momentum: Tensor, rest: Tensor, lerp: bool,
                       nesterov: bool, steps: int, dtype: torch.dtype) -> Tensor:
    """Moves the momentum on; orthogonalized updates, stacked, each with its shorter side first."""
    for grad, buffer in zip(grads, buffers):
        buffer.lerp_(grad, rest) if lerp else buffer.mul_(momentum).add_(grad)
    ahead = buffers
    if nesterov:
        ahead = [grad.lerp(buffer, momentum) if lerp else torch.addcmul(grad, buffer, momentum)
                 for grad, buffer in zip(grads, buffers)]
    wide = torch.stack([x.mT if x.size(0) > x.size(1) else x for x in ahead])
    return newton_schulz(wide.to(dtype), steps)


def apply_updates(params: list[Tensor], updates: Tensor, rate: Tensor, decay: float) -> None:
    for shape in dict.fromkeys(p.shape for p in params):
        alike = [p for p in params if p.shape == shape]
        theirs = [update if shape == update.shape else update.mT
                  for p, update in zip(params, updates) if p.shape == shape]
        if decay:
            torch._foreach_addcmul_(alike, alike, [rate] * len(alike), -decay)
        torch._foreach_addcmul_(alike, theirs, [rate] * len(alike), -update_scale(alike[0]))


class Muon(torch.optim.Optimizer):
    """Muon over any number of ranks, or none: each orthogonalizes its share while the one before is gathered.

    Parameters are grouped by size, the largest first. Of each chunk of world_size × per_rank parameters in a
    group, a rank takes per_rank, by default as many as make the group one chunk; an asynchronous all-gather
    shares the updates, and the chunk before is applied meanwhile, also across groups: what nothing hides is
    the last gather, of the smallest. A rank keeps the momentum of its own parameters only.
    """

    def __init__(self, params, lr=0.02, momentum=0.95, nesterov=True, lerp=True, weight_decay=0.0, steps=5,
                 rank=0, world_size=1, per_rank=None, dtype=torch.float32, compile=False):
        params = list(params)
        assert all(p.ndim == 2 for p in params), "Muon takes matrices only"
        self.rank, self.world_size, self.per_rank, self.dtype = rank, world_size, per_rank, dtype
        self.host_numbers = compile
        wrap = (lambda f: torch.compile(f, dynamic=False, fullgraph=True)) if compile else (lambda f: f)
        self.orthogonal_updates, self.apply_updates = wrap(orthogonal_updates), wrap(apply_updates)
        sizes = sorted({tuple(sorted(p.shape)) for p in params}, key=math.prod, reverse=True)
        groups = [dict(params=[p for p in params if tuple(sorted(p.shape)) == size]) for size in sizes]
        super().__init__(groups, dict(lr=lr, momentum=momentum, nesterov=nesterov, lerp=lerp, steps=steps,
                                      weight_decay=weight_decay))

    def share_of(self, group: dict) -> int:
        """How many parameters of a chunk are one rank's."""
        return self.per_rank or -(-len(group["params"]) // self.world_size)

    def chunks(self, group: dict):
        """(the parameters of each chunk, those of them that are this rank's)"""
        share = self.share_of(group)
        for start in range(0, len(group["params"]), self.world_size * share):
            chunk = group["params"][start:start + self.world_size * share]
            yield chunk, chunk[self.rank * share:(self.rank + 1) * share]

    @torch.no_grad()
    def step(self) -> None:
        before = None
        for group in self.param_groups:
            for chunk, mine in self.chunks(group):
                updates = self.updates(mine, group)
                if before:
                    self.apply(*before)
                before = group, chunk, *self.share(updates, group)
        self.apply(*before)

    def number(self, value: float, p: Tensor) -> Tensor:
        """As a tensor, a changed rate or momentum compiles nothing again; kernels take it from the host."""
        return torch.tensor(value, dtype=p.dtype, device=None if self.host_numbers else p.device)

    def updates(self, mine: list[Tensor], group: dict) -> Tensor | None:
        if not mine:
            return None
        for p in mine:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momentum, rest = (self.number(x, mine[0]) for x in (group["momentum"], 1 - group["momentum"]))
        return self.orthogonal_updates(
            [p.grad for p in mine], [self.state[p]["momentum_buffer"] for p in mine], momentum, rest,
            group["lerp"], group["nesterov"], group["steps"], self.dtype)

    @torch.no_grad()
    def gather_momentum(self):
        """(parameter, momentum) of all of them, from the ranks that keep it. A collective."""
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                buffer = self.state.get(p, {}).get("momentum_buffer", torch.zeros_like(p))
                if self.world_size > 1:
                    dist.broadcast(buffer, number // self.share_of(group) % self.world_size)
                yield p, buffer

    def share(self, updates: Tensor | None, group: dict):
        """(the updates of all ranks, the handle to wait for)"""
        if self.world_size == 1:
            return updates, None
        p, share = group["params"][0], self.share_of(group)
        mine = torch.zeros(share, min(p.shape), max(p.shape), dtype=self.dtype, device=p.device)
        if updates is not None:  # the last chunk may have fewer parameters than ranks
            mine[:len(updates)] = updates
        everyone = mine.new_empty(self.world_size * share, *mine.shape[1:])
        return everyone, dist.all_gather_single(everyone, mine, async_op=True)

    def apply(self, group: dict, chunk: list[Tensor], updates: Tensor, handle) -> None:
        if handle:
            handle.wait()
        self.apply_updates(chunk, updates, self.number(group["lr"], chunk[0]), group["weight_decay"])


def update_scale(p: Tensor) -> float:
    """The singular values of a Muon update are the rate times this: tall matrices take larger steps."""
    return max(1, p.size(0) / p.size(1)) ** 0.5


# ------------------------------------------------------------------------------------------------------------
# 3  Model: a U-Net of transformer blocks over one long sequence (batch size 1)
# ------------------------------------------------------------------------------------------------------------

def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


class Linear(nn.Linear):
    """Without bias; the weight stays fp32 for the optimizer and is cast where it is used."""

    def __init__(self, in_features: int, out_features: int, zero: bool = False):
        super().__init__(in_features, out_features, bias=False)
        if zero:  # a block starts as the identity, the head as the uniform distribution
            nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.type_as(x))


class Float8Product(torch.autograd.Function):
    """x @ weight.T for the head, in FP8 with constant scales: e4m3 forward, e5m2 for the gradient.

    The scales leave no room for overflow. x is normed: no entry is above √model_dim. Adam moves a weight by
    its rate at most, 0.008 a step and so 9 over a run, of the 14 that fit; the first step is well above the
    smallest number too. The gradient of a mean over the tokens is 1/tokens at most, and 2^-29 of that fits.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.scales = 448 / x.size(1) ** 0.5, 32.0, 2.0**15 * x.size(0)
        x8, weight8 = (to_float8(y, scale, torch.float8_e4m3fn) for y, scale in zip((x, weight), ctx.scales))
        ctx.save_for_backward(x8, weight8)
        return scaled_product(x8, weight8.T, math.prod(ctx.scales[:2]), x.dtype, fast=True)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        (x8, weight8), (x_scale, weight_scale, grad_scale) = ctx.saved_tensors, ctx.scales
        grad8 = to_float8(grad, grad_scale, torch.float8_e5m2)
        weight8, x8 = (y.T.contiguous().T for y in (weight8, x8))  # the hardware has rows × columns only
        return (scaled_product(grad8, weight8, grad_scale * weight_scale, grad.dtype),
                scaled_product(grad8.T.contiguous(), x8, grad_scale * x_scale, torch.float32))


def to_float8(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Saturating: a plain cast may make NaN of what is too large."""
    return (x * scale).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


def scaled_product(a: Tensor, b: Tensor, scale: float, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """(a @ b) / scale; fast: accumulated in fewer bits, which is enough for a sum over model_dim."""
    one, inverse = torch.ones((), device=a.device), torch.full((), 1 / scale, device=a.device)
    return torch._scaled_mm(a, b, scale_a=inverse, scale_b=one, out_dtype=dtype, use_fast_accum=fast)


class Rotary(nn.Module):
    """Turns pairs of dimensions by angles that grow with the position; pairs past the fraction never turn."""

    def __init__(self, head_dim: int, max_tokens: int, base: float, fraction: float, endpoint: bool):
        super().__init__()
        pairs = head_dim // 2
        turning = max(1, round(pairs * fraction))
        exponents = torch.linspace(0, 1, turning) if endpoint else torch.arange(turning) / turning
        frequencies = F.pad((1 / base) ** exponents, (0, pairs - turning))
        angles = torch.outer(torch.arange(max_tokens, dtype=torch.float32), frequencies)
        self.register_buffer("cos", angles.cos()[:, None], persistent=False)  # [tokens, 1, pairs], fp32
        self.register_buffer("sin", angles.sin()[:, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.cos[:x.size(0)], self.sin[:x.size(0)]
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1).type_as(x)


class Attention(nn.Module):
    def __init__(self, hp: Hyperparameters, rotary: Rotary):
        super().__init__()
        self.num_heads, self.rotary = hp.num_heads, rotary
        self.query, self.key, self.value = (Linear(hp.model_dim, hp.model_dim) for _ in range(3))
        self.output = Linear(hp.model_dim, hp.model_dim, zero=True)
        self.value_mix = nn.Parameter(torch.tensor([0.5, 0.5] if hp.value_lambdas == 2 else 0.5))

    def mix_values(self, v: Tensor, extra: Tensor | None) -> Tensor:
        """The stream's values with those of the token itself (a value table), or of the first layer."""
        if self.value_mix.ndim == 0:
            return torch.lerp(v, v if extra is None else extra, self.value_mix.type_as(v))
        own, other = self.value_mix.type_as(v)
        return own * v if extra is None else own * v + other * extra

    def forward(self, x: Tensor, extra: Tensor | None, mask: "Mask") -> tuple[Tensor, Tensor]:
        weights = [project.weight.type_as(x) for project in (self.query, self.key, self.value)]
        q, k, v = F.linear(x, torch.cat(weights)).view(len(x), 3, self.num_heads, -1).unbind(1)  # one product
        q, k = self.rotary(norm(q)), self.rotary(norm(k))  # QK-norm: attention logits cannot run away
        return self.output(attend(q, k, self.mix_values(v, extra), mask).reshape(x.shape)), v


class Block(nn.Module):
    def __init__(self, hp: Hyperparameters, layer: int, rotary: Rotary):
        super().__init__()
        self.attention = None if layer in hp.attention_free else Attention(hp, rotary)
        self.up = Linear(hp.model_dim, hp.mlp_ratio * hp.model_dim)
        self.down = Linear(hp.mlp_ratio * hp.model_dim, hp.model_dim, zero=True)
        self.mix = nn.Parameter(torch.tensor([1.0, 0.0]))  # of the stream and of x0, the embedding

    def forward(self, x: Tensor, x0: Tensor, extra: Tensor | None, mask: "Mask") -> tuple:
        stream, start = self.mix.type_as(x)
        x, values = stream * x + start * x0, None
        if self.attention is not None:
            attended, values = self.attention(norm(x), extra, mask)
            x = x + attended
        return x + self.down(F.relu(self.up(norm(x))).square()), values  # ReLU²: arxiv.org/abs/2109.08668


class GPT(nn.Module):
    def __init__(self, hp: Hyperparameters, dtype: torch.dtype = torch.float32, attention: str = "banded",
                 tiles: dict | None = None):
        super().__init__()
        self.hp, self.dtype, self.attention, self.tiles = hp, dtype, attention, tiles
        rows = hp.padded_vocab if hp.pad_embeddings else hp.vocab_size
        rotary = Rotary(hp.model_dim // hp.num_heads, hp.sequence_tokens, hp.rotary_base, hp.rotary_fraction,
                        hp.rotary_endpoint)
        tables = len({table for table in hp.value_tables if table is not None})
        self.embed = nn.Embedding(rows, hp.model_dim)
        self.value_embeds = nn.ModuleList(nn.Embedding(rows, hp.model_dim) for _ in range(tables))
        self.blocks = nn.ModuleList(Block(hp, layer, rotary) for layer in range(hp.num_layers))
        self.skip_weights = nn.Parameter(torch.ones(hp.num_layers - hp.num_layers // 2))
        self.head = Linear(hp.model_dim, hp.padded_vocab, zero=True)
        if hp.bf16_embeddings and dtype == torch.bfloat16:
            self.embed.bfloat16(), self.value_embeds.bfloat16()

    def forward(self, inputs: Tensor, targets: Tensor | None, window: Tensor) -> Tensor:
        """Mean loss, or logits where there are no targets. window: int32 (tokens, blocks) of window_at."""
        assert inputs.ndim == 1 and inputs.size(0) % BLOCK == 0, "one sequence, a multiple of the block"
        hp, encoder = self.hp, self.hp.num_layers // 2
        segment = hp.segment_tokens if self.training else 0  # validation text is contiguous
        mask = build_mask(inputs, window, hp.document_token, segment, self.attention, band_reach(hp),
                          self.tiles)
        x = x0 = norm(self.embed(inputs).to(self.dtype))
        tables = [table(inputs).to(self.dtype).view(len(x), hp.num_heads, -1) for table in self.value_embeds]
        skips, first_values = [], None
        for layer, block in enumerate(self.blocks):
            if layer >= encoder and skips:  # U-Net: the encoder's outputs, last in first out
                x = x + self.skip_weights[layer - encoder].type_as(x) * skips.pop()
            table = hp.value_tables[layer]
            x, values = block(x, x0, first_values if table is None else tables[table], mask)
            if hp.first_layer_values and first_values is None:
                first_values = values  # value residual: arxiv.org/abs/2410.17897
            if layer < encoder:
                skips.append(x)
        x, low = norm(x), hp.fp8_head and self.training
        logits = (Float8Product.apply(x, self.head.weight) if low else self.head(x)).float()
        if hp.softcap:
            logits = hp.softcap * torch.tanh(logits / hp.softcap)
        return logits if targets is None else F.cross_entropy(logits, targets)


# ------------------------------------------------------------------------------------------------------------
# 4  Masks and attention: causal ∧ same document ∧ within the window
# ------------------------------------------------------------------------------------------------------------

class Mask(NamedTuple):
    """What each query may look at, in the form that the attention back end takes."""
    window: Tensor              # int32 (tokens, blocks): a key is seen if it is nearer than both
    blocks: BlockMask | None    # flex
    bias: Tensor | None         # banded
    tiles: dict | None = None   # flex: of its kernels


def build_mask(inputs: Tensor, window: Tensor, document_token: int, segment: int, attention: str,
               reach: int, tiles: dict | None = None) -> Mask:
    starts = inputs == document_token
    if segment:
        starts = starts | (torch.arange(len(inputs), device=inputs.device) % segment == 0)
    documents = starts.cumsum(0, dtype=torch.int32)
    if attention == "flex":
        return Mask(window, flex_block_mask(documents, window), None, tiles)
    return Mask(window, None, band_bias(documents, window, min(reach, len(inputs) // BLOCK - 1)))


def flex_block_mask(documents: Tensor, window: Tensor) -> BlockMask:
    """Ordered lists of the partial and of the full blocks, straight from the document counts."""
    tokens = window[0]

    def visible(batch, head, query, key):  # beyond this, the lists below hold the window in blocks
        return (query >= key) & (documents[query] == documents[key]) & (query - key < tokens)

    def ordered(wanted: Tensor) -> tuple[Tensor, Tensor]:
        count = wanted.sum(dim=-1, dtype=torch.int32)
        indices = wanted.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
        return count[None, None].contiguous(), indices[None, None].contiguous()

    # counts never fall along the sequence, so the first and the last of a block tell all about it
    first, last = (documents.view(-1, BLOCK)[:, end].contiguous() for end in (0, -1))
    block = torch.arange(len(first), dtype=torch.int32, device=documents.device)
    distance = block[:, None] - block  # from the key's block to the query's
    near = (distance >= 0) & (distance < window[1])
    touched = near & ((distance - 1) * BLOCK + 1 < window[0]) & (first[:, None] <= last)
    full = near & (distance > 0) & ((distance + 1) * BLOCK - 1 < window[0]) & (last[:, None] == first)
    return BlockMask.from_kv_blocks(*ordered(touched & ~full), *ordered(full), BLOCK, mask_mod=visible)


def band_bias(documents: Tensor, window: Tensor, reach: int) -> Tensor:
    """0 where a query sees a key, −∞ elsewhere: [blocks, 1, BLOCK, span], linear in the sequence.

    The keys beside a block of queries, its span, are that block itself and the `reach` blocks before it.
    """
    span = (reach + 1) * BLOCK
    key = torch.arange(span, device=documents.device)
    query = key[-BLOCK:, None]
    near = (query >= key) & (query - key < window[0]) & (query // BLOCK - key // BLOCK < window[1])
    key_documents = F.pad(documents, (span - BLOCK, 0), value=-1).unfold(0, span, BLOCK)
    same = documents.view(-1, BLOCK, 1) == key_documents[:, None]
    return torch.where(near & same, 0.0, -math.inf)[:, None]


def reach_of(tokens: int, blocks: int) -> int:
    """How many blocks before its own a query looks into."""
    return max(0, min(blocks - 1, -(-(tokens - 1) // BLOCK)))


def band_reach(hp: Hyperparameters) -> int:
    return max(reach_of(*window_at(hp, step)) for step in (0, hp.num_steps))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Softmax attention under the mask; everything is [tokens, heads, head_dim]."""
    if mask.blocks is not None:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = flex_attention(q, k, v, block_mask=mask.blocks, kernel_options=mask.tiles)
        return out[0].transpose(0, 1)
    if q.device.type == "cpu":
        return banded_cpu(q, k, v, mask.bias, mask.window)[0]
    span = mask.bias.size(-1)
    out = F.scaled_dot_product_attention(query_blocks(q), key_bands(k, span), key_bands(v, span),
                                         attn_mask=mask.bias.type_as(q))
    return out.transpose(1, 2).reshape(q.shape)


def flex_tiles(shared_memory: int, head_bytes: int) -> dict | None:
    """FlexAttention's tiles where Inductor's own, which need about 386 × head_bytes, do not fit the GPU.

    Square ones in two stages need 6 at most: keys and values, and two pairs of queries and gradients.
    """
    if not shared_memory or shared_memory >= 386 * head_bytes:
        return None
    side = max(16, min(64, 2 ** int(math.log2(shared_memory / head_bytes / 6))))
    names = "fwd_BLOCK_M fwd_BLOCK_N bwd_BLOCK_M1 bwd_BLOCK_N1 bwd_BLOCK_M2 bwd_BLOCK_N2".split()
    return dict.fromkeys(names, side) | dict(num_stages=2, num_warps=4)


def query_blocks(x: Tensor) -> Tensor:
    return x.view(-1, BLOCK, *x.shape[1:]).transpose(1, 2)  # [blocks, heads, BLOCK, head_dim]


def key_bands(x: Tensor, span: int) -> Tensor:
    """The keys beside each block of queries, overlapping views: [blocks, heads, span, head_dim]."""
    return F.pad(x, (0, 0, 0, 0, span - BLOCK, 0)).unfold(0, span, BLOCK).transpose(2, 3)


def fold_bands(bands: Tensor) -> Tensor:
    """The transpose of key_bands: the gradients of the overlapping views, summed."""
    blocks, heads, span, head_dim = bands.shape
    total = bands.new_zeros(blocks, BLOCK, heads, head_dim)
    for back in range(span // BLOCK):  # the part of each band that lies this many blocks before its queries
        part = bands[back:, :, span - (back + 1) * BLOCK:span - back * BLOCK]
        total[:blocks - back] += part.transpose(1, 2)
    return total.flatten(0, 1)


def narrow_band(bias: Tensor, window: Tensor) -> Tensor:
    """What this step's window reaches of the bias: a narrow window costs less, and nothing recompiles."""
    return bias[..., -min(bias.size(-1), (reach_of(*window.tolist()) + 1) * BLOCK):]


# FlexAttention has no backward on the CPU: an operator of our own, opaque to the compiler.
@torch.library.custom_op("train_gpt::banded_cpu", mutates_args=())
def banded_cpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    bias = narrow_band(bias, window)
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query_blocks(q), key_bands(k, bias.size(-1)), key_bands(v, bias.size(-1)), attn_mask=bias)
    return out.transpose(1, 2).reshape(q.shape), logsumexp.contiguous()


@torch.library.custom_op("train_gpt::banded_cpu_backward", mutates_args=())
def banded_cpu_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
                        bias: Tensor, window: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    bias = narrow_band(bias, window)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        query_blocks(grad), query_blocks(q), key_bands(k, bias.size(-1)), key_bands(v, bias.size(-1)),
        query_blocks(out), logsumexp, 0.0, False, attn_mask=bias)
    return dq.transpose(1, 2).reshape(q.shape), fold_bands(dk), fold_bands(dv)


@banded_cpu.register_fake
def _(q, k, v, bias, window):
    return torch.empty(q.shape, dtype=q.dtype), torch.empty(bias.size(0), q.size(1), BLOCK)


@banded_cpu_backward.register_fake
def _(grad, q, k, v, out, logsumexp, bias, window):
    return tuple(torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))


def save_for_backward(ctx, inputs, output) -> None:
    q, k, v, bias, window = inputs
    ctx.save_for_backward(q, k, v, *output, bias, window)


def backward(ctx, grad, _):
    return *banded_cpu_backward(grad.contiguous(), *ctx.saved_tensors), None, None


banded_cpu.register_autograd(backward, setup_context=save_for_backward)


# ------------------------------------------------------------------------------------------------------------
# 5  Data: token shards, memory-mapped; one shared position walks them, each rank takes its own slice
# ------------------------------------------------------------------------------------------------------------

class Shard:
    """256 int32 of header (magic, version, number of tokens), then the tokens as uint16."""

    def __init__(self, path: str):
        self.path = path
        try:
            size = os.path.getsize(path)
            with open(path, "rb") as file:
                header = np.frombuffer(file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0"), dtype="<i4")
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); fetch or make it again") from None
        magic, version, self.num_tokens = header[:3].tolist()
        held = max(0, size - HEADER_BYTES) / 2
        if magic != SHARD_MAGIC:
            raise UserError(f"{path}: not a token shard: it begins with {magic}, not {SHARD_MAGIC}; make it "
                            "with a script of data/")
        if version != SHARD_VERSION:
            raise UserError(f"{path}: shard version {version}, not {SHARD_VERSION}; make it again with data/")
        if self.num_tokens != held:
            raise UserError(f"{path}: it claims {self.num_tokens:,} tokens and it holds {held:,.10g}; "
                            "it is damaged or cut short: fetch or make it again")

    @cached_property
    def pages(self) -> mmap.mmap:
        with contextlib.suppress(OSError, ValueError), open(self.path, "rb") as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if len(pages) == HEADER_BYTES + 2 * self.num_tokens:
                return pages
        raise UserError(f"{self.path}: gone, or not as it was when the run began; fetch or make it again")

    def read_into(self, out: np.ndarray, start: int) -> None:
        out[:] = np.frombuffer(self.pages, "<u2", len(out), HEADER_BYTES + 2 * start)

    def forget(self) -> None:
        """Hand the pages that were read back to the system: resident memory does not grow with the data."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.pages.madvise(mmap.MADV_DONTNEED)


def read_manifest(folder: Path) -> dict:
    """What the scripts of data/ say about their shards; empty where they did not make them."""
    path = folder / "manifest.json"
    if not path.exists():
        return {}
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if not (manifest["format"] == 1 and manifest["complete"]):
            raise UserError(f"{path}: not complete, or of another format; run the script that made it again")
        shards = {entry["file"]: (entry["tokens"], entry["text_bytes"]) for entry in manifest["shards"]}
        if not all(number is None or type(number) is int and 0 <= number < 2**63
                   for numbers in shards.values() for number in numbers):
            raise ValueError("a number of tokens or of bytes is none")
        return manifest | dict(shards=shards)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: damaged ({type(error).__name__}: {error}); make it again") from None


def check_manifest(hp: Hyperparameters, shards: list[Shard]) -> float | None:
    """Refuse shards made for other hyperparameters; returns their bytes of text per token, if known."""
    tokens, text_bytes = 0, 0
    manifests = {folder: read_manifest(folder) for folder in {Path(shard.path).parent for shard in shards}}
    for shard in shards:
        path = Path(shard.path)
        if not (manifest := manifests[path.parent]):
            return None
        for name in ("vocab_size", "document_token"):
            if manifest.get(name) != getattr(hp, name):
                refuse(name, getattr(hp, name), f"that of {path.parent}/manifest.json", manifest.get(name))
        held, text = manifest["shards"].get(path.name, (None, None))
        if held != shard.num_tokens:
            raise UserError(f"{path}: holds {shard.num_tokens} tokens, its manifest says {held}; remake it")
        tokens, text_bytes = tokens + held, None if text is None or text_bytes is None else text_bytes + text
    return text_bytes / tokens if text_bytes and tokens else None


class Loader:
    """The batches of a set of shards, in order; batch `index` is the same at any world size.

    A shard gives as many whole batches as it holds; what is left over is passed by. With segments, a batch
    takes one from each of batch/segment evenly spaced places of the shard, and a place moves on by a segment
    per batch: a small batch that is one contiguous stretch is mostly one article, and needs twice the tokens.
    Over several epochs, each goes through the shards in an order of its own.
    """

    def __init__(self, pattern: str, batch_tokens: int, sequence_tokens: int, segment_tokens: int = 0,
                 rank: int = 0, world_size: int = 1, device="cpu", vocab_size: int = 2**16, epochs: int = 1,
                 seed: int = 0):
        self.paths = sorted(glob.glob(pattern))
        if not self.paths:
            raise UserError(f"{pattern}: no token shards there; ./run.sh fetches what a preset needs, and "
                            "data/ has a script for each source")
        shards = [Shard(path) for path in self.paths]
        shuffle = np.random.default_rng(seed).permutation
        order = shuffle if epochs > 1 else range
        self.shards = [shards[number] for _ in range(epochs) for number in order(len(shards))]
        self.batch_tokens, self.sequence_tokens, self.vocab_size = batch_tokens, sequence_tokens, vocab_size
        self.rank, self.world_size, self.device = rank, world_size, torch.device(device)
        self.segment = segment_tokens or batch_tokens
        self.lanes = batch_tokens // self.segment
        self.batches = [max(0, shard.num_tokens - 1) // self.lanes // self.segment for shard in self.shards]
        self.ends = list(itertools.accumulate(self.batches))
        self.index = 0          # the batch that comes next: all there is to know about the position
        self.ahead = {}         # the batch being read in the background, by index
        self.reader = ThreadPoolExecutor(1, "loader")

    def __len__(self) -> int:
        return self.ends[-1]

    def locate(self, index: int) -> tuple[Shard, int]:
        """(the shard of a batch, its number there)"""
        number = bisect.bisect_right(self.ends, index)
        return self.shards[number], index - (self.ends[number] - self.batches[number])

    def read(self, index: int) -> Tensor:
        """This rank's share of a batch, on the host: uint16 [micro-steps, pieces, tokens + 1]."""
        shard, place = self.locate(index)
        stride, piece = (shard.num_tokens - 1) // self.lanes, min(self.segment, self.sequence_tokens)
        micro_steps = self.batch_tokens // (self.world_size * self.sequence_tokens)
        host = torch.empty((micro_steps, self.sequence_tokens // piece, piece + 1), dtype=torch.uint16,
                           pin_memory=self.device.type == "cuda")
        tokens = host.numpy()
        for micro, part in np.ndindex(tokens.shape[:2]):
            offset = (micro * self.world_size + self.rank) * self.sequence_tokens + part * piece
            lane, inside = divmod(offset, self.segment)
            shard.read_into(tokens[micro, part], lane * stride + place * self.segment + inside)
        shard.forget()
        if (highest := tokens.max()) >= self.vocab_size:
            raise UserError(f"{shard.path}: token {highest} in its batch {place} is outside vocab_size="
                            f"{self.vocab_size}; the shard is damaged, or was made with another tokenizer")
        return host

    def next_batch(self, stride: int = 1) -> list[tuple[Tensor, Tensor]]:
        """(inputs, targets) of each micro-step, on the device; the batch after is read meanwhile."""
        if self.index >= len(self):
            raise UserError(f"{self.paths[0]} and its fellows are used up after {len(self):,} batches "
                            f"of {self.batch_tokens:,} tokens; add shards")
        host = self.ahead.pop(self.index, None) or self.reader.submit(self.read, self.index)
        tokens = host.result().view(torch.int16).to(self.device, non_blocking=True)  # CUDA knows no uint16
        self.index += stride
        self.ahead = {self.index: self.reader.submit(self.read, self.index)} if self.index < len(self) else {}
        return [(pieces[:, :-1].flatten().int() & 0xFFFF, pieces[:, 1:].flatten().long() & 0xFFFF)
                for pieces in tokens]


def check_budget(pattern: str, loader: Loader, needed: int, asked: str, command: str) -> None:
    """Refuse to start a run that would use up its shards."""
    if len(loader) < needed:
        missing = -(-(needed - len(loader)) // max(1, *loader.batches))
        repeat = ", or let them repeat with --epochs=…" if asked == "num_steps" else ""
        raise UserError(f"{pattern}: {len(loader.paths)} shards hold {len(loader)} batches of "
                        f"{loader.batch_tokens} tokens and --{asked} asks for {needed}: {missing} shards are "
                        f"missing; {command}{repeat}, or lower --{asked}")


def fetch_command(hp: Hyperparameters) -> str:
    """The command that gets as many shards as the run needs."""
    if "data/fineweb" in hp.train_files:
        per_shard = max(1, (10**8 - 1) // hp.batch_tokens)
        return f"get them with: python data/fineweb.py {-(-hp.num_steps // per_shard)}"
    if "data/enwik8" in hp.train_files:
        return "get them with: python data/enwik8.py"
    return "make them with: python data/tokenize_text.py"


# ------------------------------------------------------------------------------------------------------------
# 6  Schedules and optimizers
# ------------------------------------------------------------------------------------------------------------

def rate_at(hp: Hyperparameters, step: int) -> float:
    """Factor on every learning rate: 1, then linearly to 0 over the cool-down."""
    cooldown = hp.cooldown if hp.cooldown > 1 else hp.cooldown * hp.num_steps
    return min(1.0, (hp.num_steps - step) / cooldown) if cooldown else 1.0


def momentum_at(hp: Hyperparameters, step: int) -> float:
    done = min(1.0, step / hp.muon_warmup_steps) if hp.muon_warmup_steps else 1.0
    return (1 - done) * hp.muon_momentum_start + done * hp.muon_momentum


def window_at(hp: Hyperparameters, step: int) -> tuple[int, int]:
    """(tokens, blocks): a query sees the keys that are fewer tokens and fewer blocks back. Never nothing."""
    tokens = hp.window_start + (hp.window_end - hp.window_start) * step / hp.num_steps
    if hp.window_unit == "block":
        return FAR, max(1, min(FAR, int(tokens // BLOCK)))
    tokens = max(64, min(FAR, int(tokens // 64) * 64))
    return tokens, FAR if hp.window_unit == "token" else -(-tokens // BLOCK)


def optimizer_groups(hp: Hyperparameters, model: GPT) -> dict[str, dict]:
    """Which parameters go where, by name: every one in exactly one group."""
    rates = dict(embed=hp.embed_rate, head=hp.head_rate, scalar=hp.scalar_rate, muon=hp.muon_rate)
    groups = {kind: dict(lr=lr, params={}) for kind, lr in rates.items()}
    for name, p in model.named_parameters():
        kind = ("embed" if name.startswith(("embed.", "value_embeds.")) else
                "head" if name.startswith("head.") else "scalar" if p.ndim < 2 else
                "muon" if p.ndim == 2 and name.startswith("blocks.") else None)
        if kind is None:
            raise UserError(f"parameter {name} has no optimizer; give it one in optimizer_groups")
        groups[kind]["params"][name] = p
    return groups


def build_optimizers(hp: Hyperparameters, model: GPT, place: "Place") -> tuple[torch.optim.Adam, Muon]:
    groups = optimizer_groups(hp, model)
    adam = torch.optim.Adam([dict(params=list(groups[kind]["params"].values()), lr=groups[kind]["lr"])
                             for kind in ("embed", "head", "scalar")],
                            betas=(hp.adam_beta1, hp.adam_beta2), fused=True)
    muon = Muon(groups["muon"]["params"].values(), hp.muon_rate, hp.muon_momentum, hp.muon_nesterov,
                hp.muon_lerp, hp.muon_decay, hp.muon_steps, place.rank, place.world_size,
                dtype=place.muon_dtype, compile=place.compile and place.device.type == "cuda")
    for group in (*adam.param_groups, *muon.param_groups):
        group["base_lr"] = group["lr"]
    return adam, muon


def set_schedules(hp: Hyperparameters, step: int, optimizers: tuple, window: Tensor) -> None:
    for group in itertools.chain(*(optimizer.param_groups for optimizer in optimizers)):
        group["lr"] = group["base_lr"] * rate_at(hp, step)
        if "momentum" in group:
            group["momentum"] = momentum_at(hp, step)
    window.copy_(torch.tensor(window_at(hp, step), dtype=torch.int32), non_blocking=True)


# ------------------------------------------------------------------------------------------------------------
# 7  Logging and checkpoints
# ------------------------------------------------------------------------------------------------------------

class Logger:
    """log.txt and metrics.jsonl, flushed, by rank 0 alone; a bar on a terminal, plain lines elsewhere."""

    def __init__(self, hp: Hyperparameters, place: "Place", folder: Path, sizes=(0, 0)):
        """`sizes`: where the two files ended at the checkpoint that the run goes on from."""
        self.main, self.terminal, self.bar = place.rank == 0, sys.stdout.isatty(), None
        self.folder, self.files, self.complaints = folder, {}, set()
        self.saver = ThreadPoolExecutor(1, "saver")
        self.saved = self.saver.submit(bool, True)  # the write that training does not wait for; succeeded?
        if not self.main:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, size in zip(("log.txt", "metrics.jsonl"), sizes):
                file = self.files[name] = open(self.folder / name, "a", encoding="utf-8")
                file.truncate(min(size, file.tell()))  # what came after the checkpoint will come again
        except OSError as error:
            raise UserError(f"--log_dir={hp.log_dir}: {error.strerror}; give another folder") from None
        if not self.sizes()[0]:
            self.write(Path(__file__).read_text(encoding="utf-8"), SEPARATOR,
                       *(f"{name}: {value!r}" for name, value in as_dict(hp).items()),
                       *environment(place), SEPARATOR, show=False)
            self.record(start=True, hyperparameters=as_dict(hp), environment=environment(place))

    def sizes(self) -> list[int]:
        return [os.fstat(file.fileno()).st_size for file in self.files.values()]

    def put(self, name: str, text: str) -> None:
        try:
            print(text, file=self.files[name], flush=True)
            os.stat(self.folder / name)  # a file whose folder is gone takes writes without a word
        except OSError as error:
            self.complain("log", f"{self.folder / name} can no longer be written ({error.strerror})")

    def complain(self, about: str, sentence: str) -> None:
        """Once about each thing: the training is worth more than its log."""
        try:
            if about not in self.complaints:
                print(f"warning: {sentence}; training goes on", file=sys.stderr, flush=True)
        except OSError:
            sys.stderr = open(os.devnull, "w")
        self.complaints.add(about)

    @contextlib.contextmanager
    def showing(self):
        """The pipe may have lost its reader, the terminal may be gone, the disk under a redirection full."""
        try:
            yield
        except OSError as error:
            self.terminal, sys.stdout = False, open(os.devnull, "w")  # which Python can flush when it exits
            if self.bar:
                self.bar.disable = True
            self.complain("output", f"standard output can no longer be written ({error.strerror})")

    def save(self, name: str, state: dict, keep: int = 0) -> None:
        """Beside the training, which waits for one copy to the host and not for the disk."""
        if self.main:
            self.saved = self.saver.submit(self.write_whole, self.folder / name, state, keep)

    def write_whole(self, path: Path, state: dict, keep: int) -> bool:
        """Under a temporary name first, and on the disk: whatever has the final name is whole."""
        temporary = path.with_name("saving.tmp")  # one name: what a killed run left is written over
        try:
            with open(temporary, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            make_latest(temporary, self.folder)
            os.replace(temporary, path)
            for old in checkpoints(self.folder)[:-keep] if keep else ():
                old.unlink(missing_ok=True)
            return True
        except (OSError, RuntimeError) as error:  # RuntimeError is torch.save's word for a full disk
            with contextlib.suppress(OSError):
                temporary.unlink()
            self.complain("save", f"{path} could not be written ({one_line(error)})")
            return False

    def close(self) -> None:
        self.saved.result()
        if self.bar:
            with self.showing():
                self.bar.close()

    def write(self, *lines: str, show: bool = True) -> None:
        if self.main:
            self.put("log.txt", "\n".join(lines))
            if show:
                with self.showing():
                    tqdm.write("\n".join(lines))
                    sys.stdout.flush()

    def step(self, step: int, steps: int, name: str, loss: float, train_ms: float, show: bool = True) -> None:
        average = train_ms / step if step else math.nan
        self.write(f"step:{step}/{steps} {name}:{loss:.4f} train_time:{train_ms:.0f}ms "
                   f"step_avg:{average:.2f}ms", show=show)

    def record(self, **values) -> None:
        if self.main:
            self.put("metrics.jsonl", json.dumps(values))

    def progress(self, done: int, total: int, loss: float, tokens_per_second: float) -> None:
        if self.main and self.terminal:
            with self.showing():
                self.bar = self.bar or tqdm(total=total, initial=done - 1, unit="step", file=sys.stdout,
                                            dynamic_ncols=True)
                self.bar.set_postfix_str(f"loss {loss:.4f}, {tokens_per_second:,.0f} tokens/s", refresh=False)
                self.bar.update(done - self.bar.n)


def as_dict(hp: Hyperparameters) -> dict:
    return {field.name: getattr(hp, field.name) for field in dataclasses.fields(hp)}


def environment(place: "Place") -> list[str]:
    name = torch.cuda.get_device_name() if place.device.type == "cuda" else platform.machine()
    versions = (f"Python {platform.python_version()}, PyTorch {torch.__version__}, NumPy {np.__version__}, "
                f"CUDA {torch.version.cuda}, {platform.platform()}")
    hardware = (f"{place.world_size} × {place.device.type} ({name}), {torch.get_num_threads()} threads, "
                f"{str(place.dtype)[6:]} activations, {str(place.muon_dtype)[6:]} Newton–Schulz, "
                f"{place.attention} attention, "
                f"{'compiled' if place.compile else 'not compiled' + place.why_not_compiled}")
    return [versions, hardware]


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def read_saved(path: str | Path) -> dict:
    """A checkpoint or a model, without anything that could run; tensors stay on the disk until used."""
    try:
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type for entry in archive.infolist()):  # a little could become a lot
                raise ValueError("it is compressed")
            if damaged := archive.testzip():  # torch.load itself compares no checksums
                raise ValueError(f"the checksum of {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        names, values = zip(*state["hyperparameters"].items())
        plain = [x for value in values for x in (value if type(value) is tuple else (value,))]
        numbers = [state["step"], state.get("index", 0), *state.get("sizes", (0, 0))]
        if (state["format"] != CHECKPOINT_FORMAT or not isinstance(state["model"], dict)
                or {*map(type, names), *map(type, plain)} - {str, int, float, bool, type(None)}
                or [type(x) is int and 0 <= x < 2**63 for x in numbers] != [True] * 4):
            raise ValueError(f"its format is not {CHECKPOINT_FORMAT}")
        repr(plain)  # which a number of a million digits would not survive later
        return state
    except Exception as error:  # whatever is wrong with a file from elsewhere: one sentence
        raise UserError(f"{path}: cannot be loaded ({one_line(error)})") from None


def checkpoints(folder: Path, pattern: str = "checkpoint_*.pt", *more: Path) -> list[Path]:
    """The latest last: by the time of writing, for a run may have gone back to an earlier step."""
    files = (path for path in {*folder.glob(pattern), *more} if path.is_file())
    return sorted(files, key=lambda path: (path.stat().st_mtime_ns, path.name))


def make_latest(path: Path, folder: Path) -> None:
    """Whatever the clock says: it may have been set back, or have been ahead on another machine."""
    now = max([time.time_ns(), *(other.stat().st_mtime_ns + 1 for other in checkpoints(folder))])
    os.utime(path, ns=(now, now))


def job_name() -> str:
    """The same over all restarts of a launch, and no other launch's."""
    job = os.environ.get("TORCHELASTIC_RUN_ID", uuid.uuid4().hex)
    if job == "none":  # torchrun's default, of any number of runs at a time: the launcher's process instead
        job = f"{zlib.crc32(f'{platform.node()} {os.getppid()}'.encode()):08x}"
    return re.sub(r"\W", "", job)[:8]


def find_run(hp: Hyperparameters, restarted: bool) -> tuple[Path, Path | None, list[str]]:
    """(the run's folder, the checkpoint to go on from, what to say of it), without those that are damaged."""
    logs, named, notes, job = Path(hp.log_dir), Path(hp.resume), [], job_name()
    by_path = hp.resume not in ("", "auto")
    one_file = by_path and not named.is_dir()
    own = max(logs.glob(f"*_{job}"), default=None) if restarted else None
    folder = (named.parent if one_file else named if by_path else logs / hp.run_id if hp.run_id else
              own or logs / f"{datetime.datetime.now():%Y-%m-%d_%H%M%S}_{job}")
    if hp.resume == "auto" and not hp.run_id and not own:
        found = checkpoints(logs, "*/checkpoint_*.pt")
    else:
        found = checkpoints(folder, "checkpoint_*.pt", *[named] * one_file)
    if not (hp.resume or restarted) and (found or (folder / "log.txt").exists()):
        raise UserError(f"--run_id={hp.run_id}: {folder} holds a run already; add --resume=auto, or give "
                        "another name")
    if one_file and not restarted:
        found = found[:found.index(named) + 1] if named in found else [named]
    for path in reversed(found):
        try:
            notes.append(f"going on from {path}, step {read_saved(path)['step']}")
            if one_file and not restarted:
                with contextlib.suppress(OSError):
                    make_latest(path, folder)  # a restart goes on from here too, not from a later step
            return path.parent, path, notes
        except UserError as error:
            notes.append(f"passed over {error}")
    if by_path:
        raise UserError("; ".join([f"--resume={hp.resume}: no checkpoint there can be read", *notes]))
    return folder, None, notes + ["no checkpoint to go on from: a new run"] * bool(hp.resume)


def changed_since(hp: Hyperparameters, saved: dict) -> str:
    """Which hyperparameters are not the checkpoint's; refuses those that would make it another training."""
    names = list(as_dict(hp))
    harmless = {"preset", "target_loss", "val_every", "device", "attention", "compile", "tune_kernels"}
    changed = {name: f"{name} {saved.get(name)!r} → {value!r}" for name, value in as_dict(hp).items()
               if repr(saved.get(name)) != repr(value) and name not in ("resume", "resume_anyway", "run_id")}
    harmless |= {*names[names.index("log_dir"):]}  # all about output
    others = [text for name, text in changed.items() if name not in harmless]
    if others and not hp.resume_anyway:
        raise UserError(f"--resume={hp.resume}: this is another training than the checkpoint's: "
                        f"{', '.join(others)}; give the old values, or --resume_anyway")
    return f"changed since the checkpoint: {', '.join(changed.values()) or 'nothing'}"


def load_model(path: str, place: "Place") -> GPT:
    """A model with the hyperparameters that it was saved with, on this device."""
    state = read_saved(path)
    try:
        saved, weights = state["hyperparameters"] | dict(preset="laptop", checkpoint=path), state["model"]
        assert saved["num_layers"] <= len(weights) and saved["sequence_tokens"] <= 2**24, "claims too much"
        hp = parse_command_line([f"--{name}={value}" for name, value in saved.items()])
        hp.sequence_tokens = min(hp.sequence_tokens, 2**16)  # of use here only as room for the prompt
        with torch.device("meta"):  # what the file claims takes no memory before it is seen to be so
            shapes = {name: p.shape for name, p in GPT(hp).state_dict().items()}
        assert shapes == {name: p.shape for name, p in weights.items()}, "weights of other shapes"
        assert all(p.isfinite().all() for p in weights.values()), "weights that are not finite"
        model = GPT(hp, place.dtype, "banded")
        model.load_state_dict(weights)
    except Exception as error:  # whatever is wrong with a file from elsewhere: one sentence
        raise UserError(f"--checkpoint={path}: cannot be loaded ({one_line(error)}); give the model.pt of a "
                        "run") from None
    return model.to(place.device).eval()


# ------------------------------------------------------------------------------------------------------------
# 8  Evaluation and sampling
# ------------------------------------------------------------------------------------------------------------

@torch.no_grad()
def evaluate(hp: Hyperparameters, model: nn.Module, loader: Loader, window: Tensor, place: "Place",
             bytes_per_token: float | None = None) -> dict:
    """Loss per token, and bits per byte of text where that is known, over the first val_tokens."""
    model.eval()
    sequences, loader.index = hp.val_tokens // hp.sequence_tokens, place.rank
    total = torch.zeros(2, dtype=widest_dtype(place), device=place.device)  # loss, targets that are text
    while loader.index < sequences:  # the ranks take turns, whatever their number
        (inputs, targets), = loader.next_batch(stride=place.world_size)
        total += torch.stack((model(inputs, targets, window), (targets != hp.document_token).sum()))
    model.train()
    loss, text = summed(total, place)
    text = text if hp.vocab_size <= 257 else (bytes_per_token or 0) * hp.val_tokens  # bytes count themselves
    bits = loss * hp.sequence_tokens / text / math.log(2) if text else None
    return dict(val_loss=loss / sequences, bits_per_byte=bits)


def widest_dtype(place: "Place") -> torch.dtype:
    return torch.float32 if place.device.type == "mps" else torch.float64  # Apple's GPUs have no float64


def text_codec(hp: Hyperparameters) -> tuple:
    """(text → tokens, tokens → text): bytes, or GPT-2's vocabulary."""
    if hp.vocab_size <= 257:
        return (lambda text: list(text.encode()),
                lambda tokens: bytes(token for token in tokens if token < 256).decode(errors="replace"))
    try:
        import tiktoken
        gpt2 = tiktoken.get_encoding("gpt2")
    except Exception as error:  # tiktoken fetches the vocabulary, in ways that fail in many ways
        raise UserError(f"text needs tiktoken and GPT-2's vocabulary ({type(error).__name__}); pip install "
                        "-r data/requirements.txt, then python data/vocabulary.py") from None
    return gpt2.encode_ordinary, gpt2.decode


@torch.no_grad()
def sample(model: GPT, prompt: str, hp: Hyperparameters) -> str:
    """The prompt and its continuation; hp has the settings of sampling, the model those of its training."""
    encode, decode = text_codec(model.hp)
    generator, device = torch.Generator().manual_seed(hp.seed), model.skip_weights.device
    tokens = [model.hp.document_token, *encode(prompt)]
    if max(tokens) >= model.hp.vocab_size:
        raise UserError(f"the text has token {max(tokens)} and the model knows {model.hp.vocab_size} tokens")
    window = torch.tensor(window_at(model.hp, model.hp.num_steps), dtype=torch.int32, device=device)
    room = min(model.hp.sequence_tokens, (band_reach(model.hp) + 2) * BLOCK)
    for _ in range(hp.sample_tokens):
        context = tokens[-room:]
        padded = torch.tensor(context + [model.hp.document_token] * (-len(context) % BLOCK), device=device)
        logits = model(padded, None, window)[len(context) - 1, :model.hp.vocab_size].float().cpu()
        if hp.top_k:
            logits[logits < logits.topk(min(hp.top_k, len(logits))).values[-1]] = -math.inf
        if hp.temperature:
            chances = (logits / hp.temperature).softmax(0)
            tokens.append(torch.multinomial(chances, 1, generator=generator).item())
        else:
            tokens.append(logits.argmax().item())
    return decode(tokens[1:])


@torch.no_grad()
def score_hellaswag(folder: str, model: GPT, place: "Place", tokens: int = 4096) -> dict:
    """Accuracy; the model's answer is the ending with the lowest mean loss.

    Many rows (a context and an ending) are packed into one sequence: the document mask keeps them apart.
    """
    hp, (path, rows, tasks) = model.hp, read_hellaswag(folder, model.hp)
    packs = pack_rows([len(row) for row in rows], min(tokens, hp.sequence_tokens), path)
    window = torch.tensor(window_at(hp, hp.num_steps), dtype=torch.int32, device=place.device)
    losses = torch.zeros(len(rows), dtype=widest_dtype(place), device=place.device)
    for pack in packs[place.rank::place.world_size]:
        packed = np.concatenate([rows[number] for number in pack])
        padded = np.pad(packed, (0, -len(packed) % BLOCK), constant_values=hp.document_token)
        inputs = torch.from_numpy(padded.astype(np.int64)).to(place.device)
        each = F.cross_entropy(model(inputs, None, window)[:-1], inputs[1:], reduction="none")
        start = 0
        for number in pack:
            context, end = tasks[number // 4][0], start + len(rows[number])
            losses[number] = each[start + context - 1:end - 1].mean()
            start = end
    losses = torch.tensor(summed(losses, place))
    answers = losses.view(-1, 4).argmin(dim=1).tolist()
    right = sum(answer == label for answer, (_, label) in zip(answers, tasks))
    return dict(hellaswag=right / len(tasks), tasks=len(tasks), losses=losses.tolist(),
                line=f"HellaSwag accuracy {right / len(tasks):.4f} of {len(tasks):,} tasks")


def read_hellaswag(folder: str, hp: Hyperparameters) -> tuple[str, list[np.ndarray], list]:
    """(the shard, its rows, for each task [context tokens, label]) as data/hellaswag.py wrote them."""
    shard = Shard(str(Path(folder) / "hellaswag_val_000000.bin"))
    check_manifest(hp, [shard])
    tokens = np.empty(shard.num_tokens, np.uint16)
    shard.read_into(tokens, 0)
    rows = np.split(tokens, np.flatnonzero(tokens == hp.document_token))[1:]
    try:
        tasks = read_manifest(Path(folder))["tasks"]
        assert len(rows) == 4 * len(tasks) > 0 and tokens.max() < hp.vocab_size
        assert all(0 < tasks[n // 4][0] < len(row) for n, row in enumerate(rows))
        assert all(label in range(4) and type(context) is int for context, label in tasks)
    except (ValueError, KeyError, TypeError, IndexError, AssertionError) as error:
        raise UserError(f"--hellaswag={folder}: tasks and tokens do not fit ({type(error).__name__}); make "
                        "it again with python data/hellaswag.py") from None
    return shard.path, rows, tasks


def pack_rows(lengths: list[int], room: int, path: str) -> list[list[int]]:
    """Rows in order, as many to a sequence as fit."""
    packs, used = [], room
    for number, length in enumerate(lengths):
        if length > room:
            raise UserError(f"{path}: row {number} has {length} tokens, more than the {room} of a sequence")
        if used + length > room:
            packs.append([])
            used = 0
        packs[-1].append(number)
        used += length
    return packs


# ------------------------------------------------------------------------------------------------------------
# 9  Train and main
# ------------------------------------------------------------------------------------------------------------

@dataclass
class Place:
    """Where this process runs, and what follows from the hardware."""
    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32          # of activations
    muon_dtype: torch.dtype = torch.float32     # of Newton–Schulz
    attention: str = "banded"
    compile: bool = False
    why_not_compiled: str = ""
    timeout: float = 600.0                      # seconds that a collective may take
    tiles: dict | None = None                   # of FlexAttention's kernels; None: Inductor's own
    launcher: int = 0                           # process of torchrun, where it is the only one; 0: none


def memory_needed(hp: Hyperparameters, place: Place) -> tuple[float, float]:
    """(bytes, bytes per token of a sequence) at a step's peak; fitted to traces of tests/gpu/gpu_memory.py."""
    with torch.device("meta"):
        groups = optimizer_groups(hp, GPT(hp, place.dtype, place.attention))
    size = {kind: sum(p.numel() * p.element_size() for p in group["params"].values())
            for kind, group in groups.items()}
    muon, adam = size.pop("muon"), sum(size.values())
    state = 5 * adam + 3 * muon + muon / place.world_size  # weights, gradients, a micro-step's own; moments
    lean = place.attention == "flex" or place.device.type == "cpu"  # neither keeps the attention's weights
    bands = 0 if lean else 3 * hp.num_heads * (band_reach(hp) + 1) * BLOCK
    layers = hp.num_layers * ((12 + 2 * hp.mlp_ratio) * hp.model_dim + bands)
    logits = place.dtype.itemsize if place.compile else 16  # bytes: fused, or four times in fp32
    return state, layers * place.dtype.itemsize + hp.padded_vocab * logits


def find_place(hp: Hyperparameters) -> Place:
    """Rank and world size come from torchrun; without it there is one process, and no process group."""
    rank, world_size, local_rank = (int(os.environ.get(name, default)) for name, default in
                                    (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    kind = hp.device if hp.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and local_rank >= torch.cuda.device_count():
        raise UserError(f"--device=cuda: rank {rank} needs GPU {local_rank} and there are "
                        f"{torch.cuda.device_count()}; start one process per GPU, or give --device=cpu")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device=mps: this machine has none; give --device=cpu")
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    cpu = torch.cpu.get_capabilities() if kind == "cpu" else {}
    bf16 = kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)  # from Ampere on; ROCm
    compiled, why_not = choose_compile(hp, kind)
    can_flex = bf16 and compiled  # Triton's matrix products are made for the same GPUs
    attention = hp.attention if hp.attention != "auto" else "flex" if can_flex else "banded"
    if attention == "flex" and not can_flex:
        raise UserError("--attention=flex: it trains only compiled, on a GPU with bfloat16 (NVIDIA: from "
                        "Ampere on); give --attention=banded")
    dtype, tiles = pick_dtype(hp.dtype, bf16), None
    if attention == "flex":  # ROCm does not tell; Inductor's own tiles are made for its 64 KiB
        shared = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
        padded_head = 1 << (hp.model_dim // hp.num_heads - 1).bit_length()  # Triton's are powers of two
        tiles = flex_tiles(shared, padded_head * dtype.itemsize)
    return Place(rank, world_size, device, dtype,
                 pick_dtype(hp.muon_dtype, bf16 or cpu.get("avx512_bf16") or cpu.get("amx_bf16")),
                 attention, compiled, why_not, hp.timeout, tiles,
                 os.getppid() * (os.environ.get("GROUP_WORLD_SIZE") == "1"))


def pick_dtype(name: str, has_bf16: bool) -> torch.dtype:
    return torch.bfloat16 if name == "bfloat16" or name == "auto" and has_bf16 else torch.float32


def choose_compile(hp: Hyperparameters, kind: str) -> tuple[bool, str]:
    """(compile?, why not). On a CPU steps get a fifth faster, after a minute: it pays in long runs."""
    why_not = what_compiling_lacks(kind) if hp.compile != "no" else ""
    if why_not and hp.compile == "yes":
        raise UserError(f"--compile=yes: {why_not}; install one, or give --compile=no")
    flops = 6 * 12 * hp.num_layers * hp.model_dim**2 * hp.num_steps * hp.batch_tokens
    if not why_not and hp.compile == "auto" and kind == "cpu" and flops < 1e14:
        why_not = "too short a run to earn it back on a CPU"
    return hp.compile != "no" and not why_not, f": {why_not}" if why_not else ""


def what_compiling_lacks(kind: str) -> str:
    if kind == "mps":
        return "there is no compiler for it"
    if kind == "cpu":
        found = any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++")))
        return "" if found else "there is no C++ compiler (g++ or clang++) here"
    if torch.cuda.get_device_properties(0).major < 7:
        return "there is no Triton for this GPU"
    try:
        start_triton()
    except Exception as error:  # it may be missing; compilers and linkers fail in many ways
        return (f"Triton cannot start ({one_line(error)}), which needs a C compiler and Python.h (gcc, "
                f"python3.{sys.version_info.minor}-dev)")
    return ""


def start_triton() -> None:
    """On its first GPU Triton builds a library in C, long before it is asked for a kernel."""
    from triton.runtime import driver
    driver.active.utils


def start_up(place: Place, hp: Hyperparameters) -> None:
    """What has to happen in the process before anything else."""
    lowest = (9, 5) if torch.version.hip else (8, 9)  # AMD's 9.4 has FP8 with another bias
    if hp.fp8_head and (place.device.type == "mps" or place.device.type == "cuda" and
                        torch.cuda.get_device_capability(place.device) < lowest):
        raise UserError("--fp8_head=true: this device has no FP8, which takes compute capability 8.9 (AMD: "
                        "9.5) or more; give --fp8_head=false")
    if place.device.type == "cuda":
        try:
            torch.cuda.set_device(place.device)
            torch.empty(1, device=place.device, requires_grad=True).backward()  # CUDA, autograd come up now
        except RuntimeError as error:  # no kernels for its generation, in use by others, broken
            raise UserError(f"GPU {place.device.index} cannot be used ({one_line(error)}); look at its "
                            "nvidia-smi, install a PyTorch built for it, or give --device=cpu") from None
        torch.backends.cuda.enable_cudnn_sdp(False)  # an H100's first choice, planned for each length
        torch._inductor.config.coordinate_descent_tuning = hp.tune_kernels
        torch._inductor.config.combo_kernels = True  # the casts of eight weights in one launch, and the like
        torch._inductor.config.combo_kernels_pointwise_only = True
    elif place.device.type == "cpu":
        torch.use_deterministic_algorithms(True)  # bit-for-bit repeatable; on CUDA it would cost speed
        torch.utils.deterministic.fill_uninitialized_memory = False
    if place.world_size > 1:
        join_group(place, hp)


def join_group(place: Place, hp: Hyperparameters) -> None:
    """A rank that does not come is named, as is one that later stops answering."""
    of, store = os.environ, None
    patience = hp.timeout + 60 * (place.device.type == "cuda")  # `summed` first: it names ranks
    if of.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and of["GROUP_WORLD_SIZE"] == "1":
        # torchrun keeps its store when it restarts a group, and with it the addresses of dead ranks
        store = dist.TCPStore(of["MASTER_ADDR"], int(of["MASTER_PORT"]))
        store = dist.PrefixStore(f"attempt{of['TORCHELASTIC_RESTART_COUNT']}", store)
        store.set(f"came{place.rank}", "")
    try:
        dist.init_process_group("nccl" if place.device.type == "cuda" else "gloo", store=store,
                                rank=place.rank, world_size=place.world_size,
                                timeout=datetime.timedelta(seconds=patience),
                                device_id=place.device if place.device.type == "cuda" else None)
    except dist.DistError as error:
        late = [str(rank) for rank in range(place.world_size) if store and not store.check([f"came{rank}"])]
        raise UserError(f"rank {' and '.join(late) or 'unknown'} did not come in --timeout={hp.timeout:g} s "
                        f"({one_line(error)}); look at its machine, or wait longer") from None


def summed(values: Tensor, place: Place) -> list:
    """Over the ranks. One that does not answer in time ends the wait here, before NCCL's watchdog ends us."""
    if place.world_size > 1:
        work, deadline = dist.all_reduce(values, async_op=True), time.monotonic() + place.timeout
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise dist.DistError(f"no answer in {place.timeout:g} s")
            time.sleep(2e-5)
        work.wait()
    return values.tolist()


def micro_steps(hp: Hyperparameters, place: Place) -> int:
    """Forward passes of a rank per step: fewer ranks take more of them, and the batch stays the same."""
    count, rest = divmod(hp.batch_tokens, unit := place.world_size * hp.sequence_tokens)
    if rest:
        refuse("batch_tokens", hp.batch_tokens, "a multiple of ranks × sequence_tokens = "
               f"{place.world_size} × {hp.sequence_tokens}", nearest_multiple(hp.batch_tokens, unit))
    return count


def in_parallel(model: nn.Module, place: Place, bucket_mb: int = 128) -> nn.Module:
    """The ranks' gradients averaged, in buckets, while the backward pass goes on; one rank needs none of it.

    Dynamo cuts the graph at each bucket, and sums across cuts are not fused: few buckets.
    """
    if place.world_size == 1:
        return model
    return DistributedDataParallel(model, device_ids=[place.device] if place.device.type == "cuda" else None,
                                   forward_sync_buffers=False, gradient_as_bucket_view=True,
                                   bucket_cap_mb=bucket_mb)


class Trainer:
    """Everything that a run is made of, and one step of it."""

    def __init__(self, hp: Hyperparameters, place: Place):
        self.hp, self.place, self.interrupted, self.stopping = hp, place, "", False
        micro_steps(hp, place)  # a batch that does not divide shows before anything is read
        self.train_data = Loader(hp.train_files, hp.batch_tokens, hp.sequence_tokens, hp.segment_tokens,
                                 place.rank, place.world_size, place.device, hp.vocab_size, hp.epochs,
                                 hp.seed)
        self.val_data = Loader(hp.val_files, hp.sequence_tokens, hp.sequence_tokens, device=place.device,
                               vocab_size=hp.vocab_size)
        check_budget(hp.train_files, self.train_data, hp.num_steps, "num_steps", fetch_command(hp))
        check_budget(hp.val_files, self.val_data, hp.val_tokens // hp.sequence_tokens, "val_tokens",
                     fetch_command(hp))
        check_manifest(hp, self.train_data.shards)
        self.bytes_per_token = check_manifest(hp, self.val_data.shards)
        if hp.hellaswag:
            read_hellaswag(hp.hellaswag, hp)  # a mistake in it shows now, not after the training
        torch.manual_seed(hp.seed)
        self.model = GPT(hp, place.dtype, place.attention, place.tiles).to(place.device)
        self.window = torch.zeros(2, dtype=torch.int32, device=place.device)
        self.optimizers = build_optimizers(hp, self.model, place)
        self.forward = self.model
        if place.compile:
            self.forward = torch.compile(self.model, dynamic=False, fullgraph=True)
        self.parallel = in_parallel(self.forward, place)

    def step(self, batch: list[tuple[Tensor, Tensor]], step: int) -> float:
        """One optimizer step. Returns the mean loss over all ranks; what is not finite stops before it."""
        set_schedules(self.hp, step, self.optimizers, self.window)
        mean = torch.zeros((), device=self.place.device)
        for micro, (inputs, targets) in enumerate(batch, 1):
            synced = micro == len(batch) or self.place.world_size == 1
            with contextlib.nullcontext() if synced else self.parallel.no_sync():
                loss = self.parallel(inputs, targets, self.window) / len(batch)
                mean += loss.detach()
                loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()],
                                             foreach=self.place.device.type != "mps")
        if self.place.launcher not in (0, os.getppid()):  # or it would train on unseen, beside its successor
            self.interrupted = self.interrupted or "the end of its launcher"
        stop = torch.full_like(mean, bool(self.interrupted))  # every rank hears of it in the same step
        values = summed(torch.stack((mean, norm.float(), stop)), self.place)
        loss, norm, self.stopping = (value / self.place.world_size for value in values)
        self.require_finite(step + 1, loss, norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss

    def require_finite(self, step: int, loss: float, norm: float | Tensor) -> None:
        """Stop before what is not finite gets into weights or a checkpoint, and say which batch to replay."""
        if math.isfinite(loss) and math.isfinite(norm):
            return
        named = list(self.model.named_parameters())
        kinds = [("parameter", *n) for n in named] + [("gradient", name, p.grad) for name, p in named]
        found = [f"the first {kind} that is not finite is that of {name}" for kind, name, x in kinds
                 if x is not None and not x.isfinite().all()] or ["all parameters and gradients are finite"]
        shard, place = self.train_data.locate(index := max(0, self.train_data.index - 1))
        raise UserError(f"the loss of step {step} is {loss}: {found[0]}; its batch is {index}, number "
                        f"{place} of {shard.path}; lower the rates, or replay it from the last checkpoint")

    def state(self, step: int, clock: "Clock", sizes: list) -> dict:
        """All that training goes on from, copied once, to rank 0's host. A collective, for the momentum."""
        adam, muon = self.optimizers
        self.require_finite(step, 0.0, torch.nn.utils.get_total_norm(self.model.parameters()))
        names = {p: name for name, p in self.model.named_parameters()}
        copied = (lambda x: x.detach().to("cpu", copy=True)) if self.place.rank == 0 else (lambda x: None)
        return dict(format=CHECKPOINT_FORMAT, hyperparameters=as_dict(self.hp), step=step, clocks=clock.now(),
                    sizes=sizes, index=self.train_data.index, random=torch.random.get_rng_state(),
                    model={name: copied(p) for name, p in self.model.state_dict().items()},
                    adam={names[p]: {key: copied(x) for key, x in x.items()} for p, x in adam.state.items()},
                    muon={names[p]: copied(x) for p, x in muon.gather_momentum()})

    @torch.no_grad()
    def restore(self, state: dict, clock: "Clock") -> None:
        """Go on from a state that any number of ranks made."""
        def fitted(x: Tensor, like: Tensor) -> Tensor:
            return torch.empty_like(like).copy_(x.view_as(like))

        adam, muon = self.optimizers
        mine = {p for group in muon.param_groups for _, own in muon.chunks(group) for p in own}
        adams = {p for group in adam.param_groups for p in group["params"]}
        try:
            self.model.load_state_dict(state["model"])
            for name, p in self.model.named_parameters():
                if p in mine:
                    muon.state[p]["momentum_buffer"] = fitted(state["muon"][name], p)
                elif p in adams:
                    likes = dict(step=torch.zeros((), device=p.device), exp_avg=p, exp_avg_sq=p)
                    adam.state[p] = {key: fitted(state["adam"][name][key], likes[key]) for key in likes}
            self.train_data.index = state["index"]
            clock.ms = {kind: float(state["clocks"][kind]) for kind in clock.ms}
            torch.random.set_rng_state(state["random"])
            if state["step"] > self.hp.num_steps or len(state["sizes"]) != 2:
                raise ValueError(f"step {state['step']} of {self.hp.num_steps}")
        except (LookupError, RuntimeError, AttributeError, TypeError, ValueError, ArithmeticError) as error:
            raise UserError(f"the checkpoint does not fit this training ({one_line(error)})") from None

    def check_ranks_agree(self) -> None:
        """By a cheap hash of each parameter, the sum of its bits: ranks that differ stop here."""
        whole, given = {2: torch.int16, 4: torch.int32}, zlib.crc32(repr(as_dict(self.hp)).encode())
        sums = torch.stack([torch.tensor(given, device=self.place.device), *(
            p.detach().view(whole[p.element_size()]).sum() for p in self.model.parameters())])
        everyone = sums.repeat(self.place.world_size)
        if self.place.world_size > 1:
            dist.all_gather_single(everyone, sums)
        names = ["the hyperparameters", *(f"parameter {name}" for name, _ in self.model.named_parameters())]
        for name, values in zip(names, everyone.view(-1, len(sums)).T.tolist()):
            if others := [rank for rank, value in enumerate(values) if value != values[0]]:
                raise UserError(f"rank {others[0]} differs from rank 0, first in {name}; start all machines "
                                "with the same, or check their hardware and go on with --resume=auto")

    def warm_up(self) -> None:
        """Compile every path on made-up tokens, then put everything back as it was."""
        hp = self.hp
        saved = [{p: {name: x.to("cpu", copy=True) for name, x in state.items()}  # the GPU may have no room
                  for p, state in optimizer.state.items()} for optimizer in self.optimizers]
        weights = [p.detach().to("cpu", copy=True) for p in self.model.parameters()]
        random = torch.random.get_rng_state()
        tokens = torch.arange(hp.sequence_tokens + 1, device=self.place.device) % hp.vocab_size
        batch = [(tokens[:-1].int(), tokens[1:].long())] * micro_steps(hp, self.place)
        for step in (0, hp.num_steps - 1):
            self.step(batch, step)
        with torch.no_grad():
            self.forward.eval()(*batch[0], self.window)
            for p, weight in zip(self.model.parameters(), weights):
                p.copy_(weight)
        self.forward.train()
        for optimizer, states in zip(self.optimizers, saved):
            optimizer.state.clear()
            for p, state in states.items():
                optimizer.state[p] = {name: x.to(p.device) for name, x in state.items()}
        torch.random.set_rng_state(random)


class Clock:
    """Milliseconds of wall time by kind of work; waits for the device at each change."""

    def __init__(self, device: torch.device):
        self.device, self.kind, self.since, self.ms = device, None, 0.0, dict(warmup=0.0, train=0.0, val=0.0)

    def switch(self, kind: str | None) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.ms, self.kind, self.since = self.now(), kind, time.perf_counter()

    def now(self) -> dict[str, float]:
        since = 1000 * (time.perf_counter() - self.since)
        return self.ms | ({self.kind: self.ms[self.kind] + since} if self.kind else {})


def peak_memory_mib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    import resource  # not on Windows
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**10 if sys.platform == "linux" else 2**20)


def compiled_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def train(hp: Hyperparameters, place: Place) -> float | None:
    """The whole run; returns the final validation loss, or None if it was told to stop before."""
    trainer, clock = Trainer(hp, place), Clock(place.device)
    folder, start, sizes, notes = resume(trainer, clock)
    log = Logger(hp, place, folder, sizes)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    trainer.check_ranks_agree()
    log.write(*environment(place),
              f"{parameters:,} parameters, {hp.num_steps:,} steps of {hp.batch_tokens:,} tokens", *notes)
    clock.switch("warmup")
    if place.compile:
        log.write("compiling and warming up …")
        trainer.warm_up()
    graphs = compiled_graphs()
    clock.switch("train")
    with listening_to_signals(trainer), contextlib.closing(log):  # which waits for what is being written
        for step in range(start, hp.num_steps + 1):
            last, tokens = step == hp.num_steps, step * hp.batch_tokens
            if step > start and (trainer.stopping or last and hp.save_every or
                                 hp.save_every and step % hp.save_every == 0):
                log.saved.result()  # at most one copy at a time, and none between checkpoints
                log.save(f"checkpoint_{step:07d}.pt", trainer.state(step, clock, log.sizes()),
                         hp.keep_checkpoints)
            if trainer.stopping:
                break
            if last or hp.val_every and step % hp.val_every == 0:
                clock.switch("val")
                trainer.check_ranks_agree()
                set_schedules(hp, step, trainer.optimizers, trainer.window)
                result = evaluate(hp, trainer.forward, trainer.val_data, trainer.window, place,
                                  trainer.bytes_per_token)
                clock.switch("train")
                trainer.require_finite(step, result["val_loss"], 0.0)
                log.step(step, hp.num_steps, "val_loss", result["val_loss"], clock.ms["train"])
                log.record(step=step, tokens=tokens, **result, **state_of(trainer, clock, step))
            if last:
                break
            loss = trainer.step(trainer.train_data.next_batch(), step)
            done, tokens, train_ms = step + 1, tokens + hp.batch_tokens, clock.now()["train"]
            if done % hp.log_every == 0 or done in (1, hp.num_steps):
                log.step(done, hp.num_steps, "train_loss", loss, train_ms, show=not log.terminal)
                log.record(step=done, tokens=tokens, train_loss=loss, **state_of(trainer, clock, step))
            log.progress(done, hp.num_steps, loss, 1000 * tokens / train_ms)
        clock.switch(None)
        if trainer.stopping:
            log.close()
            stopped = f"stopped by {trainer.interrupted or 'another rank'} after step {step}"
            if not log.saved.result():
                raise UserError(f"{stopped}, and what it had learnt since the last checkpoint is lost")
            log.write(f"{stopped}; go on with --resume={folder}")
            return None
        recompiles, trainer.model.attention = compiled_graphs() - graphs, "banded"  # the rest is not compiled
        if hp.save_model:  # before the scores, which may take long
            log.save("model.pt", dict(format=CHECKPOINT_FORMAT, hyperparameters=as_dict(hp), step=step,
                                      val_loss=result["val_loss"], model=trainer.model.state_dict()))
        log.close()
        if hp.hellaswag:
            score = score_hellaswag(hp.hellaswag, trainer.model.eval(), place)
            log.write(score["line"])
            log.record(**{name: score[name] for name in ("hellaswag", "tasks")})
        if place.rank == 0:
            finish(trainer, log, clock, result, recompiles)
        return result["val_loss"]


def resume(trainer: Trainer, clock: Clock) -> tuple[Path, int, tuple, list[str]]:
    """(the run's folder, the step to start at, where its logs ended, what to say); rank 0 chooses for all."""
    hp, place = trainer.hp, trainer.place
    again = torch.tensor([os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"], dtype=torch.int32)
    restarted = any(summed(again.to(place.device), place))  # who came back hears it from the others
    chosen = [find_run(hp, restarted) if place.rank == 0 else (Path(), None, [])]
    if place.world_size > 1 and (hp.resume or restarted):
        dist.broadcast_object_list(chosen)
    folder, path, notes = chosen[0]
    if path is None:
        return folder, 0, (0, 0), notes
    state = read_saved(path)
    notes.append(changed_since(hp, state["hyperparameters"]))
    trainer.restore(state, clock)
    return folder, state["step"], state["sizes"], notes


@contextlib.contextmanager
def listening_to_signals(trainer: Trainer):
    """The first signal asks for a checkpoint after the step in hand, the second ends the process at once."""
    def hear(number, frame):
        if trainer.interrupted and time.monotonic() > first[0] + 1:  # Ctrl-C also comes through the launcher
            os._exit(128 + number)
        trainer.interrupted = trainer.interrupted or signal.Signals(number).name
        first.append(time.monotonic())

    first = []
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)]
    before = {number: signal.signal(number, hear) for number in numbers}
    try:
        yield
    except RuntimeError:
        if trainer.interrupted:  # the launcher is ending us because another rank is gone
            os._exit(1)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def silent_ranks(error: RuntimeError, patience_s: float = 3.0) -> str:
    """A collective failed: a roll-call through the launcher's store tells whose fault it is."""
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"here{dist.get_rank()}", "")
        time.sleep(patience_s)
        silent = [str(rank) for rank in range(dist.get_world_size()) if not store.check([f"here{rank}"])]
    except RuntimeError:
        silent = ["0, or its machine,"]  # which keeps the store
    return (f"rank {' and '.join(silent) or 'unknown'} stopped answering ({one_line(error)}); look at its "
            "machine, then go on with --resume=auto")


def state_of(trainer: Trainer, clock: Clock, step: int) -> dict:
    """What a line of metrics.jsonl says beside the loss; nothing of it is asked of the device."""
    adam, muon = (optimizer.param_groups for optimizer in trainer.optimizers)
    rates = dict(zip(("embed", "head", "scalar", "muon"), (group["lr"] for group in (*adam, muon[0]))))
    return dict(rates=rates, momentum=muon[0]["momentum"],
                window=[size if size < FAR else None for size in window_at(trainer.hp, step)],
                times_ms=clock.now(), memory_mib=peak_memory_mib(trainer.place.device))


def finish(trainer: Trainer, log: Logger, clock: Clock, result: dict, recompiles: int) -> None:
    """The end of a run, for a person: loss, clocks, memory, a sample, where things are."""
    hp, val_loss, model_path = trainer.hp, result["val_loss"], log.folder / "model.pt"
    in_bytes = f", {result['bits_per_byte']:.4f} bits per byte" if result["bits_per_byte"] else ""
    reached = "reached" if val_loss <= hp.target_loss else "not reached"
    log.write(f"final validation loss {val_loss:.4f}{in_bytes} (target {hp.target_loss} {reached}) after "
              f"{hp.num_steps * hp.batch_tokens:,} tokens",
              "clocks: " + ", ".join(f"{kind} {ms / 1000:.1f} s" for kind, ms in clock.ms.items()),
              f"recompiles after warm-up: {recompiles}; peak memory: "
              f"{peak_memory_mib(trainer.place.device):,.0f} MiB")
    log.record(end=True, **result, recompiles=recompiles, times_ms=clock.ms)
    try:
        log.write("sample:", sample(trainer.model.eval(), "", hp))
    except UserError as error:
        log.write(f"no sample: {error}")
    log.write(f"log: {log.folder / 'log.txt'}", *([f"model: {model_path}"] if hp.save_model else []))


def use_model(model: GPT, hp: Hyperparameters, place: Place) -> None:
    """What else there is to do with a saved model than train it."""
    if hp.hellaswag:
        score = score_hellaswag(hp.hellaswag, model, place)
    if place.rank == 0:
        print(score["line"] if hp.hellaswag else sample(model, hp.sample, hp))


def give_up(why: UserError | str) -> int:
    if (rank := int(os.environ.get("RANK", 0))):
        time.sleep(10)  # what all ranks have to say, rank 0 says alone: torchrun then stops the others
    print(f"error on rank {rank}: {why}" if rank else f"error: {why}", file=sys.stderr, flush=True)
    return 2


def take_leave(finished: bool) -> None:
    """NCCL takes leave of all ranks together: one that failed alone would wait here, its error untold."""
    if dist.is_initialized() and (finished or dist.get_backend() != "nccl"):
        dist.destroy_process_group()


def main(arguments: list[str]) -> int:
    if {"--help", "-h"} & set(arguments):
        print(help_text())
        return 0
    finished = False
    try:
        hp = parse_command_line(arguments)
        if hp.show:
            print(*(f"{name}={value}" for name, value in as_dict(hp).items()), sep="\n")
            return 0
        place = find_place(hp)
        start_up(place, hp)
        if hp.checkpoint:
            use_model(load_model(hp.checkpoint, place), hp, place)
        else:
            train(hp, place)
        finished = True
        return 0
    except UserError as error:
        return give_up(error)
    except RuntimeError as error:
        if not (dist.is_initialized() and (isinstance(error, dist.DistError) or "gloo" in str(error))):
            raise
        os._exit(give_up(silent_ranks(error)))  # to take leave of a group that is stuck would get stuck too
    except KeyboardInterrupt:  # before the first step; from then on they are heard there
        if os.environ.get("RANK", "0") == "0":
            print("stopped: there was nothing to save yet", file=sys.stderr, flush=True)
        os._exit(128 + signal.SIGINT)
    finally:
        take_leave(finished)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
