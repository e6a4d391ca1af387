//! Input in errors, up to a length.

use std::fmt::{self, Display, Write as _};

use serde_json::Value;

/// The most bytes of a field of an error that cross the wire: the fields, as JSON, and the message
/// must fit what HTTP/2 peers take for headers, 16 KiB in all.
const MAX_FIELD: usize = 512;
/// The most bytes of the message.
pub(super) const MAX_MESSAGE: usize = 1024;

/// At most `left` characters of what is written; formatting stops there.
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

/// `input` as text, up to a number of characters.
pub(super) fn quote(characters: usize, input: impl Display) -> String {
    let mut quote = Quote { text: String::new(), left: characters };
    // The error says that the rest was left out.
    let _ = write!(quote, "{input}");
    quote.text
}

/// Cuts `text` at a number of bytes, if it is longer.
pub(super) fn cut(text: &mut String, bytes: usize) {
    if text.len() > bytes {
        text.truncate(text.floor_char_boundary(bytes));
        text.push_str("...");
    }
}

/// Takes from all texts of an error as JSON what could make it too long for a header.
pub(super) fn bound(detail: &mut Value) {
    for field in detail.as_object_mut().into_iter().flat_map(|fields| fields.values_mut()) {
        if let Value::String(text) = field {
            cut(text, MAX_FIELD);
            // JSON has six bytes for each of the others.
            if text.contains(is_unprintable) {
                *text = text.replace(is_unprintable, "?");
            }
        }
    }
}

fn is_unprintable(character: char) -> bool {
    character.is_ascii_control() && !matches!(character, '\n' | '\t')
}
