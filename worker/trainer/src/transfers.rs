//! Pulls of parameters and pushes of gradients in the background: they run on the threads of the
//! runtime while the worker's thread computes. The level (`levels`) decides when they start.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::runtime::Handle;
use zeroshard_worker::parallel::{
    HostValues, Result, accumulate,
    background::{Pushes, Task, start, wait},
    remote::{Buffer, ParameterServer, PullBy},
};

use super::memory::{Lease, Ledger};
use super::model::Segment;
use super::network::Network;
use super::segments::{Leaf, leaf};

/// The connection of a worker's thread to its job.
pub struct Link<S> {
    /// The job.
    pub server: Arc<S>,
    /// The runtime that executes the transfers. The worker's thread must not belong to it.
    pub runtime: Handle,
    /// The counter of the bytes that are held.
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

/// The parameters of one version. Each tensor is resident, being pulled, or not requested.
///
/// Dropping this cancels the pulls.
pub struct Parameters<'a, S> {
    link: Link<S>,
    network: &'a Network,
    version: u64,
    by: PullBy,
    /// The parameters in memory, by tensor.
    resident: Vec<Option<Resident>>,
    /// The running pulls with their tensors, in the order in which they were started.
    pulling: VecDeque<(Vec<usize>, Task<Vec<Pulled>>)>,
}

/// The values of a parameter, and their lease of the memory budget.
type Pulled = (Buffer, Lease);

struct Resident {
    leaf: Leaf,
    _lease: Lease,
}

impl<'a, S: ParameterServer> Parameters<'a, S> {
    /// Creates an empty set of parameters of `version`.
    pub fn new(link: &Link<S>, network: &'a Network, version: u64, by: PullBy) -> Self {
        Self {
            link: link.clone(),
            network,
            version,
            by,
            resident: std::iter::repeat_with(|| None)
                .take(network.model().parameters().len())
                .collect(),
            pulling: VecDeque::new(),
        }
    }

    /// Starts to pull the parameters of a segment that are neither resident nor being pulled.
    pub fn prefetch(&mut self, segment: Segment) {
        let wanted: Vec<usize> = self
            .network
            .model()
            .tensors_of(segment)
            .into_iter()
            .filter(|&tensor| self.resident[tensor].is_none())
            .filter(|tensor| !self.pulling.iter().any(|(tensors, _)| tensors.contains(tensor)))
            .collect();
        if wanted.is_empty() {
            return;
        }
        let allocate = |&tensor: &usize| {
            let bounds = self.network.bounds(tensor).clone();
            let lease = self.link.ledger.hold(bounds.numel() as usize);
            (Buffer::zeros(tensor, bounds), lease)
        };
        let (buffers, leases): (Vec<Buffer>, Vec<Lease>) = wanted.iter().map(allocate).unzip();
        let pulled = self.link.server.clone().pull(self.version, buffers, self.by);
        let task = start(&self.link.runtime, async move {
            Ok(pulled.await?.into_iter().zip(leases).collect())
        });
        self.pulling.push_back((wanted, task));
    }

    /// The parameters of a segment in the order of `Model::tensors_of`. Waits for their pulls.
    ///
    /// The caller must drop them before it calls [`Self::release`].
    pub fn take(&mut self, segment: Segment) -> Result<Vec<Leaf>> {
        self.prefetch(segment);
        let tensors = self.network.model().tensors_of(segment);
        while tensors.iter().any(|&tensor| self.resident[tensor].is_none()) {
            let (_, task) = self
                .pulling
                .pop_front()
                .expect("a tensor that was prefetched is resident or being pulled");
            for (Buffer { tensor, values, .. }, lease) in wait(&self.link.runtime, task)? {
                // The upload happens on this thread: on a GPU, each thread may have its own queue
                // and memory, and the memory of a tensor that another thread has created could be
                // overwritten while kernels of this thread still read it.
                let leaf = leaf(values, self.network.device());
                self.resident[tensor] = Some(Resident { leaf, _lease: lease });
            }
        }
        let leaves = tensors.iter().filter_map(|&tensor| self.resident[tensor].as_ref());
        Ok(leaves.map(|resident| resident.leaf.clone()).collect())
    }

    /// Frees the parameters of a segment, except those that segment `next` also reads.
    pub fn release(&mut self, segment: Segment, next: Option<Segment>) {
        let kept = next.map(|next| self.network.model().tensors_of(next)).unwrap_or_default();
        for tensor in self.network.model().tensors_of(segment) {
            if !kept.contains(&tensor) {
                self.resident[tensor] = None;
            }
        }
    }
}

/// A gradient whose bytes are counted by the ledger.
struct Held {
    values: HostValues,
    lease: Lease,
}

/// The time at which gradients are pushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PushSchedule {
    /// The gradients of a segment are pushed when they are complete, during the backward pass.
    WhenReady,
    /// All gradients are pushed together at the end of the step.
    AtTheEnd,
}

/// The gradients of one step that have not been pushed yet, summed over micro-batches.
///
/// The gradients of a segment are summed in the order of the micro-batches. The two gradients of a
/// tied tensor are added last (first the head's, then the embedding's). Therefore the bits do not
/// depend on whether a level processes the micro-batches one after the other or segment by segment.
pub struct Outbox<'a, S> {
    link: Link<S>,
    network: &'a Network,
    schedule: PushSchedule,
    sums: Vec<(Segment, Vec<Held>)>,
    /// Gradients of tied tensors from the first of the two segments that use them.
    partial: Vec<(usize, Held)>,
    /// Gradients that can be pushed.
    complete: Vec<(usize, Held)>,
    pushes: Pushes<S>,
}

impl<'a, S: ParameterServer> Outbox<'a, S> {
    /// Creates an outbox for the gradients of `step`.
    pub fn new(link: &Link<S>, network: &'a Network, step: u64, schedule: PushSchedule) -> Self {
        Self {
            link: link.clone(),
            network,
            schedule,
            sums: Vec::new(),
            partial: Vec::new(),
            complete: Vec::new(),
            pushes: Pushes::new(link.server.clone(), &link.runtime, step),
        }
    }

    /// Adds the gradients of one micro-batch for a segment, in the order of `Model::tensors_of`.
    pub fn add(&mut self, segment: Segment, gradients: Vec<HostValues>) {
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
            if let Some(first) = self.partial.iter().position(|(tied, _)| *tied == tensor) {
                let (_, mut total) = self.partial.swap_remove(first);
                accumulate(&mut total.values, &sum.values);
                self.complete.push((tensor, total));
            } else if self.network.model().reads_again(segment, tensor) {
                self.partial.push((tensor, sum));
            } else {
                self.complete.push((tensor, sum));
            }
        }
        match self.schedule {
            PushSchedule::WhenReady => self.push(),
            PushSchedule::AtTheEnd => Ok(()),
        }
    }

    /// Pushes the remaining gradients and waits until all have been sent.
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
