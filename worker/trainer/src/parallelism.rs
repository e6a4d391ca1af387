//! Tensor parallelism of the trainer: `D` replicas of the model, each sharded over a group of `T`
//! ranks (Shoeybi et al. 2019). With sequence parallelism (Korthikanti et al. 2022), the
//! activations between the sharded layers are sharded along the sequence.
//!
//! The embedding is sharded by the vocabulary, attention by heads, the MLP by its hidden width. The
//! input of a sharded layer is replicated, and its output is a partial sum on each rank. This
//! module computes placements; the communication is in `network`.

use std::fmt;

use zeroshard_model::{DimPlacement as Placement, ProcessMesh, Reduction, TensorLayout};
use zeroshard_worker::parallel::PARTIAL;

use super::error::Error;
use super::model::{Architecture, Parameter};

/// The degrees of parallelism of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parallelism {
    /// The number of replicas of the model, which train on different data.
    pub replicas: u32,
    /// The number of tensor-parallel ranks of each replica. With 1 the model is not sharded.
    pub ranks: u32,
    /// Sequence parallelism: between the sharded layers, each rank holds a part of every window.
    pub sequence: bool,
}

impl Parallelism {
    /// The number of workers.
    pub fn workers(self) -> u32 {
        self.replicas * self.ranks
    }

    /// The replica to which a worker belongs. The ranks of a replica are consecutive.
    pub fn replica(self, rank: u32) -> u32 {
        rank / self.ranks
    }

    /// The mesh of all workers, with the dimensions "dp" and "tp". `None` if the model is not
    /// sharded, because the workers then do not communicate with each other.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::Invalid`] for more workers than a job may have.
    pub fn mesh(self) -> zeroshard_model::Result<Option<ProcessMesh>> {
        let mesh =
            || ProcessMesh::dense([self.replicas as usize, self.ranks as usize], ["dp", "tp"]);
        (self.ranks > 1).then(mesh).transpose()
    }

    /// The placements of a parameter's gradient on the mesh.
    pub fn placements(self, parameter: &Parameter) -> Vec<Placement> {
        let along = match parameter.shard_dim {
            Some(dim) => Placement::Shard(dim),
            // The gradient of each rank is that of its part of the windows.
            None if self.sequence => PARTIAL,
            None => Placement::Replicate,
        };
        vec![Placement::Partial(Reduction::Avg), along]
    }

    /// The layout of a parameter in the job. `None` means that every worker contributes the whole
    /// gradient, and that the servers average them.
    pub fn layout(self, parameter: &Parameter) -> Option<TensorLayout> {
        let has_layout = self.ranks > 1 && parameter.alias_of.is_none();
        has_layout.then(|| TensorLayout { mesh: 0, placements: self.placements(parameter) })
    }

    /// Checks that a model can be sharded over the ranks.
    ///
    /// # Errors
    /// [`Error::Flag`] if the number of ranks does not divide the number of heads (with sequence
    /// parallelism also the context), and if a rank would hold no part of a matrix.
    pub fn check(self, architecture: Architecture) -> Result<(), Error> {
        let Architecture { vocabulary, context, heads, hidden, .. } = architecture;
        let ranks = self.ranks as usize;
        let wrong = |flag, expected| Err(Error::Flag { flag, found: ranks.to_string(), expected });
        if !heads.is_multiple_of(ranks) {
            let divisors: Vec<_> = (1..=heads).filter(|&size| heads.is_multiple_of(size)).collect();
            let more = heads.next_multiple_of(ranks);
            let expected = format!(
                "one of {divisors:?}, the divisors of --heads {heads}; or use --heads {more}"
            );
            return wrong("--tensor-parallel", expected);
        }
        if self.sequence && !context.is_multiple_of(ranks) {
            let expected = format!(
                "a divisor of --context {context} with --sequence-parallel; or use --context {}",
                context.next_multiple_of(ranks)
            );
            return wrong("--tensor-parallel", expected);
        }
        for (what, size) in
            [("characters of the vocabulary", vocabulary), ("columns of --hidden", hidden)]
        {
            // Every rank but the last holds ceil(size / ranks) of them.
            if size.div_ceil(ranks) * (ranks - 1) >= size {
                let expected =
                    format!("a smaller number: each rank needs a part of the {size} {what}");
                return wrong("--tensor-parallel", expected);
            }
        }
        Ok(())
    }
}

/// Writes, for example, "4 workers", and the degrees of parallelism if the model is sharded.
impl fmt::Display for Parallelism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} workers", self.workers())?;
        if self.ranks > 1 {
            let sequence = if self.sequence { ", sequence parallel" } else { "" };
            write!(f, " ({} data x {} tensor parallel{sequence})", self.replicas, self.ranks)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use zeroshard_model::Layout;

    use super::*;
    use crate::model::Model;

    fn refusal(ranks: u32, sequence: bool, architecture: Architecture) -> String {
        let parallelism = Parallelism { replicas: 1, ranks, sequence };
        parallelism.check(architecture).unwrap_err().to_string()
    }

    #[test]
    fn a_model_that_cannot_be_sharded_is_refused_and_the_error_suggests_a_flag() {
        let small = Architecture::small(90, 64);
        let heads = refusal(3, false, small);
        assert!(heads.contains("[1, 2, 4]") && heads.contains("--heads 6"), "{heads}");
        let three = Architecture { heads: 6, width: 12, ..small };
        assert!(Parallelism { replicas: 1, ranks: 3, sequence: false }.check(three).is_ok());
        assert!(refusal(3, true, three).contains("--context 66"));
        assert!(
            refusal(4, false, Architecture { vocabulary: 5, ..small }).contains("5 characters")
        );
        assert!(
            refusal(4, false, Architecture { hidden: 9, ..small })
                .contains("9 columns of --hidden")
        );
    }

    #[test]
    fn the_ranks_of_a_replica_hold_each_sharded_tensor_once() {
        let model = Model::new(Architecture {
            heads: 6,
            width: 12,
            hidden: 50,
            ..Architecture::small(23, 8)
        });
        for sequence in [false, true] {
            let parallelism = Parallelism { replicas: 2, ranks: 3, sequence };
            let mesh = Arc::new(parallelism.mesh().unwrap().unwrap());
            for parameter in model.parameters() {
                let layout = Layout::new(mesh.clone(), parallelism.placements(parameter)).unwrap();
                let contributions = layout.contributions(&parameter.sizes());
                assert_eq!(contributions.divisor, 2, "{}", parameter.name);
                let (boxes, ranks) = match (parameter.shard_dim, sequence) {
                    (Some(_), _) => (3, 2),
                    (None, true) => (1, 6),
                    (None, false) => (1, 2),
                };
                let found: Vec<usize> =
                    contributions.contributors.iter().map(|of| of.ranks.len()).collect();
                assert_eq!(found, vec![ranks; boxes], "{}", parameter.name);
            }
        }
    }
}
