//! A mixture of experts: route the rows here, or take what attention chose; run the routed experts of this shard and its
//! slice of the shared ones; add up.
use std::ops::Range;

use afd_common::config::model::{ModelConfig, MoeConfig};
use afd_common::frame::SideKind;
use afd_common::identity::GatePlacement;
use afd_common::ids::{LayerIdx, Shard};
use afd_common::layers::{FfnNames, Router, Selected, Selector};
use afd_common::weights::Weights;
use afd_ffi::memory;
use tch::{Device, Kind, Tensor};

use super::counts::ExpertCounts;
use super::dense::GatedMlp;
use super::error::{At, FfnModelError};
use super::experts::Experts;
use super::few_rows::FewRows;
use super::grouping::{Groups, Unrouted};
use super::{LayerSpec, Side};

/// This shard's part of a mixture of experts.
#[derive(Debug)]
pub(super) struct MixtureOfExperts {
    /// Absent when the gate is placed on attention.
    router: Option<Router>,
    selector: Selector,
    experts: Experts,
    /// Absent when the model has none, or this shard's slice is empty.
    shared: Option<GatedMlp>,
    local: Range<usize>,
    num_experts: usize,
    top_k: usize,
}

impl MixtureOfExperts {
    pub(super) fn load(
        config: &ModelConfig,
        weights: &Weights,
        layer: usize,
        moe: &MoeConfig,
        shard: Shard,
        gate: GatePlacement,
    ) -> Result<Self, FfnModelError> {
        let (architecture, hidden) = (config.architecture, config.hidden_size);
        let names = FfnNames::new(architecture, layer);
        let local = shard.part_of(moe.num_experts);
        let router = match gate {
            GatePlacement::Ffn => Some(Router::load(weights, architecture, layer, moe, hidden)?),
            GatePlacement::Attention => None,
        };
        let shared = match moe.shared_intermediate_size {
            size if shard.part_of(size).is_empty() => None,
            size => Some(GatedMlp::load(weights, &names.shared(), hidden, size, shard, false)?),
        };
        Ok(Self {
            router,
            selector: Selector::load(weights, architecture, layer, moe)?,
            experts: Experts::load(weights, &names, hidden, moe, local.clone())?,
            shared,
            local,
            num_experts: moe.num_experts,
            top_k: moe.experts_per_token,
        })
    }

    pub(super) fn spec(&self) -> LayerSpec {
        let (side, side_columns) = match (&self.router, self.selector.token_ids()) {
            (Some(_), None) => (SideKind::None, 0),
            (Some(_), Some(_)) => (SideKind::InputIds, 1),
            (None, _) => (SideKind::TopK, self.top_k),
        };
        LayerSpec {
            side,
            side_columns,
            num_experts: self.num_experts,
            experts_per_token: self.top_k,
            local_experts: self.local.clone(),
        }
    }

    /// `[rows, hidden]`, at least one row, to this shard's part of the sum, `[rows, hidden]` f32.
    pub(super) fn forward(
        &self,
        layer: LayerIdx,
        x: &Tensor,
        side: &Side,
        counts: &ExpertCounts,
        few_rows: &FewRows,
    ) -> Result<Tensor, FfnModelError> {
        let selected = self.route(layer, x, side)?;
        let groups = self.group(layer, &selected)?;
        for (expert, items) in &groups.experts {
            counts.add(layer, *expert, items.len());
        }
        if let Some(sum) = self.forward_few(layer, x, &groups, few_rows)? {
            return Ok(sum);
        }
        let x = few_rows.else_widened(x).at(layer, "widening")?;
        let routed = self.experts.forward(&x, &groups).at(layer, "experts")?;
        match &self.shared {
            None => Ok(routed),
            Some(shared) => {
                shared.forward(&x).and_then(|shared| routed.f_add(&shared)).at(layer, "shared experts")
            }
        }
    }

    /// Routed and shared experts in one go, when all of them have few rows.
    fn forward_few(
        &self,
        layer: LayerIdx,
        x: &Tensor,
        groups: &Groups,
        few_rows: &FewRows,
    ) -> Result<Option<Tensor>, FfnModelError> {
        let num_rows = x.size()[0] as usize;
        let fullest = groups.experts.iter().map(|(_, items)| items.len()).max().unwrap_or(0);
        let fullest = if self.shared.is_some() { num_rows } else { fullest };
        if !few_rows.are(fullest) {
            return Ok(None);
        }
        let Some(mut mlps) = self.experts.as_few_rows(groups) else { return Ok(None) };
        if let Some(shared) = &self.shared {
            let Some(mlp) = shared.stored() else { return Ok(None) };
            mlps.push(few_rows.all_of(mlp, num_rows));
        }
        few_rows.forward(layer, x, &mlps).map(Some)
    }

    fn route(&self, layer: LayerIdx, x: &Tensor, side: &Side) -> Result<Selected, FfnModelError> {
        let rows = x.size()[0];
        let by_token = self.selector.token_ids();
        match (&self.router, side) {
            (Some(router), Side::None) if by_token.is_none() => {
                let logits = router.logits(x).at(layer, "router")?;
                self.selector.select(&logits).at(layer, "expert selection")
            }
            (Some(router), Side::InputIds(ids)) if let Some(vocab_size) = by_token => {
                check(layer, "input_ids", ids, [rows], Kind::Int64)?;
                check_tokens(layer, ids, vocab_size)?;
                let logits = router.logits(x).at(layer, "router")?;
                self.selector.select_by_token(&logits, ids).at(layer, "expert selection")
            }
            (None, Side::RouterLogits(logits)) if by_token.is_none() => {
                check(layer, "router_logits", logits, [rows, self.num_experts as i64], Kind::Float)?;
                self.selector.select(logits).at(layer, "expert selection")
            }
            (None, Side::TopK { ids, weights }) => {
                let shape = [rows, self.top_k as i64];
                check(layer, "topk_ids", ids, shape, Kind::Int64)?;
                check(layer, "topk_weights", weights, shape, Kind::Float)?;
                Ok(Selected { ids: ids.shallow_clone(), weights: weights.shallow_clone() })
            }
            (router, found) => {
                let expected = match (router, by_token) {
                    (Some(_), None) => "none",
                    (Some(_), Some(_)) => "`input_ids`: the layer routes by token id",
                    (None, None) => "the experts' choice, or router logits",
                    (None, Some(_)) => "the experts' choice",
                };
                Err(FfnModelError::Side { layer, expected: expected.into(), found: found.kind() })
            }
        }
    }

    fn group(&self, layer: LayerIdx, selected: &Selected) -> Result<Groups, FfnModelError> {
        let host = |tensor: &Tensor| tensor.f_to_device(Device::Cpu)?.f_contiguous();
        let ids = host(&selected.ids).at(layer, "expert ids")?;
        let weights = host(&selected.weights).at(layer, "expert weights")?;
        let unusable = |name: &'static str| {
            move |error: afd_ffi::FfiError| FfnModelError::SideShape {
                layer,
                name,
                expected: "a dense tensor".into(),
                found: error.to_string(),
            }
        };
        let ids = memory::i64s(&ids).map_err(unusable("topk_ids"))?;
        let weights = memory::f32s(&weights).map_err(unusable("topk_weights"))?;
        // Only where this side looked the experts up is it known that such a row is padding.
        let unrouted = match (&self.router, self.selector.token_ids()) {
            (Some(_), Some(_)) => Unrouted::Padding,
            _ => Unrouted::Refused,
        };
        let groups = Groups::new(ids, weights, self.top_k, &self.local, self.num_experts, unrouted);
        groups.map_err(|unknown| FfnModelError::UnknownExpert {
            layer,
            row: unknown.row,
            expert: unknown.expert,
            num_experts: self.num_experts,
        })
    }
}

/// Ids below the table's end; negative ones are padding and go on as they are.
fn check_tokens(layer: LayerIdx, ids: &Tensor, vocab_size: usize) -> Result<(), FfnModelError> {
    let highest = ids.f_argmax(0, false).and_then(|row| row.f_int64_value(&[])).at(layer, "token ids")?;
    let token = ids.f_int64_value(&[highest]).at(layer, "token ids")?;
    if token >= vocab_size as i64 {
        return Err(FfnModelError::UnknownToken { layer, row: highest as usize, token, vocab_size });
    }
    Ok(())
}

fn check<const N: usize>(
    layer: LayerIdx,
    name: &'static str,
    tensor: &Tensor,
    shape: [i64; N],
    kind: Kind,
) -> Result<(), FfnModelError> {
    let (size, found) = (tensor.size(), tensor.kind());
    if size == shape && found == kind {
        return Ok(());
    }
    Err(FfnModelError::SideShape {
        layer,
        name,
        expected: format!("{shape:?} {kind:?}"),
        found: format!("{size:?} {found:?}"),
    })
}
