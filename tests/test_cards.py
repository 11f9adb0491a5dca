"""What follows from the GPU that is there: types, attention, compiling, tiles, and what sequence fits."""
import re
from types import SimpleNamespace

import pytest
import torch
import train_gpt
from harness import needs_triton
from hypothesis import given
from hypothesis import strategies as st
from train_gpt import UserError, find_place, flex_tiles, parse_command_line, start_triton

GIB = 2**30


@pytest.fixture
def cards(monkeypatch):
    """cards(gigabytes, …): GPUs of these sizes, all of one generation."""
    def pretend(*gigabytes: int, capability=(9, 0), shared: int | None = 227 * 1024, hip: str | None = None):
        told = {} if shared is None else dict(shared_memory_per_block_optin=shared)
        properties = [SimpleNamespace(total_memory=size * GIB, major=capability[0], **told)
                      for size in gigabytes]
        for name, value in dict(is_available=lambda: bool(gigabytes), device_count=lambda: len(gigabytes),
                                current_device=lambda: 0, get_device_properties=lambda device=0:
                                properties[getattr(device, "index", device)]).items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(train_gpt, "start_triton", lambda: None)
    return pretend


# ---- the length of a sequence ------------------------------------------------------------------------------

@pytest.mark.parametrize("gigabytes, tokens", [(80, 65536), (40, 65536), (24, 32768), (12, 8192), (8, 4096)])
def test_the_sequence_is_as_long_as_fits(cards, gigabytes, tokens):
    cards(gigabytes)
    hp = parse_command_line(["--preset=h100"])
    assert (hp.sequence_tokens, hp.batch_tokens) == (tokens, 524_288)
    assert train_gpt.as_dict(hp)["sequence_tokens"] == tokens, "the log says what was chosen"


def test_the_smallest_gpu_decides(cards):
    cards(80, 24, 80)
    assert parse_command_line(["--preset=h100"]).sequence_tokens == 32768


def test_the_sequence_divides_the_share_of_a_rank(cards, monkeypatch):
    cards(*[80] * 16)
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert parse_command_line(["--preset=h100"]).sequence_tokens == 32768
    assert parse_command_line(["--preset=h100", "--segment_tokens=512"]).sequence_tokens == 32768
    with pytest.raises(UserError, match="--batch_tokens=1000: .* nearest is --batch_tokens=65536"):
        parse_command_line(["--preset=h100", "--batch_tokens=1000"])


def test_ranks_that_do_not_divide_the_batch_are_what_is_said(cards, monkeypatch):
    """Not that memory is short, which no shorter sequence would mend."""
    cards(*[24] * 3)
    monkeypatch.setenv("WORLD_SIZE", "3")
    hp = parse_command_line(["--preset=h100"])
    with pytest.raises(UserError, match="--batch_tokens=524288: .* 3 × 65536; the nearest is --batch_tokens=589824"):
        train_gpt.micro_steps(hp, find_place(hp))
    assert parse_command_line(["--preset=h100", "--batch_tokens=589824"]).sequence_tokens == 32768


def test_without_a_gpu_memory_is_not_asked(cards):
    cards()
    assert parse_command_line(["--preset=h100"]).sequence_tokens == 65536
    assert parse_command_line(["--preset=h100", "--batch_tokens=8192"]).sequence_tokens == 8192
    assert parse_command_line(["--preset=h100", "--sequence_tokens=131072"]).sequence_tokens == 131072
    assert parse_command_line(["--preset=laptop"]).sequence_tokens == 4096


def test_what_cannot_fit_is_refused_in_one_sentence(cards):
    cards(24)
    with pytest.raises(UserError) as refused:
        parse_command_line(["--preset=h100", "--sequence_tokens=65536"])
    assert str(refused.value) == ("--sequence_tokens=65536: it needs about 32.0 GiB and the GPU has 20.6 GiB "
                                  "for it; --sequence_tokens=32768 is the most that fits")
    assert parse_command_line(["--preset=h100", "--sequence_tokens=16384"]).sequence_tokens == 16384
    assert parse_command_line(["--preset=h100", "--sequence_tokens=65536", "--device=cpu"])
    cards(4)
    with pytest.raises(UserError, match="--sequence_tokens=128: it needs about 3.4 GiB and the GPU has "
                                        "2.6 GiB for it; train a smaller model"):
        parse_command_line(["--preset=h100"])


def test_sampling_from_a_checkpoint_asks_no_memory(cards):
    cards(4)
    assert parse_command_line(["--preset=h100", "--checkpoint=model.pt", "--sample=A"])


@pytest.mark.parametrize("parts", [2, 4])
def test_shorter_sequences_are_the_same_training(tiny, make_shards, parts):
    """Documents of 128 tokens, so that no sequence cuts one: the losses of a few steps agree."""
    def losses(sequence_tokens: int) -> list[float]:
        hp = tiny(train_files=train, val_files=train, sequence_tokens=sequence_tokens, window_start=512)
        trainer = train_gpt.Trainer(hp, find_place(hp))
        return [trainer.step(trainer.train_data.next_batch(), step) for step in range(4)]

    tokens = torch.randint(8, 200, (12 * 1024 + 1,), generator=torch.Generator().manual_seed(0)).numpy()
    tokens[::128] = 7
    train = make_shards(tokens)
    assert losses(512 // parts) == pytest.approx(losses(512), rel=1e-5)
    tokens[128::128] = 9  # one long document: now it matters where a sequence ends
    train = make_shards(tokens)
    assert losses(512 // parts) != pytest.approx(losses(512), rel=1e-5)


# ---- types, attention, compiling ---------------------------------------------------------------------------

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("card, dtype, attention, compiled", [
    (dict(capability=(9, 0)), BF16, "flex", True),
    (dict(capability=(8, 0), shared=163 * 1024), BF16, "flex", True),
    (dict(capability=(7, 5), shared=64 * 1024), FP32, "banded", True),      # bfloat16 would be emulated
    (dict(capability=(7, 0), shared=96 * 1024), FP32, "banded", True),
    (dict(capability=(6, 1), shared=48 * 1024), FP32, "banded", False),     # Inductor refuses below 7.0
    (dict(capability=(9, 4), shared=None, hip="7.0"), BF16, "flex", True),  # ROCm tells no shared memory
])
def test_what_follows_from_the_generation(cards, card, dtype, attention, compiled):
    cards(80, **card)
    place = find_place(parse_command_line(["--preset=h100"]))
    assert (place.device.type, place.dtype, place.muon_dtype) == ("cuda", dtype, dtype)
    assert (place.attention, place.compile, place.tiles) == (attention, compiled, None)
    assert compiled or place.why_not_compiled == ": there is no Triton for this GPU"


@pytest.mark.parametrize("argument, words", [
    ("--attention=flex", "only compiled, on a GPU with bfloat16 .*; give --attention=banded"),
    ("--compile=yes", "no Triton for this GPU; .* give --compile=no")])
def test_what_an_old_gpu_cannot_do_is_refused(cards, argument, words):
    cards(80, capability=(6, 1), shared=48 * 1024)
    with pytest.raises(UserError, match=words):
        find_place(parse_command_line(["--preset=h100", argument]))


@needs_triton
def test_a_gpu_without_a_c_compiler_is_told_and_trains_without(cards, monkeypatch, tmp_path):
    """Triton builds the library that loads its kernels when it first meets a GPU."""
    from triton.runtime import driver
    cards(80)
    for name in ("_active", "_default"):
        monkeypatch.setattr(driver, name, None)
    monkeypatch.setattr(train_gpt, "start_triton", start_triton)
    monkeypatch.delenv("CC", raising=False)
    for name in ("PATH", "TRITON_CACHE_DIR", "TRITON_LIBCUDA_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    place = find_place(hp := parse_command_line(["--preset=h100"]))
    assert not place.compile and place.attention == "banded" and hp.sequence_tokens < 65536
    assert re.match(": Triton cannot start .*C compiler.* and Python.h .*gcc, python3", place.why_not_compiled)
    with pytest.raises(UserError, match="--compile=yes: Triton cannot start .* give --compile=no"):
        parse_command_line(["--preset=h100", "--compile=yes"])


def test_a_gpu_that_does_not_answer_is_refused_in_one_sentence(cards, monkeypatch):
    """PyTorch's build for CUDA 13 has no kernels for sm_70 and older: the first launch raises."""
    cards(16, capability=(7, 0), shared=96 * 1024)
    hp = parse_command_line(["--preset=h100"])

    def launch(device):
        raise torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device\nSearch for it")
    monkeypatch.setattr(torch.cuda, "set_device", launch)
    with pytest.raises(UserError, match=r"GPU 0 cannot be used \(AcceleratorError: .*no kernel image .*--device=cpu"):
        train_gpt.start_up(find_place(hp), hp)


def test_without_its_gpus_a_machine_is_a_laptop(cards):
    cards(80)
    assert [parse_command_line(given).preset for given in ([], ["--device=cuda"], ["--device=cpu"])] == [
        "h100", "h100", "laptop"]


def test_apple_gpus_are_used_only_on_request(cards, monkeypatch):
    cards()
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert find_place(parse_command_line([])).device.type == "cpu"
    place = find_place(parse_command_line(["--device=mps"]))
    assert (place.device.type, place.dtype, place.muon_dtype) == ("mps", FP32, FP32)
    assert (place.attention, place.compile) == ("banded", False)
    assert train_gpt.widest_dtype(place) == FP32, "it has no float64"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError, match="--device=mps: this machine has none; give --device=cpu"):
        find_place(parse_command_line(["--device=mps"]))


# ---- tiles of FlexAttention (tests/test_gpu_lowering.py compiles them) -------------------------------------

@pytest.mark.parametrize("heads, side", [(12, None), (6, None), (4, 32), (3, 32)])  # 64, 128, 192, 256 each
def test_wide_heads_take_small_tiles_on_a_small_gpu(cards, heads, side):
    cards(24, capability=(8, 9), shared=99 * 1024)
    tiles = find_place(parse_command_line(["--preset=h100", f"--num_heads={heads}"])).tiles
    assert (tiles or {}).get("fwd_BLOCK_M") == side


@pytest.mark.parametrize("kibibytes", [227, 163, 99])
@pytest.mark.parametrize("head_bytes", [128, 256])
def test_inductors_own_tiles_are_kept_where_they_fit(kibibytes, head_bytes):
    assert flex_tiles(kibibytes * 1024, head_bytes) is None


@given(st.integers(48, 256), st.sampled_from([64, 128, 256, 512]))
def test_other_tiles_fit_by_their_own_arithmetic(kibibytes, head_bytes):
    tiles = flex_tiles(kibibytes * 1024, head_bytes)
    if tiles:
        sides = {value for name, value in tiles.items() if "BLOCK" in name}
        assert len(sides) == 1 and (side := sides.pop()) in (16, 32, 64) and train_gpt.BLOCK % side == 0
        assert 6 * side * head_bytes <= kibibytes * 1024 < 386 * head_bytes
