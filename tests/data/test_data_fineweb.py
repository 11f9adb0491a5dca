"""data/fineweb.py against a hub on loopback: the real client, real processes, every mishap."""
import json
import os
import time

import hub_server
import numpy as np
import pytest
from hub_server import LocalHub, random_shard, run, shard_bytes, start

import fineweb
import shards

REPO = "kjj0/fineweb10B-gpt2"
VAL = "fineweb_val_000000.bin"
FIRST, SECOND, THIRD = (f"fineweb_train_{number:06d}.bin" for number in (1, 2, 3))
QUICK = ("--backoff=0.05", "--retries=4")


def public(tokens: int = 5000) -> dict[str, bytes]:
    return {name: random_shard(seed, tokens) for seed, name in enumerate((VAL, FIRST, SECOND, THIRD))}


def manifest_of(folder) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def assert_complete(folder, files: dict[str, bytes], names) -> None:
    assert {path.name for path in folder.glob("*.bin*")} == set(names)
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
        assert hub_server.REVISION in manifest["source"] and REPO in manifest["source"]
        assert manifest["tokenizer"] == "gpt2"
        assert (manifest["vocab_size"], manifest["document_token"]) == (50257, 50256)
        for entry in manifest["shards"]:
            tokens = np.frombuffer(files[entry["file"]], "<u2", offset=1024)
            assert entry["tokens"] == 5000 and entry["documents"] == np.count_nonzero(tokens == 50256)
            assert entry["sha256"] == hub.about(entry["file"])["lfs"]["oid"]
            assert entry["split"] == ("val" if entry["file"] == VAL else "train")
            assert entry["text_bytes"] is None  # no vocabulary in this test
        asked = len(hub.requests)
        again = run("fineweb.py", 2, f"--out={tmp_path}", env=hub.env())
        assert again.returncode == 0 and "already complete" in again.stdout
        assert len(hub.requests) == asked
        assert run("fineweb.py", 3, f"--out={tmp_path}", env=hub.env()).returncode == 0
        assert_complete(tmp_path, files, files)
        assert len(hub.asked(FIRST)) == 1  # what was there is not fetched again


@pytest.mark.parametrize("faults", [[503], [429], ["reset"], ["short"], ["wrong"], ["reset", "whole"],
                                    [500, 503, "reset", "short"]])
def test_mishaps_are_retried(tmp_path, faults):
    files = public(1_500_000)
    wanted = {name: files[name] for name in (VAL, FIRST)}
    with LocalHub(REPO, wanted, {FIRST: list(faults), "paths-info": [503]}) as hub:
        done = run("fineweb.py", 1, f"--out={tmp_path}", *QUICK, env=hub.env())
        assert done.returncode == 0, done.stderr
        assert_complete(tmp_path, wanted, wanted)
        assert not hub.faults[FIRST] and len(hub.asked(FIRST)) == len(faults) + (faults[-1] != "whole")
        # After a break the rest is asked for; after a wrong byte, the whole again.
        assert (hub.asked(FIRST)[-1] > 0) == bool({"reset", "short"} & set(faults))


@pytest.mark.parametrize("name, fault, said", [
    (FIRST, ["wrong"] * 9, "sha256"), (VAL, [503] * 99, "503"), (FIRST, [404] * 9, "404")])
def test_what_stays_wrong_is_refused_in_a_sentence(tmp_path, name, fault, said):
    with LocalHub(REPO, public(), {name: fault}) as hub:
        done = run("fineweb.py", 1, f"--out={tmp_path}", *QUICK, env=hub.env())
    assert done.returncode == 2
    error, = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert said in error and (name in error)
    assert not (tmp_path / name).exists() and not manifest_of(tmp_path)["complete"]


def test_a_file_that_is_no_shard_is_refused(tmp_path):
    files = public() | {FIRST: b"\0" * 3000}
    with LocalHub(REPO, files) as hub:
        done = run("fineweb.py", 1, f"--out={tmp_path}", *QUICK, env=hub.env())
    assert done.returncode == 2 and "20240520" in done.stderr and not (tmp_path / FIRST).exists()


def test_user_mistakes(tmp_path):
    with LocalHub(REPO, public()) as hub:
        for arguments, said in (((104,), "103"), ((0,), "103"), ((4,), "fineweb_train_000004.bin"),
                                ((1, "--repo=a/b"), "a/b"), ((1, "--repo=ab"), "owner/name"),
                                (("many",), "many"), ((1, "--color=red"), "--color=red")):
            done = run("fineweb.py", *arguments, f"--out={tmp_path}", *QUICK, env=hub.env())
            assert done.returncode == 2 and said in done.stderr, done.stderr
            assert "Traceback" not in done.stderr
    gone = run("fineweb.py", 1, f"--out={tmp_path}", *QUICK, env=hub.env())
    assert gone.returncode == 2 and hub.endpoint in gone.stderr and "Traceback" not in gone.stderr


def test_disk_space_is_checked_before_anything_is_fetched(tmp_path, monkeypatch):
    remotes = [fineweb.Remote(name, 10**9, "0" * 64) for name in (VAL, FIRST)]

    class Hub:
        repo, revision = REPO, "x"
        pin = staticmethod(lambda: None)
        look_up = staticmethod(lambda names: remotes)

    usage = type(shards.shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shards.shutil, "disk_usage", lambda folder: usage(10**10, 10**10, 10**9))
    with pytest.raises(shards.UserError, match="2.00 GB are needed and 1.00 GB are free"):
        fineweb.fetch_all(Hub(), tmp_path, [VAL, FIRST], {}, 1)
    assert not list(tmp_path.iterdir())


def test_files_of_another_origin_are_checked_and_kept_or_replaced(tmp_path):
    files = public()
    (tmp_path / FIRST).write_bytes(files[FIRST])
    (tmp_path / SECOND).write_bytes(shard_bytes(np.arange(5000)))   # the right size, other tokens
    (tmp_path / THIRD).write_bytes(files[THIRD])                    # beyond what is asked for
    with LocalHub(REPO, files) as hub:
        assert run("fineweb.py", 2, f"--out={tmp_path}", env=hub.env()).returncode == 0
        assert_complete(tmp_path, files, files)
        assert not hub.asked(FIRST) and not hub.asked(THIRD) and len(hub.asked(SECOND)) == 1


def test_kill_leaves_the_first_so_many_shards_and_the_next_run_goes_on(tmp_path):
    files = public(1_200_000)  # more than 2 MiB: it is written by the MiB
    with LocalHub(REPO, files, {FIRST: ["slow"]}) as hub:
        process = start("fineweb.py", 3, f"--out={tmp_path}", env=hub.env())
        began = time.monotonic()
        partial, *others = (tmp_path / f"{name}.tmp" for name in (FIRST, SECOND, THIRD))
        while not (partial.exists() and partial.stat().st_size and (tmp_path / VAL).exists()
                   and all(path.exists() and path.stat().st_size == len(files[FIRST]) for path in others)):
            assert time.monotonic() - began < 600 and process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.kill()
        process.wait()
        # Shards 2 and 3 have arrived: without 1 they must not look like the beginning of the data.
        assert {path.name for path in tmp_path.glob("*.bin")} == {VAL}
        assert not manifest_of(tmp_path)["complete"]
        reached = partial.stat().st_size
        assert 0 < reached < len(files[FIRST])
        assert run("fineweb.py", 3, f"--out={tmp_path}", env=hub.env()).returncode == 0
        assert hub.asked(FIRST) == [0, reached] and len(hub.asked(SECOND)) == len(hub.asked(THIRD)) == 1
        assert_complete(tmp_path, files, files)


def test_killed_at_every_step(tmp_path):
    files = {name: content for name, content in public().items() if name in (VAL, FIRST)}
    with LocalHub(REPO, files) as hub:
        for step in range(0, 100, 3):
            folder = tmp_path / str(step)
            if not hub_server.crash(step, "fineweb.py", 1, f"--out={folder}", "--parallel=1", env=hub.env()):
                break
            there = {path.name for path in folder.glob("*.bin")}
            assert all((folder / name).read_bytes() == files[name] for name in there)
            if (folder / "manifest.json").exists() and manifest_of(folder)["complete"]:
                assert there == set(files)
            if step % 6 == 0:  # the next run does the same from most steps
                assert run("fineweb.py", 1, f"--out={folder}", env=hub.env()).returncode == 0
                assert_complete(folder, files, files)
        assert 5 < step < 99
    assert os.listdir(tmp_path)
