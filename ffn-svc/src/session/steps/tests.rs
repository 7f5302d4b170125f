//! Plans on a session that is over, at the very moment that no client can hit on purpose: heard before its stream has
//! noticed the end. And when the stream speaks, in virtual time.
use std::time::Duration;

use afd_common::ids::LayerIdx;
use afd_common::telemetry::{Metrics, SpanSink};
use proptest::prelude::*;
use tch::Tensor;
use tonic_types::StatusExt;

use super::super::handshake::Offer;
use super::super::sessions::Settings;
use super::*;
use crate::engine::{self, EngineMetrics, EngineOptions, StageModel, StageSpec};
use crate::model::Side;

/// Gives back what it gets.
struct Same;

impl StageModel for Same {
    fn spec(&self) -> StageSpec {
        StageSpec::dense(2, 1)
    }

    fn forward(&mut self, _: LayerIdx, rows: &Tensor, _: &Side) -> Result<Tensor, String> {
        Ok(rows.shallow_clone())
    }
}

fn sessions() -> Arc<Sessions> {
    let options = EngineOptions {
        max_rows: 64,
        max_batch_rows: 64,
        metrics: EngineMetrics::new(&Metrics::new()).unwrap(),
        inject_delay: Duration::ZERO,
        board: Duration::ZERO,
        routing: Default::default(),
    };
    let settings = Settings {
        identity: v1::Identity::default(),
        offer: Offer {
            model: model(),
            shard_count: 1,
            link_kinds: vec![v1::LinkKind::Tcp],
            max_stages: 2,
            max_tokens_per_stage: 64,
            features: Vec::new(),
            join_token: None,
        },
        lease: Duration::from_secs(60),
        attach_timeout: Duration::from_secs(5),
        spans: SpanSink::off(),
    };
    Sessions::new(settings, Arc::new(engine::spawn(Same, options).unwrap()))
}

fn model() -> v1::ModelIdentity {
    v1::ModelIdentity { hidden_size: 2, ..Default::default() }
}

/// A session of an attention rank, as its own process joins, and its stream.
fn join(sessions: &Arc<Sessions>, rank: u32) -> Arc<Session> {
    let identity =
        v1::Identity { deployment: "test".into(), role: v1::Role::Attention.into(), rank, incarnation: 1 };
    let request = v1::JoinRequest {
        protocol_major: afd_common::proto::PROTOCOL_MAJOR,
        identity: Some(identity),
        model: Some(model()),
        link_kinds: vec![v1::LinkKind::Tcp.into()],
        max_stages: 2,
        max_tokens_per_stage: 64,
        ..Default::default()
    };
    let joined = sessions.join(&request, None).unwrap();
    sessions.find(&joined.session_id).unwrap()
}

fn stream<'a>(sessions: &'a Sessions, session: &'a Session) -> Stream<'a> {
    let limits = PlanLimits { max_stages: 2, max_tokens_per_stage: 64 };
    Stream { sessions, session, book: PlanBook::new(limits), out: mpsc::channel(OUT_QUEUE).0 }
}

fn plan(step_id: u64) -> v1::StepsRequest {
    let plan = v1::StepPlan {
        step_id,
        padded_tokens: vec![1],
        phase: v1::Phase::Decode.into(),
        ..Default::default()
    };
    v1::StepsRequest { session_id: String::new(), message: Some(v1::steps_request::Message::Plan(plan)) }
}

#[tokio::test]
async fn a_plan_on_a_fenced_session_is_refused_by_type_and_harms_nobody_else() {
    let sessions = sessions();
    let (old, neighbour) = (join(&sessions, 0), join(&sessions, 1));
    let (mut of_old, mut of_neighbour) = (stream(&sessions, &old), stream(&sessions, &neighbour));
    of_old.handle(plan(1)).unwrap();
    of_neighbour.handle(plan(1)).unwrap();
    let new = join(&sessions, 0);
    let refused = of_old.handle(plan(2)).unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
    let info = refused.get_details_error_info().expect("a typed detail");
    assert_eq!((info.reason.as_str(), info.metadata["step"].as_str()), ("PLAN_FENCED", "2"));
    assert!(refused.message().contains("a newer session took its place"), "{}", refused.message());
    assert_eq!(of_old.book.num_open(), 1, "nothing of it was noted");
    // What is said last on a session that is over is nobody's fault.
    let beat = v1::steps_request::Message::Heartbeat(v1::Heartbeat::default());
    of_old.handle(v1::StepsRequest { session_id: String::new(), message: Some(beat) }).unwrap();
    of_neighbour.handle(plan(2)).unwrap();
    stream(&sessions, &new).handle(plan(2)).unwrap();
    assert!(neighbour.end().is_none() && new.end().is_none());
    assert_eq!(sessions.len(), 2);
}

const LEASE: Duration = Duration::from_secs(3);

/// Beats whenever one is due until `until`, each telling of as many turns as `turns` says for its moment: the pauses between.
fn beats(pulse: &mut Pulse, until: Instant, turns: impl Fn(Instant) -> u64) -> Vec<Duration> {
    let mut pauses = Vec::new();
    while pulse.due < until {
        let now = pulse.due;
        pulse.handle_beat(turns(now), now);
        pauses.push(pulse.due - now);
    }
    pauses
}

#[test]
fn a_stream_speaks_at_once_often_while_turns_go_by_and_for_a_lease_after_the_last() {
    let begun = Instant::now();
    let mut pulse = Pulse::new(LEASE, begun);
    assert_eq!(pulse.due, begun, "the first word is due");
    let last_turn = begun + Duration::from_secs(2);
    let turns = |now: Instant| now.min(last_turn).duration_since(begun).as_millis() as u64;
    let busy = beats(&mut pulse, last_turn + LEASE, turns);
    assert!(busy.iter().all(|pause| *pause == QUICK_BEAT) && !pulse.rests, "{busy:?}");
    let resting = beats(&mut pulse, last_turn + 4 * LEASE, turns);
    assert!(pulse.rests && resting.len() == 9, "{resting:?}");
    assert!(resting.iter().all(|pause| *pause == LEASE / WORDS_PER_LEASE), "{resting:?}");
    // The next turn wakes it, as `Stream::beat` does.
    let woken = pulse.due - LEASE / 6;
    pulse.handle_beat(turns(woken) + 1, woken);
    assert!(!pulse.rests && pulse.due == woken + QUICK_BEAT);
}

#[test]
fn nobody_who_was_never_asked_for_anything_speaks_often_for_longer_than_a_lease() {
    let begun = Instant::now();
    let mut pulse = Pulse::new(LEASE, begun);
    let pauses = beats(&mut pulse, begun + 3 * LEASE, |_| 0);
    let often = pauses.iter().filter(|pause| **pause == QUICK_BEAT).count();
    assert_eq!(often, LEASE.div_duration_f64(QUICK_BEAT) as usize, "{pauses:?}");
    assert_eq!(pauses.len() - often, 2 * WORDS_PER_LEASE as usize, "{pauses:?}");
}

proptest! {
    /// Whatever goes by and however late it is run: it is never silent for more than a third of its lease, never quicker than
    /// it has to be, and rests exactly when nothing has moved for a lease.
    #[test]
    fn a_stream_is_never_silent_for_longer_than_its_lease_allows(
        lease_ms in 100u64..10_000,
        beats in prop::collection::vec((any::<bool>(), 0u64..5_000), 1..100),
    ) {
        let (lease, mut now) = (Duration::from_millis(lease_ms), Instant::now());
        let (mut pulse, mut turns, mut moved) = (Pulse::new(lease, now), 0, now);
        for (moves, late_ms) in beats {
            now = pulse.due + Duration::from_millis(late_ms);
            if moves {
                (turns, moved) = (turns + 1, now);
            }
            pulse.handle_beat(turns, now);
            let pause = pulse.due - now;
            prop_assert_eq!(pulse.rests, now - moved >= lease);
            prop_assert_eq!(pause, if pulse.rests { lease / 3 } else { (lease / 3).min(QUICK_BEAT) });
        }
    }
}
