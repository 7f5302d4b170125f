//! One process of ours: started, watched, stopped. Its log goes to a file that is shown when a test fails.
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

/// How often a condition without an event of its own is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// A running binary of this workspace. Killed when dropped.
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
    address_file: PathBuf,
}

impl Process {
    /// Starts `binary` ("attention-svc" or "ffn-svc") with `args`, its log and address file in `folder` under `name`.
    ///
    /// # Errors
    /// When the workspace does not build or the process cannot be started.
    pub fn start(binary: &str, name: &str, args: &[String], folder: &Path) -> anyhow::Result<Self> {
        Self::start_in(binary, name, args, &[], folder)
    }

    /// The same, with variables in its environment beside those of the test.
    ///
    /// # Errors
    /// As above.
    pub fn start_in(
        binary: &str,
        name: &str,
        args: &[String],
        env: &[(String, String)],
        folder: &Path,
    ) -> anyhow::Result<Self> {
        let (log, address_file) =
            (folder.join(format!("{name}.log")), folder.join(format!("{name}.address")));
        let _ = std::fs::remove_file(&address_file);
        let output = File::options().create(true).append(true).open(&log)?;
        let child = Command::new(binaries()?.join(binary))
            .args(args)
            .envs(env.iter().map(|(name, value)| (name, value)))
            .arg("--address-file")
            .arg(&address_file)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("starting {binary}"))?;
        Ok(Self { name: name.to_owned(), child, log, address_file })
    }

    /// Path of a binary of this workspace, built.
    ///
    /// # Errors
    /// When the workspace does not build.
    pub fn binary(name: &str) -> anyhow::Result<PathBuf> {
        Ok(binaries()?.join(name))
    }

    /// Where it listens, once it does.
    ///
    /// # Errors
    /// When it ends first, or does not listen within `limit`; its log is part of the message.
    pub fn address(&mut self, limit: Duration) -> anyhow::Result<SocketAddr> {
        let deadline = Instant::now() + limit;
        loop {
            if let Ok(text) = std::fs::read_to_string(&self.address_file)
                && let Ok(address) = text.trim().parse()
            {
                return Ok(address);
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended with {status} before it listened:\n{}", self.name, self.log());
            }
            if Instant::now() >= deadline {
                bail!("{} does not listen after {limit:?}:\n{}", self.name, self.log());
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether it has ended, by itself or not.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// What it has logged so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Sends a signal by its name, for example "TERM", "STOP" or "CONT".
    ///
    /// # Errors
    /// When the process is gone.
    pub fn signal(&self, name: &str) -> anyhow::Result<()> {
        let status =
            Command::new("kill").arg(format!("-{name}")).arg(self.child.id().to_string()).status()?;
        if !status.success() {
            bail!("{} cannot be sent {name}", self.name);
        }
        Ok(())
    }

    /// kill -9, and waits until it is gone.
    ///
    /// # Errors
    /// When it cannot be killed.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Waits for the process to end by itself.
    ///
    /// # Errors
    /// When it has not ended within `limit`; its log is part of the message.
    pub fn wait(&mut self, limit: Duration) -> anyhow::Result<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() >= deadline {
                bail!("{} still runs after {limit:?}:\n{}", self.name, self.log());
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("---- log of {} ----\n{}", self.name, self.log());
        }
    }
}

/// Runs one of our commands to its end: `("attention-svc", &["plan", "list"])`; what it printed.
///
/// # Errors
/// When it does not end well; what it wrote on standard error is part of the message.
pub fn run(binary: &str, args: &[&str]) -> anyhow::Result<String> {
    let output = output(binary, args)?;
    if !output.status.success() {
        bail!("{binary} {args:?}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// The same, however it ends.
///
/// # Errors
/// When it cannot be started.
pub fn output(binary: &str, args: &[&str]) -> anyhow::Result<Output> {
    Ok(Command::new(binaries()?.join(binary)).args(args).stdin(Stdio::null()).output()?)
}

/// Folder of the binaries that belong to the running test: the same profile, built first where they are not.
fn binaries() -> anyhow::Result<&'static Path> {
    static FOLDER: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let built = FOLDER.get_or_init(|| build().map_err(|error| format!("{error:#}")));
    built.as_deref().map_err(|error| anyhow::anyhow!("{error}"))
}

fn build() -> anyhow::Result<PathBuf> {
    // deploy/test.sh has built them before the first test, so that no test waits for a compiler.
    if let Some(folder) = std::env::var_os("AFD_TEST_BINARIES") {
        return Ok(folder.into());
    }
    let test = std::env::current_exe()?;
    let folder =
        test.parent().and_then(Path::parent).context("a test lies in target/<profile>/deps")?.to_owned();
    let mut cargo = Command::new(option_env!("CARGO").unwrap_or("cargo"));
    cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
    cargo.args(["build", "--quiet", "-p", "attention-svc", "-p", "ffn-svc", "--bins", "--target-dir"]);
    cargo.arg(folder.parent().context("a profile lies in a target folder")?);
    if folder.ends_with("release") {
        cargo.arg("--release");
    }
    if !cargo.status()?.success() {
        bail!("the binaries do not build");
    }
    Ok(folder)
}
