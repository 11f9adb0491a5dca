"""Files of a dataset on the Hugging Face hub, or on HF_ENDPOINT's mirror, checked by sha256.

huggingface_hub does the downloading: retries, progress bars, the hub's chunked storage. It is
imported only when something is fetched.
"""
import contextlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from shards import UserError, header_fault, reason, sha256_of

TRIES = 3  # of a download that breaks off or arrives damaged, beyond huggingface_hub's own retries


class Unreachable(UserError):
    """A failure that may pass: of the network, of the server, or of the bytes on their way."""


@dataclass
class Remote:
    """A file on the hub: what the hub says about it."""
    name: str
    size: int
    sha256: str


class Hub:
    """A dataset's repository on the hub, at the revision that is the newest when this is made."""

    def __init__(self, repo: str):
        try:
            import huggingface_hub
            from huggingface_hub import errors
            from huggingface_hub.utils import logging
        except ImportError as error:
            raise UserError(
                f"{error.name} is missing; pip install -r data/requirements.txt") from None
        except ValueError:
            raise UserError(
                f"HF_ENDPOINT={os.environ.get('HF_ENDPOINT')}: not an address; expected one such "
                "as https://hub.example") from None
        logging.set_verbosity_error()   # errors are reported here, in one sentence
        self.download = huggingface_hub.hf_hub_download
        self.errors = errors
        self.repo = repo
        self.client = huggingface_hub.HfApi()
        self.endpoint = self.client.endpoint
        with self.one_sentence(f"the list of files of {repo}"):
            info = self.client.dataset_info(repo, files_metadata=True)
        self.revision = info.sha
        self.files = {
            file.rfilename: Remote(file.rfilename, file.size, file.lfs.sha256 if file.lfs else "")
            for file in info.siblings or ()
        }

    @contextlib.contextmanager
    def one_sentence(self, what: str):
        """Turn the errors of huggingface_hub and of its HTTP library into one sentence."""
        # The hub's own error is derived from the HTTP library's, whichever library that is.
        http_errors = self.errors.HfHubHTTPError.__bases__
        try:
            yield
        except self.errors.OfflineModeIsEnabled:
            raise UserError(f"{what}: HF_HUB_OFFLINE is set; unset it to download") from None
        except (*http_errors, self.errors.XetDownloadError, OSError, ValueError, TypeError,
                LookupError, RuntimeError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of the disk, not of the network
            # A file that the hub does not deliver is reported as "not cached"; the cause says why.
            cause = error.__cause__ or error
            response = getattr(cause, "response", None)
            status = None if response is None else response.status_code
            why = reason(cause) if status is None else f"it answers {status}"
            kind = UserError if status is not None and status < 500 else Unreachable
            raise kind(
                f"{what} from {self.endpoint}: {why}; check the network, HF_ENDPOINT and --repo="
                f"{self.repo}, then run the same command again: finished files are kept") from None

    def look_up(self, names: list[str]) -> list[Remote]:
        """Size and sha256 of files, as the hub knows them."""
        for name in names:
            if name not in self.files:
                raise UserError(f"{self.repo} has no {name}; ask for fewer shards, or check --repo")
            if not self.files[name].sha256:
                raise UserError(
                    f"{self.endpoint} gives no sha256 for {name}; set another HF_ENDPOINT")
        return [self.files[name] for name in names]

    def fetch(self, remote: Remote, folder: Path, check=header_fault) -> Path:
        """Download a file into a temporary folder and check it; a finished one is kept."""
        for attempt in range(1, TRIES + 1):
            try:
                return self.fetch_once(remote, folder, check)
            except Unreachable as error:
                if attempt == TRIES:
                    raise
                print(f"{str(error).partition(';')[0]}; trying again", file=sys.stderr, flush=True)
                time.sleep(attempt)

    def fetch_once(self, remote: Remote, folder: Path, check) -> Path:
        with self.one_sentence(remote.name):
            path = Path(self.download(self.repo, remote.name, repo_type="dataset",
                                      revision=self.revision, local_dir=folder))
        found = sha256_of(path)
        fault = check(path)
        if found != remote.sha256:
            fault = f"has sha256 {found[:12]}…, not {remote.sha256[:12]}…"
        if fault:
            path.unlink()
            raise Unreachable(
                f"{remote.name} from {self.endpoint}: what arrived {fault}; try later or set "
                "HF_ENDPOINT to another mirror")
        return path


def remove_partial(folder: Path) -> None:
    """Remove the unfinished files of killed downloads, which huggingface_hub does not resume."""
    for path in folder.rglob("*.incomplete"):
        path.unlink()
