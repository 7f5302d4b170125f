#!/usr/bin/env bash
# Reads hardware counters of the large kernels, where ncu may: deploy/bench/profile.sh [--bin DIR]. Writes $OUT/ncu.txt.
set -euo pipefail
bin=target/debug
[ "${1:-}" = --bin ] && bin=$2
wheels=$(python3 -c 'import importlib.util,pathlib;print(pathlib.Path(importlib.util.find_spec("torch").origin).parent.parent/"nvidia")')
export LD_LIBRARY_PATH=$wheels/cu13/lib
timeout 150 ncu --clock-control none --kernel-name regex:'moe_gate_up|moe_down|mla_decode' \
    --section SpeedOfLight --section MemoryWorkloadAnalysis --section WarpStateStats --section SchedulerStats \
    --section MemoryWorkloadAnalysis_Tables --section Occupancy \
    "$bin/afd-gpu-bench" profile >"${OUT:-.}/ncu.txt" 2>&1 || true
grep -E 'moe_|mla_|Duration|DRAM Throughput|Max Bandwidth|No Eligible|Stall|L2 Hit' "${OUT:-.}/ncu.txt" | head -60
