"""What the tests of the GPU path share: each script in a process of its own, for the mocks are global."""
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "train_gpt.py"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None,
                                  reason="Triton is not installed: tests/requirements.txt has it")
slow = pytest.mark.slow  # minutes each: only with --slow (conftest.py)


def run(script: str, *arguments: str, **environment: str) -> str:
    process = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / script), *arguments], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_LOGS": "-all", **environment})
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-6000:]
    return process.stdout


def lower(card: str, *arguments: str, **environment: str) -> dict:
    """What gpu_step.py saw."""
    *said, seen = run("gpu_step.py", card, *arguments, **environment).splitlines()
    print(*said, sep="\n")
    return json.loads(seen)
