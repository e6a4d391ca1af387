//! The versions of clients and servers, and their compatibility.

use crate::{Error, Result};

/// The version of this program.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Checks that `program` with the version `version` works together with a coordinator of the
/// version `coordinator`: the major and minor versions must be equal. An empty version is accepted.
///
/// # Errors
/// [`Error::VersionMismatch`] if they differ.
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

/// The major and minor version; `None` for an invalid version.
fn minor(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_minor_versions_are_compatible_and_others_are_refused() {
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
