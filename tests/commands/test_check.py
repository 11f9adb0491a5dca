"""./run.sh check: what it says, and its step, which rounding passes and mistakes do not."""
import re
import subprocess
import sys

import check
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, TINY, hyperparameters, run

import train_gpt
from train_gpt import Hardware

ROUNDED = Hardware(dtype=torch.bfloat16, muon_dtype=torch.bfloat16)
H100 = hyperparameters("h100", fp8_head=False)
FP8 = hyperparameters("h100")


# ---- what it says ----

def test_it_passes_where_a_run_would_and_lists_every_parameter(data, capsys):
    assert check.main([*TINY, *data]) == 0
    out = capsys.readouterr().out
    for name in check.CHECKS:
        assert f"\nok    {name}: " in f"\n{out}", name
    hp = train_gpt.parse_command_line(TINY)
    for name, p in train_gpt.GPT(hp).named_parameters():
        row = next(line for line in out.splitlines() if line.startswith(f"{name} "))
        assert str(tuple(p.shape)) in row
        assert ("Muon" in row) == (name.startswith("blocks.") and p.ndim == 2)
    assert "active per token" in out and "of activations" in out
    assert "GPUs of 80 GB: 256, 40 GB: 256" in out
    assert out.endswith("\nthis run would work\n")


def test_the_owner_of_each_matrix_is_the_rank_that_updates_it():
    hp = train_gpt.parse_command_line(TINY)
    rows = check.parameter_table(hp, Hardware(world_size=3))
    owner = {row.split()[0]: row.split()[-1] for row in rows[1:-1]}
    model = train_gpt.GPT(hp)
    muon_params = train_gpt.optimizer_groups(model)["muon"]
    for rank in range(3):
        muon = train_gpt.Muon(muon_params.values(), rank=rank, world_size=3)
        own = {p for p in muon.all_own_params()}
        for name, p in muon_params.items():
            assert p in own or owner[name] != str(rank), name
    assert owner["head.weight"] == owner["skip_weights"] == "all"
    total = sum(p.numel() for p in model.parameters())
    assert rows[-1].startswith(f"parameters: {total:,} in all, ")


def test_it_names_what_is_missing_and_the_command_that_gets_it(data, capsys):
    assert check.main([*TINY, *data, "--num_steps=500"]) == 1
    out = capsys.readouterr().out
    assert ("FAIL  training data: " in out
            and "2 shards hold 38 batches of 1024 tokens and --num_steps=500 needs 500; repeat "
            "them with --epochs=14, or lower it to --num_steps=38" in out)
    assert out.endswith("\nthis run would not work: see FAIL above\n")


def test_it_says_what_to_fetch_and_which_memory_is_short(capsys):
    # more tokens than any machine has memory for
    huge = [f"--{name}_tokens={2**27}" for name in ("sequence", "batch", "val")]
    arguments = ["--preset=2024-12-10", "--device=cpu", *huge,
                 "--train_files=data/fineweb10B/none_*.bin"]
    assert check.main(arguments) == 1
    out = capsys.readouterr().out
    memory = next(line for line in out.splitlines() if line.startswith("FAIL  memory: "))
    assert re.search(r"about [\d.]+ GiB needed and [\d.]+ free; give --sequence_tokens=\d+$",
                     memory)
    data = next(line for line in out.splitlines() if line.startswith("FAIL  training data: "))
    assert "data/fineweb10B/none_*.bin: no token shards there" in data
    assert "(for this run: python data/fineweb.py 103)" in data


def test_wrong_options_are_one_line(capsys):
    assert check.main(["--nmu_steps=3"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: --nmu_steps=3: no such option")
    assert captured.err.count("\n") == 1


def test_the_dated_presets_do_not_tune_their_kernels_for_it(monkeypatch):
    tuned = []
    monkeypatch.setattr(train_gpt, "prepare_device",
                        lambda hp, hardware: tuned.append(hp.tune_kernels))
    monkeypatch.setattr(check, "run_checks", lambda hp, hardware: hp.tune_kernels)
    assert check.main(["--preset=2024-12-10", "--device=cpu"]) == 0
    assert tuned == [False]


# ---- the step ----

@pytest.fixture
def smaller(monkeypatch):
    """A quarter of the work: most CPUs compute bfloat16 slowly."""
    monkeypatch.setitem(check.SMALL, "model_dim", 128)
    monkeypatch.setitem(check.SMALL, "sequence_tokens", 512)


@pytest.mark.parametrize("hardware", [ROUNDED, Hardware(muon_dtype=torch.bfloat16), Hardware()])
def test_rounding_passes(smaller, hardware):
    error, where = check.step_error(H100, hardware)
    assert error < 0.8, where
    if hardware == Hardware():
        assert error == 0


@pytest.mark.parametrize("preset", [pytest.param("2025-01-16", marks=pytest.mark.slow),
                                    "2025-07-13"])
def test_the_step_has_the_techniques_of_the_preset(preset):
    hp = hyperparameters(preset)
    error, where = check.step_error(hp, ROUNDED)
    assert 0 < error < 0.8, where
    computed, _ = check.small_step(hp, Hardware())
    plain, _ = check.small_step(H100, Hardware())
    assert any(not torch.equal(computed[name], plain[name]) for name in plain)


def only_there(monkeypatch, name: str, wrong) -> None:
    """A mistake of the device that is compared and not of the CPU, which computes in fp32."""
    right = getattr(train_gpt, name)

    def chosen(x, *more, **options):
        function = wrong if x.dtype == torch.bfloat16 else right
        return function(x, *more, **options)
    monkeypatch.setattr(train_gpt, name, chosen)


def test_the_head_in_float8_is_compared_too(smaller, monkeypatch):
    """Its FP8 with the CPU's: other rounding in bfloat16 passes, a wrong scale does not."""
    error, where = check.step_error(FP8, ROUNDED)
    assert 0 < error < 0.8, where
    only_there(monkeypatch, "to_float8", lambda x, scale, dtype: (1.1 * scale * x).to(dtype))
    assert check.step_error(FP8, ROUNDED)[0] > 1


attend = train_gpt.attend


def sees_all(q, k, v, mask, scale):
    return attend(q, k, v, mask.clamp(min=-1.0), scale)


def sees_one_block(q, k, v, mask, scale):
    return attend(q, k, v, mask[..., -train_gpt.BLOCK:], scale)


def wrong_epsilon(x, eps):
    return F.rms_norm(x, (x.size(-1),), eps=0.1)


@pytest.mark.parametrize("name, wrong", [
    ("attend", sees_all), ("attend", sees_one_block), ("norm", wrong_epsilon)])
def test_mistakes_do_not(smaller, monkeypatch, name, wrong):
    only_there(monkeypatch, name, wrong)
    assert check.step_error(H100, ROUNDED)[0] > 1


def test_an_optimizer_that_is_wrong_does_not(smaller, monkeypatch):
    right = train_gpt.orthogonal_updates

    def one_step_less(*arguments):
        *others, steps, dtype = arguments
        return right(*others, steps - 1 if dtype == torch.bfloat16 else steps, dtype)
    monkeypatch.setattr(train_gpt, "orthogonal_updates", one_step_less)
    error, where = check.step_error(H100, ROUNDED)
    assert error > 1 and where.startswith("update of blocks.")


def test_ranks_compare_what_ddp_has_averaged(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests" / "commands")!r}]
import check, torch, train_gpt
hp = train_gpt.parse_command_line(["--preset=laptop", "--device=cpu", "--dtype=bfloat16"])
hardware = train_gpt.find_hardware(hp)
train_gpt.prepare_device(hp, hardware)
train_gpt.join_group(hardware)
assert hardware.world_size == 2 and hardware.dtype == torch.bfloat16
sys.stdout.write(f"error {{check.step_error(hp, hardware)}}\\n")  # at once: ranks share the pipe
hardware.device = torch.device("meta")  # anything but the CPU, which has nothing to compare
check.step_error = lambda hp, hardware: (0.5 + hardware.rank, "head.weight")
try:
    check.check_step(hp, hardware)
except train_gpt.UserError as error:
    print(error)
train_gpt.leave_group(finished=True)
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc_per_node=2", script]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    errors = [float(error) for error in re.findall(r"error \((\S+),", process.stdout)]
    assert len(errors) == 2 and max(errors) < 0.8
    sentence = "GPU 1 computes something else than the CPU: head.weight is off by 1.5 times"
    assert process.stdout.count(sentence) == 2


def test_a_gpu_that_is_wrong_is_named(monkeypatch):
    monkeypatch.setattr(check, "step_error", lambda hp, hardware: (7.0, "head.weight"))
    gpu = Hardware(device=torch.device("cuda", 0))
    with pytest.raises(train_gpt.UserError,
                       match="GPU 0 computes something else.*head.weight is off by 7 times"):
        check.check_step(train_gpt.Hyperparameters(), gpu)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_this_gpu():
    hp = train_gpt.parse_command_line(["--preset=h100", "--sequence_tokens=1024",
                                       "--batch_tokens=1024", "--val_tokens=1024",
                                       "--val_start=0"])
    print(check.check_step(hp, train_gpt.find_hardware(hp)))


def test_every_rank_takes_part_and_one_prints(data):
    script = ROOT / "tests" / "commands" / "check.py"
    process = run([*TINY, *data], ranks=2, script=script)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("ok    collective: 2 ranks answered in ") == 1
