//! What does not go together, from what was seen. Pure.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use afd_common::identity::difference;
use afd_common::proto::v1;
use afd_common::spelling::{self, first_few};

use super::look::{AttentionRank, Clock, FfnRank, Found, Seen};
use super::milliseconds;
use super::told::{Told, is_same};

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub(super) struct Finding {
    /// For programs.
    pub(super) fault: Fault,
    /// Where; empty when it is nowhere in particular.
    pub(super) address: String,
    /// For people, with what to do about it.
    pub(super) sentence: String,
}

/// Kinds of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Fault {
    /// Nobody answers, or nobody of ours.
    Unreachable,
    /// A rank of the other role.
    WrongRole,
    /// It cannot be sent work.
    NotReady,
    /// Versions of the protocol that do not work together.
    Protocol,
    /// Something about the model that must be equal is not.
    Model,
    /// Ranks that divide the layers differently.
    ShardCount,
    /// No rank for a part of every layer.
    ShardMissing,
    /// Two processes with one name.
    TwinRank,
    /// No kind of link in common.
    Links,
    /// A rank that an attention rank looks for in vain.
    Absent,
    /// A rank that is there and that an attention rank does not use.
    Unused,
    /// An attention rank that another one's `--peers` names, and that it forwards nothing to.
    PeerAbsent,
    /// Clocks too far apart.
    Clock,
}

/// Attention and FFN ranks by address.
struct Ranks<'a> {
    attention: Vec<(&'a str, &'a AttentionRank)>,
    ffn: Vec<(&'a str, &'a FfnRank)>,
}

/// Everything that is wrong, the graver first.
pub(super) fn diagnose(seen: &[Seen], max_skew: Duration) -> Vec<Finding> {
    let mut findings: Vec<Finding> = seen.iter().filter_map(misplaced).collect();
    let mut ranks = Ranks { attention: Vec::new(), ffn: Vec::new() };
    for seen in seen {
        match &seen.found {
            Found::Attention(rank) => ranks.attention.push((&seen.address, rank)),
            Found::Ffn(rank) => ranks.ffn.push((&seen.address, rank)),
            Found::Nobody(_) | Found::Stranger(_) => {}
        }
    }
    protocols(&ranks, &mut findings);
    models(&ranks, &mut findings);
    shards(seen, &ranks, &mut findings);
    let mut told = Told::nothing(seen, v1::Role::Ffn);
    findings.iter().for_each(|finding| told.add(&finding.address));
    twins(&ranks, &mut told, &mut findings);
    links(&ranks, &mut told, &mut findings);
    drains(&ranks, &mut told, &mut findings);
    readiness(&ranks, &mut told, &mut findings);
    unused(&ranks, &told, &mut findings);
    absences(&ranks, &told, &mut findings);
    peers(seen, &ranks, &mut findings);
    clocks(&ranks, max_skew, &mut findings);
    findings.sort_by_key(|finding| finding.fault);
    findings
}

fn finding(fault: Fault, address: &str, sentence: String) -> Finding {
    Finding { fault, address: address.to_owned(), sentence }
}

/// "A0", "F1".
pub(super) fn name(identity: Option<&v1::Identity>) -> String {
    let Some(identity) = identity else { return "a rank without a name".into() };
    match v1::Role::try_from(identity.role) {
        Ok(v1::Role::Ffn) => format!("F{}", identity.rank),
        Ok(v1::Role::Attention) => format!("A{}", identity.rank),
        _ => format!("rank {} of role {}", identity.rank, spelling::role(identity.role)),
    }
}

fn misplaced(seen: &Seen) -> Option<Finding> {
    let Seen { address, expected, found } = seen;
    let role = if *expected == v1::Role::Ffn { "an FFN rank" } else { "an attention rank" };
    let (other, option) = match (found, expected) {
        (Found::Nobody(why) | Found::Stranger(why), _) => {
            let sentence = format!("{address}, given as {role}, {why}");
            return Some(finding(Fault::Unreachable, address, sentence));
        }
        (Found::Ffn(rank), v1::Role::Attention) => {
            (format!("{}, an FFN rank", name(rank.edge.answer.identity.as_ref())), "--ffn")
        }
        (Found::Attention(rank), v1::Role::Ffn) => {
            (format!("{}, an attention rank", name(rank.info.identity.as_ref())), "--attention")
        }
        _ => return None,
    };
    let sentence = format!("{address} was given as {role} and is {other}: it belongs into {option}");
    Some(finding(Fault::WrongRole, address, sentence))
}

fn protocols(ranks: &Ranks<'_>, findings: &mut Vec<Finding>) {
    let ours = ranks
        .attention
        .iter()
        .map(|(address, rank)| (*address, rank.info.protocol_major, rank.info.protocol_minor));
    let theirs = ranks.ffn.iter().map(|(address, rank)| {
        let answer = &rank.edge.answer;
        (*address, answer.protocol_major, answer.protocol_minor)
    });
    let all: Vec<(&str, u32, u32)> = ours.chain(theirs).collect();
    let Some(&(first, major, minor)) = all.first() else { return };
    for (address, other, other_minor) in all.iter().filter(|(_, other, _)| *other != major) {
        let sentence = format!(
            "{address} speaks protocol {other}.{other_minor} and {first} {major}.{minor}: the major versions must be equal, \
             so update one side"
        );
        findings.push(finding(Fault::Protocol, address, sentence));
    }
}

/// Everyone is held to the first attention rank, or else to the first FFN rank.
fn models(ranks: &Ranks<'_>, findings: &mut Vec<Finding>) {
    let attention = ranks.attention.iter().map(|(address, rank)| (*address, rank.info.model.clone()));
    let ffn = ranks.ffn.iter().map(|(address, rank)| (*address, rank.edge.answer.model.clone()));
    let all: Vec<_> = attention.chain(ffn).map(|(at, model)| (at, model.unwrap_or_default())).collect();
    let Some((first, expected)) = all.first() else { return };
    for (address, model) in &all[1..] {
        if let Some((theirs, ours)) = difference(model, expected) {
            let sentence = format!(
                "{address} serves another model than {first}: `{}` is {} there and {} here; start both with the same {}",
                theirs.field, theirs.value, ours.value, theirs.options
            );
            findings.push(finding(Fault::Model, address, sentence));
        }
    }
}

fn shards(seen: &[Seen], ranks: &Ranks<'_>, findings: &mut Vec<Finding>) {
    let spec = |rank: &FfnRank| rank.edge.answer.shard.unwrap_or_default();
    let Some((first, rank)) = ranks.ffn.first() else { return };
    let count = spec(rank).count;
    let others: Vec<_> = ranks.ffn.iter().filter(|(_, rank)| spec(rank).count != count).collect();
    for (address, rank) in &others {
        let shard = spec(rank);
        let sentence = format!(
            "{address} owns shard {} of {} and {first} one of {count}: start all FFN ranks with the same number in --shard",
            shard.index, shard.count
        );
        findings.push(finding(Fault::ShardCount, address, sentence));
    }
    // Who counts otherwise or does not say who it is may be the one that seems to be missing, and has a finding.
    let is_ffn = |seen: &&Seen| seen.expected == v1::Role::Ffn;
    if !others.is_empty() || seen.iter().filter(is_ffn).any(|seen| matches!(seen.found, Found::Stranger(_))) {
        return;
    }
    // Attention knows more: since when, and of a rank that may be there and refuses.
    let words = format!("/{count} has no rank, for ");
    if ranks.attention.iter().any(|(_, attention)| attention.info.not_ready.contains(&words)) {
        return;
    }
    let mut there: BTreeSet<u32> = ranks.ffn.iter().map(|(_, rank)| spec(rank).index).collect();
    for (_, attention) in &ranks.attention {
        // Ranks that were not asked, because --ffn left them out.
        there.extend(attention.info.ffn_peers.iter().filter_map(|peer| peer.shard).map(|shard| shard.index));
    }
    for index in (0..count).filter(|index| !there.contains(index)) {
        let sentence = format!(
            "no rank serves shard {index} of {count}: start `ffn-svc serve --shard {index}/{count}` and name it in --ffn"
        );
        findings.push(finding(Fault::ShardMissing, "", sentence));
    }
}

fn twins(ranks: &Ranks<'_>, told: &mut Told<'_>, findings: &mut Vec<Finding>) {
    let attention = ranks.attention.iter().map(|(address, rank)| (*address, rank.info.identity.as_ref()));
    let ffn = ranks.ffn.iter().map(|(address, rank)| (*address, rank.edge.answer.identity.as_ref()));
    let mut by_name = BTreeMap::new();
    for (address, identity) in attention.chain(ffn) {
        let Some(identity) = identity else { continue };
        let key = (identity.deployment.clone(), identity.role, identity.rank);
        let Some((other, incarnation)) = by_name.insert(key, (address, identity.incarnation)) else {
            continue;
        };
        // One process may have two addresses.
        if incarnation != identity.incarnation {
            let sentence = format!(
                "{address} and {other} both are {} of deployment {}: give each its own --rank",
                name(Some(identity)),
                identity.deployment
            );
            findings.push(finding(Fault::TwinRank, address, sentence));
            [address, other].iter().for_each(|address| told.add(address));
        }
    }
}

/// Attention and FFN ranks whose links have nothing in common.
fn links(ranks: &Ranks<'_>, told: &mut Told<'_>, findings: &mut Vec<Finding>) {
    for (address, attention) in ranks.attention.iter().filter(|(_, attention)| !is_monolithic(attention)) {
        let who = name(attention.info.identity.as_ref());
        for (ffn_address, ffn) in &ranks.ffn {
            let offered = offered(ffn);
            let (theirs, ours) = (offered.join(", "), attention.info.link_kinds.join(", "));
            if attention.info.link_kinds.iter().any(|kind| offered.contains(kind)) {
                continue;
            }
            let rank = name(ffn.edge.answer.identity.as_ref());
            let sentence = format!(
                "{who} at {address} asks for {ours} and {rank} at {ffn_address} offers {theirs}: choose --link so that \
                 they have one in common"
            );
            findings.push(finding(Fault::Links, address, sentence));
            told.add(ffn_address);
        }
    }
}

/// FFN ranks that are there, that nothing is told of, and that an attention rank does not use.
fn unused(ranks: &Ranks<'_>, told: &Told<'_>, findings: &mut Vec<Finding>) {
    for (address, attention) in ranks.attention.iter().filter(|(_, attention)| !is_monolithic(attention)) {
        let who = name(attention.info.identity.as_ref());
        let (used, absent) = (&attention.info.ffn_peers, &attention.info.ffn_absent);
        for (ffn_address, ffn) in ranks.ffn.iter().filter(|(ffn_address, _)| !told.has(ffn_address)) {
            if !used.iter().any(|peer| is_same(&peer.address, ffn_address))
                && !absent.iter().any(|absence| is_same(&absence.address, ffn_address))
            {
                let rank = name(ffn.edge.answer.identity.as_ref());
                let sentence = format!(
                    "{who} at {address} does not use {rank} at {ffn_address}: it is not in that rank's --ffn, or was \
                     refused (its log says why)"
                );
                findings.push(finding(Fault::Unused, address, sentence));
            }
        }
    }
}

/// Whether its FFN is in its own process.
fn is_monolithic(attention: &AttentionRank) -> bool {
    attention.info.link_kinds.iter().any(|kind| kind == "loopback")
}

/// Ranks that attention ranks look for in vain: a replica may hide that.
fn absences(ranks: &Ranks<'_>, told: &Told<'_>, findings: &mut Vec<Finding>) {
    let mut absent: BTreeMap<&str, (Vec<String>, &str)> = BTreeMap::new();
    for (address, attention) in &ranks.attention {
        let who = format!("{} at {address}", name(attention.info.identity.as_ref()));
        for v1::FfnAbsence { address, why } in &attention.info.ffn_absent {
            absent.entry(address).or_insert_with(|| (Vec::new(), why)).0.push(who.clone());
        }
    }
    for (absent, (who, why)) in absent.into_iter().filter(|(absent, _)| !told.has(absent)) {
        let whose = if who.len() == 1 {
            "is without an FFN rank that its"
        } else {
            "are without an FFN rank that their"
        };
        let who = first_few(&who, ", ");
        let sentence = format!("{who} {whose} --ffn or an announcement names: {absent} {why}");
        findings.push(finding(Fault::Absent, absent, sentence));
    }
}

/// What attention ranks' `--peers` names and nothing is forwarded to, unless that is told of the rank already.
fn peers(seen: &[Seen], ranks: &Ranks<'_>, findings: &mut Vec<Finding>) {
    let mut told = Told::nothing(seen, v1::Role::Attention);
    let causes = [Fault::Unreachable, Fault::NotReady, Fault::Protocol, Fault::Model];
    findings.iter().filter(|f| causes.contains(&f.fault)).for_each(|finding| told.add(&finding.address));
    let mut absent: BTreeMap<(&str, &str), Vec<String>> = BTreeMap::new();
    for (address, attention) in &ranks.attention {
        let who = format!("{} at {address}", name(attention.info.identity.as_ref()));
        let absences = attention.info.attention_absent.iter().filter(|absence| !told.has(&absence.address));
        for v1::AttentionAbsence { address, why } in absences {
            absent.entry((address, why)).or_default().push(who.clone());
        }
    }
    for ((absent, why), who) in absent {
        let (verb, whose) = if who.len() == 1 { ("forwards", "its") } else { ("forward", "their") };
        let who = first_few(&who, ", ");
        let sentence = format!("{who} {verb} nothing to {absent}, which {whose} --peers names: {why}");
        findings.push(finding(Fault::PeerAbsent, absent, sentence));
    }
}

/// Kinds of link that an FFN rank offers, as attention names them.
pub(super) fn offered(rank: &FfnRank) -> Vec<String> {
    rank.edge.answer.link_kinds.iter().map(|kind| spelling::link(*kind).into_owned()).collect()
}

/// FFN ranks that take nothing new.
fn drains(ranks: &Ranks<'_>, told: &mut Told<'_>, findings: &mut Vec<Finding>) {
    for (address, rank) in ranks.ffn.iter().filter(|(_, rank)| rank.edge.answer.draining) {
        let who = name(rank.edge.answer.identity.as_ref());
        let sentence =
            format!("{who} at {address} is draining: it finishes what it has and takes nothing new");
        findings.push(finding(Fault::NotReady, address, sentence));
        told.add(address);
    }
}

/// Attention ranks that are not ready. Where that is for FFN ranks, they are told of with it, unless they are already.
fn readiness(ranks: &Ranks<'_>, told: &mut Told<'_>, findings: &mut Vec<Finding>) {
    for (address, rank) in ranks.attention.iter().filter(|(_, rank)| !rank.info.not_ready.is_empty()) {
        let who = name(rank.info.identity.as_ref());
        let absent: Vec<&str> = rank.info.ffn_absent.iter().map(|absence| absence.address.as_str()).collect();
        let why = match without_ranks(&rank.info) {
            Some(why) if absent.iter().all(|absent| told.has(absent)) => {
                format!("{why}; absent: {}", first_few(&absent, ", "))
            }
            Some(_) => {
                absent.iter().for_each(|absent| told.add(absent));
                rank.info.not_ready.clone()
            }
            None => rank.info.not_ready.clone(),
        };
        let sentence = format!("{who} at {address} is not ready: {why}");
        findings.push(finding(Fault::NotReady, address, sentence));
    }
}

/// Why an attention rank is not ready, before it goes on to how each FFN rank stands; `None` where it is not for absent ones.
fn without_ranks(info: &v1::GetModelInfoResponse) -> Option<&str> {
    let begins = |address: &str, separator: &str| info.not_ready.find(&format!("{separator}{address} "));
    let absent = || info.ffn_absent.iter().map(|absence| absence.address.as_str());
    absent().find(|address| [": ", "; "].iter().any(|separator| begins(address, separator).is_some()))?;
    let all = absent().chain(info.ffn_peers.iter().map(|peer| peer.address.as_str()));
    let end = all.filter_map(|address| begins(address, ": ")).min()?;
    Some(&info.not_ready[..end])
}

fn clocks(ranks: &Ranks<'_>, max_skew: Duration, findings: &mut Vec<Finding>) {
    let attention = ranks.attention.iter().map(|(address, rank)| (*address, rank.clock));
    let ffn = ranks.ffn.iter().map(|(address, rank)| (*address, rank.clock()));
    for (address, Clock { ahead_us, within }) in attention.chain(ffn) {
        let off = Duration::from_micros(ahead_us.unsigned_abs());
        if off > max_skew + within {
            let which = if ahead_us > 0 { "ahead of" } else { "behind" };
            let sentence = format!(
                "the clock at {address} is {} {which} this host's: spans and logs of the services will not line up, and a \
                 restarted rank may be taken for the older one",
                milliseconds(off)
            );
            findings.push(finding(Fault::Clock, address, sentence));
        }
    }
}
