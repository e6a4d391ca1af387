//! The versions of clients and servers, and which of them work together.

use crate::{Error, Result};

/// The version of this program.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Checks that `program` of version `version` works together with a coordinator of version
/// `coordinator`: major and minor version must be the same. A program that does not state its
/// version is accepted.
///
/// # Errors
/// [`Error::VersionMismatch`].
pub fn check(program: &str, version: &str, coordinator: &str) -> Result<()> {
    let is_unknown = version.is_empty() || coordinator.is_empty();
    if is_unknown || minor(version).is_some_and(|own| minor(coordinator) == Some(own)) {
        return Ok(());
    }
    Err(Error::VersionMismatch {
        program: program.to_owned(),
        version: version.to_owned(),
        coordinator: coordinator.to_owned(),
    })
}

/// Major and minor version.
fn minor(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_with_the_same_minor_version_work_together() {
        for (own, other) in [("0.1.0", "0.1.7"), ("1.2.3-rc.1", "1.2.0"), ("", "0.1.0")] {
            assert_eq!(check("client", own, other), Ok(()));
        }
        for (own, other) in [("0.2.0", "0.1.0"), ("1.1.0", "0.1.0"), ("nonsense", "0.1.0")] {
            let refused = check("client", own, other);
            assert!(matches!(refused, Err(Error::VersionMismatch { .. })), "{refused:?}");
        }
        assert_eq!(check("client", VERSION, VERSION), Ok(()));
    }
}
