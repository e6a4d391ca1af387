//! The file in which an operator lists the tokens of a cluster.

use std::collections::HashMap;

use zeroshard_model::{Error, Result, Role, quota::Quota};

use crate::Token;

/// The maximum number of tokens of a cluster.
const MAX_TOKENS: usize = 100_000;
/// The beginning of a hash in the file of tokens.
const HASH: &str = "blake3:";
/// The word in the place of the hash in a line about certificates.
const CERTIFICATE: &str = "certificate";

/// The credential of a caller, which may have a line in the file of tokens.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Credential {
    /// The token with this hash.
    Token([u8; 32]),
    /// A certificate with this role.
    Certificate(Role),
}

impl Credential {
    /// The credential of a caller with a token.
    pub fn token(token: &[u8]) -> Self {
        Self::Token(*blake3::hash(token).as_bytes())
    }
}

/// The tokens of a cluster, stored as hashes, with their roles and limits, and the limits of
/// certificates.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tokens(HashMap<Credential, (Role, Quota)>);

impl Tokens {
    /// The line of a token in the file of tokens. Tokens have so much randomness that a hash does
    /// not reveal them.
    pub fn line(role: &Role, token: &Token) -> String {
        let hash = blake3::hash(token.reveal().unwrap_or_default().as_bytes());
        format!("{role} {HASH}{}", hash.to_hex())
    }

    /// Parses the lines of a file. A line consists of a role, a hash, optional limits and an
    /// optional comment, separated by spaces. With the word `certificate` in place of the hash, the
    /// limits are those of all certificates with the role together. A comment begins with `#`, or
    /// with a word that does not contain `=`. Empty lines and lines that begin with `#` are
    /// ignored.
    ///
    /// # Errors
    /// [`Error::Refused`] with the number of the invalid line.
    pub fn parse(text: &str) -> Result<Self> {
        let mut tokens = HashMap::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let what = || format!("line {} of the file of tokens", number + 1);
            let mut words = line.split_whitespace();
            let role = words.next().unwrap_or_default().parse::<Role>();
            let role = role.map_err(|error| Error::refused(format!("{}: {error}", what())))?;
            let credential = match words.next() {
                Some(CERTIFICATE) => Some(Credential::Certificate(role.clone())),
                word => word
                    .and_then(|word| word.strip_prefix(HASH))
                    .and_then(|hex| blake3::Hash::from_hex(hex).ok())
                    .map(|hash| Credential::Token(*hash.as_bytes())),
            };
            let credential = credential.ok_or_else(|| {
                Error::refused(format!(
                    "{} has no hash after the role {role}; add one that `zsctl token new` prints, \
                     or the word certificate",
                    what()
                ))
            })?;
            let mut quota = Quota::default();
            for word in words {
                if word.starts_with('#') || !quota.read(word, what)? {
                    break;
                }
            }
            let is_token = matches!(credential, Credential::Token(_));
            if tokens.insert(credential, (role, quota)).is_some() {
                let repeated = if is_token { "hash" } else { "certificates" };
                let sentence = format!("{} has the {repeated} of an earlier line", what());
                return Err(Error::refused(sentence));
            }
        }
        if tokens.is_empty() || tokens.len() > MAX_TOKENS {
            let expected = format!("1 to {MAX_TOKENS}");
            let what = "number of lines in the file of tokens";
            return Err(Error::invalid(what, tokens.len(), expected));
        }
        Ok(Self(tokens))
    }

    /// The role of a token.
    pub fn role(&self, token: &[u8]) -> Option<&Role> {
        self.holder(&Credential::token(token)).map(|(role, _)| role)
    }

    /// The role and the limits of a credential that has a line.
    pub fn holder(&self, credential: &Credential) -> Option<&(Role, Quota)> {
        self.0.get(credential)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn role(text: &str) -> Role {
        text.parse().unwrap()
    }

    #[test]
    fn a_file_has_a_role_and_a_hash_in_each_line() {
        let tokens = ["one", "two"].map(|text| Token::from(text.to_owned()));
        let lines = [
            "# the servers".to_owned(),
            Tokens::line(&Role::Server, &tokens[0]),
            String::new(),
            format!("{}  the laptop of an engineer", Tokens::line(&role("job:demo"), &tokens[1])),
        ];
        let parsed = Tokens::parse(&lines.join("\n")).unwrap();
        assert_eq!(parsed.role(b"one"), Some(&Role::Server));
        assert_eq!(parsed.role(b"two"), Some(&role("job:demo")));
        assert_eq!(parsed.role(b"three"), None);
        assert!(!lines.join("").contains("one "));
    }

    #[test]
    fn limits_follow_the_hash_and_a_comment_follows_them() {
        let token = Token::from("one".to_owned());
        let line = Tokens::line(&Role::Admin, &token);
        let quota = |rest: &str| {
            let tokens = Tokens::parse(&format!("{line} {rest}"))?;
            Ok::<_, Error>(tokens.holder(&Credential::token(b"one")).unwrap().1)
        };
        let four = Quota { jobs: Some(4), ..Quota::default() };
        assert_eq!(quota("jobs=4 weight=2 # jobs=5"), Ok(Quota { weight: 2, ..four }));
        assert_eq!(quota("jobs=4 the laptop of x=y"), Ok(four));
        assert_eq!(quota("the laptop"), Ok(Quota::default()));
        assert!(matches!(quota("job=4"), Err(Error::Refused { .. })));
    }

    #[test]
    fn a_line_may_have_the_limits_of_the_certificates_of_a_role() {
        let token = Tokens::line(&role("job:demo"), &Token::from("one".to_owned()));
        let text = format!("{token} jobs=1\njob:demo certificate jobs=2 # the nightly runs\n");
        let tokens = Tokens::parse(&text).unwrap();
        let jobs = |credential: Credential| tokens.holder(&credential).and_then(|of| of.1.jobs);
        assert_eq!(jobs(Credential::token(b"one")), Some(1));
        assert_eq!(jobs(Credential::Certificate(role("job:demo"))), Some(2));
        assert_eq!(tokens.holder(&Credential::Certificate(role("job:demo:read"))), None);
        // Such a line admits no token.
        assert_eq!(tokens.role(b"certificate"), None);
        assert!(Tokens::parse("admin certificate").is_ok());
    }

    #[test]
    fn a_file_with_a_wrong_line_is_refused_with_its_number() {
        let good = Tokens::line(&Role::Admin, &Token::from("one".to_owned()));
        for wrong in ["root blake3:00", "admin", "admin blake3:00", "admin secret", &good] {
            let error = Tokens::parse(&format!("{good}\n{wrong}\n")).unwrap_err().to_string();
            assert!(error.contains("line 2") && !error.contains("secret"), "{error}");
        }
        let twice = Tokens::parse("admin certificate\nadmin certificate jobs=1\n");
        assert!(twice.unwrap_err().to_string().contains("line 2"));
        assert!(Tokens::parse("# nothing\n").is_err());
    }
}
