"""Run a log's program again and compare the curves.

A log is a program from somewhere else: it is shown first. A historical log, whose source needs
eight H100s and other packages, is not run: the preset that repeats its system is, with this
repository's own train_gpt.py, and the published curve is drawn above the new one.
"""

import difflib
import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from logs import Run, UserError, clean, find_logs, read_log
from stats import mean, standard_deviation, student_quantile
from trials import ROOT, TRAINER, Progress, options_of, result_text, run_once

SHOWN_DIFF = 60  # lines
LONGEST_DIFF = 20_000  # lines of a source; longer ones are not compared line by line
SAME_MACHINE = ("device", "device_name", "torch", "threads", "world_size", "modes")


def ask(question: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise UserError(
            "nothing was run: nobody is there to answer; give --yes if you trust this program"
        )
    if input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
        raise UserError("nothing was run")


def show_program(run: Run, options: list[str]) -> None:
    """What is about to run: hash, difference from the current file, options."""
    current = TRAINER.read_bytes()
    print(
        f"the program in {clean(str(run.path))}: {len(run.source):,} bytes, sha256 "
        f"{run.source_sha256}"
    )
    named = run.header_line("source_sha256")
    if named and re.fullmatch("[0-9a-f]{64}", named) and named != run.source_sha256:
        print(
            f"WARNING: its log was made by another program, sha256 {named}: the source was edited "
            "since"
        )
    if run.source == current:
        print("it is the current train_gpt.py")
    else:
        show_diff(
            current.decode(errors="replace").splitlines(),
            run.source.decode(errors="replace").splitlines(),
        )
    print(f"its options: {clean(shlex.join(options), 5000)}", flush=True)


def show_diff(current: list[str], other: list[str]) -> None:
    if max(len(current), len(other)) > LONGEST_DIFF:
        print(
            f"its {len(other):,} lines are too many to compare; --extract=FILE.py writes them to "
            "be read"
        )
        return
    lines = list(
        difflib.unified_diff(
            current, other, "train_gpt.py here", "train_gpt.py in the log", lineterm="", n=1
        )
    )
    for line in lines[:SHOWN_DIFF]:
        print(
            "  "
            + "".join(character if character.isprintable() else " " for character in line[:200])
        )
    if len(lines) > SHOWN_DIFF:
        print(
            f"  … and {len(lines) - SHOWN_DIFF:,} more lines; --extract=FILE.py writes the whole "
            "source"
        )


def extract(run: Run, target: Path) -> int:
    if run.source is None:
        raise UserError(f"{run.name}: its source is not in the log, nor beside it")
    if target.exists():
        raise UserError(f"--extract={target}: exists already; give another name")
    target.write_bytes(run.source)
    print(f"{target}: {len(run.source):,} bytes, sha256 {run.source_sha256}")
    return 0


def replay_log(path: str, given: dict) -> int:
    run = read_log(path)
    if given["extract"]:
        return extract(run, Path(given["extract"]))
    if not run.hyperparameters:
        return replay_historical(run, given)
    if run.source is None:
        raise UserError(
            f"{run.name}: its source is not in the log, nor beside it as source.py with the sha256 "
            "that the log names; there is nothing to run"
        )
    options = options_of(run)
    for name, value in (("seed", run.hyperparameters.get("seed")), ("save_model", False)):
        if name in run.hyperparameters:
            options.append(f"--{name}={value}")
    show_program(run, options)
    ask("run this program here?", given["yes"])
    scratch = Path(tempfile.mkdtemp(prefix="replay_"))
    script = scratch / "train_gpt.py"
    script.write_bytes(run.source)
    os.symlink(ROOT / "data", scratch / "data")  # for relative paths to shards
    again = run_in_scratch(
        script, options, scratch, given["steps"], run.environment.get("threads", "")
    )
    return compare_curves(run, again)


def run_in_scratch(
    script: Path,
    options: list[str],
    scratch: Path,
    steps: int,
    threads: str = "",
    cwd: Path | None = None,
) -> Run:
    progress = Progress(1)
    progress.start("replay")
    try:
        again = run_once(
            script, options, scratch / "again", progress.line, cwd or scratch, steps, threads
        )
    finally:
        progress.close()
    for weights in (scratch / "again").glob("*.pt"):
        weights.unlink()
    print(f"the new log: {again.path}")
    return again


# Is it the same curve? ----------------------------------------------------------------------------


def losses_of(run: Run, last_step: int) -> dict[tuple[int, str], float]:
    """(step, train_loss or val_loss) → the loss as the log prints it."""
    found = {}
    for point in run.points:
        for kind in ("train_loss", "val_loss"):
            value = getattr(point, kind)
            if value is not None and point.step <= last_step:
                found[point.step, kind] = value
    return found


def precise_losses(run: Run, last_step: int) -> dict[tuple[int, str], float]:
    """The same from metrics.jsonl, with every digit."""
    return {
        (values["step"], kind): values[kind]
        for values in run.metrics
        for kind in ("train_loss", "val_loss")
        if kind in values and values["step"] <= last_step
    }


def first_difference(old: dict, new: dict) -> str | None:
    for key in sorted(old.keys() | new.keys()):
        step, kind = key
        if key not in new or key not in old:
            where = "the log" if key in old else "the new run"
            return f"differs at step {step}: only {where} has a {kind} there"
        if repr(old[key]) != repr(new[key]):  # nan equals nan here
            return f"differs at step {step}: {kind} {old[key]} in the log, {new[key]} here"
    return None


def compare_curves(run: Run, again: Run) -> int:
    last_step = min(again.last_point.step, run.last_point.step)
    if last_step < again.total_steps:
        last_step -= 1  # a validation may be missing where the run was stopped
    old, new = losses_of(run, last_step), losses_of(again, last_step)
    if run.shards != again.shards and run.shards:
        print("note: the shards here are not those of the log")
    changed = [
        name for name in SAME_MACHINE if run.environment.get(name) != again.environment.get(name)
    ]
    if changed:
        what = ", ".join(
            f"{name} {run.environment.get(name, 'unknown')} → "
            f"{again.environment.get(name, 'unknown')}"
            for name in changed
        )
        print(f"not the machine of the log ({what}): compared within the spread of its seeds")
        return compare_within_spread(run, old, new)
    found = first_difference(old, new)
    precise_old, precise_new = precise_losses(run, last_step), precise_losses(again, last_step)
    exact = bool(precise_old and precise_new)
    if not found and exact:
        found = first_difference(precise_old, precise_new)
    if found:
        print(found)
        return 1
    digits = "bit for bit" if exact else "to every printed digit (no metrics.jsonl beside the log)"
    print(f"reproduced {digits}: {len(old)} losses up to step {last_step}")
    return 0


def siblings_of(run: Run) -> list[Run]:
    """The other logs of its record, from the folder around: the same program and length."""
    folder = run.path.parent if run.path.name != "log.txt" else run.path.parent.parent
    found = []
    for path in find_logs([folder]):
        try:
            other = read_log(path)
        except UserError:
            continue
        same = (other.source_sha256, other.total_steps) == (run.source_sha256, run.total_steps)
        if same and other.finished and not path.samefile(run.path):
            found.append(other)
    return found


def compare_within_spread(run: Run, old: dict, new: dict) -> int:
    """The log and the new run must both lie where 99 of 100 runs lie by the record's other logs."""
    common = sorted(old.keys() & new.keys())  # at one step, train_loss sorts before val_loss
    if not common:
        raise UserError(
            "the two runs have no step in common; replay without --steps, or with more of them"
        )
    key = common[-1]
    step, kind = key
    siblings = [losses_of(other, step) for other in siblings_of(run)]
    values = [losses[key] for losses in siblings if key in losses]
    print(f"step {step}: {kind} {old[key]:.4f} in the log, {new[key]:.4f} here")
    if len(values) < 3:
        print(f"no verdict: a spread needs three other logs of this program; {len(values)} there")
        return 1
    reach = student_quantile(0.995, len(values) - 1) * standard_deviation(values)
    reach *= (1 + 1 / len(values)) ** 0.5
    middle = mean(values)
    known = f"{middle:.4f} ± {reach:.4f}, where 99 % of runs lie by its {len(values)} other logs"
    for name, loss in (("the log", old[key]), ("the new run", new[key])):
        if not abs(loss - middle) <= reach:
            print(f"differs at step {step}: {name} is outside {known}")
            return 1
    print(f"reproduced: within {known}")
    return 0


# Historical logs ----------------------------------------------------------------------------------

# Number of steps → the preset that repeats the system; 1480 was used by two.
PRESET_BY_STEPS = {1875: "2024-11-19", 1530: "2024-12-04", 1490: "2024-12-17", 1390: "2025-01-04"}


def match_preset(run: Run) -> str | None:
    """The dated preset of a historical log: by its number of steps and its source, or its folder's
    date."""
    if preset := PRESET_BY_STEPS.get(run.total_steps):
        return preset
    if run.total_steps != 1480:
        return None
    if run.source is None:
        return run.date if run.date in ("2024-12-08", "2024-12-10") else None
    # The later one counts its window in blocks, the earlier one in tokens.
    counts_blocks = re.search(rb"window\w*_blocks|num_window_blocks", run.source)
    return "2024-12-10" if counts_blocks else "2024-12-08"


def replay_historical(run: Run, given: dict) -> int:
    preset = match_preset(run)
    if preset is None:
        raise UserError(
            f"{run.name}: no log of this repository's train_gpt.py, and its {run.total_steps} "
            "steps "
            "match none of the dated presets; --extract=FILE.py writes its source, if it holds one"
        )
    on_gpus = shutil.which("nvidia-smi") is not None
    options = [f"--preset={preset}"] + ([] if on_gpus else ["--preset=laptop"])
    where = "on FineWeb, as then" if on_gpus else "at laptop scale, on bytes of enwik8"
    print(
        f"{run.name} is a run of the system {preset}; {result_text(run)} on 8×H100\n"
        f"its own source is not run; instead, {where}: train_gpt.py {' '.join(options)}",
        flush=True,
    )
    ask("run this here?", given["yes"])
    scratch = Path(tempfile.mkdtemp(prefix="replay_"))
    again = run_in_scratch(TRAINER, options, scratch, given["steps"], cwd=ROOT)
    from plots import plot_overlay

    picture = Path(given["output"] or scratch / "overlay.png")
    plot_overlay(run, again, preset, same_data=on_gpus, output=picture)
    print(f"the picture: {picture}")
    return 0
