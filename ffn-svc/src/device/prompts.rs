//! A stacked layer for the many rows of prompts on a GPU. What `eager` spells out in operations, each of which reads and
//! writes every row once more, is a few kernels here.
//!
//! ```text
//! logits ─▶ choice, places ─▶ rows by expert ─▶ gate and up, SwiGLU ─▶ down ─▶ weighted sum
//! ```
//! The products are kernels of ours that take all experts at once, or, for shapes that those are not made for, libtorch's:
//! grouped by routed expert, and dense ones for the shared experts.
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::thread;

use afd_common::ids::LayerIdx;
use afd_ffi::{FfiError, cuda};
use afd_gpu::ops::{
    MoeMany, MoeOutput, MoeProducts, MoeShape, MoeWeights, Places, ProductRooms, ProductWeights,
};
use afd_gpu::{Device, GpuError, Region, Stream};
use tch::{Kind, Tensor};

use super::stack::{Routed, Stack};
use crate::model::{At, FfnModelError, Side};

/// See the module's head.
#[derive(Debug)]
pub(super) struct Prompts {
    device: Device,
    stream: Arc<Stream>,
    kernels: HashMap<Cut, Kernels>,
    /// By layer, where our products are for it.
    weights: Vec<Option<ProductWeights>>,
    /// By layer: where rows are counted by expert.
    counts: Vec<Option<Region>>,
}

/// A shape, and how many of its routed experts are here.
type Cut = (MoeShape, usize);

#[derive(Debug)]
struct Kernels {
    around: MoeMany,
    /// `None` where libtorch computes the products.
    products: Option<MoeProducts>,
    /// For our products' rows. Layers and stages follow one another on one stream, so one is enough; it grows.
    rooms: RefCell<Option<(usize, ProductRooms)>>,
}

/// Rows on their way through a layer.
struct Pass<'a> {
    prompts: &'a Prompts,
    around: &'a MoeMany,
    stack: &'a Stack,
    layer: LayerIdx,
    /// `[rows, hidden]` bf16
    x: &'a Tensor,
    rows: usize,
}

/// What the weighted sum is made of.
struct Parts {
    routed: Option<(Region, Places)>,
    /// `[num_shared, rows, hidden]`
    shared: Option<Region>,
}

impl Prompts {
    /// Compiles for the shapes of all `stacks`, whose `weights` these are; everything will run on `stream`.
    pub(super) fn new(
        stream: &Arc<Stream>,
        stacks: &[Stack],
        weights: &[(MoeShape, MoeWeights)],
        output: MoeOutput,
    ) -> Result<Self, GpuError> {
        let device = stream.device();
        let mut cuts: Vec<Cut> = Vec::new();
        for cut in stacks.iter().map(cut_of) {
            if !cuts.contains(&cut) {
                cuts.push(cut);
            }
        }
        let make = |(shape, num_here): Cut| -> Result<Kernels, GpuError> {
            let around = MoeMany::new(device, shape, output)?;
            let products = MoeProducts::new(device, shape, num_here)?;
            Ok(Kernels { around, products, rooms: RefCell::new(None) })
        };
        let kernels: HashMap<Cut, Kernels> = thread::scope(|scope| {
            let threads: Vec<_> = cuts.iter().map(|cut| (*cut, scope.spawn(|| make(*cut)))).collect();
            let join = |(cut, thread): (Cut, thread::ScopedJoinHandle<'_, _>)| {
                let panicked =
                    |_| Err(GpuError::Unsupported { what: "compiling the FFN kernels panicked".into() });
                Ok((cut, thread.join().unwrap_or_else(panicked)?))
            };
            threads.into_iter().map(join).collect::<Result<_, GpuError>>()
        })?;
        let of_layer = |(stack, (_, weights)): (&Stack, &(MoeShape, MoeWeights))| {
            let products = kernels.get(&cut_of(stack)).and_then(|kernels| kernels.products.as_ref());
            products.map(|products| products.weights(device, weights)).transpose()
        };
        let counts = weights.iter().map(|(_, weights)| weights.counts.clone()).collect();
        let weights = stacks.iter().zip(weights).map(of_layer).collect::<Result<_, GpuError>>()?;
        Ok(Self { device: device.clone(), stream: Arc::clone(stream), kernels, weights, counts })
    }

    /// Whether this is something for the kernels: rows without side tensors, and experts of this shard, if there are any at
    /// all.
    pub(super) fn take(&self, stack: &Stack, x: &Tensor, side: &Side) -> bool {
        let bare = stack.routed.as_ref().is_some_and(|routed| routed.local.is_empty());
        let size = x.size();
        let rows = size.len() == 2 && size[0] > 0 && size[1] == stack.shape.hidden as i64;
        rows && x.kind() == Kind::BFloat16 && matches!(side, Side::None) && !bare
    }

    pub(super) fn region(&self, tensor: &Tensor) -> Result<Region, FfiError> {
        cuda::region(&self.device, tensor)
    }

    /// Enqueues: this shard's part of the layer for `x`, `[rows, hidden]` bf16, at least one row, to `out`: bf16, or f32 with
    /// several shards. `out` may be memory of another device.
    pub(super) fn forward(
        &self,
        stack: &Stack,
        layer: LayerIdx,
        x: &Tensor,
        out: &Region,
    ) -> Result<(), FfnModelError> {
        let unknown = || GpuError::Unsupported { what: format!("{layer}: a shape without kernels") };
        let kernels = self.kernels.get(&cut_of(stack)).ok_or_else(unknown)?;
        let x = x.f_contiguous().at(layer, "rows")?;
        let rows = x.size()[0] as usize;
        let pass = Pass { prompts: self, around: &kernels.around, stack, layer, x: &x, rows };
        let weights = self.weights.get(usize::from(layer.0)).and_then(Option::as_ref);
        let parts = match (&stack.routed, &kernels.products, weights) {
            (Some(routed), Some(products), Some(weights)) => {
                let rooms = kernels.rooms(&self.device, products, rows)?;
                pass.by_products(routed, products, weights, &rooms)?
            }
            (routed, ..) => Parts {
                routed: routed.as_ref().map(|routed| pass.routed(routed)).transpose()?,
                shared: (stack.shape.num_shared > 0).then(|| pass.shared()).transpose()?,
            },
        };
        let routed = parts.routed.as_ref().map(|(rows, places)| (rows, places));
        Ok(kernels.around.combine(&self.stream, routed, parts.shared.as_ref(), rows, out)?)
    }
}

fn cut_of(stack: &Stack) -> Cut {
    (stack.shape, stack.num_here())
}

impl Kernels {
    /// Room for `rows` rows.
    fn rooms(&self, device: &Device, products: &MoeProducts, rows: usize) -> Result<ProductRooms, GpuError> {
        let mut rooms = self.rooms.borrow_mut();
        match &*rooms {
            Some((most, rooms)) if rows <= *most => Ok(rooms.clone()),
            _ => {
                // Given back first. Steps grow to their budget soon.
                *rooms = None;
                let most = rows.next_power_of_two();
                let made = products.rooms(device, most)?;
                *rooms = Some((most, made.clone()));
                Ok(made)
            }
        }
    }
}

impl Pass<'_> {
    fn by_products(
        &self,
        routed: &Routed,
        products: &MoeProducts,
        weights: &ProductWeights,
        rooms: &ProductRooms,
    ) -> Result<Parts, FfnModelError> {
        let (stream, rows) = (&*self.prompts.stream, self.rows);
        let (places, _) = self.places(routed)?;
        let has_shared = self.stack.shape.num_shared > 0;
        self.around.scatter(stream, &self.region(self.x)?, rows, &places, (&rooms.sorted, has_shared))?;
        products.enqueue(stream, weights, rooms, &places, rows)?;
        let shared = has_shared.then(|| products.shared_part(rooms, rows)).transpose()?;
        Ok(Parts { routed: Some((rooms.out.clone(), places)), shared })
    }

    /// Which row goes where; and where each expert's rows end, as libtorch takes it.
    fn places(&self, routed: &Routed) -> Result<(Places, Tensor), FfnModelError> {
        let (layer, rows) = (self.layer, self.rows);
        let logits =
            routed.weight.f_transpose(0, 1).and_then(|weight| self.x.f_mm_dtype(&weight, Kind::Float));
        let logits = self.region(&logits.at(layer, "router")?)?;
        let bias = routed.bias.as_ref().map(|bias| self.region(bias)).transpose()?;
        let choices = [rows as i64, self.stack.shape.top_k as i64];
        let (ends, to) = self.room(&[routed.local.len() as i64], Kind::Int)?;
        let places = Places {
            ids: self.room(&choices, Kind::Int)?.1,
            weights: self.room(&choices, Kind::Float)?.1,
            positions: self.room(&choices, Kind::Int)?.1,
            ends: to,
            counts: self.prompts.counts.get(usize::from(layer.0)).cloned().flatten(),
        };
        let local = (routed.local.clone(), routed.scale);
        self.around.place(&self.prompts.stream, &logits, bias.as_ref(), rows, local, &places)?;
        Ok((places, ends))
    }

    /// The routed experts' rows in the order of experts, by libtorch, and where whose are.
    fn routed(&self, routed: &Routed) -> Result<(Region, Places), FfnModelError> {
        let Self { stack, layer, rows, .. } = *self;
        let (top_k, here) = (stack.shape.top_k, routed.local.len() as i64);
        let (places, ends) = self.places(routed)?;
        let (sorted, to) = self.room(&[(rows * top_k) as i64, stack.shape.hidden as i64], Kind::BFloat16)?;
        self.around.scatter(&self.prompts.stream, &self.region(self.x)?, rows, &places, (&to, false))?;
        let grouped = |rows: &Tensor, weight: &Tensor| {
            let weight = weight.f_narrow(0, 0, here)?.f_transpose(1, 2)?;
            rows.f_internal_grouped_mm(&weight, Some(&ends), None, None)
        };
        let both = grouped(&sorted, &stack.gate_up).at(layer, "gate and up")?;
        let inner = self.swiglu(&both, rows * top_k)?;
        let out = grouped(&inner, &stack.down).at(layer, "down")?;
        Ok((self.region(&out)?, places))
    }

    /// The shared experts' rows by libtorch, `[num_shared, rows, hidden]`.
    fn shared(&self) -> Result<Region, FfnModelError> {
        let Self { stack, layer, rows, .. } = *self;
        let (first, pieces) = (stack.num_here() as i64, stack.shape.num_shared as i64);
        let (hidden, size) = (stack.shape.hidden as i64, stack.shape.intermediate as i64);
        // All pieces' gates and ups in one product: a row's pieces are then rows of their own.
        let gate_up = stack.gate_up.f_narrow(0, first, pieces).and_then(|all| all.f_view([-1, hidden]));
        let both =
            gate_up.and_then(|all| self.x.f_mm(&all.f_transpose(0, 1)?)).at(layer, "shared experts")?;
        let inner = self.swiglu(&both, rows * stack.shape.num_shared)?;
        let out = inner.f_view([rows as i64, pieces, size]).and_then(|inner| {
            let down = stack.down.f_narrow(0, first, pieces)?.f_transpose(1, 2)?;
            inner.f_transpose(0, 1)?.f_bmm(&down)
        });
        Ok(self.region(&out.at(layer, "shared experts")?)?)
    }

    /// `[rows, intermediate]` of as many rows of gates and ups.
    fn swiglu(&self, both: &Tensor, rows: usize) -> Result<Tensor, FfnModelError> {
        let (inner, to) = self.room(&[rows as i64, self.stack.shape.intermediate as i64], Kind::BFloat16)?;
        self.around.swiglu(&self.prompts.stream, &self.region(both)?, rows, &to)?;
        Ok(inner)
    }

    fn room(&self, shape: &[i64], kind: Kind) -> Result<(Tensor, Region), FfnModelError> {
        let tensor = Tensor::f_empty(shape, (kind, self.x.device())).at(self.layer, "memory")?;
        let region = self.region(&tensor)?;
        Ok((tensor, region))
    }

    fn region(&self, tensor: &Tensor) -> Result<Region, FfiError> {
        self.prompts.region(tensor)
    }
}
