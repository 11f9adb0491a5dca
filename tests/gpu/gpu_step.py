"""Lower the real training step of a preset for a card, and print what was seen as JSON on the last line.

    python gpu_step.py CARD [--name=value …]      H100, A100, 3090, 4090 or B200; arguments of train_gpt.py
    RANKS=8 python gpu_step.py H100 …             as rank 0 of 8
    CONFIGS=first …                               one configuration of each kernel, not all; none: none
    NO_PTXAS=1 …                                  stop short of registers and spills, in half of the time
    MICRO_STEPS=2 …                               sequences per step of a rank, 1 unless told

It goes through Trainer.warm_up, Trainer.step and evaluate as a run does; batches are given, not loaded.
"""
import json
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), os.environ.get("TRAIN_GPT", str(Path(__file__).parents[2]))]

import fake_gpu  # noqa: E402

card, arguments = sys.argv[1], sys.argv[2:]
ranks, micro_steps = (int(os.environ.get(name, 1)) for name in ("RANKS", "MICRO_STEPS"))
fake_gpu.install(card, configs=os.environ.get("CONFIGS", "all"), assemble="NO_PTXAS" not in os.environ)
if ranks > 1:
    fake_gpu.join(0, ranks)

import torch  # noqa: E402
import train_gpt  # noqa: E402


class Batches:
    """In place of the loader: the same shapes and types, nothing read."""

    def __init__(self, pattern, batch_tokens, sequence_tokens, *rest, world_size=1, **options):
        self.tokens, self.index, self.shards = sequence_tokens, 0, []
        self.micro_steps = max(1, batch_tokens // (ranks * sequence_tokens))

    def __len__(self) -> int:
        return 10**6

    def next_batch(self, stride: int = 1) -> list:
        self.index += stride
        tokens = torch.zeros(1, self.tokens + 1, dtype=torch.uint16, device=f"cuda:{fake_gpu.index}")
        inputs, targets = tokens[:, :-1].flatten().int(), tokens[:, 1:].flatten().long()
        return [(inputs, targets)] * self.micro_steps


train_gpt.Loader = Batches


def counted(function, *arguments) -> dict:
    """What a piece of the run added to each count."""
    names = "kernels", "launches", "calls", "collectives"
    before = {name: len(getattr(fake_gpu.seen, name)) for name in names}
    function(*arguments)
    return {name: getattr(fake_gpu.seen, name)[before[name]:] for name in names}


def numbers(counts: dict) -> dict:
    return {name: len(values) for name, values in counts.items()}


def run(hp: train_gpt.Hyperparameters) -> dict:
    place = train_gpt.find_place(hp)
    train_gpt.start_up(place, hp)
    trainer = train_gpt.Trainer(hp, place)
    trainer.warm_up()
    graphs = train_gpt.compiled_graphs()
    steps = {step: counted(trainer.step, trainer.train_data.next_batch(), step)
             for step in sorted({0, 1, *window_changes(hp), hp.num_steps - 1})}
    validation = counted(train_gpt.evaluate, hp, trainer.forward, trainer.val_data, trainer.window, place)
    optimizers = {type(optimizer).__name__: numbers(counted(optimizer.step))
                  for optimizer in with_gradients(trainer)}
    return fake_gpu.report() | dict(
        card=card, limit=fake_gpu.card.shared_limit, step=steps[1], steps=len(steps), optimizers=optimizers,
        new_kernels=sum(len(counts["kernels"]) for counts in (*steps.values(), validation)),
        new_graphs=train_gpt.compiled_graphs() - graphs, graphs_of_model=graphs)


def window_changes(hp) -> list[int]:
    """The steps at which the window takes another value."""
    windows = [train_gpt.window_at(hp, step) for step in range(hp.num_steps)]
    return [step for step in range(1, hp.num_steps) if windows[step] != windows[step - 1]]


def with_gradients(trainer):
    for p in trainer.model.parameters():
        p.grad = torch.zeros_like(p)
    return trainer.optimizers


def settings(arguments: list[str]) -> train_gpt.Hyperparameters:
    hp = train_gpt.parse_command_line(["--preset=h100", "--val_tokens=65536", *arguments])
    hp.batch_tokens = ranks * micro_steps * hp.sequence_tokens
    hp.val_tokens = ranks * hp.sequence_tokens
    return hp


def main() -> None:
    hp = settings(arguments)
    with fake_gpu.session():
        seen = run(hp)
    kernels = seen["kernels"] or [dict(name="none", registers=0, spilled=0, shared=0)]
    spills = {}
    for kernel in kernels:  # of the configurations of a kernel, the one that spills least
        spills[kernel["name"]] = min(kernel["spilled"], spills.get(kernel["name"], 1 << 30))
    seen["worst_spill"] = max(spills.values())
    seen["most_shared"] = max(kernel["shared"] for kernel in kernels)
    print(f"{card}, {' '.join(arguments) or 'h100'}: {len(spills)} kernels, {len(kernels)} cubins, "
          f"{seen['graphs']} graphs; a step: {len(seen['step']['launches'])} Triton launches, "
          f"{len(seen['step']['calls'])} other calls; optimizers {seen['optimizers']}; worst spill "
          f"{seen['worst_spill']:,} bytes of {max(kernel['spilled'] for kernel in kernels):,}, shared memory "
          f"{seen['most_shared']:,} of {seen['limit']:,} bytes; peak {seen['peak_bytes'] / 2**30:.2f} GiB, "
          f"largest tensor {seen['largest']}")
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
