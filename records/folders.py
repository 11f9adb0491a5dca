"""Record folders: making one out of logs, and the leaderboard in README.md out of all of them.

records/YYYY-MM-DD_Name/ holds README.md, source.py (the program of all its logs, once), a log per
run without the source, and curve.png.
"""

import datetime
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from logs import SEPARATOR, SOURCE_FILE, Run, UserError, clean, read_logs
from stats import mean, standard_deviation
from verdict import Verdict, p_text, report, verify_runs

RECORDS = Path(__file__).resolve().parent
FOLDER_NAME = re.compile(r"(20\d\d-[01]\d-[0-3]\d)_([A-Za-z0-9][\w.-]{0,60})")


@dataclass
class Record:
    folder: Path
    date: str
    name: str
    track: str
    verdict: Verdict


def track_of(run: Run) -> str:
    """By the data: bytes of enwik8 are the laptop's, FineWeb is that of the H100s."""
    files = str(run.hyperparameters.get("train_files", "fineweb"))
    if "enwik8" in files:
        return "laptop"
    return "8×H100" if "fineweb" in files else "other data"


def read_record(folder: Path) -> Record:
    date, name = FOLDER_NAME.fullmatch(folder.name).groups()

    def refuse(sentence: str) -> None:
        raise UserError(sentence)

    runs = read_logs([folder], refuse)
    return Record(folder, date, name, track_of(runs[0]), verify_runs(runs, float("nan")))


def read_records(records: Path) -> list[Record]:
    return [
        read_record(folder)
        for folder in sorted(records.iterdir())
        if folder.is_dir() and FOLDER_NAME.fullmatch(folder.name)
    ]


def between(text: str, marker: str, contents: str, where: Path) -> str:
    """`text` with new contents between <!-- marker --> and <!-- /marker -->."""
    start, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise UserError(
            f"{where}: expected the lines {start} and {end} once each; add them where the text "
            "that "
            "this tool writes belongs"
        )
    before, _, rest = text.partition(start)
    return f"{before}{start}\n{contents}\n{end}{rest.partition(end)[2]}"


# new ----------------------------------------------------------------------------------------------


def without_source(run: Run) -> bytes:
    """The log with one line in place of its source, and paths relative to its checkout."""
    separator = b"\n" + SEPARATOR + b"\n"
    rest = run.path.read_bytes().replace(b"\r\n", b"\n").split(separator, 1)[1]
    for folder in run.path.resolve().parents:
        if (folder / "train_gpt.py").exists():
            rest = rest.replace(f"{folder}/".encode(), b"")
    return f"source: {SOURCE_FILE} sha256 {run.source_sha256}".encode() + separator + rest


def statistics_text(verdict: Verdict) -> str:
    return f"```\n{report(verdict)}\n```"


def make_record(name: str, runs: list[Run], given: dict) -> Path:
    date = given["date"] or datetime.date.today().isoformat()
    folder = RECORDS / f"{date}_{name}"
    if not FOLDER_NAME.fullmatch(folder.name):
        raise UserError(
            f"{clean(folder.name)}: expected a name of letters, digits, _ . - and a date like "
            "2025-01-04"
        )
    if folder.exists():
        raise UserError(f"{folder}: exists already; give another name")
    verdict = verify_runs(runs, float("nan"))
    if not verdict.source_known or runs[0].source is None:
        raise UserError(f"{runs[0].name}: its log does not hold its source, which a record needs")
    from plots import plot_runs

    with tempfile.TemporaryDirectory(dir=RECORDS, prefix=".new_") as temporary:
        unfinished = Path(temporary) / folder.name
        unfinished.mkdir()
        (unfinished / SOURCE_FILE).write_bytes(runs[0].source)
        for number, run in enumerate(runs, 1):
            own = f"seed_{run.seed}" if run.seed is not None else f"run_{number}"
            (unfinished / f"{own}.txt").write_bytes(without_source(run))
        plot_runs(runs, "time", verdict.target, unfinished / "curve.png")
        readme = record_readme(date, name, verdict, given["change"])
        (unfinished / "README.md").write_text(readme, encoding="utf-8")
        unfinished.rename(folder)
    return folder


def plain(text: str) -> str:
    """Text out of a log, without anything that Markdown or HTML would act on."""
    return re.sub(r"[^\w .,:;()×@+/=-]", " ", text)


def record_readme(date: str, name: str, verdict: Verdict, change: str | None) -> str:
    first = verdict.runs[0]
    reached = "reaches" if verdict.proven else "does not provably reach"
    command = plain(first.header_line("command") or "unknown")
    command = re.sub(r" --(seed|log_dir|run_id)=\S*", "", command)  # each run's own
    command = re.sub(r"^/\S*/", "", command)
    times = f" in {mean(verdict.times_s):.1f} s of training" if verdict.times_s else ""
    return "\n".join(
        [
            f"# {name}, {date}",
            "",
            f"**Claim.** {track_of(first)} track: {reached} a validation loss of "
            f"{verdict.target:g}{times}, on "
            f"{plain(first.hardware) or 'unknown hardware'}.",
            "",
            "**Change.** "
            f"{change or 'Say here what was changed against the record before, and why it helps.'}",
            "",
            f"**Command.** `{command}`",
            "",
            "**Statistics**, as `./run.sh records verify` prints them:",
            "",
            "<!-- statistics -->",
            statistics_text(verdict),
            "<!-- /statistics -->",
            "",
            "![loss against training time](curve.png)",
            "",
            f"`{SOURCE_FILE}` is the program of all the logs; `./run.sh records replay` runs one "
            "of them again.",
            "",
        ]
    )


# leaderboard --------------------------------------------------------------------------------------


def leaderboard_text(records: list[Record], root: Path) -> str:
    """A table for each track and target: the proven ones by time, then the others."""
    groups = {}
    for record in records:
        groups.setdefault((record.track, record.verdict.target), []).append(record)
    parts = []
    for (track, target), members in sorted(groups.items()):
        members.sort(
            key=lambda record: (not record.verdict.proven, mean(record.verdict.times_s or [0.0]))
        )
        rows = [leaderboard_row(record, root) for record in members]
        parts.append(
            "\n".join(
                [
                    f"**{track}**, target {target:g}",
                    "",
                    "| training time (s) | record | date | validation loss | runs | p | hardware |",
                    "|---|---|---|---|---|---|---|",
                    *rows,
                ]
            )
        )
    return "\n\n".join(parts) or "No records yet."


def leaderboard_row(record: Record, root: Path) -> str:
    verdict = record.verdict
    seconds = f"{mean(verdict.times_s):.1f}" if verdict.times_s else "unknown"
    if not verdict.proven:
        seconds = f"target not proven ({seconds})"
    loss = f"{verdict.test.mean:.4f}"
    if len(verdict.losses) > 1:
        loss += f" ± {standard_deviation(verdict.losses):.4f}"
    p = p_text(verdict.test.p) if len(verdict.losses) > 1 else "–"
    hardware = plain(verdict.runs[0].hardware) or "unknown"
    link = f"[{record.name}]({record.folder.relative_to(root).as_posix()})"
    cells = (seconds, link, record.date, loss, str(len(verdict.losses)), p, hardware)
    return f"| {' | '.join(cells)} |"


def update_leaderboard(readme: Path, records: Path, check: bool) -> int:
    """Writes the leaderboard and every record's statistics; with `check`, only says what is stale
    (exit 1)."""
    found = read_records(records)
    wanted = {readme: ("leaderboard", leaderboard_text(found, readme.parent))}
    for record in found:
        wanted[record.folder / "README.md"] = ("statistics", statistics_text(record.verdict))
    stale = []
    for path, (marker, contents) in wanted.items():
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        new = between(text, marker, contents, path)
        if new != text:
            stale.append(path)
            if not check:
                path.write_text(new, encoding="utf-8")
    for path in stale:
        print(
            f"{path}: {'stale; ./run.sh records leaderboard rewrites it' if check else 'rewritten'}"
        )
    if not stale:
        print("up to date")
    return 1 if check and stale else 0
