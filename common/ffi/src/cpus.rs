//! Which CPUs a thread may run on.
use std::io;

/// Those of the calling thread, in order.
///
/// # Errors
/// The system's word: it has more CPUs than fit a set.
pub fn of_this_thread() -> io::Result<Vec<usize>> {
    // SAFETY: a set is plain bits, of which zero is a value.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes at most the bytes of `set`, which outlives the call; 0 is the calling thread.
    let done = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: reads the bits of `set`; every index is below its size.
    let has = |cpu: &usize| unsafe { libc::CPU_ISSET(*cpu, &set) };
    Ok((0..libc::CPU_SETSIZE as usize).filter(has).collect())
}

/// Keeps the calling thread on one of them; threads that it starts stay there too.
///
/// # Errors
/// The system's word: there is no such CPU, or this process may not run there.
pub fn keep_this_thread_on(cpu: usize) -> io::Result<()> {
    if cpu >= libc::CPU_SETSIZE as usize {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: as above; the index is below the set's size.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        set
    };
    // SAFETY: the kernel only reads `set`, which outlives the call; 0 is the calling thread.
    let done = unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_stays_where_it_is_told() {
        std::thread::spawn(|| {
            let cpu = *of_this_thread().unwrap().last().unwrap();
            keep_this_thread_on(cpu).unwrap();
            assert_eq!(of_this_thread().unwrap(), [cpu]);
            assert_eq!(std::thread::spawn(of_this_thread).join().unwrap().unwrap(), [cpu]);
            assert!(keep_this_thread_on(usize::MAX).is_err());
        })
        .join()
        .unwrap();
    }
}
