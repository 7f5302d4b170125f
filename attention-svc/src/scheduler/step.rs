//! What the scheduler hands to the engine for one step.

/// What a step does, seen by its sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Several tokens of every sequence: prompts, or recomputation after a preemption.
    Prefill,
    /// One new token of every sequence.
    Decode,
    /// Both.
    Mixed,
}
