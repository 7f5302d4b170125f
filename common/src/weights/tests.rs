//! Real checkpoints, broken ones, and made-up weights.
use std::path::{Path, PathBuf};

use super::*;
use crate::config::model::ModelConfig;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny").join(name)
}

fn open(name: &str, kind: Kind) -> Weights {
    let folder = fixture(name);
    Weights::open(&folder, &ModelConfig::load(&folder).unwrap(), kind).unwrap()
}

fn equal(a: &Tensor, b: &Tensor) -> bool {
    a.kind() == b.kind() && a.equal(b)
}

/// A checkpoint folder with one file of these tensors: name, dtype, shape, bytes.
fn written(tensors: &[(&str, &str, &[i64], Vec<u8>)], pad_header_to_odd: bool) -> tempfile::TempDir {
    let mut header = serde_json::Map::new();
    let mut data: Vec<u8> = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(
            (*name).into(),
            serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}),
        );
        data.extend(bytes);
    }
    let mut header = serde_json::to_string(&header).unwrap();
    while header.len() % 8 != usize::from(pad_header_to_odd) {
        header.push(' ');
    }
    let folder = tempfile::tempdir().unwrap();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    std::fs::write(folder.path().join("model.safetensors"), file).unwrap();
    folder
}

fn f32_bytes(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

fn open_at(folder: &Path, kind: Kind) -> Result<Weights, WeightError> {
    Weights::open(folder, &ModelConfig::load(&fixture("tiny-llama")).unwrap(), kind)
}

#[test]
fn parts_equal_the_whole_in_place_and_converted() {
    let (name, shape) = ("model.layers.0.block_sparse_moe.experts.3.w1.weight", [96, 64]);
    for kind in [Kind::BFloat16, Kind::Float] {
        let weights = open("tiny-mixtral", kind);
        let whole = weights.tensor(name, &shape).unwrap();
        assert_eq!(whole.kind(), kind);
        let rows = weights.rows(name, &shape, 10..33).unwrap();
        assert!(equal(&rows, &whole.narrow(0, 10, 23)));
        let columns = weights.columns(name, &shape, 5..64).unwrap();
        assert!(equal(&columns, &whole.narrow(1, 5, 59)) && columns.is_contiguous());
        assert!(equal(&weights.columns(name, &shape, 0..64).unwrap(), &whole));
        assert_eq!(weights.rows(name, &shape, 7..7).unwrap().size(), [0, 64]);
        assert!(equal(&weights.tensor_f32(name, &shape).unwrap(), &whole.to_kind(Kind::Float)));
    }
}

#[test]
fn what_is_stored_in_the_compute_dtype_stays_in_the_file() {
    let (name, shape) = ("model.norm.weight", [64]);
    let weights = open("tiny-mixtral", Kind::BFloat16);
    let (a, b) = (weights.tensor(name, &shape).unwrap(), weights.tensor(name, &shape).unwrap());
    assert_eq!(a.data_ptr(), b.data_ptr());
}

#[test]
fn neighbours_are_joined_for_free_and_others_stay_apart() {
    let shape = [32, 64];
    let names =
        ["model.layers.1.mlp.experts.2.gate_proj.weight", "model.layers.1.mlp.experts.2.up_proj.weight"];
    for kind in [Kind::BFloat16, Kind::Float] {
        let weights = open("tiny-olmoe", kind);
        let expected = Tensor::cat(&names.map(|name| weights.tensor(name, &shape).unwrap()), 0);
        let joined = weights.rows_joined(&names, &shape, 0..32).unwrap();
        assert!(joined.len() == 1 && equal(&joined[0], &expected), "{kind:?}");
    }
    let weights = open("tiny-olmoe", Kind::BFloat16);
    let parts = weights.rows_joined(&names, &shape, 4..20).unwrap();
    assert_eq!(parts.len(), 2, "half of each: not behind one another");
    assert!(equal(&parts[1], &weights.rows(names[1], &shape, 4..20).unwrap()));
}

#[test]
fn tensors_come_from_every_file_of_an_index() {
    let weights = open("tiny-qwen3-moe", Kind::Float);
    assert_eq!(weights.tensor("model.embed_tokens.weight", &[768, 64]).unwrap().size(), [768, 64]);
    assert_eq!(weights.tensor("model.norm.weight", &[64]).unwrap().size(), [64]);
    assert_eq!(weights.asked_for(), ["model.embed_tokens.weight", "model.norm.weight"]);
}

#[test]
fn a_file_that_the_index_promises_must_hold_its_tensors() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(fixture("tiny-llama").join("model.safetensors"), folder.path().join("a.safetensors"))
        .unwrap();
    let index =
        |text: &str| std::fs::write(folder.path().join("model.safetensors.index.json"), text).unwrap();
    index(r#"{"weight_map": {"model.norm.weight": "a.safetensors", "made.up": "a.safetensors"}}"#);
    let error = open_at(folder.path(), Kind::Float).err().unwrap().to_string();
    assert!(error.contains("a.safetensors") && error.contains("made.up"), "{error}");
    index(r#"{"weight_map": {"model.norm.weight": "../a.safetensors"}}"#);
    let error = open_at(folder.path(), Kind::Float).err().unwrap().to_string();
    assert!(error.contains("not the name of a file in this folder"), "{error}");
    index(r#"{"weight_map": {"model.norm.weight": "b.safetensors"}}"#);
    let error = open_at(folder.path(), Kind::Float).err().unwrap().to_string();
    assert!(
        error.contains("b.safetensors: No such file") && error.matches("b.safetensors").count() == 1,
        "{error}"
    );
}

#[test]
fn missing_misshapen_and_unusable_tensors_are_named() {
    let weights = open("tiny-llama", Kind::Float);
    assert!(matches!(weights.tensor("nope", &[1]), Err(WeightError::Missing { name }) if name == "nope"));
    let error = weights.tensor("model.norm.weight", &[65]).unwrap_err().to_string();
    assert!(error.contains("[64]") && error.contains("[65]"), "{error}");
    assert!(matches!(weights.rows("model.norm.weight", &[64], 60..65), Err(WeightError::Shape { .. })));
    assert!(!weights.contains("lm_head.weight") && weights.contains("model.norm.weight"));

    let folder = written(&[("ints", "I32", &[2], vec![0; 8]), ("fp8", "F8_E4M3", &[1, 1], vec![0])], false);
    let weights = open_at(folder.path(), Kind::Float).unwrap();
    let error = weights.tensor("ints", &[2]).unwrap_err().to_string();
    assert!(error.contains("ints") && error.contains("I32"), "{error}");
    assert!(matches!(weights.tensor("fp8", &[1, 1]), Err(WeightError::Dtype { .. })));
}

#[test]
fn an_empty_folder_and_a_truncated_file_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = open_at(folder.path(), Kind::Float).err().unwrap().to_string();
    assert!(error.contains("model.safetensors"), "{error}");
    let bytes = std::fs::read(fixture("tiny-llama").join("model.safetensors")).unwrap();
    std::fs::write(folder.path().join("model.safetensors"), &bytes[..bytes.len() - 100]).unwrap();
    let error = open_at(folder.path(), Kind::Float).err().unwrap().to_string();
    assert!(error.contains("model.safetensors") && error.contains("truncated"), "{error}");
}

#[test]
fn misaligned_data_is_copied() {
    let values = [1.5f32, -2.0, 3.25, 0.0];
    let folder = written(&[("a", "F32", &[2, 2], f32_bytes(values))], true);
    let weights = open_at(folder.path(), Kind::Float).unwrap();
    let tensor = weights.tensor("a", &[2, 2]).unwrap();
    assert_eq!(Vec::<f32>::try_from(tensor.flatten(0, 1)).unwrap(), values);
}

#[test]
fn block_fp8_is_dequantised_whole_and_in_parts() {
    // 0x38 is 1.0 and 0x40 is 2.0 in E4M3; blocks of 2 × 2 over 3 × 5 elements.
    let stored: Vec<u8> = (0..15).map(|i| if i % 2 == 0 { 0x38 } else { 0x40 }).collect();
    let scales = [1.0f32, 10.0, 100.0, 0.5, 0.25, 4.0];
    let folder = written(
        &[
            ("x.weight", "F8_E4M3", &[3, 5], stored),
            ("x.weight_scale_inv", "F32", &[2, 3], f32_bytes(scales)),
        ],
        false,
    );
    let config =
        ModelConfig { fp8_block: Some((2, 2)), ..ModelConfig::load(&fixture("tiny-llama")).unwrap() };
    let weights = Weights::open(folder.path(), &config, Kind::Float).unwrap();
    let expected: Vec<f32> = (0..15)
        .map(|i| (if i % 2 == 0 { 1.0 } else { 2.0 }) * scales[(i / 5) / 2 * 3 + (i % 5) / 2])
        .collect();
    let whole = weights.tensor("x.weight", &[3, 5]).unwrap();
    assert_eq!(Vec::<f32>::try_from(whole.flatten(0, 1)).unwrap(), expected);
    assert!(equal(&weights.rows("x.weight", &[3, 5], 1..3).unwrap(), &whole.narrow(0, 1, 2)));
    assert!(equal(&weights.columns("x.weight", &[3, 5], 3..5).unwrap(), &whole.narrow(1, 3, 2)));
}

#[test]
fn fingerprints_follow_names_types_shapes_values_and_configuration() {
    let config = ModelConfig::load(&fixture("tiny-llama")).unwrap();
    let of = |tensors: &[(&str, &str, &[i64], Vec<u8>)]| {
        open_at(written(tensors, false).path(), Kind::Float).unwrap().fingerprint().to_owned()
    };
    let base = of(&[("a", "F32", &[2], vec![0; 8]), ("b", "F32", &[1], vec![0; 4])]);
    assert_eq!(base.len(), 64);
    assert_eq!(base, of(&[("b", "F32", &[1], vec![0; 4]), ("a", "F32", &[2], vec![0; 8])]));
    assert_ne!(base, of(&[("a", "F32", &[1, 2], vec![0; 8]), ("b", "F32", &[1], vec![0; 4])]));
    assert_ne!(base, of(&[("a", "BF16", &[4], vec![0; 8]), ("b", "F32", &[1], vec![0; 4])]));
    assert_ne!(base, of(&[("a", "F32", &[2], vec![0; 8]), ("b", "F32", &[1], vec![1; 4])]));
    let dummy = |seed| Weights::dummy(&config, Kind::Float, seed).fingerprint().to_owned();
    assert_ne!(dummy(1), dummy(2));
    assert_eq!(dummy(1), dummy(1));
}

#[test]
fn a_fingerprint_sees_every_tensor_of_many() {
    let names: Vec<String> = (0..600).map(|nth| format!("t{nth}")).collect();
    let with_odd = |odd: usize| {
        let tensors: Vec<(&str, &str, &[i64], Vec<u8>)> = names
            .iter()
            .enumerate()
            .map(|(nth, name)| (name.as_str(), "F32", &[1][..], vec![u8::from(nth == odd); 4]))
            .collect();
        open_at(written(&tensors, false).path(), Kind::Float).unwrap().fingerprint().to_owned()
    };
    let none = with_odd(names.len());
    let unseen: Vec<_> = (0..names.len()).filter(|&odd| with_odd(odd) == none).collect();
    assert!(unseen.is_empty(), "{unseen:?}");
}

#[test]
fn a_fingerprint_is_the_same_in_every_process_of_a_checkpoint_and_another_with_other_weights() {
    // In two files, of which a role may need one only.
    let copy = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(fixture("tiny-qwen3-moe")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), copy.path().join(file.file_name())).unwrap();
    }
    let config = ModelConfig::load(copy.path()).unwrap();
    let fingerprint = |kind| Weights::open(copy.path(), &config, kind).unwrap().fingerprint().to_owned();
    let own = open("tiny-qwen3-moe", Kind::Float).fingerprint().to_owned();
    assert_eq!((fingerprint(Kind::Float), fingerprint(Kind::BFloat16)), (own.clone(), own.clone()));
    // Other values in one tensor of one of the files.
    let index = std::fs::read_to_string(copy.path().join("model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_str(&index).unwrap();
    let (name, file) = index["weight_map"].as_object().unwrap().iter().next_back().unwrap();
    let path = copy.path().join(file.as_str().unwrap());
    let mut bytes = std::fs::read(&path).unwrap();
    let (_, place) = places(&bytes).unwrap().into_iter().find(|(found, _)| found == name).unwrap();
    bytes[place].iter_mut().for_each(|byte| *byte ^= 1);
    // A new file: the old one is mapped.
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, bytes).unwrap();
    assert_ne!(fingerprint(Kind::Float), own);
}

#[test]
fn dummy_parts_equal_the_whole_whatever_comes_first() {
    let config = ModelConfig::load(&fixture("tiny-deepseek-v3")).unwrap();
    let (name, shape) = ("model.layers.1.mlp.experts.7.down_proj.weight", [64, 32]);
    let (a, b) = (Weights::dummy(&config, Kind::BFloat16, 3), Weights::dummy(&config, Kind::BFloat16, 3));
    let rows = a.rows(name, &shape, 5..9).unwrap();
    let other = b.tensor("model.layers.1.mlp.experts.8.down_proj.weight", &shape).unwrap();
    let whole = b.tensor(name, &shape).unwrap();
    assert!(equal(&rows, &whole.narrow(0, 5, 4)) && !equal(&whole, &other));
    assert!(equal(&a.columns(name, &shape, 3..11).unwrap(), &whole.narrow(1, 3, 8)));
    let deviation = whole.to_kind(Kind::Float).std(true).double_value(&[]) * 32f64.sqrt();
    assert!((deviation - 1.0).abs() < 0.1, "{deviation}");
    let router = a.tensor_f32("model.layers.1.mlp.gate.weight", &[16, 64]).unwrap();
    assert!((router.std(true).double_value(&[]) - 0.05).abs() < 0.005);
    assert_eq!(a.tensor("model.norm.weight", &[4]).unwrap().sum(Kind::Float).double_value(&[]), 4.0);
}

#[test]
fn large_dummy_matrices_are_made_in_pieces_that_cannot_be_told() {
    let config = ModelConfig::load(&fixture("tiny-deepseek-v3")).unwrap();
    let weights = Weights::dummy(&config, Kind::Float, 3);
    let (names, shape) = (["a.weight", "b.weight"], [2500, 1024]);
    let whole = names.map(|name| weights.tensor(name, &shape).unwrap());
    // Across the end of a piece, and in another place within one.
    for rows in [1000..1100, 2047..2500] {
        let (from, len) = (rows.start as i64, rows.len() as i64);
        let parts = whole.each_ref().map(|whole| whole.narrow(0, from, len));
        let joined = weights.rows_joined(&names, &shape, rows.clone()).unwrap();
        assert!(equal(&weights.rows(names[1], &shape, rows).unwrap(), &parts[1]));
        assert!(joined.len() == 1 && equal(&joined[0], &Tensor::cat(&parts, 0)));
    }
    assert!(matches!(weights.rows_joined(&names, &shape, 2400..2501), Err(WeightError::Shape { .. })));
    assert_eq!(weights.rows_joined(&names, &shape, 7..7).unwrap()[0].size(), [0, 1024]);
}
