"""new and leaderboard; plot and the AdamW baseline."""

import json
import math
import os
import re

import numpy as np
import pytest

import made_up_logs as made
from logs import read_log

FINALS = [1.95, 1.97, 1.96, 1.94, 1.955]


def write_runs(folder, shift=0.0, **options):
    for seed, final in enumerate(FINALS, 1):
        text = made.new_log(
            made.falling(final + shift), seed=seed, train_files="'data/enwik8/x_*.bin'", **options
        )
        made.write(folder / f"seed_{seed}/log.txt", text)
    return folder


@pytest.fixture
def tool(tmp_path):
    script = made.repository(tmp_path / "repo")
    return lambda *arguments: made.speedrun(*arguments, script=script, cwd=tmp_path / "repo")


@pytest.fixture
def record(tool, tmp_path):
    process = tool(
        "new",
        "Muon",
        write_runs(tmp_path / "logs/x"),
        "--date=2026-01-02",
        "--change=It is faster.",
    )
    assert process.returncode == 0, process.stderr
    return tmp_path / "repo/records/2026-01-02_Muon"


def test_a_record_folder_is_complete_and_small(record, tool, tmp_path):
    assert sorted(os.listdir(record)) == [
        "README.md",
        "curve.png",
        *(f"seed_{n}.txt" for n in range(1, 6)),
        "source.py",
    ]
    assert (record / "source.py").read_text() == "print('hello')\n"
    assert all("print('hello')" not in (record / f"seed_{n}.txt").read_text() for n in range(1, 6))
    readme = (record / "README.md").read_text()
    assert (
        "It is faster." in readme
        and "mean 1.9550" in readme
        and "reaches a validation loss of 2 " in readme
    )
    original = tool("verify", tmp_path / "logs/x")
    stored = tool("verify", record)
    assert stored.returncode == 0 and stored.stdout == original.stdout
    assert stored.stdout.strip() in readme


def test_a_stored_log_says_what_the_log_said(record, tmp_path):
    stored, original = read_log(record / "seed_3.txt"), read_log(tmp_path / "logs/x/seed_3/log.txt")
    for name in (
        "source",
        "source_sha256",
        "header",
        "body",
        "hyperparameters",
        "environment",
        "seed",
    ):
        assert getattr(stored, name) == getattr(original, name)
    assert stored.name == "2026-01-02_Muon/seed_3" and stored.date == "2026-01-02"


def test_a_stored_log_does_not_say_where_its_checkout_was(tool, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/train_gpt.py").touch()
    logs = write_runs(tmp_path / "there/logs/x", log_dir=f"'{tmp_path}/there/logs/x'")
    assert tool("new", "There", logs, "--date=2026-01-02").returncode == 0
    stored = (tmp_path / "repo/records/2026-01-02_There/seed_1.txt").read_text()
    assert "log_dir: 'logs/x'" in stored and str(tmp_path) not in stored


def test_a_stored_source_that_was_edited_is_not_replayed(record, tool):
    (record / "source.py").write_text("print('another')\n")
    assert "nothing to run" in made.one_sentence(tool("replay", record / "seed_1.txt", "--yes"))


def test_new_refuses(record, tool, tmp_path):
    runs = tmp_path / "logs/x"
    assert "exists already" in made.one_sentence(tool("new", "Muon", runs, "--date=2026-01-02"))
    assert "expected a name" in made.one_sentence(tool("new", "../../Muon", runs))
    assert "expected a name" in made.one_sentence(tool("new", "Muon", runs, "--date=../x"))
    mixed = made.write(
        tmp_path / "logs/y/log.txt", made.new_log(made.falling(1.9), seed=9, muon_rate=3)
    )
    assert "not the same experiment" in made.one_sentence(tool("new", "Mixed", runs, mixed))
    assert not [name for name in os.listdir(tmp_path / "repo/records") if "Mixed" in name]


def test_the_leaderboard(record, tool, tmp_path):
    slower = write_runs(tmp_path / "logs/slow", step_ms=200.0)
    worse = write_runs(tmp_path / "logs/worse", shift=0.5)
    assert tool("new", "Slow", slower, "--date=2025-12-31").returncode == 0
    assert tool("new", "Worse", worse, "--date=2026-01-03").returncode == 0
    readme = tmp_path / "repo/README.md"
    assert tool("leaderboard", "--check").returncode == 1
    assert tool("leaderboard").returncode == 0 and tool("leaderboard", "--check").returncode == 0
    text = readme.read_text()
    assert text.startswith("# Title\n<!-- leaderboard -->\n") and text.endswith(
        "<!-- /leaderboard -->\nEnd\n"
    )
    assert re.findall(r"\[(\w+)\]\(records/", text) == [
        "Muon",
        "Slow",
        "Worse",
    ]  # by time; unproven last
    assert (
        "| 1.0 | [Muon](records/2026-01-02_Muon) | 2026-01-02 | 1.9550 ± 0.0112 | 5 | 4.2e-04 |"
        in text
    )
    assert "target not proven" in text and "**laptop**, target 2" in text
    readme.write_text(text.replace("1.9550", "1.9000"))
    check = tool("leaderboard", "--check")
    assert check.returncode == 1 and "stale" in check.stdout
    assert "1.9000" in readme.read_text()  # a check changes nothing


def test_statistics_in_a_records_readme_are_the_tools(record, tool):
    assert tool("leaderboard").returncode == 0
    readme = record / "README.md"
    readme.write_text(readme.read_text().replace("mean 1.9550", "mean 1.8550"))
    assert tool("leaderboard", "--check").returncode == 1
    assert tool("leaderboard").returncode == 0 and "mean 1.9550" in readme.read_text()


def test_a_readme_without_markers(record, tool, tmp_path):
    (tmp_path / "repo/README.md").write_text("# Title\n")
    assert "<!-- leaderboard -->" in made.one_sentence(tool("leaderboard"))


def test_the_leaderboard_of_this_repository_is_fresh():
    if "<!-- leaderboard -->" not in (made.ROOT / "README.md").read_text(encoding="utf-8"):
        pytest.skip("README.md has no leaderboard yet")
    process = made.speedrun("leaderboard", "--check")
    assert process.returncode == 0, process.stdout + process.stderr


# plot ---------------------------------------------------------------------------------------------


def pixels(path):
    from matplotlib.image import imread

    return imread(path)


def test_a_picture_can_be_read_on_white_and_on_black(tmp_path):
    """Transparent but for its ink, every opaque colour of which stands out from both
    backgrounds."""
    assert (
        made.in_process(
            "plot", write_runs(tmp_path / "logs/x"), "-o", tmp_path / "a.png"
        ).returncode
        == 0
    )
    image = pixels(tmp_path / "a.png")
    assert image[..., 3].mean() < 0.3 and image[0, 0, 3] == 0
    linear = np.where(image <= 0.04045, image / 12.92, ((image + 0.055) / 1.055) ** 2.4)[..., :3]
    luminance = linear @ [0.2126, 0.7152, 0.0722]
    ink = luminance[image[..., 3] > 0.99]
    on_white, on_dark = 1.05 / (ink + 0.05), (ink + 0.05) / (0.0056 + 0.05)
    assert len(ink) > 1000 and on_white.min() > 2.8 and on_dark.min() > 2.8


def test_a_plot_without_arguments_draws_the_latest_run_even_while_it_goes_on(tool, tmp_path):
    assert "no run there yet" in made.one_sentence(tool("plot"))
    text = made.new_log(made.falling(2.0, steps=50))
    old = made.write(tmp_path / "repo/logs/old/log.txt", "\0")
    os.utime(old, (1, 1))
    made.write(tmp_path / "repo/logs/now/log.txt", text[: text.index("step:30/50") + 25])
    process = tool("plot")
    assert process.returncode == 0 and not process.stderr, process.stderr
    assert (tmp_path / "repo/logs/plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("x", ["time", "tokens", "steps"])
def test_the_axes(tmp_path, x):
    runs = write_runs(tmp_path / "logs/x")
    assert made.in_process("plot", runs, f"--x={x}", "-o", tmp_path / "a.svg").returncode == 0
    first = (tmp_path / "a.svg").read_bytes()
    assert b"<svg" in first
    made.in_process("plot", runs, f"--x={x}", "-o", tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_bytes() == first  # the same picture is the same file


def test_mistakes_in_a_plot(tmp_path):
    runs = write_runs(tmp_path / "logs/x")
    assert ".png or .svg" in made.one_sentence(
        made.in_process("plot", runs, "-o", tmp_path / "a.jpeg")
    )
    assert "expected one of time" in made.one_sentence(
        made.in_process("plot", runs, "--x=hours", "-o", tmp_path / "a.png")
    )
    assert "cannot be written" in made.one_sentence(
        made.in_process("plot", runs, "-o", tmp_path / "nowhere/a.png")
    )
    nothing = made.write(
        tmp_path / "n/log.txt", "step:1/2 train_loss:nan train_time:1ms step_avg:1.00ms\n"
    )
    assert "no loss" in made.one_sentence(
        made.in_process("plot", nothing, "-o", tmp_path / "a.png")
    )


def test_a_crossing_lies_between_the_validations_around_it():
    from plots import crossing

    assert (
        crossing([(0, 5.0), (10, 3.0), (20, 2.0)], 2.5) == 15
        and crossing([(0, 5.0), (10, 3.0)], 2.5) is None
    )


def test_the_history_has_the_published_records_and_ours(record, tool, tmp_path):
    from plots import read_history

    rows = read_history(tmp_path / "repo/records")
    assert [row["seconds"] for row in rows if row["name"] == "Muon"] == [1.0] and len(rows) == 13
    assert tool("plot", "--history", "-o", tmp_path / "h.png").returncode == 0


# The AdamW baseline -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("baseline")
    random = np.random.default_rng(0)
    for name in ("train", "val"):
        header = np.zeros(256, "<i4")
        tokens = (np.cumsum(random.integers(1, 4, 20_000)) % 256).astype("<u2")
        header[:3] = 20240520, 1, len(tokens)
        (folder / f"{name}_0.bin").write_bytes(header.tobytes() + tokens.tobytes())
    options = [
        f"--train_files={folder}/train_*.bin",
        f"--val_files={folder}/val_*.bin",
        "--num_steps=25",
        "--warmup_steps=5",
        "--val_tokens=8192",
        "--val_start=8192",
        "--val_every=20",
        f"--log_dir={folder}/logs",
    ]
    process = made.speedrun(*options, "--run_id=first", script=made.RECORDS / "baseline.py")
    assert process.returncode == 0, process.stderr
    return folder / "logs/first"


def test_the_baseline_learns_and_is_logged_like_the_trainer(baseline):
    run = read_log(baseline)
    assert (
        run.finished
        and run.hyperparameters["num_steps"] == 25
        and run.environment["world_size"] == "1"
    )
    losses = [loss for _, loss, _ in run.curve("val_loss")]
    assert losses[0] == pytest.approx(math.log(257), abs=0.3) and losses[-1] < losses[0] - 0.5
    assert run.source_sha256 == run.header_line("source_sha256") and len(run.shards) == 2
    lines = [json.loads(line) for line in (baseline / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["start"] and lines[0]["hyperparameters"]["rate"] == 1e-3 and lines[-1]["end"]
    assert lines[-1]["val_loss"] == pytest.approx(run.final_loss, abs=5e-5)


def test_the_baseline_is_the_recipe():
    import baseline as script
    import torch

    hp = script.Hyperparameters()
    assert (hp.num_layers, hp.model_dim, hp.num_heads, hp.sequence_tokens, hp.batch_tokens) == (
        4,
        128,
        4,
        64,
        768,
    )
    assert script.rate_at(hp, 99) < script.rate_at(hp, 100) == pytest.approx(1e-3)
    assert script.rate_at(hp, 2000) == pytest.approx(1e-4) and script.rate_at(
        hp, 1050
    ) == pytest.approx(5.5e-4)
    torch.manual_seed(0)
    model = script.GPT(hp)
    assert (
        sum(p.numel() for p in model.parameters())
        == 257 * 128 + 64 * 128 + 4 * (12 * 128**2 + 2 * 128) + 128
    )
    tokens = torch.randint(257, (2, 64))
    inputs = tokens.clone()
    inputs[:, 40:] = 0  # what comes later must not matter
    logits = []
    for given in (tokens, inputs):
        losses = []
        for end in (10, 40):
            losses.append(model(given[:, :end], tokens[:, :end]).item())
        logits.append(losses)
    assert logits[0] == logits[1]


def test_the_baseline_validates_on_the_bytes_of_the_trainer():
    """The val_tokens targets after token val_start, each once."""
    import baseline as script
    import torch

    hp = script.Hyperparameters(val_tokens=640, val_start=128)
    seen = []

    def model(inputs, targets):
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        seen.extend(targets.flatten().tolist())
        return targets.double().mean()

    loss = script.evaluate(hp, model, np.arange(1000, dtype=np.uint16))
    assert seen == list(range(129, 769)) and loss == pytest.approx(np.mean(seen))


def test_mistakes_with_the_baseline(tmp_path, monkeypatch):
    import baseline as script

    monkeypatch.chdir(tmp_path)
    for option, said in (
        ("--num_step=3", "expected --name=value"),
        ("--num_steps=3", "no token shards"),
        ("--num_steps=three", "expected a number"),
        ("--val_tokens=100", "a multiple of"),
    ):
        assert said in made.one_sentence(made.in_process(option, main=script.main))
