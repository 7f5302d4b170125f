//! Fields of `config.json` that are not read and cannot change what is computed. One that is neither read nor here may:
//! it is reported by name.

/// About training, about the file itself, about how somebody's library is to be called, or defaults of requests, which
/// steer requests and no layers.
const NAMES: [&str; 76] = [
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "attention_dropout",
    "attn_implementation",
    "auto_map",
    "aux_loss_alpha",
    "bad_words_ids",
    "begin_suppress_tokens",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "embd_pdrop",
    "encoder_no_repeat_ngram_size",
    "ep_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_llama_config",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "model_type",
    "name_or_path",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    // Layers that predict further tokens in training; the checkpoint has them behind the model's own.
    "num_nextn_predict_layers",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "pad_token_id",
    "prefix",
    "problem_type",
    "pruned_heads",
    "remove_invalid_values",
    "repetition_penalty",
    "resid_pdrop",
    "return_dict",
    "return_dict_in_generate",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "sep_token_id",
    "seq_aux",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    // The older name of `dtype`, where both are given.
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
    // Which tensors are quantised is seen by their scales.
    "quantization_config.ignored_layers",
    "quantization_config.modules_to_not_convert",
];

/// What a family's files have and its layers make no use of: widths that follow from others, what is about layers of a kind
/// that the model has none of, and fields that the published model does not read either. A family that does make use of
/// one reads it, and then it is not asked for here.
const UNUSED: [&str; 9] = [
    "head_dim",
    "intermediate_size",
    "max_window_layers",
    "norm_topk_prob",
    "num_key_value_heads",
    "qk_head_dim",
    "quantization_config.scale_fmt",
    "rope_scaling.original_max_position_embeddings",
    "sliding_window",
];

/// Whether a field that was not read cannot matter. Fields of objects are named like `rope_scaling.factor`.
pub(super) fn is_harmless(field: &str) -> bool {
    NAMES.contains(&field) || UNUSED.contains(&field)
}
