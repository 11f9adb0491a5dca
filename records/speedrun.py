"""Records: run, check, compare, replay and draw them. Started as ./run.sh records COMMAND …

  run [--seeds=5] [--folder=DIR] [--script=FILE] [--name=value …]
        one run per seed, one after another; skips those already done; ends with the statistics of
        verify. --name=value are hyperparameters of the script, by default train_gpt.py
  table [LOG|DIR …] [--json] [--csv]
        a row per run; without arguments, the runs in logs/
  verify LOG|DIR … [--target=LOSS]
        is the mean of the final losses proven to be at or below the target (p < 0.01)? Exit 0 if so
  compare A B [--pairs=5] [--target=LOSS] [--options="--name=value …"]
  compare A B --until=decided [--minutes=60] …
        two configurations in turn on this machine: their differences with confidence intervals.
        A configuration is a script, a git revision, a log (its hyperparameters, with the source of
        this repository), each with or without options: "HEAD~3 --muon_rate=0.04"; or options of
        train_gpt.py alone. --options are for both
  replay LOG [--steps=N] [--yes] [--extract=FILE] [-o FILE.png]
        shows the program that a log holds, asks, runs it again and compares the curves
  plot [LOG|DIR …] [--x=time|tokens|steps] [--target=LOSS] [-o FILE.png|svg]
        loss curves into logs/plot.png; without arguments, of the latest run, finished or not.
        plot --history: record times by date
  new NAME LOG|DIR … [--change=TEXT] [--date=YYYY-MM-DD]
        makes records/YYYY-MM-DD_NAME of finished runs: README.md with statistics, logs, picture
  leaderboard [--check]
        rewrites the table in README.md from the folders of records/; --check says if it is stale

records/README.md has the rules.
"""

import csv
import difflib
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from logs import Run, UserError, each_log, latest_log, read_logs
from verdict import report, verify_runs

ROOT = Path(__file__).resolve().parent.parent


# The command line ---------------------------------------------------------------------------------


@dataclass
class Arguments:
    """What a command was given: plain words, its own options, and options for the trainer."""

    words: list[str]
    options: dict
    passed_on: list[str]


def parse(arguments: list[str], own: dict, others: str = "refuse") -> Arguments:
    """`own`: each option's default, whose type is the option's; None for a text, nan for a number.

    `others`: what to do with options that are not the command's own: refuse, pass on, or words.
    """
    words, passed_on = [], []
    options = dict(own)
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if argument == "-o" and "output" in own:
            if not waiting:
                raise UserError("-o: it has no value; write -o FILE.png")
            options["output"] = waiting.pop(0)
        elif not argument.startswith("-"):
            words.append(argument)
        else:
            name, equals, text = argument.removeprefix("--").partition("=")
            if name in own:
                options[name] = parse_option(name, text if equals else None, own[name])
            elif others == "pass on" and argument.startswith("--"):
                passed_on.append(argument)
            elif others == "words" and argument.startswith("--"):
                words.append(argument)
            else:
                nearest = difflib.get_close_matches(name, list(own), n=1, cutoff=0.0)
                remedy = f"; the nearest is --{nearest[0]}" if nearest else ""
                raise UserError(f"{argument}: this command has no such option{remedy}")
    return Arguments(words, options, passed_on)


def parse_option(name: str, text: str | None, default):
    if isinstance(default, bool):
        if text not in (None, "true", "false"):
            raise UserError(f"--{name}={text}: expected no value, true or false")
        return text != "false"
    if not text:
        raise UserError(f"--{name}: it has no value; write --{name}=…")
    if isinstance(default, (int, float)):
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or (isinstance(default, int) and (number < 1 or number % 1)):
            expected = "a whole number from 1" if isinstance(default, int) else "a number"
            raise UserError(f"--{name}={text}: expected {expected}")
        return type(default)(number)
    return text


def need_words(arguments: Arguments, least: int, most: float, what: str) -> None:
    if not least <= len(arguments.words) <= most:
        raise UserError(f"{len(arguments.words)} arguments: this command takes {what}")


def warn(sentence: str) -> None:
    print(f"warning: {sentence}", file=sys.stderr, flush=True)


def refuse_unreadable(sentence: str) -> None:
    raise UserError(sentence)


# table --------------------------------------------------------------------------------------------


def table_row(run: Run) -> dict:
    """Numbers as numbers; what the log does not say is None."""
    last = run.last_point
    step = last.step if last else 0
    loss = run.last_validation.val_loss if run.last_validation else None
    return {
        "date": run.date,
        "name": run.name,
        "steps": step,
        "of": run.total_steps,
        "tokens": run.batch_tokens * step if run.batch_tokens else None,
        "loss": loss if loss is None or math.isfinite(loss) else str(loss),  # JSON has no nan
        "train_s": run.train_time_ms / 1000 if run.train_time_ms is not None else None,
        "step_ms": run.step_time_ms,
        "hardware": run.hardware or None,
        "torch": run.environment.get("torch"),
        "seed": run.seed,
        "commit": run.commit or None,
        "path": str(run.path),
    }


def show_cell(name: str, row: dict) -> str:
    value = row[name]
    if value is None:
        return "–"
    if name == "steps":
        return f"{value}" if value == row["of"] else f"{value}/{row['of']}"
    if name == "commit":
        return value[:8] + ("+" if "dirty" in value else "")
    formats = {"tokens": "{:,}", "loss": "{:.4f}", "train_s": "{:.1f}", "step_ms": "{:.2f}"}
    return (
        formats[name].format(value)
        if name in formats and not isinstance(value, str)
        else str(value)
    )


def print_table(rows: list[dict]) -> None:
    headings = {
        "date": "date",
        "name": "name",
        "steps": "steps",
        "tokens": "tokens",
        "loss": "val loss",
        "train_s": "train s",
        "step_ms": "step ms",
        "hardware": "hardware",
        "torch": "torch",
        "seed": "seed",
        "commit": "commit",
    }
    numbers = {"steps", "tokens", "loss", "train_s", "step_ms", "seed"}
    cells = [list(headings.values())] + [
        [show_cell(name, row) for name in headings] for row in rows
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(headings))]
    for line in cells:
        columns = zip(headings, line, widths)
        print(
            "  ".join(
                text.rjust(width) if name in numbers else text.ljust(width)
                for name, text, width in columns
            ).rstrip()
        )


def table(arguments: list[str]) -> int:
    given = parse(arguments, {"json": False, "csv": False})
    rows = [table_row(run) for run in each_log(given.words or [ROOT / "logs"], warn)]
    if given.options["json"]:
        print(json.dumps(rows, indent=1))
    elif given.options["csv"] and rows:
        writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    elif rows:
        print_table(rows)
    return 0 if rows else 2


# verify, run, compare, replay, plot, new, leaderboard ---------------------------------------------


def verify(arguments: list[str]) -> int:
    given = parse(arguments, {"target": math.nan})
    need_words(given, 1, math.inf, "one or more logs or folders of logs")
    runs = read_logs(given.words, refuse_unreadable)
    verdict = verify_runs(runs, given.options["target"])
    print(report(verdict))
    return 0 if verdict.proven else 1


def run_seeds(arguments: list[str]) -> int:
    from trials import run_all_seeds

    given = parse(arguments, {"seeds": 5, "folder": None, "script": None}, "pass on")
    need_words(given, 0, 0, "options only")
    folder = run_all_seeds(given.options, given.passed_on)
    print(report(verify_runs(read_logs([folder], refuse_unreadable), math.nan)))
    return 0


def compare(arguments: list[str]) -> int:
    from compare import compare_configurations

    own = {"pairs": 5, "until": None, "minutes": 60.0, "options": None, "target": math.nan}
    given = parse(arguments, own, "words")  # options of the trainer are a configuration
    need_words(
        given,
        2,
        2,
        "two configurations, the options of one together in quotes, and "
        + ", ".join(f"--{name}" for name in own),
    )
    return compare_configurations(*given.words, given.options)


def replay(arguments: list[str]) -> int:
    from replay import replay_log

    given = parse(arguments, {"steps": 0, "yes": False, "extract": None, "output": None})
    need_words(given, 1, 1, "one log")
    return replay_log(given.words[0], given.options)


def plot(arguments: list[str]) -> int:
    from plots import plot_history, plot_runs

    given = parse(arguments, {"x": "time", "target": math.nan, "history": False, "output": None})
    name = "history.png" if given.options["history"] else "plot.png"
    output = Path(given.options["output"] or ROOT / "logs" / name)
    if not given.options["output"]:
        output.parent.mkdir(exist_ok=True)
    if given.options["history"]:
        plot_history(ROOT / "records", output)
    else:
        runs = read_logs(given.words or [latest_log(ROOT / "logs")], warn)
        plot_runs(runs, given.options["x"], given.options["target"], output)
    print(output)
    return 0


def new(arguments: list[str]) -> int:
    from folders import make_record

    given = parse(arguments, {"change": None, "date": None})
    need_words(given, 2, math.inf, "a name, then the record's logs or their folder")
    name, *paths = given.words
    print(make_record(name, read_logs(paths, refuse_unreadable), given.options))
    return 0


def leaderboard(arguments: list[str]) -> int:
    from folders import update_leaderboard

    given = parse(arguments, {"check": False})
    need_words(given, 0, 0, "no arguments")
    return update_leaderboard(ROOT / "README.md", ROOT / "records", given.options["check"])


COMMANDS = {
    "run": run_seeds,
    "table": table,
    "verify": verify,
    "compare": compare,
    "replay": replay,
    "plot": plot,
    "new": new,
    "leaderboard": leaderboard,
}


def main(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__.strip())
        return 0 if arguments else 2
    command, *rest = arguments
    try:
        if command not in COMMANDS:
            raise UserError(f"{command}: no such command; there are {', '.join(COMMANDS)}")
        return COMMANDS[command](rest)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a long table, `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("stopped; the same command resumes where it was", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
