//! Two busy attention ranks meet at the FFN while it is the bottleneck; an idle one costs nothing.
use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn};
use afd_tests::oracle;
use anyhow::ensure;

const MODEL: &str = "tiny-mixtral";
/// Times the prompt is asked for in a row, to have enough steps.
const ROUNDS: usize = 3;

/// Two attention ranks and an FFN that takes 20 ms an execution, whatever is in it: as if it were reading weights.
async fn start(board_ms: &str) -> anyhow::Result<Deployment> {
    let spec = DeploymentSpec::new(fixtures::checkpoint(MODEL), Ffn::Remote { shards: 1, replicas: 1 });
    let spec = spec.attention_ranks(2).attention_args(&["--stages", "1", "--no-prefix-cache"]);
    Deployment::start(spec.ffn_args(&["--board-ms", board_ms, "--inject-delay", "20ms"])).await
}

/// Greedy answers of some ranks at the same time, held to the recorded tokens.
async fn busy(deployment: &Deployment, ranks: &[usize]) -> anyhow::Result<()> {
    let prompt = fixtures::expected(MODEL)?.prompts.remove(0);
    for _ in 0..ROUNDS {
        let asked = ranks
            .iter()
            .map(|rank| deployment.greedy(*rank, &prompt.input_ids, prompt.generated_ids.len() as u32));
        for answer in futures::future::join_all(asked).await {
            oracle::same(&prompt.generated_ids, &answer?)?;
        }
    }
    Ok(())
}

/// Of a histogram.
async fn mean(deployment: &Deployment, name: &str) -> anyhow::Result<f64> {
    let sum = deployment.ffn_metric(0, &format!("{name}_sum")).await?;
    Ok(sum / deployment.ffn_metric(0, &format!("{name}_count")).await?)
}

#[tokio::test]
async fn busy_ranks_board_and_share_executions() -> anyhow::Result<()> {
    let mut rows = Vec::new();
    for board_ms in ["0", "60"] {
        let deployment = start(board_ms).await?;
        busy(&deployment, &[0, 1]).await?;
        let (of_rows, of_ranks) =
            (mean(&deployment, "afd_ffn_batch_rows").await?, mean(&deployment, "afd_ffn_batch_ranks").await?);
        println!("--board-ms {board_ms}: {of_rows:.2} rows and {of_ranks:.2} ranks an execution");
        rows.push(of_ranks);
    }
    ensure!(rows[1] > 1.5, "with boarding {:.2} ranks met, without {:.2}", rows[1], rows[0]);
    Ok(())
}

#[tokio::test]
async fn an_idle_neighbour_is_not_waited_for() -> anyhow::Result<()> {
    let deployment = start("60").await?;
    // Both have warmed up, maybe at the same time.
    let ranks = async || deployment.ffn_metric(0, "afd_ffn_batch_ranks_sum").await;
    let batches = async || deployment.ffn_metric(0, "afd_ffn_batch_ranks_count").await;
    let before = (ranks().await?, batches().await?);
    busy(&deployment, &[1]).await?;
    ensure!(ranks().await? - before.0 == batches().await? - before.1, "a batch has rows of both");
    ensure!(deployment.ffn_metric(0, "afd_ffn_boarding").await? == 0.0, "it waits for nobody");
    ensure!(deployment.ffn_metric(0, "afd_ffn_stragglers_total").await? == 0.0);
    Ok(())
}
