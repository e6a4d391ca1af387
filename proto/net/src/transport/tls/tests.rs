//! Connections between a client and a server, with certificates that the tests generate.
//!
//! promise: invalid-input

use std::{io::Write as _, time::Duration};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DnType,
    IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SanType, SerialNumber,
};
use tempfile::{NamedTempFile, TempDir};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use super::*;

type Authority = CertifiedIssuer<'static, KeyPair>;

fn authority() -> Authority {
    named_authority("authority")
}

fn named_authority(name: &str) -> Authority {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Authority::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Issues a certificate for these names and URIs, and returns it with its key.
fn issue(
    authority: &Authority,
    names: &[&str],
    uris: &[&str],
    change: impl FnOnce(&mut CertificateParams),
) -> [String; 2] {
    let names = names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
    let mut params = CertificateParams::new(names).unwrap();
    let uri = |&uri: &&str| SanType::URI(uri.try_into().unwrap());
    params.subject_alt_names.extend(uris.iter().map(uri));
    change(&mut params);
    let key = KeyPair::generate().unwrap();
    [params.signed_by(&key, authority).unwrap().pem(), key.serialize_pem()]
}

fn file(directory: &TempDir, content: &str) -> PathBuf {
    let mut file = NamedTempFile::new_in(directory).unwrap();
    file.write_all(content.as_bytes()).unwrap();
    file.into_temp_path().keep().unwrap()
}

/// The TLS configuration of a process that trusts `authority`.
fn tls(directory: &TempDir, authority: &Authority, identity: Option<[String; 2]>) -> Tls {
    Tls::open(files(directory, authority, identity)).unwrap()
}

fn files(directory: &TempDir, authority: &Authority, identity: Option<[String; 2]>) -> TlsFiles {
    let identity = identity.map(|[cert, key]| (file(directory, &cert), file(directory, &key)));
    TlsFiles { ca: file(directory, &authority.pem()), identity, crl: None }
}

/// The revocation list of an authority with the certificates of these serial numbers, whose next
/// update is in `year`.
fn list(authority: &Authority, serials: &[u64], year: i32) -> String {
    let revoked = |&serial: &u64| RevokedCertParams {
        serial_number: SerialNumber::from(serial),
        revocation_time: rcgen::date_time_ymd(2020, 1, 1),
        reason_code: None,
        invalidity_date: None,
    };
    let params = CertificateRevocationListParams {
        this_update: rcgen::date_time_ymd(2020, 1, 1),
        next_update: rcgen::date_time_ymd(year, 1, 1),
        crl_number: SerialNumber::from(1),
        issuing_distribution_point: None,
        revoked_certs: serials.iter().map(revoked).collect(),
        key_identifier_method: KeyIdMethod::Sha256,
    };
    params.signed_by(authority).unwrap().pem().unwrap()
}

/// Gives a certificate this serial number.
fn numbered(serial: u64) -> impl Fn(&mut CertificateParams) {
    move |params| params.serial_number = Some(SerialNumber::from(serial))
}

/// The security of the connection as the server sees it, or the error of the client.
async fn connect(server: Tls, client: &Tls) -> Result<Security> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let serve = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut stream = Acceptor::new(Some(server)).unwrap().accept(stream);
        stream.write_u8(1).await?;
        stream.flush().await?;
        assert_eq!(stream.read_u8().await?, 2);
        std::io::Result::Ok(stream.connect_info().get())
    });
    use tonic::transport::server::Connected as _;
    let stream = TcpStream::connect(&address).await.unwrap();
    let connected = tokio::time::timeout(Duration::from_secs(60), client.connect(stream, &address));
    let mut stream = connected.await.unwrap()?;
    assert_eq!(stream.read_u8().await.unwrap(), 1);
    stream.write_u8(2).await.unwrap();
    stream.flush().await.unwrap();
    Ok(serve.await.unwrap().unwrap())
}

fn refusal(outcome: Result<Security>) -> String {
    match outcome {
        Err(Error::Tls { peer, cause }) if peer.starts_with("server at 127.0.0.1:") => cause,
        other => panic!("{other:?}"),
    }
}

fn unchanged(_: &mut CertificateParams) {}

fn expired(params: &mut CertificateParams) {
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    params.not_after = rcgen::date_time_ymd(2020, 2, 1);
}

#[tokio::test]
async fn the_role_of_a_client_is_the_uri_of_its_certificate() {
    let (directory, ca) = (tempfile::tempdir().unwrap(), authority());
    let own = || Some(issue(&ca, &["127.0.0.1"], &["zeroshard:server"], unchanged));
    let server = tls(&directory, &ca, own());
    let role = |text: &str| Some(text.parse::<Role>().unwrap());
    for (uris, expected) in [
        (vec!["zeroshard:admin"], role("admin")),
        (vec!["https://example.org", "zeroshard:job:demo:read"], role("job:demo:read")),
        (vec!["zeroshard:job:caf%C3%A9"], role("job:café")),
        (vec![], None),
        (vec!["zeroshard:nonsense"], None),
        (vec!["zeroshard:admin", "zeroshard:server"], None),
    ] {
        let client = tls(&directory, &ca, Some(issue(&ca, &[], &uris, unchanged)));
        let found = connect(server.clone(), &client).await.unwrap();
        assert_eq!(found, Security::Encrypted { role: expected }, "{uris:?}");
    }
    let without = connect(server, &tls(&directory, &ca, None)).await.unwrap();
    assert_eq!(without, Security::Encrypted { role: None });
}

#[tokio::test]
async fn an_untrusted_server_is_refused_with_a_remedy() {
    let (directory, ca, other) = (tempfile::tempdir().unwrap(), authority(), authority());
    let client = tls(&directory, &ca, None);
    let refused = async |identity| {
        let server = tls(&directory, &ca, Some(identity));
        refusal(connect(server, &client).await)
    };
    let wrong_ca = refused(issue(&other, &["127.0.0.1"], &[], unchanged)).await;
    assert!(wrong_ca.contains("--tls-ca to the authority of the cluster"), "{wrong_ca}");
    let wrong_name = refused(issue(&ca, &["shard-0", "10.0.0.1"], &[], unchanged)).await;
    assert!(wrong_name.contains("shard-0") && wrong_name.contains("127.0.0.1"), "{wrong_name}");
    let old = refused(issue(&ca, &["127.0.0.1"], &[], expired)).await;
    assert!(old.contains("expired; issue a new one"), "{old}");
}

#[tokio::test]
async fn an_untrusted_client_is_refused_with_a_remedy() {
    let (directory, ca, other) = (tempfile::tempdir().unwrap(), authority(), authority());
    let own = || Some(issue(&ca, &["127.0.0.1"], &[], unchanged));
    let server = tls(&directory, &ca, own());
    let refused = async |identity| {
        let client = tls(&directory, &ca, Some(identity));
        refusal(connect(server.clone(), &client).await)
    };
    let wrong_ca = refused(issue(&other, &[], &["zeroshard:admin"], unchanged)).await;
    assert!(wrong_ca.contains("refuses our certificate"), "{wrong_ca}");
    let old = refused(issue(&ca, &[], &["zeroshard:admin"], expired)).await;
    assert!(old.contains("which has expired"), "{old}");
}

#[tokio::test]
async fn the_error_says_that_the_server_does_not_use_tls() {
    let (directory, ca) = (tempfile::tempdir().unwrap(), authority());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        // An empty HTTP/2 SETTINGS frame.
        stream.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap();
        std::future::pending::<()>().await;
    });
    let stream = TcpStream::connect(&address).await.unwrap();
    let refused = tls(&directory, &ca, None).connect(stream, &address).await;
    let cause = refusal(refused.map(|_| Security::Plain));
    assert!(cause.contains("does not use TLS; start it with a certificate"), "{cause}");
}

#[tokio::test]
async fn new_connections_use_changed_files() {
    let (directory, ca) = (tempfile::tempdir().unwrap(), authority());
    let [certificate, key] =
        issue(&ca, &["other"], &[], unchanged).map(|text| file(&directory, &text));
    let identity = Some((certificate.clone(), key.clone()));
    let server =
        Tls::open(TlsFiles { ca: file(&directory, &ca.pem()), identity, crl: None }).unwrap();
    let client = tls(&directory, &ca, None);
    refusal(connect(server.clone(), &client).await);
    for (file, text) in [certificate, key].iter().zip(issue(&ca, &["127.0.0.1"], &[], unchanged)) {
        fs::write(file, text).unwrap();
    }
    server.configs.reload();
    assert!(connect(server, &client).await.is_ok());
}

#[tokio::test]
async fn a_certificate_in_the_revocation_list_is_refused_with_what_to_do() {
    let (directory, ca) = (tempfile::tempdir().unwrap(), authority());
    let own = |serial| issue(&ca, &["127.0.0.1"], &["zeroshard:admin"], numbered(serial));
    let with_list = |identity, list: String| {
        let crl = Some(file(&directory, &list));
        Tls::open(TlsFiles { crl, ..files(&directory, &ca, identity) }).unwrap()
    };
    let client = |serial| tls(&directory, &ca, Some(own(serial)));
    let server = with_list(Some(own(1)), list(&ca, &[3, 4], 2100));
    assert!(connect(server.clone(), &client(2)).await.is_ok());
    assert!(connect(server.clone(), &tls(&directory, &ca, None)).await.is_ok());
    let client_is_revoked = refusal(connect(server, &client(3)).await);
    assert!(client_is_revoked.contains("revocation list; issue a new one"), "{client_is_revoked}");
    // A client with a list checks the certificate of the server.
    let reader = with_list(None, list(&ca, &[4], 2100));
    let server_is_revoked = refusal(connect(client(4), &reader).await);
    assert!(server_is_revoked.contains("(--tls-crl); issue a new one"), "{server_is_revoked}");
    assert!(connect(client(5), &reader).await.is_ok());
    // A list that was not updated in time stays valid.
    let server = with_list(Some(own(1)), list(&ca, &[3], 2021));
    assert!(connect(server.clone(), &client(2)).await.is_ok());
    refusal(connect(server, &client(3)).await);
}

#[tokio::test]
async fn a_new_revocation_list_is_used_for_new_connections_and_a_broken_one_is_not() {
    let (directory, ca) = (tempfile::tempdir().unwrap(), authority());
    let own = |serial| Some(issue(&ca, &["127.0.0.1"], &[], numbered(serial)));
    let crl = file(&directory, &list(&ca, &[], 2100));
    let files = TlsFiles { crl: Some(crl.clone()), ..files(&directory, &ca, own(1)) };
    let (server, client) = (Tls::open(files).unwrap(), tls(&directory, &ca, own(2)));
    assert!(connect(server.clone(), &client).await.is_ok());
    for text in [&list(&ca, &[2], 2100), "nothing"] {
        fs::write(&crl, text).unwrap();
        server.configs.reload();
        let refused = refusal(connect(server.clone(), &client).await);
        assert!(refused.contains("revocation list"), "{refused}");
    }
}

#[test]
fn wrong_revocation_lists_are_refused_with_the_name_of_the_file() {
    let (directory, ca) = (tempfile::tempdir().unwrap(), authority());
    let refused = |text: &str| {
        let crl = file(&directory, text);
        let name = crl.display().to_string();
        let opened = Tls::open(TlsFiles { crl: Some(crl), ..files(&directory, &ca, None) });
        match opened.map(drop) {
            Err(error @ Error::Refused { .. }) if error.to_string().contains(&name) => {
                error.to_string()
            }
            other => panic!("{other:?}"),
        }
    };
    assert!(refused("").contains("has no revocation list"));
    assert!(refused(&ca.pem()).contains("has no revocation list"));
    let twice = [list(&ca, &[], 2100), list(&ca, &[3], 2100)].concat();
    assert!(refused(&twice).contains("two revocation lists of one authority"));
    refused("-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n");
    // Every certificate of an authority without a list would be refused.
    let other = list(&named_authority("other"), &[], 2100);
    assert!(refused(&other).contains("no revocation list of an authority"));
    let both = file(&directory, &(other + &list(&ca, &[], 2100)));
    assert!(Tls::open(TlsFiles { crl: Some(both), ..files(&directory, &ca, None) }).is_ok());
}

#[test]
fn incomplete_sets_of_files_are_refused() {
    let path = Path::new("x");
    assert_eq!(TlsFiles::of(None, None, None, None), Ok(None));
    let of = |identity, crl| TlsFiles::of(Some(path), identity, identity, crl).unwrap().unwrap();
    assert!(of(None, None).identity.is_none());
    assert!(of(Some(path), None).identity.is_some());
    assert_eq!(of(None, Some(path)).crl.as_deref(), Some(path));
    for (ca, certificate, key, crl) in [
        (None, Some(path), Some(path), None),
        (Some(path), Some(path), None, None),
        (Some(path), None, Some(path), None),
        (None, None, None, Some(path)),
    ] {
        assert!(matches!(TlsFiles::of(ca, certificate, key, crl), Err(Error::Refused { .. })));
    }
}

#[test]
fn invalid_files_are_refused_by_name_without_showing_their_content() {
    let (directory, ca) = (tempfile::tempdir().unwrap(), authority());
    let [certificate, key] = issue(&ca, &["a"], &[], unchanged);
    let [_, other_key] = issue(&ca, &["b"], &[], unchanged);
    let cases = [
        ("s3cret", &*certificate, &*key, "has no certificate"),
        (&ca.pem(), "s3cret", &key, "has no certificate"),
        (&ca.pem(), &certificate, "s3cret", "has no private key"),
        (&ca.pem(), &certificate, &other_key, "it must be a valid ce"),
    ];
    for (ca, certificate, key, why) in cases {
        let [ca, certificate, key] = [ca, certificate, key].map(|text| file(&directory, text));
        let opened = Tls::open(TlsFiles { ca, identity: Some((certificate, key)), crl: None });
        let error = opened.map(drop).unwrap_err();
        assert!(matches!(error, Error::Invalid { .. } | Error::Refused { .. }), "{error:?}");
        assert!(error.to_string().contains(why), "{error}");
        assert!(!error.to_string().contains("s3cret"), "{error}");
    }
}
