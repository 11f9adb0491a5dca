"""The self-test of ./run.sh check: rounding passes it, mistakes do not. On a GPU it compares that with the CPU."""
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import check
import train_gpt
from helpers import ROOT
from train_gpt import Hardware

ROUNDED = Hardware(dtype=torch.bfloat16, muon_dtype=torch.bfloat16)


@pytest.mark.parametrize("hardware", [ROUNDED, Hardware(muon_dtype=torch.bfloat16), Hardware()])
def test_rounding_passes(hardware):
    error, where = check.step_error(hardware)
    assert error < 0.8, where
    assert hardware != Hardware() or error == 0


def test_the_head_in_float8_is_compared_too(monkeypatch):
    """Its FP8 with the CPU's: what rounds otherwise in bfloat16 passes, a wrong scale does not."""
    error, where = check.step_error(ROUNDED, fp8_head=True)
    assert 0 < error < 0.8, where
    only_there(monkeypatch, "to_float8", lambda x, scale, dtype: (x * scale * 1.1).to(dtype))
    assert check.step_error(ROUNDED, fp8_head=True)[0] > 1


def only_there(monkeypatch, name: str, wrong) -> None:
    """A mistake that the device makes and the CPU's fp32 path does not."""
    right = getattr(train_gpt, name)

    def chosen(x, *more, **options):
        return (wrong if x.dtype == torch.bfloat16 else right)(x, *more, **options)
    monkeypatch.setattr(train_gpt, name, chosen)


@pytest.mark.parametrize("name, wrong", [
    ("attend", lambda q, k, v, mask: train_gpt.banded_cpu(q, k, v, mask.bias.clamp(min=-1.0), mask.window)[0]),  # sees all
    ("attend", lambda q, k, v, mask: train_gpt.banded_cpu(q, k, v, mask.bias, mask.window // 128)[0]),  # window too narrow
    ("norm", lambda x: F.rms_norm(x, (x.size(-1),), eps=0.1)),
])
def test_mistakes_do_not(monkeypatch, name, wrong):
    only_there(monkeypatch, name, wrong)
    assert check.step_error(ROUNDED)[0] > 1


def test_an_optimizer_that_is_wrong_does_not(monkeypatch):
    right = train_gpt.orthogonal_updates

    def one_step_less(*given):
        *most, steps, dtype = given
        return right(*most, steps - (dtype == torch.bfloat16), dtype)
    monkeypatch.setattr(train_gpt, "orthogonal_updates", one_step_less)
    error, where = check.step_error(ROUNDED)
    assert error > 1 and where.startswith("update of blocks.")


def test_ranks_compare_what_ddp_has_averaged(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests" / "commands")!r}]
import check, torch, train_gpt
hp = train_gpt.parse_command_line(["--preset=laptop", "--device=cpu", "--dtype=bfloat16"])
train_gpt.prepare_device(hardware := train_gpt.find_hardware(hp), hp)
assert hardware.world_size == 2 and hardware.dtype == torch.bfloat16
print("error", check.step_error(hardware))
hardware.device = torch.device("meta")  # anything but the CPU, which has nothing to compare
check.step_error = lambda hardware, fp8_head: (0.5 + hardware.rank, "head.weight")
try:
    check.check_step(hp, hardware)
except train_gpt.UserError as error:
    print(error)
torch.distributed.destroy_process_group()  # gloo's threads, left running, can abort a process that exits
""")
    process = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script],
                             capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    errors = [float(error) for error in re.findall(r"error \((\S+),", process.stdout)]
    assert len(errors) == 2 and max(errors) < 0.8
    assert process.stdout.count("GPU 1 computes something else than the CPU: head.weight is off by 1.5 times") == 2


def test_a_gpu_that_is_wrong_is_named(monkeypatch):
    monkeypatch.setattr(check, "step_error", lambda hardware, fp8_head: (7.0, "head.weight"))
    with pytest.raises(train_gpt.UserError, match="GPU 0 computes something else.*head.weight is off by 7 times"):
        check.check_step(train_gpt.Hyperparameters(), Hardware(device=torch.device("cuda", 0)))


def test_the_dated_presets_do_not_tune_their_kernels_for_it(monkeypatch):
    tuned = []
    monkeypatch.setattr(train_gpt, "prepare_device", lambda hardware, hp: tuned.append(hp.tune_kernels))
    monkeypatch.setattr(check, "run_checks", lambda hp, hardware: hp.tune_kernels)
    assert check.main(["--preset=2025-01-04", "--device=cpu"]) == 0 and tuned == [False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_this_gpu():
    hp = train_gpt.parse_command_line(["--preset=h100", "--sequence_tokens=1024", "--batch_tokens=1024", "--val_tokens=1024"])
    print(check.check_step(hp, train_gpt.find_hardware(hp)))
