//! How parameters come to a worker and gradients leave it: on the runtime's threads, while the worker's own
//! thread computes. Which of them when is the level's business, in `levels`.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;

use tokio::runtime::Handle;
use tokio_util::task::AbortOnDropHandle;
use zeroshard_proto::{Error, Result};

use crate::memory::{Lease, Ledger};
use crate::model::{Model, Segment};
use crate::segments::{Leaf, leaf};
use crate::tensor_parallel::Group;

/// The values of one tensor, flattened: parameters or their gradient.
#[derive(Debug, Clone, PartialEq)]
pub struct Buffer {
    /// Index in the manifest.
    pub tensor: usize,
    /// All elements that this rank has of it.
    pub values: Vec<f32>,
}

/// Where parameters come from and gradients go: the cluster, or in tests a table.
pub trait Exchange: Send + Sync + 'static {
    /// Fills the buffers with the parameters of exactly `version`; waits for it.
    fn pull(&self, version: u64, buffers: Vec<Buffer>) -> impl Future<Output = Result<Vec<Buffer>>> + Send;

    /// Sends gradients of `step`. Each tensor goes once a step. The buffers are freed on return at the latest.
    fn push(&self, step: u64, gradients: Vec<Buffer>) -> impl Future<Output = Result<()>> + Send;
}

/// What a worker's own thread needs to let things travel.
pub struct Link<E> {
    /// The other end.
    pub exchange: Arc<E>,
    /// Runs the transfers. The worker's thread must not be one of its own.
    pub runtime: Handle,
    /// Counts what is held.
    pub ledger: Ledger,
    /// The ranks that have the other parts of the model; `None`: this one has all of it.
    pub group: Option<Group>,
}

impl<E> Clone for Link<E> {
    fn clone(&self) -> Self {
        Self {
            exchange: self.exchange.clone(),
            runtime: self.runtime.clone(),
            ledger: self.ledger.clone(),
            group: self.group.clone(),
        }
    }
}

type Transfer<T> = AbortOnDropHandle<Result<T>>;

impl<E: Exchange> Link<E> {
    fn start<T: Send + 'static>(
        &self,
        transfer: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Transfer<T> {
        AbortOnDropHandle::new(self.runtime.spawn(transfer))
    }

    fn wait<T>(&self, transfer: Transfer<T>) -> Result<T> {
        self.runtime
            .block_on(transfer)
            .unwrap_or_else(|e| Err(Error::Internal { cause: format!("a transfer ended early: {e}") }))
    }
}

/// The parameters of one version: here, on their way, or not asked for.
///
/// Dropping it gives up what is on its way.
pub struct Parameters<'a, E> {
    link: Link<E>,
    model: &'a Model,
    version: u64,
    here: Vec<Option<Resident>>,
    /// In the order asked for.
    coming: VecDeque<(Vec<usize>, Transfer<Vec<Resident>>)>,
}

struct Resident {
    tensor: usize,
    leaf: Leaf,
    _lease: Lease,
}

impl<'a, E: Exchange> Parameters<'a, E> {
    /// Nothing of `version` yet.
    pub fn new(link: &Link<E>, model: &'a Model, version: u64) -> Self {
        Self {
            link: link.clone(),
            model,
            version,
            here: std::iter::repeat_with(|| None).take(model.parameters().len()).collect(),
            coming: VecDeque::new(),
        }
    }

    /// Starts to pull what a segment needs and is neither here nor on its way.
    pub fn prefetch(&mut self, segment: Segment) {
        let wanted: Vec<usize> = self
            .model
            .tensors_of(segment)
            .into_iter()
            .filter(|&tensor| self.here[tensor].is_none())
            .filter(|tensor| !self.coming.iter().any(|(tensors, _)| tensors.contains(tensor)))
            .collect();
        if wanted.is_empty() {
            return;
        }
        let (exchange, version, ledger) =
            (self.link.exchange.clone(), self.version, self.link.ledger.clone());
        let sizes: Vec<usize> = wanted.iter().map(|&t| self.model.elements_of(t)).collect();
        let buffers = wanted.clone().into_iter().zip(sizes);
        let transfer = self.link.start(async move {
            let (buffers, leases): (Vec<Buffer>, Vec<Lease>) = buffers
                .map(|(tensor, size)| (Buffer { tensor, values: vec![0.0; size] }, ledger.hold(size)))
                .unzip();
            let buffers = exchange.pull(version, buffers).await?;
            Ok(buffers
                .into_iter()
                .zip(leases)
                .map(|(Buffer { tensor, values }, lease)| Resident {
                    tensor,
                    leaf: leaf(values),
                    _lease: lease,
                })
                .collect())
        });
        self.coming.push_back((wanted, transfer));
    }

    /// A segment's parameters in the order of `Model::tensors_of`; waits for those on their way.
    ///
    /// The caller drops them before it calls [`Self::release`].
    pub fn take(&mut self, segment: Segment) -> Result<Vec<Leaf>> {
        self.prefetch(segment);
        let tensors = self.model.tensors_of(segment);
        while tensors.iter().any(|&tensor| self.here[tensor].is_none()) {
            let (_, transfer) =
                self.coming.pop_front().expect("what was prefetched and is not here is on its way");
            for resident in self.link.wait(transfer)? {
                let tensor = resident.tensor;
                self.here[tensor] = Some(resident);
            }
        }
        let leaves = tensors.iter().filter_map(|&tensor| self.here[tensor].as_ref());
        Ok(leaves.map(|resident| resident.leaf.clone()).collect())
    }

    /// Frees a segment's parameters, except those that segment `next` reads too.
    pub fn release(&mut self, segment: Segment, next: Option<Segment>) {
        let kept = next.map(|next| self.model.tensors_of(next)).unwrap_or_default();
        for tensor in self.model.tensors_of(segment) {
            if !kept.contains(&tensor) {
                self.here[tensor] = None;
            }
        }
    }
}

/// A gradient that the ledger knows.
struct Held {
    values: Vec<f32>,
    lease: Lease,
}

impl Held {
    fn add(&mut self, other: &[f32]) {
        for (sum, value) in self.values.iter_mut().zip(other) {
            *sum += value;
        }
    }
}

/// When gradients leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Departure {
    /// As soon as a segment's are complete, while the backward pass goes on.
    WhenReady,
    /// All together at the end of the step.
    AtTheEnd,
}

/// The gradients of one step, summed over micro-batches, until they are pushed.
///
/// The sums are kept by segment and in the order of the micro-batches, and a tied tensor's parts are added last
/// (head, then embedding); so the bits do not depend on whether a level runs its micro-batches one after the
/// other or side by side.
pub struct Outbox<'a, E> {
    link: Link<E>,
    model: &'a Model,
    step: u64,
    departure: Departure,
    sums: Vec<(Segment, Vec<Held>)>,
    /// Parts of tied tensors whose other part is still to come.
    parts: Vec<(usize, Held)>,
    complete: Vec<(usize, Held)>,
    /// The one push under way. One is enough to keep the wire busy, and bounds what waits.
    pushing: Option<Transfer<()>>,
}

impl<'a, E: Exchange> Outbox<'a, E> {
    /// Nothing yet of `step`.
    pub fn new(link: &Link<E>, model: &'a Model, step: u64, departure: Departure) -> Self {
        Self {
            link: link.clone(),
            model,
            step,
            departure,
            sums: Vec::new(),
            parts: Vec::new(),
            complete: Vec::new(),
            pushing: None,
        }
    }

    /// Adds one micro-batch's gradients of a segment, in the order of `Model::tensors_of`.
    pub fn add(&mut self, segment: Segment, gradients: Vec<Vec<f32>>) {
        let ledger = &self.link.ledger;
        let held = gradients.into_iter().map(|values| Held { lease: ledger.hold(values.len()), values });
        match self.sums.iter_mut().find(|(other, _)| *other == segment) {
            None => self.sums.push((segment, held.collect())),
            Some((_, sums)) => sums.iter_mut().zip(held).for_each(|(sum, part)| sum.add(&part.values)),
        }
    }

    /// Says that a segment has all its micro-batches.
    pub fn finish(&mut self, segment: Segment) -> Result<()> {
        let Some(found) = self.sums.iter().position(|(other, _)| *other == segment) else {
            return Ok(());
        };
        let (_, sums) = self.sums.swap_remove(found);
        for (tensor, sum) in self.model.tensors_of(segment).into_iter().zip(sums) {
            if let Some(part) = self.parts.iter().position(|(tied, _)| *tied == tensor) {
                let (_, mut part) = self.parts.swap_remove(part);
                part.add(&sum.values);
                self.complete.push((tensor, part));
            } else if self.model.reads_again(segment, tensor) {
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

    /// Pushes what is left and waits until everything has arrived.
    pub fn close(mut self) -> Result<()> {
        self.push()?;
        match self.pushing.take() {
            Some(transfer) => self.link.wait(transfer),
            None => Ok(()),
        }
    }

    fn push(&mut self) -> Result<()> {
        if self.complete.is_empty() {
            return Ok(());
        }
        if let Some(transfer) = self.pushing.take() {
            self.link.wait(transfer)?;
        }
        let (exchange, step) = (self.link.exchange.clone(), self.step);
        let (buffers, leases): (Vec<Buffer>, Vec<Lease>) = std::mem::take(&mut self.complete)
            .into_iter()
            .map(|(tensor, held)| (Buffer { tensor, values: held.values }, held.lease))
            .unzip();
        self.pushing = Some(self.link.start(async move {
            let pushed = exchange.push(step, buffers).await;
            drop(leases);
            pushed
        }));
        Ok(())
    }
}
