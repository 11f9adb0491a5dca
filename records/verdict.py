"""Is it a record? The statistics of runs that must be the same but for their seeds."""

import hashlib
import math
from dataclasses import dataclass

from logs import Run, UserError, differences
from stats import TTest, mean, runs_needed, standard_deviation, t_test_below

ALPHA = 0.01  # a record is proven below this p


@dataclass
class Verdict:
    runs: list[Run]
    target: float
    losses: list[float]
    times_s: list[float]  # training time of each run
    to_target_s: list[float]  # of those that validated along the way: when they reached the target
    test: TTest
    source_known: bool

    @property
    def proven(self) -> bool:
        return self.test.p < ALPHA and self.source_known


def verify_runs(runs: list[Run], target: float) -> Verdict:
    """Raises UserError, naming what differs, unless all are finished runs of one configuration."""
    if not runs:
        raise UserError("no runs to verify")
    for run in runs:
        if not run.finished:
            step = run.last_point.step if run.last_point else 0
            raise UserError(
                f"{run.name}: not finished: at step {step} of {run.total_steps}, or without its "
                "last validation; finish it or leave it out"
            )
        if not math.isfinite(run.final_loss):
            raise UserError(
                f"{run.name}: its final loss is {run.final_loss}; a run that failed cannot be "
                "part of a record"
            )
    if found := differences(runs):
        more = f"; and {len(found) - 3} more differences" if len(found) > 3 else ""
        raise UserError(f"these runs are not the same experiment: {'; '.join(found[:3])}{more}")
    refuse_repeated(runs)
    if math.isnan(target):
        target = runs[0].target
    losses = [run.final_loss for run in runs]
    times = [run.train_time_ms / 1000 for run in runs if run.train_time_ms is not None]
    reached = [run.time_to(target) for run in runs if len(run.curve("val_loss")) > 1]
    return Verdict(
        runs,
        target,
        losses,
        times,
        [ms / 1000 for ms in reached if ms is not None],
        t_test_below(losses, target),
        all(run.source_sha256 for run in runs),
    )


def refuse_repeated(runs: list[Run]) -> None:
    """The same run twice would count as two."""
    seen = {}
    for run in runs:
        keys = [("log", hashlib.sha256(run.body).hexdigest())]
        if run.seed is not None:
            keys.append(("seed", run.seed))
        for key in keys:
            if key in seen:
                what = f"seed {run.seed}" if key[0] == "seed" else "contents"
                raise UserError(
                    f"{seen[key].name} and {run.name} have the same {what}; leave one of them out"
                )
            seen[key] = run


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def p_text(p: float) -> str:
    return f"{p:.4f}" if p >= 0.001 else f"{p:.1e}"


def spread(values: list[float], digits: int, unit: str = "") -> str:
    deviation = standard_deviation(values)
    shown = "unknown" if math.isnan(deviation) else f"{deviation:.{digits}f}{unit}"
    return (
        f"mean {mean(values):.{digits}f}{unit}, standard deviation {shown}, "
        f"{min(values):.{digits}f} to {max(values):.{digits}f}"
    )


def conclusion(verdict: Verdict) -> str:
    test, target = verdict.test, verdict.target
    if verdict.proven:
        return f"proven: the mean is at or below {target:g} (p < {ALPHA})"
    if test.p < ALPHA:
        return "not proven: the logs do not hold their source, so nothing shows that it is the same"
    if test.mean >= target:
        above = test.mean - target
        return f"not proven: the mean is {above:.4f} above {target:g}; more runs will not help"
    if test.number < 2:
        return "not proven: one run has no spread; make at least two more"
    needed = runs_needed((target - test.mean) / test.deviation, ALPHA)
    if needed is None:
        return "not proven, and at this spread more than 10,000 runs would be needed"
    more = max(1, needed - test.number)
    return (
        f"not proven yet: at this mean and spread {counted(more, 'more run')} would "
        "decide it with a chance of 90 %"
    )


def report(verdict: Verdict) -> str:
    first, test = verdict.runs[0], verdict.test
    seeds = [str(run.seed) for run in verdict.runs if run.seed is not None]
    about = [
        f"source {first.source_sha256[:12] if first.source_sha256 else 'unknown'}",
        first.hardware or "hardware unknown",
        f"PyTorch {first.environment.get('torch', 'unknown')}",
    ]
    if seeds:
        about.insert(0, f"seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}")
    lines = [
        f"{counted(len(verdict.runs), 'run')} of {first.total_steps} steps: {'; '.join(about)}",
        f"validation loss: {spread(verdict.losses, 4)}",
    ]
    if verdict.times_s:
        lines.append(f"training time:   {spread(verdict.times_s, 1, ' s')}")
    if verdict.to_target_s:
        lines.append(
            f"time to {verdict.target:g}: {spread(verdict.to_target_s, 1, ' s')}, reached by "
            f"{len(verdict.to_target_s)} of {len(verdict.runs)}"
        )
    if test.number > 1:
        lines.append(
            f"one-sided t-test that the mean is at or below {verdict.target:g}: t = {test.t:.2f}, "
            f"p = {p_text(test.p)}"
        )
    return "\n".join([*lines, conclusion(verdict)])
