#!/usr/bin/env bash
# What needs several GPUs, in about ten minutes: a table at the end, logs and JSON in a folder.
#
#   tools/several_gpus.sh FOLDER [GPUS]
#
# NCCL between ranks, gradients of every layout on GPUs, a run whose trainer is split over GPUs with engines on the others, the
# same killed in the middle and resumed on one rank. It has not been run: the machines that Penstock is made on have one GPU.
set -u
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:?usage: tools/several_gpus.sh FOLDER [GPUS]}")
gpus=${2:-$(nvidia-smi --list-gpus | wc -l)}
[ "$gpus" -ge 2 ] || { echo "at least 2 GPUs are needed, got $gpus"; exit 2; }
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
penstock() { python -c 'from penstock.cli import main; main()' "$@"; }
half=$((gpus / 2))
pair=$((half % 2 ? 1 : 2)) # the demo's heads divide by 2
first=$(seq -s, 0 $((half - 1)))
rest=$(seq -s, "$half" $((gpus - 1)))
pools=("placement.trainer=[$first]" "placement.engines=[$rest]")

run_part() {
    case $1 in
    gradients) python -m pytest -q -p no:cacheprovider tests/trainer/parallel ;;
    shard) cd "$out" && penstock train model.device=cuda run.name=shard run.steps=40 "${pools[@]}" trainer.parallel.shard="$half" ;;
    context) cd "$out" && penstock train model.device=cuda run.name=context run.steps=40 "${pools[@]}" trainer.parallel.context="$half" ;;
    tensor) cd "$out" && penstock train model.device=cuda run.name=tensor run.steps=40 "${pools[@]}" trainer.parallel.tensor="$pair" \
        trainer.parallel.data=$((half / pair)) ;;
    broadcast) cd "$out" && penstock train model.device=cuda run.name=broadcast run.steps=40 "${pools[@]}" \
        trainer.parallel.shard="$half" sync.transport=collective ;;
    data) cd "$out" && penstock train model.device=cuda run.name=data run.steps=40 "${pools[@]}" trainer.parallel.data="$half" ;;
    resume)
        cd "$out" && penstock train model.device=cuda run.name=again run.steps=20 run.checkpoint_every=10 "${pools[@]}" \
            trainer.parallel.shard="$half" && penstock resume again run.steps=30 trainer.parallel.shard=1 "placement.trainer=[0]"
        ;;
    esac
}

rows=()
for part in gradients shard context tensor broadcast data resume; do
    began=$SECONDS
    if (run_part "$part") >"$out/$part.log" 2>&1; then how=passed; else how=FAILED; fi
    rows+=("$(printf '%-10s %-7s %4d s' "$part" "$how" $((SECONDS - began)))")
done
echo "part       result  time   ($gpus GPUs: trainer on $first, engines on $rest)"
printf '%s\n' "${rows[@]}"
[[ "${rows[*]}" != *FAILED* ]]
