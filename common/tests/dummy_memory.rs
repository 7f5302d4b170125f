//! Dummy weights take the memory that they hold, and hardly more: nothing of what they are made from stays behind. A test of
//! its own, because it looks at the whole process.
use std::path::Path;

use afd_common::config::model::ModelConfig;
use afd_common::layers::GateUp;
use afd_common::weights::Weights;
use tch::Kind;

const EXPERTS: usize = 16;
const HIDDEN: usize = 2048;
const INTERMEDIATE: usize = 1408;

/// Memory of this process that is no file's, bytes.
fn anonymous_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

#[test]
#[cfg(target_os = "linux")]
fn experts_out_of_nothing_take_no_more_memory_than_they_are_large() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny/tiny-mixtral");
    let config = ModelConfig::load(&folder).unwrap();
    let weights = Weights::dummy(&config, Kind::BFloat16, 0);
    let before = anonymous_bytes();
    let expert = |index: usize| {
        let [gate, up, down] = ["gate", "up", "down"].map(|part| format!("experts.{index}.{part}_proj"));
        let down = weights.tensor(&format!("{down}.weight"), &[HIDDEN as i64, INTERMEDIATE as i64]).unwrap();
        (GateUp::load(&weights, [&gate, &up], HIDDEN, INTERMEDIATE, 0..INTERMEDIATE).unwrap(), down)
    };
    let experts: Vec<_> = (0..EXPERTS).map(expert).collect();
    let (taken, held) = (anonymous_bytes() - before, EXPERTS * 3 * HIDDEN * INTERMEDIATE * 2);
    assert!(taken < held + held / 10, "{} MiB for {} MiB of weights", taken >> 20, held >> 20);
    drop(experts);
}
