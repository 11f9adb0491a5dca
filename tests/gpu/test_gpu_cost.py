"""The model of a step's time: it counts right, and the step of h100 does not become dearer."""
import subprocess
import sys

from harness import needs_triton, result, slow
from helpers import ROOT

pytestmark = needs_triton


@slow
def test_bytes_of_known_kernels():
    for name, (counted, right) in result("cost_cases.py", depth="wrapper").items():
        assert counted == right, name


@slow
def test_bench_prints_the_table_of_any_preset_and_card():
    command = [sys.executable, ROOT / "tests/commands/bench.py", "gpu", "--card=4090",
               "--preset=laptop", "--ngram_order=0", "--copy_lengths=()", "--no_attention=(0,1)"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line.split("  ")[0] for line in said.splitlines()]
    assert "NVIDIA GeForce RTX 4090, rank 0 of 1, laptop:" in said
    assert {"forward products", "backward products", "Muon", "Adam", "total", "floor"} <= {*lines}
    assert said.count(" MB  ") == 10 and "{" not in said


def check_cost(arguments: list[str], launches: int, calls: int, gigabytes: float,
               ms: float) -> None:
    """Of a step of h100 on rank 0 of 8, at most; what makes it cheaper lowers these bounds."""
    total = result("cost_model.py", *arguments, card="H100", depth="wrapper",
                   world_size=8)["rows"]["total"]
    assert total["launches"] <= launches and total["calls"] <= calls
    assert total["gigabytes"] <= gigabytes and total["ms"] <= ms


def test_the_step_of_h100_does_not_become_dearer():
    """At its shapes, with two of its layers: a rank has one matrix of each group of Muon."""
    check_cost(["--num_layers=2", "--no_attention=none", "--short_window_layers=(1,)"],
               launches=136, calls=96, gigabytes=49.0, ms=26.1)


@slow
def test_the_step_of_h100_does_not_become_dearer_at_full_depth():
    check_cost([], launches=430, calls=201, gigabytes=139.6, ms=78.1)
