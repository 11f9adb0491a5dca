"""Evaluation: validation loss, bits per byte, samples of text, HellaSwag's score."""
import json
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    TINY,
    Result,
    make_data,
    make_trainer,
    run,
    train_steps,
    trained,
    write_manifest,
    write_shard,
)

import train_gpt

BYTES = ["--vocab_size=257", "--document_token=256"]


def hyperparameters(*options: str) -> train_gpt.Hyperparameters:
    return train_gpt.parse_command_line([*TINY, *options])


def final_window(hp: train_gpt.Hyperparameters) -> torch.Tensor:
    return torch.tensor(train_gpt.window_at(hp, hp.num_steps), dtype=torch.int32)


def random_model(*options: str) -> train_gpt.GPT:
    """With no parameter at zero: its answers depend on all that it sees."""
    torch.manual_seed(0)
    model = train_gpt.GPT(hyperparameters(*options)).eval()
    for p in model.parameters():
        if not p.any():
            torch.nn.init.normal_(p, std=0.3)
    return model


# ---- validation ----

@pytest.fixture(scope="module")
def trainer(data) -> train_gpt.Trainer:
    """After a few steps, with the window of the last."""
    trainer = make_trainer(hyperparameters(*data))
    train_steps(trainer, 3)
    trainer.window.copy_(train_gpt.window_tensor(trainer.hp, 4))
    return trainer


def test_validation_is_the_mean_over_the_first_tokens_each_time(data, trainer):
    """Of its shard, as long contiguous sequences: segments are for training."""
    path = next(option for option in data if "val_files" in option).partition("=")[2]
    shard = np.fromfile(path.replace("*", "000000"), "<u2")[512:]  # after the header
    tokens = torch.from_numpy(shard[:1025].astype(np.int64))
    inputs = tokens[:-1].view(4, 256)
    targets = tokens[1:].view(4, 256)
    model = trainer.model.eval()
    losses = [model(inputs[row], targets[row], trainer.window).item() for row in range(4)]
    trainer.model.train()
    for _ in range(2):
        result = train_gpt.evaluate(trainer)
        assert result["val_loss"] == pytest.approx(sum(losses) / 4, abs=1e-6)
        assert trainer.model.training and not trainer.stopping
    text_bytes = int((targets != 63).sum())
    assert 0 < text_bytes < 1024  # document tokens are not text
    expected = result["val_loss"] * 1024 / text_bytes / math.log(2)
    assert result["bits_per_byte"] == pytest.approx(expected)


def test_validation_in_two_halves(trainer, monkeypatch):
    """val_start is where the validation tokens begin."""
    whole = train_gpt.evaluate(trainer)["val_loss"]
    monkeypatch.setattr(trainer.hp, "val_tokens", 512)
    first = train_gpt.evaluate(trainer)["val_loss"]
    monkeypatch.setattr(trainer.hp, "val_start", 512)
    second = train_gpt.evaluate(trainer)["val_loss"]
    assert first != second
    assert (first + second) / 2 == pytest.approx(whole, abs=1e-6)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_validation(trainer, monkeypatch, world_size):
    """Every sequence is one rank's, also where their number is not divisible."""
    alone = train_gpt.evaluate(trainer)
    monkeypatch.setattr(train_gpt, "all_reduce_sum", lambda totals, hardware: totals)
    shares = []
    for rank in range(world_size):
        hardware = train_gpt.Hardware(rank=rank, world_size=world_size)
        monkeypatch.setattr(trainer, "hardware", hardware)
        shares.append(train_gpt.evaluate(trainer)["val_loss"])
    assert sum(shares) == pytest.approx(alone["val_loss"], abs=1e-6)


def test_bits_per_byte_of_a_vocabulary_come_from_the_manifest(tmp_path):
    arguments = [*make_data(tmp_path), "--vocab_size=300"]
    unknown = train_gpt.evaluate(make_trainer(hyperparameters(*arguments)))
    assert unknown["bits_per_byte"] is None
    names = [path.name for path in sorted(tmp_path.glob("*.bin"))]
    write_manifest(tmp_path, [dict(file=name, split=name.split("_")[0], text_bytes=80_000)
                              for name in names], vocab_size=300)
    known = train_gpt.evaluate(make_trainer(hyperparameters(*arguments)))
    assert known["val_loss"] == unknown["val_loss"]
    assert known["bits_per_byte"] == pytest.approx(known["val_loss"] / 4 / math.log(2))


# ---- samples ----

def test_sampling_from_a_saved_model(data, capsys):
    arguments = [*TINY, *data, *BYTES, "--save_every=4", "--run_id=sampled"]
    assert train_gpt.main(arguments) == 0
    model = re.search(r"model: (.+)", capsys.readouterr().out)[1]
    folder = model.removesuffix("/model.pt")

    def sample(*options, path=model):
        arguments = ["--sample=Hello", f"--checkpoint={path}", "--sample_tokens=12", *options]
        assert train_gpt.main(arguments) == 0
        return capsys.readouterr().out

    first = sample("--seed=1")
    assert first.startswith("Hello")
    assert sample("--seed=1") == first != sample("--seed=2")
    for path in (folder, f"{folder}/checkpoint_0000004.pt"):
        assert sample("--seed=1", path=path) == first
    likeliest = sample("--temperature=0", "--seed=1")
    assert likeliest == sample("--temperature=0", "--seed=2") == sample("--top_k=1")


def test_sampling_sees_what_training_saw():
    """Its logits at a position are those of a forward pass over the whole text."""
    model = random_model(*BYTES, "--sequence_tokens=2048", "--batch_tokens=2048",
                         "--val_tokens=2048")
    text = "some words that are long enough to be seen " * 25  # longer than the window
    continued = train_gpt.sample(model, text, hyperparameters("--temperature=0",
                                                              "--sample_tokens=1"))
    tokens = [256, *text.encode()]
    inputs = torch.tensor(tokens + [256] * (-len(tokens) % 128))
    logits = model(inputs, None, final_window(model.hp))[len(tokens) - 1, :257]
    best = logits.argmax().item()
    expected = "\n\n" if best == 256 else bytes([best]).decode(errors="replace")
    assert continued == text + expected


def test_a_sample_may_be_longer_than_a_sequence():
    model = random_model(*BYTES)
    hp = hyperparameters("--temperature=0", "--sample_tokens=2")
    text = "x" * (model.hp.sequence_tokens + 50)
    assert train_gpt.sample(model, text, hp).startswith(text)


class ScriptedModel:
    """Predicts the given tokens, one after the other."""

    def __init__(self, tokens: list[int]):
        self.hp = hyperparameters(*BYTES)
        self.skip_weights = torch.zeros(1)
        self.tokens = iter(tokens)

    def __call__(self, inputs, targets, window):
        logits = torch.zeros(len(inputs), self.hp.padded_vocab)
        logits[:, next(self.tokens)] = 1.0
        return logits


def test_a_document_token_in_a_sample_is_a_blank_line():
    tokens = [*"end.".encode(), 256, 256, *"Größe".encode()]
    hp = hyperparameters("--temperature=0", f"--sample_tokens={len(tokens)}")
    text = train_gpt.sample(ScriptedModel(tokens), "The ", hp)
    assert text == "The end.\n\nGröße"


def test_control_characters_of_a_sample_are_escaped():
    """They could change the state of a terminal: move its cursor, or end its colours."""
    assert train_gpt.escape_control_characters("a\tb\nGröße → 中") == "a\tb\nGröße → 中"
    assert train_gpt.escape_control_characters("\x1b[2J\r\x07\x7f\x9b") == r"\x1b[2J\r\x07\x7f\x9b"
    tokens = [*"red \x1b[31m".encode()]
    hp = hyperparameters("--temperature=0", f"--sample_tokens={len(tokens)}")
    assert train_gpt.sample(ScriptedModel(tokens), "", hp) == r"red \x1b[31m"


def test_a_text_that_the_model_has_no_tokens_for_is_refused():
    with pytest.raises(train_gpt.UserError, match="the text has token 111 and the model knows 64"):
        train_gpt.sample(random_model(), "Hello", hyperparameters())


def test_a_vocabulary_other_than_bytes_is_gpt2s(monkeypatch):
    with train_gpt.data_module("vocabulary") as vocabulary:
        monkeypatch.setattr(vocabulary, "gpt2_codec", lambda: ("encode", "decode"))
    assert train_gpt.text_codec(hyperparameters("--vocab_size=258")) == ("encode", "decode")
    encode, decode = train_gpt.text_codec(hyperparameters(*BYTES))
    assert encode("é\udcff") == [0xC3, 0xA9, 0xFF], "as a command line with the byte 255 arrives"
    assert decode(encode("Größe")) == "Größe"


def test_a_run_without_gpt2s_vocabulary_says_why_there_is_no_sample(data, tmp_path, monkeypatch):
    with train_gpt.data_module("vocabulary") as vocabulary:
        monkeypatch.setattr(vocabulary, "is_cached", lambda: False)
    arguments = [*TINY, *data, "--vocab_size=300", "--num_steps=1", f"--log_dir={tmp_path}",
                 "--run_id=v"]
    assert train_gpt.main(arguments) == 0
    lines = Result(tmp_path / "v").log.splitlines()
    assert any(line.startswith("no sample: text needs GPT-2's vocabulary") for line in lines)
    assert lines[-1].startswith("model: ")


# ---- HellaSwag ----

def write_tasks(folder, num_tasks: int = 30) -> list[tuple]:
    """Random tasks as data/hellaswag.py writes them; returns (context, endings, label) of each."""
    generator = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    tasks = []
    rows = []
    for _ in range(num_tasks):
        context = [63, *generator.integers(0, 63, generator.integers(3, 40))]
        endings = [list(generator.integers(0, 63, generator.integers(1, 30))) for _ in range(4)]
        tasks.append((context, endings, int(generator.integers(4))))
        rows += [context + ending for ending in endings]
    tokens = np.concatenate(rows)
    write_shard(folder / "hellaswag_val_000000.bin", tokens)
    entry = dict(file="hellaswag_val_000000.bin", split="val", tokens=len(tokens))
    write_manifest(folder, [entry], tasks=[[len(context), label] for context, _, label in tasks])
    return tasks


def test_the_score_is_that_of_one_row_at_a_time(tmp_path):
    tasks = write_tasks(tmp_path)
    model = random_model()
    score = train_gpt.score_hellaswag(str(tmp_path), model)
    right = 0
    alone = []
    for context, endings, label in tasks:
        losses = []
        for ending in endings:
            row = torch.tensor(context + ending)
            inputs = F.pad(row, (0, -len(row) % 128), value=63)
            logits = model(inputs, None, final_window(model.hp))[len(context) - 1:len(row) - 1]
            losses.append(F.cross_entropy(logits, row[len(context):]).item())
        alone += losses
        right += int(np.argmin(losses) == label)
    assert score["losses"] == pytest.approx(alone, abs=1e-5)
    assert score["hellaswag"] == right / len(tasks)
    assert 0 < right < len(tasks) == score["tasks"]


def test_the_score_is_the_same_after_a_run_and_on_any_number_of_ranks(tmp_path):
    write_tasks(tmp_path / "swag")
    arguments = [*TINY, *make_data(tmp_path), f"--hellaswag={tmp_path}/swag"]
    result = trained(arguments, "swag", ranks=2)
    line = next(line for line in result.output.splitlines() if line.startswith("HellaSwag"))
    assert "of 30 tasks" in line
    recorded, = (metric for metric in result.metrics if "hellaswag" in metric)
    assert f"{recorded['hellaswag']:.4f}" in line and recorded["tasks"] == 30
    arguments = [f"--checkpoint={result.folder}", f"--hellaswag={tmp_path}/swag", "--device=cpu"]
    for ranks in (1, 3):
        assert run(arguments, ranks).stdout.strip() == line


def change_tasks(folder, change) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest["tasks"])
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("damage", [
    lambda folder: (folder / "manifest.json").unlink(),
    lambda folder: (folder / "hellaswag_val_000000.bin").unlink(),
    lambda folder: write_manifest(folder, [dict(file="hellaswag_val_000000.bin", tokens=7)]),
    lambda folder: change_tasks(folder, lambda tasks: tasks.insert(0, [999, 1])),
    lambda folder: change_tasks(folder, lambda tasks: tasks[0].__setitem__(0, 4.0))],
    ids=["no manifest", "no shard", "another shard", "another task", "a context of 4.0 tokens"])
def test_damaged_tasks_are_refused(tmp_path, damage):
    write_tasks(tmp_path)
    damage(tmp_path)
    with pytest.raises(train_gpt.UserError, match="; make|; remove"):
        train_gpt.score_hellaswag(str(tmp_path), random_model())


def test_tasks_that_cannot_be_scored_stop_a_run_before_it_starts(tmp_path, capsys):
    arguments = [*TINY, *make_data(tmp_path), f"--hellaswag={tmp_path}/nowhere"]
    assert train_gpt.main(arguments) == 2
    captured = capsys.readouterr()
    assert "hellaswag_val_000000.bin" in captured.err and captured.err.count("\n") == 1
    assert captured.out == "" and not (tmp_path / "logs").exists()
