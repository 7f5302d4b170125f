#!/usr/bin/env bash
# Installs Prometheus into .deps/go-bin, from its Go module, for machines that reach no image registry: without the pages of
# its user interface, and without service discovery other than files and fixed targets.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

VERSION=v0.305.0 # of the module; the program calls it 3.5.0
BINARY=$DEPS/go-bin/prometheus

# Clients of every cloud there is take most of a build, and nobody here asks them.
without_plugins() {
    printf '// Package plugins is empty in this build.\npackage plugins\n' >plugins/plugins.go
}

heading "Prometheus $VERSION"
if ! go_built prometheus "$VERSION"; then
    need go "to build Prometheus" "Get Go from https://go.dev/dl (Debian's may be too old)."
    locked prometheus build_go prometheus github.com/prometheus/prometheus "$VERSION" without_plugins
fi
done_with "$BINARY ($(mb "$BINARY"))"
