//! The files of a checkpoint folder, mapped, and how a tensor is taken from them.
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::ptr;
use std::sync::Mutex;

use afd_ffi::{FfiError, MappedFile, Reads};
use tch::{Device, Kind, Tensor};

use super::header::{self, Entry};
use super::{Part, WeightError, fp8};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Bytes of a tensor that stand for its values.
const SAMPLE_BYTES: usize = 64;

pub(super) struct Checkpoint {
    tensors: BTreeMap<String, Stored>,
    fp8_block: Option<(usize, usize)>,
    /// `[elements]` f32, to dequantise in. Kept, because memory of this size that is given back between two tensors is never
    /// quite large enough for the next, and what is left of it adds up to as much as the weights.
    widened: Mutex<Tensor>,
}

struct Stored {
    file: &'static MappedFile,
    entry: Entry,
}

impl Checkpoint {
    pub(super) fn open(folder: &Path, fp8_block: Option<(usize, usize)>) -> Result<Self, WeightError> {
        let tensors = if folder.join(SINGLE).exists() {
            open_file(&folder.join(SINGLE))?
        } else if folder.join(INDEX).exists() {
            open_indexed(folder)?
        } else {
            return Err(file_error(folder, format!("neither {SINGLE} nor {INDEX} is here")));
        };
        let widened = Mutex::new(Tensor::empty([0], (Kind::Float, Device::Cpu)));
        Ok(Self { tensors, fp8_block, widened })
    }

    /// Name, dtype and shape of every tensor, sorted by name.
    pub(super) fn list(&self) -> impl Iterator<Item = (&str, &str, &[i64])> {
        let entries = self.tensors.values().map(|stored| &stored.entry);
        entries.map(|entry| (entry.name.as_str(), entry.dtype.as_str(), entry.shape.as_slice()))
    }

    /// Shows `see` the bytes that stand for the values of all tensors, in the order of the names: 64 from the middle of each,
    /// a page of the file. Reading all would cost as much as loading what other roles own; leaving tensors out would let
    /// single experts differ.
    pub(super) fn sample(&self, mut see: impl FnMut(&[u8])) {
        let mut files: Vec<&MappedFile> = self.tensors.values().map(|stored| stored.file).collect();
        files.sort_unstable_by_key(|file| ptr::from_ref(*file));
        files.dedup_by_key(|file| ptr::from_ref(*file));
        files.iter().for_each(|file| file.expect(Reads::Scattered));
        for Stored { file, entry } in self.tensors.values() {
            see(&file.bytes()[middle(entry.begin, entry.end)]);
        }
        files.iter().for_each(|file| file.expect(Reads::InOrder));
    }

    /// As stored; `None` when there is no such tensor.
    pub(super) fn dtype(&self, name: &str) -> Option<&str> {
        self.tensors.get(name).map(|stored| stored.entry.dtype.as_str())
    }

    fn find(&self, name: &str, shape: &[i64]) -> Result<&Stored, WeightError> {
        let stored = self.tensors.get(name).ok_or_else(|| WeightError::Missing { name: name.into() })?;
        if stored.entry.shape != shape {
            let found = stored.entry.shape.clone();
            return Err(WeightError::Shape { name: name.into(), expected: shape.into(), found });
        }
        Ok(stored)
    }

    /// A part of the tensor in `kind`: in place when nothing has to be changed, otherwise a copy.
    pub(super) fn load(
        &self,
        name: &str,
        shape: &[i64],
        part: &Part,
        kind: Kind,
    ) -> Result<Tensor, WeightError> {
        let stored = self.find(name, shape)?;
        if stored.entry.dtype == header::name_of(kind) && part.columns.is_none() {
            let place = stored.place(&part.rows);
            let (view, in_place) = stored.view(place.clone(), &part.rows, kind)?;
            if in_place {
                stored.file.prefetch(place);
                return Ok(view);
            }
        }
        let mut size = shape.to_vec();
        if let Some(rows) = size.first_mut() {
            *rows = part.rows.len() as i64;
        }
        if let (Some(columns), Some(cut)) = (size.get_mut(1), &part.columns) {
            *columns = cut.len() as i64;
        }
        let torch = |source| WeightError::Torch { name: name.into(), source };
        let copy = Tensor::f_empty(&size, (kind, Device::Cpu)).map_err(torch)?;
        self.convert(name, shape, part, &copy)?;
        Ok(copy)
    }

    /// The same rows of several matrices, `shape` each, below one another: a copy in `kind`.
    pub(super) fn rows_joined(
        &self,
        names: &[&str],
        shape: &[i64],
        rows: &Range<usize>,
        kind: Kind,
    ) -> Result<Tensor, WeightError> {
        let len = rows.len() as i64;
        let mut size = shape.to_vec();
        size[0] = len * names.len() as i64;
        let torch = |source| WeightError::Torch { name: names.join(" | "), source };
        let joined = Tensor::f_empty(&size, (kind, Device::Cpu)).map_err(torch)?;
        for (name, at) in names.iter().zip(0..) {
            let of_one = joined.f_narrow(0, at * len, len).map_err(torch)?;
            self.convert(name, shape, &Part::rows(rows.clone()), &of_one)?;
        }
        Ok(joined)
    }

    /// Writes a part of the tensor to `out`, of the part's shape, in its dtype; gives the pages back that were read.
    fn convert(&self, name: &str, shape: &[i64], part: &Part, out: &Tensor) -> Result<(), WeightError> {
        let stored = self.find(name, shape)?;
        if stored.entry.dtype == "F8_E4M3" {
            return self.dequantise(name, shape, stored, part, out);
        }
        let place = stored.place(&part.rows);
        let (view, _) = stored.view(place.clone(), &part.rows, stored.kind()?)?;
        let torch = |source| WeightError::Torch { name: name.into(), source };
        let cut = cut_columns(&view, part).map_err(torch)?;
        // Only the handle is another: the memory is that of `out`.
        out.shallow_clone().f_copy_(&cut).map_err(torch)?;
        stored.file.release(place);
        Ok(())
    }

    /// See [`Weights::indices`](super::Weights::indices).
    pub(super) fn indices(&self, name: &str, shape: &[i64], limit: i64) -> Result<Tensor, WeightError> {
        let stored = self.find(name, shape)?;
        let Some(kind) = header::integer_kind_of(&stored.entry.dtype) else {
            return Err(WeightError::Dtype { name: name.into(), found: stored.entry.dtype.clone() });
        };
        let part = Part::whole(shape);
        let (view, _) = stored.view(stored.place(&part.rows), &part.rows, kind)?;
        let torch = |source| WeightError::Torch { name: name.into(), source };
        let indices = view.f_to_dtype(Kind::Int64, false, true).map_err(torch)?;
        stored.file.release(stored.place(&part.rows));
        if indices.numel() == 0 {
            return Ok(indices);
        }
        let extremes = [indices.f_min(), indices.f_max()];
        for extreme in extremes {
            let found = extreme.and_then(|extreme| extreme.f_int64_value(&[])).map_err(torch)?;
            if !(0..limit).contains(&found) {
                return Err(WeightError::Index { name: name.into(), found, last: limit - 1 });
            }
        }
        Ok(indices)
    }

    /// See [`Weights::release`](super::Weights::release).
    pub(super) fn release(&self, name: &str) {
        if let Some(stored) = self.tensors.get(name) {
            let rows = stored.entry.shape.first().map_or(1, |&rows| rows as usize);
            stored.file.release(stored.place(&(0..rows)));
        }
    }

    fn dequantise(
        &self,
        name: &str,
        shape: &[i64],
        stored: &Stored,
        part: &Part,
        out: &Tensor,
    ) -> Result<(), WeightError> {
        let (Some(block), &[rows, columns]) = (self.fp8_block, shape) else {
            return Err(WeightError::Dtype { name: name.into(), found: stored.entry.dtype.clone() });
        };
        let scale_name = format!("{name}_scale_inv");
        let blocks = |size: i64, block: usize| (size as usize).div_ceil(block) as i64;
        let scale_shape = [blocks(rows, block.0), blocks(columns, block.1)];
        let scales = self.load(&scale_name, &scale_shape, &Part::whole(&scale_shape), Kind::Float)?;
        let place = stored.place(&part.rows);
        let (view, _) = stored.view(place.clone(), &part.rows, Kind::Float8e4m3fn)?;
        let torch = |source| WeightError::Torch { name: name.into(), source };
        let cut = cut_columns(&view, part).map_err(torch)?;
        let first_column = part.columns.as_ref().map_or(0, |columns| columns.start);
        let origin = (part.rows.start, first_column);
        let needed = block.0 as i64 * columns;
        let mut widened = self.widened.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if (widened.numel() as i64) < needed {
            *widened = Tensor::f_empty([needed], (Kind::Float, Device::Cpu)).map_err(torch)?;
        }
        fp8::dequantise(&cut, &scales, block, origin, &widened, out).map_err(torch)?;
        stored.file.release(place);
        Ok(())
    }

    /// The same rows of several tensors as one view, when they lie behind one another in `kind`.
    pub(super) fn neighbours(
        &self,
        names: &[&str],
        shape: &[i64],
        rows: &Range<usize>,
        kind: Kind,
    ) -> Result<Option<Tensor>, WeightError> {
        let stored = names.iter().map(|name| self.find(name, shape)).collect::<Result<Vec<_>, _>>()?;
        let Some(first) = stored.first() else { return Ok(None) };
        let adjoin = |pair: &[&Stored]| {
            ptr::eq(pair[0].file, pair[1].file) && pair[0].place(rows).end == pair[1].place(rows).start
        };
        let fits = Part::rows(rows.clone()).fits(shape);
        let same_kind = stored.iter().all(|stored| stored.entry.dtype == header::name_of(kind));
        if !fits || !same_kind || !stored.windows(2).all(adjoin) {
            return Ok(None);
        }
        let mut joined_shape = shape.to_vec();
        joined_shape[0] = (rows.len() * names.len()) as i64;
        let begin = first.place(rows).start;
        match first.file.tensor(begin, &joined_shape, kind) {
            Ok(view) => {
                first.file.prefetch(begin..begin + first.place(rows).len() * names.len());
                Ok(Some(view))
            }
            Err(_) => Ok(None),
        }
    }
}

impl Stored {
    fn kind(&self) -> Result<Kind, WeightError> {
        let Entry { name, dtype, .. } = &self.entry;
        header::kind_of(dtype).ok_or_else(|| WeightError::Dtype { name: name.clone(), found: dtype.clone() })
    }

    /// Bytes of the file that hold these rows.
    fn place(&self, rows: &Range<usize>) -> Range<usize> {
        let Entry { begin, end, shape, .. } = &self.entry;
        match shape.first() {
            Some(&all) if all > 0 => {
                let row_bytes = (end - begin) / all as usize;
                begin + rows.start * row_bytes..begin + rows.end * row_bytes
            }
            _ => *begin..*end,
        }
    }

    /// The rows as stored, and whether that is the file itself or (when it is misaligned) a copy.
    fn view(
        &self,
        place: Range<usize>,
        rows: &Range<usize>,
        kind: Kind,
    ) -> Result<(Tensor, bool), WeightError> {
        let name = &self.entry.name;
        let mut shape = self.entry.shape.clone();
        if let Some(first) = shape.first_mut() {
            *first = rows.len() as i64;
        }
        match self.file.tensor(place.start, &shape, kind) {
            Ok(view) => Ok((view, true)),
            Err(FfiError::Misaligned { .. }) => {
                let bytes = &self.file.bytes()[place];
                let copy = Tensor::f_from_data_size(bytes, &shape, kind);
                copy.map(|copy| (copy, false))
                    .map_err(|source| WeightError::Torch { name: name.clone(), source })
            }
            Err(error) => Err(WeightError::File { path: name.clone(), what: error.to_string() }),
        }
    }
}

fn cut_columns(view: &Tensor, part: &Part) -> Result<Tensor, tch::TchError> {
    match &part.columns {
        Some(columns) => view.f_narrow(1, columns.start as i64, columns.len() as i64),
        None => Ok(view.shallow_clone()),
    }
}

fn open_file(path: &Path) -> Result<BTreeMap<String, Stored>, WeightError> {
    let file = MappedFile::open(path).map_err(|error| match error {
        // Its own words name the file too.
        FfiError::Os { source, .. } => file_error(path, source.to_string()),
        other => file_error(path, other.to_string()),
    })?;
    let entries = header::parse(file.bytes()).map_err(|what| file_error(path, what))?;
    Ok(entries.into_iter().map(|entry| (entry.name.clone(), Stored { file, entry })).collect())
}

#[derive(serde::Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

fn open_indexed(folder: &Path) -> Result<BTreeMap<String, Stored>, WeightError> {
    let path = folder.join(INDEX);
    let text = std::fs::read(&path).map_err(|error| file_error(&path, error.to_string()))?;
    let index: Index = serde_json::from_slice(&text).map_err(|error| file_error(&path, error.to_string()))?;
    let names: BTreeSet<&String> = index.weight_map.values().collect();
    let mut files = BTreeMap::new();
    for name in names {
        if Path::new(name).file_name() != Some(name.as_ref()) {
            return Err(file_error(&path, format!("`{name}` is not the name of a file in this folder")));
        }
        files.insert(name.clone(), open_file(&folder.join(name))?);
    }
    let mut tensors = BTreeMap::new();
    for (tensor, file) in &index.weight_map {
        let stored = files.get_mut(file).and_then(|tensors| tensors.remove(tensor));
        let stored = stored.ok_or_else(|| {
            file_error(&folder.join(file), format!("has no tensor `{tensor}`, which {INDEX} promises"))
        })?;
        tensors.insert(tensor.clone(), stored);
    }
    Ok(tensors)
}

/// The middle 64 bytes of a tensor that lies at `begin..end`, or all of a smaller one.
fn middle(begin: usize, end: usize) -> Range<usize> {
    let length = (end - begin).min(SAMPLE_BYTES);
    let from = begin + (end - begin - length) / 2;
    from..from + length
}

fn file_error(path: &Path, what: String) -> WeightError {
    WeightError::File { path: path.display().to_string(), what }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_lies_within_the_tensor() {
        assert_eq!(middle(100, 1100), 568..632);
        assert_eq!(middle(100, 110), 100..110);
        assert_eq!(middle(7, 7), 7..7);
    }
}
