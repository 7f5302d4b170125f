//! Kernels, compiled for the device at hand when they are first asked for.
use std::ffi::{CStr, CString};
use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaModule, sys as driver};
use cudarc::nvrtc::{Ptx, sys as nvrtc};

use crate::{Device, GpuError};

const PRELUDE: &str = include_str!("../kernels/prelude.cuh");

/// A kernel file, without its constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// Puts and waits of step channels.
    Channel,
    /// Mixture of experts for few rows.
    Moe,
    /// The same for at most eight.
    MoeWhole,
    /// What stands around the products of a mixture of experts with many rows.
    MoeMany,
    /// Those products.
    MoeProduct,
    /// Decode attention over a latent cache.
    Mla,
    /// Decode attention over a cache of keys and values.
    Gqa,
    /// Norms, rope and cache write, argmax.
    Rows,
    /// Sampled tokens.
    Sample,
    /// What a device does while it waits.
    Meanwhile,
    /// Products with few rows.
    FewProduct,
    /// Products with a few dozen rows.
    MidProduct,
    /// Seeded numbers.
    Random,
}

impl Source {
    /// All of them.
    pub const ALL: [Self; 13] = [
        Self::Channel,
        Self::Moe,
        Self::MoeWhole,
        Self::MoeMany,
        Self::MoeProduct,
        Self::Mla,
        Self::Gqa,
        Self::Rows,
        Self::Meanwhile,
        Self::FewProduct,
        Self::MidProduct,
        Self::Sample,
        Self::Random,
    ];

    fn file(self) -> (&'static str, &'static str) {
        match self {
            Self::Channel => ("channel.cu", include_str!("../kernels/channel.cu")),
            Self::Moe => ("moe.cu", include_str!("../kernels/moe.cu")),
            Self::MoeWhole => ("moe_whole.cu", include_str!("../kernels/moe_whole.cu")),
            Self::MoeMany => ("moe_many.cu", include_str!("../kernels/moe_many.cu")),
            Self::MoeProduct => ("moe_product.cu", include_str!("../kernels/moe_product.cu")),
            Self::Mla => ("mla.cu", include_str!("../kernels/mla.cu")),
            Self::Gqa => ("gqa.cu", include_str!("../kernels/gqa.cu")),
            Self::Rows => ("rows.cu", include_str!("../kernels/rows.cu")),
            Self::Meanwhile => ("meanwhile.cu", include_str!("../kernels/meanwhile.cu")),
            Self::Sample => ("sample.cu", include_str!("../kernels/sample.cu")),
            Self::FewProduct => ("few_product.cu", include_str!("../kernels/few_product.cu")),
            Self::MidProduct => ("mid_product.cu", include_str!("../kernels/mid_product.cu")),
            Self::Random => ("random.cu", include_str!("../kernels/random.cu")),
        }
    }

    /// What it shares with others, besides the prelude.
    fn shared(self) -> &'static str {
        match self {
            Self::Moe => {
                concat!(
                    include_str!("../kernels/choose.cuh"),
                    include_str!("../kernels/moe_pool.cuh"),
                    include_str!("../kernels/moe_router.cuh"),
                    include_str!("../kernels/moe_combine.cuh")
                )
            }
            Self::MoeWhole => {
                concat!(include_str!("../kernels/choose.cuh"), include_str!("../kernels/moe_whole.cuh"))
            }
            Self::MoeMany => include_str!("../kernels/choose.cuh"),
            Self::Mla => include_str!("../kernels/mla_plan.cuh"),
            Self::MoeProduct | Self::MidProduct => include_str!("../kernels/wgmma.cuh"),
            _ => "",
        }
    }

    /// Machine code for `arch`, such as `sm_90a`. Needs NVRTC, but no GPU.
    ///
    /// # Errors
    /// [`GpuError::NoLibrary`] without NVRTC, [`GpuError::Compile`] with the compiler's log.
    pub fn compile(self, arch: &str, constants: &[(&str, i64)]) -> Result<Vec<u8>, GpuError> {
        let (file, text) = self.file();
        let shared = self.shared();
        // SAFETY: loads libnvrtc if it is there.
        if !unsafe { nvrtc::is_culib_present() } {
            return Err(GpuError::NoLibrary { library: "libnvrtc.so" });
        }
        let mut options = vec![
            format!("--gpu-architecture={arch}"),
            "--std=c++17".to_owned(),
            "-default-device".to_owned(),
        ];
        options.extend(constants.iter().map(|(name, value)| format!("-D{name}={value}")));
        Program::new(file, &format!("{PRELUDE}\n{shared}\n#line 1 \"{file}\"\n{text}"))?
            .compile(file, &options)
    }
}

/// A compiled kernel file on a device.
#[derive(Clone, Debug)]
pub struct Module {
    file: &'static str,
    inner: Arc<CudaModule>,
}

impl Module {
    /// Compiles `source` with `constants` for `device` and loads it: about 0.3 s, so once per shape, at start.
    ///
    /// # Errors
    /// As [`Source::compile`], and [`GpuError::Driver`].
    pub fn load(device: &Device, source: Source, constants: &[(&str, i64)]) -> Result<Self, GpuError> {
        let (major, minor) = device.arch();
        // Copies of the engine in 9.0 need its own instruction set, which no other device runs.
        let own = if major >= 9 { "a" } else { "" };
        let image = source.compile(&format!("sm_{major}{minor}{own}"), constants)?;
        let inner = device.context().load_module(Ptx::from_binary(image));
        Ok(Self { file: source.file().0, inner: inner.map_err(GpuError::driver("loading kernels"))? })
    }

    /// The kernel `name`, allowed `shared_bytes` of dynamic shared memory.
    ///
    /// # Errors
    /// [`GpuError::Driver`] when there is none or the device has less shared memory.
    pub fn kernel(&self, name: &'static str, shared_bytes: usize) -> Result<Kernel, GpuError> {
        let function = self.inner.load_function(name).map_err(GpuError::driver(name))?;
        let attribute = driver::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        if shared_bytes > 48 << 10 {
            function.set_attribute(attribute, shared_bytes as i32).map_err(GpuError::driver(name))?;
        }
        Ok(Kernel { name, function, shared_bytes: shared_bytes as u32 })
    }

    /// Where it came from.
    pub fn file(&self) -> &'static str {
        self.file
    }
}

/// One kernel, ready to be launched by the operation that knows its arguments.
#[derive(Clone, Debug)]
pub struct Kernel {
    name: &'static str,
    function: CudaFunction,
    shared_bytes: u32,
}

impl Kernel {
    /// As in the kernel file.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Asks for as much shared memory as there is, though the kernel does not need it. A multiprocessor changes its split of
    /// cache and shared memory only when it is empty: with one split for all, kernels that overlap can take their
    /// places beside each other. Not for kernels that must run beside ones of another split on another stream: a launch
    /// with a new preference may wait for what runs.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn prefer_shared_memory(&self) -> Result<(), GpuError> {
        let split = driver::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        self.function.set_attribute(split, 100).map_err(GpuError::driver(self.name))
    }

    /// The same for launches with less shared memory than it is allowed.
    pub(crate) fn with_shared_bytes(&self, bytes: usize) -> Self {
        Self { shared_bytes: self.shared_bytes.min(bytes as u32), ..self.clone() }
    }

    pub(crate) fn function(&self) -> driver::CUfunction {
        self.function.cu_function()
    }

    pub(crate) fn shared_bytes(&self) -> u32 {
        self.shared_bytes
    }
}

/// An NVRTC program, destroyed with the value.
struct Program {
    handle: nvrtc::nvrtcProgram,
    _text: CString,
}

impl Program {
    fn new(file: &'static str, text: &str) -> Result<Self, GpuError> {
        let broken = |what: &str| GpuError::Compile { file, log: what.to_owned() };
        let text = CString::new(text).map_err(|_| broken("has a zero byte"))?;
        let name = CString::new(file).map_err(|_| broken("name has a zero byte"))?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: both strings end with zero and live through the call; the text is kept beside the handle.
        let made = unsafe {
            nvrtc::nvrtcCreateProgram(
                &mut handle,
                text.as_ptr(),
                name.as_ptr(),
                0,
                std::ptr::null(),
                std::ptr::null(),
            )
        };
        made.result().map_err(|e| broken(&e.to_string()))?;
        Ok(Self { handle, _text: text })
    }

    fn compile(&self, file: &'static str, options: &[String]) -> Result<Vec<u8>, GpuError> {
        let broken = |log: String| GpuError::Compile { file, log };
        let options: Vec<_> = options.iter().filter_map(|o| CString::new(o.as_str()).ok()).collect();
        let pointers: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: the pointers are valid strings through the call.
        let done = unsafe {
            nvrtc::nvrtcCompileProgram(self.handle, pointers.len() as i32, pointers.as_ptr().cast_mut())
                .result()
        };
        if let Err(e) = done {
            return Err(broken(format!("{e}: {}", self.log())));
        }
        let mut size = 0;
        // SAFETY: a compiled program; the buffer has the size that it asked for.
        unsafe {
            nvrtc::nvrtcGetCUBINSize(self.handle, &mut size).result().map_err(|e| broken(e.to_string()))?;
            let mut image = vec![0u8; size];
            let got = nvrtc::nvrtcGetCUBIN(self.handle, image.as_mut_ptr().cast());
            got.result().map_err(|e| broken(e.to_string()))?;
            Ok(image)
        }
    }

    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: a live program; the buffer has the size that it asked for and ends with zero.
        unsafe {
            if nvrtc::nvrtcGetProgramLogSize(self.handle, &mut size).result().is_err() {
                return String::new();
            }
            let mut log = vec![0u8; size.max(1)];
            let _ = nvrtc::nvrtcGetProgramLog(self.handle, log.as_mut_ptr().cast());
            CStr::from_bytes_until_nul(&log).map(|l| l.to_string_lossy().into_owned()).unwrap_or_default()
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        let _ = unsafe { nvrtc::nvrtcDestroyProgram(&mut self.handle) };
    }
}
