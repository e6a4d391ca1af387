//! Requests that no ordinary client sends are converted or refused, and never cause a panic.
//!
//! promise: invalid-input

use std::collections::HashMap;

use proptest::prelude::*;
use zeroshard_model::{Error, JobSpec, Manifest, Optimizer, Placement, TensorSpec};
use zeroshard_proto::pb;

/// Generates names, many of which are meaningful.
fn name() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => prop::sample::select(vec!["a", "b", "w", "", "job", "adamw", "sgd", "lamb", "adamx", "\0"])
            .prop_map(str::to_owned),
        1 => any::<String>(),
    ]
}

fn number() -> impl Strategy<Value = f64> {
    prop_oneof![
        Just(0.0),
        Just(1.0),
        Just(0.9),
        Just(-1.0),
        Just(f64::NAN),
        Just(1e300),
        any::<f64>()
    ]
}

fn optimizer() -> impl Strategy<Value = pb::Optimizer> {
    let kinds: Vec<String> = Optimizer::NAMES.iter().map(ToString::to_string).collect();
    let fields = [
        "lr",
        "beta1",
        "eps",
        "weight_decay",
        "momentum",
        "nesterov",
        "amsgrad",
        "centered",
        "",
        "x",
    ];
    let hyperparameters =
        prop::collection::vec((prop::sample::select(fields.to_vec()), number()), 0..4);
    let kind = prop_oneof![8 => prop::sample::select(kinds), 1 => name()];
    (kind, hyperparameters).prop_map(|(name, hyperparameters)| pb::Optimizer {
        name,
        hyperparameters: hyperparameters
            .into_iter()
            .map(|(k, v)| (k.to_owned(), v))
            .collect::<HashMap<_, _>>(),
    })
}

fn layout() -> impl Strategy<Value = pb::Layout> {
    let placement = (-1i32..6, 0u32..4).prop_map(|(kind, dim)| pb::DimPlacement { kind, dim });
    let placements = prop::collection::vec(placement, 0..3);
    (0u32..3, placements).prop_map(|(mesh, placements)| pb::Layout { mesh, placements })
}

fn mesh() -> impl Strategy<Value = pb::Mesh> {
    let size = prop_oneof![0u32..4, any::<u32>()];
    let ranks =
        prop_oneof![Just(vec![0, 1]), Just(vec![0, 1, 2, 3]), prop::collection::vec(0u32..5, 0..5)];
    let dim = (name(), size).prop_map(|(name, size)| pb::MeshDim { name, size });
    (prop::collection::vec(dim, 0..3), ranks).prop_map(|(dims, ranks)| pb::Mesh { dims, ranks })
}

fn tensor() -> impl Strategy<Value = pb::Tensor> {
    let dimension = prop_oneof![0u64..100, Just(1 << 22), Just(1 << 40), any::<u64>()];
    let shape = prop::collection::vec(dimension, 0..4);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), -1i32..5, -1i32..5, 0u32..3);
    let alias = prop_oneof![3 => Just(None), 1 => name().prop_map(Some)];
    let placed = (prop::option::of(layout()), prop::option::of(0u32..5));
    (name(), shape, alias, flags, placed).prop_map(
        |(name, shape, alias_of, (frozen, buffer, no_clip, dtype, policy, group), placed)| {
            let (layout, replaced_by) = placed;
            pb::Tensor {
                name,
                shape,
                dtype,
                frozen,
                buffer,
                alias_of,
                group,
                policy,
                no_clip,
                layout,
                replaced_by,
            }
        },
    )
}

fn checkpoints() -> impl Strategy<Value = pb::CheckpointPolicy> {
    let url = prop_oneof![Just("file:///a".to_owned()), name()];
    let every = || prop::option::of(prop_oneof![0u64..4000, any::<u64>()]);
    (url, every(), every(), any::<u32>(), -1i32..4, -1i32..4).prop_map(
        |(url, every_steps, every_ms, keep, on_loss, on_memory_shortage)| pb::CheckpointPolicy {
            url,
            every_steps,
            every_ms,
            keep,
            on_loss,
            on_memory_shortage,
        },
    )
}

fn average() -> impl Strategy<Value = pb::RunningAverage> {
    let number = || prop_oneof![0.0..1.5, any::<f64>()];
    let steps = || prop_oneof![0u64..3, any::<u64>()];
    let decay = prop::option::of(number());
    (name(), decay, -1i32..5, (number(), number()), steps(), steps()).prop_map(
        |(name, decay, warmup, (inv_gamma, power), start, every)| pb::RunningAverage {
            name,
            decay,
            warmup,
            inv_gamma,
            power,
            start,
            every,
        },
    )
}

fn spikes() -> impl Strategy<Value = pb::SpikePolicy> {
    let factor = || prop::option::of(prop_oneof![0.5..20.0, any::<f64>()]);
    let count = || prop_oneof![0u32..200, any::<u32>()];
    let counts = (count(), count(), count(), prop_oneof![0u64..4, any::<u64>()], any::<u64>());
    (-1i32..5, factor(), factor(), counts).prop_map(|(action, norm_factor, loss_factor, counts)| {
        let (window, nonfinite_steps, limit, rewind_steps, limit_batches) = counts;
        pb::SpikePolicy {
            action,
            norm_factor,
            loss_factor,
            window,
            nonfinite_steps,
            rewind_steps,
            limit,
            limit_batches,
        }
    })
}

fn spec() -> impl Strategy<Value = pb::JobSpec> {
    let tensors = prop::collection::vec(tensor(), 0..4);
    let groups = prop::collection::vec(optimizer(), 0..3);
    let count = || prop_oneof![0u32..4, any::<u32>()];
    let meshes = prop::collection::vec(mesh(), 0..3);
    let timeout = prop::option::of(any::<u64>());
    let policy =
        (-1i32..4, timeout, prop::option::of(checkpoints()), any::<u64>(), any::<bool>(), -1i32..4);
    let counts = (count(), count(), count(), count(), any::<u64>());
    let spikes = prop_oneof![2 => Just(None), 1 => spikes().prop_map(Some)];
    let averages = (prop::collection::vec(average(), 0..3), any::<bool>(), spikes);
    (name(), tensors, groups, (counts, policy), meshes, averages).prop_map(
        |(name, tensors, groups, (counts, policy), meshes, averages)| pb::JobSpec {
            name,
            tensors,
            groups,
            world: counts.0,
            min_servers: counts.1,
            replicas: counts.2,
            group_size: counts.3,
            meshes,
            departure: policy.0,
            idle_timeout_ms: policy.1,
            checkpoints: policy.2,
            compare_every: policy.3,
            offload: policy.4,
            rounding_seed: counts.4,
            state_dtype: policy.5,
            averages: averages.0,
            averages_skip: averages.1,
            spikes: averages.2,
        },
    )
}

fn placement() -> impl Strategy<Value = pb::Placement> {
    let server = (0u64..4, name(), any::<u64>())
        .prop_map(|(id, address, incarnation)| pb::Server { id, address, incarnation });
    let owner = prop_oneof![9 => 0u32..4, 1 => any::<u32>()];
    let owners = prop::collection::vec(owner, 0..9);
    (prop::collection::vec(server, 0..4), prop_oneof![0u32..4, any::<u32>()], owners)
        .prop_map(|(servers, replicas, owners)| pb::Placement { servers, replicas, owners })
}

/// Returns whether the result is an error with a useful text.
fn refused<T: std::fmt::Debug>(result: &Result<T, Error>) -> bool {
    match result {
        Err(Error::Invalid { what, expected, .. }) => !what.is_empty() && !expected.is_empty(),
        Err(Error::Refused { sentence }) => !sentence.is_empty(),
        _ => false,
    }
}

proptest! {
    #[test]
    fn a_spec_is_refused_with_a_reason_or_survives_the_wire(message in spec()) {
        let converted = JobSpec::try_from(message);
        if let Ok(spec) = &converted {
            prop_assert_eq!(spec.validate(), Ok(()));
            for tensor in 0..spec.manifest.tensors().len() {
                let contributors = spec.contributions(tensor).contributors;
                let boxes: u64 = contributors.iter().map(|each| each.of.numel() as u64).sum();
                prop_assert!(boxes == spec.manifest.tensors()[tensor].numel());
            }
            prop_assert_eq!(&JobSpec::try_from(pb::JobSpec::from(spec)), &converted);
        } else {
            prop_assert!(refused(&converted), "{:?}", converted);
        }
    }

    #[test]
    fn tensors_are_refused_with_a_reason_or_have_slices_for_every_element(messages in prop::collection::vec(tensor(), 0..5)) {
        let tensors: Result<Vec<_>, _> = messages.into_iter().map(TensorSpec::try_from).collect();
        let manifest = tensors.and_then(Manifest::new);
        match &manifest {
            Ok(manifest) => for tensor in 0..manifest.tensors().len() {
                let slices = &manifest.slices()[manifest.slices_of(tensor)];
                let elements: usize = slices.iter().map(|slice| slice.numel).sum();
                prop_assert_eq!(elements as u64, manifest.tensors()[tensor].numel());
            },
            refusal => prop_assert!(refused(refusal), "{:?}", refusal),
        }
    }

    #[test]
    fn an_optimizer_is_refused_with_a_reason_or_survives_the_wire(message in optimizer()) {
        let converted = Optimizer::try_from(message);
        match &converted {
            Ok(optimizer) => prop_assert_eq!(&Optimizer::try_from(pb::Optimizer::from(optimizer)), &converted),
            refusal => prop_assert!(refused(refusal), "{:?}", refusal),
        }
    }

    #[test]
    fn a_placement_is_refused_with_a_reason_or_has_an_owner_for_every_slice(message in placement()) {
        let converted = Placement::try_from(message);
        match &converted {
            Ok(placement) => for slice in 0..placement.slices() {
                prop_assert!(placement.primary(slice) < placement.servers().len());
            },
            refusal => prop_assert!(refused(refusal), "{:?}", refusal),
        }
    }
}
