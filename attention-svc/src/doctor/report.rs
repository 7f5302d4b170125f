//! What was seen and what is wrong, as a table with sentences and as JSON.
use std::collections::BTreeSet;
use std::fmt::Write as _;

use afd_common::proto::v1;
use afd_common::spelling::{FEW, first_few};
use serde_json::{Value, json};

use super::diagnose::{Finding, name, offered};
use super::look::{Clock, Found, Seen};
use super::milliseconds;
use crate::bench::table;

const HEADS: [&str; 10] =
    ["address", "rank", "deployment", "model", "shard", "version", "links", "round trip", "GB/s", "clock"];

/// For people.
pub(super) fn text(seen: &[Seen], findings: &[Finding]) -> String {
    // One name for all says nothing.
    let deployments: BTreeSet<_> = seen.iter().filter_map(identity).map(|id| &id.deployment).collect();
    let is_shown = |at: usize| HEADS[at] != "deployment" || deployments.len() > 1;
    let shown = |cells: Vec<String>| {
        cells.into_iter().enumerate().filter(|(at, _)| is_shown(*at)).map(|(_, cell)| cell).collect()
    };
    let heads: Vec<&str> = (0..HEADS.len()).filter(|at| is_shown(*at)).map(|at| HEADS[at]).collect();
    let mut out = table(&heads, seen.iter().map(row).map(shown).collect());
    out.push('\n');
    if findings.is_empty() {
        let count = |is: fn(&Found) -> bool| seen.iter().filter(|seen| is(&seen.found)).count();
        let (attention, ffn) = (
            count(|found| matches!(found, Found::Attention(_))),
            count(|found| matches!(found, Found::Ffn(_))),
        );
        let _ = writeln!(out, "healthy: {attention} attention and {ffn} FFN ranks that work together");
    }
    // They come sorted by their kind.
    for kind in findings.chunk_by(|one, other| one.fault == other.fault) {
        let (told, more) = kind.split_at(kind.len().min(FEW));
        for finding in told {
            let _ = writeln!(out, "✗ {}", finding.sentence);
        }
        if !more.is_empty() {
            let _ = writeln!(out, "✗ {}", summary(more));
        }
    }
    out
}

/// Of findings of one kind, of which some are told by themselves.
fn summary(more: &[Finding]) -> String {
    let mut at: Vec<&str> = more.iter().map(|finding| finding.address.as_str()).collect();
    at.retain(|address| !address.is_empty());
    at.dedup();
    let at = if at.is_empty() { String::new() } else { format!(", at {}", first_few(&at, ", ")) };
    format!("and {} more like these{at} (--json has all of them)", more.len())
}

fn identity(seen: &Seen) -> Option<&v1::Identity> {
    match &seen.found {
        Found::Attention(rank) => rank.info.identity.as_ref(),
        Found::Ffn(rank) => rank.edge.answer.identity.as_ref(),
        Found::Nobody(_) | Found::Stranger(_) => None,
    }
}

/// A cell for each of [`HEADS`].
fn row(seen: &Seen) -> Vec<String> {
    let deployment = identity(seen).map_or_else(String::new, |identity| identity.deployment.clone());
    let mut cells = vec![seen.address.clone()];
    let clock = |clock: Clock| format!("{:+.1} ms", clock.ahead_us as f64 / 1e3);
    let short = |fingerprint: &str| fingerprint.chars().take(12).collect::<String>();
    match &seen.found {
        Found::Attention(rank) => {
            let ready = if rank.info.not_ready.is_empty() { "" } else { " (not ready)" };
            let mut in_use: Vec<&str> = rank.info.ffn_peers.iter().map(|peer| peer.link.as_str()).collect();
            if in_use.is_empty() {
                in_use.push("none");
            }
            let model = rank.info.model.clone().unwrap_or_default();
            cells.extend([
                name(rank.info.identity.as_ref()) + ready,
                deployment,
                format!("{} {}", rank.info.name, short(&model.fingerprint)),
                "–".into(),
                rank.info.software_version.clone(),
                format!("{} (in use: {})", rank.info.link_kinds.join(", "), in_use.join(", ")),
                milliseconds(rank.round_trip),
                "–".into(),
                clock(rank.clock),
            ]);
        }
        Found::Ffn(rank) => {
            let (edge, answer) = (&rank.edge, &rank.edge.answer);
            let (model, shard) = (answer.model.clone().unwrap_or_default(), answer.shard.unwrap_or_default());
            let draining = if answer.draining { " (draining)" } else { "" };
            cells.extend([
                name(answer.identity.as_ref()) + draining,
                deployment,
                format!("{} {}", model.architecture, short(&model.fingerprint)),
                format!("{}/{}", shard.index, shard.count),
                answer.software_version.clone(),
                offered(rank).join(", "),
                milliseconds(edge.round_trip),
                edge.bandwidth.map_or_else(|| "–".into(), |rate| format!("{:.2}", rate / 1e9)),
                clock(rank.clock()),
            ]);
        }
        Found::Nobody(_) | Found::Stranger(_) => {
            cells.extend(std::iter::repeat_n("–".to_owned(), HEADS.len() - 1))
        }
    }
    cells
}

/// For programs.
pub(super) fn json(seen: &[Seen], findings: &[Finding]) -> Value {
    json!({
        "healthy": findings.is_empty(),
        "findings": findings,
        "ranks": seen.iter().map(rank).collect::<Vec<_>>(),
    })
}

fn rank(seen: &Seen) -> Value {
    let identity = |identity: Option<&v1::Identity>| {
        identity
            .map(|id| json!({"deployment": id.deployment, "rank": id.rank, "incarnation": id.incarnation}))
    };
    let fingerprint = |model: Option<&v1::ModelIdentity>| model.map(|m| m.fingerprint.clone());
    let found = match &seen.found {
        Found::Nobody(why) | Found::Stranger(why) => json!({"role": null, "why": why}),
        Found::Attention(rank) => {
            let peer = |peer: &v1::FfnPeer| json!({"address": peer.address, "link": peer.link});
            json!({
                "role": "attention",
                "identity": identity(rank.info.identity.as_ref()),
                "model": rank.info.name,
                "fingerprint": fingerprint(rank.info.model.as_ref()),
                "version": rank.info.software_version,
                "protocol": format!("{}.{}", rank.info.protocol_major, rank.info.protocol_minor),
                "ready": rank.info.not_ready.is_empty(),
                "links": rank.info.link_kinds,
                "uses": rank.info.ffn_peers.iter().map(peer).collect::<Vec<_>>(),
                "round_trip_us": rank.round_trip.as_secs_f64() * 1e6,
                "clock_ahead_us": rank.clock.ahead_us,
            })
        }
        Found::Ffn(rank) => {
            let answer = &rank.edge.answer;
            let shard = answer.shard.unwrap_or_default();
            json!({
                "role": "ffn",
                "identity": identity(answer.identity.as_ref()),
                "fingerprint": fingerprint(answer.model.as_ref()),
                "shard": {"index": shard.index, "count": shard.count},
                "version": answer.software_version,
                "protocol": format!("{}.{}", answer.protocol_major, answer.protocol_minor),
                "draining": answer.draining,
                "links": offered(rank),
                "edge": rank.edge.json(),
            })
        }
    };
    json!({"address": seen.address, "found": found})
}
