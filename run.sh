#!/usr/bin/env bash
# The only launcher. ./run.sh [--name=value …] sets up, fetches the data and trains on whatever hardware is here.
#   ./run.sh test [pytest options]     sets up and runs the tests
#   ./run.sh check [--name=value …]    would this run work? says so in seconds, without training
#   ./run.sh bench                     the benchmarks, as ratios
#   ./run.sh faults [KILLS]            kills a run many times at random moments: is anything lost?
# Variables: NPROC (processes on this machine; default: one per GPU, or 1), PYTHON (interpreter to start from);
# several machines: NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, or SLURM's own;
# MAX_RESTARTS (how often a group that lost a process goes on from its last checkpoint; default: never).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"  # fewer holes in GPU memory
# glibc: keep the memory of large tensors instead of handing it back after every operation (8 % of a CPU step)
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-1000000000}" MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-2000000000}"

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 2; }

# Does this interpreter have exactly what a requirements file pins? (reads metadata only: nothing is imported)
has_packages() {
    "$1" - "$2" 2>/dev/null <<'PY'
import sys
from importlib.metadata import version
for line in open(sys.argv[1]):
    if line := line.split("#")[0].split(";")[0].strip():
        name, pinned = line.split("==")
        if version(name).split("+")[0] != pinned:
            sys.exit(1)
PY
}

# Sets $python to an interpreter that has the packages of the given requirements files; makes .venv if need be.
set_up() {
    local base="${PYTHON:-python3}" file missing=()
    python="$base"
    [ -x .venv/bin/python ] && python=.venv/bin/python
    command -v "$python" >/dev/null || die "there is no $python; install Python 3.11 or later, or set PYTHON"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "$python is too old; set PYTHON to 3.11 or later"
    for file in "$@"; do has_packages "$python" "$file" || missing+=(-r "$file"); done
    [ ${#missing[@]} -eq 0 ] && return
    if [ "$python" != .venv/bin/python ]; then
        say "making .venv …"
        "$base" -m venv .venv || die "$base cannot make a virtual environment; install its venv package"
        python=.venv/bin/python
        missing=(); for file in "$@"; do missing+=(-r "$file"); done
    fi
    say "installing ${missing[*]//-r/} …"
    "$python" -m pip install --quiet --disable-pip-version-check "${missing[@]}" \
        || die "the packages could not be installed; look at pip's message above, then run this again"
}

# The GPUs that a run with these options would see: all, or those that CUDA_VISIBLE_DEVICES names; on the CPU none.
count_gpus() {
    local gpus
    gpus="$({ nvidia-smi -L 2>/dev/null || true; } | grep '^GPU' || true)"
    if [ -n "$gpus" ] && [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        gpus="$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES")"
    fi
    [[ " $* " == *" --device=cpu "* ]] && gpus=""
    grep -c '^[^-]' <<<"$gpus" || true  # prints 0 and fails where there is none
}

# GPUs that PyTorch cannot use would mean the laptop's training on the CPU, unasked for: say why instead.
need_gpus() {
    [ "$(count_gpus "$@")" -eq 0 ] && return
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
        || die "there are GPUs here and this PyTorch can use none: a build for CUDA 13 needs NVIDIA driver 580 or later;" \
               "update it, or put a build for an older CUDA into .venv, or give --device=cpu to train without GPUs"
}

# torchrun, less its page of traceback: the ranks have said what was wrong.
torchrun() {
    export LOGLEVEL="${LOGLEVEL:-ERROR}"
    exec "$python" -c 'import sys
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main
try:
    main(sys.argv[1:])
except ChildFailedError as error:
    sys.exit(max(1, error.get_first_failure()[1].exitcode))
except SignalException as error:  # handed on to the ranks, which have saved
    sys.exit(128 + error.sigval)' --max-restarts="${MAX_RESTARTS:-0}" \
        --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout=120 "$@"  # s for a step and its checkpoint
}

# Runs a script of ours on every process of this machine, and on the other machines where there are several.
launch() {
    local script="$1" processes="${NPROC:-$(count_gpus "$@")}"; shift
    local nodes="${NNODES:-${SLURM_NNODES:-1}}" node_rank="${NODE_RANK:-${SLURM_NODEID:-0}}"
    [ "$processes" -gt 0 ] || processes=1
    [ "$processes" -eq 1 ] || export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(( ($(nproc) + processes - 1) / processes ))}"
    if [ "$nodes" -gt 1 ]; then
        local address="${MASTER_ADDR:-}"
        if [ -z "$address" ] && [ -n "${SLURM_JOB_NODELIST:-}" ]; then
            address="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
            address="${address%%$'\n'*}"  # the first; through `head`, scontrol could die of the closed pipe, and we with it
        fi
        [ -n "$address" ] || die "NNODES=$nodes needs MASTER_ADDR, the address of the first machine"
        export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # a store kept over restarts has the addresses of dead ranks
        torchrun --nnodes="$nodes" --node_rank="$node_rank" --nproc_per_node="$processes" --rdzv_backend=c10d \
            --rdzv_id="${SLURM_JOB_ID:-train_gpt}" --rdzv_endpoint="$address:${MASTER_PORT:-29500}" "$script" "$@"
    elif [ "$processes" -gt 1 ] || [ "${MAX_RESTARTS:-0}" -gt 0 ]; then
        torchrun --standalone --nproc_per_node="$processes" "$script" "$@"
    else
        exec "$python" "$script" "$@"
    fi
}

# Fetches the data of the chosen preset if it is not there; any other data the user brings.
prepare_data() {
    local settings train_files
    settings="$("$python" train_gpt.py --show "$@")" || exit $?  # says what is wrong with the options, once
    setting() { sed -n "s/^$1=//p" <<<"$settings"; }
    train_files="$(setting train_files)"
    compgen -G "$train_files" >/dev/null && compgen -G "$(setting val_files)" >/dev/null && return
    case "$train_files" in
        data/enwik8/*) "$python" data/enwik8.py ;;
        data/fineweb10B/*)
            set_up requirements.txt data/requirements.txt
            "$python" data/vocabulary.py || say "the sample at the end will be left out"
            "$python" data/fineweb.py "$("$python" -c 'import sys, train_gpt as t  # as many shards as the run needs
print(t.fetch_command(t.parse_command_line(sys.argv[1:])).split()[-1])' "$@")" ;;
    esac
}

case "${1:-}" in
    test)
        shift; set_up requirements.txt tests/requirements.txt data/requirements.txt
        "$python" data/vocabulary.py || say "the tests of GPT-2's tokens will be skipped"  # the tests use no network
        exec "$python" -m pytest tests --numprocesses="$(( $(nproc) < 4 ? $(nproc) : 4 ))" --dist=loadfile \
            --no-loadscope-reorder "$@" ;;
    bench)
        shift; set_up requirements.txt tests/requirements.txt data/requirements.txt
        exec "$python" tests/commands/bench.py "$@" ;;
    faults)
        shift; set_up requirements.txt tests/requirements.txt
        exec "$python" tests/commands/faults.py "$@" ;;
    check)
        shift; set_up requirements.txt; need_gpus "$@"
        "$python" train_gpt.py --show "$@" >/dev/null
        launch tests/commands/check.py "$@" ;;
    -h|--help|help)
        set_up requirements.txt; sed -n '2,10s/^# \{0,1\}//p' "$0"; exec "$python" train_gpt.py --help ;;
    ""|--*)
        set_up requirements.txt; need_gpus "$@"; prepare_data "$@"; launch train_gpt.py "$@" ;;
    *) die "$1: no such command; there are ./run.sh [--name=value …], test, check, bench, faults" ;;
esac
