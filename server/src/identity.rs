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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_numbers_differ() {
        assert_ne!(random().unwrap(), random().unwrap());
    }
}
