"""The real training step, lowered for GPUs: what compiles, fits, launches and allocates."""
import pytest
import train_gpt
from harness import needs_triton, result, run, slow

LOGITS = 65536 * 50304  # of one sequence: 13 GB in fp32
DATED = [name for name in train_gpt.PRESETS if name.startswith("20")]
PLAIN = "--tune_products=false"  # a library's products: dozens of candidates each take long
pytestmark = needs_triton


def lower(card: str, *arguments: str, depth: str = "cubin", world_size: int = 1) -> dict:
    return result("step.py", PLAIN, *arguments, card=card, depth=depth, world_size=world_size)


def check(seen: dict, attention: bool = True) -> None:
    """A graph for training, one for validation, two for each of Muon's two sizes of matrix."""
    assert seen["graph_breaks"] == {} and seen["graphs"] == (6 if attention else 4)
    assert seen["new_kernels"] == 0 and seen["new_graphs"] == 0, "compiled after the warm-up"
    assert seen["most_shared"] <= seen["limit"] and not seen["unpipelined"]
    names = {kernel["name"] for kernel in seen["kernels"]}
    assert any("flex_attention_backward" in name for name in names) == attention
    assert all(kernel["registers"] <= 255 for kernel in seen["kernels"])


def check_launches(seen: dict, launches: int, calls: int) -> None:
    """Triton's and others of a step, at most: each costs some microseconds."""
    assert len(seen["step"]["launches"]) <= launches
    assert len(seen["step"]["calls"]) <= calls


def test_h100_step_at_its_shapes_and_a_quarter_of_its_depth():
    seen = lower("H100", "--num_layers=3")
    check(seen)
    assert seen["worst_spill"] < 100
    check_launches(seen, 140, 84)
    muon = seen["optimizers"]["Muon"]
    assert muon["launches"] <= 44 and muon["calls"] <= 30
    assert seen["largest"][0] <= 2 * LOGITS, "never all logits in fp32"


@pytest.mark.parametrize("attention", [False, pytest.param(True, marks=slow)])
def test_h100_step_with_the_head_in_float8(attention):
    """Its three products in FP8; the logits in bfloat16, their gradient in one byte each."""
    arguments = ["--preset=h100-fp8", "--num_layers=2", "--sequence_tokens=8192"]
    if not attention:
        arguments.append("--no_attention=(0,1)")
    seen = lower("H100", *arguments)
    check(seen, attention)
    assert seen["worst_spill"] < 100 and seen["step"]["calls"].count("_scaled_mm") == 3
    assert seen["largest"][0] <= 2 * LOGITS / 8


@slow
def test_laptop_step_with_its_tables_and_copies():
    check(lower("H100", "--preset=laptop", "--device=cuda", depth="ptx"))


@slow
def test_h100_step_at_full_size():
    seen = lower("H100", depth="all")
    check(seen)
    assert seen["largest"][0] <= 2 * LOGITS and seen["peak_bytes"] < 40 * 2**30
    check_launches(seen, 470, 194)


@slow
def test_h100_step_as_one_of_eight_ranks():
    seen = lower("H100", "--num_layers=3", world_size=8)
    check(seen)
    gathers = [kind for kind, *_ in seen["step"]["collectives"]].count("_allgather_base_")
    assert gathers == 2, "one for each size of matrix"


@slow
@pytest.mark.parametrize("preset", DATED)
def test_dated_presets(preset):
    check(lower("H100", f"--preset={preset}", "--num_layers=3", "--tune_kernels=false"))


@slow
@pytest.mark.parametrize("card", ["A100", "3090", "4090", "B200"])
def test_other_cards(card):
    check(lower(card, "--num_layers=3", "--sequence_tokens=8192", depth="ptx"))


@slow
def test_a_card_before_ampere():
    """Float32 and the banded attention, compiled."""
    seen = lower("T4", "--num_layers=3", "--sequence_tokens=2048")
    assert seen["graph_breaks"] == {}
    assert seen["new_kernels"] == 0 and seen["new_graphs"] == 0
    assert 0 < seen["most_shared"] <= seen["limit"]
    assert not any("flex" in kernel["name"] for kernel in seen["kernels"])


def attention(card: str, head_dim: int, *tiles: str) -> dict:
    return result("attention.py", str(head_dim), *tiles, card=card, depth="ptx")


QUICK = [("4090", 128)]
FITS = [(card, head_dim) for card in ("H100", "A100", "3090", "4090", "B200")
        for head_dim in (64, 128, 256)]


@pytest.mark.parametrize("card, head_dim", [
    pytest.param(*pair, marks=[] if pair in QUICK else slow) for pair in FITS])
def test_attention_fits_the_card(card, head_dim):
    """Forward and backward, as they are, without Inductor's second try in a single stage."""
    seen = attention(card, head_dim)
    assert not seen["error"] and not seen["unpipelined"] and len(seen["kernels"]) == 2
    assert all(0 < kernel["shared"] <= seen["limit"] for kernel in seen["kernels"])


@slow
def test_attention_would_not_fit_with_the_tiles_of_inductor():
    """The control: wide heads on a card with little shared memory."""
    seen = attention("4090", 256, "null")
    assert len(seen["unpipelined"]) == 2 and "shared memory" in seen["error"]


def memory(card: str, *arguments: str, world_size: int = 1) -> dict:
    return result("memory.py", PLAIN, *arguments, card=card, depth="wrapper", world_size=world_size)


def check_estimate(traced: dict) -> None:
    assert traced["peak"] <= traced["estimate"] <= 1.25 * traced["peak"]


@slow
def test_estimated_memory_is_what_is_traced():
    compiled = memory("H100", "--num_layers=3", "--sequence_tokens=8192")
    check_estimate(compiled)
    assert compiled["peak"] > 1.25 * compiled["state"], "the activations are there"


@slow
def test_estimated_memory_of_the_head_in_float8_and_without_a_compiler():
    check_estimate(memory("H100", "--preset=h100-fp8", "--num_layers=3", "--sequence_tokens=8192"))
    check_estimate(memory("T4", "--compile=no", "--num_layers=3", "--sequence_tokens=4096"))


@slow
@pytest.mark.parametrize("preset", ["h100", "h100-fp8", *DATED])
def test_estimated_memory_at_full_depth(preset):
    tokens = 65536 if preset.startswith("h100") else 16384
    traced = memory("H100", f"--preset={preset}", f"--sequence_tokens={tokens}")
    check_estimate(traced)
    assert max(traced["forward"][0], traced["backward"][0]) <= 2 * tokens * 50304


@slow
def test_estimated_memory_of_a_rank_and_of_an_old_card():
    check_estimate(memory("H100", "--num_layers=3", "--sequence_tokens=8192", world_size=8))
    check_estimate(memory("T4", "--num_layers=3", "--sequence_tokens=2048"))


@slow
def test_logits_in_fp32_are_caught():
    """The control of the bounds above: not compiled, logits are whole in memory in both passes."""
    eager = memory("H100", "--compile=no", "--num_layers=2", "--sequence_tokens=8192")
    assert eager["forward"][0] == eager["backward"][0] == 4 * 8192 * 50304


def test_the_harness_catches_mistakes():
    print(run("negative.py", depth="ptx", world_size=8))
