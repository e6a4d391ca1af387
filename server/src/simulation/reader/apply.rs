//! How a reader gets to a version, and what must hold when it shows it.

use std::{collections::BTreeMap, time::Duration};

use zeroshard_changes::{
    Copied, Gathering, Known, Part, SliceChange,
    apply::{Place, apply, positions},
    hash,
};
use zeroshard_model::{DType, Line};
use zeroshard_proto::pb;

use super::{Phase, Reader, Unverified};
use crate::simulation::{
    safeguard::{Safeguard, is_missing},
    world::{Happening, World},
};

impl Reader {
    /// The dtype and the number of elements of a slice.
    pub(in crate::simulation) fn size_of(&self, slice: u32) -> (DType, usize) {
        (self.dtype_of(slice), self.of().spec.manifest.slices()[slice as usize].numel)
    }

    pub(super) fn place_of(&self, slice: u32) -> Place {
        let first = self.of().spec.manifest.slices()[slice as usize].offset as u64;
        Place { dtype: self.dtype_of(slice), first }
    }

    /// The hashes of values.
    pub(super) fn hashes_of(&self, values: &BTreeMap<u32, Vec<u8>>) -> BTreeMap<u32, u64> {
        let hash = |(&slice, values): (&u32, &Vec<u8>)| {
            let Place { dtype, first } = self.place_of(slice);
            (slice, hash::of(dtype, first, values))
        };
        values.iter().map(hash).collect()
    }

    /// Applies the changes if they lead from the values to those of the servers. Returns whether
    /// they do.
    fn apply(&mut self, slices: &BTreeMap<u32, SliceChange>) -> Result<bool, String> {
        let places: BTreeMap<u32, Place> =
            slices.keys().map(|&slice| (slice, self.place_of(slice))).collect();
        let values = self.values.iter_mut().filter(|(slice, _)| slices.contains_key(slice));
        let parts = values.map(|(&slice, values)| {
            let (place, change) = (places[&slice], &slices[&slice]);
            Part { slice, place, values: &mut values[..], change }
        });
        let parts: Vec<_> = parts.collect();
        if parts.len() < slices.len() {
            return Err("a change of another slice".to_owned());
        }
        let state = self.state.as_ref().expect("the job has been described");
        let applied = state.apply(parts).map_err(|(_, error)| error.to_string())?;
        if applied.is_none() && is_missing(Safeguard::ReaderHashes) {
            for (slice, values) in &mut self.values {
                let change = slices.get(slice).map(|of| &of.change[..]).unwrap_or_default();
                apply(places[slice], values, change).map_err(|error| error.to_string())?;
            }
            return Ok(true);
        }
        Ok(applied.is_some())
    }
}

impl World {
    /// All servers have answered.
    pub(super) fn gather(&mut self, reader: usize, answers: Vec<Known>) {
        let of = &mut self.readers[reader];
        let state = of.state();
        if state.version().is_none() {
            let newest = answers.iter().map(|answer| answer.version).max();
            let copies = state.is_newer(newest);
            of.newest = newest.map(|newest| (of.of().job_id, of.of().line, newest));
            return self.describe(reader, copies);
        }
        let Some(gathering) = state.gather(answers) else { return self.describe(reader, false) };
        let behind = gathering.behind();
        if behind.is_empty() {
            return self.gathered(reader, gathering);
        }
        let (requests, to) = (of.requests(), Some(gathering.version()));
        let requests = behind.iter().map(|&(at, had)| {
            let (server, request) = requests[at].clone();
            (at, server, pb::ChangesRequest { from: Some(had), to, ..request })
        });
        let requests = requests.collect();
        of.begin(Phase::Rest(gathering));
        self.send_changes(reader, requests);
    }

    /// A server that was behind has sent the rest.
    pub(super) fn add_rest(&mut self, reader: usize, at: usize, known: Known) {
        let of = &mut self.readers[reader];
        let Phase::Rest(mut gathering) = std::mem::replace(&mut of.phase, Phase::Rests) else {
            return;
        };
        // A repeated request has two answers.
        if gathering.behind().iter().any(|(behind, _)| *behind == at) {
            let added = gathering.add(at, known, |slice| of.size_of(slice));
            if let Err((slice, error)) = added {
                return self.fail(format!("the change of slice {slice} is malformed: {error}"));
            }
        }
        match gathering.behind().is_empty() {
            true => {
                self.record.shown.completed += 1;
                self.gathered(reader, gathering);
            }
            false => of.phase = Phase::Rest(gathering),
        }
    }

    /// All changes lead to one version, unless a server does not know them.
    fn gathered(&mut self, reader: usize, gathering: Gathering) {
        let version = gathering.version();
        let of = &mut self.readers[reader];
        let Some(slices) = gathering.finish() else {
            of.unknown += 1;
            if of.unknown >= of.of().placement.replicas() || of.through.is_some() {
                of.state().lose(Copied::Behind);
            }
            return self.ask_for_changes(reader);
        };
        of.unknown = 0;
        if !slices.keys().eq(&of.slices) {
            let failure = format!("a reader of {:?} gets changes of {slices:?}", of.slices);
            return self.fail(failure);
        }
        match of.through {
            Some(_) => self.ask_for_hashes(reader, version, Unverified::Changes(slices)),
            None => self.show_changes(reader, version, slices),
        }
    }

    /// A reader shows a version that has come as changes. A mirror first sends them on.
    pub(super) fn show_changes(
        &mut self,
        reader: usize,
        version: u64,
        slices: BTreeMap<u32, SliceChange>,
    ) {
        let of = &mut self.readers[reader];
        of.state().show(version);
        let from = of.state().version();
        if let (Some(mirror), Some(from)) = (&mut of.mirror, from) {
            mirror.publish([from, version], &slices);
            of.begin(Phase::Published { version, slices });
            let round = self.round(reader);
            return self.later(Happening::ReaderWakes(round));
        }
        if self.rng.u32(..16) == 0 {
            self.write_to_values(reader, &slices);
        }
        self.apply(reader, version, &slices);
    }

    /// A mirror applies the changes that it has published.
    pub(super) fn apply_published(&mut self, reader: usize) {
        let phase = std::mem::replace(&mut self.readers[reader].phase, Phase::Rests);
        if let Phase::Published { version, slices } = phase {
            self.apply(reader, version, &slices);
        }
    }

    /// The program of a reader writes to a value that a step has changed. It would not be noticed
    /// before the next full hash if it wrote to another one.
    fn write_to_values(&mut self, reader: usize, slices: &BTreeMap<u32, SliceChange>) {
        let of = &mut self.readers[reader];
        let mut changed = Vec::new();
        for (&slice, SliceChange { change, .. }) in slices {
            let (dtype, numel) = of.size_of(slice);
            let all = positions(dtype, numel, change).unwrap_or_default();
            changed.extend(all.into_iter().map(|at| (slice, at as usize * dtype.size())));
        }
        if let Some((slice, at)) = self.rng.choice(changed) {
            of.has_written = true;
            let values = of.values.get_mut(&slice).expect("it has all slices");
            values[at] ^= 1 << self.rng.u8(..8);
        }
    }

    /// Applies changes if they fit, and copies the values otherwise.
    fn apply(&mut self, reader: usize, version: u64, slices: &BTreeMap<u32, SliceChange>) {
        let of = &mut self.readers[reader];
        match of.apply(slices) {
            Ok(true) => of.is_misled = false,
            Ok(false) if of.has_written || of.is_misled => {
                of.state().lose(Copied::Differed);
                of.state().show_again();
                return self.ask_for_changes(reader);
            }
            Ok(false) => return self.fail(format!("the changes to {version} do not fit")),
            Err(failure) => return self.fail(failure),
        }
        of.state().advance(version, slices);
        self.record.shown.changed += 1;
        self.show(reader, version);
    }

    /// All values of a version have arrived.
    pub(super) fn end_copy(&mut self, reader: usize) {
        let of = &mut self.readers[reader];
        let Phase::Copy { version, values, .. } = std::mem::replace(&mut of.phase, Phase::Rests)
        else {
            return;
        };
        let reason = of.state().reason();
        of.ahead = 0;
        of.state().show(version);
        of.state().begin_copy();
        of.values = values;
        if self.rng.u32(..16) == 0 {
            // The copy was interrupted.
            return self.describe(reader, false);
        }
        let hashes = of.hashes_of(&of.values);
        let job = (of.of().job_id, of.of().line);
        if let Some(mirror) = &mut of.mirror {
            mirror.copied(job, version, &hashes);
        }
        of.state().end_copy(version, reason, hashes);
        (of.has_written, of.is_misled) = (false, false);
        *self.record.shown.copied.entry(reason).or_default() += 1;
        self.show(reader, version);
    }

    /// A reader shows a version, and then rests.
    fn show(&mut self, reader: usize, version: u64) {
        let of = &mut self.readers[reader];
        let (job, line) = (of.of().job_id, of.of().line);
        let last = of.last.replace((job, line, version));
        if let Some((old_job, old_line, old)) = last {
            if (old_job, old_line) != (job, line) {
                of.left.insert((old_job, old_line));
            } else if version <= old {
                return self.fail(format!("a reader shows version {version} after {old}"));
            }
        }
        if of.left.contains(&(job, line)) {
            return self.fail(format!("a reader is back on line {line}"));
        }
        let lines = self.lines.values();
        let line = lines.rev().find(|of| of.number == line).map(|line| Line::clone(line));
        let batches = self.batches(&line.unwrap_or_default(), version);
        let of = &self.readers[reader];
        for (&slice, values) in of.values.iter() {
            let read = (of.dtype_of(slice), &values[..]);
            if let Err(failure) = self.record.read(batches.clone(), slice, read) {
                return self.fail(failure);
            }
        }
        self.rest(reader);
    }

    /// A reader does something else for a while, is killed, or is the last one to follow the job.
    fn rest(&mut self, reader: usize) {
        self.readers[reader].begin(Phase::Rests);
        let scale = match self.rng.u32(..16) {
            0 => return self.kill_reader(reader),
            1 => {
                self.end_follows(self.readers[reader].dtype);
                200_000
            }
            2..5 => 50_000,
            _ => 1_000,
        };
        let (round, wait) = (self.round(reader), Duration::from_micros(self.rng.u64(..scale)));
        self.after(wait, Happening::ReaderWakes(round));
    }
}
