//! What servers do for readers: they record what steps change, and send it.

use std::{collections::BTreeMap, sync::Arc};

use bytes::Bytes;
use zeroshard_changes::{Known, SliceChange, sum};
use zeroshard_kernels::Cpu;
use zeroshard_model::{DType, Result, View};
use zeroshard_proto::pb;
use zeroshard_shard::{
    slice::{Since, Unhashed},
    state_selector::StateSelector,
};

use super::{
    data::Payload,
    safeguard::{Safeguard, is_missing},
    world::{Happening, World},
};
use crate::shard::{
    changes::{self, Versions},
    content::Content,
    job::Job,
};

/// The budgets of servers for changes, in bytes. The smaller ones have room for one step or two.
pub(super) const BUDGETS: [u64; 4] = [600, 2_000, 1 << 20, 1 << 20];

/// Values with which a slice begins to record changes, and which are still to be hashed.
pub(super) struct Hashing {
    job: Arc<Job<Cpu>>,
    slice: u32,
    values: Unhashed<Cpu>,
}

impl World {
    /// The answer to a reader that asks for changes; `None`: later. `is_last`: the reader does not
    /// wait any longer.
    pub(super) fn changes(
        &mut self,
        server: usize,
        job: &Arc<Job<Cpu>>,
        request: &mut pb::ChangesRequest,
        is_last: bool,
    ) -> Result<Option<Payload>> {
        let versions = Versions::of(request, job)?;
        let slices = changes::slices(job, &request.slices)?;
        self.record_changes(server, job, &slices)?;
        let same = || versions.same(job).filter(|_| is_last);
        let Some(version) = versions.ready(job).or_else(same) else { return Ok(None) };
        let known = |slices| Ok(Some(Payload::Known(Known { version, slices })));
        let Some(from) = versions.first(version) else { return known(Some(BTreeMap::new())) };
        // Steps continue after the version was chosen.
        if request.to.is_none() && self.rng.u32(..4) == 0 {
            request.to = Some(version);
            return Ok(None);
        }
        let mut all = BTreeMap::new();
        for (index, view) in slices {
            let slice = job.followed_slice(index)?;
            let (changes, hash) = match slice.changes(&view, from, version) {
                Since::Unknown => return known(None),
                Since::Pending => return Ok(None),
                Since::Known { changes, hash } => (changes, hash),
            };
            let lost = usize::from(changes.len() > 1 && is_missing(Safeguard::EveryStep));
            let numel = view.positions(&slice.spec).len();
            let change = sum((view.dtype(), numel), &changes[lost..])?;
            all.insert(index, SliceChange { change, hash });
        }
        known(Some(all))
    }

    /// Makes slices record changes. Their hashes are computed later.
    fn record_changes(
        &mut self,
        server: usize,
        job: &Arc<Job<Cpu>>,
        slices: &[(u32, View)],
    ) -> Result<()> {
        let of = &mut self.servers[server];
        let life = of.life;
        let mut begun = Vec::new();
        for (slice, view) in slices {
            let (slice, follows) = (*slice, job.follow(*slice, view, &of.history));
            if let Some(values) = job.note(slice, follows)? {
                begun.push(Hashing { job: job.clone(), slice, values });
            }
        }
        for hashing in begun {
            self.servers[server].hashing.push_back(hashing);
            self.later(Happening::Hash { server, life });
        }
        Ok(())
    }

    /// A server has hashed the values of a slice.
    pub(super) fn hash(&mut self, server: usize, life: u64) {
        let of = &mut self.servers[server];
        if of.life != life || !of.is_alive {
            return;
        }
        let Some(Hashing { job, slice, values }) = of.hashing.pop_front() else { return };
        let held = job.followed_slice(slice);
        let hashed = held.and_then(|of| job.note(slice, values.compute(of.backend())));
        // A slice that has moved needs no hash.
        drop(hashed);
    }

    /// A server forgets all changes in a dtype, as if nobody had asked for them for a minute.
    pub(super) fn end_follows(&mut self, dtype: DType) {
        let jobs = self.servers.iter().flat_map(|server| server.jobs.values());
        let slices = jobs.flat_map(|running| running.job.slices());
        slices.for_each(|(_, slice)| slice.unfollow(&View::whole(dtype)));
    }
}

/// The answer to a reader that pins a version and copies it; `None`: later.
pub(super) fn pinned(
    job: &Job<Cpu>,
    (line, version): (u64, u64),
    slices: &[(u32, DType)],
) -> Result<Option<Payload>> {
    job.check_line(Some(line), version)?;
    let mut all: BTreeMap<u32, Bytes> = BTreeMap::new();
    for &(index, dtype) in slices {
        let slice = job.primary_slice(index)?;
        let content = Content { version, part: StateSelector::Parameters, attempt: None };
        let Some(buffer) = content.read(job, slice)? else { return Ok(None) };
        all.insert(index, slice.values(content.part, &buffer, 0..slice.spec.numel, dtype)?);
    }
    Ok(Some(Payload::Pinned(all)))
}
