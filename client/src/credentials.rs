//! The flags with which every program names its credentials.

use std::path::PathBuf;

use clap::Args;
use zeroshard_proto::{Result, Token};

/// The credentials of a program, from flags and environment variables.
#[derive(Debug, Clone, Default, PartialEq, Args)]
pub struct CredentialFlags {
    /// Token of the cluster. Prefer the environment variable or --token-file, since other users of
    /// the machine can see flags
    #[arg(
        long,
        env = "ZEROSHARD_TOKEN",
        hide_env_values = true,
        value_name = "TOKEN",
        default_value = "",
        hide_default_value = true,
        global = true
    )]
    token: Token,
    /// File with the token, instead of --token
    #[arg(long, env = "ZEROSHARD_TOKEN_FILE", value_name = "FILE", global = true)]
    token_file: Option<PathBuf>,
}

impl CredentialFlags {
    /// The token; empty if there is none.
    ///
    /// # Errors
    /// [`zeroshard_proto::Error::Invalid`] for a file that cannot be read, or a token and a file.
    pub fn token(&self) -> Result<Token> {
        Token::of(&self.token, self.token_file.as_deref())
    }
}
