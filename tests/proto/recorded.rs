//! The protocol as it was published last: `v1.binpb`, a descriptor set without comments (buf reads it too).
//!
//! After a change that only adds, move it on and commit it with the change:
//!
//! ```text
//! cargo test -p afd-tests --test proto -- --ignored record
//! ```
//!
//! It refuses a change that breaks clients. One that must be made all the same belongs into `afd.v2`; before the first
//! release, delete `v1.binpb`, record, and say in the commit who has to follow.
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use prost::Message;
use prost_types::FileDescriptorSet;

use crate::breaking::{Facts, added, broken, facts};

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("proto/v1.binpb")
}

fn recorded() -> anyhow::Result<Facts> {
    let bytes = std::fs::read(path()).with_context(|| path().display().to_string())?;
    Ok(facts(&crate::ours(FileDescriptorSet::decode(&bytes[..])?)))
}

fn current() -> anyhow::Result<Facts> {
    Ok(facts(&crate::ours(crate::compiled()?)))
}

#[test]
fn nothing_that_was_published_has_changed() -> anyhow::Result<()> {
    crate::none(broken(&recorded()?, &current()?))
}

/// Else what is new could be taken away again without anyone noticing.
#[test]
fn what_is_new_is_recorded() -> anyhow::Result<()> {
    let new = added(&recorded()?, &current()?);
    let command = "cargo test -p afd-tests --test proto -- --ignored record";
    ensure!(new.is_empty(), "not in tests/proto/v1.binpb yet (`{command}` does it):\n{}", new.join("\n"));
    Ok(())
}

#[test]
#[ignore = "writes tests/proto/v1.binpb"]
fn record() -> anyhow::Result<()> {
    if path().exists() {
        crate::none(broken(&recorded()?, &current()?))?;
    }
    let mut set = crate::compiled()?;
    set.file.iter_mut().for_each(|file| file.source_code_info = None);
    Ok(std::fs::write(path(), set.encode_to_vec())?)
}
