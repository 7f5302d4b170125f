"""Ranks of a pair on GPUs are killed, stopped and told to end while requests decode. Sections of gpu_pair.py."""
import os
import signal
import time

from gpu_rig import MODEL, Pair, expected_of, free_address, full_size_ffn, tiny_attention, tiny_ffn, together
from gpu_serve import complete, forced, full_size, metrics


def pace(args):
    """Steps until something happens, and tokens of an answer: beside attention every hop waits for the device's turns."""
    return (10, 60) if args.one_gpu else (100, 600)


def kill_when_decoding(running, process, steps=None):
    """kill -9 once the engine has run so many steps more."""
    steps = steps or pace(running.args)[0]
    until = float(metrics(running.address)["afd_steps_total"]) + steps
    deadline = time.time() + 60
    while float(metrics(running.address)["afd_steps_total"]) < until and time.time() < deadline:
        time.sleep(0.01)
    os.kill(process.process.pid, signal.SIGKILL)


def judge_texts(address, prompts, texts, lines, label):
    """The token oracle: no token further than 1.0 from the best one, teacher-forced."""
    gaps = [forced(address, MODEL, p["input_ids"], t) for p, t in zip(prompts, texts) if isinstance(t, str)]
    told = [gap for one in gaps for gap in one]
    good = bool(told) and max(told) <= 1.0
    worst = f"{sum(gap == 0 for gap in told)} the best, largest gap {max(told, default=-1):.3f}"
    lines.append(f"    {label}: {len(told)} tokens judged, {worst} (allowed 1.0) {'ok' if good else 'FAILED'}")
    return good


def loss(args, lines):
    good = loss_exact(args, lines)
    return loss_full_size(args, lines) and good


def loss_exact(args, lines):
    """In float32 every answer is the recorded one, whatever is killed meanwhile: the FFN, then attention."""
    name, listen, good = "tiny-deepseek-v2", free_address(), True
    expected = expected_of(args, name)
    running = Pair(args, "loss exact", [(tiny_ffn(args, name), args.ffn_gpu)], tiny_attention(args, name), "cuda-ipc", listen)
    try:
        until, answers, back = [time.time() + 60], [], []

        def ask(p):
            while time.time() < until[0]:
                answers.append((p, complete(running.address, name, p, len(p["generated_ids"])), time.time()))

        def kill():
            try:
                kill_when_decoding(running, running.ffns[0])
                killed = time.time()
                running.another_ffn(listen)
                running.ffns[-1].address(time.time() + 60)
                back.append(time.time())
                return killed
            finally:
                until[0] = time.time() + 3

        killed, *others = together([kill, *(lambda p=p: ask(p) for p in expected)])
        wrong = sum(text != p["generated_text"] for p, text, _ in answers)
        after = sum(at > killed for _, _, at in answers) if isinstance(killed, float) else 0
        errors = [repr(one)[:200] for one in others if one is not None]
        counted = metrics(running.address)["afd_ffn_losses_total"]
        good &= wrong == 0 and not errors and after > 0
        lines.append(f"  float32, FFN killed: {len(answers)} answers, {after} of them after the kill, {wrong} wrong; losses {counted} {errors or ''}")
        later = [at for _, _, at in answers if back and at > back[0]]
        if later:
            lines.append(f"    a new FFN was there {back[0] - killed:.1f} s after the kill, the first answer {min(later) - back[0]:.1f} s later")
        asked = [lambda p=p: complete(running.address, name, p, len(p["generated_ids"])) for p in expected * 4]
        failed = together([lambda: kill_when_decoding(running, running.attention, 20), *asked])[1:]
        running.start_attention()
        found = together([lambda p=p: complete(running.address, name, p, len(p["generated_ids"])) for p in expected])
        same = sum(text == p["generated_text"] for text, p in zip(found, expected))
        cut = sum(not isinstance(text, str) for text in failed)
        good &= same == len(expected)
        lines.append(f"  float32, attention killed with {cut} requests in it: a new one on the same FFN answers {same} of {len(expected)} as recorded")
    finally:
        running.stop()
    return good


def loss_full_size(args, lines):
    """Full size in bfloat16, graphs replayed on both sides: what is answered is teacher-forced through the same pair."""
    good, listen = True, free_address()
    ffn, tokens = full_size_ffn(args), pace(args)[1]
    running = Pair(args, "loss", [(ffn, args.ffn_gpu)], full_size(args, MODEL, "--stages", "1"), "cuda-ipc", listen)
    try:
        prompts = [{"input_ids": [(7919 * (i + 1) * (k + 3)) % 100000 + 3 for k in range(200)]} for i in range(8)]
        calls = [lambda p=p: complete(running.address, MODEL, p, tokens) for p in prompts]
        undisturbed = together(calls)

        def kill():
            kill_when_decoding(running, running.ffns[0])
            running.another_ffn(listen)

        found = together([kill, *calls])[1:]
        answered = sum(isinstance(text, str) and len(text.split()) == tokens for text in found)
        same = sum(text == before for text, before in zip(found, undisturbed))
        lines.append(f"  bfloat16, FFN killed: {answered} of 8 answered in full, {same} word for word as without it")
        lines += [f"    {text!r}"[:300] for text in found if not isinstance(text, str)]
        good &= answered == 8
        good &= judge_texts(running.address, prompts, found, lines, "with the kill")
        judge_texts(running.address, prompts, undisturbed, lines, "without it (not counted)")
        cut = together([lambda: kill_when_decoding(running, running.attention), *calls])[1:]
        begun = time.time()
        running.start_attention()
        again = together([lambda p=p: complete(running.address, MODEL, p, tokens // 6) for p in prompts])
        failed, answered = sum(not isinstance(text, str) for text in cut), sum(isinstance(text, str) for text in again)
        counted = {k: v for k, v in metrics(running.ffns[-1].address(time.time() + 5)).items() if "stream_steps" in k}
        lines.append(f"  bfloat16, attention killed with {failed} requests in it: a new one is ready after {running.attention.started_s:.1f} s on the same FFN, {answered} of 8 answered")
        lines.append(f"    FFN: {counted}")
        good &= answered == 8 and judge_texts(running.address, prompts, again, lines, "by the new one")
        return good
    finally:
        running.stop()


def drain(args, lines):
    """SIGTERM while steps are under way: attention ends when its requests have, or at its limit though its FFN is stopped; the
    FFN ends when it is told to, and a new one takes its place."""
    good, (steps, tokens) = True, pace(args)
    prompts = [{"input_ids": [(7919 * (i + 1) * (k + 3)) % 100000 + 3 for k in range(200)]} for i in range(8)]

    def ended(process, since):
        process.process.wait(30)
        return f"exit code {process.process.returncode} after {time.time() - since:.2f} s"

    def decoding(running):
        until = float(metrics(running.address)["afd_steps_total"]) + steps
        while float(metrics(running.address)["afd_steps_total"]) < until:
            time.sleep(0.01)

    for label, is_stopped in (("attention told to end", False), ("attention told to end in 2 s, its FFN stopped", True)):
        more = ["--stages", "1", *(["--drain-timeout", "2s"] if is_stopped else [])]
        running = Pair(args, f"drain {is_stopped}", [(full_size_ffn(args), args.ffn_gpu)], full_size(args, MODEL, *more), "cuda-ipc")
        try:

            def tell():
                decoding(running)
                if is_stopped:
                    running.ffns[0].process.send_signal(signal.SIGSTOP)
                since = time.time()
                running.attention.process.send_signal(signal.SIGTERM)
                return ended(running.attention, since)

            told, *found = together([tell, *(lambda p=p: complete(running.address, MODEL, p, tokens) for p in prompts)])
            full = sum(isinstance(text, str) and len(text.split()) == tokens for text in found)
            good &= isinstance(told, str) and told.startswith("exit code 0") and full == (0 if is_stopped else 8)
            lines.append(f"  {label}: {told}, {full} of 8 requests answered in full")
        finally:
            running.ffns[0].process.send_signal(signal.SIGCONT)
            running.stop()
    listen = free_address()
    running = Pair(args, "drain ffn", [(full_size_ffn(args), args.ffn_gpu)], full_size(args, MODEL, "--stages", "1"), "cuda-ipc", listen)
    try:

        def tell():
            decoding(running)
            since = time.time()
            running.ffns[0].process.send_signal(signal.SIGTERM)
            told = ended(running.ffns[0], since)
            running.another_ffn(listen)
            return told

        told, *found = together([tell, *(lambda p=p: complete(running.address, MODEL, p, tokens) for p in prompts)])
        full = sum(isinstance(text, str) and len(text.split()) == tokens for text in found)
        good &= isinstance(told, str) and told.startswith("exit code 0") and full == 8
        lines.append(f"  the FFN told to end, another started: {told}, {full} of 8 requests answered in full")
        lines += [f"    {text!r}"[:300] for text in found if not isinstance(text, str)]
    finally:
        running.stop()
    return good
