//! Addresses and sizes in flags and files.

use std::{
    collections::HashSet,
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    str::FromStr,
};

use zeroshard_model::size;

/// The error for an invalid address or size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{found:?} is not {expected}")]
pub struct Malformed {
    found: String,
    expected: &'static str,
}

impl Malformed {
    /// A description of the valid values.
    pub fn expected(&self) -> &'static str {
        self.expected
    }
}

/// An address to listen on: an IP address of this machine and a port. With port 0 the system
/// chooses a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listen(pub SocketAddr);

impl Listen {
    /// A loopback address, which only this machine can reach.
    pub const fn loopback(port: u16) -> Self {
        Self(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port))
    }
}

impl FromStr for Listen {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Self, Malformed> {
        let expected =
            "an IP address and a port, such as 127.0.0.1:7400, 0.0.0.0:7400 or [::]:7400";
        text.parse().map(Self).map_err(|_| Malformed { found: text.to_owned(), expected })
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The address of the admin HTTP server, if it is enabled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdminListen {
    /// No admin server.
    Off,
    /// The admin server listens on this address.
    On(Listen),
}

impl FromStr for AdminListen {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Self, Malformed> {
        if text == "off" {
            return Ok(Self::Off);
        }
        let expected = "`off` or an IP address and a port, such as 127.0.0.1:9400 or 0.0.0.0:9400";
        text.parse().map(Self::On).map_err(|e: Malformed| Malformed { expected, ..e })
    }
}

impl fmt::Display for AdminListen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::On(listen) => listen.fmt(f),
        }
    }
}

/// The device that holds slices and computes on them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// The first GPU if there is one, and otherwise the CPU.
    Auto,
    /// Host memory and the processors.
    #[default]
    Cpu,
    /// The GPUs with these numbers.
    Cuda(Vec<usize>),
}

impl FromStr for DeviceChoice {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Self, Malformed> {
        let gpus = || -> Option<Self> {
            let numbers = text.strip_prefix("cuda:")?.split(',');
            let numbers: Vec<usize> =
                numbers.map(|number| number.parse().ok()).collect::<Option<_>>()?;
            let is_unique = numbers.iter().collect::<HashSet<_>>().len() == numbers.len();
            is_unique.then_some(Self::Cuda(numbers))
        };
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            _ => gpus().ok_or_else(|| Malformed {
                found: text.to_owned(),
                expected: "`cpu`, `auto`, or different GPUs by number, such as cuda:0 or cuda:0,1",
            }),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(numbers) => {
                let numbers: Vec<_> = numbers.iter().map(usize::to_string).collect();
                write!(f, "cuda:{}", numbers.join(","))
            }
        }
    }
}

/// The fastest tier in which the state of optimizers may be, on a server with a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum StateTier {
    /// The memory of the GPU.
    #[default]
    Device,
    /// Host memory, as in ZeRO-Offload.
    Host,
}

/// `host:port` as other processes dial it; the host is a name or an IP address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    host: String,
    port: u16,
}

impl Address {
    /// The same host with `port` in place of port 0.
    #[must_use]
    pub fn or_port(&self, port: u16) -> Self {
        let port = if self.port == 0 { port } else { self.port };
        Self { host: self.host.clone(), port }
    }

    /// The address at which this process dials its own listener on `address`: loopback for a
    /// wildcard address.
    pub(crate) fn dialled_from_here(mut address: SocketAddr) -> Self {
        if address.ip().is_unspecified() {
            match &mut address {
                SocketAddr::V4(v4) => v4.set_ip(Ipv4Addr::LOCALHOST),
                SocketAddr::V6(v6) => v6.set_ip(Ipv6Addr::LOCALHOST),
            }
        }
        address.into()
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        let host = match address.ip() {
            IpAddr::V4(ip) => ip.to_string(),
            IpAddr::V6(ip) => format!("[{ip}]"),
        };
        Self { host, port: address.port() }
    }
}

impl FromStr for Address {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Self, Malformed> {
        let malformed = || Malformed {
            found: text.to_owned(),
            expected: "HOST:PORT, such as 10.0.0.5:7400, node-1:7400 or [::1]:7400",
        };
        let (host, port) = text.rsplit_once(':').ok_or_else(malformed)?;
        let port = port.parse().map_err(|_| malformed())?;
        let bracketed = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        let good = match bracketed {
            Some(ip) => ip.parse::<Ipv6Addr>().is_ok(),
            None => {
                !host.is_empty()
                    && host.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c))
            }
        };
        if good { Ok(Self { host: host.to_owned(), port }) } else { Err(malformed()) }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// The addresses of the coordinators of a cluster, of which one is the leader.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Addresses(Vec<Address>);

impl From<Address> for Addresses {
    fn from(address: Address) -> Self {
        Self(vec![address])
    }
}

impl FromStr for Addresses {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Self, Malformed> {
        let expected = "HOST:PORT, or several that are separated by commas, such as a:7400,b:7400";
        let malformed = |_| Malformed { found: text.to_owned(), expected };
        text.split(',').map(str::parse).collect::<Result<_, _>>().map(Self).map_err(malformed)
    }
}

impl fmt::Display for Addresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.0.iter().map(Address::to_string).collect::<Vec<_>>();
        f.write_str(&all.join(","))
    }
}

/// The scheme of an election in an etcd without TLS.
const PLAIN: &str = "etcd";
/// The scheme of an election in an etcd with TLS.
const ENCRYPTED: &str = "https";

/// An election in etcd: the members of etcd, and the name of the election.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Etcd {
    is_encrypted: bool,
    members: Addresses,
    election: String,
}

impl Etcd {
    /// Returns whether the connections to the members are encrypted: the URL begins with `https`.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.is_encrypted
    }

    /// The addresses of the members.
    pub(crate) fn members(&self) -> impl Iterator<Item = String> {
        self.members.0.iter().map(Address::to_string)
    }

    /// The name of the election: a prefix of the keys of its candidates. It has no `/`, because
    /// candidates of `a` would wait for those of `a/b`.
    pub(crate) fn election(&self) -> &str {
        &self.election
    }
}

impl FromStr for Etcd {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Self, Malformed> {
        let expected = "etcd://HOST:PORT[,HOST:PORT...][/NAME], or https:// instead of etcd:// for \
                        encrypted connections, such as etcd://10.0.0.7:2379 or \
                        https://a:2379,b:2379,c:2379/my-cluster";
        let malformed = || Malformed { found: text.to_owned(), expected };
        let (is_encrypted, rest) = match text.split_once("://") {
            Some((PLAIN, rest)) => (false, rest),
            Some((ENCRYPTED, rest)) => (true, rest),
            _ => return Err(malformed()),
        };
        let (members, election) = rest.split_once('/').unwrap_or((rest, "zeroshard"));
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        if election.is_empty() || !election.chars().all(is_name) {
            return Err(malformed());
        }
        let members = members.parse().map_err(|_| malformed())?;
        Ok(Self { is_encrypted, members, election: election.to_owned() })
    }
}

impl fmt::Display for Etcd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_encrypted { ENCRYPTED } else { PLAIN };
        write!(f, "{scheme}://{}/{}", self.members, self.election)
    }
}

/// A number of bytes: 1500000, 512MiB or 8GiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Self, Malformed> {
        let malformed = || Malformed { found: text.to_owned(), expected: size::EXPECTED };
        size::parse(text).map(Self).ok_or_else(malformed)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&size::format(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_text() {
        for text in ["node-1.cluster:7400", "10.0.0.5:1", "[::1]:7400", "localhost:0"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn devices_survive_text() {
        for text in ["auto", "cpu", "cuda:0", "cuda:11", "cuda:0,1", "cuda:3,2"] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap().to_string(), text);
        }
        for text in ["", "gpu", "cuda", "cuda:", "cuda:-1", "cuda:0,", "cuda:0,0", "cuda:0 1"] {
            assert!(text.parse::<DeviceChoice>().is_err(), "{text}");
        }
    }

    #[test]
    fn an_invalid_address_is_refused() {
        for text in [
            "",
            "node",
            "node:",
            ":7400",
            "node:70000",
            "http://node:7400",
            "::1:7400",
            "[x]:1",
            "a b:1",
        ] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }

    #[test]
    fn port_zero_of_an_advertised_address_takes_the_bound_port() {
        let address: Address = "node:0".parse().unwrap();
        assert_eq!(address.or_port(7401).to_string(), "node:7401");
        assert_eq!("node:5".parse::<Address>().unwrap().or_port(7401).port(), 5);
    }

    #[test]
    fn sizes_have_units_and_survive_text() {
        for (text, bytes) in [
            ("0", 0),
            ("1500000", 1_500_000),
            ("8GiB", 8 << 30),
            ("3KiB", 3 << 10),
            ("1TiB", 1 << 40),
        ] {
            let size: Size = text.parse().unwrap();
            assert_eq!((size.0, size.to_string()), (bytes, text.to_owned()));
        }
        for text in ["", "GiB", "8GB", "8 GiB", "-1", "1.5GiB", "99999999999TiB", "8gib"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }

    #[test]
    fn the_admin_server_can_be_off() {
        assert_eq!("off".parse(), Ok(AdminListen::Off));
        assert_eq!("127.0.0.1:9400".parse(), Ok(AdminListen::On(Listen::loopback(9400))));
        assert!("localhost:9400".parse::<AdminListen>().is_err());
    }
}
