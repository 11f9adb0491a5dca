"""replay: a real tiny run bit for bit, edited logs, other machines, historical logs."""

import re
import shutil

import helpers
import made_up_logs as made
import pytest


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A real run of train_gpt.py; two steps of it are validated."""
    folder = tmp_path_factory.mktemp("trained")
    data = helpers.make_data(folder)
    return helpers.trained([*helpers.TINY, *data, "--num_steps=3", "--val_every=2"], "first").folder


def replay(*arguments, folder, **options):
    """Its scratch folders go into the test's own."""
    (folder / "scratch").mkdir(exist_ok=True)
    return made.speedrun("replay", *arguments, TMPDIR=str(folder / "scratch"), **options)


def copied(run, folder):
    shutil.copytree(run, folder / "copy")
    return folder / "copy" / "log.txt"


def test_a_real_run_is_reproduced_bit_for_bit(trained, tmp_path):
    process = replay(trained / "log.txt", "--yes", folder=tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    assert (
        "reproduced bit for bit" in process.stdout
        and "it is the current train_gpt.py" in process.stdout
    )
    assert (
        re.search(r"sha256 [0-9a-f]{64}", process.stdout) and "--muon_rate=0.05" in process.stdout
    )
    (again,) = (tmp_path / "scratch").glob("replay_*/again/log.txt")
    assert not list(again.parent.glob("*.pt"))


def test_an_edited_loss_is_found_in_a_real_log(trained, tmp_path):
    """Also where metrics.jsonl was left as it was, and a replay of its first steps suffices."""
    log = copied(trained, tmp_path)
    text = log.read_text()
    line = re.search(r"^step:2/3 train_loss:(\S+)", text, re.MULTILINE)
    log.write_text(text[: line.start(1)] + "1.2345" + text[line.end(1) :])
    process = replay(log, "--yes", folder=tmp_path)
    assert (
        process.returncode == 1
        and "differs at step 2: train_loss 1.2345 in the log" in process.stdout
    )


@pytest.fixture
def stand_in(tmp_path):
    """Seeds of the stand-in, and the tool in a repository whose train_gpt.py it is."""
    tool = made.repository(tmp_path / "repo")
    folder = tmp_path / "repo/logs/x"
    assert (
        made.speedrun(
            "run", "--seeds=4", f"--folder={folder}", script=tool, cwd=tmp_path
        ).returncode
        == 0
    )
    return lambda *arguments: replay(
        *arguments, folder=tmp_path, script=tool
    ), folder / "seed_2/log.txt"


def edit(log, old, new):
    text = log.read_text()
    assert text.count(old) == 1
    log.write_text(text.replace(old, new))


def test_a_log_alone_is_reproduced_to_its_printed_digits(stand_in):
    start, log = stand_in
    process = start(log, "--yes")
    assert process.returncode == 0 and "to every printed digit" in process.stdout


@pytest.mark.parametrize("edited", ["val_loss", "train_loss"])
def test_edited_and_removed_lines(stand_in, edited):
    start, log = stand_in
    kind = edited
    text = log.read_text()
    found = re.findall(rf"^(step:(\d+)/10 {kind}:\S+ .*)$", text, re.MULTILINE)
    line, step = found[1]
    log.write_text(text.replace(line, re.sub(rf"{kind}:\S+", f"{kind}:1.0000", line)))
    process = start(log, "--yes")
    assert process.returncode == 1 and f"differs at step {step}: {kind} 1.0" in process.stdout
    log.write_text(text.replace(line + "\n", ""))
    process = start(log, "--yes")
    assert (
        process.returncode == 1
        and f"differs at step {step}: only the new run has a {kind}" in process.stdout
    )


def test_on_another_machine_within_the_spread_of_the_seeds(stand_in):
    start, log = stand_in
    edit(log, "(made up)", "(Intel)")
    process = start(log, "--yes")
    assert (
        process.returncode == 0
        and "reproduced: within" in process.stdout
        and "device_name Intel" in process.stdout
    )
    for other in log.parent.parent.glob("seed_*/log.txt"):
        other.write_text(re.sub(r"(step:10/10 val_loss:)1\.", r"\g<1>0.", other.read_text()))
    process = start(log, "--yes")
    assert (
        process.returncode == 1 and "differs at step 10: the new run is outside" in process.stdout
    )


def test_without_other_seeds_there_is_no_spread(stand_in):
    start, log = stand_in
    edit(log, "(made up)", "(Intel)")
    alone = made.write(log.parents[3] / "alone/run/log.txt", log.read_text())
    process = start(alone, "--yes")
    assert process.returncode == 1 and "a spread needs three other logs" in process.stdout


def test_the_first_steps_alone(stand_in):
    """The run is stopped, not shortened: its schedules stay those of the whole run."""
    start, log = stand_in
    edit(log, "pause_s: 0.0", "pause_s: 0.3")
    process = start(log, "--yes", "--steps=4")
    assert process.returncode == 0, process.stdout + process.stderr
    last_step = int(re.search(r"losses up to step (\d+)", process.stdout)[1])
    assert 3 <= last_step < 10 and "--num_steps=10" in process.stdout


def test_nothing_runs_unasked(stand_in, tmp_path):
    start, log = stand_in
    assert "nothing was run" in start(log).stderr.splitlines()[-1]
    assert not list((tmp_path / "scratch").iterdir())


def test_a_foreign_program_is_shown_first(stand_in, tmp_path):
    start, log = stand_in
    first_lines = "import os\nos.system('true')\n\x1b[31m"
    log.write_text(first_lines + log.read_text())
    process = start(log)
    assert "+os.system('true')" in process.stdout and "it is the current" not in process.stdout
    assert "\x1b" not in process.stdout
    assert start(log, f"--extract={tmp_path}/taken.py").returncode == 0
    assert (tmp_path / "taken.py").read_text().startswith(first_lines)
    assert "exists already" in made.one_sentence(start(log, f"--extract={tmp_path}/taken.py"))


def test_a_source_that_was_edited_is_named(stand_in):
    start, log = stand_in
    edit(log, "\ncommit: unknown", f"\nsource_sha256: {'0' * 64}")
    assert "the source was edited" in start(log).stdout


def test_a_zero_byte_in_an_option(stand_in):
    start, log = stand_in
    edit(log, "journal: ''", "journal: 'a\\x00b'")
    process = start(log, "--yes")
    assert (
        process.returncode == 2
        and "zero byte" in process.stderr
        and "Traceback" not in process.stderr
    )


@pytest.mark.parametrize("text", [b"", b"\0\1", b"no log at all\n"])
def test_what_is_no_log_is_not_run(tmp_path, text):
    made.one_sentence(replay(made.write(tmp_path / "log.txt", text), "--yes", folder=tmp_path))


# Historical logs ----------------------------------------------------------------------------------

WINDOW_IN_BLOCKS = made.HISTORICAL_SOURCE + "sliding_window_num_blocks = 3\n"


@pytest.mark.parametrize(
    ("steps", "folder", "source", "preset"),
    [
        (1875, "x", None, "2024-11-19"),
        (1530, "x", None, "2024-12-04"),
        (1490, "x", None, "2024-12-17"),
        (1390, "x", made.HISTORICAL_SOURCE, "2025-01-04"),
        (1480, "x", made.HISTORICAL_SOURCE, "2024-12-08"),
        (1480, "x", WINDOW_IN_BLOCKS, "2024-12-10"),
        (1480, "2024-12-08_UNet", None, "2024-12-08"),
        (1480, "2024-12-10_MFU", None, "2024-12-10"),
        (1480, "x", None, None),
        (777, "x", None, None),
    ],
)
def test_a_historical_log_finds_its_preset(tmp_path, steps, folder, source, preset):
    from logs import read_log
    from replay import match_preset

    line = f"step:{steps}/{steps} val_loss:3.2790 train_time:1000ms step_avg:100.00ms\n"
    text = line if source is None else f"{source}\n{made.SEPARATOR}\n{line}"
    assert match_preset(read_log(made.write(tmp_path / folder / "0.txt", text))) == preset


def test_a_historical_log_is_not_run_but_its_preset_is(stand_in, tmp_path):
    start, _ = stand_in
    line = "step:0/1390 val_loss:10.8 train_time:0ms step_avg:nanms\n" + "".join(
        f"step:{step}/1390 val_loss:{9 - step / 250} train_time:{step}ms step_avg:1.00ms\n"
        for step in (500, 1000, 1390)
    )
    bomb = f"open({str(tmp_path / 'bomb')!r}, 'w')\n"
    log = made.write(tmp_path / "old.txt", f"{bomb}\n{made.SEPARATOR}\n{line}")
    trainer = tmp_path / "repo/train_gpt.py"  # the stand-in, which now knows presets
    trainer.write_text(trainer.read_text().replace('journal=""', 'journal="", preset=""'))
    process = start(log, "--yes", "-o", tmp_path / "overlay.png")
    assert process.returncode == 0, process.stdout + process.stderr
    assert (
        "--preset=2025-01-04 --preset=laptop" in process.stdout and not (tmp_path / "bomb").exists()
    )
    assert (tmp_path / "overlay.png").read_bytes().startswith(b"\x89PNG")
    log.write_text(log.read_text().replace("/1390", "/1391"))
    assert "match none of the dated presets" in made.one_sentence(start(log, "--yes"))
