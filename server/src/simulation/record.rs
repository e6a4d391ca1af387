//! What an undisturbed run shows to its workers, and what every other run must show as well.

use std::collections::BTreeMap;

use bytes::Bytes;
use zeroshard_coordinator::vocabulary::decision::Report;
use zeroshard_loops::{Level, convert};
use zeroshard_model::{DType, Line};
use zeroshard_proto::pb;

use super::{checkpoints::Content, reader::Shown};
use crate::coordinator::responses::Message;

/// The batches of all steps before a version. Two versions that come from the same batches are
/// bitwise identical, on any line.
pub(super) type Batches = Vec<u64>;

/// The observations of all workers of a run.
#[derive(Debug, Default, Clone)]
pub(super) struct Record {
    /// The published parameters, by version and slice.
    versions: BTreeMap<(Batches, u32), Bytes>,
    /// The reports that workers receive, by the batches that have led to the version.
    reports: BTreeMap<Batches, pb::CommitResponse>,
    /// The content of checkpoints, by version and slice.
    saved: BTreeMap<(Batches, u32), Content>,
    /// The hashes of master weights and optimizer state after the last step, by slice.
    hashes: BTreeMap<(Batches, u32), [u8; 32]>,
    /// What readers have shown before a worker has pulled it, by version and slice.
    unpulled: Vec<(Batches, u32, DType, Vec<u8>)>,
    pub(super) shown: Shown,
    /// The last line of the run.
    pub(super) line: Line,
    /// The number of coordinators that have decided about steps of this run.
    pub(super) deciders: usize,
}

impl Record {
    /// Adds what a worker has pulled, and compares it with what others have pulled before, in this
    /// run or in the undisturbed one.
    pub(super) fn pulled(
        &mut self,
        version: Batches,
        slice: u32,
        values: &Bytes,
    ) -> Result<(), String> {
        let key = (version.clone(), slice);
        let known = self.versions.entry(key).or_insert_with(|| values.clone());
        match known == values {
            true => Ok(()),
            false => Err(format!("the version of slice {slice} after {version:?} has other bits")),
        }
    }

    /// Compares what a reader shows of a slice with what a worker has pulled, if one has.
    pub(super) fn read(
        &mut self,
        version: Batches,
        slice: u32,
        (dtype, values): (DType, &[u8]),
    ) -> Result<(), String> {
        let key = (version, slice);
        let Some(known) = self.versions.get(&key) else {
            self.unpulled.push((key.0, slice, dtype, values.to_vec()));
            return Ok(());
        };
        let mut rounded = vec![0; known.len() / DType::F32.size() * dtype.size()];
        convert::cast(Level::best(), known, DType::F32, &mut rounded, dtype);
        match rounded == values {
            true => Ok(()),
            false => Err(format!("a reader has other bits of slice {slice} after {:?}", key.0)),
        }
    }

    /// Compares what readers have shown before a worker has pulled it, at the end of a run.
    pub(super) fn compare_reads(&mut self) -> Result<(), String> {
        let reads = std::mem::take(&mut self.unpulled);
        let mut reads = reads.into_iter();
        reads.try_for_each(|(version, slice, dtype, values)| {
            self.read(version, slice, (dtype, &values))
        })
    }

    /// Adds a report, and compares it like [`Self::pulled`].
    pub(super) fn reported(&mut self, version: Batches, report: Report) -> Result<(), String> {
        let report = report.message();
        let known = self.reports.entry(version.clone()).or_insert_with(|| report.clone());
        match *known == report {
            true => Ok(()),
            false => Err(format!("the report after {version:?} is {report:?}, and was {known:?}")),
        }
    }

    /// Adds the content of a slice in a checkpoint, and compares it like [`Self::pulled`].
    pub(super) fn saved(
        &mut self,
        version: Batches,
        slice: u32,
        content: &Content,
    ) -> Result<(), String> {
        let key = (version.clone(), slice);
        let known = self.saved.entry(key).or_insert_with(|| content.clone());
        match known == content {
            true => Ok(()),
            false => {
                Err(format!("the checkpoint of slice {slice} after {version:?} has other bits"))
            }
        }
    }

    /// Adds the hash of a slice after the last step, and compares it like [`Self::pulled`].
    pub(super) fn ended(
        &mut self,
        version: Batches,
        slice: u32,
        hash: [u8; 32],
    ) -> Result<(), String> {
        match *self.hashes.entry((version, slice)).or_insert(hash) == hash {
            true => Ok(()),
            false => Err(format!("the final state of slice {slice} has another hash")),
        }
    }

    /// Compares what this run and another one have shown of the same versions.
    pub(super) fn compare(&self, other: &Self) -> Result<(), String> {
        fn differs<K: Ord, V: PartialEq>(one: &BTreeMap<K, V>, other: &BTreeMap<K, V>) -> bool {
            one.iter().any(|(key, value)| other.get(key).is_some_and(|of| of != value))
        }
        let what = [
            (differs(&self.versions, &other.versions), "parameters"),
            (differs(&self.reports, &other.reports), "reports"),
            (differs(&self.saved, &other.saved), "checkpoints"),
            (differs(&self.hashes, &other.hashes), "final states"),
        ];
        match what.iter().find(|(differs, _)| *differs) {
            Some((_, what)) => Err(format!("the {what} are not those of line {:?}", other.line)),
            None => Ok(()),
        }
    }
}
