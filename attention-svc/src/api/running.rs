//! Requests that run, by name: what `Abort` looks up and what makes names unique.
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::request::SequenceId;

/// The sequences of every running request.
#[derive(Clone, Debug, Default)]
pub(super) struct Running {
    requests: Arc<Mutex<HashMap<Arc<str>, Vec<SequenceId>>>>,
}

/// Keeps a request's name taken while it lives.
#[derive(Debug)]
pub(super) struct Registered {
    running: Running,
    name: Arc<str>,
}

impl Running {
    /// Takes a name; `None` when a running request has it.
    pub(super) fn register(&self, name: Arc<str>) -> Option<Registered> {
        let mut requests = self.lock();
        if requests.contains_key(&name) {
            return None;
        }
        requests.insert(Arc::clone(&name), Vec::new());
        drop(requests);
        Some(Registered { running: self.clone(), name })
    }

    /// Sequences of a running request.
    pub(super) fn sequences(&self, name: &str) -> Option<Vec<SequenceId>> {
        self.lock().get(name).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Arc<str>, Vec<SequenceId>>> {
        // No code panics while holding the lock, and the map is whole between any two statements.
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registered {
    /// Adds a sequence of this request.
    pub(super) fn add(&self, id: SequenceId) {
        if let Some(sequences) = self.running.lock().get_mut(&self.name) {
            sequences.push(id);
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.running.lock().remove(&self.name);
    }
}
