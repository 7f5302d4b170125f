//! How long a hop takes on each kind of link, beside what its transport costs without us: what `attention-svc bench links`
//! prints.
//!
//! Both ends are threads of this process, joined by the transport that two processes would use. A round trip is a dispatch
//! of some rows and a combine of as many. All ways take turns in short slices, size by size, so that a machine that grows
//! busy slows all of them; medians are of all slices together.
use std::time::{Duration, Instant};

use super::LinkKind;
use super::pairs::{PairError, Pairs};
use crate::frame::body_crc;

mod ways;

use ways::{OverLink, RawFutex, RawTcp, Waiting, Way};

/// Bytes of the buffer whose checksum is timed.
const CHECKSUM_BYTES: usize = 4 << 20;
/// Round trips of each way and size before any is counted.
const WARM_UP: usize = 20;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Kinds of link.
    pub kinds: Vec<LinkKind>,
    /// Sizes, rows of a hop; each at least 1.
    pub rows: Vec<u32>,
    /// Elements of a row, bf16.
    pub columns: u32,
    /// Time for each way and size.
    pub time: Duration,
    /// Slices that it is spent in.
    pub slices: u32,
}

/// What was measured.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The links asked for, `raw futex`, and `raw tcp` by how it waits: `raw tcp, epoll` as an engine does.
    pub series: Vec<Series>,
    /// Rate of a frame's checksum, bytes/s.
    pub checksum_rate: f64,
}

/// One way over all sizes.
#[derive(Clone, Debug)]
pub struct Series {
    /// For people.
    pub name: String,
    /// Which link; none of a bare transport.
    pub kind: Option<LinkKind>,
    /// In the order asked for.
    pub sizes: Vec<RoundTrips>,
}

/// Round trips of one size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoundTrips {
    /// Rows each way.
    pub rows: u32,
    /// Bytes of these rows, each way.
    pub bytes: usize,
    /// How many were timed.
    pub count: usize,
    /// The fastest tenth took at most so long.
    pub p10: Duration,
    /// Median.
    pub p50: Duration,
    /// Nine tenths took at most so long.
    pub p90: Duration,
}

impl RoundTrips {
    /// Bytes/s while rows travel: those of both ways over the round trip.
    pub fn rate(&self) -> f64 {
        2.0 * self.bytes as f64 / self.p50.as_secs_f64()
    }
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum TimingError {
    /// No sizes, or rows that fit no frame.
    #[error("{0}")]
    Settings(String),
    /// A link did not open.
    #[error(transparent)]
    Pair(#[from] PairError),
    /// A link or a socket broke while it was measured.
    #[error("{way}: {what}")]
    Broken {
        /// Which.
        way: String,
        /// Its own words.
        what: String,
    },
}

/// Measures. Blocks for about `time` for each way and size, three bare transports included.
///
/// # Errors
/// [`TimingError`].
pub fn measure(settings: &Settings) -> Result<Measured, TimingError> {
    let row_bytes = 2 * settings.columns as usize;
    let max_rows = settings.rows.iter().copied().max().unwrap_or(0);
    let fits = super::Limits::body_bytes(max_rows, row_bytes);
    let Some(max_body_bytes) = fits.filter(|bytes| *bytes > 0 && !settings.rows.contains(&0)) else {
        let what = format!(
            "rows {:?} of {} elements: at least 1 each, at most 4 GiB of a frame",
            settings.rows, settings.columns
        );
        return Err(TimingError::Settings(what));
    };
    let pairs = Pairs::new()?;
    let mut ways: Vec<Box<dyn Way>> = vec![Box::new(RawFutex::start(max_body_bytes as usize)?)];
    for kind in &settings.kinds {
        ways.push(Box::new(OverLink::open(&pairs, *kind, max_rows, settings.columns, max_body_bytes)?));
    }
    for waiting in [Waiting::Engine, Waiting::Alone] {
        ways.push(Box::new(RawTcp::connect(waiting, max_body_bytes as usize)?));
    }
    let body = vec![1u8; max_body_bytes as usize];
    let mut series: Vec<Series> =
        ways.iter().map(|way| Series { name: way.name(), kind: way.kind(), sizes: Vec::new() }).collect();
    for rows in &settings.rows {
        let sizes = in_turns(&mut ways, settings, *rows, &body[..*rows as usize * row_bytes])?;
        series.iter_mut().zip(sizes).for_each(|(series, size)| series.sizes.push(size));
    }
    Ok(Measured { series, checksum_rate: checksum_rate() })
}

/// One size over every way, slice by slice.
fn in_turns(
    ways: &mut [Box<dyn Way>],
    settings: &Settings,
    rows: u32,
    body: &[u8],
) -> Result<Vec<RoundTrips>, TimingError> {
    let slice = settings.time / settings.slices.max(1);
    let mut times: Vec<Vec<Duration>> = ways.iter().map(|_| Vec::new()).collect();
    for way in ways.iter_mut() {
        for _ in 0..WARM_UP {
            way.round_trip(rows, body)?;
        }
    }
    for _ in 0..settings.slices.max(1) {
        for (way, times) in ways.iter_mut().zip(&mut times) {
            let begun = Instant::now();
            loop {
                let started = Instant::now();
                way.round_trip(rows, body)?;
                times.push(started.elapsed());
                if begun.elapsed() >= slice {
                    break;
                }
            }
        }
    }
    Ok(times.into_iter().map(|times| of(rows, body.len(), times)).collect())
}

fn of(rows: u32, bytes: usize, mut times: Vec<Duration>) -> RoundTrips {
    times.sort_unstable();
    let at = |part: f64| times[(part * (times.len() - 1) as f64).round() as usize];
    RoundTrips { rows, bytes, count: times.len(), p10: at(0.1), p50: at(0.5), p90: at(0.9) }
}

/// Of a body that lies in the processor's cache or just beside it, as a frame's does that is about to be sent.
fn checksum_rate() -> f64 {
    let bytes = vec![7u8; CHECKSUM_BYTES];
    let mut times: Vec<Duration> = (0..21)
        .map(|_| {
            let begun = Instant::now();
            std::hint::black_box(body_crc(&[std::hint::black_box(&bytes)]));
            begun.elapsed()
        })
        .collect();
    times.sort_unstable();
    CHECKSUM_BYTES as f64 / times[times.len() / 2].as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_is_measured_at_every_size() {
        let kinds = vec![LinkKind::Loopback, LinkKind::Shm, LinkKind::Tcp, LinkKind::Inline];
        let time = Duration::from_millis(4);
        let settings = Settings { kinds: kinds.clone(), rows: vec![1, 8], columns: 64, time, slices: 2 };
        let measured = measure(&settings).unwrap();
        let found: Vec<_> = measured.series.iter().filter_map(|series| series.kind).collect();
        assert_eq!(found, kinds);
        assert_eq!(measured.series.len(), kinds.len() + 3);
        for series in &measured.series {
            let sizes: Vec<_> = series.sizes.iter().map(|size| (size.rows, size.bytes)).collect();
            assert_eq!(sizes, [(1, 128), (8, 1024)], "{}", series.name);
            for size in &series.sizes {
                assert!(size.count >= 2 && size.p10 <= size.p50 && size.p50 <= size.p90, "{series:?}");
                assert!(size.rate() > 0.0);
            }
        }
        assert!(measured.checksum_rate > 0.0);
    }

    #[test]
    fn sizes_that_are_none_are_refused() {
        let settings = |rows: Vec<u32>, columns| {
            let time = Duration::from_millis(1);
            Settings { kinds: vec![LinkKind::Loopback], rows, columns, time, slices: 1 }
        };
        for bad in [settings(vec![], 64), settings(vec![0, 1], 64), settings(vec![1 << 20], 1 << 20)] {
            assert!(matches!(measure(&bad), Err(TimingError::Settings(_))), "{bad:?}");
        }
    }
}
