#!/usr/bin/env bash
# The only launcher: ./run.sh [--name=value …] sets up, fetches the data and trains on what is here.
#   ./run.sh test [pytest options]     sets up and runs the tests
#   ./run.sh check [--name=value …]    would this run work? says so in seconds, without training
#   ./run.sh records COMMAND …         verifies, compares, replays and plots the logs of runs
#   ./run.sh bench [gpu …]             the benchmarks, as ratios; a step on a GPU, modelled
#   ./run.sh faults [KILLS]            kills a run many times at random moments: is anything lost?
# Variables: NPROC (processes on this machine; default: one per GPU, or 1), PYTHON (interpreter);
# several machines: NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT (29500), or SLURM's own;
# MAX_RESTARTS (how often failed ranks restart from the last checkpoint; default: never).
set -euo pipefail  # and nothing that bash 3.2 does not know, which is macOS's
cd "$(dirname "${BASH_SOURCE[0]}")"
# glibc: keep the memory of large tensors instead of returning it each time (8 % of a CPU step)
export MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TRIM_THRESHOLD_=2000000000

die() { echo "error: $*" >&2; exit 2; }

# set_up [-r FILE …]: sets python to one with the packages of requirements.txt and of these files.
set_up() {
    python="${PYTHON:-python3}"
    [ ! -x .venv/bin/python ] || python=.venv/bin/python
    set -- -r requirements.txt "$@"
    # without an index and configuration, pip finds only what is installed
    if PIP_CONFIG_FILE=/dev/null "$python" -m pip install --isolated --no-index --no-deps \
        --dry-run "$@" >/dev/null 2>&1; then return; fi
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
        || die "$python is not Python 3.11 or later; set PYTHON to one, and remove any .venv"
    echo "installing packages into .venv …" >&2
    "$python" -m venv .venv
    python=.venv/bin/python
    "$python" -m pip install --quiet --disable-pip-version-check "$@"
}

command="${1:-}"
[[ "$command" != [a-z]* ]] || shift
case "$command" in
    test)
        set_up -r tests/requirements.txt -r data/requirements.txt -r records/requirements.txt
        "$python" data/vocabulary.py || echo "the tests of GPT-2's tokens will be skipped" >&2
        exec "$python" -m pytest tests -n auto --dist=loadfile --no-loadscope-reorder "$@" ;;
    bench | faults)
        set_up -r tests/requirements.txt -r data/requirements.txt
        exec "$python" "tests/commands/$command.py" "$@" ;;
    records)
        set_up -r records/requirements.txt
        exec "$python" records/speedrun.py "$@" ;;
    -h | --help | help)
        sed -n '2,/^[^#]/s/^# \{0,1\}//p' run.sh
        set_up
        exec "$python" train_gpt.py --help ;;
    check) script=tests/commands/check.py ;;
    "" | --*) script=train_gpt.py ;;
    *) die "$command: no such command; ./run.sh help lists them" ;;
esac

# training, or the check of it
for name in NPROC MAX_RESTARTS NNODES NODE_RANK MASTER_PORT; do
    [[ "${!name:-0}" =~ ^(0|[1-9][0-9]{0,4})$ ]] || die "$name=${!name}: expected a number"
done
nodes="${NNODES:-${SLURM_STEP_NUM_NODES:-${SLURM_NNODES:-1}}}"
[ -n "${NNODES:-}" ] || [ "${SLURM_STEP_NUM_TASKS:-1}" -eq "$nodes" ] \
    || die "SLURM must start this once on each of $nodes nodes: srun --ntasks-per-node=1 ./run.sh" \
        "(or, on this node alone: NNODES=1 ./run.sh)"
# ranks that restart find their run by its name
if [ "${MAX_RESTARTS:-0}" -gt 0 ] && [[ "$*" != *--run_id* ]]; then
    [ "$nodes" -eq 1 ] || die "MAX_RESTARTS on $nodes machines needs --run_id=NAME"
    [[ "$*" == *--resume* ]] || set -- --run_id="$(date +%Y-%m-%d_%H%M%S)_$$" "$@"
fi

if [ "$nodes" -gt 1 ]; then
    address="${MASTER_ADDR:-$(scontrol show hostnames "${SLURM_STEP_NODELIST:-}" 2>/dev/null)}" \
        || die "NNODES=$nodes needs MASTER_ADDR, the address of the first machine"
    address="${address%%$'\n'*}"  # SLURM lists them all
    port="${MASTER_PORT:-$((29500 + ${SLURM_JOB_ID:-0} % 3000))}"  # jobs on one node must differ
    node_rank="${NODE_RANK:-${SLURM_NODEID:-$nodes}}"
    [ "$node_rank" -lt "$nodes" ] || die "NNODES=$nodes needs NODE_RANK, from 0 to $((nodes - 1))"
    echo "NNODES=$nodes, NODE_RANK=$node_rank: the machines meet at $address:$port" >&2
    # the first one listens once it has set up and fetched, for all if they share a file system
    until [ "$node_rank" -eq 0 ] || (: <"/dev/tcp/$address/$port") 2>/dev/null; do
        [ "$SECONDS" -lt 3600 ] || die "nothing listens at $address:$port after an hour"
        sleep 1
    done
fi

set_up
settings="$("$python" train_gpt.py --show "$@")"  # lines of name=value<TAB># origin
setting() { sed -n "s/^$1=//p" <<<"$settings" | cut -f1; }
visible="${CUDA_VISIBLE_DEVICES-all}"  # empty or -1 hides them on purpose
if [ "$(setting gpus)" -eq 0 ] && [ "$(setting device)" != cpu ] \
    && [[ "$visible" == [0-9A-Za-z]* ]] && [[ "$(nvidia-smi -L 2>/dev/null)" == GPU* ]]; then
    die "there are GPUs here but this PyTorch can use none: update the NVIDIA driver to 580 or" \
        "later, put a build for an older CUDA into .venv, or train without GPUs: --device=cpu"
fi
fetch=""
[ "$command" = check ] || fetch="$(setting fetch)"
case "$fetch" in
    enwik8) "$python" data/enwik8.py ;;
    fineweb*)
        set_up -r data/requirements.txt
        "$python" data/vocabulary.py || echo "the sample at the end will be left out" >&2
        "$python" data/fineweb.py "${fetch#fineweb }" ;;
esac

set -- "$script" "$@"
processes="${NPROC:-$(setting gpus)}"
[ "$processes" -gt 0 ] || processes=1
if [ "$nodes" -gt 1 ]; then
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # a restart must not find dead ranks' addresses
    set -- --nnodes="$nodes" --rdzv_backend=c10d --rdzv_endpoint="$address:$port" \
        --rdzv_conf="is_host=$((node_rank == 0)),join_timeout=3600" "$@"
elif [ "$processes" -gt 1 ] || [ "${MAX_RESTARTS:-0}" -gt 0 ]; then
    set -- --standalone "$@"
else
    exec "$python" "$@"
fi
if [ "$processes" -gt 1 ]; then
    cores="$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)"  # Linux, macOS
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(( (cores - 1) / processes + 1 ))}"
fi
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"  # no traces of lost connections
# a signal gives the ranks 120 s to finish the step and save
exec "$python" - --nproc_per_node="$processes" --max-restarts="${MAX_RESTARTS:-0}" \
    --shutdown-timeout=120 --signals-to-handle=SIGTERM,SIGINT,SIGUSR1 "$@" <<'PY'
# torchrun, with the exit code of the first rank that failed, and no restart after a stop
import logging, sys
from torch.distributed.launcher import api
from torch.distributed.run import main

class Agent(api.LocalElasticAgent):
    def _monitor_workers(self, group):
        result = super()._monitor_workers(group)
        if result.failures:
            rank, failure = api.ChildFailedError("", result.failures).get_first_failure()
            if failure.exitcode < 0:
                print(f"error: rank {rank} was killed by {failure.signal_name()}", file=sys.stderr)
            elif failure.exitcode > 128:  # a signal told it to save and stop
                self._remaining_restarts = 0
        return result

api.LocalElasticAgent = Agent
logging.disable()  # the ranks report their own errors
sys.tracebacklimit = 0
try:
    main()
except api.ChildFailedError as error:
    code = error.get_first_failure()[1].exitcode
    sys.exit(code if code > 0 else 128 - code)
except api.SignalException as error:
    sys.exit(128 + error.sigval)
PY
