//! `zeroshard-server probe`: asks the health service of a server. It is the health check of
//! containers, whose images have no other program for this.

use std::time::Duration;

use clap::{Args, ValueEnum};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use zeroshard_model::{Error, Result};
use zeroshard_net::transport;
use zeroshard_proto::status::from_status;

use crate::{
    config::{Address, Listen},
    health::{LIVENESS, READINESS},
};

/// The address and the question of a probe.
#[derive(Debug, Clone, PartialEq, Args)]
pub struct Probe {
    /// Address of the server; by default the one at which a server with the same environment
    /// listens, or else 127.0.0.1:7400
    #[arg(value_name = "HOST:PORT")]
    address: Option<Address>,
    #[arg(long, env = "ZEROSHARD_LISTEN", hide = true)]
    listen: Option<Listen>,
    /// The question
    #[arg(long, value_name = "SERVICE", default_value = "readiness")]
    service: HealthService,
    /// Number of seconds to wait for the answer
    #[arg(long, value_name = "SECONDS", default_value_t = 3)]
    timeout: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum HealthService {
    /// Whether the server can answer calls now
    Readiness,
    /// Whether the process is alive
    Liveness,
}

impl Probe {
    /// Asks the server.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if it does not answer, or not with yes.
    pub async fn ask(&self) -> Result<()> {
        let address = match (&self.address, self.listen) {
            (Some(address), _) => address.to_string(),
            (None, Some(listen)) => Address::dialled_from_here(listen.0).to_string(),
            (None, None) => "127.0.0.1:7400".to_owned(),
        };
        let (service, state) = match self.service {
            HealthService::Readiness => (READINESS, "ready"),
            HealthService::Liveness => (LIVENESS, "alive"),
        };
        let limit = Duration::from_secs(self.timeout.max(1));
        let peer = format!("server at {address}");
        let unavailable = |cause| Err(Error::Unavailable { peer: peer.clone(), cause });
        let asked = async {
            let channel = transport::endpoint(&address)?.connect_lazy();
            let request = HealthCheckRequest { service: service.to_owned() };
            let answer = HealthClient::new(channel).check(request).await;
            let answer = answer.map_err(|status| from_status(&status, &peer))?;
            match answer.into_inner().status() {
                ServingStatus::Serving => Ok(()),
                _ => unavailable(format!("it answers that it is not {state}")),
            }
        };
        match tokio::time::timeout(limit, asked).await {
            Ok(answer) => answer,
            Err(_) => unavailable(format!("no answer within {limit:?}")),
        }
    }
}
