//! Data parallelism: every rank has a replica of the module, and gradients are averaged over the
//! ranks.
//!
//! The servers compute the average, in rank order: the ranks join a job whose optimizer is
//! `average`, in which version `v + 1` of the parameters is the mean gradient of step `v`.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use burn::module::{Module, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use tokio::runtime::Handle;
use zeroshard_client::{Absent, Buckets, Commit, TensorId};
use zeroshard_model::{
    DType, JobSpec, Manifest, Optimizer, TensorBox, TensorSpec, optimizer::Average,
};

use super::background::Pushes;
use super::error::{Error, Result};
use super::host::HostValues;
use super::parameters::{self, Parameter};
use super::remote::{Buffer, JobOptions, Remote, Seat};
use super::world::Mesh;

/// The number of bytes in a MB, as Paddle counts it.
const MB: usize = 1 << 20;
/// The idle timeout of the job, unless the program chooses one. The job has no state worth keeping.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

type Gradients = HashMap<ParamId, HostValues>;

/// Settings of the synchronisation of a [`DataParallel`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataParallelOptions {
    /// The size in MB from which a bucket of gradients is sent.
    pub comm_buffer_size: usize,
    /// The same for the bucket that is sent last, which has the gradients of the first parameters.
    pub last_comm_buffer_size: usize,
    /// `true` if a forward pass may leave out parameters. A rank that did not use a parameter
    /// contributes zeros to its gradient.
    pub find_unused_parameters: bool,
}

impl Default for DataParallelOptions {
    fn default() -> Self {
        Self { comm_buffer_size: 25, last_comm_buffer_size: 1, find_unused_parameters: false }
    }
}

/// A module that is replicated on every rank of a mesh, as with Paddle's `DataParallel` and
/// torch's `DistributedDataParallel`.
///
/// A backward pass of burn returns the gradients instead of storing them in the parameters.
/// Therefore call [`Self::backward`]: it adds the gradients to those of earlier passes, and
/// synchronises them unless the *forward* pass ran inside [`Self::no_sync`].
///
/// The methods that synchronise block, and must not be called on a thread of the runtime.
#[derive(Debug)]
pub struct DataParallel<B: AutodiffBackend, M> {
    module: M,
    mesh: Mesh,
    options: DataParallelOptions,
    /// The trained parameters, each with its index among all parameters.
    parameters: Vec<(usize, Parameter)>,
    buckets: Vec<Vec<usize>>,
    average: Option<Averaging>,
    synchronises: bool,
    gradients: Gradients,
    backend: PhantomData<B>,
}

/// The job that averages gradients, and its version. A mesh of one rank has none.
#[derive(Debug)]
struct Averaging {
    remote: Arc<Remote>,
    version: u64,
}

/// The result of a forward pass.
#[derive(Debug)]
pub struct Forward<T> {
    /// The output.
    pub output: T,
    /// `true` if its backward pass synchronises.
    synchronises: bool,
}

impl<T> Forward<T> {
    /// Replaces the output by a function of it, such as the loss.
    pub fn map<U>(self, function: impl FnOnce(T) -> U) -> Forward<U> {
        Forward { output: function(self.output), synchronises: self.synchronises }
    }
}

impl<B: AutodiffBackend, M: Module<B>> DataParallel<B, M> {
    /// Wraps a module. Every rank of `mesh`, which must have one dimension, calls this function.
    /// The parameters are set to the values of the first rank of the mesh. The function creates the
    /// job `job`, whose name must be new and must not be used on another mesh. On a mesh of one
    /// rank no job is created.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless the mesh has one dimension, for a module without trained
    /// parameters, and for a job that is no longer at version 0;
    /// [`crate::collectives::Error::Disagreement`] if the names or shapes of the parameters differ
    /// between ranks; those of the cluster.
    pub fn new(
        module: M,
        mesh: &Mesh,
        options: DataParallelOptions,
        job: &JobOptions,
        runtime: &Handle,
    ) -> Result<Self> {
        mesh.check_1d("data parallelism")?;
        let all = parameters::list(&module);
        let parameters: Vec<(usize, Parameter)> =
            all.iter().cloned().enumerate().filter(|(_, parameter)| parameter.trains).collect();
        if parameters.is_empty() {
            return Err(Error::refused("the module has no parameters that train"));
        }
        let described: Vec<String> = all
            .iter()
            .map(|parameter| format!("{} {:?}", parameter.path, parameter.shape))
            .collect();
        mesh.world().agree(mesh.process_mesh(), "the parameters", &described.join(", "))?;
        let (module, average) = match mesh.process_mesh().size() {
            1 => (module, None),
            _ => {
                let (module, average) = Averaging::start(module, &all, mesh, job, runtime)?;
                (module, Some(average))
            }
        };
        let sizes: Vec<(usize, DType)> = parameters
            .iter()
            .map(|(_, parameter)| (4 * parameter.elements(), DType::F32))
            .collect();
        let buckets =
            Buckets::new(&sizes, options.comm_buffer_size * MB, options.last_comm_buffer_size * MB);
        Ok(Self {
            module,
            mesh: mesh.clone(),
            options,
            parameters,
            buckets: buckets.buckets().to_vec(),
            average,
            synchronises: true,
            gradients: HashMap::new(),
            backend: PhantomData,
        })
    }

    /// The module.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// The module without the wrapper.
    pub fn into_module(self) -> M {
        self.module
    }

    /// The buckets in which gradients are sent, as lists of indices of the trained parameters.
    pub fn buckets(&self) -> &[Vec<usize>] {
        &self.buckets
    }

    /// Runs a forward pass.
    pub fn forward<T>(&self, run: impl FnOnce(&M) -> T) -> Forward<T> {
        Forward { output: run(&self.module), synchronises: self.synchronises }
    }

    /// Runs `run` without synchronisation: the gradients of its forward passes are accumulated, and
    /// are part of the next synchronisation.
    pub fn no_sync<T>(&mut self, run: impl FnOnce(&mut Self) -> T) -> T {
        let before = std::mem::replace(&mut self.synchronises, false);
        let result = run(self);
        self.synchronises = before;
        result
    }

    /// Runs a backward pass and adds its gradients to those of earlier passes. Then synchronises
    /// them, unless the forward pass ran inside [`Self::no_sync`].
    ///
    /// # Errors
    /// [`Error::UnusedParameter`] on every rank, if a rank has no gradient for a parameter; those
    /// of the collectives and of the cluster. After [`zeroshard_model::Error::StepAborted`] the
    /// gradients are dropped, and all passes of the step have to be run again.
    pub fn backward<const D: usize>(&mut self, forward: Forward<Tensor<B, D>>) -> Result<()> {
        let gradients = self.mesh.world().backward(&forward.output)?;
        for (id, gradient) in parameters::gradients::<B, M>(&self.module, &gradients) {
            match self.gradients.get_mut(&id) {
                Some(sum) => parameters::accumulate(sum, &gradient),
                None => drop(self.gradients.insert(id, gradient)),
            }
        }
        if forward.synchronises { self.synchronise() } else { Ok(()) }
    }

    /// Replaces the accumulated gradients by their mean over the ranks, like Paddle's
    /// `fused_allreduce_gradients`. Call it after passes that ran inside [`Self::no_sync`].
    ///
    /// # Errors
    /// Those of [`Self::backward`].
    pub fn synchronise(&mut self) -> Result<()> {
        let mut gradients = std::mem::take(&mut self.gradients);
        let unused = match &mut self.average {
            None => {
                let unused = self.parameters.iter().filter(|(_, p)| !gradients.contains_key(&p.id));
                let absent = |(tensor, _): &(usize, Parameter)| Absent {
                    tensor: TensorId::new(*tensor),
                    rank: 0,
                    everywhere: true,
                };
                unused.map(absent).collect()
            }
            Some(average) => {
                let (absent, mean) = average.step(&self.parameters, &self.buckets, gradients)?;
                gradients = mean;
                absent
            }
        };
        let first = unused.iter().min_by_key(|absent| (absent.rank, absent.tensor));
        if let Some(&Absent { tensor, rank, .. }) = first
            && !self.options.find_unused_parameters
        {
            let named = self.parameters.iter().find(|(number, _)| *number == tensor.index());
            let parameter = named.map(|(_, parameter)| parameter.path.clone()).unwrap_or_default();
            let rank = self.mesh.process_mesh().ranks()[rank as usize];
            return Err(Error::UnusedParameter { parameter, rank });
        }
        self.gradients = gradients;
        Ok(())
    }

    /// Leaves the job, which ends when all ranks have left. Gradients cannot be synchronised
    /// afterwards.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn leave(&self) -> Result<()> {
        self.average.as_ref().map_or(Ok(()), |average| Ok(average.remote.leave()?))
    }

    /// Takes the gradients, for an optimizer of burn's. A parameter that no rank used has none.
    pub fn gradients(&mut self) -> GradientsParams {
        parameters::for_optimizer::<B, M>(&self.module, std::mem::take(&mut self.gradients))
    }

    /// Replaces the module by a function of it: an optimizer step, which must be the same on every
    /// rank.
    #[must_use]
    pub fn update(self, function: impl FnOnce(M) -> M) -> Self {
        Self { module: function(self.module), ..self }
    }
}

impl Averaging {
    /// Creates the job or joins it, and sets the module's parameters to the values of rank 0 of the
    /// job.
    fn start<B: AutodiffBackend, M: Module<B>>(
        module: M,
        all: &[Parameter],
        mesh: &Mesh,
        job: &JobOptions,
        runtime: &Handle,
    ) -> Result<(M, Self)> {
        let tensors = all.iter().map(|parameter| {
            let shape: Vec<u64> = parameter.shape.iter().map(|&size| size as u64).collect();
            TensorSpec { frozen: !parameter.trains, ..TensorSpec::new(&parameter.path, shape) }
        });
        let manifest = Manifest::new(tensors.collect())?;
        let spec = JobSpec {
            world: mesh.process_mesh().size() as u32,
            min_servers: job.min_servers,
            idle_timeout: job.idle_timeout.or(Some(IDLE_TIMEOUT)),
            ..JobSpec::new(&job.name, manifest, vec![Optimizer::Average(Average::default())])
        };
        spec.validate()?;
        // The ranks of the job are the coordinates along the mesh, not the ranks of the world.
        let rank = mesh.coordinate()[0] as u32;
        let seat = Seat { rank, coordinator: &job.address, reached_at: None };
        let remote = Arc::new(Remote::join(runtime, job.options.clone(), &spec, seat)?);
        if let Some(version) = remote.version().filter(|&version| version > 0) {
            return Err(Error::refused(format!(
                "DataParallel needs a new job, and job {:?} is at version {version}; use another \
                 name or delete the job",
                job.name
            )));
        }
        let mut own = parameters::read(&module);
        remote.upload(|tensor| own.remove(&all[tensor].id).unwrap_or_default())?;
        let initial = remote.read(0, whole(&spec, 0..all.len()))?;
        let values = all.iter().zip(initial).map(|(parameter, buffer)| (parameter, buffer.values));
        Ok((parameters::write(module, values), Self { remote, version: 0 }))
    }

    /// Pushes gradients and pulls their mean over the ranks. The result has no entry for a
    /// parameter for which no rank has a gradient.
    fn step(
        &mut self,
        parameters: &[(usize, Parameter)],
        buckets: &[Vec<usize>],
        mut gradients: Gradients,
    ) -> Result<(Vec<Absent>, Gradients)> {
        let mut pushes = Pushes::new(self.remote.clone(), self.remote.runtime(), self.version);
        let mut absent = Vec::new();
        // The last parameters are sent first, as in DDP.
        for bucket in buckets.iter().rev() {
            let mut present = Vec::with_capacity(bucket.len());
            for &index in bucket {
                let (tensor, parameter) = &parameters[index];
                match gradients.remove(&parameter.id) {
                    Some(gradient) => present.push((*tensor, gradient)),
                    None => absent.push(*tensor),
                }
            }
            pushes.push(present, ())?;
        }
        pushes.finish()?;
        let tensors = parameters.iter().map(|(tensor, _)| *tensor);
        let room = whole(self.remote.spec(), tensors);
        let (report, means) =
            self.remote.commit_and_read(self.version, &absent, Commit::default(), room)?;
        self.version = report.version;
        let averaged = |tensor: usize| {
            !report.absent.iter().any(|absent| absent.tensor.index() == tensor && absent.everywhere)
        };
        let means = parameters.iter().zip(means).filter(|((tensor, _), _)| averaged(*tensor));
        let means =
            means.map(|((_, parameter), mean)| (parameter.id, mean.values.into())).collect();
        Ok((report.absent, means))
    }
}

/// Buffers for whole tensors.
fn whole(spec: &JobSpec, tensors: impl Iterator<Item = usize>) -> Vec<Buffer> {
    let shape = |tensor: usize| TensorBox::whole(&spec.manifest.tensors()[tensor].shape);
    tensors.map(|tensor| Buffer::zeros(tensor, shape(tensor))).collect()
}
