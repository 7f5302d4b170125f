//! What a rank must hold, B.

/// `b · S · kv · L`, KV cache of `sequences`, each holding `held` bytes per layer.
pub fn kv_cache(sequences: f64, held_per_layer: f64, layers: f64) -> f64 {
    sequences * held_per_layer * layers
}

/// Landing memory of an attention rank: for each of `m` stages its rows out and the answers of `answers` targets.
pub fn attention_landing(sequences: f64, hidden: f64, bytes_in: f64, bytes_out: f64, answers: f64) -> f64 {
    sequences * hidden * (bytes_in + answers * bytes_out)
}

/// Landing memory of an FFN rank: the rows of all stages that reach it, in and out.
pub fn ffn_landing(rows_of_all_stages: f64, hidden: f64, bytes_in: f64, bytes_out: f64) -> f64 {
    rows_of_all_stages * hidden * (bytes_in + bytes_out)
}

/// Logits of the rows of one step, f32.
pub fn logits(sequences: f64, vocab: f64) -> f64 {
    4.0 * sequences * vocab
}
