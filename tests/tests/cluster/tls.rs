//! Tests of a cluster with TLS, in which all connections are encrypted and certificates have roles.
//!
//! promise: invalid-input

use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, IsCa,
    KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SanType, SerialNumber,
};
use tempfile::TempDir;
use zeroshard_client::{Cluster as Client, Error, Options, Result};
use zeroshard_net::{
    Token,
    transport::tls::{Tls, TlsFiles},
};
use zeroshard_tests::{Cluster, Process, Training, run, synthetic};

use crate::{adamw, job, options, until};

/// The directory with the certificates of one authority.
pub(crate) struct Certificates(TempDir);

impl Certificates {
    pub(crate) fn new(flags: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_str().unwrap();
        let output = run("zeroshard-server", &[&["dev-certs", path], flags].concat());
        assert!(output.status.success(), "{output:?}");
        Self(directory)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The flags of a program with the certificate of this name.
    pub(crate) fn flags(&self, name: &str) -> Vec<String> {
        let file =
            |flag: &str, name: String| format!("--tls-{flag}={}", self.path(&name).display());
        vec![
            file("ca", "ca.pem".to_owned()),
            file("cert", format!("{name}.pem")),
            file("key", format!("{name}-key.pem")),
        ]
    }

    /// The options of a client with the certificate of this name, or without one.
    pub(crate) fn options(&self, name: Option<&str>) -> Options {
        let pair =
            |name| (self.path(&format!("{name}.pem")), self.path(&format!("{name}-key.pem")));
        let files = TlsFiles { ca: self.path("ca.pem"), identity: name.map(pair), crl: None };
        options().tls(Some(Tls::open(files).unwrap()))
    }

    fn shard(&self, coordinator: &str, name: &str) -> Process {
        Cluster::shard(coordinator, &borrowed(&self.flags(name)))
    }

    pub(crate) async fn client(&self, cluster: &Cluster, name: &str) -> Client {
        Client::connect(cluster.address(), self.options(Some(name))).await.unwrap()
    }

    pub(crate) fn start(&self, shards: usize) -> Cluster {
        let coordinator = Cluster::coordinator_with(&borrowed(&self.flags("server")));
        let shards = (0..shards).map(|_| self.shard(coordinator.address(), "server")).collect();
        Cluster { coordinator, shards }
    }
}

fn borrowed(flags: &[String]) -> Vec<&str> {
    flags.iter().map(String::as_str).collect()
}

fn insecure<T>(result: Result<T>) -> String {
    match result.map(drop) {
        Err(Error::Tls { cause, .. }) => cause,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn training_over_tls_gives_the_same_bits_as_training_without_tls() {
    let certificates = Certificates::new(&["--job", "demo"]);
    let cluster = certificates.start(3);
    let spec = job("demo", 2, adamw(), synthetic::kinds(&adamw()));
    let training =
        Training { options: certificates.options(Some("job-demo")), ..Training::new(spec.clone()) };
    let trained = training.run(cluster.address()).await.unwrap();
    let open = Cluster::start(1);
    assert_eq!(trained, Training::new(spec).run(open.address()).await.unwrap());
}

#[tokio::test]
async fn replicas_are_copied_over_tls() {
    let certificates = Certificates::new(&[]);
    let cluster = certificates.start(2);
    let spec = zeroshard_model::JobSpec {
        replicas: 2,
        min_servers: 2,
        ..job("demo", 1, adamw(), synthetic::small())
    };
    let training = Training { options: certificates.options(Some("admin")), ..Training::new(spec) };
    let trained = training.run(cluster.address()).await.unwrap();
    let Cluster { coordinator, mut shards } = cluster;
    shards.pop();
    let client = Client::connect(coordinator.address(), certificates.options(Some("admin"))).await;
    assert_eq!(client.unwrap().state_hash("demo").await.unwrap(), trained.hash);
}

#[tokio::test]
async fn a_certificate_permits_the_calls_of_its_role() {
    let certificates = Certificates::new(&["--job", "a", "--job", "b"]);
    let cluster = certificates.start(1);
    let train = async |role: &str, name: &str| {
        let options = certificates.options(Some(role));
        let spec = job(name, 1, adamw(), synthetic::small());
        let training = Training { options, ..Training::new(spec) };
        training.run(cluster.address()).await
    };
    train("job-a", "a").await.unwrap();
    train("admin", "other").await.unwrap();
    for (role, name) in [("job-b", "a"), ("server", "c")] {
        let refused = train(role, name).await;
        assert!(matches!(refused, Err(Error::Forbidden { .. })), "{refused:?}");
    }
    // Only a certificate with the role `server` can register a server.
    let stranger = certificates.shard(cluster.address(), "job-a");
    let refused = "zeroshard_requests_total{code=\"PermissionDenied\",method=\"/zeroshard.v1.CoordinatorService/Serve\"}";
    until("the stranger is refused", || cluster.coordinator.get("/metrics").contains(refused))
        .await;
    assert_eq!(stranger.get("/readyz"), "not ready\n");
}

#[tokio::test]
async fn clients_without_credentials_or_encryption_are_refused_immediately() {
    let certificates = Certificates::new(&[]);
    let cluster = certificates.start(1);
    let connect = async |options: Options| Client::connect(cluster.address(), options).await;
    assert!(connect(certificates.options(Some("admin"))).await.is_ok());
    let anonymous = connect(certificates.options(None)).await;
    assert!(matches!(anonymous, Err(Error::Unauthenticated { .. })), "{anonymous:?}");
    let plain = insecure(connect(options()).await);
    assert!(plain.contains("set ZEROSHARD_TLS_CA"), "{plain}");
    let stranger = Certificates::new(&[]);
    let untrusting = insecure(connect(stranger.options(Some("admin"))).await);
    assert!(untrusting.contains("--tls-ca to the authority of the cluster"), "{untrusting}");
    // A client that trusts the authority of the cluster, with a certificate of another authority.
    std::fs::copy(certificates.path("ca.pem"), stranger.path("ca.pem")).unwrap();
    let untrusted = insecure(connect(stranger.options(Some("admin"))).await);
    assert!(untrusted.contains("refuses our certificate"), "{untrusted}");
    // A client with TLS calls a server without TLS.
    let open = Cluster::start(0);
    let refused = Client::connect(open.address(), certificates.options(Some("admin"))).await;
    assert!(insecure(refused).contains("does not use TLS"));
}

#[tokio::test]
async fn with_tls_and_a_token_either_a_token_or_a_certificate_opens_the_cluster() {
    let certificates = Certificates::new(&[]);
    let mut flags = certificates.flags("server");
    flags.push("--token=s3cret".to_owned());
    let coordinator = Cluster::coordinator_with(&borrowed(&flags));
    let connect = async |options: Options| Client::connect(coordinator.address(), options).await;
    let token = |text: &str| certificates.options(None).token(Token::from(text.to_owned()));
    assert!(connect(token("s3cret")).await.is_ok());
    assert!(connect(certificates.options(Some("admin"))).await.is_ok());
    for refused in [connect(token("wrong")).await, connect(token("")).await] {
        assert!(matches!(refused, Err(Error::Unauthenticated { .. })), "{refused:?}");
    }
    insecure(connect(options().token(Token::from("s3cret".to_owned()))).await);
}

#[tokio::test]
async fn a_new_certificate_is_used_without_a_restart() {
    let (certificates, new) = (Certificates::new(&[]), Certificates::new(&["--days", "60"]));
    let cluster = certificates.start(1);
    let began = expiry(&cluster.coordinator);
    assert_eq!(expiry(&cluster.shards[0]), began);
    let old =
        Client::connect(cluster.address(), certificates.options(Some("admin"))).await.unwrap();
    for name in ["ca.pem", "server.pem", "server-key.pem"] {
        replace(&new.path(name), &certificates.path(name));
    }
    // The client needs the new authority too.
    loop {
        match Client::connect(cluster.address(), new.options(Some("admin"))).await {
            Ok(client) => break drop(client.status().await.unwrap()),
            Err(Error::Tls { .. }) => tokio::task::yield_now().await,
            Err(error) => panic!("{error}"),
        }
    }
    old.status().await.unwrap();
    let gained = expiry(&cluster.coordinator) - began;
    assert!((29..=31).contains(&(gained / 86_400)), "{gained} s");
}

/// The time at which a server says that its certificate expires, in seconds since 1970.
fn expiry(server: &Process) -> i64 {
    let text = server.get("/metrics");
    let name = "zeroshard_certificate_expiry_timestamp_seconds ";
    let value = text.lines().find_map(|line| line.strip_prefix(name));
    value.unwrap_or_else(|| panic!("{name} is not in {text}")).parse().unwrap()
}

/// Replaces a file in the same way as an orchestrator.
fn replace(from: &Path, to: &Path) {
    let staged = to.with_extension("new");
    std::fs::copy(from, &staged).unwrap();
    std::fs::rename(staged, to).unwrap();
}

#[tokio::test]
async fn the_certificates_of_a_role_have_the_limits_of_their_line() {
    let certificates = Certificates::new(&["--job", "limited", "--job", "free"]);
    let tokens = certificates.path("tokens");
    std::fs::write(&tokens, "job:limited certificate jobs=1 requests=50/s\n").unwrap();
    let mut flags = certificates.flags("server");
    flags.push(format!("--tokens={}", tokens.display()));
    let coordinator = Cluster::coordinator_with(&borrowed(&flags));
    let shard = Cluster::shard(coordinator.address(), &borrowed(&flags));
    let client = async |name: &str| {
        Client::connect(coordinator.address(), certificates.options(Some(name))).await.unwrap()
    };
    let spec = |name: &str| job(name, 1, adamw(), synthetic::small());
    let (limited, free) = (client("job-limited").await, client("job-free").await);
    limited.create_job(&spec("limited/a")).await.unwrap();
    match limited.create_job(&spec("limited/b")).await {
        Err(Error::LimitExceeded { what, limit: 1, .. }) => assert!(what.contains("job:limited")),
        other => panic!("{other:?}"),
    }
    for name in ["free/a", "free/b"] {
        free.create_job(&spec(name)).await.unwrap();
    }
    let calls = (0..300).map(|_| limited.status());
    let answers = futures_util::future::join_all(calls).await;
    let refused = |answer: &Result<_>| matches!(answer, Err(Error::LimitExceeded { .. }));
    assert!(answers.iter().any(refused), "the calls of the certificates are counted");
    drop(shard);
}

/// Writes the files of an authority whose key is known: `ca.pem`, the certificates and keys of
/// `server` and `admin`, and the revocation list `crl.pem`, which has the certificates of
/// `revoked`.
fn write_revocable(directory: &Path, revoked: &[&str]) {
    let write = |name: &str, text: String| std::fs::write(directory.join(name), text).unwrap();
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    write("ca.pem", authority.pem());
    let mut revoked_certs = Vec::new();
    for (role, serial) in [("server", 1u64), ("admin", 2)] {
        let (serial, key) = (SerialNumber::from(serial), KeyPair::generate().unwrap());
        let mut params = CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
        let role_name = format!("zeroshard:{role}").try_into().unwrap();
        params.subject_alt_names.push(SanType::URI(role_name));
        params.serial_number = Some(serial.clone());
        params.not_after = rcgen::date_time_ymd(2040, 1, 1);
        write(&format!("{role}.pem"), params.signed_by(&key, &authority).unwrap().pem());
        write(&format!("{role}-key.pem"), key.serialize_pem());
        if revoked.contains(&role) {
            revoked_certs.push(RevokedCertParams {
                serial_number: serial,
                revocation_time: rcgen::date_time_ymd(2020, 1, 1),
                reason_code: None,
                invalidity_date: None,
            });
        }
    }
    let list = CertificateRevocationListParams {
        this_update: rcgen::date_time_ymd(2020, 1, 1),
        next_update: rcgen::date_time_ymd(2100, 1, 1),
        crl_number: SerialNumber::from(1),
        issuing_distribution_point: None,
        revoked_certs,
        key_identifier_method: KeyIdMethod::Sha256,
    };
    write("crl.pem", list.signed_by(&authority).unwrap().pem().unwrap());
}

#[test]
fn every_program_refuses_a_certificate_in_the_revocation_list() {
    for (revoked, found) in [
        (&[][..], None),
        (&["admin"], Some("refuses our certificate, which is in its revocation list")),
        (&["server"], Some("its certificate is in the revocation list (--tls-crl)")),
    ] {
        let certificates = Certificates(tempfile::tempdir().unwrap());
        write_revocable(certificates.0.path(), revoked);
        let with_list = |name: &str| {
            let mut flags = certificates.flags(name);
            flags.push(format!("--tls-crl={}", certificates.path("crl.pem").display()));
            flags
        };
        let coordinator = Cluster::coordinator_with(&borrowed(&with_list("server")));
        assert_eq!(expiry(&coordinator), 2_208_988_800);
        let flags = with_list("admin");
        let status = ["--address", coordinator.address(), "status"];
        let status = run("zsctl", &[&status[..], &borrowed(&flags)].concat());
        let error = String::from_utf8_lossy(&status.stderr).into_owned();
        match found {
            None => assert_ne!(status.status.code(), Some(1), "{error}"),
            Some(found) => assert!(!status.status.success() && error.contains(found), "{error}"),
        }
    }
}

#[test]
fn every_program_uses_tls_and_probes_need_no_certificate() {
    let certificates = Certificates::new(&["--host", "shard-0.shards", "--job", "demo"]);
    let cluster = certificates.start(1);
    let address = cluster.address();
    let flags = certificates.flags("job-demo");
    let status =
        |flags: &[&str]| run("zsctl", &[&["--address", address, "status"], flags].concat());
    assert_ne!(status(&borrowed(&flags)).status.code(), Some(1));
    let refused = status(&[]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("ZEROSHARD_TLS_CA"));
    assert!(run("zeroshard-server", &["probe", address]).status.success());

    let half = run("zeroshard-server", &["coordinator", "--listen=127.0.0.1:0", &flags[1]]);
    assert!(String::from_utf8_lossy(&half.stderr).contains("--tls-ca"), "{half:?}");
    let other = ["coordinator", "--listen=127.0.0.1:0", &flags[0], &flags[1]];
    let wrong_key = certificates.flags("admin").swap_remove(2);
    let mixed = run("zeroshard-server", &[&other[..], &[&wrong_key]].concat());
    assert!(!mixed.status.success());
    assert!(String::from_utf8_lossy(&mixed.stderr).contains("certificate"), "{mixed:?}");
}

#[test]
fn workers_exchange_values_over_tls() {
    let certificates = Certificates::new(&["--job", "demo"]);
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().to_str().unwrap();
    let hash = |cluster: &Cluster, flags: &[&str]| {
        let rank = |rank: &'static str| {
            let size = ["--steps=2", "--batch=4", "--context=16", "--width=32", "--sample-chars=0"];
            let run_of = ["--job=demo", "--shards=1", "--data-parallel=1", "--tensor-parallel=2"];
            let own = ["--address", cluster.address(), "--rank", rank, "--json", "--out", out];
            let output =
                run("zeroshard-worker", &[&["train"], &size[..], &run_of, &own, flags].concat());
            assert!(output.status.success(), "{output:?}");
            output.stdout
        };
        let output = std::thread::scope(|scope| {
            let other = scope.spawn(|| rank("1"));
            let output = rank("0");
            other.join().unwrap();
            String::from_utf8(output).unwrap()
        });
        let done: serde_json::Value = serde_json::from_str(output.lines().last().unwrap()).unwrap();
        done["state_hash"].as_str().unwrap().to_owned()
    };
    let encrypted = hash(&certificates.start(1), &borrowed(&certificates.flags("job-demo")));
    assert_eq!(encrypted, hash(&Cluster::start(1), &[]));
}
