//! The names and numbers of real jobs, from which valid requests are generated.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicU64},
};

use fastrand::Rng;
use zeroshard_client::{Description, Error, Job};
use zeroshard_model::Manifest;

/// A slice of a job.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slice {
    pub(crate) index: u32,
    pub(crate) numel: usize,
    pub(crate) tensor: usize,
    pub(crate) trains: bool,
    /// The index of the shard server that is its primary.
    pub(crate) shard: usize,
}

/// The state of a rank, as its worker knows it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Member {
    pub(crate) job: String,
    pub(crate) job_id: u64,
    pub(crate) rank: u32,
    pub(crate) lease: u64,
    pub(crate) world: u32,
    pub(crate) epoch: u64,
    /// The version of the job, which is also the open step.
    pub(crate) version: u64,
    pub(crate) attempt: u32,
    pub(crate) slices: Vec<Slice>,
    /// The shape of each tensor.
    pub(crate) shapes: Vec<Vec<u64>>,
}

impl Member {
    /// Describes a rank of the job. `shards` contains the addresses of the shard servers.
    pub(crate) fn of(job: &Job, placed: &Description, shards: &[String]) -> Self {
        Self {
            job: job.spec().name.clone(),
            job_id: job.id(),
            rank: job.rank(),
            lease: job.lease(),
            world: job.spec().world,
            epoch: job.epoch(),
            version: job.version().unwrap_or_default(),
            attempt: 0,
            slices: slices(&job.spec().manifest, placed, shards),
            shapes: job.spec().manifest.tensors().iter().map(|of| of.shape.clone()).collect(),
        }
    }
}

fn slices(manifest: &Manifest, placed: &Description, shards: &[String]) -> Vec<Slice> {
    let placement = &placed.placement;
    let slice = |(index, slice): (usize, &zeroshard_model::SliceSpec)| {
        let address = &placement.servers()[placement.primary(index)].address;
        let shard = shards.iter().position(|shard| shard == address)?;
        Some(Slice {
            index: index as u32,
            tensor: slice.tensor,
            numel: slice.numel,
            trains: manifest.trains(index),
            shard,
        })
    };
    manifest.slices().iter().enumerate().filter_map(slice).collect()
}

/// The knowledge of the callers.
#[derive(Debug)]
pub(crate) struct Facts {
    /// The ranks of the jobs that may be disturbed.
    members: Mutex<BTreeMap<String, Member>>,
    /// A rank of the job that must not be disturbed.
    pub(crate) bystander: Member,
    /// The version of this job.
    pub(crate) version: Arc<AtomicU64>,
    /// The directory for checkpoints.
    pub(crate) url: String,
}

impl Facts {
    pub(crate) fn new(bystander: Member, url: String) -> Self {
        Self { members: Mutex::default(), bystander, version: Arc::default(), url }
    }

    /// Follows the version of the job that must not be disturbed.
    pub(crate) fn following(self, version: Arc<AtomicU64>) -> Self {
        Self { version, ..self }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Member>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn insert(&self, member: Member) {
        self.lock().insert(format!("{}:{}", member.job, member.rank), member);
    }

    pub(crate) fn remove(&self, job: &str) {
        self.lock().retain(|_, member| member.job != job);
    }

    /// Updates the ranks of a job after a new version or epoch.
    pub(crate) fn update(&self, job: &str, change: impl Fn(&mut Member)) {
        self.lock().values_mut().filter(|member| member.job == job).for_each(change);
    }

    /// A random rank of the jobs that may be disturbed.
    pub(crate) fn any(&self, random: &mut Rng) -> Member {
        let members = self.lock();
        let chosen = members.values().nth(random.usize(..members.len().max(1)));
        // No rank is known while the jobs are being created again.
        chosen
            .cloned()
            .unwrap_or_else(|| Member { job: "fuzz/job0".to_owned(), ..Member::default() })
    }

    /// Updates the facts from a refusal, which names the current step, epoch or attempt.
    pub(crate) fn learn(&self, refusal: &Error) {
        let moved = |member: &mut Member, version: u64| {
            if member.version != version {
                (member.version, member.attempt) = (version, 0);
            }
        };
        match refusal {
            Error::StepMismatch { job, current, .. } | Error::VersionGone { job, current, .. } => {
                self.update(job, |member| moved(member, *current));
            }
            Error::StaleEpoch { job, current, .. } => self.update(job, |member| {
                (member.epoch, member.attempt) = (*current, 0);
            }),
            Error::StaleAttempt { job, current, .. } => {
                self.update(job, |member| member.attempt = *current);
            }
            _ => {}
        }
    }
}
