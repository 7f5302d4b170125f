//! One port, three protocols.
use std::io::{Read, Write};
use std::time::Instant;

use axum::extract::ConnectInfo;
use axum::routing::get;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Notify, mpsc};
use tonic::{Request, Response, Status};

use super::*;
use crate::link::contract::{self, PATIENCE};
use crate::link::grants::{LinkId, Secret, Ticket};
use crate::link::{Doorbell, attach};
use crate::proto::v1::layer_stage_service_client::LayerStageServiceClient;
use crate::proto::v1::layer_stage_service_server::{LayerStageService, LayerStageServiceServer};
use crate::proto::v1::{
    DescribeRequest, DescribeResponse, RunStageRequest, RunStageResponse, StreamStagesRequest,
};

struct Echo;

#[tonic::async_trait]
impl LayerStageService for Echo {
    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<DescribeResponse>, Status> {
        Err(Status::unimplemented("not in this test"))
    }

    async fn run_stage(
        &self,
        request: Request<RunStageRequest>,
    ) -> Result<Response<RunStageResponse>, Status> {
        assert!(request.remote_addr().is_some(), "the peer's address is known to gRPC services");
        Ok(Response::new(RunStageResponse { hidden_states: request.into_inner().hidden_states }))
    }

    type StreamStagesStream = crate::link::inline::ResponseStream;

    async fn stream_stages(
        &self,
        _: Request<tonic::Streaming<StreamStagesRequest>>,
    ) -> Result<Response<Self::StreamStagesStream>, Status> {
        Err(Status::unimplemented("not in this test"))
    }
}

struct Served {
    address: SocketAddr,
    stats: Arc<NetStats>,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<Drained>,
    /// A request of `/slow` is being answered.
    slow_began: Arc<Notify>,
}

async fn serve(links: Option<LinkAcceptor>, options: Options) -> Served {
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_service_status("", tonic_health::ServingStatus::Serving).await;
    let slow_began = Arc::<Notify>::default();
    let began = Arc::clone(&slow_began);
    let slow = move || {
        began.notify_one();
        async {
            sleep(Duration::from_millis(200)).await;
            "slow"
        }
    };
    let router = tonic::service::Routes::new(health)
        .add_service(LayerStageServiceServer::new(Echo))
        .into_axum_router()
        .route(
            "/hello",
            get(|ConnectInfo(peer): ConnectInfo<SocketAddr>| async move { format!("hello {peer}") }),
        )
        .route("/refused", get(|| async { http::StatusCode::BAD_REQUEST }))
        .route("/slow", get(slow));
    let listener = Listener::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let (address, stats, stop) = (listener.address(), listener.stats(), CancellationToken::new());
    let task = tokio::spawn(listener.serve(router, links, options, stop.clone()));
    Served { address, stats, stop, task, slow_began }
}

impl Served {
    async fn stop(self) -> Drained {
        self.stop.cancel();
        timeout(PATIENCE, self.task).await.unwrap().unwrap()
    }
}

async fn http1_get(address: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).await.unwrap();
    response
}

#[tokio::test(flavor = "multi_thread")]
async fn http_grpc_and_links_share_one_port() {
    let (attached, mut links) = mpsc::channel(1);
    let acceptor: LinkAcceptor = Arc::new(move |stream, _| {
        let answer = |ticket: &Ticket| Ok((contract::limits("A0"), Doorbell::default(), ticket.link_id));
        attached.blocking_send(attach::answer(stream, PATIENCE, answer).unwrap()).ok().unwrap();
    });
    let served = serve(Some(acceptor), Options::default()).await;

    let response = http1_get(served.address, "/hello").await;
    assert!(response.starts_with("HTTP/1.1 200") && response.contains("hello 127.0.0.1:"), "{response}");

    let channel = client::endpoint(&served.address.to_string(), PATIENCE).unwrap().connect().await.unwrap();
    let mut health = tonic_health::pb::health_client::HealthClient::new(channel.clone());
    let status = health.check(tonic_health::pb::HealthCheckRequest::default()).await.unwrap().into_inner();
    assert_eq!(status.status(), tonic_health::pb::health_check_response::ServingStatus::Serving);

    let address = served.address;
    let ticket = Ticket { link_id: LinkId(77), secret: Secret::from_slice(&[3; 16]).unwrap() };
    let dialing = tokio::task::spawn_blocking(move || {
        attach::dial(address, None, &ticket, contract::limits("F0"), Doorbell::default(), PATIENCE).unwrap()
    });
    let (_, link_id) = timeout(PATIENCE, links.recv()).await.unwrap().unwrap();
    assert_eq!(link_id, LinkId(77));
    assert_eq!(dialing.await.unwrap().limits().peer, "F0");

    let mut stages = LayerStageServiceClient::new(channel);
    let mut times = Vec::new();
    for _ in 0..200 {
        let tensor = crate::proto::v1::Tensor { dtype: 2, shape: vec![7, 1024], data: vec![1; 14 << 10] };
        let request = RunStageRequest { layer: 0, hidden_states: Some(tensor), side_tensors: Vec::new() };
        let started = Instant::now();
        let echoed = stages.run_stage(request).await.unwrap().into_inner();
        times.push(started.elapsed());
        assert_eq!(echoed.hidden_states.unwrap().data.len(), 14 << 10);
    }
    times.sort();
    println!("a unary call carrying 14 KB there and back: p50 {:?}, p99 {:?}", times[100], times[198]);

    let counts = served.stats.counts();
    assert_eq!((counts.accepted, counts.links, counts.refused), (3, 1, 0));
    drop((health, stages));
    assert_eq!(served.stop().await, Drained { cut: 0 });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_in_use_is_named() {
    let first = Listener::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let error = Listener::bind(first.address()).await.err().unwrap();
    assert!(matches!(error, NetError::InUse { address } if address == first.address()));
    assert!(error.to_string().contains(&first.address().to_string()));
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_and_slow_connections_are_closed() {
    let options = Options { header_timeout: Duration::from_millis(100), ..Options::default() };
    let served = serve(None, options).await;
    for beginning in [&b""[..], b"AFDL", b"PRI * HT", b"GET /hello HTTP/1.1\r\nhost:"] {
        let mut stream = TcpStream::connect(served.address).await.unwrap();
        stream.write_all(beginning).await.unwrap();
        let mut rest = Vec::new();
        let closed = timeout(PATIENCE, stream.read_to_end(&mut rest)).await;
        assert!(closed.is_ok(), "{beginning:?} kept its connection");
    }
    // A role without links closes a connection that wants one.
    let mut stream = TcpStream::connect(served.address).await.unwrap();
    stream.write_all(&[&attach::MAGIC[..], &[0; 32]].concat()).await.unwrap();
    let mut rest = Vec::new();
    let _ = timeout(PATIENCE, stream.read_to_end(&mut rest)).await.unwrap();
    assert!(rest.is_empty());
    assert_eq!(served.stop().await, Drained { cut: 0 });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_without_requests_is_closed_and_one_with_a_request_is_not() {
    let (idle_timeout, header_timeout) = (Duration::from_millis(100), Duration::from_millis(100));
    let options = Options { idle_timeout, header_timeout, ..Options::default() };
    let served = serve(None, options).await;
    for preface in [&b"GET /hello HTTP/1.1\r\nhost: x\r\n\r\n"[..], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"] {
        let mut stream = TcpStream::connect(served.address).await.unwrap();
        stream.write_all(preface).await.unwrap();
        let mut rest = Vec::new();
        let closed = timeout(PATIENCE, stream.read_to_end(&mut rest)).await;
        assert!(closed.is_ok(), "{preface:?} kept its connection");
    }
    assert!(
        http1_get(served.address, "/slow").await.ends_with("slow"),
        "it takes longer than idle connections have"
    );
    assert_eq!(served.stop().await, Drained { cut: 0 });
}

/// Until the connection has nothing more to say for a while, or ends.
async fn answer_of(stream: &mut TcpStream) -> String {
    let (mut heard, mut piece) = (Vec::new(), [0; 4096]);
    while !String::from_utf8_lossy(&heard).contains("hello 127.0.0.1") {
        match timeout(PATIENCE, stream.read(&mut piece)).await.expect("no answer came").unwrap_or(0) {
            0 => break,
            count => heard.extend_from_slice(&piece[..count]),
        }
    }
    String::from_utf8_lossy(&heard).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kept_connection_may_rest_between_requests_and_may_not_dawdle_in_one() {
    let header_timeout = Duration::from_millis(200);
    let options = Options { header_timeout, idle_timeout: PATIENCE, ..Options::default() };
    let served = serve(None, options).await;
    let mut stream = TcpStream::connect(served.address).await.unwrap();
    for _ in 0..3 {
        stream.write_all(b"GET /hello HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        assert!(answer_of(&mut stream).await.starts_with("HTTP/1.1 200"));
        sleep(header_timeout * 3).await;
    }
    // A byte now and then does not buy time.
    let begun = Instant::now();
    let mut closed = false;
    for byte in b"GET /hello HTTP/1.1\r\nhost: a-long-name-that-takes-its-time\r\n".iter() {
        let (mut rest, pause) = ([0; 16], header_timeout / 10);
        closed = stream.write_all(&[*byte]).await.is_err()
            || matches!(timeout(pause, stream.read(&mut rest)).await, Ok(Ok(0) | Err(_)));
        if closed {
            break;
        }
    }
    assert!(closed, "it was let dawdle for {:?}", begun.elapsed());
    assert!(begun.elapsed() >= header_timeout, "{:?}", begun.elapsed());
    assert_eq!(served.stop().await, Drained { cut: 0 });
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_are_no_http_are_told_so() {
    let served = serve(None, Options::default()).await;
    for bytes in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..],
        b"EHLO there\r\n\r\n",
        b"GET /hello HTTP/9.9\r\n\r\n",
    ] {
        let mut stream = TcpStream::connect(served.address).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        let said = answer_of(&mut stream).await;
        assert!(said.starts_with("HTTP/1.1 400") && said.contains("no HTTP request"), "{bytes:?}: {said}");
    }
    // An empty refusal of the service's own stays what it is; and so does what comes after it.
    let mut stream = TcpStream::connect(served.address).await.unwrap();
    stream
        .write_all(b"GET /refused HTTP/1.1\r\nhost: x\r\n\r\nGET /hello HTTP/1.1\r\nhost: x\r\n\r\n")
        .await
        .unwrap();
    let said = answer_of(&mut stream).await;
    assert!(said.starts_with("HTTP/1.1 400") && said.contains("content-length: 0"), "{said}");
    assert_eq!(served.stop().await, Drained { cut: 0 });
}

/// `/stream` is a call whose request is a stream.
#[tokio::test(flavor = "multi_thread")]
async fn half_a_body_is_not_waited_for_unless_it_is_a_stream() {
    let read = |body: axum::body::Bytes| async move { format!("{} bytes", body.len()) };
    let router =
        Router::new().route("/whole", axum::routing::post(read)).route("/stream", axum::routing::post(read));
    let listener = Listener::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let (address, stop) = (listener.address(), CancellationToken::new());
    let body = BodyTimes { idle: Duration::from_millis(100), whole: PATIENCE };
    let options = Options { body, is_stream: |path| path == "/stream", ..Options::default() };
    let task = tokio::spawn(listener.serve(router, None, options, stop.clone()));
    let half = async |path: &str| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 8\r\n\r\nhalf");
        stream.write_all(head.as_bytes()).await.unwrap();
        stream
    };
    let mut patient = half("/stream").await;
    let mut answer = String::new();
    timeout(PATIENCE, half("/whole").await.read_to_string(&mut answer)).await.unwrap().unwrap();
    assert!(answer.starts_with("HTTP/1.1 400"), "refused, and the connection closed: {answer}");
    patient.write_all(b"done").await.unwrap();
    let mut answer = [0; 64];
    let count = timeout(PATIENCE, patient.read(&mut answer)).await.unwrap().unwrap();
    assert!(answer[..count].starts_with(b"HTTP/1.1 200"));
    drop(patient);
    stop.cancel();
    task.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_beyond_the_limit_are_closed_at_once() {
    let served = serve(None, Options { max_connections: 1, ..Options::default() }).await;
    let mut first = TcpStream::connect(served.address).await.unwrap();
    first.write_all(b"GET /hello HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut byte = [0];
    first.read_exact(&mut byte).await.unwrap();
    let mut second = TcpStream::connect(served.address).await.unwrap();
    let read = timeout(PATIENCE, second.read(&mut byte)).await.unwrap();
    assert!(matches!(read, Ok(0) | Err(_)));
    assert_eq!(served.stats.counts().refused, 1);
    drop(first);
    let deadline = Instant::now() + PATIENCE;
    while served.stats.counts().open > 0 {
        assert!(Instant::now() < deadline);
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_lets_running_requests_end_and_cuts_what_does_not() {
    let served = serve(None, Options::default()).await;
    let address = served.address;
    let running = tokio::spawn(async move { http1_get(address, "/slow").await });
    let idle = tokio::task::spawn_blocking(move || {
        let mut idle = std::net::TcpStream::connect(address).unwrap();
        idle.write_all(b"GET /hello HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        idle.read_exact(&mut [0; 1]).unwrap();
        idle
    });
    let _idle = idle.await.unwrap();
    timeout(PATIENCE, served.slow_began.notified()).await.unwrap();
    assert_eq!(served.stop().await, Drained { cut: 0 });
    assert!(running.await.unwrap().ends_with("slow"));
    assert!(TcpStream::connect(address).await.is_err(), "nothing listens any more");

    let served = serve(None, Options { drain: Duration::from_millis(20), ..Options::default() }).await;
    let address = served.address;
    let running = tokio::spawn(async move {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest).await;
        rest
    });
    timeout(PATIENCE, served.slow_began.notified()).await.unwrap();
    assert_eq!(served.stop().await, Drained { cut: 1 });
    assert!(running.await.unwrap().is_empty());
}

/// What a client of HTTP/1.1 or HTTP/2 is answered that sends these headers; `None` when it is cut off.
async fn with_headers(served: &Served, http2: bool, headers: &[(String, String)]) -> Option<u16> {
    let mut builder = hyper_util::client::legacy::Client::builder(TokioExecutor::new());
    let client = builder.http2_only(http2).build_http::<axum::body::Body>();
    let mut request = http::Request::get(format!("http://{}/hello", served.address));
    for (name, value) in headers {
        request = request.header(name, value);
    }
    let answer = client.request(request.body(axum::body::Body::empty()).unwrap());
    timeout(PATIENCE, answer).await.unwrap().ok().map(|answer| answer.status().as_u16())
}

#[tokio::test(flavor = "multi_thread")]
async fn more_headers_or_longer_ones_than_allowed_are_refused() {
    let options = Options { max_headers: 20, max_header_bytes: 20 << 10, ..Options::default() };
    let served = serve(None, options).await;
    let many = |count: usize| (0..count).map(|i| (format!("x-{i}"), "a".to_owned())).collect::<Vec<_>>();
    let long = |bytes: usize| vec![("x-long".to_owned(), "a".repeat(bytes))];
    for http2 in [false, true] {
        for (headers, fits) in
            [(many(10), true), (many(30), false), (long(10 << 10), true), (long(30 << 10), false)]
        {
            let answered = with_headers(&served, http2, &headers).await;
            let expected = if fits { 200 } else { 431 };
            assert_eq!(answered, Some(expected), "{} headers, http2: {http2}", headers.len());
        }
    }
    let response = http1_get(served.address, "/hello").await;
    assert!(response.starts_with("HTTP/1.1 200"), "it lives on: {response}");
    assert_eq!(served.stop().await, Drained { cut: 0 });
}

/// A connection with a request on it, whose other end went away without a word.
#[tokio::test(flavor = "multi_thread")]
async fn a_silent_peer_is_given_up_and_one_that_answers_is_not() {
    let options = Options { keepalive: Duration::from_millis(50), ..Options::default() };
    let served = serve(None, options).await;
    let mut stream = TcpStream::connect(served.address).await.unwrap();
    // A preface and settings, and never an answer to a ping.
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    let mut rest = Vec::new();
    // Nothing else ends it so soon: connections may idle for minutes.
    let closed = timeout(Options::default().header_timeout / 2, stream.read_to_end(&mut rest)).await;
    assert!(closed.is_ok(), "a peer that answers no ping is still waited for");
    // It takes four times as long.
    assert_eq!(over_http_2(&served, "/slow").await, 200);
    assert_eq!(served.stop().await, Drained { cut: 0 });
}

async fn over_http_2(served: &Served, path: &str) -> u16 {
    let mut builder = hyper_util::client::legacy::Client::builder(TokioExecutor::new());
    let client = builder.http2_only(true).build_http::<axum::body::Body>();
    let uri = format!("http://{}{path}", served.address).parse().unwrap();
    timeout(PATIENCE, client.get(uri)).await.unwrap().unwrap().status().as_u16()
}
