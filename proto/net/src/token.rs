//! The secret that the servers and clients of a cluster share, and the header in which a call
//! carries it.

use std::{convert::Infallible, fmt, fs, path::Path, str::FromStr};

use http::{HeaderMap, HeaderValue, header::AUTHORIZATION};
use serde::{Deserialize, Serialize};
use zeroize::{Zeroize as _, Zeroizing};
use zeroshard_model::{Error, Result};

/// The environment variable from which every program reads the token.
pub const TOKEN_VARIABLE: &str = "ZEROSHARD_TOKEN";
/// The environment variable with the file from which every program reads the token.
pub const TOKEN_FILE_VARIABLE: &str = "ZEROSHARD_TOKEN_FILE";

/// The maximum length of a token, in bytes. Together with the other headers it fits into the limit
/// that an HTTP/2 peer has by default.
const MAX_BYTES: usize = 4096;
/// The maximum size of a file with a token.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// The token that the calls of a cluster carry as `authorization: Bearer TOKEN`; if it is empty,
/// they carry none.
///
/// Any text is accepted, because parsers of flags and files show the text that they refuse.
/// [`Bearer::new`] refuses a token that cannot be sent, without showing it. `Debug` does not show
/// the token either. It serializes as the text itself.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Text", into = "String")]
pub struct Token(String);

impl Token {
    /// A new token of 256 random bits.
    ///
    /// # Errors
    /// [`Error::Internal`] if the system cannot provide random numbers.
    pub fn random() -> Result<Self> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes).map_err(|e| Error::Internal {
            cause: format!("cannot generate a random token: {e}"),
        })?;
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self(format!("zs-{hex}")))
    }

    /// Reads the token in a file, without a line break at its end. The file may have been made by
    /// an editor, or be a secret that an orchestrator has mounted.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a file that cannot be read, is not text, or is empty. The error does
    /// not show the content.
    pub fn read(file: &Path) -> Result<Self> {
        let invalid = |found: String| {
            let what = format!("token file {}", file.display());
            Error::invalid(what, found, "a readable file whose only line is the token")
        };
        // A larger file has no token that can be sent, and might not fit in memory.
        if fs::metadata(file).is_ok_and(|found| found.len() > MAX_FILE_BYTES) {
            return Err(invalid(format!("larger than {MAX_FILE_BYTES} bytes")));
        }
        let text =
            fs::read_to_string(file).map_err(|cause| invalid(format!("unreadable ({cause})")))?;
        let text = Zeroizing::new(text);
        match text.trim_end_matches(['\r', '\n']) {
            "" => Err(invalid("empty".to_owned())),
            token => Ok(Self(token.to_owned())),
        }
    }

    /// The token of a program: `token`, or else the one in `file`. If there is neither, it is
    /// empty.
    ///
    /// # Errors
    /// Those of [`Self::read`]; [`Error::Invalid`] if there are both.
    pub fn of(token: &Self, file: Option<&Path>) -> Result<Self> {
        match (token.reveal(), file) {
            (_, None) => Ok(token.clone()),
            (None, Some(file)) => Self::read(file),
            (Some(_), Some(file)) => {
                let what = format!("token file {}", file.display());
                Err(Error::invalid(what, "given together with a token", "given without one"))
            }
        }
    }

    /// The token itself; `None` if it is empty. Use it only to pass the token to a client or a
    /// process, never in messages.
    pub fn reveal(&self) -> Option<&str> {
        Some(self.0.as_str()).filter(|text| !text.is_empty())
    }
}

impl From<String> for Token {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl From<Token> for String {
    fn from(mut token: Token) -> Self {
        std::mem::take(&mut token.0)
    }
}

/// Overwrites the token, so that it does not remain in memory.
impl Drop for Token {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl FromStr for Token {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "Token(none)" } else { "Token(..)" })
    }
}

/// A text in a file. Serde's own error for another type would show the value.
#[derive(Deserialize)]
#[serde(untagged, expecting = "it must be a text in quotes")]
enum Text {
    Text(String),
}

impl From<Text> for Token {
    fn from(Text::Text(text): Text) -> Self {
        Self(text)
    }
}

/// The header value of a token. `Debug` does not show it, and HTTP/2 never stores it in its header
/// tables.
#[derive(Debug, Clone)]
pub struct Bearer(HeaderValue);

impl Bearer {
    /// Creates the header value for `token`; `None` if the token is empty.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a token that no header can carry; the error does not show the token.
    pub fn new(token: &Token) -> Result<Option<Self>> {
        let Some(text) = token.reveal() else { return Ok(None) };
        let invalid = |found: &str| {
            let expected = format!("at most {MAX_BYTES} visible ASCII characters without spaces");
            Error::invalid("token", found, expected)
        };
        if text.len() > MAX_BYTES {
            return Err(invalid(&format!("{} bytes long", text.len())));
        }
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(invalid(
                "a text with a space, a line break or another invalid character (the text is not \
                 shown)",
            ));
        }
        let mut value = HeaderValue::try_from(format!("Bearer {text}"))
            .map_err(|_| invalid("a text that no HTTP header can carry (the text is not shown)"))?;
        value.set_sensitive(true);
        Ok(Some(Self(value)))
    }

    /// Adds the token to the headers of a call.
    pub fn write(&self, headers: &mut HeaderMap) {
        headers.insert(AUTHORIZATION, self.0.clone());
    }

    /// Checks the headers of a call. The time does not depend on the wrong token: the function
    /// compares hashes in constant time.
    ///
    /// # Errors
    /// [`Error::Unauthenticated`].
    pub fn check(&self, headers: &HeaderMap) -> Result<()> {
        let refuse = |found: &str| Err(Error::Unauthenticated { found: found.to_owned() });
        match headers.get(AUTHORIZATION) {
            None => refuse("no token"),
            Some(value) if blake3::hash(value.as_bytes()) == blake3::hash(self.0.as_bytes()) => {
                Ok(())
            }
            Some(_) => refuse("a wrong token"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bearer(text: &str) -> Result<Option<Bearer>> {
        Bearer::new(&Token::from(text.to_owned()))
    }

    fn headers(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(AUTHORIZATION, value.parse().unwrap())])
    }

    #[test]
    fn random_tokens_differ_and_can_be_sent() {
        let tokens = [(); 2].map(|()| Token::random().unwrap());
        assert_ne!(tokens[0], tokens[1]);
        for token in tokens {
            assert_eq!(token.reveal().unwrap().len(), "zs-".len() + 64);
            assert!(Bearer::new(&token).unwrap().is_some());
        }
    }

    #[test]
    fn an_empty_token_means_no_token() {
        assert!(bearer("").unwrap().is_none());
        assert_eq!(Token::default().reveal(), None);
    }

    #[test]
    fn only_the_same_token_is_accepted() {
        let ours = bearer("s3cret").unwrap().unwrap();
        let mut carried = HeaderMap::new();
        let refused = |headers: &HeaderMap| match ours.check(headers) {
            Err(Error::Unauthenticated { found }) => found,
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(&carried), "no token");
        for wrong in [
            "Bearer s3cre",
            "Bearer s3crets",
            "bearer s3cret",
            "s3cret",
            "Bearer",
            "Basic s3cret",
            "",
        ] {
            assert_eq!(refused(&headers(wrong)), "a wrong token", "{wrong}");
        }
        ours.write(&mut carried);
        assert_eq!(carried[AUTHORIZATION], "Bearer s3cret");
        assert_eq!(ours.check(&carried), Ok(()));
    }

    #[test]
    fn a_token_that_no_header_can_carry_is_refused_and_not_shown() {
        for wrong in ["s3cret s3cret", "s3cret\n", "s3crät", &"s3cret".repeat(700)] {
            match bearer(wrong) {
                Err(error @ Error::Invalid { .. }) => {
                    assert!(!error.to_string().contains("s3cr"), "{error}")
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn a_file_has_the_token_and_perhaps_a_line_break() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("token");
        let none = Token::default();
        for text in ["s3cret", "s3cret\n", "s3cret\r\n"] {
            fs::write(&file, text).unwrap();
            assert_eq!(Token::of(&none, Some(&file)).unwrap().reveal(), Some("s3cret"));
        }
        let both = Token::of(&Token::from("other".to_owned()), Some(&file)).unwrap_err();
        assert!(both.to_string().contains("given without one"), "{both}");
        for wrong in [&b"\n"[..], b"", b"\xff\xfes3cret", &[b'x'; 70_000]] {
            fs::write(&file, wrong).unwrap();
            let error = Token::read(&file).unwrap_err().to_string();
            assert!(error.contains("token file") && !error.contains("s3cret"), "{error}");
        }
        assert!(Token::read(&directory.path().join("missing")).is_err());
    }

    #[test]
    fn debug_does_not_show_it() {
        let token = Token::from("s3cret".to_owned());
        let shown = format!("{token:?} {:?}", Bearer::new(&token));
        assert!(!shown.contains("s3cret"), "{shown}");
    }

    #[test]
    fn a_token_that_is_not_a_text_is_refused_and_not_shown() {
        assert_eq!(
            serde_json::from_str::<Token>("\"7331\"").unwrap(),
            Token::from("7331".to_owned())
        );
        for wrong in ["7331", "7331.5", "[\"7331\"]"] {
            let error = serde_json::from_str::<Token>(wrong).unwrap_err().to_string();
            assert!(error.contains("text") && !error.contains("7331"), "{error}");
        }
    }
}
