"""The real training step, lowered for GPUs that are not here: what compiles, fits, launches and allocates."""
import json

import pytest
import train_gpt
from gpu_common import lower, needs_triton, run, slow

LOGITS = 65536 * 50304  # of one sequence: 13 GB in fp32
DATED = [name for name in train_gpt.PRESETS if name.startswith("20")]
pytestmark = needs_triton


def check(seen: dict, model_graphs: int = 2) -> None:
    """model_graphs: one for training, one for validation; and two for each of Muon's two sizes of matrix."""
    assert seen["graph_breaks"] == {} and seen["graphs"] == model_graphs + 4
    assert seen["new_kernels"] == 0 and seen["new_graphs"] == 0, "compiled after the warm-up"
    assert seen["most_shared"] <= seen["limit"] and not seen["unpipelined"]
    names = {kernel["name"] for kernel in seen["kernels"]}
    assert any("flex_attention_backward" in name for name in names)
    assert all(kernel["registers"] <= 255 for kernel in seen["kernels"])


def check_launches(seen: dict, launches: int, calls: int) -> None:
    """Triton's and others of a step, at most: each costs the host and the device some microseconds."""
    assert len(seen["step"]["launches"]) <= launches and len(seen["step"]["calls"]) <= calls


def test_h100_step_at_its_shapes_and_a_quarter_of_its_depth():
    seen = lower("H100", "--num_layers=3", FIRST_CONFIG="1")
    check(seen)
    assert seen["worst_spill"] < 100
    check_launches(seen, 110, 80)
    assert seen["optimizers"]["Muon"]["launches"] <= 33 and seen["optimizers"]["Muon"]["calls"] <= 30
    assert seen["largest"][0] <= 2 * LOGITS, "logits in fp32 are 13 GB: they must never be whole in memory"


def test_h100_step_with_the_head_in_float8():
    """Its three products in FP8; the logits in bfloat16, their gradient in one byte each."""
    seen = lower("H100", "--preset=h100-fp8", "--num_layers=2", "--sequence_tokens=8192", FIRST_CONFIG="1")
    check(seen)
    assert seen["worst_spill"] < 100 and seen["step"]["calls"].count("_scaled_mm") == 3
    assert seen["largest"][0] <= 2 * LOGITS / 8


@slow
def test_h100_step_at_full_size():
    seen = lower("H100")
    check(seen)
    assert seen["largest"][0] <= 2 * LOGITS and seen["peak_bytes"] < 40 * 2**30
    check_launches(seen, 330, 188)


@slow
def test_h100_step_as_one_of_eight_ranks():
    seen = lower("H100", "--num_layers=3", RANKS="8", FIRST_CONFIG="1")
    check(seen)
    gathers = [kind for kind, *_ in seen["step"]["collectives"]].count("_allgather_base_")
    assert gathers == 2, "one for each size of matrix"


@slow
@pytest.mark.parametrize("preset", DATED)
def test_dated_presets(preset):
    check(lower("H100", f"--preset={preset}", "--num_layers=3", "--tune_kernels=false", FIRST_CONFIG="1"))


@slow
@pytest.mark.parametrize("card", ["A100", "3090", "4090", "B200"])
def test_other_cards(card):
    check(lower(card, "--num_layers=3", "--sequence_tokens=8192", FIRST_CONFIG="1"))


@slow
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("card", ["H100", "A100", "3090", "4090", "B200"])
def test_attention_fits_the_card(card, head_dim):
    seen = json.loads(run("gpu_attention.py", card, str(head_dim)).splitlines()[-1])
    print(seen)
    assert not seen["error"] and not seen["unpipelined"] and len(seen["kernels"]) == 2
    assert all(kernel["shared"] <= seen["limit"] for kernel in seen["kernels"])


def test_the_harness_catches_mistakes():
    print(run("gpu_negative.py"))
