//! The walking pair: the reference's tokens come out, whatever the layout and the link.
use afd_tests::fixtures::{self, ALL};
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn};
use afd_tests::oracle;

/// Every prompt of a fixture, at once, through one deployment: token for token.
async fn serves_the_fixture(name: &str, ffn: Ffn, link: &str) -> anyhow::Result<()> {
    let spec = DeploymentSpec::new(fixtures::checkpoint(name), ffn).attention_args(&["--link", link]);
    let deployment = Deployment::start(spec).await?;
    let expected = fixtures::expected(name)?;
    let answers = futures::future::join_all(
        expected
            .prompts
            .iter()
            .map(|prompt| deployment.greedy(0, &prompt.input_ids, prompt.generated_ids.len() as u32)),
    )
    .await;
    for (prompt, answer) in expected.prompts.iter().zip(answers) {
        oracle::same(&prompt.generated_ids, &answer?)
            .map_err(|error| error.context(format!("{name}: {}", prompt.id)))?;
    }
    Ok(())
}

#[tokio::test]
async fn monolith_serves_every_family() -> anyhow::Result<()> {
    for name in ALL {
        serves_the_fixture(name, Ffn::Local, "auto").await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_pair_over_tcp_serves_every_family() -> anyhow::Result<()> {
    for name in ALL {
        serves_the_fixture(name, Ffn::Remote { shards: 1, replicas: 1 }, "tcp").await?;
    }
    Ok(())
}

#[tokio::test]
async fn two_shards_over_inline_serve_every_family() -> anyhow::Result<()> {
    for name in ALL {
        serves_the_fixture(name, Ffn::Remote { shards: 2, replicas: 1 }, "inline").await?;
    }
    Ok(())
}

#[tokio::test]
async fn three_shards_over_tcp_serve_every_family() -> anyhow::Result<()> {
    for name in ALL {
        serves_the_fixture(name, Ffn::Remote { shards: 3, replicas: 1 }, "tcp").await?;
    }
    Ok(())
}
