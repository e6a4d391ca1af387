//! Truncation of errors that are sent.

use serde_json::Value;
use zeroshard_model::error::{MAX_QUOTED, quote};

/// The maximum number of bytes of an error field on the wire. The fields, as JSON, and the message
/// must fit into the headers that HTTP/2 peers accept, 16 KiB in total.
const MAX_FIELD: usize = 512;
/// The maximum number of bytes of the message.
pub(super) const MAX_MESSAGE: usize = 1024;

/// The fields of errors that repeat input of a caller, of which at most [`MAX_QUOTED`] characters
/// are sent.
const INPUT: [&str; 6] = ["job", "what", "found", "value", "other_value", "difference"];

/// Truncates `text` to a number of bytes.
pub(super) fn cut(text: &mut String, bytes: usize) {
    if text.len() > bytes {
        text.truncate(text.floor_char_boundary(bytes));
        text.push_str("...");
    }
}

/// Truncates all texts of an error in JSON form, and replaces the characters that JSON expands, so
/// that they fit into a header.
pub(super) fn bound(detail: &mut Value) {
    for (name, field) in detail.as_object_mut().into_iter().flatten() {
        if let Value::String(text) = field {
            if INPUT.contains(&name.as_str()) && text.chars().nth(MAX_QUOTED).is_some() {
                *text = quote(MAX_QUOTED, &text);
            }
            cut(text, MAX_FIELD);
            // JSON encodes each of the other control characters with six bytes.
            if text.contains(is_unprintable) {
                *text = text.replace(is_unprintable, "?");
            }
        }
    }
}

fn is_unprintable(character: char) -> bool {
    character.is_ascii_control() && !matches!(character, '\n' | '\t')
}
