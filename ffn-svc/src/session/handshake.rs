//! What two processes must agree on before a tensor may travel, and what they negotiate. Pure: the request and what this
//! rank serves go in, an [`Agreement`] or a [`Refusal`] that names the field and both values comes out.
use std::fmt;

use afd_common::net::{Gate, Tokens};
use afd_common::placement::CONTIGUOUS;
use afd_common::proto::{PROTOCOL_MAJOR, PROTOCOL_MINOR, v1};
use subtle::ConstantTimeEq;
use tonic::metadata::{Ascii, MetadataValue};

/// Most characters of a deployment's name.
const MAX_DEPLOYMENT_CHARS: usize = 128;

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
    #[error("`{field}` differs: the caller has {caller}, this FFN rank has {own}")]
    Differs {
        /// Name in the protocol.
        field: &'static str,
        /// The caller's value.
        caller: String,
        /// This rank's value.
        own: String,
    },
    /// There is nothing that both sides can use.
    #[error("`{field}` have nothing in common: the caller has {caller}, this FFN rank has {own}")]
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
    equal("protocol_major", request.protocol_major, PROTOCOL_MAJOR)?;
    check_token(offer.join_token.as_ref(), &request.join_token)?;
    check_identity(request.identity.as_ref())?;
    check_model(&offer.model, request.model.as_ref())?;
    // 0: the caller takes what the first rank says.
    if request.shard_count != 0 {
        equal("shard_count", request.shard_count, offer.shard_count)?;
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
        features: request.features.iter().filter(|name| offer.features.contains(name)).cloned().collect(),
    })
}

fn equal<T: PartialEq + fmt::Display>(field: &'static str, caller: T, own: T) -> Result<(), Refusal> {
    if caller == own {
        return Ok(());
    }
    Err(Refusal::Differs { field, caller: caller.to_string(), own: own.to_string() })
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
        return Err(Refusal::Differs {
            field: "identity.role",
            caller: identity.role().as_str_name().into(),
            own: "ROLE_FFN, which only ROLE_ATTENTION may join".into(),
        });
    }
    Ok(())
}

fn check_model(own: &v1::ModelIdentity, caller: Option<&v1::ModelIdentity>) -> Result<(), Refusal> {
    let caller = caller.ok_or_else(|| missing("model"))?;
    // The fingerprint covers these three; they say more than a hash, so they come first, and the hashes with them.
    let shape = |model: &v1::ModelIdentity| {
        let v1::ModelIdentity { architecture, hidden_size, num_layers, .. } = model;
        [architecture.clone(), hidden_size.to_string(), num_layers.to_string()]
    };
    let names = ["model.architecture", "model.hidden_size", "model.num_layers"];
    for ((field, theirs), ours) in names.into_iter().zip(shape(caller)).zip(shape(own)) {
        if theirs != ours {
            let with_hash =
                |value, model: &v1::ModelIdentity| format!("{value} (fingerprint {})", model.fingerprint);
            return Err(Refusal::Differs {
                field,
                caller: with_hash(theirs, caller),
                own: with_hash(ours, own),
            });
        }
    }
    equal("model.fingerprint", caller.fingerprint.as_str(), own.fingerprint.as_str())?;
    equal(
        "model.activation_dtype",
        caller.activation_dtype().as_str_name(),
        own.activation_dtype().as_str_name(),
    )?;
    equal("model.gate_placement", caller.gate_placement().as_str_name(), own.gate_placement().as_str_name())?;
    equal("model.placement", placement(caller), placement(own))?;
    equal("model.routing", routing(caller).as_str_name(), routing(own).as_str_name())
}

/// Who says nothing has contiguous parts.
fn placement(model: &v1::ModelIdentity) -> &str {
    if model.placement.is_empty() { CONTIGUOUS } else { &model.placement }
}

fn routing(model: &v1::ModelIdentity) -> v1::Routing {
    match model.routing() {
        v1::Routing::Unspecified => v1::Routing::Model,
        said => said,
    }
}

fn common_kinds(offer: &Offer, request: &v1::JoinRequest) -> Result<Vec<v1::LinkKind>, Refusal> {
    // A kind this build has no name for is one it cannot serve.
    let wanted: Vec<_> = request.link_kinds().collect();
    let common: Vec<_> = wanted.iter().copied().filter(|kind| offer.link_kinds.contains(kind)).collect();
    if common.is_empty() {
        return Err(Refusal::NothingInCommon {
            field: "link_kinds",
            caller: kind_names(&wanted),
            own: kind_names(&offer.link_kinds),
        });
    }
    Ok(common)
}

fn kind_names(kinds: &[v1::LinkKind]) -> String {
    let names: Vec<_> = kinds.iter().map(v1::LinkKind::as_str_name).collect();
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

fn missing(field: &'static str) -> Refusal {
    Refusal::Invalid { field, found: "missing".into(), expected: "a value" }
}

#[cfg(test)]
mod tests;
