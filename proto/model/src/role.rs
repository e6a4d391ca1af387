//! The roles of tokens and certificates.

use std::{fmt, str::FromStr};

use crate::{Error, Result};

/// The end of the role of a token that can only read a job.
const READ: &str = ":read";

/// The rights of the holder of a token or a certificate.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Role {
    /// Run a shard server: register with the coordinator, and read the slices of all jobs.
    Server,
    /// Create, train, read and delete all jobs.
    Admin,
    /// Use the job of this name, and those whose names continue with `/` or `.`: the parts of a
    /// run, and the jobs that take over from it. The names of runs of the SDK for Python continue
    /// with `-` and eight hexadecimal digits.
    Job {
        /// The name.
        name: String,
        /// `true` if the jobs can only be read.
        is_reader: bool,
    },
}

impl Role {
    /// Returns whether the holder may read a job: its description, parameters, and state.
    pub fn may_read(&self, job: &str) -> bool {
        match self {
            Self::Server | Self::Admin => true,
            Self::Job { name, .. } => {
                let rest = job.strip_prefix(name.as_str());
                rest.is_some_and(|rest| is_part(rest) || is_run(rest))
            }
        }
    }

    /// Returns whether the holder may create, train, save and delete a job.
    pub fn may_train(&self, job: &str) -> bool {
        let only_reads = matches!(self, Self::Server | Self::Job { is_reader: true, .. });
        !only_reads && self.may_read(job)
    }
}

fn is_part(rest: &str) -> bool {
    rest.is_empty() || rest.starts_with(['/', '.'])
}

/// Returns whether this is `-`, the eight digits of a run of the SDK for Python, and one of its
/// parts.
fn is_run(rest: &str) -> bool {
    let Some((digits, part)) = rest.strip_prefix('-').and_then(|rest| rest.split_at_checked(8))
    else {
        return false;
    };
    digits.bytes().all(|digit| digit.is_ascii_hexdigit()) && is_part(part)
}

/// Writes the role as in the file of tokens: `server`, `admin`, `job:NAME` or `job:NAME:read`.
impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Server => f.write_str("server"),
            Self::Admin => f.write_str("admin"),
            Self::Job { name, is_reader } => {
                write!(f, "job:{name}{}", if *is_reader { READ } else { "" })
            }
        }
    }
}

impl FromStr for Role {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let invalid = || {
            let expected = "server, admin, job:NAME, or job:NAME:read, without spaces";
            Error::invalid("role of a token", format!("{text:?}"), expected)
        };
        match text {
            "server" => return Ok(Self::Server),
            "admin" => return Ok(Self::Admin),
            _ => {}
        }
        let job = text.strip_prefix("job:").ok_or_else(invalid)?;
        let (name, is_reader) = match job.strip_suffix(READ) {
            Some(name) => (name, true),
            None => (job, false),
        };
        if name.is_empty() || name.contains(char::is_whitespace) {
            return Err(invalid());
        }
        Ok(Self::Job { name: name.to_owned(), is_reader })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn role(text: &str) -> Role {
        text.parse().unwrap()
    }

    #[test]
    fn roles_are_written_as_they_are_read() {
        for text in ["server", "admin", "job:demo", "job:demo:read", "job:a:b/c"] {
            assert_eq!(role(text).to_string(), text);
        }
        for wrong in ["", "root", "job:", "job::read", "job", "job:a b"] {
            assert!(matches!(wrong.parse::<Role>(), Err(Error::Invalid { .. })), "{wrong}");
        }
    }

    #[test]
    fn a_jobs_token_opens_this_job_its_parts_and_its_successors_only() {
        let (trainer, reader) = (role("job:demo"), role("job:demo:read"));
        for own in
            ["demo", "demo/sharded-0", "demo.1", "demo-57e50e77/sharded-0/all", "demo-57e50e77"]
        {
            assert!(trainer.may_train(own) && trainer.may_read(own), "{own}");
            assert!(reader.may_read(own) && !reader.may_train(own), "{own}");
        }
        for other in [
            "",
            "dem",
            "demo2",
            "demo-2",
            "demo-57e50e7g",
            "demo-57e50e77x",
            "demo-é57e50e7",
            "other/demo",
        ] {
            assert!(!trainer.may_read(other) && !reader.may_read(other), "{other}");
        }
        assert!(role("admin").may_train("other") && role("server").may_read("other"));
        assert!(!role("server").may_train("other"));
    }
}
