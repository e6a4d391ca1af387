//! TLS 1.3 with certificates from files, which are read again when they change.
//!
//! A certificate authority of the cluster signs the certificates of servers and clients. Each side
//! verifies the certificate of the other. A client also checks that the certificate is valid for
//! the dialled name, and a server reads the role of the client from it. Both refuse certificates in
//! a revocation list, if they have one.

mod client;
mod server;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    client::WebPkiServerVerifier,
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, pem::PemObject},
    server::WebPkiClientVerifier,
    version::TLS13,
};
use zeroshard_model::{Error, Result};

use crate::reloaded::Reloaded;
use zeroshard_model::Role;

pub use server::{Acceptor, PeerSecurity, Security, ServerStream};

/// The environment variable that names the file with the certificates of the trusted authorities.
pub const CA_VARIABLE: &str = "ZEROSHARD_TLS_CA";
/// The environment variable that names the file with the certificate of the program.
pub const CERTIFICATE_VARIABLE: &str = "ZEROSHARD_TLS_CERT";
/// The environment variable that names the file with the private key of the certificate.
pub const KEY_VARIABLE: &str = "ZEROSHARD_TLS_KEY";

/// The maximum size of a file with certificates or a key.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// The maximum size of a file with revocation lists: about 300,000 certificates.
const MAX_CRL_BYTES: u64 = 16 << 20;
/// The ALPN protocol of gRPC calls.
const HTTP_2: &[u8] = b"h2";
/// The ALPN protocol of the admin server.
const HTTP_1: &[u8] = b"http/1.1";

/// The files of a process that uses TLS, in PEM format.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificates of the authorities that sign the certificates of the other side.
    pub ca: PathBuf,
    /// The file with the certificate of this process, followed by any intermediate certificates,
    /// and the file with its private key. A server needs both. A client without them needs a token.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// The revocation lists of the authorities, one of each, which may be empty. A list that is
    /// older than its next update stays valid.
    pub crl: Option<PathBuf>,
}

impl TlsFiles {
    /// Checks the combination of files. Returns `None` if no file is given.
    ///
    /// # Errors
    /// [`Error::Refused`] for a certificate without its key, a key without its certificate, or
    /// either of them without authorities.
    pub fn of(
        ca: Option<&Path>,
        certificate: Option<&Path>,
        key: Option<&Path>,
        crl: Option<&Path>,
    ) -> Result<Option<Self>> {
        let missing = |given: &str, file: &str| {
            Err(Error::refused(format!("{given} needs {file} in PEM format")))
        };
        match (ca, certificate, key) {
            (None, None, None) if crl.is_none() => Ok(None),
            (None, None, None) => missing("--tls-crl", "--tls-ca, the file of authorities"),
            (None, ..) => missing("--tls-cert or --tls-key", "--tls-ca, the file of authorities"),
            (_, Some(_), None) => missing("--tls-cert", "--tls-key, the file of its private key"),
            (_, None, Some(_)) => missing("--tls-key", "--tls-cert, the file of its certificate"),
            (Some(ca), certificate, key) => {
                let identity = certificate.zip(key);
                let identity = identity.map(|(file, key)| (file.to_owned(), key.to_owned()));
                Ok(Some(Self { ca: ca.to_owned(), identity, crl: crl.map(Path::to_owned) }))
            }
        }
    }

    fn load(&self) -> Result<Configs> {
        let roots = Arc::new(roots(&self.ca)?);
        let authorities = Authorities { lists: self.lists(&roots)?, roots };
        let identity = self.identity.as_ref();
        let identity = identity.map(|(file, key)| Ok((certificates(file)?, private_key(key)?)));
        let client = self.client(&authorities, None)?;
        let mut configs = Configs {
            anonymous: client.clone(),
            client,
            server: None,
            admin: None,
            role: None,
            expiry: None,
        };
        if let Some((chain, key)) = identity.transpose()? {
            configs.expiry = chain.iter().filter_map(expiry).min();
            configs.role = chain.first().and_then(server::role_of);
            configs.client = self.client(&authorities, Some((chain.clone(), key.clone_key())))?;
            let server = self.server(authorities, chain, key)?;
            let mut admin = server.clone();
            admin.alpn_protocols = vec![HTTP_1.to_vec()];
            (configs.server, configs.admin) = (Some(Arc::new(server)), Some(Arc::new(admin)));
        }
        Ok(configs)
    }

    /// The revocation lists of the authorities; none without a file.
    fn lists(&self, roots: &RootCertStore) -> Result<Lists> {
        let Some(file) = &self.crl else { return Ok(Vec::new()) };
        let lists = revocation_lists(file)?;
        let issuers = lists.iter().map(|list| webpki::OwnedCertRevocationList::from_der(list));
        let issuers = issuers.collect::<Result<Vec<_>, _>>().map_err(|cause| {
            Error::refused(format!(
                "the revocation list in {} is not a complete list in version 2 of X.509: {cause}",
                file.display()
            ))
        })?;
        let issuers: Vec<_> = issuers.into_iter().map(webpki::CertRevocationList::from).collect();
        // Only the first list of an authority would be used.
        let twice =
            |at: usize| issuers[..at].iter().any(|list| list.issuer() == issuers[at].issuer());
        if (0..issuers.len()).any(twice) {
            return Err(Error::refused(format!(
                "{} has two revocation lists of one authority; keep the later one",
                file.display()
            )));
        }
        let has_list = |subject: &[u8]| issuers.iter().any(|list| list.issuer() == subject);
        if roots.roots.iter().all(|root| has_list(&root.subject)) {
            return Ok(lists);
        }
        // Otherwise every certificate of the authority would be refused.
        Err(Error::refused(format!(
            "{} has no revocation list of an authority in {}; add one, which may be empty",
            file.display(),
            self.ca.display()
        )))
    }

    fn client(
        &self,
        authorities: &Authorities,
        identity: Option<Pair>,
    ) -> Result<Arc<ClientConfig>> {
        let Authorities { roots, lists } = authorities.clone();
        let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider())
            .with_crls(lists)
            .build()
            .map_err(|cause| self.invalid(&cause))?;
        let config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|cause| self.invalid(&cause))?
            .with_webpki_verifier(verifier);
        let mut config = match identity {
            None => config.with_no_client_auth(),
            Some((chain, key)) => {
                config.with_client_auth_cert(chain, key).map_err(|cause| self.invalid(&cause))?
            }
        };
        config.alpn_protocols = vec![HTTP_2.to_vec()];
        Ok(Arc::new(config))
    }

    fn server(
        &self,
        Authorities { roots, lists }: Authorities,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<ServerConfig> {
        // A caller without a certificate may have a token. The credentials are checked for each
        // call and not in the handshake, so that a refusal has a message.
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider())
            .allow_unauthenticated()
            .with_crls(lists)
            .build()
            .map_err(|cause| self.invalid(&cause))?;
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|cause| self.invalid(&cause))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)
            .map_err(|cause| self.invalid(&cause))?;
        config.alpn_protocols = vec![HTTP_2.to_vec()];
        // A resumed session would not verify the certificates again.
        config.send_tls13_tickets = 0;
        Ok(config)
    }

    fn invalid(&self, cause: &dyn std::error::Error) -> Error {
        let certificate = self.identity.as_ref().map(|(certificate, _)| certificate);
        let what = format!("certificate {}", certificate.unwrap_or(&self.ca).display());
        let expected = "a valid certificate that matches the private key";
        Error::invalid(what, format!("not usable ({cause})"), expected)
    }
}

type Lists = Vec<CertificateRevocationListDer<'static>>;

/// The trusted authorities, and their revocation lists.
#[derive(Clone)]
struct Authorities {
    roots: Arc<RootCertStore>,
    lists: Lists,
}

type Pair = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

/// The TLS configuration of a process. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Tls {
    configs: Arc<Reloaded<Configs>>,
    /// The beginning of the flags that errors name, as in `--tls-ca`.
    flags: &'static str,
    /// `true` if outgoing connections do not show the certificate of this process.
    is_anonymous: bool,
}

struct Configs {
    client: Arc<ClientConfig>,
    /// The same without the certificate of this process.
    anonymous: Arc<ClientConfig>,
    server: Option<Arc<ServerConfig>>,
    /// The configuration of the admin server.
    admin: Option<Arc<ServerConfig>>,
    /// The role in the certificate of this process.
    role: Option<Role>,
    /// The time at which the first certificate of its chain expires, in seconds since 1970.
    expiry: Option<i64>,
}

impl Tls {
    /// Reads the files. Changed files are used for connections that are opened more than five
    /// seconds after the change.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a file that cannot be read or has invalid content.
    pub fn open(files: TlsFiles) -> Result<Self> {
        let mut watched = vec![files.ca.clone()];
        watched.extend(files.identity.iter().flat_map(|(file, key)| [file.clone(), key.clone()]));
        watched.extend(files.crl.clone());
        let load = move || files.load();
        let configs = Arc::new(Reloaded::open("the certificates", watched, load)?);
        Ok(Self { configs, flags: "--tls", is_anonymous: false })
    }

    /// The same configuration, whose errors name flags that begin with `flags` instead of `--tls`.
    #[must_use]
    pub fn with_flags(self, flags: &'static str) -> Self {
        Self { flags, ..self }
    }

    /// The same configuration, without the certificate of this process on outgoing connections. A
    /// process needs it for calls with somebody else's token: the role in a certificate takes
    /// precedence over a token.
    #[must_use]
    pub fn anonymous(self) -> Self {
        Self { is_anonymous: true, ..self }
    }

    /// The configuration for outgoing connections.
    pub fn client_config(&self) -> Arc<ClientConfig> {
        let configs = self.configs.get();
        match self.is_anonymous {
            true => configs.anonymous.clone(),
            false => configs.client.clone(),
        }
    }

    /// The configuration for incoming connections; `None` without a certificate.
    pub fn server_config(&self) -> Option<Arc<ServerConfig>> {
        self.configs.get().server.clone()
    }

    /// The role in the certificate of this process, if it has one.
    pub fn role(&self) -> Option<Role> {
        self.configs.get().role.clone()
    }

    /// The time at which the certificate of this process or an intermediate one expires, whichever
    /// is first, in seconds since 1970.
    pub fn expiry(&self) -> Option<i64> {
        self.configs.get().expiry
    }
}

/// The cryptography of connections. AES-128 is preferred, because it is a third faster than AES-256
/// and secure enough for the lifetime of a connection.
fn provider() -> Arc<CryptoProvider> {
    use ring::cipher_suite::{
        TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256,
    };
    let cipher_suites =
        vec![TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256];
    Arc::new(CryptoProvider { cipher_suites, ..ring::default_provider() })
}

fn roots(file: &Path) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(file)? {
        roots.add(certificate).map_err(|cause| {
            let what = format!("certificate in {}", file.display());
            let expected = "the certificate of a certificate authority";
            Error::invalid(what, format!("not usable ({cause})"), expected)
        })?;
    }
    Ok(roots)
}

/// Reads a file of limited size.
fn read(file: &Path, max_bytes: u64, expected: &str) -> Result<Vec<u8>> {
    let invalid = |found| Error::invalid(format!("file {}", file.display()), found, expected);
    if fs::metadata(file).is_ok_and(|found| found.len() > max_bytes) {
        return Err(invalid(format!("larger than {max_bytes} bytes")));
    }
    fs::read(file).map_err(|cause| invalid(format!("unreadable ({cause})")))
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>> {
    parsed(file, MAX_FILE_BYTES, "certificate")
}

/// The time at which a certificate expires, in seconds since 1970.
fn expiry(certificate: &CertificateDer<'static>) -> Option<i64> {
    let (_, certificate) = x509_parser::parse_x509_certificate(certificate).ok()?;
    Some(certificate.validity().not_after.timestamp())
}

fn revocation_lists(file: &Path) -> Result<Lists> {
    parsed(file, MAX_CRL_BYTES, "revocation list")
}

/// Reads the objects of one kind from a PEM file, which must contain at least one. Errors name the
/// kind `name`.
fn parsed<T: PemObject>(file: &Path, max_bytes: u64, name: &str) -> Result<Vec<T>> {
    let expected = format!("a readable file with {name}s in PEM format");
    let invalid =
        |found: String| Error::invalid(format!("file {}", file.display()), found, &*expected);
    let pem = read(file, max_bytes, &expected)?;
    let parsed = T::pem_slice_iter(&pem).collect::<Result<Vec<_>, _>>();
    let parsed = parsed.map_err(|cause| invalid(format!("invalid ({cause})")))?;
    if parsed.is_empty() {
        let file = file.display();
        return Err(Error::refused(format!("file {file} has no {name} in PEM format")));
    }
    Ok(parsed)
}

fn private_key(file: &Path) -> Result<PrivateKeyDer<'static>> {
    let expected = "a readable file with a private key in PEM format";
    PrivateKeyDer::from_pem_slice(&read(file, MAX_FILE_BYTES, expected)?).map_err(|_| {
        // The cause could contain a part of the key.
        Error::refused(format!("file {} has no private key in PEM format", file.display()))
    })
}

#[cfg(test)]
mod tests;
