//! How large the KV cache is, and how long a sequence may be with it. Pure but for [`KvMemory::of_machine`].
use afd_common::config::option::{OptionError, refuse};
use afd_common::config::units::ByteSize;
use afd_common::spelling::count;

use super::CapacityConfig;

/// Most that is taken of a machine's memory without being asked.
const AUTO_BYTES: u64 = 4 << 30;

/// Memory that the cache can be in, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvMemory {
    /// Free now.
    pub available: u64,
    /// Most to take without being asked.
    pub at_most: u64,
}

impl KvMemory {
    /// Of this machine, or of its container where that has less. Others want some of it too.
    pub fn of_machine() -> Self {
        Self { available: available_memory(), at_most: AUTO_BYTES }
    }

    /// Of a device that is this process's own, of which so much is free.
    pub fn of_device(available: u64) -> Self {
        Self { available, at_most: u64::MAX }
    }
}

/// What the user says about the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvRequest {
    /// Nothing.
    Auto,
    /// So much memory.
    Memory(ByteSize),
    /// So many blocks.
    Blocks(u32),
}

/// What comes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvPlan {
    /// Blocks of the cache.
    pub num_blocks: u32,
    /// Most tokens of a sequence; at least one such sequence fits the cache.
    pub max_model_len: usize,
    /// Whether it is shorter than the model allows because the cache is small.
    pub shortened: bool,
}

impl KvRequest {
    /// Sizes the cache. `model_len` is what the model was trained for, `asked_len` what the user wants,
    /// `memory` what there is for it.
    ///
    /// # Errors
    /// [`OptionError`] when what was asked for does not fit together.
    pub fn plan(
        self,
        bytes_per_block: usize,
        block_size: usize,
        max_num_seqs: usize,
        model_len: usize,
        asked_len: Option<usize>,
        memory: KvMemory,
    ) -> Result<KvPlan, OptionError> {
        if let Some(asked) = asked_len.filter(|asked| *asked > model_len) {
            return refuse(
                "--max-model-len",
                format!("is {asked}; expected at most {model_len}, for which the model was made"),
            );
        }
        let wanted_len = asked_len.unwrap_or(model_len);
        let per_sequence = wanted_len.div_ceil(block_size) as u64;
        let bytes_per_block = (bytes_per_block as u64).max(1);
        let num_blocks = match self {
            Self::Blocks(blocks) => u64::from(blocks),
            Self::Memory(ByteSize(bytes)) => bytes / bytes_per_block,
            Self::Auto => {
                let KvMemory { available, at_most } = memory;
                let affordable = at_most.min(available / 4) / bytes_per_block;
                // One whole sequence is worth more memory than that, if there is any.
                let one = per_sequence.min(available / 2 / bytes_per_block);
                (per_sequence * max_num_seqs as u64).min(affordable).max(one)
            }
        };
        let num_blocks = u32::try_from(num_blocks).unwrap_or(u32::MAX);
        let fits = num_blocks as usize * block_size;
        let size = ByteSize(u64::from(num_blocks) * bytes_per_block);
        if fits < 2 {
            return Err(self.no_room(bytes_per_block, block_size, memory));
        }
        match asked_len {
            Some(asked) if asked > fits => {
                let need = ByteSize(per_sequence * bytes_per_block);
                let what = format!(
                    "is {asked}, which needs {need} of KV cache; there are {size} (--kv-cache-memory)"
                );
                refuse("--max-model-len", what)
            }
            _ => Ok(KvPlan { num_blocks, max_model_len: wanted_len.min(fits), shortened: fits < wanted_len }),
        }
    }
}

impl KvRequest {
    /// There is no room for two tokens: whose fault it is.
    fn no_room(self, bytes_per_block: u64, block_size: usize, memory: KvMemory) -> OptionError {
        let (need, default) = (ByteSize(bytes_per_block), CapacityConfig::BLOCK_SIZE);
        let (room, option) = match self {
            Self::Blocks(blocks) => {
                let what = format!(
                    "is {blocks}, of {}; expected room for 2 tokens",
                    count(block_size as u64, "token")
                );
                return OptionError::Option { option: "--kv-cache-blocks", what };
            }
            Self::Memory(ByteSize(given)) => (given, " (--kv-cache-memory)"),
            Self::Auto => (memory.available / 2, ", half of what is free"),
        };
        let of_default_size = bytes_per_block / block_size as u64 * default as u64;
        let room = ByteSize(room);
        if block_size > default && of_default_size <= room.0 {
            let what = format!("is {block_size}: a block takes {need}, and the KV cache has {room}{option}");
            return OptionError::Option { option: "--block-size", what };
        }
        OptionError::Option {
            option: "--kv-cache-memory",
            what: format!("{room} has no room for a block of {need} ({block_size} tokens)"),
        }
    }
}

/// Free memory of this machine, or of its container where that has less, bytes.
fn available_memory() -> u64 {
    let of_machine = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
    });
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let of_container = number("/sys/fs/cgroup/memory.max")
        .zip(number("/sys/fs/cgroup/memory.current"))
        .map(|(max, current)| max.saturating_sub(current));
    of_machine.into_iter().chain(of_container).min().unwrap_or(AUTO_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(request: KvRequest, asked_len: Option<usize>, available: u64) -> Result<KvPlan, OptionError> {
        // A block of 16 tokens takes 1 MiB; the model was made for 1600 tokens: 100 blocks.
        let memory = KvMemory { available, at_most: AUTO_BYTES };
        request.plan(1 << 20, 16, 8, 1600, asked_len, memory)
    }

    #[test]
    fn the_default_serves_as_many_sequences_as_memory_allows() {
        let gib = 1u64 << 30;
        assert_eq!(plan(KvRequest::Auto, None, 64 * gib).unwrap().num_blocks, 800);
        assert_eq!(plan(KvRequest::Auto, None, gib).unwrap().num_blocks, 256);
        assert_eq!(plan(KvRequest::Auto, None, gib / 4).unwrap().num_blocks, 100);
        let small = plan(KvRequest::Auto, None, gib / 16).unwrap();
        assert_eq!((small.num_blocks, small.max_model_len, small.shortened), (32, 512, true));
    }

    #[test]
    fn a_device_of_our_own_is_used_by_a_quarter() {
        let memory = KvMemory::of_device(64 << 30);
        let found = KvRequest::Auto.plan(1 << 20, 16, 1000, 1600, None, memory).unwrap();
        assert_eq!(found.num_blocks, 16 << 10);
    }

    #[test]
    fn what_was_asked_for_must_fit_together() {
        let memory = KvRequest::Memory(ByteSize(50 << 20));
        assert_eq!(
            plan(memory, None, 0).unwrap(),
            KvPlan { num_blocks: 50, max_model_len: 800, shortened: true }
        );
        assert_eq!(plan(memory, Some(800), 0).unwrap().max_model_len, 800);
        let error = plan(memory, Some(801), 0).unwrap_err().to_string();
        assert!(
            error.contains("--max-model-len") && error.contains("51MiB") && error.contains("50MiB"),
            "{error}"
        );
        assert!(plan(memory, Some(1601), 0).unwrap_err().to_string().contains("1600"));
    }

    #[test]
    fn what_leaves_no_room_for_a_block_is_named() {
        let said = |request: KvRequest, block_size: usize, available| {
            // A token takes 64 KiB.
            let memory = KvMemory { available, at_most: AUTO_BYTES };
            request.plan(block_size << 16, block_size, 8, 1600, None, memory).unwrap_err().to_string()
        };
        let memory = KvRequest::Memory(ByteSize(8 << 20));
        assert_eq!(
            said(memory, 1 << 20, 0),
            "--block-size is 1048576: a block takes 64GiB, and the KV cache has 8MiB (--kv-cache-memory)"
        );
        assert_eq!(
            said(KvRequest::Auto, 1 << 20, 1 << 30),
            "--block-size is 1048576: a block takes 64GiB, and the KV cache has 512MiB, half of what is free"
        );
        assert_eq!(
            said(KvRequest::Memory(ByteSize(5)), 16, 0),
            "--kv-cache-memory 5B has no room for a block of 1MiB (16 tokens)"
        );
        assert!(said(KvRequest::Memory(ByteSize(5)), 1 << 20, 0).starts_with("--kv-cache-memory 5"));
        assert_eq!(
            said(KvRequest::Blocks(1), 1, 0),
            "--kv-cache-blocks is 1, of 1 token; expected room for 2 tokens"
        );
    }
}
