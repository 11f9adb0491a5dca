"""Paths, threads and fixtures of the tests; helpers.py has what they call."""
import functools
import inspect
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for the processes that tests start
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", f"{tempfile.gettempdir()}/hypothesis")
if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
    # Inductor writes kernels for AVX2 then, but compiles them for the machine it is on, and takes
    # kernels for AVX-512 out of its cache: on a machine that has more they compute nonsense
    os.environ.setdefault("TORCHINDUCTOR_CPP_MARCH", "x86-64-v3")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/inductor_avx2")
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / name) for name in (".", "commands", "gpu", "data", "records")]

import pytest  # noqa: E402
import torch  # noqa: E402
from helpers import (  # noqa: E402
    SIX_STEPS,
    TINY_FIELDS,
    Result,
    hyperparameters,
    make_data,
    write_shard,
)
from hypothesis import HealthCheck, settings  # noqa: E402

import train_gpt  # noqa: E402

torch.set_num_threads(1)
# a shell that starts this in the background ignores SIGINT, and so would all that tests start
signal.signal(signal.SIGINT, signal.default_int_handler)
inspect.getsource = functools.cache(inspect.getsource)  # 0.1 s for each command line that is parsed
settings.register_profile("trainer", deadline=None, derandomize=True, max_examples=40,
                          database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("trainer")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also the tests that take minutes each")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes minutes; only with --slow, before a record")


def pytest_xdist_auto_num_workers(config):
    """One more than there are cores: many tests wait for other processes."""
    return min(os.cpu_count() + 1, 4)


def pytest_collection_modifyitems(config, items):
    longest_first = ("gpu", "test_training.py", "test_faults.py", "test_check.py", "test_launch.py")
    items.sort(key=lambda item: not {item.path.parent.name, item.path.name} & {*longest_first})
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="takes minutes: ./run.sh test --slow"))


@pytest.fixture
def tiny():
    """tiny(*presets, **overrides): hyperparameters small enough to train in a second or two."""
    return lambda *presets, **values: hyperparameters(*(presets or ("2025-01-04",)),
                                                      **(TINY_FIELDS | values))


@pytest.fixture
def make_shards(tmp_path):
    """make_shards(tokens, …, name="train"): writes one shard each; returns their pattern."""
    def make(*shards, name: str = "train") -> str:
        for number, tokens in enumerate(shards):
            write_shard(tmp_path / f"{name}_{number:06d}.bin", tokens)
        return str(tmp_path / f"{name}_*.bin")
    return make


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    """The options that name small shards and a log folder of this test file."""
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data) -> Result:
    """A run of SIX_STEPS that nothing happened to; all of its checkpoints are there."""
    assert train_gpt.main([*SIX_STEPS, *data, "--run_id=whole"]) == 0
    return Result(Path(data[-1].partition("=")[2]) / "whole")


@pytest.fixture
def cut(whole, tmp_path):
    """cut(step): a copy of that run's folder as if it had been killed some time after a step."""
    def make(step: int, source: Path = whole.folder) -> Path:
        folder = tmp_path / f"logs{step}" / "run"
        shutil.copytree(source, folder)
        (folder / "model.pt").unlink()
        for path in train_gpt.checkpoints(folder):
            if train_gpt.step_of(path) > step:
                path.unlink()
        return folder
    return make


@pytest.fixture(scope="session")
def gpt2():
    """GPT-2's vocabulary, from tiktoken's cache: it is not part of this repository."""
    import data_helpers  # puts data/ on the path
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(data_helpers.TIKTOKEN_CACHE))
        try:
            yield data_helpers.vocabulary.gpt2()
        except data_helpers.vocabulary.UserError as error:
            pytest.skip(str(error))
