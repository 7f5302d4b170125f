//! The queue against a seeded adversary that interleaves links, duplicates, replays, closes and overlong hops.
use std::collections::{HashMap, HashSet};

use afd_common::frame::FrameHeader;
use proptest::prelude::*;

use super::*;

const LAYERS: u16 = 5;
const MAX_ROWS: u32 = 32;

fn queue(links: u64) -> HopQueue<u64> {
    let mut queue = HopQueue::new(LAYERS, MAX_ROWS);
    (0..links).for_each(|source| queue.open(SourceId(source)));
    queue
}

fn push(queue: &mut HopQueue<u64>, source: u64, step: u64, layer: u16, rows: u32) -> Result<(), Refused> {
    queue.push(SourceId(source), FrameHeader::key(step, layer, 0), rows, 0).map_err(|(refused, _)| refused)
}

fn pick(queue: &mut HopQueue<u64>) -> Option<(u16, Vec<u64>)> {
    let mut batch = Vec::new();
    let layer = queue.pick(&mut batch)?;
    Some((layer.0, batch.iter().map(|hop| hop.source.0).collect()))
}

#[test]
fn the_oldest_hop_leads_and_takes_its_layer_along() {
    let mut queue = queue(3);
    push(&mut queue, 0, 1, 3, 4).unwrap();
    push(&mut queue, 1, 9, 2, 4).unwrap();
    push(&mut queue, 2, 7, 3, 4).unwrap();
    assert_eq!(pick(&mut queue), Some((3, vec![0, 2])));
    assert_eq!(pick(&mut queue), Some((2, vec![1])));
    assert_eq!(pick(&mut queue), None);
}

#[test]
fn rows_bound_a_batch_but_never_stop_its_leader() {
    let mut queue = queue(4);
    push(&mut queue, 0, 1, 0, MAX_ROWS + 5).unwrap();
    push(&mut queue, 1, 1, 0, 20).unwrap();
    push(&mut queue, 2, 1, 0, 20).unwrap();
    push(&mut queue, 3, 1, 0, 0).unwrap();
    assert_eq!(pick(&mut queue), Some((0, vec![0, 3])));
    assert_eq!(pick(&mut queue), Some((0, vec![1])));
    assert_eq!(pick(&mut queue), Some((0, vec![2])));
}

#[test]
fn a_link_with_many_hops_in_flight_does_not_hold_up_another() {
    let mut queue = queue(2);
    for layer in 0..4 {
        push(&mut queue, 0, 1, layer, 8).unwrap();
    }
    push(&mut queue, 1, 1, 4, 1).unwrap();
    assert_eq!(pick(&mut queue), Some((0, vec![0])));
    assert_eq!(pick(&mut queue), Some((4, vec![1])), "one batch of the busy source, then the other's turn");
}

#[test]
fn running_beside_another_hop_costs_no_later_turn() {
    let mut queue = queue(2);
    for stage in 0..4u8 {
        let key = HopKey { stage: afd_common::ids::StageIdx(stage), ..FrameHeader::key(1, 0, 0) };
        queue.push(SourceId(0), key, 1, 0).unwrap();
    }
    assert_eq!(pick(&mut queue), Some((0, vec![0; 4])), "all four stages ran in one batch");
    push(&mut queue, 1, 1, 1, 1).unwrap();
    push(&mut queue, 1, 1, 2, 1).unwrap();
    push(&mut queue, 0, 1, 3, 1).unwrap();
    assert_eq!(pick(&mut queue), Some((1, vec![1])));
    assert_ne!(pick(&mut queue).unwrap().0, 4);
    assert!(queue.len() <= 1);
}

#[test]
fn refusals_name_what_is_wrong_and_change_nothing() {
    let mut queue = queue(1);
    let refused = push(&mut queue, 0, 1, LAYERS, 1).unwrap_err();
    assert_eq!(refused.to_string(), "layer 5 is out of range: the model has 5 layers");
    let key = HopKey { stage: afd_common::ids::StageIdx(MAX_STAGES), ..FrameHeader::key(1, 0, 0) };
    let (refused, payload) = queue.push(SourceId(0), key, 1, 77).unwrap_err();
    assert_eq!((refused, payload), (Refused::Stage { found: MAX_STAGES }, 77));
    assert_eq!(push(&mut queue, 8, 1, 0, 1).unwrap_err(), Refused::NotOpen { link: SourceId(8) });
    assert!(queue.is_empty());
}

#[test]
fn steps_may_overlap_and_skip_but_not_come_back_after_the_window() {
    let mut queue = queue(1);
    for step in [10, 12, 11, 30, 31, 32, 33, 34] {
        push(&mut queue, 0, step, 0, 1).unwrap();
    }
    push(&mut queue, 0, 40, 0, 1).unwrap();
    assert!(matches!(push(&mut queue, 0, 10, 1, 1), Err(Refused::Stale { .. })));
    push(&mut queue, 0, 11, 1, 1).unwrap();
    assert!(matches!(push(&mut queue, 0, 11, 0, 1), Err(Refused::Duplicate { .. })));
}

/// What the adversary may do.
#[derive(Clone, Debug)]
enum Move {
    Push { source: u64, step: u64, layer: u16, stage: u8, rows: u32 },
    Pick,
    Close { source: u64 },
    Open { source: u64 },
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let push = (0..6u64, 0..14u64, 0..LAYERS + 1, 0..MAX_STAGES + 1, 0..MAX_ROWS + 8)
        .prop_map(|(source, step, layer, stage, rows)| Move::Push { source, step, layer, stage, rows });
    let other = prop_oneof![
        4 => Just(Move::Pick),
        1 => (0..6u64).prop_map(|source| Move::Close { source }),
        1 => (0..6u64).prop_map(|source| Move::Open { source }),
    ];
    proptest::collection::vec(prop_oneof![4 => push, 2 => other], 0..400)
}

proptest! {
    /// Whatever arrives in whatever order: each accepted hop of an open link comes out exactly once, with hops of its
    /// own layer, within the bound; what was refused, or belonged to a closed link, never does.
    #[test]
    fn every_accepted_hop_comes_out_once(moves in moves()) {
        let mut queue = queue(4);
        let mut open: HashSet<u64> = (0..4).collect();
        let mut waiting: HashMap<(u64, HopKey), u32> = HashMap::new();
        let mut lifetime: HashMap<u64, HashSet<HopKey>> = HashMap::new();
        let mut batch = Vec::new();
        for step in moves {
            match step {
                Move::Push { source, step, layer, stage, rows } => {
                    let key = HopKey { stage: afd_common::ids::StageIdx(stage), ..FrameHeader::key(step, layer, 0) };
                    match queue.push(SourceId(source), key, rows, step) {
                        Ok(()) => {
                            prop_assert!(open.contains(&source) && layer < LAYERS && stage < MAX_STAGES);
                            prop_assert!(lifetime.entry(source).or_default().insert(key), "ran twice");
                            waiting.insert((source, key), rows);
                        }
                        Err((refused, payload)) => {
                            prop_assert_eq!(payload, step);
                            if let Refused::Duplicate { .. } = refused {
                                prop_assert!(lifetime[&source].contains(&key));
                            }
                        }
                    }
                }
                Move::Pick => {
                    batch.clear();
                    let layer = queue.pick(&mut batch);
                    prop_assert_eq!(layer.is_none(), waiting.is_empty());
                    let rows: u32 = batch.iter().map(|hop| hop.rows).sum();
                    let biggest = batch.iter().map(|hop| hop.rows).max().unwrap_or(0);
                    prop_assert!(rows <= MAX_ROWS || rows == biggest);
                    for hop in &batch {
                        prop_assert_eq!(Some(hop.key.layer), layer);
                        prop_assert_eq!(waiting.remove(&(hop.source.0, hop.key)), Some(hop.rows));
                    }
                }
                Move::Close { source } => {
                    let mut dropped = Vec::new();
                    queue.close(SourceId(source), &mut dropped);
                    open.remove(&source);
                    lifetime.remove(&source);
                    for hop in dropped {
                        prop_assert_eq!(hop.source.0, source);
                        prop_assert!(waiting.remove(&(source, hop.key)).is_some());
                    }
                    prop_assert!(waiting.keys().all(|(owner, _)| *owner != source));
                }
                Move::Open { source } => {
                    queue.open(SourceId(source));
                    open.insert(source);
                }
            }
            prop_assert_eq!(queue.len(), waiting.len());
        }
    }

    /// However greedy the others are, a link's only hop is run after each of them led a few batches at most.
    #[test]
    fn nobody_starves(seed in proptest::collection::vec((1..5u64, 0..LAYERS, 1..MAX_ROWS), 40..200)) {
        let mut queue = queue(5);
        let (mut step, mut led, mut batch) = (1u64, HashMap::<u64, u32>::new(), Vec::new());
        for (greedy, layer, rows) in &seed[..20] {
            let _ = push(&mut queue, *greedy, step, *layer, *rows);
        }
        push(&mut queue, 0, 1, 0, MAX_ROWS).unwrap();
        for (greedy, layer, rows) in &seed[20..] {
            step += 1;
            let _ = push(&mut queue, *greedy, step, *layer, *rows);
            batch.clear();
            queue.pick(&mut batch);
            if batch.iter().any(|hop| hop.source == SourceId(0)) {
                return Ok(());
            }
            *led.entry(batch[0].source.0).or_default() += 1;
            prop_assert!(led.values().all(|batches| *batches <= 2), "{led:?}");
        }
        prop_assert!(false, "never ran");
    }
}
