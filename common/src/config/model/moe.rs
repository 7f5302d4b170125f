//! Mixtures of experts: which layers are one, how many experts, how they are chosen.
use super::fields::Fields;
use super::{ConfigError, DenseConfig, FfnConfig, MoeConfig, RouterConfig, Scoring, Selection};

const NUM_HASH_LAYERS: &str = "num_hash_layers";

/// Every layer the same mixture (Mixtral, OLMoE).
pub(super) fn uniform(moe: MoeConfig, num_layers: usize) -> Vec<FfnConfig> {
    vec![FfnConfig::Moe(moe); num_layers]
}

/// Softmax scores, the best k: Mixtral, Qwen3-MoE, OLMoE.
pub(super) fn softmax_greedy(
    config: &Fields<'_>,
    num_experts: usize,
    intermediate_size: usize,
    normalize: bool,
) -> Result<MoeConfig, ConfigError> {
    let router = RouterConfig {
        scoring: Scoring::Softmax,
        selection: Selection::Greedy,
        normalize,
        normalize_eps: 0.0,
        scaling_factor: 1.0,
        logits_in_f32: false,
    };
    let experts_per_token = experts_per_token(config, num_experts)?;
    Ok(MoeConfig { num_experts, experts_per_token, intermediate_size, shared_intermediate_size: 0, router })
}

fn experts_per_token(config: &Fields<'_>, num_experts: usize) -> Result<usize, ConfigError> {
    let top_k = config.required_size("num_experts_per_tok")?;
    if top_k > num_experts {
        return Err(config.refuse("num_experts_per_tok", format!("{top_k} of {num_experts} experts")));
    }
    Ok(top_k)
}

/// `num_local_experts` (new dialect) or `num_experts` (old): the field's name and its value.
pub(super) fn num_experts(config: &Fields<'_>) -> Result<usize, ConfigError> {
    match (config.size("num_local_experts", 1)?, config.size("num_experts", 1)?) {
        (Some(new), Some(old)) if new != old => {
            Err(config.refuse("num_experts", format!("{old}, but `num_local_experts` is {new}")))
        }
        (Some(count), _) | (None, Some(count)) => Ok(count),
        (None, None) => Err(config.missing("num_experts")),
    }
}

/// Qwen3-MoE: every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name.
pub(super) fn qwen3_layers(
    config: &Fields<'_>,
    moe: MoeConfig,
    num_layers: usize,
) -> Result<Vec<FfnConfig>, ConfigError> {
    let step = config.size("decoder_sparse_step", 1)?.unwrap_or(1);
    let dense_layers = config.sizes("mlp_only_layers")?;
    if let Some(beyond) = dense_layers.iter().find(|&&layer| layer >= num_layers) {
        return Err(config.refuse("mlp_only_layers", format!("{beyond} is not one of {num_layers} layers")));
    }
    let is_moe = |layer: usize| (layer + 1).is_multiple_of(step) && !dense_layers.contains(&layer);
    mixed(config, moe, num_layers, is_moe)
}

/// DeepSeek: every `moe_layer_freq`-th layer from `first_k_dense_replace` on. Without `n_routed_experts` all are dense.
pub(super) fn deepseek_layers(
    config: &Fields<'_>,
    num_layers: usize,
    router: RouterConfig,
) -> Result<Vec<FfnConfig>, ConfigError> {
    let Some(num_experts) = config.size("n_routed_experts", 1)? else {
        return Ok(vec![dense(config)?; num_layers]);
    };
    let first = config.size("first_k_dense_replace", 0)?.unwrap_or(0);
    let freq = config.size("moe_layer_freq", 1)?.unwrap_or(1);
    let num_hash_layers = num_hash_layers(config, num_layers)?;
    let experts_per_token = experts_per_token(config, num_experts)?;
    check_groups(config, &router.selection, num_experts, experts_per_token)?;
    let intermediate_size = config.required_size("moe_intermediate_size")?;
    let moe = MoeConfig {
        num_experts,
        experts_per_token,
        intermediate_size,
        shared_intermediate_size: config.size("n_shared_experts", 0)?.unwrap_or(0) * intermediate_size,
        router,
    };
    let mut layers = mixed(config, moe, num_layers, |layer| layer >= first && layer.is_multiple_of(freq))?;
    let vocab_size = config.required_size("vocab_size")?;
    for layer in layers.iter_mut().take(num_hash_layers) {
        if let FfnConfig::Moe(moe) = layer {
            moe.router.selection = Selection::TokenTable { vocab_size };
        }
    }
    Ok(layers)
}

/// How many of the first layers route by token id, those among them that are a mixture; absent is none.
fn num_hash_layers(config: &Fields<'_>, num_layers: usize) -> Result<usize, ConfigError> {
    let count = config.size(NUM_HASH_LAYERS, 0)?.unwrap_or(0);
    if count > num_layers {
        return Err(config.refuse(NUM_HASH_LAYERS, format!("{count} of {num_layers} layers")));
    }
    Ok(count)
}

/// The family routes by score alone.
pub(super) fn no_hash_layers(config: &Fields<'_>) -> Result<(), ConfigError> {
    config.only(NUM_HASH_LAYERS, &0.into())
}

fn mixed(
    config: &Fields<'_>,
    moe: MoeConfig,
    num_layers: usize,
    is_moe: impl Fn(usize) -> bool,
) -> Result<Vec<FfnConfig>, ConfigError> {
    (0..num_layers)
        .map(|layer| if is_moe(layer) { Ok(FfnConfig::Moe(moe.clone())) } else { dense(config) })
        .collect()
}

fn dense(config: &Fields<'_>) -> Result<FfnConfig, ConfigError> {
    let intermediate_size = config.required_size("intermediate_size")?;
    Ok(FfnConfig::Dense(DenseConfig { intermediate_size, bias: false }))
}

/// `n_group` and `topk_group`; one group of everything when absent.
pub(super) fn groups(config: &Fields<'_>) -> Result<(usize, usize), ConfigError> {
    Ok((config.size("n_group", 1)?.unwrap_or(1), config.size("topk_group", 1)?.unwrap_or(1)))
}

fn check_groups(
    config: &Fields<'_>,
    selection: &Selection,
    num_experts: usize,
    top_k: usize,
) -> Result<(), ConfigError> {
    let (num_groups, topk_groups, least_in_group) = match *selection {
        Selection::Greedy | Selection::TokenTable { .. } => return Ok(()),
        Selection::GroupLimited { num_groups, topk_groups } => (num_groups, topk_groups, 1),
        // A group is scored by its best two.
        Selection::NoAuxTc { num_groups, topk_groups } => (num_groups, topk_groups, 2),
    };
    if !num_experts.is_multiple_of(num_groups) {
        return Err(
            config.refuse("n_group", format!("{num_experts} experts do not divide into {num_groups} groups"))
        );
    }
    let group_size = num_experts / num_groups;
    if group_size < least_in_group {
        return Err(
            config.refuse("n_group", format!("groups of {group_size} have no best {least_in_group} experts"))
        );
    }
    if topk_groups > num_groups {
        return Err(config.refuse("topk_group", format!("{topk_groups} of {num_groups} groups")));
    }
    if top_k > topk_groups * group_size {
        let what = format!("{top_k}, but {topk_groups} groups of {group_size} experts may be chosen from");
        return Err(config.refuse("num_experts_per_tok", what));
    }
    Ok(())
}
