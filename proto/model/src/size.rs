//! Parses and formats numbers of bytes in flags and files, such as 1500000, 512MiB or 8GiB.

/// The units and their exponents of two, largest first.
const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];

/// A description of the input that [`parse`] accepts, for error messages.
pub const EXPECTED: &str = "a number of bytes, such as 1500000, 512MiB or 8GiB";

/// Parses a number of bytes. Returns `None` for invalid input.
pub fn parse(text: &str) -> Option<u64> {
    let unit = UNITS.iter().find(|(unit, _)| text.ends_with(unit));
    let (unit, bits) = unit.copied().unwrap_or_default();
    let number = text.strip_suffix(unit)?.parse::<u64>().ok()?;
    number.checked_mul(1 << bits)
}

/// Formats a number of bytes in the largest unit that divides it.
pub fn format(bytes: u64) -> String {
    let whole = |&&(_, bits): &&(&str, u32)| bytes > 0 && bytes.is_multiple_of(1 << bits);
    match UNITS.iter().find(whole) {
        Some((unit, bits)) => format!("{}{unit}", bytes >> bits),
        None => bytes.to_string(),
    }
}
