//! `POST /profile` with `{"steps": N, "timeout_s": S}`: records the next steps and answers with their timeline.
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use http::StatusCode;
use serde::Deserialize;
use serde_json::json;

use super::chrome::{self, Clock};
use crate::engine::{EngineHandle, ProfiledStep};
use crate::remote_ffn::stats::{FfnReport, FfnReports};

/// Most steps of a timeline.
pub(super) const MAX_STEPS: u64 = 1000;
/// Longest time that anybody may wait for them, seconds.
pub(super) const MAX_TIMEOUT_S: u64 = 600;
/// Time for the FFN ranks' reports of the last steps to arrive.
const FOR_REPORTS: Duration = Duration::from_millis(500);
/// How often it is looked whether they have: they have no event of their own.
const LOOK_EVERY: Duration = Duration::from_millis(10);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    steps: u64,
    timeout_s: u64,
}

#[derive(Clone)]
struct Profiler {
    engine: EngineHandle,
    reports: Arc<FfnReports>,
    rank: u32,
}

/// The route, for attention rank `rank`.
pub fn router(engine: EngineHandle, reports: Arc<FfnReports>, rank: u32) -> Router {
    Router::new().route("/profile", post(handle)).with_state(Profiler { engine, reports, rank })
}

async fn handle(State(profiler): State<Profiler>, Json(wanted): Json<Wanted>) -> Response {
    let Wanted { steps, timeout_s } = wanted;
    if !(1..=MAX_STEPS).contains(&steps) {
        return refuse(StatusCode::BAD_REQUEST, format!("`steps` is {steps}; must be 1 to {MAX_STEPS}"));
    }
    if !(1..=MAX_TIMEOUT_S).contains(&timeout_s) {
        let what = format!("`timeout_s` is {timeout_s}; must be 1 to {MAX_TIMEOUT_S}");
        return refuse(StatusCode::BAD_REQUEST, what);
    }
    profiler.reports.take();
    let recorded = profiler.engine.profile(steps as usize);
    let Ok(recorded) = tokio::time::timeout(Duration::from_secs(timeout_s), recorded).await else {
        let what = format!("{steps} steps did not run within {timeout_s} s: is anything being generated?");
        return refuse(StatusCode::GATEWAY_TIMEOUT, what);
    };
    let Ok(steps) = recorded else {
        return refuse(StatusCode::CONFLICT, "another profile took its place, or the engine ended".into());
    };
    let reports = profiler.reports_of(&steps).await;
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let clock = Clock { now: Instant::now(), now_us: since_epoch.as_micros() as u64 };
    Json(chrome::timeline(profiler.rank, &steps, &reports, &clock)).into_response()
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

fn refuse(code: StatusCode, what: String) -> Response {
    (code, Json(json!({"error": {"message": what, "type": "invalid_request_error"}}))).into_response()
}
