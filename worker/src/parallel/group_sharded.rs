//! ZeRO's levels for a module: Paddle's `group_sharded_parallel`.
//!
//! Optimizer state is on the shard servers at every level. The levels differ in the lifetimes of
//! parameters and gradients in a worker:
//!
//! | level | parameters | gradients |
//! |---|---|---|
//! | `os` | stay | are copied out of burn's together, and pushed together |
//! | `os_g` | stay | each is pushed and freed as it is taken out of burn's, in buckets |
//! | `p_g_os` | from a forward pass to its backward pass | as `os_g` |
//!
//! The layers of a burn module cannot be intercepted, so all parameters of the module are pulled
//! and freed together. (The trainer knows the segments of its model, and holds one segment's
//! parameters at a time: `trainer::levels`.) burn returns the gradients of a pass at its end, so
//! none is pushed before.

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
use super::layer::Parallelize;
use super::level::Level;
use super::parameters;
use super::server_optimizer::{ServerOptimizer, ServerOptions, StateTensor, shard_optimizer};
use super::world::Mesh;

/// Elements of a bucket of gradients: Paddle's `buffer_max_size`.
const BUFFER_MAX_SIZE: usize = 1 << 23;

/// A module that trains at one of ZeRO's levels. Made by [`group_sharded_parallel`].
///
/// A step is any number of [`Self::forward`] and [`Self::backward`], whose gradients add up, and
/// then [`Self::step`], which alone sends them, as Paddle does under `no_sync`. The level does not
/// change the bits of the result.
#[derive(Debug)]
pub struct GroupSharded<B: AutodiffBackend, M> {
    module: M,
    level: Level,
    mesh: Mesh,
    optimizer: ServerOptimizer,
    buffer_max_size: usize,
    loss_scale: f64,
    /// The version of the module's parameters; `None`: they are freed, or were never pulled.
    here: Option<u64>,
    /// Gradients of the last backward pass, as burn returned them.
    last: GradientsParams,
    /// Sums of the gradients of the passes before.
    sums: HashMap<ParamId, Vec<f32>>,
    /// Sum of the passes' losses.
    loss: Option<f64>,
    backend: PhantomData<B>,
}

/// Makes a module's parameters a job on the servers, as [`shard_optimizer`] does, and trains it at
/// a level of ZeRO. Distributed parameters are transferred as boxes; the gradients of the others
/// are averaged over the mesh by the servers.
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
        here: None,
        last: GradientsParams::new(),
        sums: HashMap::new(),
        loss: None,
        backend: PhantomData,
    };
    sharded.release();
    Ok(sharded)
}

impl<B: ParallelBackend + AutodiffBackend, M: AutodiffModule<B>> GroupSharded<B, M> {
    /// The same with buckets that travel once they have so many elements; 0: each gradient travels
    /// alone.
    #[must_use]
    pub fn with_buffer_max_size(self, elements: usize) -> Self {
        Self { buffer_max_size: elements, ..self }
    }

    /// Losses are multiplied by this from now on, and the servers divide the gradients by it. A
    /// step whose gradients overflow is skipped, and reported as not applied.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a scale that is not positive, and while gradients of another one wait
    /// for their step.
    pub fn set_loss_scale(&mut self, scale: f64) -> Result<()> {
        if !(scale.is_finite() && scale > 0.0) {
            return Err(Error::invalid("loss scale", scale, "finite and more than 0"));
        }
        if self.loss.is_some() {
            return Err(Error::invalid(
                "loss scale",
                "set within a step",
                "set before its first backward pass",
            ));
        }
        self.loss_scale = scale;
        Ok(())
    }

    /// The level.
    pub fn level(&self) -> Level {
        self.level
    }

    /// The optimizer: its version, its traffic, and the way to leave the job.
    pub fn optimizer(&self) -> &ServerOptimizer {
        &self.optimizer
    }

    /// The module as it is now: with the parameters of the last forward pass, or with none (see
    /// [`Self::summon_full_params`]).
    pub fn module(&self) -> &M {
        &self.module
    }

    /// Runs a forward pass, with the current parameters.
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
        let was_here = self.here.is_some();
        let result = self.forward(run);
        if !was_here {
            self.release();
        }
        result
    }

    /// Runs the backward pass of a loss, and adds its gradients to those that wait for
    /// [`Self::step`]. Gives the loss.
    ///
    /// At `p_g_os` the parameters go with it: one backward pass for all forward passes since the
    /// last.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a loss that is not of the parameters that are here; those of the
    /// collectives.
    pub fn backward(&mut self, loss: Tensor<B, 1>) -> Result<f32> {
        if loss.dims() != [1] {
            return Err(Error::invalid("shape of a loss", format!("{:?}", loss.dims()), "[1]"));
        }
        let value = loss.clone().into_data().iter::<f32>().next().unwrap_or(f32::NAN);
        let gradients = self.mesh.world().backward(&loss.mul_scalar(self.loss_scale))?;
        let gradients = GradientsParams::from_grads(gradients, &self.module);
        if gradients.is_empty() {
            let expected = "of a forward pass since the last step, and at p_g_os since the last \
                            backward pass";
            return Err(Error::invalid("loss", "of no parameter that is here", expected));
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

    /// Pushes the sums of the backward passes, and has the step applied. The report's loss is the
    /// sum over the passes, and the mean over the ranks. A rank without a backward pass may step
    /// too: its gradients count as zeros, and the report has no loss.
    ///
    /// # Errors
    /// Those of the cluster. After [`zeroshard_proto::Error::StepAborted`] the step's passes are to
    /// be run again.
    pub fn step(&mut self) -> Result<StepReport> {
        if self.loss.is_none() {
            // A rank without a forward pass has not waited for version 0.
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
            // A parameter that several layers share comes once.
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
        let commit = Commit { loss, loss_scale: self.loss_scale, ..Commit::default() };
        self.optimizer.commit(&absent, commit)
    }

    /// Whole parameters, whatever this rank has of them.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn state_dict(&self) -> Result<Vec<StateTensor>> {
        self.optimizer.state_dict()
    }

    /// Loads a state of [`Self::state_dict`], as [`ServerOptimizer::set_state_dict`]; gradients
    /// that wait for a step are dropped. Every rank calls it.
    ///
    /// # Errors
    /// Those of [`ServerOptimizer::set_state_dict`].
    pub fn set_state_dict(&mut self, state: Vec<StateTensor>) -> Result<()> {
        self.optimizer.set_state_dict(state)?;
        (self.last, self.loss, self.here) = (GradientsParams::new(), None, None);
        self.sums.clear();
        Ok(())
    }

    fn fetch(&mut self) -> Result<()> {
        let version = self.optimizer.version();
        if self.here != Some(version) {
            self.module = self.optimizer.pull(self.module.clone())?;
            self.here = Some(version);
        }
        Ok(())
    }

    /// Frees the parameters at level `p_g_os`.
    fn release(&mut self) {
        if self.level == Level::PGOs {
            self.module = parameters::give_up(self.module.clone());
            self.here = None;
        }
    }
}

/// The sum of gradients in f32, in the order of the passes.
fn add(sum: Option<Vec<f32>>, gradient: Vec<f32>) -> Vec<f32> {
    let Some(mut sum) = sum else { return gradient };
    parameters::accumulate(&mut sum, &gradient);
    sum
}
