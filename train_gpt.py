"""Train a GPT, fast: one file, the same from a laptop's CPU to 8×H100.

    ./run.sh [--name=value …]                         set up, fetch data, train on this machine
    python train_gpt.py [--name=value …]              train in this process: one GPU, or the CPU
    torchrun --nproc_per_node=N train_gpt.py …        train on N GPUs, or in N processes on the CPU
    python train_gpt.py --sample=TEXT --checkpoint=…  continue a text with a saved model
    python train_gpt.py --help                        every hyperparameter, its meaning and value

Contents, in the order of a token's way from a shard to an updated weight:
    1  hyperparameters        the numbers to edit
    2  hardware               rank, device, dtypes (chosen in section 13)
    3  data                   memory-mapped token shards, batches
    4  masks and attention    causal ∧ same document ∧ within the window; FlexAttention, banded
    5  model                  the U-Net GPT with value embeddings
    6  Muon and schedules     Newton–Schulz, Muon, learning rate, momentum, parameter groups
    7  the step and the loop  one optimizer step; the whole run
  around the loop:
    8  logging                log.txt, metrics.jsonl, the progress bar
    9  checkpoints            write, find and restore them
   10  evaluation             validation loss, samples of text, HellaSwag
   11  what some runs use     n-grams and copies of earlier text (laptop), the FP8 head (H100)
   12  ranks and faults       the process group, signals, ranks that fail
   13  before a run           device and compiler, memory estimate, warm-up, token budget
   14  command line and main  the historical systems as presets
"""
import argparse
import ast
import collections
import contextlib
import datetime
import difflib
import functools
import gc
import glob
import hashlib
import importlib
import inspect
import itertools
import json
import math
import mmap
import os
import pickle
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import uuid
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

BLOCK = 128                     # tokens in a block of the attention mask
NO_LIMIT = 2**30                # a window that excludes nothing
SHARD_MAGIC = 20240520
SHARD_VERSION = 1
HEADER_BYTES = 256 * 4          # of a shard: 256 int32
FOLDER = Path(__file__).resolve().parent


class UserError(Exception):
    """A mistake that the user can fix: one sentence with the value, what was expected, a remedy."""


@contextlib.contextmanager
def explained(what: str, remedy: str, errors=OSError):
    """Turn errors of these types, within a with block, into a UserError: "what: reason; remedy"."""
    try:
        yield
    except torch.OutOfMemoryError:  # main says what to do
        raise
    except errors as error:
        raise UserError(f"{what}: {reason_of(error)}; {remedy}") from None


def reason_of(error: BaseException) -> str:
    """The message of an error on one line, without the name of its class."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, KeyError):
        return f"{error} is missing"
    if isinstance(error, pickle.UnpicklingError):  # PyTorch's advice would be to run what is in it
        return "it is damaged, or holds more than tensors and numbers"
    return " ".join(str(error).split())[:200] or "no reason was given"


# ═══ 1  Hyperparameters: edit them here, or give --name=value ═════════════════════════════════════

@dataclass
class Hyperparameters:
    """The defaults are the h100 run. A preset replaces some of them, the command line any.

    One line for each: --help is made from these lines.
    """
    preset: str = "auto"                # auto: h100 on GPUs, else laptop; A+B: A, then B over it
    # data
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"  # token shards to train on (glob)
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"      # token shards to validate on (glob)
    vocab_size: int = 50257             # tokens of the tokenizer
    vocab_multiple: int = 128           # rows of the head are padded to a multiple of this: 50,304
    pad_embeddings: bool = True         # pad the rows of the embeddings likewise
    document_token: int = 50256         # starts each document; attention never crosses it
    # budget
    num_steps: int = 1750               # optimizer steps
    batch_tokens: int = 8 * 48 * 1024   # tokens per step over all ranks, whatever the world size
    sequence_tokens: int = 48 * 1024    # tokens per forward pass; reduced where memory is short
    segment_tokens: int = 0             # tokens per segment of a sequence (Loader); 0: all of it
    align_documents: bool = True        # training sequences start at a document (aligned_starts)
    epochs: int = 1                     # passes over the shards; above 1: in shuffled order
    val_every: int = 125                # steps between validations; 0: only at the end
    val_tokens: int = 10_485_760        # tokens to validate on, always the same
    val_start: int = 0                  # the first token to validate on
    val_sequence_tokens: int = 256 * 1024  # per forward pass of validation; 0: as in training
    target_loss: float = 3.28           # validation loss that the run should reach; 0: none
    # model
    num_layers: int = 12                # the first half encodes, the second half decodes
    num_heads: int = 6                  # attention heads per layer
    model_dim: int = 768                # width of the residual stream
    mlp_ratio: int = 4                  # hidden units of the MLP per unit of width
    value_layout: str | tuple = "ends"  # value embeddings: none, per_layer, mirrored, ends, tuple
    value_lambdas: int = 2              # learned weights of v and its embedding; 1: 1 − λ and λ
    first_layer_values: bool = False    # mix the first layer's values into layers without a table
    no_attention: str | tuple = "second_decoder"  # layers without it: none, second_decoder, tuple
    rotary_base: float = 1024.0         # rotary frequencies fall from 1 to 1/base radian per token
    rotary_fraction: float = 0.5        # part of a head's dimensions that is rotated
    rotary_endpoint: bool = True        # the last one is 1/base itself; false: one step before it
    attention_scale: float = 0.12       # factor on q·k; 0: 1/√head_dim
    norm_eps: float = 2.0**-23          # of every RMS norm; 0: torch.finfo(dtype).eps
    init_bound: float = 0.75**0.5       # input matrices start uniform in ±this/√in_features
    logit_scale: float = 0.0            # factor on the logits, before softcap; 0: 1/√model_dim
    softcap: float = 15.0               # logits pass through c·tanh(logits/c); 0: off
    ngram_order: int = 0                # tokens in the longest context that is counted; 0: none
    ngram_tokens: int = 0               # tokens to count, of those that no batch of the run reads
    ngram_share: float = 0.0            # part of every shard that is kept for counting n-grams
    copy_lengths: tuple = ()            # suggest what followed the last n tokens before
    # attention window, growing linearly over the run
    window_unit: str = "block"          # block (128 tokens), token (64), token_in_block: both apply
    window_start: int = 0               # tokens, at step 0
    window_end: int = 1728              # tokens, at the end of the last step
    window_rounding: str = "up"         # to whole units: down, up
    short_window_layers: str | tuple = "inner"  # with half of it: none, inner (all but 4), tuple
    # optimizers
    sum_loss: bool = True               # train on the sum of a sequence's losses; false: their mean
    embed_rate: float = 0.6             # Adam: all embeddings
    head_rate: float = 0.22             # Adam: output head, gates of n-grams and copies
    scalar_rate: float = 0.04           # Adam: skip weights and mixes
    adam_beta1: float = 0.8             # Adam: decay rate of the first moment
    adam_beta2: float = 0.95            # Adam: decay rate of the second moment
    adam_eps: float = 1e-10             # Adam: added to the root of the second moment
    adam_eps_first: bool = True         # Adam: added before the bias correction; false: after it
    muon_rate: float = 0.05             # Muon: matrices of the blocks
    muon_momentum: float = 0.95         # Muon: final momentum
    muon_momentum_start: float = 0.85   # Muon: momentum at step 0
    muon_warmup_steps: int = 300        # Muon: steps from the first momentum to the final one
    muon_lerp: bool = True              # Muon: momentum averages the gradients; false: sums them
    muon_nesterov: bool = True          # Muon: Nesterov momentum
    muon_decay: float = 0.0             # Muon: decoupled weight decay
    muon_steps: int = 5                 # Muon: Newton–Schulz iterations per update
    cooldown: float = 0.45              # last part of the run, where rates fall; above 1: steps
    rate_floor: float = 0.1             # factor on the rates at the end
    # hardware
    device: str = "auto"                # auto, cuda, cpu, mps
    dtype: str = "auto"                 # activations: auto (bfloat16 on GPUs that have it), a type
    bf16_embeddings: bool = True        # embeddings in bfloat16 wherever activations are
    fp8_head: bool = True               # train the output head in FP8, on GPUs that have it
    fp8_x_scale: float = 0.0            # FP8: factor on the head's inputs; 0: 448/√model_dim
    fp8_weight_scale: float = 448 / 24  # FP8: factor on its weights
    fp8_grad_scale: float = 448.0       # FP8: factor on the gradient of a token's loss
    muon_dtype: str = "auto"            # Newton–Schulz: auto (bfloat16 if the hardware has it)
    attention: str = "auto"             # auto (flex on CUDA, banded elsewhere), flex, banded
    compile: str = "auto"               # torch.compile: auto (CUDA; long runs on a CPU), yes, no
    tune_kernels: bool = False          # Inductor's coordinate descent: fast kernels, slow start
    tune_products: bool = True          # Inductor fuses ReLU² with its product where that is faster
    seed: int = 1337                    # of weights, sample and order of shards
    # output, resume, faults
    log_dir: str = "logs"               # each run makes a folder of its own in here
    run_id: str = ""                    # name of that folder; empty: the time and a random word
    log_every: int = 10                 # steps between lines with the training loss
    save_model: bool = True             # write model.pt at the end
    save_every: int = 0                 # steps between checkpoints; 0: only when stopped
    keep_checkpoints: int = 2           # number of latest checkpoints to keep
    resume: str = ""                    # auto: the latest run; a run's folder; a checkpoint
    resume_anyway: bool = False         # resume although an option changes the training
    timeout: float = 600.0              # seconds after which a rank that is silent stops the run
    profile: int = 0                    # steps to trace with torch.profiler, into trace.json.gz
    hellaswag: str = ""                 # folder made by data/hellaswag.py: score the model on it
    # instead of training
    show: bool = False                  # print the hyperparameters and where they come from
    checkpoint: str = ""                # model.pt, checkpoint or run folder to sample from or score
    sample: str = ""                    # text to continue with the checkpoint
    sample_tokens: int = 200            # length of a sample
    temperature: float = 0.8            # of sampling; 0: always the likeliest token
    top_k: int = 0                      # sample among the k likeliest tokens; 0: among all

    def __post_init__(self):
        # where each value comes from: default, a preset, the command line or hardware
        self.origins = dict.fromkeys(FIELDS, "default")

    def update(self, values: dict, origin: str) -> None:
        for name, value in values.items():
            setattr(self, name, value)
            self.origins[name] = origin

    @property
    def is_byte_level(self) -> bool:
        return self.vocab_size <= 257  # bytes, and the document token

    @property
    def val_length(self) -> str:
        """The field that has the length of validation's sequences."""
        return "val_sequence_tokens" if self.val_sequence_tokens else "sequence_tokens"

    @property
    def padded_vocab(self) -> int:
        multiple = math.lcm(self.vocab_multiple, 16 if self.fp8_head else 1)  # FP8 needs 16
        return math.ceil(self.vocab_size / multiple) * multiple


FIELDS = {each.name: each.type for each in fields(Hyperparameters)}

# The laptop run, as differences from the defaults above; edit it here. LAPTOP has what depends on
# data, budget and size: --preset=2024-12-10+laptop applies only this to a dated system. Of the
# sizes tried on two cores it reaches the lowest loss in the same time (records/NEGATIVE.md).
LAPTOP = dict(
    train_files="data/enwik8/enwik8_train_*.bin", val_files="data/enwik8/enwik8_val_*.bin",
    vocab_size=257, vocab_multiple=1, document_token=256,       # bytes, and the document token
    num_steps=950, batch_tokens=4096, sequence_tokens=4096, segment_tokens=512,
    align_documents=False,
    val_sequence_tokens=2**16,                          # copies reach further back
    val_every=0, val_tokens=2**19, val_start=2**19,     # it was tuned on the 2**19 tokens before
    target_loss=1.20,
    num_layers=2, num_heads=2, model_dim=64, fp8_head=False,
    window_start=256, window_end=256, cooldown=0.5, sample_tokens=600)
# Its model and optimizers.
LAPTOP_DESIGN = dict(
    value_layout="per_layer", no_attention="none", attention_scale=0.0, norm_eps=0.0,
    init_bound=1.0, logit_scale=1.0, window_rounding="down", short_window_layers="none",
    rotary_fraction=1.0, ngram_order=6, ngram_tokens=90_000_000,
    copy_lengths=(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32),
    sum_loss=False, embed_rate=1.2, head_rate=0.004, adam_eps=1e-8, adam_eps_first=False,
    rate_floor=0.0)

CHOICES = {"window_unit": ("block", "token", "token_in_block"),
           "window_rounding": ("down", "up"),
           "short_window_layers": ("none", "inner"),
           "device": ("auto", "cuda", "cpu", "mps"),
           "dtype": ("auto", "bfloat16", "float32", "float64"),
           "muon_dtype": ("auto", "bfloat16", "float32", "float64"),
           "attention": ("auto", "flex", "banded"),
           "compile": ("auto", "yes", "no"),
           "value_layout": ("none", "per_layer", "mirrored", "ends"),
           "no_attention": ("none", "second_decoder")}

# The lowest and the highest value of numbers; where none is given: 0 or more.
BOUNDS = dict(
    vocab_size=(1, 2**16), vocab_multiple=(1, 2**16), num_steps=(1, 10**12),
    batch_tokens=(BLOCK, 10**12), sequence_tokens=(BLOCK, 10**12), epochs=(1, 10**6),
    val_tokens=(BLOCK, 10**12), val_start=(0, 10**12), num_layers=(2, 1000), num_heads=(1, 1000),
    model_dim=(4, 10**6), mlp_ratio=(1, 100), value_lambdas=(1, 2), rotary_base=(1.001, math.inf),
    rotary_fraction=(0.001, 1), ngram_order=(0, 6), ngram_tokens=(0, 10**9), ngram_share=(0, 0.9),
    window_start=(0, NO_LIMIT), window_end=(1, NO_LIMIT), adam_beta1=(0, 0.999999),
    adam_beta2=(0, 0.999999), muon_momentum=(0, 0.999999), muon_momentum_start=(0, 0.999999),
    muon_steps=(1, 100), rate_floor=(0, 1), fp8_weight_scale=(1e-6, math.inf),
    fp8_grad_scale=(1e-6, math.inf), seed=(0, 2**63 - 1), log_every=(1, math.inf),
    keep_checkpoints=(1, math.inf), timeout=(1, 10**6))

# Fields that --resume may change. None changes a weight, except for its rounding.
MAY_CHANGE_ON_RESUME = {
    "target_loss", "val_every", "device", "attention", "compile", "tune_kernels", "tune_products",
    "log_dir", "run_id", "log_every", "save_model", "save_every",
    "keep_checkpoints", "resume", "resume_anyway", "timeout", "profile", "hellaswag", "show",
    "checkpoint", "sample", "sample_tokens", "temperature", "top_k"}


# ═══ 2  Hardware: what follows from the machine ═══════════════════════════════════════════════════

@dataclass
class Hardware:
    """The rank and device of this process, and what find_hardware (section 13) chose for them."""
    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32          # of activations
    muon_dtype: torch.dtype = torch.float32     # of Newton–Schulz
    attention: str = "banded"                   # or flex
    compile: bool = False
    # used around the loop only
    has_fp8: bool = False
    why_not_compiled: str = ""
    timeout: float = 600.0                      # seconds that a collective may take
    launcher_pid: int = 0                       # torchrun's process, if on one machine; 0: none


# ═══ 3  Data: memory-mapped token shards, and the batches made of them ════════════════════════════

class Shard:
    """A file of 256 int32 (magic, version, number of tokens, zeros) and the tokens as uint16."""

    def __init__(self, path: str, vocab_size: int = 2**16):
        self.path = path
        self.vocab_size = vocab_size
        with explained(path, "fetch or make it again"):
            file_bytes = os.path.getsize(path)
            with open(path, "rb") as file:
                header = file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0")
        magic, version, self.num_tokens = np.frombuffer(header, dtype="<i4")[:3].tolist()
        self.num_bytes = HEADER_BYTES + 2 * self.num_tokens
        problem = ""
        if magic != SHARD_MAGIC:
            problem = f"not a token shard: it begins with {magic}, not {SHARD_MAGIC}"
        elif version != SHARD_VERSION:
            problem = f"shard version {version}, not {SHARD_VERSION}"
        elif file_bytes != self.num_bytes:
            problem = f"damaged: it has {file_bytes:,} bytes instead of {self.num_bytes:,}"
        if problem:
            raise UserError(f"{path}: {problem}; fetch it again, or make it with a script of data/")

    @functools.cached_property
    def memory_map(self) -> mmap.mmap:
        with (explained(self.path, "fetch it again", (OSError, ValueError)),
              open(self.path, "rb") as file):
            memory_map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if len(memory_map) != self.num_bytes:
                raise ValueError("changed since the run began")
        return memory_map

    def tokens(self, start: int, length: int) -> np.ndarray:
        """A view of the file. Refuses tokens that are outside the vocabulary."""
        tokens = np.frombuffer(self.memory_map, "<u2", length, HEADER_BYTES + 2 * start)
        if tokens.max(initial=0) >= self.vocab_size:
            raise UserError(f"{self.path}: token {tokens.max()} among the {length} from {start} on "
                            f"is outside vocab_size={self.vocab_size}; the shard is damaged, or "
                            "made with another tokenizer")
        return tokens

    def release_pages(self) -> None:
        """Return what was read to the system: resident memory does not grow with the data."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.memory_map.madvise(mmap.MADV_DONTNEED)


class Loader:
    """The batches of a set of shards, in order; batch `index` is the same at any world size.

    A batch is micro_steps × world_size sequences, and micro-step m of rank r takes sequence
    m · world_size + r. Sequences follow each other in the shard, as in the published records, or
    each starts at a document (align_documents: aligned_starts). A sequence is one segment of text;
    with segment_tokens it is several shorter ones, from places all over the shard (lane_starts).
    With epochs above 1 each epoch reads the shards in an order of its own.
    """

    def __init__(self, pattern: str, batch_tokens: int, sequence_tokens: int,
                 segment_tokens: int = 0, rank: int = 0, world_size: int = 1, device="cpu",
                 vocab_size: int = 2**16, epochs: int = 1, seed: int = 0,
                 document_token: int = 0, align_documents: bool = False,
                 batches_needed: int = 10**12, share: float = 1.0):
        self.pattern = pattern
        self.paths = sorted(glob.glob(pattern))
        if not self.paths:
            raise UserError(f"{pattern}: no token shards there; ./run.sh fetches what a preset "
                            "needs, and data/ has a script for each source")
        shards = [Shard(path, vocab_size) for path in self.paths]
        self.shards = shards        # in the order in which they are read
        if epochs > 1:
            generator = np.random.default_rng(seed)
            self.shards = [shards[number] for _ in range(epochs)
                           for number in generator.permutation(len(shards))]
        self.batch_tokens = batch_tokens
        self.sequence_tokens = sequence_tokens
        self.segment_tokens = segment_tokens or sequence_tokens
        self.num_lanes = batch_tokens // segment_tokens if segment_tokens else 1
        self.micro_steps = batch_tokens // (world_size * sequence_tokens)   # sequences of a rank
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)
        self.starts = {}    # where segments start, for each shard: [batches, segments]
        self.batches = []   # (shard, index within it) of each batch
        for shard in self.shards:
            if len(self.batches) >= batches_needed:
                break
            if shard not in self.starts:  # else it is a later epoch
                if align_documents:
                    starts = aligned_starts(shard, batch_tokens // sequence_tokens,
                                            sequence_tokens, document_token)
                else:
                    starts = lane_starts(shard, self.num_lanes, batch_tokens, self.segment_tokens,
                                         share)
                self.starts[shard] = starts
            self.batches += [(shard, index) for index in range(len(self.starts[shard]))]
        self.index = 0              # of the next batch: all that a checkpoint needs
        self.prefetched = {}        # {index: future}: a batch that is read in the background
        # a new thread's CUDA device is GPU 0, where pinning memory would create a context
        initializer = torch.cuda.set_device if self.device.type == "cuda" else None
        self.reader = ThreadPoolExecutor(1, "loader", initializer, (self.device,))

    def __len__(self) -> int:
        return len(self.batches)

    def next_batch(self, stride: int = 1) -> list[tuple[Tensor, Tensor]]:
        """(inputs, targets) of each micro-step, on the device; the next batch is read meanwhile.

        stride: how far the position moves; in validation the ranks take turns.
        """
        if self.index not in self.prefetched:
            self.prefetched[self.index] = self.reader.submit(self.read, self.index)
        host = self.prefetched.pop(self.index).result()
        tokens = host.to(self.device, non_blocking=True)
        self.index += stride
        if self.index < len(self):
            self.prefetched = {self.index: self.reader.submit(self.read, self.index)}
        # clone: a compiled graph would copy a slice, whose memory is not aligned, in every call
        return [(segments[:, :-1].clone().flatten(), segments[:, 1:].long().flatten())
                for segments in tokens]

    def read(self, index: int) -> Tensor:
        """This rank's part of a batch, on the host: int32 [micro-steps, segments, tokens + 1]."""
        shard, index_in_shard = self.batches[index]
        starts = self.starts[shard][index_in_shard].reshape(self.micro_steps, self.world_size, -1)
        starts = starts[:, self.rank]
        host = torch.empty((*starts.shape, self.segment_tokens + 1), dtype=torch.int32,
                           pin_memory=self.device.type == "cuda")
        tokens = host.numpy()
        for place, start in np.ndenumerate(starts):
            tokens[place] = shard.tokens(start, self.segment_tokens + 1)
        shard.release_pages()
        return host


def lane_starts(shard: Shard, num_lanes: int, batch_tokens: int, segment_tokens: int,
                share: float = 1.0) -> np.ndarray:
    """Where the segments of each batch start: [batches, segments].

    A shard is cut into lanes of equal length, and every batch takes the next batch_tokens /
    num_lanes tokens of each. There is one lane, or, with the hyperparameter segment_tokens, one for
    each segment of a batch. With 3:

        shard      lane 0             lane 1             lane 2             unused rest
                   AAAABBBBCCCC…      AAAABBBBCCCC…      AAAABBBBCCCC…      …
        batch 0    AAAA               AAAA               AAAA
        batch 1        BBBB               BBBB               BBBB

    Without lanes a small batch would be one article: training then needs twice the tokens for the
    same loss. Batches take the first `share` of each lane; the rest is for counting n-grams.
    """
    lane_tokens = tokens_per_lane(shard, num_lanes)
    taken = batch_tokens // num_lanes   # by a batch, of each lane
    num_batches = int(share * lane_tokens) // taken
    batch_offset = np.arange(num_batches)[:, None, None] * taken
    lane_offset = np.arange(num_lanes)[:, None] * lane_tokens
    segment_offset = np.arange(0, taken, segment_tokens)
    starts = batch_offset + lane_offset + segment_offset  # [batches, lanes, segments of a lane]
    return starts.reshape(num_batches, batch_tokens // segment_tokens)


def tokens_per_lane(shard: Shard, num_lanes: int) -> int:
    return max(0, shard.num_tokens - 1) // num_lanes    # the last token is only a target


def aligned_starts(shard: Shard, num_sequences: int, sequence_tokens: int,
                   document_token: int) -> np.ndarray:
    """Where the sequences of each batch start: [batches, sequences]. All start at a document.

    A sequence may end within a document; the next one starts at the first document after it. As in
    the system of 2025-07-13, a batch must find its sequences within twice its tokens, and what is
    left of a shard is not used if it is shorter.
    """
    documents = np.flatnonzero(shard.tokens(0, shard.num_tokens) == document_token)
    shard.release_pages()

    def first_document(position: int) -> int:
        """The first one at the position or after it; the end of the shard where there is none."""
        index = np.searchsorted(documents, position)
        return documents[index] if index < len(documents) else shard.num_tokens

    batches = []
    position = 0
    span = 2 * num_sequences * sequence_tokens
    while position + span + 1 < shard.num_tokens:  # 1: the last target
        end = position + span
        starts = []
        position = first_document(position)
        for _ in range(num_sequences):
            starts.append(position)
            position = first_document(position + sequence_tokens)
        if position >= end:
            raise UserError(f"{shard.path}: in {span} tokens from {end - span} on there are not "
                            f"{num_sequences} sequences that start at a document, and a document "
                            "after them; give --align_documents=false, or the --document_token "
                            "of its tokenizer")
        batches.append(starts)
    return np.array(batches, dtype=np.int64).reshape(-1, num_sequences)


class Data(NamedTuple):
    """What a run reads."""
    train: Loader
    val: Loader
    # for the log: text bytes per token of validation, sha256 by path; None without a manifest
    bytes_per_token: float | None
    hashes: dict


# ═══ 4  Masks and attention: causal ∧ same document ∧ within the window ═══════════════════════════

def window_at(hp: Hyperparameters, step: int) -> tuple[int, int]:
    """(window_tokens, window_blocks) of a step: two limits, and both apply.

    A query at position q sees the key at position k where q − k < window_tokens and
    q // BLOCK − k // BLOCK < window_blocks. With window_unit=token or block the other one is
    NO_LIMIT; token_in_block sets both.
    """
    tokens = hp.window_start + (hp.window_end - hp.window_start) * step / hp.num_steps
    unit = BLOCK if hp.window_unit == "block" else 64
    round_to_unit = math.ceil if hp.window_rounding == "up" else math.floor
    tokens = max(unit, round_to_unit(tokens / unit) * unit)
    blocks = math.ceil(tokens / BLOCK)
    by_tokens = hp.window_unit in ("token", "token_in_block")
    by_blocks = hp.window_unit in ("block", "token_in_block")
    return tokens if by_tokens else NO_LIMIT, blocks if by_blocks else NO_LIMIT


def short_window(window: Tensor) -> Tensor:
    """The window of the layers that have half of it."""
    return (window // 2).clamp(min=1)


def blocks_back(window_tokens: int, window_blocks: int) -> int:
    """How many blocks before its own a query looks into."""
    back_by_tokens = math.ceil((window_tokens - 1) / BLOCK)
    return max(0, min(window_blocks - 1, back_by_tokens))


def max_blocks_back(hp: Hyperparameters) -> int:
    """The largest blocks_back of the run."""
    return max(blocks_back(*window_at(hp, step)) for step in (0, hp.num_steps))


def document_ids(inputs: Tensor, document_token: int, segment_tokens: int) -> Tensor:
    """The index of each token's document, which also increases at the start of each segment."""
    starts = inputs == document_token
    if segment_tokens:
        starts = starts | (torch.arange(len(inputs), device=inputs.device) % segment_tokens == 0)
    return starts.cumsum(0, dtype=torch.int32)


def build_mask(documents: Tensor, window: Tensor, hardware: Hardware,
               band_blocks: int) -> Tensor | BlockMask:
    """What attend takes: a BlockMask for FlexAttention, a bias of 0 and −∞ for banded attention.

    documents: document_ids of the sequence. window: int32 (tokens, blocks) of window_at.
    band_blocks: max_blocks_back of the run, for compiled graphs, whose sizes are static.
    """
    if hardware.attention == "flex":
        return flex_block_mask(documents, window)
    if documents.device.type == "cpu" and not torch.compiler.is_compiling():
        band_blocks = blocks_back(*window.tolist())  # only as many as this step needs
    return band_bias(documents, window, min(band_blocks, len(documents) // BLOCK - 1))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask,
           scale: float | None = None) -> Tensor:
    """Softmax attention under the mask; everything is [tokens, heads, head_dim].

    scale: the factor on q·k; None: 1/√head_dim.
    """
    if isinstance(mask, BlockMask):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = flex_attention(q, k, v, block_mask=mask, scale=scale)
        return out.squeeze(0).transpose(0, 1)  # squeeze: the backward pass of [0] would copy
    span = mask.size(-1)
    queries = q.view(-1, BLOCK, *q.shape[1:]).transpose(1, 2)  # [blocks, heads, BLOCK, head_dim]
    out = F.scaled_dot_product_attention(queries, key_bands(k, span), key_bands(v, span),
                                         attn_mask=mask.type_as(q), scale=scale)
    return out.transpose(1, 2).reshape(q.shape)


# ── FlexAttention ─────────────────────────────────────────────────────────────────────────────────

def flex_block_mask(documents: Tensor, window: Tensor) -> BlockMask:
    """For each block of queries, the blocks of keys that it sees in part, and those in full."""
    window_tokens, window_blocks = window.unbind()
    # [blocks]: the document of a block's first token, and of its last
    first_document = documents.view(-1, BLOCK)[:, 0].contiguous()
    last_document = documents.view(-1, BLOCK)[:, -1].contiguous()
    block = torch.arange(len(first_document), dtype=torch.int32, device=documents.device)
    # [query block, key block]: how many blocks and how many tokens the key is before the query
    distance = block[:, None] - block
    min_distance = (distance - 1) * BLOCK + 1
    max_distance = (distance + 1) * BLOCK - 1
    in_window = (distance >= 0) & (distance < window_blocks)
    # some query sees some key: they share a document, since document ids never decrease
    visible = in_window & (min_distance < window_tokens)
    visible = visible & (first_document[:, None] <= last_document)
    # every query sees every key: an earlier block, of one document from first key to last query
    full = in_window & (distance > 0) & (max_distance < window_tokens)
    full = full & (last_document[:, None] == first_document)

    def as_list(wanted: Tensor) -> tuple[Tensor, Tensor]:
        """For each query block: how many key blocks are wanted, and all of them, wanted ones first.
        """
        count = wanted.sum(dim=-1, dtype=torch.int32)
        indices = wanted.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
        return count[None, None].contiguous(), indices[None, None].contiguous()

    def mask_mod(batch, head, query, key):  # within blocks that are seen in part
        same_document = documents[query] == documents[key]
        return (query >= key) & same_document & (query - key < window_tokens)

    return BlockMask.from_kv_blocks(*as_list(visible & ~full), *as_list(full), BLOCK,
                                    mask_mod=mask_mod)


# ── banded attention: each block of queries with its own block of keys and those before it ────────

def band_bias(documents: Tensor, window: Tensor, band_blocks: int) -> Tensor:
    """0 where a query sees a key, −∞ elsewhere: [blocks, 1, BLOCK, span], linear in the sequence.

    The span of a block of queries is that block itself and the `band_blocks` blocks before it.
    """
    span = (band_blocks + 1) * BLOCK
    key = torch.arange(span, device=documents.device)  # positions within the span
    query = key[-BLOCK:, None]                         # its last block
    in_window = (query >= key) & (query - key < window[0])
    in_window = in_window & (query // BLOCK - key // BLOCK < window[1])
    key_documents = F.pad(documents, (span - BLOCK, 0), value=-1).unfold(0, span, BLOCK)
    same_document = documents.view(-1, BLOCK, 1) == key_documents[:, None]  # [blocks, BLOCK, span]
    return torch.where(in_window & same_document, 0.0, -math.inf)[:, None]


def key_bands(x: Tensor, span: int) -> Tensor:
    """The keys (or values) of each block of queries: [blocks, heads, span, head_dim], a view.

    x: [tokens, heads, head_dim]. Spans overlap, and zeros stand before the first token.
    """
    return F.pad(x, (0, 0, 0, 0, span - BLOCK, 0)).unfold(0, span, BLOCK).transpose(2, 3)


# ═══ 5  Model: a U-Net of transformer blocks over one long sequence (batch size 1) ════════════════

# ── what differs between layers: each is a name or the tuple itself ───────────────────────────────

def layers_without_attention(hp: Hyperparameters) -> tuple:
    second_decoder = min(hp.num_layers // 2 + 1, hp.num_layers - 1)
    named = {"none": (), "second_decoder": (second_decoder,)}
    return named.get(hp.no_attention, hp.no_attention)


def layers_with_short_window(hp: Hyperparameters) -> tuple:
    last = hp.num_layers - 1
    third = hp.num_layers // 3
    inner = {*range(hp.num_layers)} - {0, third, last - third, last}
    named = {"none": (), "inner": tuple(sorted(inner))}
    return named.get(hp.short_window_layers, hp.short_window_layers)


def table_of_layer(hp: Hyperparameters) -> tuple:
    """The index of each layer's table of value embeddings, or None."""
    layers = hp.num_layers
    half = layers // 2
    ends = max(1, layers // 4)
    named = {
        "none": (None,) * layers,
        "per_layer": tuple(range(layers)),
        # of 12 layers: 0 1 2 3 4 5 5 4 3 2 1 0
        "mirrored": (*range(half), *reversed(range(half)), *(None,) * (layers % 2)),
        # of 12 layers: 0 1 2 − − − − − − 0 1 2
        "ends": (*range(ends), *(None,) * (layers - 2 * ends), *range(ends))}
    layout = named.get(hp.value_layout, hp.value_layout)
    # a layer without attention uses no table; those that are used are renumbered from 0
    used = [None if layer in layers_without_attention(hp) else table
            for layer, table in enumerate(layout)]
    tables = sorted({*used} - {None})
    return tuple(None if table is None else tables.index(table) for table in used)


# ── its parts ─────────────────────────────────────────────────────────────────────────────────────

def norm(x: Tensor, eps: float = 0.0) -> Tensor:
    """RMS norm without weights; eps=0: torch.finfo(x.dtype).eps."""
    return F.rms_norm(x, (x.size(-1),), eps=eps or None)


class Linear(nn.Linear):
    """Without bias; the weight stays fp32 for the optimizer and is cast where it is used."""

    def __init__(self, in_features: int, out_features: int, bound: float = 1.0, zero: bool = False):
        """The weight starts uniform in ±bound/√in_features, or at zero."""
        super().__init__(in_features, out_features, bias=False)
        with torch.no_grad():
            self.weight *= bound  # nn.Linear starts uniform in ±1/√in_features
        if zero:  # a block starts as the identity, the head as the uniform distribution
            nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.type_as(x))


class Rotary(nn.Module):
    """Rotary position embedding (arxiv.org/abs/2104.09864) of a fraction of the dimensions."""

    def __init__(self, head_dim: int, max_tokens: int, base: float, fraction: float,
                 endpoint: bool):
        super().__init__()
        pairs = head_dim // 2
        num_rotated = max(1, round(pairs * fraction))
        if endpoint:
            exponents = torch.linspace(0, 1, num_rotated)
        else:
            exponents = torch.arange(num_rotated) / num_rotated
        # frequency 0: the other pairs are not rotated
        frequencies = F.pad((1 / base) ** exponents, (0, pairs - num_rotated))
        angles = torch.outer(torch.arange(max_tokens, dtype=torch.float32), frequencies)
        self.register_buffer("cos", angles.cos()[:, None], persistent=False)  # [tokens, 1, pairs]
        self.register_buffer("sin", angles.sin()[:, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        cos = self.cos[:x.size(0)]
        sin = self.sin[:x.size(0)]
        first, second = x.to(cos.dtype).chunk(2, dim=-1)
        rotated = torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)
        return rotated.type_as(x)


class Attention(nn.Module):
    """Causal self-attention; its values are mixed with a value embedding of the token."""

    def __init__(self, hp: Hyperparameters, rotary: Rotary):
        super().__init__()
        self.num_heads = hp.num_heads
        self.norm_eps = hp.norm_eps
        self.scale = hp.attention_scale or None
        self.rotary = rotary
        self.query = Linear(hp.model_dim, hp.model_dim, hp.init_bound)
        self.key = Linear(hp.model_dim, hp.model_dim, hp.init_bound)
        self.value = Linear(hp.model_dim, hp.model_dim, hp.init_bound)
        self.output = Linear(hp.model_dim, hp.model_dim, zero=True)
        self.value_mix = nn.Parameter(torch.tensor([0.5, 0.5] if hp.value_lambdas == 2 else 0.5))

    def mix_values(self, v: Tensor, value_embedding: Tensor | None) -> Tensor:
        """The stream's values with those of a value table, or of the first layer."""
        if self.value_mix.ndim == 0:  # value_lambdas=1
            # v mixed with itself is v, and value_mix has the gradient, of zero, that DDP needs
            other = v if value_embedding is None else value_embedding
            return torch.lerp(v, other, self.value_mix.type_as(v))
        own_weight, embedding_weight = self.value_mix.type_as(v)
        if value_embedding is None:
            return own_weight * v
        return own_weight * v + embedding_weight * value_embedding

    def forward(self, x: Tensor, value_embedding: Tensor | None,
                mask: Tensor | BlockMask) -> tuple[Tensor, Tensor]:
        """Returns the output and this layer's own values, for first_layer_values."""
        # three parameters, since Muon orthogonalizes each alone, but one matmul
        weights = [project.weight.type_as(x) for project in (self.query, self.key, self.value)]
        qkv = F.linear(x, torch.cat(weights))
        q, k, v = qkv.view(len(x), 3, self.num_heads, -1).unbind(1)
        q = self.rotary(norm(q, self.norm_eps))  # QK-norm: attention logits cannot run away
        k = self.rotary(norm(k, self.norm_eps))
        attended = attend(q, k, self.mix_values(v, value_embedding), mask, self.scale)
        return self.output(attended.reshape(x.shape)), v


class ReluSquared(torch.autograd.Function):
    """With a backward pass in one sweep: a laptop step takes 5 to 8 % less time."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = F.relu(x)
        ctx.save_for_backward(y)
        return y.square()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        y, = ctx.saved_tensors
        return torch.addcmul(grad.new_zeros(()), grad, y, value=2)  # 2 · grad · y


def relu_squared(x: Tensor) -> Tensor:
    """ReLU²: arxiv.org/abs/2109.08668"""
    if torch.compiler.is_compiling():  # Inductor fuses this form with the matmuls
        return F.relu(x).square()
    return ReluSquared.apply(x)


class Block(nn.Module):
    """Attention and MLP on a learned mix of the stream and of x0, the embedding."""

    def __init__(self, hp: Hyperparameters, layer: int, rotary: Rotary):
        super().__init__()
        has_attention = layer not in layers_without_attention(hp)
        self.norm_eps = hp.norm_eps
        self.attention = Attention(hp, rotary) if has_attention else None
        self.up = Linear(hp.model_dim, hp.mlp_ratio * hp.model_dim, hp.init_bound)
        self.down = Linear(hp.mlp_ratio * hp.model_dim, hp.model_dim, zero=True)
        self.mix = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x: Tensor, x0: Tensor, value_embedding: Tensor | None,
                mask: Tensor | BlockMask) -> tuple[Tensor, Tensor | None]:
        stream_weight, x0_weight = self.mix.type_as(x)
        x = stream_weight * x + x0_weight * x0
        values = None
        if self.attention is not None:
            attended, values = self.attention(norm(x, self.norm_eps), value_embedding, mask)
            x = x + attended
        hidden = relu_squared(self.up(norm(x, self.norm_eps)))
        return x + self.down(hidden), values


# ── the whole model ───────────────────────────────────────────────────────────────────────────────

class GPT(nn.Module):
    """Blocks that encode, then blocks that decode and take the encoder's outputs in reverse."""

    def __init__(self, hp: Hyperparameters, hardware: Hardware | None = None, micro_steps: int = 1):
        """micro_steps: of an optimizer step, for the scale of FP8 gradients."""
        super().__init__()
        self.hp = hp
        self.hardware = hardware or Hardware()
        self.micro_steps = micro_steps
        self.dtype = self.hardware.dtype
        self.loss_dtype = torch.promote_types(self.dtype, torch.float32)
        self.band_blocks = max_blocks_back(hp)
        # computed here, since Dynamo cannot trace these functions
        self.table_of_layer = table_of_layer(hp)
        self.short_layers = layers_with_short_window(hp)
        num_tables = len({*self.table_of_layer} - {None})
        rows = hp.padded_vocab if hp.pad_embeddings else hp.vocab_size
        rotary = Rotary(hp.model_dim // hp.num_heads,
                        max(hp.sequence_tokens, hp.val_sequence_tokens), hp.rotary_base,
                        hp.rotary_fraction, hp.rotary_endpoint)
        self.embed = nn.Embedding(rows, hp.model_dim)
        self.value_embeds = nn.ModuleList(nn.Embedding(rows, hp.model_dim)
                                          for _ in range(num_tables))
        self.blocks = nn.ModuleList(Block(hp, layer, rotary) for layer in range(hp.num_layers))
        # with odd layers the last one has no skip
        self.skip_weights = nn.Parameter(torch.ones(hp.num_layers - hp.num_layers // 2))
        self.head = Linear(hp.model_dim, hp.padded_vocab, zero=True)
        self.suggestions = None
        if hp.ngram_order or hp.copy_lengths:
            self.suggestions = Suggestions(hp)  # section 11
        if hp.bf16_embeddings and self.dtype == torch.bfloat16:
            self.embed.bfloat16()
            self.value_embeds.bfloat16()
        if self.dtype == torch.float64:
            self.double()

    def forward(self, inputs: Tensor, targets: Tensor | None, window: Tensor) -> Tensor:
        """Mean loss of the tokens, or logits without targets. window: of window_tensor."""
        assert inputs.ndim == 1 and inputs.size(0) % BLOCK == 0, "one sequence of whole blocks"
        hp = self.hp
        num_encoder_layers = hp.num_layers // 2
        segment_tokens = hp.segment_tokens if self.training else 0  # validation is contiguous
        documents = document_ids(inputs, hp.document_token, segment_tokens)
        mask = build_mask(documents, window, self.hardware, self.band_blocks)
        short_mask = mask
        if self.short_layers:
            short_mask = build_mask(documents, short_window(window), self.hardware,
                                    self.band_blocks)
        x = self.embed(inputs).to(self.dtype)
        if self.suggestions is not None:
            # the n-grams' probabilities and the copies are added here and to the logits
            x, probs, copies = self.suggestions.add_to_embedding(x, inputs, documents)
        x0 = norm(x, hp.norm_eps)
        x = x0
        value_embeddings = [embed(inputs).to(self.dtype).view(len(x), hp.num_heads, -1)
                            for embed in self.value_embeds]
        skips = []
        first_values = None
        for layer, block in enumerate(self.blocks):
            if layer >= num_encoder_layers and skips:
                # U-Net: the encoder's outputs, last in first out
                skip_weight = self.skip_weights[layer - num_encoder_layers].type_as(x)
                x = x + skip_weight * skips.pop()
            table = self.table_of_layer[layer]
            # first_values: None without first_layer_values
            value_embedding = first_values if table is None else value_embeddings[table]
            layer_mask = short_mask if layer in self.short_layers else mask
            x, values = block(x, x0, value_embedding, layer_mask)
            if hp.first_layer_values and first_values is None:
                first_values = values  # value residual: arxiv.org/abs/2410.17897
            if layer < num_encoder_layers:
                skips.append(x)
        x = norm(x, hp.norm_eps)
        logits = self.head_logits(x)
        if self.suggestions is not None:
            logits = self.suggestions.add_to_logits(logits, x, probs, copies)
        return logits if targets is None else F.cross_entropy(logits, targets)

    def head_logits(self, x: Tensor) -> Tensor:
        """The head's output, scaled and capped; in training with fp8_head in FP8 (section 11)."""
        hp = self.hp
        # fit_to_hardware sets fp8_head=False on GPUs without FP8; a CPU emulates it
        if hp.fp8_head and self.training and self.dtype != torch.float64:
            # after a norm no entry of x exceeds √model_dim; the largest number in e4m3 is 448
            x_scale = hp.fp8_x_scale or 448 / hp.model_dim**0.5
            # the loss is a mean over micro-steps, and over tokens without sum_loss
            grad_scale = hp.fp8_grad_scale * self.micro_steps
            if not hp.sum_loss:
                grad_scale *= len(x)
            logits = Float8Matmul.apply(x, self.head.weight, x_scale, hp.fp8_weight_scale,
                                        grad_scale)
        else:
            logits = self.head(x)
        logits = logits.to(self.loss_dtype)
        if hp.logit_scale != 1:
            logits = logits * (hp.logit_scale or hp.model_dim**-0.5)
        if hp.softcap:
            # [None]: else Inductor fuses tanh into the softmax and reads the logits three times
            logits = (hp.softcap * torch.tanh(logits[None] / hp.softcap)).squeeze(0)
        return logits


# ═══ 6  Muon and schedules ════════════════════════════════════════════════════════════════════════

def newton_schulz(matrices: Tensor, steps: int = 5) -> Tensor:
    """Bring the singular values of each matrix near 1; keep its singular vectors.

    The matrices [..., rows, columns] have at least as many columns as rows, which makes the Gram
    matrix X @ X.mT the smaller of the two.

    A quintic that is as steep as possible at zero: five steps lift every singular value above 0.01
    of the norm to about [0.7, 1.15], which trains as well as exact orthogonality.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    X = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * (A @ A)) @ X
    return X


def orthogonal_updates(grads: list[Tensor], buffers: list[Tensor], momentum: Tensor,
                       grad_weight: Tensor, lerp: bool, nesterov: bool, steps: int,
                       dtype: torch.dtype) -> Tensor:
    """Update the momentum buffers. Returns the orthogonalized updates, stacked, rows ≤ columns.

    buffer ← momentum · buffer + grad_weight · grad with lerp, momentum · buffer + grad without.
    grad_weight: 1 − momentum, which the caller computes in double precision.
    """
    for grad, buffer in zip(grads, buffers):
        if lerp:
            buffer.lerp_(grad, grad_weight)
        else:
            buffer.mul_(momentum).add_(grad)
    directions = buffers
    if nesterov and lerp:
        directions = [grad.lerp(buffer, momentum) for grad, buffer in zip(grads, buffers)]
    elif nesterov:
        directions = [torch.addcmul(grad, buffer, momentum) for grad, buffer in zip(grads, buffers)]
    wide = torch.stack([x.mT if x.size(0) > x.size(1) else x for x in directions])
    return newton_schulz(wide.to(dtype), steps)


def apply_updates(params: list[Tensor], updates: Tensor, rate: Tensor, decay: float,
                  found_inf: Tensor | None) -> None:
    """p −= rate · (decay · p + scale · update), with one call for each shape.

    There may be more updates than parameters, the padding of Muon.own_params: zip drops it.
    """
    if found_inf is not None:  # above 0 where a loss or a gradient is not finite: skip the update
        updates = torch.where(found_inf > 0, 0.0, updates)  # 0 · NaN would be NaN
        rate = torch.where(found_inf > 0, 0.0, rate)        # for the weight decay
    # by shape: Inductor fuses _foreach_addcmul_ only if all tensors have the same factor
    for shape in dict.fromkeys(p.shape for p in params):
        same_shape = [p for p in params if p.shape == shape]
        their_updates = [update if shape == update.shape else update.mT
                         for p, update in zip(params, updates) if p.shape == shape]
        rates = [rate] * len(same_shape)
        if decay:
            torch._foreach_addcmul_(same_shape, same_shape, rates, -decay)
        torch._foreach_addcmul_(same_shape, their_updates, rates, -update_scale(same_shape[0]))


def update_scale(p: Tensor) -> float:
    """Factor on the rate: √(rows / columns) where a matrix has more rows than columns."""
    return max(1, p.size(0) / p.size(1)) ** 0.5


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized by Newton–Schulz (https://kellerjordan.github.io/posts/muon).

    Parameters of the same shape, or transposed, form a group. Each rank keeps the momentum of its
    share of a group, and orthogonalizes that share. An asynchronous all-gather exchanges the
    updates of a group while the next one is computed, and while Adam runs between start_updates
    and finish_updates: the largest matrices come first. One rank needs no process group.
    """

    def __init__(self, params, lr=0.05, momentum=0.95, nesterov=True, lerp=True, weight_decay=0.0,
                 steps=5, rank=0, world_size=1, dtype=torch.float32, compiled=False):
        params = list(params)
        assert all(p.ndim == 2 for p in params), "Muon takes matrices only"
        self.rank = rank
        self.world_size = world_size
        self.dtype = dtype
        self.compiled = compiled
        self.orthogonal_updates = orthogonal_updates
        self.apply_updates = apply_updates
        if compiled:
            options = dict(dynamic=False, fullgraph=True)
            self.orthogonal_updates = torch.compile(orthogonal_updates, **options)
            self.apply_updates = torch.compile(apply_updates, **options)
        # by sorted shape: 768×3072 and 3072×768 are one group
        shapes = sorted({tuple(sorted(p.shape)) for p in params}, key=math.prod, reverse=True)
        groups = [dict(params=[p for p in params if tuple(sorted(p.shape)) == shape])
                  for shape in shapes]
        super().__init__(groups, dict(lr=lr, momentum=momentum, nesterov=nesterov, lerp=lerp,
                                      steps=steps, weight_decay=weight_decay))
        for p in self.all_own_params():
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        self.found_inf = None   # as of fused Adam; a tensor above 0: no parameter changes

    def params_per_rank(self, group: dict) -> int:
        return math.ceil(len(group["params"]) / self.world_size)

    def own_params(self, group: dict) -> list[Tensor]:
        """This rank's share of a group, padded with its first parameters so that all are equal."""
        params = group["params"]
        share = self.params_per_rank(group)
        first = self.rank * share
        return [params[number % len(params)] for number in range(first, first + share)]

    def all_own_params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in self.own_params(group)]

    def step(self) -> None:
        """Both phases, for a use with nothing to do in between."""
        self.finish_updates(self.start_updates())

    @torch.no_grad()
    def start_updates(self) -> list[tuple]:
        """Compute this rank's updates and start to gather those of all ranks.

        Returns (group, the updates of all ranks, the handle to wait for) of each group.
        """
        started = []
        for group in self.param_groups:
            own = self.own_params(group)
            grads = [p.grad for p in own]
            buffers = [self.state[p]["momentum_buffer"] for p in own]
            momentum = self.as_tensor(group["momentum"], own[0])
            grad_weight = self.as_tensor(1 - group["momentum"], own[0])
            updates = self.orthogonal_updates(grads, buffers, momentum, grad_weight, group["lerp"],
                                              group["nesterov"], group["steps"], self.dtype)
            handle = None
            if self.world_size > 1:
                own_updates = updates.contiguous()  # a compiled stack of one matrix may be a view
                updates = updates.new_empty(self.world_size * len(own), *updates.shape[1:])
                handle = dist.all_gather_single(updates, own_updates, async_op=True)
            started.append((group, updates, handle))
        return started

    @torch.no_grad()
    def finish_updates(self, started: list[tuple]) -> None:
        """Apply what start_updates returned."""
        for group, updates, handle in started:
            if handle:
                handle.wait()
            rate = self.as_tensor(group["lr"], group["params"][0])
            self.apply_updates(group["params"], updates, rate, group["weight_decay"],
                               self.found_inf)

    def as_tensor(self, value: float, p: Tensor) -> Tensor:
        """A scalar tensor: a compiled function would specialize on a Python number.

        When compiled it stays on the host, which takes no copy to the GPU.
        """
        return torch.tensor(value, dtype=p.dtype, device=None if self.compiled else p.device)

    @torch.no_grad()
    def state_dict(self) -> dict:
        """With the momentum of all ranks. A collective."""
        state = super().state_dict()
        owners = [(p, number // self.params_per_rank(group)) for group in self.param_groups
                  for number, p in enumerate(group["params"])]
        for index, (p, owner) in enumerate(owners):
            # received from its owner where it is not our own
            buffer = self.state[p]["momentum_buffer"] if p in self.state else torch.empty_like(p)
            if self.world_size > 1:
                dist.broadcast(buffer, owner)
            state["state"][index] = dict(momentum_buffer=buffer)
        return state

    def load_state_dict(self, state: dict) -> None:
        """Of a run with any number of ranks; keeps the momentum of this rank's share."""
        super().load_state_dict(state)
        for p in self.state.keys() - set(self.all_own_params()):
            del self.state[p]


# ── schedules: pure functions of the step ─────────────────────────────────────────────────────────

def rate_at(hp: Hyperparameters, step: int) -> float:
    """Factor on every learning rate: 1, then linearly to the floor over the cool-down."""
    cooldown_steps = hp.cooldown if hp.cooldown > 1 else hp.cooldown * hp.num_steps
    left = min(1.0, (hp.num_steps - step) / cooldown_steps) if cooldown_steps else 1.0
    return left + hp.rate_floor * (1 - left)


def momentum_at(hp: Hyperparameters, step: int) -> float:
    done = min(1.0, step / hp.muon_warmup_steps) if hp.muon_warmup_steps else 1.0
    return (1 - done) * hp.muon_momentum_start + done * hp.muon_momentum


def adam_eps_at(hp: Hyperparameters, step: int) -> float:
    """PyTorch adds eps after the bias correction of the second moment, adam_eps_first before it."""
    if not hp.adam_eps_first:
        return hp.adam_eps
    return hp.adam_eps / math.sqrt(1 - hp.adam_beta2 ** (step + 1))


def set_schedules(hp: Hyperparameters, step: int, adam: torch.optim.Adam, muon: Muon) -> None:
    """Set the rates, Adam's eps and Muon's momentum of a step."""
    rate = rate_at(hp, step)
    for group in (*adam.param_groups, *muon.param_groups):
        group["lr"] = group["base_lr"] * rate
    for group in adam.param_groups:
        group["eps"] = adam_eps_at(hp, step)
    for group in muon.param_groups:
        group["momentum"] = momentum_at(hp, step)


def window_tensor(hp: Hyperparameters, step: int) -> Tensor:
    """window_at as a tensor, so that a change recompiles nothing."""
    return torch.tensor(window_at(hp, step), dtype=torch.int32)


# ── which parameter goes where ────────────────────────────────────────────────────────────────────

def base_rates(hp: Hyperparameters) -> dict[str, float]:
    return dict(embed=hp.embed_rate, head=hp.head_rate, scalar=hp.scalar_rate, muon=hp.muon_rate)


def is_embedding(name: str) -> bool:
    """Whether a parameter is an embedding; Trainer.reduce_embeddings averages their gradients."""
    return "embed" in name


def optimizer_groups(model: GPT) -> dict[str, dict[str, Tensor]]:
    """The parameters of each group by name: every parameter is in exactly one."""
    groups = dict(embed={}, head={}, scalar={}, muon={})
    for name, p in model.named_parameters():
        if is_embedding(name):
            kind = "embed"
        elif name.startswith(("head.", "suggestions.")):  # and the gates of the suggestions
            kind = "head"
        elif p.ndim < 2:
            kind = "scalar"
        elif p.ndim == 2 and name.startswith("blocks."):
            kind = "muon"
        else:
            raise UserError(f"parameter {name} has no optimizer; give it one in optimizer_groups")
        groups[kind][name] = p
    return groups


def build_optimizers(hp: Hyperparameters, model: GPT,
                     hardware: Hardware) -> tuple[torch.optim.Adam, Muon]:
    """Adam and Muon. set_schedules sets lr, eps and momentum in each step, lr from base_lr."""
    groups = optimizer_groups(model)
    rates = base_rates(hp)
    adam_groups = [dict(params=list(groups[kind].values()), base_lr=rates[kind])
                   for kind in ("embed", "head", "scalar")]
    adam = torch.optim.Adam(adam_groups, betas=(hp.adam_beta1, hp.adam_beta2), fused=True)
    muon = Muon(groups["muon"].values(), momentum=hp.muon_momentum, nesterov=hp.muon_nesterov,
                lerp=hp.muon_lerp, weight_decay=hp.muon_decay, steps=hp.muon_steps,
                rank=hardware.rank, world_size=hardware.world_size, dtype=hardware.muon_dtype,
                compiled=hardware.compile and hardware.device.type == "cuda")
    for group in muon.param_groups:
        group["base_lr"] = rates["muon"]
    return adam, muon


# ═══ 7  The step and the loop ═════════════════════════════════════════════════════════════════════

def wrap_ddp(model: nn.Module, hardware: Hardware, bucket_mb: int = 108) -> nn.Module:
    """DDP averages the gradients over the ranks, in buckets, during the backward pass.

    Those of the embeddings are ready last: Trainer.reduce_embeddings averages them, during
    Newton–Schulz. Dynamo splits the graph at each bucket and cannot fuse across splits: 108 MB are
    four layers of h100.
    """
    if hardware.world_size == 1:
        return model
    embeddings = [name for name, _ in model.named_parameters() if is_embedding(name)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, embeddings)
    device_ids = [hardware.device] if hardware.device.type == "cuda" else None
    # init_sync=False: all ranks start from the same seed, and check_ranks_agree compares them
    return DistributedDataParallel(model, device_ids=device_ids, init_sync=False,
                                   forward_sync_buffers=False, gradient_as_bucket_view=True,
                                   bucket_cap_mb=bucket_mb)


class Clock:
    """Milliseconds of wall time by kind of work; waits for the device at each change."""

    def __init__(self, device: torch.device):
        self.device = device
        self.ms = dict(warmup=0.0, train=0.0, val=0.0)
        self.kind = None

    def switch(self, kind: str | None) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.ms = self.now()
        self.kind = kind
        self.started = time.perf_counter()

    def now(self) -> dict[str, float]:
        ms = dict(self.ms)
        if self.kind:
            ms[self.kind] += 1000 * (time.perf_counter() - self.started)
        return ms


class QueuedStep(NamedTuple):
    """A step whose metrics the host has not read yet."""
    step: int
    metrics: Tensor                     # of Trainer.sum_metrics, on the host
    copied: torch.cuda.Event | None     # recorded after the copy; None: nothing was copied


class Trainer:
    """The state of a training run, and one step of it."""

    def __init__(self, hp: Hyperparameters, hardware: Hardware, data: Data):
        self.hp = hp
        self.hardware = hardware
        self.data = data
        torch.manual_seed(hp.seed)
        self.model = GPT(hp, hardware, data.train.micro_steps).to(hardware.device)
        self.window = torch.zeros(2, dtype=torch.int32, device=hardware.device)
        self.adam, self.muon = build_optimizers(hp, self.model, hardware)
        # three wrappers of the same parameters: ddp_model trains, compiled_model validates, and
        # model has them under their plain names, for checkpoints
        self.compiled_model = self.model
        if hardware.compile:
            self.compiled_model = torch.compile(self.model, dynamic=False, fullgraph=True)
        self.ddp_model = wrap_ddp(self.compiled_model, hardware)
        self.clock = Clock(hardware.device)
        self.stop_requested = False     # by a signal to this rank
        self.stopping = False           # all ranks learn it in the same step
        self.diverged = torch.zeros((), dtype=torch.bool, device=hardware.device)
        self.unread = collections.deque()   # a QueuedStep for each step that read_losses has left

    def step(self, batch: list[tuple[Tensor, Tensor]], step: int) -> None:
        """One optimizer step; `step` counts from 0. read_losses reads its loss later.

        Once a loss or a gradient is not finite, no step changes a weight, and read_losses raises.
        """
        set_schedules(self.hp, step, self.adam, self.muon)
        self.window.copy_(window_tensor(self.hp, step), non_blocking=True)
        mean_loss = self.accumulate_gradients(batch)
        reductions = self.reduce_embeddings()       # meanwhile Newton–Schulz computes
        muon_updates = self.muon.start_updates()    # their all-gathers run while Adam computes
        for work in reductions:
            work.wait()
        metrics = self.sum_metrics(mean_loss)
        self.queue_metrics(step, metrics)
        self.diverged |= (0 * metrics.sum()).isnan()    # if any is not finite: 0 · ∞ is NaN
        found_inf = self.diverged.float()
        self.adam.found_inf = found_inf  # at 1 fused Adam changes nothing
        self.muon.found_inf = found_inf
        self.adam.step()
        self.muon.finish_updates(muon_updates)
        self.model.zero_grad(set_to_none=True)

    def accumulate_gradients(self, batch: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Forward and backward passes of the micro-steps. Returns their mean loss."""
        mean_loss = torch.zeros((), dtype=self.model.loss_dtype, device=self.hardware.device)
        for micro_step, (inputs, targets) in enumerate(batch, 1):
            accumulate_only = micro_step < len(batch) and self.hardware.world_size > 1
            context = self.ddp_model.no_sync() if accumulate_only else contextlib.nullcontext()
            with context:
                loss = self.ddp_model(inputs, targets, self.window) / len(batch)
                mean_loss += loss.detach()
                if self.hp.sum_loss:  # over a sequence's tokens; a mean over micro-steps and ranks
                    loss = loss * self.hp.sequence_tokens
                loss.backward()
        return mean_loss

    def reduce_embeddings(self) -> list:
        """Start to average the gradients that wrap_ddp leaves out. Returns handles to wait for."""
        if self.hardware.world_size == 1:
            return []
        return [dist.all_reduce(p.grad, dist.ReduceOp.AVG, async_op=True)
                for name, p in self.model.named_parameters() if is_embedding(name)]

    def sum_metrics(self, mean_loss: Tensor) -> Tensor:
        """Sums over the ranks of [loss, requests to stop, largest gradient norm, its parameter].

        The gradients are averaged by now, so the last two are the same on all ranks.
        """
        norms = torch.stack(torch._foreach_norm([p.grad for p in self.model.parameters()]))
        largest_norm, largest = norms.max(dim=0)  # NaN counts as the largest
        stop = torch.full_like(mean_loss, self.stop_requested)
        metrics = torch.stack([value.type_as(mean_loss)
                               for value in (mean_loss, stop, largest_norm, largest)])
        if self.hardware.world_size > 1:
            dist.all_reduce(metrics)  # on CUDA the host does not wait for it
        return metrics

    def queue_metrics(self, step: int, metrics: Tensor) -> None:
        """Start to copy the metrics of a step to the host, for read_losses."""
        copied = None
        if self.hardware.device.type == "cuda":
            on_device = metrics
            metrics = torch.empty_like(on_device, device="cpu", pin_memory=True)
            metrics.copy_(on_device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self.unread.append(QueuedStep(step, metrics, copied))

    def read_losses(self, keep: int = 0) -> dict[int, float]:
        """Read all queued steps but the last `keep`; all of them once a rank asks to stop.

        Returns {steps done: mean loss}.
        """
        world_size = self.hardware.world_size
        losses = {}
        while len(self.unread) > keep:
            queued = self.unread.popleft()
            if queued.copied:
                wait_until(queued.copied.query, self.hardware)  # section 12
            loss_sum, stops, norm_sum, index_sum = queued.metrics.tolist()
            loss = loss_sum / world_size
            steps_done = queued.step + 1
            if not math.isfinite(loss + norm_sum):
                reason = "all gradients are finite"
                if not math.isfinite(norm_sum):
                    names = [name for name, _ in self.model.named_parameters()]
                    name = names[round(index_sum / world_size)]
                    reason = f"gradient of {name} is not finite"
                raise not_finite_error(self, steps_done, f"the loss of step {steps_done} is {loss}",
                                       reason)
            losses[steps_done] = loss
            if stops > 0:
                self.stopping = True
                keep = 0
        return losses

    def state_dict(self) -> dict:
        """All that the rest of the training depends on. A collective: Muon gathers its momentum."""
        return dict(model=self.model.state_dict(), adam=self.adam.state_dict(),
                    muon=self.muon.state_dict(), batch_index=self.data.train.index,
                    rng_state=torch.random.get_rng_state())

    def load_state_dict(self, state: dict) -> None:
        """The state of a run with any number of ranks; rates and other settings stay our own."""
        self.model.load_state_dict(state["model"])
        for optimizer, saved in ((self.adam, state["adam"]), (self.muon, state["muon"])):
            groups = [dict(group) for group in optimizer.param_groups]
            optimizer.load_state_dict(saved)
            for group, ours in zip(optimizer.param_groups, groups):
                group.update(ours)
        self.data.train.index = state["batch_index"]
        torch.random.set_rng_state(state["rng_state"])


@dataclass
class Run:
    """Where a run writes, and the checkpoint that it resumes from."""
    folder: Path
    checkpoint: dict | None = None
    log_sizes: dict = field(default_factory=dict)   # of the logs at the checkpoint
    notes: list[str] = field(default_factory=list)  # for the log
    # of this file, for the log: read at the start, since it may be edited during the run
    source: str = field(default_factory=lambda: Path(__file__).read_text("utf-8"))


def train(hp: Hyperparameters, hardware: Hardware, data: Data, run: Run) -> int:
    """The whole run. Returns the exit code: 0, or 128 + the signal that stopped it."""
    join_group(hardware)
    trainer = Trainer(hp, hardware, data)
    clock = trainer.clock
    start_step = restore(trainer, run.checkpoint) if run.checkpoint else 0
    check_ranks_agree(trainer, start_step)
    log = Logger(run, hp, hardware, data, start_step)
    if hp.ngram_order and start_step == 0:
        fill_ngrams(trainer, log)    # section 11
    parameters = sum(p.numel() for p in trainer.model.parameters())
    log.write(f"{parameters:,} parameters, {hp.num_steps:,} steps of {hp.batch_tokens:,} tokens")
    if hardware.compile:
        log.write("compiling and warming up …")
        clock.switch("warmup")
        warm_up(trainer)    # section 13
    graphs_before = count_compiled_graphs()
    clock.switch("train")
    with (SignalHandler(trainer) as signals,
          Saver(run.folder, hardware.rank == 0, start_step) as saver,
          profile_steps(hp, hardware, run.folder) as profiler):
        for step in range(start_step, hp.num_steps + 1):  # here `step` steps are done
            last_step = step == hp.num_steps
            val_due = last_step or (hp.val_every > 0 and step % hp.val_every == 0)
            save_due = hp.save_every > 0 and (last_step or step % hp.save_every == 0)
            # on CUDA the host reads a loss while the GPU computes the next step
            read_all = val_due or save_due or hardware.device.type != "cuda"
            losses = trainer.read_losses(keep=0 if read_all else 1)
            log.train_losses(trainer, losses)
            if last_step and hp.save_model:
                save_model(trainer, saver)
            if save_due:  # before the validation, which may take long
                save_checkpoint(trainer, saver, log, step)
            if val_due and not trainer.stopping:
                result = validate(trainer, log, step)
            if trainer.stopping:  # as read_losses or validate found
                save_checkpoint(trainer, saver, log, step)  # does nothing if it is saved already
            if trainer.stopping or last_step:
                break
            signals.check_launcher()  # stops if torchrun was killed
            trainer.step(data.train.next_batch(), step)
            if profiler:
                profiler.step()
        clock.switch(None)
        log.bar.close()
        saver.wait()
        if trainer.stopping:
            return report_stop(trainer, log, saver, signals, step)
        finish(trainer, log, result, recompiles=count_compiled_graphs() - graphs_before)
        if signals.number:  # a signal after the last step
            return 128 + signals.number
        return 0


####################################################################################################
#####################################    around the loop    ########################################
####################################################################################################

# ═══ 8  Logging ═══════════════════════════════════════════════════════════════════════════════════

SEPARATOR = "=" * 100   # between the parts of a log


class Logger:
    """Writes log.txt, metrics.jsonl, standard output and a progress bar, on rank 0 only.

    Training matters more than its log: a sink that fails is dropped with one warning.
    """

    def __init__(self, run: Run, hp: Hyperparameters, hardware: Hardware, data: Data,
                 start_step: int = 0):
        self.folder = run.folder
        self.sinks = {}     # where to write, by name; none on other ranks
        self.sizes = {}     # bytes in each file, for checkpoints
        if sys.stdout is None:  # closed by whoever started this process
            sys.stdout = open(os.devnull, "w")
        self.bar = tqdm(total=hp.num_steps, initial=start_step, unit="step", dynamic_ncols=True,
                        file=sys.stdout, disable=hardware.rank != 0 or not sys.stdout.isatty())
        if hardware.rank != 0:
            return
        self.sinks["standard output"] = sys.stdout
        with explained(f"--log_dir={hp.log_dir}", "give another folder"):
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in ("log.txt", "metrics.jsonl"):
                file = open(self.folder / name, "a", encoding="utf-8")
                # what follows the checkpoint is written again; min: a log that failed is shorter
                size = min(run.log_sizes.get(name, 0), file.tell())
                file.truncate(size)
                self.sinks[name] = file
                self.sizes[name] = size
        self.write_start(run, hp, hardware, data)

    def write_start(self, run: Run, hp: Hyperparameters, hardware: Hardware, data: Data) -> None:
        """All that is needed to repeat the run: source, command, hyperparameters, machine, data."""
        commit = command_output("git", "rev-parse", "HEAD")
        dirty = command_output("git", "status", "--porcelain", "-uno") != ""
        source_sha256 = hashlib.sha256(run.source.encode()).hexdigest()
        program = [f"command: {' '.join(sys.argv)}",
                   f"commit: {commit or 'unknown'}{' (dirty)' if dirty else ''}",
                   f"source_sha256: {source_sha256}"]
        machine = environment(hardware)
        if self.sizes["log.txt"]:  # the run resumed, perhaps with another source and machine
            self.put("log.txt", "\n".join([*program, *machine]))
        else:
            values = asdict(hp)
            settings = [f"{name}: {value!r}  # {hp.origins[name]}"
                        for name, value in values.items()]
            shards = {shard.path: dict(tokens=shard.num_tokens, sha256=data.hashes[shard.path])
                      for shard in (*data.train.shards, *data.val.shards)}
            files = [f"shard: {path} {entry['tokens']:,} tokens sha256 "
                     f"{entry['sha256'] or 'unknown'}" for path, entry in shards.items()]
            self.put("log.txt", "\n".join([run.source, SEPARATOR, *program, *settings, *machine,
                                           *files, SEPARATOR]))
            self.record(start=True, command=sys.argv, commit=commit or None, dirty=dirty,
                        source_sha256=source_sha256, hyperparameters=values, origins=hp.origins,
                        environment=machine, shards=shards)
        self.put("standard output", "\n".join(machine))
        self.write(*describe_preset(hp), *run.notes)

    def write(self, *lines: str) -> None:
        self.put("log.txt", "\n".join(lines))
        self.put("standard output", "\n".join(lines))

    def record(self, **values) -> None:
        self.put("metrics.jsonl", json.dumps(values))

    def put(self, name: str, text: str) -> None:
        """Write to one sink; drop it where that fails."""
        if name not in self.sinks:
            return
        try:
            tqdm.write(text, file=self.sinks[name])  # print, with the progress bar kept below
            self.sinks[name].flush()
            if name in self.sizes:  # raises if the file was deleted, which a write does not notice
                self.sizes[name] = os.stat(self.folder / name).st_size
        except (OSError, UnicodeError) as error:
            if name == "standard output":  # a closed pipe, say; Python flushes it again at exit
                sys.stdout = open(os.devnull, "w")
                self.bar.disable = True
            del self.sinks[name]
            warn(f"{name} can no longer be written ({reason_of(error)})")

    def train_losses(self, trainer: Trainer, losses: dict[int, float]) -> None:
        """Move the bar, and log a step every log_every steps."""
        hp = trainer.hp
        for step, loss in losses.items():
            tokens_per_second = 1000 * step * hp.batch_tokens / trainer.clock.now()["train"]
            self.bar.set_postfix_str(f"loss {loss:.4f}, {tokens_per_second:,.0f} tokens/s",
                                     refresh=False)
            self.bar.update(step - self.bar.n)
            if step % hp.log_every == 0 or step in (1, hp.num_steps):
                line = self.record_step(trainer, step, train_loss=loss)
                self.put("log.txt", line)
                if self.bar.disable:  # else the bar shows it
                    self.put("standard output", line)

    def record_step(self, trainer: Trainer, step: int, **values) -> str:
        """Write train_loss, or what evaluate returns, to metrics.jsonl. Returns a line of the log.
        """
        hp = trainer.hp
        times_ms = trainer.clock.now()
        name = "val_loss" if "val_loss" in values else "train_loss"
        # schedules count from 0: the loss after n steps is of step n − 1
        schedule_step = step if name == "val_loss" else step - 1
        rates = {kind: rate * rate_at(hp, schedule_step) for kind, rate in base_rates(hp).items()}
        window = [size if size < NO_LIMIT else None for size in window_at(hp, schedule_step)]
        self.record(step=step, tokens=step * hp.batch_tokens, **values, rates=rates,
                    momentum=momentum_at(hp, schedule_step), window=window, times_ms=times_ms,
                    memory_mib=peak_memory_mib(trainer.hardware.device))
        train_ms = times_ms["train"]
        average = train_ms / step if step else math.nan
        return (f"step:{step}/{hp.num_steps} {name}:{values[name]:.4f} train_time:{train_ms:.0f}ms "
                f"step_avg:{average:.2f}ms")


def profile_steps(hp: Hyperparameters, hardware: Hardware, folder: Path):
    """A trace of some steps on rank 0, after the first two: for ui.perfetto.dev."""
    if not hp.profile or hardware.rank != 0:
        return contextlib.nullcontext()
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=hp.profile, repeat=1),
        on_trace_ready=lambda trace: trace.export_chrome_trace(str(folder / "trace.json.gz")))


def warn(sentence: str) -> None:
    with contextlib.suppress(OSError):  # where even that cannot be written
        print(f"warning: {sentence}", file=sys.stderr, flush=True)


def peak_memory_mib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    unit = 2**10 if sys.platform == "linux" else 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def environment(hardware: Hardware) -> list[str]:
    """The software and the machine in two lines, of which records/logs.py reads the second."""
    device_name = platform.machine()
    driver = None
    if hardware.device.type == "cuda":
        device_name = torch.cuda.get_device_name()
        driver = command_output("nvidia-smi", "--id=0", "--query-gpu=driver_version",
                                "--format=csv,noheader")
    elif sys.platform == "linux":
        model_name = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
        device_name = model_name[1] if model_name else device_name
    dtype = str(hardware.dtype).removeprefix("torch.")
    muon_dtype = str(hardware.muon_dtype).removeprefix("torch.")
    compiled = "compiled" if hardware.compile else f"not compiled: {hardware.why_not_compiled}"
    return [f"Python {platform.python_version()}, PyTorch {torch.__version__}, "
            f"NumPy {np.__version__}, CUDA {torch.version.cuda}, driver {driver}, "
            f"{platform.platform()}",
            f"{hardware.world_size} × {hardware.device.type} ({device_name}), "
            f"{torch.get_num_threads()} threads, {dtype} activations, "
            f"{muon_dtype} Newton–Schulz, {hardware.attention} attention, {compiled}"]


def describe_preset(hp: Hyperparameters) -> list[str]:
    """What the preset sets that differs from the defaults."""
    changed = [f"{name}={value}" for name, value in asdict(hp).items()
               if hp.origins[name].startswith("preset") and value != getattr(Hyperparameters, name)]
    return textwrap.wrap(f"preset {hp.preset} sets {', '.join(changed) or 'nothing'}", 100)


def command_output(*command: str) -> str:
    """The output of a command; empty where it is missing or fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=True,
                              timeout=20).stdout.strip()
    return ""


# ═══ 9  Checkpoints ═══════════════════════════════════════════════════════════════════════════════

CHECKPOINT_FORMAT = 2
# What a checkpoint has besides the entries of a model.pt.
TRAINING_STATE = {"origins", "clock_ms", "log_sizes", "adam", "muon", "batch_index", "rng_state"}
# What a damaged or foreign file can make Python, PyTorch and check_hyperparameters raise.
FOREIGN_ERRORS = (UserError, OSError, ValueError, LookupError, TypeError, AttributeError,
                  RuntimeError, EOFError, zipfile.BadZipFile, pickle.UnpicklingError)


class Saver:
    """Writes files in a background thread: training waits for the file before and for a copy."""

    def __init__(self, folder: Path, enabled: bool, start_step: int = 0):
        self.folder = folder
        self.enabled = enabled          # on rank 0
        self.saved_step = start_step    # of the last checkpoint, even if it failed; or the start
        self.executor = ThreadPoolExecutor(1)
        self.pending = None     # the last file, perhaps still being written
        self.failed = False     # the last file could not be written

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self.wait()

    def save(self, name: str, state: dict, keep: int = 0) -> None:
        """The caller must not change `state` afterwards. keep: how many checkpoints stay; 0: all.
        """
        if self.enabled:
            path = self.folder / name
            self.pending = self.executor.submit(self.write_atomically, path, state, keep)

    def wait(self) -> None:
        if self.pending:
            self.pending.result()

    def write_atomically(self, path: Path, state: dict, keep: int) -> None:
        """A file has its final name only when it is complete and on the disk."""
        temporary = path.with_name("saving.tmp")  # always the same: replaces what a killed run left
        try:
            with open(temporary, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            if keep:
                # those of later steps are damaged, or resume would have used them: not counted
                good = [each for each in checkpoints(self.folder) if step_of(each) <= step_of(path)]
                for old in good[:-keep]:
                    old.unlink(missing_ok=True)
            self.failed = False
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if not self.failed:
                reason = error.__context__ or error  # PyTorch wraps the OSError of a full disk
                warn(f"{path} could not be written ({reason_of(reason)})")
            self.failed = True


def save_model(trainer: Trainer, saver: Saver) -> None:
    hp = trainer.hp
    # no copy: this is after the last step
    saver.save("model.pt", dict(format=CHECKPOINT_FORMAT, hyperparameters=asdict(hp),
                                step=hp.num_steps, model=trainer.model.state_dict()))


def save_checkpoint(trainer: Trainer, saver: Saver, log: Logger, step: int) -> None:
    """A collective: all ranks take part, rank 0 copies and writes."""
    if step == saver.saved_step:
        return
    saver.saved_step = step
    saver.wait()  # at most one copy of the state at a time
    state = trainer.state_dict()
    if saver.enabled:
        about = dict(format=CHECKPOINT_FORMAT, hyperparameters=asdict(trainer.hp),
                     origins=trainer.hp.origins, step=step, clock_ms=trainer.clock.now(),
                     log_sizes=dict(log.sizes))
        saver.save(f"checkpoint_{step:07d}.pt", about | copy_to_host(state),
                   trainer.hp.keep_checkpoints)


def copy_to_host(state):
    """A copy of nested containers with every tensor on the CPU."""
    return tree_map_only(Tensor, lambda x: x.to("cpu", copy=True), state)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, sorted by step."""
    found = [path for path in folder.glob("checkpoint_*.pt")
             if re.fullmatch(r"checkpoint_\d+\.pt", path.name)]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("checkpoint_"))


def read_checkpoint(path: Path, to_resume: bool = False) -> dict:
    """A checkpoint or a model.pt; its entry "hyperparameters" becomes a Hyperparameters.

    Nothing in it is executed, and its tensors are memory-mapped.
    """
    with explained(f"{path} cannot be loaded", "give another checkpoint or model.pt",
                   FOREIGN_ERRORS):
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load does not compare checksums
        if damaged:
            raise ValueError(f"the checksum of {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if state["format"] != CHECKPOINT_FORMAT:
            raise ValueError(f"its format is {state['format']}, not {CHECKPOINT_FORMAT}")
        missing = {"hyperparameters", "step", "model"} - state.keys()
        if to_resume:
            missing |= TRAINING_STATE - state.keys()
        if missing:
            raise ValueError(f"it does not hold {', '.join(sorted(missing))}")
        saved = state["hyperparameters"]
        unknown = FIELDS.keys() - MAY_CHANGE_ON_RESUME - saved.keys()
        if unknown:  # the default of this file could change the training
            raise ValueError("an older train_gpt.py wrote it, without "
                             f"{', '.join(sorted(unknown))}")
        hp = Hyperparameters(**{name: saved[name] for name in FIELDS if name in saved})
        check_hyperparameters(hp)
        return state | dict(hyperparameters=hp)


def restore(trainer: Trainer, checkpoint: dict) -> int:
    """Continue from a checkpoint. Returns the step to start at."""
    step = checkpoint["step"]
    require(trainer.hp, step <= trainer.hp.num_steps, "num_steps",
            f"at least {step}, the step of the checkpoint")
    with explained("the checkpoint does not fit", "give one of this training",
                   (RuntimeError, ValueError, KeyError)):  # of PyTorch's load_state_dict
        # a copy: tables of n-grams and optimizers would keep tensors that are mapped to the file
        trainer.load_state_dict(copy_to_host(checkpoint))
    trainer.clock.ms = dict(checkpoint["clock_ms"])
    return step


def find_run(hp: Hyperparameters) -> Run:
    """The folder of the run and the checkpoint to resume from.

    By hp.resume: auto takes the newest checkpoint, if there is one; a folder its newest checkpoint;
    a file starts a new run from it; empty starts a new run. Ranks that torchrun restarted take the
    newest checkpoint in the run's folder.
    """
    logs = Path(hp.log_dir)
    new_id = f"{datetime.datetime.now():%Y-%m-%d_%H%M%S}_{uuid.uuid4().hex[:8]}"
    folder = logs / (hp.run_id or new_id)

    if hp.resume == "auto":
        paths = [path for each in logs.glob("*") for path in checkpoints(each)]
        if paths and not hp.run_id:  # the run that was saved last
            folder = max(paths, key=os.path.getmtime).parent
        return resume_newest(folder)

    if os.path.isdir(hp.resume):
        if not checkpoints(Path(hp.resume)):
            raise UserError(f"--resume={hp.resume}: there is no checkpoint; give another folder")
        return resume_newest(Path(hp.resume))

    run = Run(folder)
    if hp.resume:  # a new run from a checkpoint
        run.checkpoint = read_checkpoint(Path(hp.resume), to_resume=True)
        step = run.checkpoint["step"]
        run.notes = [f"resuming from {hp.resume}, step {step}"]
        if not hp.run_id:
            old_folder = Path(hp.resume).resolve().parent
            beside = old_folder.parent if hp.origins["log_dir"] == "default" else logs
            run.folder = beside / f"{old_folder.name}_from_{step}"

    # the folder must be new, unless torchrun restarted the ranks
    saved = checkpoints(run.folder)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        # torchrun restarts ranks with the same options: with a run_id they find their run
        return resume_newest(run.folder) if saved else run
    if saved or (run.folder / "log.txt").exists():
        remedy = f"continue it with --resume={run.folder}, or " if saved else ""
        raise UserError(f"{run.folder} holds a run already; {remedy}give another --run_id")
    return run


def resume_newest(folder: Path) -> Run:
    """From the newest checkpoint that is not damaged. A new run where nothing was saved."""
    notes = []
    for path in reversed(checkpoints(folder)):
        try:
            checkpoint = read_checkpoint(path, to_resume=True)
        except UserError as error:
            notes.append(f"skipped: {error}")
            continue
        notes.append(f"resuming from {path}, step {checkpoint['step']}")
        return Run(folder, checkpoint, checkpoint["log_sizes"], notes)
    if notes:
        raise UserError(f"{folder} cannot be resumed: {'; '.join(notes)}")
    if (folder / "model.pt").exists():
        raise UserError(f"{folder} holds a finished run without checkpoints; give another --run_id")
    return Run(folder, notes=["no checkpoint to resume from: a new run"])


def load_model(path: str, hardware: Hardware) -> GPT:
    """The model of a model.pt, a checkpoint or a run's folder, with its own hyperparameters."""
    file = Path(path)
    if file.is_dir():
        saved = checkpoints(file)
        file = file / "model.pt"
        if saved and not file.exists():
            file = saved[-1]
    state = read_checkpoint(file)
    hp = state["hyperparameters"]
    # the rotary table has the longer of the two, and a file may claim any length
    hp.sequence_tokens = min(hp.sequence_tokens, 2**16)
    hp.val_sequence_tokens = 0
    model = GPT(hp, replace(hardware, attention="banded"))  # flex must be compiled
    with explained(f"--checkpoint={path} cannot be loaded", "give the model.pt of a run",
                   (RuntimeError, KeyError)):
        model.load_state_dict(state["model"])
    return model.to(hardware.device).eval()


# ═══ 10  Evaluation ═══════════════════════════════════════════════════════════════════════════════

def validate(trainer: Trainer, log: Logger, step: int) -> dict | None:
    """Evaluate with the window of this step, and log the result. None if a signal ended it."""
    trainer.clock.switch("val")
    check_ranks_agree(trainer, step)
    trainer.window.copy_(window_tensor(trainer.hp, step))
    result = evaluate(trainer)
    trainer.clock.switch("train")
    if result:
        log.write(log.record_step(trainer, step, **result))
    return result


@torch.no_grad()
def evaluate(trainer: Trainer) -> dict | None:
    """Loss per token, and bits per byte of text where that is known, over the val_tokens.

    A signal ends it early: then trainer.stopping is set on all ranks, and there is no result.
    """
    hp = trainer.hp
    hardware = trainer.hardware
    loader = trainer.data.val
    num_sequences = hp.val_tokens // loader.sequence_tokens
    first = hp.val_start // loader.sequence_tokens
    loss_sum = 0.0
    text_tokens = 0     # those that start no document
    loader.index = first + hardware.rank
    trainer.compiled_model.eval()
    while loader.index < first + num_sequences and not trainer.stop_requested:
        (inputs, targets), = loader.next_batch(stride=hardware.world_size)  # the ranks take turns
        loss_sum += trainer.compiled_model(inputs, targets, trainer.window).item()
        text_tokens += (targets != hp.document_token).sum().item()
    trainer.compiled_model.train()
    totals = torch.tensor([loss_sum, text_tokens, trainer.stop_requested], dtype=torch.float64)
    loss_sum, text_tokens, stops = all_reduce_sum(totals, hardware).tolist()
    if stops > 0:
        trainer.stopping = True
        return None
    val_loss = loss_sum / num_sequences
    if not math.isfinite(val_loss):
        raise not_finite_error(trainer, trainer.data.train.index,
                               f"the validation loss is {val_loss}", "all parameters are finite")
    bytes_per_token = trainer.data.bytes_per_token
    if hp.is_byte_level:
        bytes_per_token = text_tokens / hp.val_tokens
    bits_per_byte = None
    if bytes_per_token:
        bits_per_byte = val_loss / math.log(2) / bytes_per_token
    return dict(val_loss=val_loss, bits_per_byte=bits_per_byte)


def text_codec(hp: Hyperparameters) -> tuple:
    """(text → tokens, tokens → text): bytes, or GPT-2's vocabulary."""
    if not hp.is_byte_level:
        with data_module("vocabulary") as vocabulary:
            return vocabulary.gpt2_codec()

    def encode(text: str) -> list[int]:
        return [*text.encode(errors="surrogateescape")]  # the bytes that the command line had

    def decode(tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    return encode, decode


def escape_control_characters(text: str) -> str:
    """Escape control characters, which could change the terminal's state."""
    return "".join(character if character.isprintable() or character in "\n\t"
                   else character.encode("unicode_escape").decode() for character in text)


@torch.no_grad()
def sample(model: GPT, prompt: str, settings: Hyperparameters) -> str:
    """The prompt and its continuation. Of the settings only those of sampling are used."""
    hp = model.hp
    encode, decode = text_codec(hp)
    tokens = [hp.document_token, *encode(prompt)]
    if max(tokens) >= hp.vocab_size:
        raise UserError(f"--sample: the text has token {max(tokens)} and the model knows "
                        f"{hp.vocab_size} tokens; give text of its own kind")
    generator = torch.Generator().manual_seed(settings.seed)
    window = last_window(model)
    for _ in range(settings.sample_tokens):
        context = tokens[-hp.sequence_tokens:]
        padding = [hp.document_token] * (-len(context) % BLOCK)
        inputs = torch.tensor(context + padding, device=window.device)
        logits = model(inputs, None, window)[len(context) - 1, :hp.vocab_size].float().cpu()
        if settings.top_k:
            lowest = logits.topk(min(settings.top_k, len(logits))).values[-1]
            logits[logits < lowest] = -math.inf
        if settings.temperature:
            probs = (logits / settings.temperature).softmax(0)
            tokens.append(torch.multinomial(probs, 1, generator=generator).item())
        else:
            tokens.append(logits.argmax().item())
    # a run of document tokens is a blank line
    runs = itertools.groupby(tokens[1:], key=lambda token: token == hp.document_token)
    text = "".join("\n\n" if is_start else decode(list(run)) for is_start, run in runs)
    return escape_control_characters(text)


def last_window(model: GPT) -> Tensor:
    """The window at the end of the training, on the model's device."""
    return window_tensor(model.hp, model.hp.num_steps).to(model.skip_weights.device)


@torch.no_grad()
def score_hellaswag(folder: str, model: GPT) -> dict:
    """The score as a line to print, the accuracy, and the number of tasks."""
    hp = model.hp
    window = last_window(model)

    def token_losses(tokens: np.ndarray) -> np.ndarray:
        inputs = torch.from_numpy(tokens).to(window.device)
        logits = model(inputs, None, window)
        return F.cross_entropy(logits[:-1], inputs[1:], reduction="none").cpu().double().numpy()

    with data_module("hellaswag") as hellaswag:
        tasks = hellaswag.read_tasks(folder, hp.vocab_size, hp.document_token)
        return hellaswag.score(tasks, token_losses, hp.sequence_tokens, hp.document_token)


def finish(trainer: Trainer, log: Logger, result: dict, recompiles: int) -> None:
    """Log the final loss, times, memory, a sample, where the files are, and HellaSwag's score.

    On rank 0, without collectives: the other ranks have left.
    """
    if trainer.hardware.rank != 0:
        return
    hp = trainer.hp
    bits = f", {result['bits_per_byte']:.4f} bits per byte" if result["bits_per_byte"] else ""
    reached = "reached" if result["val_loss"] <= hp.target_loss else "not reached"
    target = f" (target {hp.target_loss} {reached})" if hp.target_loss else ""
    times_ms = trainer.clock.ms
    clocks = ", ".join(f"{kind} {ms / 1000:.1f} s" for kind, ms in times_ms.items())
    memory_mib = peak_memory_mib(trainer.hardware.device)
    log.write(f"final validation loss {result['val_loss']:.4f}{bits}{target} after "
              f"{hp.num_steps * hp.batch_tokens:,} tokens", f"clocks: {clocks}",
              f"recompiles after warm-up: {recompiles}; peak memory: {memory_mib:,.0f} MiB")
    log.record(end=True, **result, recompiles=recompiles, times_ms=times_ms)

    model = trainer.model.eval()
    model.hardware = replace(trainer.hardware, attention="banded")  # flex must be compiled
    try:
        log.write("sample:", sample(model, "", hp))
    except UserError as error:
        log.write(f"no sample: {error}")
    log.write(f"log: {log.folder / 'log.txt'}")
    if (log.folder / "model.pt").is_file():
        log.write(f"model: {log.folder / 'model.pt'}")
    if hp.hellaswag:
        score = score_hellaswag(hp.hellaswag, model)
        log.write(score["line"])
        log.record(hellaswag=score["hellaswag"], tasks=score["tasks"])


# ═══ 11  What some runs use ═══════════════════════════════════════════════════════════════════════

# ── the laptop run: n-grams and copies of earlier text suggest the next token ─────────────────────

MAX_SUCCESSORS = 32     # that are kept of each context
TOKEN_BITS = 9          # of each token in a packed context: vocabularies of 512 at most
TOKEN_MASK = 2**TOKEN_BITS - 1
COUNT_BITS = 24         # of the count of a successor, while a table is sorted
HASH_FACTOR = 0x5851F42D4C957F2D  # for hashes of texts; Knuth's linear congruential generator


class NGrams(nn.Module):
    """Probabilities of the next token by counts of n-grams; the model learns to correct them.

    What follows each context of 1 to `order` tokens is counted once, before the first step: seconds
    for a text that the model would read for an hour (count_ngrams). After a context of n tokens,
    P_n(token) = (count − discount) / total + left_over · P_{n−1}(token), down to the unigrams;
    left_over is 1 − the sum of the first terms. forward goes from the longest context down and
    keeps the product of these factors.

    Buffers of the contexts of n tokens:
        contexts_n    each once, sorted, packed into 9 bits a token, the newest in the highest bits
        starts_n      where the successors of each context start
        successors_n  the tokens that follow, the most frequent first; in the end MAX_SUCCESSORS
                      zeros, so that as many can be read from any start
        probs_n       the probabilities of these tokens
    """

    def __init__(self, order: int, vocab_size: int):
        super().__init__()
        self.order = order
        self.register_buffer("unigrams", torch.full((vocab_size,), 1 / vocab_size),
                             persistent=False)
        for n in range(1, order + 1):
            self.set_table(n, contexts=torch.full((1,), -1),  # matches no context
                           starts=torch.zeros(2, dtype=torch.int32),
                           successors=torch.zeros(MAX_SUCCESSORS, dtype=torch.int16),
                           probs=torch.zeros(MAX_SUCCESSORS, dtype=torch.float16))

    def set_table(self, n: int, **table: Tensor) -> None:
        self.set_extra_state({f"{name}_{n}": tensor for name, tensor in table.items()})

    def table(self, n: int) -> list[Tensor]:
        return [getattr(self, f"{name}_{n}")
                for name in ("contexts", "starts", "successors", "probs")]

    def get_extra_state(self) -> dict[str, Tensor]:
        """What a state_dict has of the tables: load_state_dict refuses buffers of another size."""
        return dict(self.named_buffers())

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        for name, tensor in state.items():
            self.register_buffer(name, tensor.to(self.unigrams.device), persistent=False)

    @torch.no_grad()
    def forward(self, inputs: Tensor, documents: Tensor) -> Tensor:
        """The probabilities of every token after each input: [tokens, vocabulary]."""
        mixture = self.unigrams.new_zeros(len(inputs), len(self.unigrams))
        left_over = mixture.new_ones(len(inputs), 1)  # the product over all longer contexts
        column = torch.arange(MAX_SUCCESSORS, device=inputs.device)
        # the last `order` tokens of each position, packed, the newest in the highest bits
        context = torch.zeros_like(inputs, dtype=torch.int64)
        for back in range(self.order):
            context = (context << TOKEN_BITS) | shifted(inputs, back)
        for n in range(self.order, 0, -1):
            contexts, starts, successors, probs = self.table(n)
            in_document = documents == shifted(documents, n - 1, -1)  # all n tokens
            row = torch.searchsorted(contexts, context).clamp(max=len(contexts) - 1)
            found = in_document & (contexts[row] == context)
            start = starts[row]
            length = torch.where(found, starts[row + 1] - start, 0)
            successor = entries_from(start, successors)
            prob = entries_from(start, probs)
            prob = torch.where(column < length[:, None], prob.to(mixture.dtype), 0.0)
            mixture.scatter_add_(1, successor.long(), left_over * prob)
            # min: rounded to float16 they may sum to 1, and a probability of 0 has no logarithm
            left_over = left_over * (1 - prob.sum(dim=1, keepdim=True)).clamp(min=1e-4)
            context = context >> TOKEN_BITS  # without the oldest token
        return mixture.addcmul_(left_over, self.unigrams)


def entries_from(start: Tensor, x: Tensor) -> Tensor:
    """MAX_SUCCESSORS entries of x from each start on: [starts, MAX_SUCCESSORS]."""
    return x.unfold(0, MAX_SUCCESSORS, 1).index_select(0, start)


def shifted(x: Tensor, back: int, fill: int = 0) -> Tensor:
    """For each position, the entry of x that is `back` positions earlier."""
    return F.pad(x, (back, 0), value=fill)[:len(x)]


@torch.no_grad()
def last_followers(inputs: Tensor, documents: Tensor, lengths: tuple) -> tuple[Tensor, Tensor]:
    """(token, found), each [tokens, lengths]: what followed the latest match of so many tokens.

    A match is an earlier occurrence, in the same document, of the `length` tokens up to here, by a
    hash of 62 bits.
    """
    num_tokens = len(inputs)
    # keys of positions where nothing can match: negative, and no two are equal
    unmatched = -1 - torch.arange(num_tokens, device=inputs.device)
    key = documents.long()
    keys = []
    for length in range(1, lengths[-1] + 1):  # a hash of the document and of the last tokens
        key = key * HASH_FACTOR + shifted(inputs, length - 1)
        if length in lengths:
            in_document = documents == shifted(documents, length - 1, -1)
            keys.append(torch.where(in_document, key & (2**62 - 1), unmatched))
    # stable: equal keys keep the order of the text, so the one before is the latest match
    sorted_keys, order = torch.sort(torch.stack(keys), stable=True)
    repeated = sorted_keys[:, 1:] == sorted_keys[:, :-1]
    earlier = torch.full_like(order, -1)  # where the match ends; −1: there is none
    earlier.scatter_(1, order[:, 1:], torch.where(repeated, order[:, :-1], -1))
    return inputs[earlier + 1].long().T, (earlier >= 0).T


class Suggestions(nn.Module):
    """Adds what n-grams and copies suggest as the next token to the embedding and to the logits.

    Gates, computed for each token, weigh what is added to the logits: the logarithms of the
    n-grams' probabilities, and 1 at each copied token.
    """

    def __init__(self, hp: Hyperparameters):
        super().__init__()
        self.copy_lengths = hp.copy_lengths
        self.vocab_size = hp.padded_vocab
        self.ngrams = None
        if hp.ngram_order:
            self.ngrams = NGrams(hp.ngram_order, hp.padded_vocab)
            self.ngram_embed = nn.Embedding(hp.padded_vocab, hp.model_dim)
            self.ngram_gate = Linear(hp.model_dim, 1)
        if hp.copy_lengths:
            # the tables of all lengths, one after another, and a row that adds nothing
            self.not_found = len(hp.copy_lengths) * hp.padded_vocab
            self.copy_embed = nn.EmbeddingBag(self.not_found + 1, hp.model_dim, mode="sum",
                                              padding_idx=self.not_found)
            self.copy_gate = Linear(hp.model_dim, len(hp.copy_lengths))
        for p in self.parameters():
            nn.init.zeros_(p)

    def add_to_embedding(self, x: Tensor, inputs: Tensor,
                         documents: Tensor) -> tuple[Tensor, Tensor | None, tuple | None]:
        """Returns also what add_to_logits takes: the n-grams' probabilities, and the copies."""
        probs = None
        copies = None
        if self.ngrams is not None:
            probs = self.ngrams(inputs, documents)
            x = x + probs.type_as(x) @ self.ngram_embed.weight.type_as(x)
        if self.copy_lengths:
            copies = last_followers(inputs, documents, self.copy_lengths)
            token, found = copies
            table = torch.arange(token.size(1), device=token.device)
            row = torch.where(found, table * self.vocab_size + token, self.not_found)
            x = x + self.copy_embed(row).type_as(x)
        return x, probs, copies

    def add_to_logits(self, logits: Tensor, x: Tensor, probs: Tensor | None,
                      copies: tuple | None) -> Tensor:
        """x: what the head takes. The gate of the n-grams starts at 1, those of the copies at 0."""
        if probs is not None:
            logits = logits + (1 + torch.tanh(self.ngram_gate(x).to(logits.dtype))) * probs.log()
        if copies is not None:
            token, found = copies
            gate = torch.where(found, self.copy_gate(x).to(logits.dtype), 0.0)
            logits = logits.scatter_add(1, token, gate)
        return logits


# ── n-grams are counted once, before the first step ───────────────────────────────────────────────

def fill_ngrams(trainer: Trainer, log: Logger) -> None:
    """Fill the tables of n-grams. The time counts as training."""
    hp = trainer.hp
    clock = trainer.clock
    clock.switch("train")
    counted = count_ngrams(trainer.model.suggestions.ngrams, trainer.data.train, hp.num_steps,
                           hp.ngram_tokens)
    log.write(f"counted n-grams in {counted:,} tokens in {clock.now()['train']:.0f}ms")
    clock.switch(None)


def count_ngrams(ngrams: NGrams, loader: Loader, num_batches: int, limit: int) -> int:
    """Fill the tables from `limit` tokens that the batches do not read. Returns their number.

    Modified Kneser–Ney smoothing (Chen and Goodman, 1999): only the longest contexts count how
    often a token follows them; the others count how many longer contexts it follows.
    """
    order = ngrams.order
    spans = [(shard, start, length)
             for shard, start, length in unused_spans(loader, num_batches, limit)
             if length > order]
    if not spans:
        return 0
    pairs, counts = sort_and_count(read_pairs(spans, order))
    for n in range(order, 0, -1):
        ngrams.set_table(n, **tabulate(pairs, counts))
        successor = pairs & TOKEN_MASK
        shorter_context = pairs >> (2 * TOKEN_BITS)  # without successor and oldest token
        # each pair adds 1 to the shorter pair
        pairs, counts = sort_and_count((shorter_context << TOKEN_BITS) | successor)
    unigrams = np.full(len(ngrams.unigrams), 0.5)
    unigrams[pairs] += counts  # their contexts are empty now: a pair is its successor
    ngrams.unigrams.copy_(torch.from_numpy(unigrams / unigrams.sum()))
    return sum(length for _, _, length in spans)


def unused_spans(loader: Loader, num_batches: int, limit: int) -> list[tuple[Shard, int, int]]:
    """Spans that the first `num_batches` batches do not read, `limit` tokens at most in total.

    Each is (shard, start, length), and follows what is read of a lane.
    """
    read = {*loader.batches[:num_batches]}  # a set: epochs repeat batches
    batches_read = collections.Counter(shard for shard, _ in read)
    taken = loader.batch_tokens // loader.num_lanes     # by a batch, of each lane
    spans = []
    for shard in dict.fromkeys(loader.shards):
        lane_tokens = tokens_per_lane(shard, loader.num_lanes)
        first = batches_read[shard] * taken + 1  # 1: the last target
        length = min(lane_tokens - first, limit // loader.num_lanes)  # an equal part of each lane
        if length > 0:
            spans += [(shard, lane * lane_tokens + first, length)
                      for lane in range(loader.num_lanes)]
            limit -= length * loader.num_lanes
    return spans


def read_pairs(spans: list[tuple[Shard, int, int]], order: int) -> np.ndarray:
    """An integer for each position, 9 bits a token: context, its newest token first; successor."""
    pairs = np.zeros(sum(length - order for _, _, length in spans), np.int64)
    end = 0
    for shard, start, length in spans:
        tokens = shard.tokens(start, length)
        for first in range(0, length - order, 2**15):  # chunks fit the CPU's cache
            chunk = tokens[first:first + 2**15 + order].astype(np.int64)
            chunk_pairs = pairs[end:end + len(chunk) - order]
            # pair i has the context chunk[i:i + order] and the successor chunk[i + order]
            for offset in (*reversed(range(order)), order):
                chunk_pairs <<= TOKEN_BITS
                chunk_pairs |= chunk[offset:offset + len(chunk_pairs)]
            end += len(chunk_pairs)
        shard.release_pages()
    return pairs


def tabulate(pairs: np.ndarray, counts: np.ndarray) -> dict[str, Tensor]:
    """The table of an order from its sorted (context, successor) pairs and their counts."""
    contexts, num_successors = sort_and_count(pairs >> TOKEN_BITS)
    row = np.repeat(np.arange(len(contexts)), num_successors)  # context of each pair, and entry
    # by context, then by count, the highest first: sorts integers of row | rarity | successor
    highest = 2**COUNT_BITS - 1
    rarity = highest - np.minimum(counts, highest)
    successor = pairs & TOKEN_MASK
    entries = np.sort((row << (COUNT_BITS + TOKEN_BITS)) | (rarity << TOKEN_BITS) | successor)
    successors = entries & TOKEN_MASK
    sorted_counts = highest - ((entries >> TOKEN_BITS) & highest)
    first_entry = np.cumsum(num_successors) - num_successors  # of each context
    totals = np.add.reduceat(sorted_counts, first_entry)
    probs = (sorted_counts - discounts(sorted_counts)) / totals[row]
    is_kept = np.arange(len(entries)) - first_entry[row] < MAX_SUCCESSORS
    starts = np.append(0, np.cumsum(np.minimum(num_successors, MAX_SUCCESSORS)))
    padding = (0, MAX_SUCCESSORS)
    return dict(contexts=torch.from_numpy(contexts),
                starts=torch.from_numpy(starts.astype(np.int32)),
                successors=F.pad(torch.from_numpy(successors[is_kept].astype(np.int16)), padding),
                probs=F.pad(torch.from_numpy(probs[is_kept].astype(np.float16)), padding))


def discounts(counts: np.ndarray) -> np.ndarray:
    """Modified Kneser–Ney's discount of each count, from how many counts are 1, 2, 3 and 4."""
    how_many = [max(1, np.count_nonzero(counts == count)) for count in range(5)]
    y = how_many[1] / (how_many[1] + 2 * how_many[2])
    discount = [0.0]
    for count in (1, 2, 3):  # 3 or more
        estimate = count - (count + 1) * y * how_many[count + 1] / how_many[count]
        discount.append(min(max(estimate, 0.1), count - 0.1))
    return np.array(discount)[np.minimum(counts, 3)]


def sort_and_count(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """np.unique(values, return_counts=True), but sorts the values in place instead of a copy."""
    values.sort()
    is_first = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=is_first[1:])
    first = np.flatnonzero(is_first)
    return values[first], np.diff(first, append=len(values))


# ── the output head in FP8, on GPUs from H100 on ──────────────────────────────────────────────────

class Float8Matmul(torch.autograd.Function):
    """x @ weight.T for the head, in FP8 with constant scales: e4m3 forward, e5m2 for the gradient.

    x is normed, so that no entry is above √model_dim, and the gradient of a token's loss by a logit
    is 1 at most: with the default scales neither overflows. Weights beyond ±24 saturate.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, x_scale: float, weight_scale: float,
                grad_scale: float) -> Tensor:
        x8 = to_float8(x, x_scale, torch.float8_e4m3fn)
        weight8 = to_float8(weight, weight_scale, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, weight8)
        ctx.scales = x_scale, weight_scale, grad_scale
        return scaled_matmul(x8, weight8.T, x_scale * weight_scale, x.dtype, fast=True)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        x8, weight8 = ctx.saved_tensors
        x_scale, weight_scale, grad_scale = ctx.scales
        grad8 = to_float8(grad, grad_scale, torch.float8_e5m2)
        # _scaled_mm takes a row-major first factor and a column-major second one
        x_grad = scaled_matmul(grad8, column_major(weight8), grad_scale * weight_scale, grad.dtype)
        weight_grad = scaled_matmul(grad8.T.contiguous(), column_major(x8), grad_scale * x_scale,
                                    torch.float32)
        return x_grad, weight_grad, None, None, None


def to_float8(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Clamps first: a plain cast may turn what is too large into NaN."""
    return (x * scale).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


def column_major(x: Tensor) -> Tensor:
    return x.T.contiguous().T


def scaled_matmul(a: Tensor, b: Tensor, scale: float, dtype: torch.dtype,
                  fast: bool = False) -> Tensor:
    """(a @ b) / scale, the product of both scales. fast: accumulated in fewer bits, which is enough
    for a sum over model_dim.
    """
    one = torch.ones((), device=a.device)
    inverse = torch.full((), 1 / scale, device=a.device)
    return torch._scaled_mm(a, b, scale_a=inverse, scale_b=one, out_dtype=dtype,
                            use_fast_accum=fast)


# ═══ 12  Ranks and faults ═════════════════════════════════════════════════════════════════════════

# ── the process group ─────────────────────────────────────────────────────────────────────────────

def join_group(hardware: Hardware) -> None:
    """Initialize the process group. The error names the ranks that do not arrive in time."""
    if hardware.world_size == 1:
        return
    with explained("the ranks cannot meet", "start them with ./run.sh or torchrun", KeyError):
        address = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
    late = f"did not arrive within --timeout={hardware.timeout:g} s"
    remedy = "look at its machine, or wait longer"
    # torchrun may host the store, otherwise rank 0 does
    launcher_hosts_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = hardware.rank == 0 and not launcher_hosts_store
    with explained(f"rank 0 {late}", remedy, dist.DistError):
        store = dist.TCPStore(address, port, is_master=is_master,
                              timeout=datetime.timedelta(seconds=hardware.timeout))
        if hardware.launcher_pid:
            # on one machine torchrun keeps its store, with its keys, when it restarts the ranks
            store = dist.PrefixStore(f"attempt{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        missing = missing_ranks(store, "arrived", hardware.rank, hardware.world_size,
                                hardware.timeout)
    if missing:  # NCCL would wait for them without naming them
        raise UserError(f"rank {missing} {late}; {remedy}")
    device_id = hardware.device if hardware.device.type == "cuda" else None
    with explained("the ranks cannot connect", "check the network between their machines",
                   RuntimeError):
        dist.init_process_group("nccl" if device_id else "gloo", store=store, rank=hardware.rank,
                                world_size=hardware.world_size, device_id=device_id,
                                timeout=group_timeout(hardware))


def missing_ranks(store: dist.Store, prefix: str, rank: int, world_size: int,
                  seconds: float) -> str:
    """Set this rank's key and wait for the others. Returns the ranks that did not set theirs."""
    keys = [f"{prefix}{each}" for each in range(world_size)]
    store.set(keys[rank], "")
    with contextlib.suppress(dist.DistError):  # a timeout: some are missing
        store.wait(keys, datetime.timedelta(seconds=seconds))
    missing = [str(each) for each, key in enumerate(keys) if not store.check([key])]
    return " and ".join(missing)


def group_timeout(hardware: Hardware) -> datetime.timedelta:
    """PyTorch's timeout of a collective: longer on CUDA, so that wait_until raises first."""
    margin = 60 if hardware.device.type == "cuda" else 0
    return datetime.timedelta(seconds=hardware.timeout + margin)


def set_timeout(hardware: Hardware, seconds: float) -> None:
    """Set the timeout of wait_until and of the process group."""
    hardware.timeout = seconds
    if hardware.world_size > 1:
        dist.distributed_c10d._set_pg_timeout(group_timeout(hardware))


def leave_group(finished: bool) -> None:
    """Destroy the process group, unless NCCL failed: it would wait for the other ranks."""
    if dist.is_initialized() and (finished or dist.get_backend() != "nccl"):
        dist.destroy_process_group()


# ── collectives that wait, and ranks that do not answer ───────────────────────────────────────────

def wait_until(is_ready: Callable, hardware: Hardware) -> None:
    """Poll until is_ready(). Several ranks wait for hardware.timeout seconds at most.

    On CUDA PyTorch's own timeout is later, and would not name the rank that is missing.
    """
    started = time.monotonic()
    while not is_ready():
        if hardware.world_size > 1 and time.monotonic() > started + hardware.timeout:
            raise dist.DistError("no answer in time")
        time.sleep(2e-5)


def all_reduce_sum(values: Tensor, hardware: Hardware) -> Tensor:
    """The sum of a tensor over the ranks. Waits for it."""
    if hardware.world_size > 1:
        values = values.to(hardware.device)
        work = dist.all_reduce(values, async_op=True)
        wait_until(work.is_completed, hardware)
        work.wait()
    return values


@torch.no_grad()
def check_ranks_agree(trainer: Trainer, step: int) -> None:
    """Raise if the ranks differ in step, hyperparameters, or the sum of the bits of a tensor."""
    world_size = trainer.hardware.world_size
    if world_size == 1:
        return
    settings = zlib.crc32(repr(asdict(trainer.hp)).encode())
    values = {"the step": torch.tensor(step), "the hyperparameters": torch.tensor(settings)}
    suggestions = trainer.model.suggestions
    tables = suggestions.named_buffers() if suggestions else ()
    for name, x in (*trainer.model.named_parameters(), *tables):
        values[name] = x.flatten().view(torch.int16).sum()
    own = torch.stack([value.to(trainer.hardware.device) for value in values.values()])
    gathered = own.new_empty(world_size * len(own))
    dist.all_gather_single(gathered, own)
    by_rank = gathered.view(world_size, -1).tolist()
    for rank, numbers in enumerate(by_rank):
        for name, number, expected in zip(values, numbers, by_rank[0]):
            if number != expected:
                raise UserError(f"rank {rank} differs from rank 0, first in {name}; start all "
                                "machines with the same options and files, or check their "
                                "hardware and resume with --resume=auto")


def is_lost_connection(error: BaseException | None) -> bool:
    """Whether a collective failed because another rank is gone: NCCL, the store or gloo say so."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def silent_ranks_error(error: RuntimeError) -> UserError:
    """Names the ranks that do not answer: each of the others sets a key within some seconds."""
    try:
        store = dist.distributed_c10d._get_default_store()
        silent = missing_ranks(store, "alive", dist.get_rank(), dist.get_world_size(), seconds=10)
    except RuntimeError:
        silent = "0, or its machine,"  # which hosts the store
    return UserError(f"rank {silent or 'unknown'} stopped answering ({reason_of(error)}); look at "
                     "its machine, then resume with --resume=auto")


def not_finite_error(trainer: Trainer, steps_done: int, what: str, fallback: str) -> UserError:
    """Names the first parameter that is not finite, or gives the fallback reason; and the batch."""
    wrong = [name for name, p in trainer.model.named_parameters() if not p.isfinite().all()]
    reason = f"parameter {wrong[0]} is not finite" if wrong else fallback
    batch_index = max(0, steps_done - 1)
    shard, number = trainer.data.train.batches[batch_index]
    return UserError(f"{what}: {reason}; the batch is {batch_index}, number {number} of "
                     f"{shard.path}; lower the rates, or replay it from a checkpoint "
                     "(--save_every)")


# ── signals ───────────────────────────────────────────────────────────────────────────────────────

class SignalHandler:
    """The first signal stops the run after its step and saves; the second quits at once."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.number = 0         # of the first signal
        self.received_at = 0.0

    def __enter__(self):
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # SIGUSR1: SLURM's warning
        self.previous = {number: signal.signal(number, self.handle) for number in numbers}
        return self

    def handle(self, number: int, frame) -> None:
        if not self.trainer.stop_requested:
            self.number = number
            self.received_at = time.monotonic()
            self.trainer.stop_requested = True
            if self.trainer.hardware.rank == 0:
                with contextlib.suppress(OSError):  # the terminal may be gone
                    os.write(2, b"\nstopping after this step; a second signal quits at once\n")
        elif time.monotonic() > self.received_at + 1:
            # earlier it is the same one twice: from SLURM or the terminal, and from torchrun
            os._exit(128 + number)

    def check_launcher(self) -> None:
        """Stop if torchrun was killed: its ranks would keep training as orphans."""
        is_orphan = self.trainer.hardware.launcher_pid not in (0, os.getppid())
        if is_orphan and not self.trainer.stop_requested:
            signal.raise_signal(signal.SIGTERM)

    def __exit__(self, kind, error, traceback) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        if is_lost_connection(error) and self.trainer.stop_requested:
            os._exit(1)  # another rank failed and reports why; torchrun stopped this one


def report_stop(trainer: Trainer, log: Logger, saver: Saver, signals: SignalHandler,
                step: int) -> int:
    """Log how to resume. Returns the exit code: 128 + the signal that any rank received."""
    number = torch.tensor(signals.number, device=trainer.hardware.device)  # 0 without a signal
    if trainer.hardware.world_size > 1:
        dist.all_reduce(number, dist.ReduceOp.MAX)
    number = int(number)
    stopped = f"stopped by {signal.Signals(number).name} after step {step}"
    if saver.failed:
        raise UserError(f"{stopped}, and the checkpoint could not be written: the steps since the "
                        "last one are lost")
    resume = f"; resume with --resume={log.folder}" if checkpoints(log.folder) else ""
    log.write(f"{stopped}{resume}")
    return 128 + number


# ═══ 13  Before a run: hardware, memory, data ═════════════════════════════════════════════════════

def find_hardware(hp: Hyperparameters) -> Hardware:
    """The device of this rank, and the number types, attention and compiler to use on it.

    torchrun's variables give the ranks; without them there is one process and no group.
    """
    # fewer fragments; PyTorch reads it when CUDA starts
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    hardware = Hardware(rank=int(os.environ.get("RANK", 0)),
                        world_size=int(os.environ.get("WORLD_SIZE", 1)),
                        timeout=hp.timeout)
    if os.environ.get("GROUP_WORLD_SIZE") == "1":  # torchrun on one machine
        hardware.launcher_pid = os.getppid()
    hardware.device = find_device(hp, hardware.rank)

    gpu = None              # its properties
    has_bf16 = False        # for activations; older GPUs only emulate it, and it is slow on CPUs
    muon_has_bf16 = False   # for Newton–Schulz: some CPUs too
    if hardware.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(hardware.device)
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        muon_has_bf16 = has_bf16
        lowest = (9, 5) if torch.version.hip else (8, 9)  # AMD's 9.4 has FP8 with another bias
        hardware.has_fp8 = (gpu.major, gpu.minor) >= lowest
    elif hardware.device.type == "cpu":
        cpu = torch.cpu.get_capabilities()
        muon_has_bf16 = cpu.get("avx512_bf16") or cpu.get("amx_bf16")

    hardware.dtype = choose_dtype(hp.dtype, has_bf16)
    hardware.muon_dtype = choose_dtype(hp.muon_dtype, muon_has_bf16)
    if hp.dtype == "float64" and hp.muon_dtype == "auto":
        hardware.muon_dtype = torch.float64
    hardware.why_not_compiled = why_not_compile(hp, hardware.device.type, gpu)
    hardware.compile = not hardware.why_not_compiled
    can_flex = has_bf16 and hardware.compile  # has_bf16 is true on GPUs only
    if hp.attention == "flex" and not can_flex:
        raise UserError("--attention=flex: it trains only compiled, on a GPU with bfloat16 "
                        "(NVIDIA: from Ampere on); give --attention=banded")
    # the kernels for heads of more than 128 dimensions need the shared memory of an H100
    head_dim = hp.model_dim // hp.num_heads
    shared_memory = getattr(gpu, "shared_memory_per_block_optin", math.inf)  # AMD: not known
    heads_fit = head_dim <= 128 or shared_memory >= 200 * 1024
    if hp.attention == "flex" or (hp.attention == "auto" and can_flex and heads_fit):
        hardware.attention = "flex"
    return hardware


def find_device(hp: Hyperparameters, rank: int) -> torch.device:
    device_type = hp.device
    if device_type == "auto":
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device=mps: this machine has none; give --device=cpu")
    if device_type != "cuda":
        return torch.device(device_type)
    local_rank = int(os.environ.get("LOCAL_RANK", 0))  # among the ranks of this machine
    if local_rank >= torch.cuda.device_count():
        raise UserError(f"--device=cuda: rank {rank} needs GPU {local_rank} and there are "
                        f"{torch.cuda.device_count()}; start one process per GPU, or give "
                        "--device=cpu")
    return torch.device("cuda", local_rank)


def choose_dtype(name: str, has_bf16: bool) -> torch.dtype:
    if name == "auto":
        name = "bfloat16" if has_bf16 else "float32"
    return getattr(torch, name)


def why_not_compile(hp: Hyperparameters, device_type: str, gpu=None) -> str:
    """The reason not to use torch.compile; empty where it is used. gpu: its properties."""
    if hp.compile == "no":
        return "--compile=no"
    # training takes 6 for each parameter and token; a layer has about 12 · model_dim² parameters
    flops = 6 * 12 * hp.num_layers * hp.model_dim**2 * hp.num_steps * hp.batch_tokens
    if hp.compile == "auto" and device_type == "cpu" and flops < 1e14:
        # it makes a step a fifth faster, after a minute of compiling
        return "the run is too short for it to pay on a CPU"
    problem = ""  # from here on it is wanted: can it work?
    if device_type == "mps":
        problem = "there is no compiler for it"
    elif device_type == "cpu":
        compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
        if not shutil.which(compiler):
            problem = f"there is no C++ compiler ({compiler}) here"
    elif gpu.major < 7:
        problem = "there is no Triton for this GPU"
    else:
        try:
            start_triton()
        except (*FOREIGN_ERRORS, ImportError, subprocess.SubprocessError) as error:
            problem = (f"Triton cannot start ({reason_of(error)}), which needs a C compiler and "
                       f"Python.h (gcc, python3.{sys.version_info.minor}-dev)")
    if problem and hp.compile == "yes":
        raise UserError(f"--compile=yes: {problem}; give --compile=no")
    return problem


def start_triton() -> None:
    """Triton builds a library in C when it starts: raises where there is no C compiler."""
    from triton.runtime import driver
    driver.active.utils


def head_choices(head_dim: int):
    """Inductor's heuristics, but sums over a head in one pass: 0.7 ms of an h100 step, modelled."""
    from torch._inductor.choices import InductorChoices
    usual = InductorChoices.should_use_persistent_reduction

    class Choices(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features, cooperative_reduction: bool) -> bool:
            return features.reduction_numel == head_dim or usual(features, cooperative_reduction)

        def uuid(self) -> str:  # for the key of Inductor's cache
            return f"heads of {head_dim}"

    return Choices()


def prepare_device(hp: Hyperparameters, hardware: Hardware) -> None:
    """Settings of the whole process, before anything runs on the device."""
    device = hardware.device
    if device.type == "cuda":
        with explained(f"GPU {device.index} cannot be used",
                       "see nvidia-smi, install a PyTorch built for it, or give --device=cpu",
                       RuntimeError):
            torch.cuda.set_device(device)
            # starts CUDA and autograd's thread: fails here if CUDA does not work
            torch.zeros(1, device=device, requires_grad=True).backward()
        torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan anew for each length
        config = torch._inductor.config
        config.coordinate_descent_tuning = hp.tune_kernels
        config.max_autotune_gemm = hp.tune_products
        # it would print a table and two lines for each product
        config.autotune_num_choices_displayed = 0
        config.max_autotune_report_choices_stats = False
        head_dim = hp.model_dim // hp.num_heads
        config.inductor_choices_class = functools.partial(head_choices, head_dim)
    elif device.type == "cpu":
        torch.use_deterministic_algorithms(True)  # repeatable bit for bit; on CUDA it costs speed
        torch.utils.deterministic.fill_uninitialized_memory = False


# ── memory: which sequences fit ───────────────────────────────────────────────────────────────────
# fit_to_hardware shortens sequences by an estimate of the peak: parameter_bytes + sequence_bytes,
# fitted to traces of tests/gpu, which it exceeds by 0 to 25 %.

SEQUENCE_LENGTHS = ("sequence_tokens", "val_sequence_tokens")


def parameter_bytes(hp: Hyperparameters, hardware: Hardware) -> float:
    with torch.device("meta"):  # allocates nothing
        groups = optimizer_groups(GPT(hp, hardware))
    muon_weights = sum(p.nbytes for p in groups.pop("muon").values())
    adam_weights = sum(p.nbytes for params in groups.values() for p in params.values())
    total = 3 * (muon_weights + adam_weights)       # the weights, and their gradients twice
    total += 2 * adam_weights                       # two moments
    total += muon_weights / hardware.world_size     # momentum, shared among the ranks
    if hp.ngram_order:
        total += 14 * hp.ngram_tokens               # n-grams while they are sorted, on the host
    return total


def memory_per_token(hp: Hyperparameters, hardware: Hardware) -> dict[str, float]:
    """Bytes: of training the activations that the backward pass needs, of validation the logits."""
    per_layer = 12 * hp.model_dim                   # the stream and what attention makes of it
    per_layer += 2 * hp.mlp_ratio * hp.model_dim    # hidden units before and after ReLU²
    if hp.first_layer_values:
        per_layer += hp.model_dim                   # the values before they are mixed
    if hardware.attention == "banded" and hardware.device.type != "cpu":
        band = (max(hp.window_start, hp.window_end) // BLOCK + 1) * BLOCK
        per_layer += 3 * hp.num_heads * band        # attention weights, three copies
    itemsize = hardware.dtype.itemsize
    # once where their loss is compiled, otherwise four copies in fp32
    logits = hp.padded_vocab * (itemsize if hardware.compile else 16)
    train = hp.num_layers * per_layer * itemsize + logits
    if hp.fp8_head:
        train += 2 * hp.padded_vocab                # the gradient in FP8 and its transpose
    return dict(sequence_tokens=train, val_sequence_tokens=logits)


def sequence_bytes(hp: Hyperparameters, hardware: Hardware) -> float:
    """The most that a sequence takes beside the parameters, in training or validation."""
    per_token = memory_per_token(hp, hardware)
    return max(getattr(hp, name) * per_token[name] for name in SEQUENCE_LENGTHS)


def usable_bytes(total_bytes: int) -> float:
    """What is left of a GPU's memory for tensors, after fragmentation, CUDA and workspaces."""
    return 0.9 * total_bytes - 2**30


def available_bytes(hardware: Hardware) -> float:
    """What a run may use: the host's memory, divided among its ranks, or the smallest GPU's.

    One rank uses what is free now; several count the whole GPU, so that all choose alike.
    """
    if hardware.device.type != "cuda":
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / ranks_here
    if hardware.world_size == 1:
        free_bytes, _ = torch.cuda.mem_get_info(hardware.device)
        return usable_bytes(free_bytes)
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return usable_bytes(min(gpu.total_memory for gpu in gpus))


def can_be_halved(hp: Hyperparameters, length: int) -> bool:
    """Whether half of a sequence is whole blocks and segments."""
    shortest = math.lcm(BLOCK, hp.segment_tokens or 1)
    return length > 0 and length % (2 * shortest) == 0


def fitting_length(hp: Hyperparameters, hardware: Hardware, name: str, room: float) -> int:
    """A length that divides the batch, or the validation, halved until it fits.

    room: bytes that are left beside the parameters.
    """
    length = getattr(hp, name)
    if name == "sequence_tokens":
        length = math.gcd(length, hp.batch_tokens // hardware.world_size)
    if name == hp.val_length:
        length = math.gcd(length, hp.val_tokens, hp.val_start)
    if length % BLOCK:
        return getattr(hp, name)  # check_sequences says what does not divide
    per_token = memory_per_token(hp, hardware)[name]
    while length * per_token > room and can_be_halved(hp, length):
        length //= 2
    return length


def less_memory(hp: Hyperparameters) -> str:
    """The remedy where memory is short: sequences of half the length."""
    lengths = {name: getattr(hp, name) for name in SEQUENCE_LENGTHS}
    halves = [f"--{name}={length // 2}" for name, length in lengths.items()
              if can_be_halved(hp, length)]
    return f"give {' '.join(halves)}" if halves else "lower --model_dim or --num_layers"


def fit_to_hardware(hp: Hyperparameters, hardware: Hardware, keep: bool = False) -> list[str]:
    """Shorten sequences that do not fit, and turn FP8 off where there is none. Returns notes.

    Shorter sequences mean more micro-steps of the same number of tokens. Attention does not reach
    across sequences, and with align_documents more of them start at a document.

    Values of the command line stay. With keep (on resume) all stay, but for a sequence_tokens that
    does not divide the batch of a rank.
    """
    notes = []

    def change(name: str, value, reason: str) -> None:
        notes.append(f"{name}={value} instead of {getattr(hp, name)}: {reason}")
        hp.update({name: value}, "hardware")

    may_change = [name for name, origin in hp.origins.items() if origin != "command line"]
    if keep:
        divides = hp.batch_tokens % (hardware.world_size * hp.sequence_tokens) == 0
        may_change = [] if divides else ["sequence_tokens"]
    if hp.fp8_head and not hardware.has_fp8:
        if "fp8_head" in may_change:
            change("fp8_head", False, "there is no FP8 here")
        elif hardware.device.type != "cpu":  # a CPU emulates FP8
            raise UserError("--fp8_head=true: this device has no FP8, which takes compute "
                            "capability 8.9 (AMD: 9.5) or more; give --fp8_head=false "
                            "(on resume with --resume_anyway)")
    memory = available_bytes(hardware)
    parameters = parameter_bytes(hp, hardware)
    for name in SEQUENCE_LENGTHS:
        if name in may_change and getattr(hp, name):
            length = fitting_length(hp, hardware, name, room=memory - parameters)
            if length != getattr(hp, name):
                change(name, length, "to divide the batch or the validation, and to fit the memory")
    needed = parameters + sequence_bytes(hp, hardware)
    if needed > memory:
        notes.append(f"warning: a step needs about {needed / 2**30:.1f} GiB and there are "
                     f"{memory / 2**30:.1f}; {less_memory(hp)}")
    return notes


# ── warm-up: compile before the first step ────────────────────────────────────────────────────────

def warm_up(trainer: Trainer) -> None:
    """Compile every path on dummy tokens, with the first and the last window; then restore.

    The ranks may compile minutes apart: meanwhile they wait for each other an hour longer.
    """
    hp = trainer.hp
    hardware = trainer.hardware
    data = trainer.data
    set_timeout(hardware, hp.timeout + 3600)
    saved = copy_to_host(trainer.state_dict())  # to the host: the GPU may have no room
    batch = [dummy_sequence(trainer, hp.sequence_tokens)] * data.train.micro_steps
    for step in (0, hp.num_steps - 1):
        trainer.step(batch, step)
    with torch.no_grad():
        trainer.compiled_model.eval()
        trainer.compiled_model(*dummy_sequence(trainer, data.val.sequence_tokens), trainer.window)
    trainer.compiled_model.train()
    trainer.load_state_dict(saved)
    trainer.unread.clear()
    trainer.diverged.zero_()
    all_reduce_sum(torch.zeros(1, dtype=torch.int64), hardware)  # a barrier
    set_timeout(hardware, hp.timeout)
    gc.collect()
    gc.freeze()  # excludes the compiler's objects from later collections


def dummy_sequence(trainer: Trainer, length: int) -> tuple[Tensor, Tensor]:
    tokens = torch.arange(length + 1, device=trainer.hardware.device) % trainer.hp.vocab_size
    return tokens[:-1].int(), tokens[1:].long()


def count_compiled_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


# ── data: shards, token budget, manifests ─────────────────────────────────────────────────────────

def open_data(hp: Hyperparameters, hardware: Hardware) -> Data:
    """Open all shards; refuse what would fail in the middle of the run."""
    train = open_train(hp, hardware)
    val = open_val(hp, hardware)
    if hp.hellaswag:
        with data_module("hellaswag") as hellaswag:
            hellaswag.read_tasks(hp.hellaswag, hp.vocab_size, hp.document_token)
    train_hashes, _ = check_manifests(hp, train)
    val_hashes, bytes_per_token = check_manifests(hp, val)
    return Data(train, val, bytes_per_token, train_hashes | val_hashes)


def open_train(hp: Hyperparameters, hardware: Hardware) -> Loader:
    share = 1 - hp.ngram_share if hp.ngram_order else 1.0
    loader = Loader(hp.train_files, hp.batch_tokens, hp.sequence_tokens, hp.segment_tokens,
                    rank=hardware.rank, world_size=hardware.world_size, device=hardware.device,
                    vocab_size=hp.vocab_size, epochs=hp.epochs, seed=hp.seed,
                    document_token=hp.document_token, align_documents=hp.align_documents,
                    batches_needed=hp.num_steps, share=share)
    remedy = "lower --batch_tokens or --sequence_tokens"  # if there is no whole batch
    if 0 < len(loader) < hp.num_steps:
        epochs = math.ceil(hp.num_steps / (len(loader) // hp.epochs))
        remedy = f"repeat them with --epochs={epochs}, or lower it to --num_steps={len(loader)}"
        # measured, including what align_documents skips
        tokens_per_batch = sum(shard.num_tokens for shard in loader.shards) // len(loader)
        missing = missing_data(hp, tokens_per_batch).split()  # a script of data/, its argument
        if missing:
            command = " ".join([f"python data/{missing[0]}.py", *missing[1:]])
            remedy = f"fetch the rest with: {command}, or {remedy}"
    check_budget(loader, f"--num_steps={hp.num_steps}", hp.num_steps, remedy)
    return loader


def open_val(hp: Hyperparameters, hardware: Hardware) -> Loader:
    """The validation loader: a batch is one sequence, and the ranks take turns."""
    tokens = getattr(hp, hp.val_length)
    loader = Loader(hp.val_files, tokens, tokens, device=hardware.device, vocab_size=hp.vocab_size)
    needed = (hp.val_start + hp.val_tokens) // tokens
    possible = len(loader) * tokens - hp.val_start
    remedy = f"lower --val_start or --{hp.val_length}"
    if possible > 0:
        remedy = f"lower it to --val_tokens={possible}"
    check_budget(loader, f"--val_tokens={hp.val_tokens}", needed, remedy)
    return loader


def check_budget(loader: Loader, asked: str, needed: int, remedy: str) -> None:
    if len(loader) < needed:
        raise UserError(f"{loader.pattern}: {len(loader.paths)} shards hold {len(loader)} batches "
                        f"of {loader.batch_tokens} tokens and {asked} needs {needed}; {remedy}")


def check_manifests(hp: Hyperparameters, loader: Loader) -> tuple[dict, float | None]:
    """(sha256 of each shard, bytes of text per token), where data/ left a manifest."""
    held = {shard.path: shard.num_tokens for shard in loader.shards}
    if not has_data_scripts():
        return dict.fromkeys(held), None
    with data_module("shards") as shards:
        return shards.check_manifests(held, hp.vocab_size, hp.document_token)


def missing_data(hp: Hyperparameters, tokens_per_batch: int = 0) -> str:
    """What run.sh fetches: "enwik8", "fineweb N" for N training shards, or "" for nothing.

    tokens_per_batch: what a batch takes of the shards; 0: not known yet.
    """
    if hp.checkpoint or not has_data_scripts():
        return ""
    if not tokens_per_batch:
        skipped = hp.batch_tokens // 10 if hp.align_documents else 0  # to reach the next document
        tokens_per_batch = hp.batch_tokens + skipped
    with data_module("shards") as shards:
        return shards.what_to_fetch(hp.train_files, hp.val_files, hp.num_steps, tokens_per_batch,
                                    hp.epochs)


def has_data_scripts() -> bool:
    """False where train_gpt.py was copied without data/."""
    return (FOLDER / "data" / "shards.py").is_file()


@contextlib.contextmanager
def data_module(name: str):
    """Import a module of data/ for a with block; its UserError becomes ours."""
    folder = str(FOLDER / "data")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"data/{name}.py cannot be imported ({error}); it belongs beside "
                        "train_gpt.py, and data/requirements.txt lists its packages") from None
    try:
        yield module
    except module.UserError as error:
        raise UserError(str(error)) from None


# ═══ 14  Command line and main ════════════════════════════════════════════════════════════════════

# ── the historical systems on 8×H100 (README: The lineage) ────────────────────────────────────────

# The first is written out in full, so that no edit of a default changes any of them. Each of the
# others is the one before it and what it changed.
FLEX_2024_11_19 = dict(
    train_files="data/fineweb10B/fineweb_train_*.bin",
    val_files="data/fineweb10B/fineweb_val_*.bin",
    vocab_size=50257, vocab_multiple=128, pad_embeddings=True, document_token=50256,
    num_steps=1875, batch_tokens=8 * 64 * 1024, sequence_tokens=64 * 1024, segment_tokens=0,
    align_documents=False, epochs=1, val_every=125, val_tokens=10_485_760, val_start=0,
    val_sequence_tokens=0, target_loss=3.28,
    num_layers=12, num_heads=6, model_dim=768, mlp_ratio=4,
    value_layout="none", value_lambdas=1, first_layer_values=True, no_attention="none",
    rotary_base=10_000.0, rotary_fraction=1.0, rotary_endpoint=False, attention_scale=0.0,
    norm_eps=0.0, init_bound=1.0, logit_scale=1.0, softcap=30.0,
    ngram_order=0, ngram_tokens=0, ngram_share=0.0, copy_lengths=(),
    window_unit="token", window_start=1024, window_end=1024, window_rounding="down",
    short_window_layers="none", sum_loss=False,
    embed_rate=0.6, head_rate=0.008, scalar_rate=0.04, adam_beta1=0.9, adam_beta2=0.95,
    adam_eps=1e-8, adam_eps_first=False,
    muon_rate=0.04, muon_momentum=0.95, muon_momentum_start=0.85, muon_warmup_steps=500,
    muon_lerp=False, muon_nesterov=True, muon_decay=0.0, muon_steps=5, cooldown=562.0,
    rate_floor=0.0, dtype="auto", bf16_embeddings=True, fp8_head=False, fp8_x_scale=0.0,
    fp8_weight_scale=32.0, fp8_grad_scale=2.0**15, muon_dtype="auto", tune_kernels=True,
    tune_products=False, seed=1337)
VALUES_2024_12_04 = FLEX_2024_11_19 | dict(
    num_steps=1530, cooldown=600.0, value_layout="per_layer", first_layer_values=False,
    window_start=64, window_end=1792, adam_beta1=0.8, muon_rate=0.05, muon_warmup_steps=300)
UNET_2024_12_08 = VALUES_2024_12_04 | dict(
    num_steps=1480, value_layout="mirrored", value_lambdas=2, window_unit="token_in_block",
    muon_lerp=True)
MFU_2024_12_10 = UNET_2024_12_08 | dict(
    window_unit="block", window_start=128, window_end=1856)
SPARSE_2024_12_17 = MFU_2024_12_10 | dict(
    num_steps=1490, pad_embeddings=False, value_layout="ends", no_attention="second_decoder",
    rotary_base=1024.0, rotary_fraction=0.5, rotary_endpoint=True)
SOFTCAP_2025_01_04 = SPARSE_2024_12_17 | dict(
    num_steps=1390, cooldown=0.4, softcap=15.0, pad_embeddings=True, tune_kernels=False)
FP8_2025_01_13 = SOFTCAP_2025_01_04 | dict(
    num_steps=1395, rate_floor=0.1, pad_embeddings=False, norm_eps=2.0**-7, init_bound=0.75**0.5,
    window_start=0, window_end=1728, window_rounding="up", fp8_head=True, fp8_x_scale=2.0,
    fp8_grad_scale=2.0**13, tune_kernels=True)
WINDOWS_2025_01_16 = FP8_2025_01_13 | dict(
    num_steps=1393, attention_scale=0.12, short_window_layers="inner", adam_eps=1e-10)
ALIGNED_2025_07_13 = WINDOWS_2025_01_16 | dict(
    num_steps=1750, cooldown=0.45, batch_tokens=8 * 48 * 1024, sequence_tokens=48 * 1024,
    align_documents=True, val_sequence_tokens=256 * 1024, pad_embeddings=True,
    norm_eps=2.0**-23, logit_scale=0.0, sum_loss=True, head_rate=0.22, adam_eps_first=True,
    fp8_x_scale=0.0, fp8_weight_scale=448 / 24, fp8_grad_scale=448.0, tune_kernels=False)

# h100: the default of each field that another preset sets, for a+h100
H100 = {name: getattr(Hyperparameters, name) for name in ALIGNED_2025_07_13 | LAPTOP}

PRESETS = {"h100": H100, "laptop": LAPTOP,
           "2024-11-19": FLEX_2024_11_19, "2024-12-04": VALUES_2024_12_04,
           "2024-12-08": UNET_2024_12_08, "2024-12-10": MFU_2024_12_10,
           "2024-12-17": SPARSE_2024_12_17, "2025-01-04": SOFTCAP_2025_01_04,
           "2025-01-13": FP8_2025_01_13, "2025-01-16": WINDOWS_2025_01_16,
           "2025-07-13": ALIGNED_2025_07_13}


# ── options ───────────────────────────────────────────────────────────────────────────────────────

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text",
         tuple: "a tuple of whole numbers, such as (4,8)",
         str | tuple: "a name or a tuple of whole numbers and None, such as (3,)"}


def parse_value(kind, text: str):
    """Convert text for a field of this type; check_hyperparameters refuses what stays text."""
    if kind is str:
        return text
    if kind is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        return words.get(text.lower(), text)
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    if type(value) is float and not math.isfinite(value):  # 1e400
        return text
    if kind is float and type(value) is int:
        return float(value)
    if kind is int and type(value) is float and value.is_integer():  # 1e6
        return int(value)
    return value


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message.removeprefix('argument ')}; --help lists every option")


def build_parser(shown: Hyperparameters | None = None) -> Parser:
    """An option per field; its help is the field's comment and its value in `shown`."""
    usage = "train_gpt.py [--name=value …]\n\n" + __doc__.split("\n\n")[1]
    presets = f"Presets (--preset=NAME, later ones win): {', '.join(PRESETS)}"
    parser = Parser(usage=usage, epilog=presets, allow_abbrev=False, add_help=False,
                    argument_default=argparse.SUPPRESS,
                    formatter_class=lambda prog: argparse.HelpFormatter(prog, 4, 34, 120))
    group = parser.add_argument_group("hyperparameters, with their values on this machine")
    for line in inspect.getsource(Hyperparameters).splitlines():
        heading = re.fullmatch(r"    # (.+)", line)
        option = re.fullmatch(r"    (\w+): [\w |]+ = .+?(?:\s+# (.+))?", line)
        if heading:
            group = parser.add_argument_group(heading[1])
        elif option:
            name, meaning = option.groups("")
            options = dict(type=functools.partial(parse_value, FIELDS[name]),
                           metavar=str(getattr(shown, name, "")), help=meaning.replace("%", "%%"))
            if FIELDS[name] is bool:
                options |= dict(nargs="?", const=True)  # --name alone is true
            if name == "preset":
                options |= dict(action="append")
            group.add_argument(f"--{name}", **options)
    return parser


def parse_options(arguments: list[str]) -> dict:
    """What the command line says, and only that: {name: value}."""
    options, unknown = build_parser().parse_known_args(arguments)
    if unknown:
        word = unknown[0].lstrip("-").partition("=")[0]
        close = difflib.get_close_matches(word, FIELDS, n=1, cutoff=0.0)[0]
        raise UserError(f"{unknown[0]}: no such option; did you mean --{close}=…? (--help lists "
                        "them all)")
    values = vars(options)
    if "preset" in values:
        values["preset"] = "+".join(values["preset"])
    return values


def uses_gpus(device: str) -> bool:
    return device in ("auto", "cuda") and torch.cuda.is_available()


def resolve(options: dict, checkpoint: dict | None = None) -> Hyperparameters:
    """Defaults or the values of a checkpoint, then presets, then the options; the later win."""
    hp = Hyperparameters()
    if checkpoint:
        hp = replace(checkpoint["hyperparameters"])  # a copy: prepare_run compares with it
        hp.origins |= checkpoint["origins"]
    preset = options.get("preset", hp.preset)
    if preset == "auto":
        preset = "h100" if uses_gpus(options.get("device", hp.device)) else "laptop"
    if not checkpoint or preset != hp.preset:  # a checkpoint has the values of its preset
        names = preset.split("+")
        for name in names:
            if name not in PRESETS:
                raise UserError(f"--preset={name}: expected one of {', '.join(PRESETS)}")
        if "laptop" in names:  # first, so that a dated preset replaces it: DATED+laptop
            hp.update(LAPTOP_DESIGN, "preset laptop")
        for name in names:
            hp.update(PRESETS[name], "default" if name == "h100" else f"preset {name}")
    hp.update(options, "command line")
    hp.preset = preset
    check_hyperparameters(hp)
    # lengths that were typed; fit_to_hardware adjusts the others
    check_sequences(hp, tuple(name for name in SEQUENCE_LENGTHS if name in options))
    return hp


def parse_command_line(arguments: list[str]) -> Hyperparameters:
    """The hyperparameters of a new run."""
    return resolve(parse_options(arguments))


def prepare_run(options: dict) -> tuple[Hyperparameters, Run]:
    """The hyperparameters of the run, its folder and the checkpoint that it resumes from.

    A run that resumes has the checkpoint's own hyperparameters. Options that change the training
    are refused without --resume_anyway.
    """
    given = Hyperparameters()   # only to find the run
    given.update(options, "command line")
    if given.checkpoint or (given.show and not given.resume):  # neither continues nor makes a run
        return resolve(options), Run(Path())
    run = find_run(given)
    hp = resolve(options, run.checkpoint)
    if not run.checkpoint:
        return hp, run
    saved = asdict(run.checkpoint["hyperparameters"])
    changed = {name: f"{name} {saved[name]!r} → {value!r}" for name, value in asdict(hp).items()
               if value != saved[name]
               and name not in ("resume", "resume_anyway", "run_id", "show")}
    refused = [text for name, text in changed.items() if name not in MAY_CHANGE_ON_RESUME]
    if refused and not options.get("resume_anyway"):
        raise UserError(f"--resume={hp.resume}: this changes the training of the checkpoint: "
                        f"{', '.join(refused)}; leave these options out, or add --resume_anyway")
    run.notes.append(f"changed since the checkpoint: {', '.join(changed.values()) or 'nothing'}")
    return hp, run


def require(hp: Hyperparameters, holds, name: str, expected: str) -> None:
    if not holds:
        raise UserError(f"--{name}={getattr(hp, name)}: expected {expected}")


def require_multiple(hp: Hyperparameters, name: str, unit: int, of_what: str) -> None:
    value = getattr(hp, name)
    nearest = round(value / unit) * unit
    if name != "val_start":
        nearest = max(nearest, unit)
    require(hp, value % unit == 0, name, f"a multiple of {of_what}; the nearest is {nearest}")


def check_hyperparameters(hp: Hyperparameters) -> None:
    """Refuse impossible values and combinations, each in one sentence.

    They may come from the command line, an edit of the file or a checkpoint.
    """
    for name, kind in FIELDS.items():
        value = getattr(hp, name)
        is_of_kind = isinstance(value, int | float if kind is float else kind)
        if isinstance(value, bool):  # which Python counts as an int
            is_of_kind = kind is bool
        if isinstance(value, tuple):
            is_of_kind = is_of_kind and {*map(type, value)} <= {int, type(None)}
        if not is_of_kind:
            raise UserError(f"--{name}={value!r}: expected {KINDS[kind]}")
        if kind in (int, float):
            lowest, highest = BOUNDS.get(name, (0, math.inf))
            require(hp, value >= lowest, name, f"at least {lowest}")
            require(hp, value <= highest, name, f"at most {highest}")
    for name, choices in CHOICES.items():
        expected = f"one of {', '.join(choices)}"
        if FIELDS[name] == str | tuple:
            expected += ", or a tuple"
        is_tuple = isinstance(getattr(hp, name), tuple)
        require(hp, is_tuple or getattr(hp, name) in choices, name, expected)
    for name in ("train_files", "val_files", "log_dir"):
        require(hp, getattr(hp, name) != "", name, "a path")
    require(hp, re.fullmatch(r"([\w+-][\w.+-]*)?", hp.run_id), "run_id",
            "a name of letters, digits and . _ + -, not a path (that is --log_dir)")
    unit = math.lcm(4 * hp.num_heads, 16 if hp.fp8_head else 1)
    require_multiple(hp, "model_dim", unit,
                     f"{unit} (4 × num_heads{', and 16 for FP8' if hp.fp8_head else ''})")
    require(hp, hp.document_token < hp.vocab_size, "document_token",
            f"less than vocab_size={hp.vocab_size}")
    if hp.align_documents:
        require(hp, not (hp.segment_tokens or hp.ngram_order), "align_documents",
                "false with segment_tokens or ngram_order, whose text starts anywhere")
    if hp.ngram_order:
        require(hp, hp.padded_vocab <= 512, "ngram_order",
                "0 with more than 512 tokens: contexts are integers of 9 bits a token")
    lengths = {*hp.copy_lengths} & {*range(1, 65)}
    require(hp, hp.copy_lengths == tuple(sorted(lengths)), "copy_lengths",
            "lengths from 1 to 64, in order")
    for name, layers in (("no_attention", layers_without_attention(hp)),
                         ("short_window_layers", layers_with_short_window(hp))):
        require(hp, {*layers} <= {*range(hp.num_layers)}, name,
                f"layers from 0 to {hp.num_layers - 1}")
    require(hp, len(table_of_layer(hp)) == hp.num_layers, "value_layout",
            f"one entry for each of the {hp.num_layers} layers")
    require(hp, hp.checkpoint or not hp.sample, "checkpoint",
            "a model.pt or a run's folder to sample from")


def check_sequences(hp: Hyperparameters, names: tuple = SEQUENCE_LENGTHS,
                    world_size: int = 1) -> None:
    """Check the named lengths against the batch, its segments and the validation.

    resolve calls it for the lengths that the user gave, and main for all, after fit_to_hardware.
    """
    for name in names:
        require_multiple(hp, name, BLOCK, f"the mask's block of {BLOCK}")
    if "sequence_tokens" in names:
        sequence = hp.sequence_tokens
        ranks = f"{world_size} ranks × " if world_size > 1 else ""
        require_multiple(hp, "batch_tokens", world_size * sequence,
                         f"{ranks}sequence_tokens={sequence}")
        require(hp, sequence % (hp.segment_tokens or 1) == 0, "segment_tokens",
                f"a divisor of sequence_tokens={sequence}, such as {math.gcd(sequence, 512)}")
    else:
        require_multiple(hp, "batch_tokens", BLOCK, str(BLOCK))
    if hp.val_length in names:
        unit = getattr(hp, hp.val_length)
        for name in ("val_tokens", "val_start"):
            require_multiple(hp, name, unit, f"{hp.val_length}={unit}")


def show(hp: Hyperparameters) -> None:
    """Every value with its origin, and what run.sh needs to know."""
    for name, value in asdict(hp).items():
        print(f"{name}={value}\t# {hp.origins[name]}")
    gpus = torch.cuda.device_count() if uses_gpus(hp.device) else 0
    print(f"gpus={gpus}\t# that this PyTorch can use for the run")
    print(f"fetch={missing_data(hp)}\t# what run.sh fetches first")


def print_error(error: UserError | str) -> int:
    """Print the error as one line, and return the exit code.

    Most errors are the same on all ranks: the first of a machine prints, and the others wait for
    some seconds, in which torchrun stops them.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(5)
    rank = os.environ.get("RANK", "0")
    where = "error" if rank == "0" else f"error on rank {rank}"
    print(f"{where}: {error}", file=sys.stderr, flush=True)
    return 2


def use_model(hp: Hyperparameters, hardware: Hardware) -> int:
    """Score or sample from a saved model."""
    if hardware.rank == 0:
        model = load_model(hp.checkpoint, hardware)
        if hp.hellaswag:
            print(score_hellaswag(hp.hellaswag, model)["line"])
        else:
            print(sample(model, hp.sample, hp))
    return 0


def main(arguments: list[str]) -> int:
    code = None  # until the run has finished
    hp = None
    try:
        if {"--help", "-h"} & {*arguments}:
            others = [argument for argument in arguments if argument not in ("--help", "-h")]
            build_parser(parse_command_line(others)).print_help()
            return 0
        hp, run = prepare_run(parse_options(arguments))
        if hp.show:
            show(hp)
            return 0
        hardware = find_hardware(hp)
        prepare_device(hp, hardware)
        if hp.checkpoint:
            code = use_model(hp, hardware)
        else:
            run.notes += fit_to_hardware(hp, hardware, keep=run.checkpoint is not None)
            check_sequences(hp, world_size=hardware.world_size)
            code = train(hp, hardware, open_data(hp, hardware), run)
        return code
    except UserError as error:
        return print_error(error)
    except (RuntimeError, MemoryError) as error:
        if dist.is_initialized() and is_lost_connection(error):
            # at once: destroying a group that hangs would hang too
            os._exit(print_error(silent_ranks_error(error)))
        out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not out_of_memory and "can't allocate memory" not in str(error):
            raise
        if hp is None or hp.checkpoint:
            return print_error("out of memory; close other programs, or use another device")
        return print_error(f"out of memory with --sequence_tokens={hp.sequence_tokens}; "
                           f"{less_memory(hp)}")
    except KeyboardInterrupt:  # before the first step; from then on SignalHandler takes it
        if os.environ.get("RANK", "0") == "0":
            print("interrupted: there was nothing to save", file=sys.stderr)
        os._exit(128 + signal.SIGINT)
    finally:
        leave_group(finished=code is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
