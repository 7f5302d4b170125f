#!/usr/bin/env bash
# Makes a fresh clone buildable: checks the tools and puts libtorch into .deps/libtorch, where .cargo/config.toml points.
# Run it as often as you like: what is there already stays.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
    cat <<USAGE
usage: bash deploy/setup.sh [--cuda]

  --cuda   libtorch with CUDA 13, NCCL and what they load (3.7 GB) instead of the CPU part alone (0.5 GB).
           The binaries are the same: they load CUDA when a CUDA device is asked for.
USAGE
}

flavour=cpu
for argument in "$@"; do
    case $argument in
    --cuda) flavour=cuda ;;
    -h | --help) usage && exit 0 ;;
    *) usage >&2 && die "unknown option $argument" ;;
    esac
done

VERSION=2.11.0 # the one that tch 0.24 is written for
LIBTORCH_HERE=$DEPS/libtorch
STAMP=$LIBTORCH_HERE/.complete # holds what was unpacked: "2.11.0 cpu"
PYTORCH_INDEX=https://download.pytorch.org/whl/cpu
# Wheels for this platform whatever Python runs here: of the torch wheel only its C++ libraries are used.
WHEEL_TAGS=(--implementation cp --python-version 3.11
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_25_x86_64
    --platform manylinux_2_18_x86_64 --platform manylinux2014_x86_64)

check_tools() {
    [[ $(uname -sm) == "Linux x86_64" ]] ||
        die "$(uname -sm) is not supported" "The pinned libtorch is for Linux on x86_64; elsewhere use a container."
    need cargo "to build the services" "Get Rust from https://rustup.rs"
    need_rust
    need "${CC:-cc}" "to link and to compile C" "Debian, Ubuntu: apt-get install build-essential"
    need "${CXX:-c++}" "to compile the binding of libtorch" "Debian, Ubuntu: apt-get install build-essential"
    need curl "to see which servers can be reached" "Debian, Ubuntu: apt-get install curl"
}

need_rust() {
    local wanted have
    wanted=$(sed -n 's/^rust-version *= *"\(.*\)"/\1/p' "$ROOT/Cargo.toml")
    have=$(rustc --version | awk '{ print $2 }')
    [[ $(printf '%s\n%s\n' "$wanted" "${have%%-*}" | sort -V | head -n 1) == "$wanted" ]] ||
        die "Rust $have is too old: $wanted or newer is needed" "rustup update stable"
}

# A CUDA libtorch serves CPU runs too.
is_complete() {
    [[ -f $STAMP ]] && { [[ $(<"$STAMP") == "$VERSION $flavour" ]] || [[ $(<"$STAMP") == "$VERSION cuda" ]]; }
}

download() {
    local wheels=$1
    if [[ $flavour == cpu ]] && reachable "$PYTORCH_INDEX/torch/"; then
        say "from PyTorch's own CPU archive, about 200 MB (pip checks it against the hash in that index)"
        if pip_download "$wheels" "${WHEEL_TAGS[@]}" --index-url "$PYTORCH_INDEX" "torch==$VERSION+cpu"; then return; fi
        warn "that failed, trying PyPI"
        rm -f "$wheels"/*
    fi
    if [[ $flavour == cpu ]]; then say "from PyPI, 545 MB"; else say "from PyPI, 2.5 GB"; fi
    pip_download "$wheels" "${WHEEL_TAGS[@]}" --require-hashes --requirement "$ROOT/deploy/libtorch/$flavour.txt" ||
        die "could not download libtorch $VERSION" \
            "Neither $PYTORCH_INDEX nor pip's package index gave it (see above)." \
            "Behind a proxy: set https_proxy, or index-url in pip's configuration."
}

fetch_libtorch() {
    if is_complete; then return; fi # another run was quicker
    need_python
    if [[ $flavour == cpu ]]; then need_disk "$DEPS" 1600 "unpacking libtorch"; else need_disk "$DEPS" 6500 "unpacking libtorch with CUDA"; fi
    mkdir "$SCRATCH/wheels"
    download "$SCRATCH/wheels"
    say "unpacking"
    python3 "$ROOT/deploy/libtorch/unpack.py" --flavour "$flavour" --version "$VERSION" "$SCRATCH/libtorch" "$SCRATCH"/wheels/*.whl
    check_loadable "$SCRATCH/libtorch/lib"
    echo "$VERSION $flavour" >"$SCRATCH/libtorch/.complete"
    put_in_place "$SCRATCH/libtorch" "$LIBTORCH_HERE"
}

# Every library that libtorch's CPU part wants is there; better said here than by a linker in five minutes.
check_loadable() {
    local missing
    command -v ldd >/dev/null 2>&1 || return 0
    missing=$(ldd "$1/libtorch_cpu.so" | awk '/not found/ { print $1 }' | sort -u | tr '\n' ' ')
    [[ -z $missing ]] || die "libtorch lacks: $missing"
}

# The one C++ file of the binding takes about 2 GB to compile.
warn_of_little_memory() {
    local available_mb
    available_mb=$(awk '/MemAvailable/ { print int($2 / 1024) }' /proc/meminfo)
    if ((available_mb < 2500)); then warn "$available_mb MB of memory are free: the first build wants about 2500"; fi
}

check_tools
if is_complete; then
    done_with "libtorch $(<"$STAMP") is in .deps/libtorch"
else
    heading "libtorch $VERSION ($flavour)"
    locked libtorch fetch_libtorch
    done_with "libtorch $(<"$STAMP") is in .deps/libtorch ($(mb "$LIBTORCH_HERE"), ${SECONDS} s)"
    warn_of_little_memory
fi
