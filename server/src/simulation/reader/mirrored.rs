//! A reader that follows the job through a mirror. Only hashes come from the servers.

use std::collections::BTreeMap;

use bytes::Bytes;
use zeroshard_changes::{Copied, Known, MirrorCopy, SliceChange, apply::apply, vouch};
use zeroshard_proto::pb;

use super::{Phase, ROUND, Round};
use crate::simulation::{
    data::{Request, Sender},
    safeguard::{Safeguard, is_missing},
    world::{Happening, World},
};

/// A full copy that a mirror sends.
#[derive(Debug)]
pub(super) struct Receiving {
    /// The version of each slice that has arrived.
    versions: BTreeMap<u32, u64>,
    /// The version that the mirror has promised.
    least: u64,
    values: BTreeMap<u32, Vec<u8>>,
    /// The versions whose slices have not got the changes yet that they lack.
    behind: Vec<Option<u64>>,
}

/// What a mirror has sent, before the servers have vouched for it.
#[derive(Debug)]
pub(super) enum Unverified {
    Changes(BTreeMap<u32, SliceChange>),
    Copy(Receiving),
}

impl World {
    /// A lie of the mirror is on its way to a reader.
    pub(in crate::simulation) fn mislead(&mut self, round: Round) {
        if let Some(reader) = self.waiting(round) {
            reader.is_misled = true;
        }
    }

    fn send_to_mirror(&mut self, reader: usize, mirror: usize, requests: Vec<Request>) {
        let round = self.round(reader);
        for (at, request) in requests.iter().enumerate() {
            self.request_of_mirror(mirror, Sender::Reader { round, at }, request);
        }
        self.after(ROUND, Happening::ReaderWakes(round));
    }

    /// Asks the mirror for changes since the version in the arrays.
    pub(super) fn ask_mirror(&mut self, reader: usize, mirror: usize) {
        let request = self.readers[reader].request_for_all();
        self.readers[reader].begin(Phase::Changes(vec![None]));
        self.send_to_mirror(reader, mirror, vec![Request::Changes(Box::new(request))]);
    }

    /// Asks the mirror for all values. Slices arrive one after the other.
    pub(super) fn copy_of_mirror(&mut self, reader: usize, mirror: usize) {
        let of = &mut self.readers[reader];
        let (job, line) = (of.of().job_id, of.of().line);
        let requests = of.slices.iter();
        let requests = requests.map(|&slice| Request::MirrorCopy { job, line, slice }).collect();
        let (versions, values) = (BTreeMap::new(), BTreeMap::new());
        let newest = of.newest.filter(|newest| (newest.0, newest.1) == (job, line));
        let least = newest.map_or(0, |(.., newest)| newest);
        of.begin(Phase::Receive(Receiving { versions, least, values, behind: Vec::new() }));
        self.send_to_mirror(reader, mirror, requests);
    }

    /// A slice has arrived from the mirror.
    pub(super) fn receive_slice(&mut self, reader: usize, slice: u32, version: u64, of: &Bytes) {
        let reading = &mut self.readers[reader];
        let Phase::Receive(copy) = &mut reading.phase else { return };
        // A repeated request has two answers.
        copy.versions.entry(slice).or_insert(version);
        copy.values.entry(slice).or_insert_with(|| of.to_vec());
        if copy.values.len() == reading.slices.len() {
            let Phase::Receive(copy) = std::mem::replace(&mut reading.phase, Phase::Rests) else {
                return;
            };
            self.ask_for_missing(reader, copy);
        }
    }

    /// Asks the mirror for the changes of the slices that have arrived at an earlier version.
    fn ask_for_missing(&mut self, reader: usize, mut copy: Receiving) {
        let of = &mut self.readers[reader];
        let all = MirrorCopy::new(copy.versions.clone(), copy.least);
        let behind = all.behind();
        if behind.is_empty() {
            return self.ask_for_hashes(reader, all.version(), Unverified::Copy(copy));
        }
        copy.behind = behind.keys().copied().map(Some).collect();
        let requests = behind.into_iter().map(|(from, slices)| {
            let slices = slices.into_iter().map(|slice| (slice, of.dtype_of(slice)));
            let (from, to) = (Some(from), Some(all.version()));
            let request = of.request(slices.collect());
            Request::Changes(Box::new(pb::ChangesRequest { from, to, newer_than: None, ..request }))
        });
        let requests = requests.collect();
        of.begin(Phase::Missing(copy));
        if let Some(mirror) = self.readers[reader].through {
            self.send_to_mirror(reader, mirror, requests);
        }
    }

    /// The changes of slices that were behind have arrived.
    pub(super) fn receive_missing(&mut self, reader: usize, at: usize, known: Known) {
        let of = &mut self.readers[reader];
        let round = Round { reader, life: of.life, number: of.round };
        let Phase::Missing(mut copy) = std::mem::replace(&mut of.phase, Phase::Rests) else {
            return;
        };
        let version = MirrorCopy::new(copy.versions.clone(), copy.least).version();
        let Some(slices) = known.slices.filter(|_| known.version == version) else {
            return self.pause(round);
        };
        // A repeated request has two answers.
        if copy.behind[at].take().is_some() {
            for (slice, change) in slices {
                let place = of.place_of(slice);
                let values = copy.values.get_mut(&slice).expect("it was asked for");
                if let Err(error) = apply(place, values, &change.change) {
                    return self.fail(format!("the change of slice {slice}: {error}"));
                }
            }
        }
        match copy.behind.iter().all(Option::is_none) {
            true => self.ask_for_hashes(reader, version, Unverified::Copy(copy)),
            false => of.phase = Phase::Missing(copy),
        }
    }

    /// Asks the servers for the hashes of all slices at a version.
    pub(super) fn ask_for_hashes(&mut self, reader: usize, version: u64, of: Unverified) {
        let requests = self.readers[reader].requests().into_iter().enumerate();
        let requests = requests.map(|(at, (server, request))| {
            let (from, to) = (Some(version), Some(version));
            (at, server, pb::ChangesRequest { from, to, ..request })
        });
        let requests: Vec<_> = requests.collect();
        let answers = vec![None; requests.len()];
        self.readers[reader].begin(Phase::Hashes { version, of, answers });
        self.send_changes(reader, requests);
    }

    /// A server has sent hashes.
    pub(super) fn receive_hashes(&mut self, reader: usize, at: usize, known: Known) {
        let Phase::Hashes { answers, .. } = &mut self.readers[reader].phase else { return };
        answers[at] = Some(known);
        if answers.iter().any(Option::is_none) {
            return;
        }
        let phase = std::mem::replace(&mut self.readers[reader].phase, Phase::Rests);
        let Phase::Hashes { version, of, answers } = phase else { return };
        let slices: Option<Vec<_>> = answers.into_iter().flatten().map(|of| of.slices).collect();
        let hashes =
            slices.map(|all| all.into_iter().flatten().map(|(slice, of)| (slice, of.hash)));
        let hashes = hashes.map(Iterator::collect);
        match of {
            Unverified::Changes(slices) => self.vouched(reader, version, slices, hashes),
            Unverified::Copy(copy) => self.compare_copy(reader, version, copy, hashes),
        }
    }

    /// The servers have vouched for changes; `None`: they do not know the version any more.
    fn vouched(
        &mut self,
        reader: usize,
        version: u64,
        mut slices: BTreeMap<u32, SliceChange>,
        hashes: Option<BTreeMap<u32, u64>>,
    ) {
        let Some(hashes) = hashes else {
            self.readers[reader].state().lose(Copied::Behind);
            return self.ask_for_changes(reader);
        };
        if !is_missing(Safeguard::MirrorHashes)
            && let Err(slice) = vouch(&mut slices, &hashes)
        {
            return self.fail(format!("no server has sent the hash of slice {slice}"));
        }
        self.record.shown.mirrored += 1;
        self.show_changes(reader, version, slices);
    }

    /// The servers have sent the hashes of a full copy; `None`: they do not know the version any
    /// more.
    fn compare_copy(
        &mut self,
        reader: usize,
        version: u64,
        Receiving { versions, least, values, .. }: Receiving,
        hashes: Option<BTreeMap<u32, u64>>,
    ) {
        let of = &mut self.readers[reader];
        let round = Round { reader, life: of.life, number: of.round };
        let Some(hashes) = hashes else { return self.pause(round) };
        let differs = MirrorCopy::new(versions, least).differs(&of.hashes_of(&values), &hashes);
        match differs.filter(|_| !is_missing(Safeguard::MirrorHashes)) {
            None => {
                of.phase = Phase::Copy { version, waits: 0, values };
                self.end_copy(reader);
            }
            // It copies all values again.
            Some(_) if of.is_misled => {
                of.is_misled = false;
                self.pause(round);
            }
            Some(slice) => self.fail(format!("the copy of slice {slice} at {version} differs")),
        }
    }
}
