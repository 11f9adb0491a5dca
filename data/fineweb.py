"""FineWeb as GPT-2 tokens: the public shards of 100 million tokens each, from the hub.

    python data/fineweb.py      what the default preset needs: 9 shards and validation, 2 GB
    python data/fineweb.py N    the first N shards to train on, and the validation shard
    python data/fineweb.py N --repo=kjj0/fineweb100B-gpt2     larger, into data/fineweb100B

The same command resumes an interrupted run: finished files are not fetched again, those under way
are. Each file is checked (size, header, the hub's own sha256) before it gets its final name, and
shards get theirs in order, so that the folder always holds the first so many of them. HF_ENDPOINT
names a mirror of the hub.
"""
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hub import Hub, Remote, remove_partial
from shards import (DATA, Flags, UserError, check_space, describe, exclusive, header_fault,
                    in_place, read_manifest, relative, run, sha256_of, summary, sync,
                    write_manifest)
from vocabulary import DOCUMENT_TOKEN, VOCAB_SIZE, lengths

REPO = "kjj0/fineweb10B-gpt2"
DEFAULT_SHARDS = 9
TRAIN_SHARDS = {"kjj0/fineweb10B-gpt2": 103, "kjj0/fineweb100B-gpt2": 1030}  # how many there are
VAL = "fineweb_val_000000.bin"
DOWNLOADS = ".download"     # in the target folder: files that are under way or not checked yet
ABOUT = {"tokenizer": "gpt2", "vocab_size": VOCAB_SIZE, "document_token": DOCUMENT_TOKEN}


def parse(arguments: list[str]):
    flags = Flags(__doc__)
    flags.add_argument("shards", nargs="?", type=int, default=DEFAULT_SHARDS, metavar="N",
                       help="to train on")
    flags.add_argument("--repo", default=REPO, help="dataset on the hub")
    flags.add_argument("--out", type=Path, metavar="DIR",
                       help="of the shards; default: as the dataset")
    flags.add_argument("--parallel", type=int, default=4, help="files fetched at a time")
    options = flags.parse_args(arguments)
    most = TRAIN_SHARDS.get(options.repo, 999_999)
    if not 1 <= options.shards <= most:
        raise UserError(f"N={options.shards}: expected 1 to {most:,}, the shards of {options.repo}")
    if not 1 <= options.parallel <= 64:
        raise UserError(f"--parallel={options.parallel}: expected 1 to 64")
    if options.repo.count("/") != 1:
        raise UserError(f"--repo={options.repo}: expected owner/name, such as {REPO}")
    options.out = options.out or DATA / options.repo.partition("/")[2].removesuffix("-gpt2")
    return options


def wanted_names(folder: Path, count: int) -> list[str]:
    """Validation first, then the shards to train on; those already there are checked too."""
    names = {f"fineweb_train_{number:06d}.bin" for number in range(1, count + 1)}
    names |= {path.name for path in folder.glob(f"fineweb_train_{'[0-9]' * 6}.bin")}
    return [VAL, *sorted(names)]


def listed(folder: Path, repo: str) -> dict[str, dict]:
    """The entries of the manifest whose shards are in place."""
    manifest = read_manifest(folder) or {"source": repo, "shards": []}
    source = str(manifest.get("source"))
    if not source.startswith(repo):
        raise UserError(
            f"{relative(folder)} holds {source}, not {repo}; choose another folder with --out")
    return {entry["file"]: entry for entry in manifest["shards"] if in_place(folder, entry)}


def lengths_if_known():
    """Bytes per token, for bits per byte; None without the vocabulary."""
    try:
        return lengths()
    except UserError as error:
        print(f"bytes of text are left unknown: {error}", file=sys.stderr)
        return None


def obtain(hub: Hub, remote: Remote, folder: Path, table) -> tuple[Path, dict]:
    """A checked shard, already in place or among the downloads, and its entry in the manifest."""
    path = folder / remote.name
    if header_fault(path) or path.stat().st_size != remote.size or sha256_of(path) != remote.sha256:
        path = hub.fetch(remote, folder / DOWNLOADS)
        sync(path)
    return path, describe(path, remote.name.split("_")[1], DOCUMENT_TOKEN, table, remote.sha256)


def fetch_all(hub: Hub, folder: Path, names: list[str], entries: dict[str, dict],
              parallel: int) -> None:
    """Fetch what is missing, several at a time; final names and manifest entries come in order."""
    downloads = folder / DOWNLOADS
    remove_partial(downloads)
    missing = hub.look_up([name for name in names if name not in entries])
    finished = sum(path.stat().st_size for path in downloads.glob("*.bin"))
    check_space(folder, sum(remote.size for remote in missing) - finished + 2**20)
    about = {"source": f"{hub.repo} on the hub, revision {hub.revision}", **ABOUT}
    write_manifest(folder, about | {"shards": list(entries.values())}, complete=False)
    table = lengths_if_known()
    pool = ThreadPoolExecutor(parallel)
    try:
        futures = [pool.submit(obtain, hub, remote, folder, table) for remote in missing]
        for number, (remote, future) in enumerate(zip(missing, futures), 1):
            path, entries[remote.name] = future.result()
            os.replace(path, folder / remote.name)
            sync(folder)
            shards = [entries[name] for name in names if name in entries]
            write_manifest(folder, about | {"shards": shards}, complete=False)
            if not sys.stderr.isatty():  # where there are no progress bars
                print(f"{remote.name}: {remote.size / 1e6:,.1f} MB, {number} of {len(missing)}",
                      flush=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    folder = options.out
    names = wanted_names(folder, options.shards)
    entries = listed(folder, options.repo)
    missing = [name for name in names if name not in entries]
    manifest = read_manifest(folder)
    if not missing and manifest.get("complete") is True and not (folder / DOWNLOADS).exists():
        print(f"{relative(folder)}: already complete, with {len(names) - 1} shards to train on")
        return 0
    with exclusive(folder):
        if missing:
            fetch_all(Hub(options.repo), folder, names, entries, options.parallel)
        manifest = write_manifest(folder, read_manifest(folder), complete=True)
        shutil.rmtree(folder / DOWNLOADS, ignore_errors=True)
    print(summary(folder, manifest))
    return 0


if __name__ == "__main__":
    run(main)
