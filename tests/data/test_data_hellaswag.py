"""data/hellaswag.py: rows, labels and context lengths, from a local copy and from a hub; scores."""

import json
import re

import numpy as np
import pytest
from data_helpers import crash, run, tokens_of
from hub_server import REVISION, LocalHub
from helpers import write_shard

import hellaswag
import shards

REPO = "Rowan/hellaswag"
TASKS = [
    {
        "ctx": f"A man number {number} is on a roof. he",
        "label": number % 4,
        "activity_label": "x",
        "endings": [f"takes {ending} tiles, naïvely." for ending in range(number, number + 4)],
    }
    for number in range(7)
]


def jsonl(tasks) -> bytes:
    return "".join(json.dumps(task) + "\n" for task in tasks).encode()


def parquet(tasks, path) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {key: [task[key] for task in tasks] for key in ("ctx", "endings", "activity_label")}
    parquet.write_table(
        pyarrow.table(columns | {"label": [str(task["label"]) for task in tasks]}), path
    )
    return path.read_bytes()


def read_back(folder) -> list[dict]:
    """The tasks, from the shard and the manifest, as the script's docstring says to read them."""
    manifest = shards.read_manifest(folder)
    assert manifest["complete"]
    tokens = tokens_of(folder / "hellaswag_val_000000.bin")
    rows = np.split(tokens, np.flatnonzero(tokens == manifest["document_token"]))[1:]
    assert len(rows) == 4 * len(manifest["tasks"])
    tasks = []
    for number, (context_tokens, label) in enumerate(manifest["tasks"]):
        four = rows[4 * number : 4 * number + 4]
        contexts = {bytes(row[1:context_tokens].astype(np.uint8)).decode() for row in four}
        endings = [bytes(row[context_tokens:].astype(np.uint8)).decode() for row in four]
        assert len(contexts) == 1 and all(ending.startswith(" ") for ending in endings)
        tasks.append(
            {"ctx": contexts.pop(), "label": label, "endings": [ending[1:] for ending in endings]}
        )
    return tasks


EXPECTED = [{key: task[key] for key in ("ctx", "label", "endings")} for task in TASKS]


def test_a_local_copy_reads_back(tmp_path):
    (tmp_path / "val.jsonl").write_bytes(jsonl(TASKS))
    done = run(
        "hellaswag.py",
        f"--from={tmp_path / 'val.jsonl'}",
        f"--out={tmp_path / 'out'}",
        "--tokenizer=bytes",
    )
    assert done.returncode == 0, done.stderr
    assert read_back(tmp_path / "out") == EXPECTED
    assert run("verify.py", tmp_path / "out").returncode == 0


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_hub_with_failures(tmp_path, kind):
    name = f"data/validation-00000-of-00001.{kind}"
    content = jsonl(TASKS) if kind == "jsonl" else parquet(TASKS, tmp_path / "made.parquet")
    files = {name: content, f"data/train-00000-of-00001.{kind}": b"train", "README.md": b"x"}
    out = tmp_path / "out"
    with LocalHub(REPO, files, {name: ["short", "wrong"]}) as hub:
        done = run("hellaswag.py", f"--out={out}", "--tokenizer=bytes", env=hub.env())
        assert done.returncode == 0, done.stderr
        assert read_back(out) == EXPECTED and REVISION in shards.read_manifest(out)["source"]
        asked = len(hub.requests)
        assert (
            "already complete"
            in run("hellaswag.py", f"--out={out}", "--tokenizer=bytes", env=hub.env()).stdout
        )
        assert len(hub.requests) == asked


@pytest.mark.parametrize(
    "change, said",
    [
        ({"label": ""}, "record 3"),
        ({"label": 4}, "label 4"),
        ({"endings": ["a"]}, "record 3"),
        ({"ctx": None}, "record 3"),
    ],
)
def test_what_is_no_task_is_refused(tmp_path, change, said):
    (tmp_path / "val.jsonl").write_bytes(jsonl([*TASKS[:2], TASKS[2] | change]))
    done = run(
        "hellaswag.py",
        f"--from={tmp_path / 'val.jsonl'}",
        f"--out={tmp_path / 'out'}",
        "--tokenizer=bytes",
    )
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert not list((tmp_path / "out").glob("*.bin*"))


def test_killed_at_every_step(tmp_path):
    (tmp_path / "val.jsonl").write_bytes(jsonl(TASKS))
    arguments = (
        f"--from={tmp_path / 'val.jsonl'}",
        f"--out={tmp_path / 'out'}",
        "--tokenizer=bytes",
    )
    step = 0
    while crash(step, "hellaswag.py", *arguments):
        manifest = shards.read_manifest(tmp_path / "out")
        there = list((tmp_path / "out").glob("*.bin"))
        if manifest is None or not manifest["complete"]:
            assert manifest or not there, step
        else:
            assert read_back(tmp_path / "out") == EXPECTED
            break
        step += 1
    assert step > 3 and run("hellaswag.py", *arguments).returncode == 0
    assert read_back(tmp_path / "out") == EXPECTED


# Scoring a model ----------------------------------------------------------------------------------

DOCUMENT, VOCABULARY = 63, 64


def write_tasks(folder, tasks: int = 30, seed: int = 0, **changes) -> list[tuple]:
    """Random tasks in the format of the script; returns (context, endings, label) of each."""
    random = np.random.default_rng(seed)
    made = []
    rows = []
    for _ in range(tasks):
        context = [DOCUMENT, *random.integers(0, DOCUMENT, random.integers(3, 40))]
        endings = [list(random.integers(0, DOCUMENT, random.integers(1, 30))) for _ in range(4)]
        made.append((context, endings, int(random.integers(4))))
        rows += [context + ending for ending in endings]
    tokens = np.concatenate(rows)
    path = write_shard(folder / hellaswag.SHARD, tokens)
    entry = dict(
        file=path.name,
        split="val",
        tokens=len(tokens),
        documents=4 * tasks,
        text_bytes=None,
        sha256="",
    )
    about = dict(
        format=1,
        complete=True,
        source="a test",
        tokenizer="bytes",
        vocab_size=VOCABULARY,
        document_token=DOCUMENT,
        tasks=[[len(context), label] for context, _, label in made],
    )
    (folder / "manifest.json").write_text(json.dumps(about | dict(shards=[entry]) | changes))
    return made


def model_losses(tokens: np.ndarray) -> np.ndarray:
    """A model whose loss at a token depends on all tokens of its document up to there, only."""
    losses = np.empty(len(tokens))
    state = 0
    for place, token in enumerate(tokens.tolist()):
        state = (0 if token == DOCUMENT else state) * 31 % 1009 + token
        losses[place] = state % 97 / 10
    return losses[1:]


def expected_score(made: list[tuple]) -> tuple[list[float], float]:
    """Losses and accuracy, one row at a time."""
    losses = [
        model_losses(np.array(context + ending))[len(context) - 1 :].mean()
        for context, endings, _ in made
        for ending in endings
    ]
    answers = np.reshape(losses, (-1, 4)).argmin(axis=1)
    return losses, np.mean(answers == [label for _, _, label in made])


@pytest.mark.parametrize("sequence_tokens", [128, 512, 65536])
def test_packing_gives_the_losses_of_one_row_at_a_time(tmp_path, sequence_tokens):
    made = write_tasks(tmp_path)
    losses, accuracy = expected_score(made)
    lengths = []

    def token_losses(tokens):
        assert tokens.dtype == np.int64
        lengths.append(len(tokens))
        return model_losses(tokens)

    tasks = hellaswag.read_tasks(str(tmp_path), VOCABULARY, DOCUMENT)
    score = hellaswag.score(tasks, token_losses, sequence_tokens, DOCUMENT)
    assert score["losses"] == pytest.approx(losses) and score["hellaswag"] == pytest.approx(
        accuracy
    )
    assert 0 < accuracy < 1 and score["tasks"] == 30
    assert score["line"] == f"HellaSwag accuracy {accuracy:.4f} of 30 tasks"
    assert all(length % 128 == 0 and length <= min(4096, sequence_tokens) for length in lengths)
    assert len(lengths) < 120  # several rows to a sequence


DAMAGES = {
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "has no manifest.json"),
    "no shard": (lambda folder: (folder / hellaswag.SHARD).unlink(), "is missing"),
    "cut shard": (
        lambda folder: (folder / hellaswag.SHARD).write_bytes(
            (folder / hellaswag.SHARD).read_bytes()[:-2]
        ),
        "claims",
    ),
    "other vocabulary": (
        lambda folder: write_tasks(folder, vocab_size=50257),
        "give --vocab_size=50257",
    ),
    "a task too many": (
        lambda folder: change(folder, r'"tasks": \[', '"tasks": [[9, 1], '),
        "every 4 of its 120",
    ),
    "a long context": (
        lambda folder: change(folder, r'"tasks": \[\[\d+', '"tasks": [[999'),
        "has 999 tokens",
    ),
    "a context of 4.0": (
        lambda folder: change(folder, r'"tasks": \[\[(\d+)', r'"tasks": [[\1.0'),
        "pair of numbers",
    ),
    "label 4": (
        lambda folder: change(folder, r'("tasks": \[\[\d+, )\d', r"\g<1>4"),
        "label of task 0 is 4",
    ),
    "no list": (
        lambda folder: change(folder, r'"tasks": \[\[.*?\]\]', '"tasks": 3'),
        "does not list a task",
    ),
    "a token too high": (
        lambda folder: write_shard(
            folder / hellaswag.SHARD,
            np.where(
                tokens_of(folder / hellaswag.SHARD) == 5, 64, tokens_of(folder / hellaswag.SHARD)
            ),
        ),
        "token 64 is outside",
    ),
}


def change(folder, pattern: str, replacement: str) -> None:
    path = folder / "manifest.json"
    path.write_text(re.sub(pattern, replacement, path.read_text(), count=1))


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_tasks_are_refused(tmp_path, kind):
    write_tasks(tmp_path)
    damage, said = DAMAGES[kind]
    damage(tmp_path)
    with pytest.raises(shards.UserError, match=said):
        hellaswag.read_tasks(tmp_path, VOCABULARY, DOCUMENT)


def test_a_row_longer_than_a_sequence_is_refused(tmp_path):
    write_tasks(tmp_path, seed=1)
    tasks = hellaswag.read_tasks(tmp_path, VOCABULARY, DOCUMENT)
    tasks.rows[7] = np.arange(200)
    with pytest.raises(
        shards.UserError, match="row 7 has 200 tokens, more than the 128 of a sequence"
    ):
        hellaswag.score(tasks, model_losses, 128, DOCUMENT)
