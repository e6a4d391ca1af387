//! The jobs of a cluster, by name.
//!
//! A job handles its events alone, in a visit. After each visit the index follows the job, and the
//! consequences for other jobs and for servers are carried out.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
};

use zeroshard_model::{Error, Result};

use crate::{
    cluster::{
        connections,
        context::{Common, Consequence, Context},
        index::Name,
        startup::unknown_yet,
    },
    job::{Job, Phase},
    placement::fork::Source,
    vocabulary::{
        events::Action,
        ids::{Caller, JobRef, ServerId},
    },
};

/// The jobs of a cluster.
#[derive(Debug, Default)]
pub(crate) struct Jobs {
    all: BTreeMap<String, Job>,
    /// The jobs that have been visited since they were last asked for.
    changed: BTreeSet<Name>,
    /// The number of visits so far.
    visits: u64,
}

impl Jobs {
    /// All jobs, by name.
    pub(crate) fn all(&self) -> &BTreeMap<String, Job> {
        &self.all
    }

    /// The number of visits so far: how often events were passed to a job.
    pub(crate) fn visits(&self) -> u64 {
        self.visits
    }

    /// The names of the jobs that may have changed since the last call, including jobs that are
    /// gone.
    pub(crate) fn take_changed(&mut self) -> BTreeSet<Name> {
        mem::take(&mut self.changed)
    }

    /// The names of all jobs.
    pub(crate) fn names(&self) -> Vec<Name> {
        self.all.values().map(|job| job.name.clone()).collect()
    }

    /// A job, for what is not an event: it is not visited.
    pub(crate) fn get_mut(&mut self, name: &str) -> Option<&mut Job> {
        self.all.get_mut(name)
    }

    /// The job with this name.
    ///
    /// # Errors
    /// [`Error::UnknownJob`], or [`Error::Unavailable`] while a server may still describe it.
    pub(crate) fn find(&self, name: &str, common: &Common) -> Result<&Job> {
        self.all.get(name).ok_or_else(|| match common.startup.is_learning() {
            true => unknown_yet(name),
            false => Error::UnknownJob { job: name.to_owned() },
        })
    }

    /// The job that a member or a server means, unless an earlier one had the name.
    pub(crate) fn of(&self, job: &JobRef) -> Option<&Job> {
        self.all.get(&job.name).filter(|found| found.id == job.id)
    }

    /// The name of the job with this name, for [`Self::call`].
    ///
    /// # Errors
    /// Those of [`Self::find`].
    pub(crate) fn named(&self, name: &str, common: &Common) -> Result<Name> {
        self.find(name, common).map(|job| job.name.clone())
    }

    /// The name of the job of a member's call, for [`Self::call`].
    ///
    /// # Errors
    /// [`Error::UnknownJob`]; [`Error::Invalid`] for an id of 0; [`Error::JobReplaced`] if another
    /// job has the name.
    pub(crate) fn of_member(&self, job: &JobRef, common: &Common) -> Result<Name> {
        // A member knows that the job exists. The first server that registers may be a new one, and
        // another worker may have asked for the job as if it were new.
        let is_known =
            self.all.get(&job.name).is_some_and(|found| found.id == job.id || !found.is_new());
        if !is_known && common.startup.members_wait() {
            return Err(unknown_yet(&job.name));
        }
        let found = self.find(&job.name, common)?;
        match job.id {
            0 => Err(Error::invalid(
                format!("job_id of job {:?}", job.name),
                0,
                "the job_id in the JoinResponse",
            )),
            id if id == found.id => Ok(found.name.clone()),
            _ => Err(Error::JobReplaced { job: job.name.clone() }),
        }
    }

    /// The job from which this one is being created, if it is.
    pub(crate) fn source_of(&self, job: &JobRef, common: &Common) -> Option<Result<Source>> {
        let found = self.of(job)?;
        let fork = found.fork.as_ref().filter(|_| found.is_new())?;
        Some(self.find(&fork.from.job, common).and_then(|job| job.as_source(fork)))
    }

    /// Returns whether a job has slices on the server.
    pub(crate) fn use_server(&self, server: ServerId, common: &Common) -> bool {
        let uses = |job: &Name| self.all.get(&**job).is_some_and(|job| job.phase.uses(server));
        common.index.users(server).iter().any(uses)
    }

    /// Adds a job.
    pub(crate) fn insert(&mut self, job: Job, common: &mut Common) {
        let name = job.name.clone();
        self.all.insert(job.spec.name.clone(), job);
        self.index(&name, common);
    }

    /// Lets a job handle an event, and carries out the consequences. `None` if there is no such
    /// job.
    pub(crate) fn visit<T>(
        &mut self,
        name: &str,
        cx: &mut Context<'_>,
        handle: impl FnOnce(&mut Job, &mut Context<'_>) -> T,
    ) -> Option<T> {
        let job = self.all.get_mut(name)?;
        self.visits += 1;
        let result = handle(job, cx);
        job.note_progress(cx.now);
        self.index(name, cx.common);
        let consequences = mem::take(&mut cx.consequences);
        consequences.into_iter().for_each(|consequence| self.carry_out(consequence, cx));
        Some(result)
    }

    /// Visits the job of a server's message, unless the message is about an earlier job with the
    /// same name.
    pub(crate) fn visit_job<T>(
        &mut self,
        job: &JobRef,
        cx: &mut Context<'_>,
        handle: impl FnOnce(&mut Job, &mut Context<'_>) -> T,
    ) -> Option<T> {
        self.of(job)?;
        self.visit(&job.name, cx, handle)
    }

    /// Visits several jobs.
    pub(crate) fn visit_all(
        &mut self,
        names: impl IntoIterator<Item = Name>,
        cx: &mut Context<'_>,
        mut handle: impl FnMut(&mut Job, &mut Context<'_>),
    ) {
        names.into_iter().for_each(|name| _ = self.visit(&name, cx, &mut handle));
    }

    /// Visits the job `found` of a call. Refuses the call if there is no such job.
    pub(crate) fn call(
        &mut self,
        caller: Caller,
        found: Result<Name>,
        cx: &mut Context<'_>,
        handle: impl FnOnce(&mut Job, &mut Context<'_>),
    ) {
        match found {
            Ok(name) => _ = self.visit(&name, cx, handle),
            Err(error) => cx.push(Action::Answer(caller, Err(error))),
        }
    }

    fn carry_out(&mut self, consequence: Consequence, cx: &mut Context<'_>) {
        match consequence {
            Consequence::Ended { job_id, error } => {
                let successors = cx.common.index.successors(job_id);
                self.visit_all(successors, cx, |job, cx| job.abandon(&error, cx));
            }
            Consequence::Dismiss { link, cause } => connections::lost(self, link, &cause, cx),
            Consequence::Answer { waiter, reply, servers, what } => {
                cx.common.answer_when_received(vec![waiter], reply, servers, what, cx.out);
            }
        }
    }

    /// Updates the index after a visit, and forgets a job that is gone.
    fn index(&mut self, name: &str, common: &mut Common) {
        let Some(job) = self.all.get(name) else { return };
        let key = job.name.clone();
        let entry = (!matches!(job.phase, Phase::Gone)).then(|| job.entry(common));
        let is_gone = entry.is_none();
        let has_other_predecessor = common.index.set(&key, entry, job.phase.loads());
        let fork = job.fork.as_ref().filter(|_| has_other_predecessor);
        let predecessor = fork.map(|fork| fork.from.job.clone());
        self.changed.insert(key);
        if is_gone {
            self.all.remove(name);
        }
        // It is kept while another job is being created from it.
        if let Some(predecessor) = predecessor {
            self.index(&predecessor, common);
        }
    }
}
