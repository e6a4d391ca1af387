//! Runs a coordinator that takes part in an election: while another one is the leader, it waits and
//! refuses connections.

use std::net::SocketAddr;

use serde_json::json;
use tokio::net::{TcpListener, TcpSocket};
use tokio_util::sync::CancellationToken;
use zeroshard_net::{
    Token,
    transport::{Credentials, tls::Tls},
};

use super::{
    AdminSite, Context, Error, Failure, Site, announce, coordinator, print, serve_admin,
    start_traces,
};
use crate::{
    admin::sources::Sources,
    config::{Common, Coordinator, Etcd},
    coordinator::Place,
    election::{Candidate, Leader},
    shutdown::Shutdown,
};

/// The maximum number of connections that wait to be accepted.
const BACKLOG: u32 = 1024;

/// Runs the coordinator of `config` until `shutdown`, whenever it is the leader of `election`.
///
/// # Errors
/// [`Error`] if an address cannot be bound or the transport fails.
pub(super) async fn run(
    config: Coordinator,
    election: Etcd,
    common: &Common,
    json: bool,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    let (mut socket, address) = reserve(config.listen.0)?;
    let context = Context::new(common.clone(), config.max_connections, Failure::default()).await?;
    context.metrics.coordinator.stand_by();
    let sources = Sources::default();
    let admin =
        AdminSite::bind(config.admin_listen, "coordinator", address, &context, &sources).await?;
    start_traces(common, &Place { address, is_new: false }.name())?;
    announce(json, "coordinator", address, admin.as_ref());
    let tls = config.etcd_files().map(Tls::open).transpose()?;
    let tls = tls.map(|tls| tls.with_flags("--etcd"));
    let credentials = Credentials::new(&Token::default(), tls)?;
    let duration = config.election_duration();
    let candidate = Candidate::new(election, credentials, duration, address.to_string())?;
    let serving = async {
        while let Some(leader) = candidate.campaign(&shutdown).await {
            let term = leader.leadership.term();
            tracing::info!(term, "elected: this coordinator is the leader");
            print(json, &json!({"event": "leading", "address": address, "term": term}));
            let site = Site {
                listener: listen(socket, address)?,
                address,
                has_new_address: false,
                context: context.clone(),
                sources: sources.clone(),
            };
            lead(leader, site, &config, &shutdown).await?;
            socket = reserve(address)?.0;
        }
        Ok(())
    };
    tokio::try_join!(serving, serve_admin(admin, shutdown.clone()))?;
    Ok(())
}

/// Serves at `site` until the leadership is lost, or until `shutdown`.
async fn lead(
    leader: Leader<'_>,
    site: Site,
    config: &Coordinator,
    shutdown: &CancellationToken,
) -> Result<(), Error> {
    let stop = shutdown.child_token();
    let leadership = leader.leadership.clone();
    // Another coordinator takes over the jobs, so they are not saved.
    let shutdown = Shutdown::at_once(stop.clone());
    let parts = coordinator(&site, leadership, config.jobs.limits(), &shutdown);
    let holding = async {
        if let Some(error) = leader.hold(&stop).await {
            tracing::warn!(%error, "the leadership is lost; this coordinator is a standby now");
        }
        stop.cancel();
        Ok(())
    };
    tokio::try_join!(site.run(parts, shutdown), holding)?;
    Ok(())
}

/// Binds a socket that refuses connections until it listens.
fn reserve(address: SocketAddr) -> Result<(TcpSocket, SocketAddr), Error> {
    let wrap = |cause| Error::Bind { listen: address, cause };
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
    let socket = socket.map_err(wrap)?;
    socket.set_reuseaddr(true).map_err(wrap)?;
    socket.bind(address).map_err(wrap)?;
    let address = socket.local_addr().map_err(wrap)?;
    Ok((socket, address))
}

fn listen(socket: TcpSocket, address: SocketAddr) -> Result<TcpListener, Error> {
    socket.listen(BACKLOG).map_err(|cause| Error::Bind { listen: address, cause })
}
