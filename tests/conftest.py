"""What the tests share: the trainer on the path, few threads, small token shards, tiny hyperparameters."""
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for the processes that tests start
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", f"{tempfile.gettempdir()}/hypothesis")
HERE = Path(__file__).parent
sys.path[:0] = [str(folder) for folder in (HERE.parent, HERE, HERE / "commands", HERE / "gpu", HERE / "data")]

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

import runs
import train_gpt

torch.set_num_threads(1)
settings.register_profile("trainer", deadline=None, derandomize=True, max_examples=40, database=None,
                          suppress_health_check=[HealthCheck.too_slow])  # of a busy machine no test may fail
settings.load_profile("trainer")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also the tests that take minutes each")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes minutes; only with --slow, before a record")


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.path.parent.name != "gpu")  # the longest first: no worker waits at the end
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="takes minutes: ./run.sh test --slow"))


# Small in every way that costs time; what makes a system that system is left to its preset.
TINY = dict(vocab_size=200, document_token=7, num_steps=12, batch_tokens=1024, sequence_tokens=512,
            segment_tokens=0, val_tokens=1024, val_every=0, model_dim=32, num_heads=2, num_layers=12,
            cooldown=5, device="cpu", dtype="float32", muon_dtype="float32", compile="no", save_model=False,
            sample_tokens=4, log_every=1)
DATED = ("2024-11-19", "2024-12-04", "2024-12-08", "2024-12-10", "2024-12-17", "2025-01-04")


def write_shard(path: Path, tokens, **header) -> str:
    return str(runs.write_shard(path, np.asarray(tokens), **header))


def made_up_text(length: int, vocab_size: int = 200, document_token: int = 7, seed: int = 0,
                 documents: float = 1 / 200) -> np.ndarray:
    """Tokens with something to learn: most follow from the one before, a part of them starts a document."""
    random = np.random.default_rng(seed)
    successor = random.permutation(vocab_size)
    tokens = np.empty(length, dtype=np.uint16)
    tokens[0] = document_token
    fresh, keep = random.zipf(1.5, length) % vocab_size, random.random(length) < 0.6
    for place in range(1, length):
        tokens[place] = successor[tokens[place - 1]] if keep[place] else fresh[place]
    tokens[tokens == document_token] = successor[document_token]
    tokens[random.random(length) < documents] = document_token
    return tokens


def hyperparameters(*presets: str, **values) -> train_gpt.Hyperparameters:
    """Through the command line, as a user would: presets, then values on top."""
    arguments = [f"--preset={preset}" for preset in presets]
    arguments += [f"--{name}={value}" for name, value in values.items()]
    return train_gpt.parse_command_line(arguments)


@pytest.fixture
def tiny():
    """tiny(*presets, **overrides): hyperparameters small enough to train in a second or two."""
    return lambda *presets, **values: hyperparameters(*(presets or ("2025-01-04",)), **(TINY | values))


@pytest.fixture
def make_shards(tmp_path):
    """make_shards(tokens, …, name="train"): writes one shard each; returns the pattern that finds them."""
    def make(*shards, name: str = "train") -> str:
        for number, tokens in enumerate(shards):
            write_shard(tmp_path / f"{name}_{number:06d}.bin", tokens)
        return str(tmp_path / f"{name}_*.bin")
    return make
