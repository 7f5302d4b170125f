#!/usr/bin/env bash
# Builds the images and runs deploy/compose.yaml with them: for use, or as a test that kills a container under load.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
    cat <<USAGE
usage: bash deploy/containers.sh [build | up | test | down] [--prebuilt] [--base IMAGE] [--jaeger]

  build       the two images (the default)
  up          build, make secrets, start attention and two FFN shards; prints how to ask and how to stop
  test        up under a name of its own, a request, an FFN container killed and replaced under load, down
  down        stop what up started

  --prebuilt  images from binaries that are there already (AFD_BINARIES, default target/release) instead of a build in a
              container
  --base      the image to stand on (default: Debian's; where no registry has it and debootstrap is here, it is made)
  --jaeger    with Jaeger; in the test its traces are looked at. Without a registry: from .deps/go-bin (deploy/jaeger.sh)

DOCKER and COMPOSE name other programs, AFD_MODEL another checkpoint than the demo's, AFD_PORT another port than 8000.
USAGE
}

command=build prebuilt=no base='' jaeger=no
while (($# > 0)); do
    case $1 in
    build | up | test | down) command=$1 ;;
    --prebuilt) prebuilt=yes ;;
    --base) base=${2:?--base IMAGE} && shift ;;
    --jaeger) jaeger=yes ;;
    -h | --help) usage && exit 0 ;;
    *) usage >&2 && die "unknown argument $1" ;;
    esac
    shift
done

DOCKER=${DOCKER:-docker}
VERSION=$(sed -n 's/^version *= *"\(.*\)"/\1/p' "$ROOT/Cargo.toml" | head -n 1)
WORK=$DEPS/containers
export AFD_IMAGES=${AFD_IMAGES:-afd} AFD_VERSION=$VERSION AFD_SECRETS=$WORK/secrets DOCKER_BUILDKIT=1
export AFD_MODEL=${AFD_MODEL:-$DEPS/models/smollm2-135m-moe}
if ! "$DOCKER" info >/dev/null 2>&1; then
    warn "LEFT OUT: no Docker engine answers ($DOCKER info)"
    exit 0
fi
if [[ -z ${COMPOSE:-} ]]; then
    if "$DOCKER" compose version >/dev/null 2>&1; then COMPOSE="$DOCKER compose"; else COMPOSE=docker-compose; fi
fi
compose() { $COMPOSE --project-name "${PROJECT:-afd}" --file "$ROOT/deploy/compose.yaml" "${profiles[@]}" "$@"; }
profiles=()
if [[ $jaeger == yes ]]; then profiles=(--profile jaeger); fi

has_image() { "$DOCKER" image inspect "$1" >/dev/null 2>&1; }

# Debian from its packages: for a machine that reaches no registry. Root only.
make_base() {
    local root=$WORK/base
    need debootstrap "to make a base image without a registry" "Debian, Ubuntu: apt-get install debootstrap"
    say "no registry gives Debian's image: making $1 with debootstrap"
    mkdir -p "$WORK" && rm -rf "$root"
    debootstrap --variant=minbase --include=ca-certificates bookworm "$root" >"$WORK/debootstrap.log" 2>&1 ||
        die "debootstrap failed: $WORK/debootstrap.log"
    rm -rf "$root"/var/cache/apt/*.bin "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
    tar -C "$root" -c . | "$DOCKER" import - "$1" >/dev/null
    rm -rf "$root"
}

choose_base() {
    local public=debian:12.12-slim
    if [[ -n $base ]]; then return; fi
    base=$public
    if has_image "$public" || timeout 60 "$DOCKER" pull --quiet "$public" >/dev/null 2>&1; then return; fi
    base=$AFD_IMAGES/base:bookworm
    has_image "$base" || make_base "$base"
}

build_images() {
    local context=$ROOT arguments=(--build-arg "BASE=$base" --build-arg "VERSION=$VERSION") target
    arguments+=(--build-arg "REVISION=$(git -C "$ROOT" rev-parse --short HEAD 2>/dev/null || echo unknown)")
    if [[ $prebuilt == yes ]]; then
        context=$WORK/context
        arguments+=(--build-arg BINARIES=prebuilt)
        local binaries=${AFD_BINARIES:-$(target_folder)/release}
        rm -rf "$context" && mkdir -p "$context/bin" "$context/lib"
        for target in attention-svc ffn-svc; do
            [[ -x $binaries/$target ]] || die "$binaries/$target is missing" "cargo build --release, or AFD_BINARIES=FOLDER"
            strip --strip-debug -o "$context/bin/$target" "$binaries/$target"
        done
        cp -a "$LIBTORCH_LIB"/*.so* "$context/lib/"
    fi
    for target in attention-svc ffn-svc; do
        heading "image $AFD_IMAGES/$target:$VERSION"
        "$DOCKER" build --file "$ROOT/deploy/docker/Dockerfile" --target "$target" --tag "$AFD_IMAGES/$target:$VERSION" \
            "${arguments[@]}" "$context" >&2
        done_with "$("$DOCKER" image inspect --format '{{.Size}}' "$AFD_IMAGES/$target:$VERSION" | awk '{ printf "%.2f GB", $1 / 1e9 }')"
    done
    rm -rf "$WORK/context"
}
LIBTORCH_LIB=$(readlink -f "$DEPS/libtorch")/lib

# Jaeger from its own image, or from the binary that deploy/jaeger.sh built; else the traces are left out.
jaeger_image() {
    if [[ $jaeger == no ]]; then return; fi
    export AFD_JAEGER_IMAGE=${AFD_JAEGER_IMAGE:-jaegertracing/jaeger:2.13.0}
    if has_image "$AFD_JAEGER_IMAGE" || timeout 60 "$DOCKER" pull --quiet "$AFD_JAEGER_IMAGE" >/dev/null 2>&1; then
        :
    elif [[ -x $DEPS/go-bin/jaeger ]]; then
        AFD_JAEGER_IMAGE=$AFD_IMAGES/jaeger:local
        printf 'FROM %s\nCOPY jaeger /jaeger\nUSER 65532\nENTRYPOINT ["/jaeger"]\n' "$base" |
            "$DOCKER" build --quiet --tag "$AFD_JAEGER_IMAGE" --file - "$DEPS/go-bin" >/dev/null
    else
        warn "LEFT OUT: traces: no registry gives $AFD_JAEGER_IMAGE and deploy/jaeger.sh has not run"
        jaeger=no profiles=()
        return
    fi
    export AFD_OTLP_ENDPOINT=http://jaeger:4317
}

# The folder keeps others out; the files themselves must be readable to the containers' user.
make_secrets() {
    mkdir -p "$AFD_SECRETS" && chmod 700 "$WORK"
    for secret in api-token join-token; do
        if [[ ! -s $AFD_SECRETS/$secret ]]; then
            head -c 24 /dev/urandom | base64 | tr '+/' '-_' >"$AFD_SECRETS/$secret"
        fi
        chmod 644 "$AFD_SECRETS/$secret"
    done
}

# status PATH [curl options]: the code of an answer, 000 when there is none.
status() {
    local path=$1
    shift
    curl --silent --output /dev/null --max-time 60 --write-out '%{http_code}' --header "authorization: Bearer $(<"$AFD_SECRETS/api-token")" \
        "$@" "http://127.0.0.1:$AFD_PORT$path" || true
}

wait_ready() {
    local deadline=$((SECONDS + 180))
    until [[ $(status /ready) == 200 ]]; do
        ((SECONDS < deadline)) || { compose logs --tail=30 >&2 && die "not ready after 180 s (logs above)"; }
        sleep 1
    done
}

up() {
    [[ -f $AFD_MODEL/config.json ]] || die "no checkpoint in $AFD_MODEL" "bash deploy/model.sh, or AFD_MODEL=FOLDER"
    AFD_MODEL=$(readlink -f "$AFD_MODEL")
    export AFD_PORT=${AFD_PORT:-8000}
    make_secrets
    compose up --detach --no-build >&2
    wait_ready
}

# What the images' own health checks say.
wait_healthy() {
    local id state deadline=$((SECONDS + 120))
    for id in $(compose ps -q attention ffn-0 ffn-1); do
        until state=$("$DOCKER" inspect --format '{{.State.Health.Status}}' "$id") && [[ $state == healthy ]]; do
            ((SECONDS < deadline)) || die "$("$DOCKER" inspect --format '{{.Name}} is {{json .State.Health}}' "$id")"
            sleep 1
        done
    done
    done_with "all three containers are healthy"
}

# Asks until the file is gone; every answer's code becomes a line.
ask_until_gone() {
    local body='{"prompt": "The ferry leaves at noon", "max_tokens": 12, "ignore_eos": true}'
    while [[ -e $1 ]]; do status /v1/completions --data "$body" && echo; done
}

kill_one_under_load() {
    local go=$WORK/go codes=$WORK/codes name worker pids=()
    : >"$go"
    for worker in 1 2 3; do ask_until_gone "$go" >"$codes.$worker" & pids+=($!); done
    sleep 3
    name=$(compose ps -q ffn-0)
    heading "killing the container of ffn-0"
    "$DOCKER" rm --force "$name" >/dev/null
    compose up --detach --no-build --no-deps ffn-0 >&2
    sleep 8
    wait_ready
    sleep 2
    rm "$go"
    wait "${pids[@]}"
    cat "$codes".? >"$codes"
    local total failed
    total=$(wc -l <"$codes")
    failed=$(grep -cv '^200$' "$codes" || true)
    ((total >= 10)) || die "only $total requests were made: that proves nothing"
    ((failed == 0)) || die "$failed of $total requests failed: $(sort "$codes" | uniq -c | tr '\n' ' ')"
    done_with "$total requests, none failed"
}

look_at_traces() {
    local found
    if [[ $jaeger == no ]]; then return; fi
    status /v1/completions --header 'x-afd-trace-hops: 1' --data '{"prompt": "Hello", "max_tokens": 4}' >/dev/null
    for _ in $(seq 30); do
        found=$(curl --silent "http://127.0.0.1:${AFD_JAEGER_PORT:-16686}/api/services" || true)
        if [[ $found == *attention-svc* && $found == *ffn-svc* ]]; then done_with "both services have traces in Jaeger" && return; fi
        sleep 1
    done
    die "Jaeger does not know both services: $found"
}

test_it() {
    export PROJECT=afd-test AFD_PORT=${AFD_PORT:-18000}
    trap 'compose logs --no-color >"$WORK/test.log" 2>&1; compose down --volumes --timeout 5 >&2 || true' EXIT
    heading "attention, two FFN shards"
    up
    [[ $(status /v1/completions --data '{"prompt": "Hello", "max_tokens": 4}') == 200 ]] || die "a request was not answered"
    [[ $(curl --silent --output /dev/null --write-out '%{http_code}' "http://127.0.0.1:$AFD_PORT/v1/models") == 401 ]] ||
        die "a request without a token was answered"
    say "links: $(curl --silent --header "authorization: Bearer $(<"$AFD_SECRETS/api-token")" "http://127.0.0.1:$AFD_PORT/metrics" |
        sed -n 's/^afd_ffn_peer{\(.*\)} 1$/\1/p' | tr '\n' ' ')"
    look_at_traces
    wait_healthy
    kill_one_under_load
    heading "SIGTERM"
    "$DOCKER" stop --time 30 "$(compose ps -q attention)" >/dev/null
    [[ $("$DOCKER" inspect --format '{{.State.ExitCode}}' "$(compose ps -q attention)") == 0 ]] || die "attention did not end with 0"
    done_with "drained and ended with 0"
}

case $command in
down) AFD_PORT=0 compose down --volumes ;;
build) choose_base && build_images ;;
up)
    choose_base && build_images && jaeger_image && up
    done_with "ready"
    say "curl -H \"authorization: Bearer \$(cat $AFD_SECRETS/api-token)\" http://127.0.0.1:$AFD_PORT/v1/models"
    say "bash deploy/containers.sh down"
    ;;
test) choose_base && build_images && jaeger_image && test_it ;;
esac
