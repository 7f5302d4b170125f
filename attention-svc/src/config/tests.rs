//! Options as they are given, and the configuration or the sentence that comes of them.
use std::io::Write;

use clap::Parser;

use super::*;
use crate::cli::{Cli, Command};
use crate::scheduler::Phase;
use afd_common::config::units::ByteSize;

fn parse(args: &[&str]) -> Result<ServeConfig, String> {
    let all = ["attention-svc", "serve"].iter().chain(args);
    match Cli::try_parse_from(all).map_err(|e| e.to_string())?.command {
        Command::Serve(args) => ServeConfig::new(*args).map_err(|e| e.to_string()),
        other => Err(format!("{other:?}")),
    }
}

fn with(more: &[&str]) -> Result<ServeConfig, String> {
    parse(&[&["--model", ".", "--ffn", "local"], more].concat())
}

#[test]
fn little_must_be_said() {
    let config = with(&[]).unwrap();
    assert_eq!(config.address.listen.to_string(), "127.0.0.1:8000");
    assert_eq!(config.model.name, "attention-svc");
    assert_eq!(config.capacity.max_num_seqs, 256);
    assert!(config.capacity.prefix_cache);
    assert!(!with(&["--no-prefix-cache"]).unwrap().capacity.prefix_cache);
    assert_eq!(with(&["--max-num-batched-tokens", "32"]).unwrap().capacity.max_num_seqs, 32);
    assert!(!config.address.access.gate.is_closed() && config.ffn.tls.is_none());
    assert!(with(&["--listen", "0.0.0.0:1", "--insecure"]).is_ok());
}

#[test]
fn on_a_gpu_prompts_of_a_pair_have_two_stages_and_decode_steps_one() {
    let stages = |args: &[&str]| {
        let capacity = parse(&[&["--model", ".", "--device", "cuda:0"], args].concat()).unwrap().capacity;
        let of = |phase, tokens| capacity.stages.splittable(phase, 100, tokens);
        (
            [of(Phase::Decode, 100), of(Phase::Prefill, 1000), of(Phase::Prefill, 8192)],
            capacity.graphs.max_stages,
        )
    };
    assert_eq!(stages(&["--ffn", "f0:7000"]), ([1, 1, 2], 1));
    assert_eq!(stages(&["--ffn", "local"]), ([1, 1, 1], 1));
    assert_eq!(stages(&["--ffn", "f0:7000", "--stages", "2"]), ([2, 2, 2], 2));
    assert_eq!(stages(&["--ffn", "f0:7000", "--stages", "1"]), ([1, 1, 1], 1));
}

#[test]
fn a_wrong_option_is_named_with_its_value() {
    for (args, parts) in [
        (&["--model", "/nowhere/at/all"][..], &["--model", "/nowhere/at/all"][..]),
        (&["--ffn", "a:1,b"], &["--ffn", "\"b\""]),
        (&["--ffn", "local,a:1"], &["--ffn", "\"local\" is given among other names"]),
        (&["--ffn", "a:1,announced"], &["--ffn", "\"announced\" is given among other names"]),
        (&["--ffn", "a:0"], &["--ffn", "\"a:0\""]),
        (&["--ffn", "a:1,b:1,a:1"], &["--ffn", "\"a:1\" is given twice"]),
        (&["--body-timeout", "0s"], &["--body-timeout is 0s; expected more than 0s"]),
        (&["--peer-timeout", "0"], &["--peer-timeout is 0s; expected at least 1s"]),
        (&["--listen", "nonsense"], &["--listen", "nonsense"]),
        (&["--link", "pigeon"], &["--link", "pigeon", "tcp"]),
        (&["--link", "cuda-ipc"], &["--link is cuda-ipc", "--device is cpu"]),
        (&["--link", "nccl", "--device", "cpu"], &["--link is nccl", "--device is cpu"]),
        (&["--link", "tcp"], &["--link is tcp", "--ffn local"]),
        (&["--block-size", "0"], &["--block-size is 0"]),
        (&["--block-size", "99999999999"], &["--block-size is 99999999999"]),
        (&["--gate", "nobody"], &["--gate", "nobody"]),
        (&["--shared-experts", "nobody"], &["--shared-experts", "nobody"]),
        (&["--shared-experts", "attention"], &["--shared-experts is attention", "--ffn is local"]),
        (
            &["--shared-experts", "attention", "--device", "cuda:0"],
            &["--shared-experts is attention", "--ffn is local"],
        ),
        (&["--dtype", "float8"], &["--dtype", "float8"]),
        (&["--max-body", "0"], &["--max-body is 0B; expected at least 1B"]),
        (&["--kv-cache-memory", "lots"], &["--kv-cache-memory", "lots", "1.5GiB"]),
        (&["--join-timeout", "soon"], &["--join-timeout", "soon"]),
        (&["--link-timeout", "0s"], &["--link-timeout"]),
        (&["--warmup-timeout", "0s"], &["--warmup-timeout"]),
        (&["--hop-timeout", "0s"], &["--hop-timeout"]),
        (&["--max-num-batched-tokens", "8", "--max-num-seqs", "9"], &["--max-num-batched-tokens", "8", "9"]),
        (&["--stages", "5"], &["--stages", "5"]),
        (&["--stages", "many"], &["--stages", "many", "auto"]),
        (&["--stage-min-decode", "0"], &["--stage-min-decode", "0"]),
        (&["--threads", "0"], &["--threads", "0"]),
        (&["--threads", "99999"], &["--threads", "99999", "cores"]),
        (&["--max-model-len", "1"], &["--max-model-len"]),
        (&["--join-token-file", "/nowhere"], &["--join-token-file", "/nowhere"]),
        (&["--advertise", "host"], &["--advertise", "host"]),
        (&["--log-format", "xml"], &["--log-format", "xml"]),
        (&["--max-queu", "1"], &["--max-queu", "--max-queue"]),
        (&["--device", "gpu"], &["--device", "\"gpu\"", "cuda:0"]),
        (&["--graph-mode", "all"], &["--graph-mode", "\"all\"", "decode"]),
        (&["--capture-sizes", "8,0"], &["--capture-sizes has 0; expected sizes from 1 to 256"]),
        (&["--capture-sizes", "8,300"], &["--capture-sizes has 300; expected sizes from 1 to 256"]),
        (&["--max-capture-size", "257"], &["--max-capture-size", "257", "256"]),
        (&["--listen", "0.0.0.0:1"], &["--listen", "0.0.0.0:1", "--api-token-file", "--insecure"]),
        (&["--api-token-file", "/nowhere"], &["--api-token-file", "/nowhere"]),
        (&["--tls-cert", "/nowhere"], &["--tls-key"]),
        (&["--tls-client-ca", "/nowhere"], &["--tls-client-ca", "--tls-cert"]),
        (&["--ffn-tls-ca", "/nowhere"], &["--ffn-tls-ca", "/nowhere"]),
        (&["--ffn-tls-cert", "/nowhere", "--ffn-tls-key", "/nowhere"], &["--ffn-tls-ca"]),
    ] {
        let base: &[&str] = if args[0] == "--model" || args[0] == "--ffn" { &[] } else { &["--model", "."] };
        let base = if args[0] == "--ffn" { &["--model", "."] } else { base };
        let ffn: &[&str] = if args[0] == "--ffn" { &[] } else { &["--ffn", "local"] };
        let error = parse(&[base, ffn, args].concat()).expect_err(args[0]);
        for part in parts {
            assert!(error.contains(part), "{args:?}: {error}");
        }
    }
    assert!(parse(&["--model", "."]).unwrap_err().contains("--ffn"));
    assert!(parse(&["--ffn", "local"]).unwrap_err().contains("--model"));
}

#[test]
fn options_without_effect_are_named_with_what_takes_it_from_them() {
    let said = |args: &[&str]| {
        let config = parse(&[&["--model", "."], args].concat()).unwrap();
        config.idle.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let said_with = |args: &[&str], more: &[&str]| said(&[args, more].concat());
    let (local, pair) = (&["--ffn", "local"][..], &["--ffn", "a:1"][..]);
    assert!(said(local).is_empty() && said(pair).is_empty(), "defaults are not given");
    let useful =
        ["--stage-min-decode", "9", "--peers", "b:1", "--peer-timeout", "2s", "--join-timeout", "9s"];
    assert!(said_with(pair, &useful).is_empty());
    assert!(said_with(local, &["--link", "auto", "--hop-timeout", "1s"]).is_empty());
    let timeouts = ["--link-timeout", "1s", "--join-timeout", "1s"];
    let of_timeouts =
        ["--join-timeout has no effect with --ffn local", "--link-timeout has no effect with --ffn local"];
    assert_eq!(said_with(local, &timeouts), of_timeouts);
    let placed =
        "--placement has no effect with --ffn local: one shard has every expert, and the file is not read";
    assert_eq!(said_with(local, &["--placement", "/nowhere"]), [placed]);
    assert!(said_with(pair, &["--placement", "/nowhere"]).is_empty());
    let of_ffn = |args: &[&str]| parse(&[&["--model", "."], args].concat()).unwrap().ffn;
    assert_eq!(of_ffn(&["--ffn", "local", "--placement", "/nowhere"]).placement, None);
    let on_gpu = ["--device", "cuda:0", "--ffn", "local", "--hop-timeout", "1s", "--stage-min-decode", "9"];
    let of_gpu = [
        "--hop-timeout has no effect with --ffn local on a GPU (--device)",
        "--stage-min-decode has no effect where steps have one stage, as they have here without --stages",
    ];
    assert_eq!(said(&on_gpu), of_gpu);
    for (args, expected) in [
        (
            &["--stages", "1", "--stage-min-decode", "9"][..],
            "--stage-min-decode has no effect with --stages 1",
        ),
        (&["--stages", "1", "--stage-min-prefill", "9"], "--stage-min-prefill has no effect with --stages 1"),
        (&["--peer-timeout", "9s"], "--peer-timeout has no effect without --peers"),
        (&["--capture-sizes", "1,2"], "--capture-sizes has no effect on a CPU (--device)"),
        (&["--seed", "1"], "--seed has no effect without --load-format dummy"),
    ] {
        assert_eq!(said_with(pair, args), [expected], "{args:?}");
    }
}

#[test]
fn options_about_experts_have_no_effect_on_a_dense_model_and_say_so() {
    let idle = |args: &[&str]| {
        let config = parse(&[&["--model", "."], args].concat()).unwrap();
        config.ffn.idle_on_dense.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let dense = "has no effect on a dense model (--model): it has no experts";
    assert!(idle(&["--ffn", "a:1"]).is_empty(), "defaults are not given");
    let all = ["--gate", "attention", "--routing", "balanced", "--placement", "p"];
    assert_eq!(
        idle(&[&["--ffn", "a:1"], &all[..]].concat()),
        [
            format!("--gate {dense}"),
            format!("--routing {dense}"),
            format!("--placement {dense}, and the file is not read")
        ]
    );
    // Each is named once: that one shard has every expert is said already.
    assert_eq!(idle(&["--ffn", "local", "--placement", "p"]), [""; 0]);
}

#[test]
fn a_file_with_options_without_effect_is_told_of_them_too() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    writeln!(file, "model = \".\"\nffn = \"a:1\"\nstages = 1\nstage-min-decode = 9").unwrap();
    let idle = parse(&["--config", file.path().to_str().unwrap()]).unwrap().idle;
    assert_eq!(idle[0].to_string(), "--stage-min-decode has no effect with --stages 1");
}

#[test]
fn graphs_follow_the_batch_and_are_cut_to_the_largest() {
    let sizes = |args: &[&str]| with(args).unwrap().capacity.graphs.sizes.as_slice().to_vec();
    assert_eq!(sizes(&["--max-num-seqs", "6"]), [1, 2, 4, 6]);
    assert_eq!(sizes(&["--capture-sizes", "32,4,4,1"]), [1, 4, 32]);
    assert_eq!(sizes(&["--capture-sizes", "32,4,1", "--max-capture-size", "8"]), [1, 4]);
    let none = with(&["--capture-sizes", "32", "--max-capture-size", "8"]).unwrap_err();
    assert_eq!(none, "--capture-sizes has no size up to --max-capture-size 8");
    assert!(!with(&["--graph-mode", "none"]).unwrap().capacity.graphs.capture);
}

#[test]
fn a_file_says_the_same_and_the_command_line_wins() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    writeln!(
        file,
        "model = \".\"\nffn = [\"a:1\", \"b:2\"]\nmax-queue = 7\nkv-cache-memory = \"1GiB\"\njoin-timeout = 5\nno-prefix-cache = true\ndtype = \"float32\"\nlink = \"inline\"\ngate = \"attention\""
    )
    .unwrap();
    let path = file.path().to_str().unwrap().to_owned();
    let path = path.as_str();
    let config = parse(&["--config", path, "--max-queue", "8"]).unwrap();
    assert_eq!(config.ffn.target, FfnTarget::Remote(vec!["a:1".into(), "b:2".into()]));
    assert_eq!(config.capacity.max_queue, 8);
    assert_eq!(config.capacity.kv_cache, KvRequest::Memory(ByteSize(1 << 30)));
    assert_eq!(config.ffn.join_timeout, Duration::from_secs(5));
    assert_eq!(config.ffn.link.kinds(false), [afd_common::link::LinkKind::Inline]);
    assert!(!config.capacity.prefix_cache);
    writeln!(file, "max-queu = 1").unwrap();
    let error = parse(&["--config", path]).unwrap_err();
    for part in [path, "`max-queu`", "max-queue", "line 10"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_value_of_the_wrong_kind_in_a_file_is_told_in_words() {
    for (line, expected) in [
        ("ffn = 3", "`ffn`: expected addresses"),
        ("stages = true", "`stages`: expected 1 to 4, or auto"),
        ("join-timeout = [1]", "`join-timeout`: expected a number, or a text with a unit"),
        ("kv-cache-memory = false", "`kv-cache-memory`: expected a number, or a text with a unit"),
        ("listen = \"nonsense\"", "`listen`: "),
        ("gate = \"middle\"", "`gate`: "),
    ] {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        writeln!(file, "{line}").unwrap();
        let error = parse(&["--config", file.path().to_str().unwrap()]).unwrap_err();
        assert!(error.contains("line 1: ") && error.contains(expected), "{error}");
        assert!(!error.contains("untagged"), "{error}");
    }
}
