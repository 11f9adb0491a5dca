"""Would this run work? Says so in seconds and without training: ./run.sh check [--name=value …]

One line for each thing that can be wrong, with the remedy, then the table of parameters. Exit code 1 if anything is.
Under torchrun every rank takes part in the collective, and rank 0 speaks.
"""
import importlib.metadata
import os
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import train_gpt  # noqa: E402
from train_gpt import GPT, Hyperparameters, Loader, Place, UserError  # noqa: E402


def check_versions(hp: Hyperparameters, place: Place) -> str:
    found = {}
    for line in (ROOT / "requirements.txt").read_text().split():
        name, pinned = line.split("==")
        found[name] = importlib.metadata.version(name).split("+")[0]
        if found[name] != pinned:
            raise UserError(f"{name} {found[name]} is installed and {pinned} was tested; pip install {line}")
    return ", ".join(f"{name} {version}" for name, version in found.items())


def memory_needed(hp: Hyperparameters, place: Place, model: GPT) -> int:
    """Bytes at the peak of a step, estimated: weights, gradients, optimizer state, and what backward keeps."""
    muon = sum(p.numel() for p in train_gpt.optimizer_groups(hp, model)["muon"]["params"].values())
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    state = 2 * (total - 4 * muon) + 4 * muon / place.world_size  # Adam's two moments; Muon's momentum is shared out
    per_token = hp.num_layers * (12 + 2 * hp.mlp_ratio) * hp.model_dim + 3 * hp.padded_vocab
    return int(2 * total + state + hp.sequence_tokens * per_token * place.dtype.itemsize)


def check_memory(hp: Hyperparameters, place: Place) -> str:
    with torch.device("meta"):
        needed = memory_needed(hp, place, GPT(hp, place.dtype, place.attention))
    if place.device.type == "cuda":
        free, name = torch.cuda.mem_get_info()[0], torch.cuda.get_device_name()
    elif "SC_AVPHYS_PAGES" in os.sysconf_names:
        free, name = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine"
    else:
        return f"about {needed / 2**30:.1f} GiB needed; this system does not say how much is free"
    if needed > free:
        raise UserError(f"{name}: about {needed / 2**30:.1f} GiB needed and {free / 2**30:.1f} free; halve "
                        f"--sequence_tokens (to {hp.sequence_tokens // 2}): the batch and the training stay the same")
    return f"{name}, about {needed / 2**30:.1f} GiB needed of {free / 2**30:.1f} free"


def check_compiler(hp: Hyperparameters, place: Place) -> str:
    return "compiled" if place.compile else f"not compiled{place.why_not_compiled}"


def check_disk(hp: Hyperparameters, place: Place) -> str:
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


def check_train_data(hp: Hyperparameters, place: Place) -> str:
    return check_data(hp, hp.train_files, hp.num_steps, "num_steps", batch_tokens=hp.batch_tokens,
                      segment_tokens=hp.segment_tokens, epochs=hp.epochs)


def check_val_data(hp: Hyperparameters, place: Place) -> str:
    return check_data(hp, hp.val_files, hp.val_tokens // hp.sequence_tokens, "val_tokens",
                      batch_tokens=hp.sequence_tokens)


def check_batch(hp: Hyperparameters, place: Place) -> str:
    unit = place.world_size * hp.sequence_tokens
    if hp.batch_tokens % unit:
        train_gpt.refuse("batch_tokens", hp.batch_tokens, f"a multiple of ranks × sequence_tokens = {unit}",
                         train_gpt.nearest_multiple(hp.batch_tokens, unit))
    return f"{place.world_size} ranks × {hp.batch_tokens // unit} micro-steps × {hp.sequence_tokens:,} tokens"


def check_collective(hp: Hyperparameters, place: Place) -> str:
    if place.world_size == 1:
        return "one process, none needed"
    ranks = torch.tensor(float(place.rank), device=place.device)
    start = time.perf_counter()
    dist.all_reduce(ranks)
    if ranks.item() != sum(range(place.world_size)):
        raise UserError(f"the ranks add up to {ranks.item()}, not {sum(range(place.world_size))}; check the network")
    return f"{place.world_size} ranks answered in {1000 * (time.perf_counter() - start):.1f} ms"


CHECKS = {"versions": check_versions, "memory": check_memory, "compiler": check_compiler, "log folder": check_disk,
          "batch": check_batch, "training data": check_train_data, "validation data": check_val_data,
          "collective": check_collective}


def parameter_table(hp: Hyperparameters, place: Place) -> list[str]:
    """Every parameter: shape, optimizer, rate, size of an update, owner rank; then the totals."""
    with torch.device("meta"):
        model = GPT(hp, place.dtype, place.attention)
    groups = train_gpt.optimizer_groups(hp, model)
    muon = train_gpt.Muon(groups["muon"]["params"].values(), world_size=place.world_size)
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


def run_checks(hp: Hyperparameters, place: Place) -> bool:
    """Every check, on every rank; rank 0 says how each went."""
    passed = True
    for name, check in CHECKS.items():
        try:
            line = f"ok    {name}: {check(hp, place)}"
        except UserError as error:
            passed, line = False, f"FAIL  {name}: {error}"
        if place.rank == 0:
            print(line, flush=True)
    return passed


def main(arguments: list[str]) -> int:
    try:
        hp = train_gpt.parse_command_line(arguments)
        place = train_gpt.find_place(hp)
        train_gpt.start_up(place, hp)
        passed = run_checks(hp, place)
        if place.rank == 0:
            print(*parameter_table(hp, place), sep="\n")
            print("this run would work" if passed else "this run would not work: see FAIL above", flush=True)
        return 0 if passed else 1
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
