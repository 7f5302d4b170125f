//! What `proto/` promises: it reads like the rest of the world's protocols, everything in it is explained, and what was
//! once published stays. `v1.binpb` beside this file is what was published last; `recorded.rs` says
//! how to move it on.
mod breaking;
mod comments;
mod lint;
mod recorded;
mod round_trip;

use std::path::{Path, PathBuf};

use prost_types::FileDescriptorSet;

/// `proto/`.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../proto")
}

/// Every file under `proto/` and what it imports, with comments.
fn compiled() -> anyhow::Result<FileDescriptorSet> {
    let mut files: Vec<_> = std::fs::read_dir(root().join("afd/v1"))?
        .map(|entry| Ok(entry?.path()))
        .collect::<std::io::Result<_>>()?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "proto"));
    files.sort();
    Ok(protox::compile(files, [root()])?)
}

/// The same without what is not ours.
fn ours(mut set: FileDescriptorSet) -> FileDescriptorSet {
    set.file.retain(|file| file.package().starts_with("afd."));
    set
}

/// One file with comments, for the tests of the rules themselves.
fn sample(name: &str, text: &str) -> FileDescriptorSet {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, text).unwrap();
    protox::compile([path], [folder.path()]).unwrap()
}

/// All complaints, one a line, if there are any.
fn none(complaints: Vec<String>) -> anyhow::Result<()> {
    anyhow::ensure!(complaints.is_empty(), "{} complaints:\n{}", complaints.len(), complaints.join("\n"));
    Ok(())
}

#[test]
fn everything_has_a_comment() -> anyhow::Result<()> {
    none(comments::missing(&ours(compiled()?)))
}

#[test]
fn the_standard_lint_rules_hold() -> anyhow::Result<()> {
    none(lint::complaints(&ours(compiled()?)))
}

#[test]
fn the_services_are_compiled_from_every_file() -> anyhow::Result<()> {
    use prost::Message;
    let served = FileDescriptorSet::decode(afd_common::proto::DESCRIPTOR_SET)?;
    let served: Vec<_> = served.file.iter().map(|file| file.name()).collect();
    let left_out = ours(compiled()?).file.into_iter().filter(|file| !served.contains(&file.name()));
    none(left_out.map(|file| format!("{} is not in common/build.rs", file.name())).collect())
}
