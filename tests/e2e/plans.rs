//! Plans go one step ahead.
use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn};
use afd_tests::oracle;
use anyhow::ensure;

const MODEL: &str = "tiny-mixtral";

#[tokio::test]
async fn most_steps_of_a_long_answer_were_told_one_step_ahead() -> anyhow::Result<()> {
    are_told_ahead(pair()).await
}

/// Every request is recorded, and no step of it.
#[tokio::test]
async fn and_so_they_are_while_requests_are_traced() -> anyhow::Result<()> {
    let nobody = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let traced = pair().env("OTEL_EXPORTER_OTLP_ENDPOINT", &format!("http://{nobody}"));
    are_told_ahead(traced.attention_args(&["--trace-hops-ratio", "0"])).await
}

fn pair() -> DeploymentSpec {
    DeploymentSpec::new(fixtures::checkpoint(MODEL), Ffn::Remote { shards: 2, replicas: 1 })
}

async fn are_told_ahead(spec: DeploymentSpec) -> anyhow::Result<()> {
    let deployment = Deployment::start(spec).await?;
    let expected = fixtures::expected(MODEL)?;
    // One after the other: after each the step that was told ahead does not come.
    for prompt in &expected.prompts[..3] {
        let answer = deployment.greedy(0, &prompt.input_ids, prompt.generated_ids.len() as u32).await?;
        oracle::same(&prompt.generated_ids, &answer)?;
    }
    // All at once: batches grow and shrink, so some steps come otherwise than told.
    let asked = expected
        .prompts
        .iter()
        .map(|prompt| deployment.greedy(0, &prompt.input_ids, prompt.generated_ids.len() as u32));
    for (prompt, answer) in expected.prompts.iter().zip(futures::future::join_all(asked).await) {
        oracle::same(&prompt.generated_ids, &answer?)?;
    }
    let attention = |name| deployment.metric(0, name);
    let (ahead, steps) = (attention("afd_plans_ahead_total").await?, attention("afd_steps_total").await?);
    println!("{ahead} of {steps} steps came as told one step ahead");
    ensure!(ahead > 0.5 * steps, "only {ahead} of {steps} steps came as told");
    ensure!(attention("afd_ffn_losses_total").await? == 0.0, "a plan ended a session");
    let unplanned = deployment.ffn_metric(0, "afd_ffn_hops_unplanned_total").await?;
    println!("{unplanned} hops of shard 0 ran before their plan was there");
    Ok(())
}
