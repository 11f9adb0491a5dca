"""What the tests of the GPU path share: a process for each script, as the mocks are global."""
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None,
                                  reason="Triton is not installed: tests/requirements.txt has it")
slow = pytest.mark.slow  # minutes each: only with --slow (conftest.py)


def run(script: str | Path, *arguments: str, **options) -> str:
    """The output of a script under fake_gpu.py, whose options are given by keyword."""
    named = [f"--{name}={value}" for name, value in options.items()]
    process = subprocess.run(
        [sys.executable, "-W", "ignore", HERE / "fake_gpu.py", *named, HERE / script, *arguments],
        capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_LOGS": "-all"})
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-6000:]
    return process.stdout


def result(script: str, *arguments: str, **options) -> dict:
    """The JSON on the last line of a script's output."""
    *lines, last = run(script, *arguments, **options).splitlines()
    print(*lines, last[:1000], sep="\n")
    return json.loads(last)
