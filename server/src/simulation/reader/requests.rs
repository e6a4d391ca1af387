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

    /// The primaries of the followed slices.
    pub(super) fn servers(&self) -> Vec<(Server, Vec<(u32, DType)>)> {
        let placement = &self.of().placement;
        let mut of_server = vec![Vec::new(); placement.servers().len()];
        for &slice in &self.slices {
            of_server[placement.primary(slice as usize)].push((slice, self.dtype_of(slice)));
        }
        let servers = placement.servers().iter().cloned().zip(of_server);
        servers.filter(|(_, slices)| !slices.is_empty()).collect()
    }

    /// The requests for changes, one for each server.
    pub(super) fn requests(&self) -> Vec<(Server, pb::ChangesRequest)> {
        let (of, state) = (self.of(), self.state.as_ref());
        let request = |slices: Vec<(u32, DType)>| {
            let mut by_dtype = BTreeMap::<DType, Vec<u32>>::new();
            slices
                .iter()
                .for_each(|&(slice, dtype)| by_dtype.entry(dtype).or_default().push(slice));
            let slices = by_dtype.into_iter();
            let slices = slices.map(|(dtype, slices)| pb::FollowedSlices {
                dtype: pb::Dtype::from(dtype).into(),
                slices,
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
        };
        self.servers().into_iter().map(|(server, slices)| (server, request(slices))).collect()
    }
}
