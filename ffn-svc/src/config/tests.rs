//! Options as they are given, and the configuration or the sentence that comes of them.
use std::io::Write;

use afd_common::frame::RowType;
use afd_common::telemetry::LogFormat;
use clap::Parser;

use super::*;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    options: ServeOptions,
}

fn resolve(args: &[&str]) -> Result<Config, OptionError> {
    Line::try_parse_from(std::iter::once(&"ffn-svc").chain(args)).unwrap().options.resolve()
}

fn file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

#[test]
fn defaults_are_safe_and_the_command_line_wins_over_the_file() {
    let config = resolve(&["--model", "."]).unwrap();
    assert_eq!(config.listen, "127.0.0.1:7001".parse().unwrap());
    assert_eq!((config.shard, config.max_stages, config.rank), (Shard::WHOLE, 4, 0));
    let file = file(
        "shard = \"1/3\"\nrank = 5\ndtype = \"bfloat16\"\nlog-format = \"json\"\nload-format = \"dummy\"",
    );
    let path = file.path().to_str().unwrap();
    let config =
        resolve(&["--model", ".", "--rank", "2", "--config", path, "--drain-timeout", "1m"]).unwrap();
    assert_eq!(config.drain, Duration::from_secs(60));
    assert_eq!((config.shard, config.rank), (Shard::new(1, 3).unwrap(), 2));
    assert_eq!((config.dtype, config.log.format), (DtypeChoice::Fixed(RowType::Bf16), LogFormat::Json));
    assert_eq!(config.load_format, LoadFormat::Dummy);
}

#[test]
fn what_is_wrong_is_named_in_one_line() {
    let message = |args: &[&str]| resolve(args).unwrap_err().to_string();
    for wrong in ["x y", "ffn-0", "ffn 0:7001", "http://ffn-0:7001", "ffn-0:0", ":7001"] {
        let expected = format!("--advertise is {wrong:?}; expected host:port");
        assert_eq!(message(&["--model", ".", "--advertise", wrong]), expected);
    }
    assert!(resolve(&["--model", ".", "--advertise", "ffn-0:7001"]).is_ok());
    assert!(message(&[]).starts_with("--model is missing"));
    assert_eq!(message(&["--model", "/nowhere"]), "--model /nowhere is not there");
    assert_eq!(message(&["--model", "Cargo.toml"]), "--model Cargo.toml is no folder");
    assert!(message(&["--model", ".", "--threads", "0"]).starts_with("--threads is 0; expected 1 to "));
    assert!(
        message(&["--model", ".", "--threads", "99999"]).starts_with("--threads is 99999; expected 1 to ")
    );
    assert_eq!(message(&["--model", ".", "--max-stages", "5"]), "--max-stages is 5; expected 1 to 4");
    assert_eq!(message(&["--model", ".", "--board-ms", "2s"]), "--board-ms is 2s; expected 0 to 1s");
    for (given, shown) in [("1", "1ms"), ("0", "0ms"), ("2h", "7200s")] {
        let expected = format!("--lease-ms is {shown}; expected 100ms to 1h");
        assert_eq!(message(&["--model", ".", "--lease-ms", given]), expected);
    }
    for (text, part) in [
        ("colour = 1", "unknown field `colour`"),
        ("shard = \"2/2\"", "expected I/N"),
        ("rank = \"x\"", "`rank`"),
    ] {
        let file = file(text);
        let message = message(&["--model", ".", "--config", file.path().to_str().unwrap()]);
        assert!(message.starts_with("--config ") && message.contains(part), "{message}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
    assert!(
        message(&["--model", ".", "--join-token-file", "/nowhere"]).contains("--join-token-file /nowhere")
    );
    let empty = file(" \n");
    let path = empty.path().to_str().unwrap();
    assert!(message(&["--model", ".", "--join-token-file", path]).ends_with("nothing is in it"));
}

#[test]
fn options_without_effect_are_named_with_what_takes_it_from_them() {
    let said = |args: &[&str]| {
        let config = resolve(&[&["--model", "."], args].concat()).unwrap();
        config.idle.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert!(said(&["--board-ms", "2", "--inject-delay", "1ms"]).is_empty());
    assert!(
        said(&["--shard", "0/2", "--placement", "p", "--load-format", "dummy", "--seed", "1"]).is_empty()
    );
    assert_eq!(said(&["--seed", "1"]), ["--seed has no effect without --load-format dummy"]);
    let one =
        "--placement has no effect with --shard 0/1: one shard has every expert, and the file is not read";
    assert_eq!(said(&["--placement", "p"]), [one]);
    assert_eq!(resolve(&["--model", ".", "--placement", "/nowhere"]).unwrap().placement, None);
    assert!(resolve(&["--model", ".", "--shard", "1/2", "--placement", "p"]).unwrap().placement.is_some());
    let gpu = ["--device", "cuda:0", "--board-ms", "2"];
    assert_eq!(said(&gpu), ["--board-ms has no effect on what comes over cuda-ipc and nccl (--device)"]);
}

#[test]
fn values_that_are_no_values_are_refused_by_the_parser() {
    for args in [
        ["--shard", "2/2"],
        ["--gate", "middle"],
        ["--shared-experts", "both"],
        ["--dtype", "int4"],
        ["--listen", "here"],
    ] {
        let error = Line::try_parse_from(std::iter::once("ffn-svc").chain(args)).err().unwrap().to_string();
        assert!(error.contains(args[0]) && error.contains(args[1]), "{error}");
    }
}
