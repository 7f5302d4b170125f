#!/usr/bin/env bash
# The whole thing on one machine: a real model answers, its attention in one process, its experts in two others.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source "$ROOT/deploy/demo/processes.sh"

usage() {
    cat <<USAGE
usage: bash deploy/demo.sh [--keep] [--prompt TEXT] [--port N] [--threads N] [--dense]
       bash deploy/demo.sh --stop

  --keep      leave the three processes running
  --stop      end what --keep left running
  --prompt    what to ask (default: "$PROMPT")
  --port      of the API (default: $PORT, or any free one where that is taken)
  --threads   of each role for its tensor operations (default: by the number of cores)
  --dense     the dense model instead of its mixture of experts
USAGE
}

PROMPT="What is photosynthesis?"
PORT=8080
port_is_default=yes keep=no model_kind='' threads=$(nproc)
NUM_SHARDS=2
START_DEADLINE_S=120

parse_arguments() {
    while (($# > 0)); do
        case $1 in
        --prompt | --port | --threads) (($# > 1)) || die "$1 wants a value" ;;
        esac
        case $1 in
        --keep) keep=yes ;;
        --stop) stop_kept && exit 0 ;;
        --prompt) PROMPT=$2 && shift ;;
        --port) PORT=$2 port_is_default=no && shift ;;
        --threads) threads=$2 && shift ;;
        --dense) model_kind=--dense ;;
        -h | --help) usage && exit 0 ;;
        *) usage >&2 && die "unknown option $1" ;;
        esac
        shift
    done
    [[ $PORT =~ ^[0-9]+$ ]] && ((PORT <= 65535)) || die "--port $PORT: wanted 0 to 65535"
    [[ $threads =~ ^[1-9][0-9]*$ ]] || die "--threads $threads: wanted a positive number"
}

# Shards compute at the same time, attention while they wait: so it may use every core, and they share them.
choose_threads() {
    attention_threads=$((threads < 8 ? threads : 8)) # a model this small gains nothing from more
    ffn_threads=$((attention_threads / NUM_SHARDS > 0 ? attention_threads / NUM_SHARDS : 1))
}

build() {
    heading "release build"
    cargo build --release --locked --bins -p attention-svc -p ffn-svc
    binaries=$(target_folder)/release
}

choose_port() {
    if port_is_free "$PORT"; then return; fi
    [[ $port_is_default == yes ]] || die "port $PORT is in use" "Choose another one: --port N, or --port 0 for any free one."
    warn "port $PORT is in use: taking a free one"
    PORT=0
}

start_all() {
    heading "start"
    local shard ffn_addresses=''
    for ((shard = 0; shard < NUM_SHARDS; shard++)); do
        start "F$shard" "$binaries/ffn-svc" serve --model "$model" --shard "$shard/$NUM_SHARDS" \
            --listen 127.0.0.1:0 --threads "$ffn_threads"
    done
    for ((shard = 0; shard < NUM_SHARDS; shard++)); do
        wait_for_address "F$shard"
        ffn_addresses+=${ffn_addresses:+,}$ADDRESS
        describe "F$shard" "ffn-svc        shard $shard of $NUM_SHARDS"
    done
    choose_port
    start A0 "$binaries/attention-svc" serve --model "$model" --ffn "$ffn_addresses" \
        --listen "127.0.0.1:$PORT" --threads "$attention_threads"
    wait_for_address A0
    API=http://$ADDRESS
    describe A0 "attention-svc  the API"
    wait_until_ready A0 "$API/health"
}

# How the pair is wired, as the attention rank itself reports it.
link_in_use() {
    curl --silent --max-time 5 "$API/metrics" |
        sed -n 's/^afd_.*[{,]kind="\([a-z-]*\)".*/\1/p' | sort -u | paste -sd, - || true
}

picture() {
    local share="half of the experts" wire
    if [[ -n $model_kind ]]; then share="half of every FFN"; fi
    wire=$(printf '%-5.5s' "$(link_in_use)")
    cat <<PICTURE

              ┌─ attention-svc ─────┐              ┌─ ffn-svc 0/2 ───────┐
   tokens ◀──▶│ requests, KV cache, │◀─── $wire ──▶│ $(printf '%-19s' "$share") │
              │ attention, sampling │◀───────┐     └─────────────────────┘
              └─────────────────────┘        │     ┌─ ffn-svc 1/2 ───────┐
                                             └────▶│ $(printf '%-19s' "$share") │
          each layer: rows go over, sums come back └─────────────────────┘
PICTURE
}

examples() {
    heading "try it yourself"
    cat <<EXAMPLES
  API      $API/v1  and gRPC on the same port
  metrics  $API/metrics

  curl -N $API/v1/chat/completions -H 'content-type: application/json' -d '{
    "messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64, "stream": true}'

  grpcurl -plaintext -d '{"text": "The sky is", "stop": {"max_tokens": 16}}' \\
    ${API#http://} afd.v1.InferenceService/Generate
EXAMPLES
}

parse_arguments "$@"
refuse_if_kept_runs
cd "$ROOT"
printf '\n%sattention–FFN disaggregation%s, one attention rank and %s FFN shards on this machine\n' "$BOLD" "$PLAIN" $NUM_SHARDS >&2
bash deploy/setup.sh
model=$(bash deploy/model.sh $model_kind)
build
choose_threads
trap 'stop_all' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
start_all
picture
heading "chat"
python3 deploy/demo/chat.py "$API" "$PROMPT"
printf '%s\n' "         threads: $attention_threads attention, $ffn_threads each FFN shard · link: $(link_in_use) · ${model##*/}"
examples
if [[ $keep == yes ]]; then
    trap - EXIT
    heading "left running"
    say "logs in .deps/demo, to end it: bash deploy/demo.sh --stop"
fi
