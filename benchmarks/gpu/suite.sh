#!/usr/bin/env bash
# Measures on a GPU host, in the order in which scarce time is best spent.
#
#   benchmarks/gpu/suite.sh OUT [SECONDS] [PART…]
#
# PART: of the trainer:   check bars optim ranks losses lora bench oom
#       with vLLM:        shared (ours and TRL on one GPU, one after the other), two (two GPUs: a whole run, and rollouts alone), sync, sync-4B, sync-lora, tenants
#
# Needs Python with torch and the trainer's packages (PYTHON, default python3), for the second line vLLM and TRL, too; `src` is put on PYTHONPATH.
# Writes trainer.json, end_to_end.json, rollout.json, weight_sync.json and suite.log into the folder OUT. A part that fails or runs out of time leaves what it has measured and keeps no other from running. ONLY="text" measures only the rows whose name contains it. The tables in benchmarks/README.md come from these files:
#
#   python benchmarks/trainer.py --collect OUT
set -u
out=$1
seconds=${2:-540}
shift $(($# < 2 ? $# : 2))
parts=${*:-check bars}
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
metadata=$(mktemp -d) # by which vLLM finds our routes where prime-rl is not installed
export PYTHONPATH="$metadata:$here/../src:$here/../environments${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0}
model=${MODEL_DIR:-${TMPDIR:-/tmp}/random-0.6B}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True} # as the launcher does for trainers
# Compiled kernels of one part serve the next.
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-${TMPDIR:-/tmp}/inductor_cache} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/triton_cache}
mkdir -p "$out"
(cd "$here" && "$python" -c "from pathlib import Path; from package import plugin_path; plugin_path(Path('$metadata'))")
end=$((SECONDS + seconds))

left() { echo $((end - SECONDS)); }

# run NAME LIMIT COMMAND…: at most LIMIT seconds, and no longer than there is time left
run() {
    local name=$1 limit=$2
    shift 2
    [ "$(left)" -lt "$limit" ] && limit=$(left)
    if [ "$limit" -lt 20 ]; then
        echo "== $name: no time left"
        return
    fi
    echo "== $name (at most $limit s of $(left) s left)" | tee -a "$out/suite.log"
    timeout --signal=TERM --kill-after=20 "$limit" "$python" "$@" 2>&1 | tee -a "$out/suite.log"
    echo "== $name: exit status ${PIPESTATUS[0]}, $(left) s left" | tee -a "$out/suite.log"
}

# What a run that was cut off has left behind would hold the GPUs of the next.
clear_gpus() {
    unset PYTORCH_CUDA_ALLOC_CONF # `rl` sets it for its trainers alone
    pkill -9 -f "prime_rl\.|VLLM::|trl_grpo|weight_sync|rollout" || true
    for _ in $(seq 20); do
        [ "$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | sort -n | tail -n 1)" -lt 1500 ] && return
        sleep 1
    done
    echo "== a GPU is still in use" | tee -a "$out/suite.log"
}

trainer() {
    run "trainer $1" "$2" "$here/trainer.py" --suite "$1" --seconds "$(($2 - 20))" --json "$out/trainer.json" --log "$out/suite.log" ${ONLY:+--only "$ONLY"}
}

for part in $parts; do
    case $part in
        check) run check 240 -m pytest -q -m gpu -W ignore::pytest.PytestConfigWarning "$here/../tests/gpu" ;;
        bars) trainer bars 500 ;;
        optim) trainer optim 200 ;;
        ranks) trainer ranks 400 ;;
        losses) trainer losses 300 ;;
        lora) trainer lora 480 ;;
        shared)
            clear_gpus
            run shared-512 265 "$here/end_to_end.py" shared-512 --model-dir "$model" --steps 16 --timeout 225 --json "$out/end_to_end.json"
            clear_gpus
            run trl-512 215 "$here/peers/trl_grpo.py" shared-512 --model-dir "$model" --variants off-16 --gpu-memory 0.3 --warm 1 --steps 6 \
                --timeout 200 --json "$out/end_to_end.json"
            ;;
        two)
            clear_gpus
            run two-512 300 "$here/end_to_end.py" two-512 --model-dir "$model" --steps 16 --timeout 270 --json "$out/end_to_end.json"
            clear_gpus
            run rollout 240 "$here/rollout.py" --only ours --flight 320 --json "$out/rollout.json"
            ;;
        sync) # NCCL where there are two GPUs, CUDA IPC on one
            clear_gpus
            run sync 240 "$here/weight_sync.py" --device cuda --case "0.6B on=memory" --json "$out/weight_sync.json"
            ;;
        sync-4B)
            clear_gpus
            run sync-4B 400 "$here/weight_sync.py" --device cuda --case "4B on=memory" --json "$out/weight_sync.json"
            ;;
        sync-lora) # the model's 16 GB are written first, to SCRATCH
            clear_gpus
            run sync-lora 300 "$here/weight_sync.py" --device cuda --case "8B on=memory lora=16 in_flight=32 syncs=10" --json "$out/weight_sync.json" \
                ${SCRATCH:+--scratch "$SCRATCH"}
            ;;
        tenants) # four on one GPU, and one run alone
            clear_gpus
            run tenants 500 "$here/tenants.py" --device cuda --model 0.6B --model-dir "$model" --batch-size 64 --tokens 128 \
                --timeout 240 --json "$out/tenants.json" ${SCRATCH:+--scratch "$SCRATCH"}
            ;;
        bench) # the trainer's own command, without any option, beside the same case of `bars`
            run bench 120 -m prime_rl.entrypoints.trainer --bench --output-dir "$(mktemp -d)" --seq-len 16384 \
                --data.fake.micro-batch-size 1 --data.fake.batch-size 2
            ;;
        oom) # an error that says what took the memory and what would help
            run oom 90 "$here/trainer.py" --case "4B 16x4096 activation_checkpointing=none steps=1 warm=1" --json "$out/oom.json" --log "$out/suite.log"
            ;;
        *) echo "unknown part $part" && exit 2 ;;
    esac
done
