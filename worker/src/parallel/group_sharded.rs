//! The levels of ZeRO for a burn module, after Paddle's `group_sharded_parallel`.
//!
//! The optimizer state is on the shard servers at every level. The levels differ in the time for
//! which a worker holds parameters and gradients:
//!
//! | level | parameters | gradients |
//! |---|---|---|
//! | `os` | always | all are copied out of burn's container, and pushed together |
//! | `os_g` | always | are moved out of burn's container bucket by bucket, pushed and freed |
//! | `p_g_os` | from a forward pass to its backward pass | as at `os_g` |
//!
//! The layers of a burn module cannot be intercepted, so all parameters of the module are pulled
//! and freed together. (The trainer knows the segments of its model, and holds one segment's
//! parameters at a time: `trainer::levels`.) burn returns the gradients at the end of a backward
//! pass, so no gradient is pushed during the pass.

use std::collections::HashMap;
use std::marker::PhantomData;

use burn::module::{AutodiffModule, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use tokio::runtime::Handle;
use zeroshard_client::{Commit, StepReport};

use super::backend::ParallelBackend;
use super::error::{Error, Result};
use super::host::HostValues;
use super::layer::Parallelize;
use super::level::Level;
use super::parameters;
use super::server_optimizer::{ServerOptimizer, ServerOptions, StateTensor, shard_optimizer};
use super::world::Mesh;

/// The number of elements from which a bucket of gradients is sent; Paddle's default for
/// `buffer_max_size`.
const BUFFER_MAX_SIZE: usize = 1 << 23;

/// A module that is trained at one of ZeRO's levels, created by [`group_sharded_parallel`].
///
/// A step consists of any number of [`Self::forward`] and [`Self::backward`] calls, whose gradients
/// are accumulated, and one call of [`Self::step`], which pushes the sums. The result has the same
/// bits at every level.
#[derive(Debug)]
pub struct GroupSharded<B: AutodiffBackend, M> {
    module: M,
    level: Level,
    mesh: Mesh,
    optimizer: ServerOptimizer,
    buffer_max_size: usize,
    loss_scale: f64,
    /// The version of the parameters in the module; `None` if they are freed or were never pulled.
    loaded: Option<u64>,
    /// Gradients of the last backward pass, as burn returned them.
    last: GradientsParams,
    /// Sums of the gradients of the earlier passes.
    sums: HashMap<ParamId, HostValues>,
    /// Sum of the losses of all passes.
    loss: Option<f64>,
    backend: PhantomData<B>,
}

/// Moves the parameters of a module into a job on the shard servers, like [`shard_optimizer`], and
/// trains the module at a level of ZeRO. Each rank transfers only its box of a distributed
/// parameter. For all other parameters, the servers average the gradients over the mesh.
///
/// The methods of the result block, and must not be called on a thread of `runtime`.
///
/// # Errors
/// Those of [`shard_optimizer`].
pub fn group_sharded_parallel<B, M>(
    mut module: M,
    level: Level,
    mesh: &Mesh,
    settings: ServerOptions,
    runtime: &Handle,
) -> Result<GroupSharded<B, M>>
where
    B: ParallelBackend + AutodiffBackend,
    M: AutodiffModule<B> + Parallelize<B>,
{
    let optimizer = shard_optimizer(&mut module, mesh, settings, runtime)?;
    let mut sharded = GroupSharded {
        module,
        level,
        mesh: mesh.clone(),
        optimizer,
        buffer_max_size: BUFFER_MAX_SIZE,
        loss_scale: 1.0,
        loaded: None,
        last: GradientsParams::new(),
        sums: HashMap::new(),
        loss: None,
        backend: PhantomData,
    };
    sharded.release();
    Ok(sharded)
}

impl<B: ParallelBackend + AutodiffBackend, M: AutodiffModule<B>> GroupSharded<B, M> {
    /// Sets the number of elements from which a bucket of gradients is sent. With 0 each gradient
    /// is sent alone.
    #[must_use]
    pub fn with_buffer_max_size(self, elements: usize) -> Self {
        Self { buffer_max_size: elements, ..self }
    }

    /// Sets the loss scale: losses are multiplied by it, and the servers divide the gradients by
    /// it. A step whose gradients overflow is skipped, and its report says that it was not applied.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a scale that is not positive and finite, and between the first
    /// backward pass of a step and [`Self::step`].
    pub fn set_loss_scale(&mut self, scale: f64) -> Result<()> {
        if !(scale.is_finite() && scale > 0.0) {
            return Err(Error::invalid("loss scale", scale, "finite and more than 0"));
        }
        if self.loss.is_some() {
            return Err(Error::refused(
                "the loss scale cannot change within a step; set it before the first backward pass",
            ));
        }
        self.loss_scale = scale;
        Ok(())
    }

    /// The level.
    pub fn level(&self) -> Level {
        self.level
    }

    /// The optimizer, which gives access to the version and the traffic, and leaves the job.
    pub fn optimizer(&self) -> &ServerOptimizer {
        &self.optimizer
    }

    /// The module, with the parameters of the last forward pass, or without parameters if they are
    /// freed (see [`Self::summon_full_params`]).
    pub fn module(&self) -> &M {
        &self.module
    }

    /// Runs a forward pass with the current parameters, which are pulled if necessary.
    ///
    /// # Errors
    /// Those of the cluster, and of `run`.
    pub fn forward<T>(&mut self, run: impl FnOnce(&M) -> Result<T>) -> Result<T> {
        self.fetch()?;
        run(&self.module)
    }

    /// Runs `run` with the current parameters, without a backward pass. Parameters that were pulled
    /// for it are freed afterwards.
    ///
    /// # Errors
    /// Those of the cluster, and of `run`.
    pub fn summon_full_params<T>(&mut self, run: impl FnOnce(&M) -> Result<T>) -> Result<T> {
        let was_loaded = self.loaded.is_some();
        let result = self.forward(run);
        if !was_loaded {
            self.release();
        }
        result
    }

    /// Runs the backward pass of a loss, and adds its gradients to those that [`Self::step`] will
    /// push. Returns the loss.
    ///
    /// At `p_g_os` the parameters are freed afterwards, so the loss must cover all forward passes
    /// since the last backward pass.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a loss that does not depend on the parameters now in the module;
    /// those of the collectives.
    pub fn backward(&mut self, loss: Tensor<B, 1>) -> Result<f32> {
        if loss.dims() != [1] {
            return Err(Error::invalid("shape of a loss", format!("{:?}", loss.dims()), "[1]"));
        }
        let value = loss.clone().into_data().iter::<f32>().next().unwrap_or(f32::NAN);
        let gradients = self.mesh.world().backward(&loss.mul_scalar(self.loss_scale))?;
        let gradients = GradientsParams::from_grads(gradients, &self.module);
        if gradients.is_empty() {
            return Err(Error::refused(
                "the loss does not depend on the module's current parameters; compute it with a \
                 forward pass after the last step (at p_g_os: after the last backward pass)",
            ));
        }
        let mut before = std::mem::replace(&mut self.last, gradients);
        parameters::drain(&self.module, &mut before, |id, gradient| {
            if let Some(gradient) = gradient {
                let sum = add(self.sums.remove(&id), gradient);
                self.sums.insert(id, sum);
            }
            Ok::<_, Error>(())
        })?;
        self.loss = Some(self.loss.unwrap_or(0.0) + f64::from(value));
        self.release();
        Ok(value)
    }

    /// Pushes the accumulated gradients and commits the step. The loss in the report is the sum
    /// over the passes, averaged over the ranks. A rank that has run no backward pass may call this
    /// method too: its gradients count as zeros, and the report has no loss.
    ///
    /// # Errors
    /// Those of the cluster. After [`zeroshard_model::Error::StepAborted`] all passes of the step
    /// have to be run again.
    pub fn step(&mut self) -> Result<StepReport> {
        if self.loss.is_none() {
            // A rank that has run no forward pass has not yet waited for version 0.
            self.fetch()?;
        }
        let (mut last, mut sums) = (std::mem::take(&mut self.last), std::mem::take(&mut self.sums));
        let loss = self.loss.take();
        self.release();
        let limit = if self.level == Level::Os { usize::MAX } else { self.buffer_max_size };
        let mut pushes = self.optimizer.pushes();
        let mut numbers: HashMap<ParamId, usize> =
            self.optimizer.trained().map(|(number, parameter)| (parameter.id, number)).collect();
        let (mut bucket, mut elements, mut absent) = (Vec::new(), 0, Vec::new());
        parameters::drain(&self.module, &mut last, |id, gradient| {
            // A parameter that several layers share is visited several times.
            let Some(tensor) = numbers.remove(&id) else { return Ok(()) };
            let gradient = match (sums.remove(&id), gradient) {
                (sum, Some(gradient)) => add(sum, gradient),
                (Some(sum), None) => sum,
                (None, None) => {
                    absent.push(tensor);
                    return Ok(());
                }
            };
            elements += gradient.len();
            bucket.push((tensor, gradient));
            if elements < limit {
                return Ok(());
            }
            elements = 0;
            pushes.push(std::mem::take(&mut bucket), ())
        })?;
        pushes.push(bucket, ())?;
        pushes.finish()?;
        let commit = Commit::default().loss(loss).loss_scale(self.loss_scale);
        self.optimizer.commit(&absent, commit)
    }

    /// Pulls the whole parameters, including the parts that this rank does not hold.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn state_dict(&self) -> Result<Vec<StateTensor>> {
        self.optimizer.state_dict()
    }

    /// Loads a state that [`Self::state_dict`] has returned; see
    /// [`ServerOptimizer::set_state_dict`]. Accumulated gradients are dropped. Every rank must call
    /// this method.
    ///
    /// # Errors
    /// Those of [`ServerOptimizer::set_state_dict`].
    pub fn set_state_dict(&mut self, state: Vec<StateTensor>) -> Result<()> {
        self.optimizer.set_state_dict(state)?;
        (self.last, self.loss, self.loaded) = (GradientsParams::new(), None, None);
        self.sums.clear();
        Ok(())
    }

    fn fetch(&mut self) -> Result<()> {
        let version = self.optimizer.version();
        if self.loaded != Some(version) {
            self.module = self.optimizer.pull(self.module.clone())?;
            self.loaded = Some(version);
        }
        Ok(())
    }

    /// Frees the parameters at level `p_g_os`.
    fn release(&mut self) {
        if self.level == Level::PGOs {
            self.module = parameters::free(self.module.clone());
            self.loaded = None;
        }
    }
}

/// Adds a gradient to a sum in f32. The order of the passes determines the bits.
fn add(sum: Option<HostValues>, gradient: HostValues) -> HostValues {
    let Some(mut sum) = sum else { return gradient };
    parameters::accumulate(&mut sum, &gradient);
    sum
}
