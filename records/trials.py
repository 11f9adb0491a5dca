"""Starting training runs: each in a process of its own, with progress, one folder each."""

import collections
import contextlib
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from logs import Run, UserError, clean, read_log

ROOT = Path(__file__).resolve().parent.parent
TRAINER = ROOT / "train_gpt.py"
SET_BY_US = ("seed", "log_dir", "run_id", "resume")  # options that a run gets from this tool


@dataclass
class Configuration:
    """A script and its options: all that makes a training, but for the seed."""

    script: Path
    options: list[str]
    source_sha256: str

    def key(self) -> str:
        contents = json.dumps([self.source_sha256, self.options])
        return hashlib.sha256(contents.encode()).hexdigest()[:12]

    def __str__(self) -> str:
        script = self.script
        with contextlib.suppress(ValueError):
            script = script.relative_to(ROOT)
        return shlex.join([str(script), *self.options])


def configure(script: Path, options: list[str]) -> Configuration:
    if not script.is_file():
        raise UserError(f"{script}: no such script")
    for option in options:
        name = option.removeprefix("--").partition("=")[0]
        if not option.startswith("--"):
            raise UserError(f"{option}: expected an option of {script.name}, --name=value")
        if name in SET_BY_US:
            raise UserError(f"{option}: this tool sets --{name} for each run; leave it out")
    return Configuration(script, options, hashlib.sha256(script.read_bytes()).hexdigest())


# What a configuration is given as -----------------------------------------------------------------


def split_words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        raise UserError(f"{clean(text)}: its quotes do not match") from None


def resolve(text: str, shared_options: list[str], sources: Path) -> Configuration:
    """A script, git revision or log, with or without options; or options of train_gpt.py alone.

    `sources` is the folder for files of git revisions.
    """
    words = split_words(text)
    if not words or words[0].startswith("--"):
        return configure(TRAINER, shared_options + words)
    base, *options = words
    path = Path(base)
    if path.suffix == ".py" and path.is_file():
        return configure(path.resolve(), shared_options + options)
    if path.exists() and (path.is_file() or (path / "log.txt").is_file()):
        run = read_log(path)
        return configure(own_source_of(run, sources), options_of(run) + shared_options + options)
    return configure(checkout(base, sources), shared_options + options)


def git(*arguments: str) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True)
    except FileNotFoundError:
        raise UserError("git: not installed; a revision cannot be read without it") from None


def checkout(revision: str, sources: Path) -> Path:
    """train_gpt.py of a revision, in a folder of its own with the scripts of data/ beside it."""
    found = git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if found.returncode:
        raise UserError(
            f"{clean(revision)}: neither a script, a log nor a git revision; options of "
            "train_gpt.py begin with --"
        )
    commit = found.stdout.decode().strip()
    folder = sources / commit[:12]
    if not (folder / "train_gpt.py").is_file():
        archive = git("archive", commit, "train_gpt.py", "data")
        if archive.returncode:
            raise UserError(
                f"{clean(revision)}: has no train_gpt.py and data/ that could be compared"
            )
        unfinished = sources / f"{commit[:12]}.tmp"
        shutil.rmtree(unfinished, ignore_errors=True)
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(unfinished, filter="data")
        unfinished.rename(folder)
    return folder / "train_gpt.py"


def own_source_of(run: Run, sources: Path) -> Path:
    """The script of this repository that a log was made with; a log's own source is not run."""
    if run.source_sha256 == hashlib.sha256(TRAINER.read_bytes()).hexdigest():
        return TRAINER
    commit = re.match(r"[0-9a-f]{7,64}", run.commit)
    if commit:
        with contextlib.suppress(UserError):
            script = checkout(commit[0], sources)
            if hashlib.sha256(script.read_bytes()).hexdigest() == run.source_sha256:
                return script
    raise UserError(
        f"{run.name}: its source is neither this train_gpt.py nor that of its commit; take it out "
        "with `replay LOG --extract=FILE.py`, read it, and compare that file"
    )


def options_of(run: Run) -> list[str]:
    """The hyperparameters of a log as options, without those about output."""
    skipped = {
        *SET_BY_US,
        "resume_anyway",
        "save_model",
        "save_every",
        "keep_checkpoints",
        "show",
        "checkpoint",
        "sample",
        "hellaswag",
    }
    if not run.hyperparameters:
        raise UserError(f"{run.name}: its log has no hyperparameters to run it with")
    return [
        f"--{name}={value}"
        for name, value in run.hyperparameters.items()
        if name not in skipped and value is not None
    ]


# One run ------------------------------------------------------------------------------------------


def number_of_processes(script: Path, options: list[str]) -> int:
    """NPROC, or one for each GPU that the trainer says it can use."""
    if os.environ.get("NPROC", "").isdigit():
        return max(1, int(os.environ["NPROC"]))
    if not shutil.which("nvidia-smi"):
        return 1
    shown = subprocess.run(
        [sys.executable, str(script), "--show", *options], capture_output=True, text=True, cwd=ROOT
    )
    found = re.search(r"^gpus=(\d+)", shown.stdout, re.MULTILINE)
    return max(1, int(found[1])) if found else 1


def run_once(
    script: Path,
    options: list[str],
    folder: Path,
    show_line,
    cwd: Path = ROOT,
    stop_after: int = 0,
    threads: str = "",
) -> Run:
    """Trains in `folder`; raises UserError with the trainer's own sentence.

    `show_line` gets every line that it prints. `stop_after` asks the run to stop when it has shown
    this step; 0: to train to its end.
    """
    if any("\0" in option for option in options):
        raise UserError("an option has a zero byte in it, and no program can be given that")
    processes = number_of_processes(script, options)
    launcher = []
    if processes > 1:  # run.sh knows only one script, and this may be that of another revision
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [
        sys.executable,
        *launcher,
        str(script),
        *options,
        f"--log_dir={folder.parent}",
        f"--run_id={folder.name}",
    ]
    last_lines = collections.deque(maxlen=5)
    variables = os.environ | ({"OMP_NUM_THREADS": threads} if threads else {})
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    stopped = False
    try:
        with signals_as_interrupts():
            for line in process.stdout:
                show_line(line.rstrip("\n"))
                if line.strip():
                    last_lines.append(clean(line, 500))
                step = re.match(r"step:(\d+)/(\d+) ", line)
                if stop_after and step and int(step[1]) >= stop_after and not stopped:
                    process.send_signal(signal.SIGTERM)
                    stopped = True
            code = process.wait()
    except BaseException:
        process.terminate()  # the trainer finishes its step and stops
        try:
            process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    if code and not stopped:
        reason = last_lines[-1].removeprefix("error: ") if last_lines else f"exit code {code}"
        raise UserError(f"the run failed: {reason}")
    return read_log(folder / "log.txt")


@contextlib.contextmanager
def signals_as_interrupts():
    """SIGTERM ends this tool as Ctrl-C does, and with it the run that it started."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def finished_run(folder: Path) -> Run | None:
    """The run in this folder if it came to its end."""
    if not (folder / "log.txt").is_file():
        return None
    with contextlib.suppress(UserError):
        run = read_log(folder / "log.txt")
        return run if run.finished else None
    return None


class Progress:
    """A bar over all steps of all runs on a terminal, plain lines elsewhere."""

    def __init__(self, runs: int):
        self.runs = runs
        self.done = 0  # runs
        self.label = ""
        self.bar = None
        self.terminal = sys.stdout.isatty()

    def say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.write(text)
        else:
            print(text, flush=True)

    def start(self, label: str) -> None:
        self.label = label

    def line(self, text: str) -> None:
        found = re.match(r"step:(\d+)/(\d+) ", text)
        if not found:
            return
        if not self.terminal:
            print(f"{self.label}: {clean(text)}", flush=True)
            return
        step, steps = int(found[1]), int(found[2])
        if self.bar is None:
            from tqdm import tqdm

            self.bar = tqdm(
                total=self.runs * steps, initial=self.done * steps, unit="step", dynamic_ncols=True
            )
        self.bar.set_description(self.label, refresh=False)
        self.bar.update(max(0, self.done * steps + step - self.bar.n))

    def finish(self, run: Run) -> None:
        self.done += 1
        self.say(f"{self.label}: {result_text(run)}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def result_text(run: Run) -> str:
    time_ms = run.train_time_ms
    seconds = "an unknown time" if time_ms is None else f"{time_ms / 1000:.1f} s"
    return f"final loss {run.final_loss:.4f} after {seconds} of training"


# Several seeds ------------------------------------------------------------------------------------


def run_all_seeds(given: dict, options: list[str]) -> Path:
    """One run per seed; returns their folder. The same command resumes after an interruption."""
    wanted = configure(Path(given["script"]).resolve() if given["script"] else TRAINER, options)
    folder = Path(given["folder"]) if given["folder"] else ROOT / "logs" / default_name(wanted)
    claim_folder(folder, wanted)
    progress = Progress(given["seeds"])
    print(f"{wanted}: {given['seeds']} seeds into {folder}", flush=True)
    try:
        for seed in range(1, given["seeds"] + 1):
            progress.start(f"seed {seed}")
            place = folder / f"seed_{seed}"
            run = finished_run(place)
            if run is None:
                shutil.rmtree(place, ignore_errors=True)  # an interrupted run's, no good for a time
                seeded = [*wanted.options, f"--seed={seed}"]
                run = run_once(wanted.script, seeded, place.absolute(), progress.line)
            progress.finish(run)
    finally:
        progress.close()
    return folder


def default_name(wanted: Configuration) -> str:
    words = [option.removeprefix("--").removeprefix("preset=") for option in wanted.options]
    readable = re.sub(r"[^\w.=-]+", "_", "_".join(words))[:50] or wanted.script.stem
    return f"{readable}-{wanted.key()[:8]}"


def claim_folder(folder: Path, wanted: Configuration) -> None:
    """Notes in a folder what its runs are, and refuses one that holds runs of something else."""
    contents = {"source_sha256": wanted.source_sha256, "options": wanted.options}
    path = folder / "configuration.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            if any(folder.iterdir()):
                raise UserError(f"--folder={folder}: holds other things already; give a new one")
            path.write_text(json.dumps(contents, indent=1) + "\n")
        there = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{folder}: cannot be used ({clean(str(error))}); give another --folder"
        ) from None
    changed = [name for name in contents if there.get(name) != contents[name]]
    if changed:
        name = changed[0]
        raise UserError(
            f"--folder={folder}: holds runs with another {name} ({clean(str(there.get(name)))}); "
            "give another folder, or the same command as before"
        )
