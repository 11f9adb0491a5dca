"""What every script of data/ shares: the shard format, the manifest, and how both are written.

A shard is 256 little-endian int32 (magic 20240520, version 1, number of tokens, zeros), then the
tokens as little-endian uint16. A document starts at its document token and may continue in the next
shard of its split.

manifest.json says what the folder holds:
    format          1
    complete        false while a script is replacing shards; true once everything is in place
    source          where the text came from, in words
    tokenizer       "bytes" or "gpt2"
    vocab_size      tokens that exist, the document token included
    document_token  the token that starts each document
    shards          for each: file, split (train, val or test), tokens, documents (begun in it),
                    text_bytes (that its tokens stand for; null: unknown), sha256 (of the file)

A file gets its final name only when it is complete and on the disk, and the manifest comes last, so
that a script that is killed at any moment leaves nothing that looks complete.

The trainer imports this module when it starts: it imports nothing beyond NumPy and the standard
library.
"""
import argparse
import contextlib
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import sys
import threading
from pathlib import Path

import numpy as np

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 256 * 4
MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
SPLITS = ("train", "val", "test")
SHARD_TOKENS = 100_000_000      # as in the public shards
TEMPORARY = ".tmp"              # suffix of incomplete files; no loader's pattern ends with it
COPY_TOKENS = 1 << 20           # moved from one shard to another at a time
BYTE_LENGTHS = np.array([1] * 256 + [0], dtype=np.uint8)    # bytes of text per byte token
DATA = Path(__file__).resolve().parent


class UserError(Exception):
    """A mistake that the user can fix: the value, what was expected and the remedy."""


def reason(error: BaseException) -> str:
    """Why something failed, in one line without Python's class names."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error.args[0]) if error.args else ""
    first_sentence = text.strip().partition("\n")[0].partition(". ")[0]
    return first_sentence[:200].rstrip(".") or "unknown reason"


# The command line ---------------------------------------------------------------------------------

class Flags(argparse.ArgumentParser):
    """--name=value flags; a mistake is one sentence."""

    def __init__(self, description: str):
        super().__init__(description=description, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str):
        raise UserError(f"{message}; --help shows what there is")


def run(main) -> None:
    """Run a script's main and exit; a mistake of the user exits with 2 and one sentence."""
    try:
        status = main(sys.argv[1:])
    except UserError as error:
        status = f"error: {error}"
    except OSError as error:
        if error.errno is None:
            raise
        status = (f"error: {error.filename or 'a file'}: {reason(error)}; fix that or choose "
                  "another folder")
    except KeyboardInterrupt:
        status = "interrupted; the same command resumes"
    if isinstance(status, str):
        print(status, file=sys.stderr, flush=True)
        status = 2
    if status and any(not thread.daemon for thread in threading.enumerate()[1:]):
        sys.stdout.flush()
        os._exit(status)  # downloads under way cannot be cancelled: do not wait for them
    sys.exit(status)


def relative(path: Path) -> str:
    """A path as the user would type it."""
    path = path.resolve()
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{relative(folder)}: {needed / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are "
            "free; make room, or choose another folder with --out")


# Files --------------------------------------------------------------------------------------------

def sync(path: Path) -> None:
    """Force a file, or the renames in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it appears complete or not at all."""
    temporary = path.with_name(path.name + TEMPORARY)
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 20))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


@contextlib.contextmanager
def exclusive(folder: Path):
    """Lock a folder for writing. The lock ends with the process, however that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{relative(folder)}: another process is writing there; wait until it has "
                "finished") from None
        yield


# Shards -------------------------------------------------------------------------------------------

def header(num_tokens: int) -> bytes:
    fields = np.zeros(256, dtype="<i4")
    fields[:3] = MAGIC, VERSION, num_tokens
    return fields.tobytes()


def header_fault(path: Path) -> str:
    """What is wrong with a shard's header or size, or an empty string."""
    if not path.is_file():
        return "is missing"
    with open(path, "rb") as file:
        start = file.read(HEADER_BYTES)
    if len(start) < HEADER_BYTES:
        return f"holds {len(start)} bytes, less than the {HEADER_BYTES} of a header"
    magic, version, num_tokens = np.frombuffer(start, dtype="<i4")[:3].tolist()
    if (magic, version) != (MAGIC, VERSION):
        return f"begins with {magic} and {version}, expected {MAGIC} and {VERSION}"
    held = path.stat().st_size - HEADER_BYTES
    if held != 2 * num_tokens:
        return f"claims {num_tokens:,} tokens and holds {held / 2:,.10g}"
    return ""


def map_tokens(path: Path) -> np.ndarray:
    """The tokens of an intact shard, memory-mapped."""
    if path.stat().st_size == HEADER_BYTES:
        return np.empty(0, dtype="<u2")
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES)


def describe(path: Path, split: str, document_token: int, lengths, sha256: str = "") -> dict:
    """The manifest's entry of an intact shard; `lengths` are the bytes of each token, or None."""
    digest = hashlib.sha256()
    num_tokens = 0
    documents = 0
    text_bytes = 0
    with open(path, "rb") as file:
        digest.update(file.read(HEADER_BYTES))
        while part := file.read(1 << 21):
            if not sha256:
                digest.update(part)
            tokens = np.frombuffer(part, dtype="<u2")
            num_tokens += len(tokens)
            starts = int(np.count_nonzero(tokens == document_token))
            documents += starts
            if lengths is BYTE_LENGTHS:     # faster than the sum below, and equal to it
                text_bytes += len(tokens) - starts
            elif lengths is not None:
                text_bytes += int(lengths[tokens].sum(dtype=np.int64))
    return {"file": path.name.removesuffix(TEMPORARY), "split": split, "tokens": num_tokens,
            "documents": documents, "text_bytes": None if lengths is None else text_bytes,
            "sha256": sha256 or digest.hexdigest()}


class OpenShard:
    """A shard being written, under a temporary name."""

    def __init__(self, path: Path):
        self.path = path.with_name(path.name + TEMPORARY)
        self.tokens = 0
        self.file = open(self.path, "wb")
        self.file.write(header(0))

    def append(self, tokens: np.ndarray) -> None:
        self.file.write(np.ascontiguousarray(tokens, dtype="<u2").data)
        self.tokens += len(tokens)

    def close(self) -> None:
        self.file.seek(0)
        self.file.write(header(self.tokens))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


class ShardSet:
    """All the shards of a folder, written together: `append` for each text, then `commit` once.

    Until `commit` every shard has a temporary name and what the folder held before is untouched.
    """
    def __init__(self, folder: Path, prefix: str, tokenizer: str, vocab_size: int,
                 document_token: int, lengths: np.ndarray, shard_tokens: int = SHARD_TOKENS):
        self.folder = folder
        self.prefix = prefix
        self.lengths = lengths
        self.shard_tokens = shard_tokens
        self.about = {"tokenizer": tokenizer, "vocab_size": vocab_size,
                      "document_token": document_token}
        self.open = {}                              # split → the shard being written
        self.entries = []                           # of the closed shards
        self.numbers = dict.fromkeys(SPLITS, 0)     # split → the number of its next shard

    def __enter__(self):
        self.lock = exclusive(self.folder)
        self.lock.__enter__()
        for entry in (read_manifest(self.folder) or {"shards": []})["shards"]:
            if not entry["file"].startswith(self.prefix + "_"):
                raise UserError(
                    f"{relative(self.folder)} holds other shards ({entry['file']}); choose "
                    "another folder with --out")
        self.remove_temporaries()
        return self

    def __exit__(self, *exception) -> None:
        for shard in self.open.values():
            shard.file.close()
        self.remove_temporaries()
        self.lock.__exit__(None, None, None)

    def remove_temporaries(self) -> None:
        for path in (*self.shards_there(TEMPORARY), self.folder / (MANIFEST + TEMPORARY)):
            path.unlink(missing_ok=True)

    def shards_there(self, ending: str = "") -> list[Path]:
        """The files in the folder that have a name of this set; no other file is ever removed."""
        splits = "|".join(SPLITS)
        pattern = rf"{re.escape(self.prefix)}_({splits})_[0-9]{{6}}\.bin{re.escape(ending)}"
        return [path for path in self.folder.iterdir() if re.fullmatch(pattern, path.name)]

    def name(self, split: str, number: int) -> str:
        return f"{self.prefix}_{split}_{number:06d}.bin"

    def append(self, split: str, tokens: np.ndarray) -> None:
        """Add tokens to a split. A full shard is followed by the next, also within a document."""
        while len(tokens):
            if split not in self.open:
                self.open[split] = OpenShard(self.folder / self.name(split, self.numbers[split]))
                self.numbers[split] += 1
            shard = self.open[split]
            room = self.shard_tokens - shard.tokens
            shard.append(tokens[:room])
            tokens = tokens[room:]
            if shard.tokens == self.shard_tokens:
                self.close(split)

    def close(self, split: str) -> None:
        shard = self.open.pop(split, None)
        if shard:
            shard.close()
            self.add_entry(shard.path, split)

    def add_entry(self, path: Path, split: str) -> None:
        self.entries.append(describe(path, split, self.about["document_token"], self.lengths))

    def num_tokens(self, split: str) -> int:
        closed = sum(entry["tokens"] for entry in self.entries if entry["split"] == split)
        return closed + (self.open[split].tokens if split in self.open else 0)

    def rename_split(self, old: str, new: str) -> None:
        """Make all shards of a split those of another one, which is empty."""
        self.close(old)
        for entry in self.entries:
            if entry["split"] == old:
                name = entry["file"].replace(f"{self.prefix}_{old}_", f"{self.prefix}_{new}_")
                os.replace(self.folder / (entry["file"] + TEMPORARY),
                           self.folder / (name + TEMPORARY))
                entry["file"] = name
                entry["split"] = new
        self.numbers[new] = self.numbers[old]
        self.numbers[old] = 0

    def move_end(self, source: str, target: str, count: int) -> None:
        """Move the last `count` tokens of a split to the end of another, as their own document."""
        self.close(source)
        document_token = self.about["document_token"]
        kept = self.num_tokens(source) - count  # tokens that stay, from the shard at hand on
        moving = False
        for entry in [entry for entry in self.entries if entry["split"] == source]:
            if kept >= entry["tokens"]:
                kept -= entry["tokens"]
                continue
            path = self.folder / (entry["file"] + TEMPORARY)
            for tokens in read_tokens(path, kept):
                if not moving and tokens[0] != document_token:
                    self.append(target, np.array([document_token]))
                moving = True
                self.append(target, tokens)
            self.entries.remove(entry)
            if kept:
                shorten(path, kept)
                self.add_entry(path, source)
            else:
                path.unlink()
                self.numbers[source] -= 1
            kept = 0

    def commit(self, source: str, **more) -> dict:
        """Give every shard its final name, then write the manifest."""
        for split in tuple(self.open):
            self.close(split)
        self.entries.sort(key=lambda entry: entry["file"])
        manifest = {"source": source, **self.about, **more}
        write_manifest(self.folder, manifest | {"shards": []}, complete=False)
        names = {entry["file"] for entry in self.entries}
        for path in self.shards_there():
            if path.name not in names:
                path.unlink()  # of an earlier run: it is no part of this set
        for name in names:
            os.replace(self.folder / (name + TEMPORARY), self.folder / name)
        sync(self.folder)
        return write_manifest(self.folder, manifest | {"shards": self.entries}, complete=True)


def read_tokens(path: Path, start: int):
    """The tokens of a shard from a place on, in pieces: memory does not grow with the shard."""
    with open(path, "rb") as file:
        file.seek(HEADER_BYTES + 2 * start)
        while len(tokens := np.fromfile(file, "<u2", COPY_TOKENS)):
            yield tokens


def shorten(path: Path, num_tokens: int) -> None:
    """Keep only the first tokens of a shard."""
    with open(path, "r+b") as file:
        file.write(header(num_tokens))
        file.truncate(HEADER_BYTES + 2 * num_tokens)
        file.flush()
        os.fsync(file.fileno())


# The manifest -------------------------------------------------------------------------------------

def write_manifest(folder: Path, manifest: dict, complete: bool) -> dict:
    manifest = {"format": MANIFEST_FORMAT, "complete": complete} | manifest | {"complete": complete}
    # A line for each shard, so that a manifest is easy to read and to compare.
    lines = [json.dumps(entry) for entry in manifest["shards"]]
    rest = json.dumps({key: value for key, value in manifest.items() if key != "shards"})
    body = ",\n  ".join(lines)
    write_atomically(folder / MANIFEST, f'{rest[:-1]},\n"shards": [\n  {body}\n]}}\n'.encode())
    return manifest


def read_manifest(folder: Path) -> dict | None:
    """The manifest of a folder, or None where there is none."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({reason(error)}); make the shards again") from None
    except (ValueError, RecursionError):
        raise UserError(
            f"{path}: damaged, it is not JSON; remove it and make the shards again") from None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != MANIFEST_FORMAT:
        raise UserError(
            f"{path}: format {found!r:.40}, expected {MANIFEST_FORMAT}; make the shards again "
            "with the scripts beside this trainer")
    fault = manifest_fault(manifest)
    if fault:
        raise UserError(f"{path}: damaged, {fault}; remove it and make the shards again")
    return manifest


def manifest_fault(manifest: dict) -> str:
    """What is impossible in a manifest, or an empty string."""
    for key in ("vocab_size", "document_token"):
        if not is_count(manifest.get(key)):
            return f"its {key} is not a number of tokens"
    if not isinstance(manifest.get("shards"), list):
        return "its shards are not a list"
    for number, entry in enumerate(manifest["shards"]):
        if not isinstance(entry, dict) or not isinstance(entry.get("file"), str):
            return f"entry {number} of its shards names no file"
        if entry.get("split") not in SPLITS:
            return f"entry {number} of its shards names no split"
        for key in ("tokens", "documents", "text_bytes"):
            unknown = key == "text_bytes" and entry.get(key, "") is None
            if not is_count(entry.get(key)) and not unknown:
                return f"the {key} of entry {number} of its shards are not a possible number"
        if not isinstance(entry.get("sha256") or "", str):
            return f"the sha256 of entry {number} of its shards is not text"
    return ""


def is_count(value) -> bool:
    return type(value) is int and 0 <= value < 2**63


def check_manifest(folder: Path, shards: dict[str, int], vocab_size: int,
                   document_token: int) -> dict:
    """What the manifest of a folder says about some of its shards, given as file name → tokens.

    Refuses shards that are not what the manifest says, and a manifest of another vocabulary.
    Returns text_bytes (None: unknown) and tokens, summed over the given shards, and the sha256 of
    each (or None).
    """
    path = folder / MANIFEST
    manifest = read_manifest(folder)
    if manifest is None or manifest.get("complete") is not True:
        raise UserError(
            f"{path}: not complete, the script that makes these shards was interrupted; run it "
            "again")
    for name, value in (("vocab_size", vocab_size), ("document_token", document_token)):
        if manifest[name] != value:
            raise UserError(
                f"--{name}={value}: {path} says {manifest[name]}; give --{name}={manifest[name]}")
    entries = {entry["file"]: entry for entry in manifest["shards"]}
    for file, tokens in shards.items():
        if file not in entries:
            raise UserError(
                f"{folder / file}: not in {MANIFEST}; move it elsewhere or make the shards again")
        if entries[file]["tokens"] != tokens:
            raise UserError(f"{folder / file}: it holds {tokens:,} tokens and {MANIFEST} says "
                            f"{entries[file]['tokens']:,}; make the shards again")
    text_bytes = [entries[file]["text_bytes"] for file in shards]
    return {"text_bytes": None if None in text_bytes else sum(text_bytes),
            "tokens": sum(shards.values()),
            "sha256": {file: entries[file].get("sha256") or None for file in shards}}


def check_manifests(held: dict[str, int], vocab_size: int,
                    document_token: int) -> tuple[dict, float | None]:
    """(sha256 of each shard, bytes of text per token), each None where no manifest tells.

    `held`: the tokens in each shard, by its path. The shards may be in several folders.
    """
    hashes = dict.fromkeys(held)
    tokens = 0
    text_bytes = 0
    for folder in sorted({Path(path).parent for path in held}):
        paths = {Path(path).name: path for path in held if Path(path).parent == folder}
        found = {"text_bytes": None, "tokens": 0, "sha256": {}}
        if (folder / MANIFEST).exists():
            there = {name: held[path] for name, path in paths.items()}
            found = check_manifest(folder, there, vocab_size, document_token)
        hashes |= {paths[name]: sha256 for name, sha256 in found["sha256"].items()}
        tokens += found["tokens"]
        if found["text_bytes"] is None:
            text_bytes = None
        elif text_bytes is not None:
            text_bytes += found["text_bytes"]
    return hashes, text_bytes / tokens if text_bytes and tokens else None


def what_to_fetch(train_files: str, val_files: str, num_steps: int, batch_tokens: int,
                  epochs: int) -> str:
    """What a run lacks of our own sources: "enwik8", "fineweb N" for N training shards, or ""."""
    train_shards = len(glob.glob(train_files))
    complete = train_shards > 0 and bool(glob.glob(val_files))
    if train_files.startswith("data/enwik8/") and not complete:
        return "enwik8"
    if train_files.startswith("data/fineweb10B/"):
        batches_per_shard = max(1, (SHARD_TOKENS - 1) // batch_tokens)
        needed = -(-num_steps // (batches_per_shard * epochs))
        needed = min(103, needed)  # as many as there are
        if train_shards < needed or not complete:
            return f"fineweb {needed}"
    return ""


def in_place(folder: Path, entry: dict) -> bool:
    """Whether a shard of the manifest is there at its full size; it is not hashed."""
    path = folder / entry["file"]
    return not header_fault(path) and path.stat().st_size == HEADER_BYTES + 2 * entry["tokens"]


def is_complete(folder: Path, **expected) -> bool:
    """Whether a folder holds all shards of its manifest, and the manifest says what is expected."""
    manifest = read_manifest(folder)
    if not manifest or manifest.get("complete") is not True:
        return False
    return (all(manifest.get(key) == value for key, value in expected.items())
            and all(in_place(folder, entry) for entry in manifest["shards"]))


def summary(folder: Path, manifest: dict) -> str:
    """What was written, a line for each split."""
    lines = []
    for split in SPLITS:
        entries = [entry for entry in manifest["shards"] if entry["split"] == split]
        if entries:
            tokens = sum(entry["tokens"] for entry in entries)
            documents = sum(entry["documents"] for entry in entries)
            noun = "shard" if len(entries) == 1 else "shards"
            lines.append(f"{split:<6}{len(entries):>5} {noun:<6}{tokens:>16,} tokens"
                         f"{documents:>12,} documents")
    return "\n".join([f"{relative(folder)}: {manifest['source']}", *lines])
