#!/usr/bin/env bash
# Everything that documents call "not run" for want of a GPU, in pieces of at most 9 minutes, 40 minutes in all, offline.
# THIS HAS NOT BEEN RUN ON A GPU YET; only its dry run on a CPU has.
#
#   benchmarks/on_gpu.sh [--dry-run] [FOLDER]     FOLDER: of the logs, default reports/on-gpu
#
# A piece that ended well leaves FOLDER/PIECE.done and is not run again: call it again until nothing is left. A piece
# that takes more than 9 minutes is stopped and reported. --dry-run: every piece on a CPU at toy size.
set -uo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE

device=cuda; small=()
if [ "${1:-}" = --dry-run ]; then device=cpu; small=(--small); shift; fi
folder="${1:-reports/on-gpu}"
python="${PYTHON:-python}"
mkdir -p "$folder" || exit 2
echo "on_gpu.sh: not run on a GPU before its first logs; device $device, logs in $folder"
if [ $device = cuda ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "on_gpu.sh: torch sees no CUDA device. A dry run on a CPU: benchmarks/on_gpu.sh --dry-run" >&2
    exit 2
fi

begun=$SECONDS; failed=0
piece() {  # name, command …
    local name=$1 limit=$((2400 - SECONDS + begun)); shift
    [ -e "$folder/$name.done" ] && { echo "== $name: done before"; return; }
    [ $limit -gt 540 ] && limit=540
    if [ $limit -lt 30 ]; then echo "== $name: no time left of 40 minutes; call again"; failed=1; return; fi
    echo "== $name"
    if timeout "$limit" "$@" > "$folder/$name.log" 2>&1; then
        touch "$folder/$name.done"; tail -n 12 "$folder/$name.log"
    else
        echo "== $name: failed or stopped after $limit s (exit $?), see $folder/$name.log"; failed=1
    fi
}

listops=(--epochs 1 --quiet --overwrite); tests=(-q -n 4)
if [ $device = cpu ]; then
    listops+=(--train-samples 25 --holdout-samples 25 --blocks 1); tests=(-q -n 0 -k "not slow")
    groups=(tests/models/test_device.py)
else
    groups=(tests/models tests/diagnostics/mathematics tests/diagnostics/capturing tests/diagnostics/measurement
            tests/diagnostics/commands "tests/diagnostics/findings tests/diagnostics/presentation")
fi
for name in steps statistics agreement monitor; do
    piece $name "$python" benchmarks/on_gpu.py $name --device $device "${small[@]}"
done
for attention in full topk; do
    chosen=(--attention $attention); [ $attention = topk ] && chosen+=(--k 5)
    piece "listops-$attention" "$python" -m semdiag train listops "${chosen[@]}" --device $device "${listops[@]}" \
        --out "$folder/listops-$attention"
done
for group in "${groups[@]}"; do
    # shellcheck disable=SC2086  # a group may be several folders
    piece "tests-$(basename ${group%% *} .py)" "$python" -m pytest "${tests[@]}" $group
done
exit $failed
