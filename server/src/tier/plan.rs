//! Which arrays of slices are in memory, and which on disk: a pure function.
//!
//! A step visits every slice, always in the same order. An array that was used least recently is
//! therefore the next one to be used, and a cache that keeps the most recent ones would always have
//! the wrong ones. So the same arrays stay in memory for the life of the job, as many as fit, and
//! the others are read and written in each step.

use zeroshard_checkpoint::direct::PAGE;
use zeroshard_proto::{DType, JobSpec};

/// An array of f32 that a slice has, by its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The master weights; for a slice that is not trained, its parameters.
    Master,
    /// The sum of the gradients.
    Sum,
    /// The state tensor at this position.
    State(usize),
}

/// The arrays of one slice that are on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct OnDisk(u32);

impl OnDisk {
    fn bit(array: Kind) -> u32 {
        1 << match array {
            Kind::Master => 0,
            Kind::Sum => 1,
            Kind::State(position) => 2 + position,
        }
    }

    pub(crate) fn has(self, array: Kind) -> bool {
        self.0 & Self::bit(array) != 0
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    fn add(&mut self, array: Kind) {
        self.0 |= Self::bit(array);
    }
}

#[cfg(test)]
impl FromIterator<Kind> for OnDisk {
    fn from_iter<T: IntoIterator<Item = Kind>>(kinds: T) -> Self {
        let mut on_disk = Self::default();
        kinds.into_iter().for_each(|kind| on_disk.add(kind));
        on_disk
    }
}

/// The sizes of the arrays of one slice, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Sizes {
    /// The bytes that are always in memory: arrays whose dtype is not f32, and all arrays of
    /// optimizers whose steps need whole tensors.
    pub(crate) fixed: u64,
    /// The arrays of f32.
    pub(crate) arrays: Vec<(Kind, u64)>,
}

impl Sizes {
    /// The sizes of slice number `index` of a job.
    pub(crate) fn of(job: &JobSpec, index: usize) -> Self {
        let (slice, tensor) = (job.manifest.slices()[index], job.manifest.tensor_of(index));
        let bytes = |dtype: DType| (slice.numel * dtype.size()) as u64;
        if !tensor.trains() {
            return match tensor.dtype {
                DType::F32 => Self { fixed: 0, arrays: vec![(Kind::Master, bytes(DType::F32))] },
                dtype => Self { fixed: bytes(dtype), arrays: Vec::new() },
            };
        }
        let optimizer = &job.groups[tensor.group as usize];
        let state = optimizer.state_shapes(&tensor.shape).into_iter().enumerate();
        let state = state.map(|(position, shape)| {
            (Kind::State(position), (shape.numel(slice.numel) * DType::F32.size()) as u64)
        });
        let both = [(Kind::Master, bytes(DType::F32)), (Kind::Sum, bytes(DType::F32))];
        let arrays: Vec<_> = both.into_iter().chain(state).collect();
        let published = if tensor.dtype == DType::F32 { 0 } else { bytes(tensor.dtype) };
        match optimizer.needs_whole_tensors() {
            true => Self {
                fixed: published + arrays.iter().map(|(_, bytes)| bytes).sum::<u64>(),
                arrays: Vec::new(),
            },
            false => Self { fixed: published, arrays },
        }
    }
}

/// Where the arrays of slices are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    /// The arrays on disk, of each slice in the order of the sizes.
    pub(crate) on_disk: Vec<OnDisk>,
    /// The bytes in memory.
    pub(crate) memory: u64,
    /// The bytes on disk, where each array begins with a page.
    pub(crate) disk: u64,
}

/// The arrays do not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shortage {
    /// The bytes of all arrays.
    pub(crate) required: u64,
    /// The bytes of arrays that must be in memory.
    pub(crate) fixed: u64,
}

/// Keeps as many arrays as fit in `memory` bytes, in the order of the traffic that each byte of
/// memory saves: master weights, which are also sent to every rank, then sums, which further ranks
/// read and write again, then the optimizer state. Within a kind, the first slices are kept. The
/// other arrays are put on disk, which has room for `disk` bytes.
///
/// # Errors
/// [`Shortage`] if not everything fits.
pub(crate) fn plan(slices: &[Sizes], memory: u64, disk: u64) -> Result<Plan, Shortage> {
    let fixed = slices.iter().map(|slice| slice.fixed).sum();
    let arrays = || slices.iter().flat_map(|slice| &slice.arrays);
    let required = fixed + arrays().map(|(_, bytes)| bytes).sum::<u64>();
    let shortage = Shortage { required, fixed };
    let mut plan = Plan { on_disk: vec![OnDisk::default(); slices.len()], memory: fixed, disk: 0 };
    let positions = arrays().filter_map(|(array, _)| match array {
        Kind::State(position) => Some(position + 1),
        Kind::Master | Kind::Sum => None,
    });
    let state = (0..positions.max().unwrap_or(0)).map(Kind::State);
    let mut is_full = false;
    for kind in [Kind::Master, Kind::Sum].into_iter().chain(state) {
        for (slice, on_disk) in slices.iter().zip(&mut plan.on_disk) {
            for &(array, bytes) in slice.arrays.iter().filter(|(array, _)| *array == kind) {
                // After the first array that does not fit, smaller ones are not kept either: more
                // memory then never means that an array moves to the disk.
                is_full |= plan.memory.saturating_add(bytes) > memory;
                match is_full {
                    false => plan.memory += bytes,
                    true => {
                        on_disk.add(array);
                        plan.disk += bytes.next_multiple_of(PAGE as u64);
                    }
                }
            }
        }
    }
    match plan.memory <= memory && plan.disk <= disk {
        true => Ok(plan),
        false => Err(shortage),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use zeroshard_proto::{Manifest, TensorSpec};

    use super::*;

    fn any_slices() -> impl Strategy<Value = Vec<Sizes>> {
        let array = |array| (Just(array), 0u64..100);
        let state = prop::collection::vec(0u64..100, 0..4);
        let slice = (0u64..20, array(Kind::Master), array(Kind::Sum), state);
        let slice = slice.prop_map(|(fixed, master, sum, state)| {
            let state = state.into_iter().enumerate().map(|(i, bytes)| (Kind::State(i), bytes));
            Sizes { fixed, arrays: [master, sum].into_iter().chain(state).collect() }
        });
        prop::collection::vec(slice, 0..12)
    }

    proptest! {
        #[test]
        fn every_array_is_in_one_tier_and_no_budget_is_exceeded(
            slices in any_slices(), memory in 0u64..2_000, disk in 0u64..200_000,
        ) {
            match plan(&slices, memory, disk) {
                Ok(plan) => {
                    prop_assert!(plan.memory <= memory && plan.disk <= disk);
                    let fixed: u64 = slices.iter().map(|slice| slice.fixed).sum();
                    let on = |disk: bool| -> u64 {
                        let each = slices.iter().zip(&plan.on_disk).flat_map(|(slice, on)| {
                            slice.arrays.iter().filter(move |(array, _)| on.has(*array) == disk)
                        });
                        let page = if disk { PAGE as u64 } else { 1 };
                        each.map(|(_, bytes)| bytes.next_multiple_of(page)).sum()
                    };
                    prop_assert_eq!((fixed + on(false), on(true)), (plan.memory, plan.disk));
                }
                Err(Shortage { required, fixed }) => {
                    // A whole array is in one tier, and begins with a page there.
                    let arrays: usize = slices.iter().map(|slice| slice.arrays.len()).sum();
                    let lost = ((1 + arrays) * PAGE) as u64;
                    prop_assert!(fixed > memory || required + lost > memory + disk);
                }
            }
        }

        #[test]
        fn more_memory_moves_no_array_to_the_disk(
            slices in any_slices(), memory in 0u64..2_000, more in 0u64..500,
        ) {
            let plans = [memory, memory + more].map(|memory| plan(&slices, memory, u64::MAX));
            if let [Ok(little), Ok(much)] = plans {
                for (little, much) in little.on_disk.iter().zip(&much.on_disk) {
                    prop_assert_eq!(little.0 & much.0, much.0);
                }
            }
        }

        #[test]
        fn what_fits_is_in_memory(slices in any_slices()) {
            let needed = plan(&slices, u64::MAX, 0).unwrap().memory;
            let plan = plan(&slices, needed, 0).unwrap();
            prop_assert!(plan.on_disk.iter().all(|on| on.is_empty()) && plan.disk == 0);
        }

        #[test]
        fn state_leaves_the_memory_before_sums_and_sums_before_master_weights(
            slices in any_slices(), memory in 0u64..2_000,
        ) {
            let Ok(plan) = plan(&slices, memory, u64::MAX) else { return Ok(()) };
            let any = |wanted: Kind, disk: bool| {
                slices.iter().zip(&plan.on_disk).any(|(slice, on)| {
                    let arrays = slice.arrays.iter().map(|(array, _)| *array);
                    arrays.into_iter().any(|array| array == wanted && on.has(array) == disk)
                })
            };
            for (first, later) in [(Kind::Master, Kind::Sum), (Kind::Sum, Kind::State(0))] {
                prop_assert!(!(any(first, true) && any(later, false)));
            }
        }
    }

    #[test]
    fn half_of_adamw_is_master_weights_and_sums() {
        let manifest = Manifest::new(vec![TensorSpec::new("w", [100]), TensorSpec::new("v", [50])]);
        let job = JobSpec::new("job", manifest.unwrap(), vec!["adamw".parse().unwrap()]);
        let sizes: Vec<Sizes> = (0..2).map(|index| Sizes::of(&job, index)).collect();
        let plan = plan(&sizes, 8 * 150, 1 << 20).unwrap();
        for on in plan.on_disk {
            let arrays = [Kind::Master, Kind::Sum, Kind::State(0), Kind::State(1)];
            assert_eq!(arrays.map(|array| on.has(array)), [false, false, true, true]);
        }
    }

    #[test]
    fn what_a_step_cannot_stream_is_always_in_memory() {
        let half = TensorSpec { dtype: DType::Bf16, ..TensorSpec::new("w", [100]) };
        let frozen = TensorSpec { frozen: true, ..TensorSpec::new("v", [100]) };
        let manifest = Manifest::new(vec![half, frozen]).unwrap();
        let sizes = |optimizer: &str| {
            let groups = vec![optimizer.parse().unwrap()];
            let job = JobSpec::new("job", manifest.clone(), groups);
            [0, 1].map(|index| Sizes::of(&job, index))
        };
        let fixed = |optimizer| sizes(optimizer).map(|sizes| sizes.fixed);
        assert_eq!(fixed("adamw"), [200, 0]);
        assert_eq!(fixed("lamb"), [200 + 1_600, 0]);
        assert_eq!(
            plan(&sizes("lamb"), 1_799, 9_999),
            Err(Shortage { required: 2_200, fixed: 1_800 })
        );
    }
}
