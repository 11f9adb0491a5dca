"""The whole trainer, unedited, as one of eight ranks: all issue the same collectives."""
import json
from itertools import groupby

import numpy as np
import pytest
from harness import needs_triton, run, slow
from helpers import ROOT, SCRIPT, write_shard

pytestmark = needs_triton
# as wide as the preset, so that the gradients fill several buckets
SMALL = ("--preset=h100", "--document_token=499", "--batch_tokens=4096",
         "--sequence_tokens=512", "--num_layers=3", "--num_steps=3", "--val_every=2",
         "--val_tokens=4096", "--val_sequence_tokens=512", "--log_every=1", "--save_model=false",
         "--sample_tokens=0", "--tune_products=false")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    random = np.random.default_rng(0)
    tokens = random.integers(0, 499, 12 * 4096 + 1)
    tokens[::64] = 499  # documents, at which the sequences start
    write_shard(folder / "train_0.bin", tokens)
    write_shard(folder / "val_0.bin", random.integers(0, 500, 4 * 4096 + 1))
    return folder


def files(shards) -> tuple:
    return f"--train_files={shards}/train_*.bin", f"--val_files={shards}/val_*.bin"


def as_rank(rank: int, shards, *more: str, depth: str = "trace") -> dict:
    report = shards / f"rank{rank}.json"
    print(run(SCRIPT, *SMALL, *files(shards), f"--log_dir={shards}/logs", *more,
              rank=rank, world_size=8, depth=depth, report=report))
    return json.loads(report.read_text())


NUMBERS = ("allreduce_", 16, "float32")  # mean loss, gradient norm, stop, suspect: a step's last


def per_step(collectives: list) -> list[list]:
    """The collectives of each step: gradients, those of embeddings last; Muon's; its numbers."""
    steps = []
    for kind, size, dtype in collectives:
        if kind == "broadcast_" or dtype in ("float64", "int64"):  # of warm-up and validation
            continue
        if not steps or steps[-1][-1] == NUMBERS:
            steps.append([])
        steps[-1].append((kind, size, dtype))
    return steps


def test_ranks_issue_the_same_collectives(shards):
    reports = [as_rank(rank, shards) for rank in (0, 7)]
    seen = [report["collectives"] for report in reports]
    assert seen[0] == seen[1]
    steps = per_step(seen[0])
    assert len(steps) == 2 + 3, "two of the warm-up, three of the run"
    assert all(step == steps[0] for step in steps)
    validations = [dtype for _, _, dtype in seen[0]].count("float64")
    assert validations == 3, "at steps 0, 2 and 3"
    dtypes = [dtype for _, _, dtype in steps[0]]
    num_buckets = dtypes.index("bfloat16")
    assert num_buckets > 1 and dtypes[num_buckets:] == ["bfloat16"] * 4 + ["float32"], (
        "buckets; the embedding and a value table; Muon's two gathers; the numbers")
    start = seen[0].index([*steps[0][0]])
    first, *_, last = reports[0]["places"][start:start + num_buckets]
    assert last - first > 100, "gradients are reduced during the backward pass"
    print(*(f"{len(list(same))} × {what}" for what, same in groupby(steps[0])), sep="\n")
    print(f"{sum(size for _, size, _ in steps[0]):,} bytes a step")


@slow
def test_a_rank_lowers_and_compiles_nothing_after_the_warm_up(shards):
    seen = as_rank(0, shards, depth="all")
    assert seen["graph_breaks"] == {} and seen["graphs"] == 6
    assert seen["collectives"] == as_rank(7, shards)["collectives"]


@slow
def test_bytes_a_step_of_the_h100_preset(shards):
    """Gradients once, in the type of their parameter; Muon's updates once, in bfloat16."""
    step = per_step(as_rank(0, shards, "--num_layers=12")["collectives"])[0]
    gradients = sum(size for kind, size, _ in step if kind == "allreduce_") - 12
    updates = sum(size for kind, size, _ in step if kind == "_allgather_base_")
    print(f"{gradients:,} bytes of gradients, {updates:,} bytes of updates from each rank")
    embeddings = 4 * 50304 * 768
    matrices = 44 * 768**2 + 24 * 4 * 768**2
    head = 50304 * 768
    assert 0 <= gradients - (2 * embeddings + 4 * (matrices + head)) < 1000
    assert updates == 6 * 768**2 * 2 + 3 * 4 * 768**2 * 2


def test_check_runs_its_step_on_a_gpu(shards):
    """There are no numbers here; tests/commands/test_check.py has the comparison itself."""
    said = run(ROOT / "tests/commands/check.py", *SMALL, *files(shards), depth="trace")
    assert "ok    step: a small step on each of 1 GPUs agrees" in said
    assert "this run would work" in said
