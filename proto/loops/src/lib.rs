//! Loops over numbers, compiled for each instruction set: casts between dtypes ([`convert`]),
//! comparisons ([`differ`]), tiles of int8 ([`int8`]), and sums of squares with hashes ([`tally`]).
//! Clients and servers use the same ones.
//!
//! Every loop is plain Rust, compiled three times (AVX-512, AVX2, the target's baseline) and
//! selected at run time: see [`vectorised!`]. The compiler vectorises it. Because it never
//! contracts to fused multiply-adds and never reorders floating-point operations, all three give
//! the same bits.

// The loops are compiled for the instruction set found at run time, and calls of such functions
// are unsafe.
#![allow(unsafe_code)]

pub mod convert;
pub mod differ;
pub mod int8;
pub mod tally;

/// An instruction set that this machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level(Isa);

/// The instruction sets for which loops are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 with F, BW, DQ and VL, and what [`Isa::Avx2`] has.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX2, and the bit instructions of BMI1, BMI2 and LZCNT.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// What the compiler assumes of the target.
    Baseline,
}

impl Level {
    /// The fastest instruction set of this machine.
    pub fn best() -> Level {
        Level::fastest_first().next().unwrap_or(Level(Isa::Baseline))
    }

    /// All instruction sets of this machine, fastest first.
    pub fn all() -> Vec<Level> {
        Level::fastest_first().collect()
    }

    fn fastest_first() -> impl Iterator<Item = Level> {
        // INVARIANT: a `Level` is created only here, after checking the machine. The unsafe calls
        // rely on it.
        #[cfg(target_arch = "x86_64")]
        let vectors = {
            let has_avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            let has_avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("bmi1")
                && is_x86_feature_detected!("bmi2")
                && is_x86_feature_detected!("lzcnt");
            [(has_avx512 && has_avx2).then_some(Isa::Avx512), has_avx2.then_some(Isa::Avx2)]
        };
        #[cfg(not(target_arch = "x86_64"))]
        let vectors: [Option<Isa>; 0] = [];
        vectors.into_iter().flatten().chain([Isa::Baseline]).map(Level)
    }

    /// The instruction set, for [`vectorised!`].
    pub fn isa(self) -> Isa {
        self.0
    }
}

/// Compiles a function once for each instruction set. The generated function takes the [`Level`] as
/// its first argument. What it calls must be inlined.
#[macro_export]
macro_rules! vectorised {
    ($(#[$meta:meta])* pub fn $name:ident $(<$($generic:ident: $bound:ident),+>)? (
        $($arg:ident: $type:ty),* $(,)?
    ) $(-> $output:ty)? $body:block) => {
        $(#[$meta])*
        pub fn $name $(<$($generic: $bound),+>)? (
            level: $crate::Level, $($arg: $type),*
        ) $(-> $output)? {
            #[inline(always)]
            fn body $(<$($generic: $bound),+>)? ($($arg: $type),*) $(-> $output)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,bmi1,bmi2,lzcnt")]
            fn avx512 $(<$($generic: $bound),+>)? ($($arg: $type),*) $(-> $output)? {
                body $(::<$($generic),+>)? ($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt")]
            fn avx2 $(<$($generic: $bound),+>)? ($($arg: $type),*) $(-> $output)? {
                body $(::<$($generic),+>)? ($($arg),*)
            }

            match level.isa() {
                // SAFETY: such a level exists only if the machine has these instructions.
                #[cfg(target_arch = "x86_64")]
                $crate::Isa::Avx512 => unsafe {
                    avx512 $(::<$($generic),+>)? ($($arg),*)
                },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::Isa::Avx2 => unsafe {
                    avx2 $(::<$($generic),+>)? ($($arg),*)
                },
                $crate::Isa::Baseline => body $(::<$($generic),+>)? ($($arg),*),
            }
        }
    };
}
