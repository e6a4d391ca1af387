//! The specification of a job.

use std::{collections::BTreeMap, ops::Range, sync::Arc, time::Duration};

use serde_json::Value;

use crate::{
    CheckpointPolicy, DimPlacement, Error, Layout, Manifest, OnLoss, Optimizer, Policy,
    ProcessMesh, Reduction, Result, RunningAverage, SpikeAction, SpikePolicy, StateDType,
    TensorBox, TensorLayout, TensorSpec, average,
    geometry::Contributions,
    limits::{
        IDLE_TIMEOUTS, MAX_CONTRIBUTIONS, MAX_GROUP_SIZE, MAX_GROUPS, MAX_JOB_NAME, MAX_MESHES,
        MAX_REPLICAS, MAX_WORLD,
    },
    name::check_name,
};

/// A job: its tensors, optimizer, number of workers and replicas.
#[derive(Debug, Clone, PartialEq)]
pub struct JobSpec {
    /// The name, unique in the cluster.
    pub name: String,
    /// The tensors.
    pub manifest: Manifest,
    /// The optimizer of each parameter group. Groups may have optimizers of different kinds, and
    /// the state of a tensor is that of its group's.
    pub groups: Vec<Optimizer>,
    /// The number of workers.
    pub world: u32,
    /// The number of consecutive ranks that add their gradients before one of them pushes each
    /// share of the sum; it divides the number of workers. 1: every rank pushes its gradients.
    pub group_size: u32,
    /// The number of servers that must be connected before the slices are placed.
    pub min_servers: u32,
    /// The number of servers that hold each slice.
    pub replicas: u32,
    /// The meshes to which the layouts of the tensors refer.
    pub meshes: Vec<Arc<ProcessMesh>>,
    /// The effect on the other ranks when a rank leaves.
    pub departure: Departure,
    /// The coordinator deletes the job when every rank has left in order, or when no rank has held
    /// a lease for this duration. `None`: the job is kept until it is deleted.
    pub idle_timeout: Option<Duration>,
    /// When and where the job is saved. `None`: only when a client asks for it.
    pub checkpoints: Option<CheckpointPolicy>,
    /// With replicas: the servers of a slice compare its content at every version that is a
    /// multiple of this number, by default 100. 0: never.
    pub compare_every: u64,
    /// Servers with a GPU keep the optimizer state in host memory or on disk, not in the memory of
    /// the GPU; that of LAMB and Adafactor stays there. A server with a GPU and without budgets for
    /// host memory or a disk refuses the job. Results do not change.
    pub offload: bool,
    /// The seed of the stochastic rounding of int8 on the wire. Two jobs with the same seed round
    /// alike.
    pub rounding_seed: u64,
    /// The dtype of the optimizer state. With [`StateDType::Int8`], results differ from those with
    /// f32, and are the same on every server, device and tier.
    pub state_dtype: StateDType,
    /// The running averages of the master weights, which are always f32.
    pub averages: Arc<[RunningAverage]>,
    /// A skipped step does not count for the averages. Otherwise it does, as in a training loop
    /// that updates them after each step.
    pub averages_skip: bool,
    /// When a step counts as a spike, and what the job does then. `None`: no step does.
    pub spikes: Option<SpikePolicy>,
}

/// The effect of a rank that has left in order on ranks that wait for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Departure {
    /// They receive an error at once that names the rank.
    #[default]
    Error,
    /// If the rank was done, they continue without it, and its gradients count as zeros.
    Absent,
}

impl JobSpec {
    /// Creates the spec of a job with one worker, which accepts any number of servers.
    pub fn new(name: impl Into<String>, manifest: Manifest, groups: Vec<Optimizer>) -> Self {
        Self {
            name: name.into(),
            manifest,
            groups,
            world: 1,
            group_size: 1,
            min_servers: 1,
            replicas: 1,
            meshes: Vec::new(),
            departure: Departure::Error,
            idle_timeout: None,
            checkpoints: None,
            compare_every: 100,
            offload: false,
            rounding_seed: 0,
            state_dtype: StateDType::F32,
            averages: Arc::default(),
            averages_skip: false,
            spikes: None,
        }
    }

    /// Returns whether the servers of a slice compare its content at `version`.
    pub fn compares_at(&self, version: u64) -> bool {
        self.replicas > 1 && self.compare_every > 0 && version.is_multiple_of(self.compare_every)
    }

    /// Returns whether the job returns to its last checkpoint when a server is lost that holds the
    /// only copy of a slice.
    pub fn is_restored_on_loss(&self) -> bool {
        self.checkpoints.as_ref().is_some_and(|policy| policy.on_loss == OnLoss::Restore)
    }

    /// Checks the rules that involve several parts of the spec.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the spec has no parameter group, or a hyperparameter out of range; a
    /// tensor in no group, or one that is split although its optimizer needs it whole; a layout
    /// that does not fit its tensor or mesh; a world size, number of servers or idle timeout out of
    /// range; an average of unusable weights; or more of anything than its limit.
    /// [`Error::Refused`] for an optimizer that cannot have its state in `state_dtype`, and for
    /// `average` together with other optimizers.
    pub fn validate(&self) -> Result<()> {
        check_name("name of the job", &self.name, MAX_JOB_NAME)?;
        check_number("meshes", self.meshes.len(), MAX_MESHES)?;
        check_groups(&self.groups)?;
        self.check_overflows()?;
        self.check_state_dtype()?;
        for (index, mesh) in self.meshes.iter().enumerate() {
            self.validate_mesh(index, mesh)?;
        }
        for tensor in self.manifest.tensors() {
            self.validate_tensor(tensor)?;
        }
        if !(1..=MAX_WORLD).contains(&self.world) {
            return Err(Error::invalid("world", self.world, format!("1 to {MAX_WORLD}")));
        }
        if !(1..=MAX_GROUP_SIZE).contains(&self.group_size)
            || !self.world.is_multiple_of(self.group_size)
        {
            let expected = format!(
                "1 to {MAX_GROUP_SIZE}, a divisor of the number of workers, {}",
                self.world
            );
            return Err(Error::invalid("group_size", self.group_size, expected));
        }
        if self.replicas == 0 || self.min_servers < self.replicas {
            let found = format!("{} with min_servers {}", self.replicas, self.min_servers);
            return Err(Error::invalid("replicas", found, "at least 1 and at most min_servers"));
        }
        if self.replicas > MAX_REPLICAS {
            return Err(Error::invalid(
                "replicas",
                self.replicas,
                format!("at most {MAX_REPLICAS}"),
            ));
        }
        if let Some(timeout) = self.idle_timeout.filter(|wait| !IDLE_TIMEOUTS.contains(wait)) {
            let expected = format!("{:?} to {:?}", IDLE_TIMEOUTS.start(), IDLE_TIMEOUTS.end());
            return Err(Error::invalid("idle_timeout", format!("{timeout:?}"), expected));
        }
        self.checkpoints.as_ref().map_or(Ok(()), CheckpointPolicy::validate)?;
        average::validate(&self.averages)?;
        self.check_spikes()?;
        self.check_contributions()
    }

    /// A step is applied or skipped as a whole.
    fn check_overflows(&self) -> Result<()> {
        let (skip, never): (Vec<&Optimizer>, Vec<&Optimizer>) =
            self.groups.iter().partition(|group| group.skips_overflow());
        match (skip.first(), never.first()) {
            (Some(one), Some(other)) => Err(Error::refused(format!(
                "parameter groups with {other}, which skips no step, and with {one}, which skips \
                 those whose gradients are inf or NaN, cannot be in one job; create a job for each"
            ))),
            _ => Ok(()),
        }
    }

    fn check_state_dtype(&self) -> Result<()> {
        let uncoded = |group: &&Optimizer| group.state_codes().is_none();
        match self.groups.iter().find(uncoded).filter(|_| self.state_dtype == StateDType::Int8) {
            None => Ok(()),
            Some(group) => Err(Error::refused(format!(
                "{group} with state {:?} cannot have state_dtype int8; use f32, or adam or adamw \
                 without amsgrad, lion, or sgd",
                group.state()
            ))),
        }
    }

    fn check_spikes(&self) -> Result<()> {
        let Some(policy) = &self.spikes else { return Ok(()) };
        policy.validate()?;
        if let Some(group) = self.groups.iter().find(|group| !group.skips_overflow()) {
            return Err(Error::refused(format!(
                "a job with {group}, which skips no step, cannot have a policy on spikes"
            )));
        }
        if matches!(policy.action, SpikeAction::Rewind { .. }) && self.checkpoints.is_none() {
            return Err(Error::refused(
                "a job that rewinds after a spike needs checkpoints; give it a checkpoint policy",
            ));
        }
        Ok(())
    }

    fn check_contributions(&self) -> Result<()> {
        let mut total = 0u64;
        for (index, tensor) in self.manifest.tensors().iter().enumerate() {
            // The layout of a tensor without slices is still checked.
            let slices = (self.manifest.slices_of(index).len() as u64).max(1);
            let contributions = match &tensor.layout {
                None => u64::from(self.world) * slices,
                Some(layout) => self.layout(layout)?.most_contributions(slices),
            };
            total = total.saturating_add(contributions);
        }
        if total > MAX_CONTRIBUTIONS {
            let found = format!("up to {total}");
            let expected = format!(
                "at most {MAX_CONTRIBUTIONS}; use fewer ranks, or shard the tensors over the ranks"
            );
            return Err(Error::invalid(
                "number of contributions (ranks times slices)",
                found,
                expected,
            ));
        }
        Ok(())
    }

    fn validate_mesh(&self, index: usize, mesh: &ProcessMesh) -> Result<()> {
        match mesh.ranks().iter().find(|&&rank| rank >= self.world) {
            None => Ok(()),
            Some(rank) => {
                let expected = format!("less than the world size, {}", self.world);
                Err(Error::invalid(format!("rank in mesh {index}"), rank, expected))
            }
        }
    }

    fn validate_layout(&self, tensor: &TensorSpec, layout: &TensorLayout) -> Result<()> {
        if self.meshes.get(layout.mesh as usize).is_none() {
            let expected = format!("less than the number of meshes, {}", self.meshes.len());
            return Err(Error::invalid(
                format!("mesh of tensor {:?}", tensor.name),
                layout.mesh,
                expected,
            ));
        }
        let max = DimPlacement::Partial(Reduction::Max);
        if layout.placements.contains(&max) {
            let what = format!("placement of tensor {:?}", tensor.name);
            return Err(Error::invalid(
                what,
                max,
                "Shard, Replicate, or Partial with sum or avg, because it applies to the gradient",
            ));
        }
        self.layout(layout)?.check(&tensor.shape, &tensor.name)
    }

    fn layout(&self, layout: &TensorLayout) -> Result<Layout> {
        Layout::new(Arc::clone(&self.meshes[layout.mesh as usize]), layout.placements.clone())
    }

    /// The optimizer of tensor number `tensor` (of its owner, if it is tied); `None` if it is not
    /// trained.
    pub fn optimizer_of(&self, tensor: usize) -> Option<&Optimizer> {
        let owner = &self.manifest.tensors()[self.manifest.owner(tensor)];
        owner.trains().then(|| &self.groups[owner.group as usize])
    }

    /// The optimizer of slice number `slice`; `None` if it is not trained.
    pub fn optimizer_of_slice(&self, slice: usize) -> Option<&Optimizer> {
        self.optimizer_of(self.manifest.slices()[slice].tensor)
    }

    /// The layout of tensor number `tensor` (of its owner, if it is tied); `None` if it has no
    /// layout.
    pub fn layout_of(&self, tensor: usize) -> Option<Layout> {
        let layout = self.manifest.tensors()[self.manifest.owner(tensor)].layout.as_ref()?;
        Some(self.layout(layout).expect("a valid job has valid layouts"))
    }

    /// The contributions to the gradient of tensor number `tensor`, and to its initial value.
    pub fn contributions(&self, tensor: usize) -> Contributions {
        let shape = &self.manifest.tensors()[tensor].shape;
        let contributions = match self.layout_of(tensor) {
            None => Contributions::mean(shape, self.world),
            Some(layout) => layout.contributions(shape),
        };
        let owner = &self.manifest.tensors()[self.manifest.owner(tensor)];
        contributions.replaced_by(owner.replaced_by).grouped(self.group_size)
    }

    /// The ranks of the group of `rank`.
    pub fn group_of(&self, rank: u32) -> Range<u32> {
        let first = rank / self.group_size * self.group_size;
        first..first + self.group_size
    }

    /// Describes a rank with its coordinates in the job's first mesh that contains it, such as
    /// "rank 3 (dp 1, tp 1)".
    pub fn describe_rank(&self, rank: u32) -> String {
        let mesh = self.meshes.iter().find(|mesh| mesh.coordinate(rank).is_some());
        mesh.map_or_else(|| format!("rank {rank}"), |mesh| mesh.describe(rank))
    }

    /// Describes who sent a gradient: a rank or, in a job with groups, the group that it belongs
    /// to.
    pub fn describe_contributor(&self, rank: u32) -> String {
        match self.group_of(rank) {
            group if group.len() == 1 => self.describe_rank(rank),
            group => format!("the group of ranks {} to {}", group.start, group.end - 1),
        }
    }

    /// The divisor of the summed gradient of tensor number `tensor`: see
    /// [`Contributions::divisor`].
    pub fn divisor(&self, tensor: usize) -> u64 {
        self.layout_of(tensor).map_or(self.world.into(), |layout| layout.divisor())
    }

    /// The box of tensor number `tensor` that `rank` holds; empty if the rank is not in the
    /// tensor's mesh.
    pub fn local_box(&self, tensor: usize, rank: u32) -> TensorBox {
        let shape = &self.manifest.tensors()[tensor].shape;
        match self.layout_of(tensor) {
            None => TensorBox::whole(shape),
            Some(layout) => layout.local_box(shape, rank).unwrap_or_else(|| TensorBox {
                offset: vec![0; shape.len()],
                size: vec![0; shape.len()],
            }),
        }
    }

    fn check_replacer(&self, tensor: &TensorSpec) -> Result<()> {
        let Some(rank) = tensor.replaced_by else { return Ok(()) };
        let expected = match (&tensor.alias_of, &tensor.layout) {
            (Some(owner), _) => format!("absent, because the tensor is tied to {owner:?}"),
            (None, Some(_)) => {
                "absent, because the tensor has a layout, which names the ranks".to_owned()
            }
            (None, None) if rank < self.world => return Ok(()),
            (None, None) => format!("less than the world size, {}", self.world),
        };
        Err(Error::invalid(format!("replaced_by of tensor {:?}", tensor.name), rank, expected))
    }

    fn validate_tensor(&self, tensor: &TensorSpec) -> Result<()> {
        if let Some(layout) = &tensor.layout {
            self.validate_layout(tensor, layout)?;
        }
        self.check_replacer(tensor)?;
        let Some(optimizer) = self.groups.get(tensor.group as usize) else {
            return Err(Error::invalid(
                format!("group of tensor {:?}", tensor.name),
                tensor.group,
                format!("less than the number of groups, {}", self.groups.len()),
            ));
        };
        if optimizer.needs_whole_tensors() && tensor.trains() && tensor.policy != Policy::Whole {
            return Err(Error::invalid(
                format!("policy of tensor {:?}", tensor.name),
                "elementwise",
                format!("whole, because {} updates whole tensors", optimizer.name()),
            ));
        }
        // torch's step divides by the number of elements, and fails.
        let is_adafactor = matches!(optimizer, Optimizer::Adafactor(_));
        if is_adafactor && tensor.trains() && tensor.numel() == 0 {
            return Err(Error::refused(format!(
                "tensor {:?} has no elements, and adafactor cannot compute their root mean square",
                tensor.name
            )));
        }
        Ok(())
    }

    /// Checks the hyperparameters of a step.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the number of groups or the kind of one differs from the job's, if one
    /// needs state tensors that the job's does not have, or if a hyperparameter is out of range.
    pub fn validate_step(&self, groups: &[Optimizer]) -> Result<()> {
        if groups.len() != self.groups.len() {
            let expected = format!("the number of groups of the job, {}", self.groups.len());
            return Err(Error::invalid("number of parameter groups", groups.len(), expected));
        }
        check_groups(groups)?;
        let mut both = groups.iter().zip(&self.groups).enumerate();
        match both.find(|(_, (group, own))| !group.uses_state_of(own)) {
            None => Ok(()),
            Some((index, (group, own))) => Err(Error::invalid(
                format!("optimizer of parameter group {index}"),
                format!("{group} with state {:?}", group.state()),
                format!("{own} with state {:?}, as in the job", own.state()),
            )),
        }
    }

    /// The name of the first part in which `other` differs.
    pub fn difference(&self, other: &Self) -> Option<String> {
        let ours = self.manifest.tensors();
        let theirs = other.manifest.tensors();
        if ours.len() != theirs.len() {
            return Some(format!("number of tensors ({} and {})", ours.len(), theirs.len()));
        }
        if let Some((a, _)) = ours.iter().zip(theirs).find(|(a, b)| a != b) {
            return Some(format!("tensor {:?}", a.name));
        }
        let parts = [
            ("name", self.name == other.name),
            ("optimizer", self.groups == other.groups),
            ("world", self.world == other.world),
            ("group_size", self.group_size == other.group_size),
            ("min_servers", self.min_servers == other.min_servers),
            ("replicas", self.replicas == other.replicas),
            ("mesh", self.meshes == other.meshes),
            ("departure", self.departure == other.departure),
            ("idle_timeout", self.idle_timeout == other.idle_timeout),
            ("policy for checkpoints", self.checkpoints == other.checkpoints),
            ("compare_every", self.compare_every == other.compare_every),
            ("offload", self.offload == other.offload),
            ("rounding_seed", self.rounding_seed == other.rounding_seed),
            ("state_dtype", self.state_dtype == other.state_dtype),
            ("averages", self.averages == other.averages),
            ("averages_skip", self.averages_skip == other.averages_skip),
            ("policy on spikes", self.spikes == other.spikes),
        ];
        parts.into_iter().find(|(_, equal)| !equal).map(|(part, _)| part.to_owned())
    }
}

/// Checks the number of the parameter groups and their hyperparameters.
fn check_groups(groups: &[Optimizer]) -> Result<()> {
    if groups.is_empty() {
        return Err(Error::invalid("number of parameter groups", 0, format!("1 to {MAX_GROUPS}")));
    }
    check_number("parameter groups", groups.len(), MAX_GROUPS)?;
    for (index, group) in groups.iter().enumerate() {
        group.validate().map_err(|e| {
            Error::invalid(
                format!("{} of {} of parameter group {index}", e.field, e.optimizer),
                e.value,
                e.expected,
            )
        })?;
    }
    Ok(())
}

/// Checks a number against its limit.
///
/// # Errors
/// [`Error::Invalid`] for more than `limit`.
pub fn check_number(of: &str, number: usize, limit: usize) -> Result<()> {
    if number > limit {
        return Err(Error::invalid(format!("number of {of}"), number, format!("at most {limit}")));
    }
    Ok(())
}

impl Optimizer {
    /// The hyperparameters by name: numbers and flags.
    pub fn hyperparameters(&self) -> BTreeMap<String, Value> {
        let mut fields: BTreeMap<_, _> = serde_json::to_value(self)
            .and_then(serde_json::from_value)
            .expect("an optimizer is a struct of numbers and flags");
        fields.remove("name");
        fields
    }

    /// The name of the first hyperparameter in which `other`, of the same kind, differs, and the
    /// values of both.
    pub fn difference(&self, other: &Self) -> Option<(String, [String; 2])> {
        let theirs = other.hyperparameters();
        self.hyperparameters().into_iter().find_map(|(name, value)| {
            let other = theirs.get(&name).filter(|&other| *other != value)?;
            let values = [value.to_string(), other.to_string()];
            Some((name, values))
        })
    }
}

#[cfg(test)]
#[path = "job_tests.rs"]
mod tests;
