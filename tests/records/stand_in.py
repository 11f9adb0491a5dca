"""Stands in for the trainer: writes a log in its form, with made-up losses and times.

Its clock is not the machine's: a step takes --step_ms, with noise that depends on how many runs the
journal has seen, so that two runs with one seed differ in time as they do on a real machine.
"""

import random
import sys
import time
from pathlib import Path

options = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])
values = dict(
    num_steps=10,
    batch_tokens=64,
    target_loss=2.0,
    final_loss=1.9,
    loss_noise=0.01,
    step_ms=100.0,
    time_noise=0.01,
    seed=0,
    log_dir="logs",
    run_id="run",
    journal="",
    fail_at=-1,
    pause_s=0.0,
    device_name="made up",
)
for name, text in options.items():
    if name not in values:
        sys.exit(f"error: --{name}: no such hyperparameter")
    values[name] = type(values[name])(text)

runs_before = 0
if values["journal"]:
    journal = Path(values["journal"])
    runs_before = len(journal.read_text().splitlines()) if journal.exists() else 0
    with journal.open("a") as file:
        print(values["run_id"], file=file)
if runs_before == values["fail_at"]:
    sys.exit("error: the power went off")

steps = values["num_steps"]
final = values["final_loss"] + random.Random(values["seed"]).gauss(0, values["loss_noise"])
step_ms = values["step_ms"] * (1 + random.Random(runs_before).gauss(0, values["time_noise"]))
step_ms *= 1 + 0.02 * runs_before  # the machine gets slower all the time
folder = Path(values["log_dir"]) / values["run_id"]
folder.mkdir(parents=True)
lines = [
    Path(__file__).read_text(),
    "=" * 100,
    "command: stand_in.py",
    "commit: unknown",
    *(f"{name}: {value!r}  # default" for name, value in values.items()),
    "Python 3, PyTorch 2.13.0, NumPy 2, CUDA None, nowhere",
    f"1 × cpu ({values['device_name']}), 1 threads, float32 activations",
    "=" * 100,
]
for step in range(steps + 1):
    loss = 5 + (final - 5) * step / steps
    clock = f"train_time:{step * step_ms:.3f}ms step_avg:{step_ms if step else float('nan'):.3f}ms"
    if step:
        lines.append(f"step:{step}/{steps} train_loss:{loss:.4f} {clock}")
    if step % 5 == 0 or step == steps:
        lines.append(f"step:{step}/{steps} val_loss:{loss:.4f} {clock}")
with open(folder / "log.txt", "w") as log:
    for line in lines:
        print(line, file=log, flush=True)
        if line.startswith("step:"):
            print(line, flush=True)
            time.sleep(values["pause_s"])
(folder / "model.pt").write_bytes(b"weights")
