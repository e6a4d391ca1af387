//! Names and numbers, as the chart and the table show them.

/// Returns the name of a system of `zs-bench torch`.
pub(super) fn system(name: &str) -> &str {
    match name {
        "local" => "no synchronisation",
        "ddp" => "DDP",
        "zero1" => "ZeroRedundancyOptimizer",
        "fsdp2" => "FSDP2",
        "ds1" => "DeepSpeed ZeRO 1",
        "ds2" => "DeepSpeed ZeRO 2",
        "ds3" => "DeepSpeed ZeRO 3",
        "zeroshard" => "ZeroShard",
        other => other,
    }
}

/// Returns the name of a transport.
pub(super) fn transport(name: &str) -> &str {
    match name {
        "shm" => "shared memory",
        "grpc" => "gRPC",
        other => other,
    }
}

/// Describes encodings of gradients and parameters on the wire; `None` if both are f32.
pub(super) fn wires(gradients: &str, parameters: &str) -> Option<String> {
    match (gradients, parameters) {
        ("f32", "f32") => None,
        (gradients, parameters) if gradients == parameters => Some(gradients.to_owned()),
        (gradients, "f32") => Some(format!("{gradients} gradients")),
        (gradients, parameters) => Some(format!("{gradients} and {parameters}")),
    }
}

/// Joins the parts that exist with commas.
pub(super) fn joined(parts: &[Option<String>]) -> String {
    parts.iter().flatten().map(String::as_str).collect::<Vec<_>>().join(", ")
}

/// Formats a count and its unit, which gets an `s` in the plural.
pub(super) fn count(number: u64, unit: &str) -> String {
    format!("{} {unit}{}", thousands(number), if number == 1 { "" } else { "s" })
}

/// Formats a number of parameters.
pub(super) fn parameters(number: u64) -> String {
    match number as f64 {
        few if few < 1e5 => format!("{} parameters", thousands(number)),
        millions if millions < 1e9 => format!("{} M parameters", decimal(millions / 1e6)),
        billions => format!("{} G parameters", decimal(billions / 1e9)),
    }
}

/// Formats a number of bytes in the largest binary unit below it.
pub(super) fn bytes(number: u64) -> String {
    let units = [(30u32, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B")];
    let of = |&(bits, _): &(u32, _)| number >> bits > 0 || bits == 0;
    let (bits, unit) = units.into_iter().find(of).unwrap_or((0, "B"));
    let value = number as f64 / f64::from(1u32 << bits);
    match number % (1 << bits) {
        0 => format!("{} {unit}", thousands(number >> bits)),
        _ => format!("{} {unit}", decimal(value)),
    }
}

/// Formats a number with two decimals; with two digits other than zero if it is small, and without
/// decimals if it is large.
pub(super) fn decimal(number: f64) -> String {
    match number {
        large if large >= 100.0 => thousands(large.round() as u64),
        small if small > 0.0 && small < 0.1 => {
            let decimals = (1.0 - small.log10().floor()).min(9.0) as usize;
            format!("{small:.decimals$}")
        }
        number => format!("{number:.2}"),
    }
}

/// Formats a whole number with commas between thousands.
pub(super) fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_two_decimals_or_two_digits() {
        let cases = [
            (1.0, "1.00"),
            (0.276, "0.28"),
            (99.994, "99.99"),
            (1234.5, "1,235"),
            (0.0123, "0.012"),
            (0.000_45, "0.00045"),
            (0.0, "0.00"),
        ];
        for (number, text) in cases {
            assert_eq!(decimal(number), text);
        }
        assert_eq!(thousands(17_404), "17,404");
        assert_eq!(thousands(999), "999");
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!(
            [65_536, 256 << 20, 1500, 7].map(bytes),
            ["64 KiB", "256 MiB", "1.46 KiB", "7 B"]
        );
        assert_eq!(parameters(67_108_864), "67.11 M parameters");
        assert_eq!(parameters(8192), "8,192 parameters");
        assert_eq!((count(1, "rank"), count(2, "rank")), ("1 rank".into(), "2 ranks".into()));
    }

    #[test]
    fn wires_are_named_unless_they_are_f32() {
        assert_eq!(wires("f32", "f32"), None);
        assert_eq!(wires("int8", "f32").as_deref(), Some("int8 gradients"));
        assert_eq!(wires("bf16", "bf16").as_deref(), Some("bf16"));
        assert_eq!(wires("int8", "bf16").as_deref(), Some("int8 and bf16"));
    }
}
