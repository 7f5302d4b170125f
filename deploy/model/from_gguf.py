"""Turns the GGUF of SmolLM2 into a Hugging Face checkpoint: config, tokenizer, bfloat16 weights.

    python from_gguf.py FILE.gguf FOLDER

Everything, the tokenizer and the chat template too, comes out of the one GGUF file.
"""

import json
import sys
from pathlib import Path

import checkpoint_file
import gguf
import numpy as np

LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MODEL_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


class Source:
    """The GGUF file: its metadata by key, its tensors as float32."""

    def __init__(self, path: Path):
        self.reader = gguf.GGUFReader(path)

    def __getitem__(self, key: str):
        return self.reader.fields[key].contents()

    def llama(self, key: str):
        return self[f"llama.{key}"]

    def tokenizer(self, key: str):
        return self[f"tokenizer.{key}"]


def checkpoint_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight` at Hugging Face."""
    *block, part, kind = gguf_name.split(".")
    if block:
        return f"model.layers.{block[1]}.{LAYER_PARTS[part]}.{kind}"
    return f"{MODEL_PARTS[part]}.{kind}"


def halves_apart(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a q or k projection from llama.cpp's order to Hugging Face's.

    Inside each head llama.cpp's rope turns neighbours (0,1), (2,3), ...; Hugging Face's turns row i with row i + d/2.
    So the even rows of a head become its first half, the odd ones its second.
    """
    heads = weight.reshape(num_heads, -1, weight.shape[1])
    return np.concatenate([heads[:, 0::2], heads[:, 1::2]], axis=1).reshape(weight.shape)


def weights(source: Source) -> checkpoint_file.LazyTensors:
    rope_heads = {
        "self_attn.q_proj": source.llama("attention.head_count"),
        "self_attn.k_proj": source.llama("attention.head_count_kv"),
    }

    def values(tensor, name):
        full = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for part, num_heads in rope_heads.items():
            if part in name:
                full = halves_apart(full, num_heads)
        return checkpoint_file.round_to_bf16(full)

    tensors = {}
    for tensor in source.reader.tensors:
        name = checkpoint_name(tensor.name)
        shape = tuple(int(n) for n in reversed(tensor.shape))  # GGUF counts from the fastest dimension
        tensors[name] = (shape, lambda tensor=tensor, name=name: values(tensor, name))
    return tensors


def config(source: Source) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": source.llama("vocab_size"),
        "hidden_size": source.llama("embedding_length"),
        "num_hidden_layers": source.llama("block_count"),
        "num_attention_heads": source.llama("attention.head_count"),
        "num_key_value_heads": source.llama("attention.head_count_kv"),
        "intermediate_size": source.llama("feed_forward_length"),
        "hidden_act": "silu",
        # stored as float32: 1e-5 would read 9.99999974e-06
        "rms_norm_eps": float(f"{source.llama('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": source.llama("rope.freq_base"),
        "rope_scaling": None,
        "max_position_embeddings": source.llama("context_length"),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **special_ids(source),
    }


def special_ids(source: Source) -> dict:
    return {
        "bos_token_id": source.tokenizer("ggml.bos_token_id"),
        "eos_token_id": source.tokenizer("ggml.eos_token_id"),
        "pad_token_id": source.tokenizer("ggml.padding_token_id"),
    }


def tokenizer(source: Source) -> dict:
    """Byte-level BPE as GPT-2 has it, but every digit is a token of its own."""
    vocabulary = source.tokenizer("ggml.tokens")
    kinds = source.tokenizer("ggml.token_type")
    control = [index for index, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": vocabulary[index], **plain} for index in control],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(vocabulary)},
            "merges": source.tokenizer("ggml.merges"),
        },
    }


def tokenizer_config(source: Source) -> dict:
    vocabulary = source.tokenizer("ggml.tokens")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary[source.tokenizer("ggml.bos_token_id")],
        "eos_token": vocabulary[source.tokenizer("ggml.eos_token_id")],
        "pad_token": vocabulary[source.tokenizer("ggml.padding_token_id")],
        "unk_token": vocabulary[source.tokenizer("ggml.unknown_token_id")],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": source.llama("context_length"),
        "chat_template": source.tokenizer("chat_template"),
    }


def main(gguf_file: str, folder: str) -> None:
    source, target = Source(Path(gguf_file)), Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    texts = {
        "config.json": config(source),
        "generation_config.json": special_ids(source),
        "tokenizer.json": tokenizer(source),
        "tokenizer_config.json": tokenizer_config(source),
    }
    for name, value in texts.items():
        (target / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    checkpoint_file.write(target / "model.safetensors", weights(source))


if __name__ == "__main__":
    main(*sys.argv[1:])
