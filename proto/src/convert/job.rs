//! The specification of a job in messages.

use std::{sync::Arc, time::Duration};

use prost::Message;
use zeroshard_model::{
    Departure, Error, JobSpec, Manifest, ProcessMesh, Result, RunningAverage, StateDType,
    TensorSpec,
    job::check_number,
    limits::{MAX_AVERAGES, MAX_MESH_RANKS, MAX_MESHES},
    manifest::check_number_of_tensors,
};

use super::{encoded::check_size, optimizer::optimizers};
use crate::pb;

impl From<&JobSpec> for pb::JobSpec {
    fn from(spec: &JobSpec) -> Self {
        Self {
            name: spec.name.clone(),
            tensors: spec.manifest.tensors().iter().map(Into::into).collect(),
            groups: spec.groups.iter().map(Into::into).collect(),
            world: spec.world,
            group_size: spec.group_size,
            min_servers: spec.min_servers,
            replicas: spec.replicas,
            meshes: spec.meshes.iter().map(|mesh| mesh.as_ref().into()).collect(),
            departure: match spec.departure {
                Departure::Error => pb::Departure::Error,
                Departure::Absent => pb::Departure::Absent,
            }
            .into(),
            idle_timeout_ms: spec.idle_timeout.map(|timeout| timeout.as_millis() as u64),
            checkpoints: spec.checkpoints.as_ref().map(Into::into),
            compare_every: spec.compare_every,
            offload: spec.offload,
            rounding_seed: spec.rounding_seed,
            state_dtype: match spec.state_dtype {
                StateDType::F32 => pb::StateDtype::F32,
                StateDType::Int8 => pb::StateDtype::Int8,
            }
            .into(),
            averages: spec.averages.iter().map(Into::into).collect(),
            averages_skip: spec.averages_skip,
            spikes: spec.spikes.as_ref().map(Into::into),
        }
    }
}

impl TryFrom<pb::JobSpec> for JobSpec {
    type Error = Error;

    fn try_from(message: pb::JobSpec) -> Result<Self> {
        check_message(&message)?;
        let tensors = message.tensors.into_iter().map(TensorSpec::try_from);
        let replicas = message.replicas.max(1);
        let meshes =
            message.meshes.into_iter().map(|mesh| Ok(Arc::new(ProcessMesh::try_from(mesh)?)));
        let averages = message.averages.into_iter().map(RunningAverage::try_from);
        let spec = Self {
            name: message.name,
            manifest: Manifest::new(tensors.collect::<Result<_>>()?)?,
            groups: optimizers(message.groups)?,
            world: message.world,
            group_size: message.group_size.max(1),
            min_servers: message.min_servers.max(replicas),
            replicas,
            meshes: meshes.collect::<Result<_>>()?,
            departure: match pb::Departure::try_from(message.departure) {
                Ok(pb::Departure::Unspecified | pb::Departure::Error) => Departure::Error,
                Ok(pb::Departure::Absent) => Departure::Absent,
                Err(_) => {
                    return Err(Error::invalid("departure", message.departure, "ERROR or ABSENT"));
                }
            },
            idle_timeout: message.idle_timeout_ms.map(Duration::from_millis),
            checkpoints: message.checkpoints.map(TryInto::try_into).transpose()?,
            compare_every: message.compare_every,
            offload: message.offload,
            rounding_seed: message.rounding_seed,
            state_dtype: match pb::StateDtype::try_from(message.state_dtype) {
                Ok(pb::StateDtype::Unspecified | pb::StateDtype::F32) => StateDType::F32,
                Ok(pb::StateDtype::Int8) => StateDType::Int8,
                Err(_) => {
                    return Err(Error::invalid("state_dtype", message.state_dtype, "F32 or INT8"));
                }
            },
            averages: averages.collect::<Result<_>>()?,
            averages_skip: message.averages_skip,
            spikes: message.spikes.map(TryInto::try_into).transpose()?,
        };
        spec.validate()?;
        Ok(spec)
    }
}

/// Checks the limits that are known before anything is converted.
///
/// # Errors
/// [`Error::Invalid`] for more of anything than its limit.
fn check_message(message: &pb::JobSpec) -> Result<()> {
    check_number_of_tensors(message.tensors.len())?;
    check_number("meshes", message.meshes.len(), MAX_MESHES)?;
    check_number("averages", message.averages.len(), MAX_AVERAGES)?;
    let ranks = message.meshes.iter().map(|mesh| mesh.ranks.len()).sum();
    check_number("ranks in all meshes", ranks, MAX_MESH_RANKS)?;
    check_size(message.encoded_len())
}

#[cfg(test)]
mod tests {
    use zeroshard_model::{
        DimPlacement, Optimizer, Reduction, TensorLayout,
        limits::{MAX_GROUPS, MAX_REPLICAS, MAX_WORLD},
    };

    use super::*;

    fn spec() -> JobSpec {
        let manifest = Manifest::new(vec![TensorSpec::new("w", [2, 3])]).unwrap();
        JobSpec::new("job", manifest, vec!["adamw".parse().unwrap()])
    }

    fn what(result: Result<impl std::fmt::Debug>) -> String {
        match result {
            Err(Error::Invalid { what, .. }) => what,
            Err(Error::Refused { sentence }) => sentence,
            other => panic!("{other:?}"),
        }
    }

    fn sharded(placements: &[DimPlacement]) -> JobSpec {
        let layout = Some(TensorLayout { mesh: 0, placements: placements.into() });
        let tensor = TensorSpec { layout, ..TensorSpec::new("w", [2, 3]) };
        let meshes = vec![Arc::new(ProcessMesh::dense([1, 2], ["dp", "tp"]).unwrap())];
        JobSpec { manifest: Manifest::new(vec![tensor]).unwrap(), world: 2, meshes, ..spec() }
    }

    #[test]
    fn every_optimizer_survives_the_wire() {
        for optimizer in Optimizer::defaults() {
            assert_eq!(Optimizer::try_from(pb::Optimizer::from(&optimizer)), Ok(optimizer));
        }
    }

    #[test]
    fn a_spec_survives_the_wire() {
        let kept = JobSpec {
            idle_timeout: Some(Duration::from_millis(1500)),
            rounding_seed: u64::MAX,
            ..spec()
        };
        let int8 = JobSpec { state_dtype: StateDType::Int8, ..spec() };
        let averages = [RunningAverage::exponential("slow", 0.999)].into();
        let averaged = JobSpec { averages, averages_skip: true, ..spec() };
        for spec in [spec(), kept, int8, averaged] {
            assert_eq!(JobSpec::try_from(pb::JobSpec::from(&spec)), Ok(spec));
        }
    }

    #[test]
    fn unknown_hyperparameters_and_broken_flags_are_refused() {
        let adam = |name: &str, value| pb::Optimizer {
            name: "adam".into(),
            hyperparameters: [(name.to_owned(), value)].into(),
        };
        let unknown = what(Optimizer::try_from(adam("momentum", 0.9)));
        let names = "amsgrad, beta1, beta2, eps, lr, maximize, weight_decay";
        assert_eq!(unknown, format!("adam has no hyperparameter momentum; it has {names}"));
        assert_eq!(what(Optimizer::try_from(adam("amsgrad", 0.5))), "amsgrad of adam");
        assert_eq!(what(Optimizer::try_from(adam("lr", f64::NAN))), "lr of adam");
        assert!(Optimizer::try_from(adam("amsgrad", 1.0)).is_ok());
    }

    #[test]
    fn exceeding_a_limit_is_refused_and_the_error_states_the_limit() {
        let limit = |message: pb::JobSpec| match JobSpec::try_from(message) {
            Err(Error::Invalid { what, expected, .. }) => (what, expected),
            other => panic!("{other:?}"),
        };
        let message = || pb::JobSpec::from(&spec());
        let (what, expected) =
            limit(pb::JobSpec { meshes: vec![pb::Mesh::default(); 2000], ..message() });
        assert_eq!(
            (what.as_str(), expected),
            ("number of meshes", format!("at most {MAX_MESHES}"))
        );
        let groups = vec![pb::Optimizer::default(); 2000];
        let (what, expected) = limit(pb::JobSpec { groups, ..message() });
        assert_eq!(
            (what.as_str(), expected),
            ("number of parameter groups", format!("at most {MAX_GROUPS}"))
        );
        let (what, expected) = limit(pb::JobSpec { replicas: 65, ..message() });
        assert_eq!((what.as_str(), expected), ("replicas", format!("at most {MAX_REPLICAS}")));
        // The dimension names take 351 KiB.
        let dims = (0..40_000).map(|dim| pb::MeshDim { name: format!("dim {dim:04}"), size: 1 });
        let mesh = pb::Mesh { dims: dims.collect(), ranks: vec![0] };
        assert_eq!(
            limit(pb::JobSpec { meshes: vec![mesh], ..message() }).0,
            "number of dimensions of a mesh"
        );
    }

    #[test]
    fn a_refused_spec_creates_no_slices_and_no_list_of_contributions() {
        // A message of a few bytes describes four million slices, each with 65,536 contributions.
        let message = pb::JobSpec {
            tensors: vec![pb::Tensor {
                shape: vec![1 << 44],
                ..(&TensorSpec::new("w", [])).into()
            }],
            world: MAX_WORLD,
            ..pb::JobSpec::from(&spec())
        };
        assert_eq!(
            what(JobSpec::try_from(message)),
            "number of contributions (ranks times slices)"
        );
    }

    #[test]
    fn optimizers_without_codes_are_refused_with_8_bit_state() {
        let with = |name: &str, optimizer: &str| {
            let groups = vec![serde_json::from_str::<Optimizer>(optimizer).unwrap()];
            let spec = JobSpec { groups, state_dtype: StateDType::Int8, ..spec() };
            JobSpec::try_from(pb::JobSpec { name: name.to_owned(), ..pb::JobSpec::from(&spec) })
        };
        for optimizer in ["adam", "adamw", "lion", "sgd", "average"] {
            assert!(with("job", &format!(r#"{{"name":"{optimizer}"}}"#)).is_ok(), "{optimizer}");
        }
        for optimizer in [r#"{"name":"nadam"}"#, r#"{"name":"adamw","amsgrad":true}"#] {
            let refused = what(with("job", optimizer));
            assert!(refused.contains("cannot have state_dtype int8"), "{refused}");
        }
        let unknown = pb::JobSpec { state_dtype: 7, ..pb::JobSpec::from(&spec()) };
        assert_eq!(what(JobSpec::try_from(unknown)), "state_dtype");
    }

    #[test]
    fn layouts_survive_the_wire() {
        use DimPlacement::{Partial, Replicate, Shard};
        for placements in
            [[Partial(Reduction::Avg), Shard(1)], [Partial(Reduction::Sum), Replicate]]
        {
            let spec = sharded(&placements);
            assert_eq!(JobSpec::try_from(pb::JobSpec::from(&spec)), Ok(spec));
        }
    }
}
