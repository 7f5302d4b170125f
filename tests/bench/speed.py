"""The monolithic mode beside Hugging Face transformers and beside bare matrix products, in one run on one machine.

    python3 tests/bench/speed.py [--model FOLDER] [--threads N] [--batches 1,8] [--rounds 3] [--json FILE]

Builds the release binaries first. transformers comes into .deps/bench from PyPI, pinned in requirements.txt (about 2 GB
with torch), the first time; without it (--no-transformers) its column is empty. All three take turns, round after round,
so that a machine that grows warm or busy slows all of them; the table has medians. Goals: 1.4 x transformers' best of
float32 and bfloat16, 0.8 x the products in bfloat16. Ends with 1 where a goal is missed.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DTYPES = ["float32", "bfloat16"]
GOALS = {"transformers": 1.4, "products": 0.8}
START_LIMIT_S = 120
RUN_LIMIT_S = 1800


def run(*command, **options):
    command = [str(part) for part in command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT_S, cwd=ROOT, **options)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def build():
    """The server's binary and the products' program."""
    print("building ...", file=sys.stderr)
    run("cargo", "build", "--release", "-p", "attention-svc", "--bins")
    lines = run("cargo", "bench", "-p", "afd-tests", "--bench", "products", "--no-run", "--message-format=json")
    messages = [json.loads(line) for line in lines.splitlines() if line.startswith("{")]
    programs = [m["executable"] for m in messages if m.get("target", {}).get("name") == "products" and m.get("executable")]
    metadata = json.loads(run("cargo", "metadata", "--no-deps", "--format-version", "1"))
    return Path(metadata["target_directory"]) / "release" / "attention-svc", programs[-1]


def transformers_python():
    venv = ROOT / ".deps" / "bench"
    python, mark = venv / "bin" / "python", venv / "installed.txt"
    pinned = (HERE / "requirements.txt").read_text()
    if not mark.exists() or mark.read_text() != pinned:
        print("fetching torch and transformers ...", file=sys.stderr)
        run(sys.executable, "-m", "venv", "--clear", venv)
        run(python, "-m", "pip", "install", "-q", "-r", HERE / "requirements.txt")
        mark.write_text(pinned)
    return python


class Ours:
    """The monolithic mode, running."""

    def __init__(self, binary, options, dtype):
        self.binary, self.options = binary, options
        self.folder = tempfile.TemporaryDirectory()
        address = Path(self.folder.name) / "address"
        self.log = open(Path(self.folder.name) / "log", "w+")
        self.process = subprocess.Popen(
            [binary, "serve", "--model", options.model, "--ffn", "local", "--dtype", dtype, "--listen", "127.0.0.1:0",
             "--threads", str(options.threads), "--address-file", address, "--log-level", "warn"],
            stdout=self.log, stderr=subprocess.STDOUT, cwd=ROOT)
        deadline = time.monotonic() + START_LIMIT_S
        while not (address.exists() and address.read_text().strip()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.log.seek(0)
                sys.exit(f"attention-svc does not listen:\n{self.log.read()}")
            time.sleep(0.05)
        self.url = f"http://{address.read_text().strip()}"

    def rate(self, batch):
        options = self.options
        report = Path(self.folder.name) / "report.json"
        run(self.binary, "bench", "--url", self.url, "--concurrency", batch, "--requests-per-level", 2 * batch,
            "--input-len", options.input_len, "--output-len", options.output_len, "--json", report)
        return json.loads(report.read_text())["servers"][0]["levels"][0]["output_tokens_per_s"]

    def end(self):
        self.process.terminate()
        self.process.wait(timeout=30)


def measure(options):
    binary, products = build()
    python = None if options.no_transformers else transformers_python()
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    rates = {}

    def note(batch, what, rate):
        rates.setdefault((batch, what), []).append(rate)
        print(f"batch {batch}: {what} {rate:.1f} tokens/s", file=sys.stderr)

    for _ in range(options.rounds):
        for batch in options.batches:
            # One at a time: two servers would share the cores.
            ours = Ours(binary, options, "bfloat16")
            note(batch, "ours", ours.rate(batch))
            ours.end()
            out = run(products, options.model, "bfloat16", batch, 60, options.threads, env=environment)
            note(batch, "products", float(out))
            for dtype in DTYPES if python else []:
                out = run(python, HERE / "transformers_generate.py", options.model, dtype, batch, options.input_len,
                          options.output_len, options.threads, 1, env=environment)
                note(batch, f"transformers {dtype}", float(out))
    return {key: statistics.median(values) for key, values in rates.items()}


def table(options, medians):
    """Rows of the table, and whether every goal is met."""
    print(f"{options.model}, {options.threads} threads, prompts of {options.input_len}, answers of {options.output_len} "
          f"tokens; tokens/s, medians of {options.rounds}")
    print(f"{'batch':>5} {'ours':>8} {'transformers':>13} {'ratio':>6} {'products':>9} {'ratio':>6}")
    met = True
    for batch in options.batches:
        ours, products = medians[batch, "ours"], medians[batch, "products"]
        theirs = max((medians.get((batch, f"transformers {dtype}"), 0.0) for dtype in DTYPES))
        row = f"{batch:>5} {ours:>8.1f} "
        row += f"{theirs:>13.1f} {ours / theirs:>6.2f} " if theirs else f"{'-':>13} {'-':>6} "
        print(row + f"{products:>9.1f} {ours / products:>6.2f}")
        met &= (not theirs or ours >= GOALS["transformers"] * theirs) and ours >= GOALS["products"] * products
    print("goals met" if met else f"goals missed: {GOALS}")
    return met


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / ".deps/models/smollm2-135m"))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    medians = measure(options)
    if options.json:
        report = [{"batch": batch, "what": what, "tokens_per_s": rate} for (batch, what), rate in medians.items()]
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(0 if table(options, medians) else 1)


if __name__ == "__main__":
    main()
