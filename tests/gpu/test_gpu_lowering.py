"""The real training step, lowered for GPUs: what compiles, fits, launches and allocates."""
import pytest
import train_gpt
from harness import needs_triton, result, run, slow

VAL_LOGITS = 262144 * 50304  # of one sequence: 53 GB in fp32
TWO_LAYERS = ("--num_layers=2", "--no_attention=none", "--short_window_layers=(1,)")
# A quarter of the depth also has a layer without attention.
THREE_LAYERS = ("--num_layers=3", "--short_window_layers=(1,)")
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


@pytest.mark.parametrize("layers, launches, calls, of_muon", [
    (TWO_LAYERS, 146, 91, 42), pytest.param(THREE_LAYERS, 158, 97, 44, marks=slow)])
def test_h100_step_at_its_shapes(layers, launches, calls, of_muon):
    seen = lower("H100", *layers)
    check(seen)
    assert seen["worst_spill"] < 100 and seen["step"]["calls"].count("_scaled_mm") == 3
    check_launches(seen, launches, calls)
    muon = seen["optimizers"]["Muon"]
    assert muon["launches"] <= of_muon and muon["calls"] <= 30
    assert seen["largest"][0] <= 2 * VAL_LOGITS, "never all logits in fp32"


@slow
def test_laptop_step_with_its_tables_and_copies():
    check(lower("H100", "--preset=laptop", "--device=cuda", depth="ptx"))


@slow
def test_h100_step_at_full_size():
    seen = lower("H100", depth="all")
    check(seen)
    assert seen["largest"][0] <= 2 * VAL_LOGITS and seen["peak_bytes"] < 40 * 2**30
    check_launches(seen, 480, 206)


@slow
def test_h100_step_as_one_of_eight_ranks():
    seen = lower("H100", *THREE_LAYERS, world_size=8)
    check(seen)
    gathers = [kind for kind, *_ in seen["step"]["collectives"]].count("_allgather_base_")
    assert gathers == 2, "one for each size of matrix"


def lower_dated(preset: str, *more: str) -> dict:
    arguments = [f"--preset={preset}", "--num_layers=3", "--tune_kernels=false", *more]
    if train_gpt.PRESETS[preset]["short_window_layers"] == "inner":
        arguments.append("--short_window_layers=(1,)")  # of three layers, none is inner
    return lower("H100", *arguments)


@slow
@pytest.mark.parametrize("preset", DATED)
def test_dated_presets(preset):
    seen = lower_dated(preset)
    check(seen)
    products = 3 if train_gpt.PRESETS[preset]["fp8_head"] else 0
    assert seen["step"]["calls"].count("_scaled_mm") == products


@slow
@pytest.mark.parametrize("preset", [name for name in DATED
                                    if train_gpt.PRESETS[name]["fp8_head"]])
def test_dated_presets_with_float8_do_without_it(preset):
    seen = lower_dated(preset, "--fp8_head=false")
    check(seen)
    assert "_scaled_mm" not in seen["step"]["calls"]


@slow
@pytest.mark.parametrize("card", ["A100", "3090", "4090", "B200"])
def test_other_cards(card):
    check(lower(card, *THREE_LAYERS, "--sequence_tokens=8192", "--val_sequence_tokens=8192",
                depth="ptx"))


@slow
def test_a_card_before_ampere():
    """Float32 and the banded attention, compiled."""
    seen = lower("T4", *THREE_LAYERS, "--sequence_tokens=2048", "--val_sequence_tokens=2048")
    assert seen["graph_breaks"] == {}
    assert seen["new_kernels"] == 0 and seen["new_graphs"] == 0
    assert 0 < seen["most_shared"] <= seen["limit"]
    assert not any("flex" in kernel["name"] for kernel in seen["kernels"])


def attention(card: str, head_dim: int) -> dict:
    return result("attention.py", str(head_dim), card=card, depth="ptx")


FITS = [(card, head_dim) for card in ("H100", "A100", "3090", "4090", "B200")
        for head_dim in (64, 128)]


@slow
@pytest.mark.parametrize("card, head_dim", FITS)
def test_attention_fits_the_card(card, head_dim):
    """Forward and backward, as they are, without Inductor's second try in a single stage."""
    seen = attention(card, head_dim)
    assert not seen["error"] and not seen["unpipelined"] and len(seen["kernels"]) == 2
    assert all(0 < kernel["shared"] <= seen["limit"] for kernel in seen["kernels"])


@slow
def test_wide_heads_do_not_fit_a_card_with_little_shared_memory():
    """The control."""
    seen = attention("4090", 256)
    assert len(seen["unpipelined"]) == 2 and "shared memory" in seen["error"]


@slow
def test_wide_heads_on_that_card_take_the_banded_attention():
    seen = lower("4090", *TWO_LAYERS, "--num_heads=3", "--sequence_tokens=2048",
                 "--val_sequence_tokens=2048")
    assert seen["graph_breaks"] == {} and seen["new_graphs"] == 0
    assert not any("flex" in kernel["name"] for kernel in seen["kernels"])


def memory(card: str, *arguments: str, world_size: int = 1) -> dict:
    return result("memory.py", PLAIN, *arguments, card=card, depth="wrapper", world_size=world_size)


SHORT = ("--sequence_tokens=8192", "--val_sequence_tokens=8192")


def check_estimate(traced: dict) -> None:
    assert traced["peak"] <= traced["estimate"] <= 1.25 * traced["peak"]


@slow
def test_estimated_memory_is_what_is_traced():
    compiled = memory("H100", *THREE_LAYERS, *SHORT)
    check_estimate(compiled)
    assert compiled["peak"] > 1.25 * compiled["state"], "the activations are there"


@slow
def test_estimated_memory_without_float8_and_without_a_compiler():
    check_estimate(memory("H100", "--fp8_head=false", *THREE_LAYERS, *SHORT))
    check_estimate(memory("T4", "--compile=no", *THREE_LAYERS, *SHORT))


@slow
@pytest.mark.parametrize("preset", ["h100", *DATED])
def test_estimated_memory_at_full_depth(preset):
    tokens = 49152 if preset == "h100" else 16384
    traced = memory("H100", f"--preset={preset}", f"--sequence_tokens={tokens}")
    check_estimate(traced)
    assert max(traced["forward"][0], traced["backward"][0]) <= 2 * tokens * 50304


@slow
def test_estimated_memory_of_a_rank_and_of_an_old_card():
    check_estimate(memory("H100", *THREE_LAYERS, *SHORT, world_size=8))
    check_estimate(memory("T4", *THREE_LAYERS, "--sequence_tokens=2048",
                          "--val_sequence_tokens=2048"))


@slow
def test_logits_in_fp32_are_caught():
    """The control of the bounds above: not compiled, logits are whole in memory in both passes."""
    eager = memory("H100", "--compile=no", "--num_layers=2", *SHORT)
    assert eager["forward"][0] == eager["backward"][0] == 4 * 8192 * 50304


@slow
def test_the_harness_catches_mistakes():
    print(run("negative.py", depth="ptx", world_size=8))
