"""Pictures for a README: a transparent background, and colours that can be read on white and on
black."""

import csv
import datetime
import math
import re
import os
from pathlib import Path

import matplotlib
import matplotlib.dates
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from logs import Run, UserError, group_runs
from stats import mean

matplotlib.use("Agg")  # files only, no window
matplotlib.rcParams["svg.hashsalt"] = "train_gpt"  # the same picture gives the same file

INK = "#7c8087"  # as far from white as from GitHub's dark background
COLOURS = ("#3d86d8", "#e0712c", "#2f9e62", "#a565d6", "#d64550", "#1e9aa8", "#b58a12", "#d8579a")
HEIGHT = {"one": 4.3, "two": 5.6}  # inches, at a width of 8: the size of a README's column
AXES = {"time": "training time (s)", "tokens": "tokens", "steps": "steps"}


def new_figure(panels: int = 1):
    height = HEIGHT["one" if panels == 1 else "two"]
    figure, axes = plt.subplots(panels, 1, figsize=(8, height), squeeze=False, layout="constrained")
    figure.patch.set_alpha(0)
    for axis in axes[:, 0]:
        axis.patch.set_alpha(0)
        axis.grid(color=INK, alpha=0.25, linewidth=0.6)
        axis.tick_params(colors=INK, which="both", labelsize=10)
        axis.xaxis.label.set_color(INK)
        axis.yaxis.label.set_color(INK)
        for name, spine in axis.spines.items():
            spine.set_color(INK)
            spine.set_visible(name in ("left", "bottom"))
    return figure, list(axes[:, 0])


def save(figure, output: Path) -> None:
    """Under its final name only when it is whole."""
    if output.suffix not in (".png", ".svg"):
        plt.close(figure)
        raise UserError(f"-o {output}: expected a name that ends in .png or .svg")
    temporary = output.with_name(f".{output.stem}.tmp{output.suffix}")
    metadata = {"Date": None} if output.suffix == ".svg" else {}
    try:
        figure.savefig(temporary, dpi=200, metadata=metadata)
        os.replace(temporary, output)
    except OSError as error:
        raise UserError(f"-o {output}: cannot be written ({error.strerror})") from None
    finally:
        plt.close(figure)


def legend(axis, location: str = "upper right") -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, labelcolor=INK, fontsize=10, loc=location)


# Curves -------------------------------------------------------------------------------------------


def positions(run: Run, kind: str, x: str) -> dict[int, tuple[float, float]]:
    """step → (place on the x axis, loss); what has no place there is left out."""
    found = {}
    for step, loss, time_ms in run.curve(kind):
        place = step
        if x == "time":
            place = time_ms / 1000 if time_ms is not None else None
        elif x == "tokens":
            place = step * run.batch_tokens if run.batch_tokens else None
        if place is not None and math.isfinite(loss):
            found[step] = place, loss
    return found


def mean_curve(runs: list[Run], kind: str, x: str) -> list[tuple[float, float, float, float]]:
    """(place, mean, lowest, highest loss) at each step that all runs have."""
    curves = [positions(run, kind, x) for run in runs]
    common = set(curves[0]).intersection(*curves[1:])
    found = []
    for step in sorted(common):
        losses = [curve[step][1] for curve in curves]
        found.append(
            (mean([curve[step][0] for curve in curves]), mean(losses), min(losses), max(losses))
        )
    return found


def smoothed(curve: list[tuple], window: float = 0.04) -> list[tuple]:
    """Each point the average of those around it: a training loss is of one batch, and jumps."""
    half = round(len(curve) * window)
    found = []
    for number, (place, *_) in enumerate(curve):
        before = min(half, number)  # symmetric at the start, where the loss falls fast
        after = before if number < half else half
        around = curve[number - before : number + after + 1]
        found.append((place, *(mean([point[column] for point in around]) for column in (1, 2, 3))))
    return found


def group_label(runs: list[Run]) -> str:
    if len(runs) == 1:
        return runs[0].name
    names = [run.name.rpartition("/") for run in runs]
    folder = names[0][0]
    if not folder or any(name[0] != folder for name in names):
        folder = runs[0].path.parent.name
    name = re.sub(r"^\d{4}-\d\d-\d\d_", "", folder)  # of a record
    return f"{name} ({len(runs)} seeds)"


def draw_group(axis, runs: list[Run], x: str, colour: str, label: str) -> list[tuple]:
    """Validation as a line, or as one dot if there is but one; the training loss faintly. Returns a
    curve."""
    validation = mean_curve(runs, "val_loss", x)
    training = smoothed(mean_curve(runs, "train_loss", x))
    has_line = len(validation) > 2
    if training:
        places, losses, lowest, highest = zip(*training)
        axis.plot(
            places,
            losses,
            color=colour,
            linewidth=1.0 if has_line else 1.6,
            alpha=0.45 if has_line else 0.9,
            label=None if has_line else label,
        )
        if len(runs) > 1 and not has_line:
            axis.fill_between(places, lowest, highest, color=colour, alpha=0.2, linewidth=0)
    if has_line:
        places, losses, lowest, highest = zip(*validation)
        axis.plot(places, losses, color=colour, linewidth=1.9, label=label)
        if len(runs) > 1:
            axis.fill_between(places, lowest, highest, color=colour, alpha=0.25, linewidth=0)
    elif validation:
        place, loss, lowest, highest = validation[-1]
        axis.errorbar(
            [place],
            [loss],
            [[loss - lowest], [highest - loss]],
            color=colour,
            marker="o",
            markersize=6,
            capsize=3 if len(runs) > 1 else 0,
            linestyle="",
            label=None if training else label,
        )
    return validation if has_line or not training else training + validation


def mark_target(axis, groups: list[list[Run]], x: str, target: float, colours: list[str]) -> None:
    """The target line, and a diamond where the mean of each group reaches it."""
    axis.axhline(target, color=INK, linewidth=1.1, linestyle=(0, (5, 3)))
    axis.annotate(
        f"target {target:g}",
        (0, target),
        xycoords=("axes fraction", "data"),
        xytext=(4, 4),
        textcoords="offset points",
        color=INK,
        fontsize=10,
    )
    for runs, colour in zip(groups, colours):
        place = crossing(mean_curve(runs, "val_loss", x), target)
        if place is None:
            continue
        axis.plot(
            [place],
            [target],
            marker="D",
            markersize=7,
            color=colour,
            markeredgecolor=INK,
            clip_on=False,
            zorder=5,
        )
        axis.annotate(
            show_place(place, x),
            (place, target),
            xytext=(-4, -16),
            textcoords="offset points",
            color=colour,
            fontsize=10,
            ha="right",
            fontweight="bold",
        )


def crossing(curve: list[tuple], target: float) -> float | None:
    """Where a curve reaches the target, between the validations around it; None with but one
    validation."""
    for (place_before, before, *_), (place, loss, *_) in zip(curve, curve[1:]):
        if before > target >= loss:
            return place_before + (place - place_before) * (before - target) / (before - loss)
    return None


def show_place(place: float, x: str) -> str:
    if x == "time":
        return f"{place:.1f} s" if place < 100 else f"{place:.0f} s"
    return tick_text(place) if x == "tokens" else f"{place:,.0f}"


def tick_text(number: float, _=None) -> str:
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= unit:
            return f"{number / unit:.4g} {letter}"
    return f"{number:.4g}"


def zoom(axis, curves: list[list[tuple]], target: float | None) -> None:
    """Leaves out the fall of the first steps, which would flatten everything that matters."""
    curves = [curve for curve in curves if curve]
    if not curves:
        return
    end = max(point[0] for curve in curves for point in curve)
    late = [point for curve in curves for point in curve if point[0] >= 0.1 * end]
    low = min([point[2] for point in late] + ([target] if target is not None else []))
    high = max(point[1] for point in late)
    room = 0.05 * (high - low) or 0.1
    axis.set_ylim(low - 2 * room, high + room)
    axis.set_xlim(0, 1.04 * end or 1)


def plot_runs(runs: list[Run], x: str, target: float, output: Path) -> None:
    if x not in AXES:
        raise UserError(f"--x={x}: expected one of {', '.join(AXES)}")
    if x == "tokens" and not any(run.batch_tokens for run in runs):
        raise UserError(
            "--x=tokens: these logs do not say how many tokens a step takes; give --x=steps"
        )
    groups = group_runs(runs)
    if not groups:
        raise UserError("no runs to draw")
    targets = {run.target for run in runs}
    if math.isnan(target):
        target = targets.pop() if len(targets) == 1 else None
    figure, (axis,) = new_figure()
    colours = [COLOURS[number % len(COLOURS)] for number in range(len(groups))]
    curves = [
        draw_group(axis, group, x, colour, group_label(group))
        for group, colour in zip(groups, colours)
    ]
    if not any(curves):
        plt.close(figure)
        raise UserError(
            f"{runs[0].name}: no loss with a {x} beside it yet; wait, or give another --x"
        )
    if target is not None:
        mark_target(axis, groups, x, target, colours)
    zoom(axis, curves, target)
    axis.set_xlabel(AXES[x], fontsize=11)
    axis.set_ylabel("loss (nats per token); dots: validation", fontsize=11)
    if x == "tokens":
        axis.xaxis.set_major_formatter(FuncFormatter(tick_text))
    legend(axis, "best")
    save(figure, output)


def plot_overlay(published: Run, here: Run, preset: str, same_data: bool, output: Path) -> None:
    """A published curve and the same system run here.

    In one panel on the same data, else in one each: losses per byte and per token share no axis.
    """
    figure, axes = new_figure(1 if same_data else 2)
    labels = [
        f"{preset}, published (8×H100)",
        f"{preset}, here ({here.hardware or 'unknown hardware'})",
    ]
    for number, (run, label) in enumerate(zip((published, here), labels)):
        axis = axes[0] if same_data else axes[number]
        curve = draw_group(axis, [run], "steps", COLOURS[number], label)
        zoom(axis, [curve], None)
        axis.set_ylabel("loss (nats per token)", fontsize=11)
        legend(axis)
    axes[-1].set_xlabel("steps", fontsize=11)
    save(figure, output)


# Record times -------------------------------------------------------------------------------------


def read_history(records: Path) -> list[dict]:
    """The published records of history.csv and the proven ones of the record folders: date, track,
    name, seconds."""
    from folders import read_records

    with open(records / "history.csv", encoding="utf-8", newline="") as file:
        found = [row | {"seconds": float(row["seconds"])} for row in csv.DictReader(file)]
    for record in read_records(records):
        if record.verdict.proven and record.verdict.times_s:
            found.append(
                {
                    "date": record.date,
                    "track": f"{record.track}, target {record.verdict.target:g}",
                    "name": record.name,
                    "seconds": mean(record.verdict.times_s),
                }
            )
    return sorted(found, key=lambda row: row["date"])


def plot_history(records: Path, output: Path) -> None:
    """Record time against date on a logarithmic scale, a line through the best of each track."""
    rows = read_history(records)
    tracks = list(dict.fromkeys(row["track"] for row in rows))
    figure, (axis,) = new_figure()
    for colour, track in zip(COLOURS, tracks):
        own = [row for row in rows if row["track"] == track]
        best = [row for number, row in enumerate(own) if is_best_so_far(own, number)]
        dates = [datetime.date.fromisoformat(row["date"]) for row in own]
        seconds = [row["seconds"] for row in own]
        axis.plot(
            dates, seconds, linestyle="", marker="o", markersize=6.5, color=colour, alpha=0.35
        )
        best_dates = [datetime.date.fromisoformat(row["date"]) for row in best]
        best_seconds = [row["seconds"] for row in best]
        style = {"linestyle": ":", "linewidth": 1.4, "marker": "o", "markersize": 6.5}
        axis.plot(best_dates, best_seconds, color=colour, label=track, **style)
        label_points(axis, best_dates, best, colour)
    axis.set_yscale("log")
    low, high = min(row["seconds"] for row in rows), max(row["seconds"] for row in rows)
    axis.set_ylim(low / 1.6, high * 1.35)
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.xaxis.set_major_locator(matplotlib.dates.AutoDateLocator(maxticks=8))
    axis.xaxis.set_major_formatter(matplotlib.dates.DateFormatter("%Y-%m"))
    axis.margins(x=0.08)
    axis.set_ylabel("training time to the target (s)", fontsize=11)
    legend(axis)
    save(figure, output)


def is_best_so_far(rows: list[dict], number: int) -> bool:
    return all(rows[number]["seconds"] < earlier["seconds"] for earlier in rows[:number])


def label_points(axis, dates: list, rows: list[dict], colour: str) -> None:
    """The first and the last by name and time: those between stand too close for that."""
    for number in {0, len(rows) - 1}:
        row = rows[number]
        first = number == 0 and len(rows) > 1
        axis.annotate(
            f"{row['name']}\n{row['seconds']:.1f} s",
            (dates[number], row["seconds"]),
            xytext=(8, 4) if first else (-8, -5),
            textcoords="offset points",
            color=colour,
            fontsize=9,
            ha="left" if first else "right",
            va="bottom" if first else "top",
        )
