//! `POST /profile` with `{"steps": N, "timeout_s": S}`: records the next steps and answers with their timeline, or with 409
//! while somebody else records. Steps that did not come in time are missing in the timeline, which says so; where none came,
//! there is none.
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use afd_common::spelling::span;
use axum::extract::{ConnectInfo, Request, State};
use axum::routing::post;
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::timeout_at;

use super::chrome::{self, Clock};
use super::under_way::{Recording, UnderWay};
use crate::api::body;
use crate::api::error::ApiError;
use crate::api::json::Fields;
use crate::api::validate::{FieldError, whole};
use crate::engine::{EngineHandle, ProfiledStep, Recorded};
use crate::remote_ffn::stats::{FfnReport, FfnReports};
use crate::request::SequenceError;

/// Most steps of a timeline.
pub(super) const MAX_STEPS: u64 = 1000;
/// Longest time that anybody may wait for them.
pub(super) const MAX_TIMEOUT: Duration = Duration::from_secs(600);
/// Time for the FFN ranks' reports of the last steps to arrive.
const FOR_REPORTS: Duration = Duration::from_millis(500);
/// How often it is looked whether they have: they have no event of their own.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// The body of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wanted {
    steps: u64,
    limit: Duration,
}

#[derive(Clone)]
struct Profiler {
    engine: EngineHandle,
    reports: Arc<FfnReports>,
    rank: u32,
    max_body_bytes: usize,
    under_way: UnderWay,
}

/// What came of the steps that were asked for.
struct Steps {
    all: Vec<ProfiledStep>,
    /// Why there are fewer, in a sentence.
    fewer: Option<String>,
}

/// The route, for attention rank `rank`. Bodies may have `max_body_bytes`.
pub fn router(engine: EngineHandle, reports: Arc<FfnReports>, rank: u32, max_body_bytes: usize) -> Router {
    let under_way = UnderWay::default();
    let profiler = Profiler { engine, reports, rank, max_body_bytes, under_way };
    Router::new().route("/profile", post(handle)).with_state(profiler)
}

async fn handle(
    State(profiler): State<Profiler>,
    ConnectInfo(by): ConnectInfo<SocketAddr>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let (head, body) = request.into_parts();
    let body = body::read(&head.headers, body, profiler.max_body_bytes).await?;
    let wanted = Wanted::read(Fields::parse(&body)?)?;
    let Wanted { steps, limit } = wanted;
    let begun = Instant::now();
    let taken = profiler.under_way.begin(Recording { by, steps, begun, limit });
    let taken = taken.map_err(|busy| ApiError::ProfileUnderWay(busy.to_string()))?;
    profiler.reports.take();
    let recorded = profiler.engine.profile(steps as usize);
    let steps = wanted.collect(recorded, begun + limit).await?;
    let reports = profiler.reports_of(&steps.all).await;
    drop(taken);
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let clock = Clock { now: Instant::now(), now_us: since_epoch.as_micros() as u64 };
    let mut timeline = chrome::timeline(profiler.rank, &steps.all, &reports, &clock);
    // Where the format has room for what it does not know.
    timeline["otherData"] = json!({"steps": steps.all.len(), "fewer": steps.fewer});
    Ok(Json(timeline))
}

impl Wanted {
    fn read(mut fields: Fields) -> Result<Self, FieldError> {
        let missing = |name| move || FieldError::new(name, "is missing");
        let steps = fields.integer("steps")?.ok_or_else(missing("steps"))?;
        let timeout_s = fields.number("timeout_s")?.ok_or_else(missing("timeout_s"))?;
        fields.finish()?;
        let steps = whole("steps", steps, 1, MAX_STEPS)?;
        let limit = Duration::try_from_secs_f64(timeout_s).unwrap_or_default();
        if limit.is_zero() || limit > MAX_TIMEOUT {
            let most = MAX_TIMEOUT.as_secs();
            let what = format!("must be more than 0 and at most {most}, got {timeout_s}");
            return Err(FieldError::new("timeout_s", what));
        }
        Ok(Self { steps, limit })
    }

    /// Waits for the steps until `deadline`.
    ///
    /// # Errors
    /// [`ApiError`] where not one of them came.
    async fn collect(
        self,
        mut recorded: mpsc::UnboundedReceiver<Recorded>,
        deadline: Instant,
    ) -> Result<Steps, ApiError> {
        let (mut all, mut has_begun, asked) = (Vec::new(), false, self.steps);
        let is_late = loop {
            match timeout_at(deadline.into(), recorded.recv()).await {
                Ok(Some(Recorded::First)) => has_begun = true,
                Ok(Some(Recorded::Step(step))) => all.push(*step),
                Ok(None) => break false,
                Err(_) => break true,
            }
        };
        let (limit, came) = (span(self.limit), all.len() as u64);
        let fewer = match (came, is_late) {
            (_, false) if came == asked => None,
            (0, false) => return Err(SequenceError::ShuttingDown.into()),
            (0, true) => {
                let what = match has_begun {
                    false => format!("no step ran within {limit}: is anything being generated?"),
                    true => format!(
                        "one step ran within {limit}, and the first only leads in: is enough being generated?"
                    ),
                };
                return Err(ApiError::NothingRecorded(what));
            }
            (_, true) => Some(format!("{came} of {asked} steps ran within {limit}")),
            (_, false) => Some(format!("{came} of {asked} steps ran before the engine ended")),
        };
        Ok(Steps { all, fewer })
    }
}

impl Profiler {
    /// What the FFN ranks say of these steps: all that was asked, or what is there in time.
    async fn reports_of(&self, steps: &[ProfiledStep]) -> Vec<FfnReport> {
        let mut reports: Vec<FfnReport> = Vec::new();
        let wanted: usize = steps.iter().map(|step| step.hops.len()).sum();
        let deadline = Instant::now() + FOR_REPORTS;
        loop {
            // What was asked for before and after the recording is none of it.
            let of_these = |report: &FfnReport| steps.iter().any(|step| step.step.0 == report.report.step_id);
            reports.extend(self.reports.take().into_iter().filter(of_these));
            let there: usize = reports.iter().map(|report| report.report.hops.len()).sum();
            if there >= wanted || Instant::now() >= deadline {
                return reports;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use afd_common::ids::StepId;

    use super::*;
    use crate::scheduler::Phase;

    #[test]
    fn each_field_of_a_body_that_is_wrong_is_named() {
        let read = |body: &str| Fields::parse(body.as_bytes()).map(Wanted::read).unwrap();
        let good = Wanted { steps: 3, limit: Duration::from_millis(1500) };
        assert_eq!(read(r#"{"steps": 3, "timeout_s": 1.5}"#), Ok(good));
        for (body, param) in [
            ("{}", "steps"),
            (r#"{"steps": 3}"#, "timeout_s"),
            (r#"{"steps": 0, "timeout_s": 1}"#, "steps"),
            (r#"{"steps": 1001, "timeout_s": 1}"#, "steps"),
            (r#"{"steps": 2.5, "timeout_s": 1}"#, "steps"),
            (r#"{"steps": 3, "timeout_s": 0}"#, "timeout_s"),
            (r#"{"steps": 3, "timeout_s": -1}"#, "timeout_s"),
            (r#"{"steps": 3, "timeout_s": 601}"#, "timeout_s"),
            (r#"{"steps": 3, "timeout_s": 1, "step": 1}"#, "step"),
        ] {
            assert_eq!(read(body).unwrap_err().param, param, "{body}");
        }
    }

    fn step(step: u64) -> Recorded {
        let now = Instant::now();
        Recorded::Step(Box::new(ProfiledStep {
            step: StepId(step),
            phase: Phase::Decode,
            rows: 1,
            stages: 1,
            ffn_wait: Duration::ZERO,
            ffn_hidden: Duration::ZERO,
            begun: now,
            ended: now,
            on_device: false,
            attends: Vec::new(),
            hops: Vec::new(),
        }))
    }

    /// Of three steps within two seconds, when these come; and whether the engine ends behind them.
    async fn collected(steps: Vec<Recorded>, ends: bool) -> Result<(usize, Option<String>), String> {
        let (sender, recorded) = mpsc::unbounded_channel();
        steps.into_iter().for_each(|step| sender.send(step).unwrap());
        let held = (!ends).then_some(sender);
        let wanted = Wanted { steps: 3, limit: Duration::from_secs(2) };
        // What is there is taken before it is looked at the time, which is up.
        let collected = wanted.collect(recorded, Instant::now()).await;
        drop(held);
        collected.map(|steps| (steps.all.len(), steps.fewer)).map_err(|error| error.to_string())
    }

    #[tokio::test]
    async fn steps_that_came_are_kept_and_the_others_counted() {
        let first = || Recorded::First;
        assert_eq!(collected(vec![first(), step(1), step(2), step(3)], true).await, Ok((3, None)));
        let fewer = Some("2 of 3 steps ran within 2.0 s".to_owned());
        assert_eq!(collected(vec![first(), step(1), step(2)], false).await, Ok((2, fewer)));
        let fewer = Some("1 of 3 steps ran before the engine ended".to_owned());
        assert_eq!(collected(vec![first(), step(1)], true).await, Ok((1, fewer)));
        let nothing = "no step ran within 2.0 s: is anything being generated?";
        assert_eq!(collected(vec![], false).await, Err(nothing.into()));
        assert!(collected(vec![first()], false).await.unwrap_err().starts_with("one step ran within 2.0 s"));
        assert_eq!(collected(vec![], true).await, Err("the service is shutting down".into()));
    }
}
