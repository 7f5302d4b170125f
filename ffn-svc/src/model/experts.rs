//! The routed experts of a layer that this shard owns. Rows are sorted by expert once; each expert with rows costs two
//! or three matrix products into shared buffers, everything between them is done for all experts at once. Experts
//! without rows cost nothing.
use std::ops::Range;

use afd_common::config::model::MoeConfig;
use afd_common::layers::{FfnNames, GateUp, halves, transposed};
use afd_common::weights::{WeightError, Weights};
use afd_ffi::cpu_mlp::{MlpRows, StoredMlp};
use tch::{Kind, TchError, Tensor};

use super::grouping::Groups;

/// Up to so many rows the weighted sum is one product with a `[rows, items]` matrix; beyond, rows are added one by one.
const MAX_ROWS_BY_PRODUCT: usize = 16;

/// Weights of some experts.
#[derive(Debug)]
pub(super) struct Experts {
    experts: Vec<Expert>,
    intermediate: i64,
    hidden: i64,
}

#[derive(Debug)]
struct Expert {
    gate_up: GateUp,
    /// `[intermediate, hidden]`, a transposed view.
    down: Tensor,
    /// The same weights for the loops for few rows, where those can run.
    stored: Option<StoredMlp>,
}

impl Experts {
    /// The experts `local`, whole.
    pub(super) fn load(
        weights: &Weights,
        names: &FfnNames,
        hidden: usize,
        moe: &MoeConfig,
        local: &[usize],
    ) -> Result<Self, WeightError> {
        let intermediate = moe.intermediate_size;
        let experts = local
            .iter()
            .map(|index| {
                let [gate, up, down] = names.expert(*index);
                let down_name = format!("{down}.weight");
                let down = weights.tensor(&down_name, &[hidden as i64, intermediate as i64])?;
                let gate_up = GateUp::load(weights, [&gate, &up], hidden, intermediate, 0..intermediate)?;
                let stored = gate_up.stored_with(&down);
                Ok(Expert { gate_up, down: transposed(&down_name, &down)?, stored })
            })
            .collect::<Result<Vec<_>, WeightError>>()?;
        Ok(Self { experts, intermediate: intermediate as i64, hidden: hidden as i64 })
    }

    /// The experts' work for the loops for few rows; `None` where those cannot run.
    pub(super) fn as_few_rows<'a>(&'a self, groups: &'a Groups) -> Option<Vec<MlpRows<'a>>> {
        let part = |(expert, items): &(usize, Range<usize>)| {
            let mlp = self.experts[*expert].stored.as_ref()?;
            Some(MlpRows { mlp, rows: &groups.rows[items.clone()], scales: &groups.weights[items.clone()] })
        };
        groups.experts.iter().map(part).collect()
    }

    /// The weighted sum of the experts' outputs for `x`, `[rows, hidden]`, whose dtype may be wider than the weights';
    /// returns f32.
    pub(super) fn forward(&self, x: &Tensor, groups: &Groups) -> Result<Tensor, TchError> {
        let num_rows = x.size()[0];
        if groups.rows.is_empty() {
            return Tensor::f_zeros([num_rows, self.hidden], (Kind::Float, x.device()));
        }
        let rows = Tensor::f_from_slice(&groups.rows)?.f_to_device(x.device())?;
        // With one row every item is that row.
        let gathered = if num_rows == 1 { None } else { Some(x.f_index_select(0, &rows)?) };
        let input = |items: &Range<usize>| match &gathered {
            Some(gathered) => part(gathered, items),
            None => x.f_expand([items.len() as i64, self.hidden], false),
        };
        let activated = self.activate(x, groups, input)?;
        let outputs = self.buffer(x, groups, self.hidden)?;
        for (expert, items) in &groups.experts {
            product_into(&part(&outputs, items)?, &part(&activated, items)?, &self.experts[*expert].down)?;
        }
        let outputs = outputs.f_to_kind(Kind::Float)?;
        self.combine(&outputs, &rows, groups, num_rows as usize)
    }

    /// `silu(gate(x)) * up(x)` of every item, `[items, intermediate]`.
    fn activate(
        &self,
        x: &Tensor,
        groups: &Groups,
        input: impl Fn(&Range<usize>) -> Result<Tensor, TchError>,
    ) -> Result<Tensor, TchError> {
        let both = self.buffer(x, groups, 2 * self.intermediate)?;
        let (gates, ups) = halves(&both)?;
        for (expert, items) in &groups.experts {
            let input = input(items)?;
            match &self.experts[*expert].gate_up {
                GateUp::Joined(weight) => product_into(&part(&both, items)?, &input, weight)?,
                GateUp::Apart(gate, up) => {
                    product_into(&part(&gates, items)?, &input, gate)?;
                    product_into(&part(&ups, items)?, &input, up)?;
                }
            }
        }
        gates.f_silu()?.f_mul_(&ups)
    }

    fn buffer(&self, x: &Tensor, groups: &Groups, width: i64) -> Result<Tensor, TchError> {
        Tensor::f_empty([groups.rows.len() as i64, width], (x.kind(), x.device()))
    }

    /// Adds up each row's items, weighted. `outputs` is `[items, hidden]` f32.
    fn combine(
        &self,
        outputs: &Tensor,
        rows: &Tensor,
        groups: &Groups,
        num_rows: usize,
    ) -> Result<Tensor, TchError> {
        if num_rows <= MAX_ROWS_BY_PRODUCT {
            let matrix =
                Tensor::f_from_slice(&groups.combine_matrix(num_rows))?.f_to_device(outputs.device())?;
            return matrix.f_view([num_rows as i64, -1])?.f_mm(outputs);
        }
        let weights = Tensor::f_from_slice(&groups.weights)?.f_to_device(outputs.device())?;
        let weighted = outputs.f_mul(&weights.f_unsqueeze(1)?)?;
        let mut sum = Tensor::f_zeros([num_rows as i64, self.hidden], (Kind::Float, outputs.device()))?;
        sum.f_index_add_(0, rows, &weighted)
    }
}

/// `out = a · b`, in the dtype of `a`.
fn product_into(out: &Tensor, a: &Tensor, b: &Tensor) -> Result<(), TchError> {
    let _same_as_out = a.f_mm_out(out, &b.f_to_kind(a.kind())?)?;
    Ok(())
}

fn part(tensor: &Tensor, items: &Range<usize>) -> Result<Tensor, TchError> {
    tensor.f_narrow(0, items.start as i64, items.len() as i64)
}
