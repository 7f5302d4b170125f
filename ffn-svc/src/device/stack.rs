//! A layer's experts in one tensor, as the kernels read them: routed experts of this shard first, then its slice of the
//! shared experts, cut into pieces of a routed expert's size; a dense layer is such pieces alone. What a piece has more than
//! the slice is filled with zeros, which add nothing.
use std::ops::Range;

use afd_common::config::model::{FfnConfig, ModelConfig, MoeConfig, Scoring, Selection};
use afd_common::frame::SideKind;
use afd_common::identity::{GatePlacement, SharedExpertPlacement, Sides};
use afd_common::ids::{LayerIdx, Shard};
use afd_common::layers::{FfnNames, Router, Selector};
use afd_common::placement::Placement;
use afd_common::weights::{WeightError, Weights};
use afd_gpu::ops::{Moe, MoeScoring, MoeShape};
use tch::{Kind, TchError, Tensor};

use super::Unsupported;
use crate::model::{FfnModelError, LayerSpec};

/// One layer.
#[derive(Debug)]
pub(super) struct Stack {
    pub(super) shape: MoeShape,
    /// `[experts here + pieces, 2 * intermediate, hidden]`: of each the gate's rows, then up's.
    pub(super) gate_up: Tensor,
    /// `[experts here + pieces, hidden, intermediate]`
    pub(super) down: Tensor,
    /// Absent in a dense layer.
    pub(super) routed: Option<Routed>,
}

/// How rows find their experts.
#[derive(Debug)]
pub(super) struct Routed {
    pub(super) router: Router,
    pub(super) selector: Selector,
    /// `[experts, hidden]`, the compute dtype: the kernels add up in f32 anyway.
    pub(super) weight: Tensor,
    /// `[experts]` f32
    pub(super) bias: Option<Tensor>,
    /// Of the whole layer's experts those of this shard.
    pub(super) local: Range<usize>,
    pub(super) scale: f32,
    /// Which side has the layer's shared experts; `None` when it has none.
    pub(super) shared_experts: Option<SharedExpertPlacement>,
}

/// How the kernels would see every layer of a shard.
///
/// # Errors
/// The first reason why they cannot.
pub(super) fn shapes(
    config: &ModelConfig,
    kind: Kind,
    shard: Shard,
    sides: Sides,
    placement: &Placement,
) -> Result<Vec<MoeShape>, Unsupported> {
    if kind != Kind::BFloat16 {
        return Err(Unsupported(format!("{kind:?} rows; they take bf16")));
    }
    if sides.gate != GatePlacement::Ffn {
        return Err(Unsupported("the gate is on attention".into()));
    }
    if *placement != Placement::contiguous(config, shard.count()) {
        return Err(Unsupported("experts are placed one by one".into()));
    }
    let shape = |(layer, ffn): (usize, &FfnConfig)| {
        let shape = shape(config.hidden_size, ffn, shard, sides);
        let checked = shape.and_then(|shape| match Moe::check(&shape) {
            Ok(()) => Ok(shape),
            Err(error) => Err(error.to_string()),
        });
        checked.map_err(|what| Unsupported(format!("{}: {what}", LayerIdx(layer as u16))))
    };
    config.layers.iter().enumerate().map(shape).collect()
}

fn shape(hidden: usize, ffn: &FfnConfig, shard: Shard, sides: Sides) -> Result<MoeShape, String> {
    match ffn {
        FfnConfig::Dense(mlp) if mlp.bias => Err("biases".into()),
        FfnConfig::Dense(mlp) => dense(hidden, shard.part_of(mlp.intermediate_size).len()),
        FfnConfig::Moe(moe) => {
            let shared = if sides.shared_on_attention() { 0 } else { moe.shared_intermediate_size };
            Ok(MoeShape {
                hidden,
                intermediate: moe.intermediate_size,
                num_experts: moe.num_experts,
                top_k: moe.experts_per_token,
                num_shared: shard.part_of(shared).len().div_ceil(moe.intermediate_size),
                scoring: scoring(moe)?,
                normalize: moe.router.normalize,
                round_logits: !moe.router.logits_in_f32,
            })
        }
    }
}

/// How the kernels would see an MLP that every row goes through.
pub(super) fn dense(hidden: usize, intermediate: usize) -> Result<MoeShape, String> {
    let cut = MoeShape::cut(hidden, intermediate).filter(|_| intermediate > 0);
    let (num_shared, size) =
        cut.ok_or_else(|| format!("a dense MLP of {intermediate} in rows of {hidden}"))?;
    Ok(MoeShape {
        hidden,
        intermediate: size,
        num_experts: 0,
        top_k: 0,
        num_shared,
        scoring: MoeScoring::Softmax,
        normalize: false,
        round_logits: false,
    })
}

fn scoring(moe: &MoeConfig) -> Result<MoeScoring, String> {
    let every_group = match moe.router.selection {
        Selection::Greedy => true,
        Selection::GroupLimited { num_groups, topk_groups }
        | Selection::NoAuxTc { num_groups, topk_groups } => topk_groups >= num_groups,
        Selection::TokenTable { .. } => return Err("routing by token id".into()),
    };
    let biased = matches!(moe.router.selection, Selection::NoAuxTc { .. });
    match moe.router.scoring {
        _ if !every_group => Err("routing to the best groups alone".into()),
        Scoring::Sigmoid => Ok(MoeScoring::Sigmoid),
        Scoring::Softmax if !biased => Ok(MoeScoring::Softmax),
        other => Err(format!("{other:?} scores with {:?}", moe.router.selection)),
    }
}

impl Stack {
    /// The layer `index`.
    pub(super) fn load(
        config: &ModelConfig,
        weights: &Weights,
        index: usize,
        shape: MoeShape,
        (shard, sides): (Shard, Sides),
    ) -> Result<Self, FfnModelError> {
        let names = FfnNames::new(config.architecture, index);
        match &config.layers[index] {
            FfnConfig::Dense(mlp) => {
                let part = shard.part_of(mlp.intermediate_size);
                Self::load_dense(weights, shape, &names.dense(), mlp.intermediate_size, part)
            }
            FfnConfig::Moe(moe) => {
                let local = shard.part_of(moe.num_experts);
                let room = Room::new(weights, &shape, local.len() + shape.num_shared)?;
                for (at, expert) in local.clone().enumerate() {
                    let whole = 0..moe.intermediate_size;
                    room.put_pieces(weights, at, &names.expert(expert), moe.intermediate_size, whole)?;
                }
                let part = shard.part_of(moe.shared_intermediate_size);
                let whole = moe.shared_intermediate_size;
                if shape.num_shared > 0 {
                    room.put_pieces(weights, local.len(), &names.shared(), whole, part)?;
                }
                let routed = Some(Routed::load(config, weights, index, moe, local, sides)?);
                Ok(Self { shape, gate_up: room.gate_up, down: room.down, routed })
            }
        }
    }

    /// The part `part` of the MLP that the checkpoint has under `names`, of inner size `whole`.
    pub(super) fn load_dense(
        weights: &Weights,
        shape: MoeShape,
        names: &[String; 3],
        whole: usize,
        part: Range<usize>,
    ) -> Result<Self, FfnModelError> {
        let room = Room::new(weights, &shape, shape.num_shared)?;
        room.put_pieces(weights, 0, names, whole, part)?;
        Ok(Self { shape, gate_up: room.gate_up, down: room.down, routed: None })
    }

    /// Routed experts of this shard.
    pub(super) fn num_here(&self) -> usize {
        self.routed.as_ref().map_or(0, |routed| routed.local.len())
    }

    pub(super) fn spec(&self) -> LayerSpec {
        LayerSpec {
            side: SideKind::None,
            side_columns: 0,
            num_experts: self.shape.num_experts as u32,
            experts_per_token: self.shape.top_k as u32,
            local_experts: self
                .routed
                .iter()
                .flat_map(|routed| routed.local.clone())
                .map(|id| id as u32)
                .collect(),
            shared_experts: self.routed.as_ref().and_then(|routed| routed.shared_experts),
        }
    }
}

impl Routed {
    fn load(
        config: &ModelConfig,
        weights: &Weights,
        index: usize,
        moe: &MoeConfig,
        local: Range<usize>,
        sides: Sides,
    ) -> Result<Self, WeightError> {
        let (architecture, hidden) = (config.architecture, config.hidden_size);
        let names = FfnNames::new(architecture, index);
        let num_experts = moe.num_experts as i64;
        let bias = match moe.router.selection {
            Selection::NoAuxTc { .. } => Some(weights.tensor_f32(&names.correction_bias(), &[num_experts])?),
            _ => None,
        };
        Ok(Self {
            router: Router::load(weights, architecture, index, moe, hidden)?,
            selector: Selector::load(weights, architecture, index, moe)?,
            weight: weights.tensor(&names.router(), &[num_experts, hidden as i64])?,
            bias,
            local,
            scale: moe.router.scaling_factor as f32,
            shared_experts: (moe.shared_intermediate_size > 0).then_some(sides.shared_experts),
        })
    }
}

/// Memory of a layer's experts while it is filled.
struct Room {
    gate_up: Tensor,
    down: Tensor,
    hidden: usize,
    size: usize,
}

impl Room {
    fn new(weights: &Weights, shape: &MoeShape, experts: usize) -> Result<Self, WeightError> {
        let (experts, hidden, size) = (experts as i64, shape.hidden as i64, shape.intermediate as i64);
        let options = (weights.kind(), weights.device());
        let room = |shape: [i64; 3]| Tensor::f_zeros(shape, options).map_err(named("a layer's experts"));
        Ok(Self {
            gate_up: room([experts, 2 * size, hidden])?,
            down: room([experts, hidden, size])?,
            hidden: shape.hidden,
            size: shape.intermediate,
        })
    }

    /// The part `part` of an MLP of inner size `whole`, as experts `at` and following.
    fn put_pieces(
        &self,
        weights: &Weights,
        at: usize,
        [gate, up, down]: &[String; 3],
        whole: usize,
        part: Range<usize>,
    ) -> Result<(), WeightError> {
        let (size, rows) = (self.size, [whole as i64, self.hidden as i64]);
        for (half, name) in [gate, up].into_iter().enumerate() {
            let name = format!("{name}.weight");
            let from = weights.rows(&name, &rows, part.clone())?;
            for (piece, begin) in (0..part.len()).step_by(size).enumerate() {
                let len = size.min(part.len() - begin) as i64;
                let to = |to: Tensor| to.f_narrow(0, (half * size) as i64, len);
                let filled = self
                    .gate_up
                    .f_get((at + piece) as i64)
                    .and_then(to)
                    .and_then(|mut to| to.f_copy_(&from.f_narrow(0, begin as i64, len)?));
                filled.map_err(named(&name))?;
            }
            weights.release(&name);
        }
        let name = format!("{down}.weight");
        let from = weights.columns(&name, &[self.hidden as i64, whole as i64], part.clone())?;
        for (piece, begin) in (0..part.len()).step_by(size).enumerate() {
            let len = size.min(part.len() - begin) as i64;
            let filled = self
                .down
                .f_get((at + piece) as i64)
                .and_then(|to| to.f_narrow(1, 0, len))
                .and_then(|mut to| to.f_copy_(&from.f_narrow(1, begin as i64, len)?));
            filled.map_err(named(&name))?;
        }
        weights.release(&name);
        Ok(())
    }
}

fn named(name: &str) -> impl Fn(TchError) -> WeightError {
    move |source| WeightError::Torch { name: name.into(), source }
}
