//! A checkpoint's files: the header of a safetensors file and `config.json`.
use afd_common::config::model::ModelConfig;
use afd_common::weights;
use afd_tests::fixtures;
use serde_json::json;

use crate::driver::fuzz;

fn file(header: &str, data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; data]].concat()
}

#[test]
fn a_safetensors_header_never_points_outside_its_file() -> anyhow::Result<()> {
    let two = json!({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [0], "data_offsets": [24, 24]}, "__metadata__": {"format": "pt"}});
    let seeds = vec![
        file(&two.to_string(), 24),
        file("{}", 0),
        file(&json!({"a": {"dtype": "F8_E4M3", "shape": [], "data_offsets": [0, 1]}}).to_string(), 1),
    ];
    let words =
        ["{", "\"dtype\":\"F32\"", "\"shape\":[", "\"data_offsets\":[0,", "18446744073709551615", "-1", ","];
    fuzz("safetensors", seeds, &words, |input| match weights::places(input) {
        Err(what) => what.split('`').next().unwrap_or("").to_owned(),
        Ok(places) => {
            for (name, place) in &places {
                assert!(place.start <= place.end && place.end <= input.len(), "`{name}` at {place:?}");
            }
            assert!(places.windows(2).all(|pair| pair[0].1.end <= pair[1].1.start), "overlap: {places:?}");
            format!("{} tensors", ["no", "one", "two", "more"][places.len().min(3)])
        }
    })
}

#[test]
fn a_configuration_is_understood_or_refused() -> anyhow::Result<()> {
    let models = [
        "tiny-llama",
        "tiny-mixtral",
        "tiny-qwen3-moe",
        "tiny-olmoe",
        "tiny-deepseek-v2",
        "tiny-deepseek-v3",
    ];
    let read = |model: &&str| std::fs::read(fixtures::checkpoint(model).join("config.json"));
    let seeds = models.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    let words =
        ["null", "-1", "0", "1e300", "18446744073709551615", "4294967296", "true", "\"\"", "[", "{\"a\":"];
    fuzz("config", seeds, &words, |input| {
        let Ok(config) = serde_json::from_slice(input) else { return "not a JSON object".into() };
        match ModelConfig::from_json(&config, None) {
            Ok(config) => {
                assert!(config.hidden_size > 0 && config.vocab_size > 0, "{config:?}");
                format!("{:?}", config.architecture)
            }
            Err(error) => error.to_string().split(['"', '`', ':']).take(2).collect(),
        }
    })
}
