//! Connections between a client and a server, with certificates that the tests generate.

use std::{io::Write as _, time::Duration};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, SanType};
use tempfile::{NamedTempFile, TempDir};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use super::*;

type Authority = CertifiedIssuer<'static, KeyPair>;

fn authority() -> Authority {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
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
    let identity = identity.map(|[cert, key]| (file(directory, &cert), file(directory, &key)));
    Tls::open(TlsFiles { ca: file(directory, &authority.pem()), identity }).unwrap()
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
    assert!(cause.contains("does not use TLS; start it with --tls-cert"), "{cause}");
}

#[tokio::test]
async fn new_connections_use_changed_files() {
    let (directory, ca) = (tempfile::tempdir().unwrap(), authority());
    let [certificate, key] =
        issue(&ca, &["other"], &[], unchanged).map(|text| file(&directory, &text));
    let identity = Some((certificate.clone(), key.clone()));
    let server = Tls::open(TlsFiles { ca: file(&directory, &ca.pem()), identity }).unwrap();
    let client = tls(&directory, &ca, None);
    refusal(connect(server.clone(), &client).await);
    for (file, text) in [certificate, key].iter().zip(issue(&ca, &["127.0.0.1"], &[], unchanged)) {
        fs::write(file, text).unwrap();
    }
    server.0.reload();
    assert!(connect(server, &client).await.is_ok());
}

#[test]
fn incomplete_sets_of_files_are_refused() {
    let path = Path::new("x");
    assert_eq!(TlsFiles::of(None, None, None), Ok(None));
    assert!(TlsFiles::of(Some(path), None, None).unwrap().unwrap().identity.is_none());
    assert!(TlsFiles::of(Some(path), Some(path), Some(path)).unwrap().unwrap().identity.is_some());
    for (ca, certificate, key) in [
        (None, Some(path), Some(path)),
        (Some(path), Some(path), None),
        (Some(path), None, Some(path)),
    ] {
        assert!(matches!(TlsFiles::of(ca, certificate, key), Err(Error::Invalid { .. })));
    }
}

#[test]
fn invalid_files_are_refused_by_name_without_showing_their_content() {
    let (directory, ca) = (tempfile::tempdir().unwrap(), authority());
    let [certificate, key] = issue(&ca, &["a"], &[], unchanged);
    let [_, other_key] = issue(&ca, &["b"], &[], unchanged);
    let cases = [
        ("s3cret", &*certificate, &*key),
        (&ca.pem(), "s3cret", &key),
        (&ca.pem(), &certificate, "s3cret"),
        (&ca.pem(), &certificate, &other_key),
    ];
    for (ca, certificate, key) in cases {
        let [ca, certificate, key] = [ca, certificate, key].map(|text| file(&directory, text));
        let opened = Tls::open(TlsFiles { ca, identity: Some((certificate, key)) });
        let error = opened.map(drop).unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }), "{error:?}");
        assert!(!error.to_string().contains("s3cret"), "{error}");
    }
}
