//! Truncation of input in errors.

use std::fmt::{self, Display, Write as _};

/// A writer that accepts at most `left` characters; formatting stops there.
struct Quote {
    text: String,
    left: usize,
}

impl fmt::Write for Quote {
    fn write_str(&mut self, more: &str) -> fmt::Result {
        match more.char_indices().nth(self.left) {
            None => {
                self.left -= more.chars().count();
                self.text.push_str(more);
                Ok(())
            }
            Some((end, _)) => {
                self.text.push_str(&more[..end]);
                self.text.push_str("...");
                Err(fmt::Error)
            }
        }
    }
}

/// Formats `input`, truncated to a number of characters.
pub fn quote(characters: usize, input: impl Display) -> String {
    let mut quote = Quote { text: String::new(), left: characters };
    // An error only means that the rest was omitted.
    let _ = write!(quote, "{input}");
    quote.text
}
