# The demo's processes: starting, waiting for, stopping. Sourced by demo.sh.
# Of each process NAME, .deps/demo holds NAME.log, NAME.pid, and NAME.address, which the service writes once it listens.

DEMO=$DEPS/demo
STARTED=() # names, in the order of their start
STOP_DEADLINE_S=15
exec {MESSAGES}>&2 # standard error as it was, for stop_all wherever it interrupts

now_ms() { echo $((${EPOCHREALTIME/[.,]/} / 1000)); }

clear_traces() {
    mkdir -p "$DEMO"
    rm -f "$DEMO"/*.log "$DEMO"/*.pid "$DEMO"/*.address
}

# start NAME COMMAND...: in a session of its own, so that a Ctrl-C reaches the demo alone, which then stops all in order.
# A NAME that was started before goes on in its log.
start() {
    local name=$1
    shift
    if ((${#STARTED[@]} == 0)); then START_MS=$(now_ms); fi
    rm -f "$DEMO/$name.address"
    setsid "$@" --address-file "$DEMO/$name.address" >>"$DEMO/$name.log" 2>&1 </dev/null {MESSAGES}>&- &
    echo $! >"$DEMO/$name.pid"
    if [[ " ${STARTED[*]-} " != *" $name "* ]]; then STARTED+=("$name"); fi
}

pid_of() { cat "$DEMO/$1.pid"; }

# Whether a process of ours still runs. One that an earlier demo left is known by its program too: its number may have
# gone to something else since.
is_running() {
    local pid
    [[ -f $DEMO/$1.pid ]] && pid=$(pid_of "$1") && kill -0 "$pid" 2>/dev/null || return 1
    [[ " ${STARTED[*]-} " == *" $1 "* || $(readlink "/proc/$pid/exe") == *-svc* ]]
}

# wait_until NAME "what for" COMMAND...: polls until the command succeeds, any of the processes dies or the deadline passes.
wait_until() {
    local name=$1 what=$2 any
    shift 2
    until "$@"; do
        for any in "${STARTED[@]}"; do
            is_running "$any" || show_log_and_die "$any" "$any ended before $name was $what"
        done
        (($(now_ms) - START_MS < START_DEADLINE_S * 1000)) || show_log_and_die "$name" "$name was not $what after $START_DEADLINE_S s"
        sleep 0.05
    done
}

# show_log_and_die NAME "what is wrong"
show_log_and_die() {
    printf '%s\n' "" "last lines of .deps/demo/$1.log:" >&2
    tail -n 20 "$DEMO/$1.log" >&2
    die "$2"
}

# Sets ADDRESS.
wait_for_address() {
    wait_until "$1" listening test -s "$DEMO/$1.address"
    ADDRESS=$(<"$DEMO/$1.address")
}

answers() { curl --silent --fail --max-time 2 --output /dev/null "$1"; }

wait_until_ready() {
    wait_until "$1" ready answers "$2"
    done_with "ready $(($(now_ms) - START_MS)) ms after the first start"
}

# while_runs PID COMMAND...: runs the command again and again, and ends with the exit code of the process.
while_runs() {
    local pid=$1
    shift
    while kill -0 "$pid"; do
        "$@"
        sleep 0.02
    done 2>/dev/null # bash itself would tell of every child that was killed, in the middle of the text
    wait "$pid"
}

describe() { say "$(printf '%-3s %-40s %-18s pid %s' "$1" "$2" "$ADDRESS" "$(pid_of "$1")")"; }

port_is_free() {
    python3 - "$1" <<'PYTHON'
import socket, sys
try:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", int(sys.argv[1])))
except OSError:
    sys.exit(1)
PYTHON
}

# stop NAME: asks it to drain and end, and insists after the deadline. Fails unless it ended by itself.
stop() {
    local pid begin
    is_running "$1" || return 1
    pid=$(pid_of "$1") begin=$(now_ms)
    kill -TERM "$pid"
    while is_running "$1"; do
        if (($(now_ms) - begin > STOP_DEADLINE_S * 1000)); then
            kill -KILL "$pid"
            warn "$1 did not end within $STOP_DEADLINE_S s: killed; its log: .deps/demo/$1.log"
            return 1
        fi
        sleep 0.02
    done
    rm -f "$DEMO/$1.pid"
}

# ended_well NAME PID: with 0, or by the signal itself before it listened.
ended_well() {
    local code=0
    wait "$2" || code=$?
    ((code == 0)) || { ((code == 143)) && [[ ! -s $DEMO/$1.address ]]; }
}

# stop_client: of a demo that ends early; what it wrote is on the terminal already.
stop_client() {
    if [[ -n ${CLIENT:-} ]] && kill -TERM "$CLIENT" 2>/dev/null; then
        wait "$CLIENT" 2>/dev/null || true
    fi
}

# In reverse: attention first, so that nobody misses an FFN. The exit code of the demo becomes 1 if one ended badly.
stop_all() {
    local code=$? index name pid
    trap - EXIT
    exec 2>&"$MESSAGES"
    trap '' INT TERM # whoever is impatient gets no half-stopped demo: every wait below has its deadline
    stop_client
    if ((${#STARTED[@]} > 0)); then heading "stop"; fi
    for ((index = ${#STARTED[@]} - 1; index >= 0; index--)); do
        name=${STARTED[index]} pid=$(pid_of "${STARTED[index]}")
        if stop "$name" && ended_well "$name" "$pid"; then
            done_with "$name ended"
        else
            warn "$name ended badly: see .deps/demo/$name.log"
            code=1
        fi
    done
    exit "$code"
}

kept() {
    local file
    for file in "$DEMO"/A*.pid "$DEMO"/F*.pid; do
        local name=${file##*/}
        if [[ -f $file ]] && is_running "${name%.pid}"; then echo "${name%.pid}"; fi
    done
}

refuse_if_kept_runs() {
    local names
    names=$(kept | paste -sd' ' -)
    [[ -z $names ]] || die "an earlier demo is still running: $names" "To end it: bash deploy/demo.sh --stop"
}

stop_kept() {
    local name names code=0
    names=$(kept)
    if [[ -z $names ]]; then say "nothing is running"; fi
    for name in $names; do
        if stop "$name"; then done_with "$name ended"; else code=1; fi
    done
    return $code
}
