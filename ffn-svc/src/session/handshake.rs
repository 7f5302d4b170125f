//! What two processes must agree on before a tensor may travel, and what they negotiate. Pure: the request and what this
//! rank serves go in, an [`Agreement`] or a [`Refusal`] that names the field and both values comes out.
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;

use afd_common::identity::{Compared, difference};
use afd_common::net::{Gate, Tokens};
use afd_common::proto::{PROTOCOL_MAJOR, PROTOCOL_MINOR, v1};
use afd_common::spelling;
use subtle::ConstantTimeEq;
use tonic::metadata::{Ascii, MetadataValue};

/// Most characters of a deployment's name.
const MAX_DEPLOYMENT_CHARS: usize = 128;

/// Most characters of a caller's value in a refusal: an architecture and a fingerprint.
const MOST_SHOWN: usize = 200;

/// What this rank serves and offers.
#[derive(Clone, Debug)]
pub struct Offer {
    /// The model, to be equal on both sides.
    pub model: v1::ModelIdentity,
    /// Shards of the model, to be equal on both sides.
    pub shard_count: u32,
    /// Link kinds this process can serve.
    pub link_kinds: Vec<v1::LinkKind>,
    /// Most stages in flight.
    pub max_stages: u32,
    /// Most rows of one stage.
    pub max_tokens_per_stage: u32,
    /// Optional features this process knows.
    pub features: Vec<String>,
    /// What a caller has to present, if anything.
    pub join_token: Option<JoinToken>,
}

/// A shared secret; never printed.
#[derive(Clone)]
pub struct JoinToken(String);

impl JoinToken {
    /// `None` when nothing is left of `text` without its surrounding white space.
    pub fn new(text: &str) -> Option<Self> {
        let text = text.trim();
        (!text.is_empty()).then(|| Self(text.to_owned()))
    }

    /// The port of a rank that asks for this token: a caller shows it with every call, but for joining, which carries it as
    /// a field, and for the calls of one that has joined, which name a session or a ticket that nobody can guess.
    pub fn gate(&self) -> Gate {
        Gate::default().tokens(Tokens::one(&self.0)).with_own_secret(&[
            "/afd.v1.FfnControlService/Join",
            "/afd.v1.FfnControlService/OpenLinks",
            "/afd.v1.FfnControlService/Steps",
            "/afd.v1.LayerStageService/StreamStages",
        ])
    }

    /// As an `authorization` header, for whoever shares the secret; `None` where no header can carry it.
    pub fn header(&self) -> Option<MetadataValue<Ascii>> {
        let mut value: MetadataValue<Ascii> = format!("Bearer {}", self.0).parse().ok()?;
        value.set_sensitive(true);
        Some(value)
    }

    /// Compares in time that does not depend on where the two differ.
    pub fn matches(&self, presented: &str) -> bool {
        self.0.as_bytes().ct_eq(presented.as_bytes()).into()
    }
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JoinToken(…)")
    }
}

/// What both sides will keep to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// The lower of both minors.
    pub protocol_minor: u32,
    /// In the caller's order of preference; at least one.
    pub link_kinds: Vec<v1::LinkKind>,
    /// Stages in flight, at least 1.
    pub max_stages: u32,
    /// Rows of one stage, at least 1.
    pub max_tokens_per_stage: u32,
    /// Known to both sides.
    pub features: Vec<String>,
}

/// Why a join is refused. Retrying the same request does not help.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Something that must be equal is not.
    #[error("`{field}` differs: the caller has {caller}, this FFN rank has {own} ({options})")]
    Differs {
        /// Name in the protocol.
        field: &'static str,
        /// The caller's value.
        caller: String,
        /// This rank's value.
        own: String,
        /// What changes it.
        options: &'static str,
    },
    /// There is nothing that both sides can use.
    #[error("`{field}` have nothing in common: the caller has {caller}, this FFN rank has {own} (--link)")]
    NothingInCommon {
        /// Name in the protocol.
        field: &'static str,
        /// The caller's values.
        caller: String,
        /// This rank's values.
        own: String,
    },
    /// A field is missing or outside its range.
    #[error("`{field}` is {found}; expected {expected}")]
    Invalid {
        /// Name in the protocol.
        field: &'static str,
        /// As sent.
        found: String,
        /// What would be accepted.
        expected: &'static str,
    },
    /// The caller is none of those who join.
    #[error("`identity.role` is {found}; only attention ranks join an FFN rank (--ffn)")]
    Role {
        /// What it is.
        found: Cow<'static, str>,
    },
    /// The secret is absent or wrong.
    #[error("`join_token` is {found}; this FFN rank asks for one (--join-token-file)")]
    Token {
        /// "missing" or "wrong".
        found: &'static str,
    },
}

/// Compares and negotiates.
///
/// # Errors
/// The first [`Refusal`], in the order of the protocol's fields.
#[allow(clippy::unnecessary_min_or_max, reason = "the minor version will not stay 0")]
pub fn agree(offer: &Offer, request: &v1::JoinRequest) -> Result<Agreement, Refusal> {
    equal("protocol_major", request.protocol_major, PROTOCOL_MAJOR, "update one of the two")?;
    check_token(offer.join_token.as_ref(), &request.join_token)?;
    check_identity(request.identity.as_ref())?;
    check_model(&offer.model, request.model.as_ref())?;
    // 0: the caller takes what the first rank says.
    if request.shard_count != 0 {
        equal("shard_count", request.shard_count, offer.shard_count, "--shard of all FFN ranks")?;
    }
    Ok(Agreement {
        protocol_minor: request.protocol_minor.min(PROTOCOL_MINOR),
        link_kinds: common_kinds(offer, request)?,
        max_stages: lower("max_stages", request.max_stages, offer.max_stages)?,
        max_tokens_per_stage: lower(
            "max_tokens_per_stage",
            request.max_tokens_per_stage,
            offer.max_tokens_per_stage,
        )?,
        features: offer.features.iter().filter(|name| request.features.contains(name)).cloned().collect(),
    })
}

fn equal(field: &'static str, caller: u32, own: u32, options: &'static str) -> Result<(), Refusal> {
    if caller == own {
        return Ok(());
    }
    Err(Refusal::Differs { field, caller: caller.to_string(), own: own.to_string(), options })
}

fn lower(field: &'static str, caller: u32, own: u32) -> Result<u32, Refusal> {
    match caller {
        0 => Err(Refusal::Invalid { field, found: "0".into(), expected: "at least 1" }),
        wanted => Ok(wanted.min(own)),
    }
}

fn check_token(asked_for: Option<&JoinToken>, presented: &str) -> Result<(), Refusal> {
    match asked_for {
        Some(token) if !token.matches(presented) => {
            Err(Refusal::Token { found: if presented.is_empty() { "missing" } else { "wrong" } })
        }
        _ => Ok(()),
    }
}

fn check_identity(identity: Option<&v1::Identity>) -> Result<(), Refusal> {
    let identity = identity.ok_or_else(|| missing("identity"))?;
    let chars = identity.deployment.chars().count();
    if chars == 0 || chars > MAX_DEPLOYMENT_CHARS {
        return Err(Refusal::Invalid {
            field: "identity.deployment",
            found: format!("{chars} characters long"),
            expected: "1 to 128 characters",
        });
    }
    if identity.role() != v1::Role::Attention {
        return Err(Refusal::Role { found: spelling::role(identity.role) });
    }
    Ok(())
}

fn check_model(own: &v1::ModelIdentity, caller: Option<&v1::ModelIdentity>) -> Result<(), Refusal> {
    let caller = caller.ok_or_else(|| missing("model"))?;
    let Some((theirs, ours)) = difference(caller, own) else { return Ok(()) };
    // The fingerprint covers these; they say more than a hash, and the hashes stand with them.
    let with_hash = |compared: Compared, model: &v1::ModelIdentity| match compared.field {
        "model.architecture" | "model.hidden_size" | "model.num_layers" => {
            format!("{} (fingerprint {})", compared.value, model.fingerprint)
        }
        _ => compared.value,
    };
    let (field, options) = (theirs.field, theirs.options);
    let theirs = spelling::cut(&with_hash(theirs, caller), MOST_SHOWN);
    Err(Refusal::Differs { field, caller: theirs, own: with_hash(ours, own), options })
}

fn common_kinds(offer: &Offer, request: &v1::JoinRequest) -> Result<Vec<v1::LinkKind>, Refusal> {
    // Each once, however often it is said. A kind this build has no name for is one it cannot serve.
    let mut said = BTreeSet::new();
    let wanted: Vec<i32> = request.link_kinds.iter().copied().filter(|kind| said.insert(*kind)).collect();
    let known = wanted.iter().filter_map(|kind| v1::LinkKind::try_from(*kind).ok());
    let common: Vec<_> = known.filter(|kind| offer.link_kinds.contains(kind)).collect();
    if common.is_empty() {
        return Err(Refusal::NothingInCommon {
            field: "link_kinds",
            caller: spelling::links(wanted),
            own: spelling::links(offer.link_kinds.iter().copied()),
        });
    }
    Ok(common)
}

fn missing(field: &'static str) -> Refusal {
    Refusal::Invalid { field, found: "missing".into(), expected: "a value" }
}

#[cfg(test)]
mod tests;
