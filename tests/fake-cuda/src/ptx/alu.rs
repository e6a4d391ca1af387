//! The arithmetic of instructions, on registers of 64 bits.
//!
//! A register holds its value in the low bits, and zeros above. Floating-point results that are NaN
//! are the canonical NaN of the hardware for f32, whatever the operands are.

use crate::lanes::Lanes;

/// The NaN that NVIDIA's hardware produces.
const CANONICAL_NAN: u64 = 0x7fff_ffff;

fn f32_of(register: u64) -> f32 {
    f32::from_bits(register as u32)
}

fn f32_to(value: f32) -> u64 {
    if value.is_nan() { CANONICAL_NAN } else { u64::from(value.to_bits()) }
}

fn f64_of(register: u64) -> f64 {
    f64::from_bits(register)
}

fn f64_to(value: f64) -> u64 {
    value.to_bits()
}

fn word(register: u64) -> u32 {
    register as u32
}

/// Defines an operation for each line: its name, and its function of three registers.
macro_rules! operations {
    ($($name:ident($a:ident, $b:ident, $c:ident) $value:expr;)*) => {
        /// An operation on registers.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Alu {
            $($name,)*
        }

        impl Alu {
            /// Computes the results of some threads.
            pub(crate) fn run(self, lanes: &mut Lanes, to: u16, from: [u16; 3], mask: u32) {
                match self {
                    $(Alu::$name => lanes.compute(to, from, mask, |$a, $b, $c| $value),)*
                }
            }
        }
    };
}

operations! {
    Move(a, _b, _c) a;
    Select(a, b, c) if c != 0 { a } else { b };

    Add32(a, b, _c) u64::from(word(a).wrapping_add(word(b)));
    Add64(a, b, _c) a.wrapping_add(b);
    Sub32(a, b, _c) u64::from(word(a).wrapping_sub(word(b)));
    Sub64(a, b, _c) a.wrapping_sub(b);
    Mul32(a, b, _c) u64::from(word(a).wrapping_mul(word(b)));
    Mul64(a, b, _c) a.wrapping_mul(b);
    // The product of numbers of 16 or 32 bits has twice as many.
    MulWide(a, b, _c) a.wrapping_mul(b);
    // A quotient by zero is not specified.
    DivU32(a, b, _c) u64::from(word(a).checked_div(word(b)).unwrap_or(u32::MAX));
    DivU64(a, b, _c) a.checked_div(b).unwrap_or(u64::MAX);
    Neg64(a, _b, _c) a.wrapping_neg();
    MinU64(a, b, _c) a.min(b);
    MaxU64(a, b, _c) a.max(b);

    And(a, b, _c) a & b;
    Or(a, b, _c) a | b;
    Xor(a, b, _c) a ^ b;
    Not32(a, _b, _c) u64::from(!word(a));
    Not64(a, _b, _c) !a;
    // Shifts by the width or more give zero.
    Shl32(a, b, _c) u64::from(word(a).checked_shl(word(b)).unwrap_or(0));
    Shl64(a, b, _c) a.checked_shl(word(b)).unwrap_or(0);
    ShrU32(a, b, _c) u64::from(word(a).checked_shr(word(b)).unwrap_or(0));
    ShrU64(a, b, _c) a.checked_shr(word(b)).unwrap_or(0);

    AddF32(a, b, _c) f32_to(f32_of(a) + f32_of(b));
    SubF32(a, b, _c) f32_to(f32_of(a) - f32_of(b));
    MulF32(a, b, _c) f32_to(f32_of(a) * f32_of(b));
    DivF32(a, b, _c) f32_to(f32_of(a) / f32_of(b));
    SqrtF32(a, _b, _c) f32_to(f32_of(a).sqrt());
    NegF32(a, _b, _c) a ^ 0x8000_0000;
    AbsF32(a, _b, _c) a & 0x7fff_ffff;

    AddF64(a, b, _c) f64_to(f64_of(a) + f64_of(b));
    SubF64(a, b, _c) f64_to(f64_of(a) - f64_of(b));
    MulF64(a, b, _c) f64_to(f64_of(a) * f64_of(b));
    DivF64(a, b, _c) f64_to(f64_of(a) / f64_of(b));
    SqrtF64(a, _b, _c) f64_to(f64_of(a).sqrt());
    // The operand that is a number, if one is NaN.
    MaxF64(a, b, _c) f64_to(f64_of(a).max(f64_of(b)));

    F64OfF32(a, _b, _c) f64_to(f64::from(f32_of(a)));
    F32OfF64(a, _b, _c) f32_to(f64_of(a) as f32);
    F64OfU64(a, _b, _c) f64_to(a as f64);
    Low32(a, _b, _c) u64::from(word(a));
    Low16(a, _b, _c) a & 0xffff;

    EqInt(a, b, _c) u64::from(a == b);
    NeInt(a, b, _c) u64::from(a != b);
    LtUnsigned(a, b, _c) u64::from(a < b);
    LeUnsigned(a, b, _c) u64::from(a <= b);
    GtUnsigned(a, b, _c) u64::from(a > b);
    GeUnsigned(a, b, _c) u64::from(a >= b);

    EqF32(a, b, _c) u64::from(f32_of(a) == f32_of(b));
    NeF32(a, b, _c) u64::from(f32_of(a) < f32_of(b) || f32_of(a) > f32_of(b));
    LtF32(a, b, _c) u64::from(f32_of(a) < f32_of(b));
    LeF32(a, b, _c) u64::from(f32_of(a) <= f32_of(b));
    GtF32(a, b, _c) u64::from(f32_of(a) > f32_of(b));
    GeF32(a, b, _c) u64::from(f32_of(a) >= f32_of(b));
    EqF64(a, b, _c) u64::from(f64_of(a) == f64_of(b));
    LtF64(a, b, _c) u64::from(f64_of(a) < f64_of(b));
    GtF64(a, b, _c) u64::from(f64_of(a) > f64_of(b));
    // True as well if an operand is NaN.
    GeOrNanF32(a, b, _c) u64::from(f32_of(a).partial_cmp(&f32_of(b)) != Some(std::cmp::Ordering::Less));
    LeOrNanF64(a, b, _c) u64::from(f64_of(a).partial_cmp(&f64_of(b)) != Some(std::cmp::Ordering::Greater));
}

impl Alu {
    /// The operation of an instruction.
    pub(crate) fn named(name: &str) -> Option<Alu> {
        Some(match name {
            "cvta.to.global.u64" => Alu::Move,
            // Registers have zeros above their values.
            "cvt.u64.u32" | "cvt.u64.u16" | "cvt.u32.u16" => Alu::Move,
            "cvt.u32.u64" => Alu::Low32,
            "cvt.u16.u32" | "cvt.u16.u64" => Alu::Low16,
            "cvt.f64.f32" => Alu::F64OfF32,
            "cvt.rn.f32.f64" => Alu::F32OfF64,
            "cvt.rn.f64.u64" => Alu::F64OfU64,
            "add.s32" | "add.u32" => Alu::Add32,
            "add.s64" | "add.u64" => Alu::Add64,
            "sub.s32" | "sub.u32" => Alu::Sub32,
            "sub.s64" | "sub.u64" => Alu::Sub64,
            "mul.lo.s32" | "mul.lo.u32" => Alu::Mul32,
            "mul.lo.s64" | "mul.lo.u64" => Alu::Mul64,
            "mul.wide.u16" | "mul.wide.u32" => Alu::MulWide,
            "div.u32" => Alu::DivU32,
            "div.u64" => Alu::DivU64,
            "neg.s64" => Alu::Neg64,
            "min.u32" | "min.u64" => Alu::MinU64,
            "max.u32" | "max.u64" => Alu::MaxU64,
            "and.b16" | "and.b32" | "and.b64" | "and.pred" => Alu::And,
            "or.b16" | "or.b32" | "or.b64" | "or.pred" => Alu::Or,
            "xor.b32" | "xor.b64" => Alu::Xor,
            "not.b32" => Alu::Not32,
            "not.b64" => Alu::Not64,
            "shl.b32" => Alu::Shl32,
            "shl.b64" => Alu::Shl64,
            "shr.u32" => Alu::ShrU32,
            "shr.u64" => Alu::ShrU64,
            "add.rn.f32" => Alu::AddF32,
            "sub.rn.f32" => Alu::SubF32,
            "mul.rn.f32" => Alu::MulF32,
            "div.rn.f32" => Alu::DivF32,
            "sqrt.rn.f32" => Alu::SqrtF32,
            "neg.f32" => Alu::NegF32,
            "abs.f32" => Alu::AbsF32,
            "add.rn.f64" => Alu::AddF64,
            "sub.rn.f64" => Alu::SubF64,
            "mul.rn.f64" => Alu::MulF64,
            "div.rn.f64" => Alu::DivF64,
            "sqrt.rn.f64" => Alu::SqrtF64,
            "max.f64" => Alu::MaxF64,
            "setp.eq.f32" => Alu::EqF32,
            "setp.ne.f32" => Alu::NeF32,
            "setp.lt.f32" => Alu::LtF32,
            "setp.le.f32" => Alu::LeF32,
            "setp.gt.f32" => Alu::GtF32,
            "setp.ge.f32" => Alu::GeF32,
            "setp.geu.f32" => Alu::GeOrNanF32,
            "setp.eq.f64" => Alu::EqF64,
            "setp.lt.f64" => Alu::LtF64,
            "setp.gt.f64" => Alu::GtF64,
            "setp.leu.f64" => Alu::LeOrNanF64,
            _ => return Self::of_any_type(name),
        })
    }

    /// The operation of an instruction whose type does not matter.
    fn of_any_type(name: &str) -> Option<Alu> {
        let (name, kind) = name.rsplit_once('.')?;
        let is_unsigned = matches!(kind, "u16" | "u32" | "u64");
        let is_integer = is_unsigned || matches!(kind, "s16" | "s32" | "s64" | "b32" | "b64");
        Some(match name {
            "mov" => Alu::Move,
            "selp" => Alu::Select,
            "setp.eq" if is_integer => Alu::EqInt,
            "setp.ne" if is_integer => Alu::NeInt,
            "setp.lt" if is_unsigned => Alu::LtUnsigned,
            "setp.le" if is_unsigned => Alu::LeUnsigned,
            "setp.gt" if is_unsigned => Alu::GtUnsigned,
            "setp.ge" if is_unsigned => Alu::GeUnsigned,
            _ => return None,
        })
    }
}
