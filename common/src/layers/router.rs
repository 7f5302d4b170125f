//! The router of a mixture of experts: from normalised rows to logits ([`Router`]), and from logits (or token ids) to the
//! experts of each row and their weights ([`Selector`]). The two are apart because they may run in different roles. The
//! arithmetic is each model's own: what is rounded, masked, normalised and scaled, and in which order, decides which
//! expert wins.
use tch::{Kind, TchError, Tensor};

use super::FfnNames;
use crate::config::model::{Architecture, MoeConfig, RouterConfig, Scoring, Selection};
use crate::weights::{WeightError, Weights};

/// From rows to logits.
#[derive(Debug)]
pub struct Router {
    /// `[experts, hidden]`, f32 if the logits are computed so.
    weight: Tensor,
    in_f32: bool,
}

impl Router {
    /// The router of a layer.
    ///
    /// # Errors
    /// [`WeightError`] names the tensor.
    pub fn load(
        weights: &Weights,
        architecture: Architecture,
        layer: usize,
        moe: &MoeConfig,
        hidden_size: usize,
    ) -> Result<Self, WeightError> {
        let name = FfnNames::new(architecture, layer).router();
        let shape = [moe.num_experts as i64, hidden_size as i64];
        let in_f32 = moe.router.logits_in_f32;
        let weight =
            if in_f32 { weights.tensor_f32(&name, &shape)? } else { weights.tensor(&name, &shape)? };
        Ok(Self { weight, in_f32 })
    }

    /// `[rows, hidden]` in the compute dtype to `[rows, experts]` f32.
    ///
    /// # Errors
    /// libtorch's, when shapes or dtypes do not fit.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor, TchError> {
        if self.in_f32 {
            return hidden.f_to_kind(Kind::Float)?.f_linear(&self.weight, None::<&Tensor>);
        }
        hidden.f_linear(&self.weight, None::<&Tensor>)?.f_to_kind(Kind::Float)
    }
}

/// The experts of each row.
#[derive(Debug)]
pub struct Selected {
    /// `[rows, k]` i64, by falling weight; in the table's order, or [`NO_EXPERT`], where a table chose.
    pub ids: Tensor,
    /// `[rows, k]` f32, as they are applied: normalised and scaled where the model does that.
    pub weights: Tensor,
}

/// In place of the experts of a padding row: it is routed nowhere.
pub const NO_EXPERT: i64 = -1;

/// From logits to experts.
#[derive(Debug)]
pub struct Selector {
    config: RouterConfig,
    num_experts: i64,
    top_k: i64,
    /// `[experts]` f32; with [`Selection::NoAuxTc`].
    correction_bias: Option<Tensor>,
    /// `[vocab, k]` i64; with [`Selection::TokenTable`].
    token_table: Option<Tensor>,
}

impl Selector {
    /// The selection of a layer.
    ///
    /// # Errors
    /// [`WeightError`] names the tensor (only the correction bias or the table of token ids is read).
    pub fn load(
        weights: &Weights,
        architecture: Architecture,
        layer: usize,
        moe: &MoeConfig,
    ) -> Result<Self, WeightError> {
        let names = FfnNames::new(architecture, layer);
        let num_experts = moe.num_experts as i64;
        match moe.router.selection {
            Selection::Greedy | Selection::GroupLimited { .. } => Ok(Self::new(moe, None)),
            Selection::NoAuxTc { .. } => {
                let bias = weights.tensor_f32(&names.correction_bias(), &[num_experts])?;
                Ok(Self::new(moe, Some(bias)))
            }
            Selection::TokenTable { vocab_size } => {
                let shape = [vocab_size as i64, moe.experts_per_token as i64];
                let table = weights.indices(&names.token_table(), &shape, num_experts)?;
                Ok(Self { token_table: Some(table), ..Self::new(moe, None) })
            }
        }
    }

    /// `correction_bias`: `[experts]` f32, needed by [`Selection::NoAuxTc`]; absent means 0.
    pub fn new(moe: &MoeConfig, correction_bias: Option<Tensor>) -> Self {
        Self {
            config: moe.router.clone(),
            num_experts: moe.num_experts as i64,
            top_k: moe.experts_per_token as i64,
            correction_bias,
            token_table: None,
        }
    }

    /// How many token ids the table has, if rows are routed by token id: then [`select_by_token`](Self::select_by_token)
    /// takes the place of [`select`](Self::select).
    pub fn token_ids(&self) -> Option<usize> {
        match self.config.selection {
            Selection::TokenTable { vocab_size } => Some(vocab_size),
            Selection::Greedy | Selection::GroupLimited { .. } | Selection::NoAuxTc { .. } => None,
        }
    }

    /// `[rows, experts]` f32 to the best k of each row.
    ///
    /// # Errors
    /// libtorch's, when the shape does not fit; always when rows are routed by token id.
    pub fn select(&self, logits: &Tensor) -> Result<Selected, TchError> {
        let scores = self.scores(logits)?;
        let (weights, ids) = match self.config.selection {
            Selection::Greedy => scores.f_topk(self.top_k, -1, true, true)?,
            Selection::GroupLimited { num_groups, topk_groups } => {
                let best_of_group = |groups: &Tensor| groups.f_amax(&[-1i64][..], false);
                let allowed = self.mask_groups(&scores, num_groups, topk_groups, 0.0, best_of_group)?;
                allowed.f_topk(self.top_k, -1, true, true)?
            }
            Selection::NoAuxTc { num_groups, topk_groups } => {
                self.biased(&scores, num_groups, topk_groups)?
            }
            Selection::TokenTable { .. } => {
                return Err(TchError::Torch("the experts follow from token ids, which are missing".into()));
            }
        };
        Ok(Selected { ids, weights: self.finish(weights)? })
    }

    /// The experts that the table names for `token_ids` `[rows]` i64, weighed by the scores of `logits`
    /// `[rows, experts]` f32: gathered, normalised and scaled as everywhere, the correction bias having no part in it. A
    /// negative id marks padding: its experts are [`NO_EXPERT`], its weights 0.
    ///
    /// # Errors
    /// libtorch's, when shapes do not fit or an id is beyond the table; always when rows are routed by score.
    pub fn select_by_token(&self, logits: &Tensor, token_ids: &Tensor) -> Result<Selected, TchError> {
        let Some(table) = &self.token_table else {
            return Err(TchError::Torch("the experts follow from scores, not from token ids".into()));
        };
        let experts = table.f_index_select(0, &token_ids.f_clamp_min(0)?)?;
        let weights = self.finish(self.scores(logits)?.f_gather(-1, &experts, false)?)?;
        let padding = token_ids.f_lt(0)?.f_unsqueeze(-1)?;
        Ok(Selected {
            ids: experts.f_masked_fill(&padding, NO_EXPERT)?,
            weights: weights.f_masked_fill(&padding, 0.0)?,
        })
    }

    fn scores(&self, logits: &Tensor) -> Result<Tensor, TchError> {
        match self.config.scoring {
            Scoring::Softmax => logits.f_softmax(-1, Kind::Float),
            Scoring::Sigmoid => logits.f_to_kind(Kind::Float)?.f_sigmoid(),
            Scoring::SqrtSoftplus => logits.f_to_kind(Kind::Float)?.f_softplus()?.f_sqrt(),
        }
    }

    /// Score plus bias chooses, the score alone weighs.
    fn biased(
        &self,
        scores: &Tensor,
        num_groups: usize,
        topk_groups: usize,
    ) -> Result<(Tensor, Tensor), TchError> {
        let choice = match &self.correction_bias {
            Some(bias) => scores.f_add(bias)?,
            None => scores.shallow_clone(),
        };
        let best_two = |groups: &Tensor| {
            groups.f_topk(2, -1, true, false)?.0.f_sum_dim_intlist(&[-1i64][..], false, Kind::Float)
        };
        let allowed = self.mask_groups(&choice, num_groups, topk_groups, f64::NEG_INFINITY, best_two)?;
        let (_, by_choice) = allowed.f_topk(self.top_k, -1, true, false)?;
        let (weights, order) = scores.f_gather(-1, &by_choice, false)?.f_sort(-1, true)?;
        Ok((weights, by_choice.f_gather(-1, &order, false)?))
    }

    /// `scores` with `masked` in all but the best groups.
    fn mask_groups(
        &self,
        scores: &Tensor,
        num_groups: usize,
        topk_groups: usize,
        masked: f64,
        group_score: impl Fn(&Tensor) -> Result<Tensor, TchError>,
    ) -> Result<Tensor, TchError> {
        if topk_groups >= num_groups {
            return Ok(scores.shallow_clone());
        }
        let num_groups = num_groups as i64;
        let grouped = scores.f_view([-1, num_groups, self.num_experts / num_groups])?;
        let group_scores = group_score(&grouped)?;
        let (_, best) = group_scores.f_topk(topk_groups as i64, -1, true, false)?;
        let outside = group_scores.f_ones_like()?.f_to_kind(Kind::Bool)?.f_scatter_value(-1, &best, 0)?;
        grouped.f_masked_fill(&outside.f_unsqueeze(-1)?, masked)?.f_view([-1, self.num_experts])
    }

    fn finish(&self, weights: Tensor) -> Result<Tensor, TchError> {
        let mut weights = weights;
        if self.config.normalize {
            let sum = weights.f_sum_dim_intlist(&[-1i64][..], true, Kind::Float)?;
            weights = weights.f_div(&sum.f_add_scalar(self.config.normalize_eps)?)?;
        }
        if self.config.scaling_factor != 1.0 {
            weights = weights.f_mul_scalar(self.config.scaling_factor)?;
        }
        Ok(weights)
    }
}
