//! The few vector operations that the loops for few rows need, for three kinds of CPU, and the choice between them.
//!
//! Everything here is `#[inline(always)]`: the loops are generic over [`Simd`] and are compiled once per kind inside a
//! function with that kind's target features.

/// Vectors of f32.
pub(crate) trait Simd: Copy {
    /// Elements of a vector.
    const LANES: usize;
    /// A vector.
    type Vector: Copy;

    /// All lanes `x`.
    ///
    /// # Safety
    /// The CPU has this kind's instructions; so for every function of this trait.
    unsafe fn splat(x: f32) -> Self::Vector;
    /// Loads `LANES` floats.
    ///
    /// # Safety
    /// `from` is readable for `LANES` elements, at any alignment.
    unsafe fn load(from: *const f32) -> Self::Vector;
    /// Loads `LANES` bfloat16 values, widened.
    ///
    /// # Safety
    /// As for `load`.
    unsafe fn load_bf16(from: *const u16) -> Self::Vector;
    /// Writes `LANES` floats.
    ///
    /// # Safety
    /// `to` is writable for `LANES` elements, at any alignment.
    unsafe fn store(to: *mut f32, x: Self::Vector);
    /// `a * b`.
    ///
    /// # Safety
    /// See [`splat`](Self::splat).
    unsafe fn mul(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a * b + c`.
    ///
    /// # Safety
    /// See [`splat`](Self::splat).
    unsafe fn fma(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// Sum of the lanes.
    ///
    /// # Safety
    /// See [`splat`](Self::splat).
    unsafe fn sum(x: Self::Vector) -> f32;
    /// The same for four vectors, where that is cheaper together.
    ///
    /// # Safety
    /// See [`splat`](Self::splat).
    #[inline(always)]
    unsafe fn sum4(x: [Self::Vector; 4]) -> [f32; 4] {
        // SAFETY: the caller's promise is the same.
        unsafe { [Self::sum(x[0]), Self::sum(x[1]), Self::sum(x[2]), Self::sum(x[3])] }
    }
    /// Asks for the cache line of an address; any address is legal.
    fn prefetch<T>(_address: *const T) {}
}

/// An element that loops read and write: of the KV cache, of a weight, of a row.
pub(crate) trait Element: Copy + Send + Sync {
    /// Whether it is bfloat16.
    const IS_BF16: bool = false;
    /// Loads a vector of them as f32.
    ///
    /// # Safety
    /// As for [`Simd::load`].
    unsafe fn load<S: Simd>(from: *const Self) -> S::Vector;
    fn to_f32(self) -> f32;
    fn from_f32(x: f32) -> Self;
    /// The same elements, if they are f32.
    fn as_f32(_elements: &[Self]) -> Option<&[f32]> {
        None
    }
    /// The same elements, if they are bfloat16.
    fn as_bf16(_elements: &[Self]) -> Option<&[Bf16]> {
        None
    }
}

impl Element for f32 {
    fn as_f32(elements: &[Self]) -> Option<&[f32]> {
        Some(elements)
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::Vector {
        // SAFETY: the caller's promise is the same.
        unsafe { S::load(from) }
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }
}

/// bfloat16, as its bits.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Bf16(pub(crate) u16);

impl Element for Bf16 {
    const IS_BF16: bool = true;

    fn as_bf16(elements: &[Self]) -> Option<&[Bf16]> {
        Some(elements)
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::Vector {
        // SAFETY: the caller's promise is the same; `Bf16` is a transparent `u16`.
        unsafe { S::load_bf16(from.cast()) }
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
    /// Rounds to nearest, ties to even; a NaN stays one. Without a branch, so that loops of it become vectors.
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        let bits = x.to_bits();
        let round = 0x7fff + ((bits >> 16) & 1);
        let rounded = bits.wrapping_add(round) >> 16;
        let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
        Self(if is_nan { bits >> 16 | 0x40 } else { rounded } as u16)
    }
}

/// Any CPU; the compiler makes of it what it can.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

impl Simd for Portable {
    const LANES: usize = 8;
    type Vector = [f32; 8];

    #[inline(always)]
    unsafe fn splat(x: f32) -> [f32; 8] {
        [x; 8]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> [f32; 8] {
        // SAFETY: readable for 8 elements, says the caller.
        unsafe { from.cast::<[f32; 8]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> [f32; 8] {
        // SAFETY: readable for 8 elements, says the caller.
        let bits = unsafe { from.cast::<[u16; 8]>().read_unaligned() };
        bits.map(|b| Bf16(b).to_f32())
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: [f32; 8]) {
        // SAFETY: writable for 8 elements, says the caller.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn mul(a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn fma(a: [f32; 8], b: [f32; 8], c: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn sum(x: [f32; 8]) -> f32 {
        (x[0] + x[4]) + (x[1] + x[5]) + ((x[2] + x[6]) + (x[3] + x[7]))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::Simd;

    /// AVX2 and FMA.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2;

    /// AVX-512 F.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx512;

    // SAFETY of every block in these two implementations: the caller promises that the CPU has the instructions (the
    // only callers are functions that enable them, reached after `is_x86_feature_detected!`) and that pointers are good
    // for `LANES` elements; the unaligned forms of load and store are used throughout.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl Simd for Avx2 {
        const LANES: usize = 8;
        type Vector = __m256;

        #[inline(always)]
        unsafe fn splat(x: f32) -> __m256 {
            unsafe { _mm256_set1_ps(x) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> __m256 {
            unsafe { _mm256_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn load_bf16(from: *const u16) -> __m256 {
            unsafe {
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
            }
        }
        #[inline(always)]
        unsafe fn store(to: *mut f32, x: __m256) {
            unsafe { _mm256_storeu_ps(to, x) }
        }
        #[inline(always)]
        fn prefetch<T>(address: *const T) {
            // A hint that never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
        }
        #[inline(always)]
        unsafe fn mul(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_mul_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
            unsafe { _mm256_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        unsafe fn sum(x: __m256) -> f32 {
            unsafe {
                let half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
                let pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
                _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)))
            }
        }
    }

    /// The four vectors' sums: their lanes are brought together before they are added across.
    ///
    /// # Safety
    /// The CPU has AVX-512 F.
    #[inline(always)]
    pub(crate) unsafe fn sum4(x: [__m512; 4]) -> [f32; 4] {
        // SAFETY: the caller's promise; the array is as large as what is stored.
        unsafe {
            let a = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
            let b = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
            // Every 128 bits: a share of each of the four sums.
            let four = _mm512_add_ps(
                _mm512_shuffle_ps::<0b01_00_01_00>(a, b),
                _mm512_shuffle_ps::<0b11_10_11_10>(a, b),
            );
            let two = _mm256_add_ps(
                _mm512_castps512_ps256(four),
                _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(four))),
            );
            let one = _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps::<1>(two));
            let mut sums = [0.0; 4];
            _mm_storeu_ps(sums.as_mut_ptr(), one);
            sums
        }
    }

    #[allow(clippy::undocumented_unsafe_blocks)]
    impl Simd for Avx512 {
        const LANES: usize = 16;
        type Vector = __m512;

        #[inline(always)]
        unsafe fn splat(x: f32) -> __m512 {
            unsafe { _mm512_set1_ps(x) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> __m512 {
            unsafe { _mm512_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn load_bf16(from: *const u16) -> __m512 {
            unsafe {
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
            }
        }
        #[inline(always)]
        unsafe fn store(to: *mut f32, x: __m512) {
            unsafe { _mm512_storeu_ps(to, x) }
        }
        #[inline(always)]
        fn prefetch<T>(address: *const T) {
            // A hint that never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
        }
        #[inline(always)]
        unsafe fn mul(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_mul_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        unsafe fn sum(x: __m512) -> f32 {
            unsafe { _mm512_reduce_add_ps(x) }
        }
        #[inline(always)]
        unsafe fn sum4(x: [__m512; 4]) -> [f32; 4] {
            unsafe { sum4(x) }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512, sum4};

/// Which loops this CPU runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Isa {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// The widest that this CPU has. The look-up is a cached load.
    pub(crate) fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("fma") {
                return Self::Avx512;
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Self::Avx2;
            }
        }
        Self::Portable
    }
}

/// Compiles a loop once per kind of CPU and picks the one for `isa`.
macro_rules! for_each_isa {
    ($(#[$doc:meta])* $visible:vis fn $name:ident($($arg:ident: $type:ty),* $(,)?) = $generic:ident) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        $visible unsafe fn $name<E: Element>(isa: Isa, $($arg: $type),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn avx2<E: Element>($($arg: $type),*) {
                // SAFETY: the caller's promise is the same, and this function has the instructions.
                unsafe { $generic::<crate::simd::Avx2, E>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn avx512<E: Element>($($arg: $type),*) {
                // SAFETY: the caller's promise is the same, and this function has the instructions.
                unsafe { $generic::<crate::simd::Avx512, E>($($arg),*) }
            }
            match isa {
                // SAFETY: the caller's promise is the same; the portable loops need no special instruction.
                Isa::Portable => unsafe { $generic::<Portable, E>($($arg),*) },
                // SAFETY: as above, and `Isa` is only made after the CPU was asked.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => unsafe { avx2::<E>($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => unsafe { avx512::<E>($($arg),*) },
            }
        }
    };
}
pub(crate) use for_each_isa;
