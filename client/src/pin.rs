//! Readers: one version of a job's parameters and optimizer state, read by a program that is not a
//! member of the job, while training goes on.

use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use futures_util::future::try_join_all;
use tokio::task::JoinHandle;
use zeroshard_model::{
    AppliedSteps, DType, Error, JobSpec, Manifest, Result, Server, TensorBox, TensorId,
    local::LocalTensor,
};
use zeroshard_net::{Deadline, trace::Trace, transport::MAX_CONTROL_MESSAGE};
use zeroshard_proto::{
    Wire,
    pb::{self, shard_service_client::ShardServiceClient},
    status::from_status,
};

use crate::{
    Cluster, Description, StateSelector, Target, pull,
    retry::{Next, Tries},
    state,
    windows::{Holder, Of, Windows},
};

/// How long a reader waits for a version that does not exist yet. It asks for such a version only
/// if the current version is always replaced before all servers hold it.
const NEXT_VERSION: Duration = Duration::from_secs(1);

/// The pause before the job is described again, after a server has refused a slice that it does not
/// hold any more.
const REFRESH: Duration = Duration::from_millis(20);

/// What a reader wants to keep.
#[derive(Debug, Clone)]
pub struct Pin {
    /// The version; `None`: the latest one.
    pub version: Option<u64>,
    /// The tensors, by name; `None`: all tensors of the job.
    pub tensors: Option<Vec<String>>,
    /// Whether to keep the optimizer state as well, and all averages.
    pub optimizer_state: bool,
    /// The averages to keep as well, by name.
    pub averages: Vec<String>,
    /// The time limit, at most 10 minutes. The servers release the version afterwards.
    pub limit: Duration,
}

impl Default for Pin {
    fn default() -> Self {
        let limit = Duration::from_secs(60);
        let averages = Vec::new();
        Self { version: None, tensors: None, optimizer_state: false, averages, limit }
    }
}

/// One version of a job's parameters, which the servers keep while training goes on. They release
/// it when this value is dropped, or at the time limit. Pins count in the memory of the servers
/// (`--pinned-bytes`).
#[derive(Debug)]
pub struct Pinned {
    cluster: Cluster,
    of: Description,
    version: u64,
    locals: Vec<LocalTensor>,
    /// The slices that are kept.
    slices: BTreeSet<u32>,
    /// The pins, by the id of the server.
    pins: HashMap<u64, ServerPin>,
    /// The steps that were applied to each tensor. Empty if the optimizer state is not pinned.
    steps: Vec<AppliedSteps>,
    /// The memory that this process shares with the servers.
    windows: Windows,
}

/// The pin of one server.
#[derive(Debug)]
struct ServerPin {
    number: u64,
    /// Reads the call, which is open as long as the pin.
    call: JoinHandle<()>,
}

impl Drop for ServerPin {
    /// Ends the call.
    fn drop(&mut self) {
        self.call.abort();
    }
}

impl Cluster {
    /// Keeps one version of a job's parameters on all servers, for a reader. The reader need not be
    /// a member of the job.
    ///
    /// # Errors
    /// [`Error::UnknownJob`]; [`Error::Invalid`] for an unknown tensor, or a job without initial
    /// parameters; [`Error::VersionGone`] if [`Pin::version`] has been replaced;
    /// [`Error::OutOfMemory`] if a server has no room for another pin; [`Error::Timeout`].
    pub async fn pin(&self, job: &str, pin: &Pin) -> Result<Pinned> {
        let pinned = |of, version, wait| self.pin_at(of, version, pin, wait);
        self.at_version(job, pin.version, pinned).await
    }

    /// Calls `read` for a version of a job, or for the latest one, until it succeeds, an error is
    /// final, or the deadline passes. `read` receives the description of the job, the version, and
    /// the time for which it may wait.
    ///
    /// # Errors
    /// Those of `read`; [`Error::UnknownJob`]; [`Error::Invalid`] for a job without initial
    /// parameters; [`Error::Timeout`].
    pub(crate) async fn at_version<T, F: Future<Output = Result<T>>>(
        &self,
        job: &str,
        wanted: Option<u64>,
        read: impl Fn(Description, u64, Duration) -> F,
    ) -> Result<T> {
        let mut tries = Tries::until(Deadline::after(self.options.timeout));
        let mut ahead = 0;
        loop {
            let of = self.describe_job(job).await?;
            let version = match (wanted, of.version) {
                (Some(version), _) => version,
                (None, Some(version)) => version + ahead,
                (None, None) => return Err(not_initialised(job)),
            };
            let wait = match wanted {
                None if ahead > 0 => NEXT_VERSION.min(tries.timeout()),
                _ => tries.timeout(),
            };
            let error = match read(of, version, wait).await {
                Err(error @ Error::VersionGone { .. }) if wanted.is_none() => {
                    // The steps are fast: ask for a version before it exists.
                    ahead = (2 * ahead).clamp(2, 64);
                    tries.change(error, Duration::ZERO).await?;
                    continue;
                }
                Err(error @ Error::Timeout { .. }) if ahead > 0 => {
                    // There are no more steps.
                    ahead = 0;
                    tries.change(error, Duration::ZERO).await?;
                    continue;
                }
                Err(error) => error,
                result => return result,
            };
            if let Next::Refresh(error) = tries.next(error).await? {
                // The coordinator may not know the new placement yet.
                tries.change(error, REFRESH).await?;
            }
        }
    }

    async fn pin_at(
        &self,
        of: Description,
        version: u64,
        pin: &Pin,
        wait: Duration,
    ) -> Result<Pinned> {
        let wanted = slices(&of, pin.tensors.as_deref())?;
        let slices = wanted.iter().flat_map(|(_, slices)| slices).copied().collect();
        let calls = wanted.into_iter().map(|(server, slices)| {
            let limit_ms = u32::try_from(pin.limit.as_millis()).unwrap_or(u32::MAX).max(1);
            let (job, job_id) = (of.spec.name.clone(), of.id);
            let (optimizer_state, averages) = (pin.optimizer_state, pin.averages.clone());
            let request = pb::PinRequest {
                job,
                job_id,
                version,
                slices,
                limit_ms,
                optimizer_state,
                averages,
                line: of.line,
            };
            self.pin_one(server, request, wait)
        });
        let (mut pins, mut steps) = (HashMap::new(), Vec::new());
        if pin.optimizer_state {
            steps.resize(of.spec.manifest.tensors().len(), AppliedSteps::default());
        }
        for (server, held, of_slices) in try_join_all(calls).await? {
            pins.insert(server, held);
            state::add_steps(&of, of_slices, &mut steps)?;
        }
        let locals = LocalTensor::all(&of.spec, 0);
        let (cluster, windows) = (self.clone(), Windows::new(&self.options));
        Ok(Pinned { cluster, of, version, locals, slices, pins, steps, windows })
    }

    /// Pins slices on one server. Returns its id, the pin, and the steps that were applied to the
    /// slices.
    async fn pin_one(
        &self,
        server: Server,
        request: pb::PinRequest,
        wait: Duration,
    ) -> Result<(u64, ServerPin, Vec<pb::SliceSteps>)> {
        let shard = self.shards.get(&server)?;
        let failed = |status: tonic::Status| from_status(&status, &shard.peer);
        // The call lasts as long as the pin, so only its first message has a time limit.
        let held = async {
            let client = ShardServiceClient::new(shard.pull.clone());
            let mut client = client.max_decoding_message_size(MAX_CONTROL_MESSAGE);
            let mut call = client.pin(request).await.map_err(failed)?.into_inner();
            let first = call.message().await.map_err(failed)?;
            let first = first.ok_or_else(|| Error::Unavailable {
                peer: shard.peer.clone(),
                cause: "it ended a pin at once".to_owned(),
            })?;
            let call = tokio::spawn(async move { while let Ok(Some(_)) = call.message().await {} });
            Ok((server.id, ServerPin { number: first.pin, call }, first.steps))
        };
        let waiting_for = || format!("{} to hold the version", shard.peer);
        Deadline::after(wait).limit(waiting_for, held).await?
    }
}

/// The slices of tensors, by server. `None` stands for all tensors.
///
/// # Errors
/// [`Error::Invalid`] for an unknown tensor.
pub(crate) fn slices(
    of: &Description,
    tensors: Option<&[String]>,
) -> Result<Vec<(Server, Vec<u32>)>> {
    let (manifest, placement) = (&of.spec.manifest, &of.placement);
    let mut of_server = vec![Vec::new(); placement.servers().len()];
    let owners: BTreeSet<usize> = match tensors {
        None => (0..manifest.tensors().len()).map(|tensor| manifest.owner(tensor)).collect(),
        Some(names) => {
            let owner = |name: &String| Ok(manifest.owner(manifest.find(name)?.index()));
            names.iter().map(owner).collect::<Result<_>>()?
        }
    };
    for slice in owners.into_iter().flat_map(|owner| manifest.slices_of(owner)) {
        of_server[placement.primary(slice)].push(slice as u32);
    }
    let pairs = placement.servers().iter().cloned().zip(of_server);
    Ok(pairs.filter(|(_, slices)| !slices.is_empty()).collect())
}

/// A target without bounds, for the whole tensor.
fn whole<'a>(manifest: &Manifest, mut target: Target<'a>) -> Target<'a> {
    if let Some(spec) = manifest.tensors().get(target.tensor.index()) {
        target.bounds.get_or_insert_with(|| TensorBox::whole(&spec.shape));
    }
    target
}

fn not_initialised(job: &str) -> Error {
    Error::refused(format!(
        "job {job:?} has no version yet; wait until its initial parameters are uploaded"
    ))
}

impl Pinned {
    /// The version.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The job whose version is pinned.
    pub(crate) fn description(&self) -> &Description {
        &self.of
    }

    /// The spec of the job.
    pub fn spec(&self) -> &JobSpec {
        &self.of.spec
    }

    /// The tensor with this name.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is none.
    pub fn tensor(&self, name: &str) -> Result<TensorId> {
        self.of.spec.manifest.find(name)
    }

    /// The steps that were applied to each tensor, by its index.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the optimizer state is not pinned.
    pub fn applied_steps(&self) -> Result<&[AppliedSteps]> {
        match self.steps.is_empty() {
            false => Ok(&self.steps),
            true => {
                Err(Error::refused("the optimizer state is not pinned; set Pin::optimizer_state"))
            }
        }
    }

    /// Fills the targets with the pinned version. Targets without bounds receive the whole tensor,
    /// whatever its layout is. Parameters are encoded as [`Options::parameter_wire`] of the
    /// connection says, and buffers as f32. With int8 a box has tiles of its own, whose values are
    /// rounded differently from those of the whole tensor.
    ///
    /// [`Options::parameter_wire`]: crate::Options::parameter_wire
    ///
    /// # Errors
    /// [`Error::VersionGone`] after the time limit, and after the job was restored from a
    /// checkpoint; [`Error::Unavailable`] after a server was lost; [`Error::Invalid`] for tensors
    /// that are not pinned and for sizes that do not match; [`Error::Timeout`].
    pub async fn pull(&self, targets: Vec<Target<'_>>) -> Result<()> {
        let manifest = &self.of.spec.manifest;
        let wire = self.cluster.options.wire_of_parameters();
        let parts = pull::by_wire(manifest, wire, targets);
        self.pull_all(StateSelector::Parameters, parts).await
    }

    /// Fills the targets with the pinned version, each as its encoding.
    ///
    /// # Errors
    /// Those of [`Self::pull`].
    pub(crate) async fn pull_encoded(&self, targets: Vec<(Wire, Vec<Target<'_>>)>) -> Result<()> {
        self.pull_all(StateSelector::Parameters, targets).await
    }

    /// Fills the targets with a part of the pinned version, as exact f32 numbers: the parameters,
    /// or optimizer state if it is pinned.
    ///
    /// # Errors
    /// Those of [`Self::pull`]; [`Error::Invalid`] for a part that is not pinned.
    pub async fn pull_part(&self, part: StateSelector<'_>, targets: Vec<Target<'_>>) -> Result<()> {
        self.pull_all(part, vec![(Wire::Plain(DType::F32), targets)]).await
    }

    async fn pull_all(
        &self,
        part: StateSelector<'_>,
        targets: Vec<(Wire, Vec<Target<'_>>)>,
    ) -> Result<()> {
        let Self { cluster, of, locals, .. } = self;
        let manifest = &of.spec.manifest;
        let deadline = Deadline::after(cluster.options.timeout);
        let mut pulls = Vec::new();
        for (wire, targets) in targets {
            targets.iter().try_for_each(|target| self.check_pinned(target.tensor))?;
            let targets = targets.into_iter().map(|target| whole(manifest, target)).collect();
            pulls.extend(pull::plan(manifest, &of.placement, locals, wire, targets)?);
        }
        let pulls = pulls.into_iter().map(|pull| self.pull_from_one(part, pull, deadline));
        try_join_all(pulls).await.map(drop)
    }

    /// # Errors
    /// [`Error::Invalid`] for a tensor of which slices are not kept.
    fn check_pinned(&self, tensor: TensorId) -> Result<()> {
        let manifest = &self.of.spec.manifest;
        let Some(spec) = manifest.tensors().get(tensor.index()) else { return Ok(()) };
        let mut slices = manifest.slices_of(manifest.owner(tensor.index()));
        if slices.all(|slice| self.slices.contains(&(slice as u32))) {
            return Ok(());
        }
        let sentence = format!("tensor {:?} is not pinned; add it to Pin::tensors", spec.name);
        Err(Error::refused(sentence))
    }

    async fn pull_from_one(
        &self,
        part: StateSelector<'_>,
        mut pull: pull::ServerPull<'_>,
        deadline: Deadline,
    ) -> Result<()> {
        let Self { cluster, of, version, pins, windows, .. } = self;
        let mut tries = Tries::until(deadline);
        let Some(pin) = pins.get(&pull.server.id) else {
            let cause = format!("shard server {} has no pin", pull.server.address);
            return Err(Error::Internal { cause });
        };
        let (job, job_id) = (&*of.spec.name, of.id);
        let waiting_for = format!("version {version} from shard server {}", pull.server.address);
        loop {
            let holder = Holder::Reader { pin: pin.number };
            let shard = cluster.shards.get(&pull.server)?;
            let window = match pin.call.is_finished() {
                // The call has the error of a pin that has ended.
                true => None,
                false => {
                    let window = windows.get(&pull.server, &shard, Of { job, job_id, holder });
                    tries.limit(|| waiting_for.clone(), window).await??
                }
            };
            let of = pull::PullOf {
                job,
                job_id,
                epoch: 0,
                version: *version,
                part,
                pin: pin.number,
                chunk_bytes: cluster.options.chunk_bytes,
                timeout: tries.timeout(),
                trace: Trace::default(),
                rank: None,
                window,
            };
            let pulled = pull.pull(&cluster.shards, &of);
            let pulled = tries.limit(|| waiting_for.clone(), pulled).await?;
            let Err(error) = pulled else { return Ok(()) };
            if pin.call.is_finished() {
                // The server was lost, or the pin has ended: it will not be there again.
                return Err(error);
            }
            if let Next::Refresh(error) = tries.next(error).await? {
                return Err(error);
            }
        }
    }
}
