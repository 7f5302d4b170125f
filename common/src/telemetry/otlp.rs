//! Spans to a collector by OpenTelemetry's protocol (OTLP), over gRPC or HTTP, as the standard `OTEL_*` variables say.
//! Without an endpoint among them there is no exporter and nothing is recorded.
//!
//! The variables are read by `main` and handed in as a function. The exporter itself looks up only what concerns the wire:
//! `OTEL_EXPORTER_OTLP_[TRACES_]{HEADERS,TIMEOUT,COMPRESSION}`.
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use opentelemetry::KeyValue;
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{ExporterBuildError, Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SpanExporter as _;
use rand::Rng;
use tokio::runtime::Handle;

use super::{SpanSink, TraceContext};

/// Longest time that a collector may take for a batch over HTTP.
const HTTP_TIMEOUT: Duration = Duration::from_secs(10);
/// Most bytes of a collector's answer.
const MAX_ANSWER_BYTES: usize = 1 << 20;
/// Where OTLP over gRPC listens by convention.
const GRPC_PORT: u16 = 4317;

/// Why the variables cannot be followed: one line that names the variable.
#[derive(Debug, thiserror::Error)]
pub enum OtlpError {
    /// A variable's value.
    #[error("{variable}: {what}")]
    Variable {
        /// Which.
        variable: &'static str,
        /// Found and expected.
        what: String,
    },
    /// The exporter was not built.
    #[error("OTEL_EXPORTER_OTLP_*: {0}")]
    Build(#[from] ExporterBuildError),
}

/// Which requests are traced.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Share of the requests that begin a trace, 0 to 1.
    pub ratio: f64,
    /// Whether a request that comes with a trace context follows its caller's decision.
    pub follows_parent: bool,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { ratio: 1.0, follows_parent: true }
    }
}

impl Sampling {
    /// The context of what a request with this parent begins: a child's, or a root's.
    pub fn begin(&self, parent: Option<&TraceContext>, rng: &mut impl Rng) -> TraceContext {
        let drawn = self.ratio > 0.0 && rng.random::<f64>() < self.ratio;
        match parent {
            Some(parent) if self.follows_parent => parent.child(rng),
            Some(parent) => TraceContext { sampled: drawn, ..parent.child(rng) },
            None => TraceContext::root(rng, drawn),
        }
    }
}

/// What the variables say.
#[derive(Clone, Debug, PartialEq)]
pub struct OtlpSettings {
    /// The whole URL.
    pub endpoint: String,
    /// How to talk to it.
    pub protocol: OtlpProtocol,
    /// Name of the service in traces.
    pub service_name: String,
    /// Further attributes of the process.
    pub attributes: Vec<(String, String)>,
    /// Which requests are traced.
    pub sampling: Sampling,
}

/// OTLP's transports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtlpProtocol {
    /// `grpc`
    Grpc,
    /// `http/protobuf`
    Http,
}

impl OtlpSettings {
    /// Reads the variables through `var`; `None` when no endpoint is set, or tracing is switched off. `service` is this
    /// process's name unless `OTEL_SERVICE_NAME` is set.
    ///
    /// # Errors
    /// [`OtlpError::Variable`].
    pub fn from_vars(service: &str, var: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, OtlpError> {
        let var =
            |name: &str| var(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
        let is_off = var("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"))
            || var("OTEL_TRACES_EXPORTER").is_some_and(|value| value == "none");
        let own = var("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT");
        let (Some((endpoint, is_own)), false) = (
            own.map(|own| (own, true)).or_else(|| Some((var("OTEL_EXPORTER_OTLP_ENDPOINT")?, false))),
            is_off,
        ) else {
            return Ok(None);
        };
        let endpoint_variable =
            if is_own { "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" } else { "OTEL_EXPORTER_OTLP_ENDPOINT" };
        let refuse = |variable, what: String| OtlpError::Variable { variable, what };
        let uri: http::Uri =
            endpoint.parse().map_err(|error| refuse(endpoint_variable, format!("{endpoint:?}: {error}")))?;
        if uri.scheme_str() != Some("http") || uri.host().is_none() {
            let what = format!(
                "{endpoint:?}: expected http://host:port (a collector beside this process; it speaks TLS)"
            );
            return Err(refuse(endpoint_variable, what));
        }
        let named = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"];
        let protocol = match named.iter().find_map(|name| Some((*name, var(name)?))) {
            None if uri.port_u16() == Some(GRPC_PORT) => OtlpProtocol::Grpc,
            None => OtlpProtocol::Http,
            Some((_, value)) if value == "grpc" => OtlpProtocol::Grpc,
            Some((_, value)) if value == "http/protobuf" => OtlpProtocol::Http,
            Some((name, value)) => {
                return Err(refuse(name, format!("{value:?}: known are grpc and http/protobuf")));
            }
        };
        let endpoint = match protocol {
            OtlpProtocol::Http if !is_own => format!("{}/v1/traces", endpoint.trim_end_matches('/')),
            _ => endpoint,
        };
        let mut attributes = match var("OTEL_RESOURCE_ATTRIBUTES") {
            Some(list) => pairs(&list).ok_or_else(|| {
                refuse("OTEL_RESOURCE_ATTRIBUTES", format!("{list:?}: expected key=value,key=value"))
            })?,
            None => Vec::new(),
        };
        let listed = attributes.iter().find(|(key, _)| key == "service.name").map(|(_, name)| name.clone());
        attributes.retain(|(key, _)| key != "service.name");
        let service_name = var("OTEL_SERVICE_NAME").or(listed).unwrap_or_else(|| service.to_owned());
        let sampling = sampling(var("OTEL_TRACES_SAMPLER"), var("OTEL_TRACES_SAMPLER_ARG"))?;
        Ok(Some(Self { endpoint, protocol, service_name, attributes, sampling }))
    }

    /// Begins to export. `about` are attributes of this process that the variables do not know. Must be called within a
    /// tokio runtime that lives until the sink is flushed.
    ///
    /// # Errors
    /// [`OtlpError::Build`]. A collector that is not there is no error: it may come later.
    pub fn start(&self, about: impl IntoIterator<Item = KeyValue>) -> Result<SpanSink, OtlpError> {
        let mut exporter = match self.protocol {
            OtlpProtocol::Grpc => SpanExporter::builder()
                .with_tonic()
                .with_protocol(Protocol::Grpc)
                .with_endpoint(&self.endpoint)
                .build()?,
            OtlpProtocol::Http => SpanExporter::builder()
                .with_http()
                .with_protocol(Protocol::HttpBinary)
                .with_http_client(HyperClient::new())
                .with_endpoint(&self.endpoint)
                .build()?,
        };
        let given = self.attributes.iter().map(|(key, value)| KeyValue::new(key.clone(), value.clone()));
        let resource = Resource::builder_empty()
            .with_attributes(about)
            .with_attributes(given)
            .with_service_name(self.service_name.clone())
            .build();
        exporter.set_resource(&resource);
        tracing::info!(endpoint = self.endpoint, protocol = ?self.protocol, "traces are exported");
        Ok(SpanSink::new(exporter))
    }
}

fn pairs(list: &str) -> Option<Vec<(String, String)>> {
    let pair = |item: &str| {
        let (key, value) = item.split_once('=')?;
        (!key.trim().is_empty()).then(|| (key.trim().to_owned(), value.trim().to_owned()))
    };
    list.split(',').filter(|item| !item.trim().is_empty()).map(pair).collect()
}

fn sampling(name: Option<String>, arg: Option<String>) -> Result<Sampling, OtlpError> {
    let ratio = || match arg.as_deref().map(str::parse::<f64>) {
        None => Ok(1.0),
        Some(Ok(ratio)) if (0.0..=1.0).contains(&ratio) => Ok(ratio),
        Some(_) => Err(OtlpError::Variable {
            variable: "OTEL_TRACES_SAMPLER_ARG",
            what: format!("{:?}: expected a number from 0 to 1", arg.as_deref().unwrap_or_default()),
        }),
    };
    let name = name.unwrap_or_else(|| "parentbased_always_on".into());
    let (of_parent, kind) = match name.strip_prefix("parentbased_") {
        Some(kind) => (true, kind),
        None => (false, name.as_str()),
    };
    let ratio = match kind {
        "always_on" => 1.0,
        "always_off" => 0.0,
        "traceidratio" => ratio()?,
        _ => {
            return Err(OtlpError::Variable {
                variable: "OTEL_TRACES_SAMPLER",
                what: format!("{name:?}: known are [parentbased_]always_on, always_off and traceidratio"),
            });
        }
    };
    Ok(Sampling { ratio, follows_parent: of_parent })
}

/// Plain HTTP for the exporter's thread, which is none of tokio's: the request itself runs on the runtime.
#[derive(Clone, Debug)]
struct HyperClient {
    client: Client<HttpConnector, Full<Bytes>>,
    runtime: Handle,
}

impl HyperClient {
    fn new() -> Self {
        Self { client: Client::builder(TokioExecutor::new()).build_http(), runtime: Handle::current() }
    }
}

#[tonic::async_trait]
impl HttpClient for HyperClient {
    async fn send_bytes(&self, request: http::Request<Bytes>) -> Result<http::Response<Bytes>, HttpError> {
        let client = self.client.clone();
        let exchange = async move {
            let (head, body) = client.request(request.map(Full::new)).await?.into_parts();
            let body = Limited::new(body, MAX_ANSWER_BYTES).collect().await?.to_bytes();
            Ok(http::Response::from_parts(head, body))
        };
        self.runtime.spawn(async move { tokio::time::timeout(HTTP_TIMEOUT, exchange).await? }).await?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(vars: &[(&str, &str)]) -> Result<Option<OtlpSettings>, String> {
        let var = |name: &str| {
            let found = vars.iter().find(|(key, _)| *key == name)?;
            Some(found.1.to_owned())
        };
        OtlpSettings::from_vars("ffn-svc", var).map_err(|error| error.to_string())
    }

    const ENDPOINT: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318/");

    #[test]
    fn nothing_is_exported_unless_an_endpoint_is_set() {
        assert_eq!(read(&[]), Ok(None));
        assert_eq!(read(&[("OTEL_EXPORTER_OTLP_ENDPOINT", " ")]), Ok(None));
        assert_eq!(read(&[ENDPOINT, ("OTEL_SDK_DISABLED", "TRUE")]), Ok(None));
        assert_eq!(read(&[ENDPOINT, ("OTEL_TRACES_EXPORTER", "none")]), Ok(None));
    }

    #[test]
    fn endpoints_and_protocols_are_those_of_the_standard() {
        let of = |vars: &[(&str, &str)]| {
            let settings = read(vars).unwrap().unwrap();
            (settings.endpoint, settings.protocol)
        };
        assert_eq!(of(&[ENDPOINT]), ("http://collector:4318/v1/traces".into(), OtlpProtocol::Http));
        let own = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://other:80/spans");
        assert_eq!(of(&[ENDPOINT, own]), ("http://other:80/spans".into(), OtlpProtocol::Http));
        let grpc = ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc");
        assert_eq!(of(&[ENDPOINT, grpc]), ("http://collector:4318/".into(), OtlpProtocol::Grpc));
        let conventional = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317");
        assert_eq!(of(&[conventional]), ("http://collector:4317".into(), OtlpProtocol::Grpc));
    }

    #[test]
    fn names_attributes_and_samplers_are_read() {
        let settings = read(&[
            ENDPOINT,
            ("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine, zone=b"),
            ("OTEL_TRACES_SAMPLER", "traceidratio"),
            ("OTEL_TRACES_SAMPLER_ARG", "0.25"),
        ])
        .unwrap()
        .unwrap();
        assert_eq!((settings.service_name.as_str(), settings.attributes.len()), ("mine", 1));
        assert_eq!(settings.sampling, Sampling { ratio: 0.25, follows_parent: false });
        let plain = read(&[ENDPOINT]).unwrap().unwrap();
        assert_eq!((plain.service_name.as_str(), plain.sampling), ("ffn-svc", Sampling::default()));
    }

    #[test]
    fn what_cannot_be_followed_is_named() {
        for (name, value) in [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://collector:4318"),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
            ("OTEL_RESOURCE_ATTRIBUTES", "zone"),
            ("OTEL_TRACES_SAMPLER", "sometimes"),
        ] {
            let refused = read(&[(name, value), ENDPOINT]).unwrap_err();
            assert!(refused.starts_with(name) && refused.contains(value), "{refused}");
        }
        let ratio = [ENDPOINT, ("OTEL_TRACES_SAMPLER", "traceidratio"), ("OTEL_TRACES_SAMPLER_ARG", "2")];
        assert!(read(&ratio).unwrap_err().starts_with("OTEL_TRACES_SAMPLER_ARG"));
    }

    #[test]
    fn a_caller_decides_unless_the_sampler_says_otherwise() {
        let mut rng = rand::rng();
        let unwanted = TraceContext::root(&mut rng, false);
        let begun = Sampling::default().begin(Some(&unwanted), &mut rng);
        assert_eq!((begun.trace_id, begun.sampled), (unwanted.trace_id, false));
        assert_ne!(begun.span_id, unwanted.span_id);
        let always = Sampling { ratio: 1.0, follows_parent: false };
        assert!(always.begin(Some(&unwanted), &mut rng).sampled && always.begin(None, &mut rng).sampled);
        let never = Sampling { ratio: 0.0, follows_parent: true };
        assert!(!never.begin(None, &mut rng).sampled);
        assert!(never.begin(Some(&TraceContext::root(&mut rng, true)), &mut rng).sampled);
    }
}
