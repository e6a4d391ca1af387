//! The whole state, and the one way to change it: an event and the time in, actions out.

use std::{collections::BTreeMap, time::Duration};

use zeroshard_proto::{Error, JobSpec, Result, Server, pb};

use super::state::{Action, Event, Job, Now, Open, Peer, Phase, ServerId, Waiter};

/// All that the coordinator knows. It starts empty.
#[derive(Debug, Default)]
pub(crate) struct Cluster {
    pub(super) servers: BTreeMap<ServerId, Peer>,
    pub(super) jobs: BTreeMap<String, Job>,
    /// The last one given; epochs of all jobs come from it.
    epoch: u64,
}

impl Cluster {
    /// What `event` leads to.
    pub(crate) fn handle(&mut self, event: Event, now: Now) -> Vec<Action> {
        let mut out = Vec::new();
        match event {
            Event::ServerJoined { server, address } => self.server_joined(server, address, &mut out),
            Event::ServerLost { server } => self.server_lost(server, "its control stream ended", &mut out),
            Event::Opened { server, job, epoch } => self.opened(server, &job, epoch, &mut out),
            Event::Initialised { server, job, epoch } => self.initialised(server, &job, epoch, now, &mut out),
            Event::Ready { server, report } => self.ready(server, report, now, &mut out),
            Event::Failed { server, job, epoch, reason } => {
                self.failed_on(server, &job, epoch, &reason, &mut out);
            }
            Event::Stats { server, stats } => {
                if let Some(peer) = self.servers.get_mut(&server) {
                    peer.stats = Some(stats);
                }
            }
            Event::Create { caller, spec, wait } => {
                self.create(Waiter::new(caller, now, wait), *spec, &mut out);
            }
            Event::Delete { caller, job } => self.delete(caller, &job, &mut out),
            Event::Join { caller, lease, job, worker } => self.join(caller, lease, &job, worker, &mut out),
            Event::Leave { caller, job, lease } => self.leave(caller, &job, lease, &mut out),
            Event::LeaseEnded { job, lease } => self.lease_ended(&job, lease, &mut out),
            Event::Commit { caller, commit } => self.commit(caller, *commit, now, &mut out),
            Event::Reduce { caller, reduce } => self.reduce(caller, *reduce, now, &mut out),
            Event::Tick => self.tick(now, &mut out),
        }
        out
    }

    /// When [`Event::Tick`] is due: the earliest deadline of a waiting caller.
    pub(crate) fn next_deadline(&self) -> Option<Now> {
        self.jobs
            .values()
            .filter_map(|job| match &job.phase {
                Phase::Waiting { creators } | Phase::Opening { creators, .. } => {
                    creators.iter().map(|waiter| waiter.deadline).min()
                }
                Phase::Open(open) => open.round.next_deadline(),
                Phase::Failed { .. } => None,
            })
            .min()
    }

    fn tick(&mut self, now: Now, out: &mut Vec<Action>) {
        self.expire_creators(now, out);
        self.expire_commits(now, out);
        self.expire_reducers(now, out);
    }

    /// Epochs are never used twice, by no job.
    pub(super) fn next_epoch(&mut self) -> u64 {
        self.epoch += 1;
        self.epoch
    }

    /// The shard servers that are connected, by id.
    pub(super) fn live(&self) -> Vec<Server> {
        self.servers
            .iter()
            .map(|(&id, peer)| Server { id, incarnation: 1, address: peer.address.clone() })
            .collect()
    }

    /// `server 3 (127.0.0.1:7401)`.
    pub(super) fn name(&self, server: ServerId) -> String {
        match self.servers.get(&server) {
            Some(peer) => format!("server {server} ({})", peer.address),
            None => format!("server {server} (gone)"),
        }
    }

    pub(super) fn job_mut(&mut self, job: &str) -> Result<&mut Job> {
        self.jobs.get_mut(job).ok_or_else(|| Error::UnknownJob { job: job.to_owned() })
    }

    /// What a reader needs to pull.
    pub(crate) fn describe(&self, job: &str) -> Result<pb::DescribeJobResponse> {
        let found = self.jobs.get(job).ok_or_else(|| Error::UnknownJob { job: job.to_owned() })?;
        let open = found.phase.open(job)?;
        Ok(pb::DescribeJobResponse {
            spec: Some(found.spec.as_ref().into()),
            epoch: found.epoch,
            placement: Some(open.placement.as_ref().into()),
            version: open.version,
            job_id: 0,
        })
    }

    /// What the operator sees.
    pub(crate) fn status(&self) -> pb::StatusResponse {
        let servers = self.servers.iter().map(|(&id, peer)| pb::ServerStatus {
            server: Some(pb::Server { id, incarnation: 1, address: peer.address.clone() }),
            stats: peer.stats.clone(),
        });
        pb::StatusResponse { servers: servers.collect(), jobs: self.jobs.values().map(Job::status).collect() }
    }

    /// Name, epoch, version and number of workers of each job; and the number of servers.
    pub(crate) fn gauges(&self) -> (usize, impl Iterator<Item = (&str, u64, Option<u64>, usize)>) {
        let jobs = self.jobs.iter().map(|(name, job)| match &job.phase {
            Phase::Open(open) => (name.as_str(), job.epoch, open.version, open.members.len()),
            _ => (name.as_str(), job.epoch, None, 0),
        });
        (self.servers.len(), jobs)
    }

    /// Ends every open call and stream: this process is about to stop.
    pub(crate) fn stop(&mut self) -> Vec<Action> {
        let error =
            || Error::Unavailable { peer: "coordinator".to_owned(), cause: "it is shutting down".to_owned() };
        let mut out = Vec::new();
        for job in std::mem::take(&mut self.jobs).into_values() {
            let (waiters, members) = job.phase.into_waiting();
            out.extend(waiters.into_iter().map(|waiter| Action::Answer(waiter.caller, Err(error()))));
            out.extend(members.into_iter().map(|lease| Action::End(lease, Some(error()))));
        }
        out
    }
}

impl Job {
    fn status(&self) -> pb::JobStatus {
        let JobSpec { name, manifest, world, .. } = self.spec.as_ref();
        let mut status = pb::JobStatus {
            name: name.clone(),
            epoch: self.epoch,
            world: *world,
            parameters: manifest.parameters(),
            tensors: manifest.tensors().len() as u32,
            slices: manifest.slices().len() as u32,
            ..Default::default()
        };
        match &self.phase {
            Phase::Waiting { .. } | Phase::Opening { .. } => {}
            Phase::Open(Open { members, version, .. }) => {
                status.joined = members.keys().copied().collect();
                status.version = *version;
            }
            Phase::Failed { reason } => status.failure = reason.clone(),
        }
        status
    }
}

/// The longest wait between two looks at the clock, where nobody waits.
pub(crate) const IDLE: Duration = Duration::from_secs(3600);
