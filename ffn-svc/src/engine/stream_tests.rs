//! Links that a stream drives, with a runner whose steps keep the engine's thread waiting for the peer, as those of a model do
//! that reads something back in the middle of a layer.
use std::sync::mpsc;
use std::time::Duration;

use afd_common::ids::{Epoch, LayerIdx, StepId};
use afd_common::telemetry::Metrics;
use afd_gpu::channel::GiveUp;
use tch::Tensor;

use super::*;
use crate::model::Side;

const PATIENCE: Duration = Duration::from_secs(10);

struct Waiter {
    begun: mpsc::Sender<()>,
    closed: mpsc::Sender<()>,
    given_up: Option<mpsc::Receiver<()>>,
}

impl StageModel for Waiter {
    fn spec(&self) -> StageSpec {
        StageSpec::dense(2, 1)
    }

    fn forward(&mut self, _layer: LayerIdx, _rows: &Tensor, _side: &Side) -> Result<Tensor, String> {
        Err("only steps".into())
    }

    fn steps(&mut self) -> Option<&mut dyn StepRunner> {
        Some(self)
    }
}

impl StepRunner for Waiter {
    fn open(
        &mut self,
        _id: StreamLinkId,
        _request: &OpenStream,
        grant: &mut dyn FnMut(OwnEnd),
    ) -> Result<Option<GiveUp>, OpenStreamError> {
        let (tell, told) = mpsc::channel();
        self.given_up = Some(told);
        grant(OwnEnd::Nccl([[0; 128]; 2]));
        Ok(Some(GiveUp::new(move || tell.send(()).unwrap_or_default())))
    }

    fn begin(&mut self, _link: StreamLinkId, _plan: &PlannedStep) -> Result<StepMode, String> {
        let _ = self.begun.send(());
        let told = self.given_up.as_ref().map(|told| told.recv_timeout(PATIENCE));
        Err(format!("the peer is gone: {told:?}"))
    }

    fn poll(&mut self) -> Option<StepEnd> {
        None
    }

    fn num_begun(&self) -> usize {
        0
    }

    fn close(&mut self, _link: StreamLinkId) {
        let _ = self.closed.send(());
    }
}

#[test]
fn a_session_that_ends_frees_an_engine_that_waits_for_its_peer() {
    let ((begun, has_begun), (closed, was_closed)) = (mpsc::channel(), mpsc::channel());
    let options = EngineOptions {
        max_rows: 8,
        max_batch_rows: 16,
        metrics: EngineMetrics::new(&Metrics::new()).unwrap(),
        inject_delay: Duration::ZERO,
        board: Duration::ZERO,
        routing: Routing::Model,
    };
    let engine = spawn(Waiter { begun, closed, given_up: None }, options).unwrap();
    let session = SessionTag(3);
    let request = OpenStream {
        peer: PeerEnd::Nccl,
        epoch: Epoch(1),
        num_stages: 1,
        max_rows: 8,
        patience: PATIENCE,
        deadline: PATIENCE,
    };
    let accounts = Arc::new(StepAccounts::new(1, false));
    let owner = StreamOwner { peer: "A0".into(), accounts, session };
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(engine.open_stream(request, owner)).unwrap();
    let plan =
        PlannedStep { step: StepId(1), stage_rows: vec![1], phase: 0, graph: GraphUse::None, profile: false };
    engine.plan(session, plan);
    has_begun.recv_timeout(PATIENCE).unwrap();
    engine.close_session(SessionTag(4), "another's");
    engine.close_session(session, "its control stream has ended");
    was_closed.recv_timeout(PATIENCE / 2).expect("the engine waits out its patience");
}
