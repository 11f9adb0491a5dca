"""Reading logs: every form there has been, and what is not a log."""

import json
import math
import os
import subprocess
import sys

import pytest

import made_up_logs as made
import logs
from logs import read_log


def reader(tmp_path, text, name="run/log.txt"):
    return read_log(made.write(tmp_path / name, text))


LOSSES = made.falling(1.75)


@pytest.mark.parametrize(
    "text",
    [
        made.new_log(LOSSES),
        made.old_log(LOSSES),
        made.historical_log(LOSSES),
        made.historical_log(LOSSES, train_loss=False, more="lr:0.5 "),
        made.step_lines(LOSSES),
        made.step_lines(LOSSES).rstrip("\n"),
        made.new_log(LOSSES).replace("\n", "\r\n"),
    ],
    ids=[
        "new",
        "old",
        "historical",
        "later historical",
        "step lines",
        "no last newline",
        "Windows",
    ],
)
def test_every_form_gives_the_same_result(tmp_path, text):
    run = reader(tmp_path, text)
    assert run.finished and run.final_loss == 1.75 and run.total_steps == 10
    assert run.train_time_ms == 1000 and run.step_time_ms == 100
    assert [(step, loss) for step, loss, _ in run.curve("val_loss")] == [
        (step, pytest.approx(LOSSES[step], abs=1e-4)) for step in range(0, 11, 2)
    ]


def test_what_our_log_says_of_the_run(tmp_path):
    source = "print('hello')\n# " + "=" * 100 + "\n"
    run = reader(tmp_path, made.new_log(LOSSES, source=source, seed=7, run_id=repr("a  # b")))
    assert (
        run.source.decode() == source and run.seed == 7 and run.commit == "5cd7dc9012345678 (dirty)"
    )
    assert (
        run.hyperparameters["value_layout"] == (0, None, 1)
        and run.hyperparameters["run_id"] == "a  # b"
    )
    assert "command" not in run.hyperparameters and "shard" not in run.hyperparameters
    assert (
        run.environment["device_name"] == "AMD EPYC 7B13 (64-core)"
        and run.environment["threads"] == "2"
    )
    assert run.environment["torch"] == "2.13.0+cpu" and run.target == 2.0
    assert run.shards == {"enwik8_train_000000.bin": f"90,011,146 tokens sha256 {'ab' * 32}"}


def test_what_a_historical_log_says_of_the_run(tmp_path):
    run = reader(
        tmp_path,
        made.historical_log(LOSSES),
        "2024-12-10_MFU/0a1b2c3d-0000-0000-0000-000000000000.txt",
    )
    assert (
        run.hardware == "8 × NVIDIA H100 80GB HBM3"
        and run.environment["torch"] == "2.6.0.dev20241231+cu126"
    )
    assert run.batch_tokens == 524_288 and run.hyperparameters == {} and run.target == 3.28
    assert run.name == "2024-12-10_MFU/0a1b2c3d" and run.date == "2024-12-10"


def test_a_clock_that_was_set_back_leaves_the_time_before_it_out(tmp_path):
    text = (
        "step:0/3 val_loss:9.0 train_time:0ms step_avg:nanms\nstep:1/3 train_loss:8.0 "
        "train_time:44119ms step_avg:nanms\n"
        "step:2/3 train_loss:7.0 train_time:117ms step_avg:nanms\nstep:3/3 val_loss:6.0 "
        "train_time:217ms step_avg:100.00ms\n"
    )
    run = reader(tmp_path, text)
    assert run.curve("train_loss") == [(1, 8.0, None), (2, 7.0, 117.0)]
    assert run.curve("val_loss") == [(0, 9.0, 0.0), (3, 6.0, 217.0)] and run.step_time_ms == 100


def test_time_to_target_lies_on_the_line_between_two_validations(tmp_path):
    run = reader(tmp_path, made.step_lines([5.0, 4.0, 3.0, 2.5, 2.0]))
    assert run.time_to(2.5) == pytest.approx(300) and run.time_to(4.0) == pytest.approx(100)
    assert (
        run.time_to(5.0) == 0
        and run.time_to(1.9) is None
        and run.time_to(2.0) == pytest.approx(400)
    )


def test_a_run_still_going_on(tmp_path):
    """A loss that was cut in two must not be read as a better one."""
    whole = made.new_log(LOSSES)
    cut = whole[: whole.rindex("val_loss:") + len("val_loss:1.7")]
    run = reader(tmp_path, cut)
    assert not run.finished and math.isnan(run.final_loss) and run.last_validation.step == 8
    for end in range(whole.index("step:"), len(whole), 7):
        try:
            part = reader(tmp_path, whole[:end])
        except logs.UserError:
            continue
        last = part.last_point
        assert last.val_loss is None or last.val_loss == pytest.approx(LOSSES[last.step], abs=1e-4)


def test_a_table_reads_no_curve(tmp_path, monkeypatch):
    """What makes a thousand logs of a megabyte take seconds."""
    import speedrun

    run = reader(tmp_path, made.new_log(made.falling(2.0, steps=1000)))
    monkeypatch.setattr(logs.Run, "points", property(lambda self: pytest.fail("parsed every step")))
    assert speedrun.table_row(run)["loss"] == 2.0


def test_a_table_imports_nothing_heavy(tmp_path):
    log = made.write(tmp_path / "log.txt", made.new_log(LOSSES))
    code = (
        "import sys, speedrun; assert speedrun.main(sys.argv[1:]) == 0; "
        "assert not {'torch', 'numpy', 'matplotlib', 'tqdm', 'train_gpt'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, "table", str(log)]
    process = subprocess.run(command, capture_output=True, text=True, cwd=made.RECORDS)
    assert process.returncode == 0, process.stderr


def test_the_table_and_its_machine_readable_forms(tmp_path):
    for seed in (1, 2):
        made.write(tmp_path / f"laptop/seed_{seed}/log.txt", made.new_log(LOSSES, seed=seed))
    plain = made.speedrun("table", tmp_path)
    assert plain.returncode == 0 and "laptop/seed_2" in plain.stdout and "1.7500" in plain.stdout
    rows = json.loads(made.speedrun("table", tmp_path, "--json").stdout)
    assert (
        [row["seed"] for row in rows] == [1, 2]
        and rows[0]["tokens"] == 40_960
        and rows[0]["train_s"] == 1.0
    )
    lines = made.speedrun("table", tmp_path, "--csv").stdout.splitlines()
    assert len(lines) == 3 and lines[0].startswith("date,name,steps")


HOSTILE = {
    "empty": b"",
    "binary": b"\x7fELF\0\0" + os.urandom(2000),
    "no separator": b"just some text\n" * 100,
    "only a source": b"print(1)\n\n" + b"=" * 100 + b"\nnum_steps: 3\n",
    "nearly a step": b"step:\nstep:1/\nstep:x/y val_loss:\n",
    "deep": b"\n" + b"=" * 100 + b"\nnum_steps: " + b"(" * 9000 + b"\n" + b"=" * 100 + b"\n",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_log_gets_one_line(tmp_path, kind):
    path = made.write(tmp_path / "log.txt", HOSTILE[kind])
    assert str(path) in made.one_sentence(made.in_process("table", path))
    assert str(path) in made.one_sentence(made.in_process("verify", path))


def test_a_huge_log_is_refused_unread(tmp_path):
    path = made.write(tmp_path / "log.txt", "step:")
    os.truncate(path, 2**40)  # sparse
    assert "MiB" in made.one_sentence(made.in_process("table", path))


def test_a_log_that_is_not_there(tmp_path):
    assert "no such log" in made.one_sentence(made.in_process("table", tmp_path / "nowhere.txt"))
    (tmp_path / "empty").mkdir()
    assert "no logs there" in made.one_sentence(made.in_process("table", tmp_path / "empty"))


def test_terminal_codes_are_neither_parsed_nor_shown(tmp_path):
    text = made.new_log(LOSSES, cpu="\x1b[31mred\x1b[0m\x07").replace(
        "step:10/10 val", "\x1b[1mstep:10/10 val"
    )
    made.write(tmp_path / "a\x1b[31mb/log.txt", text)
    shown = made.speedrun("table", tmp_path)
    assert (
        shown.returncode == 0
        and "1.7500" in shown.stdout
        and "\x1b" not in shown.stdout + shown.stderr
    )


def test_a_path_as_the_name_of_a_run_stays_text(tmp_path):
    run = reader(tmp_path, made.new_log(LOSSES, run_id="'../../../etc/passwd'"))
    assert run.name == "run" and not run.metrics


def test_a_sample_may_be_any_bytes(tmp_path):
    """A byte-level model that has learnt little prints zero bytes and halves of terminal codes."""
    text = made.new_log(LOSSES, source="x = 1\n" * 2000)
    run = reader(tmp_path, text.encode() + b"sample:\n\0\xff\x1b]\x1b[\r\n\x80\nlog: logs/x\n")
    assert run.finished and run.final_loss == 1.75 and len(run.points) == 16


def test_one_bad_log_among_good_ones_costs_one_line(tmp_path):
    made.write(tmp_path / "a/log.txt", made.new_log(LOSSES))
    made.write(tmp_path / "b/log.txt", b"\0")
    shown = made.speedrun("table", tmp_path)
    assert (
        shown.returncode == 0
        and len(shown.stdout.splitlines()) == 2
        and len(shown.stderr.splitlines()) == 1
    )


@pytest.mark.skipif(not made.EXAMPLES.is_dir(), reason="the example logs are not on this machine")
def test_the_real_historical_logs():
    runs = logs.read_logs(
        [made.EXAMPLES / name for name in os.listdir(made.EXAMPLES) if name[0] == "2"], pytest.fail
    )
    assert len(runs) == 12 and all(run.finished for run in runs)
    published = {"2024-11-19": (3.2783, 301.8), "2025-01-04": (3.2785, 204.3)}
    for run in runs:
        assert len(run.curve("val_loss")) > 10 and 3.27 < run.final_loss < 3.29
        if run.date in published:
            loss, seconds = published[run.date]
            assert run.final_loss == loss and run.train_time_ms / 1000 == pytest.approx(
                seconds, abs=0.05
            )
