//! The gradients and the new values of an attempt.

use zeroshard_model::{DType, Error, Result, TensorId};
use zeroshard_proto::{
    Wire,
    pb::{self, push_begin::Contents as Message},
};

use super::{super::attempts::State, Attempt};
#[cfg(doc)]
use crate::StepReport;
use crate::{Exchange, Sums, TensorData, push::Contents};

impl Attempt {
    /// Pushes gradients. The calls of one attempt must together cover all trained tensors.
    /// Gradients that other ranks contribute according to the tensor's layout, and not this rank,
    /// are omitted.
    ///
    /// # Errors
    /// [`Error::StepAborted`]: run the step again. [`Error::Invalid`], [`Error::Timeout`], …
    pub async fn push(&self, gradients: Vec<TensorData>) -> Result<()> {
        self.check_gradients(&gradients)?;
        if self.job.spec().group_size > 1 {
            let sentence = "the job has groups; push the sums of a group (Attempt::push_sums)";
            return Err(Error::refused(sentence));
        }
        let begin = self.begin(self.gradients());
        self.job.push(begin, self.job.wire(), Contents::Contributed(gradients), Some(self)).await
    }

    /// Pushes the sums of the gradients of the group, in a job with groups
    /// ([`JobSpec::group_size`]): those of the pieces of this rank. `present` states for each rank
    /// of the group whether it has a gradient of each tensor of the exchange. Tensors of which no
    /// rank of the group has one are declared absent; [`StepReport::absent`] lists no others.
    ///
    /// [`JobSpec::group_size`]: zeroshard_model::JobSpec::group_size
    ///
    /// # Errors
    /// Those of [`Self::push`].
    pub async fn push_sums(
        &self,
        exchange: &Exchange,
        sums: Sums,
        present: &[&[bool]],
    ) -> Result<()> {
        let mut is_present = vec![false; exchange.tensors().len()];
        for piece in exchange.own_pushes() {
            let mut ranks = exchange.group().zip(present);
            is_present[piece.tensor] = ranks.any(|(rank, flags)| {
                piece.ranks.contains(&rank) && flags.get(piece.tensor).copied().unwrap_or(false)
            });
        }
        let begin = self.begin(self.gradients());
        let contents = Contents::Sums(exchange, sums, &is_present);
        // A sum of bf16 numbers needs more bits than they have.
        let wire = match self.job.wire() {
            Wire::Int8 => Wire::Int8,
            Wire::Plain(_) => DType::F32.into(),
        };
        self.job.push(begin, wire, contents, Some(self)).await?;
        let tensors = exchange.tensors().iter().zip(&is_present);
        let absent: Vec<_> = tensors.filter(|(_, present)| !**present).map(|(t, _)| *t).collect();
        self.push_absent(&absent).await
    }

    /// Declares that this rank has no gradient of these tensors in the step, or none beyond the
    /// elements that it has pushed. Missing elements count as zeros. If no rank pushes any element
    /// of a tensor, the tensor is not stepped: there is no weight decay, and neither the state nor
    /// the step count changes. The declaration has no effect on a tensor that was pushed
    /// completely.
    ///
    /// # Errors
    /// Those of [`Self::push`].
    pub async fn push_absent(&self, tensors: &[TensorId]) -> Result<()> {
        let begin = self.begin(self.gradients());
        self.job.push(begin, self.job.wire(), Contents::Absent(tensors), Some(self)).await
    }

    /// Pushes new values of tensors: of buffers (such as batch-norm statistics), or of parameters
    /// that the program has written to. The ranks that replace the tensors ([`Job::replaces`]) call
    /// this before they commit; what others pass is ignored. A trained parameter has these values
    /// before the step is applied. Readers of the step's version receive those of other tensors bit
    /// for bit. The values count even if the step is skipped. A tensor that is not pushed keeps its
    /// values.
    ///
    /// [`Job::replaces`]: crate::Job::replaces
    ///
    /// # Errors
    /// Those of [`Self::push`].
    pub async fn push_values(&self, values: Vec<TensorData>) -> Result<()> {
        let State { step, number: attempt, .. } = *self.state;
        let begin = self.begin(Message::Replacement(pb::Replacement { step, attempt }));
        self.job.push(begin, DType::F32.into(), Contents::Replaced(values), Some(self)).await
    }

    /// The first message of a push of this attempt.
    fn begin(&self, contents: Message) -> pb::PushBegin {
        self.job.begin(self.state.epoch, contents)
    }

    fn gradients(&self) -> Message {
        let State { step, number: attempt, .. } = *self.state;
        Message::Gradients(pb::Gradients { step, attempt, ..Default::default() })
    }

    /// Checks that the tensors take gradients.
    fn check_gradients(&self, data: &[TensorData]) -> Result<()> {
        let tensors = self.job.0.spec.manifest.tensors();
        let buffer = |data: &TensorData| tensors.get(data.tensor.index()).filter(|of| of.buffer);
        let Some(buffer) = data.iter().find_map(buffer) else { return Ok(()) };
        Err(Error::refused(format!(
            "tensor {:?} is a buffer, which has no gradient; leave it out",
            buffer.name
        )))
    }
}
