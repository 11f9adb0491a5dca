"""The trainer's side of the data: manifests, the token budget, epochs; HellaSwag's score."""
import json
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train_gpt
from helpers import TINY, make_data, run, trained, write_shard


def write_manifest(folder, listed, /, **changes) -> None:
    about = dict(format=1, complete=True, source="a test", tokenizer="bytes", vocab_size=64, document_token=63)
    entries = [dict(file=path.name, split="train", tokens=tokens, documents=1, text_bytes=text, sha256="")
               for path, tokens, text in listed]
    (folder / "manifest.json").write_text(json.dumps(about | dict(shards=entries) | changes))


def described(folder, **changes) -> list[str]:
    data = make_data(folder)
    write_manifest(folder, [(path, 20_000, 60_000) for path in sorted(folder.glob("*.bin"))], **changes)
    return data


def trainer(*arguments: str) -> train_gpt.Trainer:
    hp = train_gpt.parse_command_line([*TINY, *arguments])
    return make_trainer(hp)


def test_a_manifest_that_fits_gives_the_bytes_of_text(tmp_path):
    assert trainer(*described(tmp_path)).bytes_per_token == 3.0


def test_shards_without_a_manifest_load_as_they_are(tmp_path):
    assert trainer(*make_data(tmp_path)).bytes_per_token is None


@pytest.mark.parametrize("changes, sentence", [
    (dict(vocab_size=50257), "--vocab_size=64: expected that of .*manifest.json; the nearest is --vocab_size=50257"),
    (dict(document_token=0), "--document_token=63: .*--document_token=0"),
    (dict(complete=False), "not complete, or of another format; run the script"),
    (dict(format=2), "not complete, or of another format"),
    (dict(shards=[]), "its manifest says None"),
    (dict(shards=3), "damaged"),
    (dict(shards=[{"file": "train_000000.bin"}]), "damaged")])
def test_a_manifest_that_does_not_fit_is_refused(tmp_path, changes, sentence):
    with pytest.raises(train_gpt.UserError, match=sentence):
        trainer(*described(tmp_path, **changes))


def test_a_shard_that_is_not_what_its_manifest_says(tmp_path):
    data = described(tmp_path)
    write_shard(tmp_path / "train_000001.bin", np.zeros(19_000))
    with pytest.raises(train_gpt.UserError, match="holds 19000 tokens, its manifest says 20000"):
        trainer(*data)


def test_bits_per_byte_of_a_vocabulary_come_from_the_manifest(tmp_path):
    hp = train_gpt.parse_command_line([*TINY, *make_data(tmp_path), "--vocab_size=300"])
    run = make_trainer(hp)
    known = train_gpt.evaluate(hp, run.forward, run.val_data, run.window.fill_(2), run.hardware, bytes_per_token=4.0)
    assert known["bits_per_byte"] == pytest.approx(known["val_loss"] / 4 / np.log(2))
    unknown = train_gpt.evaluate(hp, run.forward, run.val_data, run.window, run.hardware)
    assert unknown["bits_per_byte"] is None and unknown["val_loss"] == known["val_loss"]


# HellaSwag --------------------------------------------------------------------------------------------------

def write_tasks(folder, tasks: int = 30, seed: int = 0) -> list[tuple]:
    """Random tasks in the format of data/hellaswag.py; returns (context, endings, label) of each."""
    random = np.random.default_rng(seed)
    made, rows, about = [], [], []
    for _ in range(tasks):
        context = [63, *random.integers(0, 63, random.integers(3, 40))]
        endings = [list(random.integers(0, 63, random.integers(1, 30))) for _ in range(4)]
        made.append((context, endings, int(random.integers(4))))
        rows += [context + ending for ending in endings]
        about.append([len(context), made[-1][2]])
    tokens = np.concatenate(rows)
    path = write_shard(folder / "hellaswag_val_000000.bin", tokens)
    write_manifest(folder, [(path, len(tokens), len(tokens))], tasks=about)
    return made


def random_model(data: list[str]) -> train_gpt.GPT:
    hp = train_gpt.parse_command_line([*TINY, *data])
    torch.manual_seed(0)
    model = train_gpt.GPT(hp).eval()
    for name, p in model.named_parameters():
        if not p.any():
            torch.nn.init.normal_(p, std=0.3)
    return model


def test_packing_gives_the_losses_of_one_row_at_a_time(tmp_path):
    tasks, model = write_tasks(tmp_path), random_model([])
    score = train_gpt.score_hellaswag(str(tmp_path), model, train_gpt.Hardware())
    window = torch.tensor(train_gpt.window_at(model.hp, model.hp.num_steps), dtype=torch.int32)
    right, alone = 0, []
    for context, endings, label in tasks:
        losses = []
        for ending in endings:
            row = torch.tensor(context + ending)
            inputs = F.pad(row, (0, -len(row) % 128), value=63)
            logits = model(inputs, None, window)[len(context) - 1:len(row) - 1]
            losses.append(F.cross_entropy(logits, row[len(context):]).item())
        alone += losses
        right += int(np.argmin(losses)) == label
    assert score["losses"] == pytest.approx(alone, abs=1e-5)
    assert score["hellaswag"] == right / len(tasks) and 0 < right < len(tasks) == score["tasks"]


def test_the_score_of_a_checkpoint_is_the_same_on_any_number_of_ranks(tmp_path):
    (tmp_path / "swag").mkdir()
    write_tasks(tmp_path / "swag")
    result = trained([*TINY, *make_data(tmp_path), f"--hellaswag={tmp_path}/swag"], "swag", ranks=2)
    at_the_end = next(line for line in result.output.splitlines() if line.startswith("HellaSwag"))
    arguments = [f"--checkpoint={result.folder}/model.pt", f"--hellaswag={tmp_path}/swag", "--device=cpu"]
    one, three = run(arguments), run(arguments, ranks=3)
    assert one.stdout.strip() == three.stdout.strip() == at_the_end and "of 30 tasks" in at_the_end


@pytest.mark.parametrize("break_it", [
    lambda folder: (folder / "manifest.json").unlink(),
    lambda folder: write_manifest(folder, [(folder / "hellaswag_val_000000.bin", 7, 7)]),
    lambda folder: (folder / "hellaswag_val_000000.bin").unlink(),
    lambda folder: (folder / "manifest.json").write_text(
        (folder / "manifest.json").read_text().replace('"tasks": [[', '"tasks": [[999, 1], [')),
    lambda folder: (folder / "manifest.json").write_text(  # a context of 4.0 tokens
        re.sub(r'"tasks": \[\[(\d+)', r'"tasks": [[\1.0', (folder / "manifest.json").read_text()))])
def test_damaged_tasks_are_refused(tmp_path, break_it):
    write_tasks(tmp_path)
    break_it(tmp_path)
    with pytest.raises(train_gpt.UserError):
        train_gpt.score_hellaswag(str(tmp_path), random_model([]), train_gpt.Hardware())


def test_tasks_that_cannot_be_scored_stop_a_run_before_it_starts(tmp_path):
    with pytest.raises(train_gpt.UserError, match="hellaswag_val_000000.bin: cannot be read"):
        trainer(*make_data(tmp_path), f"--hellaswag={tmp_path}/nowhere")
