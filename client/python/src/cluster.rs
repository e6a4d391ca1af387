//! Connections to clusters, which may run inside this process.

use std::{collections::BTreeMap, net::IpAddr, path::PathBuf, sync::Mutex, time::Duration};

use pyo3::prelude::*;
use serde_json::json;
use zeroshard_client as client;
use zeroshard_model::{Error, JobSpec, Manifest, StateDType};
use zeroshard_net::transport::tls::{Tls, TlsFiles};
use zeroshard_server::embedded;

use crate::{
    array::{TensorSpec, parse_dtype},
    average::{self, Average},
    checkpoint::CheckpointPolicy,
    error::raise,
    follow::Follower,
    job::Job,
    mesh::{Mesh, TensorBox},
    optimizer::{Group, optimizers},
    pin::Pinned,
    plan::lock,
    runtime::wait,
    spikes::{self as spike_policies, Spikes},
};

/// A cluster of shard servers.
#[pyclass(frozen, module = "zeroshard._native")]
pub(crate) struct Cluster {
    cluster: client::Cluster,
    address: String,
    /// The number of servers that hold each slice of the jobs that are created.
    replicas: u32,
    /// The seed of the rounding of the jobs that are created.
    rounding_seed: u64,
    embedded: Mutex<Option<embedded::Cluster>>,
}

fn options(
    token: Option<String>,
    (wire, parameter_wire): (&str, Option<&str>),
    chunk_bytes: usize,
    transport: Option<&str>,
    timeout: f64,
) -> PyResult<client::Options> {
    let wire: client::Wire = wire.parse().map_err(raise)?;
    let parameter_wire = parameter_wire.map(str::parse).transpose().map_err(raise)?;
    let transport = transport.map(str::parse).transpose().map_err(raise)?;
    let options = client::Options::default().wire(wire).parameter_wire(parameter_wire);
    let options = options.chunk_bytes(chunk_bytes).transport(transport);
    Ok(options.timeout(seconds("timeout", timeout)?).token(token.unwrap_or_default().into()))
}

/// The files of the authorities, of the certificate, of its key and of the revocation lists.
type Files = (PathBuf, Option<PathBuf>, Option<PathBuf>, Option<PathBuf>);

/// The TLS configuration from these files.
fn encryption((ca, certificate, key, crl): Files) -> Result<Tls, Error> {
    let files = TlsFiles::of(Some(&ca), certificate.as_deref(), key.as_deref(), crl.as_deref())?;
    Tls::open(files.expect("there are files"))
}

pub(crate) fn seconds(what: &str, number: f64) -> PyResult<Duration> {
    let duration = Duration::try_from_secs_f64(number).ok().filter(|duration| !duration.is_zero());
    duration
        .ok_or_else(|| raise(Error::invalid(what, number, "a number of seconds greater than 0")))
}

#[pymethods]
impl Cluster {
    #[staticmethod]
    #[pyo3(signature = (
        address, *, token=None, tls=None, wire="f32", parameter_wire=None, chunk_bytes=1048576,
        transport=None, timeout=600.0, connect_timeout=10.0, replicas=1, rounding_seed=0
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn connect(
        py: Python<'_>,
        address: String,
        token: Option<String>,
        tls: Option<Files>,
        wire: &str,
        parameter_wire: Option<&str>,
        chunk_bytes: usize,
        transport: Option<&str>,
        timeout: f64,
        connect_timeout: f64,
        replicas: u32,
        rounding_seed: u64,
    ) -> PyResult<Self> {
        let connect_timeout = seconds("connect_timeout", connect_timeout)?;
        let options = options(token, (wire, parameter_wire), chunk_bytes, transport, timeout)?;
        let options = options.connect_timeout(connect_timeout);
        let options = options.tls(tls.map(encryption).transpose().map_err(raise)?);
        let dialled = address.clone();
        let cluster = wait(py, async move { client::Cluster::connect(&dialled, options).await })?;
        Ok(Self { cluster, address, replicas, rounding_seed, embedded: Mutex::new(None) })
    }

    #[staticmethod]
    #[pyo3(signature = (
        shards=1, *, host="127.0.0.1", token=None, wire="f32", parameter_wire=None,
        chunk_bytes=1048576, transport=None, timeout=600.0, replicas=1, rounding_seed=0
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn embedded(
        py: Python<'_>,
        shards: usize,
        host: &str,
        token: Option<String>,
        wire: &str,
        parameter_wire: Option<&str>,
        chunk_bytes: usize,
        transport: Option<&str>,
        timeout: f64,
        replicas: u32,
        rounding_seed: u64,
    ) -> PyResult<Self> {
        if shards == 0 {
            return Err(raise(Error::invalid("shards", 0, "1 or more")));
        }
        let host: IpAddr = host
            .parse()
            .map_err(|_| raise(Error::invalid("host", format!("{host:?}"), "an IP address")))?;
        let mut starting = embedded::Options { host, ..embedded::Options::new(shards) };
        starting.common.token = token.unwrap_or_default().into();
        let embedded = wait(py, async move {
            let started = embedded::Cluster::start(starting).await;
            started
                .map_err(|e| Error::Internal { cause: format!("start an embedded cluster: {e}") })
        })?;
        let (address, token) = (embedded.address(), embedded.token().reveal().map(str::to_owned));
        let cluster = Self::connect(
            py,
            address,
            token,
            None,
            wire,
            parameter_wire,
            chunk_bytes,
            transport,
            timeout,
            timeout,
            replicas,
            rounding_seed,
        )?;
        *lock(&cluster.embedded) = Some(embedded);
        Ok(cluster)
    }

    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    fn status(&self, py: Python<'_>) -> PyResult<String> {
        let cluster = self.cluster.clone();
        let status = wait(py, async move { cluster.status().await })?;
        let servers: Vec<_> = status.servers.iter().map(server).collect();
        let jobs: Vec<_> = status.jobs.iter().map(job).collect();
        Ok(json!({ "servers": servers, "jobs": jobs }).to_string())
    }

    #[pyo3(signature = (
        name, tensors, groups, world, meshes=None, *, idle_timeout=None, predecessor=None,
        fresh_state=false, checkpoints=None, resume=false, group_size=1, offload=false,
        state_dtype="f32", averages=None, averages_skip=false, spikes=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn create_job(
        &self,
        py: Python<'_>,
        name: String,
        tensors: Vec<PyRef<'_, TensorSpec>>,
        groups: Vec<Group>,
        world: u32,
        meshes: Option<Vec<PyRef<'_, Mesh>>>,
        idle_timeout: Option<f64>,
        predecessor: Option<(PyRef<'_, Job>, u64)>,
        fresh_state: bool,
        checkpoints: Option<PyRef<'_, CheckpointPolicy>>,
        resume: bool,
        group_size: u32,
        offload: bool,
        state_dtype: &str,
        averages: Option<Vec<Average>>,
        averages_skip: bool,
        spikes: Option<Spikes>,
    ) -> PyResult<()> {
        let manifest = Manifest::new(tensors.iter().map(|tensor| tensor.0.clone()).collect())
            .map_err(raise)?;
        let meshes = meshes.iter().flatten().map(|mesh| mesh.0.clone()).collect();
        let idle_timeout = idle_timeout.map(|wait| seconds("idle_timeout", wait)).transpose()?;
        let restore = checkpoints.as_ref().filter(|_| resume).map(|policy| policy.latest(&name));
        let checkpoints = checkpoints.map(|policy| policy.0.clone());
        let spec = JobSpec::new(name, manifest, optimizers(groups)?);
        let state_dtype = state_dtype.parse::<StateDType>().map_err(|unknown| {
            raise(Error::invalid("state_dtype", format!("{:?}", unknown.0), "\"f32\" or \"int8\""))
        })?;
        let replicas = self.replicas;
        let min_servers = replicas.max(1);
        let spec = JobSpec {
            world,
            meshes,
            idle_timeout,
            checkpoints,
            replicas,
            min_servers,
            group_size,
            offload,
            rounding_seed: self.rounding_seed,
            state_dtype,
            averages: average::averages(averages.unwrap_or_default())?.into(),
            averages_skip,
            spikes: spikes.map(spike_policies::policy).transpose()?,
            ..spec
        };
        let mut create = client::CreateJob::new(spec);
        create.restore = restore;
        create.from = predecessor.map(|(job, version)| job.at(version));
        create.fresh_state = fresh_state;
        let cluster = self.cluster.clone();
        wait(py, async move { cluster.create_job(create).await })
    }

    #[pyo3(signature = (name, rank, *, bucket_numel=8388608))]
    fn join(&self, py: Python<'_>, name: String, rank: u32, bucket_numel: usize) -> PyResult<Job> {
        let cluster = self.cluster.clone();
        let job = wait(py, async move { cluster.join(&name, rank).await })?;
        Ok(Job::new(job, bucket_numel))
    }

    fn save_checkpoint(&self, py: Python<'_>, name: String) -> PyResult<(u64, u64)> {
        let cluster = self.cluster.clone();
        wait(py, async move { cluster.save_checkpoint(&name, None).await })
    }

    fn rewind(
        &self,
        py: Python<'_>,
        name: String,
        version: u64,
        url: Option<String>,
        skips: Vec<(u64, u64)>,
    ) -> PyResult<u64> {
        let skips: Vec<_> = skips.into_iter().map(|(start, end)| start..end).collect();
        let cluster = self.cluster.clone();
        wait(py, async move { cluster.rewind(&name, version, url.as_deref(), &skips).await })
    }

    #[pyo3(signature = (
        name, *, version=None, tensors=None, optimizer_state=false, averages=None, seconds=60.0
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn pin(
        &self,
        py: Python<'_>,
        name: String,
        version: Option<u64>,
        tensors: Option<Vec<String>>,
        optimizer_state: bool,
        averages: Option<Vec<String>>,
        seconds: f64,
    ) -> PyResult<Pinned> {
        let limit = self::seconds("seconds", seconds)?;
        let averages = averages.unwrap_or_default();
        let pin = client::Pin { version, tensors, optimizer_state, averages, limit };
        let cluster = self.cluster.clone();
        wait(py, async move { cluster.pin(&name, &pin).await }).map(Pinned::new)
    }

    #[pyo3(signature = (
        name, *, dtype, tensors=None, boxes=None, seconds=600.0, mirror=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn follow(
        &self,
        py: Python<'_>,
        name: String,
        dtype: &str,
        tensors: Option<Vec<String>>,
        boxes: Option<BTreeMap<String, PyRef<'_, TensorBox>>>,
        seconds: f64,
        mirror: Option<String>,
    ) -> PyResult<Follower> {
        let dtype = parse_dtype("dtype of a follower", dtype)?;
        let wait_for = self::seconds("seconds", seconds)?;
        let boxes = boxes.unwrap_or_default().into_iter();
        let boxes = boxes.map(|(name, of)| (name, of.0.clone())).collect();
        let follow = client::Follow { dtype, tensors, boxes, wait: wait_for, mirror };
        let cluster = self.cluster.clone();
        Follower::new(wait(py, async move { cluster.follow(&name, follow).await })?)
    }

    fn state_hash(&self, py: Python<'_>, name: String) -> PyResult<String> {
        let cluster = self.cluster.clone();
        wait(py, async move { cluster.state_hash(&name).await })
    }

    fn traffic(&self) -> (u64, u64) {
        let client::Traffic { pulled_bytes, pushed_bytes } = self.cluster.traffic();
        (pulled_bytes, pushed_bytes)
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let embedded = lock(&self.embedded).take();
        let Some(embedded) = embedded else { return Ok(()) };
        wait(py, async move {
            let stopped = embedded.shutdown().await;
            stopped
                .map_err(|e| Error::Internal { cause: format!("stop the embedded cluster: {e}") })
        })
    }
}

fn server(status: &client::ServerStatus) -> serde_json::Value {
    json!({
        "id": status.server.id,
        "address": status.server.address,
        "zone": status.zone,
        "master_bytes": status.master_bytes,
        "state_bytes": status.state_bytes,
        "accumulator_bytes": status.accumulator_bytes,
        "published_bytes": status.published_bytes,
        "parked_bytes": status.parked_bytes,
        "capacity_bytes": status.capacity_bytes,
        "assigned_bytes": status.assigned_bytes,
        "version": status.version,
        "cordoned": status.cordoned,
    })
}

fn job(status: &client::JobStatus) -> serde_json::Value {
    json!({
        "name": status.name,
        "version": status.version,
        "line": status.line,
        "epoch": status.epoch,
        "world": status.world,
        "joined": status.joined,
        "parameters": status.parameters,
        "tensors": status.tensors,
        "resting": status.resting,
        "failure": status.failure.as_deref().unwrap_or_default(),
        "state": status.state.to_string(),
        "waiting_for": status.wait.as_ref().map_or("", |wait| &wait.reason),
        "problem": status.problem().unwrap_or_default(),
        "slowest_rank": status.slowest.map(|slowest| slowest.rank),
        "degraded_slices": status.degraded_slices,
    })
}
