//! Plans on a session that is over, at the very moment that no client can hit on purpose: heard before its stream has
//! noticed the end.
use std::time::Duration;

use afd_common::ids::LayerIdx;
use afd_common::telemetry::{Metrics, SpanSink};
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
