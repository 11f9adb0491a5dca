"""Check a folder of token shards: python data/verify.py DIR

For each shard: header, size, sha256, token range, number of documents, bytes of text, compared with
manifest.json where there is one. Then across splits: no document of validation may occur in train,
nor any 1024 consecutive tokens of one; the same in test is only noted (enwik8's customary test part
shares one such stretch with its train part). Prints a table; exits with 1 and names the shard if
anything is wrong.
"""
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shards import (BYTE_LENGTHS, MANIFEST, SPLITS, Flags, UserError, describe, header_fault,
                    map_tokens, read_manifest, run)

WINDOW = 1024           # consecutive tokens that train and validation may not share
BLOCK = WINDOW // 2     # every window contains a complete block, counted from the document's start
CHUNK = 1 << 20         # tokens hashed at a time
SHOWN = 10              # overlaps that are printed
BASE = 0x9E3779B97F4A7C15
TABLE_SEED = 20240520
# Where there is no manifest: the vocabulary, by the beginning of the shards' names.
KNOWN = {"fineweb": {"vocab_size": 50257, "document_token": 50256},
         "enwik8": {"vocab_size": 257, "document_token": 256}}
UNKNOWN = {"vocab_size": 2**16, "document_token": 50256}


# Each shard by itself -----------------------------------------------------------------------------

def find_shards(folder: Path) -> list[dict]:
    """The shards of a folder without a manifest, with the split that is in their names."""
    pattern = re.compile(rf".+_({'|'.join(SPLITS)})_\d{{6}}\.bin")
    matches = (pattern.fullmatch(path.name) for path in sorted(folder.iterdir()))
    return [{"file": match[0], "split": match[1]} for match in matches if match]


def folder_faults(folder: Path, manifest: dict) -> list[str]:
    """What is wrong with the set as a whole."""
    names = {entry["file"] for entry in manifest["shards"]}
    faults = []
    if manifest.get("complete") is not True:
        faults.append(
            f"{MANIFEST}: not complete: the script that makes the shards was interrupted; run it "
            "again")
    return faults + [f"{entry['file']}: not in {MANIFEST}" for entry in find_shards(folder)
                     if entry["file"] not in names]


def shard_faults(path: Path, entry: dict, about: dict) -> tuple[dict, list[str]]:
    """What a shard holds, and where that differs from what it should hold."""
    if fault := header_fault(path):
        return {"tokens": 0, "documents": 0}, [fault]
    lengths = BYTE_LENGTHS if about.get("tokenizer") == "bytes" else None
    tokens = map_tokens(path)
    highest = int(tokens.max(initial=0))
    faults = []
    if highest >= about["vocab_size"]:
        faults.append(f"holds token {highest}, outside the vocabulary of {about['vocab_size']}")
    found = describe(path, entry["split"], about["document_token"], None if faults else lengths)
    meanings = {"tokens": "tokens", "documents": "documents", "text_bytes": "bytes of text"}
    for key, meaning in meanings.items():
        if key in entry and None not in (found[key], entry[key]) and found[key] != entry[key]:
            faults.append(f"holds {found[key]:,} {meaning}, {entry[key]:,} according to {MANIFEST}")
    if entry.get("sha256") and found["sha256"] != entry["sha256"]:
        faults.append(
            f"has sha256 {found['sha256'][:12]}…, {entry['sha256'][:12]}… according to {MANIFEST}")
    return found, faults


# Across splits ------------------------------------------------------------------------------------

class Stream:
    """The tokens of a split's shards, one after the other."""

    def __init__(self, paths: list[Path]):
        self.paths = paths
        self.shards = [map_tokens(path) for path in paths]
        self.ends = np.cumsum([len(tokens) for tokens in self.shards], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.shards else 0

    def read(self, start: int, end: int) -> np.ndarray:
        parts = []
        begin = 0
        for tokens, shard_end in zip(self.shards, self.ends.tolist()):
            if start < shard_end and end > begin:
                parts.append(tokens[max(0, start - begin):end - begin])
            begin = shard_end
        return np.concatenate(parts) if parts else np.empty(0, dtype="<u2")

    def where(self, position: int) -> str:
        """The shard that a position is in, and the place in it."""
        number = int(np.searchsorted(self.ends, position, side="right"))
        begin = int(self.ends[number - 1]) if number else 0
        return f"{self.paths[number].name} at token {position - begin:,}"


class Hasher:
    """Polynomial hashes modulo 2**64 of stretches of tokens, all at once from cumulative sums.

    The sum over a stretch that begins at i is BASE**i times its hash. BASE**i is odd, so it has an
    inverse: dividing by it makes the hash independent of where the stretch is.
    """

    def __init__(self, size: int):
        generator = np.random.default_rng(TABLE_SEED)
        self.values = generator.integers(1, 2**64, 2**16, dtype=np.uint64)
        self.powers = self.powers_of(BASE, size)
        self.inverse_powers = self.powers_of(pow(BASE, -1, 2**64), size)

    @staticmethod
    def powers_of(base: int, size: int) -> np.ndarray:
        powers = np.full(size, base, dtype=np.uint64)
        powers[0] = 1
        return np.cumprod(powers)

    def sums(self, tokens: np.ndarray) -> np.ndarray:
        sums = np.zeros(len(tokens) + 1, dtype=np.uint64)
        np.cumsum(self.values[tokens] * self.powers[:len(tokens)], out=sums[1:])
        return sums

    def hashes(self, sums: np.ndarray, starts, ends) -> np.ndarray:
        return (sums[ends] - sums[starts]) * self.inverse_powers[starts]

    def window_hashes(self, sums: np.ndarray, length: int) -> np.ndarray:
        """The hash of every stretch of that length."""
        return (sums[length:] - sums[:-length]) * self.inverse_powers[:len(sums) - length]


@dataclass
class Documents:
    """Where the documents of a stretch of tokens begin and end, without their document tokens."""
    starts: np.ndarray
    ends: np.ndarray

    @classmethod
    def find(cls, tokens: np.ndarray, document_token: int, at_start: bool) -> "Documents":
        """`at_start`: the stream begins here, also with a document that has no document token."""
        places = np.flatnonzero(tokens == document_token)
        starts = np.insert(places + 1, 0, 0)
        ends = np.append(places, len(tokens))
        if not at_start:
            starts = starts[1:]
            ends = ends[1:]
        return cls(starts[ends > starts], ends[ends > starts])


class Overlaps:
    """What a held-out split shares with train."""

    def __init__(self, held_out: Stream, document_token: int):
        self.held_out = held_out
        self.document_token = document_token
        self.hasher = Hasher(CHUNK + WINDOW + 1)
        self.index()

    def index(self) -> None:
        """Hash every block of the long held-out documents, and the short ones as a whole."""
        tokens = self.held_out.read(0, len(self.held_out))
        self.documents = Documents.find(tokens, self.document_token, at_start=True)
        lengths = self.documents.ends - self.documents.starts
        long = lengths >= WINDOW
        starts = [np.arange(start, end - BLOCK + 1, BLOCK) for start, end in
                  zip(self.documents.starts[long], self.documents.ends[long])]
        self.block_places = np.concatenate([np.empty(0, np.int64), *starts])
        self.short_places = self.documents.starts[~long]
        block_lengths = np.full(len(self.block_places), BLOCK)
        self.block_hashes = self.hash_places(tokens, self.block_places, block_lengths)
        self.short_hashes = self.hash_places(tokens, self.short_places, lengths[~long])
        order = np.argsort(self.block_hashes, kind="stable")
        self.block_hashes = self.block_hashes[order]
        self.block_places = self.block_places[order]
        order = np.argsort(self.short_hashes, kind="stable")
        self.short_hashes = self.short_hashes[order]
        self.short_places = self.short_places[order]
        self.sieve = np.zeros(1 << 24, dtype=bool)  # by the first 24 bits: excludes nearly all
        self.sieve[self.block_hashes >> np.uint64(40)] = True

    def hash_places(self, tokens: np.ndarray, places: np.ndarray,
                    lengths: np.ndarray) -> np.ndarray:
        hashes = np.zeros(len(places), dtype=np.uint64)
        for start in range(0, len(tokens), CHUNK):
            sums = self.hasher.sums(tokens[start:start + CHUNK + WINDOW])
            inside = (places >= start) & (places < start + CHUNK)
            begin = places[inside] - start
            hashes[inside] = self.hasher.hashes(sums, begin, begin + lengths[inside])
        return hashes

    def find(self, train: Stream) -> dict[int, int]:
        """For each held-out document that occurs in train, by its start: where in train."""
        found = {}
        for start in range(0, len(train), CHUNK):
            tokens = train.read(start, start + CHUNK + WINDOW)
            sums = self.hasher.sums(tokens)
            for place, held_out_place in self.shared_blocks(sums):
                starts = self.documents.starts
                document = int(np.searchsorted(starts, held_out_place, side="right")) - 1
                key = int(starts[document])
                if key in found:
                    continue
                there = start + place
                if self.shared_around(train, there, held_out_place, document) >= WINDOW:
                    found[key] = there
            is_last = start + len(tokens) == len(train)
            for place, held_out_place in self.shared_short(tokens, sums, start == 0, is_last):
                found.setdefault(held_out_place, start + place)
        return found

    def shared_blocks(self, sums: np.ndarray):
        """Places in a chunk of train, and in the held-out split, of equal hashes of a block."""
        if len(sums) <= BLOCK:
            return
        hashes = self.hasher.window_hashes(sums, BLOCK)[:CHUNK]
        places = np.flatnonzero(self.sieve[hashes >> np.uint64(40)])
        first = np.searchsorted(self.block_hashes, hashes[places], side="left")
        last = np.searchsorted(self.block_hashes, hashes[places], side="right")
        for number in np.flatnonzero(last > first):
            for match in self.block_places[first[number]:last[number]].tolist():
                yield int(places[number]), match

    def shared_around(self, train: Stream, place: int, held_out_place: int, document: int) -> int:
        """How many consecutive tokens are the same, around a block of equal hash."""
        start = int(self.documents.starts[document])
        end = int(self.documents.ends[document])
        before = min(WINDOW, held_out_place - start, place)
        after = min(WINDOW + BLOCK, end - held_out_place)
        ours = self.held_out.read(held_out_place - before, held_out_place + after)
        theirs = train.read(place - before, place + after)
        same = ours[:len(theirs)] == theirs
        if not same[before:before + BLOCK].all():
            return 0
        differing = np.flatnonzero(~same)
        left = differing[differing < before].max(initial=-1)
        right = differing[differing >= before].min(initial=len(same))
        return int(right - left - 1)

    def shared_short(self, tokens: np.ndarray, sums: np.ndarray, is_first: bool, is_last: bool):
        """Short documents of train that begin in a chunk and are held-out documents too."""
        documents = Documents.find(tokens, self.document_token, is_first)
        lengths = documents.ends - documents.starts
        ended = (documents.ends < len(tokens)) | is_last
        whole = (lengths < WINDOW) & (documents.starts <= CHUNK) & ended
        starts = documents.starts[whole]
        ends = documents.ends[whole]
        hashes = self.hasher.hashes(sums, starts, ends)
        first = np.searchsorted(self.short_hashes, hashes, side="left")
        last = np.searchsorted(self.short_hashes, hashes, side="right")
        for number in np.flatnonzero(last > first):
            ours = tokens[starts[number]:ends[number]]
            for match in self.short_places[first[number]:last[number]].tolist():
                if np.array_equal(ours, self.held_out.read(match, match + len(ours))):
                    yield int(starts[number]), match


def overlaps(folder: Path, shards: list[dict], split: str, document_token: int) -> list[str]:
    """The documents of a held-out split that occur in train, a sentence each."""
    train = Stream([folder / entry["file"] for entry in shards if entry["split"] == "train"])
    held_out = Stream([folder / entry["file"] for entry in shards if entry["split"] == split])
    if not len(train) or not len(held_out):
        return []
    found = Overlaps(held_out, document_token).find(train)
    what = f"this document, or {WINDOW} consecutive tokens of it, is in"
    sentences = [f"{held_out.where(place)}: {what} {train.where(match)}"
                 for place, match in sorted(found.items())[:SHOWN]]
    if len(found) > SHOWN:
        sentences.append(
            f"{held_out.paths[0].name}: {len(found) - SHOWN:,} more documents of {split} are in "
            "train")
    return sentences


def main(arguments: list[str]) -> int:
    flags = Flags(__doc__)
    flags.add_argument("folder", type=Path, metavar="DIR", help="folder of the shards")
    folder = flags.parse_args(arguments).folder
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; expected one with token shards")
    manifest = read_manifest(folder)
    shards = find_shards(folder) if manifest is None else manifest["shards"]
    if not shards and manifest is None:
        raise UserError(f"{folder}: no token shards there; ./run.sh fetches what a preset needs")
    if manifest is None:
        about = KNOWN.get(shards[0]["file"].partition("_")[0], UNKNOWN)
        faults = []
    else:
        about = manifest
        faults = folder_faults(folder, manifest)
    readable = []
    print(f"{'shard':<32}{'split':<7}{'tokens':>14}{'documents':>12}  state")
    for entry in shards:
        found, wrong = shard_faults(folder / entry["file"], entry, about)
        state = "; ".join(wrong) or "intact"
        print(f"{entry['file']:<32}{entry['split']:<7}{found['tokens']:>14,}"
              f"{found['documents']:>12,}  {state}", flush=True)
        faults += [f"{entry['file']}: {fault}" for fault in wrong]
        if not header_fault(folder / entry["file"]):
            readable.append(entry)
    faults += overlaps(folder, readable, "val", about["document_token"])
    for note in overlaps(folder, readable, "test", about["document_token"]):
        print(f"note: {note}")
    for fault in faults:
        print(f"FAULT {fault}")
    if faults:
        print(f"{folder}: {len(faults)} faults")
        return 1
    if manifest is None:
        print(f"{folder}: intact (without a manifest: hashes and counts cannot be compared)")
    else:
        print(f"{folder}: intact")
    return 0


if __name__ == "__main__":
    run(main)
