"""Data: ranks tile the stream, batches do not depend on the world size, memory stays flat."""
import json
import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from helpers import SCRIPT, TINY, make_data, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st

import train_gpt
from train_gpt import Hardware, Loader, UserError, open_data, parse_command_line

SEQUENCE = 128


def numbered(*lengths: int) -> list[np.ndarray]:
    """Shards of these lengths in which every token of the stream has a number of its own."""
    ends = np.cumsum(lengths)
    assert ends[-1] <= 2**16
    return [np.arange(end - length, end, dtype=np.uint16) for end, length in zip(ends, lengths)]


def plain_batches(shards, batch: int) -> list[np.ndarray]:
    """Walk each shard, a batch and its last target at a time; skip what does not fill one."""
    found = []
    for shard in shards:
        position = 0
        while position + batch + 1 <= len(shard):
            found.append(shard[position:position + batch + 1])
            position += batch
    return found


def plain_segments(shards, batch: int, segment: int) -> list[np.ndarray]:
    """[segments, tokens + 1] for each batch: a segment from each of the equal parts of a shard."""
    found = []
    parts = batch // segment
    for shard in shards:
        part = (len(shard) - 1) // parts
        for step in range(part // segment):
            starts = [number * part + step * segment for number in range(parts)]
            found.append(np.stack([shard[start:start + segment + 1] for start in starts]))
    return found


def read_all(pattern: str, batch: int, world_size: int, segment: int = 0) -> list[list[list]]:
    """[batch][rank][micro-step] of everything there is, each rank with a loader of its own."""
    loaders = [Loader(pattern, batch, SEQUENCE, segment, rank, world_size)
               for rank in range(world_size)]
    assert len({len(loader) for loader in loaders}) == 1
    return [[loader.next_batch() for loader in loaders] for _ in range(len(loaders[0]))]


def in_order(batch: list[list]) -> tuple[np.ndarray, np.ndarray]:
    """A batch's inputs and targets, sequence by sequence: by micro-step, and by rank within it."""
    pairs = [rank[micro] for micro in range(len(batch[0])) for rank in batch]
    return tuple(np.concatenate([pair[side].numpy() for pair in pairs]) for side in (0, 1))


def first_input(batch: list) -> int:
    return batch[0][0][0].item()


LENGTHS = (5000, 1025, 700, 1024, 3500, 0, 1, 2049)  # some fill batches exactly, some none


@pytest.mark.parametrize("world_size, micro_steps",
                         [(1, 1), (1, 8), (2, 1), (2, 4), (3, 2), (4, 2), (5, 1), (8, 1)])
def test_ranks_tile_the_stream_with_no_gap_and_no_overlap(make_shards, world_size, micro_steps):
    shards = numbered(*LENGTHS)
    batch = world_size * micro_steps * SEQUENCE
    read = read_all(make_shards(*shards), batch, world_size)
    expected = plain_batches(shards, batch)
    assert len(read) == len(expected) > 5
    for ours, theirs in zip(read, expected):
        assert [len(rank) for rank in ours] == [micro_steps] * world_size
        inputs, targets = in_order(ours)
        np.testing.assert_array_equal(inputs, theirs[:-1])
        np.testing.assert_array_equal(targets, theirs[1:])


@pytest.mark.parametrize("world_size, micro_steps",
                         [(1, 2), (1, 8), (2, 4), (3, 2), (4, 1), (5, 1)])
@pytest.mark.parametrize("segment", [32, 64, 128])
def test_ranks_tile_the_stream_in_segments_too(make_shards, world_size, micro_steps, segment):
    shards = numbered(*LENGTHS)
    batch = world_size * micro_steps * SEQUENCE
    read = read_all(make_shards(*shards), batch, world_size, segment)
    expected = plain_segments(shards, batch, segment)
    assert len(read) == len(expected) > 5
    for ours, theirs in zip(read, expected):
        inputs, targets = in_order(ours)
        np.testing.assert_array_equal(inputs.reshape(-1, segment), theirs[:, :-1])
        np.testing.assert_array_equal(targets.reshape(-1, segment), theirs[:, 1:])
    seen = np.concatenate([in_order(batch)[0] for batch in read])
    assert len(np.unique(seen)) == len(seen), "no token is trained on twice"


@given(lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=5),
       segment=st.sampled_from([0, 16, 64, 128]), world_size=st.integers(1, 4),
       micro_steps=st.integers(1, 3))
@settings(max_examples=30)
def test_any_shards_any_ranks(tmp_path_factory, lengths, segment, world_size, micro_steps):
    folder = tmp_path_factory.mktemp("shards")
    shards = numbered(*lengths)
    for number, shard in enumerate(shards):
        write_shard(folder / f"{number}.bin", shard)
    batch = world_size * micro_steps * SEQUENCE
    read = read_all(f"{folder}/*.bin", batch, world_size, segment)
    if segment:
        expected = [pieces[:, :-1].ravel() for pieces in plain_segments(shards, batch, segment)]
    else:
        expected = [stretch[:-1] for stretch in plain_batches(shards, batch)]
    np.testing.assert_array_equal([in_order(batch)[0] for batch in read], expected)


@pytest.mark.parametrize("segment", [0, 64])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_one_rank_with_micro_steps_reads_what_several_ranks_read(make_shards, world_size, segment):
    pattern = make_shards(*numbered(*LENGTHS))
    alone = read_all(pattern, 8 * SEQUENCE, 1, segment)
    together = read_all(pattern, 8 * SEQUENCE, world_size, segment)
    assert len(alone) == len(together) > 3
    for one, several in zip(alone, together):
        for side in (0, 1):
            np.testing.assert_array_equal(in_order(one)[side], in_order(several)[side])


def test_shards_come_in_the_order_of_their_names(tmp_path):
    for name, first in (("b", 1000), ("a", 0), ("c", 2000)):
        write_shard(tmp_path / f"train_{name}.bin", np.arange(first, first + SEQUENCE + 1))
    loader = Loader(str(tmp_path / "*.bin"), SEQUENCE, SEQUENCE)
    assert [first_input(loader.next_batch()) for _ in range(len(loader))] == [0, 1000, 2000]


def test_every_epoch_is_all_of_the_shards_in_an_order_of_its_own(make_shards):
    """The seed decides it, the same on every rank; a single epoch is in the order of the names."""
    shards = numbered(*[2 * SEQUENCE + 1] * 8)
    pattern = make_shards(*shards)
    starts = [int(shard[0]) for shard in shards]

    def epochs_of(**settings) -> list[list[int]]:
        loader = Loader(pattern, 2 * SEQUENCE, SEQUENCE, world_size=2, **settings)
        firsts = [first_input(loader.next_batch()) for _ in range(len(loader))]
        return [firsts[start:start + 8] for start in range(0, len(firsts), 8)]

    assert epochs_of(epochs=1, seed=5) == epochs_of() == [starts]
    orders = epochs_of(epochs=3, seed=5)
    assert orders == epochs_of(epochs=3, seed=5) != epochs_of(epochs=3, seed=6)
    assert [sorted(epoch) for epoch in orders] == [starts] * 3
    assert len({tuple(epoch) for epoch in orders}) == 3
    other_rank = epochs_of(epochs=3, seed=5, rank=1)
    assert other_rank == [[start + SEQUENCE for start in epoch] for epoch in orders]


def test_what_a_batch_is_made_of(make_shards):
    """Indices for an embedding, targets for the cross-entropy; the highest token stays unsigned."""
    loader = Loader(make_shards(np.full(300, 65535)), 2 * SEQUENCE, SEQUENCE)
    batch = loader.next_batch()
    assert len(batch) == 2
    for inputs, targets in batch:
        assert (inputs.dtype, targets.dtype) == (torch.int32, torch.int64)
        assert inputs.shape == targets.shape == (SEQUENCE,)
        assert (inputs == 65535).all() and (targets == 65535).all()


def test_the_thread_that_reads_has_the_device_of_its_rank(make_shards, monkeypatch):
    """A CUDA device is a thread's own: pinned memory would open a context on GPU 0."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device",
                        lambda device: chosen.append((threading.current_thread().name, device)))
    pattern = make_shards(*numbered(1000))
    for device in ("cpu", "cuda:3"):
        loader = Loader(pattern, SEQUENCE, SEQUENCE, device=device)
        loader.reader.submit(int).result()
    assert chosen == [("loader_0", torch.device("cuda", 3))]


def test_reading_ahead_does_not_change_the_order(make_shards):
    """However batches are asked for: in turn, after a jump, in strides, or directly."""
    loader = Loader(make_shards(*numbered(6000)), SEQUENCE, SEQUENCE)
    directly = [loader.read(index)[0, 0, 0].item() for index in range(len(loader))]
    assert directly == [SEQUENCE * index for index in range(46)]
    assert [first_input(loader.next_batch()) for _ in range(10)] == directly[:10]
    for index in (30, 3, 3, 45, 0):
        loader.index = index
        assert first_input(loader.next_batch()) == directly[index]
        assert loader.index == index + 1
    loader.index = 1
    assert [first_input(loader.next_batch(stride=5)) for _ in range(9)] == directly[1::5]
    loader.index = 2
    assert [first_input(loader.next_batch()) for _ in range(44)] == directly[2:]


def test_the_next_batch_is_read_ahead_of_being_asked_for(make_shards):
    loader = Loader(make_shards(*numbered(6000)), SEQUENCE, SEQUENCE)
    loader.next_batch()
    (index, pending), = loader.prefetched.items()
    assert index == 1
    assert pending.result(timeout=600)[0, 0, 0] == SEQUENCE


def test_batches_do_not_share_memory(make_shards):
    loader = Loader(make_shards(*numbered(6000)), SEQUENCE, SEQUENCE)
    first = loader.next_batch()
    kept = first[0][0].clone()
    for _ in range(5):
        loader.next_batch()
    assert torch.equal(first[0][0], kept)


def test_a_token_outside_the_vocabulary_names_its_shard(make_shards):
    tokens = np.zeros(600, dtype=np.uint16)
    tokens[300] = 200
    loader = Loader(make_shards(tokens), SEQUENCE, SEQUENCE, vocab_size=200)
    loader.next_batch()
    loader.next_batch()
    with pytest.raises(UserError, match=r"train_000000\.bin: token 200 .* vocab_size=200"):
        loader.next_batch()


def test_a_truncated_header_or_shard_is_refused(tmp_path):
    whole = write_shard(tmp_path / "whole.bin", np.arange(500))
    assert train_gpt.Shard(str(whole)).num_tokens == 500
    for size in (0, 3, 1000, 1024, 1025, 2023):
        (tmp_path / "cut.bin").write_bytes(whole.read_bytes()[:size])
        with pytest.raises(UserError, match=r"cut\.bin"):
            train_gpt.Shard(str(tmp_path / "cut.bin"))


MEMORY = """
import json, os, sys
sys.path.insert(0, {root!r})
import train_gpt

def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

for segment in (0, 2**16):
    loader = train_gpt.Loader({pattern!r}, 2**20, 2**19, segment)
    sizes = []
    total = 0
    while loader.index < len(loader):
        total += sum(len(inputs) for inputs, _ in loader.next_batch(stride=10))
        sizes.append(resident_mib())
    print(json.dumps(dict(sizes=sizes, total=total)))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
def test_resident_memory_stays_flat_on_a_large_shard(tmp_path):
    """A sparse shard of 3 GB, of which 300 MB are read in batches of 2 MB, all over it."""
    tokens = 3 * 2**29
    path = tmp_path / "large.bin"
    write_shard(path, [], claimed=tokens)
    os.truncate(path, 1024 + 2 * tokens)
    program = MEMORY.format(root=os.path.dirname(train_gpt.__file__), pattern=str(path))
    # glibc returns large tensors to the system at once: what is measured is the map
    environment = os.environ | dict(MALLOC_MMAP_THRESHOLD_="131072")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    contiguous, segments = map(json.loads, done.stdout.splitlines())
    for report in (contiguous, segments):
        assert 2 * report["total"] > 300 * 2**20
        settled = report["sizes"][20:]  # by then the memory of a batch is reused
        assert max(settled) < min(settled) + 100
        half = len(settled) // 2
        early = sorted(settled[:half])[half // 2]
        late = sorted(settled[half:])[half // 2]
        assert late < early + 30, "it grows"


# ---- the token budget ----

def opened(*arguments: str) -> train_gpt.Data:
    return open_data(parse_command_line([*TINY, *arguments]), Hardware())


def test_the_budget_counts_what_the_loader_will_deliver(tmp_path):
    """Two shards of 20,000 tokens hold 19 whole batches of 1,024 each: 38 steps, not 39."""
    data = make_data(tmp_path)
    train = opened(*data, "--num_steps=38").train
    for _ in range(38):
        train.next_batch()
    with pytest.raises(UserError) as caught:
        opened(*data, "--num_steps=39")
    assert str(caught.value) == (
        f"{tmp_path}/train_*.bin: 2 shards hold 38 batches of 1024 tokens and --num_steps=39 needs "
        "39; repeat them with --epochs=2, or lower it to --num_steps=38")


@pytest.mark.parametrize("advice, needed", [("--epochs=3", 100), ("--num_steps=38", 38)])
def test_advice_about_the_budget_is_enough(tmp_path, advice, needed):
    data = make_data(tmp_path)
    with pytest.raises(UserError, match=advice):
        opened(*data, "--num_steps=100")
    assert len(opened(*data, "--num_steps=100", advice).train) >= needed


def test_validation_tokens_are_counted_in_tokens(tmp_path):
    """20,000 tokens hold 78 whole sequences of 256."""
    data = make_data(tmp_path)
    assert len(opened(*data, "--val_tokens=19968").val) == 78
    with pytest.raises(UserError) as caught:
        opened(*data, "--val_tokens=20224")
    assert str(caught.value) == (
        f"{tmp_path}/val_*.bin: 1 shards hold 78 batches of 256 tokens and --val_tokens=20224 needs"
        " 79; lower it to --val_tokens=19968")
    opened(*data, "--val_start=10240", "--val_tokens=9728")
    with pytest.raises(UserError, match="val_tokens=9984 needs 79; lower it to --val_tokens=9728"):
        opened(*data, "--val_start=10240", "--val_tokens=9984")
    with pytest.raises(UserError, match="val_tokens=1024 needs 84; lower --val_start"):
        opened(*data, "--val_start=20480")


def test_a_text_shorter_than_a_batch_is_no_reason_to_make_more_shards_of_it(tmp_path):
    """Nor for epochs, of which none would ever fill a batch."""
    data = make_data(tmp_path, tokens=1000)
    with pytest.raises(UserError) as caught:
        opened(*data)
    message = str(caught.value)
    assert message.endswith("needs 4; lower --batch_tokens or --sequence_tokens")
    assert not any(word in message for word in ("epochs", "tokenize", "make", "fetch"))


@pytest.fixture
def no_data_here(tmp_path, monkeypatch):
    """An empty working directory: paths like data/fineweb10B/… are looked for in there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("preset", ["2024-11-19", "2025-01-04"])
def test_the_command_that_fetches_missing_shards_fetches_enough_of_them(no_data_here, preset):
    hp = parse_command_line([f"--preset={preset}"])
    source, shards = train_gpt.missing_data(hp).split()
    per_shard = (100_000_000 - 1) // hp.batch_tokens
    assert source == "fineweb"
    assert (int(shards) - 1) * per_shard < hp.num_steps <= int(shards) * per_shard


def test_the_command_that_fetches_the_rest_is_named(no_data_here):
    folder = no_data_here / "data/fineweb10B"
    folder.mkdir(parents=True)
    for split in ("train", "val"):
        write_shard(folder / f"fineweb_{split}_000001.bin", np.zeros(3 * 1024 + 1))
    hp = parse_command_line([*TINY, "--preset=2025-01-04", "--num_steps=200000"])
    with pytest.raises(UserError, match="hold 3 batches of 1024 tokens and --num_steps=200000 needs"
                                        " 200000; fetch the rest with: python data/fineweb.py 3, or"
                                        " repeat them with --epochs=66667, or lower it to"):
        open_data(hp, Hardware())


def test_a_script_without_a_number_is_named_as_it_is_typed(tmp_path, monkeypatch):
    monkeypatch.setattr(train_gpt, "missing_data", lambda hp, tokens: "enwik8")
    hp = parse_command_line([*TINY, *make_data(tmp_path), "--num_steps=99"])
    with pytest.raises(UserError, match="fetch the rest with: python data/enwik8.py, or repeat"):
        open_data(hp, Hardware())


def test_the_rest_is_counted_by_what_aligned_sequences_skip(no_data_here):
    """Documents of 500 tokens, sequences of 256: nearly half of the tokens is skipped."""
    folder = no_data_here / "data/fineweb10B"
    folder.mkdir(parents=True)
    tokens = np.ones(100 * 1024)
    tokens[::500] = 63
    for split in ("train", "val"):
        write_shard(folder / f"fineweb_{split}_000001.bin", tokens)
    hp = parse_command_line([*TINY, "--preset=2025-07-13", "--num_steps=70000",
                             "--segment_tokens=0", "--model_dim=32", "--num_heads=2"])
    assert train_gpt.missing_data(hp) == ""
    with pytest.raises(UserError, match="fetch the rest with: python data/fineweb.py 2, or"):
        open_data(hp, Hardware())


def test_the_text_of_the_laptop_is_fetched_where_there_is_none(no_data_here):
    hp = parse_command_line(["--preset=laptop"])
    assert train_gpt.missing_data(hp) == "enwik8"
    with pytest.raises(UserError, match=r"enwik8_train_\*\.bin: no token shards there; \./run\.sh"):
        open_data(hp, Hardware())


# ---- what data/ says about the shards ----

@pytest.fixture
def shards_module():
    with train_gpt.data_module("shards") as shards:
        return shards


def test_shards_with_a_manifest_are_passed_on_to_data(tmp_path, monkeypatch, shards_module):
    calls = []

    def check_manifests(held, vocab_size, document_token):
        calls.append((held, vocab_size, document_token))
        return {path: f"hash of {path}" for path in held}, 3.5 * len(held)

    monkeypatch.setattr(shards_module, "check_manifests", check_manifests)
    data = make_data(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    found = opened(*data, "--epochs=2")
    train = {f"{tmp_path}/train_00000{number}.bin": 20_000 for number in (0, 1)}
    val = {f"{tmp_path}/val_000000.bin": 20_000}
    assert calls == [(train, 64, 63), (val, 64, 63)]
    assert found.hashes == {path: f"hash of {path}" for path in (*train, *val)}
    assert found.bytes_per_token == 3.5, "that of the validation text"


def test_shards_without_a_manifest_load_as_they_are(tmp_path):
    found = opened(*make_data(tmp_path))
    assert set(found.hashes.values()) == {None} and len(found.hashes) == 3
    assert found.bytes_per_token is None


def test_what_data_refuses_reaches_the_user_as_one_sentence(tmp_path, monkeypatch, capsys,
                                                            shards_module):
    def check_manifests(held, vocab_size, document_token):
        raise shards_module.UserError("a reason of data/shards.py; and its remedy")

    monkeypatch.setattr(shards_module, "check_manifests", check_manifests)
    data = make_data(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    assert train_gpt.main([*TINY, *data]) == 2
    assert capsys.readouterr().err == "error: a reason of data/shards.py; and its remedy\n"
    assert not (tmp_path / "logs").exists()


def test_the_script_alone_trains_on_shards_that_exist(tmp_path):
    """Copied without the scripts of data/: also where the shards have a manifest."""
    alone = tmp_path / "alone"
    shards = alone / "data"
    shards.mkdir(parents=True)
    data = make_data(shards)
    (shards / "manifest.json").write_text("{}")
    script = shutil.copy(SCRIPT, alone)
    process = subprocess.run(
        [sys.executable, script, *TINY, *data, "--run_id=alone"], cwd=alone, text=True,
        capture_output=True, timeout=900,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"})
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    assert "final validation loss" in (shards / "logs/alone/log.txt").read_text()
    assert sorted(os.listdir(alone)) == ["data", "train_gpt.py"]
