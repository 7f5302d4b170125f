//! Grouped-query attention of prompts by kernels.
use afd_ffi::cpu_attention::CacheView;
use afd_ffi::cpu_rows::GqaShape;
use afd_ffi::cuda;
use afd_gpu::ops::GqaWrite;
use afd_gpu::{Device, Region};
use tch::Tensor;

use super::Gqa;
use crate::model::device_rows::Span;
use crate::model::error::{At, ModelError};
use crate::model::on_device::NoKernels;
use crate::model::prompts::Pass;
use crate::model::rows::{Norm, direct_attention};

/// What a layer has for its prompts.
pub(in crate::model) struct GqaPrompts {
    /// `[head_dim]` bf16 each, of queries and of keys.
    norms: Option<(Region, Region)>,
    epsilon: f32,
}

impl Gqa {
    pub(in crate::model) fn prompts(&self, device: &Device) -> Result<GqaPrompts, NoKernels> {
        let Some((_, norms, _)) = self.for_kernels() else {
            return Err(NoKernels::Unsupported("biases, clipping or a norm over all heads"));
        };
        let dim = self.shape.head_dim;
        if !dim.is_multiple_of(32) || dim > 256 {
            return Err(NoKernels::Unsupported("heads that flash attention or the kernels refuse"));
        }
        let region = |norm: &Norm| cuda::region(device, norm.tensor());
        let norms =
            norms.map(|(query, key)| Ok::<_, NoKernels>((region(query)?, region(key)?))).transpose()?;
        let epsilon = self.norms.as_ref().map_or(0.0, |norms| norms.eps as f32);
        Ok(GqaPrompts { norms, epsilon })
    }

    /// As [`forward`](Self::forward).
    pub(in crate::model) fn forward_by_kernels(
        &self,
        pass: Pass<'_>,
        own: &GqaPrompts,
        residual: &Tensor,
        x: &Tensor,
        (keys, values): (&Tensor, &Tensor),
    ) -> Result<Tensor, ModelError> {
        let GqaShape { num_heads, num_kv_heads, head_dim } = self.shape;
        let (layer, heads, dim) = (pass.layer, num_heads as i64, head_dim as i64);
        let qkv = x.f_linear(self.qkv.weight(), None::<Tensor>).at(layer, "qkv_proj")?;
        let write = GqaWrite {
            qkv: &pass.region(&qkv)?,
            norms: own.norms.as_ref().map(|(query, key)| (query, key)),
            keys: &pass.region(keys)?,
            values: &pass.region(values)?,
            heads: num_heads,
            kv: num_kv_heads,
            dim: head_dim,
            rotary: pass.rotary,
            epsilon: own.epsilon,
        };
        pass.write(|kernels, stream, places| kernels.gqa_write(stream, places, &write))?;
        let queries = qkv.f_view([-1, heads + 2 * num_kv_heads as i64, dim]);
        let queries = queries.and_then(|all| all.f_narrow(1, 0, heads)).at(layer, "queries")?;
        let span = |span: &Span| {
            let context = |cache: &Tensor| {
                let tokens = cache.f_view([-1, num_kv_heads as i64, dim])?;
                tokens.f_index_select(0, &span.context)
            };
            let queries = queries.f_narrow(0, span.rows.0, span.rows.1).at(layer, "queries")?;
            let (keys, values) = (context(keys).at(layer, "keys")?, context(values).at(layer, "values")?);
            let parts = (&queries, &keys, &values);
            cuda::flash_attention(parts, &span.sequences, self.scale).at(layer, "attention of prompts")
        };
        let view = CacheView { keys, values, num_kv_heads, key_dim: head_dim, value_dim: head_dim };
        let direct = |attended: &Tensor| {
            direct_attention(&[&queries], &view, pass.stage, self.scale, attended).at(layer, "attention")
        };
        let attended = pass.attended((heads, dim), &qkv, span, direct)?;
        let attended = attended.f_reshape([-1, heads * dim]).at(layer, "attention")?;
        self.out.add_to(residual, &attended, &pass.stage.crew).at(layer, "o_proj")
    }
}
