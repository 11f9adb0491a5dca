"""Ranks and faults: signals, killed and silent ranks, ranks that differ, lost machines."""
import contextlib
import errno
import gc
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from helpers import (
    ROOT,
    SCRIPT,
    SIX_STEPS,
    TINY,
    BackgroundRun,
    Result,
    before_step,
    before_validation,
    equal,
    free_port,
    run,
    send_signal,
    trained,
)

import train_gpt

LONG = [*TINY, "--num_steps=30", "--val_every=10", "--save_every=4"]


@pytest.fixture(scope="module")
def undisturbed(data) -> Result:
    return trained([*LONG, *data], "undisturbed", ranks=2)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    for started in BackgroundRun.started:
        if started.process.poll() is None:  # the test failed
            started.kill_all()
    BackgroundRun.started.clear()


def start(data: list[str], name: str, *options: str, **settings) -> BackgroundRun:
    return BackgroundRun(data, name, *options, base=LONG, **settings)


def patched_script(folder: Path, patch: str) -> Path:
    """A script that trains with some of the trainer's functions replaced by those of the patch.

    Every rank writes its exit code into the folder.
    """
    path = folder / "train_gpt.py"
    end = f"""
{patch}
if __name__ == "__main__":
    code = main(sys.argv[1:])
    Path({str(folder)!r}, f"exit_code_{{os.environ.get('RANK', 0)}}").write_text(str(code))
    sys.exit(code)
"""
    path.write_text(SCRIPT.read_text().partition("\nif __name__ ==")[0] + end)
    return path


def waiting_script(folder: Path, step: int, until: str = "self.stop_requested") -> Path:
    """Every rank waits before a step until it is signalled or folder/go exists.

    What a test does meanwhile happens in the middle of the run, however slow the machine.
    """
    return patched_script(folder, f"""
original_step = Trainer.step
def step(self, batch, number):
    while number == {step} and not ({until}) and not Path({str(folder / "go")!r}).exists():
        time.sleep(0.01)
    return original_step(self, batch, number)
Trainer.step = step
""")


def exit_codes(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.glob("exit_code_*"))]


# ---- signals, in this process ----

@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_finishes_the_step_saves_and_stops(data, whole, tmp_path, capfd, monkeypatch,
                                                    number):
    def interrupt(trainer):
        capfd.readouterr()
        send_signal(number)
        answer = capfd.readouterr()  # at once, while the step is still to be done
        assert answer.err == "\nstopping after this step; a second signal quits at once\n"
    arguments = [*SIX_STEPS, *data, f"--log_dir={tmp_path}", "--save_every=0"]
    with monkeypatch.context() as patched:
        before_step(patched, 2, interrupt)
        assert train_gpt.main([*arguments, "--run_id=s"]) == 128 + number
    folder = tmp_path / "s"
    stopped = f"stopped by {number.name} after step 3; resume with --resume={folder}\n"
    assert stopped in capfd.readouterr().out
    assert [path.name for path in train_gpt.checkpoints(folder)] == ["checkpoint_0000003.pt"]
    if number == signal.SIGTERM:
        assert train_gpt.main([f"--resume={folder}"]) == 0
        assert Result(folder).steps == whole.steps
        assert equal(Result(folder).weights, whole.weights)


@pytest.mark.parametrize("save_every", [0, 2])
@pytest.mark.parametrize("sequence, step", [(5, 2), (13, 6)], ids=["in the middle", "at the end"])
def test_a_signal_during_validation_loses_nothing(data, whole, tmp_path, capsys, monkeypatch,
                                                  sequence, step, save_every):
    """Each validation has 4 sequences, the first one is before step 1."""
    arguments = [*SIX_STEPS, *data, f"--log_dir={tmp_path}", "--run_id=v",
                 f"--save_every={save_every}"]
    with monkeypatch.context() as patched:
        read = before_validation(patched, sequence, send_signal)
        assert train_gpt.main(arguments) == 128 + signal.SIGTERM
    assert len(read) == sequence + 1  # it looks between the sequences
    folder = tmp_path / "v"
    assert f"stopped by SIGTERM after step {step}; resume with" in capsys.readouterr().out
    assert Result(folder).steps == whole.steps[:whole.steps.index(Result(folder).steps[-1]) + 1]
    assert train_gpt.step_of(train_gpt.checkpoints(folder)[-1]) == step
    if step == 6:
        assert equal(Result(folder).weights, whole.weights)
    assert train_gpt.main([f"--resume={folder}"]) == 0
    result = Result(folder)
    assert result.steps == whole.steps
    assert result.losses == whole.losses
    assert equal(result.weights, whole.weights)


def test_a_signal_during_the_first_validation_has_nothing_to_save(data, tmp_path, capsys,
                                                                  monkeypatch):
    before_validation(monkeypatch, 1, send_signal)
    arguments = [*SIX_STEPS, *data, f"--log_dir={tmp_path}", "--run_id=f"]
    assert train_gpt.main(arguments) == 128 + signal.SIGTERM
    assert "stopped by SIGTERM after step 0\n" in capsys.readouterr().out
    assert not list((tmp_path / "f").glob("*.pt"))


def test_a_signal_while_the_last_checkpoint_is_written_does_not_lose_it(data, tmp_path,
                                                                        monkeypatch):
    """When the validation is over, too: the run ends as it would have."""
    save = torch.save
    evaluate = train_gpt.evaluate
    validated = threading.Event()

    def slow_save(state, file):
        if state["step"] == 6 and "muon" in state:
            assert validated.wait(60)
            send_signal(signal.SIGINT)
        save(state, file)

    def evaluate_and_tell(trainer):
        result = evaluate(trainer)
        if trainer.data.train.index == 6:
            validated.set()
        return result
    monkeypatch.setattr(torch, "save", slow_save)
    monkeypatch.setattr(train_gpt, "evaluate", evaluate_and_tell)
    arguments = [*SIX_STEPS, *data, f"--log_dir={tmp_path}", "--run_id=w"]
    assert train_gpt.main(arguments) == 128 + signal.SIGINT
    assert train_gpt.read_checkpoint(tmp_path / "w" / "checkpoint_0000006.pt")["step"] == 6
    result = Result(tmp_path / "w")
    assert result.weights and "final validation loss" in result.log


def test_a_signal_while_a_run_is_scored_does_not_lose_its_model(data, tmp_path, monkeypatch):
    def score(*_):
        assert train_gpt.read_checkpoint(tmp_path / "h" / "model.pt")["step"] == 6
        send_signal(signal.SIGINT)
        return dict(line="HellaSwag accuracy", hellaswag=0.25, tasks=4)
    monkeypatch.setattr(train_gpt, "score_hellaswag", score)
    with train_gpt.data_module("hellaswag") as hellaswag:
        monkeypatch.setattr(hellaswag, "read_tasks", lambda *_: None)
    arguments = [*SIX_STEPS, *data, f"--log_dir={tmp_path}", "--run_id=h", "--hellaswag=somewhere",
                 "--save_every=0"]
    assert train_gpt.main(arguments) == 128 + signal.SIGINT
    assert "HellaSwag accuracy" in Result(tmp_path / "h").log


def test_a_stop_whose_checkpoint_cannot_be_written_is_an_error(data, tmp_path, capsys,
                                                               monkeypatch):
    def fail(state, file):
        raise OSError(errno.ENOSPC, "No space left on device")
    before_step(monkeypatch, 0, lambda trainer: send_signal())
    monkeypatch.setattr(torch, "save", fail)
    arguments = [*SIX_STEPS, *data, f"--log_dir={tmp_path}", "--run_id=f", "--save_every=0"]
    assert train_gpt.main(arguments) == 2
    captured = capsys.readouterr()
    assert "No space left" in captured.err
    assert ("error: stopped by SIGTERM after step 1, and the checkpoint could not be written: the "
            "steps since the last one are lost\n") in captured.err
    assert "resume with" not in captured.out


def test_control_c_before_the_first_step_is_one_line(data):
    code = ("import os, signal, sys, train_gpt\n"
            "train_gpt.check_ranks_agree = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
            "sys.exit(train_gpt.main(sys.argv[1:]))")
    process = subprocess.run([sys.executable, "-c", code, *SIX_STEPS, *data], capture_output=True,
                             text=True, cwd=ROOT)
    assert process.returncode == 128 + signal.SIGINT
    assert process.stderr == "interrupted: there was nothing to save\n"


@pytest.fixture
def handled(monkeypatch):
    """A trainer whose signals are handled, the clock as a list of one time, the exit codes."""
    now = [100.0]
    codes = []
    monkeypatch.setattr(train_gpt, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(os, "_exit", codes.append)
    trainer = types.SimpleNamespace(stop_requested=False, hardware=train_gpt.Hardware())
    with train_gpt.SignalHandler(trainer) as signals:
        yield types.SimpleNamespace(trainer=trainer, signals=signals, now=now, codes=codes)


def test_a_signal_within_a_second_of_the_first_is_the_same_one_by_another_way(handled):
    """SLURM signals the ranks and torchrun, which passes it on."""
    for at, expected in ((100.0, []), (100.9, []), (101.1, [128 + signal.SIGUSR1])):
        handled.now[0] = at
        signal.raise_signal(signal.SIGUSR1)
        assert handled.trainer.stop_requested and handled.signals.number == signal.SIGUSR1
        assert handled.codes == expected


def test_a_signal_stops_the_run_where_the_terminal_is_gone(handled, monkeypatch):
    def write(descriptor, text):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(train_gpt.os, "write", write)
    signal.raise_signal(signal.SIGTERM)
    assert handled.trainer.stop_requested


def test_a_signal_after_the_end_of_the_launcher_was_noticed(handled):
    handled.trainer.hardware.launcher_pid = os.getppid()
    handled.signals.check_launcher()
    assert not handled.trainer.stop_requested
    handled.trainer.hardware.launcher_pid = os.getppid() + 1
    handled.signals.check_launcher()
    assert handled.trainer.stop_requested and handled.signals.number == signal.SIGTERM
    signal.raise_signal(signal.SIGTERM)
    assert handled.codes == []
    handled.now[0] += 2
    signal.raise_signal(signal.SIGINT)
    assert handled.codes == [128 + signal.SIGINT]


# ---- signals, with real ranks ----

def test_a_signal_to_one_rank_stops_all_and_one_process_finishes(data, undisturbed, tmp_path):
    started = start(data, "term", "--save_every=0", script=waiting_script(tmp_path, 7))
    started.until("step:7/30 train_loss")
    os.kill(started.ranks()[1], signal.SIGTERM)
    (tmp_path / "go").touch()
    assert started.wait() != 0, started.output
    assert exit_codes(tmp_path) == [128 + signal.SIGTERM] * 2
    assert re.search(r"stopped by SIGTERM after step (\d+); resume with --resume=", started.output)
    saved, = train_gpt.checkpoints(started.folder)
    assert 7 <= train_gpt.step_of(saved) < 30
    assert train_gpt.main([f"--resume={started.folder}"]) == 0
    losses = Result(started.folder).train_losses
    assert losses == pytest.approx(undisturbed.train_losses, abs=1e-4)


def test_a_signal_to_one_rank_in_the_final_validation_loses_nothing(data, undisturbed, tmp_path):
    script = patched_script(tmp_path, f"""
original_evaluate = evaluate
def evaluate(trainer):
    while trainer.data.train.index == {30} and not Path({str(tmp_path / "go")!r}).exists():
        time.sleep(0.01)
    return original_evaluate(trainer)
""")
    started = start(data, "final", "--save_every=0", script=script)
    started.until("step:30/30 train_loss")
    os.kill(started.ranks()[1], signal.SIGTERM)
    (tmp_path / "go").touch()
    assert started.wait() != 0, started.output
    assert exit_codes(tmp_path) == [128 + signal.SIGTERM] * 2
    assert "stopped by SIGTERM after step 30; resume with" in started.output
    assert equal(Result(started.folder).weights, undisturbed.weights)
    process = run([f"--resume={started.folder}"], ranks=2)
    assert process.returncode == 0, process.stderr
    assert Result(started.folder).losses == undisturbed.losses


def test_a_signal_to_the_launcher_reaches_the_ranks(data, tmp_path):
    """As SLURM sends one before it ends a job."""
    waiting_script(tmp_path, 5)
    for name in ("run.sh", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    started = start(data, "usr1", "--save_every=0", command=[str(tmp_path / "run.sh")],
                    PYTHON=sys.executable, NPROC="2")
    started.until("step:5/30 train_loss")
    started.process.send_signal(signal.SIGUSR1)
    assert started.wait() == 128 + signal.SIGUSR1, started.output
    assert exit_codes(tmp_path) == [128 + signal.SIGUSR1] * 2
    assert "stopped by SIGUSR1 after step 6" in started.output
    assert "Traceback" not in started.output
    assert len(train_gpt.checkpoints(started.folder)) == 1


def test_a_second_signal_ends_the_process_at_once(data, tmp_path):
    """In a step that would never end."""
    started = start(data, "second", script=waiting_script(tmp_path, 0, until="False"), ranks=1)
    started.until("step:0/30 val_loss")
    deadline = time.monotonic() + 600
    while started.process.poll() is None and time.monotonic() < deadline:
        started.process.send_signal(signal.SIGUSR1)
        time.sleep(0.3)
    assert started.wait(1) == 128 + signal.SIGUSR1
    assert not train_gpt.checkpoints(started.folder)


# ---- ranks that are lost ----

def test_torchrun_restarts_a_killed_rank_and_nothing_is_lost(data, undisturbed, tmp_path):
    step = random.randint(5, 20)
    started = start(data, "killed", restarts=3, script=waiting_script(tmp_path, step))
    started.until(f"step:{step}/30 train_loss")
    os.kill(random.choice(list(started.ranks().values())), signal.SIGKILL)
    (tmp_path / "go").touch()
    assert started.wait() == 0, started.output
    assert Result(started.folder).losses == undisturbed.losses
    assert started.output.count("resuming from") == 1
    assert "Traceback" not in started.output


def test_ranks_whose_launcher_is_killed_save_and_stop(data, tmp_path):
    """Or they would train on, and write where the run that replaces them writes.

    They look before each step: the step that waits is done, and the one after it stops.
    """
    started = start(data, "orphans", "--save_every=0", script=waiting_script(tmp_path, 3))
    started.until("step:3/30 train_loss")
    ranks = started.ranks()
    started.process.kill()
    started.process.wait()
    (tmp_path / "go").touch()
    deadline = time.monotonic() + 600
    while len(exit_codes(tmp_path)) < 2:
        assert time.monotonic() < deadline and "step:6/30" not in started.output, started.output
        time.sleep(0.02)
    assert len(ranks) == 2 and exit_codes(tmp_path) == [128 + signal.SIGTERM] * 2
    assert "stopped by SIGTERM after step 5" in started.output
    saved = [path.name for path in started.folder.glob("checkpoint*")]
    assert saved == ["checkpoint_0000005.pt"]


def test_a_rank_that_stops_answering_is_named(data, tmp_path):
    started = start(data, "stuck", "--timeout=20", script=waiting_script(tmp_path, 3))
    started.until("step:3/30 train_loss")
    stuck = started.ranks()[1]
    os.kill(stuck, signal.SIGSTOP)
    (tmp_path / "go").touch()
    started.until("error: rank 1 stopped answering")
    os.kill(stuck, signal.SIGKILL)  # which torchrun does itself after half a minute
    assert started.wait() != 0
    assert "Traceback" not in started.output.partition("torch/distributed")[0], started.output


@pytest.mark.parametrize("late, said_by", [(1, "error"), (0, "error on rank 1")])
def test_a_rank_that_does_not_arrive_is_named(data, tmp_path, late, said_by):
    script = patched_script(tmp_path, f"""
while os.environ["RANK"] == "{late}":
    time.sleep(1)
""")
    started = start(data, f"late{late}", "--timeout=3", script=script)
    assert started.wait() != 0
    sentence = f"{said_by}: rank {late} did not arrive within --timeout=3 s"
    assert sentence in started.output, started.output


def test_a_rank_that_does_not_arrive_is_named_before_nccl_waits_for_it(monkeypatch):
    """NCCL connects all ranks at once, and says nothing about the one that is missing."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(train_gpt.dist, "TCPStore", lambda *_, **__: store)
    begun = []
    monkeypatch.setattr(train_gpt.dist, "init_process_group", lambda *_, **__: begun.append(True))
    for name, value in dict(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_ADDR="localhost",
                            MASTER_PORT="1", TORCHELASTIC_RESTART_COUNT="0").items():
        monkeypatch.setenv(name, value)
    hardware = train_gpt.Hardware(rank=0, world_size=3, launcher_pid=1, timeout=0.2,
                                  device=torch.device("cuda", 0))
    store.set("attempt0/arrived1", "")
    with pytest.raises(train_gpt.UserError, match="rank 2 did not arrive within --timeout=0.2 s"):
        train_gpt.join_group(hardware)
    assert not begun
    store.set("attempt0/arrived2", "")
    train_gpt.join_group(hardware)
    assert begun


@pytest.mark.parametrize("rank, missing", [(0, 1), (1, 0)])
def test_a_missing_rank_is_named_where_rank_0_hosts_the_store(monkeypatch, rank, missing):
    """As on several machines, whose launchers keep no store for the ranks."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    hardware = train_gpt.Hardware(rank=rank, world_size=2, timeout=0.5)
    with pytest.raises(train_gpt.UserError, match=f"rank {missing} did not arrive within"):
        train_gpt.join_group(hardware)


def test_a_signal_does_not_shorten_the_wait_for_the_other_ranks(monkeypatch):
    """They may be in the middle of a validation; torchrun kills survivors of a dead rank."""
    silent = types.SimpleNamespace(is_completed=lambda: False)
    monkeypatch.setattr(train_gpt.dist, "all_reduce", lambda values, async_op: silent)
    seconds = iter(range(1000))
    monkeypatch.setattr(train_gpt.time, "monotonic", lambda: next(seconds))
    waited = {}
    for kind in ("cpu", "cuda"):
        hardware = train_gpt.Hardware(world_size=2, timeout=100, device=torch.device(kind))
        trainer = types.SimpleNamespace(hardware=hardware, stop_requested=False)
        train_gpt.SignalHandler(trainer).handle(signal.SIGTERM, None)
        start = next(seconds)
        values = types.SimpleNamespace(to=lambda device: None)
        with pytest.raises(train_gpt.dist.DistError):
            train_gpt.all_reduce_sum(values, hardware)
        waited[kind] = next(seconds) - start
    assert min(waited.values()) > 100


def test_a_gpu_alone_finishes_its_step_however_long_that_takes():
    hardware = train_gpt.Hardware(device=torch.device("cuda"))
    trainer = types.SimpleNamespace(hardware=hardware, stop_requested=False)
    train_gpt.SignalHandler(trainer).handle(signal.SIGTERM, None)
    assert trainer.stop_requested and hardware.timeout == 600
    hardware.timeout = 0.0
    answers = iter([False, False, True])
    train_gpt.wait_until(lambda: next(answers), hardware)


def test_ranks_may_compile_an_hour_apart(monkeypatch, data, tmp_path):
    """Until all have; then the timeout is the run's own again."""
    seen = {}

    original = train_gpt.dummy_sequence

    def dummy_sequence(trainer, length):
        seen["warming up"] = trainer.hardware.timeout
        return original(trainer, length)

    def first_step(trainer):
        seen["training"] = trainer.hardware.timeout
        seen["frozen"] = gc.get_freeze_count()

    monkeypatch.setattr(train_gpt, "dummy_sequence", dummy_sequence)
    monkeypatch.setattr(train_gpt, "why_not_compile", lambda *_: "")
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    before_step(monkeypatch, 0, first_step)
    gc.unfreeze()
    try:
        assert train_gpt.main([*SIX_STEPS, *data, "--timeout=50", "--run_id=patient"]) == 0
    finally:
        gc.unfreeze()
    assert (seen["warming up"], seen["training"]) == (3650, 50)
    assert seen["frozen"] > 10_000, "the collector skips what the compiler left"


@pytest.mark.parametrize("survivor", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_ranks_that_disagree_about_the_step_do_not_start(data, undisturbed, tmp_path, survivor):
    """As where one machine found the checkpoints and the other one did not."""
    script = patched_script(tmp_path, f"""
original_resume = resume_newest
def resume_newest(folder):
    if os.environ["RANK"] == "{survivor}":
        return original_resume(folder)
    return Run(folder)
""")
    name = f"survivor{survivor}"
    folder = undisturbed.folder.with_name(name)
    shutil.copytree(undisturbed.folder, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    started = start(data, name, "--timeout=60", "--resume=auto", script=script)
    assert started.wait() != 0
    sentence = "error: rank 1 differs from rank 0, first in the step; start all machines with the "
    assert started.output.count(sentence) == 1, started.output
    assert set(exit_codes(tmp_path)) == {2}  # torchrun may end the other rank first
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_machine_that_is_lost_and_comes_back_continues(data, undisturbed, tmp_path):
    port = str(free_port())
    waiting_script(tmp_path, 9)
    for name in ("run.sh", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)

    def machine(number: int) -> BackgroundRun:
        return start(data, "machines", "--resume=auto", command=[str(tmp_path / "run.sh")],
                     PYTHON=sys.executable, NNODES="2", NODE_RANK=str(number), NPROC="1",
                     MASTER_ADDR="127.0.0.1", MASTER_PORT=port, MAX_RESTARTS="3")

    first = machine(0)  # it keeps the store: the one that is lost must be the other
    second = machine(1)
    while not any("step:9/30" in started.output for started in (first, second)):
        assert first.process.poll() is second.process.poll() is None, first.output + second.output
        time.sleep(0.05)
    second.kill_all()
    (tmp_path / "go").touch()
    again = machine(1)
    assert first.wait() == again.wait() == 0, first.output + again.output
    assert "resuming from" in first.output + again.output
    assert Result(first.folder).losses == undisturbed.losses


# ---- ranks that differ ----

def test_ranks_that_drift_apart_are_stopped_at_the_next_validation(data, tmp_path):
    script = patched_script(tmp_path, """
original_step = Trainer.step
def step(self, batch, number):
    loss = original_step(self, batch, number)
    if number == 4 and self.hardware.rank == 1:
        with torch.no_grad():
            for name in ("blocks.1.up.weight", "head.weight"):
                flat = self.model.get_parameter(name).view(torch.int32).view(-1)
                flat[5] ^= 1  # the last bit of one number
    return loss
Trainer.step = step
""")
    started = start(data, "drift", script=script)
    assert started.wait() != 0
    sentence = "error: rank 1 differs from rank 0, first in blocks.1.up.weight"
    assert started.output.count(sentence) == 1, started.output
    assert "step:10/30 train_loss" in started.output and "step:11/30" not in started.output


def test_ranks_with_other_hyperparameters_do_not_start(data, tmp_path):
    """As machines with GPUs of other sizes would choose other sequences."""
    script = patched_script(tmp_path, """
if os.environ["RANK"] == "1":
    sys.argv.append("--muon_rate=0.03")
""")
    started = start(data, "different", script=script)
    assert started.wait() != 0
    sentence = "error: rank 1 differs from rank 0, first in the hyperparameters"
    assert started.output.count(sentence) == 1, started.output
    assert "step:" not in started.output


# ---- errors ----

def test_what_every_rank_would_say_is_said_once(data, tmp_path):
    options = [*LONG, *data, f"--train_files={tmp_path}/none_*.bin"]
    process = run(options, ranks=2, LOGLEVEL="ERROR")
    assert process.returncode != 0
    assert process.stderr.count("no token shards there") == 1


@pytest.mark.parametrize("where", ["prepare_device", "check_ranks_agree"])
def test_an_error_of_one_rank_alone_is_said_by_that_rank(data, tmp_path, where):
    """Before the group is joined, as where a GPU cannot be used, and after."""
    script = patched_script(tmp_path, f"""
original = {where}
def {where}(*arguments):
    if os.environ["RANK"] == "1":
        raise UserError("there is something wrong with my GPU")
    return original(*arguments)
""")
    started = start(data, where, "--timeout=20", script=script)
    assert started.wait() != 0
    sentence = "error on rank 1: there is something wrong with my GPU\n"
    assert started.output.count(sentence) == 1, started.output


@pytest.mark.parametrize("backend, finished, leaves", [
    ("nccl", True, True), ("nccl", False, False), ("gloo", False, True)])
def test_a_rank_that_fails_alone_does_not_wait_for_nccl(data, monkeypatch, backend, finished,
                                                        leaves):
    """NCCL's ranks leave together: the error would not be seen before the timeout."""
    left = []
    stand_ins = dict(is_initialized=lambda: True, get_backend=lambda: backend,
                     destroy_process_group=lambda: left.append(True))
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(train_gpt.dist, name, stand_in)

    def train(*_):
        if not finished:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return 0
    monkeypatch.setattr(train_gpt, "train", train)
    with contextlib.nullcontext() if finished else pytest.raises(RuntimeError):
        assert train_gpt.main([*TINY, *data]) == 0
    assert bool(left) == leaves
