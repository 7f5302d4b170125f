//! The header of a safetensors file: 8 bytes of length, a JSON object of names, the data behind it. Everything in it is
//! checked against the size of the file before it is believed.
use serde::Deserialize;
use serde_json::Value;
use tch::Kind;

/// No real header comes near this.
const MAX_HEADER_BYTES: u64 = 100 << 20;

/// One tensor, its place in bytes from the start of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) dtype: String,
    pub(super) shape: Vec<i64>,
    pub(super) begin: usize,
    pub(super) end: usize,
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Reads the header of a file of which these are all the bytes. The error says what is wrong, not in which file.
pub(super) fn parse(file: &[u8]) -> Result<Vec<Entry>, String> {
    let file_bytes = file.len() as u64;
    let Some(length) = file.first_chunk::<8>() else {
        return Err(format!("{file_bytes} bytes are no safetensors file"));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        return Err(format!("not safetensors: a header of {length} bytes"));
    }
    let data_begin = 8 + length;
    if data_begin > file_bytes {
        return Err(format!("truncated: {file_bytes} bytes, the header alone ends at {data_begin}"));
    }
    let object: serde_json::Map<String, Value> = serde_json::from_slice(&file[8..data_begin as usize])
        .map_err(|error| format!("the header is not a JSON object: {error}"))?;
    let mut entries = object
        .into_iter()
        .filter(|(name, _)| name != "__metadata__")
        .map(|(name, value)| entry(name, value, data_begin, file_bytes))
        .collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(|entry| (entry.begin, entry.end));
    for pair in entries.windows(2) {
        if pair[1].begin < pair[0].end {
            return Err(format!("tensors `{}` and `{}` overlap", pair[0].name, pair[1].name));
        }
    }
    Ok(entries)
}

fn entry(name: String, value: Value, data_begin: u64, file_bytes: u64) -> Result<Entry, String> {
    let raw: RawEntry = serde_json::from_value(value)
        .map_err(|error| format!("tensor `{name}`: malformed entry: {error}"))?;
    let (begin, end) = raw.data_offsets;
    let data_bytes = file_bytes - data_begin;
    if begin > end {
        return Err(format!("tensor `{name}` ends before it begins: {begin}..{end}"));
    }
    if end > data_bytes {
        return Err(format!(
            "truncated: tensor `{name}` lies at {begin}..{end}, but there are {data_bytes} bytes of data"
        ));
    }
    let elements = raw.shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size));
    let expected = element_bytes(&raw.dtype)
        .map(|bytes| elements.and_then(|elements| elements.checked_mul(bytes)).unwrap_or(u64::MAX));
    if expected.is_some_and(|expected| expected != end - begin) {
        let (dtype, shape, found) = (&raw.dtype, &raw.shape, end - begin);
        return Err(format!("tensor `{name}` of {dtype} {shape:?} has {found} bytes"));
    }
    // In bounds of the file, so of usize; sizes are at most as large, or 0 is among them and the others are capped.
    let shape = raw.shape.iter().map(|&size| i64::try_from(size).unwrap_or(i64::MAX)).collect();
    let (begin, end) = ((data_begin + begin) as usize, (data_begin + end) as usize);
    Ok(Entry { name, dtype: raw.dtype, shape, begin, end })
}

/// Of the dtypes with whole bytes; others are refused when they are asked for.
fn element_bytes(dtype: &str) -> Option<u64> {
    match dtype {
        "F64" | "I64" | "U64" => Some(8),
        "F32" | "I32" | "U32" => Some(4),
        "F16" | "BF16" | "I16" | "U16" => Some(2),
        "F8_E4M3" | "F8_E5M2" | "I8" | "U8" | "BOOL" => Some(1),
        _ => None,
    }
}

/// The dtypes that weights may be stored in.
pub(super) fn kind_of(dtype: &str) -> Option<Kind> {
    match dtype {
        "F32" => Some(Kind::Float),
        "BF16" => Some(Kind::BFloat16),
        "F16" => Some(Kind::Half),
        _ => None,
    }
}

/// The dtypes that tables of indices may be stored in.
pub(super) fn integer_kind_of(dtype: &str) -> Option<Kind> {
    match dtype {
        "I64" => Some(Kind::Int64),
        "I32" => Some(Kind::Int),
        "I16" => Some(Kind::Int16),
        "U8" => Some(Kind::Uint8),
        _ => None,
    }
}

/// The other way round.
pub(super) fn name_of(kind: Kind) -> &'static str {
    match kind {
        Kind::Float => "F32",
        Kind::BFloat16 => "BF16",
        Kind::Half => "F16",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data_bytes: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data_bytes, 0);
        bytes
    }

    #[test]
    fn entries_come_in_file_order_with_absolute_places() {
        let header = r#"{"__metadata__":{"format":"pt"},
            "b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]},
            "a":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]}}"#;
        let entries = parse(&file(header, 16)).unwrap();
        let places: Vec<_> = entries.iter().map(|e| (e.name.as_str(), e.begin, e.end)).collect();
        let data = 8 + header.len();
        assert_eq!(places, [("a", data, data + 8), ("b", data + 8, data + 16)]);
    }

    #[test]
    fn whatever_does_not_add_up_is_refused() {
        let one = |dtype: &str, shape: &str, offsets: &str| {
            format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
        };
        let overlap = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},
            "b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}}"#;
        let cases = [
            (vec![], "no safetensors"),
            (u64::MAX.to_le_bytes().to_vec(), "a header of"),
            (1000u64.to_le_bytes().to_vec(), "truncated"),
            (file("[]", 0), "not a JSON object"),
            (file(r#"{"t":{"dtype":"F32"}}"#, 0), "malformed entry"),
            (file(&one("F32", "[4]", "[0,16]"), 15), "truncated: tensor `t`"),
            (file(&one("F32", "[4]", "[8,4]"), 16), "ends before"),
            (file(&one("F32", "[4]", "[0,12]"), 16), "has 12 bytes"),
            (file(&one("F32", "[9223372036854775807,9]", "[0,16]"), 16), "has 16 bytes"),
            (file(&one("F32", "[-1]", "[0,0]"), 0), "malformed entry"),
            (file(overlap, 8), "overlap"),
        ];
        for (bytes, expected) in cases {
            let error = parse(&bytes).unwrap_err();
            assert!(error.contains(expected), "{error}, expected {expected}");
        }
    }

    #[test]
    fn every_truncation_of_a_real_file_is_refused() {
        let path =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/tiny/tiny-llama/model.safetensors");
        let bytes = std::fs::read(path).unwrap();
        assert!(parse(&bytes).is_ok());
        for kept in [0, 7, 8, 100, 3927, 4000, bytes.len() / 2, bytes.len() - 1] {
            assert!(parse(&bytes[..kept]).is_err(), "{kept} of {} bytes", bytes.len());
        }
    }
}
