"""Mutated files, a few of each kind (./run.sh faults has many more), and shards that change."""
from pathlib import Path

import faults
import pytest
import torch
from fuzz import (
    bytes_per_token,
    fuzz_checkpoint,
    fuzz_manifest,
    fuzz_shard,
    mutations,
    read_or_refused,
)
from helpers import SIX_STEPS, make_trainer, write_manifest, write_shard
from hypothesis import given, settings

import train_gpt


@pytest.fixture(scope="module")
def trainer(data) -> train_gpt.Trainer:
    return make_trainer(train_gpt.parse_command_line([*SIX_STEPS, *data]))


@settings(max_examples=50)
@given(changes=mutations())
def test_mutated_shards(tmp_path_factory, changes):
    fuzz_shard(tmp_path_factory.getbasetemp(), changes)


@settings(max_examples=50)
@given(changes=mutations())
def test_mutated_manifests(tmp_path_factory, changes):
    fuzz_manifest(tmp_path_factory.getbasetemp(), changes)


@settings(max_examples=30)
@given(changes=mutations())
def test_mutated_checkpoints(tmp_path_factory, whole, trainer, changes):
    content = (whole.folder / "checkpoint_0000004.pt").read_bytes()
    fuzz_checkpoint(tmp_path_factory.getbasetemp(), changes, content, trainer)


@pytest.mark.parametrize("tokens, text_bytes", [(3000, 10**400), (3000, -5), (0, 9)])
def test_a_manifest_with_impossible_numbers_gives_no_ratio(tmp_path, tokens, text_bytes):
    path = write_shard(tmp_path / "a.bin", torch.arange(tokens).numpy() % 64)
    write_manifest(tmp_path, [dict(file="a.bin", tokens=tokens, text_bytes=text_bytes)])
    assert read_or_refused(lambda: bytes_per_token(path)) is None


def replace_by_a_link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)  # it exists, and cannot be opened


@pytest.mark.parametrize("change, reason", [
    (Path.unlink, "No such file"), (lambda path: path.write_bytes(b""), "cannot mmap an empty"),
    (lambda path: write_shard(path, torch.arange(300).numpy() % 64), "changed since the run began"),
    (replace_by_a_link_to_itself, "Too many levels")],
    ids=["removed", "emptied", "replaced", "cannot be opened"])
def test_a_shard_that_changes_after_the_start_is_named(tmp_path, change, reason):
    path = write_shard(tmp_path / "a.bin", torch.arange(3000).numpy() % 64)
    loader = train_gpt.Loader(str(path), 512, 256, vocab_size=64)
    change(path)
    with pytest.raises(train_gpt.UserError, match=f"a.bin: {reason}.*; fetch it again"):
        loader.next_batch()


def test_the_run_whose_ranks_are_killed_has_enough_data(tmp_path, monkeypatch):
    """The whole laptop preset, also where enwik8 is not there."""
    monkeypatch.setattr(faults, "ROOT", tmp_path)
    base, data = faults.laptop_run(tmp_path, [])
    hp = train_gpt.parse_command_line([*base, *data])
    assert len(train_gpt.open_data(hp, train_gpt.Hardware()).train) >= hp.num_steps
