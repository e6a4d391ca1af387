//! The memory of a shard server, and its division into budgets.
//!
//! Without `--memory` a server may use what its cgroup or the machine has, less a reserve for the
//! program itself and the kernel.

use std::{
    fs,
    path::{Path, PathBuf},
};

use zeroshard_shard::tier::{Limits, Tier};

use crate::config::{Resources, StateTier};

/// The memory for pulls that hold slices which they do not send yet, at most. A step needs the same
/// amount of memory in addition.
const MAX_HELD: u64 = 256 << 20;
/// The memory for the outboxes of workers on this host, at most.
const MAX_OUTBOXES: u64 = 1 << 30;
/// The memory for versions that readers have pinned, unless the operator chooses it.
const MAX_PINNED: u64 = 1 << 30;
/// The memory for what steps have changed, unless the operator chooses it.
const MAX_HISTORY: u64 = 1 << 30;
/// The smallest reserve: the program, and the data of connections.
const MIN_RESERVE: u64 = 64 << 20;

/// The memory of a server for each purpose, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Budgets {
    /// The total budget of the server.
    pub(crate) memory: u64,
    /// The arrays of slices, on a server without `--host-memory` and without a GPU.
    pub(crate) arrays: u64,
    /// Early gradients.
    pub(crate) parked: u64,
    /// Versions that readers have pinned.
    pub(crate) pinned: u64,
    /// What steps have changed, for readers that follow a job.
    pub(crate) history: u64,
    /// Pulls that hold slices.
    pub(crate) held: u64,
    /// Second copies of slices that are being saved.
    pub(crate) snapshots: u64,
    /// Where workers on this host put what they push.
    pub(crate) outboxes: u64,
}

impl Budgets {
    /// The budgets in a configuration. `found`: the memory of a server without `--memory`; `None`
    /// if it is not known.
    pub(crate) fn new(config: &Resources, found: Option<u64>) -> Self {
        let memory = config.memory.map(|size| size.0).or(found);
        let part = |divisor: u64| memory.map_or(u64::MAX, |memory| memory / divisor);
        let parked = config.parked_bytes;
        let pinned = config.pinned_bytes.unwrap_or(part(16).min(MAX_PINNED));
        let snapshots = config.snapshot_bytes.unwrap_or(part(8));
        let history = config.history_bytes.unwrap_or(part(32).min(MAX_HISTORY));
        let held = part(16).min(MAX_HELD);
        // A step writes to new memory beside the versions that pulls hold.
        let outboxes = part(16).min(MAX_OUTBOXES);
        let others = [parked, pinned, snapshots, history, held, held, outboxes];
        let arrays = match memory {
            None => u64::MAX,
            Some(memory) => others.iter().fold(memory, |left, &other| left.saturating_sub(other)),
        };
        Self {
            memory: memory.unwrap_or(u64::MAX),
            arrays,
            parked,
            pinned,
            history,
            held,
            snapshots,
            outboxes,
        }
    }
}

/// The budgets in a configuration for the tiers of slices, if there are any. `arrays`: the host
/// memory for arrays on a server without `--host-memory`; `None` if there is no limit.
pub(crate) fn tier_limits(config: &Resources, arrays: Option<u64>) -> Option<Limits> {
    let host = config.host_memory.map(|size| size.0);
    let option = if host.is_some() { "--host-memory" } else { "--memory" };
    let (memory, host) = match config.device_memory {
        Some(memory) => (memory.0, Some(host.unwrap_or_default())),
        None => (host.or(arrays)?, None),
    };
    let disk = config.disk.clone().zip(config.disk_bytes.map(|bytes| bytes.0));
    let fastest_of_state = match config.state_tier {
        StateTier::Device => Tier::Memory,
        StateTier::Host => Tier::Host,
    };
    Some(Limits { memory, host, option, disk, fastest_of_state })
}

/// The memory that this process may use, less a reserve; `None` if the system does not tell.
pub fn available() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| total(&text));
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limit = limit_of(Path::new("/sys/fs/cgroup"), &groups);
    let all = machine.into_iter().chain(limit).min()?;
    Some(all.saturating_sub(MIN_RESERVE.max(all / 16)))
}

/// The memory of the machine in `/proc/meminfo`.
fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kilobytes.checked_mul(1024)
}

/// The smallest limit of the cgroups of a process, whose `/proc/self/cgroup` has the content
/// `groups`. A group inherits the limits of its ancestors. In a container, the root of the file
/// system `root` may be the group of the container itself.
fn limit_of(root: &Path, groups: &str) -> Option<u64> {
    let limits = groups.lines().flat_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (controllers, path) = (parts.nth(1).unwrap_or_default(), parts.next());
        let is_memory = controllers.split(',').any(|controller| controller == "memory");
        let (root, file) = match (controllers.is_empty(), is_memory) {
            (true, _) => (root.to_owned(), "memory.max"),
            (_, true) => (root.join("memory"), "memory.limit_in_bytes"),
            _ => return Vec::new(),
        };
        let group = root.join(path.unwrap_or_default().trim_start_matches('/'));
        let ancestors = group.ancestors().take_while(|group| group.starts_with(&root));
        let files: Vec<PathBuf> = ancestors.map(|group| group.join(file)).collect();
        files
    });
    // A group without a limit has the text "max", or a number beyond any memory.
    limits.filter_map(|file| fs::read_to_string(file).ok()?.trim().parse().ok()).min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Size;

    #[test]
    fn what_the_other_budgets_leave_is_for_arrays() {
        const MIB: u64 = 1 << 20;
        let config = Resources { memory: Some(Size(1600 * MIB)), ..Resources::default() };
        let budgets = Budgets::new(&config, Some(1));
        assert_eq!((budgets.pinned, budgets.held), (100 * MIB, 100 * MIB));
        assert_eq!((budgets.parked, budgets.snapshots), (64 * MIB, 200 * MIB));
        assert_eq!(budgets.history, 50 * MIB);
        assert_eq!(budgets.arrays, (1600 - 64 - 4 * 100 - 50 - 200) * MIB);
        let none = Some(0);
        let chosen = Resources { pinned_bytes: none, snapshot_bytes: none, ..config.clone() };
        assert_eq!(Budgets::new(&chosen, None).arrays, (1600 - 64 - 3 * 100 - 50) * MIB);
        let chosen = Resources { history_bytes: none, ..config };
        assert_eq!(Budgets::new(&chosen, None).arrays, (1600 - 64 - 4 * 100 - 200) * MIB);
    }

    #[test]
    fn a_server_on_an_unknown_system_has_no_limit() {
        let budgets = Budgets::new(&Resources::default(), None);
        assert_eq!((budgets.arrays, budgets.snapshots), (u64::MAX, u64::MAX));
        assert_eq!((budgets.pinned, budgets.held), (MAX_PINNED, MAX_HELD));
    }

    #[test]
    fn the_smallest_limit_of_a_cgroup_and_its_ancestors_counts() {
        let root = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let file = root.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        write("pods/one/memory.max", "max\n");
        write("pods/memory.max", "5000\n");
        write("memory/docker/memory.limit_in_bytes", "9223372036854771712\n");
        write("memory/docker/two/memory.limit_in_bytes", "700\n");
        let limit = |groups| limit_of(root.path(), groups);
        assert_eq!(limit("0::/pods/one\n"), Some(5000));
        assert_eq!(limit("7:cpu,memory:/docker/two\n3:pids:/docker\n"), Some(700));
        assert_eq!(limit("7:memory:/elsewhere\n0::/elsewhere\n"), None);
        assert_eq!(limit(""), None);
        write("memory.max", "300\n");
        assert_eq!(limit("0::/pods/one\n"), Some(300));
    }

    #[test]
    fn the_memory_of_the_machine_is_read() {
        assert_eq!(total("MemTotal:       24 kB\nMemFree:  1 kB\n"), Some(24 << 10));
        assert_eq!(total("MemFree:  1 kB\n"), None);
    }
}
