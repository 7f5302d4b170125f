#!/usr/bin/env bash
# Builds the images and runs deploy/compose.yaml with them: for use, or as a test that kills a container under load.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
    cat <<USAGE
usage: bash deploy/containers.sh [build | up | test | down] [--prebuilt] [--base IMAGE] [--builder IMAGE] [--observability]

  build       the two images (the default)
  up          build, make secrets, start attention and two FFN shards; prints how to ask and how to stop
  test        up under a name of its own, a request, its trace in Jaeger and its numbers in Prometheus (with
              --observability), an FFN container killed and replaced under load, down
  down        stop what up started

  --prebuilt  images from binaries that are there already (AFD_BINARIES, default target/release) instead of a build in a
              container
  --base      the image to stand on (default: Debian's; where no registry has it and debootstrap is here, it is made)
  --builder   the image to compile in (default: Rust's; where no registry has it: the base with this machine's toolchain)
  --observability
              with Jaeger, Prometheus and Grafana. Where no registry gives their images (AFD_JAEGER_IMAGE and the like name
              others), those of which .deps/go-bin has the program (deploy/jaeger.sh, deploy/prometheus.sh) are made of it

DOCKER and COMPOSE name other programs, AFD_MODEL another checkpoint than the demo's, AFD_PORT another port than 8000,
AFD_BUILD_NETWORK the network of a build (host where only this machine's own reaches the package registries).
USAGE
}

command=build prebuilt=no base='' builder='' observability=no
while (($# > 0)); do
    case $1 in
    build | up | test | down) command=$1 ;;
    --prebuilt) prebuilt=yes ;;
    --base) base=${2:?--base IMAGE} && shift ;;
    --builder) builder=${2:?--builder IMAGE} && shift ;;
    --observability) observability=yes ;;
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
compose() { $COMPOSE --project-name "${PROJECT:-afd}" --file "$ROOT/deploy/compose.yaml" --profile observability "$@"; }
services=(attention ffn-0 ffn-1) # and what shows them, where it is wanted and to be had

has_image() { "$DOCKER" image inspect "$1" >/dev/null 2>&1; }

# can_have IMAGE: whether it is here, or a registry gives it.
can_have() { has_image "$1" || timeout 60 "$DOCKER" pull --quiet "$1" >/dev/null 2>&1; }

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
    if can_have "$public"; then return; fi
    base=$AFD_IMAGES/base:bookworm
    has_image "$base" || make_base "$base"
}

# The base with this machine's Rust and, where it has others than Debian's, its certificates: a build has to trust whom this
# machine trusts.
make_builder() {
    local folder=$WORK/builder roots=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}
    say "no registry gives Rust's image: making $1 of $base and the toolchain of $(rustc --version)"
    rm -rf "$folder" && mkdir -p "$folder"
    cp "$roots" "$folder/roots.crt"
    # Hard links where that is possible: a toolchain is large.
    cp -al "$(rustc --print sysroot)" "$folder/rust" 2>/dev/null || cp -a "$(rustc --print sysroot)" "$folder/rust"
    rm -rf "$folder/rust/share"
    printf '%s\n' "FROM $base" 'COPY rust /usr/local/rust' 'COPY roots.crt /etc/ssl/certs/ca-certificates.crt' \
        'ENV PATH=/usr/local/rust/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
        'ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt PIP_CERT=/etc/ssl/certs/ca-certificates.crt' \
        'ENV CARGO_HTTP_CAINFO=/etc/ssl/certs/ca-certificates.crt' >"$folder/Dockerfile"
    "$DOCKER" build --quiet --tag "$1" "$folder" >/dev/null
    rm -rf "$folder"
}

choose_builder() {
    if [[ -n $builder || $prebuilt == yes ]]; then return; fi
    builder=$(sed -n 's/^ARG BUILDER=//p' "$ROOT/deploy/docker/Dockerfile")
    if can_have "$builder"; then return; fi
    builder=$AFD_IMAGES/builder:local
    has_image "$builder" || make_builder "$builder"
}

build_images() {
    local context=$ROOT arguments=(--build-arg "BASE=$base" --build-arg "VERSION=$VERSION") target
    if [[ -n $builder ]]; then arguments+=(--build-arg "BUILDER=$builder"); fi
    if [[ -n ${AFD_BUILD_NETWORK:-} ]]; then arguments+=(--network "$AFD_BUILD_NETWORK"); fi
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

# observe NAME VARIABLE: a service that shows the others, by the image that VARIABLE or deploy/compose.yaml names
# or by one made of the program in .deps/go-bin; else it is left out.
observe() {
    local name=$1 variable=$2 image folder=$WORK/$1
    image=${!variable:-$(sed -n "s/.*image: \${$variable:-\(.*\)}/\1/p" "$ROOT/deploy/compose.yaml")}
    if can_have "$image"; then
        :
    elif [[ -x $DEPS/go-bin/$name ]]; then
        image=$AFD_IMAGES/$name:local
        rm -rf "$folder" && mkdir -p "$folder"
        cp "$DEPS/go-bin/$name" "$folder/"
        printf '%s\n' "FROM $base" "RUN mkdir /$name && chown 65532 /$name" "COPY $name /usr/local/bin/" 'USER 65532' \
            "WORKDIR /$name" "ENTRYPOINT [\"/usr/local/bin/$name\"]" >"$folder/Dockerfile"
        "$DOCKER" build --quiet --tag "$image" "$folder" >/dev/null
        rm -rf "$folder"
    else
        warn "LEFT OUT: $name: no registry gives $image, and .deps/go-bin has no such program"
        return
    fi
    export "$variable=$image"
    services+=("$name")
}

observe_all() {
    if [[ $observability == no ]]; then return; fi
    observe jaeger AFD_JAEGER_IMAGE
    observe prometheus AFD_PROMETHEUS_IMAGE
    observe grafana AFD_GRAFANA_IMAGE
    if has_service jaeger; then export AFD_OTLP_ENDPOINT=http://jaeger:4317; fi
}

has_service() { [[ " ${services[*]} " == *" $1 "* ]]; }

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
    compose up --detach --no-build "${services[@]}" >&2
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

# within SECONDS COMMAND...: asks every second until it succeeds.
within() {
    local deadline=$((SECONDS + $1))
    shift
    until "$@"; do
        if ((SECONDS >= deadline)); then return 1; fi
        sleep 1
    done
}

# shows URL WORD...: whether what is answered there has all of the words.
shows() {
    local word
    answer=$(curl --silent --max-time 10 "$1" || true)
    shift
    for word in "$@"; do
        if [[ $answer != *"$word"* ]]; then return 1; fi
    done
}

look_at_traces() {
    local id url=http://127.0.0.1:${AFD_JAEGER_PORT:-16686} spans
    if ! has_service jaeger; then return; fi
    id=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
    status /v1/completions --header 'x-afd-trace-hops: 1' --header "traceparent: 00-$id-00f067aa0ba902b7-01" \
        --data '{"prompt": "Hello", "max_tokens": 4}' >/dev/null
    spans=(attention-svc ffn-svc '"request"' '"prefill"' '"decode"' '"hop shard 0"' '"hop shard 1"' '"serve shard 0"' '"serve shard 1"')
    within 60 shows "$url/api/traces/$id" "${spans[@]}" || die "Jaeger does not show the request's trace: ${answer:0:2000}"
    done_with "the request's trace is in Jaeger, with the spans of attention and both shards"
}

# Every target answers, every rule is understood, and what the dashboard asks first has an answer.
look_at_metrics() {
    local url=http://127.0.0.1:${AFD_PROMETHEUS_PORT:-9090}/api/v1
    if ! has_service prometheus; then return; fi
    all_up() { shows "$url/targets?state=active" attention:8000 ffn-0:7001 ffn-1:7001 && [[ $(grep -o '"health":"up"' <<<"$answer" | wc -l) == 3 ]]; }
    within 60 all_up || die "Prometheus does not reach all three: $answer"
    no_rule_fails() { shows "$url/rules" AfdFfnNotReady '"health":"ok"' && [[ $answer != *'"health":"err"'* && $answer != *'"health":"unknown"'* ]]; }
    within 60 no_rule_fails || die "Prometheus does not understand a rule: $answer"
    within 60 shows "$url/query?query=sum(vllm:generation_tokens_total)%3E0" '"value"' || die "Prometheus counts no tokens: $answer"
    done_with "Prometheus reaches all three, understands the rules and counts tokens"
}

look_at_dashboard() {
    local url=http://127.0.0.1:${AFD_GRAFANA_PORT:-3000}
    if ! has_service grafana; then return; fi
    within 120 shows "$url/api/dashboards/uid/afd-overview" '"title":"Attention and FFN"' || die "Grafana has no dashboard: $answer"
    done_with "Grafana has the dashboard"
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
    look_at_metrics
    look_at_dashboard
    wait_healthy
    kill_one_under_load
    heading "SIGTERM"
    "$DOCKER" stop --time 30 "$(compose ps -q attention)" >/dev/null
    [[ $("$DOCKER" inspect --format '{{.State.ExitCode}}' "$(compose ps -q attention)") == 0 ]] || die "attention did not end with 0"
    done_with "drained and ended with 0"
}

case $command in
down) AFD_PORT=0 compose down --volumes ;;
build) choose_base && choose_builder && build_images ;;
up)
    choose_base && choose_builder && build_images && observe_all && up
    done_with "ready"
    say "curl -H \"authorization: Bearer \$(cat $AFD_SECRETS/api-token)\" http://127.0.0.1:$AFD_PORT/v1/models"
    say "bash deploy/containers.sh down"
    ;;
test) choose_base && choose_builder && build_images && observe_all && test_it ;;
esac
