//! Which model is served, and under which name.
use std::path::PathBuf;

use afd_common::config::choices::LoadFormat;
use afd_common::config::device::DeviceChoice;
use afd_common::config::dtype::DtypeChoice;
use afd_common::config::option::{OptionError, model_folder, refuse};

use super::ServeArgs;

/// The checkpoint.
#[derive(Clone, Debug)]
pub struct ModelSource {
    /// A folder that exists.
    pub folder: PathBuf,
    /// Name that requests use, not empty.
    pub name: String,
    /// To compute in.
    pub dtype: DtypeChoice,
    /// Where.
    pub device: DeviceChoice,
    /// Where weights come from.
    pub load_format: LoadFormat,
    /// Of dummy weights.
    pub seed: u64,
    /// Asked for by the user, at least 2.
    pub max_model_len: Option<usize>,
}

impl ModelSource {
    pub(super) fn new(args: &ServeArgs) -> Result<Self, OptionError> {
        let folder = model_folder(args.model.as_deref())?.to_owned();
        let folder_name = folder.canonicalize().unwrap_or_else(|_| folder.clone());
        let folder_name = folder_name.file_name().map(|name| name.to_string_lossy().into_owned());
        let name = args.served_model_name.clone().or(folder_name).unwrap_or_else(|| "model".into());
        if name.is_empty() || name.len() > 256 {
            return refuse("--served-model-name", format!("is {name:?}; expected 1 to 256 characters"));
        }
        if let Some(len @ 0..2) = args.max_model_len {
            return refuse(
                "--max-model-len",
                format!("is {len}; expected at least 2: a token to read and one to write"),
            );
        }
        Ok(Self {
            folder,
            name,
            dtype: args.dtype.unwrap_or_default(),
            device: args.tensors.device.unwrap_or_default(),
            load_format: args.tensors.load_format.unwrap_or_default(),
            seed: args.tensors.seed.unwrap_or(0),
            max_model_len: args.max_model_len,
        })
    }
}
