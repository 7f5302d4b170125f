//! A step in one, two or more stages gives the same tokens, at every edge of the thresholds.
use afd_tests::fixtures::{self, Prompt};
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn};
use afd_tests::oracle;
use anyhow::{Context, ensure};

const MODEL: &str = "tiny-mixtral";

async fn start(args: &[&str]) -> anyhow::Result<Deployment> {
    let spec = DeploymentSpec::new(fixtures::checkpoint(MODEL), Ffn::Remote { shards: 1, replicas: 1 });
    Deployment::start(spec.attention_args(args)).await
}

/// Some prompts at once: token for token.
async fn serves(deployment: &Deployment, prompts: &[Prompt]) -> anyhow::Result<()> {
    let asked = prompts
        .iter()
        .map(|prompt| deployment.greedy(0, &prompt.input_ids, prompt.generated_ids.len() as u32));
    for (prompt, answer) in prompts.iter().zip(futures::future::join_all(asked).await) {
        oracle::same(&prompt.generated_ids, &answer?).with_context(|| prompt.id.clone())?;
    }
    Ok(())
}

/// Steps so far that had so many stages.
async fn steps(deployment: &Deployment, stages: usize) -> anyhow::Result<u64> {
    let text = deployment.client().get(deployment.url(0, "/metrics")).send().await?.text().await?;
    let name = format!("afd_steps_by_stages_total{{stages=\"{stages}\"}} ");
    Ok(text.lines().find_map(|line| line.strip_prefix(&name)).context("no such metric")?.parse()?)
}

/// Batches of 1, 2, 3 and 4 decode around a threshold of 3; short and long prompts lie around that of prompts. All
/// together they are mixed with each other.
#[tokio::test]
async fn tokens_do_not_depend_on_the_number_of_stages_nor_on_the_thresholds() -> anyhow::Result<()> {
    let prompts = fixtures::expected(MODEL)?.prompts;
    for args in [
        ["--stages", "2", "--stage-min-decode", "3", "--stage-min-prefill", "18"],
        ["--stages", "3", "--stage-min-decode", "2", "--stage-min-prefill", "17"],
        ["--stages", "4", "--stage-min-decode", "1", "--stage-min-prefill", "1"],
        ["--stages", "auto", "--stage-min-decode", "2", "--stage-min-prefill", "12"],
    ] {
        let deployment = start(&args).await?;
        let tried = async {
            serves(&deployment, &prompts[..1]).await?;
            ensure!(steps(&deployment, 2).await? == 0, "one sequence was split");
            for batch in 2..=4 {
                serves(&deployment, &prompts[..batch]).await.with_context(|| format!("{batch} at once"))?;
            }
            serves(&deployment, &prompts).await?;
            let most: usize = args[1].parse().unwrap_or(2);
            ensure!(steps(&deployment, most).await? > 0, "no step had {most} stages");
            ensure!(most == 4 || steps(&deployment, most + 1).await? == 0, "more than {most} stages");
            anyhow::Ok(())
        };
        tried.await.with_context(|| format!("{args:?}"))?;
    }
    Ok(())
}

/// Below its threshold a step stays whole.
#[tokio::test]
async fn a_step_below_the_threshold_is_not_split() -> anyhow::Result<()> {
    let deployment =
        start(&["--stages", "2", "--stage-min-decode", "100", "--stage-min-prefill", "10000"]).await?;
    serves(&deployment, &fixtures::expected(MODEL)?.prompts).await?;
    ensure!(steps(&deployment, 2).await? == 0 && steps(&deployment, 1).await? > 0);
    Ok(())
}
