//! The binary: what it says when it cannot start, and how it ends.
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::checkpoint;

const LIMIT: Duration = Duration::from_secs(60);

fn ffn_svc(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ffn-svc"));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn failure(args: &[&str]) -> String {
    let Output { status, stderr, .. } = ffn_svc(args).output().unwrap();
    assert!(!status.success());
    String::from_utf8(stderr).unwrap()
}

#[test]
fn what_keeps_it_from_starting_is_one_line() {
    let model = checkpoint("tiny-llama").display().to_string();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let in_use = failure(&["serve", "--model", &model, "--listen", &address]);
    assert!(
        in_use.contains("--listen") && in_use.contains(&address) && in_use.contains("in use"),
        "{in_use}"
    );
    assert_eq!(in_use.lines().count(), 1, "{in_use}");
    let nowhere = failure(&["serve", "--model", "/nowhere", "--listen", "127.0.0.1:0"]);
    assert!(nowhere.contains("--model /nowhere") && nowhere.lines().count() == 1, "{nowhere}");
    assert!(failure(&["serve"]).contains("--model is missing"));
    assert!(failure(&["serve", "--colour", "red"]).contains("--colour"));
    assert!(failure(&["serve", "--model", &model, "--log-level", "a=b=c"]).contains("--log-level"));
}

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn address(file: &Path) -> String {
    wait_for("listening", || std::fs::read_to_string(file).ok()).trim().to_owned()
}

#[test]
fn it_says_where_it_listens_answers_a_probe_and_ends_well_on_sigterm() {
    let folder = tempfile::tempdir().unwrap();
    let (model, file) = (checkpoint("tiny-mixtral").display().to_string(), folder.path().join("address"));
    let path = file.display().to_string();
    let args = ["serve", "--model", &model, "--listen", "127.0.0.1:0", "--threads", "1", "--shard", "1/2"];
    let mut process = Process(ffn_svc(&args).args(["--address-file", &path]).spawn().unwrap());
    let address = address(&file);
    let probe = ffn_svc(&["probe", &address]).output().unwrap();
    let said = String::from_utf8(probe.stdout).unwrap();
    assert!(
        probe.status.success() && said.contains("MixtralForCausalLM") && said.contains("shard 1 of 2"),
        "{said}"
    );
    let id = process.0.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    let status = wait_for("the end", || process.0.try_wait().unwrap());
    assert_eq!(status.code(), Some(0));
    assert!(failure(&["probe", &address]).contains(&address));
}

/// User and system time of a process, in clock ticks of 10 ms.
#[cfg(target_os = "linux")]
fn ticks(id: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap();
    let fields: Vec<_> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
#[cfg(target_os = "linux")]
fn an_idle_rank_sleeps() {
    let folder = tempfile::tempdir().unwrap();
    let (model, file) = (checkpoint("tiny-mixtral").display().to_string(), folder.path().join("address"));
    let path = file.display().to_string();
    let args = ["serve", "--model", &model, "--listen", "127.0.0.1:0", "--address-file", &path];
    let process = Process(ffn_svc(&args).spawn().unwrap());
    address(&file);
    let before = ticks(process.0.id());
    std::thread::sleep(Duration::from_secs(1));
    let used = ticks(process.0.id()) - before;
    assert!(used <= 2, "{} ms of CPU time in one idle second", used * 10);
}
