//! A checkpoint's tensors: mapped in place and read only where a role needs them, or made up (`--load-format dummy`).
//!
//! A role asks for each tensor by its checkpoint name and the shape it must have; nothing else of the files is read.
//! What is stored in the compute dtype is viewed in place, so that the weights of all processes of a host share one page
//! cache; what must be converted, cut by columns or dequantised is copied, and its pages are given back. Views are
//! read-only: an in-place operation on one ends the process. In reading order: `header` (what a file says it holds),
//! `checkpoint` (files to tensors, and what stands for their values), `fp8`, `dummy`.
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;

use sha2::{Digest, Sha256};
use tch::{Device, Kind, Tensor};

use crate::config::model::ModelConfig;

mod checkpoint;
mod dummy;
mod fp8;
mod header;
#[cfg(test)]
mod tests;

use checkpoint::Checkpoint;
use dummy::Dummy;

/// What a safetensors file of these bytes holds: names and places, in the order of the places.
///
/// # Errors
/// A sentence that says what is wrong with it.
pub fn places(file: &[u8]) -> Result<Vec<(String, Range<usize>)>, String> {
    Ok(header::parse(file)?.into_iter().map(|entry| (entry.name, entry.begin..entry.end)).collect())
}

/// Where tensors come from. All tensors are on the CPU, unless [`on`](Weights::on) says otherwise.
pub struct Weights {
    source: Source,
    kind: Kind,
    device: Device,
    fingerprint: String,
    asked_for: Mutex<BTreeSet<String>>,
}

enum Source {
    Checkpoint(Checkpoint),
    Dummy(Dummy),
}

/// Why a tensor cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum WeightError {
    /// A file cannot be read or is not safetensors.
    #[error("{path}: {what}")]
    File {
        /// Which file.
        path: String,
        /// Why.
        what: String,
    },
    /// The checkpoint has no such tensor.
    #[error("tensor `{name}` is missing from the checkpoint")]
    Missing {
        /// Its name.
        name: String,
    },
    /// The tensor is there with another shape.
    #[error("tensor `{name}` has shape {found:?}, expected {expected:?}")]
    Shape {
        /// Its name.
        name: String,
        /// From the configuration.
        expected: Vec<i64>,
        /// In the file.
        found: Vec<i64>,
    },
    /// The tensor's element type cannot be used here.
    #[error("tensor `{name}` has dtype {found}, which cannot be used here")]
    Dtype {
        /// Its name.
        name: String,
        /// In the file.
        found: String,
    },
    /// An index points at nothing.
    #[error("tensor `{name}` holds {found}, expected 0 to {last}")]
    Index {
        /// Its name.
        name: String,
        /// In the file.
        found: i64,
        /// The largest that would do.
        last: i64,
    },
    /// libtorch refused.
    #[error("tensor `{name}`: {source}")]
    Torch {
        /// Its name.
        name: String,
        /// libtorch's words.
        source: tch::TchError,
    },
}

/// A rectangle of a tensor: rows (dimension 0), and columns (dimension 1) if not all of them.
#[derive(Clone, Debug)]
struct Part {
    rows: Range<usize>,
    columns: Option<Range<usize>>,
}

impl Part {
    fn whole(shape: &[i64]) -> Self {
        Self::rows(0..shape.first().map_or(1, |&rows| rows.max(0) as usize))
    }

    fn rows(rows: Range<usize>) -> Self {
        Self { rows, columns: None }
    }

    /// Inside a tensor of this shape.
    fn fits(&self, shape: &[i64]) -> bool {
        let within = |range: &Range<usize>, size: Option<&i64>| {
            range.start <= range.end && size.is_some_and(|&size| range.end as i64 <= size)
        };
        let columns_fit = self.columns.as_ref().is_none_or(|columns| within(columns, shape.get(1)));
        columns_fit && (shape.is_empty() || within(&self.rows, shape.first()))
    }

    /// Refuses what is not inside the tensor `name` of this shape.
    fn check(&self, name: &str, shape: &[i64]) -> Result<(), WeightError> {
        if self.fits(shape) {
            return Ok(());
        }
        let columns = self.columns.as_ref().map_or(0, |columns| columns.end as i64);
        let expected = vec![self.rows.end as i64, columns];
        Err(WeightError::Shape { name: name.into(), expected, found: shape.into() })
    }
}

impl Weights {
    /// Maps the safetensors of a checkpoint folder, one file or several with an index. Reads and checks their headers, and
    /// a page of every tensor, whichever role it belongs to, for the [fingerprint](Self::fingerprint).
    ///
    /// `kind` is the compute dtype: what [`tensor`](Self::tensor) returns.
    ///
    /// # Errors
    /// [`WeightError::File`] names the file; a retry does not help.
    pub fn open(folder: &Path, config: &ModelConfig, kind: Kind) -> Result<Self, WeightError> {
        let checkpoint = Checkpoint::open(folder, config.fp8_block)?;
        let mut hash = Sha256::new();
        hash.update(config.canonical_json());
        for (name, dtype, shape) in checkpoint.list() {
            hash.update(format!("\n{name} {dtype} {shape:?}"));
        }
        checkpoint.sample(|values| hash.update(values));
        Ok(Self::new(Source::Checkpoint(checkpoint), kind, hash))
    }

    /// Random weights for benchmarks and tests: the same for the same seed, whatever is asked for first, and a part of
    /// a tensor equals that part of the whole. Norms are 1, biases 0, routers N(0, 0.05), the rest N(0, 1/fan-in), so
    /// that activations stay finite and routing is spread out.
    pub fn dummy(config: &ModelConfig, kind: Kind, seed: u64) -> Self {
        let hash =
            Sha256::new().chain_update(config.canonical_json()).chain_update(format!("\ndummy {seed}"));
        Self::new(Source::Dummy(Dummy::new(seed, config.tie_word_embeddings)), kind, hash)
    }

    fn new(source: Source, kind: Kind, hash: Sha256) -> Self {
        let fingerprint = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Self { source, kind, device: Device::Cpu, fingerprint, asked_for: Mutex::default() }
    }

    /// The same, every tensor on `device`: dummy ones are made there, others copied, their pages given back.
    ///
    /// # Errors
    /// [`WeightError::Torch`] when the device has no memory.
    pub fn on(mut self, device: Device) -> Result<Self, WeightError> {
        if let Source::Dummy(dummy) = &mut self.source {
            dummy.move_to(device)?;
        }
        self.device = device;
        Ok(self)
    }

    /// Where tensors are.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The whole tensor in the compute dtype.
    ///
    /// # Errors
    /// [`WeightError`] names the tensor; a retry does not help.
    pub fn tensor(&self, name: &str, shape: &[i64]) -> Result<Tensor, WeightError> {
        self.part(name, shape, Part::whole(shape), self.kind)
    }

    /// The whole tensor as [`Kind::Float`] whatever the compute dtype, as routers and correction biases need it.
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor).
    pub fn tensor_f32(&self, name: &str, shape: &[i64]) -> Result<Tensor, WeightError> {
        self.part(name, shape, Part::whole(shape), Kind::Float)
    }

    /// A whole table of indices below `limit`, stored as any integer type, as i64; every number was checked.
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor), or [`WeightError::Index`].
    pub fn indices(&self, name: &str, shape: &[i64], limit: i64) -> Result<Tensor, WeightError> {
        self.note(name);
        let indices = match &self.source {
            Source::Checkpoint(checkpoint) => checkpoint.indices(name, shape, limit),
            Source::Dummy(dummy) => dummy.indices(name, shape, limit),
        };
        self.placed(indices?, &[name])
    }

    /// Some rows (dimension 0) of the tensor of this shape, in the compute dtype; in place where `tensor` would be.
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor), or [`WeightError::Shape`] when there are no such rows.
    pub fn rows(&self, name: &str, shape: &[i64], rows: Range<usize>) -> Result<Tensor, WeightError> {
        self.part(name, shape, Part::rows(rows), self.kind)
    }

    /// Some columns (dimension 1) of the tensor of this shape, in the compute dtype, contiguous: a copy unless it is all
    /// of them.
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor), or [`WeightError::Shape`] when there are no such columns.
    pub fn columns(&self, name: &str, shape: &[i64], columns: Range<usize>) -> Result<Tensor, WeightError> {
        let all = shape.get(1).is_some_and(|&width| columns == (0..width as usize));
        let part = Part { columns: (!all).then_some(columns), ..Part::whole(shape) };
        self.part(name, shape, part, self.kind)
    }

    /// The same rows of several tensors of one shape, below one another in one tensor where that costs no memory: when
    /// they are neighbours in the file, or are converted anyway. Otherwise one tensor each.
    ///
    /// # Errors
    /// As [`rows`](Self::rows).
    pub fn rows_joined(
        &self,
        names: &[&str],
        shape: &[i64],
        rows: Range<usize>,
    ) -> Result<Vec<Tensor>, WeightError> {
        if let Source::Checkpoint(checkpoint) = &self.source {
            if let Some(view) = checkpoint.neighbours(names, shape, &rows, self.kind)? {
                names.iter().for_each(|name| self.note(name));
                return Ok(vec![self.placed(view, names)?]);
            }
            let in_place =
                names.iter().any(|name| checkpoint.dtype(name) == Some(header::name_of(self.kind)));
            if in_place && self.device == Device::Cpu {
                return names.iter().map(|name| self.rows(name, shape, rows.clone())).collect();
            }
        }
        for name in names {
            self.note(name);
            Part::rows(rows.clone()).check(name, shape)?;
        }
        let torch = |source| WeightError::Torch { name: names.join(" | "), source };
        match (&self.source, shape) {
            (Source::Dummy(dummy), &[_, columns]) => {
                return Ok(vec![dummy.rows_joined(names, columns, &rows, self.kind).map_err(torch)?]);
            }
            (Source::Checkpoint(checkpoint), [_, _]) if self.device == Device::Cpu => {
                return Ok(vec![checkpoint.rows_joined(names, shape, &rows, self.kind)?]);
            }
            _ => {}
        }
        let parts =
            names.iter().map(|name| self.rows(name, shape, rows.clone())).collect::<Result<Vec<_>, _>>()?;
        Ok(vec![Tensor::f_cat(&parts, 0).map_err(torch)?])
    }

    /// Gives back the memory of a tensor's pages after the caller copied what it needs of them. Views of it stay legal
    /// and read the file anew.
    pub fn release(&self, name: &str) {
        if let Source::Checkpoint(checkpoint) = &self.source {
            checkpoint.release(name);
        }
    }

    /// Whether the checkpoint has such a tensor.
    pub fn contains(&self, name: &str) -> bool {
        match &self.source {
            Source::Checkpoint(checkpoint) => checkpoint.dtype(name).is_some(),
            Source::Dummy(dummy) => dummy.contains(name),
        }
    }

    /// Compute dtype.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// SHA-256, in lower-case hex, over what the configuration computes, the name, dtype and shape of every tensor, and
    /// some bytes of values: 64 of the middle of each of at most 256 tensors spread over all (dummy weights: their seed).
    /// The same in every process that has the same checkpoint, whatever its role reads of it. Two processes with equal
    /// fingerprints may work together.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Names of the tensors that were asked for, sorted: what this role reads of the checkpoint.
    pub fn asked_for(&self) -> Vec<String> {
        self.asked_for.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).iter().cloned().collect()
    }

    fn part(&self, name: &str, shape: &[i64], part: Part, kind: Kind) -> Result<Tensor, WeightError> {
        self.note(name);
        part.check(name, shape)?;
        let tensor = match &self.source {
            Source::Checkpoint(checkpoint) => checkpoint.load(name, shape, &part, kind),
            Source::Dummy(dummy) => dummy.load(name, shape, &part, kind),
        };
        self.placed(tensor?, &[name])
    }

    /// `tensor` on the device; after a copy, the pages of `names` are given back.
    fn placed(&self, tensor: Tensor, names: &[&str]) -> Result<Tensor, WeightError> {
        if tensor.device() == self.device {
            return Ok(tensor);
        }
        let torch = |source| WeightError::Torch { name: names.join(" | "), source };
        let placed = tensor.f_to_device(self.device).map_err(torch)?;
        names.iter().for_each(|name| self.release(name));
        Ok(placed)
    }

    fn note(&self, name: &str) {
        self.asked_for.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).insert(name.into());
    }
}
