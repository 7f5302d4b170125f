//! Rotary position embedding, from `rope_parameters` (new dialect) or `rope_theta` and `rope_scaling` (old).
use super::fields::Fields;
use super::{ConfigError, RopeConfig, RopeScaling};

const KNOWN_TYPES: &str = "default, linear, llama3, yarn";

/// How much of a head turns, in (0, 1]; `default` when the file is silent. Families that cannot serve a part of a head ask
/// for [`whole_heads`] instead.
pub(super) fn partial_rotary_factor(config: &Fields<'_>, default: f64) -> Result<f64, ConfigError> {
    let new = config.object("rope_parameters", "rope_parameters.")?;
    let factor = match new {
        Some(new) => new.positive("partial_rotary_factor")?.or(config.positive("partial_rotary_factor")?),
        None => config.positive("partial_rotary_factor")?,
    };
    let factor = factor.unwrap_or(default);
    if factor > 1.0 {
        return Err(config.refuse("partial_rotary_factor", format!("{factor} is above 1")));
    }
    Ok(factor)
}

/// Refuses rope over a part of a head.
pub(super) fn whole_heads(config: &Fields<'_>) -> Result<(), ConfigError> {
    let new = config.object("rope_parameters", "rope_parameters.")?;
    let old = config.object("rope_scaling", "rope_scaling.")?;
    let mut places = [Some(*config), new, old].into_iter().flatten();
    places.try_for_each(|fields| fields.only("partial_rotary_factor", &1.0.into()))
}

/// `default_theta`: what the family assumes when the file is silent; `None` where that changed between releases.
pub(super) fn read(
    config: &Fields<'_>,
    max_position_embeddings: usize,
    default_theta: Option<f64>,
) -> Result<RopeConfig, ConfigError> {
    let new = config.object("rope_parameters", "rope_parameters.")?;
    let old = config.object("rope_scaling", "rope_scaling.")?;
    let theta = match &new {
        Some(new) => new.positive("rope_theta")?.or(config.positive("rope_theta")?),
        None => config.positive("rope_theta")?,
    };
    let theta = theta.or(default_theta).ok_or_else(|| config.missing("rope_theta"))?;
    let scaling = match new.or(old) {
        None => RopeScaling::None,
        Some(fields) => scaling(&fields, max_position_embeddings)?,
    };
    Ok(RopeConfig { theta, scaling })
}

fn scaling(fields: &Fields<'_>, max_position_embeddings: usize) -> Result<RopeScaling, ConfigError> {
    let (field, kind) = match (fields.text("rope_type")?, fields.text("type")?) {
        (Some(kind), _) => ("rope_type", kind),
        (None, Some(kind)) => ("type", kind),
        (None, None) if fields.keys().all(|key| ["rope_theta", "partial_rotary_factor"].contains(&key)) => {
            return Ok(RopeScaling::None);
        }
        (None, None) => return Err(fields.missing("rope_type")),
    };
    match kind {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor: factor(fields)? }),
        "llama3" => llama3(fields),
        "yarn" => yarn(fields, max_position_embeddings),
        other => Err(fields.refuse(field, format!("`{other}` is not served; known: {KNOWN_TYPES}"))),
    }
}

fn factor(fields: &Fields<'_>) -> Result<f64, ConfigError> {
    let factor = fields.positive("factor")?.ok_or_else(|| fields.missing("factor"))?;
    if factor < 1.0 {
        return Err(fields.refuse("factor", format!("{factor} is below 1")));
    }
    Ok(factor)
}

fn llama3(fields: &Fields<'_>) -> Result<RopeScaling, ConfigError> {
    let required = |name: &str| fields.positive(name)?.ok_or_else(|| fields.missing(name));
    let (low, high) = (required("low_freq_factor")?, required("high_freq_factor")?);
    if high <= low {
        return Err(fields.refuse("high_freq_factor", format!("{high} is not above low_freq_factor {low}")));
    }
    Ok(RopeScaling::Llama3 {
        factor: factor(fields)?,
        low_freq_factor: low,
        high_freq_factor: high,
        original_max_position_embeddings: fields.required_size("original_max_position_embeddings")?,
    })
}

fn yarn(fields: &Fields<'_>, max_position_embeddings: usize) -> Result<RopeScaling, ConfigError> {
    let beta_fast = fields.positive("beta_fast")?.unwrap_or(32.0);
    let beta_slow = fields.positive("beta_slow")?.unwrap_or(1.0);
    if beta_fast < beta_slow {
        return Err(fields.refuse("beta_fast", format!("{beta_fast} is below beta_slow {beta_slow}")));
    }
    let original_max_position_embeddings =
        fields.size("original_max_position_embeddings", 1)?.unwrap_or(max_position_embeddings);
    Ok(RopeScaling::Yarn {
        factor: factor(fields)?,
        beta_fast,
        beta_slow,
        mscale: fields.number("mscale")?,
        mscale_all_dim: fields.number("mscale_all_dim")?,
        attention_factor: fields.positive("attention_factor")?,
        truncate: fields.flag("truncate")?.unwrap_or(true),
        original_max_position_embeddings,
    })
}
