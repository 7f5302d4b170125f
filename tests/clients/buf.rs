//! buf itself on `proto/`, beside the same rules in `tests/proto`. It reads only what is in the repository.
use anyhow::ensure;

use crate::built::{Effort, folder, root, run};

const LIMIT_S: u32 = 120;

#[test]
fn buf_has_no_complaint() -> anyhow::Result<()> {
    let Some(folder) = folder("buf", Effort::Long)? else { return Ok(()) };
    let (proto, published) = (root().join("proto"), root().join("tests/proto/v1.binpb"));
    let (proto, published) = (proto.display().to_string(), published.display().to_string());
    for arguments in [vec!["lint", &proto], vec!["breaking", &proto, "--against", &published]] {
        let output = run(LIMIT_S, folder.join("buf"), &arguments)?;
        let words = [output.stdout, output.stderr].concat();
        ensure!(output.status.success(), "buf {arguments:?}:\n{}", String::from_utf8_lossy(&words));
    }
    Ok(())
}
