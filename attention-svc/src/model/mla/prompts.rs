//! Latent attention of prompts by kernels.
//!
//! Keys and values of all heads come from the cache's entries in one product: with zeros and ones in the weight's new
//! columns the rope key, which all heads share, lands behind every head's own part, and values are as wide as keys, which
//! flash attention wants.
use afd_ffi::cuda;
use afd_gpu::ops::{Ahead, MlaQueries, MlaStep, MlaWrite};
use afd_gpu::{Device, Region};
use tch::{TchError, Tensor};

use super::{Dims, LATENT_NORM_EPS, Mla};
use crate::model::device_rows::Span;
use crate::model::error::{At, ModelError};
use crate::model::on_device::NoKernels;
use crate::model::prompts::{MAX_ALONE, Pass};

/// What a layer has for its prompts.
pub(in crate::model) struct MlaPrompts {
    /// `[latent]` bf16
    norm: Region,
    /// `[2 * heads * query, latent + rope]`: the rows of all keys, then of all values.
    expand: Tensor,
}

impl Mla {
    pub(in crate::model) fn prompts(&self, device: &Device) -> Result<MlaPrompts, NoKernels> {
        let Some((_, norm, _, _)) = self.for_kernels() else {
            return Err(NoKernels::Unsupported("biases or a query latent"));
        };
        let Dims { value, .. } = self.dims;
        if value > self.dims.query() || self.dims.query() % 8 != 0 || self.dims.query() > 256 {
            return Err(NoKernels::Unsupported(
                "values wider than keys, or keys that flash attention refuses",
            ));
        }
        Ok(MlaPrompts { norm: cuda::region(device, norm.tensor())?, expand: self.expansion()? })
    }

    fn expansion(&self) -> Result<Tensor, TchError> {
        let Dims { heads, latent, nope, rope, value } = self.dims;
        let options = (self.up.kind(), self.up.device());
        let all = Tensor::f_zeros([2, heads, self.dims.query(), latent + rope], options)?;
        let (keys, values) = (all.f_get(0)?, all.f_get(1)?);
        let own = self.up.f_view([heads, nope + value, latent])?;
        keys.f_narrow(1, 0, nope)?.f_narrow(2, 0, latent)?.f_copy_(&own.f_narrow(1, 0, nope)?)?;
        keys.f_narrow(1, nope, rope)?.f_narrow(2, latent, rope)?.f_copy_(&Tensor::f_eye(rope, options)?)?;
        values.f_narrow(1, 0, value)?.f_narrow(2, 0, latent)?.f_copy_(&own.f_narrow(1, nope, value)?)?;
        all.f_view([-1, latent + rope])
    }

    /// As [`forward`](Self::forward).
    pub(in crate::model) fn forward_by_kernels(
        &self,
        pass: Pass<'_>,
        own: &MlaPrompts,
        residual: &Tensor,
        x: &Tensor,
        cache: &Tensor,
    ) -> Result<Tensor, ModelError> {
        let Dims { heads, latent, nope, rope, value } = self.dims;
        let (layer, width) = (pass.layer, self.dims.query());
        let down = x.f_linear(self.down.weight(), None::<Tensor>).at(layer, "q_proj and kv_a_proj")?;
        let write = MlaWrite {
            projected: &pass.region(&down)?,
            stride: (heads * width + latent + rope) as usize,
            latent_norm: &own.norm,
            query: MlaQueries::InPlace,
            cache: &pass.region(cache)?,
            latent: latent as usize,
            nope: nope as usize,
            rope: rope as usize,
            heads: heads as usize,
            interleaved: pass.interleaved,
            epsilon: LATENT_NORM_EPS as f32,
            ahead: Ahead::default(),
        };
        pass.write(|kernels, stream, places| kernels.mla_write(stream, places, &write))?;
        let queries = down.f_narrow(1, 0, heads * width).and_then(|q| q.f_unflatten(1, [heads, width]));
        let queries = queries.at(layer, "queries")?;
        let span = |span: &Span| self.span(pass, own, &queries, cache, span);
        let direct = |attended: &Tensor| match self.alone(pass, &queries, cache, attended)? {
            true => Ok(()),
            false => self.direct(layer, &queries, pass.stage, cache, attended),
        };
        let attended = pass.attended((heads, value), &down, span, direct)?;
        let attended = attended.f_reshape([-1, heads * value]).at(layer, "attention")?;
        self.out.add_to(residual, &attended, &pass.stage.crew).at(layer, "o_proj")
    }

    /// Writes attention of the rows that come alone to `attended`, `[num_rows, heads, value]`, by the decode kernel; `false`
    /// where there is none for them.
    fn alone(
        &self,
        pass: Pass<'_>,
        queries: &Tensor,
        cache: &Tensor,
        attended: &Tensor,
    ) -> Result<bool, ModelError> {
        let Dims { heads, latent, nope, rope, value } = self.dims;
        let (Some(kernel), Some(direct)) = (&pass.prompts.decode, &pass.rows.direct) else {
            return Ok(false);
        };
        let batch = pass.stage.num_direct_rows();
        if batch > MAX_ALONE {
            return Ok(false);
        }
        let own = match &pass.stage.direct_index {
            Some(index) => queries.f_index_select(0, index).at(pass.layer, "queries")?,
            None => queries.shallow_clone(),
        };
        let absorbed = own
            .f_narrow(2, 0, nope)
            .and_then(|own| own.f_transpose(0, 1)?.f_bmm(&self.up_keys)?.f_transpose(0, 1))
            .and_then(|absorbed| Tensor::f_cat(&[absorbed, own.f_narrow(2, nope, rope)?], 2))
            .at(pass.layer, "absorbing W_UK")?;
        let shape = [batch as i64, heads, latent];
        let latents = Tensor::f_empty(shape, (own.kind(), own.device())).at(pass.layer, "attention")?;
        let step = MlaStep {
            batch,
            block_table: pass.region(&direct.table)?,
            max_blocks: direct.max_blocks,
            seq_lens: pass.region(&direct.seq_lens)?,
        };
        let (query, entries, out) = (pass.region(&absorbed)?, pass.region(cache)?, pass.region(&latents)?);
        let stream = &pass.prompts.stream;
        // Planned for every layer: another stage may have had its turn since.
        kernel.plan(stream, &step).at(pass.layer, "attention")?;
        let scale = self.scale as f32;
        kernel.decode(stream, &step, &query, &entries, scale, &out, false).at(pass.layer, "attention")?;
        let values = latents
            .f_transpose(0, 1)
            .and_then(|latents| {
                latents.f_bmm(&self.up_values)?.f_transpose(0, 1)?.f_reshape([-1, heads * value])
            })
            .at(pass.layer, "absorbing W_UV")?;
        let mut attended = attended.f_view([-1, heads * value]).at(pass.layer, "attention")?;
        let put = match &pass.stage.direct_index {
            Some(index) => attended.f_index_copy_(0, index, &values).map(drop),
            None => attended.f_copy_(&values),
        };
        put.at(pass.layer, "attention")?;
        Ok(true)
    }

    /// `[rows of the span, heads, value]`
    fn span(
        &self,
        pass: Pass<'_>,
        own: &MlaPrompts,
        queries: &Tensor,
        cache: &Tensor,
        span: &Span,
    ) -> Result<Tensor, ModelError> {
        let Dims { heads, latent, rope, value, .. } = self.dims;
        let (layer, width) = (pass.layer, self.dims.query());
        let expanded = cache.f_view([-1, latent + rope]).and_then(|entries| {
            let both = entries.f_index_select(0, &span.context)?.f_linear(&own.expand, None::<Tensor>)?;
            both.f_view([-1, 2, heads, width])
        });
        let expanded = expanded.at(layer, "keys and values")?;
        let part = |part| expanded.f_select(1, part).at(layer, "keys and values");
        let queries = queries.f_narrow(0, span.rows.0, span.rows.1).at(layer, "queries")?;
        let parts = (&queries, &part(0)?, &part(1)?);
        let out =
            cuda::flash_attention(parts, &span.sequences, self.scale).at(layer, "attention of prompts")?;
        out.f_narrow(2, 0, value).at(layer, "attention of prompts")
    }
}
