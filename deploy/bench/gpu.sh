#!/usr/bin/env bash
# Checks and measures the GPU layer, and the services on it, on the machine at hand, which may be bare: nothing is built or
# fetched.
#
#   deploy/bench/gpu.sh [--bin DIR] [SECTION...]
#
# DIR (default: target/debug) holds afd-gpu-bench, and afd-gpu-device-test if the tests are to run too; with attention-svc
# and ffn-svc the services are checked and measured behind it (gpu_serve.py, which can also be called by itself). CUDA's
# libraries are the ones of the Python that has torch. Tables are printed last; they and the log go to $OUT (default: .).
set -euo pipefail

bin=target/debug
if [ "${1:-}" = --bin ]; then
    bin=$2
    shift 2
fi
out=${OUT:-.}
[ $# -gt 0 ] || set -- machine rows layer moe mla contract hops

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

{
    date -u +"%Y-%m-%d %H:%M UTC"
    nvidia-smi --query-gpu=index,name,driver_version,memory.total --format=csv,noheader
    echo "command: gpu.sh $*"
} | tee "$out/machine.txt"

status=0
if [ -x "$bin/afd-gpu-device-test" ]; then
    timeout 120 "$bin/afd-gpu-device-test" --nocapture 2>&1 | tee "$out/tests.txt" || status=1
fi
timeout "${BENCH_TIMEOUT:-400}" "$bin/afd-gpu-bench" --out "$out" "$@" 2>"$out/log.txt" || status=1
tail -c 3000 "$out/log.txt"
if [ -x "$bin/attention-svc" ]; then
    here=$(cd "$(dirname "$0")" && pwd)
    common=(--bin "$bin" --fixtures "$here/../../tests/fixtures" --out "$out")
    python3 "$here/gpu_serve.py" "${common[@]}" fixtures shallow mono || status=1
    if [ -x "$bin/ffn-svc" ] && [ "$(nvidia-smi -L | wc -l)" -ge 2 ]; then
        python3 "$here/gpu_pair.py" "${common[@]}" fixtures pair profile prompts loss || status=1
    fi
fi
exit $status
