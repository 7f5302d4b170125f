//! The reference implementation's hidden states of one checkpoint (`expected/<name>.hidden.safetensors`).
use afd_tests::fixtures;
use safetensors::{Dtype, SafeTensors};
use tch::{Kind, Tensor};

pub(crate) struct Reference {
    name: String,
    file: Vec<u8>,
}

impl Reference {
    pub(crate) fn open(name: &str) -> Self {
        let path = fixtures::root().join("expected").join(format!("{name}.hidden.safetensors"));
        Self { name: name.into(), file: std::fs::read(path).unwrap() }
    }

    /// `layers.{layer}.{what}`.
    pub(crate) fn layer(&self, layer: usize, what: &str) -> Tensor {
        let tensors = SafeTensors::deserialize(&self.file).unwrap();
        let key = format!("layers.{layer}.{what}");
        let view = tensors.tensor(&key).unwrap_or_else(|error| panic!("{}: {key}: {error}", self.name));
        let shape: Vec<i64> = view.shape().iter().map(|&size| size as i64).collect();
        let kind = match view.dtype() {
            Dtype::F32 => Kind::Float,
            Dtype::I64 => Kind::Int64,
            other => panic!("{key} has dtype {other:?}"),
        };
        Tensor::f_from_data_size(view.data(), &shape, kind).unwrap()
    }
}
