#!/usr/bin/env bash
# The only launcher: ./run.sh [--name=value …] sets up, fetches the data and trains on what is here.
#   ./run.sh test [pytest options]     sets up and runs the tests
#   ./run.sh check [--name=value …]    would this run work? says so in seconds, without training
#   ./run.sh records COMMAND …         verifies, compares, replays and plots the logs of runs
#   ./run.sh bench                     the benchmarks, as ratios
#   ./run.sh bench gpu [--name=value …]    a step on a GPU, modelled by its bytes and FLOPs
#   ./run.sh faults [KILLS]            kills a run many times at random moments: is anything lost?
# Variables: NPROC (processes on this machine; default: one per GPU, or 1), PYTHON (interpreter);
# several machines: NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT (29500), or SLURM's own;
# MAX_RESTARTS (how often failed ranks restart from the last checkpoint; default: never).
set -euo pipefail  # all of this also runs in bash 3.2, which is macOS's
cd "$(dirname "${BASH_SOURCE[0]}")"
# glibc: keep the memory of large tensors instead of returning it each time (8 % of a CPU step)
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-1000000000}"
export MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-2000000000}"

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 2; }
setting() { sed -n "s/^$1=//p" <<<"$settings" | cut -f1; }  # a line is name=value<TAB># comment
answers() { (: <"/dev/tcp/$1/$2") 2>/dev/null; }  # does anything listen at this host and port?
count_cores() {  # Linux, macOS, others
    { nproc || sysctl -n hw.ncpu || getconf _NPROCESSORS_ONLN || echo 1; } 2>/dev/null
}

# check_number NAME LOWEST HIGHEST: the variable, if it is set, must be a whole number in the range.
check_number() {
    local value="${!1:-$2}"
    [[ "$value" =~ ^(0|[1-9][0-9]{0,8})$ ]] && [ "$value" -ge "$2" ] && [ "$value" -le "$3" ] \
        || die "$1=$value: expected a whole number from $2 to $3; correct it or unset it"
}

# Sets nodes and, where there are several, node_rank, address and port.
find_machines() {
    local job="${SLURM_JOB_ID:-0}" tasks="${SLURM_STEP_NUM_TASKS:-1}"
    check_number NPROC 1 1024
    check_number MAX_RESTARTS 0 999999999
    check_number NNODES 1 99999
    check_number MASTER_PORT 1 65535
    nodes="${NNODES:-${SLURM_STEP_NUM_NODES:-${SLURM_NNODES:-1}}}"
    check_number NODE_RANK 0 $((nodes - 1))
    if [ "$job" -gt 0 ] && [ -z "${NNODES:-}" ] && [ "$tasks" -ne "$nodes" ]; then
        [ "${SLURM_PROCID:-0}" -eq 0 ] || exit 2  # the first task says why
        die "SLURM gave this job $nodes nodes and started ./run.sh $tasks times, expected once on" \
            "each: srun --nodes=$nodes --ntasks=$nodes --ntasks-per-node=1 ./run.sh" \
            "(or, to train on this node alone: NNODES=1 ./run.sh)"
    fi
    [ "$nodes" -gt 1 ] || return 0
    address="${MASTER_ADDR:-}"
    if [ -z "$address" ] && [ "$job" -gt 0 ]; then  # no `| head -n 1`: a closed pipe kills scontrol
        address="$(scontrol show hostnames "${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-}}")"
        address="${address%%$'\n'*}"
    fi
    [ -n "$address" ] || die "NNODES=$nodes needs MASTER_ADDR, the address of the first machine"
    node_rank="${NODE_RANK:-${SLURM_NODEID:-}}"
    [ -n "$node_rank" ] || die "NNODES=$nodes needs NODE_RANK, which is 0 on the first machine"
    port="${MASTER_PORT:-$((job > 0 ? 10000 + job % 20000 : 29500))}"  # jobs on one node must differ
}

# alone_in FOLDER COMMAND …: while no other ./run.sh, on a machine that shares the folder, fills it.
alone_in() {
    local folder="$1" lock='import fcntl, sys; fcntl.flock(9, fcntl.LOCK_EX | int(sys.argv[1]))'
    shift
    mkdir -p "$folder"
    {   # the lock belongs to the open file: it ends with the braces, or with this process
        if ! "$python" -c "$lock" 4 2>/dev/null; then  # 4: LOCK_NB
            say "waiting for another ./run.sh that fills $folder …"
            "$python" -c "$lock" 0 2>/dev/null \
                || say "warning: $folder cannot be locked; start one machine before the others"
        fi
        "$@"
    } 9>>"$folder/.run_sh.lock"
}

# pip knows the markers and, with no index and no configuration, only what is installed.
has_packages() {
    PIP_CONFIG_FILE=/dev/null "$python" -m pip install --isolated --no-index --no-deps --dry-run \
        "$@" >/dev/null 2>&1
}

install_packages() {
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        say "making .venv …"
        "$python" -m venv .venv || die "$python cannot make a virtual environment; install its venv"
    fi
    python=.venv/bin/python
    has_packages "$@" && return  # another ./run.sh has installed them meanwhile
    say "installing the packages of ${*#--requirement=} …"
    "$python" -m pip install --quiet --disable-pip-version-check "$@" \
        || die "the packages could not be installed; see pip's message above, then run this again"
}

# Sets python to an interpreter that has the packages of the given requirements files.
set_up() {
    python="${PYTHON:-python3}"
    [ ! -x .venv/bin/python ] || python=.venv/bin/python
    command -v "$python" >/dev/null || die "there is no $python; install Python 3.11, or set PYTHON"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "$python is older than" \
        "Python 3.11; set PYTHON to a later one, and remove .venv if it is there"
    set -- "${@/#/--requirement=}"
    has_packages "$@" || alone_in .venv install_packages "$@"
}

# What train_gpt.py makes of the options; it says itself what is wrong with them.
read_settings() {
    settings="$("$python" train_gpt.py --show "$@")" || exit $?
    gpus="$(setting gpus)"
    [[ "$gpus" =~ ^[0-9]+$ && "$settings" == *$'\n'fetch=* ]] \
        || die "train_gpt.py --show printed no gpus= or fetch=; run.sh needs the newer train_gpt.py"
    [ "$gpus" -eq 0 ] && [ "$(setting device)" != cpu ] || return 0
    case "${CUDA_VISIBLE_DEVICES-all}" in "" | -*) return 0 ;; esac
    [[ "$(nvidia-smi -L 2>/dev/null || true)" != GPU* ]] \
        || die "there are GPUs here and this PyTorch can use none: a build for CUDA 13 needs" \
            "NVIDIA driver 580 or later; update it, or put a build for an older CUDA into .venv," \
            "or give --device=cpu to train without GPUs"
}

fetch_data() {
    local wanted
    wanted="$(setting fetch)"
    case "$wanted" in
        enwik8) alone_in data/enwik8 "$python" data/enwik8.py ;;
        "fineweb "*)
            set_up requirements.txt data/requirements.txt
            "$python" data/vocabulary.py || say "the sample at the end will be left out"
            alone_in data/fineweb10B "$python" data/fineweb.py "${wanted#fineweb }" ;;
    esac
}

# torchrun without its log lines: ranks report their own errors, and one that was killed is named.
IFS= read -r -d '' TORCHRUN <<'PY' || true
import functools, logging, os, sys
quiet = "LOGLEVEL" not in os.environ and "TORCH_CPP_LOG_LEVEL" not in os.environ
if quiet:
    logging.disable()
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import main

if quiet:
    del os.environ["TORCH_CPP_LOG_LEVEL"]  # the ranks keep their warnings
say = functools.partial(print, file=sys.stderr, flush=True)

def monitor(agent, group, monitor=LocalElasticAgent._monitor_workers):
    result = monitor(agent, group)
    if result.failures:
        rank, failure = ChildFailedError("", result.failures).get_first_failure()
        code = failure.exitcode
        if code < 0:
            hint = "; if nobody did that, memory ran out" if code == -9 else ""
            say(f"error: rank {rank} was killed by {failure.signal_name()}{hint}")
        elif 2 < code < 128:
            say(f"error: rank {rank} ended with exit code {code}")
        if code > 128:  # a signal told the ranks to save and stop
            agent._remaining_restarts = 0
        elif agent._remaining_restarts:
            say(f"restarting all ranks, for {agent._remaining_restarts} more times at most")
    return result

LocalElasticAgent._monitor_workers = monitor
try:
    main(sys.argv[1:])
except ChildFailedError as error:
    code = error.get_first_failure()[1].exitcode
    sys.exit(code if code > 0 else 128 - code)
except SignalException as error:  # the ranks got it too, and have saved
    sys.exit(128 + error.sigval)
except (RendezvousError, DistError):
    say("error: the first machine does not answer any more, or not all machines came in an hour;"
        " look at the messages of the others, then start ./run.sh on all of them again")
    sys.exit(1)
PY

# launch SCRIPT OPTION …: in all processes of this machine, together with the other machines.
launch() {
    local processes="${NPROC:-$gpus}" cores
    [ "$processes" -gt 0 ] || processes=1
    if [ "$nodes" -eq 1 ] && [ "$processes" -eq 1 ] && [ "${MAX_RESTARTS:-0}" -eq 0 ]; then
        exec "$python" "$@"
    fi
    if [ "$processes" -gt 1 ]; then
        cores="$(count_cores)"
        export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(( (cores + processes - 1) / processes ))}"
    fi
    # a signal gives the ranks 120 s to finish the step and save
    set -- --nproc_per_node="$processes" --max-restarts="${MAX_RESTARTS:-0}" \
        --shutdown-timeout=120 --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 "$@"
    [ "$nodes" -gt 1 ] || exec "$python" -c "$TORCHRUN" --standalone "$@"
    if [ "$node_rank" -eq 0 ]; then
        ! answers localhost "$port" || die "MASTER_PORT=$port is in use on this machine, perhaps" \
            "by another run; set MASTER_PORT to another port, the same on all machines"
        say "waiting for $((nodes - 1)) of $nodes machines at $address:$port"
    elif ! answers "$address" "$port"; then
        say "waiting for the first of $nodes machines at $address:$port"
        until answers "$address" "$port"; do sleep 1; done
    fi
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # one kept over restarts has dead ranks' addresses
    exec "$python" -c "$TORCHRUN" --nnodes="$nodes" --node_rank="$node_rank" --rdzv_backend=c10d \
        --rdzv_id="${SLURM_JOB_ID:-train_gpt}" --rdzv_endpoint="$address:$port" \
        --rdzv_conf="is_host=$((node_rank == 0)),join_timeout=3600" "$@"
}

command="${1:-}"
case "$command" in
    test)
        shift
        set_up requirements.txt tests/requirements.txt data/requirements.txt records/requirements.txt
        # the tests use no network
        "$python" data/vocabulary.py || say "the tests of GPT-2's tokens will be skipped"
        cores="$(count_cores)"  # a process more: many tests wait for other processes
        exec "$python" -m pytest tests --numprocesses="$((cores < 4 ? cores + 1 : 4))" \
            --dist=loadfile --no-loadscope-reorder "$@" ;;
    bench | faults)
        shift
        set_up requirements.txt tests/requirements.txt data/requirements.txt
        exec "$python" "tests/commands/$command.py" "$@" ;;
    records)
        shift
        [ -f records/speedrun.py ] || die "records/speedrun.py is missing from this checkout"
        set_up requirements.txt records/requirements.txt
        exec "$python" records/speedrun.py "$@" ;;
    check)
        shift
        find_machines; set_up requirements.txt; read_settings "$@"
        launch tests/commands/check.py "$@" ;;
    -h | --help | help)
        sed -n '2,/^[^#]/s/^# \{0,1\}//p' run.sh
        set_up requirements.txt; exec "$python" train_gpt.py --help ;;
    "" | --*)
        find_machines; set_up requirements.txt; read_settings "$@"; fetch_data
        launch train_gpt.py "$@" ;;
    *) die "$1: no such command; there are test, check, records, bench, faults, or none to train" ;;
esac
