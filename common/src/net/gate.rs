//! Who may ask a port for what. One rule for every request, HTTP and gRPC alike, before any route sees it:
//!
//! * health (`/live`, `/ready`, `/health`, KServe's names, `grpc.health.v1`) answers everybody: probes have no secrets;
//! * where client certificates are asked for, everything else wants one;
//! * where tokens are asked for, everything else wants `authorization: Bearer TOKEN`, but for the calls that carry a secret
//!   of their own ([`Gate::with_own_secret`]).
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::body::Body;
use axum::response::Response;
use http::{HeaderValue, Request, StatusCode, header};
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

use super::json_error::json_error;
use super::reread::Reread;

/// Bearer tokens, as digests. Which of them a caller has, and how much of it was right, does not show in the time that
/// refusing takes.
#[derive(Clone)]
pub struct Tokens(Vec<[u8; 32]>);

impl Tokens {
    /// One token a line; empty lines and those that begin with `#` say nothing. `None` when no token is left.
    pub fn parse(text: &str) -> Option<Self> {
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let digests: Vec<_> = lines.map(digest).collect();
        (!digests.is_empty()).then_some(Self(digests))
    }

    /// This one only.
    pub fn one(token: &str) -> Self {
        Self(vec![digest(token)])
    }

    /// What is wrong with an `authorization` header: missing, not a bearer token, or not one of these.
    ///
    /// # Errors
    /// In a word or two.
    pub fn check(&self, authorization: Option<&str>) -> Result<(), &'static str> {
        match authorization.map(bearer) {
            None => Err("missing"),
            Some(None) => Err("not `Bearer TOKEN`"),
            Some(Some(token)) if self.admit(token) => Ok(()),
            Some(Some(_)) => Err("wrong"),
        }
    }

    fn admit(&self, presented: &str) -> bool {
        let presented = digest(presented);
        let any = |found: Choice, token: &[u8; 32]| found | token.ct_eq(&presented);
        self.0.iter().fold(Choice::from(0), any).into()
    }
}

fn digest(token: &str) -> [u8; 32] {
    Sha256::digest(token).into()
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tokens", self.0.len())
    }
}

/// Tokens that do not change, or those of a file, which may.
#[derive(Clone, Debug)]
enum Source {
    Fixed(Tokens),
    File(Arc<Reread<Tokens>>),
}

/// What a port asks of whoever calls it.
#[derive(Clone, Debug, Default)]
pub struct Gate {
    tokens: Option<Source>,
    certificates: bool,
    own_secret: &'static [&'static str],
}

impl Gate {
    /// Asks for one of these tokens.
    pub fn tokens(mut self, tokens: Tokens) -> Self {
        self.tokens = Some(Source::Fixed(tokens));
        self
    }

    /// Asks for one of a file's tokens, which is read again when it changes.
    ///
    /// # Errors
    /// When the file cannot be read or holds none; names it.
    pub fn token_file(mut self, file: &Path) -> Result<Self, String> {
        let path: PathBuf = file.to_owned();
        let read = move || {
            let text =
                std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
            Tokens::parse(&text).ok_or_else(|| format!("{} holds no token", path.display()))
        };
        self.tokens = Some(Source::File(Arc::new(Reread::new(vec![file.to_owned()], read)?)));
        Ok(self)
    }

    /// Asks for a client certificate, which TLS has verified when there is one.
    pub fn certificates(mut self) -> Self {
        self.certificates = true;
        self
    }

    /// Paths whose calls prove in their own way who they are from: no token is asked for there.
    pub fn with_own_secret(mut self, paths: &'static [&'static str]) -> Self {
        self.own_secret = paths;
        self
    }

    /// Whether it asks for anything.
    pub fn is_closed(&self) -> bool {
        self.certificates || self.tokens.is_some()
    }

    /// Whether it asks for tokens, which travel in the clear without TLS.
    pub fn wants_tokens(&self) -> bool {
        self.tokens.is_some()
    }

    /// Whether a link may be attached on a connection that did or did not show a certificate; its ticket is checked later.
    pub(super) fn admits_link(&self, certified: bool) -> bool {
        certified || !self.certificates
    }

    /// `None` when the request may pass, else what its caller is told.
    pub(super) fn check<B>(&self, request: &Request<B>, certified: bool) -> Option<Refusal> {
        let path = request.uri().path();
        if is_health(path) {
            return None;
        }
        if self.certificates && !certified {
            return Some(Refusal::Certificate);
        }
        let tokens = self.tokens.as_ref().filter(|_| !self.own_secret.contains(&path))?;
        let mut given = request.headers().get_all(header::AUTHORIZATION).iter();
        let (Some(given), None) = (given.next(), given.next()) else {
            return Some(Refusal::Token("missing"));
        };
        match given.to_str().ok().and_then(bearer) {
            None => Some(Refusal::Token("not `Bearer TOKEN`")),
            Some(token) if tokens.admit(token) => None,
            Some(_) => Some(Refusal::Token("wrong")),
        }
    }
}

impl Source {
    fn admit(&self, token: &str) -> bool {
        match self {
            Self::Fixed(tokens) => tokens.admit(token),
            Self::File(file) => file.get().admit(token),
        }
    }
}

fn is_health(path: &str) -> bool {
    matches!(path, "/live" | "/ready" | "/health" | "/v2/health/live" | "/v2/health/ready")
        || path.starts_with("/grpc.health.v1.Health/")
}

/// The scheme's name is written in any case.
fn bearer(value: &str) -> Option<&str> {
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

/// Why a request does not pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    #[error("a client certificate is missing: this port asks for one (--tls-client-ca)")]
    Certificate,
    #[error("`authorization` is {0}; this port asks for `Bearer TOKEN`")]
    Token(&'static str),
}

impl Refusal {
    /// In the caller's language: a gRPC status, or JSON in OpenAI's shape.
    pub(super) fn answer<B>(self, request: &Request<B>) -> Response {
        if super::is_grpc(request) {
            return tonic::Status::unauthenticated(self.to_string()).into_http::<Body>();
        }
        let code = match self {
            Self::Certificate => "certificate_required",
            Self::Token(_) => "invalid_api_key",
        };
        let mut response = json_error(StatusCode::UNAUTHORIZED, code, &self.to_string());
        if let Self::Token(_) = self {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(gate: &Gate, path: &str, authorization: &[&str], certified: bool) -> Option<Refusal> {
        let mut request = Request::get(path);
        for value in authorization {
            request = request.header("authorization", *value);
        }
        gate.check(&request.body(()).unwrap(), certified)
    }

    #[test]
    fn every_token_opens_and_nothing_else_does() {
        let tokens = Tokens::parse("# for the dashboard\n  one-token \n\nanother\n").unwrap();
        assert_eq!(format!("{tokens:?}"), "2 tokens", "never shown");
        let gate = Gate::default().tokens(tokens);
        let with = |given: &[&str]| refusal(&gate, "/v1/models", given, false);
        for good in ["Bearer one-token", "bearer another", "BEARER  another "] {
            assert_eq!(with(&[good]), None, "{good}");
        }
        for wrong in ["Bearer one-toke", "Bearer one-token2", "Bearer ", "Bearer # for the dashboard"] {
            assert_eq!(with(&[wrong]), Some(Refusal::Token("wrong")), "{wrong}");
        }
        assert_eq!(with(&["one-token"]), Some(Refusal::Token("not `Bearer TOKEN`")));
        assert_eq!(with(&["Basic one-token"]), Some(Refusal::Token("not `Bearer TOKEN`")));
        assert_eq!(with(&[]), Some(Refusal::Token("missing")));
        let twice = ["Bearer wrong", "Bearer another"];
        assert_eq!(with(&twice), Some(Refusal::Token("missing")), "which of two counts is nobody's guess");
        assert!(Tokens::parse(" \n# nothing\n").is_none());
    }

    #[test]
    fn health_is_for_everybody_and_metrics_are_not() {
        let gate = Gate::default().tokens(Tokens::one("t")).certificates();
        for open in ["/live", "/ready", "/health", "/v2/health/live", "/grpc.health.v1.Health/Watch"] {
            assert_eq!(refusal(&gate, open, &[], false), None, "{open}");
        }
        for closed in
            ["/metrics", "/version", "/live/", "/healthy", "/v1/chat/completions", "/grpc.health.v1"]
        {
            assert_eq!(refusal(&gate, closed, &["Bearer t"], false), Some(Refusal::Certificate), "{closed}");
            assert_eq!(refusal(&gate, closed, &[], true), Some(Refusal::Token("missing")), "{closed}");
            assert_eq!(refusal(&gate, closed, &["Bearer t"], true), None, "{closed}");
        }
    }

    #[test]
    fn a_call_with_a_secret_of_its_own_needs_no_token_but_a_certificate() {
        let gate = Gate::default().tokens(Tokens::one("t")).with_own_secret(&["/a.B/Join"]);
        assert_eq!(refusal(&gate, "/a.B/Join", &[], false), None);
        assert_eq!(refusal(&gate, "/a.B/Drain", &[], false), Some(Refusal::Token("missing")));
        assert_eq!(refusal(&gate.certificates(), "/a.B/Join", &[], false), Some(Refusal::Certificate));
    }

    #[test]
    fn an_open_gate_asks_for_nothing() {
        assert!(!Gate::default().is_closed());
        assert_eq!(refusal(&Gate::default(), "/metrics", &[], false), None);
    }
}
