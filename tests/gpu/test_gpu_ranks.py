"""The whole script, unedited, as ranks of eight that are not there: all issue the same collectives."""
import json
from itertools import groupby

import numpy as np
import pytest
import train_gpt
from gpu_common import SCRIPT, needs_triton, run, slow

pytestmark = needs_triton
SMALL = ("--preset=h100", "--document_token=499", "--batch_tokens=4096",  # as wide as it is: more buckets
         "--sequence_tokens=512", "--num_layers=3", "--num_steps=3", "--val_every=2",
         "--val_tokens=4096", "--log_every=1", "--save_model=false", "--sample_tokens=0")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    for seed, (name, tokens) in enumerate((("train_0.bin", 12 * 4096 + 1), ("val_0.bin", 4 * 4096 + 1))):
        header = np.zeros(256, "<i4")
        header[:3] = train_gpt.SHARD_MAGIC, train_gpt.SHARD_VERSION, tokens
        body = np.random.default_rng(seed).integers(0, 500, tokens).astype("<u2")
        (folder / name).write_bytes(header.tobytes() + body.tobytes())
    return folder


def as_rank(rank: int, shards, *more: str, **environment: str) -> dict:
    report = shards / f"rank{rank}.json"
    print(run("fake_gpu.py", str(SCRIPT), *SMALL, f"--train_files={shards}/train_*.bin",
              f"--val_files={shards}/val_*.bin", f"--log_dir={shards}/logs", *more,
              FAKE_RANK=str(rank), FAKE_WORLD="8", FAKE_REPORT=str(report), **environment))
    return json.loads(report.read_text())


def per_step(collectives: list) -> list[list]:
    """The collectives of each step: gradients, then the mean loss (12 bytes with the wish to stop), then Muon's."""
    steps = []
    for kind, size, dtype in collectives:
        new = not steps or steps[-1][-1][0] == "_allgather_base_"
        if kind == "allreduce_" and dtype in ("float32", "bfloat16") and new:
            steps.append([])
        if steps and dtype not in ("float64", "int64"):  # at validation: its loss, the hashes of the parameters
            steps[-1].append((kind, size, dtype))
    return steps


def test_ranks_issue_the_same_collectives(shards):
    reports = [as_rank(rank, shards, FAKE_TRACE_ONLY="1") for rank in (0, 3, 7)]
    seen = [report["collectives"] for report in reports]
    assert seen[0] == seen[1] == seen[2]
    steps = per_step(seen[0])
    assert len(steps) == 2 + 3, "two of the warm-up, three of the run"
    assert all(step == steps[0] for step in steps)
    assert sum(dtype == "float64" for _, _, dtype in seen[0]) == 3, "validations at steps 0, 2 and 3"
    mean_loss = seen[0].index(["allreduce_", 12, "float32"])
    buckets = [kind for kind, *_ in steps[0]].count("allreduce_") - 1
    first, *_, last = reports[0]["places"][mean_loss - buckets:mean_loss]
    assert last - first > 100, "gradients are reduced while the backward pass goes on"
    print(*(f"{len(list(same))} × {what}" for what, same in groupby(steps[0])), sep="\n")
    print(f"{sum(size for _, size, _ in steps[0]):,} bytes a step")


@slow
def test_a_rank_lowers_and_compiles_nothing_after_the_warm_up(shards):
    seen = as_rank(0, shards)
    assert seen["graph_breaks"] == {} and seen["graphs"] == 6
    assert seen["collectives"] == as_rank(7, shards, FAKE_TRACE_ONLY="1")["collectives"]


@slow
def test_bytes_a_step_of_the_h100_preset(shards):
    """Gradients once, in the type of their parameter; Muon's updates once, in bfloat16."""
    step = per_step(as_rank(0, shards, "--num_layers=12", FAKE_TRACE_ONLY="1")["collectives"])[0]
    gradients = sum(size for kind, size, _ in step if kind == "allreduce_") - 12
    updates = sum(size for kind, size, _ in step if kind == "_allgather_base_")
    print(f"{gradients:,} bytes of gradients, {updates:,} bytes of updates from each rank")
    embeddings, matrices, head = 4 * 50304 * 768, 44 * 768**2 + 24 * 4 * 768**2, 50304 * 768
    assert 0 <= gradients - (2 * embeddings + 4 * (matrices + head)) < 1000
    assert updates == 6 * 768**2 * 2 + 3 * 4 * 768**2 * 2


def test_the_check_with_its_step_finds_its_way_on_a_gpu(shards):
    """The numbers are made up here; tests/commands/test_check.py has the comparison itself."""
    said = run("fake_gpu.py", str(SCRIPT.parent / "tests" / "commands" / "check.py"), *SMALL, f"--train_files={shards}/train_*.bin",
               f"--val_files={shards}/val_*.bin", FAKE_TRACE_ONLY="1")
    assert "ok    step: a small step on each of 1 GPUs agrees" in said and "this run would work" in said
