"""What really happens to runs, with real processes: signals, killed and stuck ranks, ranks that drift, lost machines."""
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

import train_gpt
from helpers import ROOT, SCRIPT, TINY, Result, make_data, trained
from test_launch import free_port

LONG = [*TINY, "--num_steps=30", "--val_every=10", "--save_every=4"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def undisturbed(data) -> Result:
    return trained([*LONG, *data], "undisturbed", ranks=2)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    for run in Run.started:
        if run.process.poll() is None:  # the test failed
            run.kill_all()
    Run.started.clear()


class Run:
    """A run in the background, its output in a file that can be read meanwhile."""
    started = []

    def __init__(self, data: list[str], name: str, *options: str, command: list[str] | None = None, ranks: int = 2,
                 restarts: int = 0, script: Path = SCRIPT, base: list[str] = LONG, **variables):
        logs = Path(data[-1].partition("=")[2])
        self.folder, self.path = logs / name, logs.parent / f"{name}_{random.random()}.out"
        launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
                                          f"--max-restarts={restarts}"]
        command = command or [sys.executable, *launcher, str(script)]
        self.process = subprocess.Popen([*command, *base, *data, f"--run_id={name}", *options], start_new_session=True,
                                        stdout=open(self.path, "w"), stderr=subprocess.STDOUT,
                                        env=os.environ | {"OMP_NUM_THREADS": "1", "LOGLEVEL": "ERROR"} | variables)
        self.started.append(self)

    @property
    def output(self) -> str:
        return self.path.read_text()

    def until(self, text: str, timeout: float = 600) -> None:
        deadline = time.monotonic() + timeout
        while not re.search(text, self.output):
            assert time.monotonic() < deadline and self.process.poll() is None, self.output
            time.sleep(0.02)

    def ranks(self) -> dict[int, int]:
        """The process of each rank, among the launcher's children."""
        found = {}
        for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            with contextlib.suppress(OSError):  # it may have ended since
                entries = Path(f"/proc/{child}/environ").read_text().split("\0")
                found |= {int(entry[5:]): int(child) for entry in entries if entry.startswith("RANK=")}
        return found

    def wait(self, timeout: float = 600) -> int:
        return self.process.wait(timeout)

    def kill_all(self) -> None:
        """A machine that goes: the launcher and its ranks at once."""
        for pid in [self.process.pid, *self.ranks().values()]:
            os.kill(pid, signal.SIGKILL)


def waiting_copy(folder: Path, step: int, until: str = "self.interrupted") -> Path:
    """The trainer and its launcher, but every rank waits before a step until it is signalled or folder/go is there.

    What a test does meanwhile is done in the middle of the run, however slow the machine.
    """
    gate = f"""
without_waiting = Trainer.step
def waiting(self, batch, number):
    while number == {step} and not ({until}) and not Path({str(folder / "go")!r}).exists():
        time.sleep(0.01)
    return without_waiting(self, batch, number)
Trainer.step = waiting
"""
    for name in ("run.sh", "requirements.txt"):
        shutil.copy(ROOT / name, folder)
    (folder / "train_gpt.py").write_text(SCRIPT.read_text().replace("\nif __name__ ==", f"{gate}\nif __name__ =="))
    return folder


def same(folder: Path, other: Result) -> None:
    result = Result(folder, subprocess.CompletedProcess([], 0, ""))
    assert result.train_losses == other.train_losses and result.val_losses == other.val_losses


def test_a_signal_to_one_rank_stops_all_after_a_checkpoint_and_a_second_run_finishes(data, undisturbed, tmp_path):
    run = Run(data, "term", "--save_every=0", script=waiting_copy(tmp_path, 7) / "train_gpt.py")
    run.until("step:7/30 train_loss")
    os.kill(run.ranks()[1], signal.SIGTERM)
    (tmp_path / "go").touch()
    assert run.wait() == 0, run.output
    assert re.search(r"stopped by another rank after step (\d+); go on with --resume=", run.output)
    saved = list(run.folder.glob("checkpoint_*"))
    assert len(saved) == 1 and 7 <= int(saved[0].stem[-7:]) < 30
    assert train_gpt.main([*LONG, *data, f"--resume={run.folder}"]) == 0  # and here by one rank
    result = Result(run.folder, subprocess.CompletedProcess([], 0, ""))
    assert result.train_losses == pytest.approx(undisturbed.train_losses, abs=1e-4)


def test_a_signal_to_the_launcher_reaches_the_ranks(data, tmp_path):
    """SLURM's word before it takes the machines away."""
    run = Run(data, "usr1", "--save_every=0", command=[str(waiting_copy(tmp_path, 5) / "run.sh")], PYTHON=sys.executable,
              NPROC="2")
    run.until("step:5/30 train_loss")
    run.process.send_signal(signal.SIGUSR1)
    assert run.wait() == 128 + signal.SIGUSR1, run.output
    assert "stopped by SIGUSR1 after step 6" in run.output and "Traceback" not in run.output
    assert len(list(run.folder.glob("checkpoint_*.pt"))) == 1


def test_a_second_signal_ends_the_process_at_once(data, tmp_path):
    """In a step that would never end."""
    run = Run(data, "second", script=waiting_copy(tmp_path, 0, until="False") / "train_gpt.py", ranks=1)
    run.until("step:0/30 val_loss")
    deadline = time.monotonic() + 600
    while run.process.poll() is None and time.monotonic() < deadline:
        run.process.send_signal(signal.SIGUSR1)
        time.sleep(0.3)
    assert run.wait(1) == 128 + signal.SIGUSR1 and not list(run.folder.glob("checkpoint*"))


def test_a_signal_within_a_second_of_the_first_is_the_same_one_come_by_another_way(monkeypatch):
    now, ended = [100.0], []
    monkeypatch.setattr(train_gpt, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(os, "_exit", ended.append)
    trainer = types.SimpleNamespace(interrupted="")
    with train_gpt.SignalHandler(trainer):
        for at, expected in ((100.0, []), (100.9, []), (101.1, [128 + signal.SIGUSR1])):
            now[0] = at
            signal.raise_signal(signal.SIGUSR1)
            assert trainer.interrupted == "SIGUSR1" and ended == expected


def test_torchrun_restarts_a_killed_rank_and_nothing_is_lost(data, undisturbed, tmp_path):
    step = random.randint(5, 20)
    run = Run(data, "killed", restarts=3, script=waiting_copy(tmp_path, step) / "train_gpt.py")
    run.until(f"step:{step}/30 train_loss")
    os.kill(random.choice(list(run.ranks().values())), signal.SIGKILL)
    (tmp_path / "go").touch()
    assert run.wait() == 0, run.output
    same(run.folder, undisturbed)
    assert run.output.count("going on from") == 1 and "Traceback" not in run.output


def test_ranks_whose_launcher_is_killed_save_and_stop(data, tmp_path):
    """Or they would go on unseen, and write where the next run that is told to resume writes."""
    run = Run(data, "orphans", "--save_every=0", script=waiting_copy(tmp_path, 3) / "train_gpt.py")
    run.until("step:3/30 train_loss")
    run.process.kill()
    run.process.wait()
    (tmp_path / "go").touch()
    deadline = time.monotonic() + 600
    while "stopped by the end of its launcher after step 4" not in run.output:
        assert time.monotonic() < deadline and "step:5/30" not in run.output, run.output
        time.sleep(0.02)
    assert [path.name for path in run.folder.glob("checkpoint*")] == ["checkpoint_0000004.pt"]


def test_a_rank_that_stops_answering_is_named(data, tmp_path):
    run = Run(data, "stuck", "--timeout=20", script=waiting_copy(tmp_path, 3) / "train_gpt.py")
    run.until("step:3/30 train_loss")
    stuck = run.ranks()[1]
    os.kill(stuck, signal.SIGSTOP)
    (tmp_path / "go").touch()
    run.until("error: rank 1 stopped answering")
    os.kill(stuck, signal.SIGKILL)  # which torchrun does itself after half a minute
    assert run.wait() != 0 and "Traceback" not in run.output.partition("torch/distributed")[0], run.output


def test_a_rank_that_does_not_come_is_named(data, tmp_path):
    script = tmp_path / "late.py"
    script.write_text(f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
import train_gpt
while os.environ["RANK"] == "1":
    time.sleep(1)
sys.exit(train_gpt.main(sys.argv[1:]))
""")
    run = Run(data, "late", "--timeout=3", script=script)
    assert run.wait() != 0
    assert "error: rank 1 did not come in --timeout=3 s" in run.output, run.output


def test_ranks_that_drift_apart_are_stopped_at_the_next_validation(data, tmp_path):
    script = tmp_path / "drifting.py"
    script.write_text(f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import torch, train_gpt
step = train_gpt.Trainer.step
def drifting(self, batch, number):
    loss = step(self, batch, number)
    if number == 4 and self.hardware.rank == 1:
        with torch.no_grad():
            for name in ("blocks.1.up.weight", "head.weight"):
                flat = self.model.get_parameter(name).view(torch.int32).view(-1)
                flat[5] ^= 1  # the last bit of one number
    return loss
train_gpt.Trainer.step = drifting
sys.exit(train_gpt.main(sys.argv[1:]))
""")
    run = Run(data, "drift", script=script)
    assert run.wait() != 0
    assert "error: rank 1 differs from rank 0, first in parameter blocks.1.up.weight" in run.output, run.output
    assert "step:10/30 train_loss" in run.output and "step:11/30" not in run.output


def test_ranks_with_other_hyperparameters_do_not_begin(data, tmp_path):
    """As machines with GPUs of other sizes would choose other sequences."""
    script = tmp_path / "different.py"
    script.write_text(f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import train_gpt
sys.exit(train_gpt.main(sys.argv[1:] + ["--muon_rate=0.03"] * (os.environ["RANK"] == "1")))
""")
    run = Run(data, "different", script=script)
    assert run.wait() != 0
    assert "error: rank 1 differs from rank 0, first in the hyperparameters" in run.output and "step:" not in run.output


@pytest.mark.parametrize("survivor", [0, 1])
def test_a_machine_that_comes_back_learns_that_the_group_was_restarted(data, undisturbed, tmp_path, survivor):
    script = tmp_path / "survivor.py"
    script.write_text(f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import train_gpt
train = train_gpt.train
def as_on_two_machines(*arguments):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(os.environ["RANK"] == "{survivor}"))
    return train(*arguments)
train_gpt.train = as_on_two_machines
sys.exit(train_gpt.main(sys.argv[1:]))
""")
    name = f"survivor_{survivor}"
    shutil.copytree(undisturbed.folder, undisturbed.folder.with_name(name))
    (undisturbed.folder.with_name(name) / "checkpoint_0000030.pt").unlink()
    run = Run(data, name, "--timeout=60", script=script)
    assert run.wait() == 0, run.output
    assert "checkpoint_0000028.pt, step 28" in run.output
    same(run.folder, undisturbed)


def test_a_machine_that_is_lost_and_comes_back_goes_on(data, undisturbed, tmp_path):
    port, launcher = str(free_port()), str(waiting_copy(tmp_path, 9) / "run.sh")

    def machine(number: int) -> Run:
        return Run(data, "machines", "--resume=auto", command=[launcher], PYTHON=sys.executable, NNODES="2",
                   NODE_RANK=str(number), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, NPROC="1", MAX_RESTARTS="3")

    first = machine(0)
    while subprocess.run(["bash", "-c", f": < /dev/tcp/127.0.0.1/{port}"], stderr=subprocess.DEVNULL).returncode:
        assert first.process.poll() is None, first.output
        time.sleep(0.2)  # the first to come keeps the store; the one that is lost must be the other
    second = machine(1)
    while not any("step:9/30" in run.output for run in (first, second)):  # either may be rank 0
        assert first.process.poll() is second.process.poll() is None, first.output + second.output
        time.sleep(0.05)
    second.kill_all()
    (tmp_path / "go").touch()
    again = machine(1)
    assert first.wait() == again.wait() == 0, first.output + again.output
    assert "going on from" in first.output + again.output
    same(first.folder, undisturbed)


@pytest.mark.parametrize("backend, finished, leaves", [("nccl", True, True), ("nccl", False, False), ("gloo", False, True)])
def test_a_rank_that_fails_alone_does_not_wait_for_nccl(monkeypatch, backend, finished, leaves):
    """destroy_process_group returns when every rank has called it: an error behind it would not show before the timeout."""
    left = []
    for name, stand_in in dict(is_initialized=lambda: True, get_backend=lambda: backend,
                               destroy_process_group=lambda: left.append(True)).items():
        monkeypatch.setattr(train_gpt.dist, name, stand_in)

    def train(hp, hardware):
        if not finished:
            raise torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(train_gpt, "train", train)
    with contextlib.nullcontext() if finished else pytest.raises(torch.OutOfMemoryError):
        assert train_gpt.main(TINY) == 0
    assert bool(left) == leaves
