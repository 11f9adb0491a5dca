"""What follows from the hardware: types, attention, compiling, tiles, and which sequence fits."""
import os
import re
from types import SimpleNamespace

import pytest
import torch
from harness import needs_triton
from helpers import DATED, TINY, hyperparameters, make_trainer, train_steps

import train_gpt
from train_gpt import (
    BLOCK,
    PRESETS,
    Hardware,
    UserError,
    find_hardware,
    fit_to_hardware,
    parameter_bytes,
    sequence_bytes,
    parse_command_line,
    start_triton,
)

GIB = 2**30
BF16 = torch.bfloat16
FP32 = torch.float32


@pytest.fixture
def cards(monkeypatch):
    """cards(gigabytes, …): GPUs of these sizes, all of one generation."""
    def pretend(*gigabytes: int, capability=(9, 0), shared: int | None = 227 * 1024,
                hip: str | None = None, free: int | None = None):
        told = {} if shared is None else dict(shared_memory_per_block_optin=shared)
        major, minor = capability
        properties = [SimpleNamespace(total_memory=size * GIB, major=major, minor=minor, **told)
                      for size in gigabytes]

        def get_device_properties(device=0):
            return properties[getattr(device, "index", device)]

        def mem_get_info(device):
            total = get_device_properties(device).total_memory
            return (total if free is None else free * GIB), total

        for name, value in dict(is_available=lambda: bool(gigabytes),
                                device_count=lambda: len(gigabytes), current_device=lambda: 0,
                                get_device_properties=get_device_properties,
                                mem_get_info=mem_get_info).items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(train_gpt, "start_triton", lambda: None)
    return pretend


@pytest.fixture
def host_memory(monkeypatch):
    """host_memory(gigabytes): a machine without GPUs and with so much memory."""
    def pretend(gigabytes: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        sizes = dict(SC_PHYS_PAGES=gigabytes * GIB // 4096, SC_PAGE_SIZE=4096)
        monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    return pretend


def fitted(*arguments: str) -> tuple[train_gpt.Hyperparameters, str]:
    """(hyperparameters, warning) as main has them before training."""
    hp = parse_command_line(list(arguments))
    notes = fit_to_hardware(hp, find_hardware(hp))
    return hp, "".join(note for note in notes if note.startswith("warning"))


# ---- the length of a sequence ----

@pytest.mark.parametrize("preset, gigabytes, tokens, val_tokens", [
    ("2025-01-04", 80, 65536, 0), ("2025-01-04", 40, 65536, 0), ("2025-01-04", 24, 32768, 0),
    ("2025-01-04", 12, 8192, 0), ("2025-01-04", 8, 4096, 0), ("h100", 80, 49152, 262144),
    ("h100", 40, 49152, 262144), ("h100", 24, 24576, 131072), ("h100", 12, 6144, 65536),
    ("h100", 8, 3072, 16384)])
def test_sequences_are_as_long_as_fits(cards, preset, gigabytes, tokens, val_tokens):
    cards(gigabytes)
    wanted = parse_command_line([f"--preset={preset}"])
    hp, warning = fitted(f"--preset={preset}")
    assert (hp.sequence_tokens, hp.val_sequence_tokens) == (tokens, val_tokens)
    assert (hp.batch_tokens, warning) == (wanted.batch_tokens, "")
    origin = "hardware" if tokens < wanted.sequence_tokens else hp.origins["batch_tokens"]
    assert hp.origins["sequence_tokens"] == origin, "the log says what was chosen"
    train_gpt.check_sequences(hp)


def test_the_smallest_gpu_decides(cards, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    cards(80, 24)
    assert fitted("--preset=h100")[0].sequence_tokens == 24576


def test_memory_that_others_use_does_not_count(cards):
    """With 20 of 80 GB free a sequence is as long as on a card of 20 GB."""
    lengths = []
    for size, free in ((80, None), (80, 20), (20, None)):
        cards(size, free=free)
        hp = train_gpt.parse_command_line(["--preset=h100"])
        train_gpt.fit_to_hardware(hp, train_gpt.find_hardware(hp))
        lengths.append(hp.sequence_tokens)
    assert lengths[0] > lengths[1] == lengths[2]


def test_ranks_choose_alike_whatever_is_free_on_their_gpus(cards, monkeypatch):
    """A screen on the first of two GPUs, say."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    cards(24, 24, free=12)
    assert fitted("--preset=h100")[0].sequence_tokens == 24576


def test_cuda_is_told_to_fragment_less_whatever_the_launcher(monkeypatch):
    hp = train_gpt.parse_command_line(["--preset=laptop", "--device=cpu"])
    for chosen, wanted in ((None, "expandable_segments:True"), ("backend:x", "backend:x")):
        monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
        if chosen:
            monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", chosen)
        train_gpt.find_hardware(hp)
        assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == wanted


def test_fp8_keeps_the_gradient_of_the_logits_twice(cards):
    """One byte each; the traces of tests/gpu say the same."""
    cards(80)
    per_token = {}
    for fp8 in ("true", "false"):
        hp = train_gpt.parse_command_line(["--preset=h100", f"--fp8_head={fp8}",
                                           "--val_sequence_tokens=0"])
        hardware = find_hardware(hp)
        activations = sequence_bytes(hp, hardware)
        per_token[fp8] = activations / hp.sequence_tokens
    assert per_token["true"] - per_token["false"] == 2 * 50304


def test_the_sequence_divides_the_share_of_a_rank(cards, monkeypatch):
    cards(*[80] * 16)
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert fitted("--preset=h100")[0].sequence_tokens == 24576
    assert fitted("--preset=2025-01-04")[0].sequence_tokens == 32768
    assert fitted("--preset=2025-01-04", "--segment_tokens=512")[0].sequence_tokens == 32768
    hp, _ = fitted("--preset=2025-01-04", "--segment_tokens=384")
    with pytest.raises(UserError, match="--segment_tokens=384: .* such as 512"):
        train_gpt.check_sequences(hp)


def test_ranks_that_do_not_divide_the_batch_are_what_is_said(cards, monkeypatch):
    """And not that memory is short, which no shorter sequence would change."""
    cards(*[24] * 3)
    monkeypatch.setenv("WORLD_SIZE", "3")
    hp, _ = fitted("--preset=2025-01-04")
    with pytest.raises(UserError, match="--batch_tokens=524288: .* 3 ranks × "
                                        "sequence_tokens=65536; the nearest is 589824"):
        train_gpt.check_sequences(hp, world_size=3)
    assert fitted("--preset=2025-01-04", "--batch_tokens=589824")[0].sequence_tokens == 32768
    assert fitted("--preset=h100")[0].sequence_tokens == 16384, "a part of 131,072"


@pytest.mark.parametrize("batch_tokens", [128, 1000, 5000, 300_000])
def test_a_batch_that_no_sequence_divides_is_what_is_said(cards, batch_tokens):
    """The user typed it, and not the sequence. Who follows the advice is accepted."""
    cards(80)
    if batch_tokens % BLOCK:
        with pytest.raises(UserError, match=f"--batch_tokens={batch_tokens}: ") as caught:
            fitted("--preset=h100", f"--batch_tokens={batch_tokens}")
        advice = re.search(r"the nearest is (\d+)$", str(caught.value))
        assert abs(int(advice[1]) - batch_tokens) <= BLOCK
        batch_tokens = int(advice[1])
    hp, _ = fitted("--preset=h100", f"--batch_tokens={batch_tokens}")
    train_gpt.check_sequences(hp)


def test_without_a_gpu_the_memory_of_the_machine_decides(host_memory):
    host_memory(512)
    assert fitted("--preset=h100")[0].sequence_tokens == 49152
    assert fitted("--preset=h100", "--batch_tokens=8192")[0].sequence_tokens == 8192
    hp, warning = fitted("--preset=h100", "--sequence_tokens=131072")
    assert (hp.sequence_tokens, warning) == (131072, "")
    assert fitted("--preset=laptop")[0].sequence_tokens == 4096
    host_memory(16)
    assert fitted("--preset=h100")[0].sequence_tokens < 49152


def test_a_typed_sequence_that_does_not_fit_is_only_warned_about(cards):
    """The estimate may be wrong."""
    cards(24)
    hp, warning = fitted("--preset=h100", "--sequence_tokens=49152")
    assert hp.sequence_tokens == 49152
    assert re.fullmatch(r"warning: a step needs about \d\d\.\d GiB and there are 20\.6; give "
                        r"--sequence_tokens=24576 --val_sequence_tokens=65536", warning)
    hp, warning = fitted("--preset=h100", "--sequence_tokens=16384")
    assert (hp.sequence_tokens, warning) == (16384, "")


@pytest.mark.parametrize("arguments, remedy", [
    (["--preset=h100"], "give --sequence_tokens=24576 --val_sequence_tokens=131072"),
    (["--preset=2025-01-04"], "give --sequence_tokens=32768"),
    (["--preset=laptop", "--sequence_tokens=512"], "give --val_sequence_tokens=32768"),
    (["--preset=laptop", "--sequence_tokens=512", "--val_sequence_tokens=0"],
     "lower --model_dim or --num_layers")])
def test_less_memory_is_half_of_what_can_be_halved(arguments, remedy):
    assert train_gpt.less_memory(parse_command_line(arguments)) == remedy


def test_the_tokens_of_validation_that_are_no_blocks_are_what_is_said(cards):
    cards(80)
    hp, _ = fitted("--preset=h100", "--val_tokens=1000")
    with pytest.raises(UserError, match="--val_tokens=1000: expected a multiple of"):
        train_gpt.check_sequences(hp)


def test_ranks_that_do_not_divide_the_laptops_batch_are_what_is_said(host_memory, monkeypatch):
    host_memory(16)
    monkeypatch.setenv("WORLD_SIZE", "3")
    hp, _ = fitted("--preset=laptop")
    train_gpt.check_sequences(hp)
    with pytest.raises(UserError, match="--batch_tokens=4096: .* 3 ranks × sequence_tokens=4096; "
                                        "the nearest is 12288"):
        train_gpt.check_sequences(hp, world_size=3)


def test_a_huge_batch_is_divided_in_no_time(cards):
    cards(24)
    hp, warning = fitted("--preset=2025-01-04", "--batch_tokens=1e12", "--sequence_tokens=1e12",
                         "--val_sequence_tokens=65536")
    assert hp.sequence_tokens == 10**12 and warning.startswith("warning: a step needs about ")


def test_what_fits_at_no_length_is_tried_at_the_shortest_with_a_warning(cards):
    cards(4)
    hp, warning = fitted("--preset=h100")
    assert hp.sequence_tokens == 3 * BLOCK
    assert re.fullmatch(r"warning: a step needs about 3\.\d GiB and there are 2\.6; lower "
                        "--model_dim or --num_layers", warning)


def test_the_warning_is_in_the_log_and_the_run_goes_on(data, capsys, monkeypatch, host_memory):
    host_memory(1)
    monkeypatch.setattr(train_gpt, "parameter_bytes", lambda hp, hardware: 0)
    monkeypatch.setattr(train_gpt, "sequence_bytes", lambda hp, hardware: hp.sequence_tokens
                        * GIB / 128)
    assert train_gpt.main([*TINY, *data, "--run_id=warned"]) == 0
    sentence = ("warning: a step needs about 2.0 GiB and there are 1.0; give "
                "--sequence_tokens=128")
    assert sentence in capsys.readouterr().out.splitlines()


def test_long_sequences_of_validation_are_counted_too(cards):
    """2025-07-13 trains on 49,152 tokens and validates on 262,144, with 26 GB of logits."""
    cards(80)
    hp, warning = fitted("--preset=2025-07-13")
    assert warning == "" and hp.sequence_tokens == 49_152
    cards(32)
    hp, warning = fitted("--preset=2025-07-13", "--fp8_head=false",
                         "--val_sequence_tokens=262144")
    assert warning.endswith(" --val_sequence_tokens=131072"), warning
    hp, warning = fitted("--preset=2025-07-13", "--fp8_head=false")
    assert (warning, hp.val_sequence_tokens) == ("", 131_072)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
                                   MemoryError()])
@pytest.mark.parametrize("sequence, remedy", [
    (256, "give --sequence_tokens=128"),
    (128, "lower --model_dim or --num_layers")])
def test_running_out_of_memory_is_one_sentence(data, capsys, monkeypatch, tmp_path, error, sequence,
                                               remedy):
    def step(trainer, batch, step):
        raise error

    monkeypatch.setattr(train_gpt.Trainer, "step", step)
    arguments = [*TINY, *data, f"--sequence_tokens={sequence}", f"--log_dir={tmp_path}"]
    assert train_gpt.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: out of memory with --sequence_tokens={sequence}; {remedy}"


def test_running_out_of_memory_with_a_saved_model_is_one_sentence_too(capsys, monkeypatch):
    def load_model(path, hardware):
        raise MemoryError

    monkeypatch.setattr(train_gpt, "load_model", load_model)
    assert train_gpt.main(["--device=cpu", "--checkpoint=model.pt"]) == 2
    assert capsys.readouterr().err.startswith("error: out of memory; close other programs")


@pytest.mark.parametrize("parts", [2, 4])
def test_shorter_sequences_are_the_same_training(tiny, make_shards, parts):
    """Documents of 128 tokens, so that no sequence cuts one: the losses of a few steps agree.

    In float64: how float32 rounds depends on the CPU.
    """
    def losses(sequence_tokens: int) -> list[float]:
        hp = tiny(train_files=train, val_files=train, sequence_tokens=sequence_tokens,
                  window_start=512, dtype="float64", muon_dtype="float64")
        return train_steps(make_trainer(hp), 4)

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(8, 200, (12 * 1024 + 1,), generator=generator).numpy()
    tokens[::128] = 7
    train = make_shards(tokens)
    assert losses(512 // parts) == pytest.approx(losses(512), rel=1e-9)
    tokens[128::128] = 9  # one long document: now it matters where a sequence ends
    train = make_shards(tokens)
    assert losses(512 // parts) != pytest.approx(losses(512), rel=1e-5)


# ---- what a step needs ----

def bytes_of(parameters) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("preset", [*PRESETS, "2024-12-10+laptop"])
def test_the_memory_of_weights_and_optimizers_is_that_of_the_model(preset, dtype):
    """Weights, gradients twice; two moments of Adam, or Muon's momentum shared among the ranks."""
    hp = hyperparameters(preset)
    with torch.device("meta"):
        model = train_gpt.GPT(hp, Hardware(dtype=dtype))
    groups = {kind: bytes_of(params.values())
              for kind, params in train_gpt.optimizer_groups(model).items()}
    for world_size in (1, 8):
        hardware = Hardware(world_size=world_size, dtype=dtype)
        expected = 5 * (groups["embed"] + groups["head"] + groups["scalar"])
        expected += (3 + 1 / world_size) * groups["muon"] + 14 * hp.ngram_tokens
        assert parameter_bytes(hp, hardware) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("preset", DATED)
def test_embeddings_in_float32_take_as_many_bytes_as_they_have(preset):
    hp = hyperparameters(preset, bf16_embeddings=False)
    with torch.device("meta"):
        model = train_gpt.GPT(hp, Hardware(dtype=BF16))
    embeddings = bytes_of([model.embed.weight, *model.value_embeds.parameters()])
    more = parameter_bytes(hp, Hardware(dtype=BF16))
    less = parameter_bytes(hyperparameters(preset), Hardware(dtype=BF16))
    assert more - less == 5 * embeddings / 2


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_activations_are_more_than_what_the_backward_pass_keeps(tiny, dtype):
    """A bound from below, without a GPU: the tensors that autograd saves in a forward pass."""
    hp = tiny(num_layers=4, model_dim=128, vocab_size=2000)
    model = train_gpt.GPT(hp, Hardware(dtype=dtype))
    kept = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return x

    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    tokens = torch.arange(hp.sequence_tokens + 1) % hp.vocab_size
    window = torch.tensor(train_gpt.window_at(hp, 0), dtype=torch.int32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model(tokens[:-1].int(), tokens[1:], window)
    assert loss.isfinite()
    saved = sum(size for pointer, size in kept.items() if pointer not in own)
    hardware = Hardware(dtype=dtype)
    activations = sequence_bytes(hp, hardware)
    assert 0.5 * saved < activations < 4 * saved


# ---- FP8 ----

FP8_CARDS = [dict(capability=(8, 9)), dict(capability=(9, 0)), dict(capability=(9, 5), hip="7.2")]
# Of AMD's, 9.0 has none and 9.4 has one with another bias.
OTHER_CARDS = [dict(capability=(8, 0)), dict(capability=(8, 6)),
               dict(capability=(9, 0), hip="7.2"), dict(capability=(9, 4), hip="7.2")]


@pytest.mark.parametrize("card", FP8_CARDS)
def test_gpus_with_float8_use_it(cards, card):
    cards(80, **card)
    assert fitted("--preset=h100")[0].fp8_head


@pytest.mark.parametrize("card", OTHER_CARDS)
def test_gpus_without_float8_train_without_it_unless_it_is_asked_for(cards, card):
    cards(80, **card)
    hp = parse_command_line(["--preset=h100"])
    assert "fp8_head=False instead of True: there is no FP8 here" in fit_to_hardware(
        hp, find_hardware(hp))
    assert not hp.fp8_head and hp.origins["fp8_head"] == "hardware"
    with pytest.raises(UserError, match="--fp8_head=true: this device has no FP8"):
        fitted("--preset=h100", "--fp8_head")


def test_apple_gpus_have_no_float8(cards, monkeypatch):
    cards()
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert not fitted("--preset=h100", "--device=mps")[0].fp8_head
    with pytest.raises(UserError, match="--fp8_head=true: this device has no FP8"):
        fitted("--preset=h100", "--device=mps", "--fp8_head")


def test_a_resumed_run_is_not_fitted_again(cards):
    """A checkpoint of an H100, on a small card without FP8."""
    cards(24, capability=(8, 6))
    hp = parse_command_line(["--preset=h100"])
    with pytest.raises(UserError, match="--fp8_head=true: this device has no FP8"):
        fit_to_hardware(hp, find_hardware(hp), keep=True)
    cards(24)
    warning, = fit_to_hardware(hp, find_hardware(hp), keep=True)
    assert hp.sequence_tokens == 49152 and warning.startswith("warning: a step needs")


# ---- types, attention, compiling ----

@pytest.mark.parametrize("card, dtype, attention, compiled", [
    (dict(capability=(9, 0)), BF16, "flex", True),
    (dict(capability=(8, 0), shared=163 * 1024), BF16, "flex", True),
    (dict(capability=(7, 5), shared=64 * 1024), FP32, "banded", True),  # bfloat16 is emulated
    (dict(capability=(7, 0), shared=96 * 1024), FP32, "banded", True),
    (dict(capability=(6, 1), shared=48 * 1024), FP32, "banded", False),  # no Triton below 7.0
    (dict(capability=(9, 4), shared=None, hip="7.0"), BF16, "flex", True),  # shared memory unknown
])
def test_what_follows_from_the_generation(cards, card, dtype, attention, compiled):
    cards(80, **card)
    hardware = find_hardware(parse_command_line(["--preset=h100"]))
    assert (hardware.device.type, hardware.dtype, hardware.muon_dtype) == ("cuda", dtype, dtype)
    assert (hardware.attention, hardware.compile) == (attention, compiled)
    assert hardware.why_not_compiled == ("" if compiled else "there is no Triton for this GPU")


@pytest.mark.parametrize("argument, words", [
    ("--attention=flex", "only compiled, on a GPU with bfloat16 .*; give --attention=banded"),
    ("--compile=yes", "no Triton for this GPU; give --compile=no")])
def test_what_an_old_gpu_cannot_do_is_refused(cards, argument, words):
    cards(80, capability=(6, 1), shared=48 * 1024)
    with pytest.raises(UserError, match=words):
        find_hardware(parse_command_line(["--preset=h100", argument]))


@needs_triton
def test_a_gpu_without_a_c_compiler_is_told_and_trains_without(cards, monkeypatch, tmp_path):
    """Triton builds the library that loads its kernels when it first uses a GPU."""
    from triton.runtime import driver
    cards(80)
    for name in ("_active", "_default"):
        monkeypatch.setattr(driver, name, None)
    monkeypatch.setattr(train_gpt, "start_triton", start_triton)
    monkeypatch.delenv("CC", raising=False)
    for name in ("PATH", "TRITON_CACHE_DIR", "TRITON_LIBCUDA_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    hp = parse_command_line(["--preset=h100"])
    hardware = find_hardware(hp)
    assert not hardware.compile and hardware.attention == "banded"
    assert re.match("Triton cannot start .*C compiler.* and Python.h .*gcc, python3",
                    hardware.why_not_compiled)
    fit_to_hardware(hp, hardware)
    assert hp.sequence_tokens < 49152, "what is not compiled needs more memory"
    with pytest.raises(UserError, match="--compile=yes: Triton cannot start .* give --compile=no"):
        find_hardware(parse_command_line(["--preset=h100", "--compile=yes"]))


def test_a_gpu_that_does_not_answer_is_refused_in_one_sentence(cards, monkeypatch):
    """PyTorch's build for CUDA 13 has no kernels for sm_70 and older: the first launch raises."""
    cards(16, capability=(7, 0), shared=96 * 1024)
    hp = parse_command_line(["--preset=h100"])

    def launch(device):
        raise torch.AcceleratorError("CUDA error: no kernel image is available for execution on "
                                     "the device\nSearch for it")

    monkeypatch.setattr(torch.cuda, "set_device", launch)
    with pytest.raises(UserError) as caught:
        train_gpt.prepare_device(hp, find_hardware(hp))
    message = str(caught.value)
    assert re.fullmatch("GPU 0 cannot be used: CUDA error: no kernel image .*--device=cpu", message)
    assert "AcceleratorError" not in message


def test_more_processes_than_gpus_are_refused(cards, monkeypatch):
    cards(80, 80)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="--device=cuda: rank 2 needs GPU 2 and there are 2; start "
                                        "one process per GPU, or give --device=cpu"):
        find_hardware(parse_command_line(["--preset=h100"]))


def test_without_its_gpus_a_machine_is_a_laptop(cards):
    cards(80)
    for arguments, preset in (([], "h100"), (["--device=cuda"], "h100"),
                              (["--device=cpu"], "laptop")):
        assert parse_command_line(arguments).preset == preset


def test_apple_gpus_are_used_only_on_request(cards, monkeypatch):
    cards()
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert find_hardware(parse_command_line([])).device.type == "cpu"
    hardware = find_hardware(parse_command_line(["--device=mps"]))
    assert (hardware.device.type, hardware.dtype, hardware.muon_dtype) == ("mps", FP32, FP32)
    assert (hardware.attention, hardware.compile) == ("banded", False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError, match="--device=mps: this machine has none; give --device=cpu"):
        find_hardware(parse_command_line(["--device=mps"]))


@pytest.mark.parametrize("capabilities, dtype", [
    (dict(avx512_bf16=True), BF16), (dict(amx_bf16=True), BF16), (dict(avx2=True), FP32)])
def test_a_cpu_computes_muon_in_bfloat16_where_it_can(cards, monkeypatch, capabilities, dtype):
    cards()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    hardware = find_hardware(parse_command_line([]))
    assert (hardware.dtype, hardware.muon_dtype) == (FP32, dtype)
    typed = find_hardware(parse_command_line(["--muon_dtype=float32", "--dtype=bfloat16"]))
    assert (typed.dtype, typed.muon_dtype) == (BF16, FP32)


@pytest.mark.parametrize("heads, shared, attention", [
    (6, 99, "flex"), (3, 99, "banded"), (3, 163, "banded"), (3, 227, "flex"), (3, None, "flex")])
def test_wide_heads_take_flex_attention_only_where_its_kernels_fit(cards, heads, shared, attention):
    """Of 128 and 256 dimensions; tests/gpu/test_gpu_lowering.py compiles both."""
    cards(24, shared=shared and shared * 1024)
    arguments = ["--preset=h100", f"--num_heads={heads}"]
    assert find_hardware(parse_command_line(arguments)).attention == attention
    asked = parse_command_line([*arguments, "--attention=flex"])
    assert find_hardware(asked).attention == "flex"


def test_the_ranks_of_a_machine_share_its_memory(monkeypatch):
    alone = train_gpt.available_bytes(train_gpt.Hardware())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert train_gpt.available_bytes(train_gpt.Hardware(world_size=4)) == alone / 4


def test_out_of_memory_is_not_explained_as_a_damaged_file():
    with pytest.raises(torch.OutOfMemoryError):
        with train_gpt.explained("a checkpoint", "give another", RuntimeError):
            raise torch.OutOfMemoryError("CUDA out of memory")


def test_out_of_memory_before_the_hyperparameters_are_known(monkeypatch, capsys):
    def fail(hp):
        raise MemoryError
    monkeypatch.setattr(train_gpt, "find_run", fail)
    assert train_gpt.main(["--preset=laptop"]) == 2
    assert capsys.readouterr().err.startswith("error: out of memory; close other programs")


@pytest.mark.parametrize("compiler, there", [("c++-of-mine", True), ("c++-of-mine", False)])
def test_the_compiler_that_is_looked_for_is_the_one_inductor_calls(monkeypatch, compiler, there):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(train_gpt.shutil, "which", lambda name: there and name == compiler)
    hp = parse_command_line(["--preset=h100", "--device=cpu", "--compile=auto"])
    expected = "" if there else f"there is no C++ compiler ({compiler}) here"
    assert find_hardware(hp).why_not_compiled == expected
