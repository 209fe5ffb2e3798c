#!/usr/bin/env bash
# What needs several GPUs, in about ten minutes: a table at the end, logs and runs in a folder.
#
#   tools/several_gpus.sh FOLDER [GPUS]
#   tools/several_gpus.sh --commands GPUS    # say what would be run on so many GPUs, and run nothing
#
# Gradients of every layout over NCCL, on as many ranks as there are GPUs (2 or 4). CUDA IPC from two trainer processes on one GPU.
# Runs of the demo whose trainer has 2 or 4 ranks, in each layout, with engines on the other GPUs (of 2 GPUs both are ranks, and
# engines run on the CPU). Weights by NCCL broadcast. A run of which a rank is killed, and which goes on with one rank. Every command has
# two minutes: a collective that hangs is a failure. It has not been run: the machines that Penstock is made on have one GPU.
set -u
cd "$(dirname "$0")/.."
limit_s=120
usage="usage: tools/several_gpus.sh FOLDER [GPUS], or --commands GPUS"
shows=
[ "${1:-}" = --commands ] && shows=yes && shift && set -- . "$@"
out=$(realpath -m "${1:?$usage}")
gpus=${2:-$(nvidia-smi --list-gpus | wc -l)}
[ "$gpus" -ge 2 ] || { echo "at least 2 GPUs are needed, got $gpus"; exit 2; }
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
penstock=(python -c 'from penstock.cli import main; main()')
pytest=(python -m pytest -q -p no:cacheprovider)

if [ "$gpus" -eq 2 ]; then
    ranks=2
    pools=(engine.device=cpu)
    broadcast=(placement.trainer=[0] placement.engines=[1]) # NCCL needs a GPU for either side
    senders=1
else
    ranks=$((gpus >= 5 ? 4 : 2)) # a power of two: the demo has 4 heads
    pools=("placement.trainer=[$(seq -s, 0 $((ranks - 1)))]" "placement.engines=[$(seq -s, "$ranks" $((gpus - 1)))]")
    broadcast=("${pools[@]}" trainer.parallel.shard="$ranks")
    senders=$ranks
fi

limited() { # run a command, or show it
    if [ -n "$shows" ]; then
        [ "$1" = "${penstock[0]}" ] && [ "$2" = -c ] && set -- penstock "${@:4}"
        echo "$*"
    else
        timeout --kill-after=10 "$limit_s" "$@"
    fi
}

demo() { # NAME RANKS STEPS SETTINGS…: a run, whose ranks must all have been there
    local last=$(($2 - 1))
    limited "${penstock[@]}" train model.device=cuda observe.view=plain run.folder="$out/runs" run.name="$1" run.steps="$3" "${@:4}" &&
        { [ -n "$shows" ] || [ -e "$out/runs/$1/logs/trainer${last/#0/}.log" ]; }
}

kill_rank() { # kill the second rank of a run once it has a checkpoint
    local run=$out/runs/$1 pid
    for _ in $(seq "$limit_s"); do
        [ -e "$run/checkpoints/latest" ] && break
        sleep 1
    done
    pid=$("${penstock[@]}" doctor "$run" | sed -n 's/^trainer1 (pid \([0-9]*\)).*/\1/p')
    echo "killing rank 1, pid ${pid:?there is no process of rank 1}" && kill -KILL "$pid"
}

run_part() {
    case $1 in
    shard-grad) limited env PENSTOCK_RANKS_ON=cuda "${pytest[@]}" tests/trainer/parallel/test_fully_sharded.py ;;
    context-grad) limited env PENSTOCK_RANKS_ON=cuda "${pytest[@]}" tests/trainer/parallel/test_split_sequences.py ;;
    tensor-grad) limited env PENSTOCK_RANKS_ON=cuda "${pytest[@]}" tests/trainer/parallel/test_split_model.py ;;
    ipc) limited "${pytest[@]}" tests/sync/test_processes.py tests/sync/test_private_group.py ;;
    shard) demo shard "$ranks" 40 "${pools[@]}" trainer.parallel.shard="$ranks" ;;
    context) demo context "$ranks" 40 "${pools[@]}" trainer.parallel.context="$ranks" ;;
    tensor) demo tensor "$ranks" 40 "${pools[@]}" trainer.parallel.tensor=2 trainer.parallel.data=$((ranks / 2)) ;;
    data) demo data "$ranks" 40 "${pools[@]}" trainer.parallel.data="$ranks" ;;
    broadcast) demo broadcast "$senders" 40 "${broadcast[@]}" sync.transport=collective ;;
    kill)
        settings=("${pools[@]}" trainer.parallel.shard="$ranks" run.checkpoint_every=5)
        [ -z "$shows" ] || { demo kill "$ranks" 100 "${settings[@]}" && echo "kill -KILL rank 1" && return; }
        demo kill "$ranks" 100 "${settings[@]}" >"$out/kill.run.log" 2>&1 &
        run=$!
        kill_rank kill && wait "$run" && grep -q "trainer is back at work" "$out/kill.run.log"
        ;;
    resume)
        limited "${penstock[@]}" resume "$out/runs/kill" run.steps=120 trainer.parallel.shard=1 placement.trainer=[0]
        ;;
    esac
}

parts=(shard-grad context-grad tensor-grad ipc shard context tensor data broadcast kill resume)
if [ -n "$shows" ]; then
    for part in "${parts[@]}"; do run_part "$part" | sed "s|^|$part: |; s|$out/||"; done
    exit
fi
[ ! -e "$out/runs" ] || { echo "$out has runs already; name another folder"; exit 2; }
mkdir -p "$out"
rows=()
for part in "${parts[@]}"; do
    began=$SECONDS
    if (run_part "$part") >"$out/$part.log" 2>&1; then how=passed; else how=FAILED; fi
    rows+=("$(printf '%-12s %-7s %4d s' "$part" "$how" $((SECONDS - began)))")
done
echo "part         result  time   ($gpus GPUs: $ranks ranks in runs; ${pools[*]})"
printf '%s\n' "${rows[@]}"
[[ "${rows[*]}" != *FAILED* ]]
