//! A model that trains, evaluates and predicts by one call: Paddle's `DistModel`.

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

/// A module with a forward pass of its own.
pub trait StaticLayer<B: ParallelBackend>: Module<B> + Parallelize<B> {
    /// Runs it.
    ///
    /// # Errors
    /// Those of its layers.
    fn run(&self, inputs: Vec<Value<B>>) -> Result<Vec<Value<B>>>;
}

/// A loss, of outputs and labels: one number.
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

/// The result of a call.
#[derive(Debug)]
pub enum Outcome<B: ParallelBackend> {
    /// In train and eval mode.
    Loss(f32),
    /// In predict mode: "out0", "out1", ...
    Outputs(BTreeMap<String, Value<B>>),
}

/// A model in one of three modes. Made by [`to_static`].
pub struct DistModel<B: ParallelBackend, M> {
    /// INVARIANT: `Some`, except while its parameters are being replaced.
    layer: Option<M>,
    mesh: Mesh,
    sample: Batch<B>,
    loss: Option<Loss<B>>,
    optimizer: Option<ServerOptimizer>,
    mode: Mode,
}

/// Makes a model of a module, the first batch of a loader, and optionally a loss and an optimizer.
/// With both it begins in train mode, with a loss alone in eval mode, without a loss in predict
/// mode. The parameters are those of the optimizer's job; without an optimizer, those of the
/// module.
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

    /// Whole parameters, as [`ServerOptimizer::state_dict`].
    ///
    /// # Errors
    /// [`Error::Invalid`] without an optimizer; those of the cluster.
    pub fn state_dict(&self) -> Result<Vec<StateTensor>> {
        self.optimizer.as_ref().ok_or_else(no_job)?.state_dict()
    }

    /// Loads a state of [`Self::state_dict`], as [`ServerOptimizer::set_state_dict`]. Every
    /// rank calls it.
    ///
    /// # Errors
    /// [`Error::Invalid`] without an optimizer, and for a state of another module; those of the
    /// cluster.
    pub fn set_state_dict(&mut self, state: Vec<StateTensor>) -> Result<()> {
        self.optimizer.as_mut().ok_or_else(no_job)?.set_state_dict(state)
    }

    /// From now on calls train.
    ///
    /// # Errors
    /// [`Error::MissingPart`] without a loss or an optimizer.
    pub fn train(&mut self) -> Result<()> {
        self.enter(Mode::Train)
    }

    /// From now on calls compute the loss.
    ///
    /// # Errors
    /// [`Error::MissingPart`] without a loss.
    pub fn eval(&mut self) -> Result<()> {
        self.enter(Mode::Eval)
    }

    /// From now on calls give outputs.
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

    /// Runs the current mode. In train and eval mode `tensors` are inputs and then labels, in
    /// predict mode inputs alone.
    ///
    /// # Errors
    /// [`Error::Invalid`] for another number of tensors than the mode takes; those of layers,
    /// collectives and cluster.
    pub fn call(&mut self, tensors: Vec<Value<B>>) -> Result<Outcome<B>> {
        let (inputs, labels) = (self.sample.inputs.len(), self.sample.labels.len());
        let expected = if self.mode == Mode::Predict { inputs } else { inputs + labels };
        if tensors.len() != expected {
            let expected = match self.mode {
                Mode::Predict => format!("{inputs}, the inputs"),
                _ => format!("{expected}, {inputs} inputs and {labels} labels"),
            };
            return Err(Error::invalid(
                format!("tensors in {} mode", self.mode.name()),
                tensors.len(),
                expected,
            ));
        }
        if let Some(optimizer) = &self.optimizer {
            let layer = self.layer.take().expect("it is put back at once");
            // After a failed pull the module is as before, and the next pull repeats all of it.
            let pulled = optimizer.pull(layer.clone());
            self.layer = Some(pulled.as_ref().map_or(layer, M::clone));
            pulled?;
        }
        let mut inputs_then_labels = tensors;
        let labels = inputs_then_labels.split_off(inputs);
        let outputs = self.layer().run(inputs_then_labels)?;
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
            let layer = self.layer.as_ref().expect("it is there between calls");
            if let Some(optimizer) = &mut self.optimizer {
                optimizer.step::<B, M>(layer, &gradients, f64::from(value))?;
            }
        }
        Ok(Outcome::Loss(value))
    }

    fn layer(&self) -> &M {
        self.layer.as_ref().expect("it is there between calls")
    }

    fn compute_loss(&self, outputs: Vec<Value<B>>, labels: Vec<Value<B>>) -> Result<Tensor<B, 1>> {
        match &self.loss {
            Some(loss) => loss(outputs, labels),
            None => Err(Error::MissingPart { mode: self.mode.name(), missing: "a loss" }),
        }
    }

    /// The operations of this rank at a call in a mode; `None`: the current mode.
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

    /// The operations of this rank once, before the first call in a mode.
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

    /// The operations of one process with the whole model.
    ///
    /// # Errors
    /// [`Error::MissingPart`].
    pub fn serial_main_program(&self, mode: Option<Mode>) -> Result<Program> {
        let mode = mode.unwrap_or(self.mode);
        self.check(mode)?;
        let optimizer = self.optimizer.as_ref();
        let pulled = optimizer.map(|optimizer| optimizer.whole(false)).unwrap_or_default();
        let mut operations: Vec<Operation> = pulled.into_iter().map(Operation::Pull).collect();
        operations.push(Operation::Forward { module: module_name::<M>() });
        if mode != Mode::Predict {
            operations.push(Operation::Loss);
        }
        if let Some(optimizer) = optimizer.filter(|_| mode == Mode::Train) {
            operations.push(Operation::Backward);
            operations.extend(optimizer.whole(true).into_iter().map(Operation::Push));
            operations.push(Operation::Commit { optimizer: optimizer.name().to_owned() });
        }
        Ok(Program { mode, scope: Scope::Serial, kind: Kind::Main, operations })
    }

    /// The operations of one process with the whole model once, before the first call.
    ///
    /// # Errors
    /// [`Error::MissingPart`].
    pub fn serial_startup_program(&self, mode: Option<Mode>) -> Result<Program> {
        let mode = mode.unwrap_or(self.mode);
        self.check(mode)?;
        let uploaded =
            self.optimizer.as_ref().map(|optimizer| optimizer.whole(false)).unwrap_or_default();
        let operations = uploaded.into_iter().map(Operation::Upload).collect();
        Ok(Program { mode, scope: Scope::Serial, kind: Kind::Startup, operations })
    }

    /// Records the operations of the sample batch, with collectives that are not executed.
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

/// The error of a model without an optimizer.
fn no_job() -> Error {
    let expected = "made with an optimizer: a module alone has burn's own record";
    Error::invalid("model of a state", "without a job on the servers", expected)
}

/// The type's name, without its path and parameters.
fn module_name<M>() -> String {
    let name = type_name::<M>();
    let name = name.split('<').next().unwrap_or(name);
    name.rsplit("::").next().unwrap_or(name).to_owned()
}
