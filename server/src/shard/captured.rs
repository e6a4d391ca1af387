//! A captured step in messages: the state before it, the gradients of all ranks, and the hashes
//! after it.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures_util::{Stream, stream};
use zeroshard_kernels::Backend;
use zeroshard_proto::{
    Wire,
    pb::{self, capture_response::Part},
};
use zeroshard_shard::{
    job::{CapturedSlices, Job},
    round::{Chunk, Contributed},
    slice::CapturedSlice,
};

use crate::config::MAX_WAIT;

/// The maximum number of bytes of an array in one message: whole elements.
const PART: usize = 1 << 20;

/// A captured step.
pub(super) struct Captured {
    step: pb::CapturedStep,
    /// The slices, with the state and the gradients of those that train.
    slices: Vec<(pb::CapturedSlice, Option<CapturedSlice>)>,
}

impl Captured {
    /// The step that `decision` is about. `after`: the hashes after it.
    pub(super) fn new<B: Backend, D>(
        job: &Job<B, D>,
        decision: &pb::Decision,
        before: CapturedSlices,
        after: Vec<[u8; 32]>,
    ) -> Self {
        let pb::Decision { step, update, spike, .. } = decision;
        let step = pb::CapturedStep { step: *step, update: update.clone(), spike: spike.clone() };
        let slices = before.into_iter().zip(after);
        let slices = slices.map(|((index, slice), after)| {
            (slice_message(job, index, slice.as_ref(), after), slice)
        });
        Self { step, slices: slices.collect() }
    }

    /// The messages. A caller that does not read them all has the memory for a limited time.
    pub(super) fn messages(self) -> impl Stream<Item = pb::CaptureResponse> + Send {
        let parts = Arc::new(Mutex::new(Some(self.parts())));
        let held = Arc::downgrade(&parts);
        tokio::spawn(async move {
            tokio::time::sleep(MAX_WAIT).await;
            if let Some(parts) = held.upgrade() {
                *parts.lock().unwrap_or_else(PoisonError::into_inner) = None;
            }
        });
        stream::iter(std::iter::from_fn(move || {
            parts.lock().unwrap_or_else(PoisonError::into_inner).as_mut()?.next()
        }))
    }

    /// The messages. The memory of a slice is released after its last one.
    fn parts(self) -> impl Iterator<Item = pb::CaptureResponse> + Send {
        let step = response(Part::Step(self.step));
        let slices = self.slices.into_iter().flat_map(|(message, slice)| {
            let slice = slice.into_iter().flat_map(contents);
            [response(Part::Slice(message))].into_iter().chain(slice)
        });
        let end = response(Part::End(pb::CaptureEnd {}));
        [step].into_iter().chain(slices).chain([end])
    }
}

/// The message that describes a captured slice.
fn slice_message<B: Backend, D>(
    job: &Job<B, D>,
    index: u32,
    slice: Option<&CapturedSlice>,
    after: [u8; 32],
) -> pb::CapturedSlice {
    let after = after.to_vec().into();
    let Some(CapturedSlice { before, applied, absent, figures, sum_of_squares, .. }) = slice else {
        return pb::CapturedSlice { slice: index, after, ..Default::default() };
    };
    let tensor = job.spec.manifest.slices()[index as usize].tensor;
    let contribution = |&Contributed { rank, tally }: &Contributed| pb::Contribution {
        tensor: tensor as u32,
        rank,
        sum_of_squares: tally.squares,
        hash: tally.hash,
    };
    pb::CapturedSlice {
        slice: index,
        after,
        before: before.to_vec().into(),
        steps: Some(pb::SliceSteps {
            slice: index,
            applied: applied.count,
            scalar_state: job.spec.scalar_state_of(tensor, applied),
            averaged: applied.averaged,
        }),
        sum_of_squares: *sum_of_squares,
        contributions: figures.iter().map(contribution).collect(),
        absent: absent.clone(),
    }
}

/// The messages with the state and the gradients of a slice.
fn contents(slice: CapturedSlice) -> impl Iterator<Item = pb::CaptureResponse> + Send {
    let CapturedSlice { state, chunks, space, .. } = slice;
    let state = (0u32..).zip(state).flat_map(|(tensor, bytes)| {
        split(bytes).map(move |(_, data)| Part::State(pb::CapturedState { tensor, data }))
    });
    let gradients = chunks.into_iter().flat_map(|Chunk { rank, offset, dtype, bytes }| {
        split(bytes).map(move |(start, data)| {
            let offset = (offset + start / dtype.size()) as u64;
            let dtype = pb::Dtype::from(Wire::Plain(dtype)).into();
            Part::Gradient(pb::CapturedGradient { rank, offset, dtype, data })
        })
    });
    state.chain(gradients).map(move |part| {
        let _held = &space;
        response(part)
    })
}

/// Splits an array for messages. Each part comes with its first byte.
fn split(bytes: Bytes) -> impl Iterator<Item = (usize, Bytes)> + Send {
    let starts = (0..bytes.len()).step_by(PART);
    starts.map(move |start| (start, bytes.slice(start..bytes.len().min(start + PART))))
}

fn response(part: Part) -> pb::CaptureResponse {
    pb::CaptureResponse { part: Some(part) }
}
