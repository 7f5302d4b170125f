//! Weights that are made or converted take the memory that they hold, and hardly more: nothing of what they are made from
//! stays behind. A test of its own, because it looks at the whole process.
#![cfg(target_os = "linux")]
use std::io::Write;
use std::path::Path;

use afd_common::config::model::ModelConfig;
use afd_common::layers::GateUp;
use afd_common::weights::Weights;
use serde_json::{Map, json};
use tch::{Kind, Tensor};

const EXPERTS: usize = 6;
const HIDDEN: usize = 2048;
const INTERMEDIATE: usize = 1408;
const BLOCK: usize = 128;

/// gate, up and down of every expert.
fn names() -> impl Iterator<Item = [String; 3]> {
    (0..EXPERTS).map(|index| ["gate", "up", "down"].map(|part| format!("experts.{index}.{part}_proj")))
}

/// A checkpoint in blocks of FP8.
fn write_fp8(folder: &Path) -> std::io::Result<()> {
    let (mut header, mut end) = (Map::new(), 0);
    let mut add = |name: String, dtype: &str, shape: [usize; 2], bytes: usize| {
        let place = json!({"dtype": dtype, "shape": shape, "data_offsets": [end, end + bytes]});
        header.insert(name, place);
        end += bytes;
    };
    for [gate, up, down] in names() {
        for (name, [rows, columns]) in
            [(gate, [INTERMEDIATE, HIDDEN]), (up, [INTERMEDIATE, HIDDEN]), (down, [HIDDEN, INTERMEDIATE])]
        {
            let blocks = [rows / BLOCK, columns / BLOCK];
            add(format!("{name}.weight"), "F8_E4M3", [rows, columns], rows * columns);
            add(format!("{name}.weight_scale_inv"), "F32", blocks, 4 * blocks[0] * blocks[1]);
        }
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = std::fs::File::create(folder.join("model.safetensors"))?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    // Of every value and scale: any bytes that are no NaN.
    file.write_all(&vec![0x38; end])
}

/// Memory of this process that is no file's, bytes.
fn anonymous_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

/// The experts, and how much memory they took.
fn load(weights: &Weights) -> (Vec<(GateUp, Tensor)>, usize) {
    let before = anonymous_bytes();
    let expert = |[gate, up, down]: [String; 3]| {
        let down = weights.tensor(&format!("{down}.weight"), &[HIDDEN as i64, INTERMEDIATE as i64]).unwrap();
        (GateUp::load(weights, [&gate, &up], HIDDEN, INTERMEDIATE, 0..INTERMEDIATE).unwrap(), down)
    };
    let experts = names().map(expert).collect();
    (experts, anonymous_bytes().saturating_sub(before))
}

#[test]
fn experts_take_no_more_memory_than_they_are_large() {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny/tiny-mixtral");
    let config = ModelConfig { fp8_block: Some((BLOCK, BLOCK)), ..ModelConfig::load(&tiny).unwrap() };
    let folder = tempfile::tempdir().unwrap();
    write_fp8(folder.path()).unwrap();
    let stored = Weights::open(folder.path(), &config, Kind::BFloat16).unwrap();
    let dummy = Weights::dummy(&config, Kind::BFloat16, 0);
    let held = EXPERTS * 3 * HIDDEN * INTERMEDIATE * 2;
    // What is loaded first stays, so that nothing of it is used again.
    let of_fp8 = load(&stored);
    let of_nothing = load(&dummy);
    for (what, taken) in [("FP8", of_fp8.1), ("dummy", of_nothing.1)] {
        println!("{what}: {} MiB for {} MiB of weights", taken >> 20, held >> 20);
        assert!(taken < held + held / 10, "{what}: {} MiB for {} MiB of weights", taken >> 20, held >> 20);
    }
}
