//! The baselines "raw TCP" and "raw TLS": one stream with blocking calls, directly from and into an
//! array. They show the limits of the machine.

use std::{
    io::{Read, Result as IoResult, Write},
    net::{TcpListener, TcpStream},
    path::PathBuf,
    process::Command,
    time::Instant,
};

use clap::Args;
use rustls::{ClientConnection, ServerConnection, StreamOwned, pki_types::ServerName};
use zeroshard_net::transport::tls::{Tls, TlsFiles};
use zeroshard_tests::{Process, binary};

use super::peers::Transfer;
use crate::Error;

const PULL: u8 = 0;
const PUSH: u8 = 1;
/// The largest single read or write.
const CHUNK: usize = 1 << 20;

/// Flags of the server of a raw stream.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Directory with the files of `zeroshard-server dev-certs`
    #[arg(long)]
    certificates: Option<PathBuf>,
}

/// The TLS configuration with the server certificate in a directory.
pub(super) fn tls(directory: &std::path::Path) -> Result<Tls, Error> {
    let file = |name: &str| directory.join(name);
    let identity = Some((file("server.pem"), file("server-key.pem")));
    Ok(Tls::open(TlsFiles { ca: file("ca.pem"), identity, crl: None })?)
}

trait Stream: Read + Write + Send {}

impl<S: Read + Write + Send> Stream for S {}

/// Serves one client.
pub(crate) fn serve(options: &Options) -> Result<(), Error> {
    let tls = options.certificates.as_deref().map(tls).transpose()?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    crate::table::print_listening(&listener.local_addr()?.to_string());
    let (stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let mut stream: Box<dyn Stream> = match tls.and_then(|tls| tls.server_config()) {
        None => Box::new(stream),
        Some(config) => Box::new(StreamOwned::new(ServerConnection::new(config)?, stream)),
    };
    let mut array = Vec::new();
    let mut request = [0u8; 9];
    while stream.read_exact(&mut request).is_ok() {
        let [operation, bytes @ ..] = request;
        array.resize(u64::from_le_bytes(bytes) as usize, 1);
        if operation == PULL {
            write(&mut stream, &array)?;
        } else {
            read(&mut stream, &mut array)?;
            stream.write_all(&[1])?;
        }
    }
    Ok(())
}

fn write(stream: &mut dyn Stream, array: &[u8]) -> IoResult<()> {
    array.chunks(CHUNK).try_for_each(|chunk| stream.write_all(chunk))
}

fn read(stream: &mut dyn Stream, array: &mut [u8]) -> IoResult<()> {
    array.chunks_mut(CHUNK).try_for_each(|chunk| stream.read_exact(chunk))
}

pub(super) struct Client {
    stream: Box<dyn Stream>,
    array: Vec<u8>,
}

impl Client {
    pub(super) fn connect(address: &str, bytes: usize, tls: Option<&Tls>) -> Result<Self, Error> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        let stream: Box<dyn Stream> = match tls {
            None => Box::new(stream),
            Some(tls) => {
                let name = ServerName::try_from("localhost")?;
                let connection = ClientConnection::new(tls.client_config(), name)?;
                Box::new(StreamOwned::new(connection, stream))
            }
        };
        Ok(Self { stream, array: vec![1; bytes] })
    }

    fn request(&mut self, operation: u8) -> IoResult<()> {
        let mut request = [operation; 9];
        request[1..].copy_from_slice(&(self.array.len() as u64).to_le_bytes());
        self.stream.write_all(&request)
    }

    /// Transfers the array. Blocks the thread.
    pub(super) fn run(&mut self, transfer: Transfer) -> Result<(), Error> {
        match transfer {
            Transfer::Pull => {
                self.request(PULL)?;
                Ok(read(&mut self.stream, &mut self.array)?)
            }
            Transfer::Push => {
                self.request(PUSH)?;
                write(&mut self.stream, &self.array)?;
                Ok(self.stream.read_exact(&mut [0])?)
            }
        }
    }
}

/// Measures one stream between this process and another one, with transfers of `bytes` bytes in
/// both directions. Returns bytes per second.
///
/// # Errors
/// Those of the system.
pub(crate) fn rate(bytes: usize) -> Result<f64, Error> {
    let mut command = Command::new(binary("zs-bench"));
    command.arg("serve-raw");
    let server = Process::start(command);
    let mut client = Client::connect(server.address(), bytes, None)?;
    let both = [Transfer::Pull, Transfer::Push];
    // The first transfers access memory for the first time, and the windows of TCP grow.
    both.into_iter().try_for_each(|transfer| client.run(transfer))?;
    let began = Instant::now();
    both.into_iter().try_for_each(|transfer| client.run(transfer))?;
    Ok((both.len() * bytes) as f64 / began.elapsed().as_secs_f64())
}
