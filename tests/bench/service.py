"""Running services for the benchmarks beside this file, what `attention-svc bench` says of them, and their counters."""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MODELS = ROOT / ".deps/models"
START_LIMIT_S = 120
RUN_LIMIT_S = 900


class Process:
    """One service, on a free port unless it is told which."""

    def __init__(self, options, name, args, env=None, listen="127.0.0.1:0"):
        folder = Path(options.folder)
        self.address_file = folder / f"{name}.address"
        # One of the same name that has ended listened elsewhere.
        self.address_file.unlink(missing_ok=True)
        self.log = open(folder / f"{name}.log", "w+")
        kind = "ffn-svc" if "-ffn" in name else "attention-svc"
        command = [options.binaries / kind, "serve", "--listen", listen, "--log-level", "warn",
                   "--address-file", self.address_file, *args]
        self.process = subprocess.Popen([str(part) for part in command], env={**os.environ, **(env or {})},
                                        stdout=self.log, stderr=subprocess.STDOUT)

    def address(self):
        deadline = time.monotonic() + START_LIMIT_S
        while not (self.address_file.exists() and self.address_file.read_text().strip()):
            self._look(deadline, "does not listen")
        return self.address_file.read_text().strip()

    def wait_ready(self):
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                with urllib.request.urlopen(f"http://{self.address()}/ready", timeout=5):
                    return
            except OSError:
                self._look(deadline, "is not ready")

    def _look(self, deadline, what):
        if self.process.poll() is not None or time.monotonic() > deadline:
            self.log.seek(0)
            sys.exit(f"a service {what}:\n{self.log.read()}")
        time.sleep(0.02)

    def url(self):
        return f"http://{self.address()}"

    def counters(self):
        """Every sample of /metrics, by name with its labels."""
        with urllib.request.urlopen(f"{self.url()}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        samples = (re.fullmatch(r"([^#\s]\S*(?: [^{}]*\})?) (\S+)", line) for line in lines)
        return {sample[1]: float(sample[2]) for sample in samples if sample}

    def cpu_s(self):
        """User and system time so far, threads that have ended included."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self):
        self.process.terminate()
        self.process.wait(timeout=60)
        self.log.close()


class Pair:
    """Attention ranks and the one FFN rank that they share. `env` is added to the environment of all."""

    def __init__(self, options, name, ranks=1, attention=(), ffn=(), env=None):
        common = ["--model", options.model, "--dtype", options.dtype, "--threads", options.threads]
        self.options = options
        self.ffn = Process(options, f"{name}-ffn", [*common, *ffn], env)
        args = [*common, "--ffn", self.ffn.address(), *attention]
        self.attention = [Process(options, f"{name}-attention-{rank}", [*args, "--rank", rank], env)
                          for rank in range(ranks)]
        for process in self.attention:
            process.wait_ready()

    def cpu_s(self):
        return sum(process.cpu_s() for process in [*self.attention, self.ffn])

    def end(self):
        for process in [*self.attention, self.ffn]:
            process.end()


class Load:
    """Requests on one address, under way until `tokens_per_s` is asked for."""

    def __init__(self, options, process, concurrency, requests, input_len, output_len, seed=None):
        self.report = tempfile.NamedTemporaryFile(dir=options.folder, suffix=".json")
        command = [options.binaries / "attention-svc", "bench", "--url", process.url(), "--concurrency", concurrency,
                   "--requests-per-level", requests, "--input-len", input_len, "--output-len", output_len,
                   "--json", self.report.name, *(["--seed", seed] if seed is not None else [])]
        self.process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True)

    def level(self):
        """What came of it, once it is over."""
        out, _ = self.process.communicate(timeout=RUN_LIMIT_S)
        if self.process.returncode != 0:
            sys.exit(f"bench: {out}")
        level = json.loads(Path(self.report.name).read_text())["servers"][0]["levels"][0]
        self.report.close()
        if level.get("failed"):
            sys.exit(f"requests failed: {level}")
        return level

    def tokens_per_s(self):
        return self.level()["output_tokens_per_s"]

    def stop(self):
        """Whatever is under way is given up."""
        self.process.terminate()
        self.process.communicate(timeout=60)
        self.report.close()


def difference(before, after, name):
    """How much a counter grew."""
    return after.get(name, 0.0) - before.get(name, 0.0)


def gauge(samples, name):
    """The sum over all labels."""
    return sum(value for key, value in samples.items() if key.split("{")[0] == name)


def mean_between(before, after, histogram):
    """The mean of what a histogram was told in between; none when it was told nothing."""
    count = difference(before, after, f"{histogram}_count")
    return difference(before, after, f"{histogram}_sum") / count if count else None


def quartiles(values):
    """Lower quartile, median, upper quartile."""
    return tuple(statistics.quantiles(values, n=4, method="inclusive")) if len(values) > 1 else tuple(3 * list(values))


def parser(doc, **defaults):
    """The options that these benchmarks share."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default=defaults.get("model", str(MODELS / "smollm2-135m-moe")))
    made.add_argument("--binaries", type=Path, default=ROOT / "target/release")
    made.add_argument("--dtype", default=defaults.get("dtype", "bfloat16"))
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--rounds", type=int, default=defaults.get("rounds", 30))
    made.add_argument("--json", type=Path)
    return made
