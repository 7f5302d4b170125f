//! `ffn-svc place`: from what the ranks of a deployment counted (`GET /expert-counts` of each, saved as files) to a file
//! for `--placement`.
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use afd_common::config::option::refuse;
use afd_common::ids::LayerIdx;
use afd_common::placement::{ExpertLoad, LayerProposal, ProposeError, propose};
use afd_common::spelling::first_few;
use serde::{Deserialize, Serialize};

use crate::engine::EngineHandle;

/// Rows that an expert should have on average: chance moves a count of a hundred by a tenth.
const ROWS_OF_AN_EXPERT: f64 = 100.0;

/// Options of `ffn-svc place`.
#[derive(Clone, Debug, clap::Args)]
pub struct PlaceOptions {
    /// What a rank answered to GET /expert-counts; at least once for each shard (ranks of one shard are added up)
    #[arg(long, value_name = "FILE", required = true)]
    pub counts: Vec<PathBuf>,
    /// Shards to place the experts on
    #[arg(long, value_name = "N")]
    pub shards: u32,
    /// Further copies of the hottest experts, in every layer
    #[arg(long, value_name = "M", default_value_t = 0)]
    pub copies: usize,
    /// Where to write the placement, as JSON [default: standard output]
    #[arg(long, value_name = "FILE.json")]
    pub out: Option<PathBuf>,
}

/// What a rank has counted since its start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertReport {
    /// Of the rank.
    pub shard: u32,
    /// Of the deployment.
    pub shards: u32,
    /// Mixtures of experts, by layer.
    pub layers: BTreeMap<usize, LayerReport>,
}

/// One layer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerReport {
    /// Experts of the whole layer.
    pub num_experts: usize,
    /// Rows that this rank's experts were given.
    pub rows: BTreeMap<usize, u64>,
}

impl ExpertReport {
    /// What an engine's model has counted.
    pub fn of(engine: &EngineHandle) -> Self {
        let spec = engine.spec();
        let mixtures = spec.layers.iter().enumerate().filter(|(_, inputs)| inputs.num_experts > 0);
        let report = |(layer, inputs): (usize, &crate::model::LayerSpec)| {
            let rows = engine.expert_counts().map(|counts| counts.of_layer(LayerIdx(layer as u16)));
            let rows = rows.unwrap_or_default().into_iter().collect();
            (layer, LayerReport { num_experts: inputs.num_experts as usize, rows })
        };
        let (shard, shards) = (spec.shard.index(), spec.shard.count());
        Self { shard, shards, layers: mixtures.map(report).collect() }
    }
}

/// Writes the placement and, on standard error, what it would have done to the loads it was made from.
///
/// # Errors
/// When a file cannot be read, or says another model than the others.
pub fn run(options: &PlaceOptions) -> anyhow::Result<()> {
    let mut reports = Vec::new();
    for path in &options.counts {
        let report = std::fs::read_to_string(path).map_err(|error| error.to_string()).and_then(|text| {
            serde_json::from_str::<ExpertReport>(&text)
                .map_err(|error| format!("is no answer of GET /expert-counts: {error}"))
        });
        let named = |what| refuse("--counts", format!("{}: {what}", path.display()));
        reports.push(report.or_else(named)?);
    }
    let loads = all_shards(&reports)
        .and_then(|()| add_up(&reports))
        .or_else(|what| refuse("--counts", format!("cannot be used: {what}")))?;
    let proposal = propose(&loads, options.shards, options.copies).or_else(|error| match error {
        ProposeError::NoCounts => refuse("--counts", format!("says nothing: {error}")),
        ProposeError::NoRows => refuse(
            "--counts",
            format!("says nothing: {error}; let the deployment serve requests, then ask its ranks again"),
        ),
        ProposeError::Shards { shards } => refuse("--shards", format!("is {shards}; expected at least 1")),
        ProposeError::TooManyShards { shards, layer, num_experts } => refuse(
            "--shards",
            format!("is {shards}; expected at most {num_experts}, the experts of layer {layer}"),
        ),
    })?;
    for (layer, layer_proposal) in &proposal.layers {
        eprintln!("layer {layer}: {}", sentence(layer_proposal, options.copies));
    }
    if let Some(warning) = too_few(&loads) {
        eprintln!("{warning}");
    }
    let text = proposal.file.to_json();
    match &options.out {
        Some(path) => std::fs::write(path, text)
            .or_else(|error| Ok(refuse("--out", format!("{}: {error}", path.display()))?)),
        None => {
            print!("{text}");
            Ok(())
        }
    }
}

/// What to say where the counts of a layer are mostly chance.
fn too_few(loads: &BTreeMap<usize, ExpertLoad>) -> Option<String> {
    let an_expert = |load: &ExpertLoad| load.iter().sum::<u64>() as f64 / load.len() as f64;
    let counted = loads.iter().filter(|(_, load)| !load.is_empty());
    let (layer, rows) = counted
        .map(|(layer, load)| (layer, an_expert(load)))
        .min_by(|a, b| a.1.total_cmp(&b.1))
        .filter(|(_, rows)| *rows < ROWS_OF_AN_EXPERT)?;
    Some(format!(
        "the counts are few: {rows:.1} rows an expert in layer {layer}, where {ROWS_OF_AN_EXPERT} tell hot experts from chance; \
         let the deployment serve more requests before its ranks are asked"
    ))
}

/// What a placement would have done to a layer, with `wanted` copies asked for.
fn sentence(proposal: &LayerProposal, wanted: usize) -> String {
    let LayerProposal { contiguous, proposed, copies, fewer } = proposal;
    let noun = if wanted == 1 { "copy" } else { "copies" };
    let copies = match (wanted, fewer) {
        (0, _) => String::new(),
        (_, None) => format!(" ({copies} of {wanted} {noun})"),
        (_, Some(why)) => format!(" ({copies} of {wanted} {noun}: {why})"),
    };
    format!("fullest shard over the mean {contiguous:.3} contiguous, {proposed:.3} as proposed{copies}")
}

/// A rank counts its own experts only: without every shard's counts, the others' would seem never to be chosen.
fn all_shards(reports: &[ExpertReport]) -> Result<(), String> {
    let shards = reports.first().map_or(0, |report| report.shards);
    if let Some(other) = reports.iter().find(|report| report.shards != shards) {
        return Err(format!("{} shards in one file and {shards} in another", other.shards));
    }
    let given: BTreeSet<u32> = reports.iter().map(|report| report.shard).collect();
    let missing: Vec<String> =
        (0..shards).filter(|shard| !given.contains(shard)).map(|shard| shard.to_string()).collect();
    match missing.is_empty() {
        true => Ok(()),
        false => Err(format!("no file has the counts of shard {} of {shards}", first_few(&missing, ", "))),
    }
}

/// Counts by layer and expert, all ranks together.
fn add_up(reports: &[ExpertReport]) -> Result<BTreeMap<usize, ExpertLoad>, String> {
    let mut loads: BTreeMap<usize, ExpertLoad> = BTreeMap::new();
    for (layer, report) in reports.iter().flat_map(|report| &report.layers) {
        let load = loads.entry(*layer).or_insert_with(|| vec![0; report.num_experts]);
        let (known, said) = (load.len(), report.num_experts);
        if known != said {
            return Err(format!("layer {layer} has {said} experts in one file and {known} in another"));
        }
        for (expert, rows) in &report.rows {
            match load.get_mut(*expert) {
                Some(count) => *count += rows,
                None => return Err(format!("layer {layer}: expert {expert} of {said} was counted")),
            }
        }
    }
    Ok(loads)
}

#[cfg(test)]
mod tests {
    use afd_common::placement::FewerCopies;

    use super::*;

    fn report(shard: u32, num_experts: usize, rows: &[(usize, u64)]) -> ExpertReport {
        let layer = LayerReport { num_experts, rows: rows.iter().copied().collect() };
        ExpertReport { shard, shards: 2, layers: BTreeMap::from([(3, layer)]) }
    }

    #[test]
    fn ranks_are_added_up_and_must_speak_of_one_model() {
        let both = [report(0, 4, &[(0, 5), (1, 1)]), report(1, 4, &[(1, 2), (3, 9)])];
        assert_eq!(add_up(&both).unwrap(), BTreeMap::from([(3, vec![5, 3, 0, 9])]));
        let other = add_up(&[report(0, 4, &[]), report(1, 5, &[])]).unwrap_err();
        assert_eq!(other, "layer 3 has 5 experts in one file and 4 in another");
        assert!(add_up(&[report(0, 4, &[(4, 1)])]).is_err());
    }

    #[test]
    fn what_is_written_can_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("placement.json");
        let write = |shard: u32, rows: &[(usize, u64)]| {
            let counts = folder.path().join(format!("counts-{shard}.json"));
            std::fs::write(&counts, serde_json::to_string(&report(shard, 4, rows)).unwrap()).unwrap();
            counts
        };
        let counts = vec![write(0, &[(0, 50), (1, 1)]), write(1, &[(2, 1), (3, 1)])];
        let mut options = PlaceOptions { counts, shards: 2, copies: 1, out: Some(out.clone()) };
        run(&options).unwrap();
        let lines = std::fs::read_to_string(&out).unwrap();
        assert_eq!(lines.lines().filter(|line| line.trim_start().starts_with("[0")).count(), 2, "{lines}");
        let file = afd_common::placement::PlacementFile::read(&out).unwrap();
        assert!(file.layers["3"].iter().all(|experts| experts.contains(&0)), "{file:?}");

        options.counts.truncate(1);
        assert_eq!(said(&options), "--counts cannot be used: no file has the counts of shard 1 of 2");
        options.counts = vec![out];
        assert!(said(&options).contains("is no answer of GET /expert-counts"));
        options.counts = vec![write(0, &[]), write(1, &[])];
        options.shards = 5;
        assert_eq!(said(&options), "--shards is 5; expected at most 4, the experts of layer 3");
        options.shards = 2;
        let nothing = "--counts says nothing: no row was counted in any layer; \
                       let the deployment serve requests, then ask its ranks again";
        assert_eq!(said(&options), nothing);
    }

    #[test]
    fn counts_that_are_mostly_chance_are_named() {
        let loads = |rows| BTreeMap::from([(0, vec![500; 4]), (3, vec![rows, 0, 0, 0])]);
        let said = too_few(&loads(50)).unwrap();
        assert!(
            said.starts_with("the counts are few: 12.5 rows an expert in layer 3, where 100 tell"),
            "{said}"
        );
        assert_eq!(too_few(&loads(400)), None);
    }

    #[test]
    fn copies_are_told_where_they_were_asked_for_and_why_they_are_fewer() {
        let proposal =
            LayerProposal { contiguous: 1.5, proposed: 1.0, copies: 0, fewer: Some(FewerCopies::NoRows) };
        let told = "fullest shard over the mean 1.500 contiguous, 1.000 as proposed";
        assert_eq!(
            sentence(&proposal, 4),
            format!("{told} (0 of 4 copies: no row of this layer was counted)")
        );
        assert_eq!(sentence(&LayerProposal { fewer: None, ..proposal }, 0), told);
        let placed = LayerProposal { copies: 1, fewer: None, ..proposal };
        assert_eq!(sentence(&placed, 1), format!("{told} (1 of 1 copy)"));
    }

    fn said(options: &PlaceOptions) -> String {
        run(options).unwrap_err().to_string()
    }
}
