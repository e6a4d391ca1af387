//! Groups of ranks in one process, which exchange gradients and parameters without a network.

use zeroshard_client::{
    Attempt, Commit, Exchange, Job, Result, Slots, StepReport, TensorData, TensorId, Values,
};
use zeroshard_model::DType;

use crate::synthetic;

/// The gradients of the ranks of one group at one step.
pub struct Gradients {
    /// The dtype in which they are exchanged.
    pub dtype: DType,
    /// By rank of the group: its gradients, of some or all trained tensors.
    pub of_ranks: Vec<Vec<TensorData>>,
}

impl Gradients {
    /// Gradients of all tensors that are trained, in f32.
    pub fn synthetic(group: &[Job], step: u64) -> Self {
        let of = |job: &Job| synthetic::gradients(&job.spec().manifest, job.rank(), step);
        Self { dtype: DType::F32, of_ranks: group.iter().map(of).collect() }
    }
}

fn exchange(job: &Job, wanted: impl Fn(&zeroshard_model::TensorSpec) -> bool) -> Result<Exchange> {
    let tensors = job.spec().manifest.tensors().iter().enumerate();
    let tensors: Vec<_> =
        tensors.filter(|(_, spec)| wanted(spec)).map(|(t, _)| TensorId::new(t)).collect();
    job.exchange(&tensors)
}

/// Exchanges gradients in a group, and pushes the sums in the open attempt of each rank at `step`.
/// Returns the attempts.
///
/// # Errors
/// Those of [`Attempt::push_sums`].
pub async fn push(group: &[Job], step: u64, gradients: Gradients) -> Result<Vec<Attempt>> {
    let Gradients { dtype, of_ranks } = gradients;
    let mut plans = Vec::new();
    for (job, of_rank) in group.iter().zip(of_ranks) {
        let exchange = exchange(job, zeroshard_model::TensorSpec::trains)?;
        let gradient = |tensor: &TensorId| {
            of_rank.iter().find(|data| data.tensor == *tensor).map(|data| data.data.clone())
        };
        let gradients: Vec<Option<Values>> = exchange.tensors().iter().map(gradient).collect();
        plans.push((exchange, gradients));
    }
    let flags = |(_, gradients): &(Exchange, Vec<Option<Values>>)| -> Vec<bool> {
        gradients.iter().map(Option::is_some).collect()
    };
    let present: Vec<Vec<bool>> = plans.iter().map(flags).collect();
    let present: Vec<&[bool]> = present.iter().map(Vec::as_slice).collect();
    let mut attempts = Vec::new();
    for (job, (own, _)) in group.iter().zip(&plans) {
        let packed = plans.iter().map(|(of, gradients)| of.pack(gradients, dtype, job.rank()));
        let packed = packed.collect::<Result<Vec<_>>>()?;
        let received: Vec<&[u8]> = packed.iter().map(Vec::as_slice).collect();
        let attempt = job.attempt(step)?;
        attempt.push_sums(own, own.add(&received, dtype)?, &present).await?;
        attempts.push(attempt);
    }
    Ok(attempts)
}

/// Runs `step` on all ranks of a job, given in order, with synthetic gradients.
///
/// # Errors
/// Those of [`push`] and [`Attempt::commit`].
pub async fn step(jobs: &[Job], step: u64, commit: &Commit) -> Result<Vec<StepReport>> {
    let group_size = jobs[0].spec().group_size as usize;
    let mut attempts = Vec::new();
    for group in jobs.chunks(group_size) {
        attempts.extend(push(group, step, Gradients::synthetic(group, step)).await?);
    }
    let commits = attempts.iter().map(|attempt| attempt.commit(commit.clone()));
    futures_util::future::try_join_all(commits).await
}

/// Pulls the parameters of all tensors that own their storage at `version`, in pieces, and puts
/// them together for the rank at position `of` of the group, in the order of the tensors.
///
/// # Errors
/// Those of [`Job::pull_pieces`].
pub async fn pull(group: &[Job], of: usize, version: u64) -> Result<Vec<(TensorId, Vec<f32>)>> {
    let mut tensors = Vec::new();
    for buffers in [false, true] {
        let of_kind =
            |job: &Job| exchange(job, |spec| spec.alias_of.is_none() && spec.buffer == buffers);
        let receiver = of_kind(&group[of])?;
        let numel = |tensor: &TensorId| {
            let bounds = group[of].spec().local_box(tensor.index(), group[of].rank());
            bounds.size.iter().product::<u64>() as usize
        };
        let mut values: Vec<Vec<f32>> =
            receiver.tensors().iter().map(|tensor| vec![0.0; numel(tensor)]).collect();
        for job in group {
            let (own, mut message) = (of_kind(job)?, Vec::new());
            let mut part = vec![0_f32; own.part_len()];
            job.pull_pieces(version, &own, (&mut part).into()).await?;
            let part: Vec<u8> = part.iter().flat_map(|value| value.to_le_bytes()).collect();
            own.pack_part(&part, DType::F32, receiver.rank(), &mut message)?;
            assert_eq!(message.len(), 4 * own.part_for(receiver.rank()));
            assert_eq!(message.len(), 4 * receiver.part_from(job.rank()));
            for piece in receiver.split(job.rank(), &message, DType::F32) {
                let (piece, bytes) = piece?;
                let mut slots = Slots::from(&mut values[piece.tensor]);
                slots.fill(piece.elements.clone(), bytes, DType::F32)?;
            }
        }
        tensors.extend(receiver.tensors().iter().copied().zip(values));
    }
    tensors.sort_by_key(|(tensor, _)| tensor.index());
    Ok(tensors)
}
