#!/usr/bin/env bash
# Checks and measures the GPU layer, and the services on it, on the machine at hand, which may be bare: nothing is built or
# fetched.
#
#   deploy/bench/gpu.sh [--bin DIR] [--short] [SECTION...]
#
# DIR (default: target/debug) holds afd-gpu-bench, and afd-gpu-device-test if the tests are to run too; with attention-svc
# and ffn-svc the services are checked and measured behind it (gpu_serve.py, on two GPUs gpu_pair.py, which can also be called
# by themselves). CUDA's libraries are the ones of the Python that has torch. What is checked for correctness comes first:
# device tests, the channels' contract, float32 fixtures token for token over every link, bfloat16 by teacher-forcing. Then
# hops, decode and prompts by concurrency, one GPU beside the pair, one and two stages, with graphs and without, bubbles,
# experts by rows, and what is left after loss. Every table is printed again at the end; they and the logs go to $OUT (default: .).
#
# On one GPU attention and the FFN share it for what the pair answers, slow and right; what needs two says that it was skipped.
# --short: fewer models, levels and layouts, for some minutes.
set -euo pipefail

bin=target/debug
if [ "${1:-}" = --bin ]; then
    bin=$2
    shift 2
fi
short=
if [ "${1:-}" = --short ]; then
    short=1
    shift
fi
out=${OUT:-.}
[ $# -gt 0 ] || set -- machine rows products sample layer moe shared waits mla hops

# The wheels call NCCL libnccl.so.2; it is looked up as libnccl.so.
wheels=$(python3 - <<'PY'
import importlib.util, pathlib
print(pathlib.Path(importlib.util.find_spec("torch").origin).parent.parent / "nvidia")
PY
)
links=$(mktemp -d)
trap 'rm -rf "$links"' EXIT
ln -s "$wheels/nccl/lib/libnccl.so.2" "$links/libnccl.so"
export LD_LIBRARY_PATH=$links:$wheels/cu13/lib:$wheels/nccl/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# NVLink multicast must stay off on shared hosts.
export NCCL_NVLS_ENABLE=0

tables=$out/tables.txt
{
    date -u +"%Y-%m-%d %H:%M UTC"
    nvidia-smi --query-gpu=index,name,driver_version,memory.total --format=csv,noheader
    echo "command: gpu.sh $*"
} | tee "$tables"

status=0
here=$(cd "$(dirname "$0")" && pwd)
# What a part prints goes to the tables; it may fail without the others.
part() {
    echo "== $*" | sed "s|$bin/||" >>"$tables"
    timeout "${BENCH_TIMEOUT:-400}" "$@" 2>>"$out/log.txt" | tee -a "$tables" || status=1
}
services() {
    local script=$1
    shift
    [ ! -x "$bin/attention-svc" ] ||
        part python3 "$here/$script" --bin "$bin" --fixtures "$here/../../tests/fixtures" --out "$out" "$@"
}
# On one GPU the FFN shares it; sections that then mean nothing are named.
pair() {
    [ -x "$bin/ffn-svc" ] || return 0
    if [ "$num_gpus" -ge 2 ]; then
        services gpu_pair.py "$@"
    else
        services gpu_pair.py --ffn-gpu 0 --layouts ipc,shared --concurrency 8 --output-len 32 "$@"
    fi
}
skipped() {
    echo "== $1: skipped: $2" | tee -a "$tables"
}

num_gpus=$(nvidia-smi -L | wc -l)
families=(--families tiny-deepseek-v2,tiny-qwen3-moe)
if [ -x "$bin/afd-gpu-device-test" ]; then
    part "$bin/afd-gpu-device-test" --nocapture
fi
part "$bin/afd-gpu-bench" --out "$out" contract
services gpu_serve.py fixtures
[ -n "$short" ] || services gpu_serve.py shallow
pair ${short:+"${families[@]}"} fixtures
part "$bin/afd-gpu-bench" --out "$out" "$@"
services gpu_serve.py ${short:+--modes decode --concurrency 1,64} mono
if [ "$num_gpus" -ge 2 ]; then
    pair ${short:+--layouts ipc,shared,nccl --concurrency 1,64} pair
    [ -n "$short" ] || pair shards sampled profile prompts
else
    pair pair
    skipped "profile, prompts, and all times of the pair" "they take two GPUs"
fi
# What may leave a device in a state comes last.
pair drain loss
part "$bin/afd-gpu-bench" --out "$out" loss
tail -c 3000 "$out/log.txt"
echo
cat "$tables"
exit $status
