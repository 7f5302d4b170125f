//! Work that is recorded once and replayed with one launch.
use std::sync::Arc;

use cudarc::driver::{CudaStream, result, sys};

use crate::{GpuError, Region, Stream};

/// Captured work, ready to be launched on the stream it was captured on. Keeps the memory that its kernels use.
pub struct Graph {
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
    stream: Arc<CudaStream>,
    _kept: Vec<Region>,
}

// SAFETY: the handles belong to this value alone, and the driver lets any thread use them, one at a time (&mut self or
// ownership): `launch` takes &mut self.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `enqueue` puts on `stream`, which runs nothing meanwhile. Only work that allocates nothing: libtorch
    /// operations are not (their temporaries would go back to a pool that others use).
    ///
    /// # Errors
    /// What `enqueue` says, or [`GpuError::Driver`]; the stream is as before.
    pub fn capture<E: From<GpuError>>(
        stream: &Stream,
        enqueue: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, E> {
        use sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as MODE;
        let inner = stream.inner();
        inner.begin_capture(MODE).map_err(GpuError::driver("beginning a capture"))?;
        *stream.capturing() = Some(Vec::new());
        let enqueued = enqueue();
        let kept = stream.capturing().take().unwrap_or_default();
        // SAFETY: the stream is capturing, begun above.
        let ended = unsafe { result::stream::end_capture(inner.cu_stream()) };
        let ended = ended.map_err(GpuError::driver("ending a capture"));
        let graph = match (enqueued, ended) {
            (Ok(()), Ok(graph)) => graph,
            (Ok(()), Err(e)) => return Err(e.into()),
            (Err(e), ended) => {
                if let Ok(graph) = ended {
                    // SAFETY: just made, and nobody else has it.
                    let _ = unsafe { result::graph::destroy(graph) };
                }
                return Err(e);
            }
        };
        let mut exec = std::ptr::null_mut();
        // SAFETY: `graph` is valid; no flags.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0).result() };
        if let Err(e) = made {
            // SAFETY: just made, and nobody else has it.
            let _ = unsafe { result::graph::destroy(graph) };
            return Err(GpuError::driver("instantiating a graph")(e).into());
        }
        // SAFETY: a valid exec and a live stream of the same context.
        let uploaded = unsafe { result::graph::upload(exec, inner.cu_stream()) };
        let graph = Self { graph, exec, stream: inner.clone(), _kept: kept };
        uploaded.map_err(GpuError::driver("uploading a graph"))?;
        Ok(graph)
    }

    /// Enqueues everything once more.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn launch(&mut self) -> Result<(), GpuError> {
        let bind = self.stream.context().bind_to_thread();
        // SAFETY: exec and stream are alive, held by self.
        let launched =
            bind.and_then(|()| unsafe { result::graph::launch(self.exec, self.stream.cu_stream()) });
        launched.map_err(GpuError::driver("launching a graph"))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.stream.context().bind_to_thread();
        // A replay in flight keeps what it needs in the driver, but not our memory.
        let _ = self.stream.synchronize();
        // SAFETY: made by `capture`, destroyed once. A context that faulted refuses, which changes nothing.
        unsafe {
            let _ = result::graph::exec_destroy(self.exec);
            let _ = result::graph::destroy(self.graph);
        }
    }
}
