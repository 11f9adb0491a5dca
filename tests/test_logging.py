"""Logging: all that repeating a run takes; a run continues when a log cannot be written."""
import gzip
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import (
    ROOT,
    SCRIPT,
    SIX_STEPS,
    STEP_LINE,
    TINY,
    Result,
    before_step,
    make_data,
    run,
    send_signal,
    trained,
    write_manifest,
)

import train_gpt
from train_gpt import SEPARATOR, Hardware


def start_log(folder: Path, data: list[str], *options: str) -> Result:
    """The folder of a run that has written the beginning of its log, and no more."""
    hp = train_gpt.parse_command_line([*TINY, *data, *options])
    hardware = train_gpt.find_hardware(hp)
    train_gpt.Logger(train_gpt.Run(folder), hp, hardware, train_gpt.open_data(hp, hardware))
    return Result(folder)


# ---- what a log says ----

def test_the_logged_source_is_the_one_that_runs(data, tmp_path):
    """Not what is in the file when the log is opened: it may have been edited since."""
    hp = train_gpt.parse_command_line([*TINY, *data])
    run = train_gpt.Run(tmp_path / "run")
    assert run.source == Path(train_gpt.__file__).read_text()
    run.source = "print('as it was')\n"
    train_gpt.Logger(run, hp, Hardware(), train_gpt.open_data(hp, Hardware()))
    log = Result(tmp_path / "run").log
    assert log.startswith(f"print('as it was')\n\n{SEPARATOR}\n")
    assert hashlib.sha256(run.source.encode()).hexdigest() in log


def test_a_profile_is_a_trace_of_so_many_steps(data):
    """And does not change the training."""
    options = [*TINY, *data, "--num_steps=6"]
    plain = trained(options, "plain")
    profiled = trained([*options, "--profile=3"], "profiled")
    assert profiled.train_losses == plain.train_losses
    assert not (plain.folder / "trace.json.gz").exists()
    with gzip.open(profiled.folder / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    names = {event.get("name", "") for event in events}
    steps = {name for name in names if name.startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"}
    assert "aten::mm" in names and any("Adam" in name for name in names)


def test_the_log_of_a_run(data):
    result = trained([*TINY, *data, "--val_every=2"], "log")
    source, settings, lines = result.log.split(SEPARATOR + "\n")[-3:]
    assert result.log.startswith(SCRIPT.read_text())
    assert "\nnum_steps: 4  # command line\n" in settings and "\nPython " in settings
    steps = [STEP_LINE.match(line) for line in lines.splitlines() if line.startswith("step:")]
    assert all(steps), lines
    assert [(int(match[1]), match[3]) for match in steps] == [
        (0, "val_loss"), (1, "train_loss"), (2, "train_loss"), (2, "val_loss"), (3, "train_loss"),
        (4, "train_loss"), (4, "val_loss")]
    assert steps[0][6] == "nan"
    metrics = [metric for metric in result.metrics if "step" in metric]
    assert len(metrics) == len(steps)
    for match, metric in zip(steps, metrics):
        assert float(match[4]) == pytest.approx(metric[match[3]], abs=6e-5)
        assert metric["step"] == int(match[1])
        assert metric["tokens"] == metric["step"] * 1024
        assert metric["memory_mib"] > 0
        assert metric["times_ms"].keys() == {"warmup", "train", "val"}
    for expected in ("final validation loss", "bits per byte", "4,096 tokens", "clocks:", "sample:",
                     "log.txt", "model.pt"):
        assert expected in result.output, expected
    assert [line for line in result.output.splitlines() if STEP_LINE.match(line)] == [
        match[0] for match in steps]


def test_the_header_has_the_command_and_every_value_with_its_origin(data, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--preset=laptop", "--sample=two words"])
    result = start_log(tmp_path, data, "--muon_rate=0.03")
    start = result.metrics[0]
    assert start["start"] is True
    assert start["command"] == sys.argv
    assert "\ncommand: train_gpt.py --preset=laptop --sample=two words\n" in result.log
    assert start["hyperparameters"]["muon_rate"] == 0.03
    origins = dict(muon_rate="command line", target_loss="preset laptop", scalar_rate="default")
    for name, origin in origins.items():
        assert start["origins"][name] == origin
        assert f"\n{name}: {start['hyperparameters'][name]!r}  # {origin}\n" in result.log
    assert start["hyperparameters"].keys() == start["origins"].keys()
    assert f"PyTorch {torch.__version__}, " in start["environment"][0]


def test_the_header_has_the_commit_and_whether_the_files_differ_from_it(data, tmp_path,
                                                                       monkeypatch):
    def git(*words):
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *words]
        process = subprocess.run(command, cwd=repo, capture_output=True, text=True, check=True)
        return process.stdout.strip()

    def about(name):
        result = start_log(tmp_path / name, data)
        return result.metrics[0]["commit"], result.metrics[0]["dirty"], result.log

    repo = tmp_path / "repo"
    repo.mkdir()
    monkeypatch.setattr(train_gpt, "FOLDER", repo)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))  # whatever lies above it
    assert about("none")[:2] == (None, False)
    git("init", "--quiet")
    (repo / "train_gpt.py").write_text("pass\n")
    git("add", ".")
    git("commit", "--quiet", "--message=one")
    head = git("rev-parse", "HEAD")
    (repo / "logs").write_text("not part of the commit\n")
    commit, dirty, log = about("clean")
    assert (commit, dirty) == (head, False) and f"\ncommit: {head}\n" in log
    (repo / "train_gpt.py").write_text("edited\n")
    commit, dirty, log = about("dirty")
    assert (commit, dirty) == (head, True) and f"\ncommit: {head} (dirty)\n" in log


def test_the_header_has_the_sha256_of_each_shard_where_a_manifest_says_it(tmp_path):
    data = make_data(tmp_path)
    without = start_log(tmp_path / "without", data).metrics[0]["shards"]
    assert {entry["sha256"] for entry in without.values()} == {None}
    names = ("train_000000.bin", "train_000001.bin", "val_000000.bin")
    hashes = {name: f"{number}" * 64 for number, name in enumerate(names)}
    write_manifest(tmp_path, [dict(file=name, split=name.split("_")[0], sha256=sha256)
                              for name, sha256 in hashes.items()])
    result = start_log(tmp_path / "with", data)
    shards = result.metrics[0]["shards"]
    assert {Path(path).name: entry["sha256"] for path, entry in shards.items()} == hashes
    assert {entry["tokens"] for entry in shards.values()} == {20_000}
    for name, sha256 in hashes.items():
        assert f"\nshard: {tmp_path / name} 20,000 tokens sha256 {sha256}\n" in result.log


def test_the_driver_is_in_the_log_of_a_gpu(monkeypatch):
    answers = {("nvidia-smi", "--id=0"): "580.65.06"}  # a line for each GPU without --id
    monkeypatch.setattr(train_gpt, "command_output",
                        lambda *command: answers.get(command[:2], ""))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    gpu = Hardware(device=torch.device("cuda", 0))
    assert "driver 580.65.06, " in train_gpt.environment(gpu)[0]
    answers.clear()
    assert "driver , " in train_gpt.environment(gpu)[0]
    assert "driver None, " in train_gpt.environment(Hardware())[0]


def test_only_rank_0_writes(data, tmp_path, capsys):
    hp = train_gpt.parse_command_line([*TINY, *data])
    hardware = Hardware(rank=1, world_size=2)
    files = train_gpt.open_data(hp, hardware)
    log = train_gpt.Logger(train_gpt.Run(tmp_path / "run"), hp, hardware, files)
    log.write("a line")
    log.record(step=1)
    log.bar.close()
    assert not (tmp_path / "run").exists() and capsys.readouterr().out == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_of_a_run_that_was_stopped_is_above_its_last_line(data, tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    before_step(monkeypatch, 2, lambda trainer: signal.raise_signal(signal.SIGTERM))
    arguments = [*SIX_STEPS, *data, f"--log_dir={tmp_path}", "--run_id=stopped"]
    assert train_gpt.main(arguments) == 128 + signal.SIGTERM
    last_line = terminal.getvalue().splitlines()[-1]
    assert last_line == ("stopped by SIGTERM after step 3; resume with "
                         f"--resume={tmp_path / 'stopped'}")


def test_a_terminal_has_a_bar_and_the_log_every_line(data, tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert train_gpt.main([*SIX_STEPS, *data, f"--log_dir={tmp_path}", "--run_id=bar"]) == 0
    assert "| 6/6 [" in terminal.getvalue() and "tokens/s" in terminal.getvalue()
    assert " train_loss:" not in terminal.getvalue()
    assert "step:6/6 val_loss:" in terminal.getvalue()
    assert len(Result(tmp_path / "bar").steps) == 6 + 4


# ---- a log that cannot be written ----

def warnings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("warning: ")]


def test_a_full_disk_does_not_stop_training(data, tmp_path, capsys):
    """A disk with room for the log and one checkpoint, and then for nothing."""
    disk = tmp_path / "disk"
    disk.mkdir()
    arguments = [*SIX_STEPS, *data, "--keep_checkpoints=9"]
    assert train_gpt.main([*arguments, f"--log_dir={tmp_path}", "--run_id=measured"]) == 0
    size = (tmp_path / "measured" / "checkpoint_0000002.pt").stat().st_size
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(1.6 * size)}", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a small disk")
    capsys.readouterr()
    try:
        assert train_gpt.main([*arguments, f"--log_dir={disk}", "--run_id=full"]) == 0
        captured = capsys.readouterr()
        assert len(warnings(captured.err)) == 1
        assert "checkpoint_0000004.pt could not be written (No space left" in captured.err
        assert "step:6/6 val_loss" in captured.out
        kept = [path.name for path in (disk / "full").glob("checkpoint*")]
        assert kept == ["checkpoint_0000002.pt"]
        assert train_gpt.read_checkpoint(disk / "full" / kept[0])["step"] == 2
    finally:
        subprocess.run(["umount", disk])


@pytest.mark.parametrize("replaced", [False, True], ids=["gone", "a file in its place"])
def test_a_folder_that_is_gone_does_not_stop_training(data, tmp_path, capsys, monkeypatch,
                                                      replaced):
    def lose(trainer):
        shutil.rmtree(tmp_path / "gone")
        if replaced:  # then not even the temporary file of a checkpoint can be deleted
            (tmp_path / "gone").write_text("")
    before_step(monkeypatch, 3, lose)
    assert train_gpt.main([*SIX_STEPS, *data, f"--log_dir={tmp_path}", "--run_id=gone"]) == 0
    captured = capsys.readouterr()
    said = warnings(captured.err)
    for name in ("log.txt can no longer", "metrics.jsonl can no longer",
                 "checkpoint_0000004.pt could not"):
        assert len([line for line in said if name in line]) == 1, said
    assert len(said) == 3
    assert "step:6/6 val_loss" in captured.out


class FullFile(io.StringIO):
    """A file that the disk has no room for any more."""

    def write(self, text):
        raise OSError(28, "No space left on device")


def test_a_log_that_failed_is_dropped_with_one_warning_and_the_others_stay(data, tmp_path, capsys):
    hp = train_gpt.parse_command_line([*TINY, *data])
    files = train_gpt.open_data(hp, Hardware())
    log = train_gpt.Logger(train_gpt.Run(tmp_path), hp, Hardware(), files)
    log.sinks["log.txt"] = FullFile()
    for number in range(3):
        log.write(f"line {number}")
        log.record(step=number)
    captured = capsys.readouterr()
    assert captured.err == ("warning: log.txt can no longer be written (No space left on device)\n")
    assert [f"line {number}" in captured.out for number in range(3)] == [True] * 3
    assert [metric["step"] for metric in Result(tmp_path).metrics[1:]] == [0, 1, 2]


def test_a_log_that_failed_keeps_its_lines_when_the_run_is_resumed(data, tmp_path, monkeypatch):
    """The checkpoints of its last steps do not know how long that log is."""
    put = train_gpt.Logger.put

    def fail(self, name, text):
        if name == "log.txt" and text.startswith("step:3/"):
            self.sinks[name] = FullFile()
        put(self, name, text)
    arguments = [*SIX_STEPS, *data, f"--log_dir={tmp_path}"]
    with monkeypatch.context() as patched:
        patched.setattr(train_gpt.Logger, "put", fail)
        before_step(patched, 4, lambda trainer: send_signal())
        assert train_gpt.main([*arguments, "--run_id=failed"]) == 128 + signal.SIGTERM
    before = (tmp_path / "failed" / "log.txt").read_text()
    assert "step:2/6 train_loss" in before and "step:3/6" not in before
    assert train_gpt.main([f"--resume={tmp_path}/failed"]) == 0
    result = Result(tmp_path / "failed")
    assert result.log.startswith(before)
    assert result.steps[-1].startswith("step:6/6 val_loss")
    assert len(result.train_losses) == 6  # the other log has all of them


@pytest.mark.parametrize("both", [False, True], ids=["output", "output and errors"])
def test_a_full_disk_under_the_output_does_not_stop_training(data, tmp_path, both):
    """Where the user redirected it to."""
    command = [sys.executable, str(SCRIPT), *SIX_STEPS, *data, f"--log_dir={tmp_path}",
               "--run_id=f"]
    with open("/dev/full", "w") as full:
        process = subprocess.run(command, text=True, stdout=full,
                                 stderr=full if both else subprocess.PIPE)
    assert process.returncode == 0, process.stderr
    if not both:
        assert process.stderr == ("warning: standard output can no longer be written "
                                  "(No space left on device)\n")
    assert Result(tmp_path / "f").steps[-1].startswith("step:6/6 val_loss")
    assert (tmp_path / "f" / "model.pt").exists()


def test_a_reader_that_leaves_does_not_stop_training(data, tmp_path):
    """As in `./run.sh | head`."""
    command = [sys.executable, str(SCRIPT), *SIX_STEPS, *data, f"--log_dir={tmp_path}",
               "--run_id=p"]
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(600) == 0, errors
    assert errors == ("warning: standard output can no longer be written (Broken pipe)\n")
    assert Result(tmp_path / "p").steps[-1].startswith("step:6/6 val_loss")


def test_an_output_that_is_closed_from_the_start_is_no_obstacle(data, tmp_path):
    command = [sys.executable, str(SCRIPT), *SIX_STEPS, *data, f"--log_dir={tmp_path}",
               "--run_id=c"]
    process = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], capture_output=True,
                             text=True, cwd=ROOT, env=os.environ)
    assert process.returncode == 0, process.stderr
    assert "Traceback" not in process.stderr
    assert Result(tmp_path / "c").steps[-1].startswith("step:6/6 val_loss")


def test_a_terminal_that_goes_does_not_stop_training(data, tmp_path, capsys, monkeypatch):
    class Closing(Terminal):
        def write(self, text):
            if "tokens/s" in self.getvalue():  # on the bar, after the first step
                raise OSError(5, "Input/output error")
            return super().write(text)
    monkeypatch.setattr(sys, "stdout", Closing())
    assert train_gpt.main([*SIX_STEPS, *data, f"--log_dir={tmp_path}", "--run_id=t"]) == 0
    assert warnings(capsys.readouterr().err) == [
        "warning: standard output can no longer be written (Input/output error)"]
    assert Result(tmp_path / "t").steps[-1].startswith("step:6/6 val_loss")


def test_an_output_that_is_not_utf8_is_dropped_and_training_continues(data):
    process = run([*TINY, *data, "--run_id=ascii"], PYTHONIOENCODING="ascii")
    assert process.returncode == 0, process.stderr
    assert "warning: standard output can no longer be written ('ascii' codec" in process.stderr
    log_dir = Path(data[-1].removeprefix("--log_dir="))
    assert "final validation loss" in Result(log_dir / "ascii").log.rpartition(SEPARATOR)[2]
