//! `attention-svc bench links`: round trips and bandwidth of every kind of link on this machine, beside a bare socket and a
//! bare futex in the same run.
use std::fmt::Write as _;
use std::path::PathBuf;

use afd_common::config::units::Span;
use afd_common::link::LinkKind;
use afd_common::link::timing::{self, Measured, RoundTrips, Series, Settings};
use clap::Args;
use serde_json::{Value, json};

use super::BenchError;
use super::report::{table, write_json};
use crate::plan::calibrate::{LinkName, LinkPoint, Measured as Points};

/// Turns that every way gets at every size.
const SLICES: u32 = 20;

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
    /// Time for each link and size
    #[arg(long, value_name = "TIME", default_value = "400ms", value_parser = Span::positive)]
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
    let settings = Settings {
        kinds: args.kinds,
        rows: args.rows,
        columns: args.columns,
        time: args.time.0,
        slices: SLICES,
    };
    let asked = settings.clone();
    let measured = tokio::task::spawn_blocking(move || timing::measure(&asked)).await;
    let measured = measured.map_err(|error| BenchError::Links(error.to_string()))?;
    let measured = measured.map_err(|error| BenchError::Links(error.to_string()))?;
    if write_json(args.json.as_deref(), &json(&settings, &measured, args.scale_up))? {
        println!("{}", text(&settings, &measured));
    }
    Ok(())
}

/// One way's times over another's, size by size.
struct Ratio {
    of: String,
    over: String,
    sizes: Vec<f64>,
}

/// What a link costs over its bare transport, and a slow link over a fast one; those whose sides were measured.
fn ratios(measured: &Measured) -> Vec<Ratio> {
    let find = |name: &str| measured.series.iter().find(|series| series.name == name);
    let pairs =
        [("shm", "raw futex"), ("tcp", "raw tcp, epoll"), ("tcp", "raw tcp"), ("inline", "shm")].into_iter();
    let ratio = |(of, over): (&str, &str)| {
        let both = find(of)?.sizes.iter().zip(&find(over)?.sizes);
        let sizes = both.map(|(of, over)| of.p50.as_secs_f64() / over.p50.as_secs_f64()).collect();
        Some(Ratio { of: of.into(), over: over.into(), sizes })
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
            "bytes_per_s": size.rate(),
        })
    };
    let series = |series: &Series| json!({"name": series.name, "sizes": series.sizes.iter().map(size).collect::<Vec<_>>()});
    let ratio = |ratio: &Ratio| json!({"of": ratio.of, "over": ratio.over, "sizes": ratio.sizes});
    json!({
        "columns": settings.columns,
        "dtype": "bfloat16",
        "checksum_bytes_per_s": measured.checksum_rate,
        "series": measured.series.iter().map(series).collect::<Vec<_>>(),
        "ratios": ratios(measured).iter().map(ratio).collect::<Vec<_>>(),
        "points": points(measured, scale_up),
    })
}

/// A hop's way there is half of its round trip.
fn points(measured: &Measured, scale_up: LinkKind) -> Points {
    let of_kind = measured.series.iter().filter(|series| series.kind == Some(scale_up));
    let point = |size: &RoundTrips| LinkPoint {
        link: LinkName::ScaleUp,
        bytes: size.bytes as f64,
        one_way_us: size.p50.as_secs_f64() / 2.0 * 1e6,
    };
    Points { links: of_kind.flat_map(|series| series.sizes.iter().map(point)).collect(), ..Points::default() }
}

fn text(settings: &Settings, measured: &Measured) -> String {
    let mut out = format!(
        "rows of {} bf16 there and back between two threads, over the transport of two processes\n",
        settings.columns
    );
    let heads: Vec<String> = settings.rows.iter().map(|rows| format!("{rows} rows")).collect();
    let heads: Vec<&str> = std::iter::once("").chain(heads.iter().map(String::as_str)).collect();
    for (what, cell) in [
        ("round trip, median, µs", (|size| size.p50.as_secs_f64() * 1e6) as fn(&RoundTrips) -> f64),
        ("bytes both ways over the round trip, GB/s", |size| size.rate() / 1e9),
    ] {
        let _ = writeln!(out, "\n{what}");
        let row = |series: &Series| {
            let cells = series.sizes.iter().map(|size| digits(cell(size)));
            std::iter::once(series.name.clone()).chain(cells).collect()
        };
        out.push_str(&table(&heads, measured.series.iter().map(row).collect()));
    }
    out.push_str("\nround trip over that of another way\n");
    let row = |ratio: Ratio| {
        let cells = ratio.sizes.iter().map(|ratio| digits(*ratio));
        std::iter::once(format!("{} / {}", ratio.of, ratio.over)).chain(cells).collect()
    };
    out.push_str(&table(&heads, ratios(measured).into_iter().map(row).collect()));
    let _ = writeln!(out, "\nchecksum of a frame: {} GB/s", digits(measured.checksum_rate / 1e9));
    out
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

    use super::*;

    fn measured() -> Measured {
        let size = |bytes: usize, us: u64| {
            let time = Duration::from_micros(us);
            RoundTrips { rows: (bytes / 4096) as u32, bytes, count: 9, p10: time, p50: time, p90: time }
        };
        let series = |name: &str, kind, small, large| Series {
            name: name.into(),
            kind,
            sizes: vec![size(4096, small), size(1 << 20, large)],
        };
        Measured {
            series: vec![
                series("raw futex", None, 10, 200),
                series("shm", Some(LinkKind::Shm), 14, 300),
                series("tcp", Some(LinkKind::Tcp), 24, 700),
                series("inline", Some(LinkKind::Inline), 100, 1400),
                series("raw tcp, epoll", None, 21, 560),
                series("raw tcp", None, 20, 500),
            ],
            checksum_rate: 30e9,
        }
    }

    #[test]
    fn ratios_are_of_the_same_run_and_size() {
        let told = |r: Ratio| format!("{}/{}: {:.2}, {:.2}", r.of, r.over, r.sizes[0], r.sizes[1]);
        let found: Vec<_> = ratios(&measured()).into_iter().map(told).collect();
        let expected = [
            "shm/raw futex: 1.40, 1.50",
            "tcp/raw tcp, epoll: 1.14, 1.25",
            "tcp/raw tcp: 1.20, 1.40",
            "inline/shm: 7.14, 4.67",
        ];
        assert_eq!(found, expected);
        let text = text(
            &Settings { kinds: vec![], rows: vec![1, 256], columns: 2048, time: Duration::ZERO, slices: 1 },
            &measured(),
        );
        let line = text.lines().find(|line| line.starts_with("tcp / raw tcp ")).unwrap();
        assert_eq!(line.split_whitespace().skip(4).collect::<Vec<_>>(), ["1.20", "1.40"], "{text}");
        assert!(text.ends_with("checksum of a frame: 30.0 GB/s\n"), "{text}");
    }

    #[test]
    fn points_are_those_of_the_kind_that_stands_for_the_fast_domain() {
        let json = json(
            &Settings { kinds: vec![], rows: vec![], columns: 2048, time: Duration::ZERO, slices: 1 },
            &measured(),
            LinkKind::Shm,
        );
        let points = crate::plan::calibrate::parse(&json.to_string()).unwrap();
        assert_eq!(points.links.len(), 2);
        assert_eq!((points.links[0].bytes, points.links[0].one_way_us), (4096.0, 7.0));
    }

    #[test]
    fn kinds_are_named_as_everywhere() {
        assert_eq!(parse_kind("inline"), Ok(LinkKind::Inline));
        assert!(parse_kind("nccl").unwrap_err().contains("shm"));
    }
}
