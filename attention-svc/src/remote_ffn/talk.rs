//! The control stream of one edge: plans and keep-alives out, reports and keep-alives in, until one side ends it or the
//! rank has said nothing for its lease.
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use afd_common::ids::Shard;
use afd_common::lease::{Silence, WORDS_PER_LEASE};
use afd_common::net::client;
use afd_common::proto::v1;
use afd_common::spelling::span;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, sleep_until};
use tokio_util::sync::CancellationToken;

use super::edge::EdgeEvent;
use super::hop_table::EdgeId;
use super::life::Life;
use super::session::Shared;

/// The control stream of an edge.
pub(super) struct Talk<'a> {
    pub(super) id: EdgeId,
    pub(super) peer: Arc<str>,
    pub(super) shard: Shard,
    pub(super) shared: &'a Shared,
    pub(super) life: Arc<Life>,
    pub(super) lease: Duration,
    pub(super) to_rank: mpsc::Sender<v1::StepsRequest>,
    /// A step that failed ends the link: the FFN has given it up already.
    pub(super) steps_may_fail: bool,
    /// Step and layer of the hop that the rank has begun last, and its turns by then.
    pub(super) last_hop: (u64, u32, u64),
}

impl Talk<'_> {
    /// Until one side ends it: says why.
    pub(super) async fn run(
        mut self,
        mut plans: mpsc::Receiver<v1::steps_request::Message>,
        mut abandoned: mpsc::Receiver<String>,
        mut responses: tonic::Streaming<v1::StepsResponse>,
        stop: &CancellationToken,
    ) -> String {
        let to_rank = self.to_rank.clone();
        let mut silence = Silence::new(self.lease, Instant::now());
        let mut beat = interval(self.lease / WORDS_PER_LEASE);
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let due = silence.due();
            tokio::select! {
                // In this order, so that what was heard counts before the time in which nothing was.
                biased;
                response = responses.message() => {
                    silence.handle_heard(Instant::now());
                    match response {
                        Err(status) => return client::words(&status),
                        Ok(None) => return "it ended the control stream".to_owned(),
                        Ok(Some(response)) => {
                            if let Some(why) = self.handle(response) {
                                return why;
                            }
                        }
                    }
                }
                () = stop.cancelled() => return "this attention rank is stopping".to_owned(),
                why = abandoned.recv() => return why.unwrap_or_else(dropped),
                () = sleep_until(due.into()) => {
                    if let Some(silent) = silence.handle_due(Instant::now()) {
                        let silent = span(silent);
                        return format!("it said nothing for {silent}, its lease (--lease-ms of ffn-svc)");
                    }
                }
                // Where the queue is full, the rank is about to hear something else, or nothing.
                _ = beat.tick() => drop(to_rank.try_send(request(heartbeat()))),
                plan = next_plan(&to_rank, &mut plans) => match plan {
                    Ok((place, plan)) => place.send(request(plan)),
                    Err(why) => return why,
                },
            }
        }
    }

    /// Takes a message in. Why the session is over, if it says so.
    fn handle(&mut self, response: v1::StepsResponse) -> Option<String> {
        match response.message {
            Some(v1::steps_response::Message::Heartbeat(beat)) => {
                let begun = (beat.last_step_id, beat.last_layer, beat.turns);
                if std::mem::replace(&mut self.last_hop, begun) != begun {
                    self.life.handle_moved(Instant::now());
                }
            }
            Some(v1::steps_response::Message::Report(report)) => {
                self.life.handle_moved(Instant::now());
                tracing::trace!(
                    step = report.step_id,
                    hops = report.num_hops,
                    compute_us = report.compute_us,
                    "step report"
                );
                let failed = report.error.clone().filter(|_| self.steps_may_fail);
                let failed =
                    failed.map(|error| format!("step {} failed there: {}", report.step_id, error.message));
                self.shared.reports.handle_report(&self.peer, self.shard, report);
                return failed;
            }
            Some(v1::steps_response::Message::Draining(draining)) => {
                tracing::info!(
                    peer = %self.peer, shard = %self.shard, remaining_ms = draining.remaining_ms,
                    "FFN rank is draining"
                );
                self.life.handle_draining();
                self.shared.tell(EdgeEvent::Draining { id: self.id });
                self.shared.changed.notify_waiters();
            }
            None => {}
        }
        None
    }
}

/// A plan, and room in the queue to the rank; or why there is none any more.
async fn next_plan<'a>(
    to_rank: &'a mpsc::Sender<v1::StepsRequest>,
    plans: &mut mpsc::Receiver<v1::steps_request::Message>,
) -> Result<(mpsc::Permit<'a, v1::StepsRequest>, v1::steps_request::Message), String> {
    // First the room: a plan that was taken and had none would be lost when another branch comes first.
    let place = to_rank.reserve().await.map_err(|_| "it closed the control stream".to_owned())?;
    Ok((place, plans.recv().await.ok_or_else(dropped)?))
}

fn dropped() -> String {
    "the engine has dropped the edge".to_owned()
}

fn request(message: v1::steps_request::Message) -> v1::StepsRequest {
    v1::StepsRequest { session_id: String::new(), message: Some(message) }
}

pub(super) fn heartbeat() -> v1::steps_request::Message {
    let sent_at_us = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_micros() as u64);
    v1::steps_request::Message::Heartbeat(v1::Heartbeat { sent_at_us, ..v1::Heartbeat::default() })
}
