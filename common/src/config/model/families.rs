//! What each architecture means by its fields: one function per family, and what all of them share.
use serde_json::Value;

use super::fields::Fields;
use super::{
    Architecture, AttentionConfig, CheckpointDtype, ConfigError, DenseConfig, FfnConfig, GqaConfig,
    MlaConfig, ModelConfig, QkNorm, RouterConfig, Scoring, Selection, moe, rope,
};

/// Layers are numbered by 16 bits on the wire.
const MAX_LAYERS: usize = 4096;

/// Fields of related architectures that change the result, with the only value that does not. `null` never does.
const NEUTRAL: [(&str, Neutral); 16] = [
    ("hidden_act", Neutral::Text("silu")),
    ("pretraining_tp", Neutral::Number(1.0)),
    ("is_encoder_decoder", Neutral::False),
    ("add_cross_attention", Neutral::False),
    ("rope_interleaved", Neutral::False),
    ("attn_logit_softcapping", Neutral::NullOnly),
    ("final_logit_softcapping", Neutral::NullOnly),
    ("query_pre_attn_scalar", Neutral::NullOnly),
    ("logit_scale", Neutral::Number(1.0)),
    ("logits_scaling", Neutral::Number(1.0)),
    ("embedding_multiplier", Neutral::Number(1.0)),
    ("residual_multiplier", Neutral::Number(1.0)),
    ("attention_multiplier", Neutral::NullOnly),
    ("attention_chunk_size", Neutral::NullOnly),
    ("no_rope_layers", Neutral::NullOnly),
    ("compression_config", Neutral::NullOnly),
];

enum Neutral {
    False,
    Number(f64),
    Text(&'static str),
    NullOnly,
}

/// What the families decide.
struct Family {
    attention: AttentionConfig,
    layers: Vec<FfnConfig>,
    default_eps: f64,
    default_theta: Option<f64>,
}

pub(super) fn read(config: &Fields<'_>, generation: Option<Fields<'_>>) -> Result<ModelConfig, ConfigError> {
    let architecture = architecture(config)?;
    check_neutral(config)?;
    if architecture != Architecture::DeepseekV3 {
        moe::no_hash_layers(config)?;
    }
    if architecture != Architecture::Glm4Moe {
        rope::whole_heads(config)?;
        config.only("use_qk_norm", &Value::Bool(false))?;
    }
    let common = Common::read(config)?;
    let family = match architecture {
        Architecture::Llama => llama(config, &common)?,
        Architecture::Mixtral => mixtral(config, &common)?,
        Architecture::Qwen3Moe => qwen3_moe(config, &common)?,
        Architecture::Olmoe => olmoe(config, &common)?,
        Architecture::DeepseekV2 => deepseek_v2(config, &common)?,
        Architecture::DeepseekV3 => deepseek_v3(config, &common)?,
        Architecture::Glm4Moe => glm4_moe(config, &common)?,
    };
    let max_position_embeddings = config.required_size("max_position_embeddings")?;
    let mut eos = config.token_ids("eos_token_id")?;
    if let Some(generation) = generation {
        eos = generation.token_ids("eos_token_id")?.or(eos);
    }
    Ok(ModelConfig {
        architecture,
        hidden_size: common.hidden_size,
        vocab_size: config.required_size("vocab_size")?,
        max_position_embeddings,
        rms_norm_eps: config.positive("rms_norm_eps")?.unwrap_or(family.default_eps),
        tie_word_embeddings: config.flag("tie_word_embeddings")?.unwrap_or(false),
        rope: rope::read(config, max_position_embeddings, family.default_theta)?,
        attention: family.attention,
        layers: family.layers,
        dtype: dtype(config)?,
        fp8_block: fp8_block(config)?,
        bos_token_id: config.token_ids("bos_token_id")?.and_then(|ids| ids.first().copied()),
        eos_token_ids: eos.unwrap_or_default(),
    })
}

fn architecture(config: &Fields<'_>) -> Result<Architecture, ConfigError> {
    match config.get("architectures") {
        None => Err(config.missing("architectures")),
        Some(Value::Array(names)) if matches!(names.as_slice(), [Value::String(_)]) => {
            names[0].as_str().unwrap_or_default().parse()
        }
        Some(other) => Err(config.refuse("architectures", format!("{other} is not a list of one name"))),
    }
}

fn check_neutral(config: &Fields<'_>) -> Result<(), ConfigError> {
    for (name, neutral) in &NEUTRAL {
        match neutral {
            Neutral::False => config.only(name, &Value::Bool(false))?,
            Neutral::Number(number) => config.only(name, &(*number).into())?,
            Neutral::Text(text) => config.only(name, &(*text).into())?,
            Neutral::NullOnly => {
                if let Some(found) = config.get(name) {
                    return Err(config.refuse(name, format!("{found} is not served, only null")));
                }
            }
        }
    }
    Ok(())
}

/// Numbers that every family has and that others are checked against.
struct Common {
    hidden_size: usize,
    num_layers: usize,
    num_heads: usize,
}

impl Common {
    fn read(config: &Fields<'_>) -> Result<Self, ConfigError> {
        let num_layers = config.required_size("num_hidden_layers")?;
        if num_layers > MAX_LAYERS {
            return Err(config.refuse("num_hidden_layers", format!("{num_layers} is above {MAX_LAYERS}")));
        }
        Ok(Self {
            hidden_size: config.required_size("hidden_size")?,
            num_layers,
            num_heads: config.required_size("num_attention_heads")?,
        })
    }

    /// Grouped-query attention without bias, norm, clipping or window: families add theirs.
    fn gqa(&self, config: &Fields<'_>, default_kv_heads: Option<usize>) -> Result<GqaConfig, ConfigError> {
        let num_heads = self.num_heads;
        let num_kv_heads = config
            .size("num_key_value_heads", 1)?
            .or(default_kv_heads)
            .ok_or_else(|| config.missing("num_key_value_heads"))?;
        if !num_heads.is_multiple_of(num_kv_heads) {
            let what = format!("{num_kv_heads} does not divide num_attention_heads {num_heads}");
            return Err(config.refuse("num_key_value_heads", what));
        }
        let head_dim = match config.size("head_dim", 1)? {
            Some(head_dim) => head_dim,
            None if self.hidden_size.is_multiple_of(num_heads) => self.hidden_size / num_heads,
            None => {
                let what = format!("{} does not divide by num_attention_heads {num_heads}", self.hidden_size);
                return Err(config.refuse("hidden_size", what));
            }
        };
        even(config, "head_dim", head_dim)?;
        Ok(GqaConfig {
            num_heads,
            num_kv_heads,
            head_dim,
            rotary_dim: head_dim,
            qkv_bias: false,
            o_bias: false,
            qk_norm: QkNorm::None,
            clip_qkv: None,
            sliding_window: None,
        })
    }
}

/// Rope turns pairs of dimensions.
fn even(config: &Fields<'_>, name: &str, width: usize) -> Result<(), ConfigError> {
    if width.is_multiple_of(2) {
        Ok(())
    } else {
        Err(config.refuse(name, format!("{width} is odd; rope needs pairs")))
    }
}

/// Every layer attends to everything, unless the family reads a window.
fn full_attention_only(config: &Fields<'_>) -> Result<(), ConfigError> {
    let Some(kinds) = config.get("layer_types") else { return Ok(()) };
    let all_full = kinds.as_array().is_some_and(|kinds| kinds.iter().all(|kind| kind == "full_attention"));
    if all_full {
        Ok(())
    } else {
        Err(config.refuse("layer_types", format!("{kinds} is not served, only full_attention")))
    }
}

fn llama(config: &Fields<'_>, common: &Common) -> Result<Family, ConfigError> {
    full_attention_only(config)?;
    config.only("sliding_window", &Value::Null)?;
    let mut gqa = common.gqa(config, Some(common.num_heads))?;
    gqa.qkv_bias = config.flag("attention_bias")?.unwrap_or(false);
    gqa.o_bias = gqa.qkv_bias;
    let dense = DenseConfig {
        intermediate_size: config.required_size("intermediate_size")?,
        bias: config.flag("mlp_bias")?.unwrap_or(false),
    };
    let layers = vec![FfnConfig::Dense(dense); common.num_layers];
    Ok(Family { attention: AttentionConfig::Gqa(gqa), layers, default_eps: 1e-6, default_theta: Some(1e4) })
}

fn mixtral(config: &Fields<'_>, common: &Common) -> Result<Family, ConfigError> {
    no_bias(config, &["attention_bias", "mlp_bias"])?;
    let mut gqa = common.gqa(config, Some(8))?;
    gqa.sliding_window = config.size("sliding_window", 1)?;
    let moe = moe::softmax_greedy(
        config,
        moe::num_experts(config)?,
        config.required_size("intermediate_size")?,
        true,
    )?;
    let layers = moe::uniform(moe, common.num_layers);
    Ok(Family { attention: AttentionConfig::Gqa(gqa), layers, default_eps: 1e-5, default_theta: Some(1e6) })
}

fn qwen3_moe(config: &Fields<'_>, common: &Common) -> Result<Family, ConfigError> {
    no_bias(config, &["mlp_bias"])?;
    let mut gqa = common.gqa(config, None)?;
    gqa.qkv_bias = config.flag("attention_bias")?.unwrap_or(false);
    gqa.o_bias = gqa.qkv_bias;
    gqa.qk_norm = QkNorm::PerHead;
    if config.flag("use_sliding_window")?.unwrap_or(false) {
        gqa.sliding_window = config.size("sliding_window", 1)?;
    } else {
        full_attention_only(config)?;
    }
    let normalize = config.flag("norm_topk_prob")?.ok_or_else(|| config.missing("norm_topk_prob"))?;
    let moe = moe::softmax_greedy(
        config,
        moe::num_experts(config)?,
        config.required_size("moe_intermediate_size")?,
        normalize,
    )?;
    let layers = moe::qwen3_layers(config, moe, common.num_layers)?;
    Ok(Family { attention: AttentionConfig::Gqa(gqa), layers, default_eps: 1e-6, default_theta: None })
}

fn olmoe(config: &Fields<'_>, common: &Common) -> Result<Family, ConfigError> {
    no_bias(config, &["mlp_bias"])?;
    full_attention_only(config)?;
    config.only("sliding_window", &Value::Null)?;
    let mut gqa = common.gqa(config, Some(common.num_heads))?;
    gqa.qkv_bias = config.flag("attention_bias")?.unwrap_or(false);
    gqa.o_bias = gqa.qkv_bias;
    gqa.qk_norm = QkNorm::Whole;
    gqa.clip_qkv = config.positive("clip_qkv")?;
    let normalize = config.flag("norm_topk_prob")?.unwrap_or(false);
    let moe = moe::softmax_greedy(
        config,
        moe::num_experts(config)?,
        config.required_size("intermediate_size")?,
        normalize,
    )?;
    let layers = moe::uniform(moe, common.num_layers);
    Ok(Family { attention: AttentionConfig::Gqa(gqa), layers, default_eps: 1e-5, default_theta: Some(1e4) })
}

/// MLA; `head_dim` and `num_key_value_heads` say nothing here, and what they hold differs between releases.
fn mla(config: &Fields<'_>, common: &Common, rope_interleave: bool) -> Result<AttentionConfig, ConfigError> {
    no_bias(config, &["mlp_bias"])?;
    full_attention_only(config)?;
    config.only("sliding_window", &Value::Null)?;
    let qk_rope_head_dim = config.required_size("qk_rope_head_dim")?;
    even(config, "qk_rope_head_dim", qk_rope_head_dim)?;
    Ok(AttentionConfig::Mla(MlaConfig {
        num_heads: common.num_heads,
        q_lora_rank: config.size("q_lora_rank", 1)?,
        kv_lora_rank: config.required_size("kv_lora_rank")?,
        qk_nope_head_dim: config.required_size("qk_nope_head_dim")?,
        qk_rope_head_dim,
        v_head_dim: config.required_size("v_head_dim")?,
        bias: config.flag("attention_bias")?.unwrap_or(false),
        rope_interleave,
    }))
}

fn deepseek_v2(config: &Fields<'_>, common: &Common) -> Result<Family, ConfigError> {
    config.only("scoring_func", &"softmax".into())?;
    config.only("rope_interleave", &Value::Bool(true))?;
    let (num_groups, topk_groups) = moe::groups(config)?;
    let selection = match config.text("topk_method")?.unwrap_or("greedy") {
        "greedy" => Selection::Greedy,
        "group_limited_greedy" => Selection::GroupLimited { num_groups, topk_groups },
        other => {
            let what = format!("`{other}` is not served; known: greedy, group_limited_greedy");
            return Err(config.refuse("topk_method", what));
        }
    };
    let router = RouterConfig {
        scoring: Scoring::Softmax,
        selection,
        // The published model scales and never normalises, whatever `norm_topk_prob` says.
        normalize: false,
        normalize_eps: 0.0,
        scaling_factor: config.positive("routed_scaling_factor")?.unwrap_or(1.0),
        logits_in_f32: true,
    };
    let layers = moe::deepseek_layers(config, common.num_layers, router)?;
    Ok(Family { attention: mla(config, common, true)?, layers, default_eps: 1e-6, default_theta: Some(1e4) })
}

fn deepseek_v3(config: &Fields<'_>, common: &Common) -> Result<Family, ConfigError> {
    let scoring = match config.text("scoring_func")?.unwrap_or("sigmoid") {
        "sigmoid" => Scoring::Sigmoid,
        "sqrtsoftplus" => Scoring::SqrtSoftplus,
        other => {
            let what = format!("`{other}` is not served; known: sigmoid, sqrtsoftplus");
            return Err(config.refuse("scoring_func", what));
        }
    };
    let layers = moe::deepseek_layers(config, common.num_layers, noaux_tc(config, scoring)?)?;
    let rope_interleave = config.flag("rope_interleave")?.unwrap_or(true);
    let attention = mla(config, common, rope_interleave)?;
    Ok(Family { attention, layers, default_eps: 1e-6, default_theta: Some(1e4) })
}

/// DeepSeek-V3's router, which GLM-4.5 has too.
fn noaux_tc(config: &Fields<'_>, scoring: Scoring) -> Result<RouterConfig, ConfigError> {
    config.only("topk_method", &"noaux_tc".into())?;
    let (num_groups, topk_groups) = moe::groups(config)?;
    let scaling_factor = config.positive("routed_scaling_factor")?;
    Ok(RouterConfig {
        scoring,
        selection: Selection::NoAuxTc { num_groups, topk_groups },
        normalize: config.flag("norm_topk_prob")?.unwrap_or(true),
        normalize_eps: 1e-20,
        scaling_factor: scaling_factor.ok_or_else(|| config.missing("routed_scaling_factor"))?,
        logits_in_f32: true,
    })
}

/// The first half of every head turns, unless the file says how much; `attention_bias` is of q, k and v alone.
fn glm4_moe(config: &Fields<'_>, common: &Common) -> Result<Family, ConfigError> {
    no_bias(config, &["mlp_bias"])?;
    full_attention_only(config)?;
    config.only("sliding_window", &Value::Null)?;
    config.only("scoring_func", &"sigmoid".into())?;
    let mut gqa = common.gqa(config, None)?;
    let factor = rope::partial_rotary_factor(config, 0.5)?;
    gqa.rotary_dim = (gqa.head_dim as f64 * factor) as usize;
    even(config, "partial_rotary_factor", gqa.rotary_dim)?;
    if gqa.rotary_dim == 0 {
        let what = format!("{factor} of a head of {} turns nothing", gqa.head_dim);
        return Err(config.refuse("partial_rotary_factor", what));
    }
    gqa.qkv_bias = config.flag("attention_bias")?.unwrap_or(false);
    if config.flag("use_qk_norm")?.unwrap_or(false) {
        gqa.qk_norm = QkNorm::PerHead;
    }
    let layers = moe::deepseek_layers(config, common.num_layers, noaux_tc(config, Scoring::Sigmoid)?)?;
    // The theta that is assumed when the file is silent changed between releases.
    Ok(Family { attention: AttentionConfig::Gqa(gqa), layers, default_eps: 1e-5, default_theta: None })
}

/// The family has no such parameters.
fn no_bias(config: &Fields<'_>, names: &[&str]) -> Result<(), ConfigError> {
    names.iter().try_for_each(|name| config.only(name, &Value::Bool(false)))
}

fn dtype(config: &Fields<'_>) -> Result<CheckpointDtype, ConfigError> {
    let (field, name) = match config.text("dtype")? {
        Some(name) => ("dtype", Some(name)),
        None => ("torch_dtype", config.text("torch_dtype")?),
    };
    match name.map(|name| name.trim_start_matches("torch.")) {
        None | Some("float32") => Ok(CheckpointDtype::F32),
        Some("bfloat16") => Ok(CheckpointDtype::Bf16),
        Some("float16") => Ok(CheckpointDtype::F16),
        Some(other) => {
            Err(config.refuse(field, format!("`{other}` is not served; known: float32, bfloat16, float16")))
        }
    }
}

fn fp8_block(config: &Fields<'_>) -> Result<Option<(usize, usize)>, ConfigError> {
    let Some(quantization) = config.object("quantization_config", "quantization_config.")? else {
        return Ok(None);
    };
    match quantization.text("quant_method")? {
        Some("fp8") => {}
        Some(other) => {
            return Err(
                quantization.refuse("quant_method", format!("`{other}` is not served, only block fp8"))
            );
        }
        None => return Err(quantization.missing("quant_method")),
    }
    quantization.only("fmt", &"e4m3".into())?;
    // Weights are dequantised when they are loaded, so activations are never quantised; a checkpoint made for static
    // activation scales would compute something else.
    quantization.only("activation_scheme", &"dynamic".into())?;
    match quantization.sizes("weight_block_size")?.as_slice() {
        &[rows, columns] if rows > 0 && columns > 0 => Ok(Some((rows, columns))),
        [] => Err(quantization.missing("weight_block_size")),
        other => Err(quantization.refuse("weight_block_size", format!("{other:?} is not [rows, columns]"))),
    }
}
