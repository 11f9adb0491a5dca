"""Checkpoints and resume: nothing lost, nothing executed, no history overwritten."""
import errno
import re
import resource
import shutil
import signal
import sys
import threading
import weakref
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from fuzz import read_or_refused
from helpers import (
    SIX_STEPS,
    TINY,
    Result,
    before_step,
    equal,
    make_trainer,
    run,
    send_signal,
)

import train_gpt


def prepare(*arguments: str) -> tuple[train_gpt.Hyperparameters, train_gpt.Run]:
    """The hyperparameters and the run that these arguments mean."""
    return train_gpt.prepare_run(train_gpt.parse_options(list(arguments)))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def edit(path: Path, change) -> Path:
    """Apply change(state) to a saved file."""
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)
    return path


# ---- resuming ----

def test_resume_continues_bit_for_bit_with_nothing_retyped(whole, cut, capsys):
    folder = cut(4)
    with open(folder / "log.txt", "a") as log:
        log.write("step:5/6 half a li")
    assert train_gpt.main([f"--resume={folder}"]) == 0
    assert f"resuming from {folder}/checkpoint_0000004.pt, step 4" in capsys.readouterr().out
    result = Result(folder)
    assert result.steps == whole.steps
    assert result.losses == whole.losses
    assert equal(result.weights, whole.weights)
    lines = result.log.rpartition(train_gpt.SEPARATOR)[2]
    assert "changed since the checkpoint: nothing\n" in lines
    assert len([metric for metric in result.metrics if "start" in metric]) == 1
    assert f"command: {' '.join(sys.argv)}\n" in lines and "source_sha256: " in lines


def test_a_log_that_was_deleted_starts_anew_with_the_source(whole, cut):
    folder = cut(4)
    (folder / "log.txt").unlink()
    assert train_gpt.main([f"--resume={folder}"]) == 0
    result = Result(folder)
    assert result.log.startswith('"""Train a GPT')
    assert result.steps == whole.steps[-4:]


def test_a_run_resumes_on_one_rank_two_three_and_one(data, whole, cut):
    source = whole.folder
    for ranks, step in ((2, 2), (3, 4), (1, 5)):
        folder = cut(step, source)
        arguments = [f"--resume={folder}", "--save_every=1", "--keep_checkpoints=9"]
        if ranks == 1:
            assert train_gpt.main(arguments) == 0
        else:
            process = run(arguments, ranks)
            assert process.returncode == 0, process.stderr
            assert "resuming from" in process.stdout
        source = folder
    result = Result(source)
    assert result.losses == pytest.approx(whole.losses, abs=1e-4)
    assert result.steps[:3] == whole.steps[:3]
    ours, theirs = (torch.load(folder / "checkpoint_0000006.pt", weights_only=True)["muon"]["state"]
                    for folder in (source, whole.folder))
    assert ours.keys() == theirs.keys()
    for index, state in theirs.items():
        momentum = state["momentum_buffer"]
        difference = momentum - ours[index]["momentum_buffer"]
        assert difference.norm() < 0.05 * momentum.norm(), index


def test_auto_is_the_run_that_was_saved_last_or_the_one_that_is_named(cut):
    older = cut(6)
    logs = older.parent
    newer = logs / "newer"
    newer.mkdir()
    shutil.copy(older / "checkpoint_0000002.pt", newer)  # saved later, though its step is earlier
    (logs / "unsaved").mkdir()
    _, latest = prepare("--resume=auto", f"--log_dir={logs}")
    assert (latest.folder, latest.checkpoint["step"]) == (newer, 2)
    _, named = prepare("--resume=auto", f"--log_dir={logs}", "--run_id=run")
    assert (named.folder, named.checkpoint["step"]) == (older, 6)


def test_auto_without_a_checkpoint_starts_a_run_and_a_folder_without_one_is_refused(tmp_path):
    arguments = [*TINY, f"--log_dir={tmp_path}"]
    _, fresh = prepare(*arguments, "--resume=auto", "--run_id=new")
    assert (fresh.folder, fresh.checkpoint) == (tmp_path / "new", None)
    assert fresh.notes == ["no checkpoint to resume from: a new run"]
    with pytest.raises(train_gpt.UserError, match="there is no checkpoint; give another folder"):
        prepare(*arguments, f"--resume={tmp_path}")


def test_auto_does_not_overwrite_a_finished_run_without_checkpoints(data, tmp_path, capsys):
    arguments = [*TINY, *data, f"--log_dir={tmp_path}", "--run_id=finished"]
    assert train_gpt.main(arguments) == 0
    before = contents(tmp_path / "finished")
    assert train_gpt.main([*arguments, "--resume=auto"]) == 2
    assert "holds a finished run without checkpoints" in capsys.readouterr().err
    assert contents(tmp_path / "finished") == before


def flip_a_bit(content: bytes) -> bytes:
    return content[:70000] + bytes([content[70000] ^ 1]) + content[70001:]


@pytest.mark.parametrize("damage", [
    lambda content: content[:len(content) // 2], lambda content: content[:9],
    lambda content: b"", flip_a_bit], ids=["half", "nine bytes", "empty", "a bit"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(cut, damage):
    folder = cut(4)
    path = folder / "checkpoint_0000004.pt"
    path.write_bytes(damage(path.read_bytes()))
    _, resumed = prepare(f"--resume={folder}")
    assert resumed.checkpoint["step"] == 2
    skipped, resuming, *_ = resumed.notes
    assert skipped.startswith(f"skipped: {path} cannot be loaded: ")
    assert resuming == f"resuming from {folder}/checkpoint_0000002.pt, step 2"
    with pytest.raises(train_gpt.UserError, match="checkpoint_0000004.pt cannot be loaded"):
        prepare(f"--resume={path}")


@pytest.mark.parametrize("resume", ["auto", "folder"])
def test_a_run_with_only_damaged_checkpoints_is_refused_and_keeps_its_log(cut, resume):
    folder = cut(2)
    (folder / "checkpoint_0000002.pt").write_bytes(b"")
    log = (folder / "log.txt").read_text()
    named = [f"--resume={folder}"]
    if resume == "auto":
        named = ["--resume=auto", f"--log_dir={folder.parent}"]
    with pytest.raises(train_gpt.UserError, match="cannot be resumed: skipped: .*0000002.pt"):
        prepare(*named)
    assert (folder / "log.txt").read_text() == log


def test_a_run_whose_last_checkpoint_is_damaged_ends_the_same(whole, cut):
    folder = cut(4)
    (folder / "checkpoint_0000004.pt").write_bytes(b"")
    assert train_gpt.main([f"--resume={folder}"]) == 0
    result = Result(folder)
    assert result.steps == whole.steps
    assert equal(result.weights, whole.weights)
    assert "\nskipped: " in result.log


def test_the_checkpoint_that_was_named_is_taken_or_refused(cut):
    """Whatever it is called, and not another one of its folder."""
    folder = cut(6)
    shutil.copy(folder / "checkpoint_0000002.pt", folder / "good.pt")
    _, resumed = prepare(f"--resume={folder}/good.pt")
    assert resumed.checkpoint["step"] == 2
    for name in ("checkpoint_0000003.pt", "nowhere"):
        with pytest.raises(train_gpt.UserError, match=f"{name} cannot be loaded: No such file"):
            prepare(f"--resume={folder}/{name}")


def test_resuming_from_an_earlier_checkpoint_leaves_the_old_run_as_it_is(whole, cut):
    folder = cut(6)
    before = contents(folder)
    assert train_gpt.main([f"--resume={folder}/checkpoint_0000004.pt"]) == 0
    assert contents(folder) == before
    new, = (path for path in folder.parent.iterdir() if path != folder)
    assert new.name == "run_from_4"
    result = Result(new)
    assert equal(result.weights, whole.weights)
    assert result.train_losses == whole.train_losses[4:]
    assert "start" in result.metrics[0]  # a log of its own, with a header
    with pytest.raises(train_gpt.UserError, match="run_from_4 holds a run already; continue it "):
        prepare(f"--resume={folder}/checkpoint_0000004.pt")
    _, again = prepare(f"--resume={folder}/checkpoint_0000004.pt", "--run_id=again")
    assert again.folder.name == "again"


def test_a_folder_continues_its_run_and_a_checkpoint_starts_another(cut):
    folder = cut(6)
    _, resumed = prepare(f"--resume={folder}")
    assert resumed.folder == folder
    assert resumed.log_sizes.keys() == {"log.txt", "metrics.jsonl"}
    _, started = prepare(f"--resume={folder}/checkpoint_0000006.pt")
    assert started.folder.parent == folder.parent and started.log_sizes == {}
    assert started.folder.name == f"{folder.name}_from_6"


def test_a_checkpoint_may_be_named_from_within_its_folder(cut, monkeypatch):
    folder = cut(4)
    monkeypatch.chdir(folder)
    _, found = prepare("--resume=checkpoint_0000002.pt")
    assert found.folder.parent == folder.parent
    assert found.folder.name == "run_from_2"


@pytest.mark.parametrize("left", ["log.txt", "checkpoint_*.pt"])
def test_a_new_run_does_not_overwrite_another(data, cut, capsys, left):
    folder = cut(4)
    for path in set(folder.iterdir()) - set(folder.glob(left)):
        path.unlink()
    before = contents(folder)
    assert before
    arguments = [*SIX_STEPS, *data, f"--log_dir={folder.parent}", "--run_id=run"]
    assert train_gpt.main(arguments) == 2
    remedy = f"continue it with --resume={folder}, or give" if left != "log.txt" else "give"
    assert capsys.readouterr().err == (f"error: {folder} holds a run already; {remedy} another "
                                       "--run_id\n")
    assert contents(folder) == before


# ---- torchrun's restarts ----

@pytest.fixture
def restarted(monkeypatch):
    """restarted(*arguments): the run of a process that torchrun has started again."""
    def find(*arguments: str) -> train_gpt.Run:
        with monkeypatch.context() as patched:
            patched.setenv("TORCHELASTIC_RESTART_COUNT", "1")
            return prepare(*arguments)[1]
    return find


def test_a_restart_continues_the_run_that_has_its_name(data, cut, restarted):
    """And starts again where that had nothing saved. run.sh gives a name to each run."""
    folder = cut(4)
    arguments = [*SIX_STEPS, *data, f"--log_dir={folder.parent}", "--run_id=run"]
    found = restarted(*arguments)
    assert (found.folder, found.checkpoint["step"]) == (folder, 4)
    for path in train_gpt.checkpoints(folder):
        path.unlink()
    found = restarted(*arguments)
    assert (found.folder, found.checkpoint) == (folder, None)


def test_a_restart_without_a_name_takes_no_other_run(data, cut, restarted):
    logs = cut(4).parent
    found = restarted(*SIX_STEPS, *data, f"--log_dir={logs}")
    assert found.checkpoint is None and not found.folder.exists()


@pytest.mark.parametrize("named", ["auto", "folder"])
def test_a_restart_of_a_resumed_run_continues_it(cut, restarted, named):
    folder = cut(4)
    names = dict(auto="auto", folder=folder)
    arguments = [f"--resume={names[named]}", f"--log_dir={folder.parent}"]
    assert prepare(*arguments)[1].checkpoint["step"] == 4
    assert restarted(*arguments).checkpoint["step"] == 4
    edit(shutil.copy(folder / "checkpoint_0000004.pt", folder / "checkpoint_0000005.pt"),
         lambda state: state.update(step=5))
    (folder / "checkpoint_0000004.pt").unlink()  # as the run does
    found = restarted(*arguments)
    assert (found.folder, found.checkpoint["step"]) == (folder, 5)


@pytest.mark.parametrize("options", [["--log_dir={logs}"], [], ["--log_dir={logs}", "--run_id=x"]],
                         ids=["same log folder", "another", "named"])
def test_a_restart_of_a_run_from_an_earlier_checkpoint_continues_that(cut, restarted, options):
    """And leaves the old run as it is."""
    folder = cut(6)
    arguments = [f"--resume={folder}/checkpoint_0000002.pt",
                 *(option.format(logs=folder.parent) for option in options)]
    first = prepare(*arguments)[1]
    assert first.folder != folder
    assert (first.folder.name == "x") == any("run_id" in option for option in options)
    found = restarted(*arguments)  # before it has saved anything
    assert (found.folder, found.checkpoint["step"]) == (first.folder, 2)
    first.folder.mkdir()
    shutil.copy(folder / "checkpoint_0000004.pt", first.folder)
    found = restarted(*arguments)
    assert (found.folder, found.checkpoint["step"]) == (first.folder, 4)


# ---- hyperparameters of a checkpoint ----

def test_a_resumed_run_has_the_checkpoints_own_hyperparameters(data, cut):
    folder = cut(4)
    hp, _ = prepare(f"--resume={folder}", "--log_every=3")
    original = train_gpt.parse_command_line([*SIX_STEPS, *data])
    different = {name for name, value in asdict(hp).items()
                 if value != getattr(original, name)}
    assert different == {"resume", "log_every", "run_id"}
    assert hp.origins["log_every"] == hp.origins["num_steps"] == "command line"
    assert hp.origins["target_loss"] == "preset laptop" and hp.origins["muon_rate"] == "default"


def test_options_that_change_the_training_are_refused_and_others_listed(cut):
    folder = cut(4)
    arguments = [f"--resume={folder}", "--muon_rate=0.01", "--head_rate=0.5", "--log_every=2",
                 "--num_steps=6"]
    with pytest.raises(train_gpt.UserError) as refused:
        prepare(*arguments)
    assert str(refused.value) == (
        f"--resume={folder}: this changes the training of the checkpoint: head_rate 0.004 → 0.5, "
        "muon_rate 0.05 → 0.01; leave these options out, or add --resume_anyway")
    hp, resumed = prepare(*arguments, "--resume_anyway")
    assert (hp.muon_rate, hp.head_rate, hp.log_every) == (0.01, 0.5, 2)
    assert resumed.notes[-1] == ("changed since the checkpoint: head_rate 0.004 → 0.5, muon_rate "
                                 "0.05 → 0.01, log_every 1 → 2")


def test_options_are_judged_with_the_checkpoints_values_and_not_with_the_presets(cut):
    """256 tokens of validation are no multiple of the laptop preset's sequences, but of these."""
    folder = cut(4)
    prepare(f"--resume={folder}", "--sequence_tokens=256", "--val_tokens=1024")
    hp, _ = prepare(f"--resume={folder}", "--val_tokens=256", "--resume_anyway")
    assert hp.val_tokens == 256


def test_what_was_allowed_once_is_refused_the_next_time(cut):
    folder = cut(4)
    edit(folder / "checkpoint_0000004.pt",
         lambda state: state["hyperparameters"].update(resume_anyway=True))
    with pytest.raises(train_gpt.UserError, match="this changes the training.*muon_rate"):
        prepare(f"--resume={folder}", "--muon_rate=1")


def test_a_value_of_another_type_names_the_checkpoint(cut):
    path = cut(4) / "checkpoint_0000004.pt"
    edit(path, lambda state: state["hyperparameters"].update(model_dim="32"))
    sentence = "checkpoint_0000004.pt cannot be loaded: --model_dim='32': expected a whole number"
    with pytest.raises(train_gpt.UserError, match=sentence):
        prepare(f"--resume={path}")


def test_another_preset_changes_the_training(cut):
    folder = cut(4)
    with pytest.raises(train_gpt.UserError, match="this changes the training.*softcap 15.0 → 30.0"):
        prepare(f"--resume={folder}", "--preset=2024-12-10")
    prepare(f"--resume={folder}", "--preset=laptop")  # its own


def test_a_checkpoint_of_another_version_of_the_file(data, cut):
    """What no longer exists is ignored; what a training depends on has to be there."""
    folder = cut(4)

    def age(state):
        del state["hyperparameters"]["profile"], state["origins"]["profile"]
        state["hyperparameters"]["number_of_bells"] = 3
    path = edit(folder / "checkpoint_0000004.pt", age)
    hp, resumed = prepare(f"--resume={path}")
    assert hp.profile == 0 and not hasattr(hp, "number_of_bells")
    assert resumed.notes[1:] == ["changed since the checkpoint: nothing"]
    trainer = make_trainer(hp)
    assert train_gpt.restore(trainer, resumed.checkpoint) == 4
    assert trainer.data.train.index == 4 and trainer.clock.ms["train"] > 0
    edit(path, lambda state: state["hyperparameters"].pop("norm_eps"))
    with pytest.raises(train_gpt.UserError, match="older train_gpt.py .* without norm_eps"):
        prepare(f"--resume={path}")


def test_an_edit_of_the_file_since_the_checkpoint_is_not_used(cut, monkeypatch):
    folder = cut(4)
    monkeypatch.setitem(train_gpt.LAPTOP, "cooldown", 0.7)
    hp, resumed = prepare(f"--resume={folder}")
    assert hp.cooldown == 0.5
    assert resumed.notes[1:] == ["changed since the checkpoint: nothing"]


def test_a_sequence_that_was_chosen_for_the_machine_is_no_edit_of_the_file(cut):
    folder = cut(4)
    hp = train_gpt.parse_command_line(["--preset=h100", "--device=cpu", "--batch_tokens=8192"])
    train_gpt.fit_to_hardware(hp, train_gpt.Hardware())
    assert hp.sequence_tokens == 8192 and not hp.fp8_head
    edit(folder / "checkpoint_0000004.pt", lambda state: state.update(
        hyperparameters=asdict(hp), origins=hp.origins))
    resumed_hp, resumed = prepare(f"--resume={folder}")
    assert resumed_hp.sequence_tokens == hp.sequence_tokens
    assert resumed.notes[1:] == ["changed since the checkpoint: nothing"]


# ---- writing ----

def test_what_is_in_a_checkpoint(whole):
    paths = train_gpt.checkpoints(whole.folder)
    assert [path.name for path in paths] == [f"checkpoint_000000{step}.pt" for step in (2, 4, 6)]
    for path, step in zip(paths, (2, 4, 6)):
        state = torch.load(path, weights_only=True)
        assert state["step"] == state["batch_index"] == step
        assert state["hyperparameters"]["num_steps"] == 6
        momentum = [entry["momentum_buffer"] for entry in state["muon"]["state"].values()]
        parameters = [x for x in state["model"].values() if isinstance(x, torch.Tensor)]
        assert len(momentum) + len(state["adam"]["state"]) == len(parameters)
        if step > 2:  # the first gradients of most matrices are zero
            assert all(buffer.any() for buffer in momentum)


def test_one_function_saves_and_one_restores(data, tmp_path, monkeypatch):
    """Checkpoint, resume and warm-up go through the trainer's state_dict and load_state_dict."""
    calls = []
    for name in ("state_dict", "load_state_dict"):
        original = getattr(train_gpt.Trainer, name)
        monkeypatch.setattr(train_gpt.Trainer, name, lambda *arguments, name=name, call=original: (
            calls.append(name), call(*arguments))[1])
    arguments = [*SIX_STEPS, *data, f"--log_dir={tmp_path}"]
    train_gpt.warm_up(make_trainer(train_gpt.parse_command_line(arguments)))
    assert calls == ["state_dict", "load_state_dict"]
    calls.clear()
    before_step(monkeypatch, 3, lambda trainer: send_signal())
    assert train_gpt.main([*arguments, "--run_id=one"]) == 128 + signal.SIGTERM
    assert calls == ["state_dict"] * 2  # steps 2 and 4
    calls.clear()
    assert train_gpt.main([f"--resume={tmp_path}/one"]) == 0
    assert calls == ["load_state_dict", "state_dict"]


def test_checkpoints_are_kept_and_ordered_by_step(tmp_path):
    """Not by name, nor by the times of the files, which a clock may have set."""
    (tmp_path / "saving.tmp").write_text("what a killed run left")
    steps = (9_999_998, 9_999_999, 10_000_000, 10_000_001)
    with train_gpt.Saver(tmp_path, enabled=True) as saver:
        for step in steps:
            saver.save(f"checkpoint_{step:07d}.pt", dict(step=step), keep=3)
    assert [train_gpt.step_of(path) for path in train_gpt.checkpoints(tmp_path)] == list(steps[1:])
    assert not (tmp_path / "saving.tmp").exists()


def test_a_later_checkpoint_that_was_skipped_does_not_displace_the_new_one(tmp_path):
    (tmp_path / "checkpoint_0000200.pt").write_text("damaged")
    with train_gpt.Saver(tmp_path, enabled=True) as saver:
        for step in (100, 150):
            saver.save(f"checkpoint_{step:07d}.pt", dict(step=step), keep=1)
    assert [train_gpt.step_of(path) for path in train_gpt.checkpoints(tmp_path)] == [150, 200]


def test_one_copy_at_a_time_and_none_between_checkpoints(data, tmp_path, monkeypatch):
    original = train_gpt.copy_to_host
    copies = []

    def copy_to_host(state):
        if isinstance(state, dict) and "batch_index" in state:
            assert all(copy() is None for copy in copies), "an earlier copy is still in memory"
            copied = original(state)
            copies.append(weakref.ref(copied["model"]["head.weight"]))
            return copied
        return original(state)
    monkeypatch.setattr(train_gpt, "copy_to_host", copy_to_host)
    arguments = [*SIX_STEPS, *data, f"--log_dir={tmp_path}", "--run_id=k", "--save_every=1",
                 "--keep_checkpoints=2"]
    assert train_gpt.main(arguments) == 0
    assert len(copies) == 6
    kept = train_gpt.checkpoints(tmp_path / "k")
    assert [train_gpt.step_of(path) for path in kept] == [5, 6]
    assert not list((tmp_path / "k").glob("*.tmp"))


def test_what_is_being_written_when_a_run_fails_is_still_written(data, tmp_path, monkeypatch):
    """By the time that the error is printed, after which the launcher ends all ranks."""
    save = torch.save
    print_error = train_gpt.print_error
    printed = threading.Event()

    def slow_save(state, file):
        printed.wait(1)
        save(state, file)

    def check(error):
        printed.set()
        train_gpt.read_checkpoint(tmp_path / "g" / "checkpoint_0000002.pt")
        return print_error(error)

    def fail(trainer):
        raise train_gpt.UserError("a loss that is not finite")
    monkeypatch.setattr(torch, "save", slow_save)
    monkeypatch.setattr(train_gpt, "print_error", check)
    before_step(monkeypatch, 2, fail)
    assert train_gpt.main([*SIX_STEPS, *data, f"--log_dir={tmp_path}", "--run_id=g"]) == 2


def test_a_file_that_cannot_be_written_warns_once_until_one_can(tmp_path, capsys, monkeypatch):
    save = torch.save
    full = [True]

    def save_if_there_is_room(state, file):
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(state, file)
    monkeypatch.setattr(torch, "save", save_if_there_is_room)
    with train_gpt.Saver(tmp_path, enabled=True) as saver:
        for step, is_full in enumerate((True, True, False, True)):
            full[0] = is_full
            saver.save(f"checkpoint_{step:07d}.pt", dict(step=step))
            saver.wait()
            assert saver.failed == is_full
    warnings = capsys.readouterr().err.splitlines()
    assert ["checkpoint_0000000" in warnings[0], "checkpoint_0000003" in warnings[1]] == [True] * 2
    assert len(warnings) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_0000002.pt"]


def test_a_gradient_that_is_not_finite_stops_before_the_optimizers_and_names_its_batch(
        cut, capsys, monkeypatch):
    def poison(trainer):
        trainer.model.blocks[1].up.weight.register_hook(lambda grad: grad * float("nan"))
    folder = cut(4)
    before_step(monkeypatch, 5, poison)
    assert train_gpt.main([f"--resume={folder}", "--save_every=1"]) == 2
    error = capsys.readouterr().err
    assert re.search(r"the loss of step 6 is \d\.\d+: gradient of blocks.1.up.weight", error)
    assert ": gradient of blocks.1.up.weight is not finite; the batch is 5, number 5 of " in error
    assert "train_000000.bin; lower the rates" in error
    state = torch.load(train_gpt.checkpoints(folder)[-1], weights_only=True)
    assert state["step"] == 5
    assert all(x.isfinite().all() for x in state["model"].values() if isinstance(x, torch.Tensor))


# ---- files from elsewhere; tests/commands/test_fuzz.py mutates them ----

def test_a_model_is_no_checkpoint_to_resume_from(whole, capsys):
    assert train_gpt.main([f"--resume={whole.folder}/model.pt"]) == 2
    error = capsys.readouterr().err
    assert error == (f"error: {whole.folder}/model.pt cannot be loaded: it does not hold adam, "
                     "batch_index, clock_ms, log_sizes, muon, origins, rng_state; give another "
                     "checkpoint or model.pt\n")


def test_a_checkpoint_without_an_entry_is_refused(whole, tmp_path):
    trainer = None
    state = torch.load(whole.folder / "checkpoint_0000004.pt", weights_only=True)
    for name in state:
        path = tmp_path / "checkpoint_0000004.pt"
        torch.save({key: value for key, value in state.items() if key != name}, path)
        with pytest.raises(train_gpt.UserError, match=rf"\b{name}\b"):
            hp, resumed = prepare(f"--resume={path}")
            trainer = trainer or make_trainer(hp)
            train_gpt.restore(trainer, resumed.checkpoint)


def test_a_checkpoint_of_a_later_step_than_the_run_has_is_refused(cut, capsys):
    folder = cut(4)
    arguments = [f"--resume={folder}", "--num_steps=3", "--resume_anyway"]
    assert train_gpt.main(arguments) == 2
    assert "--num_steps=3: expected at least 4, the step of the checkpoint" in (
        capsys.readouterr().err)


@pytest.mark.parametrize("claim", [
    dict(num_layers=10**9), dict(model_dim=2**40), dict(mlp_ratio=10**12),
    dict(vocab_multiple=2**50),
    dict(sequence_tokens=2**50, batch_tokens=2**50, val_tokens=2**50, segment_tokens=0)],
    ids=lambda claim: next(iter(claim)))
def test_a_model_that_claims_to_be_huge_takes_no_memory(whole, tmp_path, claim):
    path = Path(shutil.copy(whole.folder / "model.pt", tmp_path / "huge.pt"))
    edit(path, lambda state: state["hyperparameters"].update(claim))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read_or_refused(lambda: train_gpt.load_model(str(path), train_gpt.Hardware()))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_a_folder_is_as_good_as_a_model(whole, cut, tmp_path):
    """Its model.pt, else its newest checkpoint."""
    def head(path):
        return train_gpt.load_model(str(path), train_gpt.Hardware()).head.weight
    assert torch.equal(head(whole.folder), whole.weights["head.weight"])
    folder = cut(4)
    newest = torch.load(folder / "checkpoint_0000004.pt", weights_only=True)["model"]
    assert torch.equal(head(folder), newest["head.weight"])
    assert torch.equal(head(folder / "checkpoint_0000004.pt"), newest["head.weight"])
    with pytest.raises(train_gpt.UserError, match="model.pt cannot be loaded: No such file"):
        head(tmp_path)
