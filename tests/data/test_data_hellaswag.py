"""data/hellaswag.py: rows, labels and context lengths as documented, from a local copy and from a hub."""
import json

import hub_server
import numpy as np
import pytest
from hub_server import REVISION, LocalHub, environment, run

import shards

REPO = "Rowan/hellaswag"
TASKS = [{"ctx": f"A man number {number} is on a roof. he", "label": number % 4, "activity_label": "x",
          "endings": [f"takes {ending} tiles, naïvely." for ending in range(number, number + 4)]}
         for number in range(7)]


def jsonl(tasks) -> bytes:
    return "".join(json.dumps(task) + "\n" for task in tasks).encode()


def parquet(tasks, path) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {key: [task[key] for task in tasks] for key in ("ctx", "endings", "activity_label")}
    parquet.write_table(pyarrow.table(columns | {"label": [str(task["label"]) for task in tasks]}), path)
    return path.read_bytes()


def read_back(folder) -> list[dict]:
    """The tasks, from the shard and the manifest, as the docstring of the script says to read them."""
    manifest = shards.read_manifest(folder)
    assert manifest["complete"]
    tokens = np.frombuffer((folder / "hellaswag_val_000000.bin").read_bytes(), "<u2", offset=1024)
    rows = np.split(tokens, np.flatnonzero(tokens == manifest["document_token"]))[1:]
    assert len(rows) == 4 * len(manifest["tasks"])
    tasks = []
    for number, (context_tokens, label) in enumerate(manifest["tasks"]):
        four = rows[4 * number:4 * number + 4]
        contexts = {bytes(row[1:context_tokens].astype(np.uint8)).decode() for row in four}
        endings = [bytes(row[context_tokens:].astype(np.uint8)).decode() for row in four]
        assert len(contexts) == 1 and all(ending.startswith(" ") for ending in endings)
        tasks.append({"ctx": contexts.pop(), "label": label, "endings": [ending[1:] for ending in endings]})
    return tasks


EXPECTED = [{key: task[key] for key in ("ctx", "label", "endings")} for task in TASKS]


def test_a_local_copy_reads_back(tmp_path):
    (tmp_path / "val.jsonl").write_bytes(jsonl(TASKS))
    done = run("hellaswag.py", f"--from={tmp_path / 'val.jsonl'}", f"--out={tmp_path / 'out'}",
               "--tokenizer=bytes")
    assert done.returncode == 0, done.stderr
    assert read_back(tmp_path / "out") == EXPECTED
    assert run("verify.py", tmp_path / "out").returncode == 0


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_hub_with_mishaps(tmp_path, kind):
    name = f"data/validation-00000-of-00001.{kind}"
    content = jsonl(TASKS) if kind == "jsonl" else parquet(TASKS, tmp_path / "made.parquet")
    files = {name: content, f"data/train-00000-of-00001.{kind}": b"train", "README.md": b"x"}
    out = tmp_path / "out"
    with LocalHub(REPO, files, {name: [503, "short", "wrong"]}) as hub:
        done = run("hellaswag.py", f"--out={out}", "--tokenizer=bytes", "--backoff=0.05", env=hub.env())
        assert done.returncode == 0, done.stderr
        assert read_back(out) == EXPECTED and REVISION in shards.read_manifest(out)["source"]
        asked = len(hub.requests)
        assert "already complete" in run("hellaswag.py", f"--out={out}", "--tokenizer=bytes",
                                         env=hub.env()).stdout
        assert len(hub.requests) == asked


@pytest.mark.parametrize("change, said", [({"label": ""}, "record 3"), ({"label": 4}, "label 4"),
                                          ({"endings": ["a"]}, "record 3"),
                                          ({"ctx": None}, "record 3")])
def test_what_is_no_task_is_refused(tmp_path, change, said):
    (tmp_path / "val.jsonl").write_bytes(jsonl([*TASKS[:2], TASKS[2] | change]))
    done = run("hellaswag.py", f"--from={tmp_path / 'val.jsonl'}", f"--out={tmp_path / 'out'}",
               "--tokenizer=bytes")
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert not list((tmp_path / "out").glob("*.bin*"))


def test_killed_at_every_step(tmp_path):
    (tmp_path / "val.jsonl").write_bytes(jsonl(TASKS))
    arguments, step = (f"--from={tmp_path / 'val.jsonl'}", f"--out={tmp_path / 'out'}",
                       "--tokenizer=bytes"), 0
    while hub_server.crash(step, "hellaswag.py", *arguments, env=environment()):
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
