//! The model on a GPU as the engine sees it: rows of host-driven links come and go through host memory; steps of links that
//! a stream drives are enqueued whole.
use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use afd_common::ids::{Epoch, LayerIdx, StepId};
use afd_ffi::cuda::{self, StreamGuard};
use afd_gpu::channel::{Frame, GiveUp, HopShape, StepChannel, StepError};
use afd_gpu::{Completion, Device, Graph, Region, Stream};
use tch::Tensor;

use super::channels;
use super::graphs::{Choice, Graphs};
use super::marks::Marks;
use super::{DeviceFfn, DeviceModel};
use crate::engine::{
    OpenStream, OpenStreamError, OwnEnd, PlannedStep, StageModel, StageSpec, StepEnd, StepMode, StepRunner,
    StreamLinkId,
};
use crate::model::{ExpertCounts, FfnModelError, Side};

/// Time for a link's last step to drain when it is closed: a wait that was given up ends within microseconds.
const DRAIN: Duration = Duration::from_secs(10);

/// See the module's head.
pub struct DeviceStage {
    // Graphs and channels go before what their kernels use.
    links: Vec<Link>,
    begun: VecDeque<Begun>,
    bench: Bench,
}

/// What a step is computed with.
struct Bench {
    model: DeviceModel,
    device: Device,
    stream: Arc<Stream>,
    /// The kernels' result before it is put, where it cannot be written to the peer directly.
    out: Region,
}

struct Link {
    id: StreamLinkId,
    // Before the channel: NCCL does not end while a graph with its calls lives.
    graphs: Graphs,
    channel: Box<dyn StepChannel>,
    epoch: Epoch,
    shape: HopShape,
}

struct Begun {
    link: StreamLinkId,
    step: StepId,
    stage_rows: Vec<u32>,
    /// Whether it was one launch.
    is_graph: bool,
    end: Completion,
    /// When its times are wanted.
    marks: Option<Marks>,
}

impl DeviceStage {
    /// Takes over a model on `device`, and compiles its kernels.
    ///
    /// # Errors
    /// [`FfnModelError::Gpu`].
    pub fn new(mut model: DeviceModel, device: &Device) -> Result<Self, FfnModelError> {
        let mut row_bytes = 0;
        match model.kernels() {
            Ok(kernels) => {
                for rows in [8, 16, DeviceFfn::MAX_ROWS] {
                    kernels.prepare(rows)?;
                }
                row_bytes = kernels.out_row_bytes();
            }
            Err(why) => tracing::warn!(%why, "the FFN runs without its kernels, and never in a graph"),
        }
        let out = Region::alloc(device, DeviceFfn::MAX_ROWS * row_bytes)?;
        let stream = Arc::new(device.stream()?);
        model.run_on(&stream)?;
        let bench = Bench { model, device: device.clone(), stream, out };
        Ok(Self { links: Vec::new(), begun: VecDeque::new(), bench })
    }

    /// The model.
    pub fn model(&self) -> &DeviceModel {
        &self.bench.model
    }

    fn hop_shape(&self) -> HopShape {
        let about = self.bench.model.about();
        let (kind_in, kind_out) = (about.kind(), about.out_kind());
        HopShape::new(about.hidden_size(), kind_in.elt_size_in_bytes(), kind_out.elt_size_in_bytes())
    }
}

impl StageModel for DeviceStage {
    fn spec(&self) -> StageSpec {
        StageSpec::of(self.bench.model.about())
    }

    fn enter_thread(&mut self) -> Result<Box<dyn Any>, String> {
        let guard = StreamGuard::new(&self.bench.stream).map_err(|error| format!("--device: {error}"))?;
        Ok(Box::new(guard))
    }

    fn forward(&mut self, layer: LayerIdx, rows: &Tensor, side: &Side) -> Result<Tensor, String> {
        self.bench.forward_from_host(layer, rows, side).map_err(|error| error.to_string())
    }

    fn steps(&mut self) -> Option<&mut dyn StepRunner> {
        Some(self)
    }

    fn expert_counts(&self) -> Option<Arc<ExpertCounts>> {
        Some(Arc::clone(self.bench.model.about().expert_counts()))
    }
}

impl Bench {
    fn forward_from_host(
        &mut self,
        layer: LayerIdx,
        rows: &Tensor,
        side: &Side,
    ) -> Result<Tensor, FfnModelError> {
        let device = tch::Device::Cuda(self.device.ordinal());
        let torch = |source| FfnModelError::Torch { layer, operation: "rows to and from the device", source };
        let to_device = |tensor: &Tensor| tensor.f_to_device(device).map_err(torch);
        let side = match side {
            Side::None => Side::None,
            Side::RouterLogits(logits) => Side::RouterLogits(to_device(logits)?),
            Side::TopK { ids, weights } => Side::TopK { ids: to_device(ids)?, weights: to_device(weights)? },
            Side::InputIds(ids) => Side::InputIds(to_device(ids)?),
        };
        let rows = to_device(rows)?;
        let num_rows = rows.size()[0] as usize;
        let few = num_rows <= DeviceFfn::MAX_ROWS && matches!(side, Side::None);
        let out_kind = self.model.about().out_kind();
        let out = match self.model.kernels() {
            Ok(kernels) if few => {
                let out = Tensor::f_empty(rows.size(), (out_kind, device)).map_err(torch)?;
                let (from, to) = (cuda::region(&self.device, &rows)?, cuda::region(&self.device, &out)?);
                kernels.enqueue(&self.stream, layer, num_rows, &from, None, &to)?;
                out
            }
            _ => self.model.forward(layer, &rows, &side)?,
        };
        // Waits for the stream.
        out.f_to_device(tch::Device::Cpu).map_err(torch)
    }

    /// Enqueues a whole step: for every layer and stage a wait, the FFN, a put.
    fn enqueue_step(
        &mut self,
        link: &mut Link,
        stage_rows: &[u32],
        mut marks: Option<&mut Marks>,
    ) -> Result<(), StepError> {
        let num_layers = self.model.about().specs().len() as u16;
        for (stage, &rows) in stage_rows.iter().enumerate() {
            let frames =
                (0..num_layers).map(|layer| link.shape.frames(link.epoch.0, layer, stage, rows as usize));
            let (into, out): (Vec<_>, Vec<_>) = frames.unzip();
            link.channel.begin(&self.stream, &out, &into, None)?;
        }
        for layer in 0..num_layers {
            for (stage, &rows) in stage_rows.iter().enumerate() {
                let frames = link.shape.frames(link.epoch.0, layer, stage, rows as usize);
                let marks = marks.as_deref_mut();
                self.enqueue_hop(link.channel.as_mut(), LayerIdx(layer), rows as usize, frames, marks)?;
            }
        }
        link.channel.settle(&self.stream)
    }

    fn enqueue_hop(
        &mut self,
        channel: &mut dyn StepChannel,
        layer: LayerIdx,
        rows: usize,
        (dispatch, combine): (Frame, Frame),
        marks: Option<&mut Marks>,
    ) -> Result<(), StepError> {
        let (device, stream) = (&self.device, &self.stream);
        let mut marks = marks;
        let mut mark = || marks.as_deref_mut().map_or(Ok(()), |marks| marks.set(stream));
        let kernels = self.model.kernels().ok().filter(|_| rows <= DeviceFfn::MAX_ROWS);
        let ahead = kernels.as_ref().map(|kernels| kernels.read_meanwhile(layer, rows)).unwrap_or_default();
        let landed = channel.wait_fetching(stream, dispatch, ahead)?;
        mark()?;
        if let Some(kernels) = kernels {
            let num_rows = Some(&landed.num_rows);
            return match channel.direct(&combine) {
                Some(direct) => {
                    kernels.enqueue(stream, layer, rows, &landed.rows, num_rows, &direct)?;
                    mark()?;
                    channel.put_written(stream, combine, None)?;
                    Ok(mark()?)
                }
                None => {
                    kernels.enqueue(stream, layer, rows, &landed.rows, num_rows, &self.out)?;
                    mark()?;
                    channel.put(stream, combine, &self.out, None)?;
                    Ok(mark()?)
                }
            };
        }
        let failed = |error: String| StepError::Gpu(format!("{layer}: {error}"));
        let torch = |error: tch::TchError| failed(error.to_string());
        let size = [rows as i64, self.model.about().hidden_size() as i64];
        let options = (self.model.about().kind(), tch::Device::Cuda(device.ordinal()));
        let x = Tensor::f_empty(size, options).map_err(torch)?;
        let region =
            |tensor: &Tensor| cuda::region(device, tensor).map_err(|error| failed(error.to_string()));
        region(&x)?.copy_from(stream, &landed.rows)?;
        if let Some(direct) = channel.direct(&combine)
            && self.model.forward_to(layer, &x, &direct).map_err(|error| failed(error.to_string()))?
        {
            mark()?;
            channel.put_written(stream, combine, None)?;
            return Ok(mark()?);
        }
        let sum = self.model.forward(layer, &x, &Side::None).map_err(|error| failed(error.to_string()))?;
        let sum = sum.f_contiguous().map_err(torch)?;
        mark()?;
        channel.put(stream, combine, &region(&sum)?, None)?;
        Ok(mark()?)
    }

    /// Whether the kernels can run the whole step.
    fn fits(&mut self, stage_rows: &[u32]) -> Result<(), &'static str> {
        if self.model.kernels().is_err() {
            return Err("no kernels");
        }
        let fits = stage_rows.iter().all(|&rows| rows as usize <= DeviceFfn::MAX_ROWS);
        if fits { Ok(()) } else { Err("too many rows") }
    }
}

impl StepRunner for DeviceStage {
    fn open(
        &mut self,
        id: StreamLinkId,
        request: &OpenStream,
        grant: &mut dyn FnMut(OwnEnd),
    ) -> Result<Option<GiveUp>, OpenStreamError> {
        let needs_side = self.bench.model.about().specs().iter().any(|spec| spec.side_columns > 0);
        if needs_side {
            let what = "layers of this model take side tensors, which only host-driven links carry (--link)";
            return Err(OpenStreamError::NotShared(what.into()));
        }
        let (shape, epoch) = (self.hop_shape(), request.epoch);
        let channel = channels::open(&self.bench.device, &self.bench.stream, request, shape, grant)?;
        let give_up = channel.give_up();
        self.links.push(Link { id, graphs: Graphs::default(), channel, epoch, shape });
        Ok(give_up)
    }

    fn begin(&mut self, link: StreamLinkId, plan: &PlannedStep) -> Result<StepMode, String> {
        let Self { links, begun, bench } = self;
        let link = links.iter_mut().find(|known| known.id == link).ok_or("the link is closed")?;
        let text = |error: StepError| error.to_string();
        link.channel.check().map_err(text)?;
        let fits = bench.fits(&plan.stage_rows);
        let mut marks = plan.profile.then(Marks::default);
        let choice = match &marks {
            // A graph's launch has one beginning and one end.
            Some(_) => Choice::Eager("profiled"),
            None => link.graphs.choose(plan, fits),
        };
        let is_graph = !matches!(choice, Choice::Eager(_));
        if link.channel.keeps_graphs_apart()
            && let Some(last) = begun.iter().rev().find(|last| last.link == link.id)
            && last.is_graph != is_graph
        {
            // Rare: the peer's step was over and this one's about to be.
            last.end.wait(DRAIN).map_err(|error| error.to_string())?;
        }
        let mode = match choice {
            Choice::Replay(graph) => {
                graph.launch().map_err(|error| error.to_string())?;
                StepMode::Replayed
            }
            Choice::Eager(why) => {
                bench.enqueue_step(link, &plan.stage_rows, marks.as_mut()).map_err(text)?;
                StepMode::Eager(why)
            }
            Choice::Capture => {
                let stream = Arc::clone(&bench.stream);
                let graph = Graph::capture(&stream, || bench.enqueue_step(link, &plan.stage_rows, None));
                let graph = link.graphs.keep(plan, graph.map_err(text)?);
                graph.launch().map_err(|error| error.to_string())?;
                StepMode::Captured
            }
        };
        let end = bench.stream.mark(false).map_err(|error| error.to_string())?;
        let (link, step, stage_rows) = (link.id, plan.step, plan.stage_rows.clone());
        begun.push_back(Begun { link, step, stage_rows, is_graph, end, marks });
        Ok(mode)
    }

    fn poll(&mut self) -> Option<StepEnd> {
        let first = self.begun.front()?;
        let failed = match first.end.is_done() {
            Ok(false) => return None,
            Ok(true) => None,
            Err(error) => Some(error.to_string()),
        };
        let Begun { link, step, stage_rows, marks, .. } = self.begun.pop_front()?;
        let channel = self.links.iter().find(|known| known.id == link).map(|known| &known.channel);
        let broken = channel.and_then(|channel| channel.check().err()).map(|error| error.to_string());
        let read = |marks: &Marks| marks.read(&self.bench.device);
        let hops = marks.as_ref().map(read).transpose().unwrap_or_else(|error| {
            tracing::warn!(%error, step = step.0, "the times of a step cannot be had");
            None
        });
        Some(StepEnd { link, step, stage_rows, hops: hops.unwrap_or_default(), failure: failed.or(broken) })
    }

    fn num_begun(&self) -> usize {
        self.begun.len()
    }

    fn close(&mut self, link: StreamLinkId) {
        let Some(at) = self.links.iter().position(|known| known.id == link) else { return };
        let closed = self.links.swap_remove(at);
        closed.channel.abort();
        let last = self.begun.iter().rev().find(|begun| begun.link == link);
        if let Some(error) = last.and_then(|last| last.end.wait(DRAIN).err()) {
            tracing::error!(%error, "the steps of a closed link do not end");
        }
        self.begun.retain(|begun| begun.link != link);
    }
}
