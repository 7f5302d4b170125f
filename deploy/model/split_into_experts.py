"""Turns a dense Llama checkpoint into a Mixtral one that computes the same function, so that a small model routes.

    python split_into_experts.py DENSE_FOLDER MOE_FOLDER

A gated FFN is a sum over its intermediate units: down . (silu(gate . x) * (up . x)). Dealt out in order to 8 experts,
each unit's rows of gate and up and its column of down go together, and the experts' outputs add up to the FFN's. A
router whose weights are all zero gives every expert 1/8, and with top-8 all are chosen; down is multiplied by 8 to make
up for it, which in bfloat16 only moves the exponent. What differs from the dense model is the order of the sums alone.
"""

import json
import shutil
import sys
from pathlib import Path

import checkpoint_file
import numpy as np

NUM_EXPERTS = 8
# The dense FFN's projections: the expert's name for each, and the axis along which the intermediate units lie.
PROJECTIONS = {"gate_proj": ("w1", 0), "down_proj": ("w2", 1), "up_proj": ("w3", 0)}
LLAMA_ONLY = ("attention_bias", "mlp_bias", "pretraining_tp")


def moe_config(dense: dict) -> dict:
    units = dense["intermediate_size"]
    if units % NUM_EXPERTS:
        raise ValueError(f"intermediate_size {units} does not divide into {NUM_EXPERTS} experts")
    return {
        **{key: value for key, value in dense.items() if key not in LLAMA_ONLY},
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": units // NUM_EXPERTS,
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": NUM_EXPERTS,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
        "sliding_window": None,
    }


def expert_slice(dense: np.ndarray, expert: int, axis: int) -> np.ndarray:
    units = dense.shape[axis] // NUM_EXPERTS
    own = dense.take(range(expert * units, (expert + 1) * units), axis=axis)
    is_down = axis == 1
    return checkpoint_file.round_to_bf16(checkpoint_file.widen(own) * NUM_EXPERTS) if is_down else own


def moe_weights(dense: dict[str, np.ndarray], hidden_size: int) -> checkpoint_file.LazyTensors:
    tensors: checkpoint_file.LazyTensors = {}
    for name, values in dense.items():
        layer, in_ffn, projection = name.removesuffix(".weight").partition(".mlp.")
        if not in_ffn:
            tensors[name] = (values.shape, lambda values=values: values)
            continue
        block = f"{layer}.block_sparse_moe"
        router = (NUM_EXPERTS, hidden_size)
        tensors[f"{block}.gate.weight"] = (router, lambda router=router: np.zeros(router, dtype="<u2"))
        expert_name, axis = PROJECTIONS[projection]
        shape = list(values.shape)
        shape[axis] //= NUM_EXPERTS
        for expert in range(NUM_EXPERTS):
            tensors[f"{block}.experts.{expert}.{expert_name}.weight"] = (
                tuple(shape),
                lambda values=values, expert=expert, axis=axis: expert_slice(values, expert, axis),
            )
    return tensors


def main(dense_folder: str, moe_folder: str) -> None:
    source, target = Path(dense_folder), Path(moe_folder)
    target.mkdir(parents=True, exist_ok=True)
    dense = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps(moe_config(dense), indent=2) + "\n", encoding="utf-8")
    for same in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / same, target / same)
    weights = checkpoint_file.read(source / "model.safetensors")
    checkpoint_file.write(target / "model.safetensors", moe_weights(weights, dense["hidden_size"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
