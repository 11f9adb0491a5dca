"""The trainer of train_gpt.py on a pretended GPU, with made-up batches, for step.py and memory.py.

Import it only in a script that fake_gpu.py runs: train_gpt.py imports Dynamo, which has to see the
mocks.
"""

import fake_gpu
import torch
import train_gpt


class Batches:
    """In place of the loader: the same shapes and types, nothing read."""

    def __init__(self, sequence_tokens: int, micro_steps: int):
        self.sequence_tokens = sequence_tokens
        self.micro_steps = micro_steps
        self.index = 0

    def next_batch(self, stride: int = 1) -> list:
        self.index += stride
        device = torch.device("cuda", fake_gpu.index)
        tokens = torch.zeros(self.sequence_tokens + 1, dtype=torch.uint16, device=device)
        return [(tokens[:-1].int(), tokens[1:].long())] * self.micro_steps


def build_trainer(arguments: list[str], micro_steps: int = 0) -> train_gpt.Trainer:
    """With these arguments on top of the preset h100, and this many sequences per rank and step.

    0: as many as the batch has.
    """
    hp = train_gpt.parse_command_line(["--preset=h100", "--val_tokens=1048576", *arguments])
    hardware = train_gpt.find_hardware(hp)
    train_gpt.fit_to_hardware(hp, hardware)
    micro_steps = micro_steps or hp.batch_tokens // (hardware.world_size * hp.sequence_tokens)
    val_sequence = hp.val_sequence_tokens or hp.sequence_tokens
    hp.batch_tokens = hardware.world_size * micro_steps * hp.sequence_tokens
    hp.val_tokens = hardware.world_size * val_sequence
    train_gpt.prepare_device(hp, hardware)
    train_gpt.join_group(hardware)
    train = Batches(hp.sequence_tokens, micro_steps)
    val = Batches(val_sequence, 1)
    return train_gpt.Trainer(hp, hardware, train_gpt.Data(train, val, None, {}))


def forward(trainer: train_gpt.Trainer) -> torch.Tensor:
    """The loss of one sequence."""
    inputs, targets = trainer.data.train.next_batch()[0]
    return trainer.ddp_model(inputs, targets, trainer.window)


def window_changes(trainer: train_gpt.Trainer) -> list[int]:
    """The steps at which the window takes another value."""
    num_steps = trainer.hp.num_steps
    windows = [train_gpt.window_at(trainer.hp, step) for step in range(num_steps)]
    return [step for step in range(1, num_steps) if windows[step] != windows[step - 1]]


def estimated_memory(trainer: train_gpt.Trainer) -> tuple[float, float]:
    """(bytes of parameters, gradients and optimizers; bytes in all), as the trainer estimates."""
    parameters = train_gpt.parameter_bytes(trainer.hp, trainer.hardware)
    return parameters, parameters + train_gpt.sequence_bytes(trainer.hp, trainer.hardware)
