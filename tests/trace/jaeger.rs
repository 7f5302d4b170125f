//! A real Jaeger on loopback, as `deploy/jaeger.sh` installs it, and what its query API tells.
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::Value;

use super::tree::{Seen, Trace};

const LIMIT: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Ends with the test.
pub(crate) struct Jaeger {
    process: Child,
    pub(crate) otlp: String,
    pub(crate) query: String,
    client: reqwest::Client,
    folder: tempfile::TempDir,
}

/// The binary, where it is installed.
pub(crate) fn installed() -> Option<PathBuf> {
    let binary = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.deps/go-bin/jaeger");
    binary.exists().then_some(binary)
}

impl Jaeger {
    /// Starts it with spans in memory and ports of its own.
    pub(crate) async fn start(binary: &Path) -> anyhow::Result<Self> {
        // It takes no port 0. All are held at once, so that they differ.
        let held: Vec<_> = (0..8).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<Result<_, _>>()?;
        let ports =
            held.iter().map(|port| Ok(port.local_addr()?.port())).collect::<anyhow::Result<Vec<_>>>()?;
        drop(held);
        let template = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/observability/jaeger.yaml");
        let mut config = std::fs::read_to_string(&template).context("deploy/observability/jaeger.yaml")?;
        for (fixed, port) in ["4317", "4318", "16685", "16686", "8888", "13133"].iter().zip(&ports) {
            config = config.replace(&format!(":{fixed}"), &format!(":{port}"));
        }
        let folder = tempfile::tempdir()?;
        let (file, log) = (folder.path().join("jaeger.yaml"), folder.path().join("log"));
        std::fs::write(&file, config)?;
        let log = std::fs::File::create(log)?;
        let mut command = Command::new(binary);
        command.arg("--config").arg(&file).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let client = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(20)).build()?;
        let mut jaeger = Self {
            process: command.spawn()?,
            otlp: format!("http://127.0.0.1:{}", ports[0]),
            query: format!("http://127.0.0.1:{}", ports[3]),
            client,
            folder,
        };
        let deadline = Instant::now() + LIMIT;
        while jaeger.get("/api/services").await.is_err() {
            if let Some(status) = jaeger.process.try_wait()? {
                bail!("Jaeger ended with {status}:\n{}", jaeger.log());
            }
            if Instant::now() > deadline {
                bail!("Jaeger does not answer after {LIMIT:?}:\n{}", jaeger.log());
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Ok(jaeger)
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    async fn get(&self, path: &str) -> anyhow::Result<Value> {
        let answer = self.client.get(format!("{}{path}", self.query)).send().await?;
        Ok(answer.error_for_status()?.json().await?)
    }

    /// Waits until the spans of a trace satisfy `complete`.
    pub(crate) async fn trace(
        &self,
        trace_id: &str,
        complete: impl Fn(&Trace) -> bool,
    ) -> anyhow::Result<Trace> {
        let deadline = Instant::now() + LIMIT;
        loop {
            // Until the first span is here the trace is not found.
            let answer = self.get(&format!("/api/traces/{trace_id}")).await.unwrap_or_default();
            let trace = read(&answer["data"][0]);
            if complete(&trace) {
                return Ok(trace);
            }
            if Instant::now() > deadline {
                bail!("the trace is not complete after {LIMIT:?}:\n{}", trace.drawn());
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

impl Drop for Jaeger {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A trace as `/api/traces` tells it.
fn read(trace: &Value) -> Trace {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let span = |span: &Value| {
        let references = span["references"].as_array().cloned().unwrap_or_default();
        let ids = |reference: &Value| (text(&reference["traceID"]), text(&reference["spanID"]));
        let (parents, links): (Vec<_>, Vec<_>) =
            references.iter().partition(|reference| reference["refType"] == "CHILD_OF");
        let start_us = span["startTime"].as_u64().unwrap_or_default();
        let tags: BTreeMap<_, _> = span["tags"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|tag| (text(&tag["key"]), text(&tag["value"])))
            .collect();
        Seen {
            service: text(&trace["processes"][text(&span["processID"])]["serviceName"]),
            name: text(&span["operationName"]),
            trace_id: text(&span["traceID"]),
            span_id: text(&span["spanID"]),
            parent: parents.first().map(|reference| ids(reference).1),
            start_us,
            end_us: start_us + span["duration"].as_u64().unwrap_or_default(),
            tags,
            links: links.into_iter().map(ids).collect(),
        }
    };
    Trace(trace["spans"].as_array().into_iter().flatten().map(span).collect())
}
