"""Check a folder of token shards: python data/verify.py DIR

For each shard: header, size, sha256, token range, number of documents, bytes of text, against manifest.json
where there is one. Then across splits: no document of validation may occur in train, nor any 1024 tokens in a
row of one; the same is looked for in test, and only noted (enwik8's customary test part shares one such
stretch with its train part). Prints a table; exits with 1 and names the shard if anything is wrong.
"""
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shards import (BYTE_LENGTHS, MANIFEST, SPLITS, Flags, UserError, describe, header_fault, map_tokens,
                    read_manifest, run)

WINDOW = 1024           # tokens in a row that train and validation may not share
BLOCK = WINDOW // 2     # any window holds a whole block, if blocks are counted from a document's start
CHUNK = 1 << 20         # tokens hashed at a time
SHOWN = 10              # overlaps that are printed
BASE, TABLE_SEED = 0x9E3779B97F4A7C15, 20240520
# Size of the vocabulary and document token where there is no manifest, by the beginning of the shards' names.
KNOWN = {"fineweb": (50257, 50256), "enwik8": (257, 256)}


# Each shard by itself -------------------------------------------------------------------------------------

def find_shards(folder: Path) -> list[dict]:
    """The shards of a folder without a manifest, as the public ones are; the split is in their names."""
    pattern = re.compile(rf".+_({'|'.join(SPLITS)})_\d{{6}}\.bin")
    matches = (pattern.fullmatch(path.name) for path in sorted(folder.iterdir()))
    return [{"file": match[0], "split": match[1]} for match in matches if match]


def folder_faults(folder: Path, manifest: dict) -> list[str]:
    """What is wrong with the set as a whole."""
    names = {entry["file"] for entry in manifest["shards"]}
    unlisted = [entry["file"] for entry in find_shards(folder) if entry["file"] not in names]
    unfinished = f"{MANIFEST}: not complete: the script that makes the shards was interrupted; run it again"
    return [unfinished] * (not manifest["complete"]) + [f"{name}: not in {MANIFEST}" for name in unlisted]


def shard_faults(path: Path, entry: dict, about: dict) -> tuple[dict, list[str]]:
    """What a shard really holds, and where that differs from what it should."""
    if fault := header_fault(path):
        return {"tokens": 0, "documents": 0}, [fault]
    lengths = BYTE_LENGTHS if about.get("tokenizer") == "bytes" else None
    tokens = map_tokens(path)
    highest = int(tokens.max(initial=0))
    vocab_size = about["vocab_size"]
    faults = [f"holds token {highest}, outside the vocabulary of {vocab_size}"] * (highest >= vocab_size)
    found = describe(path, entry["split"], about["document_token"], None if faults else lengths)
    for key, meaning in (("tokens", "tokens"), ("documents", "documents"), ("text_bytes", "bytes of text")):
        if key in entry and None not in (found[key], entry[key]) and found[key] != entry[key]:
            faults.append(f"holds {found[key]:,} {meaning}, {entry[key]:,} by {MANIFEST}")
    if "sha256" in entry and found["sha256"] != entry["sha256"]:
        faults.append(f"has sha256 {found['sha256'][:12]}…, {entry['sha256'][:12]}… by {MANIFEST}")
    return found, faults


# Across splits --------------------------------------------------------------------------------------------

class Stream:
    """The tokens of a split's shards, one after the other."""

    def __init__(self, paths: list[Path]):
        self.paths, self.shards = paths, [map_tokens(path) for path in paths]
        self.ends = np.cumsum([len(tokens) for tokens in self.shards], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.shards else 0

    def read(self, start: int, end: int) -> np.ndarray:
        parts, begin = [], 0
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
    """Polynomial hashes modulo 2**64 of stretches of tokens, all at once from running sums.

    The sum over a stretch that begins at i is BASE**i times its hash; dividing by BASE**i, which is odd and
    so has an inverse, makes the hash the same wherever the stretch stands.
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
        """Of every stretch of that length."""
        return (sums[length:] - sums[:-length]) * self.inverse_powers[:len(sums) - length]


@dataclass
class Documents:
    """Where the documents of a stretch of tokens begin and end, their document tokens not counted."""
    starts: np.ndarray
    ends: np.ndarray

    @classmethod
    def find(cls, tokens: np.ndarray, document_token: int, at_start: bool) -> "Documents":
        """`at_start`: the stream begins here, so what precedes the first document token is a document too."""
        places = np.flatnonzero(tokens == document_token)
        starts, ends = places + 1, np.append(places, len(tokens))
        starts, ends = (np.insert(starts, 0, 0), ends) if at_start else (starts, ends[1:])
        return cls(starts[ends > starts], ends[ends > starts])


class Overlaps:
    """What a held-out split shares with train."""

    def __init__(self, held_out: Stream, document_token: int):
        self.held_out, self.document_token = held_out, document_token
        self.hasher = Hasher(CHUNK + WINDOW + 1)
        self.index()

    def index(self) -> None:
        """Hash every block of the long documents of the held-out split, and the whole of the short ones."""
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
        for name in ("block", "short"):
            order = np.argsort(getattr(self, f"{name}_hashes"), kind="stable")
            setattr(self, f"{name}_hashes", getattr(self, f"{name}_hashes")[order])
            setattr(self, f"{name}_places", getattr(self, f"{name}_places")[order])
        self.sieve = np.zeros(1 << 24, dtype=bool)  # by their first 24 bits: rules out nearly all, cheaply
        self.sieve[self.block_hashes >> np.uint64(40)] = True

    def hash_places(self, tokens: np.ndarray, places: np.ndarray, lengths: np.ndarray) -> np.ndarray:
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
                document = int(np.searchsorted(self.documents.starts, held_out_place, side="right")) - 1
                key = int(self.documents.starts[document])
                there = start + place
                if key not in found and self.shared_around(train, there, held_out_place, document) >= WINDOW:
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
        """How many tokens in a row are really the same, around a block of equal hash."""
        start, end = int(self.documents.starts[document]), int(self.documents.ends[document])
        before = min(WINDOW, held_out_place - start, place)
        after = min(WINDOW + BLOCK, end - held_out_place)
        ours = self.held_out.read(held_out_place - before, held_out_place + after)
        theirs = train.read(place - before, place + after)
        same = ours[:len(theirs)] == theirs
        if not same[before:before + BLOCK].all():
            return 0
        differing = np.flatnonzero(~same)
        left, right = differing[differing < before], differing[differing >= before]
        return int((right[0] if len(right) else len(same)) - (left[-1] + 1 if len(left) else 0))

    def shared_short(self, tokens: np.ndarray, sums: np.ndarray, is_first: bool, is_last: bool):
        """Short documents of train that begin in a chunk and are documents of the held-out split too."""
        documents = Documents.find(tokens, self.document_token, is_first)
        lengths = documents.ends - documents.starts
        whole = (lengths < WINDOW) & (documents.starts <= CHUNK) & ((documents.ends < len(tokens)) | is_last)
        starts, ends = documents.starts[whole], documents.ends[whole]
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
    train, held_out = (Stream([folder / entry["file"] for entry in shards if entry["split"] == name])
                       for name in ("train", split))
    if not len(train) or not len(held_out):
        return []
    found = Overlaps(held_out, document_token).find(train)
    what = f"this document, or {WINDOW} tokens in a row of it, is in"
    sentences = [f"{held_out.where(place)}: {what} {train.where(match)}"
                 for place, match in sorted(found.items())[:SHOWN]]
    more = [f"{held_out.paths[0].name}: {len(found) - SHOWN:,} more documents of {split} are in train"]
    return sentences + more * (len(found) > SHOWN)


def main(arguments: list[str]) -> int:
    flags = Flags(__doc__)
    flags.add_argument("folder", type=Path, metavar="DIR", help="folder of the shards")
    options = flags.parse_args(arguments)
    folder = options.folder
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; expected one with token shards")
    manifest = read_manifest(folder)
    shards = manifest["shards"] if manifest else find_shards(folder)
    if not shards and not manifest:
        raise UserError(f"{folder}: no token shards there; ./run.sh fetches what a preset needs")
    known = KNOWN.get(shards[0]["file"].partition("_")[0] if shards else "", (2**16, 50256))
    about = manifest or {"vocab_size": known[0], "document_token": known[1]}
    faults, sound = folder_faults(folder, manifest) if manifest else [], []
    print(f"{'shard':<32}{'split':<7}{'tokens':>14}{'documents':>12}  state")
    for entry in shards:
        found, wrong = shard_faults(folder / entry["file"], entry, about)
        print(f"{entry['file']:<32}{entry['split']:<7}{found['tokens']:>14,}{found['documents']:>12,}  "
              + ("; ".join(wrong) or "sound"), flush=True)
        faults += [f"{entry['file']}: {fault}" for fault in wrong]
        sound += [entry] * (not header_fault(folder / entry["file"]))
    faults += overlaps(folder, sound, "val", about["document_token"])
    notes = overlaps(folder, sound, "test", about["document_token"])
    for line in [f"note: {note}" for note in notes] + [f"FAULT {fault}" for fault in faults]:
        print(line)
    print(f"{folder}: {len(faults)} faults" if faults else f"{folder}: sound"
          + " (without a manifest: sums and counts have nothing to be compared with)" * (manifest is None))
    return 1 if faults else 0


if __name__ == "__main__":
    run(main)
