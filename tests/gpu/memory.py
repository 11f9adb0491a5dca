"""Trace steps and a validation as a GPU would allocate them; compare with train_gpt's estimate.

    python fake_gpu.py --card=H100 --depth=wrapper memory.py [--name=value …]

No kernel is compiled: Inductor decides on the buffers, its wrapper code allocates and frees them.
A step has two micro-steps: a gradient is added to one that is there. Prints as JSON the peak, the
estimate, and the largest tensors of the forward and of the backward pass.
"""
import json
import sys

import fake_gpu
import train_gpt
import training


def largest_in(function, *arguments) -> tuple:
    """Its result, and the largest tensor that was allocated meanwhile."""
    fake_gpu.seen.largest = (0, (), None)
    return function(*arguments), fake_gpu.seen.largest


def main(arguments: list[str]) -> None:
    trainer = training.build_trainer(arguments, micro_steps=2)
    for step in range(2):
        trainer.step(trainer.data.train.next_batch(), step)
    train_gpt.evaluate(trainer)
    peak = fake_gpu.seen.peak_bytes
    loss, in_forward = largest_in(training.forward, trainer)
    _, in_backward = largest_in(loss.backward)
    state, estimate = training.estimated_memory(trainer)
    print(json.dumps(dict(peak=peak, state=state, estimate=estimate, forward=in_forward,
                          backward=in_backward)))


if __name__ == "__main__":
    main(sys.argv[1:])
