//! The two products of a layer with many rows, all experts at once, the shared ones included, with SwiGLU between them.
use super::{MoeShape, MoeWeights, Places};
use crate::tensor_map::{MapShape, TensorMap};
use crate::{Device, GpuError, Kernel, Launch, Module, Region, Source, Stream};

/// Shared memory of a block: four steps of 128 weight rows and up to 256 rows, for each of two warpgroups three boxes of
/// results, and what aligns them.
const SHARED_BYTES: usize = 4 * (128 + 256) * 128 + 2 * 3 * BOX_ROWS * 128 + 1024;
const THREADS: u32 = 384;
/// Rows that are fetched, or leave, at once.
const BOX_ROWS: usize = 32;

/// The kernels for a shape of which `num_here` routed experts are here.
#[derive(Clone, Debug)]
pub struct MoeProducts {
    shape: MoeShape,
    num_here: usize,
    blocks: u32,
    gate_up: Kernel,
    down: Kernel,
}

/// A layer's weights as the kernels read them.
#[derive(Clone, Debug)]
pub struct ProductWeights {
    gate_up: TensorMap,
    down: TensorMap,
}

/// Memory for the rows of one layer after the other.
#[derive(Clone, Debug)]
pub struct ProductRooms {
    max_rows: usize,
    /// `[max_rows * (top_k + 1), hidden]` bf16: the rows in the order of experts, then all as they came, right behind
    /// `rows * top_k`.
    pub sorted: Region,
    /// `[max_rows * (top_k + num_shared), hidden]` bf16: what experts made of them; the shared experts' rows, one expert
    /// after the other, begin right behind `rows * top_k`.
    pub out: Region,
    sorted_map: TensorMap,
    inner_map: TensorMap,
    /// What is between the products, as the first writes it.
    inner_store: TensorMap,
    out_store: TensorMap,
}

impl MoeProducts {
    /// Compiles, about two seconds; `None` for shapes that do not divide into the kernels' tiles, or older devices.
    ///
    /// # Errors
    /// As [`Module::load`].
    pub fn new(device: &Device, shape: MoeShape, num_here: usize) -> Result<Option<Self>, GpuError> {
        let MoeShape { hidden, intermediate, top_k, num_shared, .. } = shape;
        let divides = hidden.is_multiple_of(256) && intermediate.is_multiple_of(128);
        if !divides || num_here == 0 || device.arch() != (9, 0) {
            return Ok(None);
        }
        let kernel = |width: usize, features: usize, gated: bool| {
            let constants = [
                ("WIDTH", width as i64),
                ("FEATURES", features as i64),
                ("GATED", i64::from(gated)),
                ("EXPERTS", num_here as i64),
                ("TOP_K", top_k as i64),
                ("SHARED", num_shared as i64),
            ];
            Module::load(device, Source::MoeProduct, &constants)?.kernel("moe_product", SHARED_BYTES)
        };
        let (gate_up, down) = std::thread::scope(|scope| {
            let gate_up = scope.spawn(|| kernel(hidden, intermediate, true));
            let panicked = |_| Err(GpuError::unsupported("compiling a product panicked"));
            let down = kernel(intermediate, hidden, false);
            (gate_up.join().unwrap_or_else(panicked), down)
        });
        // Blocks work in pairs.
        let blocks = device.num_multiprocessors() / 2 * 2;
        Ok(Some(Self { shape, num_here, blocks, gate_up: gate_up?, down: down? }))
    }

    /// # Errors
    /// As [`TensorMap::new`].
    pub fn weights(&self, device: &Device, weights: &MoeWeights) -> Result<ProductWeights, GpuError> {
        let MoeShape { hidden, intermediate, num_shared, .. } = self.shape;
        let (row, inner) = (hidden * 2, intermediate * 2);
        let experts = self.num_here + num_shared;
        if weights.num_here != self.num_here {
            return Err(GpuError::unsupported(format!("{} experts of {}", weights.num_here, self.num_here)));
        }
        // Eight gate rows and eight up rows by turns.
        let gate_up = MapShape {
            sizes: &[hidden, 8, 2, intermediate / 8, experts],
            strides: &[row, intermediate * row, 8 * row, 2 * intermediate * row],
            box_sizes: &[64, 8, 2, 8, 1],
        };
        let down = MapShape {
            sizes: &[intermediate, hidden, experts],
            strides: &[inner, hidden * inner],
            box_sizes: &[64, 128, 1],
        };
        Ok(ProductWeights {
            gate_up: TensorMap::new(device, &weights.gate_up, gate_up)?,
            down: TensorMap::new(device, &weights.down, down)?,
        })
    }

    /// # Errors
    /// [`GpuError::Driver`] when memory is out.
    pub fn rooms(&self, device: &Device, max_rows: usize) -> Result<ProductRooms, GpuError> {
        let MoeShape { hidden, intermediate, top_k, num_shared, .. } = self.shape;
        let map = |region: &Region, rows: usize, columns: usize, box_columns: usize| {
            let box_sizes = &[box_columns, BOX_ROWS];
            TensorMap::new(
                device,
                region,
                MapShape { sizes: &[columns, rows], strides: &[columns * 2], box_sizes },
            )
        };
        let room = |rows: usize, columns: usize| -> Result<_, GpuError> {
            // What is behind the last row of a group is multiplied too, and thrown away: it needs to be memory, no more.
            let region = Region::alloc(device, rows * columns * 2)?;
            map(&region, rows, columns, 64)
        };
        let sorted_map = room(max_rows * (top_k + 1), hidden)?;
        let inner_rows = max_rows * (top_k + num_shared);
        let inner_map = room(inner_rows, intermediate)?;
        let out_store = room(inner_rows, hidden)?;
        Ok(ProductRooms {
            max_rows,
            sorted: sorted_map.memory().clone(),
            out: out_store.memory().clone(),
            inner_store: map(inner_map.memory(), inner_rows, intermediate, 32)?,
            sorted_map,
            inner_map,
            out_store,
        })
    }

    /// Enqueues both products of the `rows` rows that are in the rooms, sorted and as they came.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`] beyond the rooms' rows; [`GpuError::TooSmall`], [`GpuError::Driver`].
    pub fn enqueue(
        &self,
        stream: &Stream,
        weights: &ProductWeights,
        rooms: &ProductRooms,
        places: &Places,
        rows: usize,
    ) -> Result<(), GpuError> {
        if rows == 0 || rows > rooms.max_rows {
            return Err(GpuError::unsupported(format!("{rows} rows of at most {}", rooms.max_rows)));
        }
        places.ends.expect("ends", self.num_here * 4)?;
        for (kernel, weight, from, to) in [
            (&self.gate_up, &weights.gate_up, &rooms.sorted_map, &rooms.inner_store),
            (&self.down, &weights.down, &rooms.inner_map, &rooms.out_store),
        ] {
            let launch = Launch::new(kernel, (self.blocks, 1), THREADS);
            let launch = launch.region(weight.region()).region(from.region()).region(to.region());
            let launch = launch.region(&places.ends).region(to.memory()).size(rows)?;
            // SAFETY: moe_product's arguments; the rooms were made for as many rows, the maps keep their memory, and the
            // rooms and weights are the caller's to keep until the work is over, which freeing waits for.
            unsafe { launch.enqueue(stream)? };
        }
        Ok(())
    }

    /// Of the rooms' result the part that the shared experts made of `rows` rows.
    ///
    /// # Errors
    /// [`GpuError::TooSmall`].
    pub fn shared_part(&self, rooms: &ProductRooms, rows: usize) -> Result<Region, GpuError> {
        let MoeShape { hidden, top_k, num_shared, .. } = self.shape;
        let begin = rows * top_k * hidden * 2;
        rooms.out.part(begin..begin + rows * num_shared * hidden * 2)
    }
}
