//! Times of replayed graphs.
use afd_gpu::{GpuError, Graph, Stream};

use crate::Result;

/// Captures what `enqueue` does and gives the time of one replay, µs: the median of seven runs of `replays`.
pub(crate) fn graph_us(
    stream: &Stream,
    replays: usize,
    enqueue: impl FnOnce() -> std::result::Result<(), GpuError>,
) -> Result<f64> {
    let mut graph = Graph::capture(stream, enqueue)?;
    for _ in 0..2 {
        graph.launch()?;
    }
    stream.synchronize()?;
    let mut times = Vec::new();
    for _ in 0..7 {
        let begin = stream.mark(true)?;
        for _ in 0..replays {
            graph.launch()?;
        }
        let end = stream.mark(true)?;
        stream.synchronize()?;
        times.push(end.us_since(&begin)? / replays as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
