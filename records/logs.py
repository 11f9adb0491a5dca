"""Reading the logs of training runs: ours of any age, and those of the historical records.

A log is text: the source of the script, a line of 100 "=", what the run was (hyperparameters,
versions, hardware), another such line, then the step lines. Older and foreign logs lack some of it.
Nothing that a log says is ever executed here, and every text out of a log is cleaned before it is
shown.
"""

import ast
import datetime
import hashlib
import json
import math
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SEPARATOR = b"=" * 100
LARGEST_LOG = 256 * 2**20  # bytes; a million steps take 70 MB
SOURCE_FILE = "source.py"  # in a record's folder: the source of all its logs
STEP_LINE = re.compile(rb"^step:(\d{1,12})/(\d{1,12})((?: [^\n]*)?)$", re.MULTILINE)
FIELD = re.compile(rb"(\w+):([-+.\w]+)")
ANSI_CODE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[@-Z\\-_])")
COMPLETE_LINE = re.compile(rb"step_avg:(?:nan|[\d.]+)ms$")
STORED_SOURCE = re.compile(rb"source: source\.py sha256 ([0-9a-f]{64})")

# Hyperparameters that may differ between runs of one record: they change no validation loss.
SEED_AND_OUTPUT = {
    "seed",
    "preset",
    "log_dir",
    "run_id",
    "log_every",
    "save_model",
    "save_every",
    "keep_checkpoints",
    "resume",
    "resume_anyway",
    "timeout",
    "hellaswag",
    "show",
    "checkpoint",
    "sample",
    "sample_tokens",
    "temperature",
    "top_k",
}


class UserError(Exception):
    """A user's mistake: one sentence with the value, what was expected and the remedy."""


def clean(text: str | bytes, longest: int = 200) -> str:
    """Text out of a log, fit for a terminal and for one line of a table."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="replace")
    printable = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(printable.split())[:longest]


@dataclass
class Point:
    """One step line; what it does not say is None."""

    step: int
    train_loss: float | None
    val_loss: float | None
    time_ms: float | None  # training time so far
    step_ms: float | None  # the run's own average; historical ones leave the first ten steps out


@dataclass
class Run:
    """One log. The parts that take time to read are read when they are first asked for."""

    path: Path
    source: bytes | None  # as it was run; None where the log does not hold it
    source_sha256: str | None
    header: str  # between the first two separators
    body: bytes  # step lines, and whatever else the run printed

    @cached_property
    def name(self) -> str:
        """The run's folder, or the log's own name; with the folder above where that says more."""
        own = self.path.stem if self.path.name != "log.txt" else self.path.parent.name
        above = self.path.parent if self.path.name != "log.txt" else self.path.parent.parent
        generic = own.startswith("seed_") or re.fullmatch(r"[0-9a-f]{8}-[-0-9a-f]{27}", own)
        if generic and above.name:
            return clean(f"{above.name}/{own[:8]}", 80)
        return clean(own or "log", 80)

    @cached_property
    def date(self) -> str:
        """Out of the nearest folder that is named after one, else the file's own."""
        for part in (self.path.name, *(folder.name for folder in self.path.absolute().parents)):
            if found := re.match(r"20\d\d-[01]\d-[0-3]\d", part):
                return found[0]
        return datetime.date.fromtimestamp(self.path.stat().st_mtime).isoformat()

    # What the run was -----------------------------------------------------------------------------

    @cached_property
    def hyperparameters(self) -> dict:
        """Of a log of ours; empty for a historical one, whose hyperparameters are in its source."""
        found = {}
        for line in self.header.splitlines():
            match = re.match(r"([a-z]\w{0,60}): (.{1,10000})$", line)
            if match and match[1] not in ("command", "commit", "source_sha256", "shard"):
                found[match[1]] = parse_literal(match[2])
        return found if "num_steps" in found else {}

    def header_line(self, name: str) -> str | None:
        match = re.search(rf"^{name}: (.+)$", self.header, re.MULTILINE)
        return clean(match[1], 1000) if match else None

    @cached_property
    def commit(self) -> str:
        commit = self.header_line("commit") or ""
        return "" if commit == "unknown" else commit

    @cached_property
    def seed(self) -> int | None:
        seed = self.hyperparameters.get("seed")
        return seed if isinstance(seed, int) else None

    @cached_property
    def shards(self) -> dict[str, str]:
        """Name of each shard → its tokens and sha256, as the log has them."""
        lines = re.findall(r"^shard: (\S+) (.+)$", self.header, re.MULTILINE)
        return {clean(Path(path).name): clean(rest) for path, rest in lines}

    @cached_property
    def environment(self) -> dict[str, str]:
        """device, device_name, world_size, threads, torch, modes: as far as the log says them."""
        found = {}
        if match := re.search(
            r"PyTorch (\S+?)(?:,| |$)", self.header, re.IGNORECASE | re.MULTILINE
        ):
            found["torch"] = clean(match[1], 60)
        ours = re.search(
            r"^(\d+) × (\w+) \((.*)\), (\d+) threads, (.*)$", self.header, re.MULTILINE
        )
        if ours:
            names = ("world_size", "device", "device_name", "threads", "modes")
            found |= {name: clean(value) for name, value in zip(names, ours.groups())}
        elif cards := re.findall(
            r"^\|\s+\d+\s+(NVIDIA [\w .-]+?)(?:\s{2,}|\s+O[nf]+\b)", self.header, re.MULTILINE
        ):
            found |= {
                "world_size": str(len(cards)),
                "device": "cuda",
                "device_name": clean(cards[0]),
            }
        return found

    @cached_property
    def hardware(self) -> str:
        known = self.environment
        if "device_name" not in known:
            return ""
        threads = ""
        if known["device"] == "cpu":
            threads = f", {known['threads']} thread{'' if known['threads'] == '1' else 's'}"
        return f"{known['world_size']} × {known['device_name']}{threads}"

    @cached_property
    def batch_tokens(self) -> int | None:
        """Tokens per step."""
        if isinstance(tokens := self.hyperparameters.get("batch_tokens"), int):
            return tokens
        factors = [
            re.search(
                rb"^\s*%s\s*(?::\s*int\s*)?=\s*(\d+(?:\s*\*\s*\d+){0,4})\s*(?:#|$)" % name,
                self.source or b"",
                re.MULTILINE,
            )
            for name in (b"batch_size", b"sequence_length")
        ]
        if not all(factors):
            return None
        return math.prod(int(number[:9]) for match in factors for number in match[1].split(b"*"))

    @cached_property
    def target(self) -> float:
        """The loss that the run is meant to reach; 3.28 in all historical records."""
        target = self.hyperparameters.get("target_loss", 3.28)
        return float(target) if isinstance(target, (int, float)) else 3.28

    # What it reached ------------------------------------------------------------------------------

    @cached_property
    def last_validation(self) -> Point | None:
        """Found from the end: a table of many logs does not read every step."""
        end = len(self.body)
        while (at := self.body.rfind(b"val_loss:", 0, end)) >= 0:
            start = self.body.rfind(b"\n", 0, at) + 1
            line_end = self.body.find(b"\n", at)
            line = self.body[start : line_end if line_end >= 0 else len(self.body)]
            if (match := STEP_LINE.match(line)) and "val_loss" in (fields := step_fields(match[3])):
                return as_point(match, fields)
            end = start
        return None

    @cached_property
    def last_point(self) -> Point | None:
        start = self.body.rfind(b"\nstep:") + 1
        matches = list(STEP_LINE.finditer(self.body, start))
        if not matches:  # a line that only begins like a step line
            return self.points[-1] if self.points else None
        return as_point(matches[-1], step_fields(matches[-1][3]))

    @cached_property
    def total_steps(self) -> int:
        match = STEP_LINE.search(self.body)
        return int(match[2]) if match else 0

    @property
    def finished(self) -> bool:
        validation = self.last_validation
        return validation is not None and validation.step == self.total_steps

    @property
    def final_loss(self) -> float:
        return self.last_validation.val_loss if self.finished else math.nan

    @property
    def train_time_ms(self) -> float | None:
        return self.last_point.time_ms if self.last_point else None

    @property
    def step_time_ms(self) -> float | None:
        last = self.last_point
        if last is None or last.step == 0:
            return None
        if last.step_ms is not None and math.isfinite(last.step_ms):
            return last.step_ms
        return last.time_ms / last.step if last.time_ms is not None else None

    @cached_property
    def points(self) -> list[Point]:
        """Every step line, in order."""
        return [as_point(match, step_fields(match[3])) for match in STEP_LINE.finditer(self.body)]

    def curve(self, kind: str) -> list[tuple[int, float, float | None]]:
        """(step, loss, ms) of each line with this loss.

        The historical runs count ten steps of warm-up, then set their clock back to zero: the times
        before that are None.
        """
        times = [point.time_ms for point in self.points]
        falls = [
            number
            for number in range(1, len(times))
            if None not in times[number - 1 : number + 1] and times[number] < times[number - 1]
        ]
        restart = falls[-1] if falls else 0
        found = []
        for number, point in enumerate(self.points):
            loss = getattr(point, kind)
            if loss is not None:
                on_clock = number >= restart or point.step == 0
                found.append((point.step, loss, point.time_ms if on_clock else None))
        return found

    def time_to(self, target: float) -> float | None:
        """Training ms until the validation loss was at the target; None if never.

        On the straight line between the two validations around it; the time of the first validation
        if that is below the target already.
        """
        before = None
        for _, loss, time_ms in self.curve("val_loss"):
            if time_ms is None or math.isnan(loss):
                before = None
                continue
            if loss <= target:
                if before is None:
                    return time_ms
                loss_before, time_before = before
                return time_before + (time_ms - time_before) * (loss_before - target) / (
                    loss_before - loss
                )
            before = loss, time_ms
        return None

    @cached_property
    def metrics(self) -> list[dict]:
        """The steps of metrics.jsonl beside the log, with losses in full precision, if any."""
        path = self.path.with_name("metrics.jsonl")
        if self.path.name != "log.txt" or not path.is_file():
            return []
        found = []
        for line in read_bounded(path).splitlines():
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                continue  # the last line of a run that is still going on
            if isinstance(values, dict) and isinstance(values.get("step"), int):
                found.append(values)
        return found


def parse_literal(text: str):
    """A number, string, tuple … as Python writes it, with or without its origin behind "  # "."""
    for candidate in (text, text.rpartition("  # ")[0]):
        try:
            return ast.literal_eval(candidate)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
    return clean(text, 1000)


def to_number(text: bytes | None) -> float | None:
    """A loss may be nan; anything that is no number counts as not said."""
    try:
        return float(text) if text is not None and len(text) < 40 else None
    except ValueError:
        return None


def step_fields(rest: bytes) -> dict[str, float]:
    """The name:value pairs of a step line; times lose their "ms"."""
    fields = {}
    for name, value in FIELD.findall(rest):
        number = to_number(value.removesuffix(b"ms"))
        if number is not None:
            fields[name.decode("ascii", errors="replace")] = number
    return fields


def as_point(match: re.Match, fields: dict[str, float]) -> Point:
    return Point(
        int(match[1]),
        fields.get("train_loss"),
        fields.get("val_loss"),
        fields.get("train_time"),
        fields.get("step_avg"),
    )


def read_bounded(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise UserError(f"{clean(str(path))}: no such log; give a log file or a folder of logs")
        size = path.stat().st_size
        if size > LARGEST_LOG:
            raise UserError(
                f"{clean(str(path))}: {size / 2**20:,.0f} MiB is no log; the largest that is read "
                f"has {LARGEST_LOG // 2**20} MiB"
            )
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{clean(str(path))}: cannot be read ({error.strerror})") from None


def read_log(path: str | Path) -> Run:
    """One log; raises UserError with one sentence where it is none."""
    path = Path(path)
    if path.is_dir():
        path /= "log.txt"
    data = read_bounded(path)
    shown = clean(str(path))
    if not data:
        raise UserError(f"{shown}: empty; a log begins with the source of its run")
    if b"\0" in data[:8000]:  # only there: the sample at the end may be any bytes
        raise UserError(f"{shown}: binary, not a log; give the run's log.txt")
    if b"\r\n" in data:
        data = data.replace(b"\r\n", b"\n")
    source, header, body = split_log(data)
    if b"\x1b" in body:
        body = ANSI_CODE.sub(b"", body)
    body = without_cut_line(body)
    if not STEP_LINE.search(body):
        raise UserError(
            f"{shown}: no step lines in it (step:N/M val_loss:… train_time:…ms); the run has not "
            "begun, or this is no log"
        )
    sha256 = hashlib.sha256(source).hexdigest() if source is not None else None
    if source is not None and (stored := STORED_SOURCE.fullmatch(source.strip())):
        source, sha256 = stored_source(path, stored[1].decode())
    return Run(path, source, sha256, header, body)


def split_log(data: bytes) -> tuple[bytes | None, str, bytes]:
    """(source, header, body); a log without separators is all body."""
    separator = b"\n" + SEPARATOR + b"\n"
    source_end = data.find(separator)
    if source_end < 0:
        return None, "", data
    start = source_end + len(separator)
    header_end = data.find(separator, start - 1)  # which the header may be empty before
    body_start = header_end + len(separator)
    first_step = STEP_LINE.search(data, start)
    if header_end < 0 or (first_step and first_step.start() < header_end):
        header_end = body_start = first_step.start() if first_step else len(data)
    header = ANSI_CODE.sub(b"", data[start : max(start, header_end)][: 10**6])
    return data[:source_end], header.decode("utf-8", errors="replace"), data[body_start:]


def without_cut_line(body: bytes) -> bytes:
    """Without the last line of a run that is still going on, unless nothing of it can be
    missing."""
    if not body or body.endswith(b"\n"):
        return body
    start = body.rfind(b"\n") + 1
    return body if COMPLETE_LINE.search(body, start) else body[:start]


def stored_source(path: Path, sha256: str) -> tuple[bytes | None, str]:
    """The source that a record's folder keeps once for all its logs; None if it is not the one they
    name."""
    stored = path.with_name(SOURCE_FILE)
    source = read_bounded(stored) if stored.is_file() else None
    if source is not None and hashlib.sha256(source).hexdigest() != sha256:
        source = None
    return source, sha256


def find_logs(paths: list[str | Path]) -> list[Path]:
    """The log files among these paths and in these folders, each once."""
    found = {}
    for path in map(Path, paths):
        if path.is_dir():
            for folder, subfolders, files in os.walk(path):
                subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
                for name in sorted(files):
                    if name.endswith((".txt", ".log")) and name != "requirements.txt":
                        found[Path(folder) / name] = None
        else:
            found[path] = None
    return list(found)


def each_log(paths: list[str | Path], warn):
    """Every log that can be read, one at a time; `warn` gets one sentence for each that cannot."""
    files = find_logs(paths)
    if not files:
        where = ", ".join(clean(str(path)) for path in paths)
        raise UserError(f"{where}: no logs there; a training run writes logs/<run id>/log.txt")
    for path in files:
        try:
            run = read_log(path)
        except UserError as error:
            warn(str(error))
        else:
            yield run


def read_logs(paths: list[str | Path], warn) -> list[Run]:
    return list(each_log(paths, warn))


def latest_log(folder: Path) -> Path:
    logs = (
        sorted(folder.rglob("log.txt"), key=lambda path: path.stat().st_mtime)
        if folder.is_dir()
        else []
    )
    if not logs:
        raise UserError(f"{folder}: no run there yet; ./run.sh makes one, or name a log")
    return logs[-1]


# Are these the same experiment? -------------------------------------------------------------------


def configuration(run: Run) -> dict[str, str]:
    """Everything that must agree between the runs of a record, seed and output aside, as text by
    name."""
    found = {"source": run.source_sha256 or "unknown"}
    ignored = SEED_AND_OUTPUT | ({"train_files", "val_files"} if run.shards else set())
    for name, value in run.hyperparameters.items():
        if name not in ignored:
            found[name] = clean(repr(value), 10_000)
    if not run.hyperparameters:
        found["num_steps"] = str(run.total_steps)
    for name, about in run.shards.items():
        found[f"shard {name}"] = about
    for name, value in run.environment.items():
        found[name] = value
    return found


def differences(runs: list[Run]) -> list[str]:
    """What differs between runs, a phrase for each thing."""
    every = [configuration(run) for run in runs]
    found = []
    for name in dict.fromkeys(name for one in every for name in one):
        values = [one.get(name, "not said") for one in every]
        other = next((number for number, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            first, second = (clean(value, 60) for value in (values[0], values[other]))
            found.append(f"{name} is {first} in {runs[0].name} and {second} in {runs[other].name}")
    return found


def group_runs(runs: list[Run]) -> list[list[Run]]:
    """Runs of the same configuration together; without a source, those of the same folder."""
    groups = {}
    for run in runs:
        key = json.dumps(configuration(run))
        if run.source_sha256 is None:
            key += str(run.path.parent)
        groups.setdefault(key, []).append(run)
    return list(groups.values())
