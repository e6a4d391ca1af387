//! A window that is opened by hand, so that its holder can do anything with it.

use std::{
    io::{self, Read, Write},
    os::{
        fd::OwnedFd,
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixStream},
    },
    time::Duration,
};

use zeroshard_client::Job;
use zeroshard_model::{Error, Result};
use zeroshard_net::transport::endpoint;
use zeroshard_proto::{
    pb::{self, shard_service_client::ShardServiceClient},
    status::from_status,
};
use zeroshard_shm::{View, descriptors};

/// A window of a rank or a reader of a job.
#[derive(Debug)]
pub struct RawWindow {
    /// Its number, for requests.
    pub number: u64,
    /// The parameters of the job on the server.
    pub parameters: View,
    /// The descriptors of the parameters and of the outbox.
    pub files: [OwnedFd; 2],
    /// The size of the outbox in bytes.
    pub outbox_bytes: u64,
    /// The socket.
    pub socket: UnixStream,
}

/// Asks the shard server at `address` for a window.
///
/// # Errors
/// Those of the server.
pub async fn prepare(
    address: &str,
    request: pb::OpenWindowRequest,
) -> Result<pb::OpenWindowResponse> {
    let channel = endpoint(address)?.connect().await;
    let channel = channel.map_err(|e| Error::Internal { cause: e.to_string() })?;
    let opened = ShardServiceClient::new(channel).open_window(request).await;
    Ok(opened.map_err(|status| from_status(&status, "shard server"))?.into_inner())
}

/// The request for a window of this rank.
pub fn request(job: &Job) -> pb::OpenWindowRequest {
    pb::OpenWindowRequest {
        job: job.spec().name.clone(),
        job_id: job.id(),
        rank: job.rank(),
        lease: job.lease(),
        pin: 0,
    }
}

/// Connects to the socket of a server, and sends it these numbers.
///
/// # Errors
/// Those of the system.
pub fn connect(socket: &str, numbers: [u64; 2]) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(socket)?)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    stream.write_all(numbers.map(u64::to_le_bytes).as_flattened())?;
    Ok(stream)
}

impl RawWindow {
    /// Opens a window of this rank with the shard server at `address`.
    ///
    /// # Errors
    /// Those of the server and the system.
    pub async fn open(address: &str, job: &Job) -> Result<Self> {
        Self::open_with(address, request(job)).await
    }

    /// Opens the window of a request with the shard server at `address`.
    ///
    /// # Errors
    /// Those of the server and the system.
    pub async fn open_with(address: &str, request: pb::OpenWindowRequest) -> Result<Self> {
        let opened = prepare(address, request).await?;
        let failed = |e: io::Error| Error::Internal { cause: e.to_string() };
        let socket = connect(&opened.socket, [opened.window, opened.secret]).map_err(failed)?;
        let (_, files) = descriptors::receive(&socket, &mut [0; 8]).map_err(failed)?;
        let files = <[OwnedFd; 2]>::try_from(files).map_err(|files| Error::Internal {
            cause: format!("{} descriptors instead of two", files.len()),
        })?;
        let parameters = files[0].try_clone().map_err(failed)?;
        let parameters = View::new(parameters, opened.parameter_bytes as usize).map_err(failed)?;
        let (number, outbox_bytes) = (opened.window, opened.outbox_bytes);
        Ok(Self { number, parameters, files, outbox_bytes, socket })
    }

    /// Sends a number to the server: the end of a hold.
    ///
    /// # Errors
    /// Those of the system.
    pub fn send(&mut self, number: u64) -> io::Result<()> {
        self.socket.write_all(&number.to_le_bytes())
    }

    /// Waits for a number from the server: what it has read.
    ///
    /// # Errors
    /// Those of the system, and [`io::ErrorKind::UnexpectedEof`] if the server has closed the
    /// socket.
    pub fn receive(&mut self) -> io::Result<u64> {
        let mut number = [0; 8];
        self.socket.read_exact(&mut number)?;
        Ok(u64::from_le_bytes(number))
    }
}
