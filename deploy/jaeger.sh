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
BINARY=$DEPS/go-bin/jaeger

heading "Jaeger $VERSION"
if ! go_built jaeger "$VERSION"; then
    need go "to build Jaeger" "Get Go from https://go.dev/dl (Debian's may be too old)."
    locked jaeger build_go jaeger github.com/jaegertracing/jaeger "$VERSION"
fi
done_with "$BINARY ($(mb "$BINARY"))"
if [[ $run == yes ]]; then exec "$BINARY" --config "$ROOT/deploy/observability/jaeger.yaml"; fi
