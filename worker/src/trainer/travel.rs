//! How parameters come to a worker and gradients leave it: on the runtime's threads, while the
//! worker's own thread computes. Which of them when is the level's business, in `levels`.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;

use tokio::runtime::Handle;
use tokio_util::task::AbortOnDropHandle;
use zeroshard_proto::{Error, Result, TensorBox};

use super::memory::{Lease, Ledger};
use super::model::Segment;
use super::network::Network;
use super::segments::{Leaf, leaf};

/// The values of one tensor, or of a box of it, flattened: parameters or their gradient.
#[derive(Debug, Clone, PartialEq)]
pub struct Buffer {
    /// Index in the manifest.
    pub tensor: usize,
    /// What of it.
    pub area: TensorBox,
    /// The elements of that, row-major.
    pub values: Vec<f32>,
}

/// Where parameters come from and gradients go: the cluster, or in tests a table.
pub trait Exchange: Send + Sync + 'static {
    /// Fills the buffers with the parameters of exactly `version`; waits for it.
    fn pull(
        &self,
        version: u64,
        buffers: Vec<Buffer>,
    ) -> impl Future<Output = Result<Vec<Buffer>>> + Send;

    /// Sends gradients of `step`, of what this rank has of the tensors. Each tensor goes once a
    /// step. The buffers are freed on return at the latest.
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
}

impl<E> Clone for Link<E> {
    fn clone(&self) -> Self {
        Self {
            exchange: self.exchange.clone(),
            runtime: self.runtime.clone(),
            ledger: self.ledger.clone(),
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
        self.runtime.block_on(transfer).unwrap_or_else(|e| {
            Err(Error::Internal { cause: format!("a transfer ended early: {e}") })
        })
    }
}

/// The parameters of one version: here, on their way, or not asked for.
///
/// Dropping it gives up what is on its way.
pub struct Parameters<'a, E> {
    link: Link<E>,
    network: &'a Network,
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
    pub fn new(link: &Link<E>, network: &'a Network, version: u64) -> Self {
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

    /// Starts to pull what a segment needs and is neither here nor on its way.
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
        let (exchange, version, ledger) =
            (self.link.exchange.clone(), self.version, self.link.ledger.clone());
        let areas: Vec<_> =
            wanted.iter().map(|&tensor| (tensor, self.network.area(tensor).clone())).collect();
        let transfer = self.link.start(async move {
            let room = |(tensor, area): (usize, TensorBox)| {
                let size = area.numel() as usize;
                (Buffer { tensor, area, values: vec![0.0; size] }, ledger.hold(size))
            };
            let (buffers, leases): (Vec<Buffer>, Vec<Lease>) = areas.into_iter().map(room).unzip();
            let buffers = exchange.pull(version, buffers).await?;
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
        self.coming.push_back((wanted, transfer));
    }

    /// A segment's parameters in the order of `Model::tensors_of`; waits for those on their way.
    ///
    /// The caller drops them before it calls [`Self::release`].
    pub fn take(&mut self, segment: Segment) -> Result<Vec<Leaf>> {
        self.prefetch(segment);
        let tensors = self.network.model().tensors_of(segment);
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
        let kept = next.map(|next| self.network.model().tensors_of(next)).unwrap_or_default();
        for tensor in self.network.model().tensors_of(segment) {
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
/// The sums are kept by segment and in the order of the micro-batches, and a tied tensor's parts
/// are added last (head, then embedding); so the bits do not depend on whether a level runs its
/// micro-batches one after the other or side by side.
pub struct Outbox<'a, E> {
    link: Link<E>,
    network: &'a Network,
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
    pub fn new(link: &Link<E>, network: &'a Network, step: u64, departure: Departure) -> Self {
        Self {
            link: link.clone(),
            network,
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
        let held =
            gradients.into_iter().map(|values| Held { lease: ledger.hold(values.len()), values });
        match self.sums.iter_mut().find(|(other, _)| *other == segment) {
            None => self.sums.push((segment, held.collect())),
            Some((_, sums)) => {
                sums.iter_mut().zip(held).for_each(|(sum, part)| sum.add(&part.values))
            }
        }
    }

    /// Says that a segment has all its micro-batches.
    pub fn finish(&mut self, segment: Segment) -> Result<()> {
        let Some(found) = self.sums.iter().position(|(other, _)| *other == segment) else {
            return Ok(());
        };
        let (_, sums) = self.sums.swap_remove(found);
        for (tensor, sum) in self.network.model().tensors_of(segment).into_iter().zip(sums) {
            if let Some(part) = self.parts.iter().position(|(tied, _)| *tied == tensor) {
                let (_, mut part) = self.parts.swap_remove(part);
                part.add(&sum.values);
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
            .map(|(tensor, held)| {
                let area = self.network.area(tensor).clone();
                (Buffer { tensor, area, values: held.values }, held.lease)
            })
            .unzip();
        self.pushing = Some(self.link.start(async move {
            let pushed = exchange.push(step, buffers).await;
            drop(leases);
            pushed
        }));
        Ok(())
    }
}
