"""The model of a step's time: it counts right, and the step of h100 does not become dearer."""
import subprocess
import sys

from harness import needs_triton, result
from helpers import ROOT

pytestmark = needs_triton


def test_bytes_of_known_kernels():
    for name, (counted, right) in result("cost_cases.py", depth="wrapper").items():
        assert counted == right, name


def test_bench_prints_the_table_of_any_preset_and_card():
    command = [sys.executable, ROOT / "tests/commands/bench.py", "gpu", "--card=4090",
               "--preset=laptop", "--ngram_order=0", "--copy_lengths=()", "--no_attention=(0,1)"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line.split("  ")[0] for line in said.splitlines()]
    assert "NVIDIA GeForce RTX 4090, rank 0 of 1, laptop:" in said
    assert {"forward products", "backward products", "Muon", "Adam", "total", "floor"} <= {*lines}
    assert said.count(" MB  ") == 10 and "{" not in said
