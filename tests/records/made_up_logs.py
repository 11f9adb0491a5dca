"""Logs of every form, made up; and the tool, started as its users do."""

import contextlib
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "records"
sys.path.insert(0, str(RECORDS))  # a test imports this module before those of records/

SEPARATOR = "=" * 100
STAND_IN = Path(__file__).with_name("stand_in.py")
# Real logs, beside the repository where the project is developed; a worktree is a level deeper.
EXAMPLES = ROOT.parent / "shared" / "logs"
if not EXAMPLES.is_dir():
    EXAMPLES = ROOT.parent.parent / "shared" / "logs"

NVIDIA_SMI = "\n".join(
    [
        "Sat Jan  4 03:05:19 2025",
        "+---------------------------------------------------------------------------------------+",
        "| NVIDIA-SMI 550.00       Driver Version: 550.00       CUDA Version: 12.4               |",
        *(
            line
            for card in range(8)
            for line in (
                f"|   {card}  NVIDIA H100 80GB HBM3          On  | 00000000:{card}9:00.0 Off |     "
                "  0 |",
                "| N/A   37C    P0             117W / 700W |   7092MiB / 81559MiB |      0%      "
                "Default |",
            )
        ),
        "+---------------------------------------------------------------------------------------+",
    ]
)
HISTORICAL_SOURCE = """import torch
class Hyperparameters:
    batch_size : int = 8 # sequences
    sequence_length : int = 64*1024 # tokens
    num_iterations : int = 1480
x = "step:1/2 val_loss:9.9 train_time:1ms step_avg:1ms"
"""


def step_lines(
    losses: list[float],
    step_ms: float = 100.0,
    val_every: int = 2,
    train_loss: bool = True,
    more: str = "",
) -> str:
    """A training loss per step, a validation at step 0, every `val_every` steps and at the end."""
    steps = len(losses) - 1
    lines = []
    for step, loss in enumerate(losses):
        times = (
            f"train_time:{step * step_ms:.0f}ms step_avg:{step_ms if step else float('nan'):.2f}ms"
        )
        if step:
            shown = f"train_loss:{loss:.4f} " if train_loss else ""
            lines.append(f"step:{step}/{steps} {shown}{times}")
        if step % val_every == 0 or step == steps:
            lines.append(f"step:{step}/{steps} {more}val_loss:{loss:.4f} {times}")
    return "\n".join(lines) + "\n"


def falling(final: float, steps: int = 10, start: float = 5.0) -> list[float]:
    return [start + (final - start) * step / steps for step in range(steps + 1)]


def new_log(
    losses: list[float],
    source: str = "print('hello')\n",
    seed: int = 1,
    step_ms: float = 100.0,
    torch: str = "2.13.0+cpu",
    cpu: str = "AMD EPYC 7B13 (64-core)",
    sha: str = "ab" * 32,
    threads: int = 2,
    run_id: str = "''",
    target: float = 2.0,
    **hyperparameters,
) -> str:
    """The form that train_gpt.py writes now."""
    values = (
        dict(
            num_steps=len(losses) - 1,
            batch_tokens=4096,
            target_loss=target,
            seed=seed,
            value_layout="(0, None, 1)",
            log_dir="'logs'",
            run_id=run_id,
        )
        | hyperparameters
    )
    return "\n".join(
        [
            source,
            SEPARATOR,
            "command: train_gpt.py --preset=laptop",
            "commit: 5cd7dc9012345678 (dirty)",
            f"source_sha256: {'0' * 64}",
            *(f"{name}: {value}  # default" for name, value in values.items()),
            f"Python 3.11.9, PyTorch {torch}, NumPy 2.4.6, CUDA None, Linux-6.1",
            f"1 × cpu ({cpu}), {threads} threads, float32 activations, float32 Newton–Schulz, "
            "banded attention, "
            "not compiled: short",
            f"shard: data/enwik8/enwik8_train_000000.bin 90,011,146 tokens sha256 {sha}",
            SEPARATOR,
            "983,826 parameters, 10 steps of 4,096 tokens",
            step_lines(losses, step_ms)
            + f"final validation loss {losses[-1]:.4f} (target {target:g} reached)\n",
        ]
    )


def old_log(losses: list[float], seed: int = 1) -> str:
    """The form that train_gpt.py wrote before: values without origin, no command, commit or
    shards."""
    return "\n".join(
        [
            "print('hello')\n",
            SEPARATOR,
            "preset: 'laptop'",
            f"num_steps: {len(losses) - 1}",
            "batch_tokens: 4096",
            "target_loss: 2.0",
            f"seed: {seed}",
            "run_id: ''",
            "Python 3.11.9, PyTorch 2.13.0+cpu, NumPy 2.4.6, CUDA None, Linux-6.1",
            "1 × cpu (x86_64), 2 threads, float32 activations, float32 Newton–Schulz, banded "
            "attention, not compiled",
            SEPARATOR,
            "983,826 parameters",
            step_lines(losses),
        ]
    )


def historical_log(
    losses: list[float],
    train_loss: bool = True,
    more: str = "",
    source: str = HISTORICAL_SOURCE,
    smi: str = NVIDIA_SMI,
) -> str:
    """Source, versions and nvidia-smi, step lines; the later ones without training losses."""
    return "\n".join(
        [
            source,
            SEPARATOR,
            "Running Python 3.12.7 (main, Oct  1 2024)",
            "Running PyTorch 2.6.0.dev20241231+cu126 compiled for CUDA 12.6",
            smi,
            SEPARATOR,
            step_lines(losses, train_loss=train_loss, more=more)
            + "peak memory consumption: 31563 MiB\n",
        ]
    )


def repository(folder: Path) -> Path:
    """A repository with this tool, and a train_gpt.py that is the stand-in; returns the tool."""
    shutil.copytree(
        RECORDS, folder / "records", ignore=shutil.ignore_patterns("__pycache__", "20*")
    )
    shutil.copy(STAND_IN, folder / "train_gpt.py")
    write(folder / "data/shards.py", "")
    write(folder / "README.md", "# Title\n<!-- leaderboard -->\n<!-- /leaderboard -->\nEnd\n")
    return folder / "records/speedrun.py"


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def speedrun(
    *arguments,
    cwd: Path = ROOT,
    script: Path = RECORDS / "speedrun.py",
    stdin: str = "",
    timeout: int = 300,
    **variables,
) -> subprocess.CompletedProcess:
    """The tool in a process of its own."""
    return subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        input=stdin,
        timeout=timeout,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
    )


def in_process(*arguments, main=None) -> subprocess.CompletedProcess:
    """The same without a new process: where only what it says matters, and imports would take
    longest."""
    import speedrun as tool

    with (
        contextlib.redirect_stdout(io.StringIO()) as output,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        code = (main or tool.main)([str(argument) for argument in arguments])
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


def one_sentence(process: subprocess.CompletedProcess, code: int = 2) -> str:
    """What a mistake gets: one line on stderr, the right exit code, no traceback."""
    assert process.returncode == code, process.stdout + process.stderr
    lines = process.stderr.splitlines()
    assert (
        len(lines) == 1 and "Traceback" not in process.stderr and "Error" not in process.stderr
    ), lines
    return lines[0]
