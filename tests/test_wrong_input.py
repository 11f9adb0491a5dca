"""Each mistake is one clear sentence and exit code 2 on every rank: no traceback, no hang, nothing half-written."""
import os

import numpy as np
import pytest
import torch

import train_gpt
from helpers import TINY, make_data, run, write_shard


def refused(arguments: list[str], capsys, *expected: str) -> None:
    """main, in this process, prints one sentence with all that is expected, and returns 2."""
    assert train_gpt.main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    for part in expected:
        assert part in lines[0], lines[0]


def broken_shards(folder) -> dict[str, tuple]:
    tokens = np.arange(2000) % 60
    return {
        "magic": (lambda p: write_shard(p, tokens, magic=7), "not a token shard: it begins with 7"),
        "version": (lambda p: write_shard(p, tokens, version=2), "shard version 2, not 1"),
        "claims_more": (lambda p: write_shard(p, tokens, claimed=3000), "claims 3,000 tokens and it holds 2,000"),
        "claims_fewer": (lambda p: write_shard(p, tokens, claimed=1000), "claims 1,000 tokens and it holds 2,000"),
        "truncated": (lambda p: p.write_bytes(write_shard(p, tokens).read_bytes()[:-1]), "it holds 1,999.5"),
        "shorter_than_a_header": (lambda p: p.write_bytes(b"abc"), "not a token shard"),
        "empty": (lambda p: p.write_bytes(b""), "not a token shard"),
        "outside_vocabulary": (lambda p: write_shard(p, tokens + 10), "is outside vocab_size=64"),
    }


@pytest.mark.parametrize("fault", broken_shards(None))
def test_a_broken_shard_is_named(tmp_path, capsys, fault):
    data = make_data(tmp_path)
    (tmp_path / "train_000001.bin").unlink()
    make, sentence = broken_shards(tmp_path)[fault]
    make(tmp_path / "train_000000.bin")
    refused([*TINY, *data, "--num_steps=1"], capsys, "train_000000.bin", sentence)


def test_a_broken_shard_stops_every_rank(tmp_path):
    data = make_data(tmp_path)
    write_shard(tmp_path / "train_000000.bin", np.full(20_000, 64))
    process = run([*TINY, *data], ranks=2)
    assert process.returncode == 1 and "token 64 in its batch 0 is outside vocab_size=64" in process.stderr


@pytest.mark.parametrize("options, sentence", [
    (["--train_files=nowhere/*.bin"], "nowhere/*.bin: no token shards there"),
    (["--batch_tokens=1000"], "expected a multiple of sequence_tokens=256; the nearest is --batch_tokens=1024"),
    (["--sequence_tokens=300"], "the mask's block of 128; the nearest is --sequence_tokens=256"),
    (["--preset=labtop"], "--preset=labtop: expected one of h100, laptop,"),
    (["--num_steps=500"], "--num_steps asks for 500: 25 shards are missing; make them with: python data/tokenize_text.py"),
    (["--val_tokens=102400"], "--val_tokens asks for 400: 5 shards are missing"),
    (["--num_steps=many"], "--num_steps=many: expected a number"),
    (["--num_steps=2.5"], "expected a whole number; the nearest is --num_steps=2"),
    (["--muon_nesterov=perhaps"], "expected true or false"),
    (["--model_dim=30"], "expected a multiple of 4 × num_heads = 8; the nearest is --model_dim=32"),
    (["--value_layout=(0, 1)"], "one entry for each of the 4 layers"),
    (["--value_layout=(0, x, 1, 1)"], "whole numbers and None"),
    (["--value_layout=mirorred"], "the nearest is --value_layout=mirrored"),
    (["--no_attention=(9)"], "layers from 0 to 3"),
    (["--document_token=64"], "below vocab_size=64; the nearest is --document_token=63"),
    (["--attention=flex"], "give --attention=banded"),
    (["--device=mps"], "this machine has none"),
    (["--checkpoint=missing.pt"], "missing.pt: cannot be loaded"),
    (["--sample=Hello"], "a model to sample from"),
    (["num_steps=3"], "num_steps=3: no such hyperparameter"),
    (["--num_steps"], "it has no value"),
    (["--seed=-1"], "0 or more; the nearest is --seed=0"),
    (["--adam_beta1=1"], "below 1")])
def test_wrong_options(tmp_path, capsys, options, sentence):
    refused([*TINY, *make_data(tmp_path), *options], capsys, sentence)
    assert not (tmp_path / "logs").exists()


def test_the_script_itself_exits_with_2_and_one_line():
    process = run(["--preset=labtop"])
    assert process.returncode == 2 and process.stdout == "" and len(process.stderr.splitlines()) == 1


def test_batch_that_the_ranks_do_not_divide(tmp_path):
    process = run([*TINY, *make_data(tmp_path), "--batch_tokens=768"], ranks=2)
    assert process.returncode == 1  # torchrun's own
    sentence = "a multiple of ranks × sequence_tokens = 2 × 256; the nearest is --batch_tokens=1024"
    assert process.stderr.count(sentence) == 1


def test_a_log_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    refused([*TINY, *make_data(tmp_path), f"--log_dir={tmp_path}/file"], capsys, f"--log_dir={tmp_path}/file",
            "give another folder")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere; a file in the way of the folder is tested above")
def test_a_log_folder_without_permission(tmp_path, capsys):
    (tmp_path / "locked").mkdir(mode=0o500)
    refused([*TINY, *make_data(tmp_path), f"--log_dir={tmp_path}/locked"], capsys, "Permission denied")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_not_finite_stops_every_rank_and_names_the_step(tmp_path, ranks):
    process = run([*TINY, *make_data(tmp_path), "--head_rate=1e38", "--softcap=0", "--num_steps=10"], ranks)
    assert process.returncode == {1: 2, 2: 1}[ranks]  # ours, torchrun's
    assert "Traceback" not in process.stderr.partition("torch/distributed")[0]
    sentence = next(line for line in process.stderr.splitlines() if line.startswith("error"))
    assert "the loss of step" in sentence and "lower the rates" in sentence


def test_the_first_tensor_that_is_not_finite_is_named(tmp_path):
    hp = train_gpt.parse_command_line([*TINY, *make_data(tmp_path)])
    trainer = make_trainer(hp)
    with torch.no_grad():
        trainer.model.blocks[2].up.weight[0, 0] = float("nan")
    with pytest.raises(train_gpt.UserError, match="step 1 is nan: the first parameter that is not finite is that of "
                                                  "blocks.2.up.weight"):
        trainer.step(trainer.data.train.next_batch(), 0)
    trainer = make_trainer(hp)
    batch = trainer.data.train.next_batch()
    trainer.model.register_forward_hook(lambda *_: torch.tensor(float("inf"), requires_grad=True))
    trainer.model.blocks[0].mix.grad = torch.tensor([0.0, float("nan")])
    for p in trainer.model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(train_gpt.UserError, match="is inf: the first gradient that is not finite is that of "
                                                  "blocks.0.mix"):
        trainer.step(batch, 0)
    assert all(map(torch.equal, before, trainer.model.parameters()))  # stopped before the optimizers


def test_a_damaged_checkpoint_is_refused_and_nothing_in_it_runs(tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)
    torch.save(dict(format=1, model=Evil()), tmp_path / "evil.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "evil.pt").read_bytes()[:100])
    torch.save(dict(format=99), tmp_path / "future.pt")
    for name in ("evil", "cut", "future"):
        refused([f"--checkpoint={tmp_path}/{name}.pt", "--device=cpu"], capsys, f"{name}.pt: cannot be loaded")
    assert not (tmp_path / "owned").exists()
