//! The beginning of a job: it waits for servers, is placed, opens, and receives its initial
//! parameters. (`endings` is about its end.)
//!
//! ```text
//! Waiting --placed--> Opening --all opened--> Open --a server is lost--> Failed
//!    |                   |                     |                           |
//!    +--- nobody waits --+-- refused: gone     +---- deleted: gone --------+
//! ```

use std::{collections::BTreeSet, sync::Arc};

use zeroshard_model::{Error, RecentSteps, Result};

use crate::{
    cluster::{context::Context, index::Name, startup::unknown_yet},
    job::{Job, Open, Phase, restore::same_checkpoint},
    placement::{fork::Source, free_memory::FreeMemory},
    state::{progress::Progress, replicas::Replicas},
    vocabulary::{
        calls::{Create, Reply},
        commands::{Command, OpenJob},
        events::{Action, Placed, Placing},
        ids::{ServerId, Waiter},
    },
};

impl Job {
    /// A job for which its first creator waits.
    pub(crate) fn new(waiter: Waiter, id: u64, create: Create) -> Self {
        let Create { spec, fork, restore, quota: _ } = create;
        let creators = vec![waiter];
        Self {
            name: Name::from(spec.name.as_str()),
            spec: Arc::new(spec),
            id,
            epoch: 0,
            line: Arc::default(),
            recent: RecentSteps::default(),
            unused_since: waiter.since,
            fork: fork.map(Arc::new),
            restore: restore.map(Arc::new),
            learned: None,
            progress: Progress::default(),
            phase: Phase::Waiting { creators, placing: false, interrupted: None },
        }
    }

    /// Another caller creates the job.
    pub(crate) fn create_again(&mut self, waiter: Waiter, create: &Create, cx: &mut Context<'_>) {
        let Create { spec, fork, restore, quota: _ } = create;
        let name = spec.name.clone();
        let other = || {
            let is_other = self.fork.as_deref() != fork.as_ref();
            is_other.then(|| "predecessor".to_owned())
        };
        let checkpoint = || {
            let is_other = !same_checkpoint(self.restore.as_deref(), restore.as_ref());
            is_other.then(|| "checkpoint to start from".to_owned())
        };
        if let Some(difference) = self.spec.difference(spec).or_else(other).or_else(checkpoint) {
            return cx.answer(waiter, Err(Error::JobExists { job: name, difference }));
        }
        let answer = match &mut self.phase {
            Phase::Waiting { creators, .. } | Phase::Opening { creators, .. } => {
                return creators.push(waiter);
            }
            Phase::Open(_) => Ok(Reply::Created { epoch: self.epoch, job_id: self.id }),
            Phase::Recovering(_) | Phase::Gone => Err(unknown_yet(&name)),
            Phase::Failed { reason, .. } => {
                let reason = format!("{reason}; delete the job before creating it again");
                Err(Error::JobFailed { job: name, reason })
            }
        };
        cx.answer(waiter, answer);
    }

    /// Requests a placement from the driver, if enough servers are connected.
    pub(crate) fn try_place(&mut self, cx: &mut Context<'_>) {
        // Another server may hold the job, or a later checkpoint be almost complete.
        if cx.common.startup.is_learning() || cx.common.saves.completes(&self.name) {
            return;
        }
        let job = self.reference();
        let Self { spec, restore, line, phase, .. } = self;
        let Phase::Waiting { placing: placing @ false, interrupted, .. } = phase else { return };
        let live = cx.common.servers.placeable();
        let is_ready = match interrupted {
            Some(interrupted) => {
                interrupted.may_be_placed(live.len(), spec.replicas as usize, cx.now, cx.out)
            }
            None => live.len() >= spec.min_servers as usize,
        };
        if !is_ready {
            return;
        }
        *placing = true;
        let (restore, free_memory) = match interrupted {
            // It has memory on its servers already.
            Some(interrupted) => (Some(interrupted.checkpoint()), FreeMemory::default()),
            None => (restore.clone(), cx.common.free_memory()),
        };
        let line = interrupted.as_ref().and_then(|of| of.line()).unwrap_or(line).clone();
        let (zones, returns) = (cx.common.servers.zones().clone(), interrupted.is_some());
        let spec = spec.clone();
        cx.push(Action::Place(Placing {
            job,
            spec,
            live,
            zones,
            free_memory,
            restore,
            returns,
            line,
        }));
    }

    /// Waiting -> Opening. `source` is the predecessor of a job that is being created from it.
    pub(crate) fn placed(
        &mut self,
        placed: Result<Placed>,
        source: Option<Result<Source>>,
        cx: &mut Context<'_>,
    ) {
        let Phase::Waiting { placing, interrupted, .. } = &mut self.phase else { return };
        *placing = false;
        if let (Some(interrupted), Ok(Placed { checkpoint: Some(found), .. })) =
            (&mut *interrupted, &placed)
        {
            interrupted.return_to(found.version.version);
        }
        let is_new = interrupted.is_none();
        let (placed, source) = match (placed, source.transpose()) {
            (Err(error), _) | (_, Err(error)) => return self.cannot_open(&error, cx),
            (Ok(placed), Ok(source)) => (placed, source),
        };
        let live = cx.common.servers.live();
        let is_live = placed.plan.placement.servers().iter().all(|server| live.contains(server));
        if !is_live || is_new && !cx.common.has_room_for(&placed.plan) {
            // A server has been lost, or another job been placed meanwhile.
            return self.try_place(cx);
        }
        self.epoch = cx.common.epochs.next();
        cx.note(format!(
            "job {:?} is placed on {} of {} servers, epoch {}: {} slices",
            self.name,
            placed.plan.placement.servers().len(),
            live.len(),
            self.epoch,
            placed.plan.placement.slices()
        ));
        self.open_on(placed, source, cx);
        self.open_if_all_are(cx);
    }

    /// Tells the servers of the placement to open the job.
    fn open_on(&mut self, placed: Placed, source: Option<Source>, cx: &mut Context<'_>) {
        let Placed { plan, checkpoint, user_data, line, recent } = placed;
        self.line = Arc::new(line);
        self.recent = recent.with_spikes_of(&self.recent);
        let Phase::Waiting { creators, interrupted, .. } = &mut self.phase else { return };
        let ranks = interrupted.as_ref().map(|interrupted| interrupted.ranks());
        let (leases, done, left) = ranks.unwrap_or_default();
        let pending: BTreeSet<ServerId> =
            plan.placement.servers().iter().map(|server| server.id).collect();
        for &server in &pending {
            let open = OpenJob {
                spec: self.spec.clone(),
                placement: plan.placement.clone(),
                job_id: self.id,
                epoch: self.epoch,
                line: self.line.clone(),
                server,
                fork: self.fork.clone(),
                source: source.clone(),
                checkpoint: checkpoint.clone(),
                requested: self.restore.clone(),
                leases: leases.clone(),
                done: done.clone(),
                left: left.clone(),
                version: None,
                decision: None,
                recent: self.recent.clone(),
            };
            cx.command(server, Command::Open(open));
        }
        let (creators, interrupted) = (std::mem::take(creators), interrupted.take());
        let restored = checkpoint.map(|of| Box::new((of, user_data)));
        self.phase = Phase::Opening { plan, restored, pending, creators, interrupted };
    }

    pub(crate) fn opened(&mut self, server: ServerId, epoch: u64, cx: &mut Context<'_>) {
        if self.opened_as_backup(server, cx) {
            return;
        }
        // A job that returns to a checkpoint may be opened more than once.
        if let Phase::Opening { pending, .. } = &mut self.phase
            && self.epoch == epoch
        {
            pending.remove(&server);
            self.open_if_all_are(cx);
        }
    }

    /// Opening -> Open, when every server has allocated its memory.
    fn open_if_all_are(&mut self, cx: &mut Context<'_>) {
        let Phase::Opening { plan, restored, pending, creators, interrupted } = &mut self.phase
        else {
            return;
        };
        if !pending.is_empty() {
            return;
        }
        let reply = Reply::Created { epoch: self.epoch, job_id: self.id };
        for waiter in std::mem::take(creators) {
            cx.answer(waiter, Ok(reply.clone()));
        }
        let replicas = Replicas::new(&self.spec, &plan.placement);
        let mut open = Open::new(plan.clone(), replicas);
        if let Some(restored) = restored.take() {
            let (checkpoint, user_data) = *restored;
            open.restored(checkpoint, user_data);
        }
        let interrupted = interrupted.take();
        self.phase = Phase::Open(Box::new(open));
        if self.fork.is_some() {
            // Its predecessor may be of no more use.
            cx.push(Action::Tick(cx.now));
        }
        if let Some(interrupted) = interrupted {
            self.resume(*interrupted, cx);
        }
        self.idle_from_now(cx);
    }

    pub(crate) fn initialised(&mut self, server: ServerId, epoch: u64, cx: &mut Context<'_>) {
        let open = match &mut self.phase {
            Phase::Recovering(recovery) => return recovery.initialised(server, epoch),
            Phase::Open(open) => open,
            _ => return,
        };
        // A report of an older epoch is about parameters that the server has dropped with that
        // epoch.
        if epoch != self.epoch || !open.version.initialised(server) {
            return;
        }
        self.publish_if_initialised(cx);
        self.advance(cx);
    }

    /// Publishes version 0 when every server has its initial parameters.
    pub(crate) fn publish_if_initialised(&mut self, cx: &mut Context<'_>) {
        let (job, epoch) = (self.reference(), self.epoch);
        let Phase::Open(open) = &mut self.phase else { return };
        if !open.version.publish() {
            return;
        }
        cx.note(format!("job {:?} has all its initial parameters", job.name));
        open.send(&Command::Publish { job, epoch }, cx.out);
        open.wake_all(cx.out);
    }
}
