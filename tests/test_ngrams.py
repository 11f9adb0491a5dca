"""What the model is told beside the token: the tables of n-grams, and what followed before."""
import collections
import math

import numpy as np
import pytest
import torch
from helpers import TINY, Result, make_data, make_trainer, run, train_steps, write_shard
from hypothesis import given
from hypothesis import strategies as st

import train_gpt
from train_gpt import Loader, NGrams

NGRAMS = ["--ngram_order=3", "--ngram_tokens=10000", "--copy_lengths=(2,4)"]


def text(length: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    """Some tokens are frequent, and all depend on the one before."""
    generator = np.random.default_rng(seed)
    tokens = np.minimum(generator.geometric(0.3, length), vocab_size) - 1
    return (np.repeat(tokens[::2], 2)[:length] + tokens) % vocab_size


def count(tmp_path, tokens: np.ndarray, order: int, vocab_size: int) -> NGrams:
    """From a shard of which nothing else is read: one stretch, without its first token."""
    write_shard(tmp_path / "text.bin", tokens)
    ngrams = NGrams(order, vocab_size)
    loader = Loader(str(tmp_path / "text.bin"), 128, 128, vocab_size=vocab_size)
    assert train_gpt.count_ngrams(ngrams, loader, 0, len(tokens)) == len(tokens) - 2
    return ngrams


class Reference:
    """Modified Kneser–Ney by its definition, with dictionaries."""

    def __init__(self, tokens: list[int], order: int, vocab_size: int):
        windows = [tuple(tokens[end - order:end + 1]) for end in range(order, len(tokens))]
        counts = collections.Counter(windows)
        self.orders = []
        for n in range(order, -1, -1):
            self.orders.insert(0, counts)
            if n:  # how many longer n-grams end like this one
                counts = collections.Counter(ngram[1:] for ngram in counts)
        self.vocab_size = vocab_size

    def discount(self, n: int, count: int) -> float:
        with_count = collections.Counter(self.orders[n].values())
        n1, n2, n3, n4 = (max(1, with_count[value]) for value in (1, 2, 3, 4))
        y = n1 / (n1 + 2 * n2)
        if count == 1:
            return min(max(1 - 2 * y * n2 / n1, 0.1), 0.9)
        if count == 2:
            return min(max(2 - 3 * y * n3 / n2, 0.1), 1.9)
        return min(max(3 - 4 * y * n4 / n3, 0.1), 2.9)

    def chances(self, context: tuple) -> list[float]:
        """Of every token after the context, which is at most as long as the order."""
        n = len(context)
        if n == 0:
            total = sum(self.orders[0].values()) + 0.5 * self.vocab_size
            return [(self.orders[0][(token,)] + 0.5) / total for token in range(self.vocab_size)]
        shorter = self.chances(context[1:])
        counts = [self.orders[n][*context, token] for token in range(self.vocab_size)]
        if not any(counts):
            return shorter
        own = [max(0, count - self.discount(n, count)) / sum(counts) if count else 0
               for count in counts]
        return [chance + (1 - sum(own)) * less for chance, less in zip(own, shorter)]


@pytest.mark.parametrize("order", [1, 2, 4])
def test_the_tables_are_modified_kneser_ney(tmp_path, order):
    tokens = text(600, 12)
    ngrams = count(tmp_path, tokens, order, 12)
    reference = Reference(tokens[1:-1].tolist(), order, 12)
    inputs = torch.from_numpy(text(200, 12, seed=1)).int()
    found = ngrams(inputs, torch.zeros_like(inputs))
    for place in range(200):
        context = tuple(inputs[max(0, place + 1 - order):place + 1].tolist())
        expected = torch.tensor(reference.chances(context))
        torch.testing.assert_close(found[place], expected, rtol=2e-3, atol=0)  # half precision


def test_of_many_successors_the_most_frequent_are_kept(tmp_path):
    """After a 0 comes 1 most often, then 2, …"""
    pairs = np.repeat(np.arange(1, 101), np.arange(100, 0, -1))
    tokens = np.zeros(2 * len(pairs) + 2, np.int64)
    tokens[2:-1:2] = np.random.default_rng(0).permutation(pairs)
    ngrams = count(tmp_path, tokens, 1, 128)
    start, end = ngrams.starts_1[:2].tolist()
    assert end - start == train_gpt.MAX_SUCCESSORS
    assert ngrams.successors_1[start:end].tolist() == list(range(1, 1 + train_gpt.MAX_SUCCESSORS))
    assert (ngrams.probs_1[start:end].diff() < 0).all()


def test_a_context_ends_at_a_document(tmp_path):
    ngrams = count(tmp_path, text(600, 12), 4, 12)
    inputs = torch.from_numpy(text(64, 12, seed=1)).int()
    documents = (torch.arange(64) >= 32).int()
    changed = inputs.clone()
    changed[:32] = (changed[:32] + 1) % 12
    found = ngrams(inputs, documents)
    assert torch.equal(found[32:], ngrams(changed, documents)[32:])
    assert not torch.equal(found[32:35], ngrams(changed, torch.zeros(64))[32:35])


def test_no_token_is_predicted_from_later_ones(tmp_path):
    ngrams = count(tmp_path, text(600, 12), 4, 12)
    inputs = torch.from_numpy(text(64, 12, seed=1)).int()
    changed = inputs.clone()
    changed[40:] = (changed[40:] + 1) % 12
    assert torch.equal(ngrams(inputs, torch.zeros(64))[:40], ngrams(changed, torch.zeros(64))[:40])


def test_without_a_count_every_token_is_as_likely():
    found = NGrams(3, 16)(torch.arange(8), torch.zeros(8))
    torch.testing.assert_close(found, torch.full((8, 16), 1 / 16))


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=3), st.integers(0, 20),
       st.sampled_from([0, 128]), st.integers(1, 2), st.integers(0, 9000),
       st.sampled_from([1.0, 0.5]))
def test_what_is_counted_is_in_no_batch(tmp_path_factory, sizes, steps, segment, epochs, limit,
                                        share):
    folder = tmp_path_factory.mktemp("unused")
    for number, size in enumerate(sizes):
        write_shard(folder / f"{number}.bin", np.arange(size))
    loader = Loader(f"{folder}/*.bin", 256, 256, segment_tokens=segment, epochs=epochs, seed=1,
                    share=share)
    steps = min(steps, len(loader))
    read = {(loader.batches[index][0].path, token)
            for index in range(steps) for token in loader.read(index).flatten().tolist()}
    stretches = train_gpt.unused_spans(loader, steps, limit)
    counted = [(shard.path, token) for shard, start, length in stretches
               for token in shard.tokens(start, length).tolist()]
    assert len(counted) == len(set(counted)) <= limit
    assert not read & set(counted)
    if limit >= sum(sizes) and not steps:
        assert len(counted) >= sum(sizes) - 6 * len(sizes)  # nearly all: ends of lanes
    if limit >= sum(sizes):
        assert len(counted) >= (1 - share) * sum(sizes) - 6 * len(sizes)


# ---- what followed before ----

@given(st.lists(st.integers(0, 2), min_size=2, max_size=60),
       st.sets(st.integers(1, 5), min_size=1).map(sorted).map(tuple),
       st.lists(st.booleans(), min_size=60, max_size=60))
def test_last_followers_are_those_of_a_search(tokens, lengths, starts):
    documents = np.cumsum(starts)[:len(tokens)].tolist()
    suggested, found = train_gpt.last_followers(torch.tensor(tokens).int(),
                                                torch.tensor(documents).int(), lengths)
    assert suggested.shape == found.shape == (len(tokens), len(lengths))
    for column, length in enumerate(lengths):
        for here in range(len(tokens)):
            expected = None
            for there in range(length - 1, here):
                same = tokens[there + 1 - length:there + 1] == tokens[here + 1 - length:here + 1]
                if same and documents[there + 1 - length] == documents[here]:
                    expected = tokens[there + 1]
            assert found[here, column] == (expected is not None)
            if expected is not None:
                assert suggested[here, column] == expected


def test_every_part_of_the_model_learns(tmp_path):
    """After two steps no parameter is where it was, and the gates have opened."""
    hp = train_gpt.parse_command_line([*TINY, *NGRAMS, *make_data(tmp_path)])
    trainer = make_trainer(hp)
    train_gpt.count_ngrams(trainer.model.suggestions.ngrams, trainer.data.train, hp.num_steps,
                           hp.ngram_tokens)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    train_steps(trainer, 3)
    for name, p in trainer.model.named_parameters():
        if "ngram" in name or "copy" in name:
            assert not torch.equal(p, before[name]), name


# ---- in a run ----

@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Result:
    folder = tmp_path_factory.mktemp("ngrams")
    process = run([*TINY, *NGRAMS, *make_data(folder), "--run_id=whole", "--val_every=2",
                   "--save_every=2", "--keep_checkpoints=9", "--batch_tokens=1536"])
    assert process.returncode == 0, process.stderr
    return Result(folder / "logs/whole")


def test_the_model_starts_with_what_was_counted(whole):
    assert "counted n-grams in 9,996 tokens in " in whole.log  # of 12 lanes, 833 each
    assert whole.val_losses[0] < 1.5 < math.log(64)  # one of three tokens follows: log 3


def test_a_resumed_run_has_the_tables_of_its_checkpoint(whole):
    folder = whole.folder
    process = run(["--resume=" + str(folder / "checkpoint_0000002.pt")])
    assert process.returncode == 0, process.stderr
    resumed = Result(folder.with_name("whole_from_2"))
    assert not any(line.startswith("counted") for line in resumed.log.splitlines())
    assert resumed.train_losses == whole.train_losses[-2:]
    assert resumed.val_losses[-1] == whole.val_losses[-1]


def test_ranks_have_the_same_tables(whole):
    for ranks in (2, 3):
        options = [*TINY, *NGRAMS, *make_data(whole.folder.parent.parent), f"--run_id=on{ranks}",
                   "--batch_tokens=1536"]
        process = run(options, ranks=ranks)
        assert process.returncode == 0, process.stderr
        result = Result(whole.folder.with_name(f"on{ranks}"))
        assert result.train_losses == pytest.approx(whole.train_losses, abs=2e-4)


def test_a_saved_model_has_its_tables(whole):
    state = train_gpt.read_checkpoint(whole.folder / "model.pt")
    model = train_gpt.load_model(str(whole.folder), train_gpt.Hardware())
    assert len(model.suggestions.ngrams.contexts_3) > 500
    for name, tensor in state["model"]["suggestions.ngrams._extra_state"].items():
        assert torch.equal(getattr(model.suggestions.ngrams, name), tensor)
    process = run([f"--checkpoint={whole.folder}", "--sample_tokens=5"])
    assert process.returncode == 0, process.stderr


def test_compiled_it_computes_the_same(tmp_path):
    hp = train_gpt.parse_command_line([*TINY, *NGRAMS, *make_data(tmp_path)])
    trainer = make_trainer(hp)
    train_gpt.count_ngrams(trainer.model.suggestions.ngrams, trainer.data.train, hp.num_steps,
                           hp.ngram_tokens)
    ngrams = trainer.model.suggestions.ngrams
    compiled = torch.compile(ngrams, dynamic=False, fullgraph=True, backend="eager")
    inputs = torch.arange(256) % 60
    documents = torch.zeros(256)
    assert torch.equal(compiled(inputs, documents), ngrams(inputs, documents))
    assert len(train_steps(trainer, 2)) == 2


@pytest.mark.parametrize("options, sentence", [
    (["--vocab_size=600"], "--ngram_order=3: expected 0 with more than 512 tokens"),
    (["--ngram_order=7"], "--ngram_order=7: expected at most 6"),
    (["--copy_lengths=(0,)"], r"--copy_lengths=\(0,\): expected lengths from 1 to 64"),
    (["--copy_lengths=(4,2)"], r"--copy_lengths=\(4, 2\): expected lengths from 1 to 64, in order"),
    (["--copy_lengths=(2,2)"], r"--copy_lengths=\(2, 2\): expected lengths from 1 to 64, in order"),
    (["--copy_lengths=4"], "--copy_lengths=4: expected a tuple of whole numbers, such as")])
def test_what_cannot_be_counted(options, sentence):
    with pytest.raises(train_gpt.UserError, match=sentence):
        train_gpt.parse_command_line([*TINY, *NGRAMS, *options])


def test_a_text_that_is_used_up_leaves_nothing_to_count(tmp_path):
    """The tables then say nothing, and the run trains as without them; or a part is set aside."""
    data = make_data(tmp_path, tokens=1027)
    options = [*TINY, *NGRAMS, *data, "--batch_tokens=256", "--num_steps=80"]
    process = run([*options, "--epochs=10"])
    assert process.returncode == 0, process.stderr
    assert "counted n-grams in 0 tokens" in process.stdout
    process = run([*options, "--epochs=20", "--ngram_share=0.5"])
    assert process.returncode == 0, process.stderr
    assert "counted n-grams in 1,024 tokens" in process.stdout


def test_no_part_is_set_aside_without_ngrams(tmp_path):
    data = make_data(tmp_path, tokens=1027)
    batches = {}
    for order in (0, 3):
        hp = train_gpt.parse_command_line([*TINY, *NGRAMS, *data, "--num_steps=1",
                                           "--batch_tokens=256", "--ngram_share=0.5",
                                           f"--ngram_order={order}"])
        batches[order] = len(train_gpt.open_train(hp, train_gpt.Hardware()))
    assert batches[0] == 2 * batches[3] > 0
