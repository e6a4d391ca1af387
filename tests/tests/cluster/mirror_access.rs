//! Who may read from a mirror: those who may read the job from the servers.
//!
//! promise: invalid-input

use std::{
    io::{Read, Write},
    net::TcpStream,
    process::Command,
};

use zeroshard_client::{Copied, Error, Follow};
use zeroshard_net::{
    Token,
    transport::{Connection, Credentials, tls::Tls},
};
use zeroshard_proto::{
    pb::{self, mirror_service_client::MirrorServiceClient},
    status::from_status,
};
use zeroshard_tests::{Process, binary, synthetic};

use crate::{
    adamw,
    follow::Reader,
    job, options,
    roles::{Guarded, new_token},
    tls::Certificates,
    until,
};

/// Starts a mirror of job `demo` with these flags, and waits until it has a version.
async fn mirror(address: &str, flags: &[&str]) -> Process {
    let mut command = Command::new(binary("zsctl"));
    command.args(["--json", "--address", address]).args(flags);
    command.args(["mirror", "demo", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]);
    let mirror = Process::start(command);
    until("the mirror has a version", || mirror.get("/readyz") == "ready\n").await;
    mirror
}

/// Asks a mirror for no slices, with a token and a TLS configuration.
async fn ask(mirror: &Process, token: &str, tls: Option<Tls>) -> Result<(), Error> {
    let credentials = Credentials::new(&Token::from(token.to_owned()), tls).unwrap();
    let connection = Connection::lazy(mirror.address(), &credentials).unwrap();
    let mut client = MirrorServiceClient::new(connection.within(options().timeout));
    let request = pb::CopyRequest { job: "demo".to_owned(), ..Default::default() };
    let answer = client.copy(request).await;
    answer.map(drop).map_err(|status| from_status(&status, "the mirror"))
}

#[tokio::test]
async fn over_tls_a_mirror_serves_the_certificates_that_may_read_the_job() {
    let certificates = Certificates::new(&["--job", "demo", "--job", "other"]);
    let cluster = certificates.start(1);
    let client = certificates.client(&cluster, "job-demo").await;
    let spec = job("demo", 1, adamw(), synthetic::small());
    client.create_job(&spec).await.unwrap();
    let trainer = client.join("demo", 0).await.unwrap();
    trainer.initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
    // The certificate of the mirror may read every job. It must not lend this to its callers.
    let flags = certificates.flags("server");
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let mirror = mirror(cluster.address(), &flags).await;

    let follow = Follow { mirror: Some(mirror.address().to_owned()), ..Follow::default() };
    let mut reader = Reader::with(&client, "demo", follow).await;
    assert_eq!(reader.next().await.copied(), Some(Copied::Joined));

    let tls = |name: Option<&str>| certificates.options(name).tls;
    for name in ["job-demo", "admin", "server"] {
        assert_eq!(ask(&mirror, "", tls(Some(name))).await, Ok(()), "{name}");
    }
    let other = ask(&mirror, "", tls(Some("job-other"))).await;
    assert!(
        matches!(&other, Err(Error::Forbidden { role, .. }) if role == "job:other"),
        "{other:?}"
    );
    for token in ["", "unknown"] {
        let refused = ask(&mirror, token, tls(None)).await;
        assert!(matches!(refused, Err(Error::Unauthenticated { .. })), "{token:?}: {refused:?}");
    }
    let plain = ask(&mirror, "", None).await;
    assert!(matches!(plain, Err(Error::Tls { .. })), "{plain:?}");
    // A reader that trusts another authority does not send its request.
    let stranger = Certificates::new(&[]);
    let untrusting = ask(&mirror, "", stranger.options(Some("admin")).tls).await;
    assert!(matches!(untrusting, Err(Error::Tls { .. })), "{untrusting:?}");
}

#[tokio::test]
async fn a_mirror_serves_the_tokens_that_may_read_the_job() {
    let roles = ["server", "admin", "job:demo", "job:demo:read", "job:other"];
    let guarded = Guarded::start_with(roles.map(|role| (role, new_token(role))));
    let _trainer = guarded.rank("job:demo", "demo").await;
    let token = guarded.token("job:demo:read");
    let mirror = mirror(guarded.address(), &["--token", token]).await;
    for role in ["server", "admin", "job:demo", "job:demo:read"] {
        assert_eq!(ask(&mirror, guarded.token(role), None).await, Ok(()), "{role}");
    }
    let other = ask(&mirror, guarded.token("job:other"), None).await;
    assert!(
        matches!(&other, Err(Error::Forbidden { role, .. }) if role == "job:other"),
        "{other:?}"
    );
    for unknown in ["", "unknown"] {
        // The second time, the mirror must not have remembered it.
        for _ in 0..2 {
            let refused = ask(&mirror, unknown, None).await;
            assert!(matches!(refused, Err(Error::Unauthenticated { .. })), "{refused:?}");
        }
    }
}

#[tokio::test]
async fn beyond_loopback_the_metrics_of_a_mirror_need_a_token_and_probes_do_not() {
    let roles = ["server", "job:demo", "job:other"];
    let guarded = Guarded::start_with(roles.map(|role| (role, new_token(role))));
    let _trainer = guarded.rank("job:demo", "demo").await;
    let mut command = Command::new(binary("zsctl"));
    command.args(["--json", "--address", guarded.address()]);
    command.args(["--token", guarded.token("job:demo"), "mirror", "demo"]);
    command.args(["--listen", "127.0.0.1:0", "--admin-listen", "0.0.0.0:0"]);
    let mirror = Process::start(command);
    let (_, port) = mirror.admin().rsplit_once(':').unwrap();
    let get = |path: &str, token: &str| {
        let mut stream = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nhost: mirror\r\nconnection: close\r\n");
        write!(stream, "{head}authorization: Bearer {token}\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    for (token, expected) in
        [("unknown", "401"), (guarded.token("job:other"), "403"), (guarded.token("server"), "200")]
    {
        let answer = get("/metrics", token);
        assert!(answer.starts_with(&format!("HTTP/1.1 {expected}")), "{answer}");
        assert_eq!(answer.contains("zeroshard_mirror_readers"), expected == "200", "{answer}");
    }
    assert!(get("/healthz", "unknown").starts_with("HTTP/1.1 200"));
}
