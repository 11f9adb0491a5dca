"""FineWeb as GPT-2 tokens: the public shards of 100 million tokens each, from the hub.

    python data/fineweb.py       what the default preset needs: 9 shards to train on and validation, 2 GB
    python data/fineweb.py N     the first N shards to train on, and the validation shard
    python data/fineweb.py N --repo=kjj0/fineweb100B-gpt2      of the larger set, into data/fineweb100B

A run that was interrupted goes on where it stopped; what is there already is not fetched again. Each file is
checked (size, header, the hub's own sha256) before it gets its final name, and shards get theirs in order, so
that the folder always holds the first so many of them. HF_ENDPOINT names a mirror of the hub.
"""
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from hub import Hub, Remote, add_patience
from shards import (DATA, TEMPORARY, Flags, UserError, check_space, describe, exclusive, header_fault,
                    in_place, read_manifest, relative, run, sha256_of, summary, sync_folder, write_manifest)
from vocabulary import DOCUMENT_TOKEN, VOCAB_SIZE, lengths

REPO, DEFAULT_SHARDS = "kjj0/fineweb10B-gpt2", 9
TRAIN_SHARDS = {"kjj0/fineweb10B-gpt2": 103, "kjj0/fineweb100B-gpt2": 1030}  # how many there are
VAL = "fineweb_val_000000.bin"
ABOUT = {"tokenizer": "gpt2", "vocab_size": VOCAB_SIZE, "document_token": DOCUMENT_TOKEN}


def parse(arguments: list[str]):
    flags = Flags(__doc__)
    flags.add_argument("shards", nargs="?", type=int, default=DEFAULT_SHARDS, metavar="N", help="to train on")
    flags.add_argument("--repo", default=REPO, help="dataset on the hub")
    flags.add_argument("--out", type=Path, metavar="DIR", help="of the shards; default: as the dataset")
    flags.add_argument("--parallel", type=int, default=4, help="files fetched at a time")
    add_patience(flags)
    options = flags.parse_args(arguments)
    most = TRAIN_SHARDS.get(options.repo, 999_999)
    for name, value, highest in (("N", options.shards, most), ("--parallel", options.parallel, 64),
                                 ("--retries", options.retries, 1000)):
        if not 1 <= value <= highest:
            holds = f", what {options.repo} holds" if name == "N" else ""
            raise UserError(f"{name}={value}: expected 1 to {highest:,}{holds}")
    if options.repo.count("/") != 1:
        raise UserError(f"--repo={options.repo}: expected owner/name, such as {REPO}")
    options.out = options.out or DATA / options.repo.partition("/")[2].removesuffix("-gpt2")
    return options


def wanted_names(folder: Path, count: int) -> list[str]:
    """Validation first, then the shards to train on; also those already there, so that all get checked."""
    names = {f"fineweb_train_{number:06d}.bin" for number in range(1, count + 1)}
    names |= {path.name for path in folder.glob(f"fineweb_train_{'[0-9]' * 6}.bin")}
    return [VAL, *sorted(names)]


def listed(folder: Path, repo: str) -> dict[str, dict]:
    """The entries of the manifest whose shards are in place."""
    manifest = read_manifest(folder) or {"source": repo, "shards": []}
    if not manifest["source"].startswith(repo):
        raise UserError(f"{relative(folder)} holds {manifest['source']}, not {repo}; choose another --out")
    return {entry["file"]: entry for entry in manifest["shards"] if in_place(folder, entry)}


def lengths_if_any():
    """For bits per byte. The shards are of use without."""
    try:
        return lengths()
    except UserError as error:
        print(f"bytes of text are left unknown: {error}", file=sys.stderr)
        return None


def obtain(hub: Hub, remote: Remote, folder: Path, table) -> tuple[Path, dict]:
    """A checked shard, under a temporary name unless it was there already, and its entry in the manifest."""
    path = folder / remote.name
    if not (path.is_file() and path.stat().st_size == remote.size and not header_fault(path)
            and sha256_of(path) == remote.sha256):
        path = hub.fetch(remote, folder)
    hub.received[remote.name] = remote.size
    return path, describe(path, remote.name.split("_")[1], DOCUMENT_TOKEN, table, remote.sha256)


def fetch_all(hub: Hub, folder: Path, names: list[str], entries: dict[str, dict], parallel: int) -> None:
    """Fetch what is missing, several at a time; give final names, and entries in the manifest, in order."""
    hub.pin()
    missing = hub.look_up([name for name in names if name not in entries])
    sizes = {remote.name: remote.size for remote in missing}
    begun = [folder / (name + TEMPORARY) for name in sizes]
    had = sum(path.stat().st_size for path in begun if path.is_file())
    check_space(folder, sum(sizes.values()) - had + 2**20)
    if unhashed := [remote.name for remote in missing if not remote.sha256]:
        raise UserError(f"{hub.client.endpoint} gives no sha256 for {unhashed[0]}; set another HF_ENDPOINT")
    about = {"source": f"{hub.repo} on the hub, revision {hub.revision}", **ABOUT}
    write_manifest(folder, about | {"shards": list(entries.values())}, complete=False)
    table, terminal = lengths_if_any(), sys.stderr.isatty()
    with (ThreadPoolExecutor(parallel) as pool,
          tqdm(total=sum(sizes.values()), unit="B", unit_scale=True, disable=not terminal) as hub.progress):
        futures = [pool.submit(obtain, hub, remote, folder, table) for remote in missing]
        try:
            for number, (remote, future) in enumerate(zip(missing, futures), 1):
                path, entries[remote.name] = future.result()
                os.replace(path, folder / remote.name)
                sync_folder(folder)
                shards = [entries[name] for name in names if name in entries]
                write_manifest(folder, about | {"shards": shards}, complete=len(shards) == len(names))
                if not terminal:
                    print(f"{remote.name}: {remote.size / 1e6:,.1f} MB, {number} of {len(sizes)}", flush=True)
        finally:  # after an error or an interruption, the others stop at their next piece
            hub.stop.set()
            pool.shutdown(cancel_futures=True)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    folder = options.out
    names = wanted_names(folder, options.shards)
    entries = listed(folder, options.repo)
    if all(name in entries for name in names):
        if not read_manifest(folder)["complete"]:
            with exclusive(folder):
                write_manifest(folder, read_manifest(folder), complete=True)
        print(f"{relative(folder)}: already complete, with {len(names) - 1} shards to train on")
        return 0
    with exclusive(folder):
        hub = Hub(options.repo, options.retries, options.backoff)
        fetch_all(hub, folder, names, entries, options.parallel)
    print(summary(folder, read_manifest(folder)))
    return 0


if __name__ == "__main__":
    run(main)
