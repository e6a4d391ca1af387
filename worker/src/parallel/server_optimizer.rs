//! Paddle's `shard_optimizer`: the master weights and the optimizer state of a module are on the
//! shard servers, and each rank transfers only the boxes that it holds.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{Module, ParamId};
use burn::tensor::backend::AutodiffBackend;
use tokio::runtime::Handle;
use zeroshard_client::{Commit, StepReport, Traffic, Wire};
use zeroshard_model::{
    DType, DimPlacement as Placement, JobSpec, Manifest, Optimizer, Policy, Reduction, TensorBox,
    TensorLayout, TensorSpec, local::LocalTensor,
};

use super::backend::ParallelBackend;
use super::background::Pushes;
use super::error::{Error, Result};
use super::layer::{Layer, Parallelize, walk};
use super::parameters::{self, Parameter};
use super::placed::PlacedParameter;
use super::program::Part;
use super::remote::{Buffer, JobOptions, Remote, Seat};
use super::transfer::cut;
use super::world::Mesh;

/// The settings of a job that trains a module.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// The job. If it exists, training continues from its version.
    pub job: JobOptions,
    /// The optimizer that the servers apply.
    pub optimizer: Optimizer,
    /// The maximum global norm of the gradient, in which each element of a distributed parameter
    /// counts once; `None` disables clipping.
    pub max_norm: Option<f64>,
}

/// The optimizer of a module, on the shard servers: each rank pulls and pushes the boxes that its
/// placements give it.
#[derive(Debug)]
pub struct ServerOptimizer {
    remote: Arc<Remote>,
    /// In manifest order.
    parameters: Vec<Parameter>,
    settings: ServerOptions,
    version: u64,
}

/// A whole parameter.
#[derive(Debug, Clone, PartialEq)]
pub struct StateTensor {
    /// The path of the parameter in the module.
    pub name: String,
    /// Row-major.
    pub shape: Vec<usize>,
    /// All elements.
    pub values: Vec<f32>,
}

/// Creates a job for the parameters of a module, or joins the job that another rank has created.
/// `mesh` must contain all ranks of the world, numbered from 0. The gradient of a distributed
/// parameter has the placements of the parameter along the dimensions of the parameter's mesh.
/// Along all other dimensions, and for parameters that are not distributed, the servers average the
/// gradients over the ranks.
///
/// The methods of the result block, and must not be called on a thread of `runtime`.
///
/// # Errors
/// [`Error::Invalid`] for an invalid job, and those of the cluster.
pub fn shard_optimizer<B: ParallelBackend, M: Module<B> + Parallelize<B>>(
    layer: &mut M,
    mesh: &Mesh,
    settings: ServerOptions,
    runtime: &Handle,
) -> Result<ServerOptimizer> {
    let mut placed: HashMap<ParamId, (PlacedParameter, Mesh)> = HashMap::new();
    walk("", Layer::Module(layer), &mut |_, layer| {
        placed.extend(layer.placed());
        Ok(())
    })?;
    let parameters = parameters::list(layer);
    let policy =
        if settings.optimizer.needs_whole_tensors() { Policy::Whole } else { Policy::Elementwise };
    let mut tensors = Vec::with_capacity(parameters.len());
    for parameter in &parameters {
        let (shape, placements) = match placed.get(&parameter.id) {
            Some((parameter, own)) => {
                (parameter.shape.clone(), on_job_mesh(mesh, own, &parameter.placements)?)
            }
            None => (parameter.shape.clone(), vec![mean(); mesh.process_mesh().ndim()]),
        };
        let shape: Vec<u64> = shape.iter().map(|&size| size as u64).collect();
        let layout = Some(TensorLayout { mesh: 0, placements });
        tensors.push(TensorSpec {
            frozen: !parameter.trains,
            layout,
            policy,
            ..TensorSpec::new(&parameter.path, shape)
        });
    }
    let spec = JobSpec {
        world: mesh.process_mesh().size() as u32,
        min_servers: settings.job.min_servers,
        idle_timeout: settings.job.idle_timeout,
        meshes: vec![mesh.process_mesh().clone()],
        ..JobSpec::new(&settings.job.name, Manifest::new(tensors)?, vec![settings.optimizer])
    };
    spec.validate()?;
    let mut values = parameters::read(layer);
    let seat = Seat { rank: mesh.rank(), coordinator: &settings.job.address, reached_at: None };
    let remote = Remote::join(runtime, settings.job.options.clone(), &spec, seat)?;
    let version = remote.version();
    if version.is_none() {
        remote.upload(|tensor| values.remove(&parameters[tensor].id).unwrap_or_default())?;
    }
    let (remote, version) = (Arc::new(remote), version.unwrap_or(0));
    Ok(ServerOptimizer { remote, parameters, settings, version })
}

/// The placements of a gradient on the job's mesh. `own` is the mesh of the layer, to which
/// `placements` refer.
fn on_job_mesh(mesh: &Mesh, own: &Mesh, placements: &[Placement]) -> Result<Vec<Placement>> {
    let names = mesh.process_mesh().names();
    if let Some(name) = own.process_mesh().names().iter().find(|name| !names.contains(name)) {
        let expected = format!("one of the dimensions of the job's mesh, {names:?}");
        return Err(Error::invalid("dimension of a layer's mesh", format!("{name:?}"), expected));
    }
    let along = |name: &String| own.process_mesh().dim(name).map_or(mean(), |dim| placements[dim]);
    Ok(names.iter().map(along).collect())
}

fn mean() -> Placement {
    Placement::Partial(Reduction::Avg)
}

impl ServerOptimizer {
    /// The current version of the parameters, from which the next step starts.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The name of the current job. [`Self::set_state_dict`] changes it.
    pub fn job(&self) -> &str {
        &self.remote.spec().name
    }

    /// The rank of this process.
    pub fn rank(&self) -> u32 {
        self.remote.rank()
    }

    /// The number of bytes that this rank has transferred.
    pub fn traffic(&self) -> Traffic {
        self.remote.traffic()
    }

    /// The optimizer's name.
    pub fn name(&self) -> &'static str {
        self.settings.optimizer.name()
    }

    /// Pulls the current parameters into the module.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn pull<B: ParallelBackend, M: Module<B>>(&self, layer: M) -> Result<M> {
        let bounds = |tensor| self.remote.spec().local_box(tensor, self.remote.rank());
        let values = self.read(bounds)?.into_iter().map(|buffer| buffer.values);
        Ok(parameters::write(layer, self.parameters.iter().zip(values)))
    }

    /// Pushes the gradients of this rank and commits the step.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn step<B: AutodiffBackend, M: Module<B>>(
        &mut self,
        layer: &M,
        gradients: &B::Gradients,
        loss: f64,
    ) -> Result<StepReport> {
        let mut gradients = parameters::gradients::<B, M>(layer, gradients);
        let (mut present, mut absent) = (Vec::new(), Vec::new());
        for (tensor, parameter) in self.trained() {
            match gradients.remove(&parameter.id) {
                Some(gradient) => present.push((tensor, gradient)),
                None => absent.push(tensor),
            }
        }
        let mut pushes = self.pushes();
        pushes.push(present, ())?;
        pushes.finish()?;
        self.commit(&absent, Commit::default().loss(loss))
    }

    /// The trained parameters, with their indices in the manifest.
    pub(crate) fn trained(&self) -> impl Iterator<Item = (usize, &Parameter)> {
        self.parameters.iter().enumerate().filter(|(_, parameter)| parameter.trains)
    }

    /// A queue for pushing the gradients of the current step.
    pub(crate) fn pushes(&self) -> Pushes<Remote> {
        Pushes::new(self.remote.clone(), self.remote.runtime(), self.version)
    }

    /// Commits the step. Must be called after all gradients of this rank have been pushed.
    /// `absent` are the tensors for which this rank has no gradient.
    pub(crate) fn commit(&mut self, absent: &[usize], commit: Commit) -> Result<StepReport> {
        let commit = commit.max_norm(self.settings.max_norm);
        let report = self.remote.commit(self.version, absent, commit)?;
        self.version = report.version;
        Ok(report)
    }

    /// Pulls the whole parameters, including the parts that this rank does not hold.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn state_dict(&self) -> Result<Vec<StateTensor>> {
        let specs = self.remote.spec().manifest.tensors();
        let buffers = self.read(|tensor| TensorBox::whole(&specs[tensor].shape))?;
        let tensor = |(spec, buffer): (&TensorSpec, Buffer)| {
            let shape = spec.shape.iter().map(|&size| size as usize).collect();
            StateTensor { name: spec.name.clone(), shape, values: buffer.values }
        };
        Ok(specs.iter().zip(buffers).map(tensor).collect())
    }

    /// Reads a box of every tensor at the current version.
    fn read(&self, bounds: impl Fn(usize) -> TensorBox) -> Result<Vec<Buffer>> {
        let buffers =
            (0..self.parameters.len()).map(|tensor| Buffer::zeros(tensor, bounds(tensor)));
        Ok(self.remote.read(self.version, buffers.collect())?)
    }

    /// Loads a state that [`Self::state_dict`] has returned. It must contain every tensor, as a
    /// whole. Every rank must call this method, with the same state.
    ///
    /// The parameters of a running job cannot be replaced. Therefore the method creates a successor
    /// of the job ("name.1" for "name"), in which the state is version 0. The successor keeps the
    /// optimizer state. Every rank leaves the old job, which the coordinator deletes if it has an
    /// idle timeout.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming a tensor that is unknown, missing, repeated or of the wrong shape,
    /// in which case nothing has changed; [`zeroshard_model::Error::JobExists`] if a different job
    /// has the successor's name; those of the cluster.
    pub fn set_state_dict(&mut self, state: Vec<StateTensor>) -> Result<()> {
        let values = self.in_manifest_order(state)?;
        let remote = self.remote.join_successor(self.version)?;
        remote.upload(|tensor| {
            let whole = TensorBox::whole(&remote.spec().manifest.tensors()[tensor].shape);
            cut(&values[tensor], &whole, &remote.spec().local_box(tensor, remote.rank()))
        })?;
        let old = std::mem::replace(&mut self.remote, Arc::new(remote));
        self.version = 0;
        Ok(old.leave()?)
    }

    /// The values of a state in manifest order. The state must have each of the job's tensors once.
    fn in_manifest_order(&self, state: Vec<StateTensor>) -> Result<Vec<Vec<f32>>> {
        let specs = self.remote.spec().manifest.tensors();
        let numbers: HashMap<&str, usize> =
            specs.iter().enumerate().map(|(number, spec)| (spec.name.as_str(), number)).collect();
        let mut found: Vec<Option<Vec<f32>>> = vec![None; specs.len()];
        for StateTensor { name, shape, values } in state {
            let Some(&number) = numbers.get(name.as_str()) else {
                let names: Vec<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
                return Err(Error::refused(format!(
                    "the job has no tensor {name:?}, which the state has; it has {names:?}"
                )));
            };
            let expected: Vec<usize> =
                specs[number].shape.iter().map(|&size| size as usize).collect();
            if shape != expected || values.len() as u64 != specs[number].numel() {
                let (found, expected) = (
                    format!("of shape {shape:?} with {} values", values.len()),
                    format!("of shape {expected:?} with {} values", specs[number].numel()),
                );
                let what = format!("tensor {name:?} of the state");
                return Err(Error::invalid(what, found, expected));
            }
            if found[number].replace(values).is_some() {
                return Err(Error::refused(format!("the state has tensor {name:?} twice")));
            }
        }
        let missing = |spec: &TensorSpec| {
            let name = &spec.name;
            Error::refused(format!("the state has no tensor {name:?}, which the job has"))
        };
        found
            .into_iter()
            .zip(specs)
            .map(|(values, spec)| values.ok_or_else(|| missing(spec)))
            .collect()
    }

    /// Leaves the job in order: the other ranks are notified at once.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn leave(&self) -> Result<()> {
        Ok(self.remote.leave()?)
    }

    /// The boxes that this rank pulls.
    pub(crate) fn pulled(&self) -> Vec<Part> {
        let wire = self.settings.job.options.wire_of_parameters();
        self.parts(wire, |_, tensor| Some(self.remote.spec().local_box(tensor, self.remote.rank())))
    }

    /// The boxes that this rank pushes.
    pub(crate) fn pushed(&self) -> Vec<Part> {
        self.parts(self.settings.job.options.wire, |spec, tensor| {
            let local = LocalTensor::new(self.remote.spec(), tensor, self.remote.rank());
            (spec.trains() && local.contributes()).then(|| local.of.bounds().clone())
        })
    }

    /// The boxes that this rank uploads.
    pub(crate) fn uploaded(&self) -> Vec<Part> {
        self.parts(DType::F32.into(), |_, tensor| {
            let local = LocalTensor::new(self.remote.spec(), tensor, self.remote.rank());
            local.uploads().then(|| local.of.bounds().clone())
        })
    }

    /// The tensors that a single process pulls.
    pub(crate) fn pulled_whole(&self) -> Vec<Part> {
        let wire = self.settings.job.options.wire_of_parameters();
        self.parts(wire, |spec, _| Some(TensorBox::whole(&spec.shape)))
    }

    /// The tensors that a single process pushes.
    pub(crate) fn pushed_whole(&self) -> Vec<Part> {
        self.parts(self.settings.job.options.wire, |spec, _| {
            spec.trains().then(|| TensorBox::whole(&spec.shape))
        })
    }

    /// The tensors that a single process uploads.
    pub(crate) fn uploaded_whole(&self) -> Vec<Part> {
        self.parts(DType::F32.into(), |spec, _| Some(TensorBox::whole(&spec.shape)))
    }

    fn parts(
        &self,
        wire: Wire,
        bounds: impl Fn(&TensorSpec, usize) -> Option<TensorBox>,
    ) -> Vec<Part> {
        let tensors = self.remote.spec().manifest.tensors().iter().enumerate();
        let parts = tensors.filter_map(|(tensor, spec)| {
            let bounds = bounds(spec, tensor).filter(|bounds| !bounds.is_empty())?;
            let bytes = wire.bytes(bounds.numel() as usize) as u64;
            Some(Part { tensor: spec.name.clone(), bounds, bytes })
        });
        parts.collect()
    }
}
