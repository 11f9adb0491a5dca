"""Is anything lost? ./run.sh faults [KILLS [--name=value …]]

Mutates shards, manifests and checkpoints; then kills ranks of a real laptop run at random moments
and compares its losses and weights with those of a run that nothing happened to.
"""
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import conftest  # noqa: F401  (paths, number of threads)
from fuzz import fuzz_checkpoint, fuzz_manifest, fuzz_shard, mutations
from helpers import (
    ROOT,
    SIX_STEPS,
    BackgroundRun,
    Result,
    equal,
    make_data,
    make_trainer,
)
from hypothesis import HealthCheck, given, settings

import train_gpt

NUM_SHARDS = 800            # mutated files of each kind
NUM_MANIFESTS = 800
NUM_CHECKPOINTS = 400


# ---- mutated files ----

def fuzz_files(folder: Path) -> None:
    data = make_data(folder)
    if train_gpt.main([*SIX_STEPS, *data, "--run_id=fuzz"]) != 0:
        raise SystemExit("error: the run whose checkpoint is to be mutated failed")
    content = (folder / "logs" / "fuzz" / "checkpoint_0000004.pt").read_bytes()
    trainer = make_trainer(train_gpt.parse_command_line([*SIX_STEPS, *data]))
    fuzz_many("shards", NUM_SHARDS, lambda changes: fuzz_shard(folder, changes))
    fuzz_many("manifests", NUM_MANIFESTS, lambda changes: fuzz_manifest(folder, changes))
    fuzz_many("checkpoints", NUM_CHECKPOINTS,
              lambda changes: fuzz_checkpoint(folder, changes, content, trainer))


def fuzz_many(kind: str, examples: int, function) -> None:
    @settings(max_examples=examples, deadline=None, database=None, derandomize=False,
              suppress_health_check=list(HealthCheck))
    @given(mutations())
    def try_one(changes):
        function(changes)
    try_one()
    print(f"{examples} mutated {kind}: each was read right or refused in one sentence", flush=True)


# ---- killed ranks ----

def laptop_run(folder: Path, options: list[str]) -> tuple[list[str], list[str]]:
    """(options, data): the whole laptop preset, on enwik8 where it is, else a made-up language."""
    data = make_data(folder, vocab_size=257, tokens=3_000_000, document_token=256)
    if list((ROOT / "data" / "enwik8").glob("enwik8_train_*.bin")):
        data[:2] = [f"--{kind}_files={ROOT}/data/enwik8/enwik8_{kind}_*.bin"
                    for kind in ("train", "val")]
    base = ["--preset=laptop", "--device=cpu", "--batch_tokens=4096", "--sequence_tokens=2048",
            "--segment_tokens=512", "--val_tokens=65536", "--val_start=0", "--val_every=40",
            "--ngram_tokens=1000000",  # small tables: a checkpoint every few steps
            "--log_every=1", "--save_every=5", *options]
    return base, data


def wait_for(run: BackgroundRun, start: int, pattern: str, times: int = 1) -> None:
    """Until the output after `start` has the pattern so often, or the run ends; 5 minutes at most.
    """
    deadline = time.monotonic() + 300
    while run.process.poll() is None and time.monotonic() < deadline:
        if len(re.findall(pattern, run.output[start:])) >= times:
            return
        time.sleep(0.01)


def last_step(run: BackgroundRun) -> int:
    return int((re.findall(r"step:(\d+)/", run.output) or ["0"])[-1])


def kill_ranks(run: BackgroundRun, kills: int, num_steps: int) -> int:
    """Over the whole run, a line for each; returns how many there were before it ended."""
    size = 0
    starting = False
    for number in range(1, kills + 1):
        if starting:
            time.sleep(random.uniform(0, 5))
        else:  # spread over the steps that are left
            share = 2 * (num_steps - last_step(run)) // (kills - number + 2)
            wait_for(run, size, "train_loss", times=random.randint(1, max(1, share)))
            time.sleep(random.uniform(0, 0.3))
        ranks = {}
        while run.process.poll() is None and not ranks:
            ranks = run.ranks()
            time.sleep(0.05)
        if run.process.poll() is not None:
            return number - 1
        rank = random.choice(list(ranks))
        step = last_step(run)
        size = len(run.output)
        try:
            os.kill(ranks[rank], signal.SIGKILL)
        except ProcessLookupError:  # the launcher ended it just now, because of the last kill
            pass
        starting = number < kills and random.random() < 0.2
        print(f"kill {number}: rank {rank} at step {step}; {outcome(run, size, starting)}",
              flush=True)
    return kills


def outcome(run: BackgroundRun, size: int, starting: bool) -> str:
    if starting:
        return "the next comes while it starts"
    wait_for(run, size, "parameters, [^x]*step:")
    resumed = re.findall(r"resuming from \S+, step (\d+)", run.output[size:])
    return f"resumed from step {resumed[0]}" if resumed else "started again"


def compare(undisturbed: Result, killed: Result) -> tuple[int, bool]:
    """(steps whose losses differ or are missing, whether the weights are equal)"""
    pairs = zip(undisturbed.train_losses, killed.train_losses)
    lost = len([1 for one, other in pairs if one != other])
    lost += abs(len(undisturbed.train_losses) - len(killed.train_losses))
    return lost, equal(undisturbed.weights, killed.weights)


def main(arguments: list[str]) -> int:
    kills = 50
    if arguments:
        if not arguments[0].isdigit():
            print(f"error: {arguments[0]}: expected the number of kills first, such as "
                  "./run.sh faults 50 --num_steps=100", file=sys.stderr)
            return 2
        kills = int(arguments[0])
    folder = Path(tempfile.mkdtemp(prefix="faults_"))
    try:
        fuzz_files(folder)
        base, data = laptop_run(folder, arguments[1:])
        undisturbed = BackgroundRun(data, "undisturbed", base=base)
        if undisturbed.wait(3600) != 0:
            print(undisturbed.output, file=sys.stderr)
            return 1
        killed = BackgroundRun(data, "killed", base=base, restarts=2 * kills + 10)
        survived = kill_ranks(killed, kills, train_gpt.parse_command_line(base).num_steps)
        if killed.wait(3600) != 0:
            print(killed.output, file=sys.stderr)
            return 1
        lost, same_weights = compare(Result(undisturbed.folder), Result(killed.folder))
        print(f"{survived} kills survived, {lost} steps lost, final weights equal the undisturbed "
              f"run's: {'yes' if same_weights else 'NO'}")
        return 0 if survived == kills and lost == 0 and same_weights else 1
    finally:
        for run in BackgroundRun.started:
            if run.process.poll() is None:
                run.kill_all()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
