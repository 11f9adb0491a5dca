"""verify: proven records, those that are not yet, and runs that do not belong together."""

import made_up_logs as made
import pytest

FINALS = [1.95, 1.97, 1.96, 1.94, 1.955]


def write_runs(folder, finals=FINALS, **each):
    for seed, final in enumerate(finals, 1):
        changed = {name: values[seed - 1] for name, values in each.items()}
        made.write(
            folder / f"seed_{seed}/log.txt",
            made.new_log(made.falling(final), **({"seed": seed} | changed)),
        )
    return folder


def test_a_proven_record(tmp_path):
    shown = made.in_process("verify", write_runs(tmp_path))
    assert shown.returncode == 0 and "proven" in shown.stdout and "mean 1.9550" in shown.stdout
    assert "standard deviation 0.0112" in shown.stdout and "seeds 1, 2, 3, 4, 5" in shown.stdout
    assert "p = 4.2e-04" in shown.stdout  # SciPy: ttest_1samp(FINALS, 2.0, alternative="less")


def test_a_target_that_is_not_reached(tmp_path):
    shown = made.in_process("verify", write_runs(tmp_path), "--target=1.9")
    assert shown.returncode == 1 and "0.0550 above 1.9" in shown.stdout


def test_how_many_more_runs(tmp_path):
    shown = made.in_process("verify", write_runs(tmp_path), "--target=1.96")
    assert shown.returncode == 1 and "more runs would decide it" in shown.stdout


@pytest.mark.parametrize(
    ("each", "named"),
    [
        (dict(source=["a\n", "a\n", "b\n", "a\n", "a\n"]), "source is"),
        (dict(sha=["ab" * 32, "cd" * 32, *["ab" * 32] * 3]), "shard enwik8_train_000000.bin is"),
        (dict(muon_rate=[0.05, 0.05, 0.05, 0.05, 0.04]), "muon_rate is 0.05 in"),
        (dict(cpu=["Intel", *["AMD"] * 4]), "device_name is Intel"),
        (dict(torch=["2.12.0", *["2.13.0"] * 4]), "torch is 2.12.0"),
        (dict(threads=[1, 2, 2, 2, 2]), "threads is 1"),
        (dict(seed=[1, 2, 3, 3, 4]), "same seed 3"),
    ],
)
def test_mixed_runs_are_refused_by_name(tmp_path, each, named):
    assert named in made.one_sentence(made.in_process("verify", write_runs(tmp_path, **each)))


def test_output_options_may_differ(tmp_path):
    write_runs(tmp_path, run_id=[repr(f"run{n}") for n in range(5)], log_every=[1, 2, 3, 4, 5])
    assert made.in_process("verify", tmp_path).returncode == 0


def test_unfinished_and_failed_runs_are_refused(tmp_path):
    write_runs(tmp_path)
    log = tmp_path / "seed_5/log.txt"
    whole = log.read_text()
    log.write_text(whole[: whole.index("step:10/10 val")])
    assert "not finished" in made.one_sentence(made.in_process("verify", tmp_path))
    log.write_text(whole.replace("step:10/10 val_loss:1.9550", "step:10/10 val_loss:nan"))
    assert "final loss is nan" in made.one_sentence(made.in_process("verify", tmp_path))


def test_logs_without_their_source_prove_nothing(tmp_path):
    for number, final in enumerate(FINALS):
        made.write(tmp_path / f"{number}.txt", made.step_lines(made.falling(final)))
    shown = made.in_process("verify", tmp_path, "--target=2")
    assert (
        shown.returncode == 1
        and "do not hold their source" in shown.stdout
        and "mean 1.9550" in shown.stdout
    )


def test_mistakes_on_the_command_line():
    assert "no such command" in made.one_sentence(made.in_process("verfy"))
    assert "--target" in made.one_sentence(made.in_process("verify", "x", "--traget=3"))
    assert "expected a number" in made.one_sentence(made.in_process("verify", "x", "--target=low"))
    assert "takes one or more logs" in made.one_sentence(made.in_process("verify"))
