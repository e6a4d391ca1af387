//! A module whose parameters and optimizer live on the shard servers, by boxes: Paddle's
//! `shard_optimizer`.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{Module, ParamId};
use burn::tensor::backend::AutodiffBackend;
use tokio::runtime::Handle;
use zeroshard_client::{Commit, StepReport, Traffic};
use zeroshard_proto::{
    DimPlacement as Placement, JobSpec, Manifest, Optimizer, Policy, Reduction, TensorBox,
    TensorLayout, TensorSpec, geometry::LocalTensor,
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

/// A job that trains a module.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// The job; one that exists is continued.
    pub job: JobOptions,
    /// The optimizer that the servers apply.
    pub optimizer: Optimizer,
    /// Clip by global norm: each element of a distributed parameter counts once.
    pub max_norm: Option<f64>,
}

/// The optimizer of a module, on the shard servers: each rank pulls and pushes the boxes that its
/// placements give it.
#[derive(Debug)]
pub struct ServerOptimizer {
    remote: Arc<Remote>,
    /// By number in the manifest.
    parameters: Vec<Parameter>,
    settings: ServerOptions,
    version: u64,
}

/// A whole parameter.
#[derive(Debug, Clone, PartialEq)]
pub struct StateTensor {
    /// Its path in the module.
    pub name: String,
    /// Row-major.
    pub shape: Vec<usize>,
    /// All elements.
    pub values: Vec<f32>,
}

/// Makes a module's parameters a job on the servers, or joins that of the other ranks. `mesh` has
/// all ranks of the world, from 0 on. Along those of its dimensions over which a layer is
/// distributed, the gradient lies as the parameter does; along the others, and of parameters that
/// are not distributed, it is the mean over the ranks.
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
                (parameter.shape.clone(), lie(mesh, own, &parameter.placements)?)
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

/// Placements of a gradient on the job's mesh.
fn lie(mesh: &Mesh, own: &Mesh, placements: &[Placement]) -> Result<Vec<Placement>> {
    let names = mesh.process_mesh().names();
    if let Some(name) = own.process_mesh().names().iter().find(|name| !names.contains(name)) {
        let expected = format!("one of those of the job's mesh, {names:?}");
        return Err(Error::invalid("dimension of a layer's mesh", format!("{name:?}"), expected));
    }
    let along = |name: &String| own.process_mesh().dim(name).map_or(mean(), |dim| placements[dim]);
    Ok(names.iter().map(along).collect())
}

fn mean() -> Placement {
    Placement::Partial(Reduction::Avg)
}

impl ServerOptimizer {
    /// The version that the next step starts from.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The job's name: [`Self::set_state_dict`] goes on with another.
    pub fn job(&self) -> &str {
        &self.remote.spec().name
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.remote.rank()
    }

    /// Bytes moved by this rank.
    pub fn traffic(&self) -> Traffic {
        self.remote.traffic()
    }

    /// The optimizer's name.
    pub fn name(&self) -> &'static str {
        self.settings.optimizer.name()
    }

    /// The module with the current parameters.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn pull<B: ParallelBackend, M: Module<B>>(&self, layer: M) -> Result<M> {
        let bounds = |tensor| self.remote.spec().local_box(tensor, self.remote.rank());
        let values = self.read(bounds)?.into_iter().map(|buffer| buffer.values);
        Ok(parameters::write(layer, self.parameters.iter().zip(values)))
    }

    /// Pushes this rank's gradients, and has the step applied.
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
        let (mut here, mut absent) = (Vec::new(), Vec::new());
        for (tensor, parameter) in self.trained() {
            match gradients.remove(&parameter.id) {
                Some(gradient) => here.push((tensor, gradient)),
                None => absent.push(tensor),
            }
        }
        let mut pushes = self.pushes();
        pushes.push(here, ())?;
        pushes.finish()?;
        self.commit(&absent, Commit { loss: Some(loss), ..Commit::default() })
    }

    /// The parameters that train, with their numbers in the manifest.
    pub(crate) fn trained(&self) -> impl Iterator<Item = (usize, &Parameter)> {
        self.parameters.iter().enumerate().filter(|(_, parameter)| parameter.trains)
    }

    /// Pushes of this rank's gradients of the current step.
    pub(crate) fn pushes(&self) -> Pushes<Remote> {
        Pushes::new(self.remote.clone(), self.remote.runtime(), self.version)
    }

    /// Has the step applied, once all that this rank has is pushed; it has no gradient of the
    /// `absent` tensors.
    pub(crate) fn commit(&mut self, absent: &[usize], commit: Commit) -> Result<StepReport> {
        let commit = Commit { max_norm: self.settings.max_norm, ..commit };
        let report = self.remote.commit(self.version, absent, commit)?;
        self.version = report.version;
        Ok(report)
    }

    /// Whole parameters, whatever this rank has of them.
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

    /// Loads a state of [`Self::state_dict`]: all tensors, whole. Every rank calls it, with the
    /// same state.
    ///
    /// The initial parameters of a job cannot be written a second time. So a new job ("name.1"
    /// after "name") continues from the state at version 0, and the last rank to leave the old job
    /// deletes it. The optimizer's state is carried over.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the tensor that is unknown, missing, given twice or of another
    /// shape, in which case nothing has changed; [`zeroshard_proto::Error::JobExists`] if another
    /// job has the next name; others of the cluster.
    pub fn set_state_dict(&mut self, state: Vec<StateTensor>) -> Result<()> {
        let values = self.by_number(state)?;
        let remote = self.remote.join_successor(self.version)?;
        remote.upload(|tensor| {
            let whole = TensorBox::whole(&remote.spec().manifest.tensors()[tensor].shape);
            cut(&values[tensor], &whole, &remote.spec().local_box(tensor, remote.rank()))
        })?;
        let old = std::mem::replace(&mut self.remote, Arc::new(remote));
        self.version = 0;
        Ok(old.retire()?)
    }

    /// The values of a state that has each of the job's tensors once.
    fn by_number(&self, state: Vec<StateTensor>) -> Result<Vec<Vec<f32>>> {
        let specs = self.remote.spec().manifest.tensors();
        let numbers: HashMap<&str, usize> =
            specs.iter().enumerate().map(|(number, spec)| (spec.name.as_str(), number)).collect();
        let mut found: Vec<Option<Vec<f32>>> = vec![None; specs.len()];
        for StateTensor { name, shape, values } in state {
            let what = format!("tensor {name:?} of the state");
            let Some(&number) = numbers.get(name.as_str()) else {
                let names: Vec<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
                return Err(Error::invalid(
                    what,
                    "unknown",
                    format!("one of the job's, {names:?}"),
                ));
            };
            let expected: Vec<usize> =
                specs[number].shape.iter().map(|&size| size as usize).collect();
            if shape != expected || values.len() as u64 != specs[number].numel() {
                let (found, expected) = (
                    format!("of shape {shape:?} with {} values", values.len()),
                    format!("of shape {expected:?}, and whole"),
                );
                return Err(Error::invalid(what, found, expected));
            }
            if found[number].replace(values).is_some() {
                return Err(Error::invalid(what, "given twice", "given once"));
            }
        }
        let missing = |spec: &TensorSpec| {
            Error::invalid(
                format!("tensor {:?} of the state", spec.name),
                "missing",
                "given: a state has all tensors",
            )
        };
        found
            .into_iter()
            .zip(specs)
            .map(|(values, spec)| values.ok_or_else(|| missing(spec)))
            .collect()
    }

    /// Ends this rank's part in the job in order.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn leave(&self) -> Result<()> {
        Ok(self.remote.leave()?)
    }

    /// The boxes that this rank pulls.
    pub(crate) fn pulled(&self) -> Vec<Part> {
        self.parts(|_, tensor| Some(self.remote.spec().local_box(tensor, self.remote.rank())))
    }

    /// The boxes that this rank pushes.
    pub(crate) fn pushed(&self) -> Vec<Part> {
        self.parts(|spec, tensor| {
            let local = LocalTensor::new(self.remote.spec(), tensor, self.remote.rank());
            (spec.trains() && local.contributes()).then(|| local.of.bounds().clone())
        })
    }

    /// The boxes that this rank uploads.
    pub(crate) fn uploaded(&self) -> Vec<Part> {
        self.parts(|_, tensor| {
            let local = LocalTensor::new(self.remote.spec(), tensor, self.remote.rank());
            local.uploads().then(|| local.of.bounds().clone())
        })
    }

    /// All of every tensor; of those that train, if only they are wanted.
    pub(crate) fn whole(&self, training: bool) -> Vec<Part> {
        self.parts(|spec, _| (!training || spec.trains()).then(|| TensorBox::whole(&spec.shape)))
    }

    fn parts(&self, bounds: impl Fn(&TensorSpec, usize) -> Option<TensorBox>) -> Vec<Part> {
        let tensors = self.remote.spec().manifest.tensors().iter().enumerate();
        let parts = tensors.filter_map(|(tensor, spec)| {
            let bounds = bounds(spec, tensor).filter(|bounds| !bounds.is_empty())?;
            let bytes = bounds.numel() * self.settings.job.options.wire.size() as u64;
            Some(Part { tensor: spec.name.clone(), bounds, bytes })
        });
        parts.collect()
    }
}
