# What the scripts of this folder share: where things are, how they speak, how they check. Sourced, never run.
# Messages go to standard error: standard output carries only what a script was asked for.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
DEPS=$ROOT/.deps

if [[ -t 2 && -z ${NO_COLOR:-} && ${TERM:-dumb} != dumb ]]; then
    BOLD=$'\e[1m' RED=$'\e[31m' GREEN=$'\e[32m' YELLOW=$'\e[33m' CYAN=$'\e[36m' PLAIN=$'\e[0m'
else
    BOLD='' RED='' GREEN='' YELLOW='' CYAN='' PLAIN=''
fi

heading() { printf '\n%s▸ %s%s\n' "$BOLD$CYAN" "$*" "$PLAIN" >&2; }
say() { printf '  %s\n' "$*" >&2; }
done_with() { printf '  %s✓%s %s\n' "$GREEN" "$PLAIN" "$*" >&2; }
warn() { printf '  %s! %s%s\n' "$YELLOW" "$*" "$PLAIN" >&2; }

# die "what is wrong" ["what to do about it" ...]
die() {
    printf '\n%s✗ %s%s\n' "$BOLD$RED" "$1" "$PLAIN" >&2
    shift
    if (($# > 0)); then printf '  %s\n' "$@" >&2; fi
    exit 1
}

# need COMMAND "what it is for" "how to get it": ends the script unless the command is there.
need() { command -v "$1" >/dev/null 2>&1 || die "$1 is missing: needed $2" "$3"; }

# Python with pip and venv; needed only when something has to be fetched.
need_python() {
    need python3 "to fetch libtorch and the demo's model" "Debian, Ubuntu: apt-get install python3 python3-pip python3-venv"
    python3 -c '' || die "$(command -v python3) does not run (see above)"
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' ||
        die "$(python3 --version 2>&1) is too old" "Python 3.9 or newer is needed."
    python3 -m pip --version >/dev/null 2>&1 ||
        die "python3 has no pip: needed to fetch libtorch and the demo's model" "Debian, Ubuntu: apt-get install python3-pip"
    python3 -c 'import ensurepip, venv' >/dev/null 2>&1 ||
        die "python3 has no venv: needed to convert the demo's model" "Debian, Ubuntu: apt-get install python3-venv"
}

# need_disk FOLDER MB "for what"
need_disk() {
    local free_mb
    free_mb=$(df -Pk "$1" | awk 'NR == 2 { print int($4 / 1024) }')
    ((free_mb >= $2)) || die "$1 has $free_mb MB left: $3 takes $2 MB" "Free some space, or clone onto another disk."
}

# reachable URL: whether its server answers within a few seconds.
reachable() { curl --silent --head --location --connect-timeout 4 --max-time 10 --output /dev/null --fail "$1"; }

# pip_download FOLDER ARGS...: wheels exactly as asked for; which Python runs here does not matter.
pip_download() {
    local folder=$1 bar=off
    shift
    if [[ -t 2 ]]; then bar=on; fi
    python3 -m pip download --disable-pip-version-check --progress-bar $bar --quiet --no-deps --only-binary=:all: \
        --dest "$folder" "$@" >&2
}

# locked NAME COMMAND...: two set-ups at once do the work one after the other, not twice. The command finds a fresh folder
# in $SCRATCH, on the disk of the final place so that moving a result there is atomic; it goes when the command ends.
locked() {
    local name=$1
    shift
    mkdir -p "$DEPS"
    (
        if command -v flock >/dev/null 2>&1; then
            exec 9>"$DEPS/.$name.lock"
            flock --nonblock 9 || { say "another run is fetching $name, waiting up to 15 minutes" && flock --wait 900 9; } ||
                die "gave up waiting for the other run that fetches $name" "If none is running, delete $DEPS/.$name.lock"
            rm -rf "$DEPS/.partial.$name".* # of a run that was killed: nobody else is at work here now
        fi
        SCRATCH=$(mktemp -d "$DEPS/.partial.$name.XXXXXX")
        trap 'rm -rf "$SCRATCH"' EXIT
        trap 'exit 130' INT
        trap 'exit 143' TERM
        "$@"
    )
}

# put_in_place SOURCE TARGET: renames a finished folder into its place; whoever reads TARGET sees the old or the new one.
put_in_place() {
    mkdir -p "$(dirname "$2")"
    if [[ -e $2 ]]; then mv "$2" "$SCRATCH/replaced"; fi
    mv "$1" "$2"
}

# go_built NAME VERSION: whether .deps/go-bin has this program in this version.
go_built() { [[ -x $DEPS/go-bin/$1 && -f $DEPS/go-bin/.$1 && $(<"$DEPS/go-bin/.$1") == "$2" ]]; }

# build_go NAME MODULE VERSION [COMMAND]: builds ./cmd/NAME of a Go module into .deps/go-bin, from a copy of the module's
# folder in which COMMAND has been run: `go install` refuses a module that replaces another. Within `locked`.
build_go() {
    local name=$1 module=$2 version=$3 folder
    if go_built "$name" "$version"; then return; fi # another run was quicker
    need_disk "$DEPS" 1000 "$name"
    say "from the Go module proxy; the first build takes some minutes"
    folder=$(GOFLAGS='' go mod download -json "$module@$version" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
    [[ -d $folder ]] || die "could not download $module@$version (see above)"
    cp -r "$folder" "$SCRATCH/source"
    chmod -R u+w "$SCRATCH/source"
    (
        cd "$SCRATCH/source"
        if (($# > 3)); then "$4"; fi
        GOFLAGS=-mod=readonly go build -buildvcs=false -trimpath -ldflags '-s -w' -o "$SCRATCH/$name" "./cmd/$name"
    )
    mkdir -p "$DEPS/go-bin"
    mv "$SCRATCH/$name" "$DEPS/go-bin/$name"
    echo "$version" >"$DEPS/go-bin/.$name"
}

mb() { du -sm "$1" | awk '{ print $1 " MB" }'; }

# target_folder: where cargo puts what it builds.
target_folder() {
    cargo metadata --no-deps --format-version 1 | sed 's/.*"target_directory":"\([^"]*\)".*/\1/'
}
