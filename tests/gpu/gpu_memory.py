"""Trace training steps as a GPU would allocate them, beside the estimate of train_gpt.memory_needed.

    python gpu_memory.py CARD [--name=value …] [/ --name=value …]      a run for each set of arguments

No kernel is compiled: Inductor decides on the buffers, its wrapper code allocates and frees them. Prints the
peak, the estimate and the largest tensors of the forward and of the backward pass, as JSON, a line per run.
"""
import gc
import itertools
import json
import sys

import gpu_step  # first: it reads the card and installs the harness
import torch
from gpu_step import fake_gpu, train_gpt


def largest_in(function, *arguments) -> tuple:
    """Its result, and what was the largest tensor allocated meanwhile."""
    fake_gpu.seen.largest = (0, (), None)
    return function(*arguments), fake_gpu.seen.largest


def run(arguments: list[str]) -> dict:
    torch._dynamo.reset()
    fake_gpu.seen.forget_freed()
    fake_gpu.seen.peak_bytes = fake_gpu.seen.live_bytes
    hp = gpu_step.settings(arguments)
    place = train_gpt.find_place(hp)
    train_gpt.start_up(place, hp)
    state, per_token = train_gpt.memory_needed(hp, place)
    trainer = train_gpt.Trainer(hp, place)
    for step in range(2):
        trainer.step(trainer.train_data.next_batch(), step)
    peak = fake_gpu.seen.peak_bytes
    (inputs, targets), *_ = trainer.train_data.next_batch()
    loss, forward = largest_in(trainer.parallel, inputs, targets, trainer.window)
    _, backward = largest_in(loss.backward)
    del trainer, loss
    gc.collect()
    return dict(arguments=arguments, peak=peak, state=state, estimate=state + hp.sequence_tokens * per_token,
                forward=forward, backward=backward)


def main() -> None:
    sets = [list(group) for split, group in itertools.groupby(sys.argv[2:], "/".__eq__) if not split]
    with fake_gpu.session():
        for arguments in sets or [[]]:
            print(json.dumps(run(arguments)), flush=True)


if __name__ == "__main__":
    main()
