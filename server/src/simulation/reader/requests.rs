//! Which servers a reader asks, and for what.

use std::collections::BTreeMap;

use zeroshard_changes as changes;
use zeroshard_model::{DType, Server};
use zeroshard_proto::pb;

use super::Reader;
use crate::simulation::world::JOB;

impl Reader {
    /// The dtype of a slice in the reader's arrays.
    pub(super) fn dtype_of(&self, slice: u32) -> DType {
        let is_buffer = self.of().spec.manifest.tensor_of(slice as usize).buffer;
        if is_buffer { DType::F32 } else { self.dtype }
    }

    /// Servers of the followed slices: with replicas, one of each slice. 0: the primaries.
    pub(super) fn servers(&self, turn: usize) -> Vec<(Server, Vec<(u32, DType)>)> {
        let placement = &self.of().placement;
        let mut of_server = vec![Vec::new(); placement.servers().len()];
        for &slice in &self.slices {
            let owners = placement.owners(slice as usize);
            let server = owners[turn % owners.len()] as usize;
            of_server[server].push((slice, self.dtype_of(slice)));
        }
        let servers = placement.servers().iter().cloned().zip(of_server);
        servers.filter(|(_, slices)| !slices.is_empty()).collect()
    }

    /// The requests for changes, one for each server.
    pub(super) fn requests(&self) -> Vec<(Server, pb::ChangesRequest)> {
        let servers = self.servers(self.turn).into_iter();
        servers.map(|(server, slices)| (server, self.request(slices))).collect()
    }

    /// The request for changes of all slices.
    pub(super) fn request_for_all(&self) -> pb::ChangesRequest {
        self.request(self.slices.iter().map(|&slice| (slice, self.dtype_of(slice))).collect())
    }

    /// The request for changes of some slices.
    pub(super) fn request(&self, slices: Vec<(u32, DType)>) -> pb::ChangesRequest {
        let (of, state) = (self.of(), self.state.as_ref());
        let mut by_dtype = BTreeMap::<DType, Vec<u32>>::new();
        slices.iter().for_each(|&(slice, dtype)| by_dtype.entry(dtype).or_default().push(slice));
        let slices = by_dtype.into_iter();
        let slices = slices.map(|(dtype, slices)| pb::FollowedSlices {
            dtype: pb::Dtype::from(dtype).into(),
            slices,
            boxes: Vec::new(),
        });
        pb::ChangesRequest {
            job: JOB.to_owned(),
            job_id: of.job_id,
            line: Some(of.line),
            slices: slices.collect(),
            from: state.and_then(changes::Reader::version),
            newer_than: state.and_then(changes::Reader::shown),
            ..Default::default()
        }
    }
}
