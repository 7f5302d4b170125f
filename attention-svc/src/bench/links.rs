//! `attention-svc bench links`: round trips and bandwidth of every kind of link on this machine, beside a bare socket and a
//! bare futex in the same run.
use std::fmt::Write as _;
use std::path::PathBuf;

use afd_common::config::units::Span;
use afd_common::link::LinkKind;
use afd_common::link::timing::{self, Measured, Placed, Placement, RoundTrips, Series, Settings, Spread};
use afd_common::process::out_file::JsonOut;
use clap::Args;
use serde_json::{Value, json};

use super::BenchError;
use super::report::table;
use crate::plan::calibrate::{LinkName, LinkPoint, Measured as Points};

/// Rounds in which every way gets its turn at every size.
const ROUNDS: u32 = 11;

/// Measure the links of this machine.
#[derive(Clone, Debug, Args)]
pub(super) struct LinksArgs {
    /// Kinds of link
    #[arg(long, value_name = "KIND,…", value_delimiter = ',', value_parser = parse_kind, default_value = "loopback,shm,tcp,inline")]
    kinds: Vec<LinkKind>,
    /// Sizes, rows of a hop, up to 16384
    #[arg(
        long, value_name = "N,…", value_delimiter = ',', default_value = "1,8,64,256,1024",
        value_parser = clap::value_parser!(u32).range(1..=16384)
    )]
    rows: Vec<u32>,
    /// Elements of a row, of two bytes each, up to 65536
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..=65536))]
    columns: u32,
    /// Time for each link and size, and each of two placements of its ends
    #[arg(long, value_name = "TIME", default_value = "300ms", value_parser = Span::positive)]
    time: Span,
    /// Kind that stands for the planner's link within a fast domain (scale_up) in the points that `plan calibrate` reads
    #[arg(long, value_name = "KIND", value_parser = parse_kind, default_value = "shm")]
    scale_up: LinkKind,
    /// Also write everything as JSON; - is standard output, without the table
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn parse_kind(text: &str) -> Result<LinkKind, String> {
    [LinkKind::Loopback, LinkKind::Shm, LinkKind::Tcp, LinkKind::Inline]
        .into_iter()
        .find(|kind| kind.to_string() == text)
        .ok_or_else(|| "expected loopback, shm, tcp or inline".into())
}

/// Measures and prints.
///
/// # Errors
/// [`BenchError`].
pub(super) async fn run(args: LinksArgs) -> Result<(), BenchError> {
    let not_written = BenchError::write(args.json.as_deref());
    let out = JsonOut::open(args.json.as_deref()).map_err(&not_written)?;
    let settings = Settings {
        kinds: args.kinds,
        rows: args.rows,
        columns: args.columns,
        time: args.time.0,
        rounds: ROUNDS,
    };
    let asked = settings.clone();
    let measured = tokio::task::spawn_blocking(move || timing::measure(&asked)).await;
    let measured = measured.map_err(|error| BenchError::Links(error.to_string()))?;
    let measured = measured.map_err(|error| BenchError::Links(error.to_string()))?;
    if out.write(&json(&settings, &measured, args.scale_up)).map_err(not_written)? {
        println!("{}", text(&settings, &measured));
    }
    Ok(())
}

/// One way's times over another's in the same round, size by size.
struct Ratio {
    of: String,
    over: String,
    sizes: Vec<Spread>,
}

/// What a link costs over its bare transport, and a slow link over a fast one; those whose sides were measured.
fn ratios(placed: &Placed) -> Vec<Ratio> {
    let find = |name: &str| placed.series.iter().find(|series| series.name == name);
    let pairs =
        [("shm", "raw futex"), ("tcp", "raw tcp, epoll"), ("tcp", "raw tcp"), ("inline", "shm")].into_iter();
    let ratio = |(of, over): (&str, &str)| {
        let both = find(of)?.sizes.iter().zip(&find(over)?.sizes);
        let in_a_round = |(of, over): (&RoundTrips, &RoundTrips)| {
            let both = of.rounds.iter().zip(&over.rounds);
            Spread::of(both.map(|(of, over)| of.as_secs_f64() / over.as_secs_f64()))
        };
        Some(Ratio { of: of.into(), over: over.into(), sizes: both.map(in_a_round).collect() })
    };
    pairs.filter_map(ratio).collect()
}

fn json(settings: &Settings, measured: &Measured, scale_up: LinkKind) -> Value {
    let micros = |time: std::time::Duration| time.as_secs_f64() * 1e6;
    let size = |size: &RoundTrips| {
        json!({
            "rows": size.rows,
            "bytes": size.bytes,
            "count": size.count,
            "round_trip_us": {"p10": micros(size.p10), "p50": micros(size.p50), "p90": micros(size.p90)},
            "rounds_us": size.rounds.iter().map(|round| micros(*round)).collect::<Vec<_>>(),
            "bytes_per_s": size.rate(),
        })
    };
    let series = |series: &Series| json!({"name": series.name, "sizes": series.sizes.iter().map(size).collect::<Vec<_>>()});
    let spread = |spread: &Spread| json!({"p25": spread.lower, "p50": spread.median, "p75": spread.upper});
    let ratio = |ratio: &Ratio| {
        let sizes: Vec<_> = ratio.sizes.iter().map(spread).collect();
        json!({"of": ratio.of, "over": ratio.over, "sizes": sizes})
    };
    let placed = |placed: &Placed| {
        json!({
            "placement": match placed.placement {
                Placement::OneCore => "one_core",
                Placement::TwoCores => "two_cores",
            },
            "series": placed.series.iter().map(series).collect::<Vec<_>>(),
            "ratios": ratios(placed).iter().map(ratio).collect::<Vec<_>>(),
        })
    };
    let checksum = |of: &timing::ChecksumRate| json!({"name": of.checksum.to_string(), "bytes": of.bytes, "bytes_per_s": of.rate});
    json!({
        "columns": settings.columns,
        "dtype": "bfloat16",
        "rounds": settings.rounds,
        "checksums": measured.checksums.iter().map(checksum).collect::<Vec<_>>(),
        "placed": measured.placed.iter().map(placed).collect::<Vec<_>>(),
        "points": points(measured, scale_up),
    })
}

/// A hop's way there is half of its round trip, in the placement that is the faster one for its size: where engines sit is
/// the system's business, and it likes to put those together that gain by it.
fn points(measured: &Measured, scale_up: LinkKind) -> Points {
    let of_kind =
        |placed: &'_ Placed| placed.series.iter().find(|series| series.kind == Some(scale_up)).cloned();
    let placed: Vec<Series> = measured.placed.iter().filter_map(of_kind).collect();
    let sizes = placed.first().map_or(0, |series| series.sizes.len());
    let fastest = |at: usize| placed.iter().map(|series| &series.sizes[at]).min_by_key(|size| size.p50);
    let point = |size: &RoundTrips| LinkPoint {
        link: LinkName::ScaleUp,
        bytes: size.bytes as f64,
        one_way_us: size.p50.as_secs_f64() / 2.0 * 1e6,
    };
    Points { links: (0..sizes).filter_map(fastest).map(point).collect(), ..Points::default() }
}

fn text(settings: &Settings, measured: &Measured) -> String {
    let mut out = format!(
        "rows of {} bf16 there and back between two threads, over the transport of two processes\n\
         medians of {} rounds, with new connections and threads in each; behind them the middle half of the rounds\n",
        settings.columns, settings.rounds
    );
    for placed in &measured.placed {
        let _ = writeln!(out, "\n{}", placed.placement);
        out.push_str(&text_of(settings, placed));
    }
    out.push_str("\nchecksums of a body, GB/s\n");
    for of in &measured.checksums {
        let _ = writeln!(out, "{}, {} KiB: {}", of.checksum, of.bytes >> 10, digits(of.rate / 1e9));
    }
    out
}

fn text_of(settings: &Settings, placed: &Placed) -> String {
    let mut out = String::new();
    let heads: Vec<String> = settings.rows.iter().map(|rows| format!("{rows} rows")).collect();
    let mut part = |what: &str, rows: Vec<Vec<String>>| {
        let heads: Vec<&str> = std::iter::once(what).chain(heads.iter().map(String::as_str)).collect();
        out.push_str(&table(&heads, rows));
    };
    let of_series = |cell: fn(&RoundTrips) -> String| {
        let row = |series: &Series| {
            std::iter::once(series.name.clone()).chain(series.sizes.iter().map(cell)).collect()
        };
        placed.series.iter().map(row).collect()
    };
    part("round trip, µs", of_series(|size| spread(&size.spread_us())));
    part("both ways, GB/s", of_series(|size| digits(size.rate() / 1e9)));
    let row = |ratio: Ratio| {
        let cells = ratio.sizes.iter().map(spread);
        std::iter::once(format!("{} / {}", ratio.of, ratio.over)).chain(cells).collect()
    };
    part("in the same round", ratios(placed).into_iter().map(row).collect());
    out
}

fn spread(spread: &Spread) -> String {
    format!("{} ({}–{})", digits(spread.median), digits(spread.lower), digits(spread.upper))
}

/// Three that matter.
fn digits(value: f64) -> String {
    match value {
        v if v < 10.0 => format!("{v:.2}"),
        v if v < 100.0 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use afd_common::frame::Checksum;

    use super::*;

    fn measured() -> Measured {
        // In the second round everything takes twice as long, in the third the larger size of a link half as long again.
        let size = |bytes: usize, us: u64, is_link: bool| {
            let slow = if is_link && bytes > 4096 { 3 } else { 2 };
            let rounds =
                [2 * us, 4 * us, slow * us].map(|half_us| Duration::from_nanos(half_us * 500)).to_vec();
            let time = Duration::from_micros(us);
            let rows = (bytes / 4096) as u32;
            RoundTrips { rows, bytes, count: 9, p10: time, p50: time, p90: time, rounds }
        };
        let series = |name: &str, kind: Option<LinkKind>, small, large| Series {
            name: name.into(),
            kind,
            sizes: vec![size(4096, small, kind.is_some()), size(1 << 20, large, kind.is_some())],
        };
        let all = |factor: u64| {
            vec![
                series("raw futex", None, 10, 200),
                series("shm", Some(LinkKind::Shm), 14 * factor, 300 / factor),
                series("tcp", Some(LinkKind::Tcp), 24, 700),
                series("inline", Some(LinkKind::Inline), 100, 1400),
                series("raw tcp, epoll", None, 21, 560),
                series("raw tcp", None, 20, 500),
            ]
        };
        Measured {
            placed: vec![
                Placed { placement: Placement::OneCore, series: all(1) },
                Placed { placement: Placement::TwoCores, series: all(3) },
            ],
            checksums: vec![timing::ChecksumRate { checksum: Checksum::Sum64, bytes: 1 << 18, rate: 30e9 }],
        }
    }

    fn settings() -> Settings {
        Settings { kinds: vec![], rows: vec![1, 256], columns: 2048, time: Duration::ZERO, rounds: 3 }
    }

    #[test]
    fn ratios_are_of_the_same_round_and_size() {
        let told = |r: Ratio| {
            let [small, large] = &r.sizes[..] else { panic!("two sizes") };
            format!("{}/{}: {:.2}, {:.2}", r.of, r.over, small.median, large.median)
        };
        let found: Vec<_> = ratios(&measured().placed[0]).into_iter().map(told).collect();
        let expected = [
            "shm/raw futex: 1.40, 1.50",
            "tcp/raw tcp, epoll: 1.14, 1.25",
            "tcp/raw tcp: 1.20, 1.40",
            "inline/shm: 7.14, 4.67",
        ];
        assert_eq!(found, expected);
        let text = text(&settings(), &measured());
        let line = text.lines().find(|line| line.starts_with("tcp / raw tcp ")).unwrap();
        let cells: Vec<_> = line.split_whitespace().skip(4).collect();
        assert_eq!(cells, ["1.20", "(1.20–1.20)", "1.40", "(1.40–2.10)"], "{text}");
        assert!(text.contains("\neach end on a core of its own\n"), "{text}");
        assert!(text.ends_with("sum64, 256 KiB: 30.0\n"), "{text}");
    }

    #[test]
    fn points_are_the_fastest_of_the_kind_that_stands_for_the_fast_domain() {
        let json = json(&settings(), &measured(), LinkKind::Shm);
        let points = crate::plan::calibrate::parse(&json.to_string()).unwrap();
        let found: Vec<_> = points.links.iter().map(|point| (point.bytes, point.one_way_us)).collect();
        assert_eq!(found, [(4096.0, 7.0), (1_048_576.0, 50.0)]);
    }

    #[test]
    fn kinds_are_named_as_everywhere() {
        assert_eq!(parse_kind("inline"), Ok(LinkKind::Inline));
        assert!(parse_kind("nccl").unwrap_err().contains("shm"));
    }
}
