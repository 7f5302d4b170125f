#!/usr/bin/env bash
# Installs Jaeger into .deps/go-bin, from its Go module, and runs it when asked to. What is there already stays.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
    cat <<USAGE
usage: bash deploy/jaeger.sh [--run]

  --run   also runs it, in the foreground, with spans in memory: http://127.0.0.1:16686 shows them,
          OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4317 makes both services send theirs
USAGE
}

run=no
for argument in "$@"; do
    case $argument in
    --run) run=yes ;;
    -h | --help) usage && exit 0 ;;
    *) usage >&2 && die "unknown option $argument" ;;
    esac
done

VERSION=v1.76.0
MODULE=github.com/jaegertracing/jaeger
BINARY=$DEPS/go-bin/jaeger
STAMP=$DEPS/go-bin/.jaeger # holds the version that is there

is_installed() { [[ -x $BINARY && -f $STAMP && $(<"$STAMP") == "$VERSION" ]]; }

# `go install` refuses a module that replaces another; built from its own folder the same module is the main one.
install_jaeger() {
    if is_installed; then return; fi # another run was quicker
    local folder
    need_disk "$DEPS" 500 "Jaeger"
    say "from the Go module proxy; the first build takes some minutes"
    folder=$(GOFLAGS='' go mod download -json "$MODULE@$VERSION" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
    [[ -d $folder ]] || die "could not download $MODULE@$VERSION (see above)"
    (cd "$folder" && GOFLAGS=-mod=readonly go build -buildvcs=false -trimpath -ldflags '-s -w' -o "$SCRATCH/jaeger" ./cmd/jaeger)
    mkdir -p "$DEPS/go-bin"
    mv "$SCRATCH/jaeger" "$BINARY"
    echo "$VERSION" >"$STAMP"
}

heading "Jaeger $VERSION"
if ! is_installed; then
    need go "to build Jaeger" "Get Go from https://go.dev/dl (Debian's may be too old)."
    locked jaeger install_jaeger
fi
done_with "$BINARY ($(mb "$BINARY"))"
if [[ $run == yes ]]; then exec "$BINARY" --config "$ROOT/deploy/observability/jaeger.yaml"; fi
