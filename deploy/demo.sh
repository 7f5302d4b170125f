#!/usr/bin/env bash
# The whole thing on one machine: a real model answers, its attention in one process, its experts in two others.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source "$ROOT/deploy/demo/processes.sh"

usage() {
    cat <<USAGE
usage: bash deploy/demo.sh [--kill] [--keep] [--prompt TEXT] [--port N] [--threads N] [--dense]
       bash deploy/demo.sh --stop

  --kill      two shards with two replicas each; in mid-sentence FFN processes are killed with kill -9, and the text
              goes on: shows the pauses, what was replayed, and whether every token is right (computes in float32)
  --keep      leave the processes running
  --stop      end what --keep left running
  --prompt    what to ask (default: "$PROMPT", with --kill "$KILL_PROMPT")
  --port      of the API (default: $PORT, or any free one where that is taken)
  --threads   of each role for its tensor operations (default: by the number of cores)
  --dense     the dense model instead of its mixture of experts
USAGE
}

PROMPT="What is photosynthesis?"
KILL_PROMPT="Write a short story about a lighthouse keeper."
PORT=8080
port_is_default=yes keep=no act=chat prompt='' model_kind='' threads=$(nproc)
NUM_SHARDS=2 num_replicas=1 dtype=auto
START_DEADLINE_S=120 RESTART_AFTER_MS=1500
died_at_ms=()

parse_arguments() {
    while (($# > 0)); do
        case $1 in
        --prompt | --port | --threads) (($# > 1)) || die "$1 wants a value" ;;
        esac
        case $1 in
        --kill) act=kill num_replicas=2 dtype=float32 ;;
        --keep) keep=yes ;;
        --stop) stop_kept && exit 0 || exit 1 ;;
        --prompt) prompt=$2 && shift ;;
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
    if [[ -z $prompt && $act == kill ]]; then prompt=$KILL_PROMPT; fi
    prompt=${prompt:-$PROMPT}
    num_ffn=$((NUM_SHARDS * num_replicas))
}

# Shards compute at the same time, attention while they wait: so it may use every core, and they share them.
choose_threads() {
    attention_threads=$((threads < 8 ? threads : 8)) # a model this small gains nothing from more
    ffn_threads=$((attention_threads / NUM_SHARDS > 0 ? attention_threads / NUM_SHARDS : 1))
}

build() {
    heading "release build"
    # Packages say which features dependencies have, binaries what is compiled: with the same packages --kill, which runs
    # the token oracle too, builds nothing anew.
    local selected=(-p attention-svc -p ffn-svc -p afd-tests --bin attention-svc --bin ffn-svc)
    if [[ $act == kill ]]; then selected+=(--bin oracle); fi
    cargo build --release --locked "${selected[@]}"
    binaries=$(target_folder)/release
}

choose_port() {
    if port_is_free "$PORT"; then return; fi
    [[ $port_is_default == yes ]] || die "port $PORT is in use" "Choose another one: --port N, or --port 0 for any free one."
    warn "port $PORT is in use: taking a free one"
    PORT=0
}

# start_ffn RANK ADDRESS: the replicas of a shard have neighbouring ranks.
start_ffn() {
    start "F$1" "$binaries/ffn-svc" serve --model "$model" --shard "$(($1 / num_replicas))/$NUM_SHARDS" --rank "$1" \
        --listen "$2" --dtype $dtype --threads "$ffn_threads"
}

# What an orchestrator does with what has died: starts it again where it was. At once where nobody else serves the shard;
# else a moment later, so that the pause is that of the replica and not of a model that is loaded on the same cores.
restart_dead_ffn() {
    local rank
    for ((rank = 0; rank < num_ffn; rank++)); do
        if is_running "F$rank"; then
            died_at_ms[rank]=''
        elif : "${died_at_ms[rank]:=$(now_ms)}" &&
            { ! is_shard_served "$rank" || (($(now_ms) - died_at_ms[rank] > RESTART_AFTER_MS)); }; then
            start_ffn "$rank" "${ffn_addresses[rank]}"
        fi
    done
}

# is_shard_served RANK: by any of its replicas.
is_shard_served() {
    local first=$(($1 / num_replicas * num_replicas)) replica
    for ((replica = first; replica < first + num_replicas; replica++)); do
        if is_running "F$replica"; then return 0; fi
    done
    return 1
}

start_all() {
    heading "start"
    local rank replica
    clear_traces
    for ((rank = 0; rank < num_ffn; rank++)); do start_ffn "$rank" 127.0.0.1:0; done
    ffn_addresses=()
    for ((rank = 0; rank < num_ffn; rank++)); do
        wait_for_address "F$rank"
        ffn_addresses+=("$ADDRESS")
        replica=''
        if ((num_replicas > 1)); then replica=", replica $((rank % num_replicas))"; fi
        describe "F$rank" "ffn-svc        shard $((rank / num_replicas)) of $NUM_SHARDS$replica"
    done
    choose_port
    start A0 "$binaries/attention-svc" serve --model "$model" --ffn "$(IFS=, && echo "${ffn_addresses[*]}")" \
        --listen "127.0.0.1:$PORT" --dtype $dtype --threads "$attention_threads" --kv-cache-memory 512MiB
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
    local share="half of the experts" names=("F0" "F1") wire
    if [[ -n $model_kind ]]; then share="half of every FFN"; fi
    if ((num_replicas > 1)); then names=("F0, replica F1" "F2, replica F3"); fi
    wire=$(printf '%-5.5s' "$(link_in_use)")
    cat <<PICTURE

              ┌─ attention-svc ─────┐              ┌─ ffn-svc 0/2 ───────┐
              │ A0                  │              │ $(printf '%-19s' "${names[0]}") │
   tokens ◀──▶│ requests, KV cache, │◀─── $wire ──▶│ $(printf '%-19s' "$share") │
              │ attention, sampling │◀───────┐     └─────────────────────┘
              └─────────────────────┘        │     ┌─ ffn-svc 1/2 ───────┐
                                             │     │ $(printf '%-19s' "${names[1]}") │
          each layer: rows go over,          └────▶│ $(printf '%-19s' "$share") │
          partial sums come back                   └─────────────────────┘
PICTURE
}

examples() {
    heading "try it yourself"
    if [[ $keep == no ]]; then say "(with --keep: this demo ends its processes now)"; fi
    cat <<EXAMPLES
  API      $API/v1  and gRPC on the same port
  metrics  $API/metrics

  curl -N $API/v1/chat/completions -H 'content-type: application/json' -d '{
    "messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64, "stream": true}'

  grpcurl -plaintext -d '{"conversation": {"messages": [{"role": "user", "content": "Why is the sky blue?"}]},
    "sampling": {"temperature": 0}, "stop": {"max_tokens": 64}}' \\
    ${API#http://} afd.v1.InferenceService/Generate
EXAMPLES
}

chat_act() {
    heading "chat"
    python3 deploy/demo/chat.py "$API" "$prompt"
}

kill_act() {
    heading "kill -9 in mid-sentence"
    python3 deploy/demo/kill.py "$API" "$prompt" --folder "$DEMO" --shards $NUM_SHARDS --replicas "$num_replicas" \
        --oracle "$binaries/oracle" --model "$model" --dtype $dtype &
    CLIENT=$!
    while_runs "$CLIENT" restart_dead_ffn
    CLIENT=''
    echo
}

parse_arguments "$@"
refuse_if_kept_runs
cd "$ROOT"
printf '\n%sattention–FFN disaggregation%s, one attention rank and %s FFN ranks on this machine\n' "$BOLD" "$PLAIN" $num_ffn >&2
bash deploy/setup.sh
model=$(bash deploy/model.sh $model_kind)
build
choose_threads
trap 'stop_all' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
start_all
picture
"${act}_act"
printf '%s\n' "         threads: $attention_threads attention, $ffn_threads each FFN rank · link: $(link_in_use) · ${model##*/}"
examples
if [[ $keep == yes ]]; then
    trap - EXIT
    heading "left running"
    say "logs in .deps/demo, to end it: bash deploy/demo.sh --stop"
fi
