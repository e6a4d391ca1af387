//! Tensor parallelism of the trainer: `D` replicas of the model, each cut over a group of `T` ranks
//! (Shoeybi et al. 2019), whose tokens may be cut too where the model is not (sequence parallelism:
//! Korthikanti et al. 2022).
//!
//! The embedding is cut by the vocabulary, attention by heads, the MLP by its inner width: what
//! comes in is whole, what comes out are parts of a sum. [`Group`] has the places in between, for
//! `segments`.

use std::fmt;
use std::sync::Arc;

use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use zeroshard_proto::{
    DimPlacement as Placement, Layout, ProcessMesh, Reduction, TensorBox, TensorLayout,
};

use crate::collectives::Collectives;
use crate::error::Error;
use crate::model::{Architecture, Model, Parameter};
use crate::parallel::{DistTensor, Mesh, PARTIAL, Result, World};
use crate::segments::Graph;

/// How many replicas there are, and how each is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parallelism {
    /// Replicas of the model: ranks that see different data.
    pub replicas: u32,
    /// Ranks that have one replica together. 1: the model is not cut.
    pub ranks: u32,
    /// Between the cut layers each rank has its part of every window, not all of them.
    pub sequence: bool,
}

impl Parallelism {
    /// Number of workers.
    pub fn workers(self) -> u32 {
        self.replicas * self.ranks
    }

    /// The replica that a worker belongs to. Its ranks follow each other.
    pub fn replica(self, rank: u32) -> u32 {
        rank / self.ranks
    }

    /// The workers as a mesh "dp" x "tp"; `None` if the model is not cut, and the workers need not
    /// know each other.
    ///
    /// # Errors
    /// [`zeroshard_proto::Error::Invalid`] for more workers than a job may have.
    pub fn mesh(self) -> zeroshard_proto::Result<Option<ProcessMesh>> {
        let mesh =
            || ProcessMesh::dense([self.replicas as usize, self.ranks as usize], ["dp", "tp"]);
        (self.ranks > 1).then(mesh).transpose()
    }

    /// How a parameter and its gradient lie on the mesh.
    pub fn placements(self, parameter: &Parameter) -> Vec<Placement> {
        let along = match parameter.cut {
            Some(dim) => Placement::Shard(dim),
            // Each rank's gradient is that of its part of the windows.
            None if self.sequence => PARTIAL,
            None => Placement::Replicate,
        };
        vec![Placement::Partial(Reduction::Avg), along]
    }

    /// The same for a job; `None`: every worker gives all of it, and the mean is taken.
    pub fn layout(self, parameter: &Parameter) -> Option<TensorLayout> {
        let cut = self.ranks > 1 && parameter.alias_of.is_none();
        cut.then(|| TensorLayout { mesh: 0, placements: self.placements(parameter) })
    }

    /// Checks that a model can be cut so.
    ///
    /// # Errors
    /// [`Error::Flag`] for heads or windows that do not divide, and a rank for which nothing would
    /// be left.
    pub fn check(self, architecture: Architecture) -> Result<(), Error> {
        let Architecture { vocabulary, context, heads, hidden, .. } = architecture;
        let ranks = self.ranks as usize;
        let wrong = |flag, expected| Err(Error::Flag { flag, found: ranks.to_string(), expected });
        if !heads.is_multiple_of(ranks) {
            let divisors: Vec<_> = (1..=heads).filter(|&size| heads.is_multiple_of(size)).collect();
            let more = heads.next_multiple_of(ranks);
            let expected = format!(
                "one of {divisors:?}, since each worker of a group has some of the {heads} heads whole; or take --heads {more}"
            );
            return wrong("--tensor-parallel", expected);
        }
        if self.sequence && !context.is_multiple_of(ranks) {
            let expected = format!(
                "a divisor of --context {context} with --sequence-parallel; or take --context {}",
                context.next_multiple_of(ranks)
            );
            return wrong("--tensor-parallel", expected);
        }
        for (what, size) in
            [("characters of the vocabulary", vocabulary), ("columns of --hidden", hidden)]
        {
            // Everybody but the last has a ceil(size / ranks)-th.
            if size.div_ceil(ranks) * (ranks - 1) >= size {
                let expected =
                    format!("so small that each worker of a group has some of the {size} {what}");
                return wrong("--tensor-parallel", expected);
            }
        }
        Ok(())
    }
}

/// "4 workers", and how they have the model if not each all of it.
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

/// The ranks that have a replica together, as one of them sees them. Cheap to clone.
///
/// Hidden states are `[n, t, width]`: `n` windows of `t` characters. Between the cut layers lies
/// the residual stream, of which each rank has all, or with sequence parallelism its part of every
/// window.
#[derive(Debug, Clone)]
pub struct Group {
    /// INVARIANT: of one dimension.
    mesh: Mesh,
    parallelism: Parallelism,
}

impl Group {
    /// The group of this rank on `mesh`, which is `parallelism`'s. All workers make theirs at the
    /// same time, and say the same about the run.
    ///
    /// # Errors
    /// Those of the collectives; that another worker has another mesh, or said something else.
    pub fn new(
        collectives: Arc<dyn Collectives>,
        mesh: ProcessMesh,
        parallelism: Parallelism,
        said: &str,
    ) -> Result<Self> {
        let world = World::new(collectives);
        let all = world.mesh(mesh)?;
        world.agree(all.process_mesh(), "the run", said)?;
        Ok(Self { mesh: all.sub_mesh(&["tp"])?, parallelism })
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.parallelism.ranks as usize
    }

    /// This rank's part of a parameter.
    pub fn area(&self, parameter: &Parameter) -> TensorBox {
        let placement = self.parallelism.placements(parameter)[1];
        let layout = Layout::new(self.mesh.process_mesh().clone(), vec![placement]);
        let layout = layout.expect("the mesh has one dimension");
        layout
            .local_box(&parameter.sizes(), self.mesh.rank())
            .expect("a mesh is made with this rank in it")
    }

    /// The first character of a window of `length` in this rank's part of the residual stream, and
    /// how many there are.
    pub fn window(&self, length: usize) -> (usize, usize) {
        if !self.parallelism.sequence {
            return (0, length);
        }
        let part = length / self.size();
        (self.mesh.coordinate()[0] * part, part)
    }

    /// From the residual stream into a cut layer: everybody has all of it, and gets a part of its
    /// gradient.
    ///
    /// # Errors
    /// Those of the collectives.
    pub fn enter(&self, x: Tensor<Graph, 3>) -> Result<Tensor<Graph, 3>> {
        let x = DistTensor::from_local(x, &self.mesh, &[self.stream()])?;
        x.convert(&[Placement::Replicate], &[PARTIAL])?.to_local_with_gradient(&[PARTIAL])
    }

    /// From a cut layer, where everybody has a part of every sum, to the residual stream.
    ///
    /// # Errors
    /// Those of the collectives.
    pub fn leave(&self, x: Tensor<Graph, 3>) -> Result<Tensor<Graph, 3>> {
        DistTensor::from_local(x, &self.mesh, &[PARTIAL])?.reshard(&[self.stream()])?.to_local()
    }

    /// The sum over the ranks, which everybody uses for the same.
    ///
    /// # Errors
    /// Those of the collectives.
    pub fn sum(&self, x: Tensor<Graph, 2>) -> Result<Tensor<Graph, 2>> {
        DistTensor::from_local(x, &self.mesh, &[PARTIAL])?.full()
    }

    /// The greatest over the ranks, of tensors that are in no graph.
    ///
    /// # Errors
    /// Those of the collectives.
    pub fn max(&self, x: Tensor<Graph, 2>) -> Result<Tensor<Graph, 2>> {
        DistTensor::from_local(x, &self.mesh, &[Placement::Partial(Reduction::Max)])?.full()
    }

    /// Runs a backward pass.
    ///
    /// # Errors
    /// Those of its collectives.
    pub fn backward(
        &self,
        loss: &Tensor<Graph, 1>,
    ) -> Result<<Graph as AutodiffBackend>::Gradients> {
        self.mesh.world().backward(loss)
    }

    fn stream(&self) -> Placement {
        if self.parallelism.sequence { Placement::Shard(1) } else { Placement::Replicate }
    }
}

/// A model as one rank runs it: all of it, or its part of what a group has together.
#[derive(Debug, Clone)]
pub struct Network {
    model: Model,
    group: Option<Group>,
    /// What this rank has of each tensor.
    areas: Vec<TensorBox>,
}

impl Network {
    /// All of a model.
    pub fn whole(model: Model) -> Self {
        Self::new(model, None)
    }

    /// A rank's part of a model; without a group, all of it.
    pub fn new(model: Model, group: Option<Group>) -> Self {
        let area = |parameter: &Parameter| match &group {
            Some(group) => group.area(parameter),
            None => TensorBox::whole(&parameter.sizes()),
        };
        let areas = model.parameters().iter().map(area).collect();
        Self { model, group, areas }
    }

    /// The whole model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Who has it together.
    pub fn group(&self) -> Option<&Group> {
        self.group.as_ref()
    }

    /// What this rank has of a tensor.
    pub fn area(&self, tensor: usize) -> &TensorBox {
        &self.areas[tensor]
    }

    /// Number of ranks that have it together.
    pub fn ranks(&self) -> usize {
        self.group.as_ref().map_or(1, Group::size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(ranks: u32, sequence: bool, architecture: Architecture) -> String {
        let parallelism = Parallelism { replicas: 1, ranks, sequence };
        parallelism.check(architecture).unwrap_err().to_string()
    }

    #[test]
    fn a_model_that_cannot_be_cut_so_is_refused_with_what_would_be_right() {
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
    fn all_ranks_have_the_model_once() {
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
                let (boxes, ranks) = match (parameter.cut, sequence) {
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
