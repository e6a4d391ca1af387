//! Connecting to a cluster: the first call to its coordinator, its time limit, the message
//! about a wait, and its error.

use std::{
    io::{Write as _, stderr},
    sync::Arc,
    time::Duration,
};

use tokio::time::sleep;
use zeroshard_model::{
    Error, Result,
    version::{self, VERSION},
};
use zeroshard_net::{
    Deadline,
    transport::{Addresses, CONNECT_TIMEOUT, Credentials},
};
use zeroshard_proto::status::from_status;

use crate::{Cluster, Options, Transport, retry::Tries, shards::Shards, status::status_request};

/// A wait that lasts longer than this is reported on standard error.
const SILENT: Duration = Duration::from_secs(1);

impl Cluster {
    /// Connects to the coordinator at `address`, `host:port`; with several coordinators, of which
    /// one is the leader, their addresses are separated by commas. Waits for an answer for
    /// [`Options::connect_timeout`], at most for [`Options::timeout`], and prints one line on
    /// standard error if there is none after a second.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an invalid address or token, [`Error::Unauthenticated`] for a wrong
    /// token, [`Error::Tls`] if one side does not trust the certificate of the other,
    /// [`Error::VersionMismatch`] if the minor version of the coordinator is another one,
    /// [`Error::Unavailable`] if no coordinator answers at this address.
    pub async fn connect(address: &str, mut options: Options) -> Result<Self> {
        options.transport = Some(options.transport.map_or_else(Transport::of_environment, Ok)?);
        let peer = format!("coordinator {address}");
        let limit = options.connect_timeout.min(options.timeout);
        // At least two tries, so that the cause is known if the host does not respond at all.
        let addresses = Addresses::parse(address)?;
        let addresses = addresses.connect_timeout(CONNECT_TIMEOUT.min(limit / 2));
        let credentials = Credentials::new(&options.token, options.tls.clone())?;
        let connection = addresses.connect_lazy(&credentials);
        let shards = Arc::new(Shards::new(credentials));
        let cluster = Self { connection, peer, options, shards };
        first_answer(&cluster, limit).await?;
        Ok(cluster)
    }
}

/// Waits until the coordinator answers, at most for `limit`. If this takes a second or more, a
/// message on standard error names the address, once.
///
/// # Errors
/// [`Error::Unavailable`] with the last cause, if there is no answer, or one of another program;
/// [`Error::Unauthenticated`], [`Error::Tls`] and [`Error::VersionMismatch`].
async fn first_answer(cluster: &Cluster, limit: Duration) -> Result<()> {
    let mut tries = Tries::until(Deadline::after(limit));
    let answered = {
        let mut answer = std::pin::pin!(answer(cluster, &mut tries));
        tokio::select! {
            answered = &mut answer => answered,
            () = sleep(SILENT) => {
                let peer = &cluster.peer;
                // Standard error may be closed.
                let _ = writeln!(stderr(), "zeroshard: waiting up to {limit:?} for {peer} to answer");
                answer.await
            }
        }
    };
    let cause = match answered {
        Err(Error::Timeout { .. }) => match tries.last() {
            Some(Error::Unavailable { cause, .. }) => {
                format!("no answer within {limit:?}, the last error was {cause:?}")
            }
            // The limit for opening a connection is shorter.
            _ => format!("a connection was opened, but there was no answer within {limit:?}"),
        },
        Err(Error::Internal { cause }) => format!("another program may use the port: {cause}"),
        answered => return answered,
    };
    let remedy = "check that it is the address of a coordinator, and that the coordinator runs \
                  (`zeroshard-server coordinator`)";
    Err(Error::Unavailable { peer: cluster.peer.clone(), cause: format!("{cause}; {remedy}") })
}

async fn answer(cluster: &Cluster, tries: &mut Tries) -> Result<()> {
    loop {
        let mut client = Cluster::client(cluster.connection.within(tries.timeout()));
        let status = client.status(status_request());
        match tries.limit(String::new, status).await? {
            Ok(status) => {
                // A coordinator that does not state its version accepts every client.
                return version::check("this client", VERSION, &status.get_ref().version);
            }
            Err(status) => match from_status(&status, &cluster.peer) {
                // A retry would use the same certificates and fail again.
                error @ Error::Tls { .. } => return Err(error),
                error => tries.next(error).await?,
            },
        };
    }
}
