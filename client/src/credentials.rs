//! The flags with which every program names its credentials.

use std::{env, ffi::OsStr, path::PathBuf};

use clap::Args;
use zeroshard_model::Result;
use zeroshard_net::{
    Token,
    token::{TOKEN_FILE_VARIABLE, TOKEN_VARIABLE},
    transport::tls::{Tls, TlsFiles},
};

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
    /// File with the certificates of the cluster's certificate authorities, in PEM format. If it is
    /// set, all connections are encrypted
    #[arg(long, env = "ZEROSHARD_TLS_CA", value_name = "FILE", global = true)]
    tls_ca: Option<PathBuf>,
    /// File with the certificate of this program, in PEM format. Its role can replace a token
    #[arg(long, env = "ZEROSHARD_TLS_CERT", value_name = "FILE", global = true)]
    tls_cert: Option<PathBuf>,
    /// File with the private key of --tls-cert, in PEM format
    #[arg(long, env = "ZEROSHARD_TLS_KEY", value_name = "FILE", global = true)]
    tls_key: Option<PathBuf>,
    /// File with the revocation lists of the authorities in --tls-ca, one of each, in PEM format.
    /// Servers whose certificates are in them are refused
    #[arg(long, env = "ZEROSHARD_TLS_CRL", value_name = "FILE", global = true)]
    tls_crl: Option<PathBuf>,
}

impl CredentialFlags {
    /// The token; empty if there is none.
    ///
    /// A flag takes precedence over both environment variables.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::Invalid`] for a file that cannot be read, or a token and a file.
    pub fn token(&self) -> Result<Token> {
        let (token, file) = (&self.token, self.token_file.as_deref());
        let is_flag =
            |variable: &str, value: &OsStr| env::var_os(variable).as_deref() != Some(value);
        let has_flag = token.reveal().is_some_and(|text| is_flag(TOKEN_VARIABLE, text.as_ref()));
        let has_file_flag = file.is_some_and(|file| is_flag(TOKEN_FILE_VARIABLE, file.as_ref()));
        match (has_flag, has_file_flag) {
            (true, false) => Ok(token.clone()),
            (false, true) => Token::of(&Token::default(), file),
            _ => Token::of(token, file),
        }
    }

    /// The TLS files; `None` without encryption.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::Invalid`] if only some of the required files are set.
    pub fn tls_files(&self) -> Result<Option<TlsFiles>> {
        let Self { tls_ca, tls_cert, tls_key, tls_crl, .. } = self;
        let [ca, cert, key, crl] = [tls_ca, tls_cert, tls_key, tls_crl].map(Option::as_deref);
        TlsFiles::of(ca, cert, key, crl)
    }

    /// The TLS configuration; `None` without encryption.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::Invalid`] for missing or invalid files.
    pub fn tls(&self) -> Result<Option<Tls>> {
        self.tls_files()?.map(Tls::open).transpose()
    }
}
