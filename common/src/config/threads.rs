//! How many tensor threads a process may be told to use, alike on both roles.

/// Cores this process may use; 1 where the system does not say.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The number that `--threads` asks for, or all cores.
///
/// # Errors
/// What is expected instead: 0 computes nothing, and far more threads than cores take turns until nothing moves.
pub fn tensor_threads(asked: Option<usize>, cores: usize) -> Result<usize, String> {
    let most = most_threads(cores);
    match asked {
        None => Ok(cores),
        Some(threads) if (1..=most).contains(&threads) => Ok(threads),
        Some(_) => Err(format!("1 to {most} (this machine gives the process {cores} cores)")),
    }
}

/// A few too many are harmless, and a small machine may try what a larger one is told.
fn most_threads(cores: usize) -> usize {
    (4 * cores).max(16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_bounded_by_the_machine() {
        assert_eq!(tensor_threads(None, 2), Ok(2));
        assert_eq!(tensor_threads(Some(16), 2), Ok(16));
        assert_eq!(tensor_threads(Some(256), 64), Ok(256));
        for (asked, cores) in [(0, 2), (17, 2), (9999, 2), (257, 64)] {
            assert!(tensor_threads(Some(asked), cores).is_err(), "{asked} threads on {cores} cores");
        }
    }
}
