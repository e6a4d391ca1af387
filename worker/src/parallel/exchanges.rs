//! What a rank exchanges with the other ranks of its group (`JobSpec::group_size`): gradients,
//! which they add before each of them pushes a part, and parameters, of which each of them pulls a
//! part.
//!
//! The collective operations of a rank run in one thread, in the order in which they are requested.
//! The order is the same on all ranks as long as none of them runs a step again. Therefore the
//! ranks compare what they are about to exchange before each exchange. A rank that is at an earlier
//! attempt than another one ends it with [`ClusterError::StepAborted`], and the other rank waits
//! for it. Parameters that the ranks do not request in the same order are pulled by each rank
//! alone.

use std::future::Future;
use std::io;
use std::sync::{Arc, mpsc};
use std::thread;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use zeroshard_client::{Attempt, Exchange, Job, Slots, Values};
use zeroshard_model::{DType, Error as ClusterError};

use super::buffers::{Buffer, Gradient, targets, tensor_ids};
use super::error::{Error, Result};
use crate::collectives::Collectives;

/// The exchanges of a rank with its group.
#[derive(Debug)]
pub(crate) struct Exchanges {
    group: Arc<Group>,
    work: mpsc::Sender<Work>,
}

type Work = Box<dyn FnOnce() + Send>;

#[derive(Debug)]
struct Group {
    job: Job,
    runtime: Handle,
    collectives: Arc<dyn Collectives>,
    /// The ranks of the group.
    ranks: Vec<u32>,
}

/// The data that a rank is about to exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Subject {
    epoch: u64,
    /// The step, or the version of the parameters.
    step: u64,
    attempt: u64,
    kind: Kind,
    /// A hash of the tensors.
    tensors: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Parameters,
    Gradients,
}

/// What the subjects of the ranks have shown.
enum Meeting {
    /// All ranks exchange the same values.
    Agreed,
    /// The ranks do not pull the same parameters now.
    Missed,
    /// Another rank is at a later attempt, in this epoch.
    Late(u64),
}

impl Exchanges {
    /// Starts the thread of a rank. `collectives` connects it to the other ranks of its group, and
    /// is used by nobody else.
    ///
    /// # Errors
    /// Those of the operating system.
    pub(crate) fn start(
        job: &Job,
        runtime: &Handle,
        collectives: Arc<dyn Collectives>,
    ) -> io::Result<Self> {
        let ranks = job.spec().group_of(job.rank()).collect();
        let (job, runtime) = (job.clone(), runtime.clone());
        let (work, requested) = mpsc::channel::<Work>();
        // The thread ends when the exchanges are dropped.
        thread::Builder::new()
            .name(format!("group-{}", job.rank()))
            .spawn(move || requested.into_iter().for_each(|work| work()))?;
        Ok(Self { group: Arc::new(Group { job, runtime, collectives, ranks }), work })
    }

    /// Adds the gradients of the group, and pushes this rank's part of the sums. The exchange takes
    /// place in the order of the calls, even if the result is dropped.
    pub(crate) fn push(
        &self,
        step: u64,
        gradients: Vec<Gradient>,
    ) -> impl Future<Output = Result<()>> + Send + use<> {
        let attempt = self.group.job.attempt(step);
        let group = self.group.clone();
        let pushed = self.submit(move || group.push(attempt?, gradients));
        async move { joined(answer(pushed).await?).await }
    }

    /// Fills the buffers with the parameters of `version`. The exchange
    /// takes place in the order of the calls, even if the result is dropped.
    pub(crate) fn pull(
        &self,
        version: u64,
        buffers: Vec<Buffer>,
    ) -> impl Future<Output = Result<Vec<Buffer>>> + Send + use<> {
        let group = self.group.clone();
        let tensors: Vec<_> = buffers.iter().map(|buffer| buffer.tensor).collect();
        let exchange = group.job.exchange(&tensor_ids(&tensors));
        let part = exchange.map(|exchange| (group.start(version, exchange.clone()), exchange));
        let pulled = self.submit(move || {
            let (part, exchange) = part?;
            group.gather(version, part, &exchange, buffers)
        });
        answer(pulled)
    }

    fn submit<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> oneshot::Receiver<Result<T>> {
        let (answer, answered) = oneshot::channel();
        // If the thread has ended, the sender of the answer is dropped.
        let _ = self.work.send(Box::new(move || drop(answer.send(work()))));
        answered
    }
}

async fn answer<T>(answered: oneshot::Receiver<Result<T>>) -> Result<T> {
    let ended = || Error::internal("the thread for exchanges in the group has ended");
    answered.await.unwrap_or_else(|_| Err(ended()))
}

async fn joined<T>(task: JoinHandle<zeroshard_model::Result<T>>) -> Result<T> {
    let ended = |cause| Error::internal(format!("a transfer ended early: {cause}"));
    Ok(task.await.map_err(ended)??)
}

impl Group {
    /// Exchanges gradients, and starts to push the sums.
    fn push(
        &self,
        attempt: Attempt,
        gradients: Vec<Gradient>,
    ) -> Result<JoinHandle<zeroshard_model::Result<()>>> {
        let (tensors, values): (Vec<_>, Vec<_>) = gradients.into_iter().unzip();
        let subject = Subject {
            epoch: attempt.epoch(),
            step: attempt.step(),
            attempt: u64::from(attempt.number()),
            kind: Kind::Gradients,
            tensors: hash(&tensors),
        };
        if let Meeting::Late(epoch) = self.meet(subject)? {
            self.runtime.block_on(attempt.reach_epoch(epoch))?;
            let cause = "another rank of the group has begun the step again".to_owned();
            let (job, step) = (self.job.spec().name.clone(), attempt.step());
            return Err(ClusterError::StepAborted { job, step, epoch, cause }.into());
        }
        let exchange = self.job.exchange(&tensor_ids(&tensors))?;
        let values: Vec<_> = values.into_iter().map(|values| Some(Values::from(values))).collect();
        let dtype = self.job.wire().decoded();
        let packed = |&rank: &u32| Ok(words(&exchange.pack(&values, dtype, rank)?));
        let parts = self.ranks.iter().map(packed).collect::<Result<_>>()?;
        let sizes = self.ranks.iter().map(|&rank| words_of(exchange.received_from(rank), dtype));
        let received =
            self.collectives.all_to_all(&self.ranks, &sizes.collect::<Vec<_>>(), parts)?;
        let parts = self.ranks.iter().zip(&received).map(|(&rank, words)| {
            let bytes = exchange.received_from(rank) * dtype.size();
            &bytemuck::must_cast_slice::<f32, u8>(words)[..bytes]
        });
        let sums = exchange.add(&parts.collect::<Vec<_>>(), dtype)?;
        let group = self.ranks.len();
        Ok(self.runtime.spawn(async move {
            let present = vec![true; exchange.tensors().len()];
            attempt.push_sums(&exchange, sums, &vec![&present[..]; group]).await
        }))
    }

    /// Starts to pull this rank's part of some parameters.
    fn start(
        &self,
        version: u64,
        exchange: Exchange,
    ) -> JoinHandle<zeroshard_model::Result<Vec<f32>>> {
        let job = self.job.clone();
        self.runtime.spawn(async move {
            let (dtype, numel) = (job.parameter_wire().decoded(), exchange.part_len());
            let (mut part, bytes) = (vec![0.0; words_of(numel, dtype)], numel * dtype.size());
            let slots = &mut bytemuck::must_cast_slice_mut(&mut part)[..bytes];
            job.pull_pieces(version, &exchange, Slots::new(slots, dtype)?).await?;
            Ok(part)
        })
    }

    /// Waits for this rank's part, and gathers the parts of all ranks.
    fn gather(
        &self,
        version: u64,
        part: JoinHandle<zeroshard_model::Result<Vec<f32>>>,
        exchange: &Exchange,
        mut buffers: Vec<Buffer>,
    ) -> Result<Vec<Buffer>> {
        let part = self.runtime.block_on(joined(part))?;
        let tensors: Vec<_> = buffers.iter().map(|buffer| buffer.tensor).collect();
        let subject = Subject {
            epoch: self.job.epoch(),
            step: version,
            attempt: 0,
            kind: Kind::Parameters,
            tensors: hash(&tensors),
        };
        match self.meet(subject)? {
            Meeting::Agreed => {
                let messages = self.spread(exchange, part)?;
                self.place(exchange, &messages, &mut buffers)?;
            }
            Meeting::Missed | Meeting::Late(_) => {
                self.runtime.block_on(self.job.pull(version, targets(&mut buffers)))?;
            }
        }
        Ok(buffers)
    }

    /// Sends each rank the parameters that it needs of this rank's part, and returns what the
    /// ranks have sent to this one.
    fn spread(&self, exchange: &Exchange, part: Vec<f32>) -> Result<Vec<Vec<f32>>> {
        let dtype = self.job.parameter_wire().decoded();
        let taken = self.ranks.iter().map(|&rank| words_of(exchange.part_from(rank), dtype));
        let taken: Vec<_> = taken.collect();
        if exchange.is_whole() {
            return Ok(self.collectives.all_gather(&self.ranks, &taken, part)?);
        }
        let message = |&rank: &u32| {
            let mut packed = Vec::new();
            exchange.pack_part(bytemuck::must_cast_slice(&part), dtype, rank, &mut packed)?;
            Ok(words(&packed))
        };
        let given = self.ranks.iter().map(message).collect::<Result<_>>()?;
        Ok(self.collectives.all_to_all(&self.ranks, &taken, given)?)
    }

    /// Copies the parameters from all ranks to the tensors.
    fn place(
        &self,
        exchange: &Exchange,
        messages: &[Vec<f32>],
        buffers: &mut [Buffer],
    ) -> zeroshard_model::Result<()> {
        for (&rank, words) in self.ranks.iter().zip(messages) {
            let dtype = self.job.parameter_wire().decoded();
            let message = bytemuck::must_cast_slice(words);
            for piece in exchange.split(rank, message, dtype) {
                let (piece, values) = piece?;
                let mut slots = Slots::from(&mut buffers[piece.tensor].values);
                slots.fill(piece.elements.clone(), values, dtype)?;
            }
        }
        Ok(())
    }

    /// Compares `subject` with those of the other ranks. With gradients, waits for ranks that are
    /// behind this one.
    fn meet(&self, subject: Subject) -> Result<Meeting> {
        let own = subject.numbers();
        let sizes = vec![2 * own.len(); self.ranks.len()];
        loop {
            let found = self.collectives.all_gather(&self.ranks, &sizes, halves(&own))?;
            let found: Vec<Vec<u64>> = found.iter().map(|halves| numbers(halves)).collect();
            if found.iter().all(|other| *other == own) {
                return Ok(Meeting::Agreed);
            }
            if subject.kind == Kind::Parameters {
                return Ok(Meeting::Missed);
            }
            let latest = found.iter().map(|other| &other[..3]).max().unwrap_or(&own[..3]);
            if &own[..3] < latest {
                return Ok(Meeting::Late(latest[0]));
            }
            if found.iter().all(|other| other[..4] == own[..4]) {
                let step = subject.step;
                return Err(Error::internal(format!(
                    "the ranks of the group exchange different gradients in step {step}"
                )));
            }
        }
    }
}

impl Subject {
    /// The subject for the other ranks. A later attempt is greater in the first three numbers.
    fn numbers(self) -> [u64; 5] {
        [self.epoch, self.step, self.attempt, self.kind as u64, self.tensors]
    }
}

/// The FNV-1a hash of indices of tensors.
fn hash(tensors: &[usize]) -> u64 {
    let bytes = tensors.iter().flat_map(|&tensor| (tensor as u64).to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// The words of a message with `numel` values.
fn words_of(numel: usize, dtype: DType) -> usize {
    (numel * dtype.size()).div_ceil(size_of::<f32>())
}

/// Bytes as the words of a message, the last of which is filled with zeros.
fn words(bytes: &[u8]) -> Vec<f32> {
    let mut words = vec![0.0; bytes.len().div_ceil(size_of::<f32>())];
    bytemuck::must_cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
    words
}

/// Numbers as the words of a message.
fn halves(numbers: &[u64]) -> Vec<f32> {
    let halves = numbers.iter().flat_map(|&number| [(number >> 32) as u32, number as u32]);
    halves.map(f32::from_bits).collect()
}

fn numbers(halves: &[f32]) -> Vec<u64> {
    let number = |pair: &[f32]| u64::from(pair[0].to_bits()) << 32 | u64::from(pair[1].to_bits());
    halves.chunks_exact(2).map(number).collect()
}
