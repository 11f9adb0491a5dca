"""Is anything lost? ./run.sh faults [KILLS [--name=value …]]: ranks of a real laptop run are killed at random moments; files are mutated."""
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import conftest  # noqa: F401  (the paths, the number of threads)
import torch
from hypothesis import HealthCheck, given, settings

import train_gpt
from helpers import Result, make_data
from test_checkpoints import SIX, equal, fuzz_checkpoint, fuzz_manifest, fuzz_shard, mutations
from test_faults import Run

ROOT = Path(__file__).resolve().parents[2]
MUTATED = 2000


def laptop_run(folder: Path) -> tuple[list[str], list[str]]:
    """(options, data): enwik8 where it is, otherwise a made-up language; the whole laptop preset in either case."""
    data = make_data(folder, vocab_size=257, tokens=1_000_000, document_token=256)
    if list((ROOT / "data" / "enwik8").glob("enwik8_train_*.bin")):
        data[:2] = [f"--{kind}_files={ROOT}/data/enwik8/enwik8_{kind}_*.bin" for kind in ("train", "val")]
    return ["--preset=laptop", "--device=cpu", "--batch_tokens=4096", "--sequence_tokens=2048", "--segment_tokens=512",
            "--val_tokens=65536", "--val_every=40", "--log_every=1", "--save_every=5", *sys.argv[2:]], data


def kill_some(run: Run, kills: int, num_steps: int) -> int:
    """Over the whole run, one line each; returns how many there were before it ended."""
    def wait(size: int, pattern: str, times: int = 1, seconds: float = 300) -> None:
        """Until the pattern has come so often after this hardware of the output, or the time is up."""
        deadline = time.monotonic() + seconds
        while run.process.poll() is None and len(re.findall(pattern, run.output[size:])) < times and time.monotonic() < deadline:
            time.sleep(0.01)

    def reached() -> int:
        return int((re.findall(r"step:(\d+)/", run.output) or ["0"])[-1])

    size, starting = 0, False
    for number in range(1, kills + 1):
        if starting:
            time.sleep(random.uniform(0, 5))
        else:  # spread over the steps that are left
            wait(size, "train_loss", times=random.randint(1, max(1, 2 * (num_steps - reached()) // (kills - number + 2))))
            time.sleep(random.uniform(0, 0.3))
        while run.process.poll() is None and not (ranks := run.ranks()):
            time.sleep(0.05)
        if run.process.poll() is not None:
            return number - 1
        rank, at, size = random.choice(list(ranks)), reached(), len(run.output)
        os.kill(ranks[rank], signal.SIGKILL)
        starting = number < kills and random.random() < 0.2
        if not starting:
            wait(size, "parameters, [^x]*(step:|going on)")
        went_on = re.findall(r"going on from \S+, step (\d+)", run.output[size:])
        then = "the next comes while it starts" if starting else f"went on from step {went_on[0]}" if went_on else "began again"
        print(f"kill {number}: rank {rank} at step {at}; {then}", flush=True)
    return kills


def fuzz(folder: Path) -> None:
    assert train_gpt.main([*SIX, *(data := make_data(folder)), "--run_id=fuzz"]) == 0
    content = (folder / "logs" / "fuzz" / "checkpoint_0000004.pt").read_bytes()
    hp = train_gpt.parse_command_line([*SIX, *data])
    trainer = make_trainer(hp)
    readers = dict(shards=(fuzz_shard, ()), manifests=(fuzz_manifest, ()), checkpoints=(fuzz_checkpoint, (content, trainer)))
    for (kind, (function, more)), part in zip(readers.items(), (0.4, 0.4, 0.2)):
        examples = int(part * MUTATED)

        @settings(max_examples=examples, deadline=None, database=None, derandomize=False,
                  suppress_health_check=list(HealthCheck))
        @given(mutations())
        def every(changes):
            function(folder, changes, *more)
        every()
        print(f"{examples} mutated {kind}: each was read right or refused in one sentence", flush=True)


def main() -> int:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    folder = Path(tempfile.mkdtemp(prefix="faults_"))
    try:
        fuzz(folder)
        base, data = laptop_run(folder)
        quiet = Run(data, "undisturbed", base=base)
        assert quiet.wait(3600) == 0, quiet.output
        run = Run(data, "killed", base=base, restarts=2 * kills + 10)
        survived = kill_some(run, kills, train_gpt.parse_command_line(base).num_steps)
        finished = run.wait(3600) == 0
        one, other = (Result(log, subprocess.CompletedProcess([], 0, "")) for log in (quiet.folder, run.folder))
        lost = sum(a != b for a, b in zip(one.train_losses, other.train_losses)) + abs(
            len(one.train_losses) - len(other.train_losses))
        models = [torch.load(log / "model.pt", weights_only=True)["model"] for log in (quiet.folder, run.folder)]
        print(f"{survived} kills survived, {lost} steps lost, final weights equal the undisturbed run's: "
              f"{'yes' if equal(*models) else 'NO'}")
        return 0 if finished and not lost and equal(*models) and survived == kills else 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
