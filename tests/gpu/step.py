"""Lower the real training step of a preset, and print what was seen, as JSON on the last line.

    python fake_gpu.py --card=H100 step.py [--name=value …]       hyperparameters of train_gpt.py

It runs warm_up, Trainer.step and evaluate as a run does; batches are made up.
"""
import json
import sys

import fake_gpu
import torch
import train_gpt
import training


def counted(function, *arguments) -> dict:
    """What a piece of the run added to each list of fake_gpu.seen."""
    names = ("kernels", "launches", "calls", "collectives")
    before = {name: len(getattr(fake_gpu.seen, name)) for name in names}
    function(*arguments)
    return {name: getattr(fake_gpu.seen, name)[before[name]:] for name in names}


def lengths(counts: dict) -> dict:
    return {name: len(values) for name, values in counts.items()}


def run(arguments: list[str]) -> dict:
    trainer = training.build_trainer(arguments, micro_steps=1)
    train_gpt.warm_up(trainer)
    graphs = train_gpt.count_compiled_graphs()
    numbers = {0, 1, *training.window_changes(trainer), trainer.hp.num_steps - 1}
    steps = {step: counted(trainer.step, trainer.data.train.next_batch(), step)
             for step in sorted(numbers)}
    validation = counted(train_gpt.evaluate, trainer)
    for p in trainer.model.parameters():
        p.grad = torch.zeros_like(p)
    muon = trainer.muon
    optimizers = dict(
        Adam=lengths(counted(trainer.adam.step)),
        Muon=lengths(counted(lambda: muon.finish_updates(muon.start_updates()))))
    after_warm_up = (*steps.values(), validation)
    return fake_gpu.report() | dict(
        limit=fake_gpu.card.shared_limit, step=steps[1], optimizers=optimizers,
        new_kernels=sum(len(counts["kernels"]) for counts in after_warm_up),
        new_graphs=train_gpt.count_compiled_graphs() - graphs)


def main(arguments: list[str]) -> None:
    seen = run(arguments)
    kernels = seen["kernels"] or [dict(name="none", registers=0, spilled=0, shared=0)]
    spills = {}
    for kernel in kernels:  # of a kernel's configurations, the one that spills least
        spills[kernel["name"]] = min(kernel["spilled"], spills.get(kernel["name"], 1 << 30))
    seen["worst_spill"] = max(spills.values())
    seen["most_shared"] = max(kernel["shared"] for kernel in kernels)
    print(f"{fake_gpu.card.name}, {' '.join(arguments) or 'h100'}: {len(spills)} kernels in "
          f"{len(kernels)} configurations, {seen['graphs']} graphs")
    print(f"a step: {len(seen['step']['launches'])} Triton launches, "
          f"{len(seen['step']['calls'])} other calls; optimizers: {seen['optimizers']}")
    print(f"worst spill {seen['worst_spill']:,} bytes, shared memory {seen['most_shared']:,} of "
          f"{seen['limit']:,} bytes, peak {seen['peak_bytes'] / 2**30:.2f} GiB, largest tensor "
          f"{seen['largest']}")
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1:])
