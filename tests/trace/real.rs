//! The same tree in a real Jaeger, through its query API.
use afd_tests::harness::Deployment;
use anyhow::ensure;

use super::jaeger::{self, Jaeger};
use super::requests::{CALLER, PAIR, check, complete, is_complete, slowest, spec};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jaeger_shows_a_request_and_names_the_slow_shard() -> anyhow::Result<()> {
    let Some(binary) = jaeger::installed() else {
        let wanted = std::env::var_os("AFD_TEST_FULL").is_some();
        ensure!(!wanted, "Jaeger is not installed: bash deploy/jaeger.sh");
        println!("skipped: Jaeger is not installed (bash deploy/jaeger.sh)");
        return Ok(());
    };
    let jaeger = Jaeger::start(&binary).await?;
    let spec = spec(&jaeger.otlp, "grpc").ffn_rank_args(1, &["--inject-delay", "3ms"]);
    let deployment = Deployment::start(spec).await?;
    complete(&deployment, CALLER.0).await?;
    let trace = jaeger.trace(CALLER.0, is_complete).await?;
    check(&trace, &PAIR)?;
    ensure!(slowest(&trace, "hop").map(|(shard, _)| shard) == Some(1), "{}", trace.drawn());
    // For a look with a browser: AFD_TEST_HOLD_SECONDS=600 cargo test -p afd-tests --test trace jaeger -- --nocapture
    if let Some(seconds) = std::env::var("AFD_TEST_HOLD_SECONDS").ok().and_then(|text| text.parse().ok()) {
        println!("{}/trace/{}", jaeger.query, CALLER.0);
        tokio::time::sleep(std::time::Duration::from_secs(seconds)).await;
    }
    Ok(())
}
