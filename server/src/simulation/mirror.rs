//! What a mirror answers to its readers. It follows the job as a reader does, and decides with the
//! code of production (`zeroshard_changes::Mirror`). In some runs it lies.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use zeroshard_changes::{self as changes, Known, Sent, SliceChange, Wanted, sum};
use zeroshard_model::{Error, Result};
use zeroshard_proto::pb;

use super::{
    data::{Payload, Request, Sender},
    follow::BUDGETS,
    world::{Happening, World},
};

/// The interval at which a request that has to wait is tried again.
const WAIT: Duration = Duration::from_millis(4);

/// What a mirror sends.
pub(super) struct Mirror {
    pub(super) state: changes::Mirror,
    /// The hash of each slice at each version, by which it lies.
    hashes: BTreeMap<(u64, u32), u64>,
}

impl Mirror {
    pub(super) fn new(rng: &mut fastrand::Rng) -> Self {
        let budget = BUDGETS[rng.usize(..BUDGETS.len())];
        Self { state: changes::Mirror::new(budget), hashes: BTreeMap::new() }
    }

    /// Changes have arrived, and are not applied yet.
    pub(super) fn publish(&mut self, versions: [u64; 2], slices: &BTreeMap<u32, SliceChange>) {
        let hashes = slices.iter().map(|(&slice, of)| ((versions[1], slice), of.hash));
        self.hashes.extend(hashes);
        self.state.publish(versions, slices.clone());
    }

    /// A full copy is complete.
    pub(super) fn copied(&mut self, of: (u64, u64), version: u64, hashes: &BTreeMap<u32, u64>) {
        self.hashes = hashes.iter().map(|(&slice, &hash)| ((version, slice), hash)).collect();
        self.state.copied((of.0, Some(of.1)), version);
    }
}

impl World {
    /// Sends a request to a mirror.
    pub(super) fn request_of_mirror(&mut self, mirror: usize, from: Sender, request: &Request) {
        for _ in 0..self.faults.copies(&mut self.rng) {
            let request = request.clone();
            self.later(Happening::MirrorRequest { mirror, from, request, tries: 0 });
        }
    }

    /// A request reaches a mirror, or is tried again there because it had to wait.
    pub(super) fn mirror_requested(
        &mut self,
        mirror: usize,
        from: Sender,
        (request, tries): (Request, u32),
    ) {
        let is_last = tries == request.tries().0;
        let answer = match self.answer_of_mirror(mirror, &request, is_last) {
            // The caller repeats it.
            Ok(None) if is_last => return,
            Ok(None) => {
                let tries = tries + 1;
                let wait = WAIT * self.rng.u32(1..8);
                return self.after(wait, Happening::MirrorRequest { mirror, from, request, tries });
            }
            Ok(Some(payload)) => Ok(self.perhaps_a_lie(mirror, from, &request, payload)),
            Err(error) => Err(Box::new(error)),
        };
        if !self.faults.loses(&mut self.rng) {
            self.later(Happening::Answered { to: from, request, answer });
        }
    }

    /// The answer of a mirror; `None`: later. `is_last`: the request will not be tried again.
    fn answer_of_mirror(
        &self,
        mirror: usize,
        request: &Request,
        is_last: bool,
    ) -> Result<Option<Payload>> {
        let of = &self.readers[mirror];
        let unavailable = |cause: &str| {
            Err(Error::Unavailable { peer: "the mirror".to_owned(), cause: cause.to_owned() })
        };
        let Some(Mirror { state, .. }) = of.mirror.as_ref().filter(|_| of.is_alive()) else {
            return unavailable("connection refused");
        };
        match request {
            Request::Changes(request) => {
                if !state.has((request.job_id, request.line)) {
                    return unavailable("it does not have the job's current line yet");
                }
                let &pb::ChangesRequest { from, to, newer_than, .. } = &**request;
                let sent = state.answer(Wanted { from, to, newer_than }, is_last);
                let Some(Sent { version, from }) = sent else { return Ok(None) };
                let mut all = BTreeMap::new();
                let slices = request.slices.iter().flat_map(|of| &of.slices);
                for &slice in slices.filter(|_| from.is_some()) {
                    let versions = [from.unwrap_or(version), version];
                    let Some((parts, hash)) = state.changes(slice, versions) else {
                        return Ok(Some(Payload::Known(Known { version, slices: None })));
                    };
                    all.insert(
                        slice,
                        SliceChange { change: sum(of.size_of(slice), &parts)?, hash },
                    );
                }
                Ok(Some(Payload::Known(Known { version, slices: Some(all) })))
            }
            &Request::MirrorCopy { job, line, slice } => {
                if !state.has((job, Some(line))) {
                    return unavailable("it does not have the job's current line yet");
                }
                // A full copy of the mirror's own has no version until it is complete.
                let held = of.held();
                Ok(held.map(|(version, values)| {
                    let values = Bytes::copy_from_slice(&values[&slice]);
                    Payload::MirrorSlice { slice, version, values }
                }))
            }
            other => unreachable!("{other:?} is not for mirrors"),
        }
    }

    /// Makes an answer wrong in a run in which the mirror lies.
    fn perhaps_a_lie(
        &mut self,
        mirror: usize,
        from: Sender,
        request: &Request,
        mut payload: Payload,
    ) -> Payload {
        if !self.faults.lies(&mut self.rng) {
            return payload;
        }
        let of = &self.readers[mirror];
        let is_lie = match &mut payload {
            Payload::MirrorSlice { values, .. } => {
                let mut wrong = values.to_vec();
                let at = self.rng.usize(..wrong.len());
                wrong[at] ^= 1 << self.rng.u8(..8);
                *values = wrong.into();
                true
            }
            // It says that a slice has not changed, with the hash that the slice had before.
            Payload::Known(Known { slices: Some(slices), .. }) => {
                let Request::Changes(request) = request else { return payload };
                let any = self.rng.choice(slices.iter_mut());
                let known = any.zip(request.from).zip(of.mirror.as_ref());
                let lie = known.and_then(|(((slice, of_slice), from), mirror)| {
                    let hash = *mirror.hashes.get(&(from, *slice))?;
                    let change = sum(of.size_of(*slice), &[]).ok()?;
                    let is_lie = change != of_slice.change;
                    *of_slice = SliceChange { change, hash };
                    Some(is_lie)
                });
                lie.unwrap_or_default()
            }
            _ => false,
        };
        if let (Sender::Reader { round, .. }, true) = (from, is_lie) {
            self.record.shown.lies += 1;
            self.mislead(round);
        }
        payload
    }
}
