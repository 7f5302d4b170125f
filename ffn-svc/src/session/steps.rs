//! One session's control stream: plans, withdrawals and heartbeats in, reports and heartbeats out. Whatever it hears
//! renews the lease; its end is the session's end. A wrong plan ends this stream with a typed status and touches no
//! other.
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use afd_common::ids::StepId;
use afd_common::lease::WORDS_PER_LEASE;
use afd_common::net::{client, messages};
use afd_common::proto::{RpcStatus, v1};
use tokio::sync::mpsc;
use tokio::time::{sleep_until, timeout};
use tonic::{Code, Status, Streaming};

use super::plans::{Accepted, PlanBook, PlanError, PlanLimits};
use super::sessions::{Session, Sessions};
use super::status::detailed;
use super::trace;
use crate::engine::{GraphUse, HopTimes, Planned, PlannedStep, StepAccount};

/// Messages that wait for a slow reader; reports beyond that stay on the session's accounts.
pub(super) const OUT_QUEUE: usize = 64;
/// Between two heartbeats while hops come: their rank counts the time in which nothing moves.
const QUICK_BEAT: Duration = Duration::from_millis(50);
/// Longest time that a last word waits for a reader.
const LAST_WORD: Duration = Duration::from_millis(500);

/// What goes out.
pub(super) type Out = mpsc::Sender<Result<v1::StepsResponse, Status>>;

/// The first message, which names the session.
///
/// # Errors
/// `INVALID_ARGUMENT`, `NOT_FOUND`, `DEADLINE_EXCEEDED`, or `ALREADY_EXISTS` for a second stream of one session.
pub(super) async fn open(
    sessions: &Sessions,
    requests: &mut Streaming<v1::StepsRequest>,
) -> Result<(Arc<Session>, v1::StepsRequest), Status> {
    let lease = sessions.settings().lease;
    let first = timeout(lease, requests.message())
        .await
        .map_err(|_| {
            Status::deadline_exceeded(format!("no first message came within {lease:?} (--lease-ms)"))
        })??
        .ok_or_else(|| Status::invalid_argument("the stream ended before its first message"))?;
    let session = sessions.find(&first.session_id)?;
    if !session.claim_steps() {
        return Err(detailed(
            Code::AlreadyExists,
            "the session has a Steps stream already: join again for another one",
            "STEPS_OPEN",
            Vec::new(),
        ));
    }
    Ok((session, first))
}

/// Serves an opened stream until one side ends it.
pub(super) async fn serve(
    sessions: Arc<Sessions>,
    session: Arc<Session>,
    first: v1::StepsRequest,
    mut requests: Streaming<v1::StepsRequest>,
    out: Out,
) {
    let agreement = &session.agreement;
    let limits =
        PlanLimits { max_stages: agreement.max_stages, max_tokens_per_stage: agreement.max_tokens_per_stage };
    let mut stream = Stream { sessions: &sessions, session: &session, book: PlanBook::new(limits), out };
    let end = match stream.handle(first) {
        Ok(()) => stream.run(&mut requests).await,
        Err(status) => End::Refused(status),
    };
    stream.report_finished();
    let (why, status) = match end {
        End::Peer(why) => (why, None),
        End::Refused(status) => (format!("refused: {}", status.message()), Some(status)),
        End::Session => {
            let why = session.end().unwrap_or("it has ended").to_owned();
            let status = detailed(Code::Aborted, why.clone(), "SESSION_ENDED", Vec::new());
            (why, Some(status))
        }
    };
    sessions.end(&session, &why);
    if let Some(status) = status {
        // A peer that does not read its stream does without.
        let _ = timeout(LAST_WORD, stream.out.send(Err(status))).await;
    }
}

enum End {
    /// The peer's doing.
    Peer(String),
    /// It sent something that ends its stream.
    Refused(Status),
    /// The session ended elsewhere: replaced, expired, or the process stops.
    Session,
}

/// When to speak next: often while hops come and for a lease after them, else as often as the lease asks.
struct Pulse {
    lease: Duration,
    due: Instant,
    turns: u64,
    moved: Instant,
    /// Speaks seldom.
    rests: bool,
}

impl Pulse {
    /// The first word is due.
    fn new(lease: Duration, now: Instant) -> Self {
        Self { lease, due: now, turns: 0, moved: now, rests: false }
    }

    /// So many turns were told of.
    fn handle_beat(&mut self, turns: u64, now: Instant) {
        if std::mem::replace(&mut self.turns, turns) != turns {
            self.moved = now;
        }
        self.rests = now.saturating_duration_since(self.moved) >= self.lease;
        let third = self.lease / WORDS_PER_LEASE;
        self.due = now + if self.rests { third } else { third.min(QUICK_BEAT) };
    }
}

/// A message that cannot be read is answered; a connection that is gone is not.
fn broken(status: Status) -> End {
    match messages::blamed(&status, None).unwrap_or(status) {
        status if status.code() == Code::InvalidArgument => End::Refused(status),
        status => End::Peer(client::words(&status)),
    }
}

struct Stream<'a> {
    sessions: &'a Sessions,
    session: &'a Session,
    book: PlanBook,
    out: Out,
}

impl Stream<'_> {
    async fn run(&mut self, requests: &mut Streaming<v1::StepsRequest>) -> End {
        let mut pulse = Pulse::new(self.sessions.settings().lease, Instant::now());
        let mut draining = self.sessions.draining();
        if draining.borrow_and_update().is_some() {
            self.tell_draining();
        }
        loop {
            tokio::select! {
                message = requests.message() => match message {
                    Ok(Some(message)) => {
                        if let Err(status) = self.handle(message) {
                            return End::Refused(status);
                        }
                    }
                    Ok(None) => return End::Peer("the attention rank closed its control stream".into()),
                    Err(status) => return broken(status),
                },
                () = self.session.accounts.wait_finished() => {}
                () = sleep_until(pulse.due.into()) => {}
                Ok(()) = draining.changed() => self.tell_draining(),
                () = self.session.ended() => return End::Session,
                () = self.out.closed() => return End::Peer("the attention rank is gone".into()),
            }
            self.report_finished();
            self.beat(&mut pulse);
        }
    }

    /// A heartbeat, if it is time for one.
    fn beat(&self, pulse: &mut Pulse) {
        let (accounts, now) = (&self.session.accounts, Instant::now());
        let turns = accounts.turns();
        if pulse.rests && !accounts.is_resting() {
            pulse.due = now;
        }
        if now < pulse.due {
            return;
        }
        self.send(v1::steps_response::Message::Heartbeat(self.heartbeat(turns)));
        pulse.handle_beat(turns, now);
        if pulse.rests {
            accounts.rest();
        }
    }

    fn handle(&mut self, request: v1::StepsRequest) -> Result<(), Status> {
        let alive = self.sessions.renew(self.session);
        match request.message {
            Some(v1::steps_request::Message::Plan(plan)) if !alive => {
                let why = self.session.end().unwrap_or("its lease has ended").to_owned();
                return Err(PlanError::Fenced { step: plan.step_id, why }.into());
            }
            Some(v1::steps_request::Message::Plan(plan)) => {
                let accepted = self.book.accept(&plan)?;
                if accepted == Accepted::Late {
                    return Ok(());
                }
                self.session.accounts.handle_plan(StepId(plan.step_id), planned(&plan));
                if self.session.has_stream_links() && accepted == Accepted::New {
                    self.sessions.engine().plan(self.session.tag, as_step(&plan));
                }
                tracing::trace!(
                    peer = %self.session.place, step = plan.step_id, revision = plan.revision,
                    traceparent = plan.traceparent, "plan"
                );
            }
            Some(v1::steps_request::Message::Cancel(cancel)) => {
                let step = StepId(cancel.step_id);
                self.book.cancel(step);
                self.session.accounts.handle_cancel(step);
            }
            // A heartbeat has done its work by being heard; so has a message of a later version.
            Some(v1::steps_request::Message::Heartbeat(_)) | None => {}
        }
        Ok(())
    }

    /// Makes the spans of recorded steps, and sends reports as far as there is room for them.
    fn report_finished(&mut self) {
        let accounts = &self.session.accounts;
        while let Some(step) = accounts.take_traced() {
            trace::end_spans(&self.sessions.settings().spans, self.sessions.engine().spec().shard, &step);
            accounts.recycle(step);
        }
        while let Ok(permit) = self.out.try_reserve() {
            let Some(account) = self.session.accounts.take_finished() else { return };
            self.book.finish(account.step);
            permit.send(Ok(response(v1::steps_response::Message::Report(report(account)))));
        }
    }

    fn heartbeat(&self, turns: u64) -> v1::Heartbeat {
        let last = self.session.accounts.last_begun().unwrap_or_default();
        let (last_step_id, last_layer) = (last.step.0, last.layer.0.into());
        v1::Heartbeat { sent_at_us: now_us(), last_step_id, last_layer, turns }
    }

    fn tell_draining(&self) {
        let deadline = *self.sessions.draining().borrow();
        let remaining = deadline.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()));
        let remaining_ms = remaining.as_millis() as u32;
        self.send(v1::steps_response::Message::Draining(v1::Draining { remaining_ms }));
    }

    /// A reader that is too slow for what is not a report does without it.
    fn send(&self, message: v1::steps_response::Message) {
        let _ = self.out.try_send(Ok(response(message)));
    }
}

fn response(message: v1::steps_response::Message) -> v1::StepsResponse {
    v1::StepsResponse { message: Some(message) }
}

/// What the account of a step has to know of its plan.
pub(super) fn planned(plan: &v1::StepPlan) -> Planned {
    // What is malformed is ignored, as the standard asks.
    let trace = plan.traceparent.parse().ok().filter(|_| plan.sampled);
    let stages = plan.padded_tokens.len() as u32;
    Planned { stages, profile: plan.profile, trace, is_warmup: plan.warmup }
}

/// What a link that a stream drives has to know of a plan.
fn as_step(plan: &v1::StepPlan) -> PlannedStep {
    PlannedStep {
        step: StepId(plan.step_id),
        stage_rows: plan.padded_tokens.clone(),
        phase: plan.phase,
        graph: match (plan.graph_capture, plan.graph_replay) {
            (true, _) => GraphUse::Capture,
            (_, true) => GraphUse::Replay,
            _ => GraphUse::None,
        },
        profile: plan.profile,
    }
}

fn report(account: StepAccount) -> v1::StepReport {
    v1::StepReport {
        step_id: account.step.0,
        num_hops: account.num_hops,
        num_rows: account.num_rows,
        queue_us: account.queue_us,
        compute_us: account.compute_us,
        send_us: account.send_us,
        last_layer: account.last_layer.0.into(),
        error: account.error.map(|(code, message)| RpcStatus { code, message, details: Vec::new() }),
        hops: account.hops.iter().map(timing).collect(),
    }
}

fn timing(hop: &HopTimes) -> v1::HopTiming {
    v1::HopTiming {
        layer: hop.key.layer.0.into(),
        stage: hop.key.stage.0.into(),
        rows: hop.rows,
        arrived_at_us: hop.arrived_us,
        started_at_us: hop.started_us,
        finished_at_us: hop.finished_us,
        sent_at_us: hop.sent_us,
    }
}

/// Microseconds since the Unix epoch.
pub(super) fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64
}

#[cfg(test)]
mod tests;
