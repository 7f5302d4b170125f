//! A collector in the test: OTLP over gRPC and over HTTP on one port, spans kept as they come.
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use afd_common::net::{Listener, Options};
use anyhow::bail;
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use prost::Message;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::tree::{Seen, Trace};

/// See the module's head. Ends with the test.
pub(crate) struct Collector {
    kept: Arc<Kept>,
    address: SocketAddr,
    stop: CancellationToken,
}

#[derive(Default)]
struct Kept {
    spans: Mutex<Vec<Seen>>,
    more: Notify,
}

impl Collector {
    pub(crate) async fn start() -> anyhow::Result<Self> {
        let kept = Arc::<Kept>::default();
        let grpc = TraceServiceServer::new(Face(Arc::clone(&kept)));
        let http = Router::new().route("/v1/traces", post(export)).with_state(Arc::clone(&kept));
        let router = http.merge(tonic::service::Routes::new(grpc).into_axum_router().reset_fallback());
        let listener = Listener::bind(([127, 0, 0, 1], 0).into()).await?;
        let (address, stop) = (listener.address(), CancellationToken::new());
        tokio::spawn(listener.serve(router, None, Options::default(), stop.clone()));
        Ok(Self { kept, address, stop })
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Everything so far.
    pub(crate) fn spans(&self) -> Vec<Seen> {
        self.kept.spans.lock().unwrap().clone()
    }

    /// Waits until the spans of a trace satisfy `complete`.
    pub(crate) async fn trace(
        &self,
        trace_id: &str,
        complete: impl Fn(&Trace) -> bool,
    ) -> anyhow::Result<Trace> {
        let of_trace = || Trace(self.spans().into_iter().filter(|span| span.trace_id == trace_id).collect());
        let found = async {
            loop {
                let more = self.kept.more.notified();
                let trace = of_trace();
                if complete(&trace) {
                    return trace;
                }
                more.await;
            }
        };
        match tokio::time::timeout(Duration::from_secs(30), found).await {
            Ok(trace) => Ok(trace),
            Err(_) => bail!("the trace is not complete after 30 s:\n{}", of_trace().drawn()),
        }
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Kept {
    fn take(&self, request: ExportTraceServiceRequest) {
        let mut spans = self.spans.lock().unwrap();
        for resource in request.resource_spans {
            let about = tags(resource.resource.map(|resource| resource.attributes).unwrap_or_default());
            let service = about.get("service.name").cloned().unwrap_or_default();
            for span in resource.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                let parent = hex(&span.parent_span_id);
                spans.push(Seen {
                    service: service.clone(),
                    name: span.name,
                    trace_id: hex(&span.trace_id),
                    span_id: hex(&span.span_id),
                    parent: (!parent.is_empty()).then_some(parent),
                    start_us: span.start_time_unix_nano / 1000,
                    end_us: span.end_time_unix_nano / 1000,
                    tags: tags(span.attributes),
                    links: span.links.iter().map(|link| (hex(&link.trace_id), hex(&link.span_id))).collect(),
                });
            }
        }
        drop(spans);
        self.more.notify_waiters();
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn tags(attributes: Vec<KeyValue>) -> BTreeMap<String, String> {
    let text = |value: Value| match value {
        Value::StringValue(text) => text,
        Value::BoolValue(value) => value.to_string(),
        Value::IntValue(value) => value.to_string(),
        Value::DoubleValue(value) => value.to_string(),
        other => format!("{other:?}"),
    };
    let value = |pair: KeyValue| Some((pair.key, text(pair.value?.value?)));
    attributes.into_iter().filter_map(value).collect()
}

struct Face(Arc<Kept>);

#[tonic::async_trait]
impl TraceService for Face {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.take(request.into_inner());
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

async fn export(State(kept): State<Arc<Kept>>, body: Bytes) -> Result<Vec<u8>, String> {
    kept.take(ExportTraceServiceRequest::decode(body).map_err(|error| error.to_string())?);
    Ok(ExportTraceServiceResponse::default().encode_to_vec())
}
