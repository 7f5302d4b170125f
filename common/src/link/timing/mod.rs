//! How long a hop takes on each kind of link, beside what its transport costs without us: what `attention-svc bench links`
//! prints.
//!
//! Both ends are threads of this process, joined by the transport that two processes would use. A round trip is a dispatch
//! of some rows and a combine of as many. Where the two threads of a way sit decides more than anything else, and left to
//! itself the system decides it anew for every way: so they are told, and everything is measured twice, with both ends on
//! one core and with each on its own.
//!
//! Size by size there are several rounds. In each of them every way is opened anew, with new threads and new memory, warmed
//! up, measured and closed; in every other round they take their turns backwards. A machine that grows busy slows all of
//! them. What is compared is compared within a round, and the median over rounds is what counts.
use std::time::{Duration, Instant};
use std::{fmt, io, thread};

use afd_ffi::cpus;

use super::LinkKind;
use super::pairs::{PairError, Pairs};
use crate::frame::{Checksum, body_sum};

mod raw;
mod ways;

use raw::Waiting;
use ways::{Aligned, Way, Which};

/// Bytes of the buffers whose checksum is timed: one that a core's cache holds, and one that it does not.
const CHECKSUM_BYTES: [usize; 2] = [256 << 10, 4 << 20];
/// Round trips of each way, size and round before any is counted: at most, and at least, where they take long.
const WARM_UP: usize = 40;
const LEAST_WARM_UP: usize = 6;
/// Round trips that are counted at least.
const LEAST: usize = 5;

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
    /// Rounds that it is spent in; at least 1.
    pub rounds: u32,
}

/// Where the two threads of a way sit. What works for them beside (a writer of what a socket did not take) is not told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Both on the same core, as the system likes to put threads that wake each other.
    OneCore,
    /// Each on its own. Whoever is woken there may have to be fetched from a sleep of the core's own.
    TwoCores,
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OneCore => "both ends on one core",
            Self::TwoCores => "each end on a core of its own",
        })
    }
}

/// CPUs of a way's threads.
#[derive(Clone, Copy, Debug)]
struct Seats {
    near: usize,
    far: usize,
}

impl Seats {
    /// The calling thread is the far end's. It was tried before whether this CPU can be had.
    fn far(self) {
        let _ = cpus::keep_this_thread_on(self.far);
    }
}

/// What was measured.
#[derive(Clone, Debug)]
pub struct Measured {
    /// By where the threads sat; without [`Placement::TwoCores`] where there is but one.
    pub placed: Vec<Placed>,
    /// How fast bodies are summed.
    pub checksums: Vec<ChecksumRate>,
}

/// One kind of sum over a body of one size.
#[derive(Clone, Copy, Debug)]
pub struct ChecksumRate {
    /// Which.
    pub checksum: Checksum,
    /// Of the body.
    pub bytes: usize,
    /// Bytes/s.
    pub rate: f64,
}

/// All ways with their threads in one placement.
#[derive(Clone, Debug)]
pub struct Placed {
    /// Where they sat.
    pub placement: Placement,
    /// The links asked for, `raw futex`, and `raw tcp` by how it waits: `raw tcp, epoll` as an engine does.
    pub series: Vec<Series>,
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

/// Round trips of one size: medians over rounds of what is said of each of them.
#[derive(Clone, Debug, PartialEq)]
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
    /// Every round's median, in the order of rounds.
    pub rounds: Vec<Duration>,
}

/// How far rounds lie apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// A quarter of them is at most so much.
    pub lower: f64,
    /// Half of them.
    pub median: f64,
    /// Three quarters of them.
    pub upper: f64,
}

impl Spread {
    /// Of at least one value.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_unstable_by(f64::total_cmp);
        let at = |part: f64| values[(part * (values.len() - 1) as f64).round() as usize];
        Self { lower: at(0.25), median: at(0.5), upper: at(0.75) }
    }
}

impl RoundTrips {
    /// Of the rounds' medians, microseconds.
    pub fn spread_us(&self) -> Spread {
        Spread::of(self.rounds.iter().map(|round| round.as_secs_f64() * 1e6))
    }

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
    /// Threads cannot be told where to run.
    #[error("keeping threads on a CPU: {0}")]
    Seats(#[from] io::Error),
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

/// Measures. Blocks for about `time` for each way, size and placement, three bare transports included, and for as long as it
/// takes to open them.
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
    let links = settings.kinds.iter().map(|kind| Which::Link(*kind));
    let bare = [Waiting::Engine, Waiting::Alone].map(Which::Tcp);
    let ways: Vec<Which> = std::iter::once(Which::Futex).chain(links).chain(bare).collect();
    let series = || ways.iter().map(|way| Series { name: way.name(), kind: way.kind(), sizes: Vec::new() });
    let all_seats = seats()?;
    let mut placed: Vec<Placed> = all_seats
        .iter()
        .map(|(placement, _)| Placed { placement: *placement, series: series().collect() })
        .collect();
    let body = Aligned::new(max_body_bytes as usize);
    for rows in &settings.rows {
        let body = &body.bytes()[..*rows as usize * row_bytes];
        let sizes = in_rounds(&ways, &all_seats, settings, *rows, body)?;
        for (Placed { series, .. }, sizes) in placed.iter_mut().zip(sizes) {
            series.iter_mut().zip(sizes).for_each(|(series, size)| series.sizes.push(size));
        }
    }
    Ok(Measured { placed, checksums: checksums() })
}

/// Where to put the two ends: on the last two CPUs there are, since the first has most of what else goes on.
fn seats() -> Result<Vec<(Placement, Seats)>, io::Error> {
    let cpus = cpus::of_this_thread()?;
    let (Some(near), two) = (cpus.last(), cpus.len() > 1) else { return Err(io::ErrorKind::NotFound.into()) };
    let one = [(Placement::OneCore, Seats { near: *near, far: *near })];
    let two = two.then(|| (Placement::TwoCores, Seats { near: *near, far: cpus[cpus.len() - 2] }));
    Ok(one.into_iter().chain(two).collect())
}

/// One size over every way, round by round: by placement, then by way.
fn in_rounds(
    ways: &[Which],
    all_seats: &[(Placement, Seats)],
    settings: &Settings,
    rows: u32,
    body: &[u8],
) -> Result<Vec<Vec<RoundTrips>>, TimingError> {
    let num_rounds = settings.rounds.max(1);
    let mut rounds: Vec<Vec<Vec<Round>>> = vec![vec![Vec::new(); ways.len()]; all_seats.len()];
    for round in 0..num_rounds {
        let pairs = Pairs::new()?;
        let mut turns: Vec<usize> = (0..ways.len()).collect();
        if round % 2 == 1 {
            turns.reverse();
        }
        for ((_, seats), rounds_of_ways) in all_seats.iter().zip(&mut rounds) {
            for &at in &turns {
                let mut way = ways[at].open(&pairs, rows, settings.columns, *seats)?;
                let time = settings.time / num_rounds;
                let measured = thread::scope(|scope| {
                    let near = scope.spawn(|| {
                        cpus::keep_this_thread_on(seats.near)?;
                        Round::of(&mut *way, rows, body, time)
                    });
                    near.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                });
                rounds_of_ways[at].push(measured?);
            }
        }
    }
    let over = |rounds: &Vec<Round>| over(rows, body.len(), rounds);
    Ok(rounds.iter().map(|ways| ways.iter().map(over).collect()).collect())
}

/// One way in one round.
#[derive(Clone)]
struct Round {
    count: usize,
    p10: Duration,
    p50: Duration,
    p90: Duration,
}

impl Round {
    fn of(way: &mut dyn Way, rows: u32, body: &[u8], time: Duration) -> Result<Self, TimingError> {
        let begun = Instant::now();
        for trip in 0..WARM_UP {
            if trip >= LEAST_WARM_UP && begun.elapsed() >= time {
                break;
            }
            way.round_trip(rows, body)?;
        }
        let (begun, mut times) = (Instant::now(), Vec::new());
        while times.len() < LEAST || begun.elapsed() < time {
            let started = Instant::now();
            way.round_trip(rows, body)?;
            times.push(started.elapsed());
        }
        times.sort_unstable();
        let at = |part: f64| times[(part * (times.len() - 1) as f64).round() as usize];
        Ok(Self { count: times.len(), p10: at(0.1), p50: at(0.5), p90: at(0.9) })
    }
}

fn over(rows: u32, bytes: usize, rounds: &[Round]) -> RoundTrips {
    let over = |what: fn(&Round) -> Duration| median(&rounds.iter().map(what).collect::<Vec<_>>());
    RoundTrips {
        rows,
        bytes,
        count: rounds.iter().map(|round| round.count).sum(),
        p10: over(|round| round.p10),
        p50: over(|round| round.p50),
        p90: over(|round| round.p90),
        rounds: rounds.iter().map(|round| round.p50).collect(),
    }
}

/// The one in the middle, of an even number the larger of two.
fn median<T: PartialOrd + Copy>(values: &[T]) -> T {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(|a, b| a.partial_cmp(b).unwrap_or(std::cmp::Ordering::Equal));
    sorted[sorted.len() / 2]
}

/// Of bodies that one core's cache holds and does not hold.
fn checksums() -> Vec<ChecksumRate> {
    let kinds = [Checksum::Crc32c, Checksum::Sum64];
    kinds
        .into_iter()
        .flat_map(|checksum| CHECKSUM_BYTES.map(|bytes| checksum_rate(checksum, bytes)))
        .collect()
}

fn checksum_rate(checksum: Checksum, bytes: usize) -> ChecksumRate {
    let body = Aligned::new(bytes);
    let times: Vec<Duration> = (0..41)
        .map(|_| {
            let begun = Instant::now();
            std::hint::black_box(body_sum(checksum, &[std::hint::black_box(&body.bytes()[..bytes])]));
            begun.elapsed()
        })
        .collect();
    ChecksumRate { checksum, bytes, rate: bytes as f64 / median(&times).as_secs_f64() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_is_measured_at_every_size() {
        let kinds = vec![LinkKind::Loopback, LinkKind::Shm, LinkKind::Tcp, LinkKind::Inline];
        let time = Duration::from_millis(4);
        let settings = Settings { kinds: kinds.clone(), rows: vec![1, 8], columns: 64, time, rounds: 3 };
        let measured = measure(&settings).unwrap();
        assert_eq!(measured.placed.len(), cpus::of_this_thread().unwrap().len().min(2));
        for Placed { placement, series } in &measured.placed {
            let found: Vec<_> = series.iter().filter_map(|series| series.kind).collect();
            assert_eq!((found, series.len()), (kinds.clone(), kinds.len() + 3), "{placement}");
            for series in series {
                let sizes: Vec<_> = series.sizes.iter().map(|size| (size.rows, size.bytes)).collect();
                assert_eq!(sizes, [(1, 128), (8, 1024)], "{}", series.name);
                for size in &series.sizes {
                    assert!(size.count >= 3 * LEAST && size.rate() > 0.0, "{series:?}");
                    assert!(size.p10 <= size.p50 && size.p50 <= size.p90, "{series:?}");
                    assert!(size.rounds.len() == 3 && median(&size.rounds) == size.p50, "{series:?}");
                }
            }
        }
        assert_eq!(measured.checksums.len(), 4);
        assert!(measured.checksums.iter().all(|checksum| checksum.rate > 0.0));
    }

    #[test]
    fn sizes_that_are_none_are_refused() {
        let settings = |rows: Vec<u32>, columns| {
            let time = Duration::from_millis(1);
            Settings { kinds: vec![LinkKind::Loopback], rows, columns, time, rounds: 1 }
        };
        for bad in [settings(vec![], 64), settings(vec![0, 1], 64), settings(vec![1 << 20], 1 << 20)] {
            assert!(matches!(measure(&bad), Err(TimingError::Settings(_))), "{bad:?}");
        }
    }
}
