"""Starting: nothing on import, torchrun, run.sh, several machines, the check."""
import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers import ROOT, TINY, make_data, run, trained


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    return make_data(tmp_path_factory.mktemp("data"))


def run_sh(*arguments: str, cwd: Path = ROOT, **variables) -> subprocess.CompletedProcess:
    """run.sh with this very interpreter, which has the packages."""
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | variables
    return subprocess.run([str(cwd / "run.sh"), *arguments], capture_output=True, text=True, timeout=900, env=environment)


def free_port() -> int:
    """Below those that the system gives to connections, of which other tests make many before this one is used."""
    while True:
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("127.0.0.1", port := random.randint(10_000, 30_000)))
            return port


def test_importing_starts_nothing(tmp_path):
    code = f"""
import sys, os, threading
sys.path.insert(0, {str(ROOT)!r})
before, environment = set(os.listdir()), dict(os.environ)
import torch
threads, random, flags = threading.active_count(), torch.random.get_rng_state(), torch.are_deterministic_algorithms_enabled()
import train_gpt, torch.distributed as dist
assert set(os.listdir()) == before and not dist.is_initialized() and threading.active_count() == threads
assert torch.equal(torch.random.get_rng_state(), random) and not torch.cuda.is_initialized()
assert torch.are_deterministic_algorithms_enabled() == flags
assert {{k: v for k, v in os.environ.items() if k in environment}} == environment
"""
    process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 0 and process.stdout == process.stderr == "", process.stderr


def test_torchrun_trains_and_writes_one_log(data):
    result = trained([*TINY, *data], "torchrun", ranks=2)
    assert sorted(p.name for p in result.folder.iterdir()) == ["log.txt", "metrics.jsonl", "model.pt"]
    assert result.output.count("step:4/4 val_loss:") == 1 and "2 × cpu" in result.output


def test_run_sh_trains_with_the_packages_that_are_there(data):
    process = run_sh(*TINY, *data, "--run_id=run_sh")
    assert process.returncode == 0, process.stderr
    assert "final validation loss" in process.stdout and "making .venv" not in process.stderr


def test_run_sh_refuses_wrong_options_once_before_it_launches(data):
    process = run_sh(*TINY, *data, "--nmu_steps=3", NPROC="2")
    assert process.returncode == 2 and process.stdout == ""
    assert process.stderr == ("error: --nmu_steps=3: no such hyperparameter; the nearest is --num_steps=… "
                              "(--help lists them all)\n")


def test_run_sh_passes_on_the_exit_code_of_the_ranks_without_a_wall_of_traceback(data):
    process = run_sh(*TINY, *data, "--batch_tokens=768", NPROC="2")
    assert process.returncode == 2 and "Traceback" not in process.stderr
    assert process.stderr.count("expected a multiple of ranks × sequence_tokens = 2 × 256") == 1


def test_two_machines_train_as_one(data):
    """Two launchers that find each other by address, as on two hosts; the losses are those of one process."""
    port = str(free_port())
    machines = [subprocess.Popen([str(ROOT / "run.sh"), *TINY, *data, "--run_id=machines"], text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 env=os.environ | dict(PYTHON=sys.executable, OMP_NUM_THREADS="1", NNODES="2",
                                                       NODE_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                                                       NPROC="1"))
                for rank in range(2)]
    outputs = [machine.communicate(timeout=900) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    lines = [line for out, _ in outputs for line in out.splitlines() if " train_loss:" in line]
    alone = trained([*TINY, *data], "machine")
    assert [float(line.split("train_loss:")[1].split()[0]) for line in lines] == pytest.approx(alone.train_losses, abs=2e-4)


def test_several_machines_need_an_address(data):
    process = run_sh(*TINY, *data, NNODES="2")
    assert process.returncode == 2 and "NNODES=2 needs MASTER_ADDR" in process.stderr


def launched(tmp_path: Path, *arguments: str, commands: dict[str, str], **variables) -> list[str]:
    """What run.sh would start Python with: the interpreter prints its words, and the commands are stand-ins too."""
    python = f'case "$1" in -|train_gpt.py) exec {sys.executable} "$@";; esac; printf "%s\\n" "$@"'
    for name, body in (commands | {"python": python}).items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    repo = tmp_path / "repo"
    shutil.copytree(ROOT, repo, ignore=shutil.ignore_patterns(".git", ".venv", "logs", "enwik8", "fineweb*", "__pycache__"))
    process = run_sh(*arguments, cwd=repo, PATH=f"{tmp_path}:{os.environ['PATH']}", PYTHON=str(tmp_path / "python"), **variables)
    assert process.returncode == 0 and process.stderr == "", process
    return process.stdout.splitlines()


def test_slurm_variables_give_nodes_rank_and_address(data, tmp_path):
    """The list of hosts comes slowly and is longer than a pipe holds: nobody may hang up after the first."""
    words = launched(tmp_path, *TINY, *data, commands={"scontrol": "echo first; sleep 0.2; seq 100000"}, NPROC="4",
                     SLURM_NNODES="2", SLURM_NODEID="1", SLURM_JOB_NODELIST="n[1-100001]", SLURM_JOB_ID="77")
    for expected in ("--nnodes=2", "--node_rank=1", "--nproc_per_node=4", "--rdzv_backend=c10d", "--rdzv_id=77",
                     "--rdzv_endpoint=first:29500", "--shutdown-timeout=120"):
        assert expected in words, (expected, words)


THREE = "printf 'GPU 0: H100\\n  MIG 1g\\nGPU 1: H100\\nGPU 2: H100\\n'"


@pytest.mark.parametrize("nvidia_smi, visible, options, count", [
    (THREE, None, "", 3), (THREE, "0,2", "", 2), (THREE, "1", "", 1), (THREE, "", "", 0), (THREE, "-1", "", 0),
    (THREE, None, "--num_steps=2 --device=cpu", 0), ("echo No devices were found; exit 6", None, "", 0), ("exit 127", None, "", 0),
    ("exit 127", "0", "", 0)], ids=["all", "some", "one", "none", "minus one", "CPU", "broken", "absent", "named but absent"])
def test_the_gpus_that_a_run_would_see_are_counted(tmp_path, nvidia_smi, visible, options, count):
    function = re.search(r"^count_gpus\(\) \{.*?^\}", (ROOT / "run.sh").read_text(), re.M | re.S)[0]
    hidden = "unset CUDA_VISIBLE_DEVICES" if visible is None else f"CUDA_VISIBLE_DEVICES={visible}"
    script = f"set -euo pipefail; {hidden}; nvidia-smi() {{ {nvidia_smi}; }}\n{function}\ncount_gpus {options}"
    process = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (process.returncode, process.stdout, process.stderr) == (0, f"{count}\n", "")


def test_one_process_per_visible_gpu(data, tmp_path):
    assert TINY[0] == "--device=cpu"
    words = launched(tmp_path, *TINY[1:], *data, commands={"nvidia-smi": THREE}, CUDA_VISIBLE_DEVICES="0,2")
    assert "--nproc_per_node=2" in words


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU here can be used")
@pytest.mark.parametrize("command", [[], ["check"]])
def test_gpus_that_pytorch_cannot_use_are_not_passed_over(tmp_path, monkeypatch, command):
    """An old driver, or a build for the CPU: on a rented machine the laptop's training would be no help."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: H100'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    process = run_sh(*command, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert process.returncode == 2 and process.stdout == ""
    assert re.fullmatch("error: there are GPUs here and this PyTorch can use none: .*--device=cpu .*\n", process.stderr)


def test_check_passes_where_a_run_would_and_lists_every_parameter(data):
    process = run_sh("check", *TINY, *data)
    assert process.returncode == 0, process.stdout + process.stderr
    for expected in ("versions", "memory", "compiler", "training data", "collective", "blocks.3.down.weight", "skip_weights",
                     "Muon", "active per token", "of activations", "GPUs of 80 GB: 1,024, 40 GB: 1,024",
                     "this run would work"):
        assert expected in process.stdout, expected


def test_check_names_what_is_missing_and_the_command_that_gets_it(data):
    process = run_sh("check", *TINY, *data, "--num_steps=500")
    assert process.returncode == 1 and "FAIL  training data" in process.stdout
    assert "2 shards hold 38 batches of 1024 tokens and --num_steps asks for 500: 25 shards are missing" in process.stdout
    huge = [f"--{name}_tokens={2**27}" for name in ("sequence", "batch", "val")]  # more than any machine has
    process = run_sh("check", "--preset=2024-12-10", "--device=cpu", *huge, "--train_files=data/fineweb10B/none_*.bin")
    assert process.returncode == 1 and "halve --sequence_tokens (to 67108864)" in process.stdout
    assert "FAIL  training data: data/fineweb10B/none_*.bin: no token shards there" in process.stdout
    assert "get them with: python data/fineweb.py 1480" in process.stdout


def test_check_runs_a_collective_among_the_ranks(data):
    process = run_sh("check", *TINY, *data, NPROC="2")
    assert process.returncode == 0 and "2 ranks answered" in process.stdout, process.stdout + process.stderr


def test_help_lists_every_hyperparameter_with_its_meaning():
    process = run(["--help"])
    assert process.returncode == 0
    import dataclasses
    import train_gpt
    for field in dataclasses.fields(train_gpt.Hyperparameters):
        line = next(line for line in process.stdout.splitlines() if line.startswith(f"  --{field.name}="))
        assert str(field.default) in line and len(line.split("  ")[-1]) > 5, line
