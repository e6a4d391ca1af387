//! Paddle's `DistModel`: a model that is trained, evaluated or used for prediction through one
//! method, depending on its mode.

use std::any::type_name;
use std::collections::BTreeMap;
use std::fmt;

use burn::module::Module;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;

use super::backend::ParallelBackend;
use super::dist_tensor::Value;
use super::error::{Error, Result};
use super::layer::Parallelize;
use super::program::{Kind, Mode, Operation, Program, Scope};
use super::server_optimizer::{ServerOptimizer, StateTensor};
use super::world::{Call, Mesh};

/// A module that [`DistModel`] can run.
pub trait StaticLayer<B: ParallelBackend>: Module<B> + Parallelize<B> {
    /// Runs the forward pass.
    ///
    /// # Errors
    /// Those of its layers.
    fn run(&self, inputs: Vec<Value<B>>) -> Result<Vec<Value<B>>>;
}

/// A loss function of outputs and labels. The result has one element.
pub type Loss<B> = Box<dyn Fn(Vec<Value<B>>, Vec<Value<B>>) -> Result<Tensor<B, 1>> + Send + Sync>;

/// A batch of a data loader. The first batch defines the number of inputs and labels, and the
/// programs are traced with it.
#[derive(Debug, Clone)]
pub struct Batch<B: ParallelBackend> {
    /// Inputs of the module.
    pub inputs: Vec<Value<B>>,
    /// Labels for the loss.
    pub labels: Vec<Value<B>>,
}

/// The result of [`DistModel::call`].
#[derive(Debug)]
pub enum Outcome<B: ParallelBackend> {
    /// The loss, in train and eval mode.
    Loss(f32),
    /// The outputs, in predict mode, named "out0", "out1", ...
    Outputs(BTreeMap<String, Value<B>>),
}

/// A model in one of three modes, created by [`to_static`].
pub struct DistModel<B: ParallelBackend, M> {
    /// INVARIANT: `Some`, except while [`Self::call`] replaces the parameters.
    layer: Option<M>,
    mesh: Mesh,
    sample: Batch<B>,
    loss: Option<Loss<B>>,
    optimizer: Option<ServerOptimizer>,
    mode: Mode,
}

/// Creates a model from a module, the first batch of a data loader, and optionally a loss and an
/// optimizer. The initial mode is train with both, eval with a loss only, and predict with neither.
/// With an optimizer the parameters are pulled from its job; without one, the model uses the
/// parameters of the module.
///
/// # Errors
/// [`Error::MissingPart`] for an optimizer without a loss.
pub fn to_static<B: ParallelBackend + AutodiffBackend, M: StaticLayer<B>>(
    layer: M,
    mesh: &Mesh,
    sample: Batch<B>,
    loss: Option<Loss<B>>,
    optimizer: Option<ServerOptimizer>,
) -> Result<DistModel<B, M>> {
    let mode = match (&loss, &optimizer) {
        (Some(_), Some(_)) => Mode::Train,
        (Some(_), None) => Mode::Eval,
        (None, None) => Mode::Predict,
        (None, Some(_)) => {
            return Err(Error::MissingPart { mode: Mode::Train.name(), missing: "a loss" });
        }
    };
    Ok(DistModel { layer: Some(layer), mesh: mesh.clone(), sample, loss, optimizer, mode })
}

impl<B: ParallelBackend + AutodiffBackend, M: StaticLayer<B>> DistModel<B, M> {
    /// The current mode.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The optimizer, if the model has one.
    pub fn optimizer(&self) -> Option<&ServerOptimizer> {
        self.optimizer.as_ref()
    }

    /// Pulls the whole parameters; see [`ServerOptimizer::state_dict`].
    ///
    /// # Errors
    /// [`Error::Invalid`] without an optimizer; those of the cluster.
    pub fn state_dict(&self) -> Result<Vec<StateTensor>> {
        self.optimizer.as_ref().ok_or_else(no_job)?.state_dict()
    }

    /// Loads a state that [`Self::state_dict`] has returned; see
    /// [`ServerOptimizer::set_state_dict`]. Every rank must call this method.
    ///
    /// # Errors
    /// [`Error::Invalid`] without an optimizer, and for a state of a different module; those of the
    /// cluster.
    pub fn set_state_dict(&mut self, state: Vec<StateTensor>) -> Result<()> {
        self.optimizer.as_mut().ok_or_else(no_job)?.set_state_dict(state)
    }

    /// Selects train mode: [`Self::call`] computes the loss and applies an optimizer step.
    ///
    /// # Errors
    /// [`Error::MissingPart`] without a loss or an optimizer.
    pub fn train(&mut self) -> Result<()> {
        self.enter(Mode::Train)
    }

    /// Selects eval mode: [`Self::call`] computes the loss.
    ///
    /// # Errors
    /// [`Error::MissingPart`] without a loss.
    pub fn eval(&mut self) -> Result<()> {
        self.enter(Mode::Eval)
    }

    /// Selects predict mode: [`Self::call`] computes the outputs.
    ///
    /// # Errors
    /// None.
    pub fn predict(&mut self) -> Result<()> {
        self.enter(Mode::Predict)
    }

    fn enter(&mut self, mode: Mode) -> Result<()> {
        self.check(mode)?;
        self.mode = mode;
        Ok(())
    }

    fn check(&self, mode: Mode) -> Result<()> {
        let missing = match mode {
            Mode::Train if self.loss.is_none() => "a loss",
            Mode::Train if self.optimizer.is_none() => "an optimizer",
            Mode::Eval if self.loss.is_none() => "a loss",
            _ => return Ok(()),
        };
        Err(Error::MissingPart { mode: mode.name(), missing })
    }

    /// Runs the model in the current mode. `tensors` are the inputs, followed by the labels in
    /// train and eval mode.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a wrong number of tensors; those of the layers, the collectives and
    /// the cluster.
    pub fn call(&mut self, tensors: Vec<Value<B>>) -> Result<Outcome<B>> {
        let (inputs, labels) = (self.sample.inputs.len(), self.sample.labels.len());
        let expected = if self.mode == Mode::Predict { inputs } else { inputs + labels };
        if tensors.len() != expected {
            let expected = match self.mode {
                Mode::Predict => format!("{inputs}, the number of inputs"),
                _ => format!("{expected}: {inputs} inputs and {labels} labels"),
            };
            return Err(Error::invalid(
                format!("number of tensors in {} mode", self.mode.name()),
                tensors.len(),
                expected,
            ));
        }
        if let Some(optimizer) = &self.optimizer {
            let layer = self.layer.take().expect("the layer is present between calls");
            // After a failed pull the old parameters stay, and the next call pulls all of them.
            let pulled = optimizer.pull(layer.clone());
            self.layer = Some(pulled.as_ref().map_or(layer, M::clone));
            pulled?;
        }
        let mut tensors = tensors;
        let labels = tensors.split_off(inputs);
        let outputs = self.layer().run(tensors)?;
        if self.mode == Mode::Predict {
            let named = outputs
                .into_iter()
                .enumerate()
                .map(|(index, value)| (format!("out{index}"), value));
            return Ok(Outcome::Outputs(named.collect()));
        }
        let loss = self.compute_loss(outputs, labels)?;
        let value = loss.clone().into_data().iter::<f32>().next().unwrap_or(f32::NAN);
        if self.mode == Mode::Train {
            let gradients = self.mesh.world().backward(&loss)?;
            let layer = self.layer.as_ref().expect("the layer is present between calls");
            if let Some(optimizer) = &mut self.optimizer {
                optimizer.step::<B, M>(layer, &gradients, f64::from(value))?;
            }
        }
        Ok(Outcome::Loss(value))
    }

    fn layer(&self) -> &M {
        self.layer.as_ref().expect("the layer is present between calls")
    }

    fn compute_loss(&self, outputs: Vec<Value<B>>, labels: Vec<Value<B>>) -> Result<Tensor<B, 1>> {
        match &self.loss {
            Some(loss) => loss(outputs, labels),
            None => Err(Error::MissingPart { mode: self.mode.name(), missing: "a loss" }),
        }
    }

    /// The operations that this rank executes in each call in `mode` (`None`: the current mode).
    ///
    /// # Errors
    /// [`Error::MissingPart`], and those of the layers.
    pub fn dist_main_program(&self, mode: Option<Mode>) -> Result<Program> {
        let mode = mode.unwrap_or(self.mode);
        self.check(mode)?;
        let optimizer = self.optimizer.as_ref();
        let pulled = optimizer.map(ServerOptimizer::pulled).unwrap_or_default();
        let mut operations: Vec<Operation> = pulled.into_iter().map(Operation::Pull).collect();
        self.trace(mode, &mut operations)?;
        if let Some(optimizer) = optimizer.filter(|_| mode == Mode::Train) {
            operations.extend(optimizer.pushed().into_iter().map(Operation::Push));
            operations.push(Operation::Commit { optimizer: optimizer.name().to_owned() });
        }
        Ok(Program { mode, scope: Scope::Dist, kind: Kind::Main, operations })
    }

    /// The operations that this rank executes once, before the first call in `mode`.
    ///
    /// # Errors
    /// [`Error::MissingPart`].
    pub fn dist_startup_program(&self, mode: Option<Mode>) -> Result<Program> {
        let mode = mode.unwrap_or(self.mode);
        self.check(mode)?;
        let uploaded = self.optimizer.as_ref().map(ServerOptimizer::uploaded).unwrap_or_default();
        let operations = uploaded.into_iter().map(Operation::Upload).collect();
        Ok(Program { mode, scope: Scope::Dist, kind: Kind::Startup, operations })
    }

    /// The operations that a single process with the whole model would execute in each call.
    ///
    /// # Errors
    /// [`Error::MissingPart`].
    pub fn serial_main_program(&self, mode: Option<Mode>) -> Result<Program> {
        let mode = mode.unwrap_or(self.mode);
        self.check(mode)?;
        let optimizer = self.optimizer.as_ref();
        let pulled = optimizer.map(ServerOptimizer::pulled_whole).unwrap_or_default();
        let mut operations: Vec<Operation> = pulled.into_iter().map(Operation::Pull).collect();
        operations.push(Operation::Forward { module: module_name::<M>() });
        if mode != Mode::Predict {
            operations.push(Operation::Loss);
        }
        if let Some(optimizer) = optimizer.filter(|_| mode == Mode::Train) {
            operations.push(Operation::Backward);
            operations.extend(optimizer.pushed_whole().into_iter().map(Operation::Push));
            operations.push(Operation::Commit { optimizer: optimizer.name().to_owned() });
        }
        Ok(Program { mode, scope: Scope::Serial, kind: Kind::Main, operations })
    }

    /// The operations that a single process with the whole model would execute once, before the
    /// first call.
    ///
    /// # Errors
    /// [`Error::MissingPart`].
    pub fn serial_startup_program(&self, mode: Option<Mode>) -> Result<Program> {
        let mode = mode.unwrap_or(self.mode);
        self.check(mode)?;
        let uploaded =
            self.optimizer.as_ref().map(ServerOptimizer::uploaded_whole).unwrap_or_default();
        let operations = uploaded.into_iter().map(Operation::Upload).collect();
        Ok(Program { mode, scope: Scope::Serial, kind: Kind::Startup, operations })
    }

    /// Records the operations for the sample batch. The collectives are not executed.
    fn trace(&self, mode: Mode, operations: &mut Vec<Operation>) -> Result<()> {
        let world = self.mesh.world();
        let Batch { inputs, labels } = self.sample.clone();
        let mut note = |operation, calls: Vec<Call>| {
            operations.push(operation);
            operations.extend(calls.into_iter().map(Operation::Collective));
        };
        let (outputs, calls) = world.trace(|| self.layer().run(inputs));
        note(Operation::Forward { module: module_name::<M>() }, calls);
        let outputs = outputs?;
        if mode == Mode::Predict {
            return Ok(());
        }
        let (loss, calls) = world.trace(|| self.compute_loss(outputs, labels));
        note(Operation::Loss, calls);
        let loss = loss?;
        if mode == Mode::Train {
            let (gradients, calls) = world.trace(|| world.backward(&loss).map(drop));
            note(Operation::Backward, calls);
            gradients?;
        }
        Ok(())
    }
}

impl<B: ParallelBackend, M> fmt::Debug for DistModel<B, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let module = module_name::<M>();
        f.debug_struct("DistModel")
            .field("layer", &module)
            .field("mode", &self.mode)
            .finish_non_exhaustive()
    }
}

/// The error for reading or writing the state of a model without an optimizer.
fn no_job() -> Error {
    Error::refused("the model has no optimizer and no job; use burn's record of the module")
}

/// The type's name, without its path and parameters.
fn module_name<M>() -> String {
    let name = type_name::<M>();
    let name = name.split('<').next().unwrap_or(name);
    name.rsplit("::").next().unwrap_or(name).to_owned()
}
