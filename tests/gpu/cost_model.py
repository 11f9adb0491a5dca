"""Model the time of a training step on a GPU from its bytes and FLOPs, without a GPU.

    python fake_gpu.py --card=H100 --depth=wrapper --world_size=8 cost_model.py [--name=value …]

`./run.sh bench gpu` starts it. Of a Triton kernel it counts the bytes that Inductor's lists of
accesses say are read and written: slices as slices, gathers as rows, atomic additions twice. Of a
library's call it counts operands, results and FLOPs. The time of each is bytes / bandwidth or FLOPs
/ rate, whichever is longer. Collectives are counted apart: most of them overlap with kernels.

Masked reads count as reads; no caches, overlap, occupancy or limits by instructions. Two versions
of a program can be compared; a total is to be believed to perhaps 15 %. The last line is JSON.
"""
import collections
import contextlib
import json
import math
import re
import sys
from dataclasses import asdict, dataclass
from typing import NamedTuple

import fake_gpu
import numpy as np
import sympy
import torch
import torch._inductor.codegen.triton as triton_codegen
import torch._inductor.codegen.triton_combo_kernel as combo_codegen
import train_gpt
import training
from torch._inductor.codegen.common import RemovedArg
from torch._inductor.dependencies import MemoryDep
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.select_algorithm import AlgorithmSelectorCache, ExternKernelCaller
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_leaves

LAUNCH_MS = 0.003       # a launch that has to wait for the host
TEMPLATE_RATE = 0.85    # of Triton's matrix products, over the library's: assumed, not measured


class Rates(NamedTuple):
    """What kernels reach, of a data sheet: 0.9 of the bandwidth, 0.7 of the dense FLOPs."""
    bandwidth: float    # bytes/s
    bfloat16: float     # FLOP/s of large matrix products, accumulated in fp32
    attention: float    # FLOP/s of FlexAttention: 0.4 of the data sheet
    float8: float
    float32: float      # without TF32


RATES = {
    "H100": Rates(3.0e12, 700e12, 400e12, 1400e12, 47e12),
    "A100": Rates(1.4e12, 220e12, 125e12, math.nan, 14e12),
    "3090": Rates(0.84e12, 50e12, 28e12, math.nan, 25e12),
    "4090": Rates(0.91e12, 115e12, 66e12, 230e12, 58e12),
    "B200": Rates(7.2e12, 1600e12, 900e12, 3200e12, 53e12),
    "T4": Rates(0.29e12, math.nan, 3e12, math.nan, 5.7e12),
}
CATEGORIES = ("forward products", "backward products", "attention", "head and loss",
              "element-wise", "embeddings", "mask", "weight casts", "DDP buckets", "other copies",
              "gradient norm, flags", "Muon", "Adam")


@dataclass
class Item:
    """A launch or a library's call."""
    kind: str           # "triton", "library"; "hidden": a kernel inside a library's call
    name: str
    phase: str
    category: str
    bytes: int
    flops: float = 0.0
    ms: float = 0.0


items = []
collectives = []        # (phase, kind, bytes sent by this rank)
phase = "forward"
sizes = None            # the hyperparameters of the run, for the shapes


# ---- the bytes of a Triton kernel, when Inductor writes it ----

def hint(expression) -> int:
    return int(V.graph.sizevars.optimization_hint(expression))


def addresses(access: MemoryDep, samples: int = 2**15) -> np.ndarray:
    """Of the access at random points of the kernel's loops."""
    ranges = dict(zip(access.var_names, map(hint, access.size)))
    index = sympy.expand(access.index, identity=True)
    symbols = list(index.free_symbols)
    random = np.random.default_rng(0)
    points = [random.integers(0, max(1, ranges.get(symbol, 4096)), samples) for symbol in symbols]
    functions = dict(ModularIndexing=lambda x, divisor, modulus: x // divisor % modulus,
                     FloorDiv=lambda x, y: x // y, CleanDiv=lambda x, y: x // y,
                     Mod=lambda x, y: x % y, PythonMod=lambda x, y: x % y, Identity=lambda x: x)
    evaluate = sympy.lambdify(symbols, index, modules=[functions, "numpy"])
    return np.atleast_1d(evaluate(*points))


def touched_elements(name: str, accesses: list[MemoryDep]) -> int:
    """How many elements of a buffer these accesses read, or write, each counted once."""
    numel = hint(V.graph.get_numel(name))
    if not all(isinstance(access, MemoryDep) for access in accesses):
        return numel
    different = {(str(access.normalize().index), str(access.normalize().size)): access
                 for access in accesses}.values()
    indirect = [math.prod(map(hint, access.size)) for access in different if access.is_indirect()]
    if indirect:  # a gather or scatter: the rows, not the table
        return max(indirect)
    total = min(numel, sum(hint(access.get_numel()) for access in different))
    if len(different) == 1:
        return total
    layout = V.graph.get_buffer(name).get_layout()
    row = max((hint(stride) for stride, size in zip(layout.stride, layout.size) if hint(size) > 1),
              default=1)
    if not 1 < row <= 4096:  # more columns than the samples would find
        return total
    columns = set().union(*(np.unique(addresses(access) % row).tolist() for access in different))
    return min(total, numel * len(columns) // row)


def kernel_bytes(kernel) -> int:
    """Read and written by a kernel, as its arguments; what stays in registers does not count."""
    def is_argument(name: str) -> bool:
        tables = (kernel.args.input_buffers, kernel.args.output_buffers,
                  kernel.args.inplace_buffers)
        return any(name in table and not isinstance(table[name], RemovedArg) for table in tables)

    nodes = kernel.features.scheduler_nodes()
    written = {access.name for node in nodes for access in node.read_writes.writes}
    traffic = collections.defaultdict(list)
    for node in nodes:
        for way, accesses in (("read", node.read_writes.reads), ("write", node.read_writes.writes)):
            for access in accesses:
                name = V.graph.scheduler.mutation_real_name.get(access.name, access.name)
                if is_argument(name) and not (way == "read" and access.name in written):
                    traffic[way, name].append(access)
                    if getattr(access, "mode", None):  # an atomic addition reads, too
                        traffic["read for writing", name].append(access)
    return sum(touched_elements(name, accesses) * V.graph.get_dtype(name).itemsize
               for (_, name), accesses in traffic.items())


def count_bytes_in_kernels() -> None:
    """Inductor notes the bytes in the metadata of each kernel; a launch adds them up."""
    describe = triton_codegen.TritonKernel.inductor_meta_per_kernel
    describe_combination = combo_codegen.ComboKernel.combo_grid_meta

    def with_bytes(kernel):
        return describe(kernel) | dict(touched_bytes=kernel_bytes(kernel))

    def with_bytes_of_all(combination, *arguments):
        parts = map(kernel_bytes, combination.sub_kernels)
        return describe_combination(combination, *arguments) | dict(touched_bytes=sum(parts))

    def launch(kernel, *arguments, **options):
        fake_gpu.seen.launches.append((kernel.fn.__name__, None))
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        meta = kernel.inductor_meta.get("combo_grid_meta", kernel.inductor_meta)
        add_kernel(kernel.fn.__name__, tensors, meta.get("touched_bytes"))

    triton_codegen.TritonKernel.inductor_meta_per_kernel = with_bytes
    combo_codegen.ComboKernel.combo_grid_meta = with_bytes_of_all
    CachingAutotuner.run = launch


def choose_products() -> None:
    """Where Inductor chooses among products (max_autotune_gemm), a GPU would time them.

    Here a template takes the products that make the MLP's hidden units: with these it fuses ReLU².
    """
    def choose(cls, choices, input_nodes, layout, *arguments, **options):
        hidden_units = sizes.mlp_ratio * sizes.model_dim
        template_wins = [hint(n) for n in layout.size] == [sizes.sequence_tokens, hidden_units]
        return {choice: 1.0 if isinstance(choice, ExternKernelCaller) != template_wins else 2.0
                for choice in choices}
    AlgorithmSelectorCache.benchmark_in_current_process = classmethod(choose)


# ---- what is launched and called in a step ----

def is_table(tensor: torch.Tensor) -> bool:
    """An embedding, the head, or their gradients."""
    rows = (sizes.padded_vocab, sizes.vocab_size)
    return tensor.ndim == 2 and tensor.shape[0] in rows and tensor.shape[1] == sizes.model_dim


def is_logits(tensor: torch.Tensor) -> bool:
    return tensor.numel() >= sizes.sequence_tokens * sizes.padded_vocab


def category_of_kernel(name: str, tensors: list[torch.Tensor]) -> str:
    by_phase = {"Muon": "Muon", "Adam": "Adam", "check": "gradient norm, flags"}
    if phase in by_phase:
        return by_phase[phase]
    activations = sizes.sequence_tokens * sizes.model_dim
    if "flex_attention" in name and not any(map(is_logits, tensors)):
        return "attention"
    if any(map(is_logits, tensors)) or re.search("nll_loss|softmax|logsumexp", name):
        return "head and loss"
    if "embedding" in name:
        return "embeddings"
    if any(map(is_table, tensors)):
        return "head and loss"  # the cast of its weight or gradient
    if phase == "forward" and not any(tensor.is_floating_point() for tensor in tensors):
        return "mask"
    if re.search("cumsum|sort", name) and all(t.numel() < activations for t in tensors):
        return "mask"
    if not any(sizes.sequence_tokens in tensor.shape for tensor in tensors):
        return "weight casts"
    return "element-wise"


def add_kernel(name: str, tensors: list[torch.Tensor], touched_bytes: int | None) -> None:
    category = category_of_kernel(name, tensors)
    flops = 0.0
    rate = "attention"
    if touched_bytes is None:  # a template
        touched_bytes = sum(tensor.nbytes for tensor in tensors)
        if "flex_attention" in name:
            products = {"forward": 2, "backward": 7}[phase]  # S, O; dQ: S, dP, dQ; S, dP, dV, dK
            flops = products * attention_product_flops()
        else:
            first, second = tensors[:2]
            category = f"{phase} products"
            flops = 2.0 * first.numel() * second.numel() / sizes.model_dim / TEMPLATE_RATE
            rate = "bfloat16"
    name = re.sub(r"^triton_\w+?_fused_|_\d+$", "", name)
    add(Item("triton", name, phase, category, touched_bytes, flops), rate)


def attention_product_flops() -> float:
    """Of one product of a layer: all pairs of blocks in the window; mean of steps and layers."""
    hp = sizes
    blocks = hp.sequence_tokens // train_gpt.BLOCK
    layers = {*range(hp.num_layers)} - {*train_gpt.layers_without_attention(hp)}
    short = len(layers & {*train_gpt.layers_with_short_window(hp)})
    layers_of_window = collections.Counter()
    for step in range(hp.num_steps):
        window = train_gpt.window_at(hp, step)
        half = [max(1, size // 2) for size in window]  # train_gpt.short_window
        layers_of_window[train_gpt.blocks_back(*window) + 1] += len(layers) - short
        layers_of_window[train_gpt.blocks_back(*half) + 1] += short
    pairs = sum(count * sum(min(seen, block + 1) for block in range(blocks))
                for seen, count in layers_of_window.items()) / (hp.num_steps * len(layers))
    return 2 * pairs * train_gpt.BLOCK**2 * hp.model_dim


PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "_scaled_mm": (0, 1)}
ONLY_WRITTEN = {"copy_", "zero_", "fill_", "normal_", "uniform_", "_foreach_copy_",
                "_foreach_zero_"}
NOT_READ = {"zeros", "full", "ones", "zeros_like", "full_like", "ones_like", "new_zeros",
            "new_full"}


def cuda_bytes(value) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value)
               if isinstance(leaf, torch.Tensor) and leaf.is_cuda)


def add_call(function, args: tuple, kwargs: dict, result) -> None:
    """A library's call: by the schema, what it reads and what it writes."""
    name = function._opname
    total = 0
    writes_an_argument = False
    for position, argument in enumerate(function._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        size = cuda_bytes(value)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        writes_an_argument |= is_written
        if name == "_fused_adam_" and argument.name == "grads":
            is_written = False  # only with a scaler
        if name not in NOT_READ:
            total += size
        if is_written and not (argument.name == "out" or name in ONLY_WRITTEN):
            total += size
    if not writes_an_argument:
        total += cuda_bytes(result)
    tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
    flops = 0.0
    rate = "bandwidth"
    if name in PRODUCTS:
        first, second = (args[position] for position in PRODUCTS[name])
        flops = 2.0 * first.numel() * second.shape[-1]
        rate = "float8" if name == "_scaled_mm" else str(first.dtype).removeprefix("torch.")
    category = category_of_call(name, tensors, flops)
    shapes = " · ".join("×".join(map(str, tensor.shape)) for tensor in tensors[:3])
    add(Item("library", f"{name} {shapes}", phase, category, total, flops), rate)
    if name in ("addmm", "baddbmm") and args[0].shape == result.shape:
        # the library adds in place: ATen first copies the summand to the result
        add(Item("hidden", f"copy of the summand of {name}", phase,
                 "Muon" if phase == "Muon" else "other copies", 2 * result.nbytes), rate)


def category_of_call(name: str, tensors: list[torch.Tensor], flops: float) -> str:
    by_phase = {"Muon": "Muon", "Adam": "Adam", "check": "gradient norm, flags"}
    if phase in by_phase:
        return by_phase[phase]
    if flops:
        is_head = any(sizes.padded_vocab in tensor.shape for tensor in tensors)
        return "head and loss" if is_head else f"{phase} products"
    if name == "cat" and phase == "backward":
        return "DDP buckets"
    if name == "sort":
        return "mask"
    if name in ("add", "add_") and max(t.numel() for t in tensors) >= sizes.sequence_tokens:
        return "element-wise"
    return "other copies"


def add(item: Item, rate: str) -> None:
    name = next(name for name, card in fake_gpu.CARDS.items() if card == fake_gpu.card)
    rates = RATES[name]
    seconds = item.bytes / rates.bandwidth
    if item.flops:
        seconds = max(seconds, item.flops / getattr(rates, rate))
    item.ms = 1000 * seconds
    items.append(item)


# ---- one step ----

@contextlib.contextmanager
def in_phase(name: str, then: str | None = None):
    global phase
    before = phase
    phase = name
    yield
    phase = then or before


def mark_phase(owner, attribute: str, name: str, then: str | None = None) -> None:
    function = getattr(owner, attribute)

    def marked(*arguments, **options):
        with in_phase(name, then):
            return function(*arguments, **options)
    marked.no_sync = getattr(function, "no_sync", None)  # of DDP
    setattr(owner, attribute, marked)


def watch_calls() -> None:
    """Note what the harness sees."""
    note = fake_gpu.note
    check = fake_gpu.check_collective

    def note_call(function, args, kwargs, result):
        calls = len(fake_gpu.seen.calls)
        note(function, args, kwargs, result)
        if len(fake_gpu.seen.calls) > calls:
            add_call(function, args, kwargs, result)

    def note_collective(function, args):
        number = len(fake_gpu.seen.collectives)
        check(function, args)
        collectives.extend((phase, kind, sent)
                           for kind, sent, _ in fake_gpu.seen.collectives[number:])

    fake_gpu.note = note_call
    fake_gpu.check_collective = note_collective


def watch(trainer: train_gpt.Trainer) -> None:
    """Note what a step does, and in which phase."""
    global sizes
    sizes = trainer.hp
    watch_calls()
    mark_phase(torch.Tensor, "backward", "backward", then="check")
    mark_phase(trainer, "ddp_model", "forward")
    mark_phase(trainer.adam, "step", "Adam")
    mark_phase(trainer.muon, "start_updates", "Muon")
    mark_phase(trainer.muon, "finish_updates", "Muon")


def totals() -> dict:
    """By category, and of all."""
    rows = {name: [item for item in items if item.category == name] for name in CATEGORIES}
    rows["total"] = items
    rows["floor"] = [item for item in items if item.flops and item.phase in ("forward", "backward")]
    return {name: dict(launches=sum(item.kind == "triton" for item in some),
                       calls=sum(item.kind == "library" for item in some),
                       gigabytes=sum(item.bytes for item in some) / 1e9,
                       teraflops=sum(item.flops for item in some) / 1e12,
                       ms=sum(item.ms for item in some),
                       launch_ms=len(some) * LAUNCH_MS) for name, some in rows.items()}


def largest(count: int) -> list[dict]:
    """Of what is not a product: equal items of all layers together."""
    groups = collections.defaultdict(list)
    for item in items:
        if not item.flops:
            groups[item.category, item.phase, item.name, round(item.bytes, -5)].append(item)
    longest = sorted(groups.values(), key=lambda group: -sum(item.ms for item in group))
    return [asdict(group[0]) | dict(count=len(group), ms=sum(item.ms for item in group))
            for group in longest[:count]]


def print_table(rows: dict, others: list[dict]) -> None:
    print(f"{'':22}{'launches':>9}{'calls':>7}{'GB':>9}{'TFLOP':>8}{'ms':>9}{'launching ms':>14}")
    for name, row in rows.items():
        if row["launches"] + row["calls"]:
            print(f"{name:22}{row['launches']:9}{row['calls']:7}{row['gigabytes']:9.2f}"
                  f"{row['teraflops']:8.2f}{row['ms']:9.2f}{row['launch_ms']:14.2f}")
    print("the floor: products and attention alone, forward and backward")
    sent = collections.Counter()
    for _, kind, size in collectives:
        sent[kind] += size
    print("collectives, bytes from each rank, not in the total:",
          ", ".join(f"{kind} {size:,}" for kind, size in sent.items()) or "none")
    print("\nlargest items that are not products:")
    for group in others:
        print(f"{group['ms']:7.2f} ms {group['count']:4} × {group['bytes'] / 1e6:9.1f} MB  "
              f"{group['phase']:9} {group['name'][:100]}")


# ---- other numbers of GPUs, from the figures of this one ----

NVLINK = 360e9          # bytes/s of NCCL's all-reduce among the eight GPUs of a machine
NETWORK = 0.9 * 50e9    # bytes/s of a link of 400 Gb/s; machines have one for each of eight GPUs
LATENCY_MS = 0.01       # of a collective, for each doubling of the ranks


def scaled_step_ms(rows: dict, ranks: int, links: int = 8) -> tuple[float, float]:
    """(kernels, collectives that nothing hides) of a step with the same batch on so many GPUs.

    Products, attention and what is element-wise share the tokens. Casts, buckets, the tables of the
    embeddings and Adam are the same on every rank. The embeddings' gradients come last: Muon hides
    them, as far as it is long enough, and the backward pass the others.
    """
    here = fake_gpu.world_size
    per_token = sum(rows[name]["ms"] for name in ("forward products", "backward products",
                                                  "attention", "head and loss", "element-wise",
                                                  "other copies"))
    fixed = sum(rows[name]["ms"] for name in ("embeddings", "weight casts", "Adam"))
    shared_matrices = rows["Muon"]["ms"] * max(1.0, here / ranks)
    if ranks == 1:
        return per_token * here + fixed + shared_matrices, 0.0
    fixed += rows["DDP buckets"]["ms"]
    kernels = per_token * here / ranks + fixed + shared_matrices
    bandwidth = NVLINK if ranks <= 8 else min(NVLINK, links * NETWORK)
    sent = sum(size for _, kind, size in collectives if kind == "allreduce_")
    value_tables = {*train_gpt.table_of_layer(sizes)} - {None}
    tables = min(sent, 2 * (1 + len(value_tables)) * sizes.padded_vocab * sizes.model_dim)
    ms_per_byte = 1000 * 2 * (ranks - 1) / ranks / bandwidth
    backward = 2 / 3 * per_token * here / ranks
    exposed = max(0.0, tables * ms_per_byte - shared_matrices)
    exposed += max(0.0, (sent - tables) * ms_per_byte - backward)
    return kernels, exposed + len(collectives) * LATENCY_MS * math.log2(ranks)


def print_scaling(rows: dict, hp: train_gpt.Hyperparameters) -> None:
    print("\nthe same batch on other numbers of these GPUs, ms of a step and s of the run:")
    print(f"{'GPUs':>6}{'kernels':>10}{'exposed':>10}{'step':>8}{'run, s':>9}{'efficiency':>12}"
          f"{'one link':>10}")
    alone = sum(scaled_step_ms(rows, 1))
    for ranks in (1, 8, 16, 64, 256):
        kernels, exposed = scaled_step_ms(rows, ranks)
        step = kernels + exposed
        one_link = sum(scaled_step_ms(rows, ranks, links=1))
        print(f"{ranks:6}{kernels:10.1f}{exposed:10.1f}{step:8.1f}{step * hp.num_steps / 1000:9.1f}"
              f"{alone / ranks / step:12.2f}{one_link:10.1f}")
    print("one link: a step where machines have one link of 400 Gb/s instead of eight")


def main(arguments: list[str]) -> None:
    count_bytes_in_kernels()
    choose_products()
    trainer = training.build_trainer(arguments)
    watch(trainer)
    for step in range(2):  # the first compiles
        items.clear()
        collectives.clear()
        with in_phase("forward"):
            trainer.step(trainer.data.train.next_batch(), step)
    hp = trainer.hp
    preset = hp.preset.removeprefix("h100+")
    print(f"{fake_gpu.card.name}, rank 0 of {trainer.hardware.world_size}, {preset}: a step of "
          f"{hp.batch_tokens:,} tokens in sequences of {hp.sequence_tokens:,}, modelled")
    rows = totals()
    print_table(rows, largest(10))
    if trainer.hardware.world_size == 8:
        print_scaling(rows, hp)
    print(json.dumps(dict(rows=rows, collectives=collectives, largest=largest(80))))


if __name__ == "__main__":
    main(sys.argv[1:])
