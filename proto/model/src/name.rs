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
