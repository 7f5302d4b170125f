//! Some kilobytes between page-locked host memory and the device, by a kernel: a copy engine would have the stream handed over
//! to it and back, which takes longer than the copy.
use super::Rows;
use crate::{GpuError, Launch, Region, Staging, Stream};

const THREADS: usize = 256;
/// Bytes that a thread takes.
const EACH: usize = 16;

/// Words that are on the device already.
#[derive(Clone, Copy, Debug)]
pub struct Follow<'a> {
    /// `[rows]` i32
    pub tokens: &'a Region,
    /// How many.
    pub rows: usize,
    /// Where they belong, bytes from the beginning; a multiple of 16.
    pub at: usize,
}

impl Rows {
    /// Enqueues a copy of the first `bytes` bytes, to the next multiple of 16, to the beginning of `to`; in the place of some
    /// of them come those that `follow` says.
    ///
    /// # Errors
    /// [`GpuError::TooSmall`], [`GpuError::Unsupported`] for an `at` that is no multiple of 16, [`GpuError::Driver`].
    pub fn carry_in(
        &self,
        stream: &Stream,
        from: &mut Staging,
        to: &Region,
        bytes: usize,
        follow: Option<Follow<'_>>,
    ) -> Result<(), GpuError> {
        let bytes = bytes.next_multiple_of(EACH);
        to.expect("what is carried to", bytes)?;
        let (mut at, mut rows) = (0, 0);
        if let Some(follow) = follow {
            follow.tokens.expect("tokens", follow.rows * 4)?;
            if !follow.at.is_multiple_of(EACH) || follow.at + follow.rows * 4 > bytes {
                return Err(GpuError::unsupported(format!("{} words at {}", follow.rows, follow.at)));
            }
            (at, rows) = (follow.at, follow.rows);
        }
        let address = from.begin_copy(bytes)?;
        let launch = self.launch(bytes).u64(address).region(to).size(bytes / EACH)?;
        let launch = launch.maybe(follow.map(|follow| follow.tokens)).size(at / 4)?.size(rows)?;
        // SAFETY: carry's arguments; sizes were checked, and the host's memory is not touched before the copy has ended.
        unsafe { launch.enqueue(stream) }?;
        from.end_copy(stream)
    }

    /// Enqueues a copy of the first `bytes` bytes of `from`, to the next multiple of 16, to the beginning of `to`.
    ///
    /// # Errors
    /// [`GpuError::TooSmall`], [`GpuError::Driver`].
    pub fn carry_out(
        &self,
        stream: &Stream,
        from: &Region,
        to: &mut Staging,
        bytes: usize,
    ) -> Result<(), GpuError> {
        let bytes = bytes.next_multiple_of(EACH);
        from.expect("what is carried from", bytes)?;
        let address = to.begin_copy(bytes)?;
        let launch = self.launch(bytes).region(from).u64(address).size(bytes / EACH)?;
        let launch = launch.maybe(None).size(0)?.size(0)?;
        // SAFETY: as above.
        unsafe { launch.enqueue(stream) }?;
        to.end_copy(stream)
    }

    fn launch(&self, bytes: usize) -> Launch<'_> {
        Launch::new(&self.carry, (bytes.div_ceil(EACH * THREADS) as u32, 1), THREADS as u32)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::Device;

    #[test]
    fn what_is_carried_arrives_with_the_tokens_in_their_place() {
        if let Some(why) = Device::missing(1) {
            return eprintln!("{why}");
        }
        let device = Device::open(0).unwrap();
        let (stream, rows) = (device.stream().unwrap(), Rows::new(&device).unwrap());
        let (mut there, mut back) =
            (Staging::new(&device, 8192).unwrap(), Staging::new(&device, 8192).unwrap());
        let memory = Region::zeroed(&device, 8192).unwrap();
        let tokens = Region::from_slice(&device, &[-1i32, -2, -3, -4, -5, -6, -7]).unwrap();
        for (bytes, count) in [(4, 0), (6000, 7), (8192, 5)] {
            let words = there.elements::<i32>(0..8192).unwrap();
            words.iter_mut().zip(0..).for_each(|(word, at)| *word = at + bytes as i32);
            let follow = (count > 0).then_some(Follow { tokens: &tokens, rows: count, at: 512 });
            rows.carry_in(&stream, &mut there, &memory, bytes, follow).unwrap();
            rows.carry_out(&stream, &memory, &mut back, bytes).unwrap();
            back.wait(Duration::from_secs(5)).unwrap();
            for (at, word) in (0..).zip(back.elements::<i32>(0..bytes).unwrap().iter()) {
                let row = at - 128;
                let is_token = (0..count as i32).contains(&row);
                assert_eq!(*word, if is_token { -1 - row } else { at + bytes as i32 }, "{at} of {bytes}");
            }
        }
        let off = Follow { tokens: &tokens, rows: 1, at: 8 };
        assert!(rows.carry_in(&stream, &mut there, &memory, 64, Some(off)).is_err());
    }
}
