//! Names that people choose.

use crate::{Error, Result};

/// Checks a name of at most `longest` bytes.
///
/// # Errors
/// [`Error::Invalid`], which names it as `what`.
pub fn check_name(what: &str, name: &str, longest: usize) -> Result<()> {
    let is_blank = name.chars().all(char::is_whitespace);
    if is_blank || name.len() > longest || name.chars().any(is_hidden) {
        let expected =
            format!("1 to {longest} bytes, not blank, without control and formatting characters");
        return Err(Error::invalid(
            what,
            format_args!("{name:?} ({} bytes)", name.len()),
            expected,
        ));
    }
    Ok(())
}

/// Returns whether a character changes how the text around it is shown, or is not shown itself, so
/// that two names could look alike: control characters, and those of Unicode's category Cf that set
/// the direction of text or have no width.
fn is_hidden(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
            | '\u{e0000}'..='\u{e007f}')
}

/// The id of the server with this name, which survives restarts and is never 0. The name is chosen
/// by the operator, or is the address by default.
pub fn server_id(name: &str) -> u64 {
    let hash = blake3::hash(name.as_bytes());
    let first = hash.as_bytes().first_chunk().expect("a hash has 32 bytes");
    u64::from_le_bytes(*first).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_keeps_its_id_and_ids_differ() {
        assert_eq!(server_id("shard-0:7401"), server_id("shard-0:7401"));
        assert_ne!(server_id("shard-0:7401"), server_id("shard-1:7401"));
    }
}
