//! Formats text and numbers for HTML.

use std::{fmt, time::Duration};

/// Text from a job, a server or an error. It is escaped when it is displayed.
pub(super) struct Text<'a>(pub(super) &'a str);

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0;
        while let Some(at) = rest.find(['&', '<', '>', '"', '\'']) {
            f.write_str(&rest[..at])?;
            f.write_str(match rest.as_bytes()[at] {
                b'&' => "&amp;",
                b'<' => "&lt;",
                b'>' => "&gt;",
                b'"' => "&quot;",
                _ => "&#39;",
            })?;
            rest = &rest[at + 1..];
        }
        f.write_str(rest)
    }
}

/// Formats a number of bytes, such as `1.25 GiB`.
pub(super) fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let (mut value, mut unit) = (bytes as f64 / 1024.0, 0);
    while value >= 1023.95 {
        (value, unit) = (value / 1024.0, unit + 1);
    }
    let digits = if value < 9.995 { 2 } else { 1 };
    format!("{value:.digits$} {}", UNITS[unit])
}

/// Formats a number, such as `1,234,567`.
pub(super) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a number with a noun, such as `1 slice` or `2 slices`.
pub(super) fn counted(number: usize, thing: &str) -> String {
    format!("{} {thing}{}", count(number as u64), if number == 1 { "" } else { "s" })
}

/// Formats a number of parameters, such as `124.4 M`.
pub(super) fn short(number: u64) -> String {
    let units = [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")];
    match units.into_iter().find(|(unit, _)| number as f64 >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", number as f64 / unit),
        None => number.to_string(),
    }
}

/// Formats a measured number with four significant digits.
pub(super) fn number(value: f64) -> String {
    let size = value.abs();
    if !value.is_finite() || (size > 0.0 && !(1e-4..1e7).contains(&size)) {
        return format!("{value:.3e}");
    }
    let digits = match size {
        size if size >= 1000.0 => 0,
        size if size >= 100.0 => 1,
        size if size >= 10.0 => 2,
        size if size >= 0.1 || size == 0.0 => 3,
        _ => 5,
    };
    format!("{value:.digits$}")
}

/// Formats a measured number, or a dash for a missing value.
pub(super) fn optional(value: Option<f64>) -> String {
    value.map_or("–".to_owned(), number)
}

/// Formats a duration, such as `12.3 ms`, `1.20 s`, `3 min 20 s`, `2 h 5 min` or `3 d 4 h`.
pub(super) fn duration(duration: Duration) -> String {
    let (seconds, whole) = (duration.as_secs_f64(), duration.as_secs());
    match whole {
        0 if seconds < 0.001 => format!("{:.0} µs", seconds * 1e6),
        0 if seconds < 0.0999 => format!("{:.1} ms", seconds * 1e3),
        0 => format!("{:.0} ms", seconds * 1e3),
        1..=59 => format!("{seconds:.1} s"),
        60..=3599 => format!("{} min {} s", whole / 60, whole % 60),
        3600..=86399 => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
        _ => format!("{} d {} h", whole / 86400, whole % 86400 / 3600),
    }
}

/// Formats the age of an event in one unit: `now`, `12 s`, `3 min`, `2 h` or `3 d`.
pub(super) fn age(duration: Duration) -> String {
    match duration.as_secs() {
        0 => "now".to_owned(),
        seconds @ 1..=59 => format!("{seconds} s"),
        seconds @ 60..=3599 => format!("{} min", seconds / 60),
        seconds @ 3600..=86399 => format!("{} h", seconds / 3600),
        seconds => format!("{} d", seconds / 86400),
    }
}

/// Formats a share in percent, such as `73 %`.
pub(super) fn percent(part: u64, whole: u64) -> String {
    format!("{:.0} %", 100.0 * part as f64 / whole.max(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_from_users_is_escaped() {
        let escaped = Text("<script>'a' & \"ä\"</script>").to_string();
        assert_eq!(escaped, "&lt;script&gt;&#39;a&#39; &amp; &quot;ä&quot;&lt;/script&gt;");
    }

    #[test]
    fn numbers_are_formatted_briefly() {
        assert_eq!(
            [0, 1023, 1024, 1 << 20, 45 << 30].map(bytes),
            ["0 B", "1023 B", "1.00 KiB", "1.00 MiB", "45.0 GiB"]
        );
        assert_eq!(bytes(u64::MAX), "16.0 EiB");
        assert_eq!(bytes((1 << 20) - 1), "1.00 MiB");
        assert_eq!([0, 999, 1000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([999, 124_400_000, 7_000_000_000].map(short), ["999", "124.4 M", "7.0 B"]);
        let numbers = [0.0, 2.34567, -0.5, 1e-9, 123_456.0, 1e12, f64::NAN].map(number);
        assert_eq!(numbers, ["0.000", "2.346", "-0.500", "1.000e-9", "123456", "1.000e12", "NaN"]);
        let ms = |ms| duration(Duration::from_millis(ms));
        assert_eq!(
            [12, 999, 1200, 200_000, 7_500_000, 300_000_000].map(ms),
            ["12.0 ms", "999 ms", "1.2 s", "3 min 20 s", "2 h 5 min", "3 d 11 h"]
        );
        assert_eq!((percent(3, 4), percent(0, 0)), ("75 %".to_owned(), "0 %".to_owned()));
    }
}
