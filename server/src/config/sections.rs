//! The sections of the configuration for each role.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use zeroshard_coordinator::cluster::context::JobLimits;
use zeroshard_model::{
    limits::{MAX_CONNECTIONS, MAX_JOBS, MAX_SERVER_NAME},
    name::check_name,
};
use zeroshard_net::transport::tls::TlsFiles;

use super::{
    Address, Addresses, AdminListen, DeviceChoice, Error, Etcd, Listen, Size, StateTier, defaults,
};

/// The configuration of the coordinator.
#[derive(Debug, Clone, PartialEq, Args)]
pub struct Coordinator {
    /// Address on which the coordinator serves workers and shard servers. With 0.0.0.0:7400 other
    /// machines can connect; then also set --token or the TLS flags
    #[arg(long, env = "ZEROSHARD_LISTEN", value_name = "IP:PORT", default_value_t = Listen::loopback(7400))]
    pub listen: Listen,
    /// Address of /metrics, /healthz, /readyz and the status page; `off` disables them. With an
    /// address other than loopback, /metrics and the status page require the token
    #[arg(
        long,
        env = "ZEROSHARD_ADMIN_LISTEN",
        value_name = "IP:PORT",
        default_value = "127.0.0.1:9400"
    )]
    pub admin_listen: AdminListen,
    /// The election in etcd, which makes one of several coordinators the leader; the others wait
    /// until the leader is lost. Shard servers and clients get the addresses of all coordinators,
    /// separated by commas. Only coordinators with the same members and NAME (zeroshard by default)
    /// form a cluster
    #[arg(long, env = "ZEROSHARD_ELECTION", value_name = "etcd://HOST:PORT[,HOST:PORT...][/NAME]")]
    pub election: Option<Etcd>,
    /// File with the certificates of the authorities of etcd, in PEM format. The connections to
    /// etcd are encrypted with an --election that begins with https:// instead of etcd://. The
    /// certificate of a member must be for the HOST of --election
    #[arg(long, env = "ZEROSHARD_ETCD_CA", value_name = "FILE")]
    pub etcd_ca: Option<PathBuf>,
    /// File with the certificate of this coordinator for etcd, in PEM format, if etcd requires one
    #[arg(long, env = "ZEROSHARD_ETCD_CERT", value_name = "FILE")]
    pub etcd_cert: Option<PathBuf>,
    /// File with the private key of --etcd-cert, in PEM format
    #[arg(long, env = "ZEROSHARD_ETCD_KEY", value_name = "FILE")]
    pub etcd_key: Option<PathBuf>,
    /// Time after which another coordinator takes over from a leader that died or does not reach
    /// etcd. A leader that is stopped with SIGTERM is replaced at once
    #[arg(long, env = "ZEROSHARD_ELECTION_SECONDS", value_name = "SECONDS", default_value_t = 10)]
    pub election_seconds: u64,
    /// The limits of jobs.
    #[command(flatten)]
    pub jobs: Jobs,
    /// Maximum number of connections to the server; calls on further connections are refused
    #[arg(long, env = "ZEROSHARD_MAX_CONNECTIONS", value_name = "N", default_value_t = MAX_CONNECTIONS)]
    pub max_connections: usize,
}

impl Default for Coordinator {
    fn default() -> Self {
        defaults()
    }
}

impl Coordinator {
    /// [`Self::election_seconds`].
    pub fn election_duration(&self) -> Duration {
        Duration::from_secs(self.election_seconds)
    }

    pub(super) fn validate(&self) -> Result<(), Error> {
        // etcd chooses a longer lease than one that is shorter than its own election.
        if !(3..=600).contains(&self.election_seconds) {
            let (key, found) = ("election_seconds", self.election_seconds);
            return Err(Error::value("coordinator", key, found, "3 to 600"));
        }
        self.check_etcd()
    }

    /// Checks that the TLS files for etcd are set if and only if --election begins with https://.
    fn check_etcd(&self) -> Result<(), Error> {
        let wrong = |key, found: String, expected: &str| {
            Err(Error::value("coordinator", key, found, expected))
        };
        let missing = || "missing".to_owned();
        let has_tls = self.election.as_ref().is_some_and(Etcd::is_encrypted);
        match (has_tls, &self.etcd_ca, &self.etcd_cert, &self.etcd_key) {
            (false, None, None, None) | (true, Some(_), None, None) => Ok(()),
            (true, Some(_), Some(_), Some(_)) => Ok(()),
            (false, ..) => {
                let found = self.election.as_ref().map_or_else(missing, Etcd::to_string);
                let expected = "https://HOST:PORT[,HOST:PORT...][/NAME], because of --etcd-ca, \
                                --etcd-cert or --etcd-key";
                wrong("election", found, expected)
            }
            (true, None, ..) => {
                let expected = "a file with the certificates of the authorities of etcd, because \
                                --election begins with https://";
                wrong("etcd_ca", missing(), expected)
            }
            (.., None, _) => wrong("etcd_cert", missing(), "a file, because of --etcd-key"),
            (.., None) => wrong("etcd_key", missing(), "a file, because of --etcd-cert"),
        }
    }

    /// The files of TLS for etcd; `None` without encryption.
    pub(crate) fn etcd_files(&self) -> Option<TlsFiles> {
        let identity = self.etcd_cert.clone().zip(self.etcd_key.clone());
        Some(TlsFiles { ca: self.etcd_ca.clone()?, identity, crl: None })
    }
}

/// The configuration of a shard server.
#[derive(Debug, Clone, PartialEq, Args)]
pub struct Shard {
    /// Address on which the server serves workers. With 0.0.0.0:7401 (and --advertise) other
    /// machines can connect; then also set --token or the TLS flags
    #[arg(long, env = "ZEROSHARD_LISTEN", value_name = "IP:PORT", default_value_t = Listen::loopback(7401))]
    pub listen: Listen,
    /// Address of /metrics, /healthz, /readyz and the status page; `off` disables them. With an
    /// address other than loopback, /metrics and the status page require the token
    #[arg(
        long,
        env = "ZEROSHARD_ADMIN_LISTEN",
        value_name = "IP:PORT",
        default_value = "127.0.0.1:9401"
    )]
    pub admin_listen: AdminListen,
    /// Address of the coordinator, which may start later. Several coordinators, of which one is the
    /// leader, are separated by commas
    #[arg(long, env = "ZEROSHARD_COORDINATOR", value_name = "HOST:PORT[,HOST:PORT...]")]
    pub coordinator: Option<Addresses>,
    /// Address that other processes dial to reach this server; by default the address on which it
    /// listens. Port 0 stands for the port on which it listens
    #[arg(long, env = "ZEROSHARD_ADVERTISE", value_name = "HOST:PORT")]
    pub advertise: Option<Address>,
    /// Name of this server, unique in the cluster and unchanged after a restart; by default the
    /// address that it advertises
    #[arg(long, env = "ZEROSHARD_ID", value_name = "NAME")]
    pub id: Option<String>,
    /// What fails together with this server, such as a rack or an availability zone. The replicas
    /// of a job are in different zones, where there are enough, so each zone needs about the same
    /// memory
    #[arg(long, env = "ZEROSHARD_ZONE", value_name = "NAME")]
    pub zone: Option<String>,
    /// The memory and devices for slices.
    #[command(flatten)]
    pub resources: Resources,
    /// Maximum number of connections to the server; calls on further connections are refused
    #[arg(long, env = "ZEROSHARD_MAX_CONNECTIONS", value_name = "N", default_value_t = MAX_CONNECTIONS)]
    pub max_connections: usize,
}

impl Default for Shard {
    fn default() -> Self {
        defaults()
    }
}

/// The configuration of a process with a coordinator and one shard server.
#[derive(Debug, Clone, PartialEq, Args)]
pub struct All {
    /// Address on which the coordinator serves workers and further shard servers. With an address
    /// other than loopback, also set --token or the TLS flags
    #[arg(long, env = "ZEROSHARD_LISTEN", value_name = "IP:PORT", default_value_t = Listen::loopback(7400))]
    pub listen: Listen,
    /// Address on which the shard server serves workers
    #[arg(long, env = "ZEROSHARD_SHARD_LISTEN", value_name = "IP:PORT", default_value_t = Listen::loopback(7401))]
    pub shard_listen: Listen,
    /// Address of /metrics, /healthz, /readyz and the status page; `off` disables them. With an
    /// address other than loopback, /metrics and the status page require the token
    #[arg(
        long,
        env = "ZEROSHARD_ADMIN_LISTEN",
        value_name = "IP:PORT",
        default_value = "127.0.0.1:9400"
    )]
    pub admin_listen: AdminListen,
    /// Address that other processes dial to reach the shard server; by default the address on which
    /// it listens. Port 0 stands for the port on which it listens
    #[arg(long, env = "ZEROSHARD_ADVERTISE", value_name = "HOST:PORT")]
    pub advertise: Option<Address>,
    /// The memory and devices for slices.
    #[command(flatten)]
    pub resources: Resources,
    /// The limits of jobs.
    #[command(flatten)]
    pub jobs: Jobs,
    /// Maximum number of connections to the server; calls on further connections are refused
    #[arg(long, env = "ZEROSHARD_MAX_CONNECTIONS", value_name = "N", default_value_t = MAX_CONNECTIONS)]
    pub max_connections: usize,
}

impl All {
    /// The configuration of the shard server; its coordinator is the one in this process.
    pub fn shard(&self) -> Shard {
        Shard {
            listen: self.shard_listen,
            admin_listen: AdminListen::Off,
            coordinator: None,
            advertise: self.advertise.clone(),
            id: None,
            zone: None,
            resources: self.resources.clone(),
            max_connections: self.max_connections,
        }
    }
}

/// The memory and devices of a shard server for slices.
#[derive(Debug, Clone, PartialEq, Args)]
#[command(next_help_heading = "Memory and devices")]
pub struct Resources {
    /// Memory that the server may use, such as 48GiB; by default what its cgroup or the machine
    /// has, less a sixteenth. What the budgets for readers, saves and early gradients leave of it
    /// is for slices, and a job that does not fit is refused when it is created. On a machine with
    /// several servers, give each its part
    #[arg(long, env = "ZEROSHARD_MEMORY", value_name = "SIZE")]
    pub memory: Option<Size>,
    /// Maximum number of bytes of early gradients, which wait for the gradients of earlier ranks
    #[arg(long, env = "ZEROSHARD_PARKED_BYTES", value_name = "BYTES", default_value_t = 64 << 20)]
    pub parked_bytes: u64,
    /// Maximum number of bytes of versions that readers have pinned, and of captured steps; further
    /// ones are refused. By default a sixteenth of --memory, and at most 1 GiB
    #[arg(long, env = "ZEROSHARD_PINNED_BYTES", value_name = "BYTES")]
    pub pinned_bytes: Option<u64>,
    /// Maximum number of bytes of what steps have changed, for readers that follow jobs; beyond it
    /// readers that are behind fetch the parameters in full. By default a thirty-second of
    /// --memory, and at most 1 GiB. Used only while somebody follows a job
    #[arg(long, env = "ZEROSHARD_HISTORY_BYTES", value_name = "BYTES")]
    pub history_bytes: Option<u64>,
    /// Maximum number of bytes of second copies of slices, which the steps of all jobs need during
    /// saves. Where they are exhausted, the step waits or the save is given up, as the policy of
    /// the job says; by default an eighth of --memory
    #[arg(long, env = "ZEROSHARD_SNAPSHOT_BYTES", value_name = "BYTES")]
    pub snapshot_bytes: Option<u64>,
    /// Device that holds slices and computes on them: `cpu`, a GPU such as `cuda:0`, several GPUs
    /// such as `cuda:0,1`, over which slices are balanced by bytes, or `auto` for the first GPU if
    /// there is one. GPUs have been tested on an H100 and with a simulated driver
    #[arg(long, env = "ZEROSHARD_DEVICE", value_name = "DEVICE", default_value_t = DeviceChoice::Cpu)]
    pub device: DeviceChoice,
    /// With GPUs: maximum memory of each GPU for the master weights, optimizer state and gradients
    /// of slices, such as 64GiB; by default there is no limit. What does not fit is in
    /// --host-memory or in --disk. Buffers of about 300 MiB come in addition
    #[arg(long, env = "ZEROSHARD_DEVICE_MEMORY", value_name = "SIZE")]
    pub device_memory: Option<Size>,
    /// With a GPU: fastest tier for the optimizer state, `device` or `host`. With `host` only the
    /// master weights and gradients are in the memory of the GPU, as in ZeRO-Offload. LAMB and
    /// Adafactor always have their state in the memory of the GPU
    #[arg(long, env = "ZEROSHARD_STATE_TIER", value_name = "TIER", default_value = "device")]
    pub state_tier: StateTier,
    /// Maximum host memory for the master weights, optimizer state and gradients of slices, such
    /// as 48GiB; by default what the other budgets leave of --memory, and with a GPU nothing is
    /// there. Buffers, early gradients and versions that readers hold come in addition
    #[arg(long, env = "ZEROSHARD_HOST_MEMORY", value_name = "SIZE")]
    pub host_memory: Option<Size>,
    /// Directory, on a fast disk, for slices that do not fit in --host-memory, or with a GPU in
    /// --device-memory and --host-memory. The file in it has no name, and is gone when the server
    /// ends
    #[arg(long, env = "ZEROSHARD_DISK", value_name = "DIR")]
    pub disk: Option<PathBuf>,
    /// Maximum size of the slices in --disk, such as 400GiB
    #[arg(long, env = "ZEROSHARD_DISK_BYTES", value_name = "SIZE")]
    pub disk_bytes: Option<Size>,
}

impl Default for Resources {
    fn default() -> Self {
        defaults()
    }
}

/// The limits of jobs.
#[derive(Debug, Clone, PartialEq, Args)]
pub struct Jobs {
    /// Seconds after which a job without workers is deleted, and saved before if it has a policy
    /// for checkpoints; 0: never. Jobs with an idle timeout of their own have that one
    #[arg(long, env = "ZEROSHARD_JOB_TIMEOUT", value_name = "SECONDS", default_value_t = 3600)]
    pub job_timeout: u64,
    /// Maximum number of jobs of the cluster; the creation of further jobs is refused
    #[arg(long, env = "ZEROSHARD_MAX_JOBS", value_name = "N", default_value_t = MAX_JOBS)]
    pub max_jobs: usize,
}

impl Jobs {
    /// Returns the limits for the coordinator.
    pub fn limits(&self) -> JobLimits {
        let timeout = (self.job_timeout > 0).then(|| Duration::from_secs(self.job_timeout));
        JobLimits { timeout, number: self.max_jobs }
    }
}

impl Shard {
    /// Checks the name of the server. Tables and messages show it.
    pub(super) fn check_id(&self) -> Result<(), Error> {
        let Some(id) = &self.id else { return Ok(()) };
        check_name("id", id, MAX_SERVER_NAME).map_err(|error| Error::refused("shard", "id", error))
    }
}

impl Resources {
    /// Checks that the flags for tiers are complete, and that they match the device.
    pub(super) fn check_tiers(&self, section: &'static str) -> Result<(), Error> {
        let missing = |key, expected| Err(Error::value(section, key, "missing", expected));
        let refused = |key, found: &dyn ToString, expected| {
            Err(Error::value(section, key, found.to_string(), expected))
        };
        match (&self.disk, self.disk_bytes) {
            (Some(_), None) => {
                return missing("disk_bytes", "a size such as 400GiB, because of --disk");
            }
            (None, Some(_)) => return missing("disk", "a directory, because of --disk-bytes"),
            _ => {}
        }
        let on_host = self.host_memory.is_some() || self.disk.is_some();
        match (&self.device, self.device_memory, self.host_memory) {
            (DeviceChoice::Auto, device_memory, _) if on_host || device_memory.is_some() => {
                refused(
                    "device",
                    &self.device,
                    "cpu or a GPU such as cuda:0, because the budgets of tiers depend on the device",
                )
            }
            (DeviceChoice::Cpu, Some(size), _) => {
                refused("device_memory", &size, "no value with --device cpu: use --host-memory")
            }
            (DeviceChoice::Cpu, None, None) if self.disk.is_some() && self.memory.is_none() => {
                missing("host_memory", "a size such as 48GiB, or --memory, because of --disk")
            }
            (DeviceChoice::Cuda(_), None, _) if on_host => {
                missing("device_memory", "a size such as 64GiB, because of --host-memory or --disk")
            }
            (device, device_memory, _) if self.state_tier == StateTier::Host => {
                match (device, device_memory) {
                    (DeviceChoice::Cuda(_), Some(_)) if on_host => Ok(()),
                    _ => refused(
                        "state_tier",
                        &"host",
                        "device, or a GPU with --device-memory, and --host-memory or --disk",
                    ),
                }
            }
            _ => Ok(()),
        }
    }
}

/// Checks that a listener on a wildcard address has an advertised address.
pub(super) fn check_advertise(
    section: &'static str,
    listen: Listen,
    advertise: Option<&Address>,
) -> Result<(), Error> {
    if listen.0.ip().is_unspecified() && advertise.is_none() {
        let found = format!("missing, and the server listens on the wildcard address {listen}");
        let expected =
            "the HOST:PORT at which workers reach this server (port 0: the port it listens on)";
        return Err(Error::value(section, "advertise", found, expected));
    }
    Ok(())
}
