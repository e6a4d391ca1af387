//! Identities, which distinguish messages of the current life of their sender from those of an
//! earlier life.

use zeroshard_model::{Error, Result};

/// A random number other than 0: the id of a job, a lease, or the incarnation of a process.
///
/// # Errors
/// [`Error::Internal`] if the system has no random numbers.
pub(crate) fn random() -> Result<u64> {
    let number = getrandom::u64()
        .map_err(|e| Error::Internal { cause: format!("cannot draw a random number: {e}") })?;
    Ok(number.max(1))
}

/// The id of the server with this name, which survives restarts and is never 0. The name is chosen
/// by the operator, or is the address by default.
pub(crate) fn of_server(name: &str) -> u64 {
    let hash = blake3::hash(name.as_bytes());
    let first = hash.as_bytes().first_chunk().expect("a hash has 32 bytes");
    u64::from_le_bytes(*first).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_keeps_its_id_and_ids_differ() {
        assert_eq!(of_server("shard-0:7401"), of_server("shard-0:7401"));
        assert_ne!(of_server("shard-0:7401"), of_server("shard-1:7401"));
    }

    #[test]
    fn random_numbers_differ() {
        assert_ne!(random().unwrap(), random().unwrap());
    }
}
