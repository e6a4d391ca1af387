//! Operands of instructions: registers, constants and addresses.

use std::collections::HashMap;

use super::{At, Special, parse::bytes_of};
use crate::lanes::Register;

/// The registers of a kernel, numbered in the order of their first use.
#[derive(Debug, Default)]
pub(crate) struct Registers<'a> {
    named: HashMap<&'a str, Register>,
    constants: HashMap<u64, Register>,
    specials: Vec<(Register, Special)>,
    count: usize,
}

impl<'a> Registers<'a> {
    fn next(&mut self) -> Result<Register, String> {
        let next = Register::try_from(self.count).map_err(|_| "too many registers")?;
        self.count += 1;
        Ok(next)
    }

    /// The register of a name.
    pub(crate) fn register(&mut self, name: &'a str) -> Result<Register, String> {
        if let Some(register) = self.named.get(name) {
            return Ok(*register);
        }
        let special = match name {
            "%tid.x" => Some(Special::Thread),
            "%ntid.x" => Some(Special::Threads),
            "%ctaid.x" => Some(Special::Block),
            "%nctaid.x" => Some(Special::Blocks),
            other if other.starts_with('%') && !other.contains('.') => None,
            other => return Err(format!("unknown register {other}")),
        };
        let register = self.next()?;
        self.named.insert(name, register);
        self.specials.extend(special.map(|special| (register, special)));
        Ok(register)
    }

    /// A register that always holds a constant.
    pub(crate) fn constant(&mut self, value: u64) -> Result<Register, String> {
        if let Some(register) = self.constants.get(&value) {
            return Ok(*register);
        }
        let register = self.next()?;
        self.constants.insert(value, register);
        Ok(register)
    }

    /// The register of an operand of `kind`: a register, a number, or the name of a variable, whose
    /// address is a number.
    pub(crate) fn value(
        &mut self,
        text: &'a str,
        kind: &str,
        variables: &HashMap<&str, u64>,
    ) -> Result<Register, String> {
        if text.starts_with('%') {
            return self.register(text);
        }
        let value = match variables.get(text) {
            Some(address) => *address,
            None => number(text, kind).ok_or_else(|| format!("unknown operand {text}"))?,
        };
        self.constant(value)
    }

    /// `[%rd1+8]` or `[variable+8]`: the address.
    pub(crate) fn address(
        &mut self,
        text: &'a str,
        variables: &HashMap<&str, u64>,
    ) -> Result<At, String> {
        let (base, offset) = split_address(text)?;
        let base = self.value(base, "u64", variables)?;
        Ok(At { base, offset })
    }

    /// The number of registers.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// The constants, with their registers.
    pub(crate) fn constants(&self) -> Vec<(Register, u64)> {
        self.constants.iter().map(|(value, register)| (*register, *value)).collect()
    }

    /// The special registers, with the registers that have their values.
    pub(crate) fn specials(&self) -> Vec<(Register, Special)> {
        self.specials.clone()
    }
}

/// The parts of `[base+offset]`.
pub(crate) fn split_address(text: &str) -> Result<(&str, i64), String> {
    let unknown = || format!("unknown address {text}");
    let inside = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
    let inside = inside.ok_or_else(unknown)?;
    match inside.split_once('+') {
        None => Ok((inside, 0)),
        Some((base, offset)) => Ok((base, offset.parse().map_err(|_| unknown())?)),
    }
}

/// The bits of a number of `kind`.
fn number(text: &str, kind: &str) -> Option<u64> {
    if let Some(bits) = text.strip_prefix("0f") {
        return u64::from_str_radix(bits, 16).ok();
    }
    if let Some(bits) = text.strip_prefix("0d") {
        return u64::from_str_radix(bits, 16).ok();
    }
    let value: i128 = text.parse().ok()?;
    let bits = 8 * bytes_of(kind)?;
    Some(value as u64 & (u64::MAX >> (64 - bits)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_bits_of_their_type() {
        assert_eq!(number("0f3F000000", "f32"), Some(u64::from(0.5f32.to_bits())));
        assert_eq!(number("0d3FE0000000000000", "f64"), Some(0.5f64.to_bits()));
        assert_eq!(number("-1", "s16"), Some(0xffff));
        assert_eq!(number("-939520001", "s32"), Some(u64::from(-939_520_001i32 as u32)));
        assert_eq!(number("-1", "s64"), Some(u64::MAX));
        assert_eq!(number("18446744073709551615", "u64"), Some(u64::MAX));
        assert_eq!(number("x", "s32"), None);
        assert_eq!(number("1", "pred"), None);
    }

    #[test]
    fn a_name_or_a_constant_has_one_register() {
        let mut registers = Registers::default();
        let variables = HashMap::from([("lanes", 4096)]);
        let first = registers.register("%r1").unwrap();
        assert_eq!(registers.value("%r1", "u32", &variables), Ok(first));
        let one = registers.value("1", "u32", &variables).unwrap();
        assert_eq!(registers.constant(1), Ok(one));
        let at = registers.address("[lanes+8]", &variables).unwrap();
        assert_eq!((at.base, at.offset), (registers.constant(4096).unwrap(), 8));
        registers.register("%tid.x").unwrap();
        assert!(registers.register("%laneid.x").is_err());
        assert!(registers.value("other", "u32", &variables).is_err());
        let (constants, specials) = (registers.constants(), registers.specials());
        assert_eq!((registers.count(), constants.len(), specials.len()), (4, 2, 1));
    }
}
