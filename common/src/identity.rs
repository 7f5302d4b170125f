//! What two processes compare before they work together, computed alike on both sides.
use std::path::Path;

use crate::config::model::ModelConfig;
use crate::config::option::{OptionError, refuse};
use crate::frame::RowType;
use crate::placement::{CONTIGUOUS, Placement};
use crate::proto::v1;
use crate::routing::Routing;
use crate::spelling;

/// Which side computes the router of a mixture of experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GatePlacement {
    /// The FFN routes the rows it receives.
    #[default]
    Ffn,
    /// Attention routes and sends its choice along.
    Attention,
}

impl std::str::FromStr for GatePlacement {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "ffn" => Ok(Self::Ffn),
            "attention" => Ok(Self::Attention),
            other => Err(format!("{other:?} is no side; known are ffn and attention")),
        }
    }
}

impl From<GatePlacement> for v1::GatePlacement {
    fn from(gate: GatePlacement) -> Self {
        match gate {
            GatePlacement::Ffn => Self::Ffn,
            GatePlacement::Attention => Self::Attention,
        }
    }
}

/// Which side computes the shared experts of a mixture, which every row goes through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SharedExpertPlacement {
    /// The FFN: a slice on each shard, or whole where the gate is on attention.
    #[default]
    Ffn,
    /// Attention, while the FFN computes the routed ones.
    Attention,
}

impl std::str::FromStr for SharedExpertPlacement {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().map(|side| match side {
            GatePlacement::Ffn => Self::Ffn,
            GatePlacement::Attention => Self::Attention,
        })
    }
}

impl From<SharedExpertPlacement> for v1::SharedExpertPlacement {
    fn from(shared_experts: SharedExpertPlacement) -> Self {
        match shared_experts {
            SharedExpertPlacement::Ffn => Self::Ffn,
            SharedExpertPlacement::Attention => Self::Attention,
        }
    }
}

/// Which side computes what of a mixture of experts, beside the routed ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sides {
    /// The router.
    pub gate: GatePlacement,
    /// The shared experts.
    pub shared_experts: SharedExpertPlacement,
}

/// Shared experts on the FFN.
impl From<GatePlacement> for Sides {
    fn from(gate: GatePlacement) -> Self {
        Self { gate, shared_experts: SharedExpertPlacement::Ffn }
    }
}

impl Sides {
    /// Whether attention computes shared experts.
    pub fn shared_on_attention(self) -> bool {
        self.shared_experts == SharedExpertPlacement::Attention
    }

    /// Whether a model has what these sides are said to compute; `folder` is its checkpoint.
    ///
    /// # Errors
    /// [`OptionError`] names the option and the model.
    pub fn check(self, config: &ModelConfig, folder: &Path) -> Result<(), OptionError> {
        if self.shared_on_attention() && !config.has_shared_experts() {
            let (folder, architecture) = (folder.display(), config.architecture);
            let what = format!("is attention, and {folder} ({architecture}) has no shared experts");
            return refuse("--shared-experts", what);
        }
        Ok(())
    }
}

impl From<Routing> for v1::Routing {
    fn from(routing: Routing) -> Self {
        match routing {
            Routing::Model => Self::Model,
            Routing::Balanced => Self::Balanced,
        }
    }
}

/// How experts are chosen and where they are, to be alike on both roles.
#[derive(Clone, Debug, Default)]
pub struct ExpertRules {
    /// Which side routes, and which computes the shared ones.
    pub sides: Sides,
    /// Who chooses.
    pub routing: Routing,
    /// Who has which; `None`: contiguous parts.
    pub placement: Option<std::sync::Arc<Placement>>,
}

/// What `Join` compares field by field. `fingerprint` is the weights' own (see `weights`).
pub fn model_identity(
    config: &ModelConfig,
    fingerprint: &str,
    activations: RowType,
    experts: &ExpertRules,
) -> v1::ModelIdentity {
    v1::ModelIdentity {
        fingerprint: fingerprint.to_owned(),
        architecture: config.architecture.name().to_owned(),
        hidden_size: config.hidden_size as u32,
        num_layers: config.layers.len() as u32,
        activation_dtype: dtype(activations).into(),
        gate_placement: v1::GatePlacement::from(experts.sides.gate).into(),
        placement: experts
            .placement
            .as_ref()
            .map_or_else(|| CONTIGUOUS.into(), |placed| placed.digest(config)),
        routing: v1::Routing::from(experts.routing).into(),
        shared_expert_placement: v1::SharedExpertPlacement::from(experts.sides.shared_experts).into(),
    }
}

/// A field of a model's identity as it is compared and shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compared {
    /// Name in the protocol, with its message's.
    pub field: &'static str,
    /// In the words of the options.
    pub value: String,
    /// Options that decide it.
    pub options: &'static str,
}

/// What must be alike on both sides, the plainest first: a fingerprint differs whenever one of the first three does.
pub fn compared(model: &v1::ModelIdentity) -> [Compared; 9] {
    let of = |field, value: String, options| Compared { field, value, options };
    // Who says nothing has contiguous parts, lets the model route, and has shared experts on the FFN.
    let placement = if model.placement.is_empty() { CONTIGUOUS } else { &model.placement };
    // Numbers as they came: one that is not known here is no default.
    let said = |wire: i32, default: i32| if wire == 0 { default } else { wire };
    let routing = said(model.routing, v1::Routing::Model.into());
    let shared_experts = said(model.shared_expert_placement, v1::SharedExpertPlacement::Ffn.into());
    [
        of("model.architecture", model.architecture.clone(), "--model"),
        of("model.hidden_size", model.hidden_size.to_string(), "--model"),
        of("model.num_layers", model.num_layers.to_string(), "--model"),
        of("model.fingerprint", model.fingerprint.clone(), "--model, or --load-format and --seed"),
        of("model.activation_dtype", spelling::dtype(model.activation_dtype).into(), "--dtype"),
        of("model.gate_placement", spelling::gate(model.gate_placement).into(), "--gate"),
        of(
            "model.shared_expert_placement",
            spelling::shared_experts(shared_experts).into(),
            "--shared-experts",
        ),
        of("model.placement", placement.into(), "--placement"),
        of("model.routing", spelling::routing(routing).into(), "--routing"),
    ]
}

/// The first field in which two models differ: the one's, and the other's.
pub fn difference(a: &v1::ModelIdentity, b: &v1::ModelIdentity) -> Option<(Compared, Compared)> {
    compared(a).into_iter().zip(compared(b)).find(|(a, b)| a.value != b.value)
}

/// The protocol's name of a row type.
pub fn dtype(rows: RowType) -> v1::Dtype {
    match rows {
        RowType::F32 => v1::Dtype::F32,
        RowType::Bf16 => v1::Dtype::Bf16,
    }
}
