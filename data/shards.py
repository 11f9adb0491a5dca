"""What every script of data/ shares: the shard format, the manifest, and how both are written.

A shard is 256 little-endian int32 (magic 20240520, version 1, number of tokens, zeros), then the tokens as
little-endian uint16. A document starts at its document token, and may go on in the next shard of its split.

manifest.json says what the folder holds:
    format          1
    complete        false while a script is replacing shards; true once everything is in place
    source          where the text came from, in words
    tokenizer       "bytes" or "gpt2"
    vocab_size      tokens that exist, the document token included
    document_token  the token that starts each document
    shards          for each: file, split (train, val or test), tokens, documents (how many start in it),
                    text_bytes (of text that its tokens stand for; null: unknown), sha256 (of the whole file)

Nothing gets its final name before it is whole and on the disk, and the manifest comes last, so that a script
that is killed at any moment leaves nothing that looks complete.
"""
import argparse
import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 256 * 4
MANIFEST, MANIFEST_FORMAT = "manifest.json", 1
SPLITS = ("train", "val", "test")
SHARD_TOKENS = 100_000_000      # as in the public shards
TEMPORARY = ".tmp"              # ends the name of whatever is not whole yet; no loader's pattern ends so
BYTE_LENGTHS = np.array([1] * 256 + [0], dtype=np.uint8)    # bytes of text per token of the byte tokenizer
DATA = Path(__file__).resolve().parent
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOTDIR)


class UserError(Exception):
    """A mistake that the user can mend: one sentence with the value, what was expected and the remedy."""


# The command line -----------------------------------------------------------------------------------------

class Flags(argparse.ArgumentParser):
    """--name=value flags; a mistake is one sentence."""

    def __init__(self, description: str):
        super().__init__(description=description, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str):
        raise UserError(f"{message}; --help shows what there is")


def run(main) -> None:
    """Run a script's main, and exit: 2 and one sentence when the user can mend what went wrong."""
    try:
        status = main(sys.argv[1:])
    except UserError as error:
        status = f"error: {error}"
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        status = f"error: {error.filename or 'writing'}: {error.strerror}; mend that or choose another folder"
    except KeyboardInterrupt:
        status = "interrupted; the same command goes on from here"
    if isinstance(status, str):
        print(status, file=sys.stderr, flush=True)
        status = 2
    sys.exit(status)


def relative(path: Path) -> str:
    """A path as the user would type it."""
    path, here = path.resolve(), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(f"{relative(folder)}: {needed / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are "
                        "free; make room, or choose another folder with --out")


# Files ----------------------------------------------------------------------------------------------------

def sync_folder(folder: Path) -> None:
    """Make renames in a folder last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes) -> None:
    """The file appears whole or not at all."""
    temporary = path.with_name(path.name + TEMPORARY)
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sha256_of(path: Path) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(1 << 20))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


@contextlib.contextmanager
def exclusive(folder: Path):
    """Only one process at a time writes in a folder. The lock ends with the process, however that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{relative(folder)}: another process writes there; wait for its end") from None
        yield


# Shards ---------------------------------------------------------------------------------------------------

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
    return "" if held == 2 * num_tokens else f"claims {num_tokens:,} tokens and holds {held / 2:,.10g}"


def map_tokens(path: Path) -> np.ndarray:
    """The tokens of a sound shard, memory-mapped."""
    if path.stat().st_size == HEADER_BYTES:
        return np.empty(0, dtype="<u2")
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES)


def describe(path: Path, split: str, document_token: int, lengths, sha256: str = "") -> dict:
    """The manifest's entry of a sound shard, which is read once; `lengths` are bytes per token, or None."""
    digest, num_tokens, documents, text_bytes = hashlib.sha256(), 0, 0, 0
    with open(path, "rb") as file:
        digest.update(file.read(HEADER_BYTES))
        while part := file.read(1 << 21):
            if not sha256:
                digest.update(part)
            tokens = np.frombuffer(part, dtype="<u2")
            num_tokens += len(tokens)
            starts = int(np.count_nonzero(tokens == document_token))
            documents += starts
            if lengths is BYTE_LENGTHS:     # the sum below without a look at each token, for speed
                text_bytes += len(tokens) - starts
            elif lengths is not None:
                text_bytes += int(lengths[tokens].sum(dtype=np.int64))
    return {"file": path.name.removesuffix(TEMPORARY), "split": split, "tokens": num_tokens,
            "documents": documents, "text_bytes": None if lengths is None else text_bytes,
            "sha256": sha256 or digest.hexdigest()}


class OpenShard:
    """A shard being written, under a temporary name."""

    def __init__(self, path: Path):
        self.final, self.path, self.tokens = path, path.with_name(path.name + TEMPORARY), 0
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
    """All the shards of a folder, written together: `append` as often as there is text, then `commit` once.

    Until `commit` every shard has a temporary name and what the folder held before is untouched.
    """

    def __init__(self, folder: Path, prefix: str, tokenizer: str, vocab_size: int, document_token: int,
                 lengths: np.ndarray, shard_tokens: int = SHARD_TOKENS):
        self.folder, self.prefix, self.lengths, self.shard_tokens = folder, prefix, lengths, shard_tokens
        self.about = {"tokenizer": tokenizer, "vocab_size": vocab_size, "document_token": document_token}
        self.open, self.entries, self.numbers = {}, [], dict.fromkeys(SPLITS, 0)

    def __enter__(self):
        self.lock = exclusive(self.folder)
        self.lock.__enter__()
        for entry in (read_manifest(self.folder) or {"shards": []})["shards"]:
            if not entry["file"].startswith(self.prefix + "_"):
                raise UserError(f"{relative(self.folder)} holds other shards ({entry['file']}); choose "
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
        """The files in the folder that this set would call its own: nothing else there is ever removed."""
        pattern = rf"{re.escape(self.prefix)}_({'|'.join(SPLITS)})_[0-9]{{6}}\.bin{re.escape(ending)}"
        return [path for path in self.folder.iterdir() if re.fullmatch(pattern, path.name)]

    def append(self, split: str, tokens: np.ndarray) -> None:
        """Add tokens to a split. When a shard is full the next one goes on, within a document if need be."""
        while len(tokens):
            if split not in self.open:
                name = f"{self.prefix}_{split}_{self.numbers[split]:06d}.bin"
                self.open[split] = OpenShard(self.folder / name)
                self.numbers[split] += 1
            shard = self.open[split]
            room = self.shard_tokens - shard.tokens
            shard.append(tokens[:room])
            tokens = tokens[room:]
            if shard.tokens == self.shard_tokens:
                self.close(split)

    def close(self, split: str) -> None:
        shard = self.open.pop(split)
        shard.close()
        self.entries.append(describe(shard.path, split, self.about["document_token"], self.lengths))

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
        sync_folder(self.folder)
        return write_manifest(self.folder, manifest | {"shards": self.entries}, complete=True)


# The manifest ---------------------------------------------------------------------------------------------

def write_manifest(folder: Path, manifest: dict, complete: bool) -> dict:
    manifest = {"format": MANIFEST_FORMAT, "complete": complete} | manifest | {"shards": manifest["shards"]}
    # A line for each shard, so that a manifest reads and compares well.
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
    except ValueError as error:
        raise UserError(f"{relative(path)}: not JSON ({error}); remove it, make the shards again") from None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != MANIFEST_FORMAT:
        raise UserError(f"{relative(path)}: format {found}, expected {MANIFEST_FORMAT}; make it again")
    return manifest


def in_place(folder: Path, entry: dict) -> bool:
    """Whether a shard of the manifest is there at its full size: a quick look, without hashing."""
    path = folder / entry["file"]
    return not header_fault(path) and path.stat().st_size == HEADER_BYTES + 2 * entry["tokens"]


def is_complete(folder: Path, **expected) -> bool:
    """Whether a folder holds all that its manifest promises, and the manifest says what is expected."""
    manifest = read_manifest(folder)
    if not manifest or not manifest["complete"]:
        return False
    return (all(manifest.get(key) == value for key, value in expected.items())
            and all(in_place(folder, entry) for entry in manifest["shards"]))


def summary(folder: Path, manifest: dict) -> str:
    """What was written, a line for each split."""
    lines = []
    for split in SPLITS:
        entries = [entry for entry in manifest["shards"] if entry["split"] == split]
        if entries:
            tokens, documents = (sum(entry[key] for entry in entries) for key in ("tokens", "documents"))
            lines.append(f"{split:<6}{len(entries):>5} shard{'s' * (len(entries) > 1):<2}{tokens:>15,} tokens"
                         f"{documents:>12,} documents")
    return "\n".join([f"{relative(folder)}: {manifest['source']}", *lines])


def check_manifest(folder, names, vocab_size, document_token):
    """Temporary: the data branch has the real one."""
    manifest = json.loads((folder / "manifest.json").read_text())
    entries = {entry["file"]: entry for entry in manifest["shards"] if entry["file"] in names}
    return dict(text_bytes=sum(e["text_bytes"] or 0 for e in entries.values()), tokens=sum(names.values()),
                sha256={name: entry["sha256"] for name, entry in entries.items()})


def check_manifests(held: dict[str, int], vocab_size: int, document_token: int) -> tuple[dict, float | None]:
    """(sha256 of each shard, bytes of text per token), each where a manifest says so.

    held: the tokens in each shard, by path. Refuses shards made for another vocabulary.
    """
    hashes = dict.fromkeys(held)
    total_tokens = 0
    total_bytes = 0
    for folder in sorted({Path(path).parent for path in held}):
        names = {Path(path).name: tokens for path, tokens in held.items() if Path(path).parent == folder}
        if not (folder / "manifest.json").exists():
            total_bytes = None
            continue
        found = check_manifest(folder, names, vocab_size, document_token)
        hashes |= {str(folder / name): found["sha256"].get(name) for name in names}
        total_tokens += found["tokens"]
        if total_bytes is not None and found["text_bytes"] is not None:
            total_bytes += found["text_bytes"]
        else:
            total_bytes = None
    return hashes, total_bytes / total_tokens if total_bytes and total_tokens else None


def what_to_fetch(train_files: str, val_files: str, num_steps: int, batch_tokens: int, epochs: int) -> str:
    """What a run lacks of our own sources: "enwik8", "fineweb N" for N training shards, or ""."""
    train_shards = len(glob.glob(train_files))
    complete = train_shards > 0 and bool(glob.glob(val_files))
    if train_files.startswith("data/enwik8/") and not complete:
        return "enwik8"
    if train_files.startswith("data/fineweb10B/"):
        batches_per_shard = max(1, (10**8 - 1) // batch_tokens)
        needed = min(103, -(-num_steps // (batches_per_shard * epochs)))  # 103: as many as there are
        if train_shards < needed or not complete:
            return f"fineweb {needed}"
    return ""
