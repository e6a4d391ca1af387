//! The parameters that a worker holds and the gradients that it has not sent yet: pulled ahead and
//! pushed behind, on the runtime's threads, while the worker's own thread computes. The level
//! (`levels`) decides when.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::runtime::Handle;
use zeroshard_proto::{Result, TensorBox};

use super::memory::{Lease, Ledger};
use super::model::Segment;
use super::network::Network;
use super::segments::{Leaf, leaf};
use crate::parallel::accumulate;
use crate::parallel::background::{Pushes, Task, start, wait};
use crate::parallel::remote::{Buffer, ParameterServer};

/// What a worker's own thread needs for its transfers.
pub struct Link<S> {
    /// The job.
    pub server: Arc<S>,
    /// Runs the transfers. The worker's thread must not be one of its own.
    pub runtime: Handle,
    /// Counts the bytes that are held.
    pub ledger: Ledger,
}

impl<S> Clone for Link<S> {
    fn clone(&self) -> Self {
        Self {
            server: self.server.clone(),
            runtime: self.runtime.clone(),
            ledger: self.ledger.clone(),
        }
    }
}

/// The parameters of one version: present, being pulled, or not requested.
///
/// Dropping this cancels the pulls.
pub struct Parameters<'a, S> {
    link: Link<S>,
    network: &'a Network,
    version: u64,
    here: Vec<Option<Resident>>,
    /// Pulls under way, in the order of the requests.
    coming: VecDeque<(Vec<usize>, Task<Vec<Resident>>)>,
}

struct Resident {
    tensor: usize,
    leaf: Leaf,
    _lease: Lease,
}

impl<'a, S: ParameterServer> Parameters<'a, S> {
    /// No parameter of `version` yet.
    pub fn new(link: &Link<S>, network: &'a Network, version: u64) -> Self {
        Self {
            link: link.clone(),
            network,
            version,
            here: std::iter::repeat_with(|| None)
                .take(network.model().parameters().len())
                .collect(),
            coming: VecDeque::new(),
        }
    }

    /// Starts to pull those parameters of a segment that are neither present nor being pulled.
    pub fn prefetch(&mut self, segment: Segment) {
        let wanted: Vec<usize> = self
            .network
            .model()
            .tensors_of(segment)
            .into_iter()
            .filter(|&tensor| self.here[tensor].is_none())
            .filter(|tensor| !self.coming.iter().any(|(tensors, _)| tensors.contains(tensor)))
            .collect();
        if wanted.is_empty() {
            return;
        }
        let (server, version, ledger) =
            (self.link.server.clone(), self.version, self.link.ledger.clone());
        let boxes: Vec<_> =
            wanted.iter().map(|&tensor| (tensor, self.network.bounds(tensor).clone())).collect();
        let task = start(&self.link.runtime, async move {
            let room = |(tensor, bounds): (usize, TensorBox)| {
                let lease = ledger.hold(bounds.numel() as usize);
                (Buffer::zeros(tensor, bounds), lease)
            };
            let (buffers, leases): (Vec<Buffer>, Vec<Lease>) = boxes.into_iter().map(room).unzip();
            let buffers = server.pull(version, buffers).await?;
            Ok(buffers
                .into_iter()
                .zip(leases)
                .map(|(Buffer { tensor, values, .. }, lease)| Resident {
                    tensor,
                    leaf: leaf(values),
                    _lease: lease,
                })
                .collect())
        });
        self.coming.push_back((wanted, task));
    }

    /// A segment's parameters in the order of `Model::tensors_of`; waits for their pulls.
    ///
    /// The caller drops them before it calls [`Self::release`].
    pub fn take(&mut self, segment: Segment) -> Result<Vec<Leaf>> {
        self.prefetch(segment);
        let tensors = self.network.model().tensors_of(segment);
        while tensors.iter().any(|&tensor| self.here[tensor].is_none()) {
            let (_, task) =
                self.coming.pop_front().expect("a tensor that was prefetched is here or coming");
            for resident in wait(&self.link.runtime, task)? {
                let tensor = resident.tensor;
                self.here[tensor] = Some(resident);
            }
        }
        let leaves = tensors.iter().filter_map(|&tensor| self.here[tensor].as_ref());
        Ok(leaves.map(|resident| resident.leaf.clone()).collect())
    }

    /// Frees a segment's parameters, except those that segment `next` reads too.
    pub fn release(&mut self, segment: Segment, next: Option<Segment>) {
        let kept = next.map(|next| self.network.model().tensors_of(next)).unwrap_or_default();
        for tensor in self.network.model().tensors_of(segment) {
            if !kept.contains(&tensor) {
                self.here[tensor] = None;
            }
        }
    }
}

/// A gradient, counted by the ledger.
struct Held {
    values: Vec<f32>,
    lease: Lease,
}

/// When gradients are pushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Departure {
    /// When those of a segment are complete, while the backward pass goes on.
    WhenReady,
    /// All together at the end of the step.
    AtTheEnd,
}

/// The gradients of one step, summed over micro-batches, until they are pushed.
///
/// Gradients are summed by segment in the order of the micro-batches, and the two parts of a tied
/// tensor are added last (head, then embedding). So the bits do not depend on whether a level runs
/// its micro-batches one after the other or side by side.
pub struct Outbox<'a, S> {
    link: Link<S>,
    network: &'a Network,
    departure: Departure,
    sums: Vec<(Segment, Vec<Held>)>,
    /// Parts of tied tensors whose other part is not complete yet.
    parts: Vec<(usize, Held)>,
    complete: Vec<(usize, Held)>,
    pushes: Pushes<S>,
}

impl<'a, S: ParameterServer> Outbox<'a, S> {
    /// No gradient of `step` yet.
    pub fn new(link: &Link<S>, network: &'a Network, step: u64, departure: Departure) -> Self {
        Self {
            link: link.clone(),
            network,
            departure,
            sums: Vec::new(),
            parts: Vec::new(),
            complete: Vec::new(),
            pushes: Pushes::new(link.server.clone(), &link.runtime, step),
        }
    }

    /// Adds one micro-batch's gradients of a segment, in the order of `Model::tensors_of`.
    pub fn add(&mut self, segment: Segment, gradients: Vec<Vec<f32>>) {
        let ledger = &self.link.ledger;
        let held =
            gradients.into_iter().map(|values| Held { lease: ledger.hold(values.len()), values });
        match self.sums.iter_mut().find(|(other, _)| *other == segment) {
            None => self.sums.push((segment, held.collect())),
            Some((_, sums)) => {
                let pairs = sums.iter_mut().zip(held);
                pairs.for_each(|(sum, part)| accumulate(&mut sum.values, &part.values));
            }
        }
    }

    /// Marks the gradients of a segment as complete.
    pub fn finish(&mut self, segment: Segment) -> Result<()> {
        let Some(found) = self.sums.iter().position(|(other, _)| *other == segment) else {
            return Ok(());
        };
        let (_, sums) = self.sums.swap_remove(found);
        for (tensor, sum) in self.network.model().tensors_of(segment).into_iter().zip(sums) {
            if let Some(part) = self.parts.iter().position(|(tied, _)| *tied == tensor) {
                let (_, mut part) = self.parts.swap_remove(part);
                accumulate(&mut part.values, &sum.values);
                self.complete.push((tensor, part));
            } else if self.network.model().reads_again(segment, tensor) {
                self.parts.push((tensor, sum));
            } else {
                self.complete.push((tensor, sum));
            }
        }
        match self.departure {
            Departure::WhenReady => self.push(),
            Departure::AtTheEnd => Ok(()),
        }
    }

    /// Pushes the remaining gradients and waits until all have arrived.
    pub fn close(mut self) -> Result<()> {
        self.push()?;
        self.pushes.finish()
    }

    fn push(&mut self) -> Result<()> {
        let complete = std::mem::take(&mut self.complete).into_iter();
        let (gradients, leases): (Vec<_>, Vec<Lease>) =
            complete.map(|(tensor, held)| ((tensor, held.values), held.lease)).unzip();
        self.pushes.push(gradients, leases)
    }
}
