//! Where a decode step's time goes, by load: what servers of this kind count in `/metrics`, looked at twice while nothing
//! but decoding happens. `plan calibrate` reads the points.
//!
//! Of every level a wave of its own is sent: as many requests as the level has in flight, all at once. The first look comes
//! when each of them has its first token, the second when the first of them ends, so that no prompt falls between. Counters
//! are sums over steps, and times are taken to be straight lines over rows, so the mean time belongs to the mean number of
//! rows even where some steps have fewer.
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::AcqRel};

use serde::Serialize;
use tokio::sync::Notify;

use super::BenchError;
use super::exposition::Samples;
use super::levels::Prompts;
use super::request::Target;
use crate::plan::calibrate::{AttentionPoint, FfnPoint, Fits, Measured as Points, StepPoint};
use crate::plan::layout::Layout;

/// Fewest tokens of an answer with which the two looks are far enough apart.
pub(super) const MIN_OUTPUT_LEN: usize = 8;

/// One level, per layer and stage.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct LayerTimes {
    /// Requests in flight.
    pub(super) concurrency: usize,
    /// Decode steps between the two looks.
    pub(super) steps: f64,
    /// Tokens of a sequence, half-way through its answer.
    pub(super) context: u64,
    /// Tokens of a step.
    pub(super) batch: f64,
    /// Stages of a step.
    pub(super) stages: u32,
    /// Rows of a hop.
    pub(super) rows: f64,
    /// Attention, the embedding included, microseconds a layer and stage.
    pub(super) attention_us: f64,
    /// Sending a hop and waiting for its answer with nothing else to do, microseconds a layer and stage.
    pub(super) ffn_wait_us: f64,
    /// A whole step, milliseconds.
    pub(super) step_ms: f64,
    /// FFN ranks; none when the FFN is in the server's process.
    pub(super) ffn: Option<FfnTimes>,
}

/// The slowest FFN rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct FfnTimes {
    /// Shards of every layer.
    pub(super) shards: u32,
    /// Attention ranks that have joined it.
    pub(super) attention_ranks: u32,
    /// Rows of a batch, those of all attention ranks.
    pub(super) pool_rows: f64,
    /// Computing a batch, microseconds a layer.
    pub(super) compute_us: f64,
}

/// Sends the wave and looks.
///
/// # Errors
/// [`BenchError::Server`] when the server does not count what is needed, or a request fails.
pub(super) async fn measure(
    target: &Target,
    prompts: &Prompts,
    concurrency: usize,
) -> Result<LayerTimes, BenchError> {
    let (begun, all_begun) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let (ended, asked) = (Arc::new(Notify::new()), prompts.take(concurrency));
    let asks = asked.into_iter().map(|prompt| {
        let (target, begun, all_begun, ended) =
            (target.clone(), Arc::clone(&begun), Arc::clone(&all_begun), Arc::clone(&ended));
        tokio::spawn(async move {
            let first = || {
                if begun.fetch_add(1, AcqRel) + 1 == concurrency {
                    all_begun.notify_one();
                }
            };
            let answer = target.ask(target.write(&prompt), first).await;
            ended.notify_one();
            answer.map(drop)
        })
    });
    let asks: Vec<_> = asks.collect();
    let looks = async {
        tokio::select! {
            () = all_begun.notified() => {}
            () = ended.notified() => return Err(failed(target, "a request ended before all had begun: --output-len is too small for this concurrency".into())),
        }
        let before = Look::take(target).await?;
        ended.notified().await;
        Ok((before, Look::take(target).await?))
    };
    let looks = looks.await;
    for ask in asks {
        let answered = ask.await.map_err(|error| failed(target, error.to_string()))?;
        answered.map_err(|what| failed(target, what))?;
    }
    let (before, after) = looks?;
    between(&before, &after, concurrency, prompts.middle()).map_err(|what| failed(target, what))
}

fn failed(target: &Target, what: String) -> BenchError {
    BenchError::Server { url: target.url().to_owned(), what }
}

/// What all processes of a deployment had counted at one moment.
struct Look {
    attention: Samples,
    ffn: Vec<Samples>,
}

impl Look {
    async fn take(target: &Target) -> Result<Self, BenchError> {
        let said = |text: Result<String, String>| {
            text.map(|text| Samples::parse(&text)).map_err(|what| failed(target, what))
        };
        let attention = said(target.own_metrics().await)?;
        let mut ffn = Vec::new();
        for peer in attention.labels("afd_ffn_peer", "address") {
            // The FFN of the monolithic mode has no address.
            if peer.contains(':') {
                ffn.push(said(target.ffn_metrics(&peer).await)?);
            }
        }
        Ok(Self { attention, ffn })
    }
}

/// What happened between two looks; what is missing, in words.
fn between(before: &Look, after: &Look, concurrency: usize, context: u64) -> Result<LayerTimes, String> {
    let grown = |name: &str, label: Option<(&str, &str)>| {
        let value =
            |samples: &Samples| samples.sum(name, label).ok_or_else(|| format!("/metrics has no {name}"));
        Ok::<_, String>(value(&after.attention)? - value(&before.attention)?)
    };
    let part = |part: &str| grown("afd_engine_seconds_total", Some(("part", part)));
    let (steps, hops) = (grown("afd_steps_total", None)?, grown("afd_hops_total", None)?);
    if steps < 1.0 || hops < 1.0 {
        return Err("no whole step fell between two looks at /metrics: give a larger --output-len".into());
    }
    let (rows, batch) =
        (grown("afd_hop_rows_total", None)? / hops, grown("afd_tokens_generated_total", None)? / steps);
    let per_hop = |seconds: f64| seconds / hops * 1e6;
    Ok(LayerTimes {
        concurrency,
        steps,
        context,
        batch,
        stages: (batch / rows).round().max(1.0) as u32,
        rows,
        attention_us: per_hop(part("attention")?),
        ffn_wait_us: per_hop(part("dispatch")? + part("ffn_wait")?),
        step_ms: part("step")? / steps * 1e3,
        ffn: ffn_between(before, after)?,
    })
}

/// A step waits for the slowest rank.
fn ffn_between(before: &Look, after: &Look) -> Result<Option<FfnTimes>, String> {
    if before.ffn.len() != after.ffn.len() {
        return Err("an FFN rank came or went while it was measured".into());
    }
    let shards = after.attention.labels("afd_ffn_peer", "shard");
    let shards = shards.iter().filter_map(|shard| shard.split_once('/')?.1.parse().ok()).max().unwrap_or(1);
    let of_rank = |(before, after): (&Samples, &Samples)| {
        let grown = |name: &str| Some(after.sum(name, None)? - before.sum(name, None)?);
        let batches = grown("afd_ffn_compute_seconds_count").filter(|batches| *batches > 0.0)?;
        Some(FfnTimes {
            shards,
            attention_ranks: after.sum("afd_ffn_sessions", None)? as u32,
            pool_rows: grown("afd_ffn_batch_rows_sum")? / batches,
            compute_us: grown("afd_ffn_compute_seconds_sum")? / batches * 1e6,
        })
    };
    let ranks = before.ffn.iter().zip(&after.ffn).filter_map(of_rank);
    Ok(ranks.max_by(|a, b| a.compute_us.total_cmp(&b.compute_us)))
}

/// As `plan calibrate` reads them. A step is told only where one attention rank has the FFN to itself: another one's rows
/// would be in its time and not in its layout.
pub(super) fn points(levels: &[LayerTimes]) -> Points {
    let mut points = Points::default();
    for level in levels {
        points.attention.push(AttentionPoint {
            rows: level.rows,
            context: level.context,
            layer_us: level.attention_us,
        });
        match &level.ffn {
            Some(ffn) => {
                points.ffn.push(FfnPoint {
                    pool_rows: ffn.pool_rows,
                    ranks: ffn.shards,
                    layer_us: ffn.compute_us,
                });
                if ffn.attention_ranks == 1 {
                    let layout = Layout::Afd { attention: 1, ffn: ffn.shards, stages: level.stages };
                    points.steps.push(StepPoint {
                        fits: Fits::Exchange,
                        layout,
                        batch_per_rank: level.batch,
                        context: level.context,
                        step_ms: level.step_ms,
                    });
                }
            }
            // Nothing overlaps with the FFN of the same process when there is one stage.
            None if level.stages == 1 => {
                points.ffn.push(FfnPoint { pool_rows: level.rows, ranks: 1, layer_us: level.ffn_wait_us });
            }
            None => {}
        }
    }
    points
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attention(steps: u32, us_per_hop: f64) -> String {
        let (hops, s) = (steps * 4, f64::from(steps * 4) * us_per_hop * 1e-6);
        format!(
            "afd_steps_total {steps}\nafd_hops_total {hops}\nafd_hop_rows_total {}\nafd_tokens_generated_total {}\n\
             afd_engine_seconds_total{{part=\"attention\"}} {s}\nafd_engine_seconds_total{{part=\"dispatch\"}} 0\n\
             afd_engine_seconds_total{{part=\"ffn_wait\"}} {s}\nafd_engine_seconds_total{{part=\"step\"}} {}\n\
             afd_ffn_peer{{address=\"127.0.0.1:7001\",shard=\"0/2\",kind=\"shm\"}} 1\n",
            hops * 8,
            steps * 8,
            3.0 * s,
        )
    }

    fn ffn(batches: u32) -> String {
        format!(
            "afd_ffn_sessions 1\nafd_ffn_compute_seconds_sum {}\nafd_ffn_compute_seconds_count {batches}\n\
             afd_ffn_batch_rows_sum {}\n",
            f64::from(batches) * 50e-6,
            batches * 8
        )
    }

    fn look(steps: u32) -> Look {
        let ffn = vec![Samples::parse(&ffn(steps * 4))];
        Look { attention: Samples::parse(&attention(steps, 30.0)), ffn }
    }

    #[test]
    fn what_lies_between_two_looks_becomes_points() {
        let times = between(&look(10), &look(30), 8, 96).unwrap();
        assert_eq!((times.steps, times.stages, times.rows, times.batch), (20.0, 1, 8.0, 8.0));
        let near = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-9;
        assert!(near(times.attention_us, 30.0) && near(times.step_ms, 0.36), "{times:?}");
        let points = points(&[times]);
        assert!(near(points.ffn[0].layer_us, 50.0) && points.ffn[0].ranks == 2, "{points:?}");
        let layout = Layout::Afd { attention: 1, ffn: 2, stages: 1 };
        assert_eq!((points.steps[0].layout, points.steps[0].fits), (layout, Fits::Exchange));
    }

    #[test]
    fn looks_at_another_server_or_too_close_together_say_so() {
        let none = Look { attention: Samples::parse("other_total 1\n"), ffn: vec![] };
        assert!(between(&none, &none, 1, 1).unwrap_err().contains("afd_steps_total"));
        assert!(between(&look(3), &look(3), 1, 1).unwrap_err().contains("--output-len"));
    }
}
