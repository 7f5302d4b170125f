//! How often a thread asks for memory: for tests of what must not.
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    // Neither set up nor torn down by code: so it may be used wherever memory is asked for.
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counted: a test binary's `#[global_allocator]`.
#[derive(Debug)]
pub struct Counted;

/// Times that this thread asked for memory so far, under [`Counted`].
pub fn of_this_thread() -> u64 {
    COUNT.get()
}

// SAFETY: every call is handed on to the system's allocator as it came, which keeps the rules; counting asks for no memory.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: the caller's promise is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above; it came from the system's allocator.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: as above.
        unsafe { System.realloc(memory, layout, new_size) }
    }
}
