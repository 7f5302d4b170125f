//! Convoys in virtual time: attention ranks that think, an FFN that does one thing at a time.
use super::super::{HopQueue, QueuedHop};
use super::*;
use afd_common::frame::FrameHeader;

const LAYERS: u16 = 6;

/// Times in microseconds.
#[derive(Clone)]
struct Setup {
    board_us: u64,
    /// From an answer to the next hop, by rank.
    think: Vec<u64>,
    /// Largest deviation of it.
    jitter: f64,
    ffn: u64,
    ffn_per_row: u64,
    rows: u32,
    /// A rank that stops after so many steps, if any.
    stops: Option<(usize, u64)>,
    /// Steps of an answer, and how long a rank has nothing to do after it; ranks begin at different places of theirs.
    answers: Option<(u64, u64)>,
    /// Of so many executions one, by chance, takes so much longer: something else has the processor.
    disturbed: Option<(u64, u64)>,
}

#[derive(Debug)]
struct Outcome {
    executions: u64,
    hops: u64,
    /// Steps of each rank.
    steps: Vec<u64>,
    longest_hold_us: u64,
    dropped: u64,
}

impl Outcome {
    fn ranks_per_execution(&self) -> f64 {
        self.hops as f64 / self.executions as f64
    }
}

/// Numbers between -1 and 1 that look drawn (a linear congruence).
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as f64 / f64::from(1u32 << 30) - 1.0
    }
}

struct Rank {
    /// Its next hop and when it comes; `None` while the FFN has one.
    next: Option<(u64, HopKey)>,
    steps: u64,
}

/// Runs for `micros` of virtual time.
fn run(setup: &Setup, micros: u64) -> Outcome {
    let mut random = Noise(7);
    let (mut queue, mut convoys) = (HopQueue::<u64>::new(LAYERS, 10_000), Convoys::new(setup.board_us));
    let mut ranks: Vec<Rank> = (0..setup.think.len())
        .map(|rank| Rank { next: Some((rank as u64 * 777, FrameHeader::key(1, 0, 0))), steps: 0 })
        .collect();
    (0..ranks.len()).for_each(|rank| queue.open(SourceId(rank as u64)));
    let mut outcome = Outcome { executions: 0, hops: 0, steps: Vec::new(), longest_hold_us: 0, dropped: 0 };
    let (mut now, mut free) = (0u64, 0u64);
    let mut batch: Vec<QueuedHop<u64>> = Vec::new();
    while now < micros {
        for (rank, state) in ranks.iter_mut().enumerate() {
            if let Some((_, key)) = state.next.take_if(|(at, _)| *at <= now) {
                queue.push(SourceId(rank as u64), key, setup.rows, now).unwrap();
                convoys.handle_arrival(SourceId(rank as u64), key, setup.rows, now);
            }
        }
        let until = convoys.update(now);
        if queue.pick_ready(&mut batch, |hop| convoys.holds(hop.source, hop.key)).is_some() {
            let rows: u32 = batch.iter().map(|hop| hop.rows).sum();
            let chance = random.next().abs();
            let disturbed = setup.disturbed.filter(|(of, _)| chance * (*of as f64) < 1.0);
            let took =
                setup.ffn + setup.ffn_per_row * u64::from(rows) + disturbed.map_or(0, |(_, more)| more);
            let end = now + took;
            outcome.executions += 1;
            outcome.hops += batch.len() as u64;
            for hop in &batch {
                // What it waited although nothing else ran.
                outcome.longest_hold_us = outcome.longest_hold_us.max(now - hop.payload.max(free).min(now));
                let rank = hop.source.0 as usize;
                let mut key = hop.key;
                key.layer.0 += 1;
                if key.layer.0 == LAYERS {
                    key = FrameHeader::key(key.step.0 + 1, 0, 0);
                    ranks[rank].steps += 1;
                }
                let stopped =
                    setup.stops.is_some_and(|(who, after)| who == rank && ranks[rank].steps >= after);
                let think = setup.think[rank] as f64 * (1.0 + setup.jitter * random.next());
                let pause = setup.answers.filter(|(steps, _)| {
                    key.layer.0 == 0 && (ranks[rank].steps + 7 * rank as u64).is_multiple_of(*steps)
                });
                let pause = pause.map_or(0, |(_, pause)| pause);
                ranks[rank].next = (!stopped).then_some((end + think as u64 + pause, key));
            }
            convoys.handle_executed(batch.drain(..).map(|hop| (hop.source, hop.key)), rows, now, end);
            (now, free) = (end, end);
            continue;
        }
        let next = ranks.iter().filter_map(|rank| Some(rank.next?.0)).chain(until).min();
        // Time always goes on.
        now = next.unwrap_or(micros).max(now + 1);
    }
    outcome.steps = ranks.iter().map(|rank| rank.steps).collect();
    outcome.dropped = convoys.dropped();
    outcome
}

/// Two ranks whose FFN reads weights for longer than they think.
fn weight_bound() -> Setup {
    Setup {
        board_us: 2000,
        think: vec![600, 600],
        jitter: 0.15,
        ffn: 1500,
        ffn_per_row: 5,
        rows: 8,
        stops: None,
        answers: None,
        disturbed: None,
    }
}

const LONG: u64 = 20_000_000;

#[test]
fn two_ranks_meet_at_every_layer_while_the_ffn_is_the_bottleneck() {
    let alone = run(&Setup { board_us: 0, ..weight_bound() }, LONG);
    let boarded = run(&weight_bound(), LONG);
    assert!(alone.ranks_per_execution() < 1.2, "{alone:?}");
    assert!(boarded.ranks_per_execution() > 1.8 * alone.ranks_per_execution(), "{boarded:?}");
    let steps = |outcome: &Outcome| outcome.steps.iter().sum::<u64>() as f64;
    assert!(steps(&boarded) > 1.3 * steps(&alone), "{} {}", steps(&boarded), steps(&alone));
    assert!(boarded.longest_hold_us <= 2000, "{boarded:?}");
}

/// Answers end and others begin, every half second or so: what was aligned is not, for a moment.
#[test]
fn ranks_that_pause_between_answers_meet_again() {
    for pause in [500, 3_000, 20_000] {
        let setup = Setup { answers: Some((40, pause)), ..weight_bound() };
        let alone = run(&Setup { board_us: 0, ..setup.clone() }, LONG);
        let boarded = run(&setup, LONG);
        println!(
            "pauses of {pause} us: {:.3} and {:.3}",
            boarded.ranks_per_execution(),
            alone.ranks_per_execution()
        );
        assert!(boarded.ranks_per_execution() > 1.8 * alone.ranks_per_execution(), "{boarded:?} {alone:?}");
    }
}

/// A processor that others use too: an execution that was held up says nothing about company.
#[test]
fn disturbed_executions_do_not_keep_ranks_apart() {
    for disturbed in [(500, 8_000), (500, 30_000), (100, 8_000)] {
        let setup = Setup { disturbed: Some(disturbed), board_us: 8_000, ..weight_bound() };
        let alone = run(&Setup { board_us: 0, ..setup.clone() }, LONG);
        let boarded = run(&setup, LONG);
        assert!(boarded.ranks_per_execution() > 1.8 * alone.ranks_per_execution(), "{boarded:?} {alone:?}");
    }
}

#[test]
fn three_ranks_meet_too() {
    let setup = Setup { think: vec![500, 600, 700], ..weight_bound() };
    let boarded = run(&setup, LONG);
    assert!(boarded.ranks_per_execution() > 2.4, "{boarded:?}");
}

#[test]
fn with_attention_as_the_bottleneck_nobody_waits() {
    for (think, ffn) in [(5000, 500), (3000, 1200)] {
        let setup = Setup { think: vec![think; 2], ffn, ..weight_bound() };
        let alone = run(&Setup { board_us: 0, ..setup.clone() }, LONG);
        let boarded = run(&setup, LONG);
        let steps = |outcome: &Outcome| outcome.steps.iter().sum::<u64>() as f64;
        assert!(steps(&boarded) > 0.97 * steps(&alone), "{boarded:?} {alone:?}");
    }
}

#[test]
fn an_ffn_bound_by_its_rows_gains_nothing_and_loses_nothing() {
    let setup = Setup { ffn: 50, ffn_per_row: 150, ..weight_bound() };
    let alone = run(&Setup { board_us: 0, ..setup.clone() }, LONG);
    let boarded = run(&setup, LONG);
    let steps = |outcome: &Outcome| outcome.steps.iter().sum::<u64>() as f64;
    assert!(steps(&boarded) > 0.97 * steps(&alone), "{boarded:?} {alone:?}");
}

#[test]
fn a_neighbour_that_stopped_costs_nothing() {
    let setup = Setup { stops: Some((1, 40)), ..weight_bound() };
    let with = run(&setup, LONG);
    let without = run(&Setup { think: vec![600], ..weight_bound() }, LONG);
    assert_eq!(with.steps[1], 40);
    assert!(with.steps[0] as f64 > 0.97 * without.steps[0] as f64, "{with:?} {without:?}");
}

#[test]
fn whoever_misses_its_convoy_is_dropped_and_the_others_go_on() {
    // The second rank takes longer between two layers than anybody is held.
    let setup = Setup { think: vec![600, 4000], board_us: 1000, ffn: 3000, jitter: 0.0, ..weight_bound() };
    let outcome = run(&setup, LONG);
    assert!(outcome.longest_hold_us <= 1000, "{outcome:?}");
    let alone = run(&Setup { board_us: 0, ..setup }, LONG);
    assert!(outcome.steps[0] as f64 > 0.8 * alone.steps[0] as f64, "{outcome:?} {alone:?}");
}

#[test]
fn a_hop_is_held_no_longer_than_it_may_be_and_a_closed_link_is_not_waited_for() {
    let mut convoys = Convoys::new(1000);
    let (a, b) = (SourceId(1), SourceId(2));
    let key = |step, layer| FrameHeader::key(step, layer, 0);
    // Both are busy, and the FFN takes long: whatever comes later is worth waiting for.
    let mut now = 0;
    for step in 1..8 {
        for (layer, source) in [(0, a), (0, b), (1, a), (1, b)] {
            now += 10;
            convoys.handle_arrival(source, key(step, layer), 1, now);
            convoys.update(now);
            convoys.handle_executed([(source, key(step, layer))].into_iter(), 1, now, now + 500);
            now += 500;
        }
    }
    convoys.handle_arrival(a, key(8, 0), 1, now);
    let until = convoys.update(now).expect("b is due");
    assert!(convoys.is_on() && convoys.holds(a, key(8, 0)) && until <= now + 1000);
    assert_eq!(convoys.update(until), None);
    assert!(!convoys.holds(a, key(8, 0)), "long enough");
    convoys.handle_executed([(a, key(8, 0))].into_iter(), 1, until, until + 500);
    convoys.handle_arrival(a, key(9, 0), 1, until + 600);
    convoys.handle_closed(b);
    assert_eq!(convoys.update(until + 600), None);
    assert!(!convoys.holds(a, key(9, 0)), "nobody is left to wait for");
}

#[test]
fn off_means_that_nothing_is_ever_held() {
    let mut convoys = Convoys::new(0);
    convoys.handle_arrival(SourceId(1), FrameHeader::key(1, 0, 0), 1, 5);
    assert_eq!(convoys.update(5), None);
    assert!(!convoys.is_on() && !convoys.holds(SourceId(1), FrameHeader::key(1, 0, 0)));
}
