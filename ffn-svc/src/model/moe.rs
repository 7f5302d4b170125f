//! A mixture of experts: route the rows here, or take what attention chose; run the routed experts that this shard serves
//! and its part of the shared ones; add up.
//!
//! With the gate on the FFN every shard gets every row, so shared experts are cut into slices. With the gate on attention a
//! row comes only where an expert of it is served, so they are whole everywhere and each row's are applied by one shard.
//! They may be attention's own instead ([`Sides`]): then they are nowhere here, and left out of every sum. Either way
//! the sum over all shards of what they return for a row is the layer's output, whether or not a shard that serves
//! nothing of the row was asked.

use afd_common::config::model::{ModelConfig, MoeConfig};
use afd_common::frame::SideKind;
use afd_common::identity::{GatePlacement, SharedExpertPlacement, Sides};
use afd_common::ids::{LayerIdx, Shard};
use afd_common::layers::{FewRows, FfnNames, GatedMlp, Router, Selected, Selector};
use afd_common::placement::row_salt;
use afd_common::weights::Weights;
use afd_ffi::memory;
use tch::{Device, Kind, TchError, Tensor};

use super::counts::ExpertCounts;
use super::error::{At, FfnModelError};
use super::experts::Experts;
use super::grouping::{Groups, LocalExperts};
use super::{LayerSpec, Side};

/// This shard's part of a mixture of experts.
#[derive(Debug)]
pub(super) struct MixtureOfExperts {
    /// Absent when the gate is placed on attention.
    router: Option<Router>,
    selector: Selector,
    experts: Experts,
    shared: Shared,
    /// Which side has them; `None` when the layer has none.
    shared_experts: Option<SharedExpertPlacement>,
    local: LocalExperts,
    num_experts: usize,
    top_k: usize,
}

/// This shard's part of the shared experts.
#[derive(Debug)]
enum Shared {
    /// The model has none, attention has them, or this shard's slice is empty.
    None,
    /// A slice, for every row.
    Slice(GatedMlp),
    /// All, for the rows whose first choice this shard serves.
    Whole(GatedMlp),
}

impl Shared {
    fn load(
        weights: &Weights,
        names: &FfnNames,
        hidden: usize,
        size: usize,
        shard: Shard,
        sides: Sides,
    ) -> Result<Self, FfnModelError> {
        let load = |shard| GatedMlp::load(weights, &names.shared(), hidden, size, shard, false);
        let gate = sides.gate;
        Ok(match gate {
            _ if sides.shared_on_attention() => Self::None,
            _ if shard.part_of(size).is_empty() && (size == 0 || gate == GatePlacement::Ffn) => Self::None,
            GatePlacement::Attention if shard.count() > 1 => Self::Whole(load(Shard::WHOLE)?),
            _ => Self::Slice(load(shard)?),
        })
    }
}

/// What of a batch is this shard's work.
struct Work {
    groups: Groups,
    /// Rows for shared experts; `None`: all.
    shared_rows: Option<Vec<i64>>,
}

impl MixtureOfExperts {
    pub(super) fn load(
        config: &ModelConfig,
        weights: &Weights,
        layer: usize,
        moe: &MoeConfig,
        shard: Shard,
        sides: Sides,
        local: LocalExperts,
    ) -> Result<Self, FfnModelError> {
        let (architecture, hidden) = (config.architecture, config.hidden_size);
        let names = FfnNames::new(architecture, layer);
        let router = match sides.gate {
            GatePlacement::Ffn => Some(Router::load(weights, architecture, layer, moe, hidden)?),
            GatePlacement::Attention => None,
        };
        Ok(Self {
            router,
            selector: Selector::load(weights, architecture, layer, moe)?,
            experts: Experts::load(weights, &names, hidden, moe, local.ids())?,
            shared: Shared::load(weights, &names, hidden, moe.shared_intermediate_size, shard, sides)?,
            shared_experts: (moe.shared_intermediate_size > 0).then_some(sides.shared_experts),
            local,
            num_experts: moe.num_experts,
            top_k: moe.experts_per_token,
        })
    }

    pub(super) fn spec(&self) -> LayerSpec {
        let (side, side_columns) = match (&self.router, self.selector.token_ids()) {
            (Some(_), None) => (SideKind::None, 0),
            (Some(_), Some(_)) => (SideKind::InputIds, 1),
            (None, _) => (SideKind::TopK, self.top_k as u32),
        };
        LayerSpec {
            side,
            side_columns,
            num_experts: self.num_experts as u32,
            experts_per_token: self.top_k as u32,
            local_experts: self.local.ids().iter().map(|id| *id as u32).collect(),
            shared_experts: self.shared_experts,
        }
    }

    /// `[rows, hidden]`, at least one row, to this shard's part of the sum, `[rows, hidden]` f32. Choices are noted in `counts`.
    pub(super) fn forward(
        &self,
        layer: LayerIdx,
        x: &Tensor,
        side: &Side,
        counts: Option<&ExpertCounts>,
        few_rows: &FewRows,
    ) -> Result<Tensor, FfnModelError> {
        let selected = self.route(layer, x, side)?;
        let work = self.share_out(layer, x, &selected)?;
        if let Some(counts) = counts {
            for (expert, items) in &work.groups.experts {
                counts.add(layer, *expert, items.len());
            }
        }
        if let Some(sum) = self.forward_few(layer, x, &work, few_rows)? {
            return Ok(sum);
        }
        let x = few_rows.else_widened(x).at(layer, "widening")?;
        let routed = self.experts.forward(&x, &work.groups).at(layer, "experts")?;
        self.add_shared(&x, routed, work.shared_rows.as_deref()).at(layer, "shared experts")
    }

    /// Adds the shared experts' output for some rows, or for all, to `sum`, `[rows, hidden]` f32.
    fn add_shared(&self, x: &Tensor, mut sum: Tensor, rows: Option<&[i64]>) -> Result<Tensor, TchError> {
        match (&self.shared, rows) {
            (Shared::None, _) | (_, Some([])) => Ok(sum),
            (Shared::Slice(mlp) | Shared::Whole(mlp), None) => sum.f_add(&mlp.forward(x)?),
            (Shared::Slice(mlp) | Shared::Whole(mlp), Some(rows)) => {
                let rows = Tensor::f_from_slice(rows)?.f_to_device(x.device())?;
                let shared = mlp.forward(&x.f_index_select(0, &rows)?)?.f_to_kind(Kind::Float)?;
                sum.f_index_add_(0, &rows, &shared)
            }
        }
    }

    /// Routed and shared experts in one go, when all of them have few rows.
    fn forward_few(
        &self,
        layer: LayerIdx,
        x: &Tensor,
        work: &Work,
        few_rows: &FewRows,
    ) -> Result<Option<Tensor>, FfnModelError> {
        let num_rows = x.size()[0] as usize;
        let groups = &work.groups;
        let fullest = groups.experts.iter().map(|(_, items)| items.len()).max().unwrap_or(0);
        let num_shared = match &self.shared {
            Shared::None => 0,
            Shared::Slice(_) | Shared::Whole(_) => work.shared_rows.as_ref().map_or(num_rows, Vec::len),
        };
        // On a GPU the loops cannot reach rows, not even to find that none of them is this shard's.
        if x.device() != Device::Cpu || !few_rows.are(fullest.max(num_shared)) {
            return Ok(None);
        }
        let Some(mut mlps) = self.experts.as_few_rows(groups) else { return Ok(None) };
        if let Shared::Slice(shared) | Shared::Whole(shared) = &self.shared {
            let Some(mlp) = shared.stored() else { return Ok(None) };
            match &work.shared_rows {
                None => mlps.push(few_rows.all_of(mlp, num_rows)),
                Some(rows) if rows.is_empty() => {}
                Some(rows) => mlps.push(few_rows.some_of(mlp, rows)),
            }
        }
        few_rows.forward(x, &mlps).map(Some).map_err(|source| FfnModelError::FewRows { layer, source })
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
            // Whoever chose, a choice is a choice: attention, or the cycle of `--routing balanced`.
            (_, Side::TopK { ids, weights }) => {
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

    /// Which rows are this shard's to serve, and with which experts.
    fn share_out(&self, layer: LayerIdx, x: &Tensor, selected: &Selected) -> Result<Work, FfnModelError> {
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
        let salts = if self.local.has_copies() { salts(x).at(layer, "row salts")? } else { Vec::new() };
        let groups = Groups::new(ids, weights, self.top_k, &self.local, &salts);
        let groups = groups.map_err(|unknown| FfnModelError::UnknownExpert {
            layer,
            row: unknown.row,
            expert: unknown.expert,
            num_experts: self.num_experts,
        })?;
        let shared_rows = match self.shared {
            Shared::Whole(_) => Some(self.local.shared_rows(ids, self.top_k, &salts)),
            Shared::None | Shared::Slice(_) => None,
        };
        Ok(Work { groups, shared_rows })
    }
}

/// The [`row_salt`] of every row of `x`, `[rows, hidden]` in the dtype it travelled in.
fn salts(x: &Tensor) -> Result<Vec<u32>, TchError> {
    let rows = x.size()[0] as usize;
    let host = x.f_to_device(Device::Cpu)?.f_contiguous()?;
    let bytes = memory::bytes(&host).map_err(|error| TchError::Torch(error.to_string()))?;
    Ok(bytes.chunks_exact((bytes.len() / rows.max(1)).max(1)).map(row_salt).collect())
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
