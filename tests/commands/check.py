"""Would this run work? Answers in seconds, without training: ./run.sh check [--name=value …]

One line for each thing that can be wrong, with the remedy, then the table of parameters. The exit
code is 1 if anything is wrong. Under torchrun every rank takes part, and rank 0 prints.
"""
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
from train_gpt import GPT, Hardware, Hyperparameters, Loader, UserError  # noqa: E402

GIB = 2**30


def check_versions(hp: Hyperparameters, hardware: Hardware) -> str:
    found = {}
    for line in (ROOT / "requirements.txt").read_text().split():
        name, pinned = line.split("==")
        found[name] = importlib.metadata.version(name).split("+")[0]
        if found[name] != pinned:
            raise UserError(f"{name} {found[name]} is installed and {pinned} was tested; "
                            f"pip install {line}")
    return ", ".join(f"{name} {version}" for name, version in found.items())


def free_bytes(hardware: Hardware) -> tuple[int | None, str]:
    """(memory that is free now, or None where the system does not say; where)"""
    if hardware.device.type == "cuda":
        return torch.cuda.mem_get_info()[0], torch.cuda.get_device_name()
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return None, "this machine"
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine"


def check_memory(hp: Hyperparameters, hardware: Hardware) -> str:
    parameters = train_gpt.parameter_bytes(hp, hardware)
    needed = parameters + train_gpt.sequence_bytes(hp, hardware)
    free, name = free_bytes(hardware)
    if free is None:
        return f"about {needed / GIB:.1f} GiB needed; this system does not say how much is free"
    if needed > free:
        raise UserError(f"{name}: about {needed / GIB:.1f} GiB needed and {free / GIB:.1f} free; "
                        f"{train_gpt.less_memory(hp)}")
    return (f"{name}, about {needed / GIB:.1f} GiB needed of {free / GIB:.1f} free: "
            f"{parameters / GIB:.1f} of parameters, gradients and optimizers, "
            f"{(needed - parameters) / GIB:.1f} of activations")


def longest_sequences(hp: Hyperparameters, hardware: Hardware) -> str:
    """On GPUs of these sizes; the training is the same."""
    gpu = replace(hardware, device=torch.device("cuda"), dtype=torch.bfloat16, attention="flex",
                  compile=True)
    found = []
    for size in (80, 40, 24, 12, 8):
        memory = train_gpt.usable_bytes(size * GIB)
        fitted = replace(hp)
        room = memory - train_gpt.parameter_bytes(hp, gpu)
        for name in train_gpt.SEQUENCE_LENGTHS:
            setattr(fitted, name, train_gpt.fitting_length(fitted, gpu, name, room))
        fits = train_gpt.sequence_bytes(fitted, gpu) <= room
        found.append(f"{size} GB: {fitted.sequence_tokens:,}" if fits else f"{size} GB: none")
    return f"tokens per sequence on GPUs of {', '.join(found)}"


def check_compiler(hp: Hyperparameters, hardware: Hardware) -> str:
    return "compiled" if hardware.compile else f"not compiled: {hardware.why_not_compiled}"


def check_log_folder(hp: Hyperparameters, hardware: Hardware) -> str:
    folder = Path(hp.log_dir)
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        raise UserError(f"--log_dir={hp.log_dir}: {folder} cannot be written; give another folder")
    return f"{folder.resolve()} has {shutil.disk_usage(folder).free / GIB:.0f} GiB free"


def check_batch(hp: Hyperparameters, hardware: Hardware) -> str:
    train_gpt.check_sequences(hp, world_size=hardware.world_size)
    steps = hp.batch_tokens // (hardware.world_size * hp.sequence_tokens)
    return f"{hardware.world_size} ranks × {steps} micro-steps × {hp.sequence_tokens:,} tokens"


def describe_loader(hp: Hyperparameters, loader: Loader, needed: int) -> str:
    hashes, _ = train_gpt.check_manifests(hp, loader)
    described = "with" if any(hashes.values()) else "without"
    return (f"{len(loader.paths)} shards, {described} checksums, hold {len(loader):,} batches or "
            f"more and {needed:,} are needed")


def check_train_data(hp: Hyperparameters, hardware: Hardware) -> str:
    loader = open_shards(train_gpt.open_train, hp, hardware)
    return describe_loader(hp, loader, hp.num_steps)


def check_val_data(hp: Hyperparameters, hardware: Hardware) -> str:
    loader = open_shards(train_gpt.open_val, hp, hardware)
    return describe_loader(hp, loader, (hp.val_start + hp.val_tokens) // loader.sequence_tokens)


def open_shards(open_loader, hp: Hyperparameters, hardware: Hardware) -> Loader:
    try:
        return open_loader(hp, hardware)
    except UserError as error:
        missing = train_gpt.missing_data(hp)
        if not missing or "fetch the rest" in str(error):
            raise
        source, *shards = missing.split()
        command = " ".join([f"python data/{source}.py", *shards])
        raise UserError(f"{error} (for this run: {command})") from None


def check_collective(hp: Hyperparameters, hardware: Hardware) -> str:
    if hardware.world_size == 1:
        return "one process, none needed"
    start = time.perf_counter()
    total, = train_gpt.all_reduce_sum(
        torch.tensor([float(hardware.rank)], device=hardware.device), hardware)
    expected = sum(range(hardware.world_size))
    if total != expected:
        raise UserError(f"the sum of the ranks is {total}, not {expected}; check the network")
    milliseconds = 1000 * (time.perf_counter() - start)
    return f"{hardware.world_size} ranks answered in {milliseconds:.1f} ms"


# ---- a small step, compared with the CPU's ----

def copy_of(x: torch.Tensor) -> torch.Tensor:
    return x.detach().to("cpu", torch.float32, copy=True)


SMALL = dict(vocab_size=1000, document_token=999, num_layers=3, num_heads=2, model_dim=256,
             sequence_tokens=1024, window_start=384, window_end=384)
# What the small model takes from the run that is checked.
TECHNIQUES = ("attention_scale", "norm_eps", "logit_scale", "softcap", "sum_loss", "adam_eps",
              "fp8_head", "fp8_x_scale", "fp8_weight_scale", "fp8_grad_scale", "rotary_base",
              "rotary_fraction", "rotary_endpoint")


def small_step(run_hp: Hyperparameters, hardware: Hardware,
               gradients: dict | None = None) -> tuple[dict, dict]:
    """(loss and gradients, updates by both optimizers) of a step of a small model.

    Weights and tokens are always the same. With gradients given, the optimizers take those: what
    differs in the updates is then the optimizers' own doing.
    """
    short_layers = (1,) if train_gpt.layers_with_short_window(run_hp) else ()
    hp = Hyperparameters(**SMALL, short_window_layers=short_layers,
                         **{name: getattr(run_hp, name) for name in TECHNIQUES})
    generator = torch.Generator().manual_seed(0)
    model = GPT(hp, hardware)
    tokens = torch.randint(hp.vocab_size - 1, (hp.sequence_tokens + 1,), generator=generator)
    tokens[::171] = hp.document_token
    with torch.no_grad():
        for p in model.parameters():  # nothing is zero: every gradient counts
            values = torch.randn(p.shape, generator=generator)
            p.copy_(0.05 * values if p.ndim == 2 else 1 + 0.2 * values)
    model.to(hardware.device)
    forward = model
    if hardware.compile:
        forward = torch.compile(model, dynamic=False, fullgraph=True)
    # All ranks have the same gradients, and so the same mean. Small buckets: a graph in pieces.
    forward = train_gpt.wrap_ddp(forward, hardware, bucket_mb=1)
    tokens = tokens.to(hardware.device)
    window = torch.tensor(train_gpt.window_at(hp, 0), dtype=torch.int32, device=hardware.device)
    loss = forward(tokens[:-1].int(), tokens[1:], window)
    (loss * hp.sequence_tokens if hp.sum_loss else loss).backward()
    named = dict(model.named_parameters())
    computed = {"loss": copy_of(loss)} | {name: copy_of(p.grad) for name, p in named.items()}
    before = {name: copy_of(p) for name, p in named.items()}
    for name, p in named.items():
        p.grad.copy_((gradients or computed)[name])
    alone = replace(hardware, rank=0, world_size=1)
    for optimizer in train_gpt.build_optimizers(hp, model, alone):
        optimizer.step()
    updates = {f"update of {name}": copy_of(p) - before[name] for name, p in named.items()}
    return computed, updates


def rounding_limit(name: str, expected: torch.Tensor, hardware: Hardware) -> float:
    """How far rounding may move a tensor, as a part of its norm."""
    is_update = name.startswith("update of ")
    rounded = hardware.dtype != torch.float32
    if is_update:
        rounded = rounded or hardware.muon_dtype != torch.float32
    if not rounded:
        return 2e-3
    if is_update:
        return 0.1
    if name == "loss":
        return 0.01
    return 0.06 if expected.ndim == 2 else 0.5


def step_error(hp: Hyperparameters, hardware: Hardware) -> tuple[float, str]:
    """(how far this device is from the CPU in fp32, in units of the limit; where it is farthest)"""
    computed, updates = small_step(hp, hardware)
    expected, _ = small_step(hp, Hardware())
    _, expected_updates = small_step(hp, Hardware(), computed)
    expected |= expected_updates
    errors = {}
    for name, x in (computed | updates).items():
        y = expected[name]
        error = ((x - y).norm() / y.norm()).nan_to_num(1e9).item()
        errors[name] = error / rounding_limit(name, y, hardware)
    worst = max(errors, key=errors.get)
    return errors[worst], worst


def check_step(hp: Hyperparameters, hardware: Hardware) -> str:
    if hardware.device.type == "cpu":
        return "not needed: the CPU's own step is what the tests compare with"
    start = time.perf_counter()
    everyone = [(*step_error(hp, hardware), hardware.rank)]
    if hardware.world_size > 1:
        own = everyone[0]
        everyone = [None] * hardware.world_size
        dist.all_gather_object(everyone, own)
    error, name, rank = max(everyone)
    if not error <= 1:
        raise UserError(f"GPU {rank} computes something else than the CPU: {name} is off by "
                        f"{error:.3g} times what rounding explains; try --attention=banded, then "
                        "--compile=no, and report it")
    return (f"a small step on each of {hardware.world_size} GPUs agrees with the CPU's "
            f"({error:.2f} of what rounding explains, {time.perf_counter() - start:.0f} s)")


CHECKS = {"versions": check_versions, "memory": check_memory, "compiler": check_compiler,
          "log folder": check_log_folder, "batch": check_batch,
          "training data": check_train_data, "validation data": check_val_data,
          "collective": check_collective, "step": check_step}


def parameter_table(hp: Hyperparameters, hardware: Hardware) -> list[str]:
    """Every parameter: shape, optimizer, rate, size of an update, owner rank; then the totals."""
    with torch.device("meta"):
        model = GPT(hp, hardware)
    groups = train_gpt.optimizer_groups(model)
    rates = train_gpt.base_rates(hp)
    muon = train_gpt.Muon(groups["muon"].values(), world_size=hardware.world_size)
    owners = {p: index // muon.params_per_rank(group) for group in muon.param_groups
              for index, p in enumerate(group["params"])}
    rows = [f"{'parameter':34}{'shape':>16}  {'optimizer':10}{'rate':>8}  {'update':24}"
            f"{'owner':>6}"]
    for kind, params in groups.items():
        for name, p in params.items():
            optimizer = "Adam"
            update = "rate × about 1"
            if kind == "muon":
                optimizer = "Muon"
                update = f"rate × {train_gpt.update_scale(p):.3g} × orthogonal"
            rows.append(f"{name:34}{str(tuple(p.shape)):>16}  {optimizer:10}{rates[kind]:>8g}  "
                        f"{update:24}{owners.get(p, 'all'):>6}")
    sizes = {kind: sum(p.numel() for p in params.values()) for kind, params in groups.items()}
    num_tables = 1 + len(model.value_embeds)
    active = sizes["muon"] + sizes["head"] + sizes["scalar"] + num_tables * hp.model_dim
    rows.append(f"parameters: {sum(sizes.values()):,} in all, {active:,} active per token, "
                f"{sizes['embed']:,} embeddings")
    return rows


def run_checks(hp: Hyperparameters, hardware: Hardware) -> bool:
    """Every check, on every rank; rank 0 prints the result of each."""
    passed = True
    for name, check in CHECKS.items():
        try:
            line = f"ok    {name}: {check(hp, hardware)}"
        except UserError as error:
            line = f"FAIL  {name}: {error}"
            passed = False
        if hardware.rank == 0:
            print(line, flush=True)
    return passed


def main(arguments: list[str]) -> int:
    finished = False
    try:
        hp = train_gpt.parse_command_line(arguments)
        hardware = train_gpt.find_hardware(hp)
        wanted = replace(hp)
        # Tuning kernels takes minutes, also for a small step.
        train_gpt.prepare_device(replace(hp, tune_kernels=False), hardware)
        notes = train_gpt.fit_to_hardware(hp, hardware)
        train_gpt.check_sequences(hp)
        train_gpt.join_group(hardware)
        passed = run_checks(hp, hardware)
        if hardware.rank == 0:
            print(*notes, *parameter_table(hp, hardware), longest_sequences(wanted, hardware),
                  sep="\n")
            verdict = "this run would work"
            if not passed:
                verdict = "this run would not work: see FAIL above"
            print(verdict, flush=True)
        finished = True
        return 0 if passed else 1
    except UserError as error:
        return train_gpt.print_error(error)
    finally:
        train_gpt.leave_group(finished)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
