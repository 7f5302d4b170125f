"""What tracing costs: tokens/s of a pair with no exporter, and with one at --trace-hops-ratio 0 and 0.01.

    python3 tests/bench/tracing.py [--model FOLDER] [--binaries FOLDER] [--rounds 15] [--batch 8] [--json FILE]

Three pairs (one attention rank, one FFN rank) run all the time and are measured in turn, so that a busy machine slows all
of them; what is told is the median, over the rounds, of each pair's rate beside that of the pair without an exporter in
the same round, with the quartiles. The exporter's collector takes everything and keeps nothing. Goals: less than 0.5 %
at ratio 0, less than 2 % at 0.01. Ends with 1 where a median misses its goal.
"""
import argparse
import http.server
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# Name, ratio (none: no exporter), most that it may cost.
CASES = [("off", None, None), ("ratio 0", "0", 0.005), ("ratio 0.01", "0.01", 0.02)]
START_LIMIT_S = 120
RUN_LIMIT_S = 600


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes spans and forgets them."""

    protocol_version = "HTTP/1.1"
    requests = 0

    def do_POST(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        Collector.requests += 1
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


class Process:
    def __init__(self, binary, args, env, folder, name):
        self.address_file = Path(folder) / f"{name}.address"
        self.log = open(Path(folder) / f"{name}.log", "w+")
        command = [binary, "serve", *args, "--address-file", self.address_file, "--log-level", "warn"]
        self.process = subprocess.Popen([str(part) for part in command], env=env, stdout=self.log, stderr=subprocess.STDOUT)

    def address(self):
        deadline = time.monotonic() + START_LIMIT_S
        while not (self.address_file.exists() and self.address_file.read_text().strip()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.log.seek(0)
                sys.exit(f"a service does not listen:\n{self.log.read()}")
            time.sleep(0.05)
        return self.address_file.read_text().strip()

    def end(self):
        self.process.terminate()
        self.process.wait(timeout=60)


class Pair:
    def __init__(self, options, folder, name, ratio, collector):
        environment = dict(os.environ)
        if ratio is not None:
            environment |= {"OTEL_EXPORTER_OTLP_ENDPOINT": collector, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
        common = ["--model", options.model, "--listen", "127.0.0.1:0", "--dtype", "bfloat16", "--threads", options.threads]
        name = name.replace(" ", "-")
        self.ffn = Process(options.binaries / "ffn-svc", common, environment, folder, f"{name}-ffn")
        args = common + ["--ffn", self.ffn.address()] + (["--trace-hops-ratio", ratio] if ratio else [])
        self.attention = Process(options.binaries / "attention-svc", args, environment, folder, f"{name}-attention")
        self.url = f"http://{self.attention.address()}"

    def rate(self, options, folder):
        report = Path(folder) / "report.json"
        command = [options.binaries / "attention-svc", "bench", "--url", self.url, "--concurrency", options.batch,
                   "--requests-per-level", options.batch, "--input-len", 16, "--output-len", options.output_len, "--json", report]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=RUN_LIMIT_S)
        if done.returncode != 0:
            sys.exit(f"bench: {done.stdout}\n{done.stderr}")
        return json.loads(report.read_text())["servers"][0]["levels"][0]["output_tokens_per_s"]

    def end(self):
        self.attention.end()
        self.ffn.end()


def measure(options, folder):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    collector = f"http://127.0.0.1:{server.server_port}"
    pairs = {name: Pair(options, folder, name, ratio, collector) for name, ratio, _ in CASES}
    rates = {name: [] for name in pairs}
    for turn in range(options.rounds + 1):
        # Whoever comes first in a round comes last in the next: no pair has the better place.
        for name in list(pairs)[:: 1 if turn % 2 else -1]:
            rate = pairs[name].rate(options, folder)
            # The first round warms up.
            if turn > 0:
                rates[name].append(rate)
                print(f"round {turn}: {name} {rate:.1f} tokens/s", file=sys.stderr)
    for pair in pairs.values():
        pair.end()
    return rates


def table(options, rates):
    print(f"{options.model}, one attention and one FFN rank, bfloat16, {options.threads} threads each, {options.batch} in "
          f"flight, answers of {options.output_len} tokens, {options.rounds} rounds; {Collector.requests} exports taken")
    print(f"{'tracing':<11} {'tokens/s':>9} {'cost':>8} {'quartiles of the cost':>24} {'goal':>8}")
    met = True
    for name, ratio, goal in CASES:
        row = f"{name:<11} {statistics.median(rates[name]):>9.1f} "
        if ratio is None:
            print(row)
            continue
        costs = [1 - on / off for on, off in zip(rates[name], rates["off"])]
        low, median, high = statistics.quantiles(costs, n=4)
        print(row + f"{100 * median:>7.2f}% {f'{100 * low:.2f} to {100 * high:.2f} %':>24} {f'< {100 * goal:.1f} %':>8}")
        met &= median < goal
    print("goals met" if met else "goals missed")
    return met


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / ".deps/models/smollm2-135m"))
    parser.add_argument("--binaries", type=Path, default=ROOT / "target/release")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rates = measure(options, folder)
    if options.json:
        options.json.write_text(json.dumps(rates, indent=1) + "\n")
    sys.exit(0 if table(options, rates) else 1)


if __name__ == "__main__":
    main()
