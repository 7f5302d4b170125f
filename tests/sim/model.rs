//! A layer's FFN whose results say where they came from. Plain: shard `s` makes `x · (s + 2) + layer` of every element.
//! Routed: expert `e` makes `w · (x · (e + 2) + layer)` of every element of a row that chose it with weight `w`, and a
//! shard has the experts that a contiguous placement gives it. All numbers are small and whole, so sums are exact in f32 in
//! whatever order they are added up.
use afd_common::frame::{RowType, SideKind};
use afd_common::ids::{LayerIdx, Shard};
use ffn_svc::engine::{StageModel, StageSpec};
use ffn_svc::model::{LayerSpec, Side};
use tch::{Kind, Tensor};

use crate::dice::Dice;

pub(crate) const HIDDEN: usize = 2;
/// As in the fixture whose configuration the port is given.
pub(crate) const NUM_EXPERTS: usize = 8;
pub(crate) const TOP_K: usize = 2;

pub(crate) struct SimModel {
    pub(crate) shard: Shard,
    pub(crate) num_layers: u16,
    pub(crate) is_routed: bool,
}

impl StageModel for SimModel {
    fn spec(&self) -> StageSpec {
        let local = self.shard.part_of(NUM_EXPERTS).map(|expert| expert as u32).collect();
        let routed = LayerSpec {
            side: SideKind::TopK,
            side_columns: TOP_K as u32,
            num_experts: NUM_EXPERTS as u32,
            experts_per_token: TOP_K as u32,
            local_experts: local,
            shared_experts: None,
        };
        StageSpec {
            hidden_size: HIDDEN,
            activations: RowType::F32,
            shard: self.shard,
            layers: vec![
                if self.is_routed { routed } else { LayerSpec::dense() };
                usize::from(self.num_layers)
            ],
        }
    }

    fn forward(&mut self, layer: LayerIdx, rows: &Tensor, side: &Side) -> Result<Tensor, String> {
        let Side::TopK { ids, weights } = side else {
            return Ok(rows * f64::from(self.shard.index() + 2) + f64::from(layer.0));
        };
        let flat = |tensor: &Tensor| Vec::<f32>::try_from(tensor.to_kind(Kind::Float).reshape([-1]));
        let read = || Ok::<_, tch::TchError>((flat(rows)?, flat(ids)?, flat(weights)?));
        let (values, ids, weights) = read().map_err(|error| error.to_string())?;
        let choices = ids.into_iter().map(|id| id as usize).zip(weights).collect();
        let sums = Rows { values, choices }.partial(layer.0, self.shard);
        Ok(Tensor::from_slice(&sums).view([-1, HIDDEN as i64]))
    }
}

/// What is sent of a hop, and what must come back.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rows {
    /// `[rows, HIDDEN]`
    pub(crate) values: Vec<f32>,
    /// `[rows, TOP_K]`: experts and their weights; empty where nothing is routed.
    pub(crate) choices: Vec<(usize, f32)>,
}

impl Rows {
    pub(crate) fn throw(dice: &mut Dice, num_rows: usize, is_routed: bool) -> Self {
        let values = (0..num_rows * HIDDEN).map(|_| dice.between(0, 999) as f32).collect();
        let mut choices = Vec::new();
        for _ in 0..if is_routed { num_rows } else { 0 } {
            let first = dice.index(NUM_EXPERTS);
            let second = (first + 1 + dice.index(NUM_EXPERTS - 1)) % NUM_EXPERTS;
            choices.extend([first, second].map(|expert| (expert, dice.between(1, 4) as f32)));
        }
        Self { values, choices }
    }

    pub(crate) fn len(&self) -> usize {
        self.values.len() / HIDDEN
    }

    /// One shard's part of the sum.
    pub(crate) fn partial(&self, layer: u16, shard: Shard) -> Vec<f32> {
        let layer = f32::from(layer);
        if self.choices.is_empty() {
            return self.values.iter().map(|x| x * (shard.index() + 2) as f32 + layer).collect();
        }
        let local = shard.part_of(NUM_EXPERTS);
        let rows = self.values.chunks(HIDDEN).zip(self.choices.chunks(TOP_K));
        rows.flat_map(|(row, choices)| {
            let chosen = choices.iter().filter(|(expert, _)| local.contains(expert));
            let part =
                |x: &f32| chosen.clone().map(|(expert, w)| w * (x * (expert + 2) as f32 + layer)).sum();
            row.iter().map(part).collect::<Vec<f32>>()
        })
        .collect()
    }

    /// The sum over all shards.
    pub(crate) fn whole(&self, layer: u16, num_shards: u32) -> Vec<f32> {
        let mut sum = vec![0.0; self.values.len()];
        for shard in (0..num_shards).filter_map(|index| Shard::new(index, num_shards)) {
            sum.iter_mut().zip(self.partial(layer, shard)).for_each(|(sum, part)| *sum += part);
        }
        sum
    }

    /// As the body of a dispatch.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let values = self.values.iter().flat_map(|x| x.to_le_bytes());
        let ids = self.choices.iter().flat_map(|(expert, _)| (*expert as i32).to_le_bytes());
        let weights = self.choices.iter().flat_map(|(_, weight)| weight.to_le_bytes());
        values.chain(ids).chain(weights).collect()
    }
}
