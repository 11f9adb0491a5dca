"""Files from elsewhere, mutated: each is read right or refused in one sentence.

For the tests and for ./run.sh faults.
"""
import io
from pathlib import Path

import torch
from helpers import TINY, write_manifest, write_shard
from hypothesis import strategies as st

import train_gpt


@st.composite
def mutations(draw) -> list[tuple]:
    """(where, as a part of the file's length; how; with what)"""
    where = st.floats(0, 1, exclude_max=True)
    how = st.sampled_from(["flip", "cut", "insert", "header"])
    content = st.binary(min_size=1, max_size=8)
    return draw(st.lists(st.tuples(where, how, content), min_size=1, max_size=4))


def mutate(content: bytes, changes: list[tuple]) -> bytes:
    for where, how, new in changes:
        length = min(64, len(content)) if how == "header" else len(content)
        at = int(where * length)
        if how == "cut":
            content = content[:at]
        elif how == "insert":
            content = content[:at] + new + content[at:]
        else:
            content = content[:at] + new + content[at + len(new):]
    return content


def read_or_refused(function) -> object | None:
    """What a function returns, or None where it refuses in one sentence."""
    try:
        return function()
    except train_gpt.UserError as error:
        assert len(str(error)) < 5000  # a list of all hyperparameters is long
        assert "\n" not in str(error)


def fuzz_shard(folder: Path, changes: list) -> None:
    """Whatever reaches the embedding is in range."""
    path = write_shard(folder / "fuzz.bin", torch.arange(3000).numpy() % 64)
    path.write_bytes(mutate(path.read_bytes(), changes))

    def batches():
        loader = train_gpt.Loader(str(path), 512, 256, vocab_size=64)
        return [loader.next_batch() for _ in range(len(loader))]
    for batch in read_or_refused(batches) or ():
        for tokens in (tokens for pair in batch for tokens in pair):
            assert 0 <= tokens.min() and tokens.max() < 64


def fuzz_manifest(folder: Path, changes: list) -> None:
    path = write_shard(folder / "fuzz.bin", torch.arange(3000).numpy() % 64)
    write_manifest(folder, [dict(file="fuzz.bin", tokens=3000, text_bytes=9000)])
    manifest = folder / "manifest.json"
    manifest.write_bytes(mutate(manifest.read_bytes(), changes))
    found = read_or_refused(lambda: bytes_per_token(path))
    manifest.unlink()
    assert found is None or (type(found) is float and 0 < found < 1e300)


def bytes_per_token(path: Path) -> float | None:
    """By the manifest beside a shard."""
    loader = train_gpt.Loader(str(path), 512, 256, vocab_size=64)
    return train_gpt.check_manifests(train_gpt.parse_command_line(TINY), loader)[1]


def fuzz_checkpoint(folder: Path, changes: list, content: bytes,
                    trainer: train_gpt.Trainer) -> None:
    """Bytes first; then entries of a file whose checksums are right, as another version's."""
    path = folder / "fuzz.pt"
    path.write_bytes(mutate(content, changes))
    if read_or_refused(lambda: train_gpt.read_checkpoint(path)) is None:
        torch.save(mutate_entries(content, changes), path)

    def resume():
        options = train_gpt.parse_options([f"--resume={path}", "--resume_anyway"])
        _, run = train_gpt.prepare_run(options)
        train_gpt.restore(trainer, run.checkpoint)
        trainer.step(trainer.data.train.next_batch(), 0)

    def sample():
        model = train_gpt.load_model(str(path), trainer.hardware)
        return train_gpt.sample(model, "", trainer.hp)
    read_or_refused(resume)
    read_or_refused(sample)


def mutate_entries(content: bytes, changes: list[tuple]) -> dict:
    """A checkpoint of which some entries are missing, or hyperparameters of another kind."""
    state = torch.load(io.BytesIO(content), weights_only=True)
    for where, _, new in changes:
        hyperparameters = state.get("hyperparameters", {})
        holder = state if new[0] % 2 else hyperparameters
        names = sorted(holder)
        if not names:
            continue
        name = names[int(where * len(names))]
        number = int.from_bytes(new, "little", signed=True)
        values = [number, float("nan"), "text", None, torch.zeros(3), [], {}]
        choice = new[-1] % (len(values) + 1)
        if holder is hyperparameters and choice < len(values):
            holder[name] = values[choice]
        else:
            del holder[name]
    return state
