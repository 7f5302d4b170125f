//! What the way to a rank costs, measured by `FfnControlService.Probe`: latency, bandwidth, and how far its clock is from
//! ours. For `ffn-svc probe` and `attention-svc doctor`.
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use afd_common::proto::v1;
use afd_common::proto::v1::ffn_control_service_client::FfnControlServiceClient;
use serde_json::{Value, json};
use tonic::Status;

use super::dial::DialedChannel;
use crate::session::control::MAX_MESSAGE_BYTES;

/// Round trips of next to nothing; their median is the latency.
const SMALL: usize = 21;
const SMALL_BYTES: usize = 8;
/// Round trips of what makes the bandwidth visible.
const LARGE: usize = 5;
const LARGE_BYTES: usize = 4 << 20;

/// An edge as probed. Rows on a `shm` or `tcp` link take a shorter way than a probe, which is a gRPC call.
#[derive(Clone, Debug)]
pub struct Edge {
    /// Median round trip of an empty call.
    pub round_trip: Duration,
    /// Bytes/s in one direction, as far as one call at a time can show it; `None` where it was not asked for.
    pub bandwidth: Option<f64>,
    /// How far the rank's clock is ahead of ours, microseconds; known to half of the fastest round trip.
    pub clock_ahead_us: i64,
    /// Half of the fastest round trip.
    pub clock_within: Duration,
    /// What the rank says of itself, without the payload.
    pub answer: v1::ProbeResponse,
}

impl Edge {
    /// One way.
    pub fn latency_us(&self) -> f64 {
        self.round_trip.as_secs_f64() / 2.0 * 1e6
    }

    /// For programs.
    pub fn json(&self) -> Value {
        json!({
            "round_trip_us": self.round_trip.as_secs_f64() * 1e6,
            "latency_us": self.latency_us(),
            "bandwidth_bytes_per_s": self.bandwidth,
            "clock_ahead_us": self.clock_ahead_us,
            "clock_within_us": self.clock_within.as_secs_f64() * 1e6,
        })
    }
}

/// Probes a rank; without `bandwidth` only with small calls. The caller sets the deadline.
///
/// # Errors
/// The rank's status, or the transport's.
pub async fn measure(channel: DialedChannel, bandwidth: bool) -> Result<Edge, Status> {
    let mut client = FfnControlServiceClient::new(channel)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    // The first call pays for what the others find ready.
    call(&mut client, SMALL_BYTES).await?;
    let mut small = Vec::with_capacity(SMALL);
    for _ in 0..SMALL {
        small.push(call(&mut client, SMALL_BYTES).await?);
    }
    small.sort_unstable_by_key(|call| call.took);
    let mut fastest = small[0].clone();
    fastest.answer.payload.clear();
    let round_trip = small[SMALL / 2].took;
    let bandwidth = match bandwidth {
        true => Some(rate(&mut client, round_trip).await?),
        false => None,
    };
    Ok(Edge {
        round_trip,
        bandwidth,
        clock_ahead_us: fastest.answer.answered_at_us as i64 - fastest.middle_us,
        clock_within: fastest.took / 2,
        answer: fastest.answer,
    })
}

#[derive(Clone)]
struct Call {
    took: Duration,
    /// Our clock half-way, microseconds since the Unix epoch.
    middle_us: i64,
    answer: v1::ProbeResponse,
}

async fn call(client: &mut FfnControlServiceClient<DialedChannel>, bytes: usize) -> Result<Call, Status> {
    let request = v1::ProbeRequest { payload: vec![7; bytes] };
    let (clock, begun) = (SystemTime::now(), Instant::now());
    let answer = client.probe(request).await?.into_inner();
    let took = begun.elapsed();
    if answer.payload.len() != bytes {
        let what = format!("a probe of {bytes} bytes was answered with {}", answer.payload.len());
        return Err(Status::data_loss(what));
    }
    let middle = (clock + took / 2).duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(Call { took, middle_us: middle.as_micros() as i64, answer })
}

/// The bytes of both ways over what they add to an empty call.
async fn rate(client: &mut FfnControlServiceClient<DialedChannel>, empty: Duration) -> Result<f64, Status> {
    let mut large = Vec::with_capacity(LARGE);
    for _ in 0..LARGE {
        large.push(call(client, LARGE_BYTES).await?.took);
    }
    large.sort_unstable();
    let took = large[LARGE / 2];
    // Where the difference is lost in noise the whole call still is a bound.
    let added = took.checked_sub(empty).filter(|added| *added > took / 10).unwrap_or(took);
    Ok(2.0 * LARGE_BYTES as f64 / added.as_secs_f64())
}
