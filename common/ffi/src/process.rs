//! Control over this process: when it may be told to end, how its compute threads wait, and how many they are.
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::FfiError;

const WAIT_POLICY: &str = "OMP_WAIT_POLICY";

/// Replaces this process by itself with `OMP_WAIT_POLICY=PASSIVE`, unless the variable is set to anything already.
///
/// libgomp lets idle threads spin, and reads its setting before `main`, so it cannot be changed from within. With
/// several processes on few cores spinning costs more than ten times the work. Call this first in `main`, before any
/// thread or file is opened: process id, arguments, environment and standard streams stay the same.
///
/// Returns when there is nothing to do.
///
/// # Errors
/// [`FfiError::Os`] when the program cannot be started again; going on without is correct, only slow.
pub fn reexec_with_passive_wait() -> Result<(), FfiError> {
    if std::env::var_os(WAIT_POLICY).is_some() {
        return Ok(());
    }
    let fail = |source| FfiError::Os { what: format!("starting again with {WAIT_POLICY}=PASSIVE"), source };
    let program = std::env::current_exe().map_err(fail)?;
    let mut arguments = std::env::args_os();
    let mut command = Command::new(program);
    if let Some(name) = arguments.next() {
        command.arg0(name);
    }
    Err(fail(command.args(arguments).env(WAIT_POLICY, "PASSIVE").exec()))
}

/// SIGTERM and SIGINT wait from now on, in this thread and in those it starts, until [`let_end`]: neither ends the process, and
/// neither is lost, [beginning anew](reexec_with_passive_wait) included. First thing in `main`, for a process that ends well
/// whenever it is told to.
pub fn hold_end() {
    mask_end(libc::SIG_BLOCK);
}

/// The calling thread takes SIGTERM and SIGINT again, and what has waited comes now. By then something should handle it.
pub fn let_end() {
    mask_end(libc::SIG_UNBLOCK);
}

fn mask_end(how: libc::c_int) {
    // SAFETY: an all-zero set is memory that `sigemptyset` makes a set of; every call only writes to or reads from it, and
    // both signals exist. None of them fails with such arguments.
    unsafe {
        let mut ends: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut ends);
        libc::sigaddset(&mut ends, libc::SIGTERM);
        libc::sigaddset(&mut ends, libc::SIGINT);
        libc::pthread_sigmask(how, &ends, std::ptr::null_mut());
    }
}

/// Tells NCCL that a communicator's graphs and its other work are never on their way at the same time, as those of these
/// services are not: it then guards nothing, which a graph's every call pays for. What is set already stays. Call this
/// in `main` before any thread is started.
pub fn keep_nccl_graphs_apart() {
    const VARIABLE: &str = "NCCL_GRAPH_MIXING_SUPPORT";
    if std::env::var_os(VARIABLE).is_none() {
        // SAFETY: the caller has no other thread yet, so nobody reads the environment meanwhile.
        unsafe { std::env::set_var(VARIABLE, "0") };
    }
}

/// Threads that one tensor operation may use, for every thread that has not computed yet. Call before the engine starts.
pub fn set_compute_threads(threads: usize) {
    tch::set_num_threads(i32::try_from(threads.max(1)).unwrap_or(i32::MAX));
}

/// Ends the process now, as the system would: no destructor of libtorch's runs, which must not while another thread still
/// computes. What was written to standard error is there; what is buffered elsewhere is lost.
pub fn end_at_once(code: u8) -> ! {
    // SAFETY: `_exit` takes any number, touches nothing of this process's memory and does not return.
    unsafe { libc::_exit(i32::from(code)) }
}
