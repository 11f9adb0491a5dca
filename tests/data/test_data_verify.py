"""data/verify.py finds each kind of planted fault, and none in intact shards."""

import json

import numpy as np
import pytest
from data_helpers import manifest_of, random_shard, run, shard_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

import shards
import verify

DOCUMENT = 256


def documents(seed: int, count: int, length: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, length + number) for number in range(count)]


def write(folder, train: list, val: list, limit: int = 9000):
    with shards.ShardSet(folder, "x", "bytes", 257, DOCUMENT, shards.BYTE_LENGTHS, limit) as writer:
        for split, texts in (("train", train), ("val", val)):
            for text in texts:
                writer.append(split, np.append(DOCUMENT, text))
        writer.commit("test")


def check(folder, capsys) -> tuple[int, str]:
    status = verify.main([str(folder)])
    return status, capsys.readouterr().out


TRAIN, VAL = documents(1, 12, 3000), documents(2, 3, 2500)


def test_intact_shards_pass(tmp_path, capsys):
    write(tmp_path, TRAIN, VAL)
    status, said = check(tmp_path, capsys)
    assert status == 0 and "intact" in said and "FAULT" not in said
    for path in tmp_path.glob("*.bin"):
        assert path.name in said


def edit(path, place: int, value: int) -> None:
    content = np.frombuffer(path.read_bytes(), "<u2").copy()
    content[512 + place] = value
    path.write_bytes(content.tobytes())


def change_manifest(folder, change) -> None:
    manifest = manifest_of(folder)
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def sha_too(folder, name: str) -> None:
    """Make the manifest agree with a shard's bytes, so that only the fault itself can be found."""

    def change(manifest):
        for entry in manifest["shards"]:
            if entry["file"] == name:
                entry["sha256"] = shards.sha256_of(folder / name)

    change_manifest(folder, change)


SECOND = "x_train_000001.bin"
FAULTS = {
    "cut short": (
        lambda folder: (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-20]),
        "claims 9,000 tokens",
    ),
    "no header": (
        lambda folder: (folder / SECOND).write_bytes(b"short"),
        "less than the 1024 of a header",
    ),
    "magic": (
        lambda folder: (folder / SECOND).write_bytes(b"\1" + (folder / SECOND).read_bytes()[1:]),
        "expected 20240520",
    ),
    "missing": (lambda folder: (folder / SECOND).unlink(), "is missing"),
    "changed token": (lambda folder: edit(folder / SECOND, 5, 7), "sha256"),
    "token range": (
        lambda folder: (edit(folder / SECOND, 5, 257), sha_too(folder, SECOND)),
        "token 257, outside",
    ),
    "documents": (
        lambda folder: (edit(folder / SECOND, 5, 256), sha_too(folder, SECOND)),
        "documents",
    ),
    "tokens": (
        lambda folder: change_manifest(folder, lambda m: m["shards"][1].update(tokens=8)),
        "9,000 tokens, 8 according",
    ),
    "text": (
        lambda folder: change_manifest(folder, lambda m: m["shards"][1].update(text_bytes=8)),
        "bytes of text, 8",
    ),
    "not listed": (
        lambda folder: change_manifest(folder, lambda m: m["shards"].pop(1)),
        "not in manifest.json",
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_each_planted_fault_is_found_and_the_shard_named(tmp_path, capsys, kind):
    write(tmp_path, TRAIN, VAL)
    plant, expected = FAULTS[kind]
    plant(tmp_path)
    status, said = check(tmp_path, capsys)
    faults = [line for line in said.splitlines() if line.startswith("FAULT")]
    assert status == 1 and any(SECOND in line and expected in line for line in faults), said
    assert all(SECOND in line for line in faults)


def test_an_interrupted_set_is_a_fault(tmp_path, capsys):
    write(tmp_path, TRAIN, VAL)
    change_manifest(tmp_path, lambda manifest: manifest.update(complete=False))
    assert check(tmp_path, capsys)[0] == 1


SHORT = np.arange(100)
OVERLAPS = {
    "a short document": (TRAIN + [SHORT], VAL + [SHORT], True),
    "a short document first": ([SHORT] + TRAIN, VAL + [SHORT], True),
    "a long document": (TRAIN + [VAL[1]], VAL, True),
    "a window": (
        TRAIN + [np.concatenate([TRAIN[0][:77], VAL[1][333 : 333 + 1024], TRAIN[1][:50]])],
        VAL,
        True,
    ),
    "its last window": (TRAIN + [np.append(TRAIN[0][:50], VAL[0][-1024:])], VAL, True),
    "one token less": (
        TRAIN + [np.concatenate([TRAIN[0][:77], VAL[1][333 : 333 + 1023], [249]])],
        VAL,
        False,
    ),
    "part of a short one": (TRAIN + [SHORT[:-1]], VAL + [SHORT], False),
    "a short one within": (
        TRAIN + [np.concatenate([TRAIN[0][:9], SHORT, TRAIN[0][:9]])],
        VAL + [SHORT],
        False,
    ),
}


@pytest.mark.parametrize("kind", OVERLAPS)
@pytest.mark.parametrize(
    "limit", [4001, 10**6]
)  # with and without documents that continue in the next shard
def test_overlaps_are_found(tmp_path, capsys, kind, limit):
    train, val, overlap = OVERLAPS[kind]
    write(tmp_path, train, val, limit)
    status, said = check(tmp_path, capsys)
    assert status == overlap, said
    if overlap:
        (fault,) = [line for line in said.splitlines() if line.startswith("FAULT")]
        assert "x_val_" in fault and "x_train_" in fault


def brute_force(train: list[int], val: list[int], window: int) -> set[int]:
    """Starts of the documents of val that are in train, found by comparing everything."""

    def split(tokens):
        found, start = [], 0
        for place, token in enumerate([*tokens, 9]):
            if token == 9:
                found += [(start, tokens[start:place])] if place > start else []
                start = place + 1
        return found

    texts = [text for _, text in split(train)]
    stretches = {
        tuple(text[i : i + window]) for text in texts for i in range(len(text) - window + 1)
    }
    return {
        start
        for start, text in split(val)
        if (
            text in texts
            if len(text) < window
            else any(
                tuple(text[i : i + window]) in stretches for i in range(len(text) - window + 1)
            )
        )
    }


TOKENS = st.lists(st.sampled_from([0, 1, 9]) | st.just(0), max_size=120)


@settings(max_examples=300)
@given(TOKENS, TOKENS)
def test_overlaps_agree_with_brute_force(tmp_path_factory, train, val):
    folder = tmp_path_factory.mktemp("overlap")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "WINDOW", 8)
        patch.setattr(verify, "BLOCK", 4)
        patch.setattr(verify, "CHUNK", 16)
        for name, tokens in (("train", train), ("val", val)):
            (folder / name).write_bytes(shard_bytes(tokens))
        found = verify.Overlaps(verify.Stream([folder / "val"]), 9).find(
            verify.Stream([folder / "train"])
        )
    assert set(found) == brute_force(train, val, 8)


def test_public_shards_without_a_manifest(tmp_path):
    (tmp_path / "fineweb_train_000001.bin").write_bytes(random_shard(1, 20_000))
    (tmp_path / "fineweb_val_000000.bin").write_bytes(random_shard(2, 20_000))
    done = run("verify.py", tmp_path)
    assert done.returncode == 0 and "without a manifest" in done.stdout
    (tmp_path / "fineweb_train_000002.bin").write_bytes(random_shard(2, 20_000))
    done = run("verify.py", tmp_path)
    assert done.returncode == 1
    assert "fineweb_train_000002.bin" in done.stdout and "more documents" in done.stdout


def test_user_mistakes(tmp_path):
    for folder in (tmp_path / "absent", tmp_path):
        done = run("verify.py", folder)
        assert (
            done.returncode == 2 and str(folder) in done.stderr and "Traceback" not in done.stderr
        )
    (tmp_path / "manifest.json").write_text("{")
    assert "not JSON" in run("verify.py", tmp_path).stderr
