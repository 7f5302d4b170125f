//! A gated MLP, `down(silu(gate(x)) * up(x))`, or this shard's slice of one: some rows of gate and up, the same columns
//! of down. The slices' results add up to the whole.
use afd_ffi::cpu_mlp::StoredMlp;
use tch::{TchError, Tensor};

use crate::ids::Shard;
use crate::weights::{WeightError, Weights};

/// Weights of a (part of a) gated MLP.
#[derive(Debug)]
pub struct GatedMlp {
    gate_up: GateUp,
    /// `[intermediate, hidden]`, a transposed view.
    down: Tensor,
    biases: Option<Biases>,
    /// The same weights for the loops for few rows; absent with biases, or off the CPU.
    stored: Option<StoredMlp>,
}

#[derive(Debug)]
struct Biases {
    gate: Tensor,
    up: Tensor,
    /// Only the first shard adds it.
    down: Option<Tensor>,
}

impl GatedMlp {
    /// The part of `shard` of the MLP that the checkpoint stores under `names` (gate, up, down), `[intermediate, hidden]` each
    /// as it multiplies.
    ///
    /// # Errors
    /// [`WeightError`] names the tensor.
    pub fn load(
        weights: &Weights,
        names: &[String; 3],
        hidden: usize,
        intermediate: usize,
        shard: Shard,
        bias: bool,
    ) -> Result<Self, WeightError> {
        let part = shard.part_of(intermediate);
        let [gate, up, down] = names;
        let rows = |name: &str| weights.rows(&format!("{name}.bias"), &[intermediate as i64], part.clone());
        let biases = if bias {
            let down = (shard.index() == 0)
                .then(|| weights.tensor(&format!("{down}.bias"), &[hidden as i64]))
                .transpose()?;
            Some(Biases { gate: rows(gate)?, up: rows(up)?, down })
        } else {
            None
        };
        let down_name = format!("{down}.weight");
        let down = weights.columns(&down_name, &[hidden as i64, intermediate as i64], part.clone())?;
        let gate_up = GateUp::load(weights, [gate, up], hidden, intermediate, part)?;
        let stored = if bias { None } else { gate_up.stored_with(&down) };
        Ok(Self { gate_up, down: transposed(&down_name, &down)?, biases, stored })
    }

    /// The same weights for [`FewRows`](super::FewRows), where those can have them.
    pub fn stored(&self) -> Option<&StoredMlp> {
        self.stored.as_ref()
    }

    /// `[rows, hidden]` to `[rows, hidden]`, in the dtype of `x`, which may be wider than the weights'.
    ///
    /// # Errors
    /// libtorch's, when shapes or dtypes do not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, TchError> {
        let (mut gate, mut up) = self.gate_up.forward(x)?;
        if let Some(biases) = &self.biases {
            (gate, up) = (gate.f_add(&biases.gate)?, up.f_add(&biases.up)?);
        }
        let sum = gate.f_silu()?.f_mul_(&up)?.f_mm(&self.down.f_to_kind(x.kind())?)?;
        match self.biases.as_ref().and_then(|biases| biases.down.as_ref()) {
            Some(bias) => sum.f_add(bias),
            None => Ok(sum),
        }
    }
}

/// Weights of gate and up: one product where they lie behind one another in memory, else two.
#[derive(Debug)]
pub enum GateUp {
    /// `[hidden, 2 * intermediate]`, a transposed view.
    Joined(Tensor),
    /// `[hidden, intermediate]` each, transposed views.
    Apart(Tensor, Tensor),
}

impl GateUp {
    /// Rows `part` of both.
    ///
    /// # Errors
    /// [`WeightError`] names the tensor.
    pub fn load(
        weights: &Weights,
        [gate, up]: [&str; 2],
        hidden: usize,
        intermediate: usize,
        part: std::ops::Range<usize>,
    ) -> Result<Self, WeightError> {
        let names = [format!("{gate}.weight"), format!("{up}.weight")];
        let shape = [intermediate as i64, hidden as i64];
        let found = weights.rows_joined(&[&names[0], &names[1]], &shape, part)?;
        match found.as_slice() {
            [gate, up] => Ok(Self::Apart(transposed(&names[0], gate)?, transposed(&names[1], up)?)),
            [both] => Ok(Self::Joined(transposed(&names[0], both)?)),
            _ => Err(WeightError::Missing { name: names[0].clone() }),
        }
    }

    /// The weights with `down`, `[hidden, intermediate]`, for the loops for few rows; `None` where those cannot run.
    pub fn stored_with(&self, down: &Tensor) -> Option<StoredMlp> {
        let (gate, up) = match self {
            Self::Joined(both) => {
                let (gate, up) = halves(both).ok()?;
                (gate.f_transpose(0, 1).ok()?, up.f_transpose(0, 1).ok()?)
            }
            Self::Apart(gate, up) => (gate.f_transpose(0, 1).ok()?, up.f_transpose(0, 1).ok()?),
        };
        StoredMlp::new(&gate, &up, down).ok()
    }

    /// `[rows, intermediate]` of gate and of up.
    fn forward(&self, x: &Tensor) -> Result<(Tensor, Tensor), TchError> {
        match self {
            Self::Joined(both) => halves(&x.f_mm(&both.f_to_kind(x.kind())?)?),
            Self::Apart(gate, up) => {
                Ok((x.f_mm(&gate.f_to_kind(x.kind())?)?, x.f_mm(&up.f_to_kind(x.kind())?)?))
            }
        }
    }
}

/// `[rows, 2 * n]` as two of `[rows, n]`.
///
/// # Errors
/// libtorch's, when it has another shape.
pub fn halves(both: &Tensor) -> Result<(Tensor, Tensor), TchError> {
    let width = both.size()[1] / 2;
    Ok((both.f_narrow(1, 0, width)?, both.f_narrow(1, width, width)?))
}

/// A weight as products take it, a view.
///
/// # Errors
/// [`WeightError`] names the tensor.
pub fn transposed(name: &str, weight: &Tensor) -> Result<Tensor, WeightError> {
    weight.f_transpose(0, 1).map_err(|source| WeightError::Torch { name: name.into(), source })
}
