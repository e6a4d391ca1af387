//! The ranks of a job, and meshes of these ranks, from the point of view of one rank.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use zeroshard_model::{ProcessMesh, Reduction};

use super::error::{Error, Result};
use crate::collectives::{self, Collectives};

/// A call of a collective operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// "all_reduce", "all_gather", ...
    pub name: &'static str,
    /// The ranks of the group; for "send" and "recv" the sender and the receiver.
    pub group: Vec<u32>,
    /// The size of this rank's data in bytes.
    pub bytes: u64,
}

/// The ranks of a job, shared by all meshes of this process. Cheap to clone.
#[derive(Clone)]
pub struct World(Arc<Inner>);

struct Inner {
    collectives: Arc<dyn Collectives>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The calls recorded so far, while [`World::trace`] runs.
    trace: Option<Vec<Call>>,
    /// The first error of a backward pass, which cannot return it.
    failure: Option<Error>,
}

impl World {
    /// Creates a world of the ranks that `collectives` connects.
    pub fn new(collectives: Arc<dyn Collectives>) -> Self {
        Self(Arc::new(Inner { collectives, state: Mutex::default() }))
    }

    /// The rank of this process.
    pub fn rank(&self) -> u32 {
        self.0.collectives.rank()
    }

    /// Creates a mesh, which must contain this rank. All ranks of the mesh must create the same
    /// meshes, in the same order.
    ///
    /// # Errors
    /// [`Error::Invalid`] if this rank is not in the mesh; [`collectives::Error::Disagreement`] if
    /// another rank creates a different mesh.
    pub fn mesh(&self, mesh: ProcessMesh) -> Result<Mesh> {
        let rank = self.rank();
        if mesh.coordinate(rank).is_none() {
            let mesh = describe(&mesh);
            return Err(Error::refused(format!("the mesh {mesh} does not have this rank, {rank}")));
        }
        let mut ranks = mesh.ranks().to_vec();
        ranks.sort_unstable();
        self.0.collectives.agree(&ranks, "the mesh", &describe(&mesh))?;
        Ok(Mesh { process: Arc::new(mesh), world: self.clone() })
    }

    /// Runs a backward pass and returns the error of its collectives, which burn's own `backward`
    /// cannot return.
    ///
    /// Each rank must run in a separate process. At the end of a backward pass burn locks every
    /// graph of the process, and a graph stays locked while its own backward pass runs. With two
    /// ranks in one process, a rank would wait for the pass of the other rank, which in turn waits
    /// for the next collective of the first rank.
    ///
    /// # Errors
    /// The first error of a collective.
    pub fn backward<B: AutodiffBackend, const D: usize>(
        &self,
        loss: &Tensor<B, D>,
    ) -> Result<B::Gradients> {
        self.lock().failure = None;
        let gradients = loss.backward();
        match self.lock().failure.take() {
            Some(failure) => Err(failure),
            None => Ok(gradients),
        }
    }

    /// Runs `run` with collectives that are recorded and return zeros. Returns its result and the
    /// recorded calls.
    pub(crate) fn trace<T>(&self, run: impl FnOnce() -> T) -> (T, Vec<Call>) {
        self.lock().trace = Some(Vec::new());
        let result = run();
        (result, self.lock().trace.take().unwrap_or_default())
    }

    /// Records an error of a backward pass. Later errors of the same pass are dropped.
    pub(crate) fn fail(&self, error: Error) {
        self.lock().failure.get_or_insert(error);
    }

    /// Runs a collective; while tracing, records `call` and returns `dry()` instead.
    pub(crate) fn call<T>(
        &self,
        call: impl FnOnce() -> Call,
        dry: impl FnOnce() -> T,
        live: impl FnOnce(&dyn Collectives) -> collectives::Result<T>,
    ) -> Result<T> {
        if let Some(trace) = &mut self.lock().trace {
            trace.push(call());
            return Ok(dry());
        }
        Ok(live(self.0.collectives.as_ref())?)
    }

    pub(crate) fn all_reduce(
        &self,
        group: &[u32],
        reduction: Reduction,
        data: Vec<f32>,
    ) -> Result<Vec<f32>> {
        let (bytes, elements) = (size(&data), data.len());
        let call = || Call { name: "all_reduce", group: group.to_vec(), bytes };
        self.call(call, || vec![0.0; elements], |c| c.all_reduce(group, reduction, data))
    }

    pub(crate) fn all_gather(
        &self,
        group: &[u32],
        sizes: &[usize],
        data: Vec<f32>,
    ) -> Result<Vec<Vec<f32>>> {
        let call = || Call { name: "all_gather", group: group.to_vec(), bytes: size(&data) };
        let dry = || sizes.iter().map(|&size| vec![0.0; size]).collect();
        // `call` borrows the data that the last closure moves.
        let call = call();
        self.call(|| call, dry, |c| c.all_gather(group, sizes, data))
    }

    pub(crate) fn reduce_scatter(
        &self,
        group: &[u32],
        reduction: Reduction,
        parts: Vec<Vec<f32>>,
        own: usize,
    ) -> Result<Vec<f32>> {
        let bytes = parts.iter().map(|part| size(part)).sum();
        let elements = parts[own].len();
        let call = || Call { name: "reduce_scatter", group: group.to_vec(), bytes };
        self.call(call, || vec![0.0; elements], |c| c.reduce_scatter(group, reduction, parts))
    }

    pub(crate) fn send(&self, to: u32, data: Vec<f32>) -> Result<()> {
        let bytes = size(&data);
        let call = || Call { name: "send", group: vec![self.rank(), to], bytes };
        self.call(call, || (), |c| c.send(to, data))
    }

    pub(crate) fn recv(&self, from: u32, elements: usize) -> Result<Vec<f32>> {
        let call =
            || Call { name: "recv", group: vec![from, self.rank()], bytes: 4 * elements as u64 };
        self.call(call, || vec![0.0; elements], |c| c.recv(from, elements))
    }

    /// Checks that all ranks of `mesh` pass the same text.
    ///
    /// # Errors
    /// [`super::Error`] if they do not, which names a rank and both texts.
    pub fn agree(&self, mesh: &ProcessMesh, about: &str, text: &str) -> Result<()> {
        let mut ranks = mesh.ranks().to_vec();
        ranks.sort_unstable();
        Ok(self.0.collectives.agree(&ranks, about, text)?)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is consistent after a panic, because each change is a single assignment.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "World({:?})", self.0.collectives)
    }
}

/// A [`ProcessMesh`] that contains this rank, connected to its other ranks. Cheap to clone.
#[derive(Clone)]
pub struct Mesh {
    process: Arc<ProcessMesh>,
    world: World,
}

impl Mesh {
    /// The ranks and the shape of the mesh.
    pub fn process_mesh(&self) -> &Arc<ProcessMesh> {
        &self.process
    }

    /// The world to which the ranks belong.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// The rank of this process in the world.
    pub fn rank(&self) -> u32 {
        self.world.rank()
    }

    /// The coordinate of this rank along each dimension.
    pub fn coordinate(&self) -> Vec<usize> {
        self.process.coordinate(self.rank()).expect("World::mesh checks that this rank is in it")
    }

    /// The ranks along dimension `dim` whose other coordinates are those of this rank.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unknown dimension.
    pub fn group(&self, dim: usize) -> Result<Vec<u32>> {
        self.process.group(self.rank(), dim).ok_or_else(|| {
            let expected = format!("less than the number of dimensions, {}", self.process.ndim());
            Error::invalid("dimension of a mesh", dim, expected)
        })
    }

    /// The sub-mesh of the dimensions with these names that contains this rank.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unknown name.
    pub fn sub_mesh(&self, names: &[&str]) -> Result<Self> {
        let dims = names
            .iter()
            .map(|name| self.process.dim(name))
            .collect::<zeroshard_model::Result<Vec<_>>>()?;
        let process = Arc::new(self.process.sub_mesh(&dims, self.rank())?);
        Ok(Self { process, world: self.world.clone() })
    }

    /// # Errors
    /// [`Error::Invalid`] unless the mesh has one dimension. The error names `what`, the operation
    /// with this requirement.
    pub(crate) fn check_1d(&self, what: &str) -> Result<()> {
        if self.process.ndim() == 1 {
            return Ok(());
        }
        Err(Error::refused(format!(
            "{what} needs a mesh of 1 dimension, not {}; select one with `sub_mesh`",
            describe(&self.process)
        )))
    }
}

impl PartialEq for Mesh {
    fn eq(&self, other: &Self) -> bool {
        self.process == other.process && Arc::ptr_eq(&self.world.0, &other.world.0)
    }
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mesh({} of rank {})", describe(&self.process), self.rank())
    }
}

/// "dp 2 x tp 2, ranks [0, 1, 2, 3]".
fn describe(mesh: &ProcessMesh) -> String {
    let dims: Vec<String> = mesh
        .names()
        .iter()
        .zip(mesh.shape())
        .map(|(name, size)| format!("{name} {size}"))
        .collect();
    format!("{}, ranks {:?}", dims.join(" x "), mesh.ranks())
}

fn size(data: &[f32]) -> u64 {
    size_of_val(data) as u64
}
