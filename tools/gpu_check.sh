#!/usr/bin/env bash
# Everything that needs a GPU, one part after another: logs and JSON into a folder, the end of each on the screen.
#
#   tools/gpu_check.sh FOLDER [tests] [sync] [sync7b] [train] [lora] [engine] [engine7b] [adapters] [colocated] [loop] [lora7b] [demo] [auto] [recipe] [checkpoint] [moe] [serve] [ranks]
#
# Without parts: all of them, perhaps 30 minutes on one H200. `recipe` is examples/one_gpu with random weights, and needs
# reasoning-gym. `auto` is what `auto` chooses, and what compiling brings to small models. `moe` is a mixture of experts of
# OLMoE's shape: recorded and replayed routes. `serve` is 512 streams over HTTP against the engine in process, `ranks` what
# one GPU can show of several: a single rank of FSDP2, NCCL of one rank, CUDA IPC from two trainer processes. A part that fails does not stop the others.
# On a machine without internet, put the wheels of tools/gpu_wheels.sh on PYTHONPATH first; tests also need pytest,
# pytest-timeout, hypothesis and psutil.
set -u
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:?usage: tools/gpu_check.sh FOLDER [part …]}")
shift
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
penstock() { python -c 'from penstock.cli import main; main()' "$@"; }

run_part() {
    case $1 in
    tests) python -m pytest -q -p no:cacheprovider tests/engines/embedded/cuda tests/trainer/forward/test_logprob_kernel.py tests/sync ;;
    sync) penstock bench sync --shape 1.5b --json "$out/sync.json" ;;
    sync7b) penstock bench sync --shape 7b --updates 20 --json "$out/sync7b.json" ;;
    train) penstock bench train --shape 1.5b --json "$out/train.json" && python -m benchmarks train-parts --shape 1.5b --json "$out/train_parts.json" ;;
    lora) python -m benchmarks lora --shape 1.5b --rank 16 --json "$out/lora.json" ;;
    engine) penstock bench engine --shape 1.5b --json "$out/engine.json" ;;
    adapters) python -m benchmarks adapters --adapters 1 --adapters 4 --json "$out/adapters.json" ;;
    engine7b) penstock bench engine --shape 7b --json "$out/engine7b.json" ;;
    colocated) python -m benchmarks colocated --json "$out/colocated.json" ;;
    loop) python -m benchmarks one-gpu --json "$out/loop.json" ;;
    lora7b) python examples/lora_7b/rehearse.py --json "$out/lora7b.json" ;;
    demo) cd "$out" && penstock train model.device=cuda ;;
    auto)
        python -m pytest -q -s -p no:cacheprovider tests/placement/test_automatic.py &&
            penstock bench engine --shape 135m --only uniform &&
            penstock bench engine --shape 135m --only uniform engine.embedded.compile=off &&
            penstock bench train --shape 135m
        ;;
    recipe)
        python tools/random_model.py "$out/random-1.5b" --shape 1.5b --config examples/one_gpu/config.yaml &&
            recipe=$PWD/examples/one_gpu/config.yaml && cd "$out" &&
            penstock train "$recipe" model.name="$out/random-1.5b" run.steps=12
        ;;
    checkpoint)
        python -m pytest -q -p no:cacheprovider tests/trainer/checkpoint/test_host_copies.py &&
            python -m benchmarks checkpoint --shape 1.5b --json "$out/checkpoint.json"
        ;;
    moe)
        worked=0
        timeout 150 python -m pytest -q -p no:cacheprovider tests/engines/embedded/cuda/test_device_routes.py \
            tests/engines/embedded/cuda/kernels/test_expert_record.py tests/trainer/forward/test_row_routing.py \
            tests/trainer/test_routing_exactness.py \
            --tb=short --show-capture=no -k "not in_float32 and not halves and not every_row and not in_bfloat16" || worked=1
        timeout 150 python -m benchmarks moe --only engine --json "$out/moe_engine.json" || worked=1
        timeout 120 python -m benchmarks moe --only train --json "$out/moe_train.json" || worked=1
        return $worked
        ;;
    serve) penstock bench serve --shape 1.5b --streams 512 --tokens 512 --clients 8 --json "$out/serve.json" ;;
    ranks)
        worked=0
        python -m pytest -q -p no:cacheprovider tests/sync/test_processes.py tests/sync/test_private_group.py tests/benchmarks/test_train_sharded.py --tb=short || worked=1
        python -m benchmarks sharded --shape 1.5b --json "$out/sharded.json" || worked=1
        return $worked
        ;;
    *) echo "no such part: $1" && return 2 ;;
    esac
}

failed=()
for part in "${@:-tests sync sync7b train lora engine engine7b adapters colocated loop lora7b demo auto recipe checkpoint moe serve ranks}"; do
    for name in $part; do
        began=$SECONDS
        if (run_part "$name") >"$out/$name.log" 2>&1; then how=done; else how="FAILED"; failed+=("$name"); fi
        echo "== $name: $how in $((SECONDS - began)) s"
        tail -n "$([ "$name" = moe ] && echo 100 || echo 16)" "$out/$name.log"
    done
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
