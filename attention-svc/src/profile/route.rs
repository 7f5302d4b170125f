//! `POST /profile` with `{"steps": N, "timeout_s": S}`: records the next steps and answers with their timeline, or with 409
//! while somebody else records.
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::extract::{ConnectInfo, State};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use http::StatusCode;
use serde::Deserialize;
use serde_json::json;

use super::chrome::{self, Clock};
use super::under_way::{Recording, UnderWay};
use crate::engine::{EngineHandle, ProfiledStep};
use crate::remote_ffn::stats::{FfnReport, FfnReports};

/// Most steps of a timeline.
pub(super) const MAX_STEPS: u64 = 1000;
/// Longest time that anybody may wait for them.
pub(super) const MAX_TIMEOUT: Duration = Duration::from_secs(600);
/// Time for the FFN ranks' reports of the last steps to arrive.
const FOR_REPORTS: Duration = Duration::from_millis(500);
/// How often it is looked whether they have: they have no event of their own.
const LOOK_EVERY: Duration = Duration::from_millis(10);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    steps: u64,
    timeout_s: f64,
}

#[derive(Clone)]
struct Profiler {
    engine: EngineHandle,
    reports: Arc<FfnReports>,
    rank: u32,
    under_way: UnderWay,
}

/// The route, for attention rank `rank`.
pub fn router(engine: EngineHandle, reports: Arc<FfnReports>, rank: u32) -> Router {
    Router::new().route("/profile", post(handle)).with_state(Profiler {
        engine,
        reports,
        rank,
        under_way: UnderWay::default(),
    })
}

async fn handle(
    State(profiler): State<Profiler>,
    ConnectInfo(by): ConnectInfo<SocketAddr>,
    Json(wanted): Json<Wanted>,
) -> Response {
    let Wanted { steps, timeout_s } = wanted;
    if !(1..=MAX_STEPS).contains(&steps) {
        let what = format!("`steps` is {steps}; must be 1 to {MAX_STEPS}");
        return refuse(StatusCode::BAD_REQUEST, "invalid_value", what);
    }
    let limit = Duration::try_from_secs_f64(timeout_s).unwrap_or_default();
    if limit.is_zero() || limit > MAX_TIMEOUT {
        let most = MAX_TIMEOUT.as_secs();
        let what = format!("`timeout_s` is {timeout_s}; must be more than 0 and at most {most}");
        return refuse(StatusCode::BAD_REQUEST, "invalid_value", what);
    }
    let taken = match profiler.under_way.begin(Recording { by, steps, begun: Instant::now(), limit }) {
        Ok(taken) => taken,
        Err(busy) => return refuse(StatusCode::CONFLICT, "profile_under_way", busy.to_string()),
    };
    profiler.reports.take();
    let recorded = profiler.engine.profile(steps as usize);
    let Ok(recorded) = tokio::time::timeout(limit, recorded).await else {
        let what = format!("{steps} steps did not run within {timeout_s} s: is anything being generated?");
        return refuse(StatusCode::GATEWAY_TIMEOUT, "deadline_exceeded", what);
    };
    let Ok(steps) = recorded else {
        return refuse(StatusCode::SERVICE_UNAVAILABLE, "engine_ended", "the engine has ended".into());
    };
    let reports = profiler.reports_of(&steps).await;
    drop(taken);
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

fn refuse(status: StatusCode, code: &str, what: String) -> Response {
    let kind = if status.is_server_error() { "server_error" } else { "invalid_request_error" };
    (status, Json(json!({"error": {"message": what, "type": kind, "code": code}}))).into_response()
}
