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

/// What comes out is not compared: in bf16 the routing of these tiny models flips, in the reference too.
#[tokio::test]
async fn a_pair_in_bf16_answers_over_every_link() -> anyhow::Result<()> {
    for link in ["shm", "tcp", "inline"] {
        let ffn = Ffn::Remote { shards: 1, replicas: 1 };
        let mut spec =
            DeploymentSpec::new(fixtures::checkpoint("tiny-mixtral"), ffn).attention_args(&["--link", link]);
        let options = spec.attention_args.iter_mut().chain(&mut spec.ffn_args);
        options.filter(|value| *value == "float32").for_each(|value| *value = "bfloat16".to_owned());
        let answer = Deployment::start(spec).await?.greedy(0, &[1, 2, 3], 8).await?;
        anyhow::ensure!(answer.len() == 8, "{link}: {answer:?}");
    }
    Ok(())
}
