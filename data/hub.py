"""Files of the Hugging Face hub, or of the mirror that HF_ENDPOINT names: resumed, retried and checked."""
import io
import os
import random
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from shards import DISK_ERRORS, TEMPORARY, Flags, UserError, header_fault, sha256_of

PASSING = (408, 425, 429, 500, 502, 503, 504)   # answers of a server that may well answer better in a while
LONGEST_WAIT = 60.0             # seconds between two tries
PATHS_PER_QUESTION = 500


class Stopped(Exception):
    """Another download failed, or the user interrupted: this one need not go on."""


def asked_wait(error: Exception) -> float:
    """The seconds that a server asked to wait, at most five minutes; 0 if it did not."""
    response = getattr(error, "response", None)
    text = response.headers.get("retry-after", "") if response is not None else ""
    return min(float(text), 300.0) if text.isdecimal() else 0.0


@dataclass
class Remote:
    """A file on the hub: what the hub says of it."""
    name: str
    size: int
    sha256: str


@dataclass
class Hub:
    """A dataset's repository on the hub. huggingface_hub, which does the talking, is imported only here."""
    repo: str
    retries: int = 8                # tries in a row that bring nothing, before giving up
    backoff: float = 1.0            # seconds before the second try; doubled for each further one
    revision: str = "main"
    progress: tqdm | None = None    # a bar over the bytes of all files
    stop: threading.Event = field(default_factory=threading.Event)
    received: dict = field(default_factory=dict)

    def __post_init__(self):
        try:
            import huggingface_hub
            from huggingface_hub import constants, errors, file_download, utils
        except ImportError as error:
            raise UserError(f"{error.name} is missing; pip install -r data/requirements.txt") from None
        utils.logging.set_verbosity_error()     # what goes wrong is said here, in one line, not in several
        utils.disable_progress_bars()
        constants.DOWNLOAD_CHUNK_SIZE = 2**20   # what an interruption can lose
        self.client, self.http_get = huggingface_hub.HfApi(), file_download.http_get
        self.url_of, self.headers = huggingface_hub.hf_hub_url, utils.build_hf_headers
        self.http_error, self.offline = errors.HfHubHTTPError, errors.OfflineModeIsEnabled
        # The HTTP library under huggingface_hub has changed before: its errors' base class is found through
        # the hub's own.
        self.transport_error = errors.HfHubHTTPError.__bases__[0]

    def say(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)

    def explain(self, what: str, error: Exception) -> str:
        """Why a try failed, in a few words. Raises where another try would not help."""
        if isinstance(error, self.offline):
            raise UserError(f"{what}: HF_HUB_OFFLINE is set, so the hub is not asked; unset it") from None
        if isinstance(error, self.http_error):
            status = error.response.status_code
            if status not in PASSING:
                raise UserError(f"{self.client.endpoint} answers {status} for {what}; check HF_ENDPOINT and "
                                f"--repo={self.repo}") from None
            return f"{self.client.endpoint} answers {status}"
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise error
        return str(error).partition("\n")[0] or type(error).__name__

    def patiently(self, what: str, action, gained=lambda: 0):
        """The result of an action, tried again after passing errors; a gain starts the count anew."""
        failures, had = 0, gained()
        while True:
            try:
                return action()
            except (self.transport_error, OSError) as error:
                reason, asked = self.explain(what, error), asked_wait(error)
            failures = failures + 1 if gained() <= had else 1
            had = gained()
            if failures >= self.retries:
                raise UserError(f"{what}: given up after {failures} tries ({reason}); check the network and "
                                f"HF_ENDPOINT ({self.client.endpoint}), and run the same command again: it "
                                "goes on from here")
            wait = min(LONGEST_WAIT, self.backoff * 2 ** (failures - 1)) * random.uniform(0.75, 1.25)
            wait = max(wait, asked)
            self.say(f"{what}: {reason}; trying again in {wait:.1f} s ({failures} of {self.retries})")
            if self.stop.wait(wait):
                raise Stopped

    def pin(self) -> None:
        """Fix the revision, so that all files are of one moment."""
        info = self.ask("the revision", lambda: self.client.dataset_info(self.repo, revision=self.revision))
        self.revision = info.sha

    def ask(self, what: str, action):
        try:
            return self.patiently(f"{what} of {self.repo}", action)
        except ValueError as error:
            raise UserError(f"{self.client.endpoint} does not answer as the hub does ({error}); check "
                            f"HF_ENDPOINT and --repo={self.repo}") from None

    def look_up(self, names: list[str]) -> list[Remote]:
        """Size and sha256 of files, as the hub knows them."""
        found = {}
        for start in range(0, len(names), PATHS_PER_QUESTION):
            paths = names[start:start + PATHS_PER_QUESTION]
            infos = self.ask("the list of files", lambda paths=paths: self.client.get_paths_info(
                self.repo, paths, repo_type="dataset", revision=self.revision))
            for info in infos:
                found[info.path] = Remote(info.path, info.size, info.lfs.sha256 if info.lfs else "")
        if missing := [name for name in names if name not in found]:
            raise UserError(f"{self.repo} has no {missing[0]}; ask for fewer shards, or check --repo")
        return [found[name] for name in names]

    def names(self) -> list[str]:
        return self.ask("the list of files", lambda: self.client.list_repo_files(
            self.repo, repo_type="dataset", revision=self.revision))

    def fetch(self, remote: Remote, folder: Path, check=header_fault) -> Path:
        """A whole and checked file, still under a temporary name; goes on from what a former run left."""
        path = folder / (Path(remote.name).name + TEMPORARY)
        for _ in range(2):  # what is whole and yet wrong is fetched once more: then the source must be wrong
            self.patiently(remote.name, lambda: self.receive(remote, path),
                           lambda: self.received.get(remote.name, 0))
            found = sha256_of(path) if remote.sha256 else ""
            fault = check(path)
            if found != remote.sha256:
                fault = f"has sha256 {found[:12]}…, not {remote.sha256[:12]}…"
            if not fault:
                return path
            path.unlink()
            self.received[remote.name] = 0
            self.say(f"{remote.name}: what arrived {fault}")
        raise UserError(f"{remote.name}: what arrived {fault}, twice; {self.client.endpoint} serves another "
                        "file than the hub's, so try later or set HF_ENDPOINT to another mirror")

    def receive(self, remote: Remote, path: Path) -> None:
        """The bytes that are still missing."""
        if path.exists() and path.stat().st_size > remote.size:
            path.unlink()
        with Sink(path, self, remote.name) as sink:
            url = self.url_of(self.repo, remote.name, repo_type="dataset", revision=self.revision)
            self.http_get(url, sink, resume_size=sink.tell(), headers=self.headers(),
                          expected_size=remote.size)
            sink.flush()
            os.fsync(sink.fileno())


def add_patience(flags: Flags) -> None:
    """The flags that say how long to try."""
    flags.add_argument("--retries", type=int, default=8, help="tries that bring nothing, before giving up")
    flags.add_argument("--backoff", type=float, default=1.0, help="seconds before the second try; doubles")


class Sink(io.BufferedWriter):
    """Where a download is written: goes on at the end of what is there, moves the bar, and can be stopped."""

    def __init__(self, path: Path, hub: Hub, name: str):
        super().__init__(io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+"))
        self.hub, self.file_name = hub, name
        self.seek(0, io.SEEK_END)
        self.report()

    def report(self) -> None:
        self.hub.received[self.file_name] = self.tell()
        if self.hub.progress is not None:
            self.hub.progress.n = sum(tuple(self.hub.received.values()))
            self.hub.progress.update(0)

    def write(self, chunk) -> int:
        if self.hub.stop.is_set():
            raise Stopped
        written = super().write(chunk)
        self.report()
        return written

    def truncate(self, *position) -> int:
        size = super().truncate(*position)
        self.report()
        return size
