"""Your own text as token shards, without a network.

    python data/tokenize_text.py IN…                       IN: files, folders, or - for stdin
    python data/tokenize_text.py IN… --tokenizer=bytes     bytes as tokens, 256 before a document
    python data/tokenize_text.py IN… --separator='\\n\\n'  several documents in a file
    python data/tokenize_text.py IN… --out=DIR             default: data/NAME, as the first input

It ends by printing the command that trains a small model on the shards.

Plain text is one document per file, or as many as a separator makes of it; .jsonl and .ndjson are a
document per line, in the field that --field names; any of them may be gzipped. A hash of a document
decides whether it goes to validation: it lands in the same split whatever comes with it and in
whatever order, and no copy of a validation document is trained on. Where that leaves a split too
small to use, as it must with a single document, the last part of the text is validation (--val of
it, or as much as a run needs at least).

Text streams through, so memory does not grow with it (a JSON record, though, is held in memory),
and the shards do not depend on the number of processes.
"""
import glob
import gzip
import hashlib
import json
import multiprocessing
import os
import re
import shlex
import sys
import threading
import zlib
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

import vocabulary
from shards import (BYTE_LENGTHS, DATA, SHARD_TOKENS, TEMPORARY, Flags, ShardSet, UserError,
                    read_manifest, reason, relative, run, summary)

BLOCK_BYTES = 1 << 20           # read at a time, and handed to a process at a time
PIECE_BYTES = 1 << 20           # a longer document is tokenized in pieces
CUT_BYTES = 1 << 16             # at the end of a piece: where a place to cut is searched
HASHED_CHARACTERS = 1 << 14     # of a document's beginning: they decide its split
MASK_BLOCK = 128                # the trainer's shortest sequence
SPLIT_TOKENS = MASK_BLOCK + 1   # the smallest usable split: a sequence and its last target
JSON_ENDINGS = (".jsonl", ".ndjson")
OTHER_ENDINGS = (".zst", ".xz", ".bz2", ".zip", ".tar", ".tgz", ".7z", ".parquet", ".arrow")
# GPT-2 never joins a space to what precedes it, so a cut between other characters and white space
# changes no token. After white space beyond ASCII a cut could change tokens: none is made there.
CUT = re.compile(
    rb"[^\s](?<!\xc2\x85)(?<!\xc2\xa0)(?<!\xe1\x9a\x80)(?<!\xe2\x80[\x80-\x8a\xa8\xa9\xaf])"
    rb"(?<!\xe2\x81\x9f)(?<!\xe3\x80\x80)(?=[ \n])")
REPORT = {"invalid": "places with invalid UTF-8, replaced by U+FFFD",
          "crlf": "line ends turned from CRLF into LF",
          "empty": "documents without text, left out",
          "missing": "records without the field as text, left out",
          "malformed": "lines that are not JSON objects, left out",
          "binary": "binary files in folders, left out",
          "long": f"documents longer than {PIECE_BYTES:,} bytes, tokenized in pieces",
          "forced": "cuts inside a word, where there was no white space"}


@dataclass
class Settings:
    """What a process needs to know to tokenize."""
    tokenizer: str = "gpt2"
    field: str = "text"
    val: float = 0.02


@dataclass
class Result:
    """What became of a block of input."""
    parts: dict = field(default_factory=lambda: {"train": [], "val": []})
    counts: Counter = field(default_factory=Counter)
    fields: tuple = ()              # of a record without the wanted field


# Documents: what happens in every process ---------------------------------------------------------

def decode(raw: bytes, counts: Counter) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        text = raw.decode(errors="replace")
        counts["invalid"] += text.count("\ufffd") - raw.count(b"\xef\xbf\xbd")
        return text


def hash_of(text: str) -> float:
    """A document's place between 0 and 1. Copies may differ in white space around them."""
    start = text.strip()[:HASHED_CHARACTERS].encode()
    return int.from_bytes(hashlib.sha256(start).digest()[:6], "big") / 2**48


def choose_split(text: str, settings: Settings, result: Result) -> str:
    """The split of a document; its first piece is enough to tell."""
    result.counts["documents"] += 1
    return "val" if hash_of(text) < settings.val else "train"


def cut_place(raw: bytes) -> tuple[int, bool]:
    """Where to cut the first piece off a long text, and whether that may be inside a word."""
    last = None
    for last in CUT.finditer(raw, PIECE_BYTES - CUT_BYTES, PIECE_BYTES):
        pass
    if last:
        return last.end(), False
    place = PIECE_BYTES
    while place > PIECE_BYTES - 4 and raw[place] & 0xC0 == 0x80:  # not inside a character
        place -= 1
    return place, True


def pieces(raw: bytes, counts: Counter):
    """A text in pieces whose tokens, one after the other, are the tokens of the text."""
    start = 0
    while len(raw) - start > PIECE_BYTES:
        place, forced = cut_place(raw[start:start + PIECE_BYTES + 1])
        counts["forced"] += forced
        yield raw[start:start + place]
        start += place
    yield raw[start:]


def encode(text: str, raw: bytes, settings: Settings) -> np.ndarray:
    if settings.tokenizer == "gpt2":
        return vocabulary.encode(text)
    return np.frombuffer(text.encode() if "\ufffd" in text else raw, np.uint8).astype("<u2")


def add_document(raw: bytes, settings: Settings, result: Result) -> None:
    """A whole document."""
    text = decode(raw, result.counts)
    if not text.strip():
        result.counts["empty"] += 1
        return
    part = result.parts[choose_split(text, settings, result)]
    part.append(document_start(settings))
    if len(raw) <= PIECE_BYTES:
        part.append(encode(text, raw, settings))
        return
    result.counts["long"] += 1
    for piece in pieces(raw, result.counts):
        part.append(encode(decode(piece, Counter()), piece, settings))


def document_start(settings: Settings) -> np.ndarray:
    return np.array([vocabulary.DOCUMENT_TOKEN if settings.tokenizer == "gpt2" else 256],
                    dtype="<u2")


def add_line(line: bytes, settings: Settings, result: Result) -> None:
    """A record of a JSON Lines file."""
    if not line.strip():
        return
    try:
        record = json.loads(decode(line, result.counts))
    except ValueError:
        record = None
    if not isinstance(record, dict):
        result.counts["malformed"] += 1
        return
    text = record.get(settings.field)
    if not isinstance(text, str):
        result.counts["missing"] += 1
        result.fields = result.fields or tuple(record)
        return
    result.counts["crlf"] += text.count("\r\n")
    text = text.replace("\r\n", "\n")
    # JSON can spell halves of surrogate pairs, which no UTF-8 can.
    raw = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()
    result.counts["invalid"] += raw.count(b"\xef\xbf\xbd") - text.count("\ufffd")
    add_document(raw, settings, result)


def tokenize(kind: str, content, settings: Settings) -> Result:
    """The tokens of a block of input: documents, lines of JSON, or a piece of a document."""
    result = Result()
    if kind == "documents":
        for raw in content:
            add_document(raw, settings, result)
    elif kind == "lines":
        for line in content.split(b"\n"):
            add_line(line, settings, result)
    else:
        raw, split, first = content
        result.parts[split] += [document_start(settings)] if first else []
        result.parts[split].append(encode(decode(raw, result.counts), raw, settings))
    result.parts = {split: np.concatenate(parts) for split, parts in result.parts.items() if parts}
    return result


def start_process(settings: Settings) -> None:
    """Start a process of the pool: load the vocabulary; exit with the parent, even a killed one."""
    global process_settings
    process_settings = settings
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    if settings.tokenizer == "gpt2":
        vocabulary.gpt2()


def tokenize_here(kind: str, content) -> Result:
    return tokenize(kind, content, process_settings)


# Input: what the first process reads --------------------------------------------------------------

def find_files(inputs: list[str], out: Path) -> list[tuple[str, bool]]:
    """The files of the inputs, in order, each with whether it was found in a folder."""
    found = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file())
            for file in inside:
                hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
                if not hidden and out.resolve() not in file.resolve().parents:
                    found.append((str(file), True))
        elif name != "-" and not path.is_file():
            raise UserError(
                f"{name}: no such file or folder; expected text, JSON Lines, a folder, or -")
        elif name.endswith(OTHER_ENDINGS):
            raise UserError(
                f"{name}: {path.suffix} files are not read; unpack it, or pipe it in and give -")
        else:
            found.append((name, False))
    if not found:
        raise UserError(f"{' '.join(inputs)}: no files there; expected text or JSON Lines")
    return found


def open_input(name: str):
    if name == "-":
        return sys.stdin.buffer
    try:
        return open(name, "rb")
    except OSError as error:
        raise UserError(
            f"{name}: cannot be read ({reason(error)}); expected a file that may be read") from None


def read_chunks(name: str, file, bar: tqdm):
    """The bytes of a file, unpacked if it is gzipped and without a byte order mark, in chunks."""
    stream = gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file
    before = 0
    mark = b"\xef\xbb\xbf"
    try:
        while chunk := stream.read(BLOCK_BYTES):
            yield chunk.removeprefix(mark)
            mark = b""
            if bar.total:
                bar.update(file.tell() - before)
                before = file.tell()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(
            f"{name}: cannot be unpacked ({reason(error)}); fetch or make it again") from None


def unify_line_ends(chunks, counts: Counter):
    """CRLF becomes LF, also where a chunk ends between the two."""
    held = b""
    for chunk in chunks:
        chunk = held + chunk
        held = b""
        if chunk.endswith(b"\r"):
            chunk = chunk[:-1]
            held = b"\r"
        if b"\r" in chunk:
            counts["crlf"] += chunk.count(b"\r\n")
            chunk = chunk.replace(b"\r\n", b"\n")
        yield chunk
    yield held


def split_documents(chunks, separator: bytes, counts: Counter):
    """The documents of a text: triples of bytes, whether they begin and whether they end one.

    A document of up to PIECE_BYTES comes in one, a longer one in the pieces that `pieces` makes.
    """
    tail = b""
    first = True
    hold = max(0, len(separator) - 1)   # of the bytes at hand, the last may be part of a separator
    for chunk in chunks:
        *whole, tail = (tail + chunk).split(separator) if separator else [tail + chunk]
        for raw in whole:
            *cut, rest = pieces(raw, counts)
            for piece in cut:
                yield piece, first, False
                first = False
            yield rest, first, True
            first = True
        while len(tail) - hold > PIECE_BYTES:
            place, forced = cut_place(tail)
            counts["forced"] += forced
            yield tail[:place], first, False
            tail = tail[place:]
            first = False
    *cut, rest = pieces(tail, counts)
    for piece in cut:
        yield piece, first, False
        first = False
    yield rest, first, True


def split_lines(chunks):
    """Blocks of whole lines. A line that spans many chunks is joined only once."""
    pending = []
    for chunk in chunks:
        end = chunk.rfind(b"\n") + 1
        if end:
            yield b"".join([*pending, chunk[:end]])
            pending = []
        pending.append(chunk[end:])
    yield b"".join(pending)


class Reader:
    """Makes blocks of work from the inputs; they do not depend on the number of processes."""

    def __init__(self, options, settings: Settings, bar: tqdm):
        self.options = options
        self.settings = settings
        self.bar = bar
        self.result = Result()      # what the reader itself counts
        self.batch = []             # short documents that wait to be handed on together
        self.batch_bytes = 0

    def blocks(self):
        """The work: pairs of a kind and its content, as `tokenize` takes them."""
        for name, in_folder in find_files(self.options.inputs, self.options.out):
            with open_input(name) as file:
                if in_folder and (name.endswith(OTHER_ENDINGS) or b"\0" in file.peek(1 << 13)):
                    if not file.peek(2).startswith(b"\x1f\x8b"):
                        self.result.counts["binary"] += 1
                        continue
                yield from self.blocks_of(name, read_chunks(name, file, self.bar))
        yield from self.flush()

    def blocks_of(self, name: str, chunks):
        by_name = name.removesuffix(".gz").endswith(JSON_ENDINGS)
        if self.options.format == "jsonl" or (self.options.format == "auto" and by_name):
            yield from self.flush()
            yield from (("lines", lines) for lines in split_lines(chunks))
            return
        counts = self.result.counts
        split = ""
        chunks = unify_line_ends(chunks, counts)
        for raw, first, last in split_documents(chunks, self.options.separator, counts):
            if first and last:
                self.batch.append(raw)
                self.batch_bytes += len(raw) + 64
                if self.batch_bytes >= BLOCK_BYTES:
                    yield from self.flush()
                continue
            if first:
                yield from self.flush()
                split = self.begin_long(raw)
            yield "piece", (raw, split, first)

    def begin_long(self, raw: bytes) -> str:
        """The split of a document that comes in pieces, from its first one."""
        self.result.counts["long"] += 1
        return choose_split(decode(raw, Counter()), self.settings, self.result)

    def flush(self):
        if self.batch:
            yield "documents", self.batch
        self.batch = []
        self.batch_bytes = 0


# All together -------------------------------------------------------------------------------------

def results(blocks, settings: Settings, processes: int):
    """The results of the blocks, in order. Few blocks wait at a time, so memory stays flat."""
    if processes == 1:
        yield from (tokenize(*block, settings) for block in blocks)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, start_process, (settings,))
    waiting = deque()
    try:
        for block in blocks:
            waiting.append(pool.submit(tokenize_here, *block))
            if len(waiting) > 2 * processes + 2:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            f"one of {processes} processes was killed, as happens when memory runs out; try again "
            "with fewer --processes") from None
    finally:
        pool.shutdown(cancel_futures=True)


def check_documents(total: Result, options) -> None:
    """Refuse input without any text, and say what was found instead."""
    if total.counts["documents"]:
        return
    skipped = [key for key in ("empty", "missing", "malformed") if total.counts[key]]
    found = "".join(f"; {total.counts[key]:,} {REPORT[key]}" for key in skipped)
    if total.fields:
        found += f"; a record has the fields {', '.join(total.fields)}: choose one with --field"
    raise UserError(f"{' '.join(options.inputs)}: no document with text in it{found}")


def fill_splits(shards: ShardSet, options) -> str:
    """Split by position where the hashes left a split too small to use; returns a note on it."""
    train = shards.num_tokens("train")
    val = shards.num_tokens("val")
    total = train + val
    needed = 2 * SPLIT_TOKENS if options.val else SPLIT_TOKENS
    if total < needed:
        remedy = "give more text"
        if options.tokenizer == "gpt2":
            remedy += ", or --tokenizer=bytes"
        raise UserError(
            f"{' '.join(options.inputs)}: {total} tokens are too few to train on, expected "
            f"{needed} or more; {remedy}")
    if not options.val or min(train, val) >= SPLIT_TOKENS:
        return ""
    if not train:
        shards.rename_split("val", "train")
    if not train or not val:
        count = min(max(SPLIT_TOKENS, round(options.val * total)), total - SPLIT_TOKENS)
        shards.move_end("train", "val", count)
        return f"split by position: the last {count:,} tokens are validation"
    source, target = ("train", "val") if train > val else ("val", "train")
    count = SPLIT_TOKENS - min(train, val)
    shards.move_end(source, target, count)
    return f"{target} had too few tokens: the last {count} of {source} were added to it"


def source_of(options) -> str:
    """The inputs, as the manifest names them."""
    source = f"text of {' '.join(options.inputs)}"
    return source if len(source) <= 200 else source[:199] + "…"


def write_shards(options, settings: Settings, shards: ShardSet) -> tuple[dict, list[str]]:
    """Tokenize the inputs; returns the manifest and notes for the user."""
    names = [name for name, _ in find_files(options.inputs, options.out)]
    size = 0 if "-" in names else sum(os.path.getsize(name) for name in names)
    with tqdm(total=size, unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        reader = Reader(options, settings, bar)
        total = reader.result
        for result in results(reader.blocks(), settings, options.processes):
            for split, tokens in result.parts.items():
                shards.append(split, tokens)
            total.counts += result.counts
            total.fields = total.fields or result.fields
    check_documents(total, options)
    counts = {key: total.counts[key] for key in REPORT if total.counts[key]}
    notes = [f"{count:>12,} {REPORT[key]}" for key, count in counts.items()]
    note = fill_splits(shards, options)
    if note:
        notes.append(note)
    return shards.commit(source_of(options), val=options.val, report=counts), notes


def training_options(manifest: dict, tokenizer: str) -> dict:
    """Options with which the trainer runs on these shards, a few minutes on a CPU at most.

    The trainer's rules: val_tokens and batch_tokens are multiples of sequence_tokens, which is a
    multiple of the mask's block and of segment_tokens; a shard gives only whole batches, each of
    batch/segment stretches.
    """
    train = [entry["tokens"] for entry in manifest["shards"] if entry["split"] == "train"]
    val = [entry["tokens"] for entry in manifest["shards"] if entry["split"] == "val"]
    longest_batch = min(4096, max(train) // 8)  # several batches to a shard: little is left over
    longest_sequence = min(longest_batch, max(val, default=4097) - 1)
    sequence = MASK_BLOCK
    while 2 * sequence <= longest_sequence:
        sequence *= 2
    batch = sequence
    while 2 * batch <= min(longest_batch, 4 * sequence):  # many short forward passes would be slow
        batch *= 2
    segment = min(512, sequence)
    stretches = batch // segment
    ngram_share = 0.0
    if tokenizer == "bytes" and max(train) > 8 * MASK_BLOCK:
        ngram_share = 0.5  # of the text, to count n-grams in
    batches = sum(int((1 - ngram_share) * ((tokens - 1) // stretches)) // segment
                  for tokens in train)
    steps = min(320, 40 * batches)
    options = {"vocab_size": manifest["vocab_size"], "document_token": manifest["document_token"],
               "num_steps": steps, "epochs": -(-steps // batches), "batch_tokens": batch,
               "sequence_tokens": sequence, "segment_tokens": segment,
               "val_start": 0, "target_loss": 0}
    if tokenizer == "gpt2":
        options |= {"vocab_multiple": 128, "ngram_order": 0, "copy_lengths": "()"}
    else:
        options |= {"ngram_share": ngram_share}
    if val:
        sequences = sum((tokens - 1) // sequence for tokens in val)
        options["val_tokens"] = min(sequences, 2**18 // sequence) * sequence
    return options


def training_command(options, manifest: dict, prefix: str) -> str:
    """The command that trains on the shards as they are. run.sh works in the folder above data/."""
    root = DATA.parent
    launcher = "./run.sh" if Path.cwd() == root else shlex.quote(str(root / "run.sh"))
    folder = options.out.resolve()
    folder = folder.relative_to(root) if folder.is_relative_to(root) else folder
    pattern = f"{glob.escape(str(folder))}/{glob.escape(prefix)}"
    words = [launcher, "--preset=laptop", f"--train_files={shlex.quote(pattern + '_train_*.bin')}"]
    if options.val:
        words.append(f"--val_files={shlex.quote(pattern + '_val_*.bin')}")
    for name, value in training_options(manifest, options.tokenizer).items():
        words.append(f"--{name}={shlex.quote(str(value))}")
    return " ".join(words)


def parse(arguments: list[str]):
    flags = Flags(__doc__)
    flags.add_argument("inputs", nargs="+", metavar="IN",
                       help="text, JSON Lines, folders of them, or -")
    flags.add_argument("--out", type=Path, metavar="DIR",
                       help="folder of the shards, which it names")
    flags.add_argument("--tokenizer", choices=("gpt2", "bytes"), default="gpt2")
    flags.add_argument("--format", choices=("auto", "text", "jsonl"), default="auto",
                       help="auto: by name")
    flags.add_argument("--field", default="text", help="field of a JSON record with its text")
    flags.add_argument("--separator", default="",
                       help="between documents in plain text; \\n is a line end")
    flags.add_argument("--val", type=float, default=0.02, help="part of the text to validate on")
    flags.add_argument("--processes", type=int, default=0, help="0: one for each core")
    flags.add_argument("--shard_tokens", type=int, default=SHARD_TOKENS, help="tokens in a shard")
    flags.add_argument("--vocabulary", type=Path, metavar="PATH",
                       help=f"{vocabulary.WHEEL}, not PyPI's")
    options = flags.parse_args(arguments)
    if not 0 <= options.val < 1:
        raise UserError(
            f"--val={options.val:g}: expected a part from 0 to less than 1, such as 0.02")
    if not 0 <= options.processes <= 1024:
        raise UserError(
            f"--processes={options.processes}: expected 1 to 1024, or 0 for one for each core")
    if not 2 * SPLIT_TOKENS <= options.shard_tokens < 2**31:
        raise UserError(
            f"--shard_tokens={options.shard_tokens}: expected {2 * SPLIT_TOKENS} to {2**31 - 1}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    options.processes = options.processes or cores
    options.separator = options.separator.replace("\\n", "\n").replace("\\t", "\t").encode()
    return options


def default_folder(options) -> Path:
    """data/NAME for the first input's name, unless that holds something else already."""
    first = options.inputs[0]
    name = "stdin" if first == "-" else Path(first).resolve().name
    for ending in (".gz", ".txt", ".md", *JSON_ENDINGS):
        name = name.removesuffix(ending)
    folder = DATA / (re.sub(r"[^\w.-]+", "_", name).strip(".") or "text")
    if folder.resolve() in [Path(name).resolve() for name in options.inputs]:
        raise UserError(
            f"{first}: shards would be written into this folder itself; choose one with --out=DIR")
    manifest = read_manifest(folder)
    files = [path.name for path in folder.glob("[!.]*") if path.suffix != TEMPORARY]
    if files and (manifest is None or manifest.get("source") != source_of(options)):
        raise UserError(
            f"{relative(folder)}: exists and was not made from {' '.join(options.inputs)}; choose "
            "a folder with --out=DIR")
    return folder


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    options.out = options.out or default_folder(options)
    settings = Settings(options.tokenizer, options.field, options.val)
    find_files(options.inputs, options.out)  # a wrong name is reported before anything else happens
    if options.tokenizer == "gpt2":
        vocabulary.fill_cache(options.vocabulary)
        about = "gpt2", vocabulary.VOCAB_SIZE, vocabulary.DOCUMENT_TOKEN, vocabulary.lengths()
    else:
        about = "bytes", 257, 256, BYTE_LENGTHS
    prefix = options.out.resolve().name
    with ShardSet(options.out, prefix, *about, options.shard_tokens) as shards:
        manifest, notes = write_shards(options, settings, shards)
    print(summary(options.out, manifest), *notes, sep="\n")
    if options.val:
        print("to train on it:")
    else:
        print("to train on it, with --val_files=… of other shards:")
    print(training_command(options, manifest, prefix))
    return 0


if __name__ == "__main__":
    run(main)
