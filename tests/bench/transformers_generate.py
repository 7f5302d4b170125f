"""Tokens a second of Hugging Face transformers' `generate`: MODEL DTYPE BATCH INPUT_LEN OUTPUT_LEN THREADS RUNS.

Prints the median over RUNS, after one that is not counted. Greedy, with its cache, past the model's end tokens.
"""
import statistics
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main():
    folder, dtype = sys.argv[1:3]
    batch, input_len, output_len, threads, runs = map(int, sys.argv[3:])
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True).eval()
    rates = []
    for run in range(runs + 1):
        prompt = torch.randint(3, 500, (batch, input_len))
        start = time.perf_counter()
        with torch.inference_mode():
            answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                                    min_new_tokens=output_len, max_new_tokens=output_len, pad_token_id=0)
        elapsed = time.perf_counter() - start
        assert answer.shape == (batch, input_len + output_len)
        if run > 0:
            rates.append(batch * output_len / elapsed)
    print(f"{statistics.median(rates):.3f}")


if __name__ == "__main__":
    main()
