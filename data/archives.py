"""Files of PyPI's archives: downloaded by pip with the hash enforced; read, never run."""
import subprocess
import sys
from pathlib import Path

from shards import UserError, sha256_of

# `pip download` of a source archive would run its build back end to learn its dependencies. This
# takes the file when pip has it on the disk with its hash checked, and stops pip there.
KEEP_SOURCE = """
import shutil, sys
from pip._internal.cli.main import main
from pip._internal.exceptions import InstallationError
from pip._internal.operations import prepare
if not callable(getattr(prepare, "_get_prepared_distribution", None)):
    sys.exit("ERROR: this pip cannot be stopped before it builds")
def keep(request, *rest, **more):
    shutil.copy(request.local_file_path, sys.argv[1])
    raise InstallationError("kept, not built")
prepare._get_prepared_distribution = keep
main(sys.argv[2:])
"""


def download(requirement: str, sha256: str, name: str, folder: Path) -> Path:
    """An archive of PyPI: `requirement` such as "package==1.0", `name` the archive's file name."""
    wheel = name.endswith(".whl")
    requirements = folder / "requirements.txt"
    target = folder / name
    requirements.write_text(f"{requirement} --hash=sha256:{sha256}\n")
    kind = "--only-binary=:all:" if wheel else "--no-binary=:all:"
    options = ["download", "--no-deps", "--require-hashes", "--disable-pip-version-check",
               "--no-input", kind, "-d", str(folder), "-r", str(requirements)]
    start = ["-m", "pip"] if wheel else ["-c", KEEP_SOURCE, str(target)]
    command = [sys.executable, *start, *options]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if not target.is_file() or sha256_of(target) != sha256:
        target.unlink(missing_ok=True)
        raise UserError(f"{name}: {reason(done.stderr)}")
    return target


def reason(errors: str) -> str:
    """The sentence in which pip says why."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    said = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    if any("No module named pip" in line for line in lines):
        return "this Python has no pip; install it with python -m ensurepip"
    return (said or lines or ["pip did not download it"])[0].rstrip(".")
