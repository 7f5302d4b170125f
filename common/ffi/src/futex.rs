//! Sleeping until a word in memory changes, within a process or between processes that map the same page.
//!
//! The kernel compares and sleeps in one step, so a change between looking and sleeping is never missed. Any wait may end
//! early; callers look again in a loop.
use std::io;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Who else may wake a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Threads of this process.
    Process,
    /// Whoever maps the page.
    Shared,
}

/// A word, the value it was seen with, and who may change it.
pub type Watched<'a> = (&'a AtomicU32, u32, Scope);

/// Most words of one [`wait_any`].
pub const MAX_WORDS: usize = libc::FUTEX_WAITV_MAX as usize;

/// Wakes every thread that sleeps on `word`.
pub fn wake(word: &AtomicU32, scope: Scope) {
    // SAFETY: the word is a live, aligned u32; the kernel only uses its address to find sleepers.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE | private(scope), i32::MAX);
    }
}

/// Sleeps while `word` has the value `seen`, at most for `timeout`.
pub fn wait(word: &AtomicU32, seen: u32, scope: Scope, timeout: Option<Duration>) {
    let timeout = timeout.map(timespec);
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the word is a live, aligned u32 and `timeout` is null or points to a timespec that outlives the call; the
    // kernel reads both and writes neither.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT | private(scope), seen, timeout);
    }
}

/// Sleeps while every word has the value it was seen with, at most for `timeout`. At most [`MAX_WORDS`] of them.
///
/// # Errors
/// [`io::ErrorKind::Unsupported`] on kernels older than 5.16, where the call is filtered, or with more words than there may
/// be; nothing was waited for.
pub fn wait_any<'a>(
    words: impl IntoIterator<Item = Watched<'a>>,
    timeout: Option<Duration>,
) -> io::Result<()> {
    let mut entries = [const { Entry::NONE }; MAX_WORDS];
    let mut len = 0;
    for word in words {
        *entries.get_mut(len).ok_or(io::ErrorKind::Unsupported)? = Entry::of(&word);
        len += 1;
    }
    let deadline = timeout.map(|timeout| timespec(monotonic_now() + timeout));
    let deadline = deadline.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: `entries` begins with `len` entries laid out as the kernel's struct futex_waitv, each with the address of a
    // live, aligned u32 borrowed for 'a; `deadline` is null or points to a timespec. All outlive the call, which writes
    // to none of them.
    let result = unsafe {
        libc::syscall(libc::SYS_futex_waitv, entries.as_ptr(), len, 0, deadline, libc::CLOCK_MONOTONIC)
    };
    match io::Error::last_os_error() {
        error
            if result < 0
                && matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM | libc::EINVAL)) =>
        {
            Err(io::Error::new(io::ErrorKind::Unsupported, error))
        }
        _ => Ok(()),
    }
}

/// Whether [`wait_any`] works here.
pub fn can_wait_any() -> bool {
    let words = [AtomicU32::new(0), AtomicU32::new(0)];
    let watched = words.each_ref().map(|word| (word, 1, Scope::Shared));
    wait_any(watched, Some(Duration::ZERO)).is_ok()
}

/// As the kernel's `struct futex_waitv`.
#[repr(C)]
struct Entry {
    seen: u64,
    address: u64,
    flags: u32,
    reserved: u32,
}

impl Entry {
    const NONE: Self = Self { seen: 0, address: 0, flags: 0, reserved: 0 };

    fn of((word, seen, scope): &Watched<'_>) -> Self {
        let flags = libc::FUTEX2_SIZE_U32 | private(*scope);
        Self {
            seen: (*seen).into(),
            address: word.as_ptr().expose_provenance() as u64,
            flags: flags as u32,
            reserved: 0,
        }
    }
}

fn private(scope: Scope) -> libc::c_int {
    match scope {
        Scope::Process => libc::FUTEX_PRIVATE_FLAG,
        Scope::Shared => 0,
    }
}

fn monotonic_now() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a timespec that the call may write to. It cannot fail for this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

pub(crate) fn timespec(duration: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: libc::time_t::try_from(duration.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::SeqCst;
    use std::thread;
    use std::time::Instant;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn a_change_before_or_during_the_wait_ends_it() {
        let word = AtomicU32::new(1);
        let begun = Instant::now();
        wait(&word, 0, Scope::Process, Some(LONG));
        thread::scope(|scope| {
            scope.spawn(|| {
                word.store(2, SeqCst);
                wake(&word, Scope::Process);
            });
            while word.load(SeqCst) == 1 {
                wait(&word, 1, Scope::Process, Some(LONG));
            }
        });
        assert!(begun.elapsed() < LONG / 2);
    }

    #[test]
    fn one_of_several_words_is_enough_and_a_timeout_ends_all() {
        if !can_wait_any() {
            println!("skipped: this kernel cannot wait for several words");
            return;
        }
        let words = [AtomicU32::new(0), AtomicU32::new(0)];
        let begun = Instant::now();
        let watched = [(&words[0], 0, Scope::Process), (&words[1], 0, Scope::Shared)];
        wait_any(watched, Some(Duration::from_millis(5))).unwrap();
        assert!(begun.elapsed() >= Duration::from_millis(4));
        thread::scope(|scope| {
            scope.spawn(|| {
                words[1].store(1, SeqCst);
                wake(&words[1], Scope::Shared);
            });
            while words[1].load(SeqCst) == 0 {
                wait_any(watched, Some(LONG)).unwrap();
            }
        });
        assert!(begun.elapsed() < LONG / 2);
    }
}
