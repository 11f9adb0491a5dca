"""Would this run work? Says so in seconds and without training: ./run.sh check [--name=value …]

One line for each thing that can be wrong, with the remedy, then the table of parameters. Exit code 1 if anything is.
Under torchrun every rank takes part in the collective, and rank 0 speaks.
"""
import dataclasses
import importlib.metadata
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import train_gpt  # noqa: E402
from train_gpt import GPT, Hyperparameters, Loader, Hardware, UserError  # noqa: E402


def check_versions(hp: Hyperparameters, hardware: Hardware) -> str:
    found = {}
    for line in (ROOT / "requirements.txt").read_text().split():
        name, pinned = line.split("==")
        found[name] = importlib.metadata.version(name).split("+")[0]
        if found[name] != pinned:
            raise UserError(f"{name} {found[name]} is installed and {pinned} was tested; pip install {line}")
    return ", ".join(f"{name} {version}" for name, version in found.items())


def check_memory(hp: Hyperparameters, hardware: Hardware) -> str:
    state, per_token = train_gpt.memory_needed(hp, hardware)
    needed = state + hp.sequence_tokens * per_token
    if hardware.device.type == "cuda":
        free, name = torch.cuda.mem_get_info()[0], torch.cuda.get_device_name()
    elif "SC_AVPHYS_PAGES" in os.sysconf_names:
        free, name = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine"
    else:
        return f"about {needed / 2**30:.1f} GiB needed; this system does not say how much is free"
    if needed > free:
        raise UserError(f"{name}: about {needed / 2**30:.1f} GiB needed and {free / 2**30:.1f} free; halve "
                        f"--sequence_tokens (to {hp.sequence_tokens // 2}): the batch and the training stay the same")
    return (f"{name}, about {needed / 2**30:.1f} GiB needed of {free / 2**30:.1f} free: {state / 2**30:.1f} of "
            f"parameters, gradients and optimizers, {(needed - state) / 2**30:.1f} of activations")


def cards_table(hp: Hyperparameters, hardware: Hardware) -> str:
    """How long a sequence GPUs of these sizes would run with sequence_tokens=0; the training is the same."""
    gpu = dataclasses.replace(hardware, dtype=torch.bfloat16, attention="flex", compile=True)
    state, per_token = train_gpt.memory_needed(hp, gpu)
    longest = {size: max((length for length in train_gpt.sequence_lengths(hp)
                          if state + length * per_token <= train_gpt.usable(size * 2**30)), default=0)
               for size in (80, 40, 24, 12, 8)}
    return "tokens a sequence on GPUs of " + ", ".join(
        f"{size} GB: {length:,}" if length else f"{size} GB: none" for size, length in longest.items())


def check_compiler(hp: Hyperparameters, hardware: Hardware) -> str:
    return "compiled" if hardware.compile else f"not compiled{hardware.why_not_compiled}"


def check_disk(hp: Hyperparameters, hardware: Hardware) -> str:
    folder = Path(hp.log_dir)
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        raise UserError(f"--log_dir={hp.log_dir}: {folder} cannot be written; give another folder")
    return f"{folder.resolve()} has {shutil.disk_usage(folder).free / 2**30:.0f} GiB free"


def check_data(hp: Hyperparameters, files: str, needed: int, asked: str, **options) -> str:
    try:
        loader = Loader(files, sequence_tokens=hp.sequence_tokens, **options)
    except UserError as error:
        raise UserError(f"{error} ({train_gpt.fetch_command(hp)})") from None
    train_gpt.check_budget(files, loader, needed, asked, train_gpt.fetch_command(hp))
    train_gpt.check_manifest(hp, loader.shards)
    return f"{len(loader.paths)} shards hold {len(loader):,} batches, {needed:,} are asked for"


def check_train_data(hp: Hyperparameters, hardware: Hardware) -> str:
    return check_data(hp, hp.train_files, hp.num_steps, "num_steps", batch_tokens=hp.batch_tokens,
                      segment_tokens=hp.segment_tokens, epochs=hp.epochs)


def check_val_data(hp: Hyperparameters, hardware: Hardware) -> str:
    return check_data(hp, hp.val_files, hp.val_tokens // hp.sequence_tokens, "val_tokens",
                      batch_tokens=hp.sequence_tokens)


def check_batch(hp: Hyperparameters, hardware: Hardware) -> str:
    steps = train_gpt.micro_steps(hp, hardware)
    return f"{hardware.world_size} ranks × {steps} micro-steps × {hp.sequence_tokens:,} tokens"


def check_collective(hp: Hyperparameters, hardware: Hardware) -> str:
    if hardware.world_size == 1:
        return "one process, none needed"
    ranks = torch.tensor(float(hardware.rank), device=hardware.device)
    start = time.perf_counter()
    dist.all_reduce(ranks)
    if ranks.item() != sum(range(hardware.world_size)):
        raise UserError(f"the ranks add up to {ranks.item()}, not {sum(range(hardware.world_size))}; check the network")
    return f"{hardware.world_size} ranks answered in {1000 * (time.perf_counter() - start):.1f} ms"


def copied(x: torch.Tensor) -> torch.Tensor:
    return x.detach().to("cpu", torch.float32, copy=True)


def small_step(hardware: Hardware, fp8_head: bool, gradients: dict | None = None) -> tuple[dict, dict]:
    """(loss and gradients, updates by both optimizers) of a step of a small model: weights and tokens are always the same.

    With gradients given, the optimizers take those: what differs in the updates is then the optimizers' own doing.
    """
    hp = Hyperparameters(vocab_size=1000, document_token=999, num_layers=3, num_heads=2, model_dim=256, sequence_tokens=1024,
                         window_start=384, window_end=384, fp8_head=fp8_head, **train_gpt.SPARSE)
    random, model = torch.Generator().manual_seed(0), GPT(hp, hardware.dtype, hardware.attention)
    tokens = torch.randint(hp.vocab_size - 1, (hp.sequence_tokens + 1,), generator=random)
    tokens[::171] = hp.document_token
    with torch.no_grad():
        for p in model.parameters():  # nothing is zero, so that every gradient counts
            p.copy_(torch.randn(p.shape, generator=random) * (0.05 if p.ndim == 2 else 0.2) + (p.ndim < 2))
    model.to(hardware.device)
    forward = torch.compile(model, dynamic=False, fullgraph=True) if hardware.compile else model
    # all ranks have the same gradients, and so the same mean; small buckets: a graph in pieces
    forward = train_gpt.wrap_ddp(forward, hardware, bucket_mb=1)
    tokens, window = tokens.to(hardware.device), torch.tensor(train_gpt.window_at(hp, 0), dtype=torch.int32, device=hardware.device)
    loss = forward(tokens[:-1].int(), tokens[1:], window)
    loss.backward()
    named = dict(model.named_parameters())
    seen = dict(loss=copied(loss)) | {name: copied(p.grad) for name, p in named.items()}
    before = {name: copied(p) for name, p in named.items()}
    for name, p in named.items():
        p.grad.copy_((gradients or seen)[name])
    for optimizer in train_gpt.build_optimizers(hp, model, replace(hardware, rank=0, world_size=1)):
        optimizer.step()
    return seen, {f"update of {name}": copied(p) - before[name] for name, p in named.items()}


def step_error(hardware: Hardware, fp8_head: bool = False) -> tuple[float, str]:
    """(how far this device is from the CPU's fp32 path, as a part of what rounding explains; where it is farthest)"""
    seen, updates = small_step(hardware, fp8_head)
    right, _ = small_step(Hardware(), fp8_head)
    _, right_updates = small_step(Hardware(), fp8_head, seen)
    errors = {}
    for (name, x), y in zip((seen | updates).items(), (right | right_updates).values()):
        precise = hardware.dtype == torch.float32 and not (name in updates and hardware.muon_dtype != torch.float32)
        limit = 2e-3 if precise else 0.01 if name == "loss" else 0.1 if name in updates else 0.06 if y.ndim == 2 else 0.5
        errors[name] = ((x - y).norm() / y.norm()).nan_to_num(1e9).item() / limit
    worst = max(errors, key=errors.get)
    return errors[worst], worst


def check_step(hp: Hyperparameters, hardware: Hardware) -> str:
    if hardware.device.type == "cpu":
        return "not needed: the CPU's own path is what the tests compare with"
    start, worst = time.perf_counter(), [(*step_error(hardware, hp.fp8_head), hardware.rank)]
    if hardware.world_size > 1:
        everyone = [None] * hardware.world_size
        dist.all_gather_object(everyone, worst[0])
        worst = everyone
    error, name, rank = max(worst)
    if not error <= 1:
        raise UserError(f"GPU {rank} computes something else than the CPU: {name} is off by {error:.3g} times what rounding "
                        "explains; try --attention=banded, then --compile=no, and report it")
    return (f"a small step on each of {hardware.world_size} GPUs agrees with the CPU's ({error:.2f} of what rounding explains, "
            f"{time.perf_counter() - start:.0f} s)")


CHECKS = {"versions": check_versions, "memory": check_memory, "compiler": check_compiler, "log folder": check_disk,
          "batch": check_batch, "training data": check_train_data, "validation data": check_val_data,
          "collective": check_collective, "step": check_step}


def parameter_table(hp: Hyperparameters, hardware: Hardware) -> list[str]:
    """Every parameter: shape, optimizer, rate, size of an update, owner rank; then the totals."""
    with torch.device("meta"):
        model = GPT(hp, hardware.dtype, hardware.attention)
    groups = train_gpt.optimizer_groups(hp, model)
    muon = train_gpt.Muon(groups["muon"]["params"].values(), world_size=hardware.world_size)
    owners = {id(p): index // muon.share_of(group) for group in muon.param_groups for chunk, _ in muon.chunks(group)
              for index, p in enumerate(chunk)}
    rows = [f"{'parameter':34}{'shape':>16}  {'optimizer':10}{'rate':>8}  {'update':20}{'owner':>6}"]
    for kind, group in groups.items():
        for name, p in group["params"].items():
            update = (f"rate × {train_gpt.update_scale(p):.3g} × orthogonal" if kind == "muon" else "rate × about 1")
            rows.append(f"{name:34}{str(tuple(p.shape)):>16}  {'Muon' if kind == 'muon' else 'Adam':10}"
                        f"{group['lr']:>8g}  {update:24}{owners.get(id(p), 'all'):>4}")
    sizes = {kind: sum(p.numel() for p in group["params"].values()) for kind, group in groups.items()}
    tables = 1 + len(model.value_embeds)
    active = sizes["muon"] + sizes["head"] + sizes["scalar"] + tables * hp.model_dim
    rows.append(f"parameters: {sum(sizes.values()):,} in all, {active:,} active per token, {sizes['embed']:,} embeddings")
    return rows


def run_checks(hp: Hyperparameters, hardware: Hardware) -> bool:
    """Every check, on every rank; rank 0 says how each went."""
    passed = True
    for name, check in CHECKS.items():
        try:
            line = f"ok    {name}: {check(hp, hardware)}"
        except UserError as error:
            passed, line = False, f"FAIL  {name}: {error}"
        if hardware.rank == 0:
            print(line, flush=True)
    return passed


def main(arguments: list[str]) -> int:
    finished = False
    try:
        hp = train_gpt.parse_command_line(arguments)
        hardware = train_gpt.find_hardware(hp)
        train_gpt.prepare_device(hardware, replace(hp, tune_kernels=False))  # which takes minutes, also for a small step
        passed = run_checks(hp, hardware)
        if hardware.rank == 0:
            print(*parameter_table(hp, hardware), cards_table(hp, hardware), sep="\n")
            print("this run would work" if passed else "this run would not work: see FAIL above", flush=True)
        finished = True
        return 0 if passed else 1
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        train_gpt.leave_group(finished)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
