//! Random weights out of nothing. One long noise sequence is drawn once; every row of every tensor is a window of it
//! whose place follows from seed, name and row alone. So parts equal the same part of the whole, and tens of gigabytes
//! are made at the speed of copying.
use std::ops::Range;
use std::sync::Mutex;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sha2::{Digest, Sha256};
use tch::{Device, Kind, TchError, Tensor};

use super::{Part, WeightError};

/// Longer than any row.
const NOISE: usize = (1 << 19) - 1;

/// Elements that are made at a time, more than any row has, as f32 in memory that is used again and again. Intermediates of
/// their own would leave holes in the allocator's memory, none of which quite holds the next: more in the end than the weights
/// take.
const CHUNK: i64 = 1 << 20;

const ROUTER_DEVIATION: f64 = 0.05;

pub(super) struct Dummy {
    seed: u64,
    tied: bool,
    device: Device,
    /// Behind a lock because a tensor must not be used by two threads at once.
    noise: Mutex<Noise>,
}

struct Noise {
    /// `[NOISE]` f32, standard normal.
    values: Tensor,
    /// `[CHUNK]` f32, for what is made of it.
    chunk: Tensor,
}

impl Dummy {
    pub(super) fn new(seed: u64, tied: bool) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut noise = Vec::with_capacity(NOISE + 1);
        while noise.len() < NOISE {
            // Box–Muller: two uniform numbers become two normal ones.
            let radius = (-2.0 * (1.0 - random.random::<f32>()).ln()).sqrt();
            let angle = std::f32::consts::TAU * random.random::<f32>();
            noise.extend([radius * angle.cos(), radius * angle.sin()]);
        }
        noise.truncate(NOISE);
        let values = Tensor::from_slice(&noise);
        let chunk = Tensor::empty([CHUNK], (Kind::Float, Device::Cpu));
        Self { seed, tied, device: Device::Cpu, noise: Mutex::new(Noise { values, chunk }) }
    }

    /// Makes tensors on `device` from now on, with the same numbers.
    pub(super) fn move_to(&mut self, device: Device) -> Result<(), WeightError> {
        let noise = self.noise.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        let torch = |source| WeightError::Torch { name: "(dummy)".into(), source };
        noise.values = noise.values.f_to_device(device).map_err(torch)?;
        noise.chunk = noise.chunk.f_to_device(device).map_err(torch)?;
        self.device = device;
        Ok(())
    }

    /// Everything is there but what the configuration says is not.
    pub(super) fn contains(&self, name: &str) -> bool {
        let tied_head = self.tied && name == "lm_head.weight";
        !tied_head && !name.ends_with("_scale_inv")
    }

    pub(super) fn load(
        &self,
        name: &str,
        shape: &[i64],
        part: &Part,
        kind: Kind,
    ) -> Result<Tensor, WeightError> {
        let torch = |source| WeightError::Torch { name: name.into(), source };
        match shape {
            &[_, columns] => {
                let cut = part.columns.clone().unwrap_or(0..columns as usize);
                let size = [part.rows.len() as i64, cut.len() as i64];
                let matrix = Tensor::f_empty(size, (kind, self.device)).map_err(torch)?;
                self.fill(&matrix, name, columns, &part.rows, cut).map_err(torch)?;
                Ok(matrix)
            }
            _ => {
                let mut size = shape.to_vec();
                if let Some(first) = size.first_mut() {
                    *first = part.rows.len() as i64;
                }
                let value = if name.contains("norm") { 1.0 } else { 0.0 };
                Tensor::f_full(&size, value, (kind, self.device)).map_err(torch)
            }
        }
    }

    /// The same rows of several matrices of so many columns, below one another.
    pub(super) fn rows_joined(
        &self,
        names: &[&str],
        columns: i64,
        rows: &Range<usize>,
        kind: Kind,
    ) -> Result<Tensor, TchError> {
        let len = rows.len() as i64;
        let joined = Tensor::f_empty([len * names.len() as i64, columns], (kind, self.device))?;
        for (name, at) in names.iter().zip(0..) {
            self.fill(&joined.f_narrow(0, at * len, len)?, name, columns, rows, 0..columns as usize)?;
        }
        Ok(joined)
    }

    /// Neighbours from a random first one on, so that no row of up to `limit` columns names an index twice.
    pub(super) fn indices(&self, name: &str, shape: &[i64], limit: i64) -> Result<Tensor, WeightError> {
        let (rows, columns) = (shape.first().copied().unwrap_or(1), shape.iter().skip(1).product::<i64>());
        let (key, limit) = (self.key(name), limit.max(1));
        let row = |row: i64| {
            let first = (mix(key ^ row as u64) % limit as u64) as i64;
            (0..columns).map(move |column| (first + column) % limit)
        };
        let indices: Vec<i64> = (0..rows).flat_map(row).collect();
        Tensor::f_from_slice(&indices)
            .and_then(|indices| indices.f_view(shape))
            .map_err(|source| WeightError::Torch { name: name.into(), source })
    }

    /// Writes the rectangle `rows`, `cut` of a matrix of so many `columns` to `part`.
    fn fill(
        &self,
        part: &Tensor,
        name: &str,
        columns: i64,
        rows: &Range<usize>,
        cut: Range<usize>,
    ) -> Result<(), TchError> {
        let is_router = name.ends_with(".gate.weight");
        let deviation = if is_router { ROUTER_DEVIATION } else { 1.0 / (columns.max(1) as f64).sqrt() };
        let windows = (NOISE as i64 - columns + 1).max(1) as u64;
        let key = self.key(name);
        let start = |row: usize| (mix(key ^ row as u64) % windows) as i64 + cut.start as i64;
        let starts = Tensor::f_from_slice(&rows.clone().map(start).collect::<Vec<_>>())?;
        let starts = starts.f_to_device(self.device)?;
        let noise = self.noise.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let width = cut.len() as i64;
        let windows = noise.values.f_unfold(0, width, 1)?;
        let (num_rows, rows_at_a_time) = (rows.len() as i64, CHUNK / width.max(1));
        let mut from = 0;
        while from < num_rows {
            let len = rows_at_a_time.min(num_rows - from);
            let chunk = noise.chunk.f_narrow(0, 0, len * width)?.f_view([len, width])?;
            let mut chunk = windows.f_index_select_out(&chunk, 0, &starts.f_narrow(0, from, len)?)?;
            part.f_narrow(0, from, len)?.f_copy_(&chunk.f_mul_scalar_(deviation)?)?;
            from += len;
        }
        Ok(())
    }

    fn key(&self, name: &str) -> u64 {
        let digest = Sha256::new().chain_update(self.seed.to_le_bytes()).chain_update(name).finalize();
        digest.first_chunk::<8>().map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }
}

/// Spreads neighbouring numbers over all of u64 (the finaliser of SplitMix64).
fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
