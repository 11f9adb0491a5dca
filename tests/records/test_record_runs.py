"""run and compare, with a stand-in for the trainer whose clock is made up."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import made_up_logs as made
import pytest


@pytest.fixture
def tool(tmp_path):
    """tool(*arguments) in a repository of its own, with a journal of the runs that were started."""
    script = made.repository(tmp_path / "repo")

    def start(*arguments, **options):
        return made.speedrun(*arguments, script=script, cwd=tmp_path / "repo", **options)

    start.root, start.script, start.journal = tmp_path / "repo", script, tmp_path / "journal"
    return start


def started(tool) -> list[str]:
    return tool.journal.read_text().split() if tool.journal.exists() else []


def verdicts(process) -> dict[str, str]:
    assert process.returncode == 0, process.stdout + process.stderr
    rows = re.findall(
        r"^(final loss|time to \S+|step time) .*?  ((?:B is|no difference|not compared).*)$",
        process.stdout,
        re.MULTILINE,
    )
    return {name.split(" ")[0]: verdict for name, verdict in rows}


def test_run_makes_a_record_seed_by_seed(tool):
    process = tool("run", "--seeds=3", f"--journal={tool.journal}", "--num_steps=12")
    assert process.returncode == 0, process.stdout + process.stderr
    assert started(tool) == ["seed_1", "seed_2", "seed_3"]
    assert (
        "seeds 1, 2, 3" in process.stdout
        and "proven" in process.stdout
        and "of 12 steps" in process.stdout
    )
    assert (
        "seed 2: step:12/12 val_loss" in process.stdout and "\r" not in process.stdout
    )  # no terminal, no bar
    again = tool("run", "--seeds=4", f"--journal={tool.journal}", "--num_steps=12")
    assert again.returncode == 0 and started(tool)[3:] == ["seed_4"]


def test_run_resumes_after_a_failure(tool):
    arguments = ["run", "--seeds=3", f"--journal={tool.journal}", "--fail_at=1"]
    assert "the power went off" in made.one_sentence(tool(*arguments))
    assert tool(*arguments).returncode == 0
    assert started(tool) == ["seed_1", "seed_2", "seed_2", "seed_3"]


def test_run_discards_what_an_interrupted_run_left(tool):
    folder = tool.root / "logs/mine"
    arguments = ["run", "--seeds=2", f"--folder={folder}", f"--journal={tool.journal}"]
    assert tool(*arguments).returncode == 0
    log = folder / "seed_2/log.txt"
    log.write_text(log.read_text()[:-200])
    assert tool(*arguments).returncode == 0 and started(tool) == ["seed_1", "seed_2", "seed_2"]


def test_run_does_not_mix_configurations_in_a_folder(tool):
    folder = tool.root / "logs/mine"
    assert tool("run", "--seeds=2", f"--folder={folder}").returncode == 0
    assert "another options" in made.one_sentence(
        tool("run", "--seeds=2", f"--folder={folder}", "--step_ms=5")
    )
    (tool.root / "train_gpt.py").write_text((tool.root / "train_gpt.py").read_text() + "\n")
    assert "another source_sha256" in made.one_sentence(
        tool("run", "--seeds=2", f"--folder={folder}")
    )


def test_run_refuses_what_it_sets_itself(tool):
    assert "sets --seed" in made.one_sentence(tool("run", "--seed=3"))
    assert "no such hyperparameter" in made.one_sentence(tool("run", "--muon_rat=3"))


def test_a_stopped_tool_stops_its_run(tool, tmp_path):
    """SIGTERM to the tool: the trainer must not go on alone."""
    script = made.write(
        tmp_path / "sleeper.py",
        "import os, pathlib, sys, time\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\ntime.sleep(600)\n",
    )
    process = subprocess.Popen(
        [sys.executable, str(tool.script), "run", f"--script={script}"],
        cwd=tool.root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command resumes" in errors
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_compare_finds_nothing_between_equal_configurations(tool):
    """The machine gets two per cent slower with every run; pairs in turn do not care."""
    process = tool(
        "compare", f"--journal={tool.journal}", f"--journal={tool.journal} --step_ms=100.0"
    )
    assert verdicts(process) == dict.fromkeys(("final", "time", "step"), "no difference shown")
    order = [
        f"pair_{pair:03d}_{side}" for pair in range(1, 6) for side in ("AB" if pair % 2 else "BA")
    ]
    assert started(tool) == order


def test_compare_finds_a_planted_slow_down(tool):
    process = tool(
        "compare", "", "--step_ms=120", f"--options=--journal={tool.journal} --num_steps=20"
    )
    assert verdicts(process) == {
        "final": "no difference shown",
        "time": "B is slower",
        "step": "B is slower",
    }
    low, high = map(
        float,
        re.search(r"^step time .*× \S+ +(\S+) to (\S+)", process.stdout, re.MULTILINE).groups(),
    )
    assert 1.1 < low < 1.2 < high < 1.3


def test_compare_finds_a_lower_loss(tool):
    process = tool("compare", "", "--final_loss=1.4", f"--options=--journal={tool.journal}")
    assert verdicts(process) == {
        "final": "B is lower",
        "time": "B is faster",
        "step": "no difference shown",
    }


def test_compare_says_when_a_target_is_not_reached(tool):
    process = tool("compare", "--final_loss=1.9", "--final_loss=2.5", "--pairs=2")
    assert verdicts(process)["time"] == "not compared: reached by A in 2, by B in 0 of 2 runs"
    assert (
        verdicts(
            tool("compare", "--final_loss=1.9", "--final_loss=2.5", "--pairs=2", "--target=3")
        )["time"]
        != verdicts(process)["time"]
    )


def test_compare_resumes_and_keeps_no_weights(tool):
    arguments = [
        "compare",
        "",
        "--step_ms=120",
        "--pairs=2",
        f"--options=--journal={tool.journal} --fail_at=2",
    ]
    assert "the power went off" in made.one_sentence(tool(*arguments))
    assert tool(*arguments).returncode == 0
    assert started(tool) == ["pair_001_A", "pair_001_B", "pair_002_B", "pair_002_B", "pair_002_A"]
    assert not list(tool.root.rglob("*.pt"))


def test_compare_until_decided_stops_when_it_is(tool):
    process = tool(
        "compare", "", "--step_ms=140", "--until=decided", f"--options=--journal={tool.journal}"
    )
    assert (
        verdicts(process)["step"] == "B is slower"
        and "valid at any number of pairs" in process.stdout
    )
    assert 4 <= len(started(tool)) < 20


def test_compare_until_decided_stops_when_its_time_is_spent(tool):
    process = tool("compare", "", "--step_ms=100.0", "--until=decided", "--minutes=0.00001")
    assert "minutes are spent" in process.stdout and "no difference shown" in process.stdout


def test_looking_again_with_more_pairs_costs_width(tool):
    arguments = ["compare", f"--journal={tool.journal}", f"--journal={tool.journal} --step_ms=120"]
    first, second, third = (tool(*arguments, f"--pairs={pairs}").stdout for pairs in (5, 5, 6))
    assert "for 5 pairs" in first and "for 5 pairs" in second
    assert "valid at any number of pairs" in third and "looked at after 5 pairs already" in third


def test_a_configuration_may_be_a_script_a_revision_or_a_log(tool):
    def git(*words):
        subprocess.run(
            ["git", "-c", "user.name=x", "-c", "user.email=x@y", *words],
            cwd=tool.root,
            check=True,
            capture_output=True,
        )

    git("init")
    git("add", "-A")
    git("commit", "-m", "slow")
    trainer = tool.root / "train_gpt.py"
    slow, fast = trainer.read_text(), trainer.read_text().replace("step_ms=100.0", "step_ms=50.0")
    trainer.write_text(fast)
    made.write(tool.root / "other.py", slow)
    for other in ("HEAD", "other.py", "HEAD --step_ms=100"):
        process = tool("compare", other, "--step_ms=50", "--pairs=3")
        assert verdicts(process)["step"] == "B is faster", process.stdout
    assert tool("run", "--seeds=2", "--folder=logs/x", "--step_ms=50").returncode == 0
    process = tool("compare", "logs/x/seed_1/log.txt", "HEAD", "--pairs=3")
    assert verdicts(process)["step"] == "B is slower"
    made.write(tool.root / "logs/foreign/log.txt", made.new_log(made.falling(2.0)))
    assert "its source is neither" in made.one_sentence(tool("compare", "logs/foreign", "HEAD"))
    assert "neither a script, a log nor a git revision" in made.one_sentence(
        tool("compare", "nowhere", "HEAD")
    )


def test_runs_of_another_machine_are_not_mixed_in(tool):
    arguments = ["compare", "--num_steps=10", "--num_steps=10 --step_ms=120", "--pairs=2"]
    assert tool(*arguments).returncode == 0
    log = next(tool.root.glob("logs/compare/*/pair_001_A/log.txt"))
    log.write_text(log.read_text().replace("(made up)", "(another)"))
    assert "different device_name" in made.one_sentence(tool(*arguments))


def test_several_gpus_are_trained_on_through_torchrun(tmp_path, monkeypatch):
    import trials

    commands = []
    monkeypatch.setenv("NPROC", "8")
    monkeypatch.setattr(
        trials.subprocess, "Popen", lambda command, **_: commands.append(command) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        trials.run_once(tmp_path / "a.py", ["--x=1"], tmp_path / "logs/run", print)
    assert commands[0][1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=8"]
    assert commands[0][-3:] == ["--x=1", f"--log_dir={tmp_path}/logs", "--run_id=run"]


def test_the_number_of_gpus_is_the_trainers_own(tmp_path, monkeypatch):
    import trials

    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.setattr(trials.shutil, "which", lambda name: name)
    script = made.write(tmp_path / "a.py", "print('num_steps=3\\ngpus=4\\t# GPUs')")
    assert trials.number_of_processes(script, []) == 4
    monkeypatch.setattr(trials.shutil, "which", lambda name: None)
    assert trials.number_of_processes(script, []) == 1


def test_a_configuration_file_notes_what_the_runs_are(tool):
    assert tool("run", "--seeds=2", "--folder=logs/x", "--step_ms=50").returncode == 0
    assert json.loads((tool.root / "logs/x/configuration.json").read_text())["options"] == [
        "--step_ms=50"
    ]
