//! Data parallelism: every rank has the whole module, and gradients are the mean over the ranks.

use std::collections::HashMap;

use burn::module::{Module, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use zeroshard_client::Buckets;
use zeroshard_proto::{DType, Reduction};

use super::error::{Error, Result};
use super::parameters::{self, Parameter};
use super::world::Mesh;

/// Bytes of a MB, as in Paddle's sizes.
const MB: usize = 1 << 20;

/// How a [`DataParallel`] synchronises.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataParallelOptions {
    /// A bucket of gradients that travel together closes once it has so many MB.
    pub comm_buffer_size: usize,
    /// The first bucket, the last to be sent, once it has so many.
    pub last_comm_buffer_size: usize,
    /// Whether a forward pass may leave parameters out. One that another rank used then counts as
    /// zeros here.
    pub find_unused_parameters: bool,
}

impl Default for DataParallelOptions {
    fn default() -> Self {
        Self { comm_buffer_size: 25, last_comm_buffer_size: 1, find_unused_parameters: false }
    }
}

/// A module that every rank of a mesh has, Paddle's and torch's `DataParallel`.
///
/// burn's gradients are values, so a backward pass is called on it: it adds them to those that
/// there are, and synchronises unless the *forward* pass was under [`Self::no_sync`].
#[derive(Debug)]
pub struct DataParallel<B: AutodiffBackend, M> {
    module: M,
    mesh: Mesh,
    options: DataParallelOptions,
    /// Those that train.
    parameters: Vec<Parameter>,
    buckets: Vec<Vec<usize>>,
    synchronises: bool,
    gradients: HashMap<ParamId, Vec<f32>>,
    backend: std::marker::PhantomData<B>,
}

/// What a forward pass gave.
#[derive(Debug)]
pub struct Forward<T> {
    /// Its result.
    pub output: T,
    /// Whether its backward pass synchronises.
    synchronises: bool,
}

impl<T> Forward<T> {
    /// The same pass with a result made of its own: a loss, of outputs.
    pub fn map<U>(self, function: impl FnOnce(T) -> U) -> Forward<U> {
        Forward { output: function(self.output), synchronises: self.synchronises }
    }
}

impl<B: AutodiffBackend, M: Module<B>> DataParallel<B, M> {
    /// Takes a module, on each rank of a mesh of one dimension; its parameters become those of the
    /// mesh's first rank. With one rank it works, and sends nothing.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a mesh that has not one dimension, and for a module without a
    /// parameter that trains; [`crate::collectives::Error::Disagreement`] if another rank has other
    /// parameters.
    pub fn new(module: M, mesh: &Mesh, options: DataParallelOptions) -> Result<Self> {
        mesh.check_1d("data parallelism")?;
        let all = parameters::list(&module);
        let parameters: Vec<Parameter> =
            all.iter().filter(|parameter| parameter.trains).cloned().collect();
        if parameters.is_empty() {
            return Err(Error::invalid("number of parameters that train", 0, "1 or more"));
        }
        let described: Vec<String> = all
            .iter()
            .map(|parameter| format!("{} {:?}", parameter.path, parameter.shape))
            .collect();
        mesh.world().agree(mesh.process_mesh(), "the parameters", &described.join(", "))?;
        let group = mesh.group(0)?;
        let mut own = parameters::read(&module);
        let mut values = Vec::with_capacity(all.len());
        for parameter in &all {
            let own = own.remove(&parameter.id).unwrap_or_default();
            values.push((parameter, mesh.world().broadcast(&group, group[0], own)?));
        }
        let module = parameters::write(module, values);
        let sizes: Vec<(usize, DType)> =
            parameters.iter().map(|parameter| (4 * parameter.elements(), DType::F32)).collect();
        let buckets =
            Buckets::new(&sizes, options.comm_buffer_size * MB, options.last_comm_buffer_size * MB);
        Ok(Self {
            module,
            mesh: mesh.clone(),
            options,
            parameters,
            buckets: buckets.buckets().to_vec(),
            synchronises: true,
            gradients: HashMap::new(),
            backend: std::marker::PhantomData,
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

    /// Which parameters travel together, by their numbers among those that train.
    pub fn buckets(&self) -> &[Vec<usize>] {
        &self.buckets
    }

    /// Runs a forward pass.
    pub fn forward<T>(&self, run: impl FnOnce(&M) -> T) -> Forward<T> {
        Forward { output: run(&self.module), synchronises: self.synchronises }
    }

    /// Runs something whose forward passes do not synchronise: what accumulates is part of the next
    /// synchronisation.
    pub fn no_sync<T>(&mut self, run: impl FnOnce(&mut Self) -> T) -> T {
        let before = std::mem::replace(&mut self.synchronises, false);
        let result = run(self);
        self.synchronises = before;
        result
    }

    /// Runs a backward pass, adds its gradients to those that there are, and synchronises them,
    /// unless the forward pass was under [`Self::no_sync`].
    ///
    /// # Errors
    /// [`Error::UnusedParameter`] on every rank, if a rank has no gradient of a parameter; those of
    /// the collectives.
    pub fn backward<const D: usize>(&mut self, forward: Forward<Tensor<B, D>>) -> Result<()> {
        let gradients = self.mesh.world().backward(&forward.output)?;
        for (id, gradient) in parameters::gradients::<B, M>(&self.module, &gradients) {
            match self.gradients.get_mut(&id) {
                Some(sum) => sum.iter_mut().zip(gradient).for_each(|(sum, value)| *sum += value),
                None => drop(self.gradients.insert(id, gradient)),
            }
        }
        if forward.synchronises { self.synchronise() } else { Ok(()) }
    }

    /// Makes the gradients the mean over the ranks: Paddle's `fused_allreduce_gradients`, for what
    /// ran under [`Self::no_sync`].
    ///
    /// # Errors
    /// Those of [`Self::backward`].
    pub fn synchronise(&mut self) -> Result<()> {
        let used = self.used()?;
        let (world, group) = (self.mesh.world(), self.mesh.group(0)?);
        // Backward makes gradients in about the reverse order.
        for bucket in self.buckets.iter().rev() {
            let bucket: Vec<&Parameter> = bucket
                .iter()
                .filter(|index| used[**index])
                .map(|index| &self.parameters[*index])
                .collect();
            let mut data =
                Vec::with_capacity(bucket.iter().map(|parameter| parameter.elements()).sum());
            for parameter in &bucket {
                match self.gradients.get(&parameter.id) {
                    Some(gradient) => data.extend_from_slice(gradient),
                    None => data.resize(data.len() + parameter.elements(), 0.0),
                }
            }
            let mut mean = world.all_reduce(&group, Reduction::Avg, data)?.into_iter();
            for parameter in bucket {
                self.gradients
                    .insert(parameter.id, mean.by_ref().take(parameter.elements()).collect());
            }
        }
        Ok(())
    }

    /// Takes the gradients, for an optimizer of burn's. A parameter that no rank used has none.
    pub fn gradients(&mut self) -> GradientsParams {
        parameters::for_optimizer::<B, M>(&self.module, std::mem::take(&mut self.gradients))
    }

    /// Changes the module: an optimizer's step, the same on every rank.
    #[must_use]
    pub fn update(self, function: impl FnOnce(M) -> M) -> Self {
        Self { module: function(self.module), ..self }
    }

    /// Which parameters some rank used.
    fn used(&self) -> Result<Vec<bool>> {
        let here = |parameter: &Parameter| f32::from(self.gradients.contains_key(&parameter.id));
        let here: Vec<f32> = self.parameters.iter().map(here).collect();
        let group = self.mesh.group(0)?;
        let all = self.mesh.world().all_gather(&group, &vec![here.len(); group.len()], here)?;
        if !self.options.find_unused_parameters {
            for (used, &rank) in all.iter().zip(&group) {
                if let Some(unused) = used.iter().position(|used| *used == 0.0) {
                    let parameter = self.parameters[unused].path.clone();
                    return Err(Error::UnusedParameter { parameter, rank });
                }
            }
        }
        Ok((0..self.parameters.len())
            .map(|index| all.iter().any(|used| used[index] > 0.0))
            .collect())
    }
}
