"""Starting: nothing on import, torchrun, run.sh with real runs and with stand-ins, the check."""
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from helpers import ROOT, TINY, free_port, trained


def run_sh(*arguments: str, cwd: Path = ROOT, **variables) -> subprocess.CompletedProcess:
    """run.sh with this very interpreter, which has the packages."""
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | variables
    return subprocess.run([str(cwd / "run.sh"), *arguments], capture_output=True, text=True,
                          timeout=900, env=environment)


# The trainer itself -----------------------------------------------------------------------------

def test_importing_starts_nothing(tmp_path):
    code = f"""
import sys, os, threading
sys.path.insert(0, {str(ROOT)!r})
before, environment = set(os.listdir()), dict(os.environ)
import torch
threads, random = threading.active_count(), torch.random.get_rng_state()
flags = torch.are_deterministic_algorithms_enabled()
import train_gpt, torch.distributed as dist
assert set(os.listdir()) == before and not dist.is_initialized()
assert threading.active_count() == threads
assert torch.equal(torch.random.get_rng_state(), random) and not torch.cuda.is_initialized()
assert torch.are_deterministic_algorithms_enabled() == flags
assert {{k: v for k, v in os.environ.items() if k in environment}} == environment
"""
    process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True,
                             text=True)
    assert process.returncode == 0 and process.stdout == process.stderr == "", process.stderr


# run.sh with the trainer ------------------------------------------------------------------------

def test_run_sh_trains_with_the_packages_that_are_there_and_writes_one_log(data):
    process = run_sh(*TINY, *data, "--run_id=run_sh", NPROC="2")
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.count("step:4/4 val_loss:") == 1 and "2 × cpu" in process.stdout
    folder = Path(data[-1].partition("=")[2]) / "run_sh"
    assert sorted(path.name for path in folder.iterdir()) == ["log.txt", "metrics.jsonl",
                                                              "model.pt"]


@pytest.mark.slow  # as test_faults.py's machine that is lost and comes back, without the loss
def test_two_machines_train_as_one(data):
    """Two launchers that find each other by address, as on two hosts; losses as of one process."""
    port = str(free_port())
    machines = [subprocess.Popen([str(ROOT / "run.sh"), *TINY, *data, "--run_id=machines"],
                                 text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 env=os.environ | dict(PYTHON=sys.executable, OMP_NUM_THREADS="1",
                                                       NNODES="2", NODE_RANK=str(rank), NPROC="1",
                                                       MASTER_ADDR="127.0.0.1", MASTER_PORT=port))
                for rank in range(2)]
    outputs = [machine.communicate(timeout=900) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    lines = [line for out, _ in outputs for line in out.splitlines() if " train_loss:" in line]
    losses = [float(line.split("train_loss:")[1].split()[0]) for line in lines]
    alone = trained([*TINY, *data], "machine")
    assert losses == pytest.approx(alone.train_losses, abs=2e-4)


@pytest.mark.slow
def test_check_passes_where_a_run_would_and_lists_every_parameter(data):
    process = run_sh("check", *TINY, *data)
    assert process.returncode == 0, process.stdout + process.stderr
    for expected in ("versions", "memory", "compiler", "training data", "collective",
                     "blocks.3.down.weight", "skip_weights", "Muon", "active per token",
                     "of activations", "GPUs of 80 GB: 256, 40 GB: 256",
                     "this run would work"):
        assert expected in process.stdout, expected


@pytest.mark.slow
def test_check_runs_a_collective_among_the_ranks(data):
    process = run_sh("check", *TINY, *data, NPROC="2")
    assert process.returncode == 0, process.stdout + process.stderr
    assert "2 ranks answered" in process.stdout


# run.sh with stand-ins for everything that it starts --------------------------------------------

TRAINER = """
import os, sys
if "--show" in sys.argv:
    print(os.environ["SHOW"].replace(";", "\\n"))
    sys.exit()
"""
# a rank that would train for long, but not after its launcher
WAIT = """
import time
launcher = os.getppid()
while os.getppid() == launcher:
    time.sleep(0.1)
"""
SHOW = "preset=laptop\t# default;device=auto\t# default;gpus=0\t# GPUs;fetch=\t# nothing"
# notes what Python is started with; prints what would go to pytest and torchrun, makes a .venv of
# itself, runs the rest
PYTHON = """#!/usr/bin/env bash
words="$*"
printf '%s\\n' "${words%%$'\\n'*}" >>"$CALLS"
case "$words" in
    "-m pip install"*) [ -z "${MISSING:-}" ] ;;
    "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    "-m pytest"* | "- --"*) printf '%s\\n' "$@" "threads=${OMP_NUM_THREADS:-}" ;;
    *) exec REAL "$@" ;;
esac
"""
THREE = "printf 'GPU 0: H100\\n  MIG 1g\\nGPU 1: H100\\nGPU 2: H100\\n'"
# what the user's own shell may have set
NAMES = ("NPROC", "MAX_RESTARTS", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
         "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHON")


class StandIn:
    """A copy of run.sh beside scripts that only print their own name and options."""

    def __init__(self, folder: Path):
        self.repo, self.tools, self.calls_file = folder / "repo", folder / "bin", folder / "calls"
        self.tools.mkdir()
        self.tool("python", PYTHON.replace("REAL", sys.executable))
        self.write("train_gpt.py", TRAINER + "print(*sys.argv)\n")
        for name in ("data/enwik8.py", "data/fineweb.py", "data/vocabulary.py",
                     "tests/commands/check.py", "tests/commands/bench.py",
                     "tests/commands/faults.py", "records/speedrun.py"):
            self.write(name, "import sys\nprint(*sys.argv)\n")
        for name in ("", "data/", "tests/", "records/"):
            self.write(f"{name}requirements.txt", "")
        shutil.copy(ROOT / "run.sh", self.repo)
        clean = {name: value for name, value in os.environ.items()
                 if name not in NAMES and not name.startswith("SLURM_")}
        self.environment = clean | {"PATH": f"{self.tools}:{os.environ['PATH']}", "SHOW": SHOW,
                                    "PYTHON": str(self.tools / "python"),
                                    "CALLS": str(self.calls_file)}

    def write(self, name: str, text: str) -> None:
        (self.repo / name).parent.mkdir(parents=True, exist_ok=True)
        (self.repo / name).write_text(text)

    def tool(self, name: str, body: str) -> None:
        head = "" if body.startswith("#!") else "#!/usr/bin/env bash\n"
        (self.tools / name).write_text(f"{head}{body}\n")
        (self.tools / name).chmod(0o755)

    def start(self, *arguments: str, **variables) -> subprocess.Popen:
        return subprocess.Popen([str(self.repo / "run.sh"), *arguments], text=True,
                                env=self.environment | variables, start_new_session=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(self, *arguments: str, **variables) -> subprocess.CompletedProcess:
        process = self.start(*arguments, **variables)
        out, err = process.communicate(timeout=900)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def launched(self, *arguments: str, **variables) -> list[str]:
        """What torchrun or pytest would be given."""
        process = self.run(*arguments, **variables)
        assert process.returncode == 0, process
        return process.stdout.splitlines()

    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []


@pytest.fixture
def stand_in(tmp_path) -> StandIn:
    return StandIn(tmp_path)


SET_UP = "-m pip install --isolated --no-index --no-deps --dry-run -r requirements.txt"


def test_a_run_starts_the_trainer_twice_for_its_settings_and_for_training(stand_in):
    process = stand_in.run("--num_steps=3", "--run_id=two words")
    assert (process.returncode, process.stderr) == (0, ""), process
    assert process.stdout == "train_gpt.py --num_steps=3 --run_id=two words\n"
    options = "--num_steps=3 --run_id=two words"
    assert stand_in.calls() == [SET_UP, f"train_gpt.py --show {options}", f"train_gpt.py {options}"]


def test_wrong_options_are_refused_once_before_the_launch_with_the_trainers_exit_code(stand_in):
    stand_in.write("train_gpt.py", "import sys; print('error: x', file=sys.stderr); sys.exit(5)")
    process = stand_in.run("--nmu_steps=3", NPROC="2")
    assert (process.returncode, process.stdout, process.stderr) == (5, "", "error: x\n")


@pytest.mark.parametrize("command, script", [
    ("check", "tests/commands/check.py"), ("bench", "tests/commands/bench.py"),
    ("faults", "tests/commands/faults.py"), ("records", "records/speedrun.py")])
def test_commands_get_their_options(stand_in, command, script):
    process = stand_in.run(command, "one", "two three")
    assert (process.returncode, process.stderr) == (0, ""), process
    assert process.stdout == f"{script} one two three\n"


def test_a_command_that_is_not_there_is_refused_before_any_set_up(stand_in):
    process = stand_in.run("trian", "--num_steps=3")
    assert process.returncode == 2 and stand_in.calls() == []
    assert process.stderr == "error: trian: no such command; ./run.sh help lists them\n"


def test_help_starts_with_the_commands(stand_in):
    lines = stand_in.launched("--help")
    assert stand_in.launched("help") == lines
    assert lines[0].startswith("The only launcher: ./run.sh") and lines[-1] == "train_gpt.py --help"
    assert sum(line.startswith("  ./run.sh ") for line in lines) == 5
    assert not any("set -euo" in line for line in lines)


# Processes and GPUs

def test_one_process_per_gpu_of_the_trainer(stand_in):
    show = SHOW.replace("gpus=0", "gpus=2")
    assert "--nproc_per_node=2" in stand_in.launched(SHOW=show)
    assert "--nproc_per_node=3" in stand_in.launched(SHOW=show, NPROC="3")
    assert stand_in.launched(SHOW=show, NPROC="1") == ["train_gpt.py"]  # needs no torchrun
    assert "--standalone" in stand_in.launched(MAX_RESTARTS="2")


@pytest.mark.parametrize("nvidia_smi, visible, device, refused", [
    (THREE, None, "auto", True), (THREE, "0,2", "auto", True), (THREE, None, "cuda", True),
    (THREE, "", "auto", False), (THREE, "-1", "auto", False), (THREE, None, "cpu", False),
    ("echo No devices were found; exit 6", None, "auto", False), ("exit 127", "0", "auto", False),
], ids=["all", "some", "named", "none", "minus one", "CPU", "broken", "absent"])
@pytest.mark.parametrize("command", [[], ["check"]], ids=["train", "check"])
def test_gpus_that_pytorch_cannot_use_stop_the_run(stand_in, nvidia_smi, visible, device, refused,
                                                   command):
    """An old driver, or a build for the CPU: a rented machine should not train the laptop's GPT."""
    stand_in.tool("nvidia-smi", nvidia_smi)
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    process = stand_in.run(*command, SHOW=SHOW.replace("device=auto", f"device={device}"),
                           **variables)
    if refused:
        assert process.returncode == 2 and process.stdout == ""
        assert re.fullmatch("error: there are GPUs here but this PyTorch can use none: "
                            ".*--device=cpu\n", process.stderr)
    else:
        assert (process.returncode, process.stderr) == (0, "")


def test_gpus_that_pytorch_can_use_need_no_driver_tool(stand_in):
    stand_in.tool("nvidia-smi", "touch \"$CALLS.nvidia\"")
    stand_in.launched(SHOW=SHOW.replace("gpus=0", "gpus=1"))
    assert not Path(f"{stand_in.calls_file}.nvidia").exists()


@pytest.mark.parametrize("tools, threads", [
    ({"nproc": "echo 6", "getconf": "exit 9"}, 3),
    ({"getconf": '[ "$1" = _NPROCESSORS_ONLN ] && echo 5'}, 3),
    ({"nproc": "echo 1"}, 1)], ids=["Linux", "macOS", "one core"])
def test_ranks_share_the_cores(stand_in, tools, threads):
    for name in ("bash", "env", "dirname", "sed", "cut"):  # all that run.sh needs
        (stand_in.tools / name).symlink_to(shutil.which(name))
    for name, body in tools.items():
        stand_in.tool(name, body)
    assert f"threads={threads}" in stand_in.launched(NPROC="2", PATH=str(stand_in.tools))


def test_the_tests_get_the_options_of_pytest(stand_in):
    stand_in.write("data/vocabulary.py", "raise SystemExit(2)")
    process = stand_in.run("test", "--slow", "-k", "a or b")
    assert process.returncode == 0
    assert process.stderr == "the tests of GPT-2's tokens will be skipped\n"
    assert process.stdout.splitlines()[:-1] == [
        "-m", "pytest", "tests", "-n", "auto", "--dist=loadfile", "--no-loadscope-reorder",
        "--slow", "-k", "a or b"]
    files = " ".join(f"-r {folder}/requirements.txt" for folder in ("tests", "data", "records"))
    assert stand_in.calls()[:2] == [f"{SET_UP} {files}", "data/vocabulary.py"]
    assert len(stand_in.calls()) == 3


# Data

def test_what_the_trainer_asks_for_is_fetched_before_it_starts(stand_in):
    assert stand_in.launched(SHOW=SHOW.replace("fetch=", "fetch=enwik8")) == [
        "data/enwik8.py", "train_gpt.py"]
    assert stand_in.launched(SHOW=SHOW.replace("fetch=", "fetch=fineweb 9")) == [
        "data/vocabulary.py", "data/fineweb.py 9", "train_gpt.py"]
    assert f"{SET_UP} -r data/requirements.txt" in stand_in.calls()
    assert stand_in.launched("check", SHOW=SHOW.replace("fetch=", "fetch=enwik8")) == [
        "tests/commands/check.py"]


def test_only_the_vocabulary_may_fail(stand_in):
    show = SHOW.replace("fetch=", "fetch=fineweb 9")
    stand_in.write("data/vocabulary.py", "raise SystemExit(2)")
    process = stand_in.run(SHOW=show)
    assert process.returncode == 0 and process.stdout == "data/fineweb.py 9\ntrain_gpt.py\n"
    assert process.stderr == "the sample at the end will be left out\n"
    stand_in.write("data/fineweb.py", "raise SystemExit(3)")
    process = stand_in.run(SHOW=show)
    assert (process.returncode, process.stdout) == (3, "")


# Packages

def make_package(folder: Path, name: str) -> None:
    """A wheel with nothing in it but its name."""
    information = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\n"
                                                  "Version: 1.0\n")
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\n"
                                               "Root-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", f"{information}/METADATA,,\n")


def test_packages_are_installed_into_a_virtual_environment(stand_in, tmp_path):
    """With a real pip, whose packages come from a folder, in an environment that has no pip yet.

    As if it had been interrupted, or made by a tool that leaves pip out.
    """
    make_package(tmp_path, "tiny_package")
    stand_in.write("requirements.txt", "tiny-package==1.0  # a comment\n\n"
                                       'absent==2.0 ; sys_platform == "other"\n')
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", stand_in.repo / ".venv"],
                   check=True)
    variables = {"PYTHON": "/no/python", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    process = stand_in.run(**variables)
    assert process.returncode == 0, process.stderr
    assert process.stderr == "installing packages into .venv …\n"
    process = stand_in.run(**variables)  # now all is there, also by the marker
    assert (process.returncode, process.stderr) == (0, "")


def test_the_virtual_environment_is_made_where_packages_are_missing(stand_in):
    process = stand_in.run(MISSING="1")
    assert process.returncode == 1 and process.stdout == ""  # pip itself says why
    assert process.stderr == "installing packages into .venv …\n"
    assert [call.partition("(")[0] for call in stand_in.calls()] == [
        SET_UP, "-c import sys; sys.exit", "-m venv .venv",
        "-m pip install --quiet --disable-pip-version-check -r requirements.txt"]


def test_an_old_or_absent_python_is_refused(stand_in):
    stand_in.tool("python", "exit 1")
    for python in ("python", "no-such-python"):
        process = stand_in.run(PYTHON=str(stand_in.tools / python))
        assert process.returncode == 2
        assert re.search(f"^error: .*/{python} is not Python 3.11 or later; set PYTHON to one.*\n$",
                         process.stderr, re.M)


# Several machines

def test_slurm_variables_give_nodes_rank_address_and_port(stand_in):
    stand_in.tool("scontrol", '[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"')
    job = dict(SLURM_JOB_ID="40000007", SLURM_NNODES="4", SLURM_NODEID="0",
               SLURM_JOB_NODELIST="n[0-3]", SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="2",
               SLURM_STEP_NUM_NODES="2", SLURM_STEP_NODELIST="n[1-2]")
    words = stand_in.launched("--num_steps=1", NPROC="4", **job)
    for expected in ("--nnodes=2", "--nproc_per_node=4", "--rdzv_backend=c10d",
                     "--rdzv_endpoint=n1:30507", "--rdzv_conf=is_host=1,join_timeout=3600",
                     "--shutdown-timeout=120"):
        assert expected in words, (expected, words)
    assert words[-3:-1] == ["train_gpt.py", "--num_steps=1"]
    words = stand_in.launched(MASTER_ADDR="other", MASTER_PORT="1234", **job)
    assert "--rdzv_endpoint=other:1234" in words


@pytest.mark.parametrize("nodes, tasks, refused", [
    ("2", None, True), ("2", "16", True), ("1", "8", True), ("1", None, False), ("1", "1", False)])
def test_under_slurm_one_task_per_node_is_needed(stand_in, nodes, tasks, refused):
    """No number of tasks: inside sbatch or salloc, without srun."""
    job = dict(SLURM_JOB_ID="7", SLURM_NNODES=nodes, SLURM_NODEID="0", SLURM_NTASKS="16",
               SLURM_NTASKS_PER_NODE="8")
    if tasks:
        job |= dict(SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS=tasks, SLURM_STEP_NUM_NODES=nodes)
    process = stand_in.run(**job)
    if not refused:
        assert (process.returncode, process.stdout) == (0, "train_gpt.py\n")
        return
    assert process.returncode == 2 and stand_in.calls() == []
    assert process.stderr == (
        f"error: SLURM must start this once on each of {nodes} nodes: srun --ntasks-per-node=1 "
        "./run.sh (or, on this node alone: NNODES=1 ./run.sh)\n")
    assert stand_in.launched(NNODES="1", **job) == ["train_gpt.py"]


@pytest.mark.parametrize("variables, expected", [
    ({"NPROC": "abc"}, "NPROC=abc: expected a number"), ({"NPROC": "-1"}, "NPROC=-1: "),
    ({"NPROC": "08"}, "NPROC=08: "), ({"NPROC": "1.5"}, "NPROC=1.5: "),
    ({"NPROC": "99999999999999999999"}, "NPROC=9"),
    ({"NPROC": "a[$(touch hacked)]"}, "NPROC=a["), ({"MAX_RESTARTS": "x"}, "MAX_RESTARTS=x: "),
    ({"NNODES": "x"}, "NNODES=x: "), ({"MASTER_PORT": "x"}, "MASTER_PORT=x: "),
    ({"NNODES": "2"}, "NNODES=2 needs MASTER_ADDR"),
    ({"NNODES": "2", "MASTER_ADDR": "a"}, "NNODES=2 needs NODE_RANK, from 0 to 1"),
    ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NNODES=2 needs NODE_RANK"),
    ({"NNODES": "2", "MAX_RESTARTS": "1"}, "MAX_RESTARTS on 2 machines needs --run_id=")], ids=str)
@pytest.mark.parametrize("command", [[], ["check"]], ids=["train", "check"])
def test_wrong_variables_are_refused_before_any_set_up(stand_in, command, variables, expected):
    process = stand_in.run(*command, **variables)
    assert process.returncode == 2 and process.stdout == ""
    assert process.stderr.startswith(f"error: {expected}"), process.stderr
    assert len(process.stderr.splitlines()) == 1 and stand_in.calls() == []


def test_other_machines_set_up_and_fetch_after_the_first(stand_in):
    """Where they share a file system they find it done."""
    port = free_port()
    process = stand_in.start(SHOW=SHOW.replace("fetch=", "fetch=enwik8"), NNODES="2",
                             NODE_RANK="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    assert process.stderr.readline() == (
        f"NNODES=2, NODE_RANK=1: the machines meet at 127.0.0.1:{port}\n")
    time.sleep(0.5)
    assert stand_in.calls() == []
    with socket.create_server(("127.0.0.1", port)):  # as torchrun of the first machine
        out, err = process.communicate(timeout=900)
    assert (process.returncode, err) == (0, "")
    assert out.startswith("data/enwik8.py\n") and "is_host=0,join_timeout=3600\n" in out


def test_an_error_of_torchrun_itself_has_no_traceback(stand_in):
    with socket.create_server(("", 0)) as server:  # as of another run
        port = str(server.getsockname()[1])
        process = stand_in.run(PYTHON=sys.executable, NNODES="2", NODE_RANK="0",
                               MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert process.returncode == 1 and "Traceback" not in process.stderr
    assert re.search(f"port: {port}, .* address already in use", process.stderr)


@pytest.mark.slow
def test_a_first_machine_that_is_lost_is_named(stand_in):
    """With the real torchrun."""
    stand_in.write("train_gpt.py", TRAINER + f"print('started', flush=True)\n{WAIT}")
    machine = dict(PYTHON=sys.executable, NNODES="2", MASTER_ADDR="127.0.0.1",
                   MASTER_PORT=str(free_port()))
    first = stand_in.start(NODE_RANK="0", **machine)
    second = stand_in.start(NODE_RANK="1", **machine)
    assert first.stdout.readline() == second.stdout.readline() == "started\n"
    os.killpg(first.pid, signal.SIGKILL)
    out, err = second.communicate(timeout=900)
    first.communicate(timeout=900)
    assert second.returncode == 1 and "Traceback" not in err and "frame #" not in err
    assert "Did the remote server shutdown or crash?" in err


def test_a_run_that_may_restart_has_a_name(stand_in):
    """By which its ranks find it; the user's own comes later and wins, and so does --resume."""
    def options(*arguments: str) -> list[str]:
        words = stand_in.launched(*arguments, MAX_RESTARTS="1")
        return words[words.index("train_gpt.py") + 1:-1]
    name, steps = options("--num_steps=3")
    assert re.fullmatch(r"--run_id=\d{4}-\d\d-\d\d_\d{6}_\d+", name) and steps == "--num_steps=3"
    assert options("--run_id=mine")[-1] == "--run_id=mine"
    assert options("--resume=auto") == ["--resume=auto"]
    assert stand_in.launched("--num_steps=3") == ["train_gpt.py --num_steps=3"]


# Ranks that fail, with the real torchrun

def ranks(stand_in: StandIn, body: str, **variables) -> tuple[int, str, list[str]]:
    """(exit code, what the ranks printed, the lines of errors) of two ranks that run this."""
    stand_in.write("train_gpt.py", f"""{TRAINER}
import signal
rank = int(os.environ["RANK"])
restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
{body}
{WAIT}""")
    process = stand_in.run(PYTHON=sys.executable, NPROC="2", **variables)
    return process.returncode, process.stdout, process.stderr.splitlines()


def test_the_exit_code_of_a_mistake_is_2_and_its_sentence_stands_alone(stand_in):
    assert ranks(stand_in, """
if rank == 1:
    print("error: the sentence", file=sys.stderr, flush=True)
    sys.exit(2)
""") == (2, "", ["error: the sentence"])


def test_a_rank_that_was_killed_is_named(stand_in):
    assert ranks(stand_in, "if rank == 1: os.kill(os.getpid(), signal.SIGSEGV)") == (
        128 + signal.SIGSEGV, "", ["error: rank 1 was killed by SIGSEGV"])


def test_nohup_keeps_several_ranks_alive(stand_in):
    """The terminal's SIGHUP is ignored, as nohup wants it, by the launcher too."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited by what is started
    try:
        code, out, errors = ranks(stand_in, """
import time
if rank == 0:
    os.kill(os.getppid(), signal.SIGHUP)
time.sleep(2)
sys.stdout.write("finished\\n")  # at once: the ranks share the pipe
sys.exit()
""")
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert (code, out, errors) == (0, "finished\n" * 2, [])


def test_ranks_that_were_killed_are_restarted_and_those_that_were_told_to_stop_are_not(stand_in):
    code, out, errors = ranks(stand_in, """
if restarted:
    print("restarted", flush=True)
    sys.exit(128 + signal.SIGUSR1)
elif rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
""", MAX_RESTARTS="3")
    assert code == 128 + signal.SIGUSR1 and 1 <= out.count("restarted") <= 2
    assert errors == ["error: rank 1 was killed by SIGKILL"]
