//! Prefetching.

/// The bytes of a cache line.
pub const LINE: usize = 64;

/// Prefetches the cache lines of `values`, if the target has an instruction for it.
#[inline(always)]
pub fn prefetch<T>(values: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for line in values.chunks(LINE / size_of::<T>()) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint that reads nothing, at an address that may be read.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = values;
}

/// Prefetches the cache lines that begin `ahead` elements behind a part of an array. The array may
/// have ended there.
#[inline(always)]
pub fn prefetch_behind<T>(part: &[T], ahead: usize) {
    #[cfg(target_arch = "x86_64")]
    for i in (0..part.len()).step_by(LINE / size_of::<T>()) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let line = part.as_ptr().wrapping_add(i + ahead);
        // SAFETY: a hint that reads nothing, and has no effect at an address that is not mapped.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (part, ahead);
}
