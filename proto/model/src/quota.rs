//! The limits of a token, or of the certificates of a role, which an operator appends to its line
//! in the file of tokens.

use std::{fmt, num::NonZero, ops::RangeInclusive};

use crate::{Error, Result, Role, size};

/// The weights that the jobs of a token may have.
pub const WEIGHTS: RangeInclusive<u32> = 1..=1000;

/// The limits of a token, and the weight of its jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quota {
    /// The total number of bytes that its jobs may need on all servers, including replicas.
    pub memory: Option<u64>,
    /// The maximum number of jobs.
    pub jobs: Option<u32>,
    /// The maximum number of calls per second to each server.
    pub requests: Option<NonZero<u32>>,
    /// The weight of each of its jobs when jobs compete for the time of a server.
    pub weight: u32,
}

/// The role and the limits of the token or certificate of a request. It is an extension of the
/// request.
#[derive(Debug, Clone)]
pub struct Holder {
    /// The role.
    pub role: Role,
    /// The limits.
    pub quota: Quota,
}

impl Default for Quota {
    /// No limits, and a weight of 1.
    fn default() -> Self {
        Self { memory: None, jobs: None, requests: None, weight: *WEIGHTS.start() }
    }
}

impl Quota {
    /// Sets the limit that a word in the file of tokens contains. Returns false if the word is not
    /// a limit.
    ///
    /// # Errors
    /// [`Error::Refused`] for an unknown limit or an invalid number. `what` describes the location
    /// of the word.
    pub fn read(&mut self, word: &str, what: impl Fn() -> String) -> Result<bool> {
        let Some((name, number)) = word.split_once('=') else { return Ok(false) };
        let wrong = |expected: &str| {
            Error::refused(format!("{} has `{word:.200}` in place of {expected}", what()))
        };
        let whole = || number.parse().map_err(|_| wrong("a whole number"));
        match name {
            "memory" => {
                self.memory = Some(size::parse(number).ok_or_else(|| wrong(size::EXPECTED))?);
            }
            "jobs" => self.jobs = Some(whole()?),
            "requests" => {
                let number = number.strip_suffix("/s").and_then(|number| number.parse().ok());
                let expected = "a whole number of requests per second, at least 1, such as 500/s";
                self.requests = Some(number.ok_or_else(|| wrong(expected))?);
            }
            "weight" => {
                self.weight = whole()?;
                if !WEIGHTS.contains(&self.weight) {
                    return Err(wrong("a weight from 1 to 1000"));
                }
            }
            _ => {
                return Err(wrong(
                    "memory=, jobs=, requests= or weight=, or a comment that begins with #",
                ));
            }
        }
        Ok(true)
    }
}

/// Writes the limits in the format of the file of tokens.
impl fmt::Display for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            self.memory.map(|bytes| format!("memory={}", size::format(bytes))),
            self.jobs.map(|jobs| format!("jobs={jobs}")),
            self.requests.map(|requests| format!("requests={requests}/s")),
            (self.weight != *WEIGHTS.start()).then(|| format!("weight={}", self.weight)),
        ];
        f.write_str(&parts.into_iter().flatten().collect::<Vec<_>>().join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Quota> {
        let mut quota = Quota::default();
        for word in text.split_whitespace() {
            assert!(quota.read(word, || "line 1".to_owned())?, "{word}");
        }
        Ok(quota)
    }

    #[test]
    fn limits_are_written_as_they_are_read() {
        for text in ["", "memory=8GiB jobs=4 requests=500/s weight=2", "memory=1500", "jobs=0"] {
            assert_eq!(read(text).unwrap().to_string(), text);
        }
        assert_eq!(read("memory=8GiB").unwrap().memory, Some(8 << 30));
    }

    #[test]
    fn an_invalid_limit_is_refused_and_other_words_are_not_limits() {
        for wrong in [
            "memory=much",
            "memory=-1",
            "jobs=1.5",
            "jobs=",
            "requests=500",
            "requests=0/s",
            "weight=0",
            "weight=1001",
            "bytes=5",
            "=5",
        ] {
            assert!(matches!(read(wrong), Err(Error::Refused { .. })), "{wrong}");
        }
        assert_eq!(Quota::default().read("laptop", String::new), Ok(false));
    }
}
