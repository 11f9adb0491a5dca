"""The loader: ranks tile the stream, at any world size the same batches, and memory stays flat."""
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import train_gpt
from conftest import write_shard
from train_gpt import Loader, UserError

SEQUENCE = 128


def numbered(*lengths: int) -> list[np.ndarray]:
    """Shards of these lengths in which every token of the stream has a number of its own."""
    ends = np.cumsum(lengths)
    assert ends[-1] <= 2**16
    return [np.arange(end - length, end, dtype=np.uint16) for end, length in zip(ends, lengths)]


def plain_batches(shards, batch: int) -> list[np.ndarray]:
    """Walk each shard, a batch and its last target at a time; what does not fill one is passed by."""
    found = []
    for shard in shards:
        position = 0
        while position + batch + 1 <= len(shard):
            found.append(shard[position:position + batch + 1])
            position += batch
    return found


def plain_segments(shards, batch: int, segment: int) -> list[np.ndarray]:
    """[segments, tokens + 1] for each batch: a segment from each of batch/segment equal parts of a shard."""
    found, parts = [], batch // segment
    for shard in shards:
        part = (len(shard) - 1) // parts
        for step in range(part // segment):
            starts = [number * part + step * segment for number in range(parts)]
            found.append(np.stack([shard[start:start + segment + 1] for start in starts]))
    return found


def read_all(pattern: str, batch: int, world_size: int, segment: int = 0) -> list[list[list]]:
    """[batch][rank][micro-step] of everything there is, each rank with a loader of its own."""
    loaders = [Loader(pattern, batch, SEQUENCE, segment, rank, world_size) for rank in range(world_size)]
    assert len({len(loader) for loader in loaders}) == 1
    return [[loader.next_batch() for loader in loaders] for _ in range(len(loaders[0]))]


def in_order(batch: list[list]) -> tuple[np.ndarray, np.ndarray]:
    """A batch's inputs and targets, sequence by sequence: by micro-step, and by rank within it."""
    pairs = [rank[micro] for micro in range(len(batch[0])) for rank in batch]
    return tuple(np.concatenate([pair[side].numpy() for pair in pairs]) for side in (0, 1))


LENGTHS = (5000, 1025, 700, 1024, 3500, 0, 1, 2049)  # some fill batches exactly, some none, one is empty


@pytest.mark.parametrize("world_size, micro_steps",
                         [(1, 1), (1, 8), (2, 1), (2, 4), (3, 2), (4, 2), (5, 1), (8, 1)])
def test_ranks_tile_the_stream_with_no_gap_and_no_overlap(make_shards, world_size, micro_steps):
    shards, batch = numbered(*LENGTHS), world_size * micro_steps * SEQUENCE
    read = read_all(make_shards(*shards), batch, world_size)
    expected = plain_batches(shards, batch)
    assert len(read) == len(expected) > 5
    for ours, theirs in zip(read, expected):
        assert [len(rank) for rank in ours] == [micro_steps] * world_size
        inputs, targets = in_order(ours)
        np.testing.assert_array_equal(inputs, theirs[:-1])
        np.testing.assert_array_equal(targets, theirs[1:])


@pytest.mark.parametrize("world_size, micro_steps", [(1, 2), (1, 8), (2, 4), (3, 2), (4, 1), (5, 1)])
@pytest.mark.parametrize("segment", [32, 64, 128])
def test_ranks_tile_the_stream_in_segments_too(make_shards, world_size, micro_steps, segment):
    shards, batch = numbered(*LENGTHS), world_size * micro_steps * SEQUENCE
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
       segment=st.sampled_from([0, 16, 64, 128]), world_size=st.integers(1, 4), micro_steps=st.integers(1, 3))
@settings(max_examples=30)
def test_any_shards_any_ranks(tmp_path_factory, lengths, segment, world_size, micro_steps):
    folder, shards = tmp_path_factory.mktemp("shards"), numbered(*lengths)
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
    pattern, batch = make_shards(*numbered(*LENGTHS)), 8 * SEQUENCE
    alone, together = read_all(pattern, batch, 1, segment), read_all(pattern, batch, world_size, segment)
    assert len(alone) == len(together) > 3
    for one, several in zip(alone, together):
        for side in (0, 1):
            np.testing.assert_array_equal(in_order(one)[side], in_order(several)[side])


def test_shards_come_in_the_order_of_their_names(tmp_path):
    for name, first in (("b", 1000), ("a", 0), ("c", 2000)):
        write_shard(tmp_path / f"train_{name}.bin", np.arange(first, first + SEQUENCE + 1))
    loader = Loader(str(tmp_path / "*.bin"), SEQUENCE, SEQUENCE)
    assert [loader.next_batch()[0][0][0].item() for _ in range(len(loader))] == [0, 1000, 2000]


def test_every_epoch_is_all_of_the_shards_in_an_order_of_its_own(make_shards):
    """The order is the seed's, the same on every rank; a single epoch goes by the names."""
    shards = numbered(*[2 * SEQUENCE + 1] * 8)
    pattern, starts = make_shards(*shards), [int(shard[0]) for shard in shards]

    def epochs_of(**settings) -> list[list[int]]:
        loader = Loader(pattern, 2 * SEQUENCE, SEQUENCE, world_size=2, **settings)
        firsts = [loader.next_batch()[0][0][0].item() for _ in range(len(loader))]
        return [firsts[hardware:hardware + 8] for hardware in range(0, len(firsts), 8)]

    assert epochs_of(epochs=1, seed=5) == epochs_of() == [starts]
    walked = epochs_of(epochs=3, seed=5)
    assert [sorted(epoch) for epoch in walked] == [starts] * 3
    assert len({tuple(epoch) for epoch in walked}) == 3 and walked != epochs_of(epochs=3, seed=6)
    other_rank = epochs_of(epochs=3, seed=5, rank=1)
    assert other_rank == [[start + SEQUENCE for start in epoch] for epoch in walked]


def test_what_a_batch_is_made_of(make_shards):
    """Indices for an embedding, targets for the cross-entropy; the highest token comes through unsigned."""
    loader = Loader(make_shards(np.full(300, 65535)), 2 * SEQUENCE, SEQUENCE)
    batch = loader.next_batch()
    assert len(batch) == 2
    for inputs, targets in batch:
        assert (inputs.dtype, targets.dtype) == (torch.int32, torch.int64)
        assert inputs.shape == targets.shape == (SEQUENCE,)
        assert (inputs == 65535).all() and (targets == 65535).all()


def first_inputs(batch: list) -> int:
    return batch[0][0][0].item()


def test_reading_ahead_does_not_change_the_order(make_shards):
    """However batches are asked for: in turn, after a jump, in strides, or straight from the file."""
    loader = Loader(make_shards(*numbered(6000)), SEQUENCE, SEQUENCE)
    directly = [loader.read(index)[0, 0, 0].item() for index in range(len(loader))]
    assert directly == [SEQUENCE * index for index in range(46)]
    assert [first_inputs(loader.next_batch()) for _ in range(10)] == directly[:10]
    for index in (30, 3, 3, 45, 0):
        loader.index = index
        assert first_inputs(loader.next_batch()) == directly[index]
        assert loader.index == index + 1
    loader.index = 1
    assert [first_inputs(loader.next_batch(stride=5)) for _ in range(9)] == directly[1::5]
    loader.index = 2
    assert [first_inputs(loader.next_batch()) for _ in range(44)] == directly[2:]


def test_the_next_batch_is_read_ahead_of_being_asked_for(make_shards):
    loader = Loader(make_shards(*numbered(6000)), SEQUENCE, SEQUENCE)
    loader.next_batch()
    (index, ahead), = loader.ahead.items()
    assert index == 1 and ahead.result(timeout=600)[0, 0, 0] == SEQUENCE


def test_batches_do_not_share_memory(make_shards):
    loader = Loader(make_shards(*numbered(6000)), SEQUENCE, SEQUENCE)
    first, kept = loader.next_batch(), None
    kept = first[0][0].clone()
    for _ in range(5):
        loader.next_batch()
    assert torch.equal(first[0][0], kept)


def test_running_out_is_said_in_one_sentence(make_shards):
    loader = Loader(make_shards(*numbered(300, 300)), SEQUENCE, SEQUENCE)
    for _ in range(4):
        loader.next_batch()
    with pytest.raises(UserError, match="used up.* 4 batches of 128 tokens"):
        loader.next_batch()


def test_a_token_outside_the_vocabulary_names_its_shard(make_shards):
    tokens = np.zeros(600, dtype=np.uint16)
    tokens[300] = 200
    loader = Loader(make_shards(tokens), SEQUENCE, SEQUENCE, vocab_size=200)
    loader.next_batch(), loader.next_batch()
    with pytest.raises(UserError, match=r"train_000000\.bin: token 200 .* vocab_size=200"):
        loader.next_batch()


def test_a_truncated_header_or_shard_is_refused(tmp_path):
    whole = write_shard(tmp_path / "whole.bin", np.arange(500))
    assert train_gpt.Shard(whole).num_tokens == 500
    for size in (0, 3, 1000, 1024, 1025, 2023):
        (tmp_path / "cut.bin").write_bytes((tmp_path / "whole.bin").read_bytes()[:size])
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
    loader, sizes, total = train_gpt.Loader({pattern!r}, 2**20, 2**19, segment), [], 0
    while loader.index < len(loader):
        total += sum(len(inputs) for inputs, _ in loader.next_batch(stride=10))
        sizes.append(resident_mib())
    print(json.dumps(dict(sizes=sizes, total=total)))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="only Linux says how much is resident")
def test_resident_memory_stays_flat_on_a_large_shard(tmp_path):
    """A sparse shard of 3 GB, of which 300 MB are read in batches of 2 MB, all over it."""
    tokens, path = 3 * 2**29, tmp_path / "large.bin"
    write_shard(path, [], claimed=tokens)
    os.truncate(path, 1024 + 2 * tokens)
    program = MEMORY.format(root=os.path.dirname(train_gpt.__file__), pattern=str(path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    contiguous, segments = map(json.loads, done.stdout.splitlines())
    for report in (contiguous, segments):
        assert 2 * report["total"] > 300 * 2**20
        settled = report["sizes"][20:]  # by then the copies of a batch have found their hardware
        assert max(settled) < min(settled) + 100
        half = len(settled) // 2
        assert sorted(settled[half:])[half // 2] < sorted(settled[:half])[half // 2] + 30, "it creeps up"
