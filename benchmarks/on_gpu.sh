#!/usr/bin/env bash
# What only a machine with a GPU can show, in pieces of at most 9 minutes, offline.
#
#   benchmarks/on_gpu.sh [--dry-run] [FOLDER [PIECE …]]     FOLDER: of the logs, default reports/on-gpu
#
# Pieces, in this order, all by default: tests trainer agreement statistics monitor listops. A piece that ended well
# leaves FOLDER/PIECE.done and is not run again: call it again until nothing is left. The training of listops goes on
# where it was stopped. --dry-run: every piece on a CPU at toy size.
set -uo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE

device=cuda; small=()
if [ "${1:-}" = --dry-run ]; then device=cpu; small=(--small); shift; fi
folder="${1:-reports/on-gpu}"; shift
python="${PYTHON:-python}"
wanted=" ${*:-tests trainer agreement statistics monitor listops} "
limit="${LIMIT:-540}"  # seconds a piece
mkdir -p "$folder" || exit 2
echo "on_gpu.sh: device $device, logs in $folder"
if [ $device = cuda ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "on_gpu.sh: torch sees no CUDA device. A dry run on a CPU: benchmarks/on_gpu.sh --dry-run" >&2
    exit 2
fi

failed=0
piece() {  # name, command …
    local name=$1; shift
    [[ "$wanted" == *" ${name%%-*} "* ]] || return
    [ -e "$folder/$name.done" ] && { echo "== $name: done before"; return; }
    echo "== $name"
    if timeout -s INT -k 30 "$limit" "$@" > "$folder/$name.log" 2>&1; then
        touch "$folder/$name.done"; tail -n 12 "$folder/$name.log"
    else
        echo "== $name: failed or stopped after $limit s (exit $?), see $folder/$name.log"; failed=1
    fi
}

tests=(-v -n 14 --tb=short -W default)  # other releases of what semdiag stands on warn of other things
[ $device = cpu ] && tests=(-q -n 0 tests/models/test_device.py)
piece tests "$python" -m pytest "${tests[@]}"
piece trainer "$python" benchmarks/trainer_on_gpu.py --check --time --device $device --out "$folder"
for name in agreement statistics monitor; do
    piece $name "$python" benchmarks/on_gpu.py $name --device $device "${small[@]}"
done
for attention in full topk; do  # both at once: neither fills a GPU
    run="$folder/listops-$attention"
    train=(train listops --attention $attention --device $device --quiet --out "$run")
    [ $attention = topk ] && train+=(--k 5)
    [ -e "$run/last.pt" ] && train+=(--resume)
    [ $device = cpu ] && train+=(--epochs 1 --train-samples 25 --holdout-samples 25 --blocks 1)
    piece "listops-$attention" "$python" -m semdiag "${train[@]}" &
done
wait
for attention in full topk; do
    [[ "$wanted" != *" listops "* || -e "$folder/listops-$attention.done" ]] || failed=1
done
exit $failed
