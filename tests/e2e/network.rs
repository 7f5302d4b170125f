//! The network between the roles goes wrong: frames are damaged, doubled, cut short and late, and nothing gets through one
//! way or both. Through a proxy on real TCP; the text goes on, and it is the same text.
use std::sync::Arc;
use std::time::{Duration, Instant};

use afd_tests::fixtures;
use afd_tests::harness::{Deployment, DeploymentSpec, Ffn, Harm, Network, Way};
use anyhow::{Context, ensure};

use crate::story::{self, MODEL};

const HOP_TIMEOUT: Duration = Duration::from_secs(1);
const LEASE: Duration = Duration::from_millis(1500);

async fn behind(networks: &[Arc<Network>]) -> anyhow::Result<Deployment> {
    let ffn = Ffn::Remote { shards: 1, replicas: networks.len() as u32 };
    let spec = DeploymentSpec::new(fixtures::checkpoint(MODEL), ffn)
        .attention_args(&["--hop-timeout", &format!("{}ms", HOP_TIMEOUT.as_millis())])
        // Slow enough that what is read is what is being computed.
        .ffn_args(&["--lease-ms", &LEASE.as_millis().to_string(), "--inject-delay", "1ms"])
        .behind(networks);
    let deployment = Deployment::start(spec).await?;
    deployment.wait_in_use(0, networks.len(), Duration::from_secs(30)).await?;
    Ok(deployment)
}

/// Waits until every rank serves: what happens to one that is being warmed up costs nobody anything.
async fn all_serve(deployment: &Deployment, replicas: usize) -> anyhow::Result<()> {
    let limit = Duration::from_secs(30);
    deployment.wait_in_use(0, replicas, limit).await?;
    let deadline = Instant::now() + limit;
    while deployment.metric(0, "afd_ffn_cold").await? > 0.0 {
        ensure!(Instant::now() < deadline, "not warm:\n{}", deployment.attention[0].log());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

/// Every harm once in each direction, each in the middle of a text.
async fn every_harm(replicas: usize) -> anyhow::Result<()> {
    // Whichever rank is in use: they share one network.
    let network = Arc::new(Network::default());
    let mut deployment = behind(&vec![Arc::clone(&network); replicas]).await?;
    // What a rank says of the hops before, three times a lease, is progress too: after that there is none.
    let late = HOP_TIMEOUT + LEASE;
    let harms = [Harm::FlipHeader, Harm::FlipBody, Harm::Duplicate, Harm::Truncate, Harm::Delay(late)];
    for (way, harm) in harms.into_iter().flat_map(|harm| [(Way::ToFfn, harm), (Way::ToAttention, harm)]) {
        all_serve(&deployment, replicas).await?;
        let before = deployment.metric(0, "afd_ffn_losses_total").await?;
        let (mut is_done, logged) = (false, deployment.attention[0].log().len());
        let pause = story::goes_on(&mut deployment, async |_, num_tokens| {
            if num_tokens >= 20 && !is_done {
                is_done = true;
                tokio::time::timeout(Duration::from_secs(20), network.harm(way, harm)).await?;
            }
            Ok(())
        })
        .await
        .with_context(|| format!("{harm:?} {way:?}"))?;
        let losses = deployment.metric(0, "afd_ffn_losses_total").await? - before;
        println!("{harm:?} {way:?}: {losses} losses, longest pause {} ms", pause.as_millis());
        // A doubled frame may be dropped; every other harm costs a link.
        let log = || deployment.attention[0].log();
        ensure!(losses >= 1.0 || harm == Harm::Duplicate, "{harm:?} {way:?} cost no link:\n{}", log());
        // Whichever side finds the damage, attention's log names it.
        if matches!(harm, Harm::FlipHeader | Harm::FlipBody) {
            let log = log();
            let new = log.get(logged..).unwrap_or(&log);
            ensure!(
                new.contains("corrupt") && new.contains("checksum"),
                "{harm:?} {way:?} is not named:\n{new}"
            );
        }
    }
    Ok(())
}

#[tokio::test]
async fn damaged_doubled_truncated_and_late_frames_cost_a_link_and_no_token() -> anyhow::Result<()> {
    every_harm(1).await
}

#[tokio::test]
async fn and_neither_do_they_with_a_replica() -> anyhow::Result<()> {
    every_harm(2).await
}

/// What is late but not too late is no loss.
#[tokio::test]
async fn a_slow_network_is_not_a_lost_rank() -> anyhow::Result<()> {
    let network = Arc::new(Network::default());
    let mut deployment = behind(&[Arc::clone(&network)]).await?;
    story::goes_on(&mut deployment, async |_, num_tokens| {
        if num_tokens % 100 == 50 {
            let way = if num_tokens % 200 == 50 { Way::ToFfn } else { Way::ToAttention };
            let delay = Harm::Delay(HOP_TIMEOUT / 4);
            tokio::time::timeout(Duration::from_secs(20), network.harm(way, delay)).await?;
        }
        Ok(())
    })
    .await?;
    let losses = deployment.metric(0, "afd_ffn_losses_total").await?;
    ensure!(losses == 0.0, "{losses} ranks were given up");
    Ok(())
}

const CUTS: [&[Way]; 3] = [&[Way::ToFfn, Way::ToAttention], &[Way::ToFfn], &[Way::ToAttention]];

#[tokio::test]
async fn a_network_cut_both_ways_or_one_way_is_survived_with_a_replica() -> anyhow::Result<()> {
    let networks = [Arc::new(Network::default()), Arc::new(Network::default())];
    let mut deployment = behind(&networks).await?;
    for ways in CUTS {
        let before = deployment.metric(0, "afd_ffn_losses_total").await?;
        let mut cut = None;
        let pause = story::goes_on(&mut deployment, async |deployment, num_tokens| {
            if num_tokens >= 40 && cut.is_none() {
                let active = story::active(deployment).await?;
                networks[active].cut(ways);
                cut = Some(active);
            }
            Ok(())
        })
        .await?;
        let losses = deployment.metric(0, "afd_ffn_losses_total").await? - before;
        println!("{cut:?} cut off, {ways:?}: {losses} losses, longest pause {} ms", pause.as_millis());
        ensure!(losses >= 1.0, "{losses} losses");
        // What it still has to say is of an old epoch, and harms nobody.
        networks.iter().for_each(|network| network.heal());
        deployment.wait_in_use(0, 2, Duration::from_secs(30)).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_network_cut_both_ways_or_one_way_is_survived_once_it_heals() -> anyhow::Result<()> {
    let network = Arc::new(Network::default());
    let mut deployment = behind(&[Arc::clone(&network)]).await?;
    let mut cuts = CUTS.to_vec();
    story::goes_on(&mut deployment, async |_, num_tokens| {
        if num_tokens % 100 == 50
            && let Some(ways) = cuts.pop()
        {
            network.cut(ways);
            tokio::time::sleep(HOP_TIMEOUT + Duration::from_millis(500)).await;
            network.heal();
        }
        Ok(())
    })
    .await?;
    let losses = deployment.metric(0, "afd_ffn_losses_total").await?;
    ensure!(cuts.is_empty() && losses >= 1.0, "{losses} losses, {cuts:?} are left");
    Ok(())
}
