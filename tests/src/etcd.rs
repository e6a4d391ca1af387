//! A real etcd with one member, on loopback.

use std::{
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;

/// The time limit for etcd to accept connections.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// A running etcd, which is killed when dropped.
#[derive(Debug)]
pub struct Etcd {
    process: Child,
    folder: TempDir,
    client: SocketAddr,
    peer: SocketAddr,
    /// The directory with the certificates of an etcd with TLS.
    certificates: Option<PathBuf>,
}

impl Etcd {
    /// Starts an empty etcd.
    ///
    /// # Panics
    /// If etcd is not installed, or does not start.
    pub fn start() -> Self {
        Self::start_with(None)
    }

    /// Starts an empty etcd that requires certificates of its clients. `certificates`: a directory
    /// that `zeroshard-server dev-certs` has written. It also listens on the same port of
    /// 127.0.0.2, for which its certificate is not valid.
    ///
    /// # Panics
    /// Those of [`Self::start`].
    pub fn with_tls(certificates: &Path) -> Self {
        Self::start_with(Some(certificates.to_owned()))
    }

    fn start_with(certificates: Option<PathBuf>) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (client, peer) = (unused(), unused());
        let process = start(&folder, client, peer, certificates.as_deref());
        Self { process, folder, client, peer, certificates }
    }

    /// The address for clients.
    pub fn address(&self) -> SocketAddr {
        self.client
    }

    /// Kills the process at once (SIGKILL).
    pub fn kill(&mut self) {
        // This fails only if the process has already ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// Starts the process again with its data and addresses.
    ///
    /// # Panics
    /// If it does not start.
    pub fn restart(&mut self) {
        self.kill();
        self.process = start(&self.folder, self.client, self.peer, self.certificates.as_deref());
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}

/// An address on which no process listens. etcd does not report a port that the system chooses.
fn unused() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("a bound socket has an address")
}

fn start(
    folder: &TempDir,
    client: SocketAddr,
    peer: SocketAddr,
    certificates: Option<&Path>,
) -> Child {
    let scheme = if certificates.is_some() { "https" } else { "http" };
    let (client_url, peer_url) = (format!("{scheme}://{client}"), format!("http://{peer}"));
    let listen = match certificates {
        Some(_) => format!("{client_url},https://127.0.0.2:{}", client.port()),
        None => client_url.clone(),
    };
    let data = PathBuf::from(folder.path()).join("data");
    let mut command = Command::new("etcd");
    command
        .arg("--data-dir")
        .arg(data)
        .args(["--listen-client-urls", &listen, "--advertise-client-urls", &client_url])
        .args(["--listen-peer-urls", &peer_url, "--initial-advertise-peer-urls", &peer_url])
        .args(["--initial-cluster", &format!("default={peer_url}"), "--log-level", "error"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    if let Some(directory) = certificates {
        command.arg("--cert-file").arg(directory.join("server.pem"));
        command.arg("--key-file").arg(directory.join("server-key.pem"));
        command.arg("--trusted-ca-file").arg(directory.join("ca.pem")).arg("--client-cert-auth");
    }
    let mut process = command.spawn().unwrap_or_else(|error| {
        panic!(
            "cannot start etcd: {error}; install it, for example with apt-get install etcd-server"
        )
    });
    let deadline = Instant::now() + START_TIMEOUT;
    while TcpStream::connect(client).is_err() {
        let ended = process.try_wait().expect("the process is a child");
        assert!(ended.is_none() && Instant::now() < deadline, "{command:?} does not listen");
        thread::sleep(Duration::from_millis(10));
    }
    process
}
