//! Who is there: shard servers and workers.

use zeroshard_proto::{
    Error, Result,
    pb::{self, server_command::Command},
};

use super::{
    cluster::Cluster,
    jobs::held_by,
    state::{Action, Caller, Job, Lease, Member, Peer, Phase, Reply, ServerId, Worker},
};

impl Cluster {
    pub(super) fn server_joined(&mut self, server: ServerId, address: String, out: &mut Vec<Action>) {
        // Restarted before we noticed that it was gone.
        let same = self.servers.iter().find(|(_, peer)| peer.address == address).map(|(&id, _)| id);
        if let Some(old) = same {
            self.server_lost(old, "another server came with its address", out);
        }
        out.push(Action::Note(format!("server {server} ({address}) joined")));
        self.servers.insert(server, Peer { address, stats: None });
        out.push(Action::Command(server, Command::Welcome(pb::Welcome {})));
        let names: Vec<String> = self.jobs.keys().cloned().collect();
        for name in names {
            self.try_place(&name, out);
        }
    }

    /// Every job that holds slices there fails: nobody else has them.
    pub(super) fn server_lost(&mut self, server: ServerId, cause: &str, out: &mut Vec<Action>) {
        if !self.servers.contains_key(&server) {
            return;
        }
        let gone = format!("{} is gone ({cause})", self.name(server));
        self.servers.remove(&server);
        out.push(Action::Note(gone.clone()));
        out.push(Action::Dismiss(server));
        let hit = |job: &&Job| job.phase.uses(server);
        let names: Vec<String> = self.jobs.values().filter(hit).map(|job| job.spec.name.clone()).collect();
        for name in names {
            let reason = match self.jobs.get(&name) {
                Some(Job { spec, phase: Phase::Open(open), .. }) => {
                    format!("{gone}, and with it {}", held_by(server, spec, &open.placement))
                }
                _ => format!("{gone} while the job was being opened"),
            };
            self.fail(&name, &reason, out);
        }
    }

    pub(super) fn join(
        &mut self,
        caller: Caller,
        lease: Lease,
        name: &str,
        worker: Worker,
        out: &mut Vec<Action>,
    ) {
        let answer = self.try_join(lease, name, worker, out);
        out.push(Action::Answer(caller, answer));
    }

    fn try_join(&mut self, lease: Lease, name: &str, worker: Worker, out: &mut Vec<Action>) -> Result<Reply> {
        let Worker { rank, address } = worker;
        let job = self.job_mut(name)?;
        if rank >= job.spec.world {
            let expected = format!("less than the world, {}", job.spec.world);
            return Err(Error::invalid(format!("rank of job {name:?}"), rank, expected));
        }
        let Phase::Open(open) = &mut job.phase else { return Err(job.phase.not_open(name)) };
        if open.members.contains_key(&rank) {
            return Err(Error::RankTaken { job: name.to_owned(), rank });
        }
        let is_peer = address.is_some();
        open.members.insert(rank, Member { lease, address });
        out.push(Action::Tell(lease, open.membership(&job.spec, job.epoch, lease, true)));
        if is_peer {
            let others = open.members.values().map(|member| member.lease).filter(|&other| other != lease);
            let tell = |other| Action::Tell(other, open.membership(&job.spec, job.epoch, other, false));
            out.extend(others.map(tell));
        }
        out.push(Action::Note(format!("rank {rank} of job {name:?} joined, epoch {}", job.epoch)));
        Ok(Reply::Joined)
    }

    /// In order: the others are not disturbed, and told only if it was a peer. A lease that is not there has ended already.
    pub(super) fn leave(&mut self, caller: Caller, name: &str, lease: Lease, out: &mut Vec<Action>) {
        let job = match self.job_mut(name) {
            Ok(job) => job,
            Err(error) => return out.push(Action::Answer(caller, Err(error))),
        };
        if let Phase::Open(open) = &mut job.phase
            && let Some(rank) = open.rank_of(lease)
        {
            let left = open.members.remove(&rank);
            out.push(Action::Note(format!("rank {rank} of job {name:?} left")));
            out.push(Action::End(lease, None));
            if left.is_some_and(|member| member.address.is_some()) {
                open.tell_all(&job.spec, job.epoch, out);
            }
        }
        out.push(Action::Answer(caller, Ok(Reply::Left)));
    }

    /// A worker is lost: what the open step has so far may be half of its gradients, so it is dropped
    /// everywhere, under a new epoch.
    pub(super) fn lease_ended(&mut self, name: &str, lease: Lease, out: &mut Vec<Action>) {
        let holds = |job: &Job| match &job.phase {
            Phase::Open(open) => open.rank_of(lease),
            _ => None,
        };
        let Some(rank) = self.jobs.get(name).and_then(holds) else { return };
        let new = self.next_epoch();
        let Some(Job { spec, epoch, phase: Phase::Open(open) }) = self.jobs.get_mut(name) else { return };
        *epoch = new;
        open.members.remove(&rank);
        out.push(Action::Note(format!("rank {rank} of job {name:?} was lost; epoch {new}")));
        // Parameters that are not complete may be half of the lost worker's: they come again, all of them.
        let initialised = open.version.is_some();
        if !initialised {
            open.uninitialised = open.placement.servers().iter().map(|server| server.id).collect();
        }
        // Servers first: by the time a worker knows the epoch, it is under way to them.
        for server in open.placement.servers() {
            let command = pb::NewEpoch { job: name.to_owned(), epoch: new, initialised, job_id: 0, rank };
            out.push(Action::Command(server.id, Command::NewEpoch(command)));
        }
        let step = open.step();
        if !open.round.is_empty() {
            out.push(Action::Aborted);
        }
        for waiter in open.round.drop_all() {
            let cause = format!("rank {rank} was lost");
            let error = Error::StepAborted { job: name.to_owned(), step, epoch: new, cause };
            out.push(Action::Answer(waiter.caller, Err(error)));
        }
        open.tell_all(spec, new, out);
    }
}
