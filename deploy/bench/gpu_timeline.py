"""What `attention-svc profile` wrote of a pair on two GPUs, in lines of text. Used by gpu_pair.py."""


def told(events, lines, label):
    """What a timeline says of its decode steps."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [dict(e, lane=lanes[e["pid"], e["tid"]], end=e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    device = [e for e in slices if e["lane"] == "device"]
    key = lambda e: (e["args"]["step"], e["args"]["layer"], e["lane"].split(",")[0])
    hops = {key(e): e for e in slices if "hops to shard" in e["lane"]}
    computed = [e for e in slices if e["name"].startswith("compute ") and processes[e["pid"]].startswith("F")]
    mean = lambda found: sum(e["dur"] for e in found) / max(len(found), 1)
    attends = [e for e in device if e["name"].startswith("attention")]
    pairs = [(hops.get(key(e)), e) for e in computed]
    inside = [h is not None and h["ts"] - 30 <= e["ts"] and e["end"] <= h["end"] + 30 for h, e in pairs]
    beyond = [h["dur"] - e["dur"] for h, e in pairs if h]
    # From the first attention of a step to the last hop's end, on both devices.
    spans = {}
    for e in (*attends, *hops.values()):
        begin, end = spans.get(e["args"]["step"], (e["ts"], e["end"]))
        spans[e["args"]["step"]] = (min(begin, e["ts"]), max(end, e["end"]))
    span = sum(end - begin for begin, end in spans.values())
    bubbles = [100 - 100 * sum(e["dur"] for e in found) / max(span, 1) for found in (attends, computed)]
    good = len(attends) >= 27 * 9 and len(computed) == len(hops) == len(attends) and sum(inside) >= 0.95 * len(inside)
    lines.append(
        f"  {label}: {sorted(set(lanes.values()))} of {sorted(processes.values())}\n"
        f"      a layer, us: attention {mean(attends):.1f}, hop {mean(list(hops.values())):.1f}, of it the FFN {mean(computed):.1f}; "
        f"{sum(inside)} of {len(inside)} computations inside their hop (within 30 us); hop beyond compute, median {sorted(beyond)[len(beyond) // 2] if beyond else -1:.1f} "
        f"{'ok' if good else 'FAILED'}\n"
        f"      bubbles (eager, with marks): attention {bubbles[0]:.0f} %, FFN {bubbles[1]:.0f} %"
    )
    return good


def steps_of_prompts(events, lines):
    """A line a step, ms. Between: since the step before had ended on attention's GPU, of it the host's telling, pause and planning."""
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    roles = {e["pid"]: e["args"]["name"][0] for e in events if e["name"] == "process_name"}
    slices = [dict(e, lane=lanes[e["pid"], e["tid"]], end=e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    before, told_at = None, None
    lines.append("  rows (stages)  step  between (told, pause, planned)  on the devices  attention's busy  FFN's busy  FFN's first hop  FFN's idle between hops")
    for step in (e for e in slices if e["lane"] == "engine" and e["name"].startswith("step ")):
        own = [e for e in slices if e["args"].get("step") == step["args"]["step"]]
        attends = [e for e in own if e["lane"] == "device" and e["name"].startswith("attention")]
        hops = [e for e in own if "hops to shard" in e["lane"]]
        computed = sorted((e for e in own if e["name"].startswith("compute ") and roles[e["pid"]] == "F"), key=lambda e: e["ts"])
        if not attends or not hops or not computed or step["args"]["rows"] <= 64:
            continue
        begin, end = min(e["ts"] for e in attends), max(e["end"] for e in hops)
        idle = sum(max(b["ts"] - a["end"], 0) for a, b in zip(computed, computed[1:]))
        busy = lambda found: sum(e["dur"] for e in found)
        told = [
            step["dur"],
            begin - before if before else 0,
            told_at - before if before else 0,
            step["ts"] - told_at if before else 0,
            begin - step["ts"],
            end - begin,
            busy(attends),
            busy(computed),
            computed[0]["ts"] - begin,
            idle,
        ]
        before, told_at = end, step["end"]
        lines.append(f"  {step['args']['rows']:6} ({step['args']['stages']})  " + "  ".join(f"{us / 1e3:8.2f}" for us in told))
