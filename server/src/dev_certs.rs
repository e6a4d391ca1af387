//! `zeroshard-server dev-certs`: makes the certificates of a cluster to try out TLS, signed by a
//! new certificate authority.

use std::{
    fs::{self, DirBuilder, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use clap::Args;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose, SanType,
};
use zeroshard_model::Role;

/// The names by which a machine reaches itself.
const LOCAL: [&str; 3] = ["localhost", "127.0.0.1", "::1"];
/// The characters that are escaped in the name of a file.
const IN_FILE: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.');
/// The characters that are escaped in a URI.
const IN_URI: &AsciiSet = &IN_FILE.remove(b':').remove(b'/');
/// Certificates are valid from this long before their creation, because clocks differ.
const CLOCK_DIFFERENCE: Duration = Duration::from_secs(3600);

/// Flags of `zeroshard-server dev-certs`.
#[derive(Debug, Clone, PartialEq, Args)]
pub struct DevCerts {
    /// Directory for the files. It is created if it does not exist, and must not contain
    /// certificates
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Name or IP address at which a machine of the cluster is dialled, in addition to localhost.
    /// May be repeated
    #[arg(long = "host", value_name = "NAME")]
    hosts: Vec<String>,
    /// Job for which a certificate is made. May be repeated
    #[arg(long = "job", value_name = "NAME")]
    jobs: Vec<String>,
    /// Number of days for which the certificates are valid
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=825))]
    days: u32,
}

/// The reasons why certificates cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A name cannot be part of a certificate.
    #[error("cannot make certificates: {0}; check the names of --host and --job")]
    Certificate(#[from] rcgen::Error),
    /// A role is invalid.
    #[error(transparent)]
    Role(#[from] zeroshard_model::Error),
    /// A file cannot be written.
    #[error("cannot write {}: {cause}; choose a new directory", file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// The error of the system.
        cause: io::Error,
    },
}

impl DevCerts {
    /// Makes the certificates. The key of the authority is discarded.
    ///
    /// # Errors
    /// [`Error`] for an invalid name, or for a file that already exists or cannot be written.
    pub fn make(&self) -> Result<Vec<PathBuf>, Error> {
        let failed = |cause| Error::File { file: self.directory.clone(), cause };
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory).map_err(failed)?;
        let mut roles = vec![Role::Server, Role::Admin];
        for name in &self.jobs {
            roles.push(format!("job:{name}").parse()?);
        }
        let authority = self.authority()?;
        let mut files = vec![self.write("ca.pem", &authority.pem(), 0o644)?];
        for role in roles {
            let key = KeyPair::generate()?;
            let certificate = self.certificate(&role)?.signed_by(&key, &authority)?;
            let name = file_name(&role);
            files.push(self.write(&format!("{name}.pem"), &certificate.pem(), 0o644)?);
            files.push(self.write(&format!("{name}-key.pem"), &key.serialize_pem(), 0o600)?);
        }
        Ok(files)
    }

    /// The directory of the files.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    fn authority(&self) -> Result<CertifiedIssuer<'static, KeyPair>, Error> {
        let mut params = self.params(vec![], "ZeroShard authority for development")?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        Ok(CertifiedIssuer::self_signed(params, KeyPair::generate()?)?)
    }

    /// The parameters of a certificate that is valid for all machines of the cluster, because
    /// workers also listen.
    fn certificate(&self, role: &Role) -> Result<CertificateParams, Error> {
        let hosts = LOCAL.map(str::to_owned).into_iter().chain(self.hosts.iter().cloned());
        let mut params = self.params(hosts.collect(), &format!("ZeroShard {role}"))?;
        let role = utf8_percent_encode(&role.to_string(), IN_URI).to_string();
        params.subject_alt_names.push(SanType::URI(format!("zeroshard:{role}").try_into()?));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        Ok(params)
    }

    fn params(&self, hosts: Vec<String>, name: &str) -> Result<CertificateParams, Error> {
        let mut params = CertificateParams::new(hosts)?;
        params.distinguished_name.push(DnType::CommonName, name);
        let now = SystemTime::now();
        params.not_before = (now - CLOCK_DIFFERENCE).into();
        params.not_after = (now + Duration::from_secs(86_400) * self.days).into();
        Ok(params)
    }

    /// Writes a new file.
    fn write(&self, name: &str, content: &str, mode: u32) -> Result<PathBuf, Error> {
        let file = self.directory.join(name);
        let written = OpenOptions::new().write(true).create_new(true).mode(mode).open(&file);
        let written = written.and_then(|mut file| file.write_all(content.as_bytes()));
        match written {
            Ok(()) => Ok(file),
            Err(cause) => Err(Error::File { file, cause }),
        }
    }
}

/// The file name for a role: `server`, `admin` or `job-NAME`.
fn file_name(role: &Role) -> String {
    match role {
        Role::Job { name, .. } => format!("job-{}", utf8_percent_encode(name, IN_FILE)),
        other => other.to_string(),
    }
}

/// Prints the names of the files, and instructions to use them.
///
/// # Errors
/// Those of the output.
pub fn print(directory: &Path, files: &[PathBuf]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    for file in files {
        writeln!(out, "{}", file.display())?;
    }
    let directory = fs::canonicalize(directory)?;
    let directory = directory.display();
    writeln!(out, "\nservers read them from these environment variables:")?;
    writeln!(out, "  export ZEROSHARD_TLS_CA={directory}/ca.pem")?;
    writeln!(out, "  export ZEROSHARD_TLS_CERT={directory}/server.pem")?;
    writeln!(out, "  export ZEROSHARD_TLS_KEY={directory}/server-key.pem")?;
    writeln!(
        out,
        "operators and workers use the same variables, with admin.pem or the certificate of a job"
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use zeroshard_net::transport::tls::{Tls, TlsFiles};

    use super::*;

    #[test]
    fn the_certificates_have_roles_and_their_keys_are_private() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join("certs").join(name);
        let certs = DevCerts {
            directory: directory.path().join("certs"),
            hosts: vec!["shard-0.shards".to_owned(), "10.0.0.5".to_owned()],
            jobs: vec!["demo".to_owned(), "team/größe:2".to_owned()],
            days: 30,
        };
        let files = certs.make().unwrap();
        assert_eq!(files.len(), 1 + 4 * 2);
        let names = ["server", "admin", "job-demo", "job-team%2Fgr%C3%B6%C3%9Fe%3A2"];
        let roles = ["server", "admin", "job:demo", "job:team/größe:2"];
        for (name, role) in names.into_iter().zip(roles) {
            let key = path(&format!("{name}-key.pem"));
            assert_eq!(fs::metadata(&key).unwrap().permissions().mode() & 0o777, 0o600);
            let identity = Some((path(&format!("{name}.pem")), key));
            let tls = Tls::open(TlsFiles { ca: path("ca.pem"), identity, crl: None }).unwrap();
            assert_eq!(tls.role(), Some(role.parse().unwrap()));
        }
        let again = certs.make().unwrap_err().to_string();
        assert!(again.contains("ca.pem") && again.contains("new directory"), "{again}");
    }

    #[test]
    fn a_name_that_no_certificate_can_have_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let certs = |hosts: &[&str], jobs: &[&str]| DevCerts {
            directory: directory.path().join("certs"),
            hosts: hosts.iter().map(ToString::to_string).collect(),
            jobs: jobs.iter().map(ToString::to_string).collect(),
            days: 1,
        };
        assert!(matches!(certs(&["größe"], &[]).make(), Err(Error::Certificate(_))));
        fs::remove_dir_all(directory.path().join("certs")).unwrap();
        assert!(matches!(certs(&[], &["a b"]).make(), Err(Error::Role(_))));
    }
}
