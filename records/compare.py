"""Two configurations in turn on one machine: A B, B A, A B, …, and what the pairs differ in.

Each run is a process of its own; the two of a pair have the same seed and follow each other, so
that a machine that gets slower or faster meets both alike. Finished runs are kept: the same command
resumes.
"""

import hashlib
import json
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from logs import Run, UserError
from stats import fixed_interval, mean, sequential_interval
from trials import ROOT, Configuration, Progress, finished_run, resolve, run_once, split_words

ERROR_RATE = 0.05  # chance that equal configurations get any wrong verdict, of all quantities


@dataclass
class Quantity:
    """One measurement of a run, and how two of them are compared."""

    name: str
    better: str  # what a smaller value is called
    worse: str
    ratio: bool  # compared as B/A; otherwise as B − A
    pairs: list[tuple[float, float]]
    missing: str = ""  # why there is no comparison

    @property
    def differences(self) -> list[float]:
        if self.ratio:
            return [math.log(b / a) for a, b in self.pairs]
        return [b - a for a, b in self.pairs]


def measure(pairs: list[tuple[Run, Run]], target: float) -> list[Quantity]:
    losses = [(a.final_loss, b.final_loss) for a, b in pairs]
    final_loss = Quantity("final loss", "lower", "higher", False, losses)
    if not all(math.isfinite(loss) for pair in losses for loss in pair):
        final_loss.missing = "not compared: a final loss is not finite"
    times = [(a.time_to(target), b.time_to(target)) for a, b in pairs]
    reached = [(a, b) for a, b in times if a and b]
    time_to_target = Quantity(f"time to {target:g}", "faster", "slower", True, reached)
    if len(reached) < len(pairs):  # to leave out the pairs that failed would favour who failed
        by_a, by_b = (len([pair for pair in times if pair[side]]) for side in (0, 1))
        time_to_target.missing = (
            f"not compared: reached by A in {by_a}, by B in {by_b} of {len(pairs)} runs"
        )
    both = [(a.step_time_ms, b.step_time_ms) for a, b in pairs]
    known = [(a, b) for a, b in both if a and b]
    step_time = Quantity("step time", "faster", "slower", True, known)
    if len(known) < len(pairs):
        step_time.missing = "not compared: not in the logs"
    return [final_loss, time_to_target, step_time]


def interval_of(quantity: Quantity, sequential: bool) -> tuple[float, float]:
    """Of the difference, or of the ratio's logarithm; the three quantities share the error rate."""
    if quantity.missing:
        return -math.inf, math.inf
    interval = sequential_interval if sequential else fixed_interval
    return interval(quantity.differences, ERROR_RATE / 3)


def decided(quantity: Quantity, sequential: bool) -> bool:
    low, high = interval_of(quantity, sequential)
    return low > 0 or high < 0


def verdict_of(quantity: Quantity, sequential: bool) -> str:
    if quantity.missing:
        return quantity.missing
    if not decided(quantity, sequential):
        return "no difference shown"
    smaller = interval_of(quantity, sequential)[1] < 0
    return f"B is {quantity.better if smaller else quantity.worse}"


def duration(ms: float) -> str:
    return f"{ms:.1f} ms" if ms < 10_000 else f"{ms / 1000:.1f} s"


def report_lines(quantities: list[Quantity], sequential: bool) -> list[str]:
    rows = [("", "A", "B", "B against A", "interval", "verdict")]
    for quantity in quantities:
        if quantity.missing:
            rows.append((quantity.name, "", "", "", "", quantity.missing))
            continue
        number = duration if quantity.ratio else "{:.4f}".format
        sides = [number(mean([pair[side] for pair in quantity.pairs])) for side in (0, 1)]
        middle = mean(quantity.differences)
        low, high = interval_of(quantity, sequential)
        change = f"× {math.exp(middle):.4f}" if quantity.ratio else f"{middle:+.4f}"
        if math.isinf(high):
            known = "unknown yet"
        elif quantity.ratio:
            known = f"{math.exp(low):.4f} to {math.exp(high):.4f}"
        else:
            known = f"{low:+.4f} to {high:+.4f}"
        rows.append((quantity.name, *sides, change, known, verdict_of(quantity, sequential)))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    ]


class Comparison:
    """The folder of a comparison: its runs, and how often its result was looked at."""

    def __init__(self, a: Configuration, b: Configuration, folder: Path):
        self.sides = {"A": a, "B": b}
        self.folder = folder
        self.looks = folder / "looks.json"

    def place(self, pair: int, side: str) -> Path:
        return self.folder / f"pair_{pair:03d}_{side}"

    def run(self, pair: int, progress: Progress) -> tuple[Run, Run]:
        """Both runs of a pair, made or already there; odd pairs begin with A, even ones with B."""
        runs = {}
        for side in "AB" if pair % 2 else "BA":
            progress.start(f"pair {pair} {side}")
            place = self.place(pair, side)
            run = finished_run(place)
            if run is None:
                shutil.rmtree(place, ignore_errors=True)
                wanted = self.sides[side]
                check_unchanged(wanted)
                run = run_once(
                    wanted.script, [*wanted.options, f"--seed={pair}"], place, progress.line
                )
                for weights in place.glob("*.pt"):
                    weights.unlink()
            if not run.finished:
                raise UserError(
                    f"{place}: stopped before its last validation; run the same command again"
                )
            progress.finish(run)
            runs[side] = run
        return runs["A"], runs["B"]

    def earlier_looks(self) -> list[int]:
        try:
            return [
                number for number in json.loads(self.looks.read_text()) if isinstance(number, int)
            ]
        except (OSError, ValueError, TypeError):
            return []

    def note_look(self, pairs: int) -> None:
        self.looks.write_text(json.dumps(sorted({*self.earlier_looks(), pairs})) + "\n")


def check_unchanged(wanted: Configuration) -> None:
    if hashlib.sha256(wanted.script.read_bytes()).hexdigest() != wanted.source_sha256:
        raise UserError(
            f"{wanted.script}: changed during the comparison; start the comparison again"
        )


def check_one_machine(pairs: list[tuple[Run, Run]], folder: Path) -> None:
    runs = [run for pair in pairs for run in pair]
    for name in ("device_name", "world_size", "torch"):
        values = {run.environment.get(name, "unknown") for run in runs}
        if len(values) > 1:
            raise UserError(
                f"{folder}: runs with different {name} ({', '.join(sorted(values))}); remove the "
                "folder and compare on one machine"
            )


def compare_configurations(first: str, second: str, given: dict) -> int:
    if given["until"] not in (None, "decided"):
        raise UserError(f"--until={given['until']}: expected decided, or --pairs=N")
    until_decided = given["until"] == "decided"
    everything = ROOT / "logs" / "compare"
    shared = split_words(given["options"] or "")
    a, b = (resolve(text, shared, everything / "sources") for text in (first, second))
    comparison = Comparison(a, b, everything / f"{a.key()}-{b.key()}")
    comparison.folder.mkdir(parents=True, exist_ok=True)
    print(f"A: {a}\nB: {b}\nruns: {comparison.folder}", flush=True)
    progress = Progress(2 * given["pairs"])
    try:
        if until_decided:
            pairs, target = run_until_decided(
                comparison, progress, given["minutes"], given["target"]
            )
        else:
            pairs = [comparison.run(pair, progress) for pair in range(1, given["pairs"] + 1)]
            target = target_of(pairs, given["target"])
    finally:
        progress.close()
    check_one_machine(pairs, comparison.folder)
    peeked = set(comparison.earlier_looks()) - {len(pairs)}
    sequential = until_decided or bool(peeked)
    comparison.note_look(len(pairs))
    kind = "valid at any number of pairs" if sequential else f"for {len(pairs)} pairs"
    print(f"\n{len(pairs)} pairs; intervals hold together with {1 - ERROR_RATE:.0%}, {kind}")
    if peeked and not until_decided:
        print(
            f"(wider than for a number fixed beforehand: this was looked at after {max(peeked)} "
            "pairs already)"
        )
    print("\n".join(report_lines(measure(pairs, target), sequential)))
    return 0


def target_of(pairs: list[tuple[Run, Run]], given: float) -> float:
    return pairs[0][0].target if math.isnan(given) else given


def run_until_decided(
    comparison: Comparison, progress: Progress, minutes: float, target: float
) -> tuple:
    """Pairs until an interval excludes zero, or the next pair would not fit into the minutes."""
    start = time.monotonic()
    pairs = []
    slowest = 0.0
    progress.terminal = False  # the number of runs is not known: plain lines
    while True:
        began = time.monotonic()
        pairs.append(comparison.run(len(pairs) + 1, progress))
        slowest = max(slowest, time.monotonic() - began)
        quantities = measure(pairs, target_of(pairs, target))
        if any(decided(quantity, sequential=True) for quantity in quantities):
            return pairs, target_of(pairs, target)
        if time.monotonic() - start + slowest > 60 * minutes:
            progress.say(f"{minutes:g} minutes are spent")
            return pairs, target_of(pairs, target)
