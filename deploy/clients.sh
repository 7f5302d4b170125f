#!/usr/bin/env bash
# Builds the clients of tests/clients in every language whose tools are here, into .deps/clients/LANGUAGE. Run it as often
# as you like: what is built from the same sources stays.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
    cat <<USAGE
usage: bash deploy/clients.sh [python] [go] [node] [java] [buf]

  Without arguments: all four clients whose tools are here. buf: the linter of proto/, by go install (minutes).
  Exit status 3: the tools of a language that was named are not here; standard error says which.
USAGE
}

CLIENTS=$DEPS/clients
NO_TOOLS=3

# The versions of what is fetched by name; all else is pinned in the clients' own files.
PROTOC_GEN_GO=google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12
PROTOC_GEN_GO_GRPC=google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2
BUF=github.com/bufbuild/buf/cmd/buf@v1.75.0

# has_tools LANGUAGE: if not, says what is missing.
has_tools() {
    local needed missing=()
    case $1 in
    python) needed=(python3) ;;
    go) needed=(go python3) ;; # protoc comes with Python's grpcio-tools: one thing less to install
    node) needed=(node npm) ;;
    java) needed=(java javac mvn) ;;
    buf) needed=(go) ;;
    esac
    for tool in "${needed[@]}"; do command -v "$tool" >/dev/null 2>&1 || missing+=("$tool"); done
    if ((${#missing[@]} == 0)); then return 0; fi
    warn "$1 is left out: ${missing[*]} not found"
    return 1
}

# fingerprint LANGUAGE: changes whenever a rebuild is due.
fingerprint() {
    (
        cd "$ROOT"
        sources "$1" | sort | while read -r file; do sha256sum "$file"; done
        sha256sum deploy/clients.sh
    ) | sha256sum | cut -d ' ' -f 1
}

# Of a client and of everything it is generated from, without what a build in place left there.
sources() {
    local folders=(proto)
    if [[ $1 != buf ]]; then folders+=("tests/clients/$1"); fi
    if [[ $1 == go ]]; then folders+=(tests/clients/python/requirements.txt); fi
    find "${folders[@]}" \( -name gen -o -name dist -o -name target -o -name node_modules -o -name venv -o -name __pycache__ \) \
        -prune -o -type f -print
}

# copy LANGUAGE: fresh sources beside what is kept from the last build. From there ../../../proto is what it was.
copy() {
    mkdir -p "$CLIENTS/$1"
    (cd "$ROOT/tests/clients/$1" && (cd "$ROOT" && sources "$1") | sed -n "s|^tests/clients/$1/||p" | tar -cf - -T -) |
        tar -xf - -C "$CLIENTS/$1"
    rm -rf "$CLIENTS/$1/gen"
}

build_python() {
    cd "$CLIENTS/python"
    if ! cmp -s requirements.txt venv/installed.txt; then
        rm -rf venv
        python3 -m venv venv
        venv/bin/python -m pip install --quiet --disable-pip-version-check --only-binary=:all: --requirement requirements.txt >&2
        cp requirements.txt venv/installed.txt
    fi
    mkdir gen
    venv/bin/python -m grpc_tools.protoc -I../../../proto --python_out=gen --grpc_python_out=gen ../../../proto/afd/v1/*.proto
}

build_go() {
    cd "$CLIENTS/go"
    GOBIN=$PWD/bin go install "$PROTOC_GEN_GO" >&2
    GOBIN=$PWD/bin go install "$PROTOC_GEN_GO_GRPC" >&2
    mkdir gen
    PATH=$PWD/bin:$PATH "$CLIENTS/python/venv/bin/python" -m grpc_tools.protoc -I../../../proto \
        --go_out=gen --go_opt=paths=source_relative --go-grpc_out=gen --go-grpc_opt=paths=source_relative \
        ../../../proto/afd/v1/*.proto
    go vet .
    go build -o client .
}

build_node() {
    cd "$CLIENTS/node"
    if ! cmp -s package-lock.json node_modules/.installed; then
        npm ci --no-audit --no-fund --loglevel=error >&2
        cp package-lock.json node_modules/.installed
    fi
    rm -rf src/gen dist
    npm run --silent build >&2
}

build_java() {
    cd "$CLIENTS/java"
    mvn --batch-mode --quiet -Dstyle.color=never package >&2
}

build_buf() {
    mkdir -p "$CLIENTS/buf"
    GOBIN=$CLIENTS/buf go install "$BUF" >&2
}

prepare() {
    local language=$1 wanted=$2 begin=$SECONDS code
    if is_built "$language" "$wanted"; then return; fi # another run was quicker
    if [[ $language != buf ]]; then copy "$language"; fi
    # Not `|| die`: in the left half of it a failing command would not end the build.
    set +e
    (
        set -e
        build_"$language"
    )
    code=$?
    set -e
    if ((code != 0)); then die "$language does not build (see above)"; fi
    echo "$wanted" >"$CLIENTS/$language/.built"
    done_with "$language: $((SECONDS - begin)) s"
}

is_built() { [[ -f $CLIENTS/$1/.built && $(<"$CLIENTS/$1/.built") == "$2" ]]; }

build() {
    local wanted
    if [[ $1 == go ]]; then build python; fi
    wanted=$(fingerprint "$1")
    if is_built "$1" "$wanted"; then return; fi
    heading "client: $1"
    locked "clients-$1" prepare "$1" "$wanted"
}

languages=()
for argument in "$@"; do
    case $argument in
    -h | --help) usage && exit 0 ;;
    python | go | node | java | buf) languages+=("$argument") ;;
    *) usage >&2 && die "unknown language $argument" ;;
    esac
done

status=0
if ((${#languages[@]} == 0)); then
    for language in python go node java; do
        if has_tools "$language"; then build "$language"; fi
    done
else
    for language in "${languages[@]}"; do
        if has_tools "$language"; then build "$language"; else status=$NO_TOOLS; fi
    done
fi
exit $status
