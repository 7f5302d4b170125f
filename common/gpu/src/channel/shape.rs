//! How the rows of a model's hops travel on a channel, which knows one size of a row: that of rows on their way to the FFN.
//! Both ends come to the same frames by themselves.
use std::time::Duration;

use super::{Form, Frame, Identity, StepLimits};

/// See the module's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HopShape {
    /// Bytes of a row on its way to the FFN.
    pub row_bytes: usize,
    /// Rows of that size that one row on its way back takes: 2 for f32 partial sums of bf16 rows.
    pub units_back: usize,
}

impl HopShape {
    /// Of rows of `hidden_size` elements, of so many bytes each on their way out and back.
    pub fn new(hidden_size: usize, bytes_out: usize, bytes_back: usize) -> Self {
        Self { row_bytes: hidden_size * bytes_out, units_back: bytes_back.div_ceil(bytes_out.max(1)) }
    }

    /// Of a channel for stages of up to `max_rows` rows.
    pub fn limits(self, num_stages: usize, max_rows: usize, patience: Duration) -> StepLimits {
        let Self { row_bytes, units_back } = self;
        StepLimits { num_slots: num_stages, max_rows: max_rows * units_back, row_bytes, patience }
    }

    /// The frames of a hop, on its way out and back. A stage's slot is its index.
    pub fn frames(self, epoch: u64, layer: u16, stage: usize, rows: usize) -> (Frame, Frame) {
        let frame = |combine: bool, rows: usize| Frame {
            slot: stage,
            identity: Identity { epoch, layer, stage: stage as u8, combine },
            rows,
            form: Form::for_bytes(rows * self.row_bytes),
        };
        (frame(false, rows), frame(true, rows * self.units_back))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partial_sums_take_the_room_of_two_rows() {
        let shape = HopShape::new(256, 2, 4);
        let limits = shape.limits(2, 100, Duration::from_secs(1));
        assert_eq!((limits.num_slots, limits.max_rows, limits.row_bytes), (2, 200, 512));
        let (to, back) = shape.frames(9, 3, 1, 70);
        assert_eq!((to.rows, back.rows, to.slot, back.slot), (70, 140, 1, 1));
        assert!(!to.identity.combine && back.identity.combine && to.identity.word() != back.identity.word());
        assert_eq!((to.form, back.form), (Form::Packets, Form::Rows));
    }
}
