//! Identities: what tells a message of this life of its sender from one of an earlier life.

use zeroshard_proto::{Error, Result};

/// A random number that is not 0: the id of a job, a lease, one life of a process.
///
/// # Errors
/// [`Error::Internal`] if the system has no random numbers.
pub(crate) fn random() -> Result<u64> {
    let number = getrandom::u64()
        .map_err(|e| Error::Internal { cause: format!("cannot draw a random number: {e}") })?;
    Ok(number.max(1))
}

/// The id of the server that its operator, or by default its address, calls `name`: it survives
/// restarts. Not 0.
pub(crate) fn of_server(name: &str) -> u64 {
    let hash = blake3::hash(name.as_bytes());
    let first = hash.as_bytes().first_chunk().expect("a hash has 32 bytes");
    u64::from_le_bytes(*first).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_keeps_its_id_and_others_have_another() {
        assert_eq!(of_server("shard-0:7401"), of_server("shard-0:7401"));
        assert_ne!(of_server("shard-0:7401"), of_server("shard-1:7401"));
    }

    #[test]
    fn random_numbers_differ() {
        assert_ne!(random().unwrap(), random().unwrap());
    }
}
