//! `zsctl top`: the speed of jobs and the memory of servers.

use std::{
    collections::{BTreeMap, VecDeque},
    io::{IsTerminal, stdout},
    time::{Duration, Instant},
};

use comfy_table::Table;
use serde_json::{Value, json};
use tokio::time::sleep;
use zeroshard_client::{Cluster, JobStatus, Result, ServerStatus, Status};

use crate::{
    status::{late_rank, state, version_of},
    table::{human, table},
};

/// The time between two requests.
const INTERVAL: Duration = Duration::from_secs(1);
/// The number of intervals over which rates are averaged. Servers report once a second.
const INTERVALS: usize = 5;
/// The number of intervals before the output of `--once`.
const ONCE: usize = 2;

/// Moves the cursor to the upper left corner of the terminal, and clears the screen.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// Flags of `zsctl top`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Measure for two seconds, print the tables once, and exit. This is the default if the output
    /// is not a terminal
    #[arg(long)]
    once: bool,
}

/// Prints tables until Ctrl-C, or once.
///
/// # Errors
/// Those of [`Cluster::status`].
pub(crate) async fn run(arguments: &Arguments, cluster: &Cluster, json: bool) -> Result<()> {
    let is_live = !arguments.once && stdout().is_terminal();
    let mut window = VecDeque::from([(Instant::now(), cluster.status().await?)]);
    loop {
        sleep(INTERVAL).await;
        window.push_back((Instant::now(), cluster.status().await?));
        if window.len() > INTERVALS + 1 {
            window.pop_front();
        }
        if !is_live && window.len() <= ONCE {
            continue;
        }
        let (Some((began, before)), Some((ended, now))) = (window.front(), window.back()) else {
            continue;
        };
        let followers = followers(now);
        let seconds = ended.duration_since(*began).as_secs_f64();
        let rates = Rates { before, now, seconds, followers };
        if json {
            rates.lines().iter().for_each(|line| say!("{line}"));
        } else {
            let clear = if is_live { CLEAR } else { "" };
            say!("{clear}{}\n\n{}", rates.jobs(), rates.servers());
        }
        if !is_live {
            return Ok(());
        }
    }
}

/// The readers of a job by number, and how many versions each is behind; `None` if it has none yet.
type Followers = BTreeMap<u64, Option<u64>>;

/// Returns the readers that follow each job, by its name. With replicas a reader asks the servers
/// in turn, so the one that it has asked last knows its lag best: this is the smallest one.
fn followers(status: &Status) -> BTreeMap<&str, Followers> {
    let mut all = BTreeMap::<&str, Followers>::new();
    for held in status.servers.iter().flat_map(|server| &server.jobs) {
        let followers = all.entry(&held.job).or_default();
        for (&id, &lag) in &held.readers {
            let least = followers.entry(id).or_default();
            *least = lag.into_iter().chain(*least).min();
        }
    }
    all
}

/// Two statuses, and the time between them.
struct Rates<'a> {
    before: &'a Status,
    now: &'a Status,
    seconds: f64,
    /// The readers that follow each job.
    followers: BTreeMap<&'a str, Followers>,
}

impl Rates<'_> {
    /// The rate of a counter; 0 if the counter was reset.
    fn per_second(&self, before: u64, now: u64) -> f64 {
        now.saturating_sub(before) as f64 / self.seconds.max(f64::MIN_POSITIVE)
    }

    /// The steps of a job per second; `None` if the job was replaced or restored meanwhile.
    fn steps(&self, job: &JobStatus) -> Option<f64> {
        let before = self.before.jobs.iter().find(|before| before.id == job.id)?;
        Some(self.per_second(before.version?, job.version?))
    }

    /// The bytes per second that are sent and received for a job, or for all jobs, by these
    /// servers.
    fn bytes<'a>(
        &self,
        job: Option<&str>,
        servers: impl Iterator<Item = &'a ServerStatus>,
    ) -> [f64; 2] {
        let mut rates = [0.0; 2];
        for server in servers {
            let before = self.before.servers.iter().find(|before| before.server == server.server);
            let before = before.map_or(&[][..], |before| &before.jobs);
            for held in server.jobs.iter().filter(|held| job.is_none_or(|job| held.job == job)) {
                // A job that is missing in the earlier report counts from 0.
                let before = before.iter().find(|before| before.job == held.job);
                let [sent, received] =
                    before.map_or([0; 2], |before| [before.sent_bytes, before.received_bytes]);
                rates[0] += self.per_second(sent, held.sent_bytes);
                rates[1] += self.per_second(received, held.received_bytes);
            }
        }
        rates
    }

    /// The number of readers that follow a job.
    fn followers(&self, job: &JobStatus) -> usize {
        self.followers.get(&*job.name).map_or(0, BTreeMap::len)
    }

    /// How many versions each reader of a job is behind, without readers that have none yet.
    fn lags(&self, job: &JobStatus) -> Vec<u64> {
        let followers = self.followers.get(&*job.name).into_iter().flat_map(BTreeMap::values);
        followers.copied().flatten().collect()
    }

    fn jobs(&self) -> Table {
        let mut table = table(&[
            "JOB",
            "VERSION",
            "STEPS/S",
            "SENT/S",
            "RECEIVED/S",
            "WORKERS",
            "FOLLOWERS",
            "LAG",
            "LATE RANK",
            "STATE",
        ]);
        for job in &self.now.jobs {
            let [sent, received] = self.bytes(Some(&job.name), self.now.servers.iter());
            table.add_row([
                job.name.clone(),
                version_of(job),
                self.steps(job).map_or("-".to_owned(), |steps| format!("{steps:.2}")),
                human(sent as u64),
                human(received as u64),
                format!("{}/{}", job.joined.len(), job.world),
                self.followers(job).to_string(),
                self.lags(job).iter().max().map_or("-".to_owned(), u64::to_string),
                late_rank(job),
                state(job),
            ]);
        }
        table
    }

    fn servers(&self) -> Table {
        let mut table =
            table(&["SERVER", "JOBS", "MEMORY", "FREE", "SENT/S", "RECEIVED/S", "CORDONED"]);
        for server in &self.now.servers {
            let [sent, received] = self.bytes(None, [server].into_iter());
            let left = |capacity: u64| human(capacity.saturating_sub(server.assigned_bytes));
            table.add_row([
                server.server.address.clone(),
                server.jobs.len().to_string(),
                human(memory(server)),
                server.capacity_bytes.map_or("no limit".to_owned(), left),
                human(sent as u64),
                human(received as u64),
                if server.cordoned { "yes" } else { "-" }.to_owned(),
            ]);
        }
        table
    }

    fn lines(&self) -> Vec<Value> {
        let job = |job: &JobStatus| {
            let [sent, received] = self.bytes(Some(&job.name), self.now.servers.iter());
            json!({
                "event": "job", "name": job.name, "version": job.version,
                "steps_per_second": self.steps(job), "sent_bytes_per_second": sent,
                "received_bytes_per_second": received, "joined": job.joined.len(),
                "world": job.world, "followers": self.followers(job),
                "follower_lags": self.lags(job),
                "slowest_rank": job.slowest.map(|slowest| slowest.rank), "state": state(job),
            })
        };
        let server = |server: &ServerStatus| {
            let [sent, received] = self.bytes(None, [server].into_iter());
            json!({
                "event": "server", "address": server.server.address, "memory_bytes": memory(server),
                "sent_bytes_per_second": sent, "received_bytes_per_second": received,
                "cordoned": server.cordoned,
            })
        };
        self.now.jobs.iter().map(job).chain(self.now.servers.iter().map(server)).collect()
    }
}

/// The bytes that a server holds.
fn memory(server: &ServerStatus) -> u64 {
    server.master_bytes
        + server.state_bytes
        + server.accumulator_bytes
        + server.published_bytes
        + server.parked_bytes
}
