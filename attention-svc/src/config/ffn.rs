//! The way to the FFN.
use std::path::PathBuf;
use std::time::Duration;

use afd_common::config::idle::Idle;
use afd_common::config::option::{OptionError, client_tls, deployment, join_token, refuse};
use afd_common::config::shared::ExpertOptions;
use afd_common::identity::Sides;
use afd_common::net::tls::{ClientTls, Identity};
use afd_common::routing::Routing;

use super::{FfnTarget, LinkChoice, ServeArgs, time};

/// The way to the FFN.
#[derive(Clone, Debug)]
pub struct FfnConfig {
    /// Where it is.
    pub target: FfnTarget,
    /// This attention rank.
    pub rank: u32,
    /// 1 to 128 characters.
    pub deployment: String,
    /// How rows travel.
    pub link: LinkChoice,
    /// Which side routes, and which has shared experts.
    pub sides: Sides,
    /// Where experts are, unless in contiguous parts; `None` with the FFN in this process, which has them all.
    pub placement: Option<PathBuf>,
    /// Who chooses them.
    pub routing: Routing,
    /// Options about experts that were given, of no effect where the model turns out to have none.
    pub idle_on_dense: Vec<Idle>,
    /// Empty when there is none.
    pub join_token: String,
    /// In the clear without.
    pub tls: Option<ClientTls>,
    /// For every shard to have joined.
    pub join_timeout: Duration,
    /// For each phase of joining one rank.
    pub link_timeout: Duration,
    /// For an answer or progress of a rank that is warmed up.
    pub warmup_timeout: Duration,
    /// For an answer or progress.
    pub hop_timeout: Duration,
    /// For a replacement.
    pub loss_timeout: Duration,
}

impl FfnConfig {
    pub(super) fn new(args: &ServeArgs) -> Result<Self, OptionError> {
        let Some(target) = args.ffn.clone() else {
            return refuse("--ffn", "is missing: give the addresses of FFN ranks, or local");
        };
        let sides = sides(args, &target)?;
        if let Some(link) = args.link.filter(|link| link.needs_gpu())
            && args.tensors.on_cpu()
        {
            let what =
                format!("is {link}, which needs attention on a GPU; --device is cpu (cuda:0 is a GPU)");
            return refuse("--link", what);
        }
        let link = args.link.unwrap_or_default();
        if target == FfnTarget::Local && link != LinkChoice::Auto {
            return refuse("--link", format!("is {link}, and with --ffn local rows go nowhere"));
        }
        // One shard has every expert: there is nothing to place.
        let placement = args.experts.placement.clone().filter(|_| target != FfnTarget::Local);
        let experts = ExpertOptions { placement, ..args.experts.clone() };
        Ok(Self {
            target,
            rank: args.rank.unwrap_or(0),
            deployment: deployment(args.deployment.as_deref())?,
            link,
            sides,
            routing: experts.routing.unwrap_or_default(),
            idle_on_dense: experts.idle_on_dense(),
            placement: experts.placement,
            join_token: join_token(args.join_token_file.as_deref())?.unwrap_or_default(),
            tls: ffn_tls(args)?,
            join_timeout: time("--join-timeout", args.join_timeout, 120)?,
            link_timeout: time("--link-timeout", args.link_timeout, 5)?,
            warmup_timeout: time("--warmup-timeout", args.warmup_timeout, 30)?,
            hop_timeout: time("--hop-timeout", args.hop_timeout, 5)?,
            loss_timeout: time("--ffn-loss-timeout", args.ffn_loss_timeout, 30)?,
        })
    }
}

fn sides(args: &ServeArgs, target: &FfnTarget) -> Result<Sides, OptionError> {
    let sides = args.experts.sides();
    if sides.shared_on_attention() && *target == FfnTarget::Local {
        let why = "is attention, and --ffn is local: both sides are this process, where they take turns; \
                   leave it out, or name FFN ranks with --ffn";
        return refuse("--shared-experts", why);
    }
    Ok(sides)
}

fn ffn_tls(args: &ServeArgs) -> Result<Option<ClientTls>, OptionError> {
    let options = ["--ffn-tls-cert", "--ffn-tls-key"];
    if args.ffn_tls_ca.is_none() && args.ffn_tls_cert.is_some() {
        return refuse("--ffn-tls-ca", "is missing: without it FFN ranks are dialled in the clear");
    }
    let identity = Identity::of(args.ffn_tls_cert.clone(), args.ffn_tls_key.clone(), options);
    let identity = identity.or_else(|(option, what)| refuse(option, what))?;
    client_tls("--ffn-tls-ca", args.ffn_tls_ca.as_deref(), identity)
}
