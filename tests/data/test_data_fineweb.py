"""data/fineweb.py against a hub on loopback: the real client, real processes, every failure."""

import signal
import time

import numpy as np
import pytest
from data_helpers import (
    HUB_CACHE,
    crash,
    environment,
    manifest_of,
    random_shard,
    run,
    shard_bytes,
    start,
    tokens_of,
)
from hub_server import REVISION, LocalHub

import fineweb
import hub as hub_module
import shards

REPO = "kjj0/fineweb10B-gpt2"
VAL = "fineweb_val_000000.bin"
FIRST, SECOND, THIRD = (f"fineweb_train_{number:06d}.bin" for number in (1, 2, 3))


def public(tokens: int = 5000) -> dict[str, bytes]:
    return {
        name: random_shard(seed, tokens) for seed, name in enumerate((VAL, FIRST, SECOND, THIRD))
    }


def assert_complete(folder, files: dict[str, bytes], names) -> None:
    assert {path.name for path in folder.iterdir()} == {*names, "manifest.json", ".lock"}
    assert all((folder / name).read_bytes() == files[name] for name in names)
    assert manifest_of(folder)["complete"]
    assert {entry["file"] for entry in manifest_of(folder)["shards"]} == set(names)


def test_fetches_the_first_shards_and_says_what_they_are(tmp_path):
    files = public()
    with LocalHub(REPO, files) as hub:
        done = run("fineweb.py", 2, f"--out={tmp_path}", env=hub.env())
        assert done.returncode == 0, done.stderr
        assert_complete(tmp_path, files, (VAL, FIRST, SECOND))
        manifest = manifest_of(tmp_path)
        assert REVISION in manifest["source"] and REPO in manifest["source"]
        assert manifest["tokenizer"] == "gpt2"
        assert (manifest["vocab_size"], manifest["document_token"]) == (50257, 50256)
        for entry in manifest["shards"]:
            tokens = tokens_of(tmp_path / entry["file"])
            assert entry["tokens"] == 5000 and entry["documents"] == np.count_nonzero(
                tokens == 50256
            )
            assert entry["sha256"] == hub.sha256(entry["file"])
            assert entry["split"] == ("val" if entry["file"] == VAL else "train")
            assert entry["text_bytes"] is None  # no vocabulary in this test
        asked = len(hub.requests)
        again = run("fineweb.py", 2, f"--out={tmp_path}", env=hub.env())
        assert again.returncode == 0 and "already complete" in again.stdout
        assert len(hub.requests) == asked
        assert run("fineweb.py", 3, f"--out={tmp_path}", env=hub.env()).returncode == 0
        assert_complete(tmp_path, files, files)
        assert len(hub.asked(FIRST)) == 1  # what was there is not fetched again
    assert not HUB_CACHE.exists()


@pytest.mark.parametrize(
    "faults", [[503], [429], ["reset"], ["short"], ["wrong"], ["short", "whole"], [503, "reset"]]
)
def test_a_failure_that_passes_does_not_end_the_run(tmp_path, faults):
    files = public(1_500_000)
    wanted = {name: files[name] for name in (VAL, FIRST)}
    with LocalHub(REPO, wanted, {FIRST: list(faults)}) as hub:
        done = run("fineweb.py", 1, f"--out={tmp_path}", env=hub.env())
        assert done.returncode == 0, done.stderr
        assert_complete(tmp_path, wanted, wanted)
        assert not hub.faults[FIRST]


@pytest.mark.parametrize(
    "name, fault, said",
    [(FIRST, ["wrong"] * 9, "sha256"), (VAL, [503] * 99, "503"), (FIRST, [404] * 9, "404")],
)
def test_a_failure_that_stays_is_one_sentence(tmp_path, name, fault, said):
    with LocalHub(REPO, public(), {name: fault}) as hub:
        done = run("fineweb.py", 1, f"--out={tmp_path}", env=hub.env())
    assert done.returncode == 2
    error = done.stderr.splitlines()[-1]
    assert error.startswith("error: ") and said in error and name in error and hub.endpoint in error
    assert "Traceback" not in done.stderr and "Error" not in error
    assert not (tmp_path / name).exists() and not manifest_of(tmp_path)["complete"]


def test_a_hub_that_cannot_be_asked_is_one_sentence(tmp_path):
    with LocalHub(REPO, public(), {"list": [503]}) as hub:
        broken = run("fineweb.py", 1, f"--out={tmp_path}", env=hub.env())
    gone = run("fineweb.py", 1, f"--out={tmp_path}", env=hub.env())
    offline = run("fineweb.py", 1, f"--out={tmp_path}", env=hub.env(HF_HUB_OFFLINE="1"))
    no_address = run("fineweb.py", 1, f"--out={tmp_path}", env=environment(HF_ENDPOINT="http://[:"))
    for done, said in (
        (broken, "503"),
        (gone, hub.endpoint),
        (offline, "HF_HUB_OFFLINE"),
        (no_address, "HF_ENDPOINT"),
    ):
        assert done.returncode == 2 and said in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1 and "Error" not in done.stderr


def test_a_file_that_is_no_shard_is_refused(tmp_path):
    files = public() | {FIRST: b"\0" * 3000}
    with LocalHub(REPO, files) as hub:
        done = run("fineweb.py", 1, f"--out={tmp_path}", env=hub.env())
    assert done.returncode == 2 and "20240520" in done.stderr and not (tmp_path / FIRST).exists()


def test_user_mistakes(tmp_path):
    with LocalHub(REPO, public()) as hub:
        for arguments, said in (
            ((104,), "103"),
            ((0,), "103"),
            ((4,), "fineweb_train_000004.bin"),
            ((1, "--repo=a/b"), "a/b"),
            ((1, "--repo=ab"), "owner/name"),
            (("many",), "many"),
            ((1, "--color=red"), "--color=red"),
        ):
            done = run("fineweb.py", *arguments, f"--out={tmp_path}", env=hub.env())
            assert done.returncode == 2 and said in done.stderr, done.stderr
            assert "Traceback" not in done.stderr


def test_disk_space_is_checked_before_anything_is_fetched(tmp_path, monkeypatch):
    hub = object.__new__(hub_module.Hub)
    hub.files = {name: hub_module.Remote(name, 10**9, "0" * 64) for name in (VAL, FIRST)}
    usage = type(shards.shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shards.shutil, "disk_usage", lambda folder: usage(10**10, 10**10, 10**9))
    with pytest.raises(shards.UserError, match="2.00 GB are needed and 1.00 GB are free"):
        fineweb.fetch_all(hub, tmp_path, [VAL, FIRST], {}, 1)
    assert not list(tmp_path.iterdir())


def test_files_of_another_origin_are_checked_and_kept_or_replaced(tmp_path):
    files = public()
    (tmp_path / FIRST).write_bytes(files[FIRST])
    (tmp_path / SECOND).write_bytes(shard_bytes(np.arange(5000)))  # the right size, other tokens
    (tmp_path / THIRD).write_bytes(files[THIRD])  # beyond what is asked for
    with LocalHub(REPO, files) as hub:
        assert run("fineweb.py", 2, f"--out={tmp_path}", env=hub.env()).returncode == 0
        assert_complete(tmp_path, files, files)
        assert not hub.asked(FIRST) and not hub.asked(THIRD) and len(hub.asked(SECOND)) == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_run_leaves_the_first_so_many_shards_and_the_next_resumes(tmp_path, how):
    files = public(1_200_000)
    downloads = tmp_path / fineweb.DOWNLOADS
    with LocalHub(REPO, files, {FIRST: ["slow"]}) as hub:
        process = start("fineweb.py", 3, f"--out={tmp_path}", env=hub.env())
        began = time.monotonic()
        while not (
            (tmp_path / VAL).exists()
            and (downloads / SECOND).exists()
            and (downloads / THIRD).exists()
        ):
            assert time.monotonic() - began < 600 and process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.send_signal(how)
        output, errors = process.communicate(timeout=600)
        if how == signal.SIGINT:
            assert process.returncode == 2 and "interrupted; the same command resumes" in errors
            assert "Traceback" not in errors
        # Shards 2 and 3 have arrived: without 1 they must not look like the beginning of the data.
        assert {path.name for path in tmp_path.glob("*.bin")} == {VAL}
        assert not manifest_of(tmp_path)["complete"]
        done = run("fineweb.py", 3, f"--out={tmp_path}", env=hub.env())
        assert done.returncode == 0, done.stderr
        assert len(hub.asked(FIRST)) == 2 and len(hub.asked(SECOND)) == len(hub.asked(THIRD)) == 1
        assert_complete(tmp_path, files, files)


def test_killed_at_every_step(tmp_path):
    files = {name: content for name, content in public().items() if name in (VAL, FIRST)}
    with LocalHub(REPO, files) as hub:
        for step in range(0, 100, 3):
            folder = tmp_path / str(step)
            if not crash(step, "fineweb.py", 1, f"--out={folder}", "--parallel=1", env=hub.env()):
                break
            there = {path.name for path in folder.glob("*.bin")}
            assert all((folder / name).read_bytes() == files[name] for name in there)
            if (folder / "manifest.json").exists() and manifest_of(folder)["complete"]:
                assert there == set(files)
            if step % 6 == 0:  # every second step: does the next run complete it?
                assert run("fineweb.py", 1, f"--out={folder}", env=hub.env()).returncode == 0
                assert_complete(folder, files, files)
        assert 5 < step < 99
