//! The same operations in plain Rust and higher precision: what kernels are checked against. Slow on purpose.
mod mla;
mod moe;
mod rows;
mod sample;

pub use mla::mla_decode;
pub use moe::{Route, moe, route};
pub use rows::{argmax, rms_norm};
pub use sample::{Drawn, interval, sample};

/// Relative distance of `found` from `wanted`: the norm of the difference over the norm. NaN when anything is.
pub fn relative_error(found: impl IntoIterator<Item = f64>, wanted: impl IntoIterator<Item = f64>) -> f64 {
    let (mut difference, mut norm) = (0.0, 0.0);
    for (f, w) in found.into_iter().zip(wanted) {
        difference += (f - w) * (f - w);
        norm += w * w;
    }
    (difference / norm).sqrt()
}

/// Runs `f(0), f(1), .. f(count - 1)` on all cores; results in order.
pub(crate) fn parallel<T: Send>(count: usize, f: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(count.max(1));
    let mut done: Vec<(usize, T)> = std::thread::scope(|scope| {
        let work = || {
            let mut mine = Vec::new();
            loop {
                let i = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                if i >= count {
                    return mine;
                }
                mine.push((i, f(i)));
            }
        };
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|w| w.join().unwrap_or_default()).collect()
    });
    done.sort_by_key(|(i, _)| *i);
    done.into_iter().map(|(_, value)| value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_error_is_a_ratio_and_nan_never_passes() {
        assert_eq!(relative_error([3.0, 4.0], [3.0, 4.0]), 0.0);
        assert!((relative_error([3.3, 4.4], [3.0, 4.0]) - 0.1).abs() < 1e-12);
        assert!(relative_error([f64::NAN], [1.0]).is_nan());
    }

    #[test]
    fn parallel_keeps_the_order() {
        assert_eq!(parallel(100, |i| i * i), (0..100).map(|i| i * i).collect::<Vec<_>>());
    }
}
