//! `zsctl mirror` serves the readers of a job on behalf of the servers.

use std::{net::SocketAddr, time::Duration};

use serde_json::json;
use tokio::net::TcpListener;
use zeroshard_client::{Copied, Follow, Options, Result};
use zeroshard_mirror::{Listeners, Mirror, Mirrored, listen};
use zeroshard_model::DType;

use crate::{print, table::human};

/// The longest wait for a version before the mirror asks again.
const WAIT: Duration = Duration::from_secs(600);

/// The default of `--history-bytes`.
const HISTORY: u64 = 1 << 30;

/// Flags of `zsctl mirror`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Name of the job; `zsctl status` lists the jobs
    job: String,
    /// Address at which readers connect; port 0: any free port
    #[arg(long, value_name = "IP:PORT", default_value = "0.0.0.0:7420")]
    listen: SocketAddr,
    /// Dtype of the readers' parameters: f32, bf16 or f16
    #[arg(long, value_name = "DTYPE", default_value = "f32")]
    dtype: DType,
    /// Mirror only these tensors; `zsctl tensors` lists them [default: all tensors]
    #[arg(long, value_name = "NAME[,NAME...]", value_delimiter = ',')]
    tensors: Option<Vec<String>>,
    /// Memory for the changes of the last versions, in bytes. A reader that needs older ones gets a
    /// full copy
    #[arg(long, value_name = "BYTES", default_value_t = HISTORY)]
    history_bytes: u64,
    /// Address of the admin HTTP server, which shows /metrics and answers /healthz and /readyz;
    /// port 0: any free port [default: no admin server]
    #[arg(long, value_name = "IP:PORT")]
    admin_listen: Option<SocketAddr>,
    /// Address of another mirror that sends the values instead of the servers
    #[arg(long, value_name = "HOST:PORT")]
    mirror: Option<String>,
}

/// Serves readers until Ctrl-C or an error.
///
/// # Errors
/// Those of [`Mirror::run`] and [`listen`].
pub(crate) async fn run(
    arguments: &Arguments,
    address: &str,
    options: Options,
    json: bool,
) -> Result<()> {
    let Arguments { job, dtype, tensors, history_bytes, mirror, .. } = arguments;
    let (tensors, mirror) = (tensors.clone(), mirror.clone());
    let follow = Follow { dtype: *dtype, tensors, wait: WAIT, mirror, ..Follow::default() };
    let (readers, at) = bind(arguments.listen).await?;
    let admin = match arguments.admin_listen {
        Some(address) => Some(bind(address).await?),
        None => None,
    };
    let (admin, admin_at) = admin.unzip();
    let event = json!({"event": "listening", "job": job, "address": at, "admin": admin_at});
    print(json, &event, &format!("mirror of job {job:?}, which listens at {at}"));
    let mirror = Mirror {
        job: job.clone(),
        follow,
        history_bytes: *history_bytes,
        address: address.to_owned(),
        options,
    };
    let received = |Mirrored { version, bytes, copied }| {
        let reason = copied.map(Copied::name);
        let event = json!({
            "event": "mirrored", "job": job, "version": version.version, "line": version.line,
            "bytes": bytes, "copied": reason,
        });
        let full = reason.map_or(String::new(), |reason| format!(", a full copy ({reason})"));
        print(json, &event, &format!("version {version}: {}{full}", human(bytes)));
    };
    mirror.run(Listeners { readers, admin }, received).await
}

/// Returns a listener and its address.
async fn bind(address: SocketAddr) -> Result<(TcpListener, SocketAddr)> {
    let listener = listen(address).await?;
    let at = listener.local_addr().unwrap_or(address);
    Ok((listener, at))
}
