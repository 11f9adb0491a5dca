"""Checkpoints and resume: nothing lost, nothing executable, nothing believed that a file claims."""
import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import weakref
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import train_gpt
from helpers import ROOT, SCRIPT, TINY, Result, make_data, run, write_shard

SIX = [*TINY, "--num_steps=6", "--val_every=2", "--batch_tokens=1536", "--save_every=2", "--keep_checkpoints=3"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data) -> Path:
    """The folder of a run that nothing happened to."""
    assert train_gpt.main([*SIX, *data, "--run_id=whole"]) == 0
    return Path(data[-1].partition("=")[2]) / "whole"


@pytest.fixture
def cut(whole, tmp_path):
    """cut(step): a copy of that folder, as it would be if the run had been killed some time after a step."""
    def make(step: int, source: Path = whole) -> Path:
        folder = tmp_path / f"logs{step}" / "run"
        shutil.copytree(source, folder)
        (folder / "model.pt").unlink()
        for path in folder.glob("checkpoint_*.pt"):
            if int(path.stem[-7:]) > step:
                path.unlink()
        return folder
    return make


def steps(folder: Path) -> list[str]:
    """The lines of the log about steps, without their times."""
    return [line.partition(" train_time")[0] for line in (folder / "log.txt").read_text().splitlines() if line.startswith("step:")]


def losses(folder: Path) -> list[float]:
    result = Result(folder, subprocess.CompletedProcess([], 0, ""))
    return result.train_losses + result.val_losses


def weights(folder: Path) -> dict:
    return torch.load(folder / "model.pt", weights_only=True)["model"]


def equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_resume_continues_bit_for_bit(data, whole, cut, capsys):
    folder = cut(4)
    (folder / "log.txt").open("a").write("step:5/6 half a li")
    assert train_gpt.main([*SIX, *data, f"--log_dir={folder.parent}", "--resume=auto"]) == 0
    assert "going on from" in capsys.readouterr().out
    assert steps(folder) == steps(whole) and losses(folder) == losses(whole) and equal(weights(folder), weights(whole))


def test_from_one_rank_to_two_to_three_to_one(data, whole, cut, tmp_path):
    source = whole
    for ranks, step in ((2, 2), (3, 4), (1, 5)):
        folder = cut(step, source)
        arguments = [*SIX, *data, f"--resume={folder}", "--save_every=1", "--keep_checkpoints=9"]
        if ranks == 1:
            assert train_gpt.main(arguments) == 0
        else:
            process = run(arguments, ranks)
            assert process.returncode == 0 and "going on from" in process.stdout, process.stderr
        source = folder
    assert losses(source) == pytest.approx(losses(whole), abs=1e-4) and steps(source)[:3] == steps(whole)[:3]
    ours, theirs = (torch.load(folder / "checkpoint_0000006.pt", weights_only=True)["muon"] for folder in (source, whole))
    for name, momentum in theirs.items():
        assert (momentum - ours[name]).norm() < 0.05 * momentum.norm(), name


def test_the_momentum_of_all_ranks_is_in_a_checkpoint_that_runs_nothing(data, whole):
    names = sorted(path.name for path in whole.glob("checkpoint_*"))
    assert names == [f"checkpoint_000000{step}.pt" for step in (2, 4, 6)]  # the last three
    for name in names:
        state = torch.load(whole / name, weights_only=True)
        assert state["step"] == state["index"] == int(name[-4]) and state["hyperparameters"]["num_steps"] == 6
        assert state["muon"].keys() | state["adam"].keys() == state["model"].keys()
        assert state["step"] == 2 or all(x.abs().sum() > 0 for x in state["muon"].values())


def test_only_the_last_checkpoints_are_kept(data, tmp_path):
    assert train_gpt.main([*SIX, *data, f"--log_dir={tmp_path}", "--run_id=k", "--save_every=1", "--keep_checkpoints=2"]) == 0
    assert [path.name[-4] for path in sorted((tmp_path / "k").glob("checkpoint_*"))] == ["5", "6"]
    assert not list((tmp_path / "k").glob("*.tmp"))


@pytest.mark.parametrize("damage", [lambda b: b[:len(b) // 2], lambda b: b[:9], lambda b: b"",
                                    lambda b: b[:70000] + bytes([b[70000] ^ 1]) + b[70001:]])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(data, whole, cut, capsys, damage):
    folder = cut(4)
    path = folder / "checkpoint_0000004.pt"
    path.write_bytes(damage(path.read_bytes()))
    assert train_gpt.main([*SIX, *data, f"--resume={folder}"]) == 0
    out = capsys.readouterr().out
    assert f"passed over {path}: cannot be loaded" in out and "checkpoint_0000002.pt, step 2" in out
    assert equal(weights(folder), weights(whole))


def test_a_clock_that_was_ahead_loses_no_checkpoint(data, cut):
    folder = cut(2)
    os.utime(folder / "checkpoint_0000002.pt", (4e9, 4e9))
    assert train_gpt.main([*SIX, *data, f"--resume={folder}", "--save_every=1", "--keep_checkpoints=2"]) == 0
    assert [path.name[-4] for path in train_gpt.checkpoints(folder)] == ["5", "6"]


def test_the_checkpoint_that_was_named_is_taken_or_refused(data, cut, capsys):
    """Whatever it is called, and not another one of its folder."""
    folder = cut(6)
    (folder / "checkpoint_0000009.pt").symlink_to("nowhere")
    shutil.copy(folder / "checkpoint_0000002.pt", folder / "good.pt")
    arguments = [*SIX, *data, f"--resume={folder}/good.pt", "--save_every=0"]
    assert train_gpt.main([*arguments, f"--resume={folder}/checkpoint_0000003.pt"]) == 2
    assert "checkpoint_0000003.pt: cannot be loaded (FileNotFoundError" in capsys.readouterr().err
    assert train_gpt.main(arguments) == 0
    assert f"going on from {folder}/good.pt, step 2" in capsys.readouterr().out
    hp = train_gpt.parse_command_line(arguments)
    assert train_gpt.find_run(hp, restarted=True)[1] == folder / "good.pt"  # killed before it saved anything
    hp.resume = f"{folder}/checkpoint_0000004.pt"
    assert train_gpt.find_run(hp, restarted=False)[1] == train_gpt.find_run(hp, restarted=True)[1] == Path(hp.resume)


def test_a_restart_finds_its_own_run_among_others_of_torchrun(data, cut, monkeypatch):
    folder = cut(6)
    hp = train_gpt.parse_command_line([*SIX, *data, f"--log_dir={folder.parent}"])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # when torchrun is given no other
    own = train_gpt.find_run(hp, restarted=False)[0]
    own.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "getppid", lambda: 1)
        other = train_gpt.find_run(hp, restarted=False)[0]
    folder.rename(other.with_name(f"9999{other.name}"))
    assert train_gpt.find_run(hp, restarted=True)[:2] == (own, None)


def test_a_restart_of_a_run_that_was_resumed_goes_on_with_it(data, cut, monkeypatch):
    folder = cut(4)
    hp = train_gpt.parse_command_line([*SIX, *data, f"--log_dir={folder.parent}", "--resume=auto"])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another_than_that_of_the_folder")
    for restarted in (False, True):
        assert train_gpt.find_run(hp, restarted)[:2] == (folder, folder / "checkpoint_0000004.pt")


def test_changed_hyperparameters_are_listed_or_refused(data, cut, capsys):
    folder = cut(4)
    arguments = [*SIX, *data, f"--resume={folder}", "--muon_rate=0.01", "--head_rate=0.5", "--log_every=2"]
    assert train_gpt.main(arguments) == 2
    error = capsys.readouterr().err
    assert "head_rate 0.008 → 0.5, muon_rate 0.05 → 0.01; give the old values, or --resume_anyway" in error
    assert "log_every" not in error and error.count("\n") == 1
    assert train_gpt.main([*arguments, "--resume_anyway"]) == 0
    assert "log_every 1 → 2" in (out := capsys.readouterr().out) and "muon_rate 0.05 → 0.01" in out


@pytest.mark.parametrize("left", ["log.txt", "checkpoint_*.pt"])
def test_a_new_run_does_not_overwrite_another(data, cut, capsys, left):
    folder = cut(4)
    before = (folder / "log.txt").read_bytes()
    for path in {*folder.iterdir()} - {folder / "log.txt", *folder.glob(left)}:
        path.unlink()
    assert train_gpt.main([*SIX, *data, f"--log_dir={folder.parent}", "--run_id=run"]) == 2
    assert "holds a run already; add --resume=auto" in capsys.readouterr().err and (folder / "log.txt").read_bytes() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_finishes_the_step_saves_and_stops(data, whole, tmp_path, capsys, monkeypatch, number):
    step = train_gpt.Trainer.step

    def interrupted(self, batch, at):
        if at == 2:
            os.kill(os.getpid(), number)
        return step(self, batch, at)
    arguments = [*SIX, *data, f"--log_dir={tmp_path}", "--save_every=0"]
    with monkeypatch.context() as patched:
        patched.setattr(train_gpt.Trainer, "step", interrupted)
        assert train_gpt.main([*arguments, "--run_id=s"]) == 0
    assert f"stopped by {number.name} after step 3" in capsys.readouterr().out
    assert train_gpt.main([*arguments, "--resume=auto"]) == 0
    assert steps(tmp_path / "s") == steps(whole) and equal(weights(tmp_path / "s"), weights(whole))


def test_a_stop_whose_checkpoint_cannot_be_written_is_an_error(data, tmp_path, capsys, monkeypatch):
    def interrupted(self, batch, at):
        os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, at)

    def full(state, file):
        raise OSError(errno.ENOSPC, "No space left on device")
    step = train_gpt.Trainer.step
    monkeypatch.setattr(train_gpt.Trainer, "step", interrupted)
    monkeypatch.setattr(torch, "save", full)
    assert train_gpt.main([*SIX, *data, f"--log_dir={tmp_path}", "--run_id=f", "--save_every=0"]) == 2
    seen = capsys.readouterr()
    assert "error: stopped by SIGTERM after step 1, and what it had learnt since the last checkpoint is lost" in seen.err
    assert "No space left" in seen.err and "go on with" not in seen.out


def test_a_signal_while_the_last_checkpoint_is_written_does_not_lose_it(data, tmp_path, monkeypatch):
    """Such as the launcher's own, when the whole group was signalled and this rank was quick to stop."""
    save, close, waiting = torch.save, train_gpt.Logger.close, threading.Event()

    def interrupted(state, file):
        if state["step"] == 6 and "muon" in state:
            assert waiting.wait(60)
            os.kill(os.getpid(), signal.SIGINT)
        save(state, file)
    monkeypatch.setattr(torch, "save", interrupted)
    monkeypatch.setattr(train_gpt.Logger, "close", lambda self: (waiting.set(), close(self)))
    assert train_gpt.main([*SIX, *data, f"--log_dir={tmp_path}", "--run_id=w"]) == 0
    assert train_gpt.read_checkpoint(tmp_path / "w" / "checkpoint_0000006.pt")["step"] == 6 and weights(tmp_path / "w")


def test_a_signal_while_a_run_is_scored_does_not_lose_its_model(data, tmp_path, monkeypatch):
    def interrupted(*_):
        assert train_gpt.read_checkpoint(tmp_path / "h" / "model.pt")["step"] == 6
        os.kill(os.getpid(), signal.SIGINT)
        return dict(line="HellaSwag accuracy", hellaswag=0.25, tasks=4)
    monkeypatch.setattr(train_gpt, "read_hellaswag", lambda *_: None)
    monkeypatch.setattr(train_gpt, "score_hellaswag", interrupted)
    arguments = [*SIX, *data, f"--log_dir={tmp_path}", "--run_id=h", "--hellaswag=somewhere", "--save_every=0"]
    assert train_gpt.main(arguments) == 0
    assert "HellaSwag accuracy\nfinal validation loss" in (tmp_path / "h" / "log.txt").read_text()


def test_what_is_being_written_when_a_run_gives_up_is_still_written(data, tmp_path, monkeypatch):
    """By the time that the error is said, which makes the launcher end all ranks."""
    save, print_error, told = torch.save, train_gpt.print_error, threading.Event()

    def slow(state, file):
        told.wait(1)
        save(state, file)

    def poisoned(self, batch, at):
        if at == 2:
            raise train_gpt.UserError("a loss that is not finite")
        return step(self, batch, at)
    step = train_gpt.Trainer.step
    monkeypatch.setattr(torch, "save", slow)
    monkeypatch.setattr(train_gpt.Trainer, "step", poisoned)
    monkeypatch.setattr(train_gpt, "print_error", lambda why: (
        told.set(), train_gpt.read_checkpoint(tmp_path / "g" / "checkpoint_0000002.pt"), print_error(why))[-1])
    assert train_gpt.main([*SIX, *data, f"--log_dir={tmp_path}", "--run_id=g"]) == 2


def test_control_c_before_the_first_step_is_one_line(data):
    code = ("import os, signal, sys, train_gpt\n"
            "train_gpt.resume = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
            "sys.exit(train_gpt.main(sys.argv[1:]))")
    process = subprocess.run([sys.executable, "-c", code, *SIX, *data], capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 128 + signal.SIGINT and process.stderr == "stopped: there was nothing to save yet\n"


def test_a_full_disk_or_a_folder_that_is_gone_does_not_stop_training(data, whole, tmp_path, capsys):
    """A disk with room for the log and one checkpoint, and then for nothing."""
    disk = tmp_path / "disk"
    disk.mkdir()
    size = (whole / "checkpoint_0000002.pt").stat().st_size
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={int(1.6 * size)}", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("no right to mount a small disk")
    try:
        arguments = [*SIX, *data, f"--log_dir={disk}"]
        assert train_gpt.main([*arguments, "--run_id=full", "--keep_checkpoints=9"]) == 0
        captured = capsys.readouterr()
        assert captured.err.count("warning: ") == 1 and "checkpoint_0000004.pt could not be written" in captured.err
        assert "step:6/6 val_loss" in captured.out
        assert [path.name for path in (disk / "full").glob("checkpoint*")] == ["checkpoint_0000002.pt"]
        assert train_gpt.read_checkpoint(disk / "full" / "checkpoint_0000002.pt")["step"] == 2
    finally:
        subprocess.run(["umount", disk])


@pytest.mark.parametrize("in_its_place", [False, True], ids=["gone", "a file in its hardware"])
def test_a_folder_that_is_gone_does_not_stop_training(data, tmp_path, capsys, monkeypatch, in_its_place):
    step = train_gpt.Trainer.step

    def losing(self, batch, at):
        if at == 3:
            shutil.rmtree(tmp_path / "gone")
            if in_its_place:  # as in a folder that became read-only, nothing can even be deleted
                (tmp_path / "gone").write_text("")
        return step(self, batch, at)
    monkeypatch.setattr(train_gpt.Trainer, "step", losing)
    assert train_gpt.main([*SIX, *data, f"--log_dir={tmp_path}", "--run_id=gone"]) == 0
    captured = capsys.readouterr()
    warnings = [line for line in captured.err.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 2 and "can no longer be written" in warnings[0] and "could not be written" in warnings[1]
    assert "step:6/6 val_loss" in captured.out


@pytest.mark.parametrize("both", [False, True], ids=["output", "output and errors"])
def test_a_full_disk_under_the_output_does_not_stop_training(data, tmp_path, both):
    """Where a user has redirected it to; a pipe whose reader has died is the same."""
    with open("/dev/full", "w") as full:
        process = subprocess.run([sys.executable, str(SCRIPT), *SIX, *data, f"--log_dir={tmp_path}", "--run_id=f"], text=True,
                                 stdout=full, stderr=full if both else subprocess.PIPE)
    assert process.returncode == 0, process.stderr
    assert both or process.stderr == ("warning: standard output can no longer be written (No space left on device); "
                                      "training goes on\n")
    assert steps(tmp_path / "f")[-1].startswith("step:6/6 val_loss") and (tmp_path / "f" / "model.pt").exists()


def test_a_terminal_that_goes_does_not_stop_training(data, tmp_path, capsys, monkeypatch):
    class Terminal(io.StringIO):
        isatty = lambda self: True  # noqa: E731

        def write(self, text):
            if "loss 3." in self.getvalue():  # on the bar
                raise OSError(5, "Input/output error")
            return super().write(text)
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert train_gpt.main([*SIX, *data, f"--log_dir={tmp_path}", "--run_id=t"]) == 0
    assert capsys.readouterr().err.count("warning: standard output can no longer be written") == 1
    assert steps(tmp_path / "t")[-1].startswith("step:6/6 val_loss")


def test_one_copy_at_a_time_and_none_between_checkpoints(data, tmp_path, monkeypatch):
    state, before = train_gpt.Trainer.state, []

    def watched(self, *arguments):
        assert all(copy() is None for copy in before), "the copy of the checkpoint before is still in memory"
        made = state(self, *arguments)
        before.append(weakref.ref(made["model"]["head.weight"]))
        return made
    monkeypatch.setattr(train_gpt.Trainer, "state", watched)
    assert train_gpt.main([*SIX, *data, f"--log_dir={tmp_path}", "--save_every=1"]) == 0
    assert len(before) == 6


def test_a_gradient_that_is_not_finite_stops_before_the_optimizers_and_names_its_batch(data, cut, capsys, monkeypatch):
    folder, step = cut(4), train_gpt.Trainer.step

    def poisoned(self, batch, at):
        if at == 5:
            self.model.blocks[1].up.weight.register_hook(lambda grad: grad * float("nan"))
        return step(self, batch, at)
    monkeypatch.setattr(train_gpt.Trainer, "step", poisoned)
    assert train_gpt.main([*SIX, *data, f"--resume={folder}", "--save_every=1"]) == 2
    error = capsys.readouterr().err
    assert "the first gradient that is not finite is that of blocks.1.up.weight" in error and "loss of step 6 is 3." in error
    assert re.search(r"its batch is 5, number 5 of \S+train_000000.bin", error)
    state = torch.load(max(folder.glob("checkpoint*")), weights_only=True)
    assert state["step"] == 5 and all(x.isfinite().all() for x in state["model"].values())


def test_no_checkpoint_is_made_of_parameters_that_are_not_finite(data, tmp_path):
    hp = train_gpt.parse_command_line([*SIX, *data])
    trainer = make_trainer(hp)
    trainer.step(trainer.data.train.next_batch(), 0)
    with torch.no_grad():
        trainer.model.head.weight[3, 3] = float("inf")
    with pytest.raises(train_gpt.UserError, match="head.weight.*batch is 0"):
        trainer.state(1, train_gpt.Clock(trainer.hardware.device), [0, 0])


# Files from elsewhere, mutated: each is read right or refused in one sentence.

@st.composite
def mutations(draw) -> list[tuple]:
    """(where, as a part of the file's length; how; with what)"""
    return draw(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from(["flip", "cut", "insert", "number"]),
                                   st.binary(min_size=1, max_size=8)), min_size=1, max_size=4))


def mutate(content: bytes, changes: list[tuple]) -> bytes:
    for where, how, new in changes:
        at = int(where * len(content)) if how != "number" else int(where * min(64, len(content)))
        if how == "flip" or how == "number":
            content = content[:at] + new + content[at + len(new):]
        else:
            content = content[:at] + (new + content[at:] if how == "insert" else b"")
    return content


def read_or_refused(function) -> object | None:
    try:
        return function()
    except train_gpt.UserError as error:
        assert len(str(error)) < 5000  # a list of all hyperparameters is long
        assert "\n" not in str(error)


def fuzz_shard(folder: Path, changes: list) -> None:
    """Whatever is handed to the embedding is in range."""
    path = write_shard(folder / "fuzz.bin", torch.arange(3000).numpy() % 64)
    path.write_bytes(mutate(path.read_bytes(), changes))
    def batches():
        loader = train_gpt.Loader(str(path), 512, 256, vocab_size=64)
        return [loader.next_batch() for _ in range(len(loader))]
    for batch in read_or_refused(batches) or ():
        assert all(0 <= tokens.min() and tokens.max() < 64 for pair in batch for tokens in pair)


def fuzz_manifest(folder: Path, changes: list) -> None:
    path = write_shard(folder / "fuzz.bin", torch.arange(3000).numpy() % 64)
    manifest = dict(format=1, complete=True, vocab_size=64, document_token=63,
                    shards=[dict(file="fuzz.bin", tokens=3000, text_bytes=9000)])
    (folder / "manifest.json").write_bytes(mutate(json.dumps(manifest).encode(), changes))
    hp = train_gpt.parse_command_line(TINY)
    ratio = read_or_refused(lambda: train_gpt.check_manifest(hp, [train_gpt.Shard(str(path))]))
    assert ratio is None or type(ratio) is float and abs(ratio) < 1e300
    (folder / "manifest.json").unlink()


def fuzz_checkpoint(folder: Path, changes: list, content: bytes, trainer: train_gpt.Trainer) -> None:
    """Bytes first; then values inside of a file whose checksums are right."""
    path = folder / "fuzz.pt"
    path.write_bytes(mutate(content, changes))
    state = read_or_refused(lambda: train_gpt.read_checkpoint(path))
    if state is None:
        state = torch.load(io.BytesIO(content), weights_only=True)
        holders = [state, state["model"], state["adam"], state["adam"]["embed.weight"], state["muon"],
                   state["hyperparameters"]]
        for where, _, new in changes:
            holder = holders[new[0] % len(holders)]
            name = sorted(holder)[int(where * len(holder))] if holder else ""
            number = int.from_bytes(new, "little", signed=True)
            values = [number, 1 << 20_000, float("nan"), "text", None, torch.zeros(3), [], {}]
            if new[-1] % 9 == 8:
                holder.pop(name, None)
            else:
                holder[name] = values[new[-1] % 9]
        torch.save(state, path)
    hardware = trainer.hardware

    def use():
        state = train_gpt.read_checkpoint(path)
        train_gpt.changed_since(trainer.hp, state["hyperparameters"])
        trainer.restore(state, train_gpt.Clock(hardware.device))
        trainer.step(trainer.data.train.next_batch(), 0)
    read_or_refused(use)
    read_or_refused(lambda: train_gpt.sample(train_gpt.load_model(str(path), hardware), "", trainer.hp))


@settings(max_examples=150)
@given(changes=mutations())
def test_mutated_shards(tmp_path_factory, changes):
    fuzz_shard(tmp_path_factory.getbasetemp(), changes)


@settings(max_examples=150)
@given(changes=mutations())
def test_mutated_manifests(tmp_path_factory, changes):
    fuzz_manifest(tmp_path_factory.getbasetemp(), changes)


@settings(max_examples=60)
@given(changes=mutations())
def test_mutated_checkpoints(tmp_path_factory, whole, data, changes):
    hp = train_gpt.parse_command_line([*SIX, *data])
    if not hasattr(test_mutated_checkpoints, "trainer"):
        test_mutated_checkpoints.trainer = make_trainer(hp)
    fuzz_checkpoint(tmp_path_factory.getbasetemp(), changes, (whole / "checkpoint_0000004.pt").read_bytes(),
                    test_mutated_checkpoints.trainer)


def test_a_model_that_claims_to_be_huge_takes_no_memory(whole, tmp_path):
    import resource
    for claim in (dict(num_layers=10**9), dict(model_dim=2**40), dict(mlp_ratio=10**12), dict(vocab_multiple=2**50),
                  dict(sequence_tokens=2**50, batch_tokens=2**50, val_tokens=2**50, segment_tokens=0)):
        state = torch.load(whole / "model.pt", weights_only=True)
        state["hyperparameters"] |= claim
        torch.save(state, tmp_path / "huge.pt")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        read_or_refused(lambda: train_gpt.load_model(str(tmp_path / "huge.pt"), train_gpt.Hardware()))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024, claim


def test_a_checkpoint_that_would_swell_is_refused(whole, tmp_path):
    """Compressed, or a list of twice the same list of twice the same …; and one without the state of a parameter."""
    import resource
    with zipfile.ZipFile(whole / "checkpoint_0000004.pt") as good, zipfile.ZipFile(tmp_path / "zip.pt", "w") as bomb:
        for entry in good.infolist():
            more, how = (bytes(2**29), zipfile.ZIP_DEFLATED) if entry.filename.endswith("data.pkl") else (b"", None)
            bomb.writestr(entry.filename, good.read(entry) + more, how)
    state, twice = torch.load(whole / "checkpoint_0000004.pt", weights_only=True), []
    for _ in range(60):
        twice = [twice, twice]
    torch.save(state | dict(hyperparameters=state["hyperparameters"] | dict(seed=twice)), tmp_path / "twice.pt")
    torch.save(state | dict(step=10**5000), tmp_path / "digits.pt")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in ("zip", "twice", "digits"):
        with pytest.raises(train_gpt.UserError, match=f"{name}.pt: cannot be loaded"):
            train_gpt.read_checkpoint(tmp_path / f"{name}.pt")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


def test_a_checkpoint_without_the_state_of_a_parameter_is_refused(data, whole):
    hp = train_gpt.parse_command_line([*SIX, *data])
    trainer = make_trainer(hp)
    for kind, name in (("adam", "head.weight"), ("muon", "blocks.0.up.weight")):
        state = torch.load(whole / "checkpoint_0000004.pt", weights_only=True)
        del state[kind][name]
        with pytest.raises(train_gpt.UserError, match=f"does not fit this training .KeyError: '{name}'"):
            trainer.restore(state, train_gpt.Clock(trainer.hardware.device))


@pytest.mark.parametrize("tokens, text_bytes", [(3000, 10**400), (3000, -5), (0, 9)])
def test_a_manifest_with_impossible_numbers_is_refused_or_gives_no_ratio(tmp_path, tokens, text_bytes):
    path = write_shard(tmp_path / "a.bin", torch.arange(tokens).numpy() % 64)
    (tmp_path / "manifest.json").write_text(json.dumps(dict(
        format=1, complete=True, vocab_size=64, document_token=63,
        shards=[dict(file="a.bin", tokens=tokens, text_bytes=text_bytes)])))
    hp = train_gpt.parse_command_line(TINY)
    assert read_or_refused(lambda: train_gpt.check_manifest(hp, [train_gpt.Shard(str(path))])) is None


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_bytes(b""),
                                    lambda path: write_shard(path, torch.arange(300).numpy() % 64)])
def test_a_shard_that_goes_or_changes_after_the_start_is_named(tmp_path, change):
    path = write_shard(tmp_path / "a.bin", torch.arange(3000).numpy() % 64)
    loader = train_gpt.Loader(str(path), 512, 256, vocab_size=64)
    change(path)
    with pytest.raises(train_gpt.UserError, match="a.bin: gone, or not as it was when the run began"):
        loader.next_batch()
