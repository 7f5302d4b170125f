//! `LayerStageService`: one layer's FFN on tensors carried inline, for clients in any language, and the inline link.
use std::sync::Arc;

use afd_common::frame::{FrameHeader, FrameKind, RowType, SideKind};
use afd_common::ids::{Epoch, HopKey, LayerIdx};
use afd_common::link::{LinkKind, inline};
use afd_common::proto::v1;
use afd_common::proto::v1::layer_stage_service_server::LayerStageService;
use afd_common::spelling;
use bytes::Bytes;
use tokio::sync::Semaphore;
use tonic::{Request, Response, Status, Streaming};

use crate::engine::StageSpec;
use crate::model::LayerSpec;
use crate::session::sessions::Sessions;

/// Unary calls that may wait for the engine at once: each holds its rows in memory.
const MAX_CALLS: usize = 64;

/// See the module's head.
pub(super) struct LayerStages {
    sessions: Arc<Sessions>,
    calls: Semaphore,
}

impl LayerStages {
    pub(super) fn new(sessions: Arc<Sessions>) -> Self {
        Self { sessions, calls: Semaphore::new(MAX_CALLS) }
    }
}

#[tonic::async_trait]
impl LayerStageService for LayerStages {
    async fn describe(
        &self,
        _: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::DescribeResponse>, Status> {
        let (settings, spec) = (self.sessions.settings(), self.sessions.engine().spec());
        Ok(Response::new(v1::DescribeResponse {
            model: Some(settings.offer.model.clone()),
            shard: Some(v1::ShardSpec { index: spec.shard.index(), count: spec.shard.count() }),
            layers: spec.layers.iter().enumerate().map(|(at, layer)| describe(spec, at, layer)).collect(),
            max_rows: settings.offer.max_tokens_per_stage,
        }))
    }

    async fn run_stage(
        &self,
        request: Request<v1::RunStageRequest>,
    ) -> Result<Response<v1::RunStageResponse>, Status> {
        let _permit = self.calls.acquire().await.map_err(|_| Status::unavailable("stopping"))?;
        let (engine, request) = (self.sessions.engine(), request.into_inner());
        let spec = engine.spec();
        let (header, body) = dispatch(spec, request)?;
        let data = engine.call(header, body).await?;
        let shape = vec![header.rows.into(), spec.hidden_size as i64];
        let dtype = afd_common::identity::dtype(spec.combine()).into();
        Ok(Response::new(v1::RunStageResponse { hidden_states: Some(v1::Tensor { dtype, shape, data }) }))
    }

    type StreamStagesStream = inline::ResponseStream;

    async fn stream_stages(
        &self,
        request: Request<Streaming<v1::StreamStagesRequest>>,
    ) -> Result<Response<Self::StreamStagesStream>, Status> {
        let patience = self.sessions.settings().attach_timeout;
        let attach = |ticket: &_| self.sessions.attach(ticket, &[LinkKind::Inline]);
        let (responses, link, session) = inline::answer(request.into_inner(), patience, attach).await?;
        self.sessions.adopt(Box::new(link), &session);
        Ok(Response::new(responses))
    }
}

fn describe(spec: &StageSpec, at: usize, layer: &LayerSpec) -> v1::LayerSpec {
    let rows = |dtype| tensor_spec("hidden_states", dtype, spec.hidden_size as u32);
    let moe = layer.num_experts > 0;
    let mut inputs = vec![rows(afd_common::identity::dtype(spec.activations))];
    inputs.extend(side_specs(layer.side, layer.side_columns));
    v1::LayerSpec {
        layer: at as u32,
        kind: if moe { v1::LayerKind::Moe } else { v1::LayerKind::Dense }.into(),
        inputs,
        outputs: vec![rows(afd_common::identity::dtype(spec.combine()))],
        side_tensors: side_tensors(layer.side).into(),
        num_experts: layer.num_experts,
        experts_per_token: layer.experts_per_token,
        local_experts: layer.local_experts.clone(),
        shared_experts: layer
            .shared_experts
            .map_or(v1::SharedExpertPlacement::Unspecified, Into::into)
            .into(),
    }
}

fn tensor_spec(name: &str, dtype: v1::Dtype, columns: u32) -> v1::TensorSpec {
    v1::TensorSpec { name: name.to_owned(), dtype: dtype.into(), columns }
}

fn side_specs(side: SideKind, columns: u32) -> Vec<v1::TensorSpec> {
    match side {
        SideKind::None => Vec::new(),
        SideKind::RouterLogits => vec![tensor_spec("router_logits", v1::Dtype::F32, columns)],
        SideKind::TopK => vec![
            tensor_spec("topk_ids", v1::Dtype::I32, columns),
            tensor_spec("topk_weights", v1::Dtype::F32, columns),
        ],
        SideKind::InputIds => vec![tensor_spec("input_ids", v1::Dtype::I64, 1)],
    }
}

fn side_tensors(side: SideKind) -> v1::SideTensors {
    match side {
        SideKind::None => v1::SideTensors::None,
        SideKind::RouterLogits => v1::SideTensors::RouterLogits,
        SideKind::TopK => v1::SideTensors::Topk,
        SideKind::InputIds => v1::SideTensors::InputIds,
    }
}

/// The call as the dispatch frame that a link would carry. Whether it fits its layer is the engine's to say, in the same
/// words as for every other hop; here every tensor must be what it claims to be, and the layer a number that a frame can
/// have.
fn dispatch(spec: &StageSpec, request: v1::RunStageRequest) -> Result<(FrameHeader, Bytes), Status> {
    let Ok(layer) = u16::try_from(request.layer) else {
        let (found, num_layers) = (request.layer, spec.layers.len());
        let what = format!("layer {found} is out of range: the model has {num_layers} layers");
        return Err(Status::invalid_argument(what));
    };
    let rows = request.hidden_states.ok_or_else(|| wrong("hidden_states", "missing".into()))?;
    let (num_rows, columns) = check_tensor("hidden_states", &rows)?;
    let dtype = match rows.dtype() {
        v1::Dtype::F32 => RowType::F32,
        v1::Dtype::Bf16 => RowType::Bf16,
        _ => {
            let what = format!("{}, expected {}", spelling::dtype(rows.dtype), spec.activations);
            return Err(wrong("hidden_states.dtype", what));
        }
    };
    let (side, side_columns) = side_of(spec, layer, num_rows, &request.side_tensors)?;
    let header = FrameHeader {
        kind: FrameKind::Dispatch,
        dtype,
        side,
        epoch: Epoch(0),
        hop: HopKey { layer: LayerIdx(layer), ..HopKey::default() },
        rows: num_rows,
        columns,
        side_columns,
        body_bytes: 0,
    };
    if request.side_tensors.is_empty() {
        return Ok((header, rows.data.into()));
    }
    let mut body = rows.data;
    request.side_tensors.iter().for_each(|side| body.extend_from_slice(&side.data));
    Ok((header, body.into()))
}

/// Which side tensors these are: those of the layer, or a message with expected and received.
fn side_of(
    spec: &StageSpec,
    layer: u16,
    num_rows: u32,
    tensors: &[v1::Tensor],
) -> Result<(SideKind, u32), Status> {
    let Some(inputs) = spec.layers.get(usize::from(layer)) else {
        // The engine says so.
        return Ok((SideKind::None, 0));
    };
    let expected = side_specs(inputs.side, inputs.side_columns);
    let received: Vec<_> =
        tensors.iter().map(|tensor| (spelling::dtype(tensor.dtype), tensor.shape.clone())).collect();
    let wanted: Vec<_> = expected
        .iter()
        .map(|spec| (spelling::dtype(spec.dtype), vec![i64::from(num_rows), i64::from(spec.columns)]))
        .collect();
    if received != wanted {
        let listed = |words: Vec<String>| if words.is_empty() { "none".into() } else { words.join(", ") };
        let one = |(dtype, shape): &(_, Vec<i64>)| format!("{dtype} {shape:?}");
        let found = listed(received.iter().map(one).collect());
        let named =
            expected.iter().zip(&wanted).map(|(spec, wanted)| format!("{} {}", spec.name, one(wanted)));
        let takes = listed(named.collect());
        return Err(wrong("side_tensors", format!("found {found}; layer {layer} takes {takes}")));
    }
    for (tensor, spec) in tensors.iter().zip(&expected) {
        check_tensor(&spec.name, tensor)?;
    }
    Ok((inputs.side, inputs.side_columns))
}

/// Rows and columns of a tensor whose bytes are what its shape and dtype say.
fn check_tensor(name: &str, tensor: &v1::Tensor) -> Result<(u32, u32), Status> {
    let width = match tensor.dtype() {
        v1::Dtype::F32 | v1::Dtype::I32 => 4u64,
        v1::Dtype::Bf16 | v1::Dtype::F16 => 2,
        v1::Dtype::I64 => 8,
        v1::Dtype::Unspecified => {
            return Err(wrong(name, format!("its dtype is {}", spelling::dtype(tensor.dtype))));
        }
    };
    let [rows, columns] = tensor.shape[..] else {
        return Err(wrong(name, format!("shape {:?}, expected [rows, columns]", tensor.shape)));
    };
    let (Ok(rows), Ok(columns)) = (u32::try_from(rows), u32::try_from(columns)) else {
        return Err(wrong(name, format!("shape [{rows}, {columns}] is out of range")));
    };
    let expected = (u64::from(rows) * u64::from(columns)).checked_mul(width);
    if expected != Some(tensor.data.len() as u64) {
        let expected = expected.map_or("more than can be sent".into(), |bytes| bytes.to_string());
        return Err(wrong(name, format!("{} bytes, shape and dtype make it {expected}", tensor.data.len())));
    }
    Ok((rows, columns))
}

fn wrong(field: &str, what: String) -> Status {
    Status::invalid_argument(format!("`{field}`: {what}"))
}

#[cfg(test)]
mod tests {
    use afd_common::identity::SharedExpertPlacement;
    use afd_common::ids::Shard;
    use tonic::Code;

    use super::*;

    fn spec() -> StageSpec {
        let layer = |side, side_columns| LayerSpec {
            side,
            side_columns,
            num_experts: 4,
            experts_per_token: 2,
            local_experts: vec![0, 1],
            shared_experts: Some(SharedExpertPlacement::Attention),
        };
        StageSpec {
            hidden_size: 2,
            activations: RowType::F32,
            shard: Shard::WHOLE,
            layers: vec![layer(SideKind::None, 0), layer(SideKind::TopK, 2), layer(SideKind::InputIds, 1)],
        }
    }

    fn tensor(dtype: v1::Dtype, shape: &[i64], bytes: usize) -> v1::Tensor {
        v1::Tensor { dtype: dtype.into(), shape: shape.to_vec(), data: vec![1; bytes] }
    }

    fn request(layer: u32, side_tensors: Vec<v1::Tensor>) -> v1::RunStageRequest {
        v1::RunStageRequest { layer, hidden_states: Some(tensor(v1::Dtype::F32, &[3, 2], 24)), side_tensors }
    }

    #[test]
    fn a_call_becomes_the_frame_a_link_would_carry() {
        let topk = vec![tensor(v1::Dtype::I32, &[3, 2], 24), tensor(v1::Dtype::F32, &[3, 2], 24)];
        let (header, body) = dispatch(&spec(), request(1, topk)).unwrap();
        assert_eq!(
            (header.rows, header.columns, header.side, header.side_columns),
            (3, 2, SideKind::TopK, 2)
        );
        assert_eq!(header.expected_body_bytes(), Some(body.len() as u64));
        let (header, _) = dispatch(&spec(), request(3, Vec::new())).unwrap();
        assert_eq!(header.hop.layer, LayerIdx(3), "for the engine to refuse");
        for layer in [65_536, u32::MAX] {
            let refused = dispatch(&spec(), request(layer, Vec::new())).unwrap_err();
            let expected = format!("layer {layer} is out of range: the model has 3 layers");
            assert_eq!((refused.code(), refused.message()), (Code::InvalidArgument, &*expected));
        }
    }

    #[test]
    fn wrong_tensors_are_named_with_expected_and_received() {
        let refused = |change: fn(&mut v1::RunStageRequest)| {
            let mut request = request(0, Vec::new());
            change(&mut request);
            dispatch(&spec(), request).unwrap_err().message().to_owned()
        };
        fn rows(request: &mut v1::RunStageRequest) -> &mut v1::Tensor {
            request.hidden_states.as_mut().unwrap()
        }
        assert_eq!(refused(|r| r.hidden_states = None), "`hidden_states`: missing");
        assert_eq!(
            refused(|r| rows(r).shape = vec![6]),
            "`hidden_states`: shape [6], expected [rows, columns]"
        );
        assert_eq!(refused(|r| rows(r).shape[0] = -3), "`hidden_states`: shape [-3, 2] is out of range");
        assert_eq!(
            refused(|r| rows(r).shape[0] = 4),
            "`hidden_states`: 24 bytes, shape and dtype make it 32"
        );
        assert_eq!(
            refused(|r| rows(r).dtype = v1::Dtype::I32.into()),
            "`hidden_states.dtype`: int32, expected float32"
        );
        let unexpected = refused(|r| r.side_tensors = vec![tensor(v1::Dtype::F32, &[3, 2], 24)]);
        assert_eq!(unexpected, "`side_tensors`: found float32 [3, 2]; layer 0 takes none");
        let missing = refused(|r| r.layer = 1);
        assert!(
            missing.contains("found none; layer 1 takes topk_ids int32 [3, 2], topk_weights float32 [3, 2]"),
            "{missing}"
        );
        let no_tokens = refused(|r| r.layer = 2);
        assert_eq!(no_tokens, "`side_tensors`: found none; layer 2 takes input_ids int64 [3, 1]");
        let swapped = refused(|r| {
            r.layer = 1;
            r.side_tensors = vec![tensor(v1::Dtype::F32, &[3, 2], 24), tensor(v1::Dtype::I32, &[3, 2], 24)];
        });
        assert!(swapped.contains("found float32 [3, 2], int32 [3, 2]; layer 1 takes"), "{swapped}");
    }

    #[test]
    fn the_description_lists_inputs_in_order() {
        let spec = spec();
        let layer = describe(&spec, 1, &spec.layers[1]);
        let names: Vec<_> = layer.inputs.iter().map(|input| input.name.as_str()).collect();
        assert_eq!(names, ["hidden_states", "topk_ids", "topk_weights"]);
        assert_eq!((layer.layer, layer.side_tensors()), (1, v1::SideTensors::Topk));
        assert_eq!(layer.local_experts, [0, 1]);
        assert_eq!(layer.shared_experts(), v1::SharedExpertPlacement::Attention);
    }
}
