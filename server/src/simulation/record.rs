//! What an undisturbed run shows to its workers, and what every other run must show as well.

use std::collections::BTreeMap;

use bytes::Bytes;
use zeroshard_coordinator::vocabulary::decision::Report;
use zeroshard_proto::pb;

use super::checkpoints::Content;
use crate::coordinator::responses::Message;

/// The observations of all workers of a run.
#[derive(Debug, Default, Clone)]
pub(super) struct Record {
    /// The published parameters, by version and slice.
    versions: BTreeMap<(u64, u32), Bytes>,
    /// The reports as they are sent to workers, by step.
    reports: BTreeMap<u64, pb::CommitResponse>,
    /// The content of checkpoints, by version and slice.
    saved: BTreeMap<(u64, u32), Content>,
    /// The hashes of master weights and optimizer state after the last step, by slice.
    pub(super) hashes: BTreeMap<u32, [u8; 32]>,
    /// The number of coordinators that have decided about steps of this run.
    pub(super) deciders: usize,
}

impl Record {
    /// Adds what a worker has pulled, and compares it with what others have pulled before, in this
    /// run or in the undisturbed one.
    pub(super) fn pulled(
        &mut self,
        version: u64,
        slice: u32,
        values: &Bytes,
    ) -> Result<(), String> {
        let known = self.versions.entry((version, slice)).or_insert_with(|| values.clone());
        match known == values {
            true => Ok(()),
            false => Err(format!("version {version} of slice {slice} has other bits")),
        }
    }

    /// Adds a report, and compares it like [`Self::pulled`].
    pub(super) fn reported(&mut self, step: u64, report: Report) -> Result<(), String> {
        let report = report.message();
        let known = self.reports.entry(step).or_insert_with(|| report.clone());
        match *known == report {
            true => Ok(()),
            false => Err(format!("the report of step {step} is {report:?}, and was {known:?}")),
        }
    }

    /// Adds the content of a slice in a checkpoint, and compares it like [`Self::pulled`].
    pub(super) fn saved(
        &mut self,
        version: u64,
        slice: u32,
        content: &Content,
    ) -> Result<(), String> {
        let known = self.saved.entry((version, slice)).or_insert_with(|| content.clone());
        match known == content {
            true => Ok(()),
            false => Err(format!("the checkpoint of slice {slice} at {version} has other bits")),
        }
    }

    /// Adds the hash of a slice after the last step, and compares it like [`Self::pulled`].
    pub(super) fn ended(&mut self, slice: u32, hash: [u8; 32]) -> Result<(), String> {
        match *self.hashes.entry(slice).or_insert(hash) == hash {
            true => Ok(()),
            false => Err(format!("the final state of slice {slice} has another hash")),
        }
    }
}
