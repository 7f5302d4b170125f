//! What of a mixture of experts may be placed on attention: its router (`--gate`), so that rows go only where their experts
//! are, and its shared experts (`--shared-experts`), which every row goes through and which are computed here while the FFN
//! computes the routed ones. The routed experts never are here.
use std::sync::Arc;

use afd_common::config::model::{FfnConfig, ModelConfig, MoeConfig, Selection};
use afd_common::identity::{GatePlacement, SharedExpertPlacement, Sides};
use afd_common::ids::{LayerIdx, Shard};
use afd_common::layers::{FewRows, FfnNames, GatedMlp, MlpError, Router, Selected, Selector};
use afd_common::weights::Weights;
use ffn_svc::device::SharedExperts;
use ffn_svc::model::FfnModelError;
use tch::{Device, Kind, Tensor};

use super::error::At;
use super::{AttentionModel, ModelError};

const WHAT: &str = "shared experts";

/// What attention has of one layer's mixture; nothing where options say nothing, or the layer is dense.
#[derive(Default)]
pub(super) struct Mixture {
    pub(super) gate: Option<Gate>,
    /// All of them, as one MLP.
    pub(super) shared_experts: Option<GatedMlp>,
}

/// The router of a layer.
pub(super) struct Gate {
    router: Router,
    selector: Selector,
}

impl Mixture {
    fn load(
        config: &ModelConfig,
        weights: &Weights,
        layer: usize,
        moe: &MoeConfig,
        sides: Sides,
    ) -> Result<Self, ModelError> {
        let (architecture, hidden) = (config.architecture, config.hidden_size);
        let gate = match sides.gate {
            GatePlacement::Ffn => None,
            GatePlacement::Attention => Some(Gate {
                router: Router::load(weights, architecture, layer, moe, hidden)?,
                selector: Selector::load(weights, architecture, layer, moe)?,
            }),
        };
        let size = moe.shared_intermediate_size;
        let shared_experts = if sides.shared_on_attention() && size > 0 {
            let names = FfnNames::new(architecture, layer).shared();
            Some(GatedMlp::load(weights, &names, hidden, size, Shard::WHOLE, false)?)
        } else {
            None
        };
        Ok(Self { gate, shared_experts })
    }
}

impl AttentionModel {
    /// Takes what is placed on attention of every mixture of experts too: routers, shared experts.
    ///
    /// # Errors
    /// [`ModelError`] names the tensor; a retry does not help.
    pub fn take_on(&mut self, sides: impl Into<Sides>, weights: &Weights) -> Result<(), ModelError> {
        let _no_grad = tch::no_grad_guard();
        let sides = sides.into();
        let for_kernels = sides.shared_on_attention()
            && weights.device() != Device::Cpu
            && SharedExperts::check(&self.config, self.kind()).is_ok();
        if for_kernels {
            let shared = SharedExperts::load(&self.config, weights);
            self.shared_experts = Some(shared.map_err(|error| match error {
                FfnModelError::Weights(error) => ModelError::Weights(error),
                error => ModelError::Device { place: WHAT.into(), what: error.to_string() },
            })?);
        }
        // By operations where there are no kernels for them.
        let shared_experts = if for_kernels { SharedExpertPlacement::Ffn } else { sides.shared_experts };
        let sides = Sides { shared_experts, ..sides };
        for (i, (layer, ffn)) in self.layers.iter_mut().zip(&self.config.layers).enumerate() {
            if let FfnConfig::Moe(moe) = ffn {
                layer.mixture = Mixture::load(&self.config, weights, i, moe, sides)?;
            }
        }
        if sides.shared_on_attention() {
            self.few_rows = Some(FewRows::on(Arc::clone(&self.crew), self.kind()));
        }
        Ok(())
    }

    fn mixture(&self, layer: LayerIdx) -> Option<&Mixture> {
        self.layers.get(usize::from(layer.0)).map(|layer| &layer.mixture)
    }

    /// Whether the layer's experts follow from token ids, wherever the gate is.
    pub fn routes_by_token(&self, layer: LayerIdx) -> bool {
        let moe = self.config.moe(usize::from(layer.0));
        moe.is_some_and(|moe| matches!(moe.router.selection, Selection::TokenTable { .. }))
    }

    /// Router logits `[num_rows, num_experts]` f32 of a layer's `ffn_in`; `None` when the layer is dense or the gate is
    /// on the FFN.
    ///
    /// # Errors
    /// [`ModelError`] when the shape does not fit.
    pub fn router_logits(&self, layer: LayerIdx, ffn_in: &Tensor) -> Result<Option<Tensor>, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let gate = self.mixture(layer).and_then(|mixture| mixture.gate.as_ref());
        gate.map(|gate| gate.router.logits(ffn_in)).transpose().at(layer, "router")
    }

    /// The experts of each row of a layer's `ffn_in` and their weights, the rows being those of the tokens `input_ids`;
    /// `None` as for [`router_logits`](Self::router_logits).
    ///
    /// # Errors
    /// As for [`router_logits`](Self::router_logits).
    pub fn route(
        &self,
        layer: LayerIdx,
        ffn_in: &Tensor,
        input_ids: &[u32],
    ) -> Result<Option<Selected>, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let gate = self.mixture(layer).and_then(|mixture| mixture.gate.as_ref());
        let Some(Gate { router, selector }) = gate else { return Ok(None) };
        let logits = router.logits(ffn_in).at(layer, "router")?;
        let selected = match selector.token_ids() {
            None => selector.select(&logits),
            Some(_) => selector.select_by_token(&logits, &self.token_ids(input_ids)?),
        };
        selected.map(Some).at(layer, "expert selection")
    }

    /// The output of a layer's shared experts for its `ffn_in`, `[num_rows, hidden]` f32: what the FFN's sum leaves out.
    /// `None` when the layer has none, or the FFN has them.
    ///
    /// # Errors
    /// [`ModelError`] when the shape does not fit.
    pub fn shared_experts(&self, layer: LayerIdx, ffn_in: &Tensor) -> Result<Option<Tensor>, ModelError> {
        if let Some(shared) = &self.shared_experts {
            let _no_grad = tch::no_grad_guard();
            return shared.forward(layer, ffn_in).at(layer, WHAT);
        }
        let mlp = self.mixture(layer).and_then(|mixture| mixture.shared_experts.as_ref());
        let (Some(mlp), Some(few_rows)) = (mlp, &self.few_rows) else { return Ok(None) };
        let _no_grad = tch::no_grad_guard();
        let out = few_rows.forward_one(mlp, ffn_in).map_err(|error| match error {
            MlpError::Shape(source) => ModelError::Shape { place: format!("{layer}: {WHAT}"), source },
            MlpError::Torch(source) => ModelError::Torch { place: format!("{layer}: {WHAT}"), source },
        })?;
        out.f_to_kind(Kind::Float).map(Some).at(layer, WHAT)
    }
}
