//! The configuration of a server: flags, environment variables, a TOML file and defaults, in this
//! order of precedence.
//!
//! Each struct is one section of the file and one group of flags, so that each field is declared
//! once.

pub(crate) mod file;
mod sections;
mod values;

use std::{cmp::Ordering, path::PathBuf, time::Duration};

use clap::{ArgMatches, Args, CommandFactory, FromArgMatches, Parser, parser::ValueSource};
use zeroshard_net::{
    Token,
    token::Bearer,
    trace,
    transport::{FRAME_BYTES, WINDOW_BYTES, tls::TlsFiles},
};

use file::SECTIONS;
pub use sections::{All, Coordinator, Jobs, Resources, Shard};
pub use values::{
    Address, Addresses, AdminListen, DeviceChoice, Etcd, Listen, Malformed, Size, StateTier,
};

/// The longest wait that a caller may request.
pub const MAX_WAIT: Duration = Duration::from_secs(600);

/// The heading of the flags for tokens, certificates and permissions.
const ACCESS: &str = "Access";

/// An invalid configuration.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command line is invalid; clap's own message (or the text of `--help`).
    #[error(transparent)]
    CommandLine(#[from] clap::Error),
    /// The file cannot be read, is not TOML, or has a value of the wrong type or an unknown key.
    #[error("configuration file: {0}")]
    File(String),
    /// The file has an unknown section.
    #[error(
        "configuration file {file}: unknown section [{section}]; the known sections are [{}]",
        SECTIONS.join("], [")
    )]
    UnknownSection {
        /// The file.
        file: PathBuf,
        /// The section.
        section: String,
    },
    /// A value from any source is out of range.
    #[error("--{flag} (`{key}` in [{section}] of the file) is {found}; it must be {expected}")]
    Value {
        /// The flag.
        flag: String,
        /// The key in the file.
        key: &'static str,
        /// The section of the file.
        section: &'static str,
        /// The invalid value.
        found: String,
        /// A description of the valid values.
        expected: String,
    },
}

impl Error {
    fn value(
        section: &'static str,
        key: &'static str,
        found: impl ToString,
        expected: &str,
    ) -> Self {
        let flag = key.replace('_', "-");
        Self::Value { flag, key, section, found: found.to_string(), expected: expected.to_owned() }
    }

    /// The error of a value that another crate refuses, for whatever reason.
    fn refused(section: &'static str, key: &'static str, error: zeroshard_model::Error) -> Self {
        match error {
            zeroshard_model::Error::Invalid { found, expected, .. } => {
                Self::value(section, key, found, &expected)
            }
            other => Self::value(section, key, other, "a valid value"),
        }
    }
}

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For human readers.
    Text,
    /// One JSON object per line.
    Json,
}

/// The configuration that all roles share.
#[derive(Debug, Clone, PartialEq, Args)]
#[command(next_help_heading = "All servers")]
pub struct Common {
    /// The log filter (logs go to standard error): a level, or directives such as
    /// `info,zeroshard_server=debug`
    #[arg(long, env = "ZEROSHARD_LOG", value_name = "FILTER", default_value = "info")]
    pub log: String,
    /// The log format
    #[arg(long, env = "ZEROSHARD_LOG_FORMAT", value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
    /// Largest gRPC message that the server accepts, in bytes; larger messages are refused
    #[arg(long, env = "ZEROSHARD_MAX_MESSAGE_BYTES", value_name = "BYTES", default_value_t = 64 << 20)]
    pub max_message_bytes: usize,
    /// Maximum number of open calls on one connection; further calls wait at the caller
    #[arg(
        long,
        env = "ZEROSHARD_MAX_CONCURRENT_STREAMS",
        value_name = "N",
        default_value_t = 1024
    )]
    pub max_concurrent_streams: u32,
    /// Largest HTTP/2 frame that the server accepts, in bytes; it has a large effect on throughput
    #[arg(long, env = "ZEROSHARD_FRAME_BYTES", value_name = "BYTES", default_value_t = FRAME_BYTES)]
    pub frame_bytes: u32,
    /// HTTP/2 receive window of a stream and of a connection, in bytes
    #[arg(long, env = "ZEROSHARD_WINDOW_BYTES", value_name = "BYTES", default_value_t = WINDOW_BYTES)]
    pub window_bytes: u32,
    /// A worker or server that does not answer keepalive probes for this time is lost
    #[arg(long, env = "ZEROSHARD_KEEPALIVE_SECONDS", value_name = "SECONDS", default_value_t = 10)]
    pub keepalive_seconds: u64,
    /// How long a call waits for input from others (a version, a rank, a server), unless the call
    /// has a limit of its own
    #[arg(long, env = "ZEROSHARD_WAIT_SECONDS", value_name = "SECONDS", default_value_t = 60)]
    pub wait_seconds: u64,
    /// Time limit of a shutdown after SIGTERM or SIGINT. Three quarters of it are for saving jobs
    /// or handing them over, and the rest is for open calls
    #[arg(long, env = "ZEROSHARD_DRAIN_SECONDS", value_name = "SECONDS", default_value_t = 10)]
    pub drain_seconds: u64,
    /// The token of the cluster: calls without it are refused, except health probes. All servers
    /// and clients of a cluster have the same token; without a token every call is accepted. Prefer
    /// the environment variable, since other users of the machine can see flags
    #[arg(
        long,
        env = "ZEROSHARD_TOKEN",
        hide_env_values = true,
        value_name = "TOKEN",
        default_value = "",
        hide_default_value = true,
        help_heading = ACCESS
    )]
    pub token: Token,
    /// File with the token, instead of --token, such as a secret that docker or Kubernetes mounts
    #[arg(long, env = "ZEROSHARD_TOKEN_FILE", value_name = "FILE", help_heading = ACCESS)]
    pub token_file: Option<PathBuf>,
    /// File with the tokens that calls may carry: a role and a hash per line, as `zsctl token new`
    /// prints them. A line with a role, the word `certificate` and limits has the limits of the
    /// certificates with this role. The file is read again when it changes. --token is then the
    /// token of this server itself, and its role in the file must be `server`
    #[arg(long, env = "ZEROSHARD_TOKENS", value_name = "FILE", help_heading = ACCESS)]
    pub tokens: Option<PathBuf>,
    /// File with the certificates of the cluster's certificate authorities, in PEM format. All
    /// connections are then encrypted, servers need a certificate from one of these authorities,
    /// and callers need one or a token. The role of a certificate is a URI in it:
    /// `zeroshard:server`, `zeroshard:admin`, `zeroshard:job:NAME` or `zeroshard:job:NAME:read`
    #[arg(long, env = "ZEROSHARD_TLS_CA", value_name = "FILE", help_heading = ACCESS)]
    pub tls_ca: Option<PathBuf>,
    /// File with the certificate of this server, in PEM format. It must be valid for the names and
    /// addresses at which others dial this server, and have the role `zeroshard:server`. It is read
    /// again when it changes
    #[arg(long, env = "ZEROSHARD_TLS_CERT", value_name = "FILE", help_heading = ACCESS)]
    pub tls_cert: Option<PathBuf>,
    /// File with the private key of --tls-cert, in PEM format
    #[arg(long, env = "ZEROSHARD_TLS_KEY", value_name = "FILE", help_heading = ACCESS)]
    pub tls_key: Option<PathBuf>,
    /// File with the revocation lists of the authorities in --tls-ca, one of each, in PEM format.
    /// Certificates in them are refused on new connections. It is read again when it changes. A
    /// list that was not updated in time stays valid
    #[arg(long, env = "ZEROSHARD_TLS_CRL", value_name = "FILE", help_heading = ACCESS)]
    pub tls_crl: Option<PathBuf>,
    /// URL of an OpenTelemetry collector, such as http://localhost:4317, to which the traces of
    /// steps are sent (OTLP over gRPC). Without it nothing is recorded
    #[arg(long, env = "ZEROSHARD_OTLP_ENDPOINT", value_name = "URL")]
    pub otlp_endpoint: Option<String>,
    /// Fraction of the steps whose traces are sent, from 0 to 1. Servers and workers need the same
    /// value, so that they send the same traces
    #[arg(long, env = "ZEROSHARD_TRACE_RATIO", value_name = "RATIO", default_value_t = 1.0)]
    pub trace_ratio: f64,
    /// Prefix of the URLs at which jobs may save checkpoints and read them, such as
    /// s3://bucket/team/. Without it, everyone who may create a job can have the shard servers
    /// write to any file and any bucket that the servers can write to
    #[arg(long, env = "ZEROSHARD_CHECKPOINT_URLS", value_name = "PREFIX", help_heading = ACCESS)]
    pub checkpoint_urls: Option<String>,
    /// Accept connections from other machines without a token or certificate. Everyone who can
    /// connect can then read, change and delete all jobs
    #[arg(long, env = "ZEROSHARD_INSECURE", help_heading = ACCESS)]
    pub insecure: bool,
}

impl Common {
    /// [`Self::wait_seconds`].
    pub fn wait(&self) -> Duration {
        Duration::from_secs(self.wait_seconds)
    }

    /// The interval of keepalive probes on a silent connection, and the time limit for an answer:
    /// together [`Self::keepalive_seconds`]. The limit is the larger part, so that a process may
    /// stand still for most of the time.
    pub fn keepalive(&self) -> (Duration, Duration) {
        let total = Duration::from_secs(self.keepalive_seconds);
        let interval = total * 3 / 10;
        (interval, total - interval)
    }

    /// [`Self::drain_seconds`].
    pub fn drain(&self) -> Duration {
        Duration::from_secs(self.drain_seconds)
    }

    /// If both a token and a token file are set, keeps the one whose source has the higher
    /// precedence.
    fn choose_token(&mut self, matches: &ArgMatches) {
        let precedence = |key| match matches.value_source(key) {
            Some(ValueSource::CommandLine) => 2,
            Some(ValueSource::EnvVariable) => 1,
            _ => 0,
        };
        match precedence("token").cmp(&precedence("token_file")) {
            Ordering::Greater => self.token_file = None,
            Ordering::Less => self.token = Token::default(),
            Ordering::Equal => {}
        }
    }

    /// Reads the token in [`Self::token_file`].
    fn read_token(&mut self) -> Result<(), Error> {
        let read = Token::of(&self.token, self.token_file.as_deref());
        self.token = read.map_err(|error| match error {
            zeroshard_model::Error::Invalid { what, found, expected } => {
                Error::value("common", "token_file", format!("{found} ({what})"), &expected)
            }
            other => Error::value("common", "token_file", other, "a file with the token"),
        })?;
        Ok(())
    }

    /// The TLS files; `None` without encryption.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::Invalid`] if only some of the required files are set.
    pub fn tls_files(&self) -> zeroshard_model::Result<Option<TlsFiles>> {
        let Self { tls_ca, tls_cert, tls_key, tls_crl, .. } = self;
        let [ca, cert, key, crl] = [tls_ca, tls_cert, tls_key, tls_crl].map(Option::as_deref);
        TlsFiles::of(ca, cert, key, crl)
    }

    /// The collector of traces, if there is one.
    pub fn collector(&self) -> Option<&str> {
        self.otlp_endpoint.as_deref().filter(|endpoint| !endpoint.is_empty())
    }

    /// Checks that other machines cannot connect to `listen` without a token or certificate.
    fn check_open(&self, listen: Listen) -> Result<(), Error> {
        let has_token = self.token.reveal().is_some() || self.tokens.is_some();
        if listen.0.ip().is_loopback() || self.insecure || has_token || self.tls_cert.is_some() {
            return Ok(());
        }
        let found = format!("missing, and other machines can connect to {listen}");
        let expected = "set to a secret (or set --token-file, --tokens, or --tls-ca with \
                        --tls-cert and --tls-key; --insecure accepts every call)";
        Err(Error::value("common", "token", found, expected))
    }

    /// Checks the same of the admin server, whose pages and metrics show all jobs.
    fn check_admin(&self, listen: AdminListen) -> Result<(), Error> {
        match listen {
            AdminListen::On(listen) => self.check_open(listen),
            AdminListen::Off => Ok(()),
        }
    }

    fn validate(&self) -> Result<(), Error> {
        if let Err(error) = tracing_subscriber::EnvFilter::try_new(&self.log) {
            let found = format!("{:?} ({error})", self.log);
            let expected =
                "a level (error, warn, info, debug, trace) or directives such as info,h2=warn";
            return Err(Error::value("common", "log", found, expected));
        }
        for (key, found, range) in [
            ("max_message_bytes", self.max_message_bytes as u64, 1024..=1 << 31),
            ("max_concurrent_streams", self.max_concurrent_streams.into(), 1..=u32::MAX.into()),
            // RFC 9113: SETTINGS_MAX_FRAME_SIZE, SETTINGS_INITIAL_WINDOW_SIZE.
            ("frame_bytes", self.frame_bytes.into(), 16_384..=16_777_215),
            ("window_bytes", self.window_bytes.into(), 65_535..=2_147_483_647),
            ("keepalive_seconds", self.keepalive_seconds, 1..=3600),
            ("wait_seconds", self.wait_seconds, 1..=MAX_WAIT.as_secs()),
            ("drain_seconds", self.drain_seconds, 0..=3600),
        ] {
            if !range.contains(&found) {
                let expected = format!("{} to {}", range.start(), range.end());
                return Err(Error::value("common", key, found, &expected));
            }
        }
        Bearer::new(&self.token).map_err(|error| Error::refused("common", "token", error))?;
        if !(0.0..=1.0).contains(&self.trace_ratio) {
            return Err(Error::value("common", "trace_ratio", self.trace_ratio, "0 to 1"));
        }
        if let Some(endpoint) = self.collector() {
            trace::check(endpoint, self.trace_ratio)
                .map_err(|error| Error::refused("common", "otlp_endpoint", error))?;
        }
        Ok(())
    }
}

impl Default for Common {
    fn default() -> Self {
        defaults()
    }
}

#[derive(Debug, Args)]
struct Process {
    /// TOML file with the sections [common] and [coordinator], [shard] or [all]. Its keys are the
    /// names of the flags with `_` instead of `-`. Flags and environment variables override the
    /// file
    #[arg(long, env = "ZEROSHARD_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print one JSON object per line, and nothing else, on standard output. The event "listening"
    /// reports the addresses as soon as all listeners are bound
    #[arg(long)]
    json: bool,
}

/// The flags of a server with a role.
#[derive(Debug, Args)]
pub(crate) struct Flags<R: Args> {
    #[command(flatten)]
    role: R,
    #[command(flatten)]
    process: Process,
    #[command(flatten)]
    common: Common,
}

/// The role of a process.
#[derive(Debug, Clone, PartialEq)]
pub enum Role {
    /// The coordinator.
    Coordinator(Coordinator),
    /// A shard server.
    Shard(Shard),
    /// Both.
    All(All),
}

/// The complete configuration from the command line, the environment and the file.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The role and its configuration.
    pub role: Role,
    /// The configuration that all roles share.
    pub common: Common,
    /// `true` if the process prints events as JSON on standard output.
    pub json: bool,
}

/// The configuration of a server with the role `section` from its flags, to which those of
/// [`file::flags`] belong.
///
/// # Errors
/// [`Error`] for an invalid value.
pub(crate) fn load(section: &str, matches: &ArgMatches) -> Result<Config, Error> {
    let process = Process::from_arg_matches(matches)?;
    let mut common = Common::from_arg_matches(matches)?;
    common.choose_token(matches);
    common.read_token()?;
    common.validate()?;
    let role = match section {
        "coordinator" => {
            let coordinator = Coordinator::from_arg_matches(matches)?;
            coordinator.validate()?;
            common.check_open(coordinator.listen)?;
            common.check_admin(coordinator.admin_listen)?;
            Role::Coordinator(coordinator)
        }
        "shard" => {
            let shard = Shard::from_arg_matches(matches)?;
            sections::check_advertise("shard", shard.listen, shard.advertise.as_ref())?;
            if shard.coordinator.is_none() {
                let expected = "the HOST:PORT of the coordinator, such as 127.0.0.1:7400";
                return Err(Error::value("shard", "coordinator", "missing", expected));
            }
            shard.resources.check_tiers("shard")?;
            shard.check_id()?;
            common.check_open(shard.listen)?;
            common.check_admin(shard.admin_listen)?;
            Role::Shard(shard)
        }
        _ => {
            let all = All::from_arg_matches(matches)?;
            sections::check_advertise("all", all.shard_listen, all.advertise.as_ref())?;
            all.resources.check_tiers("all")?;
            common.check_open(all.listen)?;
            common.check_open(all.shard_listen)?;
            common.check_admin(all.admin_listen)?;
            Role::All(all)
        }
    };
    Ok(Config { role, common, json: process.json })
}

/// The default configuration of a section.
fn defaults<T: Args>() -> T {
    #[derive(Parser)]
    struct Only<T: Args> {
        #[command(flatten)]
        section: T,
    }
    // The environment is ignored, so that the defaults are the same everywhere.
    let command = Only::<T>::command().mut_args(|arg| arg.env(None::<&'static str>));
    let matches = command.try_get_matches_from(["defaults"]).expect("nothing is required");
    Only::from_arg_matches(&matches).expect("the defaults are valid").section
}

#[cfg(test)]
mod tests;
