//! Token ids travel with the rows: a model whose first mixture routes by them, over every link, the gate on either side.
use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn};
use afd_tests::oracle;

async fn serves(ffn: Ffn, link: &str, gate: &str) -> anyhow::Result<()> {
    let spec = DeploymentSpec::new(fixtures::checkpoint("tiny-hash-routed"), ffn)
        .attention_args(&["--link", link, "--gate", gate])
        .ffn_args(&["--gate", gate]);
    let deployment = Deployment::start(spec).await?;
    for prompt in fixtures::expected("tiny-hash-routed")?.prompts {
        let answer = deployment.greedy(0, &prompt.input_ids, prompt.generated_ids.len() as u32).await?;
        oracle::same(&prompt.generated_ids, &answer)
            .map_err(|error| error.context(format!("{ffn:?}, {link}, gate on {gate}: {}", prompt.id)))?;
    }
    Ok(())
}

#[tokio::test]
async fn experts_are_chosen_by_token_id_over_every_link_with_the_gate_on_either_side() -> anyhow::Result<()> {
    let remote = |shards| Ffn::Remote { shards, replicas: 1 };
    serves(Ffn::Local, "auto", "ffn").await?;
    for (shards, link, gate) in [
        (1, "shm", "ffn"),
        (2, "tcp", "ffn"),
        (3, "inline", "ffn"),
        (2, "shm", "attention"),
        (3, "tcp", "attention"),
    ] {
        serves(remote(shards), link, gate).await?;
    }
    Ok(())
}
